"""Plan all layers of one call: the compiled loop behind `plan_placement`.

Each layer ends in one of four ways (`Outcome`): left as it is, because nothing is over the
trigger; improved by a few moves; settled with as many moves as it takes; or planned afresh, with
ranks renamed to keep what can be kept. The last two are for layers that cheap steps cannot bring
below the trigger.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dsched.eplb.fresh import place_fresh
from dsched.eplb.relabel import keep_positions, match_ranks
from dsched.eplb.search import Holding, settle
from dsched.eplb.state import LayerState, clear, fill, new_state
from dsched.eplb.warm import (
    cover,
    fill_spare_slots,
    improve,
    is_better,
    is_small,
    set_holding,
)


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


KEPT, IMPROVED, SETTLED, FRESH = (int(outcome) for outcome in Outcome)


class Goals(NamedTuple):
    """When to start, and when to stop, as heaviest over mean rank load, less one."""

    trigger: float
    stop: float
    fresh: float
    max_rounds: int
    """Overwritings and full passes of the search of a fresh plan; -1: no search at all."""


class Scratch(NamedTuple):
    """Arrays that the steps of one layer share."""

    heap: NDArray[np.int32]
    keys: NDArray[np.int64]
    by_load: NDArray[np.int32]
    by_share: NDArray[np.int32]
    rank_heap: NDArray[np.int32]
    used: NDArray[np.int32]
    chosen: NDArray[np.int32]
    scanned: NDArray[np.int64]
    changed: NDArray[np.int64]
    slots: NDArray[np.int32]
    spare_slots: NDArray[np.int32]
    num_copies: NDArray[np.int32]
    rank_load: NDArray[np.int64]


class Results(NamedTuple):
    """What is written for each layer."""

    slot_expert: NDArray[np.int32]
    """[L, P]; E in empty slots."""
    num_moves: NDArray[np.int64]
    num_far_moves: NDArray[np.int64]
    num_covered: NDArray[np.int64]
    """Moves that brought an expert back that had no live copy."""
    outcome: NDArray[np.int64]
    heaviest_before: NDArray[np.int64]
    """Heaviest rank load of the placement in use; 0 without one."""
    heaviest: NDArray[np.int64]


@njit(cache=True, nogil=True)
def new_scratch(num_experts: int, num_ranks: int, num_slots: int) -> Scratch:
    return Scratch(
        np.empty(num_experts, np.int32),
        np.empty(num_experts, np.int64),
        np.empty(num_experts, np.int32),
        np.empty(num_experts, np.int32),
        np.empty(num_ranks + 1, np.int32),
        np.empty(num_ranks, np.int32),
        np.empty(num_ranks + 1, np.int32),
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_slots, np.int32),
        np.empty(num_slots, np.int32),
        np.empty(num_experts + 1, np.int32),
        np.empty(num_ranks, np.int64),
    )


@njit(cache=True, nogil=True)
def limit_above(mean: int, excess: float) -> int:
    """Rank load that is `excess` above the mean. Rounded down, so 0 means the mean itself."""
    return mean + np.int64(float(mean) * excess)


@njit(cache=True, nogil=True)
def mean_load(weight: NDArray[np.int64], num_live: int) -> int:
    """Total over live ranks, rounded up: no placement is lighter."""
    total = np.int64(0)
    for value in weight:
        total += value
    return -(-total // num_live)


@njit(cache=True, nogil=True)
def sort_experts(weight: NDArray[np.int64], scratch: Scratch) -> None:
    """Write the experts by falling load, then rising number, to `by_load`."""
    num_experts = len(weight)
    for expert in range(num_experts):
        scratch.keys[expert] = weight[expert] * num_experts + (num_experts - 1 - expert)
    scratch.keys.sort()
    for index in range(num_experts):
        key = scratch.keys[num_experts - 1 - index]
        scratch.by_load[index] = num_experts - 1 - key % num_experts


@njit(cache=True, nogil=True)
def plan_fresh_layer(
    state: LayerState,
    scratch: Scratch,
    weight: NDArray[np.int64],
    width: int,
    goals: Goals,
    holding: Holding,
) -> int:
    """Plan one layer from nothing into the state. Returns the heaviest rank load."""
    clear(state, weight)
    place_fresh(
        state,
        width,
        scratch.by_load,
        scratch.heap,
        scratch.keys,
        scratch.by_share,
        scratch.rank_heap,
        scratch.used,
        scratch.chosen,
    )
    last = len(state.order) - 1
    if goals.max_rounds >= 0:
        mean = mean_load(weight, len(state.order))
        goal = limit_above(mean, goals.fresh)
        settle(
            state, width, goal, mean, holding, goals.max_rounds, scratch.scanned, scratch.changed
        )
        if state.rank_load[state.order[last]] > goal and is_small(state):
            improve(state, width, goal, mean, holding, 0, np.int64(1) << 40, scratch.slots)
            clear(state, weight)
            fill(state, scratch.slots)
    return state.rank_load[state.order[last]]


@njit(cache=True, nogil=True)
def plan_fresh(
    weight: NDArray[np.int64],
    by_load: NDArray[np.int32],
    rank_up: NDArray[np.bool_],
    node_of: NDArray[np.int32],
    width: int,
    spread: bool,
    goals: Goals,
    results: Results,
) -> None:
    """Plan every layer from nothing. `by_load` has the experts of each layer by falling load."""
    num_layers, num_experts = weight.shape
    state = new_state(num_experts, rank_up, node_of, width, spread)
    scratch = new_scratch(num_experts, len(rank_up), len(state.slot))
    holding = empty_holding(num_experts, len(rank_up), int(node_of.max()) + 1, 1, 1)
    for layer in range(num_layers):
        scratch.by_load[:] = by_load[layer]
        results.heaviest[layer] = plan_fresh_layer(
            state, scratch, weight[layer], width, goals, holding
        )
        results.slot_expert[layer] = state.slot
        results.outcome[layer] = FRESH


@njit(cache=True, nogil=True)
def empty_holding(
    num_experts: int, num_ranks: int, num_nodes: int, near_price: int, far_price: int
) -> Holding:
    """Nothing is anywhere yet."""
    return Holding(
        np.zeros((num_experts + 1, num_ranks), np.int8),
        np.zeros((num_experts + 1, num_nodes), np.int8),
        near_price,
        far_price,
    )


@njit(cache=True, nogil=True)
def heaviest_of(
    state: LayerState, scratch: Scratch, weight: NDArray[np.int64], slots: NDArray[np.int32]
) -> tuple[int, bool]:
    """Return the heaviest rank load of a row of slots, and whether an expert has no copy."""
    num_experts = len(weight)
    scratch.num_copies[:] = 0
    for expert in slots:
        scratch.num_copies[expert] += 1
    scratch.rank_load[:] = 0
    width = len(slots) // len(scratch.rank_load)
    for rank in range(len(scratch.rank_load)):
        load = np.int64(0)
        for slot in range(rank * width, (rank + 1) * width):
            expert = slots[slot]
            if expert != num_experts:
                copies = scratch.num_copies[expert]
                load += weight[expert] if copies == 1 else weight[expert] // copies
        scratch.rank_load[rank] = load
    is_missing = False
    for expert in range(num_experts):
        is_missing = is_missing or scratch.num_copies[expert] == 0
    return scratch.rank_load.max(), is_missing


@njit(cache=True, nogil=True)
def plan_from_current(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    rank_up: NDArray[np.bool_],
    node_of: NDArray[np.int32],
    width: int,
    spread: bool,
    goals: Goals,
    prices: tuple[int, int],
    max_moves: NDArray[np.int64],
    results: Results,
) -> None:
    """Improve every layer of `current`, which has E in slots of ranks that are down."""
    num_layers, num_experts = weight.shape
    state = new_state(num_experts, rank_up, node_of, width, spread)
    scratch = new_scratch(num_experts, len(rank_up), len(state.slot))
    holding = empty_holding(num_experts, len(rank_up), int(node_of.max()) + 1, prices[0], prices[1])
    for layer in range(num_layers):
        mean = mean_load(weight[layer], len(state.order))
        heaviest, is_missing = heaviest_of(state, scratch, weight[layer], current[layer])
        results.heaviest_before[layer] = heaviest
        results.heaviest[layer] = heaviest
        results.slot_expert[layer] = current[layer]
        if heaviest <= limit_above(mean, goals.trigger) and not is_missing:
            continue
        improve_layer(
            state,
            scratch,
            weight[layer],
            current[layer],
            width,
            goals,
            holding,
            max_moves[layer],
            layer,
            results,
        )


@njit(cache=True, nogil=True)
def drop_doubles(
    current: NDArray[np.int32], slots: NDArray[np.int32], width: int, num_experts: int
) -> None:
    """Copy `current`, emptying slots whose expert the rank holds in an earlier slot."""
    for slot in range(len(current)):
        slots[slot] = current[slot]
        for other in range(slot // width * width, slot):
            if current[other] == current[slot]:
                slots[slot] = num_experts


@njit(cache=True, nogil=True)
def improve_layer(
    state: LayerState,
    scratch: Scratch,
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    width: int,
    goals: Goals,
    holding: Holding,
    max_moves: int,
    layer: int,
    results: Results,
) -> None:
    """Plan one layer that needs a change."""
    num_experts = len(weight)
    mean = mean_load(weight, len(state.order))
    goal = limit_above(mean, goals.stop)
    out = results.slot_expert[layer]
    clear(state, weight)
    drop_doubles(current, scratch.slots, width, num_experts)
    fill(state, scratch.slots)
    set_holding(holding, scratch.slots, state)
    num_covered = cover(state, holding, goal, mean)
    results.num_covered[layer] = num_covered
    last = len(state.order) - 1
    num_moves = improve(state, width, goal, mean, holding, num_covered, max_moves, out)
    heaviest, _ = heaviest_of(state, scratch, weight, out)
    results.outcome[layer] = IMPROVED
    if heaviest > limit_above(mean, goals.trigger) and mean > 0:
        clear(state, weight)
        fill(state, out)
        settle(
            state, width, goal, mean, holding, goals.max_rounds, scratch.scanned, scratch.changed
        )
        scratch.slots[:] = state.slot
        if take_if_better(
            state, scratch, weight, holding, goal, heaviest, num_moves, max_moves, out
        ):
            results.outcome[layer] = SETTLED
            heaviest = state.rank_load[state.order[last]]
            num_moves, _ = count_moves(state, holding, out)
    if heaviest > limit_above(mean, goals.trigger) and mean > 0:
        sort_experts(weight, scratch)
        plan_fresh_layer(state, scratch, weight, width, goals, holding)
        scratch.slots[:] = state.slot
        match_ranks(state, scratch.slots, width, holding)
        if take_if_better(
            state, scratch, weight, holding, goal, heaviest, num_moves, max_moves, out
        ):
            results.outcome[layer] = FRESH
            num_moves, _ = count_moves(state, holding, out)
    clear(state, weight)
    fill(state, out)
    fill_spare_slots(state, width, holding, goal, mean, max_moves - num_moves)
    out[:] = state.slot
    keep_positions(out, current, width, num_experts)
    num_moves, num_far = count_moves(state, holding, out)
    results.num_moves[layer] = num_moves
    results.num_far_moves[layer] = num_far
    results.heaviest[layer] = state.rank_load[state.order[last]]
    if num_moves == 0:
        out[:] = current
        results.outcome[layer] = KEPT
        results.heaviest[layer] = results.heaviest_before[layer]


@njit(cache=True, nogil=True)
def take_if_better(
    state: LayerState,
    scratch: Scratch,
    weight: NDArray[np.int64],
    holding: Holding,
    goal: int,
    heaviest: int,
    num_moves: int,
    max_moves: int,
    out: NDArray[np.int32],
) -> bool:
    """Replace `out` by `scratch.slots` if that is allowed and better."""
    moves, _ = count_moves(state, holding, scratch.slots)
    load, _ = heaviest_of(state, scratch, weight, scratch.slots)
    if moves > max_moves or not is_better(load, moves, heaviest, num_moves, goal):
        return False
    out[:] = scratch.slots
    return True


@njit(cache=True, nogil=True)
def count_moves(state: LayerState, holding: Holding, slots: NDArray[np.int32]) -> tuple[int, int]:
    """Count (rank, expert) pairs that are new to the rank, and of those new to its node."""
    num_experts = len(state.weight) - 1
    num_moves = 0
    num_far = 0
    for slot in range(len(slots)):
        expert = slots[slot]
        rank = state.rank_of[slot]
        if expert != num_experts and not holding.on_rank[expert, rank]:
            num_moves += 1
            if not holding.on_node[expert, state.node_of[rank]]:
                num_far += 1
    return num_moves, num_far
