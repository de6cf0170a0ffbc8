"""Plain numpy twin of the compiled part of the decision trace."""

import numpy as np
from numpy.typing import NDArray

from dsched.routing.snapshot import NUM_VIEW_ROWS


def plain_changes(
    table: NDArray[np.int64], prices: NDArray[np.float64], seen: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """(cell, increase) of each cell of the view that differs from `seen`, row by row."""
    view = np.vstack([table, prices.view(np.int64)])
    increase = view - seen
    rows, ranks = np.nonzero(view != seen)
    return [
        (int(rank) * NUM_VIEW_ROWS + int(row), int(increase[row, rank]))
        for row, rank in zip(rows, ranks, strict=True)
    ]
