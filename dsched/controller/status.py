"""What dsched knows of engines and ranks, for people, metrics and the registry."""

from collections.abc import Iterator
from dataclasses import dataclass

from dsched.controller.spare import UNKNOWN_CAPACITY
from dsched.controller.state import ControllerState
from dsched.faults.membership import EngineMember
from dsched.ids import DpRank, EngineId, RankId
from dsched.states import RankState


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One DP rank."""

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
    time_factor: float = 1.0
    """Step time of its engine over that of the pool's middle engine at equal load, as routing
    prices it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One engine."""

    engine_id: EngineId
    pool: str
    model: str
    kind: str
    state: RankState
    reason: str
    ranks: tuple[RankStatus, ...]


def engine_statuses(state: ControllerState) -> tuple[EngineStatus, ...]:
    """Every engine and rank, by id, as dsched sees them now."""
    return tuple(each_engine_status(state))


def each_engine_status(state: ControllerState) -> Iterator[EngineStatus]:
    """The same one by one, each of the moment it is asked for: thousands of ranks take a while."""
    for _, record in sorted(state.membership.engines.items()):
        yield _engine_status(state, record, state.clock.now_ns())


def _engine_status(state: ControllerState, record: EngineMember, now_ns: int) -> EngineStatus:
    description = record.description
    return EngineStatus(
        engine_id=record.spec.engine_id,
        pool=record.pool,
        model=record.spec.model,
        kind=description.kind if description else "",
        state=record.state,
        reason=record.reason,
        ranks=tuple(_rank_status(state, record, rank_id, now_ns) for rank_id in record.rank_ids()),
    )


def _rank_status(
    state: ControllerState, record: EngineMember, rank_id: RankId, now_ns: int
) -> RankStatus:
    router = state.pools[record.pool].router
    rank = router.index_of(rank_id)
    report = state.last_reports.get(rank_id)
    num_running = num_kv_tokens = 0
    capacity: int | None = None
    age_ns: int | None = None
    time_factor = 1.0
    if rank is not None:
        load = router.load_of(rank)
        num_running = load.num_own_running + load.num_other_running
        num_kv_tokens = load.num_own_kv_tokens + load.num_other_kv_tokens
        if load.kv_capacity_tokens != UNKNOWN_CAPACITY:
            capacity = load.kv_capacity_tokens
        age_ns = router.report_age_ns(rank, now_ns)
        time_factor = router.time_factor(rank)
    return RankStatus(
        dp_rank=rank_id.dp_rank,
        state=record.rank_state(rank_id.dp_rank),
        num_running=num_running,
        num_waiting=report.num_waiting if report else 0,
        num_kv_tokens=num_kv_tokens,
        kv_capacity_tokens=capacity,
        step_ns=report.step_ns if report else 0,
        report_age_ns=age_ns,
        num_dispatched=state.counts.dispatched.get(rank_id, 0),
        time_factor=time_factor,
    )
