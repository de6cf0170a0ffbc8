"""Builds the view of every router again, record by record.

`TraceViews.apply(record)` brings the routers of a trace to what they were when the record's
decision was made. Decisions are then asked of `router(pool)`, which is a real `DecodeRouter`.
Records of a pool before its first keyframe are passed over: nothing can be said about them.
"""

import numpy as np

from dsched.errors import TraceError
from dsched.ids import DpRank, EngineId, RankId
from dsched.routing import DecodeRouter, RoutingRequest
from dsched.routing import kernels as k
from dsched.routing.holding import HeldRequest
from dsched.routing.prefill import PrefillView
from dsched.routing.snapshot import (
    NUM_PRICES,
    RouterSettings,
    RouterSnapshot,
    add_cells,
    restore_router,
    set_ranks,
)
from dsched.trace.records import (
    Dropped,
    Held,
    Keyframe,
    Picked,
    PrefillChosen,
    Ranks,
    Record,
    Released,
)


class TraceViews:
    """State of all routers at one place of a trace."""

    def __init__(self) -> None:
        self._routers: dict[str, DecodeRouter] = {}

    def router(self, pool: str) -> DecodeRouter | None:
        """The pool's router as of the last applied record; `None` before its first keyframe."""
        return self._routers.get(pool)

    def apply(self, record: Record) -> None:
        """Take in one record; those that change no view are ignored.

        Raises:
            TraceError: the record does not fit the ones before it.
        """
        try:
            self._apply(record)
        except ValueError as error:
            raise TraceError(f"the trace contradicts itself: {error}") from error

    def _apply(self, record: Record) -> None:
        if isinstance(record, Keyframe):
            self._routers[record.pool] = restore_router(snapshot_of(record))
            return
        if not isinstance(record, Ranks | Picked | Released | Held | Dropped):
            return
        router = self._routers.get(record.pool)
        if router is None:
            return
        if isinstance(record, Picked | Released):
            cells = np.frombuffer(record.cells, np.int64).reshape(-1, 2)
            add_cells(
                router,
                cells,
                tie_offset=record.tie_offset,
                longest_tokens=record.longest_tokens,
            )
        elif isinstance(record, Ranks):
            set_ranks(router, _rank_ids(record.rank_ids))
        elif isinstance(record, Held):
            if record.is_accepted:
                router.hold(held_request(record), record.request_id, record.time_ns)
        else:
            router.drop_held(record.request_id, is_served=record.is_served)


def held_request(record: Held) -> RoutingRequest:
    """What the router was asked to hold."""
    return RoutingRequest(
        num_prompt_tokens=record.num_tokens,
        num_reserved_tokens=record.num_wanted_tokens - record.num_tokens,
        tenant=record.tenant,
        pinned_dp_rank=record.pinned_dp_rank,
        excluded_ranks=record.excluded_ranks,
        priority=record.priority,
    )


def picked_request(record: Picked) -> RoutingRequest:
    """What the router was asked to place."""
    return RoutingRequest(
        num_prompt_tokens=record.num_tokens,
        num_reserved_tokens=record.num_reserved_tokens,
        pinned_dp_rank=record.pinned_dp_rank,
        excluded_ranks=record.excluded_ranks,
    )


def prefill_view(record: PrefillChosen) -> PrefillView:
    """What a prefill worker was chosen from. Raises `TraceError` for arrays that do not fit."""
    count = len(record.workers)
    values = np.frombuffer(record.arrays, np.int64)
    if values.size != 4 * count:
        raise TraceError(f"the trace contradicts itself: {values.size} numbers of {count} workers")
    states, worker_bucket, backlog_ns, work_ns = values.reshape(4, count)
    return PrefillView(
        states=states,
        worker_bucket=worker_bucket,
        backlog_ns=backlog_ns,
        work_ns=work_ns,
        bucket=record.bucket,
        tie_offset=record.tie_offset,
        spill_ratio=record.spill_ratio,
        spill_ns=record.spill_ns,
    )


def snapshot_of(record: Keyframe) -> RouterSnapshot:
    """The values of a keyframe. Raises `ValueError` for arrays that do not fit its ranks."""
    count = len(record.rank_ids)
    router_index, num_routers, is_synchronised, gather_ns, max_held, max_hold_ns = record.settings
    return RouterSnapshot(
        settings=RouterSettings(
            router_index=router_index,
            num_routers=num_routers,
            is_synchronised=is_synchronised,
            gather_ns=gather_ns,
            max_held_requests=max_held,
            max_hold_ns=max_hold_ns,
        ),
        rank_ids=_rank_ids(record.rank_ids),
        table=np.frombuffer(record.table, np.int64).reshape(k.NUM_ROWS, count),
        prices=np.frombuffer(record.prices, np.float64).reshape(NUM_PRICES, count),
        tie_offset=record.tie_offset,
        held=tuple(
            HeldRequest(
                request_key=key,
                num_prompt_tokens=num_tokens,
                num_wanted_tokens=num_wanted,
                tenant=tenant,
                pinned_dp_rank=pin,
                excluded_ranks=excluded,
                held_ns=held_ns,
                number=number,
                priority=priority,
            )
            for (
                key,
                num_tokens,
                num_wanted,
                tenant,
                pin,
                excluded,
                held_ns,
                number,
                priority,
            ) in record.held
        ),
        served_tokens=record.served_tokens,
        next_number=record.next_number,
        hears_peers=record.hears_peers,
    )


def _rank_ids(pairs: tuple[tuple[str, int], ...]) -> tuple[RankId, ...]:
    return tuple(RankId(EngineId(engine_id), DpRank(dp_rank)) for engine_id, dp_rank in pairs)
