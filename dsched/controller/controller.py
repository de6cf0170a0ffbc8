"""The controller: drain events, apply them, plan once, check, hand out.

One tick is one pass. Facts that need a decision (a request arrived, an attempt was lost, an engine
came up or went down) wait in a list; `tick` applies them in order, asks the routers once, checks
what they say, and only then speaks to engines. Batching keeps the control flow ours and lets a
burst be booked one request after the other, so that it does not herd.

What does not need a decision does not wait: tokens go from the engine through the journal to the
client in one call (`run.RequestRun`), and a finished request ends its stream at once.

Time comes from a `Clock`, randomness from nowhere; the host (an event loop, or the simulator) is
asked to call `tick` again through `TickHost`. One thread owns a controller.

Cost of a tick: O(events + dispatches * D).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog
from sortedcontainers import SortedList

from dsched.clock import Clock
from dsched.controller import refusals
from dsched.controller.events import (
    AttemptLost,
    DrainAsked,
    EngineCameUp,
    EngineProgressed,
    EngineWentDown,
    Event,
    RankLost,
    RequestArrived,
)
from dsched.controller.handoffs import Handoffs
from dsched.controller.preference import (
    eligible_ranks,
    ignores_room,
    prefer,
    request_view,
)
from dsched.controller.request import (
    InferenceRequest,
    ModelInfo,
    RequestError,
    RequestFinish,
    RequestStream,
)
from dsched.controller.run import Attempt, Phase, RequestRun
from dsched.controller.spare import UNKNOWN_CAPACITY, PoolLoad, SpareGate, pool_load
from dsched.drivers.base import AttemptFinish, Driver, EngineDescription, FinishReason
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams
from dsched.errors import DriverError, EngineRefusedError, EngineUnreachableError, InvariantError
from dsched.faults import (
    Membership,
    MembershipView,
    PoolSpec,
    RecoveryGuarantee,
    RecoveryMethod,
    ResumeKind,
    ResumePlan,
    SparePlan,
    TokenJournal,
    plan_recovery,
    plan_resume,
)
from dsched.faults.membership import EngineMember
from dsched.faults.progress import ProgressLimits, ProgressWatch
from dsched.faults.spare import SpareMode
from dsched.ids import AttemptId, AttemptIds, DpRank, EngineId, RankId, RequestId
from dsched.plugins import RoutingPolicies
from dsched.routing import (
    DecodeRouter,
    ReportOutcome,
    RoutingDecision,
    RoutingReason,
    RoutingRequest,
)
from dsched.states import Evidence, RankState

log = structlog.get_logger(__name__)

PROBATION_NS = 10_000_000_000
"""After which a suspect engine that reports no load is tried again. Below: a frozen one costs its
next requests a pause again and again. Above: one that works again idles."""
ENGINE_BUSY_STATUSES = (429, 503, 529)
"""Answers of an engine that is alive and has no room: another rank may have."""


class TickHost(Protocol):
    """Calls the controller back. Implemented over an event loop and by the simulator."""

    def request_tick(self) -> None:
        """Call `tick` soon, once, however often this is asked before."""
        ...

    def request_tick_at(self, time_ns: int) -> None:
        """Call `tick` at `time_ns` of the controller's clock, or a little later."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Limits of the controller; units in the names."""

    max_attempts: int = 3
    """Ranks that a request is tried on. Fewer: a second failure ends it. More: a request that
    kills engines kills more of them."""
    max_held_requests: int = 4_096
    """Requests that wait for a rank; more are refused with 429."""
    max_hold_ns: int = 10_000_000_000
    """Wait for room, after which a request goes to the least loaded rank, room or not."""
    queue_timeout_ns: int = 120_000_000_000
    """Wait for any rank at all, after which a request ends with 503."""
    handoff_deadline_ns: int = 60_000_000_000
    """The same for a request that lost its engine in the middle of its answer."""
    request_cost_ns: float = 200_000.0
    kv_token_cost_ns: float = 26.0
    router_index: int = 0
    """Number of this process among the dsched processes over the same engines."""
    progress: ProgressLimits | None = None
    """How long what may stand still before it counts as frozen; `None` does not look."""
    reprefill_tokens_per_rank: int | None = None
    """Prompt tokens of lost requests computed again at once, for each rank that is up; `None`: no
    ration. See `dsched.faults.ration`."""
    spare: SpareMode = "none"
    """`n-1` keeps room for the loss of a pool's largest EP group. See `dsched.faults.spare`."""
    is_validating: bool = False
    """Check every invariant after each tick."""


class Outcome(StrEnum):
    """How requests ended; label of a metric."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """One decision to hand out: this run goes to this rank."""

    run: RequestRun
    decision: RoutingDecision
    command: GenerateCommand
    engine_id: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffGap:
    """What a client saw of a lost engine: the pause between two of its tokens, by part."""

    detect_ns: int
    """From its last token until the loss was noticed."""
    dispatch_ns: int
    """Until the next attempt was handed to an engine."""
    prefill_ns: int
    """Until that engine's first new token."""

    @property
    def total_ns(self) -> int:
        return self.detect_ns + self.dispatch_ns + self.prefill_ns


class ControllerObserver(Protocol):
    """Hears what is worth measuring. Methods must not raise and must not block."""

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        """A request that had lost its engine got its next token."""
        ...

    def on_membership_changed(self, view: MembershipView) -> None:
        """Engines or ranks came, went or changed their state; called in the tick that did it,
        after routing knows. `dsched.controller.placement` turns it into expert placements."""
        ...


class NullObserver:
    """Hears nothing."""

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        pass

    def on_membership_changed(self, view: MembershipView) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine, for people, metrics and the registry."""

    engine_id: EngineId
    pool: str
    model: str
    kind: str
    state: RankState
    reason: str
    ranks: tuple["RankStatus", ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One DP rank, for people, metrics and the registry."""

    dp_rank: DpRank
    state: RankState
    num_running: int
    """Requests that dsched and others have on it."""
    num_waiting: int
    """Requests that wait inside the engine, as last reported."""
    num_kv_tokens: int
    kv_capacity_tokens: int | None
    step_ns: int
    report_age_ns: int | None
    num_dispatched: int


class Controller:
    """Routes requests to engines and sees each of them to its one end.

    Implements `ControlPlane` for the front door and `EngineListener` for drivers.
    """

    def __init__(
        self,
        *,
        pools: Iterable[PoolSpec],
        drivers: Mapping[EngineId, Driver],
        journal: TokenJournal,
        clock: Clock,
        host: TickHost,
        attempt_ids: AttemptIds,
        settings: ControllerSettings | None = None,
        observer: ControllerObserver | None = None,
        policies: RoutingPolicies | None = None,
    ) -> None:
        self.settings = settings or ControllerSettings()
        self.policies = policies
        """Operators' routing policies; `None` asks nobody."""
        self._observer = observer or NullObserver()
        self._watch = ProgressWatch(self.settings.progress) if self.settings.progress else None
        self.membership = Membership(pools)
        self._drivers = dict(drivers)
        missing = sorted(set(self.membership.engines) ^ set(self._drivers))
        if missing:
            raise ValueError(f"engines and drivers do not match: {', '.join(missing)}")
        self._journal = journal
        self._clock = clock
        self._host = host
        self._attempt_ids = attempt_ids
        self._routers = {name: self._make_router() for name in self.membership.pools}
        self._handoffs = {
            name: Handoffs(tokens_per_rank=self.settings.reprefill_tokens_per_rank)
            for name in self.membership.pools
        }
        self._gates = {
            name: SpareGate(name, mode=self.settings.spare) for name in self.membership.pools
        }
        self._drain_deadlines: dict[EngineId, int] = {}
        """When what still runs on a drained engine is handed over."""
        self._suspect_since: dict[EngineId, int] = {}
        """Since when engines that report no load are suspect."""
        self._told_epoch = self.membership.epoch
        self._pool_of_model = {pool.model: name for name, pool in self.membership.pools.items()}
        self._models: dict[str, ModelInfo] = {}
        self._models_epoch: int | None = None
        self._events: list[Event] = []
        self._runs: dict[RequestId, RequestRun] = {}
        self._waiting: dict[RequestId, RequestRun] = {}
        """Runs that no rank has; the routers hold them between ticks."""
        self._deadlines: SortedList[tuple[int, RequestId]] = SortedList()
        """When each of them has waited too long."""
        self._running: dict[AttemptId, RequestRun] = {}
        """Runs that an engine computes now, by attempt."""
        self._unplanned: list[RequestRun] = []
        """Runs that this tick has to place first."""
        self._router_of_attempt: dict[AttemptId, DecodeRouter] = {}
        """Attempts that an engine may still hold something for."""
        self._last_reports: dict[RankId, RankReport] = {}
        self.num_dispatched: dict[RankId, int] = {}
        self.num_fenced_tokens = 0
        self.num_requests: dict[tuple[str, Outcome], int] = {}
        self.num_recoveries: dict[RecoveryMethod, int] = {}
        self.num_handoffs: dict[tuple[str, str], int] = {}
        """By method and by what made it necessary; labels of a metric."""
        self.num_unknown_reports = 0
        self._timer_ns: int | None = None
        self._is_closed = False

    def _make_router(self) -> DecodeRouter:
        settings = self.settings
        return DecodeRouter(
            router_index=settings.router_index,
            request_ns=settings.request_cost_ns,
            kv_token_ns=settings.kv_token_cost_ns,
            max_held_requests=settings.max_held_requests,
            max_hold_ns=settings.max_hold_ns,
        )

    def start(self) -> None:
        """Begin to watch all engines."""
        for _, driver in sorted(self._drivers.items()):
            driver.start(self)

    def close(self) -> None:
        """End every request with an error, release drivers and journal. Engines live on."""
        self._is_closed = True
        for run in list(self._runs.values()):
            self._end_with_error(run, refusals.stopping())
        for _, driver in sorted(self._drivers.items()):
            driver.close()
        self._journal.close()

    # ---- ControlPlane: what the front door asks

    def submit(self, request: InferenceRequest, stream: RequestStream) -> None:
        """Take a request; the answer comes through `stream`."""
        self._push(RequestArrived(request=request, stream=stream, time_ns=self._clock.now_ns()))

    def cancel(self, request_id: RequestId) -> RequestFinish | None:
        """The client went away. Its engine is told at once; the booking ends with the attempt."""
        run = self._runs.get(request_id)
        if run is None:
            self._events = [
                event
                for event in self._events
                if not (
                    isinstance(event, RequestArrived) and event.request.request_id == request_id
                )
            ]
            return None
        self._close_run(run, outcome=Outcome.CANCELLED)
        self._abort_attempt(run)
        return self._finish_of(run, reason=FinishReason.STOP, num_cached_tokens=0)

    def models(self) -> Mapping[str, ModelInfo]:
        """Every configured model by name, also those without a live engine.

        Asked for every request, so it is worked out anew only when the membership has changed.
        """
        if self._models_epoch != self.membership.epoch:
            self._models_epoch = self.membership.epoch
            self._models = {
                model: self._model_info(pool) for model, pool in self._pool_of_model.items()
            }
        return self._models

    def not_ready_reason(self) -> str | None:
        """`None` while at least one pool can serve."""
        if self._is_closed:
            return "dsched is stopping"
        if not self.membership.pools:
            return "no pool is configured"
        reasons = []
        for pool in sorted(self.membership.pools):
            if self._can_serve(pool):
                return None
            reasons.append(f"pool {pool!r} has no engine up")
        return "; ".join(reasons)

    def _can_serve(self, pool: str) -> bool:
        return any(
            record.state in (RankState.UP, RankState.SUSPECT)
            for record in self.membership.engines.values()
            if record.pool == pool
        )

    def _model_info(self, pool_name: str) -> ModelInfo:
        pool = self.membership.pools[pool_name]
        known = [
            record.description
            for record in self.membership.engines.values()
            if record.pool == pool_name
            and record.description is not None
            and record.description.model == record.spec.model
        ]
        limits = [description.max_model_len for description in known]
        if pool.max_model_len is not None:
            limits.append(pool.max_model_len)
        sizes = [each.vocab_size for each in known if each.vocab_size is not None]
        return ModelInfo(
            name=pool.model,
            max_model_len=min(limits) if limits else None,
            vocab_size=min(sizes) if sizes else None,
            is_available=self._can_serve(pool_name),
            capabilities=self.membership.capabilities(pool_name),
        )

    # ---- EngineListener: what drivers say

    def on_engine_up(self, description: EngineDescription) -> None:
        self._push(EngineCameUp(description=description))

    def on_engine_down(
        self, engine_id: EngineId, reason: str, evidence: Evidence = Evidence.SOCKET
    ) -> None:
        self._push(EngineWentDown(engine_id=engine_id, reason=reason, evidence=evidence))

    def on_rank_lost(self, rank_id: RankId, reason: str) -> None:
        """One DP rank is gone while its engine answers (see `dsched.drivers.recovery`).

        Raises `ValueError` for a rank that is not there.
        """
        record = self.membership.engines.get(rank_id.engine_id)
        if record is None or rank_id not in list(record.rank_ids()):
            raise ValueError(f"there is no rank {rank_id}")
        self._push(RankLost(rank_id=rank_id, reason=reason))

    def on_report(self, report: RankReport) -> None:
        """Correct the ledger at once: a report decides nothing by itself."""
        record = self.membership.engines.get(EngineId(report.engine_id))
        if record is None:
            self.num_unknown_reports += 1
            return
        router = self._routers[record.pool]
        rank_id = RankId(record.spec.engine_id, DpRank(report.dp_rank))
        outcome = router.apply_report(router.index_of(rank_id), report, self._clock.now_ns())
        if outcome is ReportOutcome.APPLIED:
            last = self._last_reports.get(rank_id)
            self._last_reports[rank_id] = report
            if last is None or last.step != report.step:
                self._note_step(record)
            elif report.num_running == report.num_waiting == 0:
                # It has nothing to step for, and has let go of what was taken from it: it lives.
                self._trust(record)
            if router.num_held:
                self._host.request_tick()

    def _note_step(self, record: EngineMember) -> None:
        if self._watch is not None:
            self._watch.note_step(record.spec.engine_id, self._clock.now_ns())
        self._trust(record)

    def _trust(self, record: EngineMember) -> None:
        if record.own_state is RankState.SUSPECT:
            self._push(EngineProgressed(engine_id=record.spec.engine_id))

    def _end_probation(self, now_ns: int) -> None:
        """Try engines again that cannot show progress, because they report no load."""
        for engine_id, since_ns in list(self._suspect_since.items()):
            record = self.membership.engines[engine_id]
            if record.own_state is not RankState.SUSPECT:
                del self._suspect_since[engine_id]
            elif now_ns - since_ns >= PROBATION_NS:
                self.membership.apply_trusted(engine_id)
                self._sync_group(engine_id)
                log.info("engine.tried_again", engine_id=engine_id, epoch=self.membership.epoch)

    # ---- what operators ask

    def drain(
        self,
        engine_id: EngineId,
        *,
        is_draining: bool = True,
        deadline_ns: int | None = None,
    ) -> None:
        """Give an engine nothing new (or again).

        What runs there finishes; what still runs `deadline_ns` from now is handed to other engines,
        as far as it can be continued and one is up. `None`: it may take as long as it takes.

        Raises:
            ValueError: there is no such engine, or the deadline is negative.
        """
        if engine_id not in self.membership.engines:
            raise ValueError(f"no engine is called {engine_id!r}")
        if deadline_ns is not None and deadline_ns < 0:
            raise ValueError(f"deadline_ns is {deadline_ns}; it must not be negative")
        due_ns = None if deadline_ns is None else self._clock.now_ns() + deadline_ns
        self._push(DrainAsked(engine_id=engine_id, is_draining=is_draining, deadline_ns=due_ns))

    def num_requests_on(self, engine_id: EngineId) -> int:
        """Requests of this dsched that an engine computes now."""
        return len(self._runs_on(engine_id))

    @property
    def held_up_ns(self) -> int:
        """Time in which this process did not run while requests did; no engine is blamed for it."""
        return self._watch.forgiven_ns if self._watch is not None else 0

    @property
    def num_waiting_handoffs(self) -> int:
        """Requests that wait for the ration of re-prefill."""
        return sum(handoffs.num_waiting for handoffs in self._handoffs.values())

    def capacities(self) -> dict[str, tuple[PoolLoad, SparePlan]]:
        """What runs in each pool, and what may run so that its largest group can be lost."""
        return {
            name: (pool_load(self._routers[name]), self._gates[name].plan)
            for name in sorted(self._routers)
        }

    @property
    def num_open_requests(self) -> int:
        return len(self._runs)

    @property
    def num_waiting_requests(self) -> int:
        return len(self._waiting)

    def engine_statuses(self) -> tuple[EngineStatus, ...]:
        """Every engine and rank, by id, as dsched sees them now."""
        now_ns = self._clock.now_ns()
        return tuple(
            self._engine_status(record, now_ns)
            for _, record in sorted(self.membership.engines.items())
        )

    def num_reports(self) -> dict[str, int]:
        """Load reports by what became of them."""
        total: dict[str, int] = {outcome.value: 0 for outcome in ReportOutcome}
        for router in self._routers.values():
            for outcome, count in router.ledger.num_reports.items():
                total[outcome.value] += count
        total["unknown_engine"] = self.num_unknown_reports
        return total

    def _engine_status(self, record: EngineMember, now_ns: int) -> EngineStatus:
        description = record.description
        return EngineStatus(
            engine_id=record.spec.engine_id,
            pool=record.pool,
            model=record.spec.model,
            kind=description.kind if description else "",
            state=record.state,
            reason=record.reason,
            ranks=tuple(
                self._rank_status(record, rank_id, now_ns) for rank_id in record.rank_ids()
            ),
        )

    def _rank_status(self, record: EngineMember, rank_id: RankId, now_ns: int) -> RankStatus:
        router = self._routers[record.pool]
        rank = router.index_of(rank_id)
        report = self._last_reports.get(rank_id)
        num_running = num_kv_tokens = 0
        capacity: int | None = None
        age_ns: int | None = None
        if rank is not None:
            load = router.load_of(rank)
            num_running = load.num_own_running + load.num_other_running
            num_kv_tokens = load.num_own_kv_tokens + load.num_other_kv_tokens
            if load.kv_capacity_tokens != UNKNOWN_CAPACITY:
                capacity = load.kv_capacity_tokens
            age_ns = router.report_age_ns(rank, now_ns)
        return RankStatus(
            dp_rank=rank_id.dp_rank,
            state=record.rank_state(rank_id.dp_rank),
            num_running=num_running,
            num_waiting=report.num_waiting if report else 0,
            num_kv_tokens=num_kv_tokens,
            kv_capacity_tokens=capacity,
            step_ns=report.step_ns if report else 0,
            report_age_ns=age_ns,
            num_dispatched=self.num_dispatched.get(rank_id, 0),
        )

    # ---- the tick

    def tick(self) -> None:
        """Apply what happened, decide, and tell the engines."""
        now_ns = self._clock.now_ns()
        self._sweep(now_ns)
        while self._events:  # applying one may find more: the loss of a group is its attempts'
            events, self._events = self._events, []
            for event in events:
                self._apply(event)
        self._end_probation(now_ns)
        self._hand_over_drained(now_ns)
        self._end_overdue(now_ns)
        self._tell_membership()
        for dispatch in self._plan(now_ns):
            self._hand_out(dispatch)
        self._set_timer()
        if self.settings.is_validating:
            self.validate()

    def _sweep(self, now_ns: int) -> None:
        """Look for engines that have stopped without saying so, and take their requests away."""
        if self._watch is None:
            return
        due_ns = self._watch.next_sweep_ns(now_ns)
        if due_ns is None or now_ns < due_ns:
            return
        plan = self._watch.sweep(now_ns, lambda key: self._running[key].num_attempt_tokens)  # type: ignore[index]
        for stalled in plan.engines:
            reason = f"no progress for {stalled.silent_ns / 1e9:.1f} s"
            record = self.membership.apply_suspect(stalled.engine_id, reason)
            if record.description and not record.description.capabilities.has_load_reports:
                self._suspect_since.setdefault(stalled.engine_id, now_ns)
            self._sync_group(stalled.engine_id)
            log.warning(
                "engine.suspected",
                engine_id=stalled.engine_id,
                silent_ms=stalled.silent_ns // 1_000_000,
                limit_ms=stalled.limit_ns // 1_000_000,
                epoch=self.membership.epoch,
            )
            self._lose_group(stalled.engine_id, f"engine {stalled.engine_id}: {reason}")
        for key in plan.attempts:
            limit_s = self._watch.limits.stream_timeout_ns / 1e9
            run = self._running.get(key)  # type: ignore[call-overload]
            if run is not None:
                self._lose_attempt(run, reason=f"no token for {limit_s:.0f} s")

    def _lose_group(self, engine_id: EngineId, reason: str, *, rank: int | None = None) -> None:
        """Take away what runs on an engine and its group's others, or on one rank of it."""
        for member in self.membership.group_of(engine_id):
            for run in self._runs_on(member.spec.engine_id):
                if rank is None or (run.attempt is not None and run.attempt.rank == rank):
                    self._lose_attempt(run, reason=reason)

    def _hand_over_drained(self, now_ns: int) -> None:
        """Move what still runs on drained engines whose deadline has passed."""
        for engine_id, due_ns in sorted(self._drain_deadlines.items()):
            if due_ns > now_ns:
                continue
            record = self.membership.engines[engine_id]
            runs = self._runs_on(engine_id)
            if not runs:
                if record.state is RankState.DOWN:
                    del self._drain_deadlines[engine_id]
                continue
            if not self.membership.up_engines(record.pool):
                continue  # nowhere to go: finishing here is better than an error
            for run in runs:
                plan = plan_recovery(run.request.sampling, num_output_tokens=run.num_output_tokens)
                if plan.method not in (RecoveryMethod.REFUSE, RecoveryMethod.FINISH):
                    self._abort_attempt(run)
                    self._move_attempt(run)

    def _move_attempt(self, run: RequestRun) -> None:
        """Take a request away from an engine that works, to go on elsewhere in this tick."""
        if run.attempt is None:
            raise InvariantError(f"request {run.request.request_id} moves without an attempt")
        event = self._part_from_attempt(
            run, reason="its engine is drained", is_engine_lost=False, is_moved=True
        )
        self._apply_attempt_lost(event)

    def _tell_membership(self) -> None:
        """Let gates and the observer know of a change in the tick that made it."""
        if self.membership.epoch == self._told_epoch:
            return
        self._told_epoch = self.membership.epoch
        for gate in self._gates.values():
            gate.update(self.membership)
        self._observer.on_membership_changed(self.membership.view())

    def _runs_on(self, engine_id: EngineId) -> list[RequestRun]:
        return [
            run
            for run in self._running.values()
            if run.attempt is not None and run.attempt.engine_id == engine_id
        ]

    def _lose_attempt(self, run: RequestRun, *, reason: str) -> None:
        """Take a request away from an engine that does not answer: fence, abort, go on."""
        self._abort_attempt(run)
        self._fail_attempt(run, reason=reason, is_engine_lost=True)

    def _push(self, event: Event) -> None:
        self._events.append(event)
        self._host.request_tick()

    def _apply(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._apply_arrival(event)
            case AttemptLost():
                self._apply_attempt_lost(event)
            case EngineCameUp():
                self._apply_engine_up(event.description)
            case EngineWentDown():
                self._apply_engine_down(event)
            case EngineProgressed():
                self.membership.apply_trusted(event.engine_id)
                self._sync_group(event.engine_id)
                log.info("engine.trusted", engine_id=event.engine_id, epoch=self.membership.epoch)
            case RankLost():
                self._apply_rank_lost(event)
            case DrainAsked():
                self._apply_drain(event)

    def _apply_rank_lost(self, event: RankLost) -> None:
        engine_id = event.rank_id.engine_id
        record = self.membership.apply_rank_lost(event.rank_id, event.reason)
        log.warning(
            "rank.lost",
            engine_id=engine_id,
            dp_rank=event.rank_id.dp_rank,
            reason=event.reason,
            epoch=self.membership.epoch,
        )
        self._sync_group(engine_id)
        rank = None
        if record.state is not RankState.DOWN:
            rank = self._routers[record.pool].index_of(event.rank_id)
        self._lose_group(engine_id, f"rank {event.rank_id}: {event.reason}", rank=rank)

    def _apply_drain(self, event: DrainAsked) -> None:
        engine_id = event.engine_id
        self.membership.apply_draining(engine_id, is_draining=event.is_draining)
        self._sync_group(engine_id)
        self._drain_deadlines.pop(engine_id, None)
        if event.is_draining and event.deadline_ns is not None:
            self._drain_deadlines[engine_id] = event.deadline_ns
        epoch = self.membership.epoch
        if event.is_draining:
            num_requests = self.num_requests_on(engine_id)
            log.info("engine.draining", engine_id=engine_id, num_requests=num_requests, epoch=epoch)
        else:
            log.info("engine.undrained", engine_id=engine_id, epoch=epoch)

    def _apply_arrival(self, event: RequestArrived) -> None:
        request = event.request
        error = self._refusal(request)
        if error is not None:
            self._count(request.model, Outcome.ERROR)
            event.stream.on_error(error)
            return
        resume = self._resume_plan(request)
        if resume.kind is ResumeKind.REFUSE:
            self._count(request.model, Outcome.ERROR)
            event.stream.on_error(refusals.cannot_resume(resume.reason))
            return
        pool = self._pool_of_model[request.model]
        run = RequestRun(
            request=request,
            stream=event.stream,
            pool=pool,
            router=self._routers[pool],
            journal=self._journal,
            owner=self,
            clock=self._clock,
            time_ns=event.time_ns,
        )
        self._journal.open_request(
            request.request_id,
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
        )
        self._runs[request.request_id] = run
        if resume.kind is ResumeKind.CONTINUE:
            self._resume(run, resume)
        else:
            self._wait(run)

    def _resume_plan(self, request: InferenceRequest) -> ResumePlan:
        """What the journal has of a request that its client repeats."""
        if not request.may_resume:
            return ResumePlan(kind=ResumeKind.NEW)
        return plan_resume(
            self._journal.read_request(
                request.request_id, is_known_only=request.num_client_tokens is None
            ),
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            num_client_tokens=request.num_client_tokens,
        )

    def _resume(self, run: RequestRun, resume: ResumePlan) -> None:
        """Give the client what the journal has, and go on from there."""
        request_id = run.request.request_id
        run.num_attempts = run.num_moves = 1  # the attempt that died with dsched
        self._journal.begin_attempt(
            request_id,
            attempt_id=self._attempt_ids.next_id(),
            epoch=1,
            target=RankId(EngineId("journal"), DpRank(0)),
        )
        self._journal.record(request_id, epoch=1, first_index=0, token_ids=resume.output_token_ids)
        run.num_output_tokens = len(resume.output_token_ids)
        log.info(
            "request.resumed",
            request_id=request_id,
            num_output_tokens=run.num_output_tokens,
            is_ended=resume.finish_reason is not None,
        )
        run.stream.on_tokens(0, resume.output_token_ids, None)
        if run.phase is Phase.ENDED:
            return  # a stop string was among them
        if resume.finish_reason is not None:
            self._finish(run, reason=resume.finish_reason, num_cached_tokens=0)
        else:
            engine_id = EngineId("journal")
            self._go_on(run, engine_id=engine_id, reason="repeated by its client", cause="repeated")

    def _refusal(self, request: InferenceRequest) -> RequestError | None:
        """Why a request cannot even wait, or `None`."""
        if self._is_closed:
            return refusals.stopping()
        pool = self._pool_of_model.get(request.model)
        if pool is None:
            return refusals.unknown_model(request.model)
        if request.request_id in self._runs:
            return refusals.id_in_use(request.request_id)
        if not self._can_serve(pool):
            return refusals.no_engine(request.model)
        return None

    def _wait(self, run: RequestRun) -> None:
        """Let a run wait for this tick's plan, and longer if no rank has room."""
        run.phase = Phase.WAITING
        run.attempt = None
        limit_ns = self.settings.queue_timeout_ns
        if run.num_handoffs:
            limit_ns = self.settings.handoff_deadline_ns
        run.deadline_ns = self._clock.now_ns() + limit_ns
        self._waiting[run.request.request_id] = run
        self._deadlines.add((run.deadline_ns, run.request.request_id))
        if run.recovery is None:
            self._unplanned.append(run)
        else:
            self._handoffs[run.pool].add(run, self._clock.now_ns())

    def _apply_attempt_lost(self, event: AttemptLost) -> None:
        run = self._runs.get(event.request_id)
        if run is None or run.phase is not Phase.WAITING or run.attempt is None:
            return
        lost_rank = run.attempt.rank
        run.num_moves += event.is_moved
        if run.num_attempts - run.num_moves >= self.settings.max_attempts:
            self._end_with_error(
                run,
                RequestError(
                    status=502 if event.is_engine_lost else 503,
                    code="engine_lost" if event.is_engine_lost else "overloaded",
                    message=f"gave up after {run.num_attempts} attempts: {event.reason}",
                    retry_after_s=refusals.RETRY_AFTER_S,
                ),
            )
            return
        run.excluded_ranks = tuple(sorted({*run.excluded_ranks, lost_rank}))
        cause = "engine_lost" if event.is_engine_lost else "engine_busy"
        self._go_on(
            run,
            engine_id=event.engine_id,
            reason=event.reason,
            cause="drained" if event.is_moved else cause,
        )

    def _go_on(self, run: RequestRun, *, engine_id: EngineId, reason: str, cause: str) -> None:
        """Go on with a request whose attempt was lost, as `plan_recovery` says."""
        plan = plan_recovery(run.request.sampling, num_output_tokens=run.num_output_tokens)
        run.recovery = plan
        self.num_recoveries[plan.method] = self.num_recoveries.get(plan.method, 0) + 1
        key = (plan.method.value, cause)
        self.num_handoffs[key] = self.num_handoffs.get(key, 0) + 1
        if run.num_output_tokens:
            run.num_handoffs += 1
            if run.guarantee is not RecoveryGuarantee.CONTINUATION:
                run.guarantee = plan.guarantee  # once drawn anew, an answer is never exact again
        log.info(
            "request.recovered",
            request_id=run.request.request_id,
            method=plan.method.value,
            guarantee=plan.guarantee.value,
            engine_id=engine_id,
            reason=reason,
            num_output_tokens=run.num_output_tokens,
        )
        if plan.method is RecoveryMethod.REFUSE:
            self._end_with_error(
                run,
                RequestError(
                    status=502,
                    code="engine_lost",
                    message=f"engine {engine_id} was lost after {run.num_output_tokens} "
                    f"tokens, and {plan.reason}",
                    guarantee=plan.guarantee.value,
                ),
            )
        elif plan.finish_reason is not None:
            self._finish(run, reason=plan.finish_reason, num_cached_tokens=0)
        else:
            run.expected_token_ids = list(
                self._journal.output_token_ids(run.request.request_id)[: plan.num_replayed_tokens]
            )
            self._wait(run)

    def _apply_engine_up(self, description: EngineDescription) -> None:
        record = self.membership.engines[description.engine_id]
        old_rank_ids = list(record.rank_ids())
        self.membership.apply_up(description)
        if record.reason and record.state is RankState.DOWN:
            log.error("engine.refused", engine_id=description.engine_id, reason=record.reason)
        else:
            log.info(
                "engine.came_up",
                engine_id=description.engine_id,
                kind=description.kind,
                model=description.model,
                num_dp_ranks=description.num_dp_ranks,
                epoch=self.membership.epoch,
            )
        router = self._routers[record.pool]
        for rank_id in old_rank_ids[description.num_dp_ranks :]:
            rank = router.index_of(rank_id)
            if rank is not None:
                router.remove_rank(rank)
        for rank_id in record.rank_ids():
            router.add_rank(
                rank_id,
                kv_capacity_tokens=description.kv_capacity_tokens or UNKNOWN_CAPACITY,
                max_running_requests=description.max_running_requests or UNKNOWN_CAPACITY,
            )
        self._sync_group(description.engine_id)

    def _apply_engine_down(self, event: EngineWentDown) -> None:
        epoch = self.membership.epoch
        record = self.membership.apply_down(event.engine_id, event.reason, evidence=event.evidence)
        self._sync_group(event.engine_id)
        if self.membership.epoch == epoch:
            return
        log.warning(
            "engine.went_down",
            engine_id=event.engine_id,
            state=record.state.name.lower(),
            reason=record.reason,
            evidence=event.evidence.value,
            epoch=self.membership.epoch,
        )
        if record.own_state is RankState.DOWN:
            # Its own attempts fail by themselves; its group's others may not have noticed yet.
            for mate in self.membership.group_of(event.engine_id):
                if mate is not record and mate.state is RankState.DOWN:
                    for run in self._runs_on(mate.spec.engine_id):
                        self._lose_attempt(run, reason=mate.reason)

    def _sync_group(self, engine_id: EngineId) -> None:
        """Give every rank of an EP group its state: the group is the failure domain."""
        for member in self.membership.group_of(engine_id):
            router = self._routers[member.pool]
            for rank_id in member.rank_ids():
                rank = router.index_of(rank_id)
                if rank is not None:
                    router.set_rank_state(rank, member.rank_state(rank_id.dp_rank))

    # ---- planning and handing out

    def _plan(self, now_ns: int) -> list[Dispatch]:
        """Place what is held, then what is new; book each answer before asking for the next."""
        dispatches = self._plan_held(now_ns)
        for pool in sorted(self._handoffs):
            handoffs = self._handoffs[pool]
            if handoffs.num_waiting:
                self._unplanned += handoffs.take(self._num_ranks_up(pool))
        unplanned, self._unplanned = self._unplanned, []
        for run in unplanned:
            dispatch = self._plan_new(run, now_ns) if run.phase is Phase.WAITING else None
            if dispatch is not None:
                dispatches.append(dispatch)
        return dispatches

    def _num_ranks_up(self, pool: str) -> int:
        members = self.membership.up_engines(pool)
        return sum(
            member.rank_state(rank_id.dp_rank) is RankState.UP
            for member in members
            for rank_id in member.rank_ids()
        )

    def _has_spare(self, run: RequestRun) -> bool:
        """Whether a run may start; one that lost its engine uses what was kept for it."""
        if run.recovery is not None:
            return True
        return self._gates[run.pool].has_room(run.router, num_new_tokens=run.num_known_tokens)

    def _plan_held(self, now_ns: int) -> list[Dispatch]:
        dispatches: list[Dispatch] = []
        for pool in sorted(self._routers):
            router = self._routers[pool]
            while (held := router.next_held(now_ns)) is not None:
                run = self._waiting[held.request_key]  # type: ignore[index]
                if held.decision.rank is not None and not self._has_spare(run):
                    break  # what is free is kept for the loss of a group
                router.drop_held(held.request_key, is_served=held.decision.rank is not None)
                if held.decision.rank is None:
                    self._end_unroutable(run, held.decision)
                else:
                    dispatches.append(self._book(run, held.decision, now_ns))
        return dispatches

    def _plan_new(self, run: RequestRun, now_ns: int) -> Dispatch | None:
        """Dispatch a run, hold it, or end it when no rank could ever take it."""
        decision = run.router.pick(_routing_request(run), now_ns)
        if decision.reason is RoutingReason.NO_RANK_UP and run.excluded_ranks:
            # Every rank that is up has failed it once: better one of them again than none.
            run.excluded_ranks = ()
            decision = run.router.pick(_routing_request(run), now_ns)
        if decision.reason in (RoutingReason.TOO_LARGE, RoutingReason.NO_SUCH_RANK):
            self._end_unroutable(run, decision)
            return None
        # Continuations overtake what is held: their clients wait in the middle of an answer.
        may_go = not run.router.num_held or run.recovery is not None
        if decision.rank is not None and may_go and self._has_spare(run):
            return self._book(run, decision, now_ns)
        if not run.router.hold(_routing_request(run), run.request.request_id, now_ns):
            self._end_with_error(run, refusals.full(run.router.num_held))
        return None

    def _book(self, run: RequestRun, decision: RoutingDecision, now_ns: int) -> Dispatch:
        if self.policies is not None:
            decision = self._prefer(self.policies, run, decision, now_ns)
        if decision.rank is None:
            raise InvariantError(f"request {run.request.request_id}: a dispatch needs a rank")
        request = run.request
        prompt_token_ids, sampling = self._attempt_input(run)
        rank_id = run.router.rank_id(decision.rank)
        attempt_id = self._attempt_ids.next_id()
        run.num_attempts += 1
        run.attempt = Attempt(
            attempt_id=attempt_id,
            epoch=run.num_attempts,
            engine_id=rank_id.engine_id,
            rank=decision.rank,
            num_prompt_tokens=len(prompt_token_ids),
        )
        run.phase = Phase.RUNNING
        run.dispatch_ns = now_ns
        run.num_attempt_tokens = 0
        self._stop_waiting(run)
        self._running[attempt_id] = run
        if self._watch is not None:
            self._watch.begin(
                attempt_id,
                engine_id=rank_id.engine_id,
                num_prompt_tokens=len(prompt_token_ids),
                now_ns=now_ns,
            )
        # Booked by attempt, not by request: a cancelled attempt may still run while its client
        # repeats the request.
        run.router.book(
            decision.rank, attempt_id, num_prompt_tokens=len(prompt_token_ids), now_ns=now_ns
        )
        self._router_of_attempt[attempt_id] = run.router
        if run.recovery is not None:
            self._handoffs[run.pool].begin(attempt_id, len(prompt_token_ids))
        self._journal.begin_attempt(
            request.request_id, attempt_id=attempt_id, epoch=run.attempt.epoch, target=rank_id
        )
        self.num_dispatched[rank_id] = self.num_dispatched.get(rank_id, 0) + 1
        return Dispatch(
            run=run,
            decision=decision,
            engine_id=rank_id.engine_id,
            command=GenerateCommand(
                attempt_id=attempt_id,
                epoch=self.membership.epoch,
                dp_rank=rank_id.dp_rank,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
                priority=request.priority,
            ),
        )

    def _prefer(
        self, policies: RoutingPolicies, run: RequestRun, decision: RoutingDecision, now_ns: int
    ) -> RoutingDecision:
        """Ask the operator's policies; the router's own decision is the default."""
        offered = eligible_ranks(
            run.router, _routing_request(run), ignores_room=ignores_room(decision)
        )
        view = request_view(run.request, held_ns=now_ns - run.time_ns)
        preferred, _ = prefer(policies, decision, view, offered)
        return preferred

    def _attempt_input(self, run: RequestRun) -> tuple[tuple[int, ...], SamplingParams]:
        """Prompt and sampling of the next attempt."""
        request, plan = run.request, run.recovery
        if plan is None or plan.sampling is None:
            return request.prompt_token_ids, request.sampling
        prompt_token_ids = request.prompt_token_ids
        if plan.num_prompt_output_tokens:
            prompt_token_ids += self._journal.output_token_ids(request.request_id)
        return prompt_token_ids, plan.sampling

    def _hand_out(self, dispatch: Dispatch) -> None:
        run = dispatch.run
        attempt_id = AttemptId(dispatch.command.attempt_id)
        if run.attempt is None or run.attempt.attempt_id != attempt_id:
            self.on_attempt_released(attempt_id)  # ended between planning and handing out
            return
        self._drivers[dispatch.engine_id].generate(dispatch.command, run)

    # ---- ends

    def on_run_finished(self, run: RequestRun, finish: AttemptFinish) -> None:
        """The engine ended the request well: tell the client at once."""
        if finish.reason is FinishReason.ABORT:
            self._end_with_error(
                run,
                RequestError(
                    status=502, code="engine_aborted", message="the engine aborted the request"
                ),
            )
            return
        if run.expected_token_ids:
            self.on_replay_differs(run)
            return
        self._finish(run, reason=finish.reason, num_cached_tokens=finish.num_cached_tokens)

    def on_replay_differs(self, run: RequestRun) -> None:
        """A replay gave other tokens than the client has: an honest end is all that is left."""
        self._end_with_error(
            run,
            RequestError(
                status=502,
                code="engine_lost",
                message=f"an engine was lost after {run.num_output_tokens} tokens, and another "
                "one does not repeat them",
                guarantee=RecoveryGuarantee.REFUSED.value,
            ),
        )

    def _finish(self, run: RequestRun, *, reason: FinishReason, num_cached_tokens: int) -> None:
        """End a request well; counts are those of the request, however many attempts it took."""
        outcome = Outcome.STOP if reason is FinishReason.STOP else Outcome.LENGTH
        self._close_run(run, outcome=outcome)
        run.stream.on_finish(
            self._finish_of(run, reason=reason, num_cached_tokens=num_cached_tokens)
        )

    @staticmethod
    def _finish_of(
        run: RequestRun, *, reason: FinishReason, num_cached_tokens: int
    ) -> RequestFinish:
        num_prompt_tokens = len(run.request.prompt_token_ids)
        return RequestFinish(
            reason=reason,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=run.num_output_tokens,
            num_cached_tokens=min(num_cached_tokens, num_prompt_tokens),
            num_handoffs=run.num_handoffs,
            guarantee=run.guarantee.value if run.guarantee else None,
        )

    def on_attempt_failed(self, run: RequestRun, error: DriverError) -> None:
        """The attempt ended badly: refuse, or let the tick find another rank."""
        is_lost = isinstance(error, EngineUnreachableError)
        is_busy = isinstance(error, EngineRefusedError) and error.status in ENGINE_BUSY_STATUSES
        if not (is_lost or is_busy):
            self._end_with_error(run, refusals.from_engine(error))
            return
        self._fail_attempt(run, reason=str(error), is_engine_lost=is_lost)

    def _fail_attempt(self, run: RequestRun, *, reason: str, is_engine_lost: bool) -> None:
        self._push(self._part_from_attempt(run, reason=reason, is_engine_lost=is_engine_lost))

    def _part_from_attempt(
        self, run: RequestRun, *, reason: str, is_engine_lost: bool, is_moved: bool = False
    ) -> AttemptLost:
        """The attempt is over, the request is not: nothing it still says counts."""
        if run.attempt is None:
            raise InvariantError(f"request {run.request.request_id} failed without an attempt")
        self._stop_watching(run)
        run.phase = Phase.WAITING
        if run.lost_ns is None:
            run.lost_ns = self._clock.now_ns()
        self._journal.fence_attempt(run.request.request_id)
        return AttemptLost(
            request_id=run.request.request_id,
            engine_id=run.attempt.engine_id,
            reason=reason,
            is_engine_lost=is_engine_lost,
            is_moved=is_moved,
        )

    def on_handed_off(self, run: RequestRun, now_ns: int) -> None:
        """The first token after a loss: measure what the client saw."""
        if run.lost_ns is not None and run.recovery is not None and run.num_handoffs:
            gap = HandoffGap(
                detect_ns=run.lost_ns - run.token_ns,
                dispatch_ns=run.dispatch_ns - run.lost_ns,
                prefill_ns=now_ns - run.dispatch_ns,
            )
            self._observer.on_handoff(run.recovery.method.value, gap)
        run.lost_ns = None
        if run.attempt is not None and self._handoffs[run.pool].end(run.attempt.attempt_id):
            self._host.request_tick()

    def _stop_watching(self, run: RequestRun) -> None:
        if run.attempt is not None:
            self._running.pop(run.attempt.attempt_id, None)
            if self._handoffs[run.pool].end(run.attempt.attempt_id):
                self._host.request_tick()
            if self._watch is not None:
                self._watch.end(run.attempt.attempt_id)

    def on_attempt_released(self, attempt_id: AttemptId) -> None:
        """The engine holds nothing of this attempt any more."""
        router = self._router_of_attempt.pop(attempt_id, None)
        if router is not None:
            router.release(attempt_id)
            if router.num_held:
                self._host.request_tick()

    def _abort_attempt(self, run: RequestRun) -> None:
        attempt = run.attempt
        if attempt is not None and attempt.attempt_id in self._router_of_attempt:
            self._drivers[attempt.engine_id].abort(attempt.attempt_id)

    def _close_run(self, run: RequestRun, *, outcome: Outcome) -> None:
        """Forget a request. Its booking stays until the engine has let go of it."""
        request_id = run.request.request_id
        self._stop_watching(run)
        run.phase = Phase.ENDED
        del self._runs[request_id]
        if self._stop_waiting(run):
            run.router.drop_held(request_id)
            self._handoffs[run.pool].drop(request_id)
        self._journal.finish(request_id, reason=outcome.value)
        self._count(run.request.model, outcome)

    def _end_with_error(self, run: RequestRun, error: RequestError) -> None:
        self._close_run(run, outcome=Outcome.ERROR)
        self._abort_attempt(run)
        log.warning(
            "request.failed",
            request_id=run.request.request_id,
            code=error.code,
            reason=error.message,
            num_attempts=run.num_attempts,
            num_output_tokens=run.num_output_tokens,
        )
        run.stream.on_error(error)

    def _end_unroutable(self, run: RequestRun, decision: RoutingDecision) -> None:
        self._end_with_error(run, refusals.unroutable(run, decision.reason))

    def _stop_waiting(self, run: RequestRun) -> bool:
        request_id = run.request.request_id
        if self._waiting.pop(request_id, None) is None:
            return False
        self._deadlines.remove((run.deadline_ns, request_id))
        return True

    def _end_overdue(self, now_ns: int) -> None:
        """End what has waited too long for any rank."""
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            run = self._waiting[self._deadlines[0][1]]
            if run.num_handoffs:
                key = ("overdue", "no_room")
                self.num_handoffs[key] = self.num_handoffs.get(key, 0) + 1
            is_pool_up = self._can_serve(run.pool)
            self._end_with_error(run, refusals.overdue(run, is_pool_up=is_pool_up))

    def _set_timer(self) -> None:
        """Ask to be called when something that waits runs out of time."""
        now_ns = self._clock.now_ns()
        times = [
            expiry_ns
            for router in self._routers.values()
            # What has expired and is still held waits for an engine or for spare room.
            if (expiry_ns := router.next_hold_expiry_ns()) is not None and expiry_ns > now_ns
        ]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        times += [since_ns + PROBATION_NS for since_ns in self._suspect_since.values()]
        times += [due_ns for due_ns in self._drain_deadlines.values() if due_ns > now_ns]
        if self._watch is not None and (due_ns := self._watch.next_sweep_ns(now_ns)) is not None:
            times.append(due_ns)
        if not times:
            self._timer_ns = None
            return
        time_ns = max(min(times), now_ns + 1)
        if self._timer_ns is None or not now_ns < self._timer_ns <= time_ns:
            self._timer_ns = time_ns
            self._host.request_tick_at(time_ns)

    def _count(self, model: str, outcome: Outcome) -> None:
        key = (model, outcome)
        self.num_requests[key] = self.num_requests.get(key, 0) + 1

    def validate(self) -> None:
        """Check that no request is in two places and every booking has an attempt. O(requests)."""
        self.membership.validate()
        for router in self._routers.values():
            router.validate()
        lost = {event.request_id for event in self._events if isinstance(event, AttemptLost)}
        for request_id, run in self._runs.items():
            if request_id in lost:
                continue  # the next tick decides about it
            if run.phase is Phase.ENDED:
                raise InvariantError(f"request {request_id} ended and is still kept")
            if (run.phase is Phase.RUNNING) != (
                run.attempt is not None and run.attempt.attempt_id in self._running
            ):
                raise InvariantError(f"request {request_id}: {run.phase.name} and not in its place")
            if (run.phase is Phase.RUNNING) == (request_id in self._waiting):
                raise InvariantError(
                    f"request {request_id}: phase {run.phase.name} is not its place"
                )
        num_held = sum(router.num_held for router in self._routers.values())
        if len(self._deadlines) != len(self._waiting):
            raise InvariantError(
                f"{len(self._deadlines)} deadlines for {len(self._waiting)} waiting requests"
            )
        num_held += sum(handoffs.num_waiting for handoffs in self._handoffs.values())
        if num_held != len(self._waiting):
            raise InvariantError(f"{num_held} requests are held, {len(self._waiting)} wait")


def _routing_request(run: RequestRun) -> RoutingRequest:
    request = run.request
    return RoutingRequest(
        num_prompt_tokens=len(request.prompt_token_ids) + run.num_output_tokens,
        pinned_dp_rank=request.pinned_dp_rank,
        tenant=request.tenant,
        excluded_ranks=run.excluded_ranks,
    )
