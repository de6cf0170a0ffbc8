"""Divide each expert's tokens over its copies so that the heaviest rank is as light as it can be.

An engine that sends the same part to every copy leaves balance on the table: the copy on the busy
rank gets as much as the one on the idle rank. Choosing the parts needs no weight to move, so it is
the cheapest lever there is. `split_traffic` is the optimum for known counts: exact where ranks
share their counts every step, a forecast (`split_weights`) where they use those of the last window.

Method: start even; then expert by expert pour its tokens over the ranks that hold it, lowest first,
like water (block-coordinate descent on the sum of squared rank loads, which is least exactly where
the sorted loads are). Where chains of shared experts make that slow, push flow along shortest paths
from the heaviest rank until it is as light as the mean of all ranks that paths lead to, which
proves the optimum.

Pure. About 10 us for a layer of 288 slots on 32 ranks; O(S log c) a pass for S shared slots.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.eplb.placement import EMPTY, ExpertPlacement, read_tokens, refuse_tokens
from dsched.jit import kernel

TOLERANCE = 1e-5
"""Relative distance to the optimum at which a layer is done. Lower: more passes for nothing that
a step time could show. Higher: the last tokens of a small batch are divided unevenly."""
CERTIFIED = 1e-4
"""Relative distance to the proven bound at which paths need no more flow."""
MAX_PASSES = 8
"""Passes of pouring before paths are searched. Where the mean can be reached, fewer
are enough."""
MAX_PATHS = 4_096
"""Paths pushed for one layer; bounds the time on chains of hundreds of ranks."""


def split_traffic(placement: ExpertPlacement, load: ArrayLike) -> NDArray[np.float64]:
    """Return the tokens of each slot, [L, P], that make the heaviest rank lightest.

    `load` is [L, E]. The parts of an expert add up to its load; empty slots get 0. The heaviest
    rank is within 1e-4 of the optimum; lighter ranks are evened out as far as pouring goes.

    Raises:
        ValueError: a load that does not fit (`balancedness` has the same rules).

    >>> placement = ExpertPlacement(slot_expert=[[0, 1, 0, 2]], num_ranks=2)
    >>> split_traffic(placement, [[10, 6, 2]])
    array([[3., 6., 7., 2.]])
    """
    tokens = read_tokens(placement, load)
    out = np.empty(placement.slot_expert.shape, np.float64)
    if solve_layers(placement.slot_expert, tokens, placement.num_ranks, out) >= 0:
        refuse_tokens(placement, load)
    return out


def split_weights(placement: ExpertPlacement, load: ArrayLike) -> NDArray[np.float64]:
    """Return the part of its expert's tokens that each slot should get, [L, P], from `load`.

    For engines that choose copies by fixed weights until the next window. The parts of an expert
    add up to 1; an expert without load is divided evenly.
    """
    tokens = read_tokens(placement, load)
    parts = split_traffic(placement, load)
    totals = np.take_along_axis(tokens, np.maximum(placement.slot_expert, 0), axis=1)
    even = split_evenly_ones(placement)
    return np.divide(parts, totals, out=even, where=totals > 0)


def split_evenly_ones(placement: ExpertPlacement) -> NDArray[np.float64]:
    """Return one over the number of copies of each slot's expert, [L, P]; 0 in empty slots."""
    copies = placement.count_copies()
    of_slot = np.take_along_axis(copies, np.maximum(placement.slot_expert, 0), axis=1)
    is_used = placement.slot_expert != EMPTY
    return np.divide(1.0, of_slot, out=np.zeros(of_slot.shape), where=is_used & (of_slot > 0))


def split_by_weights(
    placement: ExpertPlacement, weights: NDArray[np.float64], load: ArrayLike
) -> NDArray[np.float64]:
    """Return the tokens of each slot, [L, P], when `load` is divided by fixed `weights` [L, P]."""
    tokens = read_tokens(placement, load)
    of_slot = np.take_along_axis(tokens, np.maximum(placement.slot_expert, 0), axis=1)
    product: NDArray[np.float64] = of_slot * weights * (placement.slot_expert != EMPTY)
    return product


def split_whole_tokens(placement: ExpertPlacement, load: ArrayLike) -> NDArray[np.int64]:
    """Return `split_traffic` in whole tokens, [L, P]: each expert's parts add up exactly.

    Every part is the optimal one rounded down or up; the tokens left over go one by one to the
    copy on the then lightest rank. `load` must hold whole numbers.

    >>> placement = ExpertPlacement(slot_expert=[[0, 1, 0, 2]], num_ranks=2)
    >>> split_whole_tokens(placement, [[3, 0, 0]])
    array([[2, 0, 1, 0]])
    """
    tokens = read_tokens(placement, load)
    if (tokens != np.floor(tokens)).any():
        layer, expert = np.argwhere(tokens != np.floor(tokens))[0]
        raise ValueError(
            f"load of layer {layer}, expert {expert} is {tokens[layer, expert]}; "
            "only whole tokens can be split into whole tokens"
        )
    parts = split_traffic(placement, load)
    out = np.zeros(parts.shape, np.int64)
    round_layers(placement.slot_expert, tokens, parts, placement.num_ranks, out)
    return out


class SplitState(NamedTuple):
    """One layer: experts with several copies are runs; a run's copies lie side by side."""

    run_of: NDArray[np.int32]
    """[E] run of the expert, -1 for none."""
    start: NDArray[np.int32]
    """[E] first copy of a run."""
    size: NDArray[np.int32]
    """[E] copies of a run; also the number of copies of each expert while runs are made."""
    amount: NDArray[np.float64]
    """[E] tokens of a run."""
    rank: NDArray[np.int32]
    """[P] rank of a copy. Rising in a run: slots are ordered by rank."""
    slot: NDArray[np.int32]
    """[P] slot of a copy."""
    run: NDArray[np.int32]
    """[P] run of a copy."""
    part: NDArray[np.float64]
    """[P] tokens of a copy."""
    copy_at: NDArray[np.int32]
    """[P] copy in the slot, -1 if its expert is in no run."""
    rank_load: NDArray[np.float64]
    """[G]"""
    order: NDArray[np.int32]
    """[G] scratch: copies of a run by rank load; ranks reached by a search."""
    came_by: NDArray[np.int32]
    """[G] scratch: copy by which a search reached the rank; -1 not reached, -2 its start."""
    came_from: NDArray[np.int32]
    """[G] scratch: copy, on the rank before, that gives tokens up."""


@kernel
def new_split_state(num_experts: int, num_ranks: int, num_slots: int) -> SplitState:
    return SplitState(
        np.empty(num_experts, np.int32),
        np.empty(num_experts, np.int32),
        np.empty(num_experts, np.int32),
        np.empty(num_experts, np.float64),
        np.empty(num_slots, np.int32),
        np.empty(num_slots, np.int32),
        np.empty(num_slots, np.int32),
        np.empty(num_slots, np.float64),
        np.empty(num_slots, np.int32),
        np.empty(num_ranks, np.float64),
        np.empty(num_ranks, np.int32),
        np.empty(num_ranks, np.int32),
        np.empty(num_ranks, np.int32),
    )


@kernel
def solve_layers(
    slot_expert: NDArray[np.int32],
    load: NDArray[np.float64],
    num_ranks: int,
    out: NDArray[np.float64],
) -> int:
    """Write the optimal split of every layer. Returns the first layer of wrong load, or -1."""
    num_layers, num_experts = load.shape
    state = new_split_state(num_experts, num_ranks, slot_expert.shape[1])
    for layer in range(num_layers):
        num_runs = make_runs(state, slot_expert[layer], load[layer], out[layer])
        if num_runs < 0:
            return int(layer)
        mean = state.rank_load.sum()
        for run in range(num_runs):
            mean += state.amount[run]
        mean /= num_ranks
        pour_runs(state, num_runs, mean)
        push_paths(state, mean)
        for run in range(num_runs):
            write_run(state, run, out[layer])
    return -1


@kernel
def make_runs(
    state: SplitState,
    slots: NDArray[np.int32],
    load: NDArray[np.float64],
    out: NDArray[np.float64],
) -> int:
    """Gather shared experts in runs, divided evenly; place the others. -1: the load is wrong."""
    copies = state.size
    copies[:] = 0
    for expert in slots:
        if expert >= 0:
            copies[expert] += 1
    num_runs = 0
    position = 0
    for expert in range(len(load)):
        if not 0.0 <= load[expert] < np.inf or (load[expert] > 0 and copies[expert] == 0):
            return -1
        state.run_of[expert] = -1
        if copies[expert] > 1 and load[expert] > 0:
            state.run_of[expert] = num_runs
            state.start[num_runs] = position
            state.amount[num_runs] = load[expert]
            position += copies[expert]
            num_runs += 1
    copies[:num_runs] = 0
    num_ranks = len(state.rank_load)
    width = len(slots) // num_ranks
    for rank in range(num_ranks):
        settled = 0.0
        for slot in range(rank * width, (rank + 1) * width):
            expert = slots[slot]
            out[slot] = 0.0
            state.copy_at[slot] = -1
            if expert < 0:
                continue
            run = state.run_of[expert]
            if run < 0:
                # An expert with several copies and no load comes here too, and adds nothing.
                out[slot] = load[expert]
                settled += load[expert]
                continue
            copy = state.start[run] + state.size[run]
            if state.size[run] > 0 and state.rank[copy - 1] == rank:
                continue  # a second copy on one rank changes nothing
            state.rank[copy] = rank
            state.slot[copy] = slot
            state.run[copy] = run
            state.copy_at[slot] = copy
            state.size[run] += 1
        state.rank_load[rank] = settled
    return num_runs


@kernel
def pour_runs(state: SplitState, num_runs: int, mean: float) -> None:
    """Divide evenly, then pour run by run until no part moves by more than the tolerance."""
    rank_load, part, rank = state.rank_load, state.part, state.rank
    for run in range(num_runs):
        even = state.amount[run] / state.size[run]
        for copy in range(state.start[run], state.start[run] + state.size[run]):
            part[copy] = even
            rank_load[rank[copy]] += even
    for _ in range(MAX_PASSES):
        greatest_change = 0.0
        for run in range(num_runs):
            start = state.start[run]
            change = pour(
                rank_load,
                part,
                rank,
                state.order,
                start,
                start + state.size[run],
                state.amount[run],
            )
            greatest_change = max(greatest_change, change)
        if greatest_change <= TOLERANCE * mean:
            return


@kernel
def pour(
    rank_load: NDArray[np.float64],
    part: NDArray[np.float64],
    rank: NDArray[np.int32],
    order: NDArray[np.int32],
    start: int,
    end: int,
    amount: float,
) -> float:
    """Divide one run's tokens over its ranks, lowest first. Returns the greatest change of a part.

    Ranks are sorted by load without the run; the level is where the water stands.
    """
    size = end - start
    for copy in range(start, end):
        rank_load[rank[copy]] -= part[copy]
    for index in range(size):
        copy = start + index
        position = index - 1
        while position >= 0 and rank_load[rank[order[position]]] > rank_load[rank[copy]]:
            order[position + 1] = order[position]
            position -= 1
        order[position + 1] = copy
    below = 0.0
    level = 0.0
    for index in range(size):
        below += rank_load[rank[order[index]]]
        level = (amount + below) / (index + 1)
        if index + 1 == size or level <= rank_load[rank[order[index + 1]]]:
            break
    greatest_change = 0.0
    for copy in range(start, end):
        new = max(level - rank_load[rank[copy]], 0.0)
        greatest_change = max(greatest_change, abs(new - part[copy]))
        part[copy] = new
        rank_load[rank[copy]] += new
    return greatest_change


@kernel
def push_paths(state: SplitState, mean: float) -> None:
    """Push flow from the heaviest rank to lighter ones it can reach, until there is none.

    One search serves many pushes: each rank below the mean of those reached is filled up to that
    mean while its path carries. Where none is, the lightest gets half of the difference.
    """
    tolerance = TOLERANCE * mean
    rank_load = state.rank_load
    for _ in range(MAX_PATHS):
        heaviest = 0
        for rank in range(1, len(rank_load)):
            if rank_load[rank] > rank_load[heaviest]:
                heaviest = rank
        if rank_load[heaviest] <= mean + tolerance:
            return
        lightest, bound, num_reached = search_paths(state, heaviest, tolerance)
        is_proven = rank_load[heaviest] <= bound + CERTIFIED * mean
        if is_proven or rank_load[lightest] >= rank_load[heaviest] - 2 * tolerance:
            return
        is_pushed = False
        for index in range(1, num_reached):
            there = state.order[index]
            wanted = min(rank_load[heaviest] - bound, bound - rank_load[there])
            if wanted > tolerance:
                is_pushed |= push_along(state, heaviest, there, wanted) > tolerance
        if not is_pushed:
            half = (rank_load[heaviest] - rank_load[lightest]) / 2
            push_along(state, heaviest, lightest, half)


@kernel
def search_paths(state: SplitState, source: int, tolerance: float) -> tuple[int, float, int]:
    """Search breadth first from `source` along copies with tokens to give.

    Returns the lightest rank reached, the mean load of those reached (they share their experts
    with no other rank, so no split makes the heaviest of them lighter than that), and how many
    there are: the first of `state.order`.
    """
    rank_load, part, rank = state.rank_load, state.part, state.rank
    queue, came_by, came_from = state.order, state.came_by, state.came_from
    width = len(state.slot) // len(rank_load)
    came_by[:] = -1
    came_by[source] = -2
    queue[0] = source
    num_queued = 1
    lightest = source
    head = 0
    while head < num_queued:
        here = queue[head]
        head += 1
        for slot in range(here * width, (here + 1) * width):
            giver = state.copy_at[slot]
            if giver < 0 or part[giver] <= tolerance:
                continue
            start = state.start[state.run[giver]]
            end = start + state.size[state.run[giver]]
            for copy in range(start, end):
                there = rank[copy]
                if came_by[there] != -1:
                    continue
                came_by[there] = copy
                came_from[there] = giver
                queue[num_queued] = there
                num_queued += 1
                if rank_load[there] < rank_load[lightest]:
                    lightest = there
    total = 0.0
    for index in range(num_queued):
        total += rank_load[queue[index]]
    return int(lightest), total / num_queued, num_queued


@kernel
def push_along(state: SplitState, source: int, target: int, wanted: float) -> float:
    """Move `wanted` tokens along the path found, or what it can carry; returns how many."""
    part, rank = state.part, state.rank
    amount = wanted
    here = target
    while here != source:
        amount = min(amount, part[state.came_from[here]])
        here = rank[state.came_from[here]]
    here = target
    while here != source:
        part[state.came_from[here]] -= amount
        part[state.came_by[here]] += amount
        here = rank[state.came_from[here]]
    state.rank_load[source] -= amount
    state.rank_load[target] += amount
    return amount


@kernel
def write_run(state: SplitState, run: int, out: NDArray[np.float64]) -> None:
    """Write a run's parts; the greatest takes the rounding error, so that they add up."""
    start = state.start[run]
    end = start + state.size[run]
    greatest = start
    total = 0.0
    for copy in range(start, end):
        if state.part[copy] > state.part[greatest]:
            greatest = copy
        out[state.slot[copy]] = state.part[copy]
        total += state.part[copy]
    out[state.slot[greatest]] += state.amount[run] - total


@kernel
def round_layers(
    slot_expert: NDArray[np.int32],
    load: NDArray[np.float64],
    parts: NDArray[np.float64],
    num_ranks: int,
    out: NDArray[np.int64],
) -> None:
    """Round parts down and give what is left to the copies on the lightest ranks."""
    num_layers, num_experts = load.shape
    num_slots = slot_expert.shape[1]
    width = num_slots // num_ranks
    left = np.empty(num_experts, np.int64)
    rank_load = np.empty(num_ranks, np.int64)
    for layer in range(num_layers):
        rank_load[:] = 0
        for expert in range(num_experts):
            left[expert] = np.int64(load[layer, expert])
        for slot in range(num_slots):
            expert = slot_expert[layer, slot]
            if expert >= 0:
                # Rounding noise below a whole token must not cost the token.
                out[layer, slot] = min(np.int64(parts[layer, slot] + 1e-6), left[expert])
                left[expert] -= out[layer, slot]
                rank_load[slot // width] += out[layer, slot]
        for expert in range(num_experts):
            while left[expert] > 0:
                best = -1
                for slot in range(num_slots):
                    if slot_expert[layer, slot] != expert or out[layer, slot] > parts[layer, slot]:
                        continue  # of another expert, or rounded up already
                    if best < 0 or rank_load[slot // width] < rank_load[best // width]:
                        best = slot
                out[layer, best] += 1
                left[expert] -= 1
                rank_load[best // width] += 1
