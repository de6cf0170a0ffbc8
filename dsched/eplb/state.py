"""One layer while a planner works on it: slots, copies, rank loads, and the steps that change them.

All loads are integers in fixed point (`loads.py`), so sums do not depend on the order in which
they were made, a change can be undone exactly, and equal loads compare as equal. Every rank that
plans from the same counts therefore gets the same bytes.

The arrays belong to one `LayerState` that is reused for every layer of a call. An empty slot holds
the number `E`, one past the last expert: a logical expert without load and without copies, which
saves a special case in every loop.

These functions are compiled (numba) and allocate nothing.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel


class LayerState(NamedTuple):
    """Scratch arrays of one layer. P slots, E experts, G ranks of which H are up."""

    slot: NDArray[np.int64]
    """[P] expert in the slot; E if empty. Slots of ranks that are down are always empty."""
    next_copy: NDArray[np.int64]
    """[P] next slot with the same expert, -1 at the end."""
    first_copy: NDArray[np.int64]
    """[E + 1] first slot that holds the expert, -1 without copies."""
    num_copies: NDArray[np.int64]
    """[E + 1]"""
    weight: NDArray[np.int64]
    """[E + 1] load of the expert in fixed point; 0 for E."""
    share: NDArray[np.int64]
    """[E + 1] load of one copy when all copies get equal parts."""
    grown_share: NDArray[np.int64]
    """[E + 1] the same if there were one copy more."""
    rank_load: NDArray[np.int64]
    """[G] sum of the shares on the rank."""
    order: NDArray[np.int64]
    """[H] ranks that are up, by load, then by number."""
    harm: NDArray[np.float64]
    """[P] scratch of a search: overload that emptying the slot would bring."""
    harm_top: NDArray[np.int64]
    """[P] scratch: heaviest rank that emptying the slot would add to; too much to be allowed where
    the slot has an expert's only copy, or its rank is down."""
    relief: NDArray[np.float64]
    """[E + 1] scratch: overload that one copy more would change, without the rank that gets it."""
    relief_top: NDArray[np.int64]
    """[E + 1] scratch: heaviest of the other ranks, given one copy more."""
    is_up: NDArray[np.bool_]
    """[G]"""
    rank_of: NDArray[np.int64]
    """[P] rank of the slot."""
    node_of: NDArray[np.int64]
    """[G] node of the rank."""
    spread: int
    """1: copies of an expert that has several must not all sit on one node."""


@kernel
def new_state(
    num_experts: int,
    rank_up: NDArray[np.bool_],
    node_of: NDArray[np.int64],
    width: int,
    spread: int,
) -> LayerState:
    """Allocate the state for layers of `num_experts` on ranks of `width` slots."""
    num_ranks = len(rank_up)
    num_slots = num_ranks * width
    rank_of = np.empty(num_slots, np.int64)
    for slot in range(num_slots):
        rank_of[slot] = slot // width
    num_up = 0
    for rank in range(num_ranks):
        num_up += rank_up[rank]
    order = np.empty(num_up, np.int64)
    position = 0
    for rank in range(num_ranks):
        if rank_up[rank]:
            order[position] = rank
            position += 1
    return LayerState(
        np.full(num_slots, num_experts, np.int64),
        np.full(num_slots, -1, np.int64),
        np.full(num_experts + 1, -1, np.int64),
        np.zeros(num_experts + 1, np.int64),
        np.zeros(num_experts + 1, np.int64),
        np.zeros(num_experts + 1, np.int64),
        np.zeros(num_experts + 1, np.int64),
        np.zeros(num_ranks, np.int64),
        order,
        np.zeros(num_slots, np.float64),
        np.zeros(num_slots, np.int64),
        np.zeros(num_experts + 1, np.float64),
        np.zeros(num_experts + 1, np.int64),
        rank_up,
        rank_of,
        node_of,
        spread,
    )


@kernel
def clear(state: LayerState, weight: NDArray[np.int64]) -> None:
    """Empty every slot and take the loads of another layer. `weight` has E elements."""
    num_experts = len(weight)
    state.slot[:] = num_experts
    state.first_copy[:] = -1
    state.num_copies[:] = 0
    state.rank_load[:] = 0
    for expert in range(num_experts):
        state.weight[expert] = weight[expert]
        state.share[expert] = weight[expert]
        state.grown_share[expert] = weight[expert]


@kernel
def fill(state: LayerState, slots: NDArray[np.int32]) -> None:
    """Put a whole layer in, E in empty slots. The state must be clear."""
    num_experts = len(state.weight) - 1
    for slot in range(len(slots) - 1, -1, -1):
        expert = slots[slot]
        state.slot[slot] = expert
        if expert != num_experts:
            state.next_copy[slot] = state.first_copy[expert]
            state.first_copy[expert] = slot
            state.num_copies[expert] += 1
    for expert in range(num_experts):
        set_shares(state, expert)
    for slot in range(len(slots)):
        state.rank_load[state.rank_of[slot]] += state.share[state.slot[slot]]
    sort_ranks(state)


@kernel
def set_shares(state: LayerState, expert: int) -> None:
    """Recompute the two shares of an expert from its number of copies."""
    num_copies = state.num_copies[expert]
    weight = state.weight[expert]
    if num_copies == 1:  # most experts; a shift is cheaper than two divisions
        state.share[expert] = weight
        state.grown_share[expert] = weight >> 1
        return
    state.share[expert] = weight // num_copies if num_copies > 0 else weight
    state.grown_share[expert] = weight // (num_copies + 1)


@kernel
def has_copy(state: LayerState, expert: int, rank: int) -> bool:
    """Whether the rank holds the expert. O(copies)."""
    return is_on(state.first_copy, state.next_copy, state.rank_of, expert, rank)


@kernel
def is_on(
    first_copy: NDArray[np.int64],
    next_copy: NDArray[np.int64],
    rank_of: NDArray[np.int64],
    expert: int,
    rank: int,
) -> bool:
    """`has_copy` on the arrays themselves, for inner loops."""
    slot = first_copy[expert]
    while slot >= 0:
        if rank_of[slot] == rank:
            return True
        slot = next_copy[slot]
    return False


@kernel
def add_to_ranks(state: LayerState, expert: int, amount: int) -> None:
    """Add `amount` to every rank that holds the expert."""
    slot = state.first_copy[expert]
    while slot >= 0:
        state.rank_load[state.rank_of[slot]] += amount
        slot = state.next_copy[slot]


@kernel
def link_copy(state: LayerState, slot: int, expert: int) -> None:
    """Enter an expert in an empty slot, without touching loads."""
    state.slot[slot] = expert
    if expert != len(state.weight) - 1:
        state.next_copy[slot] = state.first_copy[expert]
        state.first_copy[expert] = slot


@kernel
def unlink_copy(state: LayerState, slot: int) -> None:
    """Take the expert out of a slot, without touching loads."""
    num_experts = len(state.weight) - 1
    expert = state.slot[slot]
    if expert == num_experts:
        return
    state.slot[slot] = num_experts
    if state.first_copy[expert] == slot:
        state.first_copy[expert] = state.next_copy[slot]
        return
    previous = state.first_copy[expert]
    while state.next_copy[previous] != slot:
        previous = state.next_copy[previous]
    state.next_copy[previous] = state.next_copy[slot]


@kernel
def add_copy(state: LayerState, slot: int, expert: int) -> None:
    """Put a copy into an empty slot; the other copies give up their part. Ranks are not sorted."""
    if expert == len(state.weight) - 1:
        return
    old_share = state.share[expert]
    had_copies = state.num_copies[expert] > 0
    state.num_copies[expert] += 1
    set_shares(state, expert)
    if had_copies:
        add_to_ranks(state, expert, state.share[expert] - old_share)
    link_copy(state, slot, expert)
    state.rank_load[state.rank_of[slot]] += state.share[expert]


@kernel
def remove_copy(state: LayerState, slot: int) -> None:
    """Empty a slot; the other copies take over its part. Ranks are not sorted."""
    expert = state.slot[slot]
    if expert == len(state.weight) - 1:
        return
    old_share = state.share[expert]
    state.rank_load[state.rank_of[slot]] -= old_share
    unlink_copy(state, slot)
    state.num_copies[expert] -= 1
    set_shares(state, expert)
    add_to_ranks(state, expert, state.share[expert] - old_share)


@kernel
def replace_copy(state: LayerState, slot: int, expert: int) -> None:
    """Overwrite a slot with a copy of another expert and sort the ranks."""
    remove_copy(state, slot)
    add_copy(state, slot, expert)
    sort_ranks(state)


@kernel
def swap_copies(state: LayerState, first: int, second: int) -> None:
    """Exchange the experts of two slots and sort the ranks."""
    one = state.slot[first]
    other = state.slot[second]
    difference = state.share[one] - state.share[other]
    state.rank_load[state.rank_of[first]] -= difference
    state.rank_load[state.rank_of[second]] += difference
    unlink_copy(state, first)
    unlink_copy(state, second)
    link_copy(state, first, other)
    link_copy(state, second, one)
    sort_ranks(state)


@kernel
def sort_ranks(state: LayerState) -> None:
    """Restore the order of the ranks: insertion, as few ranks are out of place."""
    order = state.order
    load = state.rank_load
    for index in range(1, len(order)):
        rank = order[index]
        position = index - 1
        while position >= 0 and (
            load[order[position]] > load[rank]
            or (load[order[position]] == load[rank] and order[position] > rank)
        ):
            order[position + 1] = order[position]
            position -= 1
        order[position + 1] = rank


@kernel
def keeps_spread(state: LayerState, expert: int, left_slot: int, new_rank: int) -> bool:
    """Whether the copies stay on two nodes when one leaves `left_slot` and one joins `new_rank`.

    -1 stands for no such slot or rank. True where the state does not ask for it, and for a single
    copy.
    """
    if not state.spread or expert == len(state.weight) - 1:
        return True
    num_copies = 0
    node = -1
    if new_rank >= 0:
        node = state.node_of[new_rank]
        num_copies = 1
    slot = state.first_copy[expert]
    while slot >= 0:
        if slot != left_slot:
            here = state.node_of[state.rank_of[slot]]
            if num_copies > 0 and here != node:
                return True
            node = here
            num_copies += 1
        slot = state.next_copy[slot]
    return num_copies <= 1


@kernel
def overload(load: int, limit: int, mean: int, tilt: float) -> float:
    """How bad a rank load is: its square above `limit`, plus a little for any distance to `mean`.

    The second part orders candidates that the first calls equal.
    """
    distance = float(load - mean)
    value = tilt * distance * distance
    if load > limit:
        excess = float(load - limit)
        value += excess * excess
    return value
