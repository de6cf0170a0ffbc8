"""A placement from nothing: how many copies each expert gets, and which rank each copy goes to.

Copies are given one by one to the expert whose copies carry most, never more than one copy a rank:
the published greedy (deepseek-ai/EPLB) gives a very hot expert more copies than there are ranks,
and one rank then carries two shares. Packing takes experts by falling share and puts the copies of
one expert on the lightest ranks with a free slot, all different. `search.py` improves the result.

Compiled. Counting is O(E + R log E) for R redundant experts, packing O(P log G).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsched.eplb.search import FAR_ABOVE, Holding, settle
from dsched.eplb.state import (
    LayerState,
    add_copy,
    add_to_ranks,
    clear,
    fill,
    has_copy,
    keeps_spread,
    new_state,
    set_shares,
    sort_ranks,
)
from dsched.eplb.warm import empty_holding, limit_above, mean_load
from dsched.jit import kernel

ENOUGH = 0.004
"""Excess of the heaviest rank over the mean with which the first count of copies is good enough."""
COUNT_LIMIT = 512
"""Slots times experts of a layer whose counts are searched, too. The search packs a layer up to
E^4 times, some milliseconds at the limit."""


@kernel
def is_before(
    share: NDArray[np.int64], num_copies: NDArray[np.int64], one: int, other: int
) -> bool:
    """Whether `one` should get a copy before `other`: greater share, fewer copies, lower number."""
    if share[one] != share[other]:
        return bool(share[one] > share[other])
    if num_copies[one] != num_copies[other]:
        return bool(num_copies[one] < num_copies[other])
    return one < other


@kernel
def sink(
    share: NDArray[np.int64], num_copies: NDArray[np.int64], heap: NDArray[np.int64], size: int
) -> None:
    """Restore the heap after its first expert got a copy or was overwritten."""
    expert = heap[0]
    position = 0
    while True:
        child = 2 * position + 1
        if child >= size:
            break
        if child + 1 < size and is_before(share, num_copies, heap[child + 1], heap[child]):
            child += 1
        if is_before(share, num_copies, expert, heap[child]):
            break
        heap[position] = heap[child]
        position = child
    heap[position] = expert


@kernel
def count_copies(
    state: LayerState,
    heap: NDArray[np.int64],
    priority: NDArray[np.int64],
    num_slots: int,
    rebate: int,
) -> None:
    """Set `num_copies` and the shares. In: `heap` holds all experts by falling load.

    The next copy goes to the greatest load / (copies - rebate / 16): a rebate prefers experts with
    few copies. A falling order is a heap. Experts leave it when they have a copy on every rank.
    """
    size = len(heap)
    max_copies = len(state.order)
    num_copies = state.num_copies
    num_copies[:-1] = 1
    for expert in heap:
        priority[expert] = state.weight[expert] * 8 // (16 - rebate)
    state.grown_share[:] = state.weight >> 1
    if max_copies == 1:
        return
    for _ in range(num_slots - len(heap)):
        if size == 0:
            return
        expert = heap[0]
        num_copies[expert] += 1
        set_shares(state, expert)
        priority[expert] = state.weight[expert] * 8 // (16 * num_copies[expert] - rebate)
        if num_copies[expert] == max_copies:
            size -= 1
            heap[0], heap[size] = heap[size], heap[0]
        if size > 0:
            sink(priority, num_copies, heap, size)


@kernel
def by_falling_share(
    state: LayerState, by_load: NDArray[np.int64], keys: NDArray[np.int64], out: NDArray[np.int64]
) -> None:
    """Merge single experts (sorted already) with those that have copies (sorted here)."""
    num_experts = len(by_load)
    num_shared = 0
    for expert in by_load:
        if state.num_copies[expert] > 1:
            keys[num_shared] = state.share[expert] * num_experts + (num_experts - 1 - expert)
            num_shared += 1
    keys[:num_shared].sort()
    position = num_shared - 1
    written = 0
    for expert in by_load:
        if state.num_copies[expert] > 1:
            continue
        key = state.share[expert] * num_experts + (num_experts - 1 - expert)
        while position >= 0 and keys[position] > key:
            out[written] = num_experts - 1 - keys[position] % num_experts
            written += 1
            position -= 1
        out[written] = expert
        written += 1
    while position >= 0:
        out[written] = num_experts - 1 - keys[position] % num_experts
        written += 1
        position -= 1


@kernel
def is_lighter(rank_load: NDArray[np.int64], one: int, other: int) -> bool:
    """Order of the rank heap: load, then number."""
    if rank_load[one] != rank_load[other]:
        return bool(rank_load[one] < rank_load[other])
    return one < other


@kernel
def pop_lightest(rank_load: NDArray[np.int64], heap: NDArray[np.int64], size: int) -> int:
    """Take the first rank from a heap of `size` ranks."""
    first = heap[0]
    rank = heap[size - 1]
    position = 0
    while True:
        child = 2 * position + 1
        if child >= size - 1:
            break
        if child + 1 < size - 1 and is_lighter(rank_load, heap[child + 1], heap[child]):
            child += 1
        if is_lighter(rank_load, rank, heap[child]):
            break
        heap[position] = heap[child]
        position = child
    heap[position] = rank
    return int(first)


@kernel
def push_rank(rank_load: NDArray[np.int64], heap: NDArray[np.int64], size: int, rank: int) -> None:
    """Add a rank to a heap of `size` ranks."""
    position = size
    while position > 0:
        parent = (position - 1) // 2
        if is_lighter(rank_load, heap[parent], rank):
            break
        heap[position] = heap[parent]
        position = parent
    heap[position] = rank


@kernel
def choose_other_node(
    state: LayerState,
    heap: NDArray[np.int64],
    size: int,
    chosen: NDArray[np.int64],
    num_chosen: int,
) -> int:
    """If all chosen ranks share a node, trade the last for the lightest rank elsewhere.

    Returns the new size of the heap. Leaves the choice alone if no other node has a free slot.
    """
    node = state.node_of[chosen[0]]
    for index in range(1, num_chosen):
        if state.node_of[chosen[index]] != node:
            return size
    num_popped = num_chosen
    while size > 0:
        chosen[num_popped] = pop_lightest(state.rank_load, heap, size)
        size -= 1
        num_popped += 1
        if state.node_of[chosen[num_popped - 1]] != node:
            last = num_chosen - 1
            chosen[last], chosen[num_popped - 1] = chosen[num_popped - 1], chosen[last]
            break
    for index in range(num_chosen, num_popped):
        push_rank(state.rank_load, heap, size, chosen[index])
        size += 1
    return size


@kernel
def pack_copies(
    state: LayerState,
    width: int,
    by_share: NDArray[np.int64],
    heap: NDArray[np.int64],
    used: NDArray[np.int64],
    chosen: NDArray[np.int64],
) -> None:
    """Put all copies on ranks, heaviest share first. In: counts are set and slots empty."""
    size = 0
    used[:] = 0
    rank_load = state.rank_load
    next_copy = state.next_copy
    first_copy = state.first_copy
    slot_expert = state.slot
    for rank in state.order:
        push_rank(rank_load, heap, size, rank)
        size += 1
    for expert in by_share:
        wanted = state.num_copies[expert]
        num_chosen = min(wanted, size)
        for index in range(num_chosen):
            chosen[index] = pop_lightest(rank_load, heap, size)
            size -= 1
        if state.spread and num_chosen > 1:
            size = choose_other_node(state, heap, size, chosen, num_chosen)
        share = state.share[expert]
        for index in range(num_chosen):
            rank = chosen[index]
            slot = rank * width + used[rank]
            slot_expert[slot] = expert
            next_copy[slot] = first_copy[expert]
            first_copy[expert] = slot
            used[rank] += 1
            rank_load[rank] += share
            if used[rank] < width:
                push_rank(rank_load, heap, size, rank)
                size += 1
        if num_chosen < wanted:
            give_up_copies(state, expert, num_chosen)
    sort_ranks(state)


@kernel
def give_up_copies(state: LayerState, expert: int, num_placed: int) -> None:
    """Forget the copies that found no rank; their slots are filled with other experts later.

    At least one copy has a place: an expert comes here only while some rank has a free slot.
    """
    old_share = state.share[expert]
    state.num_copies[expert] = num_placed
    set_shares(state, expert)
    add_to_ranks(state, expert, state.share[expert] - old_share)


@kernel
def fill_empty_slots(state: LayerState, width: int) -> None:
    """Use every empty slot of a live rank for the heaviest share that the rank does not hold.

    A slot stays empty only where the rank already holds every expert.
    """
    num_experts = len(state.weight) - 1
    share = state.share
    num_copies = state.num_copies
    for index in range(len(state.order)):
        rank = state.order[index]
        for slot in range(rank * width, (rank + 1) * width):
            if state.slot[slot] != num_experts:
                continue
            best = -1
            for expert in range(num_experts):
                if best >= 0 and not is_before(share, num_copies, expert, best):
                    continue
                if not has_copy(state, expert, rank) and keeps_spread(state, expert, -1, rank):
                    best = expert
            if best >= 0:
                add_copy(state, slot, best)
    sort_ranks(state)


class FreshScratch(NamedTuple):
    """Arrays that the steps of one layer share."""

    priority: NDArray[np.int64]
    expert_heap: NDArray[np.int64]
    keys: NDArray[np.int64]
    by_share: NDArray[np.int64]
    rank_heap: NDArray[np.int64]
    used: NDArray[np.int64]
    chosen: NDArray[np.int64]
    scanned: NDArray[np.int64]
    changed: NDArray[np.int64]


@kernel
def plan_fresh(
    weight: NDArray[np.int64],
    by_load: NDArray[np.int64],
    rank_up: NDArray[np.bool_],
    node_of: NDArray[np.int64],
    spread: int,
    stop: float,
    max_rounds: int,
    rebates: NDArray[np.int64],
    out: NDArray[np.int32],
) -> None:
    """Plan every layer from nothing into `out` [L, P], with E in empty slots.

    `by_load` has the experts of each layer by falling load. `max_rounds` -1: no search.
    """
    num_layers, num_experts = weight.shape
    num_ranks = len(rank_up)
    width = out.shape[1] // num_ranks
    state = new_state(num_experts, rank_up, node_of, width, spread)
    slots = np.empty(out.shape[1], np.int32)
    scratch = FreshScratch(
        np.empty(num_experts, np.int64),
        np.empty(num_experts, np.int64),
        np.empty(num_experts, np.int64),
        np.empty(num_experts, np.int64),
        np.empty(num_ranks + 1, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks + 1, np.int64),
        np.empty(num_ranks, np.int64),
        np.empty(num_ranks, np.int64),
    )
    holding = empty_holding(num_experts, num_ranks, int(node_of.max()) + 1, 1, 1)
    for layer in range(num_layers):
        mean = mean_load(weight[layer], len(state.order))
        goal = limit_above(mean, stop)
        best = FAR_ABOVE
        for rebate in rebates:
            if best <= limit_above(mean, ENOUGH) or (best < FAR_ABOVE and max_rounds < 0):
                break
            clear(state, weight[layer])
            scratch.expert_heap[:] = by_load[layer]
            count_copies(
                state,
                scratch.expert_heap,
                scratch.priority,
                len(state.order) * width,
                rebate,
            )
            heaviest = place_counted(
                state, width, by_load[layer], goal, mean, max_rounds, holding, scratch, slots
            )
            if heaviest < best:
                best = heaviest
                out[layer] = slots
        if best > goal and max_rounds > 0 and num_experts * out.shape[1] <= COUNT_LIMIT:
            search_counts(
                state,
                width,
                by_load[layer],
                goal,
                mean,
                max_rounds,
                holding,
                scratch,
                out[layer],
                best,
            )


@kernel
def place_counted(
    state: LayerState,
    width: int,
    by_load: NDArray[np.int64],
    goal: int,
    mean: int,
    max_rounds: int,
    holding: Holding,
    scratch: FreshScratch,
    best_slots: NDArray[np.int32],
) -> int:
    """Pack the copies that were counted and improve the result. In: slots are empty.

    Writes the slots to `best_slots`; returns the heaviest rank load.
    """
    by_falling_share(state, by_load, scratch.keys, scratch.by_share)
    pack_copies(state, width, scratch.by_share, scratch.rank_heap, scratch.used, scratch.chosen)
    if scratch.used.sum() < len(state.order) * width:
        fill_empty_slots(state, width)
    if max_rounds < 0:
        best_slots[:] = state.slot
        return int(state.rank_load[state.order[-1]])
    return settle(
        state,
        width,
        goal,
        mean,
        max_rounds,
        holding,
        scratch.scanned,
        scratch.changed,
        best_slots,
    )


@kernel
def search_counts(
    state: LayerState,
    width: int,
    by_load: NDArray[np.int64],
    goal: int,
    mean: int,
    max_rounds: int,
    holding: Holding,
    scratch: FreshScratch,
    best_slots: NDArray[np.int32],
    best: int,
) -> None:
    """Try other numbers of copies, packing each anew, until no change of two copies helps.

    For small layers: the packing is fast, and greedy counts are far off where few experts carry
    nearly everything. A change moves one copy from an expert to another, and possibly a second one.
    """
    num_experts = len(by_load)
    num_pairs = num_experts * num_experts
    slots = np.empty_like(best_slots)
    best_counts = np.zeros(num_experts + 1, np.int64)
    for expert in best_slots:
        best_counts[expert] += 1
    best_counts[num_experts] = 0
    start_counts = best_counts.copy()
    weight = state.weight[:-1].copy()
    has_improved = True
    while has_improved and best > goal:
        has_improved = False
        start_counts[:] = best_counts
        for candidate in range(num_pairs * num_pairs):
            first, second = candidate % num_pairs, candidate // num_pairs
            if second > 0 and has_improved:
                break  # a single change helped: start again from there
            if second > 0 and second <= first:
                continue  # the same two changes in the other order
            clear(state, weight)
            state.num_copies[:] = start_counts
            if not shift_copy(state, first // num_experts, first % num_experts):
                continue
            if second > 0 and not shift_copy(state, second // num_experts, second % num_experts):
                continue
            for expert in range(num_experts):
                set_shares(state, expert)
            rounds = max_rounds if second == 0 else 0
            heaviest = place_counted(
                state, width, by_load, goal, mean, rounds, holding, scratch, slots
            )
            if heaviest < best:
                best = heaviest
                best_slots[:] = slots
                best_counts[:] = 0
                for expert in slots:
                    best_counts[expert] += 1
                best_counts[num_experts] = 0
                has_improved = True


@kernel
def shift_copy(state: LayerState, giver: int, taker: int) -> bool:
    """Take a copy from one expert's count and give it to another's, if both may."""
    if giver == taker or state.num_copies[giver] < 2 or state.num_copies[taker] >= len(state.order):
        return False
    state.num_copies[giver] -= 1
    state.num_copies[taker] += 1
    return True


@kernel
def settle_layers(
    weight: NDArray[np.int64],
    rank_up: NDArray[np.bool_],
    node_of: NDArray[np.int64],
    spread: int,
    stop: float,
    max_rounds: int,
    out: NDArray[np.int32],
) -> None:
    """Improve every layer of `out` [L, P], in place, with as many moves as it takes."""
    num_layers, num_experts = weight.shape
    num_ranks = len(rank_up)
    width = out.shape[1] // num_ranks
    state = new_state(num_experts, rank_up, node_of, width, spread)
    holding = empty_holding(num_experts, num_ranks, int(node_of.max()) + 1, 1, 1)
    scanned = np.empty(num_ranks, np.int64)
    changed = np.empty(num_ranks, np.int64)
    for layer in range(num_layers):
        mean = mean_load(weight[layer], len(state.order))
        clear(state, weight[layer])
        fill(state, out[layer])
        goal = limit_above(mean, stop)
        settle(state, width, goal, mean, max_rounds, holding, scanned, changed, out[layer])
