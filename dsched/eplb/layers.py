"""Plan all layers of one call: which are left alone, improved, settled or planned afresh.

`plan_placement` reads and checks its arguments; here the compiled parts are put together. Each
layer ends in one of four ways (`Outcome`). The last two are for layers that cheap steps cannot
bring below the trigger, and for those only if `max_moves` allows it.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from dsched.eplb.fresh import plan_fresh, settle_layers
from dsched.eplb.relabel import finish_layers, match_layers
from dsched.eplb.warm import PAIR_LIMIT, UNLIMITED, improve_layers
from dsched.jit import kernel

REBATES = (2,)
"""Rebates (see `count_copies`) tried for a fresh layer until one is good enough. 0 is the published
greedy; with few slots a rank it leaves middle-sized experts that no packing can pair. 2 mends that
at no cost (384 slots on 128 ranks: balance .993 instead of .990, worst layer .974 instead of .960);
4, then 2, then 0 reaches .996 and .981 in twice the time (benchmarks/eplb.py)."""
MIN_MOVES_LEFT = 3
"""Moves that a stuck layer must have left to be settled or planned afresh. Cheap steps end for
want of moves only with fewer left: an exchange is two moves."""


class Outcome(IntEnum):
    """What became of a layer."""

    KEPT = 0
    """Nothing moved."""
    IMPROVED = 1
    """A few moves from the placement in use."""
    SETTLED = 2
    """Cheap steps were not enough; exchanged until nothing improved."""
    FRESH = 3
    """Planned from nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupShape:
    """The EP group that a plan is for, checked."""

    num_experts: int
    num_slots: int
    rank_up: NDArray[np.bool_]
    """[G]"""
    node_of: NDArray[np.int64]
    """[G]"""

    @property
    def num_ranks(self) -> int:
        return len(self.rank_up)

    @property
    def width(self) -> int:
        """Slots of one rank."""
        return self.num_slots // self.num_ranks

    @property
    def num_live(self) -> int:
        return int(self.rank_up.sum())

    @property
    def num_nodes(self) -> int:
        return int(self.node_of[-1]) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """When layers are touched and when they are good enough; loads over the mean, less one."""

    trigger: float
    stop: float
    fresh_stop: float
    max_rounds: int
    """-1: no search."""
    near_price: int
    far_price: int
    spread: int
    """1: copies of an expert that has several are on at least two nodes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerResults:
    """What becomes of each layer. Written while planning, then frozen into a plan."""

    slots: NDArray[np.int32]
    """[L, P], E in empty slots."""
    heaviest: NDArray[np.int64]
    """[L] heaviest rank load."""
    heaviest_before: NDArray[np.int64]
    num_moves: NDArray[np.int64]
    num_far_moves: NDArray[np.int64]
    num_covered: NDArray[np.int64]
    outcome: NDArray[np.int64]
    trail: NDArray[np.int64]
    """[L, S, 2] moves and heaviest rank load after each step of the search, zero where it ended."""

    @staticmethod
    def of(slots: NDArray[np.int32], trail_steps: int) -> "LayerResults":
        num_layers = len(slots)
        return LayerResults(
            slots=slots,
            heaviest=np.zeros(num_layers, np.int64),
            heaviest_before=np.zeros(num_layers, np.int64),
            num_moves=np.zeros(num_layers, np.int64),
            num_far_moves=np.zeros(num_layers, np.int64),
            num_covered=np.zeros(num_layers, np.int64),
            outcome=np.full(num_layers, Outcome.KEPT, np.int64),
            trail=np.zeros((num_layers, trail_steps, 2), np.int64),
        )


@kernel
def survey_layers(
    weight: NDArray[np.int64],
    slots: NDArray[np.int32],
    num_ranks: int,
    heaviest: NDArray[np.int64],
    is_missing: NDArray[np.bool_],
) -> None:
    """Write the heaviest rank load of each layer, and whether an expert has no copy."""
    num_layers, num_experts = weight.shape
    width = slots.shape[1] // num_ranks
    num_copies = np.empty(num_experts + 1, np.int64)
    for layer in range(num_layers):
        num_copies[:] = 0
        for expert in slots[layer]:
            num_copies[expert] += 1
        top = np.int64(0)
        for start in range(0, slots.shape[1], width):
            load = np.int64(0)
            for slot in range(start, start + width):
                expert = slots[layer, slot]
                if expert != num_experts:
                    copies = num_copies[expert]
                    load += (
                        weight[layer, expert] if copies == 1 else (weight[layer, expert] // copies)
                    )
            top = max(top, load)
        heaviest[layer] = top
        is_missing[layer] = (num_copies[:num_experts] == 0).any()


def mean_loads(weight: NDArray[np.int64], num_live: int) -> NDArray[np.int64]:
    """Total over live ranks of each layer, rounded up."""
    means: NDArray[np.int64] = -(-weight.sum(axis=1) // num_live)
    return means


def limits_above(means: NDArray[np.int64], excess: float) -> NDArray[np.int64]:
    """Rank loads that are `excess` above the means, as `warm.limit_above`."""
    return means + (means.astype(np.float64) * excess).astype(np.int64)


def start_layers(
    weight: NDArray[np.int64], shape: GroupShape, limits: SearchLimits
) -> NDArray[np.int32]:
    """Plan layers from nothing, [L, P]. A layer without load counts as evenly loaded."""
    num_experts = shape.num_experts
    silent: NDArray[np.bool_] = weight.max(axis=1) == 0
    if silent.any():
        weight = np.where(silent[:, None], np.int64(1 << 30), weight)
    keys = np.sort(weight * num_experts + np.arange(num_experts - 1, -1, -1), axis=1)
    by_load = num_experts - 1 - keys[:, ::-1] % num_experts
    slots = np.empty((len(weight), shape.num_slots), np.int32)
    plan_fresh(
        weight,
        by_load,
        shape.rank_up,
        shape.node_of,
        limits.spread,
        limits.fresh_stop,
        limits.max_rounds,
        np.array(REBATES, np.int64),
        slots,
    )
    if limits.max_rounds >= 0 and shape.num_slots * (num_experts + 1) <= PAIR_LIMIT:
        improve_all(weight, slots.copy(), shape, limits, slots)
    return slots


def improve_all(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    shape: GroupShape,
    limits: SearchLimits,
    slots: NDArray[np.int32],
) -> None:
    """Search small fresh layers two steps deep, into `slots`."""
    num_layers = len(weight)
    improve_layers(
        weight,
        current,
        np.arange(num_layers),
        shape.rank_up,
        shape.node_of,
        limits.spread,
        limits.fresh_stop,
        1,
        1,
        np.full(num_layers, UNLIMITED, np.int64),
        slots,
        np.empty(num_layers, np.int64),
        np.empty((num_layers, 0, 2), np.int64),
    )


def plan_first(weight: NDArray[np.int64], shape: GroupShape, limits: SearchLimits) -> LayerResults:
    """Plan every layer without a placement in use."""
    results = LayerResults.of(start_layers(weight, shape, limits), 0)
    missing = np.empty(len(weight), np.bool_)
    survey_layers(weight, results.slots, shape.num_ranks, results.heaviest, missing)
    results.outcome[:] = Outcome.FRESH
    return results


def plan_next(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    shape: GroupShape,
    limits: SearchLimits,
    max_moves: NDArray[np.int64],
    trail_steps: int,
) -> LayerResults:
    """Plan from `current` [L, P], with E in empty slots; `max_moves` [L] each layer may make."""
    results = LayerResults.of(current.copy(), trail_steps)
    missing = np.empty(len(weight), np.bool_)
    survey_layers(weight, current, shape.num_ranks, results.heaviest_before, missing)
    results.heaviest[:] = results.heaviest_before
    means = mean_loads(weight, shape.num_live)
    triggers = limits_above(means, limits.trigger)
    layers = np.flatnonzero((results.heaviest_before > triggers) | missing)
    if not layers.size:
        return results
    improve_layers(
        weight,
        current,
        layers,
        shape.rank_up,
        shape.node_of,
        limits.spread,
        limits.stop,
        limits.near_price,
        limits.far_price,
        max_moves,
        results.slots,
        results.num_covered,
        results.trail,
    )
    survey_layers(weight, results.slots, shape.num_ranks, results.heaviest, missing)
    count_and_order(current, layers, shape, results)
    results.outcome[layers] = Outcome.IMPROVED
    # A layer that ran out of moves is not stuck: what follows needs far more.
    is_stuck = (results.heaviest > triggers) & (results.num_moves + MIN_MOVES_LEFT < max_moves)
    stuck = layers[is_stuck[layers]]
    if limits.max_rounds >= 0 and stuck.size:
        unstick(weight, current, stuck, shape, limits, max_moves, results)
    still = layers[results.num_moves[layers] == 0]
    results.slots[still] = current[still]
    results.outcome[still] = Outcome.KEPT
    results.heaviest[still] = results.heaviest_before[still]
    return results


def count_and_order(
    current: NDArray[np.int32],
    layers: NDArray[np.int64],
    shape: GroupShape,
    results: LayerResults,
) -> None:
    finish_layers(
        results.slots,
        current,
        layers,
        shape.num_experts,
        shape.width,
        shape.node_of,
        results.num_moves,
        results.num_far_moves,
    )


def unstick(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    stuck: NDArray[np.int64],
    shape: GroupShape,
    limits: SearchLimits,
    max_moves: NDArray[np.int64],
    results: LayerResults,
) -> None:
    """Settle the layers that cheap steps left above the trigger; plan afresh those still there."""
    triggers = limits_above(mean_loads(weight, shape.num_live), limits.trigger)
    slots = results.slots[stuck]
    settle_layers(
        weight[stuck],
        shape.rank_up,
        shape.node_of,
        limits.spread,
        limits.stop,
        limits.max_rounds,
        slots,
    )
    take_better(weight, current, stuck, slots, Outcome.SETTLED, shape, limits, max_moves, results)
    stuck = stuck[(results.heaviest > triggers)[stuck]]
    if not stuck.size:
        return
    slots = start_layers(weight[stuck], shape, limits)
    match_layers(
        slots,
        current[stuck],
        shape.num_experts,
        shape.rank_up,
        shape.node_of,
        limits.spread,
        limits.near_price,
        limits.far_price,
    )
    take_better(weight, current, stuck, slots, Outcome.FRESH, shape, limits, max_moves, results)


def take_better(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    layers: NDArray[np.int64],
    slots: NDArray[np.int32],
    outcome: Outcome,
    shape: GroupShape,
    limits: SearchLimits,
    max_moves: NDArray[np.int64],
    results: LayerResults,
) -> None:
    """Take `slots` [len(layers), P] for the layers where that is allowed and brings load down.

    The heaviest rank must fall by what the stop allows above the mean, or many moves would be made
    for nothing.
    """
    offer = LayerResults.of(slots, 0)
    missing = np.empty(len(layers), np.bool_)
    survey_layers(weight[layers], slots, shape.num_ranks, offer.heaviest, missing)
    count_and_order(current[layers], np.arange(len(layers)), shape, offer)
    means = mean_loads(weight[layers], shape.num_live)
    margin = limits_above(means, limits.trigger) - limits_above(means, limits.stop)
    is_taken = (offer.heaviest + margin < results.heaviest[layers]) & (
        offer.num_moves <= max_moves[layers]
    )
    taken = layers[is_taken]
    results.slots[taken] = slots[is_taken]
    results.heaviest[taken] = offer.heaviest[is_taken]
    results.num_moves[taken] = offer.num_moves[is_taken]
    results.num_far_moves[taken] = offer.num_far_moves[is_taken]
    results.outcome[taken] = outcome
