"""Make a new placement look as much like the old one as it can, at no cost in balance.

Which rank is called which does not matter to a fresh plan, and neither does the order of slots
inside a rank. `match_layers` renames the ranks so that as many experts as possible are already
there (an assignment problem, solved exactly by shortest augmenting paths), and `keep_positions`
leaves experts that stay on a rank in the slots they had.

Compiled. O(G^3 + P G) and O(P K).
"""

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel

FORBIDDEN = 1 << 40
"""Cost of a pair of ranks that must not be matched; more than all allowed pairs together."""


@kernel
def assign(cost: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row the column of an assignment of least total cost. O(n^3).

    Rows are added one at a time along a shortest augmenting path under reduced costs.
    """
    size = len(cost)
    row_price = np.zeros(size, np.int64)
    column_price = np.zeros(size, np.int64)
    row_of = np.full(size, -1, np.int64)
    came_from = np.empty(size, np.int64)
    distance = np.empty(size, np.int64)
    is_done = np.empty(size, np.bool_)
    for start in range(size):
        distance[:] = np.int64(1) << 62
        is_done[:] = False
        row = start
        column = -1
        reached = np.int64(0)
        while True:
            nearest = -1
            for candidate in range(size):
                if is_done[candidate]:
                    continue
                reduced = reached + cost[row, candidate] - row_price[row] - column_price[candidate]
                if reduced < distance[candidate]:
                    distance[candidate] = reduced
                    came_from[candidate] = column
                if nearest < 0 or distance[candidate] < distance[nearest]:
                    nearest = candidate
            column = nearest
            reached = distance[column]
            is_done[column] = True
            if row_of[column] < 0:
                break
            row = row_of[column]
        row_price[start] += reached
        for candidate in range(size):
            if is_done[candidate] and candidate != column:
                slack = reached - distance[candidate]
                column_price[candidate] -= slack
                row_price[row_of[candidate]] += slack
        while column >= 0:
            previous = came_from[column]
            row_of[column] = row_of[previous] if previous >= 0 else start
            column = previous
    result = np.empty(size, np.int64)
    for column in range(size):
        result[row_of[column]] = column
    return result


@kernel
def match_layers(
    slots: NDArray[np.int32],
    current: NDArray[np.int32],
    num_experts: int,
    rank_up: NDArray[np.bool_],
    node_of: NDArray[np.int64],
    spread: int,
    near_price: int,
    far_price: int,
) -> None:
    """Rename the live ranks of every layer of `slots` [L, P], in place, so that least must move.

    If copies must be spread over nodes, ranks are renamed only within their node.
    """
    num_ranks = len(rank_up)
    width = slots.shape[1] // num_ranks
    live = np.flatnonzero(rank_up)
    num_live = len(live)
    on_rank = np.zeros((num_experts, num_ranks), np.bool_)
    on_node = np.zeros((num_experts, int(node_of.max()) + 1), np.bool_)
    cost = np.zeros((num_live, num_live), np.int64)
    before = np.empty(slots.shape[1], np.int32)
    for layer in range(len(slots)):
        on_rank[:] = False
        on_node[:] = False
        for slot in range(slots.shape[1]):
            expert = current[layer, slot]
            if expert != num_experts:
                on_rank[expert, slot // width] = True
                on_node[expert, node_of[slot // width]] = True
        cost[:] = 0
        for index in range(num_live):
            for other in range(num_live):
                rank = live[other]
                if spread and node_of[live[index]] != node_of[rank]:
                    cost[index, other] = FORBIDDEN
                    continue
                for slot in range(live[index] * width, (live[index] + 1) * width):
                    expert = slots[layer, slot]
                    if expert != num_experts and not on_rank[expert, rank]:
                        is_near = on_node[expert, node_of[rank]]
                        cost[index, other] += near_price if is_near else far_price
        new_name = assign(cost)
        before[:] = slots[layer]
        for index in range(num_live):
            source = live[index] * width
            target = live[new_name[index]] * width
            slots[layer, target : target + width] = before[source : source + width]


@kernel
def finish_layers(
    slots: NDArray[np.int32],
    current: NDArray[np.int32],
    layers: NDArray[np.int64],
    num_experts: int,
    width: int,
    node_of: NDArray[np.int64],
    num_moves: NDArray[np.int64],
    num_far_moves: NDArray[np.int64],
) -> None:
    """Put experts that stay on a rank back into their slots, in place, and count the moves [L]."""
    on_node = np.zeros((num_experts, int(node_of.max()) + 1), np.bool_)
    for layer in layers:
        keep_positions(slots[layer], current[layer], width, num_experts)
        on_node[:] = False
        for slot in range(slots.shape[1]):
            if current[layer, slot] != num_experts:
                on_node[current[layer, slot], node_of[slot // width]] = True
        num_moves[layer] = 0
        num_far_moves[layer] = 0
        for slot in range(slots.shape[1]):
            expert = slots[layer, slot]
            if expert == num_experts or expert == current[layer, slot]:
                continue
            # Experts that the rank held are at their old slots now, so this one is new to it.
            num_moves[layer] += 1
            num_far_moves[layer] += not on_node[expert, node_of[slot // width]]


@kernel
def keep_positions(
    slots: NDArray[np.int32], old: NDArray[np.int32], width: int, num_experts: int
) -> None:
    """Reorder each rank of `slots`, in place, so that experts it held keep their slot."""
    arrived = np.empty(width, np.int32)
    for start in range(0, len(slots), width):
        num_arrived = 0
        for slot in range(start, start + width):
            expert = slots[slot]
            if expert == num_experts or expert == old[slot]:
                continue
            is_known = False
            for other in range(start, start + width):
                is_known = is_known or old[other] == expert
            if not is_known:
                arrived[num_arrived] = expert
                num_arrived += 1
        reorder_rank(slots, old, start, width, num_experts, arrived[:num_arrived])


@kernel
def reorder_rank(
    slots: NDArray[np.int32],
    old: NDArray[np.int32],
    start: int,
    width: int,
    num_experts: int,
    arrived: NDArray[np.int32],
) -> None:
    """Write one rank: experts that stay at their old slots, then arrivals in the free ones."""
    stays = np.zeros(width, np.bool_)
    for offset in range(width):
        expert = old[start + offset]
        for other in range(start, start + width):
            if expert != num_experts and slots[other] == expert:
                stays[offset] = True
        for other in range(start, start + offset):
            if old[other] == expert:  # doubled before: only the first place counts
                stays[offset] = False
    position = 0
    for offset in range(width):
        if stays[offset]:
            slots[start + offset] = old[start + offset]
        elif position < len(arrived):
            slots[start + offset] = arrived[position]
            position += 1
        else:
            slots[start + offset] = num_experts
