"""Cost models as numba kernels call them: arrays and numbers, no objects."""

import numba as nb
import numpy as np
from numpy.typing import NDArray


@nb.njit(cache=True, nogil=True)
def curve_ns(
    tier_tokens: NDArray[np.int64], tier_ns: NDArray[np.int64], slope_ns: float, num_tokens: int
) -> float:
    """Return the nanoseconds of a step of `num_tokens`, as `StepCostCurve.seconds`. O(log T)."""
    last = len(tier_tokens) - 1
    if num_tokens > tier_tokens[last]:
        above: float = tier_ns[last] + (num_tokens - tier_tokens[last]) * slope_ns
        return above
    low = 0
    high = last
    while low < high:
        middle = (low + high) // 2
        if tier_tokens[middle] < num_tokens:
            low = middle + 1
        else:
            high = middle
    return float(tier_ns[low])
