"""Share a budget of moves over layers: most gain for a move first.

Each layer's search leaves a trail: after so many moves, the heaviest rank carried so much. Tokens
of different layers add up, as the layers of a step run one after the other, each as long as its
heaviest rank. So the best use of a budget takes, again and again, the stretch of a trail that saves
most tokens for its moves.

Pure. O(L S^2 + N log L) for trails of S steps and N stretches taken.
"""

import heapq

import numpy as np
from numpy.typing import NDArray

Point = tuple[int, float]
"""Moves made, and tokens on the heaviest rank after them."""


def share_moves(trails: list[list[Point]], *, max_total_moves: int) -> NDArray[np.int64]:
    """Return the moves each layer may make, [L].

    A trail starts with the moves that must be made (lost experts) and rises in moves. Those first
    moves are granted in any case; the rest shares what is left.

    >>> share_moves([[(0, 100.0), (1, 90.0)], [(0, 100.0), (2, 60.0)]], max_total_moves=2)
    array([0, 2])
    """
    granted = [trail[0][0] for trail in trails]
    left = max_total_moves - sum(granted)
    heap: list[tuple[float, int, int, int]] = []
    for layer, trail in enumerate(trails):
        push_stretch(heap, layer, trail, 0)
    while heap:
        _, layer, start, end = heapq.heappop(heap)
        num_moves = trails[layer][end][0] - trails[layer][start][0]
        if num_moves > left:
            continue
        left -= num_moves
        granted[layer] += num_moves
        push_stretch(heap, layer, trails[layer], end)
    return np.array(granted, np.int64)


def push_stretch(
    heap: list[tuple[float, int, int, int]], layer: int, trail: list[Point], start: int
) -> None:
    """Offer the stretch from `start` that saves most for a move; ties go to the shorter one."""
    moves, tokens = trail[start]
    best: tuple[float, int] | None = None
    for end in range(start + 1, len(trail)):
        if trail[end][0] > moves and trail[end][1] < tokens:
            rate = (tokens - trail[end][1]) / (trail[end][0] - moves)
            if best is None or rate > best[0]:
                best = (rate, end)
    if best is not None:
        heapq.heappush(heap, (-best[0], layer, start, best[1]))
