"""Improve a placement that is in use, with few moves.

`cover` gives each expert that lost its last copy a slot again, where it does least harm. `improve`
then takes the cheapest steps until the heaviest rank is at the goal. It remembers the best state on
its way, and also looks one step aside of it, so that more allowed moves never give a worse result:
the states seen with few moves are seen with many, too.

Compiled. One step costs what `search.py` says.
"""

import numpy as np
from numpy.typing import NDArray

from dsched.eplb.search import (
    FAR_ABOVE,
    TILT,
    Holding,
    Step,
    can_exchange,
    can_replace,
    count_change,
    find_cycle,
    find_exchange,
    find_replace,
    no_step,
    price_exchange,
    price_replace,
    take_step,
    undo_of,
    weigh_harm,
    weigh_relief,
)
from dsched.eplb.state import (
    LayerState,
    add_copy,
    clear,
    fill,
    new_state,
    overload,
    replace_copy,
    sort_ranks,
)
from dsched.jit import kernel

MAX_STEPS = 4_096
"""Steps of one layer. Never reached in practice; bounds the time if it were."""
PAIR_LIMIT = 1_024
"""Layers with at most this many slots times experts are also searched two steps deep, which costs
the square of that."""
UNLIMITED = 1 << 40
"""More moves than any layer has."""


@kernel
def improve_layers(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    layers: NDArray[np.int64],
    rank_up: NDArray[np.bool_],
    node_of: NDArray[np.int64],
    spread: int,
    stop: float,
    near_price: int,
    far_price: int,
    max_moves: NDArray[np.int64],
    out: NDArray[np.int32],
    num_covered: NDArray[np.int64],
    trail: NDArray[np.int64],
) -> None:
    """Improve the named layers; `current` and `out` [L, P] hold E in empty slots.

    `trail` [L, S, 2] receives the moves and the heaviest rank load of the best state after each of
    the first S steps; S may be 0.
    """
    num_experts = weight.shape[1]
    num_ranks = len(rank_up)
    width = current.shape[1] // num_ranks
    state = new_state(num_experts, rank_up, node_of, width, spread)
    holding = empty_holding(num_experts, num_ranks, int(node_of.max()) + 1, near_price, far_price)
    best_slots = np.empty(current.shape[1], np.int64)
    for layer in layers:
        mean = mean_load(weight[layer], len(state.order))
        goal = limit_above(mean, stop)
        trail[layer] = 0
        out[layer] = current[layer]
        drop_doubles(out[layer], width, num_experts)
        clear(state, weight[layer])
        fill(state, out[layer])
        set_holding(holding, state)
        num_covered[layer] = cover(state, goal, mean)
        num_moves = improve(
            state,
            width,
            goal,
            mean,
            holding,
            num_covered[layer],
            max_moves[layer],
            best_slots,
            trail[layer],
        )
        out[layer] = best_slots
        if not np.array_equal(best_slots, state.slot):
            clear(state, weight[layer])
            fill(state, out[layer])
        fill_spare_slots(state, holding, goal, mean, max_moves[layer] - num_moves)
        out[layer] = state.slot


@kernel
def mean_load(weight: NDArray[np.int64], num_live: int) -> int:
    """Total over live ranks, rounded up: no placement is lighter."""
    total = np.int64(0)
    for value in weight:
        total += value
    return int(-(-total // num_live))


@kernel
def limit_above(mean: int, excess: float) -> int:
    """Rank load that is `excess` above the mean. Rounded down, so 0 means the mean itself."""
    return mean + int(float(mean) * excess)


@kernel
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


@kernel
def set_holding(holding: Holding, state: LayerState) -> None:
    """Note which experts are where before anything moves."""
    num_experts = len(state.weight) - 1
    holding.on_rank[:] = 0
    holding.on_node[:] = 0
    holding.on_rank[num_experts] = 1
    holding.on_node[num_experts] = 1
    for slot in range(len(state.slot)):
        expert = state.slot[slot]
        if expert != num_experts:
            rank = state.rank_of[slot]
            holding.on_rank[expert, rank] = 1
            holding.on_node[expert, state.node_of[rank]] = 1


@kernel
def drop_doubles(slots: NDArray[np.int32], width: int, num_experts: int) -> None:
    """Empty the slots whose expert the rank holds in an earlier slot."""
    for slot in range(len(slots)):
        for other in range(slot // width * width, slot):
            if slots[other] == slots[slot]:
                slots[slot] = num_experts


@kernel
def cover(state: LayerState, goal: int, mean: int) -> int:
    """Place every expert without a copy, heaviest first. Returns the number of copies placed.

    A slot is taken from an expert that keeps another copy, or is empty; of those, the one that
    leaves the least overload. Such a slot exists while slots are no fewer than experts.
    """
    num_copies, weight, share = state.num_copies, state.weight, state.share
    slot_expert, rank_of, rank_load = state.slot, state.rank_of, state.rank_load
    harm, harm_top = state.harm, state.harm_top
    num_placed = 0
    while True:
        lost = -1
        for expert in range(len(weight) - 1):
            if num_copies[expert] == 0 and (lost < 0 or weight[expert] > weight[lost]):
                lost = expert
        if lost < 0:
            return num_placed
        weigh_harm(state, goal, mean)
        best = -1
        least = np.inf
        for slot in range(len(slot_expert)):
            if harm_top[slot] == FAR_ABOVE:
                continue
            load = rank_load[rank_of[slot]]
            received = load + weight[lost] - share[slot_expert[slot]]
            total = harm[slot] + overload(received, goal, mean, TILT)
            total -= overload(load, goal, mean, TILT)
            if total < least and (not state.spread or can_replace(state, slot, lost)):
                best = slot
                least = total
        if best < 0:  # spread cannot be kept; coverage matters more
            for slot in range(len(slot_expert)):
                if best < 0 and harm_top[slot] != FAR_ABOVE:
                    best = slot
        replace_copy(state, best, lost)
        num_placed += 1


@kernel
def fill_spare_slots(
    state: LayerState, holding: Holding, goal: int, mean: int, moves_left: int
) -> None:
    """Use the empty slots of live ranks, while moves are left, where it relieves most."""
    num_experts = len(state.weight) - 1
    for slot in range(len(state.slot)):
        rank = state.rank_of[slot]
        if state.slot[slot] != num_experts or not state.is_up[rank]:
            continue
        weigh_relief(state, rank, goal, mean)
        best = -1
        least = np.inf
        for expert in range(num_experts):
            harm = state.relief[expert] + overload(
                state.rank_load[rank] + state.grown_share[expert], goal, mean, TILT
            )
            if (
                harm < least
                and count_change(holding, expert, num_experts, rank) <= moves_left
                and can_replace(state, slot, expert)
            ):
                best = expert
                least = harm
        if best >= 0:
            moves_left -= count_change(holding, best, num_experts, rank)
            add_copy(state, slot, best)
    sort_ranks(state)


@kernel
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


@kernel
def improve(
    state: LayerState,
    width: int,
    goal: int,
    mean: int,
    holding: Holding,
    num_moves: int,
    max_moves: int,
    best_slots: NDArray[np.int64],
    trail: NDArray[np.int64],
) -> int:
    """Search from the state; write the best slots found and return their number of moves.

    `num_moves` were spent before; results have at most `max_moves`, unless those were more.
    """
    last = len(state.order) - 1
    best_heaviest = state.rank_load[state.order[last]]
    best_moves = num_moves
    best_slots[:] = state.slot
    looks_ahead = len(state.slot) * len(state.weight) <= PAIR_LIMIT
    for index in range(MAX_STEPS):
        heaviest = state.rank_load[state.order[last]]
        if heaviest <= goal or best_heaviest <= goal or num_moves >= max_moves:
            break
        step, first = choose_step(state, width, goal, mean, holding, max_moves - num_moves)
        second = no_step()
        if looks_ahead and first.heaviest > goal:
            pair, follower = find_pair(state, width, goal, mean, holding, max_moves - num_moves)
            if follower.heaviest < first.heaviest:
                first, second = pair, follower
        if first.slot >= 0:
            # Look aside: one or two steps, judged by the heaviest rank alone.
            back = undo_of(state, first)
            take_step(state, first)
            back_again = undo_of(state, second) if second.slot >= 0 else no_step()
            take_step(state, second)
            moves = num_moves + first.num_moves + second.num_moves
            heaviest = state.rank_load[state.order[last]]
            if is_better(heaviest, moves, best_heaviest, best_moves, goal):
                best_heaviest = heaviest
                best_moves = moves
                best_slots[:] = state.slot
                if step.slot < 0:  # nothing else helps: go on from there
                    num_moves = moves
                    continue
            take_step(state, back_again)
            take_step(state, back)
        if step.slot < 0 or num_moves + step.num_moves > max_moves:
            break
        take_step(state, step)
        num_moves += step.num_moves
        heaviest = state.rank_load[state.order[last]]
        if is_better(heaviest, num_moves, best_heaviest, best_moves, goal):
            best_heaviest = heaviest
            best_moves = num_moves
            best_slots[:] = state.slot
        if index < len(trail):
            trail[index, 0] = best_moves
            trail[index, 1] = best_heaviest
    return best_moves


@kernel
def choose_step(
    state: LayerState, width: int, goal: int, mean: int, holding: Holding, moves_left: int
) -> tuple[Step, Step]:
    """Return the step to take, and the affordable step that leaves the heaviest rank lightest.

    The heaviest rank that can be improved is served first. If overload cannot fall, a step that
    brings its rank below its present load is taken: the list of loads still gets smaller.
    """
    aside = no_step()
    last = len(state.order) - 1
    for index in range(last, 0, -1):
        rank = state.order[index]
        if state.rank_load[rank] <= goal:
            break
        exchange, lightest_exchange = find_exchange(state, width, rank, goal, mean, holding)
        replace, lightest, strict = find_replace(state, width, rank, goal, mean, holding)
        if index == last:
            aside = lighter(lightest, lightest_exchange, moves_left)
        if exchange.slot >= 0 or replace.slot >= 0:
            cycle = find_cycle(state, width, rank, goal, mean, holding)
            if cycle.slot >= 0 and cycle.score < min(exchange.score, replace.score):
                return cycle, aside
        if replace.slot >= 0 and replace.score <= exchange.score:
            return replace, aside
        if exchange.slot >= 0:
            return exchange, aside
        if strict.slot >= 0:
            return strict, aside
    return no_step(), aside


@kernel
def lighter(one: Step, other: Step, moves_left: int) -> Step:
    """Return the affordable step with the lighter heaviest rank; with equal ones, fewer moves."""
    if one.num_moves > moves_left:
        one = no_step()
    if other.num_moves > moves_left:
        other = no_step()
    if one.heaviest != other.heaviest:
        return one if one.heaviest < other.heaviest else other
    return one if one.num_moves <= other.num_moves else other


@kernel
def find_pair(
    state: LayerState, width: int, goal: int, mean: int, holding: Holding, moves_left: int
) -> tuple[Step, Step]:
    """Try every step followed by the best step for the then heaviest rank; for small layers.

    Returns the affordable pair that leaves the heaviest rank lightest, if lighter than now.
    """
    num_experts = len(state.weight) - 1
    num_slots = len(state.slot)
    best_first = no_step()
    best_second = no_step()
    best = state.rank_load[state.order[len(state.order) - 1]]
    for candidate in range(num_slots * (num_experts + num_slots)):
        slot = candidate // (num_experts + num_slots)
        other = candidate % (num_experts + num_slots)
        if not state.is_up[state.rank_of[slot]]:
            continue
        if other < num_experts:
            if not can_replace(state, slot, other):
                continue
            first = price_replace(state, holding, slot, other, 0.0, 0)
        else:
            other -= num_experts
            if (
                other <= slot
                or state.slot[slot] == state.slot[other]
                or state.rank_of[slot] == state.rank_of[other]
                or not state.is_up[state.rank_of[other]]
                or not can_exchange(state, slot, other)
            ):
                continue
            first = price_exchange(state, holding, slot, other, 0.0, 0)
        back = undo_of(state, first)
        take_step(state, first)
        rank = state.order[len(state.order) - 1]
        _, exchange = find_exchange(state, width, rank, goal, mean, holding)
        _, replace, _ = find_replace(state, width, rank, goal, mean, holding)
        second = lighter(replace, exchange, moves_left - first.num_moves)
        if second.heaviest < best:
            best = second.heaviest
            best_first = first
            best_second = second
        take_step(state, back)
    return best_first, best_second
