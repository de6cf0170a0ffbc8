"""Expert placement for an engine's own rebalancing: arrays in, arrays out.

The engines differ in names and tensor types; what lies between is here. An engine's slots are never
empty, so a slot that dsched leaves empty (more slots than a rank has experts to hold) gets a second
copy of an expert of its rank, which changes nothing.

Every rank of the EP group plans for itself, from counts that were summed over all ranks, and gets
the same bytes. numba is imported with the first plan, not with this module: vLLM's CPU worker
cannot be made in a process that has it.
"""

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsched.config import EplbSettings
from dsched.drivers.expert_report import ExpertReporter


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


def report_plan(
    reporter: ExpertReporter | None,
    load: NDArray[Any],
    slots: NDArray[np.int64],
    *,
    num_ranks: int,
    num_steps: int = 0,
    log: logging.Logger,
) -> None:
    """Let the first rank of the EP group show dsched the load that was planned from.

    Profiling without load is nothing to see. Never raises: the plan counts, not its picture.
    """
    try:
        if reporter is None or not reporter.is_on or not load.any() or not _is_first_rank():
            return
        balance = plan_balance(load, slots, num_ranks=num_ranks)
        reporter.send(load, num_steps=num_steps, balance=balance)
    except Exception as error:  # the door
        log.warning("eplb.unreported reason=%r", error)


def _is_first_rank() -> bool:
    import torch

    distributed = torch.distributed
    is_alone = not distributed.is_available() or not distributed.is_initialized()
    return is_alone or distributed.get_rank() == 0


def plan_balance(
    load: NDArray[Any], slots: NDArray[np.int64], *, num_ranks: int
) -> NDArray[np.float64]:
    """Return [L] mean EP-rank load over the largest, a copy taking an equal part of its expert.

    A layer without load is even. No expert of `slots` may be negative.

    >>> plan_balance(np.array([[4, 2]]), np.array([[0, 1, 0, 0]]), num_ranks=2)
    array([0.9])
    """
    per_layer = []
    for row, experts in zip(np.asarray(load, np.float64), slots, strict=True):
        copies = np.bincount(experts, minlength=len(row))
        of_slot = row[experts] / copies[experts]
        of_rank = of_slot.reshape(num_ranks, -1).sum(axis=1)
        largest = of_rank.max(initial=0.0)
        per_layer.append(min(1.0, of_rank.mean() / largest) if largest > 0 else 1.0)
    return np.array(per_layer)


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
