"""Improve a placement that is in use, with few moves.

`cover` gives each expert that lost its last copy a slot again, where it does least harm. `improve`
then takes the cheapest steps until the heaviest rank is at the goal. It remembers the best state on
its way, and also looks one step aside of it, so that more allowed moves never give a worse result:
the states seen with few moves are seen with many, too.

Compiled. One step is O(K P + E c) for K slots a rank and c copies of an expert.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dsched.eplb.search import (
    Holding,
    Step,
    can_exchange,
    can_replace,
    count_change,
    find_exchange,
    find_replace,
    no_step,
    take_step,
    weigh_exchange,
    weigh_replace,
)
from dsched.eplb.state import LayerState, add_copy, replace_copy, sort_ranks, swap_copies

MAX_STEPS = 4_096
"""Steps of one layer. Never reached in practice; bounds the time if it were."""
PAIR_LIMIT = 1_024
"""Layers with at most this many slots times experts are also searched two steps deep, which costs
the square of that."""


@njit(cache=True, nogil=True)
def cover(state: LayerState, holding: Holding, goal: int, mean: int) -> int:
    """Place every expert without a copy, heaviest first. Returns the number of copies placed.

    A slot is taken from an expert that keeps another copy, or is empty; of those, the one that
    leaves the least overload for its price. Such a slot exists while slots are no fewer than
    experts.
    """
    num_experts = len(state.weight) - 1
    num_placed = 0
    while True:
        lost = -1
        for expert in range(num_experts):
            if state.num_copies[expert] == 0 and (
                lost < 0 or state.weight[expert] > state.weight[lost]
            ):
                lost = expert
        if lost < 0:
            return num_placed
        best = no_step()
        for rank in state.order:
            width = len(state.slot) // len(state.rank_load)
            for slot in range(rank * width, (rank + 1) * width):
                if can_replace(state, slot, lost):
                    step = weigh_replace(state, slot, lost, goal, mean, holding)
                    if best.slot < 0 or is_less_harm(step, best):
                        best = step
        replace_copy(state, best.slot, lost)
        num_placed += 1


@njit(cache=True, nogil=True)
def is_less_harm(step: Step, best: Step) -> bool:
    """Overload first. The price of the link decides only between equal harm."""
    if step.gain != best.gain:
        return step.gain < best.gain
    return step.heaviest < best.heaviest


@njit(cache=True, nogil=True)
def is_better(
    heaviest: int, num_moves: int, best_heaviest: int, best_moves: int, goal: int
) -> bool:
    """Order of results: less above the goal, then fewer moves, then lighter."""
    above = max(heaviest, goal)
    best_above = max(best_heaviest, goal)
    if above != best_above:
        return above < best_above
    if num_moves != best_moves:
        return num_moves < best_moves
    return heaviest < best_heaviest


@njit(cache=True, nogil=True)
def improve(
    state: LayerState,
    width: int,
    goal: int,
    mean: int,
    holding: Holding,
    num_moves: int,
    max_moves: int,
    best_slots: NDArray[np.int32],
) -> int:
    """Search from the state; write the best slots found and return their number of moves.

    `num_moves` were spent before; results have at most `max_moves`, unless they were spent.
    """
    last = len(state.order) - 1
    best_heaviest = state.rank_load[state.order[last]]
    best_moves = num_moves
    best_slots[:] = state.slot
    looks_ahead = is_small(state)
    for _ in range(MAX_STEPS):
        if state.rank_load[state.order[last]] <= goal:
            break
        step, aside = choose_step(state, width, goal, mean, holding, max_moves - num_moves)
        if aside.slot >= 0 and is_better(
            aside.heaviest, num_moves + aside.num_moves, best_heaviest, best_moves, goal
        ):
            best_heaviest = aside.heaviest
            best_moves = num_moves + aside.num_moves
            write_with(state, aside, best_slots)
        if looks_ahead and best_heaviest > goal and max_moves - num_moves >= 2:
            first, second = find_pair(state, width, goal, mean, holding, max_moves - num_moves)
            moves = num_moves + first.num_moves + second.num_moves
            if first.slot >= 0 and is_better(
                second.heaviest, moves, best_heaviest, best_moves, goal
            ):
                best_heaviest = second.heaviest
                best_moves = moves
                write_with_pair(state, first, second, best_slots)
            if step.slot < 0 and first.slot >= 0:
                take_step(state, first)
                num_moves += first.num_moves
                step = second
        if step.slot < 0 or best_heaviest <= goal or num_moves + step.num_moves > max_moves:
            break
        take_step(state, step)
        num_moves += step.num_moves
        heaviest = state.rank_load[state.order[last]]
        if is_better(heaviest, num_moves, best_heaviest, best_moves, goal):
            best_heaviest = heaviest
            best_moves = num_moves
            best_slots[:] = state.slot
    return best_moves


@njit(cache=True, nogil=True)
def is_small(state: LayerState) -> bool:
    """Whether the layer can be searched two steps deep."""
    return len(state.slot) * len(state.weight) <= PAIR_LIMIT


@njit(cache=True, nogil=True)
def choose_step(
    state: LayerState, width: int, goal: int, mean: int, holding: Holding, moves_left: int
) -> tuple[Step, Step]:
    """Return the step to take, and the single step that leaves the heaviest rank lightest.

    The heaviest rank that can be improved is served first. If overload cannot fall, a step that
    brings its rank below its present load is taken: the list of loads still gets smaller.
    """
    aside = no_step()
    for index in range(len(state.order) - 1, 0, -1):
        rank = state.order[index]
        if state.rank_load[rank] <= goal:
            break
        exchange, lightest_exchange = find_exchange(state, width, rank, goal, mean, holding)
        replace, lightest, strict = find_replace(state, width, rank, goal, mean, holding)
        if index == len(state.order) - 1:
            for step in (lightest_exchange, lightest):
                if step.num_moves <= moves_left and (
                    step.heaviest < aside.heaviest
                    or (step.heaviest == aside.heaviest and step.num_moves < aside.num_moves)
                ):
                    aside = step
        if replace.slot >= 0 and replace.score <= exchange.score:
            return replace, aside
        if exchange.slot >= 0:
            return exchange, aside
        if strict.slot >= 0:
            return strict, aside
    return no_step(), aside


@njit(cache=True, nogil=True)
def find_pair(
    state: LayerState, width: int, goal: int, mean: int, holding: Holding, moves_left: int
) -> tuple[Step, Step]:
    """Try every step followed by the best step for the then heaviest rank; for small layers.

    Returns the pair that leaves the heaviest rank lightest, if that is lighter than now.
    """
    num_experts = len(state.weight) - 1
    last = len(state.order) - 1
    best_first = no_step()
    best_second = no_step()
    best = state.rank_load[state.order[last]]
    for slot in range(len(state.slot)):
        old = state.slot[slot]
        if not is_live(state, slot):
            continue
        for expert in range(num_experts):
            if not can_replace(state, slot, expert):
                continue
            first = weigh_replace(state, slot, expert, goal, mean, holding)
            replace_copy(state, slot, expert)
            second = best_follower(state, width, goal, mean, holding, moves_left - first.num_moves)
            if second.heaviest < best:
                best = second.heaviest
                best_first = first
                best_second = second
            replace_copy(state, slot, old)
        for other_slot in range(slot + 1, len(state.slot)):
            if state.rank_of[slot] == state.rank_of[other_slot] or not is_live(state, other_slot):
                continue
            if old == state.slot[other_slot] or not can_exchange(state, slot, other_slot):
                continue
            first = weigh_exchange(state, slot, other_slot, 0.0, 0, holding)
            swap_copies(state, slot, other_slot)
            second = best_follower(state, width, goal, mean, holding, moves_left - first.num_moves)
            if second.heaviest < best:
                best = second.heaviest
                best_first = first
                best_second = second
            swap_copies(state, slot, other_slot)
    return best_first, best_second


@njit(cache=True, nogil=True)
def is_live(state: LayerState, slot: int) -> bool:
    rank = state.rank_of[slot]
    for live_rank in state.order:
        if live_rank == rank:
            return True
    return False


@njit(cache=True, nogil=True)
def best_follower(
    state: LayerState, width: int, goal: int, mean: int, holding: Holding, moves_left: int
) -> Step:
    """Return the affordable step for the heaviest rank that leaves the heaviest load least."""
    rank = state.order[len(state.order) - 1]
    _, exchange = find_exchange(state, width, rank, goal, mean, holding)
    _, replace, _ = find_replace(state, width, rank, goal, mean, holding)
    if exchange.num_moves > moves_left:
        exchange = no_step()
    if replace.num_moves > moves_left:
        replace = no_step()
    return exchange if exchange.heaviest < replace.heaviest else replace


@njit(cache=True, nogil=True)
def write_with(state: LayerState, step: Step, slots: NDArray[np.int32]) -> None:
    """Write the slots as they would be after the step."""
    slots[:] = state.slot
    apply_to_slots(step, slots)


@njit(cache=True, nogil=True)
def write_with_pair(state: LayerState, first: Step, second: Step, slots: NDArray[np.int32]) -> None:
    slots[:] = state.slot
    apply_to_slots(first, slots)
    apply_to_slots(second, slots)


@njit(cache=True, nogil=True)
def apply_to_slots(step: Step, slots: NDArray[np.int32]) -> None:
    if step.other_slot >= 0:
        slots[step.slot], slots[step.other_slot] = slots[step.other_slot], slots[step.slot]
    else:
        slots[step.slot] = step.expert


@njit(cache=True, nogil=True)
def set_holding(holding: Holding, slots: NDArray[np.int32], state: LayerState) -> None:
    """Note which experts are where before anything moves."""
    num_experts = len(state.weight) - 1
    holding.on_rank[:] = 0
    holding.on_node[:] = 0
    holding.on_rank[num_experts] = 1
    holding.on_node[num_experts] = 1
    for slot in range(len(slots)):
        expert = slots[slot]
        if expert != num_experts:
            rank = state.rank_of[slot]
            holding.on_rank[expert, rank] = 1
            holding.on_node[expert, state.node_of[rank]] = 1


@njit(cache=True, nogil=True)
def fill_spare_slots(
    state: LayerState, width: int, holding: Holding, goal: int, mean: int, moves_left: int
) -> int:
    """Use empty slots of live ranks while moves are left. Returns the number of copies placed."""
    num_experts = len(state.weight) - 1
    num_placed = 0
    for index in range(len(state.order)):
        rank = state.order[index]
        for slot in range(rank * width, (rank + 1) * width):
            if state.slot[slot] != num_experts:
                continue
            best = no_step()
            for expert in range(num_experts):
                if not can_replace(state, slot, expert):
                    continue
                step = weigh_replace(state, slot, expert, goal, mean, holding)
                if num_placed + count_change(holding, expert, num_experts, rank) > moves_left:
                    continue
                if best.slot < 0 or step.gain < best.gain:
                    best = step
            if best.slot >= 0:
                num_placed += count_change(holding, best.expert, num_experts, rank)
                add_copy(state, slot, best.expert)
    sort_ranks(state)
    return num_placed
