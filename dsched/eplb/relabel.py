"""Make a new placement look as much like the old one as it can, at no cost in balance.

Which rank is called which does not matter to a fresh plan, and neither does the order of slots
inside a rank. `match_ranks` renames the ranks so that as many experts as possible are already
there (an assignment problem, solved exactly by shortest augmenting paths), and `keep_positions`
leaves experts that stay on a rank in the slots they had.

Compiled. O(G^3 + P G) and O(P K).
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from dsched.eplb.search import Holding
from dsched.eplb.state import LayerState

FORBIDDEN = 1 << 40
"""Cost of a pair of ranks that must not be matched; more than all allowed pairs together."""


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def match_ranks(state: LayerState, slots: NDArray[np.int32], width: int, holding: Holding) -> None:
    """Rename the live ranks of `slots`, in place, so that moving there costs least.

    If copies must be spread over nodes, ranks are renamed only within their node.
    """
    num_live = len(state.order)
    num_experts = len(state.weight) - 1
    live = np.sort(state.order)
    cost = np.zeros((num_live, num_live), np.int64)
    for index in range(num_live):
        for slot in range(live[index] * width, (live[index] + 1) * width):
            expert = slots[slot]
            if expert == num_experts:
                continue
            for other in range(num_live):
                rank = live[other]
                if not holding.on_rank[expert, rank]:
                    is_near = holding.on_node[expert, state.node_of[rank]]
                    cost[index, other] += holding.near_price if is_near else holding.far_price
    if state.spread:
        for index in range(num_live):
            for other in range(num_live):
                if state.node_of[live[index]] != state.node_of[live[other]]:
                    cost[index, other] = FORBIDDEN
    new_name = assign(cost)
    before = slots.copy()
    for index in range(num_live):
        source = live[index] * width
        target = live[new_name[index]] * width
        for offset in range(width):
            slots[target + offset] = before[source + offset]


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
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
        for other in range(start, start + width):
            if old[start + offset] != num_experts and slots[other] == old[start + offset]:
                stays[offset] = True
    position = 0
    for offset in range(width):
        if stays[offset]:
            slots[start + offset] = old[start + offset]
        elif position < len(arrived):
            slots[start + offset] = arrived[position]
            position += 1
        else:
            slots[start + offset] = num_experts
