"""A running dsched: builds every part from the configuration, starts them in order, stops them.

Start: journal and agent socket, engines and drivers, controller, front door, admin API, registry.
Stop: the other way round; open streams get `front_door.stop_grace_s` to end. Engines that dsched
did not start live on.
"""

import asyncio
import secrets
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import structlog

from dsched import __version__
from dsched.cli.engine_admin import EngineAdmin
from dsched.cli.engines import Fleet, FleetBuilder, sim_cost
from dsched.cli.live_process import LiveProcess, Observers
from dsched.cli.metric_sources import (
    FaultStats,
    controller_samples,
    fault_samples,
    front_door_samples,
    journal_samples,
    kv_event_samples,
    live_samples,
    local_engine_samples,
    peer_samples,
    placement_samples,
    reader_samples,
    registry_samples,
    reload_samples,
    token_cache_samples,
)
from dsched.cli.otel_setup import make_tracer
from dsched.cli.policy_setup import PolicyReloader, make_policies
from dsched.cli.rank_watches import RankWatches
from dsched.cli.rebalancing import Rebalancing, on_daemon_thread
from dsched.cli.stopping import PART_LIMIT_S, StopStack
from dsched.cli.trace_service import TraceService
from dsched.clock import SystemClock, wall_time_s
from dsched.config import Config
from dsched.config_load import LoadedConfig
from dsched.controller import (
    Controller,
    ControllerSettings,
    EngineStatus,
    LoopTickHost,
    PoolSpec,
    RankStatus,
)
from dsched.controller.settings import MigrationSettings
from dsched.costs.prefill import PrefillCostModel
from dsched.costs.presets import load_cost_models
from dsched.drivers.base import Driver
from dsched.drivers.http_driver import HttpDriver
from dsched.drivers.kv_follower import KvEventSource, KvFollower
from dsched.drivers.local import STOP_GRACE_S
from dsched.drivers.reports import ReportReader
from dsched.errors import ConfigError
from dsched.faults import MemoryJournal, SqliteJournal, TokenJournal
from dsched.faults.progress import ProgressLimits
from dsched.frontdoor.door import FrontDoor
from dsched.frontdoor.live_sampler import LiveSampler
from dsched.frontdoor.spans import RequestSpans
from dsched.ids import AttemptIds, DpRank, EngineId, RankId
from dsched.metrics import MetricsExporter, Sample
from dsched.plugins import RebalanceView
from dsched.registry.cluster import ClusterView
from dsched.registry.member import RegistryMember
from dsched.registry.peer_channel import DEFAULT_ENDPOINT, PeerChannel
from dsched.registry.records import EngineRow, InstanceRow, RankRow, WorkersView
from dsched.routing import (
    DecodeRouter,
    MigrationView,
    PrefillRouter,
    RoutingRequest,
    plan_migrations,
)
from dsched.routing.snapshot import ViewWatch
from dsched.sim.loop import AsyncioTimers
from dsched.trace import Recorder

log = structlog.get_logger(__name__)

S = 1_000_000_000
FLEET_LIMIT_S = STOP_GRACE_S + PART_LIMIT_S
"""For local engines: their own time to end, then that of the kernel to end them."""
REGISTRATION_WAIT_S = 3.0
"""For the first entries in the registry, before the URL is printed. Lower: a busy machine prints it
before `dsched workers` finds us. Higher: a registry that is away delays the start."""


class Service:
    """One dsched process on the running event loop."""

    def __init__(self, loaded: LoadedConfig) -> None:
        self.config: Config = loaded.config
        self._loaded = loaded
        self._clock = SystemClock()
        self._process_tag = secrets.randbits(64)
        self.instance_id = f"{self._process_tag:016x}"
        self._settings = controller_settings(self.config, process_tag=self._process_tag)
        self._policies = make_policies(loaded)
        self._reloader = PolicyReloader(loaded)
        self._tasks: list[asyncio.Task[None]] = []
        self._stops = StopStack()
        self._spans: RequestSpans | None = None
        self.peers: PeerChannel | None = None

    async def start(self) -> None:
        """Start everything.

        Raises:
            ConfigError: something in the configuration cannot be used; what was started is stopped.
        """
        try:
            await self._start()
        except BaseException:
            await self._stops.stop()
            raise

    async def stop(self) -> None:
        """Let streams end, then release everything."""
        log.info("service.stopping", num_open_requests=self.controller.num_open_requests)
        await self._stops.stop()
        log.info("service.stopped")

    async def reload_policies(self) -> bool:
        """Read the configuration again and ask its policies from the next tick on.

        `False` when they cannot be used; the old ones go on then. No request is touched.
        """
        policies = await self._reloader.reload()
        if policies is None:
            return False
        self.controller.use_policies(policies).close()
        return True

    @property
    def is_simulated(self) -> bool:
        """Every engine is simulated inside this process."""
        return not _needs_agents(self.config)

    @property
    def model_names(self) -> list[str]:
        return sorted(self.fleet.models)

    async def _start(self) -> None:
        config = self.config
        Path(config.state_dir).mkdir(parents=True, exist_ok=True)
        self._started_s = wall_time_s()
        self.member = RegistryMember(config, clock=self._clock, instance_id=self.instance_id)
        self._stops.add("registry client", self.member.close)
        await self.member.check()
        self.journal = open_journal(config, owner=self.instance_id)
        self._stops.add("journal", self.journal.close)
        self.reports = ReportReader(
            endpoint=config.agent.endpoint,
            max_pending_messages=config.agent.max_pending_messages,
        )
        if _needs_agents(config):
            self.reports.start()
            self._stops.add("agent socket", self.reports.close)
        self.trace = TraceService(config, clock=self._clock)
        await self.trace.start()
        self._stops.add("trace", self.trace.stop)
        loop = asyncio.get_running_loop()
        builder = FleetBuilder(
            config,
            timers=AsyncioTimers(self._clock, loop),
            reports=self.reports,
        )
        self._stops.add("local engines", builder.fleet.stop, limit_s=FLEET_LIMIT_S)
        self.fleet: Fleet = await builder.build()
        # A minute where nothing is compiled yet: no thread that a stop would have to wait for.
        await on_daemon_thread(warm_router)
        if config.routing.migration != "off":
            await on_daemon_thread(warm_migrations)
        self.rebalancing = Rebalancing(
            config.placement,
            self.fleet.drivers,
            leader_epoch=self.member.election.epoch_now,
            is_due=self._is_rebalance_due,
        )
        await self.rebalancing.warm()
        self._start_controller(loop)
        await self._start_front_door()
        self._start_rank_watches()
        self.rebalancing.start()
        self._stops.add("placement", self.rebalancing.stop)
        self.member.start(instance=self._instance_row(), engines=self._registered_rows)
        self._stops.add("registry member", self.member.stop)
        # Whoever reads that we started should find us. A registry that is away changes nothing.
        await self.member.registration.wait(REGISTRATION_WAIT_S)
        log.info(
            "service.started",
            version=__version__,
            instance_id=self.instance_id,
            seed=config.seed,
            front_door=self.front_door_url,
            admin=self.admin_url,
            num_engines=len(self.fleet.drivers),
        )

    def _start_controller(self, loop: asyncio.AbstractEventLoop) -> None:
        host = LoopTickHost(loop=loop, clock=self._clock)
        self.faults = FaultStats()
        self.kv_follower = KvFollower(kv_event_sources(self.config))
        self._stops.add("kv follower", self.kv_follower.close)
        self.live = LiveSampler(clock=self._clock, environment=LiveProcess(self))
        try:
            self.controller = Controller(
                pools=self.fleet.pools,
                drivers=self.fleet.drivers,
                journal=self.journal,
                clock=self._clock,
                host=host,
                attempt_ids=AttemptIds(process_tag=self._process_tag),
                settings=self._settings,
                observer=Observers(
                    self.faults, self.live, self.kv_follower, *self.rebalancing.observers
                ),
                policies=self._policies,
                recorder=self._make_recorder(),
                prefixes=self.kv_follower if self.kv_follower.has_sources else None,
            )
        except ValueError as error:  # engines or EP groups that do not go together
            raise ConfigError(f"$.pools: {error}") from error
        host.attach(self._tick)
        self._start_peers()
        self.controller.start()
        self._stops.add("policies", self._close_policies)
        self._stops.add("tick host", host.close)
        self._stops.add("controller", self.controller.close)

    def _start_peers(self) -> None:
        """Talk with other dsched processes; those of simulated engines share none."""
        routing = self.config.routing
        if not routing.talks_to_peers or self.is_simulated:
            return
        self.peers = PeerChannel(
            endpoint=routing.peer_endpoint or DEFAULT_ENDPOINT,
            instance_id=self.instance_id,
            peering=self.controller.peering,
            clock=self._clock,
        )
        self.peers.start()
        self._stops.add("peer channel", self.peers.close)

    def _tick(self) -> None:
        self.controller.tick()
        if self.peers is not None:
            self.peers.publish()

    def _make_recorder(self) -> Recorder:
        """What hears the controller: the decision trace, and before it spans if they are wanted."""
        made = make_tracer(self.config.otel, instance_id=self.instance_id)
        if made is None:
            return self.trace.recorder
        tracer, stop = made
        self._stops.add("spans", lambda: asyncio.to_thread(stop))
        self._spans = RequestSpans(tracer, clock=self._clock, recorder=self.trace.recorder)
        return self._spans.as_recorder()

    def _start_rank_watches(self) -> None:
        mode = self.config.faults.engine_recovery
        if mode == "off":
            return
        self.rank_watches = RankWatches(
            self.fleet,
            self.controller,
            can_repair=lambda: mode == "repair" and self.member.election.epoch_now() is not None,
        )
        self.rank_watches.start()
        self._stops.add("rank watches", self.rank_watches.stop)

    def _is_rebalance_due(self, view: RebalanceView) -> bool:
        return self.controller.policies.should_rebalance(view)

    def _close_policies(self) -> None:
        self.controller.policies.close()

    async def _start_front_door(self) -> None:
        exporter = MetricsExporter(show_process=self.config.metrics.process)
        self.front_door = FrontDoor(
            control=self.controller,
            models=self.fleet.models,
            settings=self.config.front_door,
            admin=self.config.admin,
            metrics_text=exporter.render,
            workers=lambda: msgspec.to_builtins(self.workers()),
            config=lambda: msgspec.to_builtins(self.config),
            engines=EngineAdmin(self.controller),
            trace=self.trace,
            live=self.live,
            metrics=self._spans,
            tracer=self._spans,
            clock=self._clock,
            process_tag=self._process_tag & 0xFFFF_FFFF,
        )
        await self.front_door.start()
        self._stops.add(
            "front door",
            self.front_door.stop,
            limit_s=self.config.front_door.stop_grace_s + PART_LIMIT_S,
        )
        self.live.start(self.controller)
        self._stops.add("live view", self.live.close)
        self.front_door_url = f"http://{self.config.front_door.host}:{self.front_door.bound_port}"
        self.admin_url = f"http://{self.config.admin.host}:{self.front_door.bound_admin_port}"
        exporter.add_source(lambda: front_door_samples(self.front_door.stats))
        exporter.add_source(lambda: token_cache_samples(self.fleet.models))
        exporter.add_source(lambda: controller_samples(self.controller))
        exporter.add_source(lambda: local_engine_samples(self.fleet.keepers))
        exporter.add_source(lambda: kv_event_samples(self.kv_follower))
        exporter.add_source(lambda: fault_samples(self.controller, self.faults))
        exporter.add_source(lambda: placement_samples(self.rebalancing.rebalancer.num_placements))
        exporter.add_source(lambda: reload_samples(self._reloader.num_reloads))
        exporter.add_source(lambda: journal_samples(self.journal.status()))
        exporter.add_source(lambda: reader_samples(self.reports))
        exporter.add_source(lambda: live_samples(self.live))
        exporter.add_source(self._registry_samples)
        exporter.add_source(lambda: peer_samples(self.peers) if self.peers is not None else ())

    def _registry_samples(self) -> Iterable[Sample]:
        return registry_samples(self.member, now_ns=self._clock.now_ns())

    # ---- registry and admin views

    def workers(self) -> WorkersView:
        """What `dsched workers` and the admin API show: this process, and others as last heard."""
        own = WorkersView(instances=(self._instance_row(),), engines=self._engine_rows())
        return self.member.workers(own)

    def _instance_row(self) -> InstanceRow:
        return InstanceRow(
            instance_id=self.instance_id,
            version=__version__,
            front_door_url=self.front_door_url,
            admin_url=self.admin_url,
            started_s=self._started_s,
            peer_endpoint=self.peers.endpoint if self.peers is not None else None,
        )

    def _registered_rows(self) -> tuple[EngineRow, ...]:
        """What the registry is told, once a second; and what it says of the pools' other users."""
        if not self.is_simulated:  # simulated engines are each process's own
            heard = self.peers.peers if self.peers is not None else ()
            for pool, index, count, hears_all in find_peers(
                self.fleet.pools, self.member.cluster, own_id=self.instance_id, heard=heard
            ):
                self.controller.set_peers(
                    pool, router_index=index, num_routers=count, hears_peers=hears_all
                )
        if self.peers is not None:
            self.peers.follow(peer_addresses(self.fleet.pools, self.member.cluster))
        return self._engine_rows()

    def _engine_rows(self) -> tuple[EngineRow, ...]:
        return tuple(
            _engine_row(
                status,
                url=self.fleet.urls.get(status.engine_id),
                driver=self.fleet.drivers.get(status.engine_id),
            )
            for status in self.controller.engine_statuses()
        )


def find_peers(
    pools: Iterable[PoolSpec], cluster: ClusterView, *, own_id: str, heard: Collection[str] = ()
) -> Iterator[tuple[str, int, int, bool]]:
    """(pool, number of this process, how many there are, whether all others are `heard`) among the
    dsched processes over a pool."""
    for pool in pools:
        if not pool.engines:
            continue
        instance_ids = sorted({own_id, *_processes_over(pool, cluster)})
        others = [each for each in instance_ids if each != own_id]
        hears_all = bool(others) and all(each in heard for each in others)
        yield pool.name, instance_ids.index(own_id), len(instance_ids), hears_all


def peer_addresses(pools: Iterable[PoolSpec], cluster: ClusterView) -> dict[str, str]:
    """Where the dsched processes over any of these pools tell what they booked, by instance id."""
    over_pools = {each for pool in pools for each in _processes_over(pool, cluster)}
    endpoints = cluster.peer_endpoints()
    return {each: endpoints[each] for each in sorted(over_pools) if each in endpoints}


def _processes_over(pool: PoolSpec, cluster: ClusterView) -> Collection[str]:
    """Instance ids of the dsched processes that have registered a pool's first engine."""
    first = min((engine.engine_id for engine in pool.engines), default=None)
    return () if first is None else cluster.drivers_of(first)


def warm_router() -> None:
    """Load the compiled kernels (or compile them, once a machine) before the first request."""
    router = DecodeRouter()
    rank_id = RankId(EngineId("warm"), DpRank(0))
    router.add_rank(rank_id, kv_capacity_tokens=10, max_running_requests=1)
    for prompt_tokens in (5, 20):
        router.pick(RoutingRequest(num_prompt_tokens=prompt_tokens, excluded_ranks=(7,)), 0)
    router.hold(RoutingRequest(num_prompt_tokens=5), "held", 0)
    router.next_held(0)
    ViewWatch(router).snapshot()
    prefill = PrefillRouter(load_cost_models(None)[0])
    prefill.add_worker(rank_id)
    prefill.pick(num_prompt_tokens=5, now_ns=0)


def warm_migrations() -> None:
    """The same for the kernel that plans moves."""
    one = np.ones(2, np.int64)
    view = MigrationView(
        sequence_rank=np.zeros(2, np.int64),
        sequence_kv_tokens=100 * one,
        is_movable=np.ones(2, np.bool_),
        num_running=np.array([2, 0]),
        num_kv_tokens=np.array([200, 0]),
        prices=np.ones((3, 2)),
        room_tokens=1_000 * one,
        link_tokens=np.full((2, 2), 1_000),
    )
    plan_migrations(view)


def open_journal(config: Config, *, owner: str) -> TokenJournal:
    """Open the journal that the configuration names."""
    journal = config.journal
    if journal.kind == "memory":
        return MemoryJournal(max_retained_requests=journal.max_retained_requests)
    return SqliteJournal(
        config.journal_path(),
        owner=owner,
        flush_interval_s=journal.flush_interval_ms / 1e3,
        max_batch_requests=journal.max_batch_requests,
        max_pending_requests=journal.max_pending_requests,
        max_retained_requests=journal.max_retained_requests,
        retention_s=journal.retention_s,
        sync_full=journal.sync_full,
    )


def controller_settings(config: Config, *, process_tag: int) -> ControllerSettings:
    """Translate the configuration into nanoseconds and prices."""
    routing = config.routing
    request_ns, kv_token_ns = routing.request_cost_us * 1e3, routing.kv_token_cost_ns
    if routing.policy == "least_requests":
        request_ns, kv_token_ns = 1.0, 0.0
    elif routing.policy == "least_kv":
        request_ns, kv_token_ns = 0.0, 1.0
    index = routing.router_index
    return ControllerSettings(
        max_attempts=routing.max_attempts,
        max_held_requests=routing.max_queued_requests,
        max_hold_ns=int(routing.max_hold_s * S),
        queue_timeout_ns=int(routing.queue_timeout_s * S),
        request_cost_ns=request_ns,
        kv_token_cost_ns=kv_token_ns,
        router_index=process_tag % 1_024 if index is None else index,
        handoff_deadline_ns=int(config.faults.handoff_deadline_s * S),
        reprefill_tokens_per_rank=config.faults.reprefill_tokens_per_rank or None,
        spare=config.faults.spare,
        prefill_costs=_prefill_costs(config),
        max_local_prefill_tokens=routing.max_local_prefill_tokens,
        migration=MigrationSettings(
            mode=routing.migration,
            interval_ns=int(routing.migration_interval_s * S),
            max_moves=routing.max_migrations,
        ),
        max_transfer_age_ns=int(routing.max_transfer_age_s * S),
        progress=ProgressLimits(
            decode_timeout_ns=int(config.faults.decode_timeout_s * S),
            prefill_timeout_ns=int(config.faults.prefill_timeout_s * S),
            prefill_token_ns=int(config.faults.prefill_token_cost_us * 1e3),
            prefill_factor=config.faults.prefill_factor,
            stream_timeout_ns=int(config.faults.stream_timeout_s * S),
        ),
        is_validating=config.debug.validate,
    )


def kv_event_sources(config: Config) -> dict[EngineId, KvEventSource]:
    """The engines that publish what they have cached."""
    return {
        EngineId(config.engine_id(name, index)): KvEventSource(
            endpoint=engine.kv_events, replay_endpoint=engine.kv_events_replay
        )
        for name, pool in sorted(config.pools.items())
        for index, engine in enumerate(pool.engines)
        if engine.kv_events is not None
    }


def _prefill_costs(config: Config) -> PrefillCostModel | None:
    """What prompts cost on prefill pools: as configured, or as the simulated engines work.

    Raises:
        ConfigError: the file or preset cannot be used.
    """
    named = config.routing.prefill_costs
    if named is None and not _needs_agents(config):
        return PrefillCostModel.from_affine(sim_cost(config.sim))
    try:
        return load_cost_models(named)[0]
    except ConfigError as error:
        raise ConfigError(f"$.routing.prefill_costs: {error}") from error


def _needs_agents(config: Config) -> bool:
    if config.pools:
        return any(e.kind != "sim" for pool in config.pools.values() for e in pool.engines)
    return config.launch.engine != "sim"


def _engine_row(status: EngineStatus, *, url: str | None, driver: Driver | None) -> EngineRow:
    state = status.state.name.lower()
    server = driver if isinstance(driver, HttpDriver) else None
    return EngineRow(
        engine_id=status.engine_id,
        pool=status.pool,
        kind=status.kind,
        model=status.model,
        state=state,  # type: ignore[arg-type]  # RankState's names are the registry's
        url=url,
        reason=status.reason or None,
        version=None if server is None else server.engine_version,
        missing=() if server is None else server.lost_features,
        ranks=tuple(_rank_row(rank, state=rank.state.name.lower()) for rank in status.ranks),
    )


def _rank_row(rank: RankStatus, *, state: str) -> RankRow:
    return RankRow(
        dp_rank=rank.dp_rank,
        state=state,  # type: ignore[arg-type]
        num_running=rank.num_running,
        num_waiting=rank.num_waiting,
        num_kv_tokens=rank.num_kv_tokens,
        kv_capacity_tokens=rank.kv_capacity_tokens,
        step_ns=rank.step_ns,
        report_age_ns=rank.report_age_ns,
    )
