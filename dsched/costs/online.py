"""Correct a fitted model while it is in use: one factor for each part of its time.

A model fitted elsewhere has the right shape and the wrong scale: another clock, another expert
skew, a neighbour on the link. Recursive least squares learns a factor for each part (fixed time,
tokens, attention, ...) from measured steps. Both sides are divided by the prediction, so that a
short step teaches as much as a long one, and old steps are forgotten at a rate of 0.95 to 0.98.

Three guards. A factor stays between MIN_FACTOR and MAX_FACTOR: no part becomes free. A step far
off the prediction is left out as an outlier, unless OUTLIERS_IN_A_ROW agree: then it is the world
that changed. A persistent small bias (a CUSUM of the errors) also counts as change. After a change
the filter trusts its past less and learns faster.

The update is a numba kernel on arrays of the state, without allocation.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel

DEFAULT_FORGETTING = 0.98
MIN_FORGETTING = 0.9
"""Below, ten steps make a model and it follows the noise."""

MIN_FACTOR = 0.02
MAX_FACTOR = 50.0

PRIOR_VARIANCE = 36.0
"""Variance of a factor before any step, in units of the variance of a step's noise: a start that
is off by 30 % against steps that scatter by 5 %."""

OUTLIER_ERROR = 0.3
"""Relative error of a step that is not believed on its own."""
OUTLIERS_IN_A_ROW = 3

CUSUM_SLACK = 0.75
"""Bias below this many standard deviations of the noise is not counted as change."""
CUSUM_ALARM = 6.0
"""Standard deviations of bias, summed up, that count as change."""

_NOISE = 0
_CUSUM_UP = 1
_CUSUM_DOWN = 2
_OUTLIERS = 3
_NUM_STEPS = 4
_NUM_CHANGES = 5
_NUM_SKIPPED = 6
_NUM_FACTS = 7


class OnlineState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that online learning has learned; `OnlineFactors.restore` goes on from it."""

    factors: list[float]
    covariance: list[list[float]]
    facts: list[float]
    forgetting: float


class OnlineFactors:
    """Factors [F] of a model's parts, learned from steps. Mutable; owned by one model."""

    __slots__ = ("_covariance", "_facts", "_gain", "_row", "factors", "forgetting")

    def __init__(self, num_factors: int, *, forgetting: float = DEFAULT_FORGETTING) -> None:
        if not MIN_FORGETTING <= forgetting <= 1.0:
            raise ValueError(f"forgetting is {forgetting}; it must be in [{MIN_FORGETTING}, 1]")
        self.forgetting = forgetting
        self.factors: NDArray[np.float64] = np.ones(num_factors)
        """[F] what to multiply each part by; 1 until a step says otherwise."""
        self._covariance = np.eye(num_factors) * PRIOR_VARIANCE
        self._facts = np.zeros(_NUM_FACTS)
        self._facts[_NOISE] = 0.05**2
        self._gain = np.zeros(num_factors)
        self._row = np.zeros(num_factors)

    @property
    def num_steps(self) -> int:
        """Steps learned from."""
        return int(self._facts[_NUM_STEPS])

    @property
    def num_skipped(self) -> int:
        """Steps left out as outliers."""
        return int(self._facts[_NUM_SKIPPED])

    @property
    def num_changes(self) -> int:
        """How often the world was found changed."""
        return int(self._facts[_NUM_CHANGES])

    @property
    def noise(self) -> float:
        """Standard deviation of a step's relative error, as seen lately."""
        return float(np.sqrt(self._facts[_NOISE]))

    def observe(self, parts: NDArray[np.float64], measured: float) -> None:
        """Learn from one step: its `parts` [F] at factor 1, and what it took, in one unit."""
        _update(
            self.factors, self._covariance, self._facts, self._gain, self._row,
            parts, measured, self.forgetting,
        )  # fmt: skip

    def save(self) -> OnlineState:
        """Return the state as plain values."""
        return OnlineState(
            factors=self.factors.tolist(),
            covariance=self._covariance.tolist(),
            facts=self._facts.tolist(),
            forgetting=self.forgetting,
        )

    @classmethod
    def restore(cls, state: OnlineState, *, num_factors: int) -> "OnlineFactors":
        """Return the factors that were saved. Raises ValueError if they are of another model."""
        _check_shape("factors", state.factors, (num_factors,))
        _check_shape("covariance", state.covariance, (num_factors, num_factors))
        _check_shape("facts", state.facts, (_NUM_FACTS,))
        online = cls(num_factors, forgetting=state.forgetting)
        online.factors[:] = np.clip(state.factors, MIN_FACTOR, MAX_FACTOR)
        online._covariance[:] = state.covariance
        online._facts[:] = state.facts
        return online


def _check_shape(name: str, value: Sequence[Any], shape: tuple[int, ...]) -> None:
    array = np.asarray(value, dtype=np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"{name} must be {shape} finite numbers, not {value}")


@kernel
def _update(
    factors: NDArray[np.float64],
    covariance: NDArray[np.float64],
    facts: NDArray[np.float64],
    gain: NDArray[np.float64],
    row: NDArray[np.float64],
    parts: NDArray[np.float64],
    measured: float,
    forgetting: float,
) -> None:
    num_factors = len(factors)
    predicted = 0.0
    for i in range(num_factors):
        predicted += factors[i] * parts[i]
    if predicted <= 0.0:
        return
    error = measured / predicted - 1.0
    if abs(error) > OUTLIER_ERROR:
        # Outliers in a row count only if they lie on one side.
        same_side = facts[_OUTLIERS] * error >= 0.0
        facts[_OUTLIERS] = (facts[_OUTLIERS] if same_side else 0.0) + (1.0 if error > 0 else -1.0)
        if abs(facts[_OUTLIERS]) < OUTLIERS_IN_A_ROW:
            facts[_NUM_SKIPPED] += 1.0
            return
        _forget(covariance, facts)
    else:
        facts[_OUTLIERS] = 0.0
        _watch_bias(covariance, facts, error)

    # Recursive least squares on parts / predicted, target measured / predicted.
    variance = 1.0
    for i in range(num_factors):
        total = 0.0
        for j in range(num_factors):
            total += covariance[i, j] * parts[j] / predicted
        row[i] = total
    for i in range(num_factors):
        variance += row[i] * parts[i] / predicted
    for i in range(num_factors):
        gain[i] = row[i] / variance
    for i in range(num_factors):
        factors[i] = min(max(factors[i] + gain[i] * error, MIN_FACTOR), MAX_FACTOR)
    largest = 0.0
    for i in range(num_factors):
        for j in range(num_factors):
            covariance[i, j] -= gain[i] * row[j]
        largest = max(largest, covariance[i, i])
    # Forgetting inflates what no step excites; the prior is as little as one can know.
    if largest < PRIOR_VARIANCE * forgetting:
        for i in range(num_factors):
            for j in range(num_factors):
                covariance[i, j] /= forgetting
    facts[_NUM_STEPS] += 1.0


@kernel
def _watch_bias(covariance: NDArray[np.float64], facts: NDArray[np.float64], error: float) -> None:
    """Follow the noise and the CUSUM of the errors; on alarm learn as if anew."""
    sigma = max(np.sqrt(facts[_NOISE]), 1e-3)
    bounded = min(max(error / sigma, -3.0), 3.0)
    facts[_NOISE] += 0.03 * ((bounded * sigma) ** 2 - facts[_NOISE])
    facts[_CUSUM_UP] = max(0.0, facts[_CUSUM_UP] + bounded - CUSUM_SLACK)
    facts[_CUSUM_DOWN] = max(0.0, facts[_CUSUM_DOWN] - bounded - CUSUM_SLACK)
    if max(facts[_CUSUM_UP], facts[_CUSUM_DOWN]) > CUSUM_ALARM:
        _forget(covariance, facts)


@kernel
def _forget(covariance: NDArray[np.float64], facts: NDArray[np.float64]) -> None:
    """Know of each factor as little as after a few steps."""
    facts[_CUSUM_UP] = 0.0
    facts[_CUSUM_DOWN] = 0.0
    facts[_NUM_CHANGES] += 1.0
    for i in range(len(covariance)):
        covariance[i, i] += PRIOR_VARIANCE / 4.0
