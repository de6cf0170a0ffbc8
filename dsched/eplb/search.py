"""Improve a placement step by step: exchange two slots, or overwrite one with another expert.

Two searches share these steps:

- `settle` is for a fresh placement, where moves cost nothing. It takes the heaviest rank that can
  be improved and makes the exchange that leaves the heavier of the two ranks lightest. Where
  exchanges end, one slot is overwritten, which changes the *number* of copies of two experts:
  greedy counts are not optimal (two hot experts of nearly equal share show it).
- `find_step` is for a placement in use, where each move has a price. It takes the step with the
  greatest fall of overload for its price; overload counts only above the limit at which the
  search may stop, so ranks that are good enough are left alone.

Each step makes the sorted list of rank loads smaller or the overload less, so both searches end.
Compiled; an exchange costs O(G K^2) for K slots a rank, an overwriting O(E c + P c) for c copies.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dsched.eplb.state import (
    LayerState,
    has_copy,
    is_on,
    keeps_spread,
    overload,
    replace_copy,
    swap_copies,
    try_replace,
)

TILT = 0.01
"""Weight of the distance to the mean against overload. 0: ties are broken by number. Above .1:
moves are spent on ranks that are good enough."""

FAR_ABOVE = 1 << 62
"""More than any load."""


class Holding(NamedTuple):
    """Which experts were where before, and what a copy costs to bring. N nodes."""

    on_rank: NDArray[np.int8]
    """[E + 1, G] 1 if the rank held the expert; 1 for E, as emptying a slot is no move."""
    on_node: NDArray[np.int8]
    """[E + 1, N]"""
    near_price: int
    """Price of a copy from the same node."""
    far_price: int
    """Price of a copy from another node."""


class Step(NamedTuple):
    """A candidate: exchange `slot` with `other_slot`, or overwrite `slot` with `expert`."""

    slot: int
    """-1: no step found."""
    other_slot: int
    """-1 for an overwriting."""
    expert: int
    gain: float
    """Change of the summed overload; negative is better."""
    score: float
    """Gain for the price; negative is better."""
    touched_heaviest: int
    """Heaviest load afterwards among the ranks that change."""
    heaviest: int
    """Heaviest rank load afterwards."""
    num_moves: int
    """Change of the number of moves: -2 .. 2."""


@njit(cache=True, nogil=True)
def new_step(
    slot: int,
    other_slot: int,
    expert: int,
    gain: float,
    score: float,
    touched_heaviest: int,
    heaviest: int,
    num_moves: int,
) -> Step:
    """Make a step of one type, whatever integer types its parts have."""
    return Step(
        np.int64(slot),
        np.int64(other_slot),
        np.int64(expert),
        gain,
        score,
        np.int64(touched_heaviest),
        np.int64(heaviest),
        np.int64(num_moves),
    )


@njit(cache=True, nogil=True)
def no_step() -> Step:
    return new_step(-1, -1, -1, 0.0, 0.0, FAR_ABOVE, FAR_ABOVE, 0)


@njit(cache=True, nogil=True)
def count_change(holding: Holding, came: int, left: int, rank: int) -> int:
    """Moves more (or fewer) when `came` replaces `left` on the rank."""
    return np.int64(holding.on_rank[left, rank]) - np.int64(holding.on_rank[came, rank])


@njit(cache=True, nogil=True)
def price_of(holding: Holding, expert: int, rank: int, node: int) -> int:
    """Price of having the expert on the rank: 0 where it already was."""
    if holding.on_rank[expert, rank]:
        return 0
    return holding.near_price if holding.on_node[expert, node] else holding.far_price


@njit(cache=True, nogil=True)
def price_change(state: LayerState, holding: Holding, came: int, left: int, rank: int) -> int:
    node = state.node_of[rank]
    return price_of(holding, came, rank, node) - price_of(holding, left, rank, node)


@njit(cache=True, nogil=True)
def score_of(holding: Holding, gain: float, price: int) -> float:
    """Gain for the price. A step that costs nothing counts as a quarter of the cheapest move."""
    return gain / max(float(price), 0.25 * float(holding.near_price))


@njit(cache=True, nogil=True)
def can_exchange(state: LayerState, slot: int, other_slot: int) -> bool:
    """Whether an exchange leaves no rank with two copies of one expert."""
    expert = state.slot[slot]
    other = state.slot[other_slot]
    rank = state.rank_of[slot]
    other_rank = state.rank_of[other_slot]
    if state.num_copies[expert] > 1 and has_copy(state, expert, other_rank):
        return False
    if state.num_copies[other] > 1 and has_copy(state, other, rank):
        return False
    if not state.spread:
        return True
    return keeps_spread(state, expert, slot, other_rank) and keeps_spread(
        state, other, other_slot, rank
    )


@njit(cache=True, nogil=True)
def can_replace(state: LayerState, slot: int, expert: int) -> bool:
    """Whether `slot` may take a copy of `expert`: distinct, spread, and nothing gets lost."""
    old = state.slot[slot]
    if old != len(state.weight) - 1 and state.num_copies[old] < 2:
        return False
    if has_copy(state, expert, state.rank_of[slot]):
        return False
    if not state.spread:
        return True
    return keeps_spread(state, expert, -1, state.rank_of[slot]) and keeps_spread(
        state, old, slot, -1
    )


@njit(cache=True, nogil=True)
def exchange_from(
    state: LayerState,
    width: int,
    position: int,
    goal: int,
    scanned: NDArray[np.int64],
    changed: NDArray[np.int64],
    now: int,
) -> bool:
    """Make the best exchange between the rank at `position` of the order and a lighter one.

    `scanned` and `changed` say when a rank was last searched in vain and last altered: pairs that
    were seen and stayed as they are need no second look.
    """
    order = state.order
    rank_load = state.rank_load
    slot_expert = state.slot
    shares = state.share
    rank = order[position]
    load = rank_load[rank]
    since = scanned[rank] if changed[rank] < scanned[rank] else -1
    best = load
    best_slot = -1
    best_other = -1
    for index in range(position):
        other_rank = order[index]
        other_load = rank_load[other_rank]
        if best <= goal or (load + other_load) // 2 >= best:
            break
        if changed[other_rank] < since:
            continue
        for slot in range(rank * width, (rank + 1) * width):
            share = shares[slot_expert[slot]]
            if share == 0:
                continue
            for other_slot in range(other_rank * width, (other_rank + 1) * width):
                difference = share - shares[slot_expert[other_slot]]
                if difference <= 0:
                    continue
                heavier = max(load - difference, other_load + difference)
                if heavier < best and can_exchange(state, slot, other_slot):
                    best = heavier
                    best_slot = slot
                    best_other = other_slot
    scanned[rank] = now
    if best_slot < 0:
        return False
    changed[rank] = now
    changed[state.rank_of[best_other]] = now
    swap_copies(state, best_slot, best_other)
    return True


@njit(cache=True, nogil=True)
def find_replace(
    state: LayerState, width: int, rank: int, limit: int, mean: int, holding: Holding
) -> tuple[Step, Step, Step]:
    """Search the overwritings that relieve `rank`: of its own slots, or by a copy elsewhere.

    Returns the one with the best score, the one that leaves the heaviest rank lightest, and of
    those that bring every touched rank below the present load of `rank`, the one with most gain.
    """
    best = no_step()
    lightest = no_step()
    strict = no_step()
    strict_gain = np.inf
    num_experts = len(state.weight) - 1
    max_copies = len(state.order)
    present = state.rank_load[rank]
    next_copy, first_copy, num_copies = state.next_copy, state.first_copy, state.num_copies
    weight, share, grown_share = state.weight, state.share, state.grown_share
    rank_load, rank_of, order = state.rank_load, state.rank_of, state.order
    change, touched, mark = state.change, state.touched, state.mark
    slot_expert = state.slot
    for part in range(2):
        # Part 0: any expert into a slot of this rank. Part 1: an expert of this rank into a slot
        # of another rank, which takes load off this one.
        for outer in range(width):
            own_slot = rank * width + outer
            own = slot_expert[own_slot]
            if part == 0 and own != num_experts and num_copies[own] < 2:
                continue
            if part == 1 and (own == num_experts or num_copies[own] >= max_copies):
                continue
            for inner in range(num_experts if part == 0 else max_copies * width):
                if part == 0:
                    slot = own_slot
                    expert = inner
                    if num_copies[expert] >= max_copies or is_on(
                        first_copy, next_copy, rank_of, expert, rank
                    ):
                        continue
                else:
                    slot = order[inner // width] * width + inner % width
                    expert = own
                    if slot_expert[slot] != num_experts and num_copies[slot_expert[slot]] < 2:
                        continue
                    if is_on(first_copy, next_copy, rank_of, expert, rank_of[slot]):
                        continue
                old = slot_expert[slot]
                if part == 0 and old != num_experts and grown_share[expert] >= share[old]:
                    continue
                if state.spread and not can_replace(state, slot, expert):
                    continue
                gain, touched_heaviest, heaviest = try_replace(
                    next_copy,
                    first_copy,
                    num_copies,
                    weight,
                    share,
                    grown_share,
                    rank_load,
                    rank_of,
                    order,
                    change,
                    touched,
                    mark,
                    slot,
                    old,
                    expert,
                    limit,
                    mean,
                    TILT,
                )
                # A step is charged a quarter of a move at least (see score_of).
                is_best = gain < 0 and score_of(holding, gain, 0) < best.score
                is_strict = touched_heaviest < present and gain < strict_gain
                if not (is_best or is_strict or heaviest <= lightest.heaviest):
                    continue
                step = price_replace(state, holding, slot, expert, gain, touched_heaviest, heaviest)
                if is_strict:
                    strict = step
                    strict_gain = gain
                if is_best and step.score < best.score:
                    best = step
                if heaviest < lightest.heaviest or (
                    heaviest == lightest.heaviest and step.num_moves < lightest.num_moves
                ):
                    lightest = step
    return best, lightest, strict


@njit(cache=True, nogil=True)
def price_replace(
    state: LayerState,
    holding: Holding,
    slot: int,
    expert: int,
    gain: float,
    touched_heaviest: int,
    heaviest: int,
) -> Step:
    old = state.slot[slot]
    rank = state.rank_of[slot]
    price = price_change(state, holding, expert, old, rank)
    num_moves = count_change(holding, expert, old, rank)
    score = score_of(holding, gain, price)
    return new_step(slot, -1, expert, gain, score, touched_heaviest, heaviest, num_moves)


@njit(cache=True, nogil=True)
def weigh_replace(
    state: LayerState, slot: int, expert: int, limit: int, mean: int, holding: Holding
) -> Step:
    """Return the step that overwrites `slot` with `expert`, with all that it would change."""
    gain, touched_heaviest, heaviest = try_replace(
        state.next_copy,
        state.first_copy,
        state.num_copies,
        state.weight,
        state.share,
        state.grown_share,
        state.rank_load,
        state.rank_of,
        state.order,
        state.change,
        state.touched,
        state.mark,
        slot,
        state.slot[slot],
        expert,
        limit,
        mean,
        TILT,
    )
    return price_replace(state, holding, slot, expert, gain, touched_heaviest, heaviest)


@njit(cache=True, nogil=True)
def find_exchange(
    state: LayerState, width: int, rank: int, limit: int, mean: int, holding: Holding
) -> tuple[Step, Step]:
    """Search all exchanges between `rank` and lighter ranks.

    Returns the one with the best score and the one that leaves the heaviest rank lightest.
    """
    best = no_step()
    lightest = no_step()
    load = state.rank_load[rank]
    before = overload(load, limit, mean, TILT)
    for index in range(len(state.order)):
        other_rank = state.order[index]
        other_load = state.rank_load[other_rank]
        if other_load >= load:
            continue
        other_before = overload(other_load, limit, mean, TILT)
        third = third_load(state, rank, other_rank)
        for slot in range(rank * width, (rank + 1) * width):
            share = state.share[state.slot[slot]]
            for other_slot in range(other_rank * width, (other_rank + 1) * width):
                difference = share - state.share[state.slot[other_slot]]
                if difference <= 0 or other_load + difference >= load:
                    continue
                gain = (
                    overload(load - difference, limit, mean, TILT)
                    + overload(other_load + difference, limit, mean, TILT)
                    - before
                    - other_before
                )
                heaviest = max(load - difference, other_load + difference, third)
                # Half a move is the least an exchange is ever charged (see score_of).
                bound = score_of(holding, gain, 0)
                if (gain >= 0 or bound >= best.score) and heaviest > lightest.heaviest:
                    continue
                if not can_exchange(state, slot, other_slot):
                    continue
                step = weigh_exchange(state, slot, other_slot, gain, heaviest, holding)
                if gain < 0 and step.score < best.score:
                    best = step
                if heaviest < lightest.heaviest or (
                    heaviest == lightest.heaviest and step.num_moves < lightest.num_moves
                ):
                    lightest = step
    return best, lightest


@njit(cache=True, nogil=True)
def third_load(state: LayerState, one: int, other: int) -> int:
    """Heaviest load among the ranks other than these two."""
    for index in range(len(state.order) - 1, -1, -1):
        rank = state.order[index]
        if rank not in (one, other):
            return int(state.rank_load[rank])
    return 0


@njit(cache=True, nogil=True)
def weigh_exchange(
    state: LayerState, slot: int, other_slot: int, gain: float, heaviest: int, holding: Holding
) -> Step:
    expert = state.slot[slot]
    other = state.slot[other_slot]
    rank = state.rank_of[slot]
    other_rank = state.rank_of[other_slot]
    price = price_change(state, holding, other, expert, rank) + price_change(
        state, holding, expert, other, other_rank
    )
    num_moves = count_change(holding, other, expert, rank) + count_change(
        holding, expert, other, other_rank
    )
    score = score_of(holding, gain, price)
    return new_step(slot, other_slot, -1, gain, score, heaviest, heaviest, num_moves)


@njit(cache=True, nogil=True)
def take_step(state: LayerState, step: Step) -> None:
    if step.other_slot >= 0:
        swap_copies(state, step.slot, step.other_slot)
    else:
        replace_copy(state, step.slot, step.expert)


@njit(cache=True, nogil=True)
def settle_ranks(
    state: LayerState,
    width: int,
    goal: int,
    scanned: NDArray[np.int64],
    changed: NDArray[np.int64],
    now: int,
) -> int:
    """Exchange from every rank above `goal`, heaviest first, until nothing improves.

    A rank that is stuck may come free when lighter ones have changed. Returns the new `now`.
    """
    last = len(state.order) - 1
    has_moved = True
    while has_moved and state.rank_load[state.order[last]] > goal:
        has_moved = False
        position = last
        while position > 0 and state.rank_load[state.order[position]] > goal:
            now += 1
            if exchange_from(state, width, position, goal, scanned, changed, now):
                has_moved = True
            else:
                position -= 1
    return now


@njit(cache=True, nogil=True)
def settle(
    state: LayerState,
    width: int,
    goal: int,
    mean: int,
    holding: Holding,
    max_rounds: int,
    scanned: NDArray[np.int64],
    changed: NDArray[np.int64],
) -> None:
    """Improve a fresh placement until the heaviest rank is at `goal` or no step helps.

    `max_rounds` limits the overwritings and full passes; exchanges from the heaviest rank are
    always made.
    """
    last = len(state.order) - 1
    scanned[:] = -1
    changed[:] = 0
    now = 0
    for index in range(max_rounds + 1):
        while state.rank_load[state.order[last]] > goal:
            now += 1
            if not exchange_from(state, width, last, goal, scanned, changed, now):
                break
        heaviest = state.rank_load[state.order[last]]
        if heaviest <= goal or index == max_rounds:
            return
        _, _, strict = find_replace(state, width, state.order[last], goal, mean, holding)
        if strict.slot >= 0:
            take_step(state, strict)
            now += 1
            changed[:] = now
            continue
        now = settle_ranks(state, width, goal, scanned, changed, now)
        if state.rank_load[state.order[last]] >= heaviest:
            return
