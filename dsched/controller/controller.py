"""The controller: drain events, apply them, plan once, check, hand out.

One tick is one pass. Facts that need a decision (a request arrived, an attempt was lost, an engine
came up or went down) wait in a list; `tick` applies them in order, asks the routers once, checks
what they say, and only then speaks to engines. Batching keeps the control flow ours and lets a
burst be booked one request after the other, so that it does not herd.

What does not need a decision does not wait: tokens go from the engine through the journal to the
client in one call (`run.RequestRun`), and a finished request ends its stream at once.

Time comes from a `Clock`, randomness from nowhere; the host (an event loop, or the simulator) is
asked to call `tick` again through `TickHost`. One thread owns a controller.

The work is in the parts: `engines` (membership), `withdrawal` (who must leave an engine),
`lifecycle` (a request's way to its end), `dispatch` (ranks for what waits). They share a
`ControllerState`; this module is their order in a tick, and what others may ask.

Cost of a tick: O(events + dispatches * D).
"""

from collections.abc import Iterable, Iterator, Mapping

from dsched.clock import Clock
from dsched.controller.dispatch import Dispatcher
from dsched.controller.engines import Engines
from dsched.controller.events import (
    AttemptLost,
    DrainAsked,
    EngineCameUp,
    EngineProgressed,
    EngineWentDown,
    Event,
    RankCameBack,
    RankLost,
    RequestArrived,
)
from dsched.controller.host import TickHost
from dsched.controller.lifecycle import Lifecycle
from dsched.controller.migrations import Migrations
from dsched.controller.models import ModelCatalog
from dsched.controller.observer import ControllerObserver, NullObserver
from dsched.controller.peering import Peering
from dsched.controller.pools import PrefixSource
from dsched.controller.prefills import Prefills
from dsched.controller.refusals import stopping
from dsched.controller.request import (
    InferenceRequest,
    ModelInfo,
    RequestFinish,
    RequestStream,
)
from dsched.controller.settings import ControllerSettings
from dsched.controller.spare import PoolLoad, pool_load
from dsched.controller.state import ControllerState, Outcome
from dsched.controller.status import EngineStatus, each_engine_status, engine_statuses
from dsched.controller.withdrawal import Withdrawal
from dsched.drivers.base import Driver, EngineDescription
from dsched.drivers.wire import RankReport
from dsched.errors import InvariantError
from dsched.faults import Membership, PoolSpec, RecoveryMethod, SparePlan, TokenJournal
from dsched.ids import AttemptIds, EngineId, RankId, RequestId
from dsched.plugins import PolicySet
from dsched.routing import ReportOutcome
from dsched.states import Evidence
from dsched.trace import Recorder, null_recorder


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
        policies: PolicySet | None = None,
        recorder: Recorder | None = None,
        prefixes: PrefixSource | None = None,
    ) -> None:
        """Start with every engine down.

        Raises:
            ValueError: pools or engines that do not go together, or not every engine has a driver.
        """
        self.settings = settings or ControllerSettings()
        self._state = ControllerState(
            pools=pools,
            drivers=drivers,
            journal=journal,
            clock=clock,
            host=host,
            attempt_ids=attempt_ids,
            settings=self.settings,
            observer=observer or NullObserver(),
            recorder=recorder or null_recorder(),
            prefixes=prefixes,
            policies=policies or PolicySet(),
        )
        self._prefills = Prefills(self._state)
        self._lifecycle = Lifecycle(self._state, self._prefills)
        self._withdrawal = Withdrawal(self._state, self._lifecycle)
        self._engines = Engines(self._state, self._withdrawal)
        self._dispatcher = Dispatcher(self._state, self._lifecycle, self._prefills)
        self._migrations = Migrations(self._state, self._lifecycle)
        self._catalog = ModelCatalog(self._state)
        self.peering = Peering(self._state)
        """What other dsched processes are told, and what they say."""
        self._timer_ns: int | None = None

    def start(self) -> None:
        """Begin to watch all engines."""
        for _, driver in sorted(self._state.drivers.items()):
            driver.start(self)

    def close(self) -> None:
        """End every request with an error, release drivers and journal. Engines live on."""
        self._state.is_closed = True
        for run in self._state.runs:
            self._lifecycle.end_with_error(run, stopping())
        for _, driver in sorted(self._state.drivers.items()):
            driver.close()
        self._state.journal.close()

    # ---- ControlPlane: what the front door asks

    def submit(self, request: InferenceRequest, stream: RequestStream) -> None:
        """Take a request; the answer comes through `stream`."""
        time_ns = self._state.clock.now_ns()
        self._state.push(RequestArrived(request=request, stream=stream, time_ns=time_ns))

    def cancel(self, request_id: RequestId) -> RequestFinish | None:
        """The client went away. Its engine is told at once; the booking ends with the attempt."""
        if request_id not in self._state.runs:
            self._state.events = [
                event
                for event in self._state.events
                if not (
                    isinstance(event, RequestArrived) and event.request.request_id == request_id
                )
            ]
        return self._lifecycle.cancel(request_id)

    def models(self) -> Mapping[str, ModelInfo]:
        """Every configured model by name, also those without a live engine."""
        return self._catalog.models()

    def not_ready_reason(self) -> str | None:
        """`None` while at least one pool can serve."""
        return self._catalog.not_ready_reason()

    # ---- EngineListener: what drivers say

    def on_engine_up(self, description: EngineDescription) -> None:
        self._state.push(EngineCameUp(description=description))

    def on_engine_down(
        self, engine_id: EngineId, reason: str, evidence: Evidence = Evidence.SOCKET
    ) -> None:
        self._state.push(EngineWentDown(engine_id=engine_id, reason=reason, evidence=evidence))

    def on_rank_lost(self, rank_id: RankId, reason: str) -> None:
        """One DP rank is gone while its engine answers (see `dsched.drivers.rank_watch`)."""
        self._state.push(RankLost(rank_id=rank_id, reason=reason))

    def on_rank_back(self, rank_id: RankId) -> None:
        """A lost rank works again."""
        self._state.push(RankCameBack(rank_id=rank_id))

    def on_report(self, report: RankReport) -> None:
        """Correct the ledger at once: a report decides nothing by itself."""
        self._engines.apply_report(report)

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
        due_ns = None if deadline_ns is None else self._state.clock.now_ns() + deadline_ns
        self._state.push(
            DrainAsked(engine_id=engine_id, is_draining=is_draining, deadline_ns=due_ns)
        )

    @property
    def policies(self) -> PolicySet:
        """The operator's policies in use."""
        return self._state.policies

    def use_policies(self, policies: PolicySet) -> PolicySet:
        """Ask other policies from the next tick on; return those that were asked until now.

        Requests that were admitted, and the priorities they got, stay.
        """
        old = self._state.policies
        policies.replace(old)
        self._state.policies = policies
        return old

    def set_peers(
        self, pool: str, *, router_index: int, num_routers: int, hears_peers: bool = False
    ) -> None:
        """Say which of how many dsched processes over a pool's engines this one is now, and whether
        it hears from all others what they send.

        Raises `ValueError` for a pool that is not there, or a number that is not one of them.
        """
        if pool not in self._state.pools:
            raise ValueError(f"no pool is called {pool!r}")
        router = self._state.pools[pool].router
        if router.set_peers(
            router_index=router_index, num_routers=num_routers, hears_peers=hears_peers
        ):
            self._state.recorder.on_peers(pool, self._state.clock.now_ns())

    @property
    def membership(self) -> Membership:
        """Who is there, in which state. Read it only."""
        return self._state.membership

    def num_requests_on(self, engine_id: EngineId) -> int:
        """Requests of this dsched that an engine computes now."""
        return len(self._state.runs.on_engine(engine_id))

    @property
    def held_up_ns(self) -> int:
        """Time in which this process did not run while requests did; no engine is blamed for it."""
        return self._state.watch.forgiven_ns if self._state.watch is not None else 0

    @property
    def num_waiting_handoffs(self) -> int:
        """Requests that wait for the ration of re-prefill."""
        return sum(pool.handoffs.num_waiting for pool in self._state.pools.values())

    def capacities(self) -> dict[str, tuple[PoolLoad, SparePlan]]:
        """What runs in each pool, and what may run so that its largest group can be lost."""
        return {
            name: (pool_load(pool.router), pool.gate.plan)
            for name, pool in self._state.pools.items()
        }

    @property
    def num_open_requests(self) -> int:
        return len(self._state.runs)

    @property
    def num_waiting_requests(self) -> int:
        return self._state.runs.num_waiting

    @property
    def num_dispatched(self) -> Mapping[RankId, int]:
        """Attempts handed to each rank."""
        return self._state.counts.dispatched

    @property
    def num_requests(self) -> Mapping[tuple[str, Outcome], int]:
        """Ended requests by model and outcome."""
        return self._state.counts.requests

    @property
    def num_recoveries(self) -> Mapping[RecoveryMethod, int]:
        return self._state.counts.recoveries

    @property
    def num_handoffs(self) -> Mapping[tuple[str, str], int]:
        """By method and by what made it necessary; labels of a metric."""
        return self._state.counts.handoffs

    @property
    def num_prefills(self) -> Mapping[str, int]:
        """Prompts of separate pools by what became of them; label of a metric."""
        return self._state.counts.prefills

    @property
    def num_unknown_reports(self) -> int:
        return self._state.counts.unknown_reports

    @property
    def num_fenced_tokens(self) -> int:
        return self._lifecycle.num_fenced_tokens

    def engine_statuses(self) -> tuple[EngineStatus, ...]:
        """Every engine and rank, by id, as dsched sees them now."""
        return engine_statuses(self._state)

    def each_engine_status(self) -> Iterator[EngineStatus]:
        """The same one by one, so that other work gets its turn in between."""
        return each_engine_status(self._state)

    def num_reports(self) -> dict[str, int]:
        """Load reports by what became of them."""
        total: dict[str, int] = {outcome.value: 0 for outcome in ReportOutcome}
        for pool in self._state.pools.values():
            for outcome, count in pool.router.ledger.num_reports.items():
                total[outcome.value] += count
        total["unknown_engine"] = self.num_unknown_reports
        return total

    # ---- the tick

    def tick(self) -> None:
        """Apply what happened, decide, and tell the engines."""
        state = self._state
        now_ns = state.clock.now_ns()
        self._withdrawal.sweep(now_ns)
        while state.events:  # applying one may find more: the loss of a group is its attempts'
            events, state.events = state.events, []
            for event in events:
                self._apply(event)
        self._withdrawal.end_probation(now_ns)
        self._withdrawal.hand_over_drained(now_ns)
        self._lifecycle.lose_overdue_halves(now_ns)
        self._migrations.plan(now_ns)
        self._lifecycle.end_overdue(now_ns)
        self._engines.tell_membership()
        for dispatch in self._dispatcher.plan(now_ns):
            self._dispatcher.hand_out(dispatch)
        self._set_timer()
        if self.settings.is_validating:
            self.validate()

    def _apply(self, event: Event) -> None:
        match event:
            case RequestArrived():
                self._lifecycle.apply_arrival(event)
            case AttemptLost():
                self._lifecycle.apply_attempt_lost(event)
            case EngineCameUp():
                self._engines.apply_up(event.description)
            case EngineWentDown():
                self._engines.apply_down(event)
            case EngineProgressed():
                self._engines.apply_progressed(event)
            case RankLost():
                self._engines.apply_rank_lost(event)
            case RankCameBack():
                self._engines.apply_rank_back(event)
            case DrainAsked():
                self._engines.apply_drain(event)

    def _set_timer(self) -> None:
        """Ask to be called when something that waits runs out of time."""
        state = self._state
        now_ns = state.clock.now_ns()
        times = self._dispatcher.next_hold_expiry_ns(now_ns) + self._withdrawal.due_times_ns(now_ns)
        for due_ns in (
            state.runs.next_deadline_ns(),
            self._prefills.next_due_ns(),
            self._migrations.next_due_ns(),
        ):
            if due_ns is not None:
                times.append(due_ns)
        if not times:
            self._timer_ns = None
            return
        time_ns = max(min(times), now_ns + 1)
        if self._timer_ns is None or not now_ns < self._timer_ns <= time_ns:
            self._timer_ns = time_ns
            state.host.request_tick_at(time_ns)

    def validate(self) -> None:
        """Check that no request is in two places and every booking has an attempt. O(requests)."""
        state = self._state
        state.membership.validate()
        for pool in state.pools.values():
            pool.validate()
        state.runs.validate(
            undecided=(event.request_id for event in state.events if isinstance(event, AttemptLost))
        )
        self._prefills.validate()
        num_held = sum(pool.router.num_held for pool in state.pools.values())
        num_held += sum(pool.handoffs.num_waiting for pool in state.pools.values())
        if num_held != state.runs.num_waiting:
            raise InvariantError(f"{num_held} requests are held, {state.runs.num_waiting} wait")
