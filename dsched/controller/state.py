"""What the parts of one controller share: the cluster, the open requests, and how to reach both.

Each part (`engines`, `withdrawal`, `lifecycle`, `dispatch`) changes its own piece of it by the
pieces' methods; none of them knows the controller.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from dsched.clock import Clock
from dsched.controller.events import Event
from dsched.controller.host import TickHost
from dsched.controller.observer import ControllerObserver
from dsched.controller.pools import PrefixSource, make_pool
from dsched.controller.runs import RunTable
from dsched.controller.settings import ControllerSettings
from dsched.costs.prefill import PrefillCostModel
from dsched.costs.presets import load_cost_models
from dsched.drivers.base import Driver
from dsched.drivers.wire import RankReport
from dsched.faults import Membership, PoolSpec, RecoveryMethod, TokenJournal
from dsched.faults.progress import ProgressWatch
from dsched.ids import AttemptId, AttemptIds, EngineId, RankId
from dsched.plugins import PolicySet
from dsched.routing import DecodeRouter
from dsched.states import PoolRole, RankState
from dsched.trace import Recorder


class Outcome(StrEnum):
    """How requests ended; label of a metric."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True)
class Counters:
    """Counted since the start."""

    dispatched: dict[RankId, int] = field(default_factory=dict)
    requests: dict[tuple[str, Outcome], int] = field(default_factory=dict)
    recoveries: dict[RecoveryMethod, int] = field(default_factory=dict)
    handoffs: dict[tuple[str, str], int] = field(default_factory=dict)
    """By method and by what made it necessary; labels of a metric."""
    prefills: dict[str, int] = field(default_factory=dict)
    """Prompts of separate pools by what became of them; label of a metric."""
    unknown_reports: int = 0

    def add_dispatch(self, rank_id: RankId) -> None:
        self.dispatched[rank_id] = self.dispatched.get(rank_id, 0) + 1

    def add_prefill(self, outcome: str) -> None:
        self.prefills[outcome] = self.prefills.get(outcome, 0) + 1

    def add_request(self, model: str, outcome: Outcome) -> None:
        key = (model, outcome)
        self.requests[key] = self.requests.get(key, 0) + 1

    def add_handoff(self, method: str, cause: str) -> None:
        key = (method, cause)
        self.handoffs[key] = self.handoffs.get(key, 0) + 1


class ControllerState:
    """One controller's knowledge. One thread owns it."""

    def __init__(
        self,
        *,
        pools: Iterable[PoolSpec],
        drivers: Mapping[EngineId, Driver],
        journal: TokenJournal,
        clock: Clock,
        host: TickHost,
        attempt_ids: AttemptIds,
        settings: ControllerSettings,
        observer: ControllerObserver,
        recorder: Recorder,
        policies: PolicySet,
        prefixes: PrefixSource | None,
    ) -> None:
        """Start with every engine down.

        Raises:
            ValueError: pools or engines that do not go together, or not every engine has a driver.
        """
        self.settings = settings
        self.clock = clock
        self.host = host
        self.journal = journal
        self.attempt_ids = attempt_ids
        self.observer = observer
        self.policies = policies
        """Replaced as a whole, between two ticks."""
        self.recorder = recorder
        self.membership = Membership(pools)
        self.drivers = dict(drivers)
        missing = sorted(set(self.membership.engines) ^ set(self.drivers))
        if missing:
            raise ValueError(f"engines and drivers do not match: {', '.join(missing)}")
        self.pools = {
            name: make_pool(self.membership.pools[name], settings, recorder, prefixes)
            for name in sorted(self.membership.pools)
        }
        """By name, in order of names."""
        for name, pool in self.pools.items():
            recorder.watch(name, pool.router)
        self.pool_of_model = {
            pool.model: name
            for name, pool in self.membership.pools.items()
            if pool.role is not PoolRole.PREFILL
        }
        """Where requests go; a decode pool has a prefill pool behind it."""
        self.prefill_pools = {
            name: self.pools[prefill]
            for name in self.pools
            if (prefill := self.membership.prefill_pool_of(name)) is not None
        }
        """By the name of the decode pool that they work for."""
        self._can_prefill: tuple[int, dict[str, bool]] = (0, {})
        """Of each decode pool, as of an epoch."""
        self.runs = RunTable()
        self.watch = make_watch(settings)
        self.router_of_attempt: dict[AttemptId, DecodeRouter] = {}
        """Attempts that an engine may still hold something for."""
        self.last_reports: dict[RankId, RankReport] = {}
        self.counts = Counters()
        self.events: list[Event] = []
        """Facts that wait for the next tick."""
        self.is_closed = False
        self.tells_peers = False
        """Other dsched processes hear what begins and ends here, at the end of a tick."""

    def push(self, event: Event) -> None:
        """Let a fact wait for the next tick, soon."""
        self.events.append(event)
        self.host.request_tick()

    def can_serve(self, pool: str) -> bool:
        """Whether a request of the pool may find a rank now, and a prefill worker if it must."""
        if not self._has_usable(pool):
            return False
        prefill = self.prefill_pools.get(pool)
        return prefill is None or self.can_prefill(pool) or self._has_usable(prefill.name)

    def _has_usable(self, pool: str) -> bool:
        return any(
            record.state in (RankState.UP, RankState.SUSPECT)
            for record in self.membership.engines.values()
            if record.pool == pool
        )

    def prefill_costs(self) -> PrefillCostModel:
        """What prompts cost, as configured or as a preset says."""
        return self.settings.prefill_costs or load_cost_models(None)[0]

    def can_prefill(self, pool: str) -> bool:
        """Whether every engine of the pool computes prompts by itself."""
        epoch, known = self._can_prefill
        if epoch != self.membership.epoch:
            known = {
                name: self.membership.capabilities(name).can_prefill for name in self.prefill_pools
            }
            self._can_prefill = (self.membership.epoch, known)
        return known.get(pool, True)

    def num_ranks_up(self, pool: str) -> int:
        members = self.membership.up_engines(pool)
        return sum(
            member.rank_state(rank_id.dp_rank) is RankState.UP
            for member in members
            for rank_id in member.rank_ids()
        )

    def sync_group(self, engine_id: EngineId) -> None:
        """Give every rank of an EP group its state: the group is the failure domain."""
        for member in self.membership.group_of(engine_id):
            pool = self.pools[member.pool]
            for rank_id in member.rank_ids():
                pool.set_rank_state(rank_id, member.rank_state(rank_id.dp_rank))


def make_watch(settings: ControllerSettings) -> ProgressWatch | None:
    """Make the watch over engines' progress; each engine learns its own prefill pace."""
    if settings.progress is None:
        return None
    start = (settings.prefill_costs or load_cost_models(None)[0]).to_json()
    return ProgressWatch(
        settings.progress, make_prefill_model=lambda: PrefillCostModel.from_json(start)
    )
