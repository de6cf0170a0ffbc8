"""Least squares with coefficients that cannot be negative: no work takes less than no time."""

import numpy as np
from numpy.typing import NDArray

MAX_ROUNDS_PER_COLUMN = 10
"""Columns enter and leave the solution; each does so a few times at most. Beyond this the
columns are numerically equal and any of the reached solutions serves."""

_TOLERANCE = 1e-10


def nonnegative_least_squares(
    features: NDArray[np.float64], target: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return x >= 0 that minimises |features @ x - target|. Shapes [N, M] and [N].

    The active-set method of Lawson and Hanson (1974), on columns scaled to one length. Meant for
    tens of columns: each round solves a dense system.

    >>> a = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> nonnegative_least_squares(a, np.array([2.0, -1.0])).tolist()
    [2.0, 0.0]
    """
    lengths = np.linalg.norm(features, axis=0)
    scale = np.where(lengths > 0, lengths, 1.0)
    scaled = features / scale
    num_columns = features.shape[1]
    tolerance = _TOLERANCE * max(1.0, float(np.linalg.norm(target)))
    passive = np.zeros(num_columns, dtype=bool)
    x = np.zeros(num_columns, dtype=np.float64)

    for _ in range(MAX_ROUNDS_PER_COLUMN * max(num_columns, 1)):
        gradient = scaled.T @ (target - scaled @ x)
        gradient[passive | (lengths == 0)] = -np.inf
        entering = int(np.argmax(gradient)) if num_columns else 0
        if not num_columns or gradient[entering] <= tolerance:
            break
        passive[entering] = True
        x = _step_to_feasible(scaled, target, x, passive)
    return x / scale


def _step_to_feasible(
    scaled: NDArray[np.float64],
    target: NDArray[np.float64],
    x: NDArray[np.float64],
    passive: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Solve for the passive columns; while one comes out negative, stop at its zero and drop it.

    Changes `passive`. Each turn drops a column, so it ends.
    """
    while True:
        candidate = np.zeros_like(x)
        candidate[passive] = np.linalg.lstsq(scaled[:, passive], target, rcond=None)[0]
        negative = passive & (candidate <= 0)
        if not negative.any():
            return candidate
        ratios = x[negative] / (x[negative] - candidate[negative])
        x = np.maximum(x + float(ratios.min()) * (candidate - x), 0.0)
        # Rounding may leave the blocking column a hair above zero; it leaves all the same.
        blocking = np.flatnonzero(negative)[int(np.argmin(ratios))]
        x[blocking] = 0.0
        passive &= x > 0
