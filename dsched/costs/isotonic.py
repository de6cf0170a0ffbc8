"""Non-decreasing least-squares fit: more tokens never take less time.

Measured step times dip by noise. A dip makes the tokens behind it look free, and a planner that
maximises tokens per second then asks for exactly those; so every table is made monotone first.
"""

import numpy as np
from numpy.typing import NDArray


def isotonic(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-decreasing sequence nearest to `values` in weighted least squares. O(N).

    Pool-adjacent-violators (Ayer et al. 1955). Both arrays [N]; weights are positive.

    >>> isotonic(np.array([10.0, 9.0, 12.0]), np.ones(3)).tolist()
    [9.5, 9.5, 12.0]
    """
    means: list[float] = []
    masses: list[float] = []
    sizes: list[int] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        means.append(value)
        masses.append(weight)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mass = masses[-2] + masses[-1]
            mean = (means[-2] * masses[-2] + means[-1] * masses[-1]) / mass
            size = sizes[-2] + sizes[-1]
            del means[-1], masses[-1], sizes[-1]
            means[-1], masses[-1], sizes[-1] = mean, mass, size
    return np.repeat(np.array(means, dtype=np.float64), sizes)
