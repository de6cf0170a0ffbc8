"""Decide again what a trace decided, through the same code, and report the first difference.

What was a fact in the run is a fact here: which requests came, what the load table said, what a
policy preferred, what was held back for spare. What was decided by our own planners is decided
again from it: routing (`DecodeRouter.pick`, `next_held`), prefill workers (`choose_worker`), how a
lost request goes on (`plan_recovery`), and who may compute its prompt again (`plan_ration`). Every
decision starts from the recorded view, so one difference does not cause the next: the number of
different decisions says how much another price would have changed, decision by decision, not what
the run would have become.

With `Changes` the same is decided under other prices or limits. A changed price holds for every
rank from the start to the end, instead of what was learned from reported steps; costs are not
compared then, only choices.

Pure apart from reading its input. O(records * D).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from dsched.drivers.wire import SamplingParams
from dsched.faults import LostRequest, RationView, plan_ration, plan_recovery
from dsched.ids import RequestId
from dsched.routing import DecodeRouter, RoutingDecision, RoutingReason, RoutingRequest
from dsched.routing.prefill import choose_worker
from dsched.routing.snapshot import keep_prices, set_max_hold_ns, set_prices_of_all
from dsched.trace.candidates import cost_of
from dsched.trace.records import Picked, PrefillChosen, Rationed, Record, Recovered, Released
from dsched.trace.view import TraceViews, picked_request, prefill_view

ROUTE = "route"
RELEASE = "release"
RECOVERY = "recovery"
RATION = "ration"
PREFILL = "prefill"
KINDS = (ROUTE, RELEASE, PREFILL, RECOVERY, RATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What is different from the recorded run; `None` is as recorded."""

    request_ns: float | None = None
    kv_token_ns: float | None = None
    max_hold_ns: int | None = None
    tokens_per_rank: int | None = None
    """Ration of re-prefill; 0 is no limit."""

    @property
    def has_prices(self) -> bool:
        """Every cost is another then, so that only choices are compared."""
        return self.request_ns is not None or self.kv_token_ns is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One decision that came out otherwise."""

    record: int
    """Its place in the trace, from 0."""
    time_ns: int
    kind: str
    request_id: str
    name: str
    """Of the number that differs first: `rank`, `reason`, `cost_ns`, ..."""
    recorded: str
    replayed: str
    note: str = ""
    """The numbers behind it."""


@dataclass(slots=True, kw_only=True)
class ReplayResult:
    """What came out."""

    num_records: int = 0
    num_decisions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_different: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    num_passed: int = 0
    """Decisions before their router's first keyframe."""
    first: Difference | None = None
    first_time_ns: int | None = None
    last_time_ns: int | None = None

    @property
    def is_same(self) -> bool:
        return self.first is None

    @property
    def span_s(self) -> float:
        """Time between the first and the last record."""
        if self.first_time_ns is None or self.last_time_ns is None:
            return 0.0
        return (self.last_time_ns - self.first_time_ns) / 1e9


def replay(records: Iterable[Record], changes: Changes | None = None) -> ReplayResult:
    """Decide everything again.

    Raises:
        TraceError: the trace contradicts itself.
    """
    return _Replay(changes or Changes()).run(records)


class _Replay:
    """State of one replay."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._views = TraceViews()
        self._result = ReplayResult()

    def run(self, records: Iterable[Record]) -> ReplayResult:
        result = self._result
        for number, record in enumerate(records):
            result.num_records = number + 1
            if record.time_ns or result.first_time_ns is not None:
                result.first_time_ns = result.first_time_ns or record.time_ns
                result.last_time_ns = record.time_ns
            self._views.apply(record)
            if isinstance(record, Picked | Released):
                self._route(number, record)
            elif isinstance(record, PrefillChosen):
                self._prefill(number, record)
            elif isinstance(record, Recovered):
                self._recover(number, record)
            elif isinstance(record, Rationed):
                self._ration(number, record)
        return result

    def _route(self, number: int, record: Picked | Released) -> None:
        router = self._views.router(record.pool)
        if router is None:
            self._result.num_passed += 1
            return
        changes = self._changes
        with keep_prices(router):
            if changes.has_prices:
                set_prices_of_all(
                    router, request_ns=changes.request_ns, kv_token_ns=changes.kv_token_ns
                )
            if changes.max_hold_ns is not None:
                set_max_hold_ns(router, changes.max_hold_ns)
            if isinstance(record, Picked):
                decision = router.pick(picked_request(record), record.time_ns)
                self._compare(number, record, router, ROUTE, record.request_id, decision)
                return
            held = router.next_held(record.time_ns)
            request_id = "nobody" if held is None else str(held.request_key)
            nothing = RoutingDecision(rank=None, reason=RoutingReason.QUEUED)
            decision = nothing if held is None else held.decision
            self._compare(number, record, router, RELEASE, request_id, decision)

    def _compare(
        self,
        number: int,
        record: Picked | Released,
        router: DecodeRouter,
        kind: str,
        request_id: str,
        decision: RoutingDecision,
    ) -> None:
        recorded = {
            "request": record.request_id,
            "rank": _rank_name(router, record.rank),
            "reason": record.reason,
            "num_eligible": record.num_eligible,
            "cost_ns": record.cost_ns,
        }
        replayed = {
            "request": request_id,
            "rank": _rank_name(router, decision.rank),
            "reason": decision.reason.value,
            "num_eligible": decision.num_eligible,
            "cost_ns": decision.cost_ns,
        }
        if self._changes.has_prices:
            del recorded["cost_ns"]
        self._result.num_decisions[kind] += 1
        name = next((each for each in recorded if recorded[each] != replayed[each]), None)
        if name is None:
            return
        note = ""
        if isinstance(record, Picked):
            note = _costs(router, picked_request(record), (record.rank, decision.rank))
        self._differ(
            number,
            record,
            kind=kind,
            name=name,
            recorded=_shown(recorded[name]),
            replayed=_shown(replayed[name]),
            note=note,
        )

    def _prefill(self, number: int, record: PrefillChosen) -> None:
        decision = choose_worker(prefill_view(record))
        self._result.num_decisions[PREFILL] += 1
        for name, recorded, replayed in (
            ("worker", _worker(record, record.worker), _worker(record, decision.worker)),
            ("reason", record.reason, decision.reason.value),
            ("finish_ns", record.finish_ns, decision.finish_ns),
        ):
            if recorded != replayed:
                self._differ(
                    number,
                    record,
                    kind=PREFILL,
                    name=name,
                    recorded=str(recorded),
                    replayed=str(replayed),
                )
                return

    def _recover(self, number: int, record: Recovered) -> None:
        plan = plan_recovery(sampling_of(record), num_output_tokens=record.num_output_tokens)
        self._result.num_decisions[RECOVERY] += 1
        for name, recorded, replayed in (
            ("method", record.method, plan.method.value),
            ("guarantee", record.guarantee, plan.guarantee.value),
        ):
            if recorded != replayed:
                self._differ(
                    number, record, kind=RECOVERY, name=name, recorded=recorded, replayed=replayed
                )
                return

    def _ration(self, number: int, record: Rationed) -> None:
        view = RationView(
            waiting=[
                LostRequest(request_id=RequestId(request_id), lost_ns=lost_ns, num_tokens=tokens)
                for request_id, lost_ns, tokens in record.waiting
            ],
            num_tokens_under_way=record.num_tokens_under_way,
            num_ranks_up=record.num_ranks_up,
        )
        limit = record.tokens_per_rank
        if self._changes.tokens_per_rank is not None:
            limit = self._changes.tokens_per_rank or None
        plan = plan_ration(view, tokens_per_rank=limit)
        self._result.num_decisions[RATION] += 1
        if plan.released != record.released:
            self._differ(
                number,
                record,
                kind=RATION,
                name="released",
                recorded=", ".join(record.released) or "nobody",
                replayed=", ".join(plan.released) or "nobody",
            )

    def _differ(
        self,
        number: int,
        record: Picked | Released | PrefillChosen | Recovered | Rationed,
        *,
        kind: str,
        name: str,
        recorded: str,
        replayed: str,
        note: str = "",
    ) -> None:
        self._result.num_different[kind] += 1
        if self._result.first is None:
            is_of_one = not isinstance(record, Rationed)
            self._result.first = Difference(
                record=number,
                time_ns=record.time_ns,
                kind=kind,
                request_id=record.request_id if is_of_one else "",  # type: ignore[union-attr]
                name=name,
                recorded=recorded,
                replayed=replayed,
                note=note,
            )


def sampling_of(record: Recovered) -> SamplingParams:
    """What recovery looks at; the values behind the flags do not matter to it."""
    return SamplingParams(
        max_tokens=record.max_tokens,
        min_tokens=record.min_tokens,
        temperature=record.temperature,
        top_k=record.top_k,
        seed=0 if record.has_seed else None,
        presence_penalty=1.0 if record.has_penalty else None,
        structured_output={} if record.has_grammar else None,
    )


def _worker(record: PrefillChosen, worker: int | None) -> str:
    return "none" if worker is None else record.workers[worker]


def _rank_name(router: DecodeRouter, rank: int | None) -> str | None:
    return None if rank is None else str(router.rank_id(rank))


def _costs(router: DecodeRouter, request: RoutingRequest, ranks: tuple[int | None, ...]) -> str:
    """What each of the ranks costs now."""
    parts = []
    for rank in dict.fromkeys(ranks):
        if rank is not None:
            terms = cost_of(router, request, rank)
            parts.append(f"{router.rank_id(rank)} costs {terms.total_ns:,.1f} ns now")
    return ", ".join(parts)


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
