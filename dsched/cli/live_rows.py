"""The rows of `dsched top`: engines or DP ranks, filtered and sorted. Arrays, for there may be
thousands.

A row keeps its place among equals, whatever it is sorted by: ties end in the position that the
snapshot gives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from dsched.frontdoor.live import STATES, LiveSnapshot


class RowMode(StrEnum):
    """What a row is."""

    ENGINES = "engines"
    RANKS = "ranks"


class SortKey(StrEnum):
    """What rows are sorted by."""

    NAME = "name"
    STATE = "state"
    RUNNING = "running"
    WAITING = "waiting"
    KV = "kv"
    STEP = "step"
    DISPATCHED = "dispatched"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTable:
    """All rows as columns [N]."""

    mode: RowMode
    name: list[str]
    pool: list[str]
    state: NDArray[np.int64]
    reason: list[str]
    num_ranks: NDArray[np.int64]
    running: NDArray[np.int64]
    waiting: NDArray[np.int64]
    kv_tokens: NDArray[np.int64]
    kv_share: NDArray[np.float64]
    """KV tokens in use over capacity; NaN where the capacity is not known."""
    step_us: NDArray[np.int64]
    dispatched: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.name)


def make_rows(snapshot: LiveSnapshot, mode: RowMode) -> RowTable:
    """Turn a snapshot into rows. O(ranks)."""
    ranks, engines = snapshot.ranks, snapshot.engines
    engine = np.array(ranks.engine, np.int64)
    running = np.array(ranks.running, np.int64)
    waiting = np.array(ranks.waiting, np.int64)
    tokens = np.array(ranks.kv_tokens, np.int64)
    capacity = np.array([each or 0 for each in ranks.kv_capacity], np.int64)
    step = np.array(ranks.step_us, np.int64)
    dispatched = np.array(ranks.dispatched, np.int64)
    pools = [snapshot.pools[index].name for index in engines.pool]
    if mode is RowMode.RANKS:
        return RowTable(
            mode=mode,
            name=[
                f"{engines.engine_id[e]}/{rank}"
                for e, rank in zip(ranks.engine, ranks.dp_rank, strict=True)
            ],
            pool=[pools[e] for e in ranks.engine],
            state=np.array(ranks.state, np.int64),
            reason=[engines.reason[e] for e in ranks.engine],
            num_ranks=np.ones(len(engine), np.int64),
            running=running,
            waiting=waiting,
            kv_tokens=tokens,
            kv_share=_share(tokens, capacity),
            step_us=step,
            dispatched=dispatched,
        )
    size = len(engines.engine_id)
    longest = np.zeros(size, np.int64)
    np.maximum.at(longest, engine, step)
    kv_tokens = _sum_by(engine, tokens, size)
    return RowTable(
        mode=mode,
        name=list(engines.engine_id),
        pool=pools,
        state=np.array(engines.state, np.int64),
        reason=list(engines.reason),
        num_ranks=np.bincount(engine, minlength=size).astype(np.int64),
        running=_sum_by(engine, running, size),
        waiting=_sum_by(engine, waiting, size),
        kv_tokens=kv_tokens,
        kv_share=_share(kv_tokens, _sum_by(engine, capacity, size)),
        step_us=longest,
        dispatched=_sum_by(engine, dispatched, size),
    )


def _sum_by(group: NDArray[np.int64], values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    total = np.zeros(size, np.int64)
    np.add.at(total, group, values)
    return total


def _share(tokens: NDArray[np.int64], capacity: NDArray[np.int64]) -> NDArray[np.float64]:
    share = np.full(len(tokens), np.nan)
    np.divide(tokens, capacity, out=share, where=capacity > 0)
    return share


def order_rows(
    table: RowTable, *, key: SortKey, is_reversed: bool = False, words: Sequence[str] = ()
) -> NDArray[np.int64]:
    """Positions of the rows that have all `words` in name, state or pool, in order.

    Numbers come largest first and names smallest first; `is_reversed` turns that round.
    """
    chosen = np.arange(len(table))
    if words:
        wanted = [word.lower() for word in words]
        chosen = np.array(
            [
                index
                for index in range(len(table))
                if all(word in row_text(table, index) for word in wanted)
            ],
            np.int64,
        )
    if key is SortKey.NAME:
        return chosen[::-1] if is_reversed else chosen
    values = _sort_values(table, key)[chosen]
    return chosen[np.argsort(values if is_reversed else -values, kind="stable")]


def row_text(table: RowTable, index: int) -> str:
    """What a filter looks at."""
    return f"{table.name[index]} {STATES[table.state[index]]} {table.pool[index]}".lower()


def _sort_values(table: RowTable, key: SortKey) -> NDArray[np.float64]:
    columns: dict[SortKey, NDArray[np.int64] | NDArray[np.float64]] = {
        SortKey.STATE: table.state,
        SortKey.RUNNING: table.running,
        SortKey.WAITING: table.waiting,
        SortKey.KV: np.nan_to_num(table.kv_share, nan=-1.0),
        SortKey.STEP: table.step_us,
        SortKey.DISPATCHED: table.dispatched,
    }
    return columns[key].astype(np.float64)
