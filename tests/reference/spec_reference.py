"""Plain twins of the compiled verify-length kernels: sort everything, try every budget.

Survivals are floats here and units there; ties are settled by the same rule.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Place = tuple[int, int]
"""(request, position)."""


def survival(confidence: NDArray[np.float64]) -> NDArray[np.float64]:
    """[R, K] products of the confidences up to each position."""
    return np.cumprod(confidence, axis=1)


def survival_units(confidence: NDArray[np.float64]) -> NDArray[np.int64]:
    """[R, K] survival in whole 2**-30, rounded down."""
    return (survival(confidence) * 2**30).astype(np.int64)


def in_order(value: NDArray[np.generic]) -> list[Place]:
    """Places from the best value down; ties by position, then request."""
    num_requests, num_positions = value.shape
    places = [(r, k) for r in range(num_requests) for k in range(num_positions)]
    return sorted(places, key=lambda place: (-value[place], place[1], place[0]))


def rates(value: NDArray[np.generic], order: Sequence[Place], cost: Sequence[float]) -> list[float]:
    """Emitted tokens a second of every budget 0..N; `cost[n]` is the time with n drafts."""
    emitted = [float(value.shape[0])]
    for place in order:
        emitted.append(emitted[-1] + float(value[place]))
    return [tokens / cost[n] for n, tokens in enumerate(emitted)]


def best_budget(rate: Sequence[float], cost: Sequence[float]) -> int:
    """The smallest budget that no other beats by more than rounding, filled up to its tier."""
    best = 0
    for n, value in enumerate(rate):
        if value > rate[best] * (1 + 1e-9):
            best = n
    return fill_tier(best, cost)


def fill_tier(n: int, cost: Sequence[float]) -> int:
    """The last budget that costs the same as `n`."""
    while n + 1 < len(cost) and cost[n + 1] == cost[n]:
        n += 1
    return n


def lengths_of(places: Sequence[Place], num_requests: int) -> list[int]:
    """Verify lengths of the chosen places; each request's must be a prefix."""
    chosen = [sorted(k for r, k in places if r == request) for request in range(num_requests)]
    assert all(positions == list(range(len(positions))) for positions in chosen)
    return [len(positions) for positions in chosen]


def convex_minorant(cost: Sequence[float]) -> list[float]:
    """The largest convex function below the points (n, cost[n])."""
    n = len(cost)
    return [
        min(
            cost[i] if i == j else cost[i] + (cost[j] - cost[i]) * (at - i) / (j - i)
            for i in range(at + 1)
            for j in range(at, n)
        )
        for at in range(n)
    ]


def early_stop(emitted: Sequence[float], minorant: Sequence[float], cost: Sequence[float]) -> int:
    """Algorithm 1 on the convex minorant, then up to the end of the tier."""
    n = 0
    while n + 1 < len(emitted) and emitted[n + 1] / minorant[n + 1] > emitted[n] / minorant[n] * (
        1 + 1e-9
    ):
        n += 1
    return fill_tier(n, cost)


def learn_outcomes(
    confidence: NDArray[np.float64],
    verified: NDArray[np.int64],
    accepted: NDArray[np.int64],
    parameters: NDArray[np.float64],
    curvature: NDArray[np.float64],
    keep: float,
) -> None:
    """One Newton step a position; `parameters` [K, 2] and `curvature` [K, 3] change in place."""
    edge = 1.0 / (1.0 + np.exp(12.0))
    logits = np.clip(confidence, edge, 1.0 - edge)
    logits = np.log(logits / (1.0 - logits))
    for k in range(len(parameters)):
        is_seen = (verified > k) & (accepted >= k)
        x, y = logits[is_seen, k], (accepted > k)[is_seen].astype(float)
        p = 1.0 / (1.0 + np.exp(-(parameters[k, 0] * x + parameters[k, 1])))
        weight = p * (1.0 - p) * keep ** np.arange(len(x) - 1, -1, -1)
        seen = np.array([np.sum(weight * x * x), np.sum(weight), np.sum(weight * x)])
        curvature[k] = curvature[k] * keep ** len(x) + seen
        square, one, cross = curvature[k]
        gradient = np.array([np.sum((p - y) * x), np.sum(p - y)])
        hessian = np.array([[square + 1.0, cross], [cross, one + 1.0]])
        moved = parameters[k] - np.linalg.solve(hessian, gradient)
        parameters[k] = np.clip(moved, [0.1, -12.0], [10.0, 12.0])
