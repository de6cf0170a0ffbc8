"""Expert placement for an engine's own rebalancing: arrays in, arrays out.

The engines differ in names and tensor types; what lies between is here. An engine's slots are never
empty, so a slot that dsched leaves empty (more slots than a rank has experts to hold) gets a second
copy of an expert of its rank, which changes nothing.

Every rank of the EP group plans for itself, from counts that were summed over all ranks, and gets
the same bytes. numba is imported with the first plan, not with this module: vLLM's CPU worker
cannot be made in a process that has it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsched.config import EplbSettings


def plan_slots(
    load: NDArray[Any],
    *,
    num_slots: int,
    num_ranks: int,
    num_nodes: int,
    num_groups: int | None,
    current: NDArray[Any] | None,
    settings: EplbSettings,
    rank_up: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Return the logical expert of every slot, [L, P].

    `current` of another shape (the EP group has grown or shrunk) is not started from; negative
    entries count as empty. Raises what `plan_placement` raises.
    """
    from dsched.eplb import PlacementOptions, plan_placement

    if current is not None and current.shape != (len(load), num_slots):
        current = None
    if current is not None:
        current = np.maximum(current.astype(np.int64), -1)
    keeps_groups = settings.keep_groups and num_groups is not None and num_groups % num_nodes == 0
    plan = plan_placement(
        load,
        num_slots=num_slots,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        current=current,
        max_moves=settings.max_moves,
        rank_up=rank_up,
        options=PlacementOptions(
            trigger=settings.trigger,
            stop=settings.stop,
            num_groups=num_groups if keeps_groups else None,
        ),
    )
    return fill_empty(plan.placement.slot_expert.astype(np.int64), num_ranks, current)


def fill_empty(
    slots: NDArray[np.int64], num_ranks: int, current: NDArray[np.int64] | None
) -> NDArray[np.int64]:
    """Put the expert that was there, or one of the same rank, into empty slots."""
    if (slots >= 0).all():
        return slots
    filled = slots.copy()
    if current is not None:
        filled = np.where(filled < 0, current, filled)
    by_rank = filled.reshape(len(slots), num_ranks, -1)
    any_of_rank = by_rank.max(axis=2, keepdims=True)
    return np.where(by_rank < 0, any_of_rank, by_rank).reshape(slots.shape)
