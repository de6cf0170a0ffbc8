"""Keep a step cost curve true while the engine runs.

In:  a curve, from a table or a start-up profile, and the measured time of each step.
Out: the curve to plan with.

Two kinds of error are cured. A table's tiers are noisy one by one, and a planner hunts for the tier
that looks cheapest, so it finds the luckiest measurement: `smooth_curve` takes the noise out. And
the whole curve drifts (longer contexts, other expert loads, a table of another machine): measured
steps move an offset and a factor, T(B) = offset + factor * start(B), by least squares with
forgetting.

Moving the tiers one by one was tried and rejected: the planner runs in one or two tiers, so those
rise to the truth and leave a shelf above them on which further tokens look free.
"""

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsched.costs import StepCostCurve

NEIGHBOURS: Final = 4
"""Tiers on each side that a tier's distance from the smooth form is averaged over."""

MISFIT_SIGMAS: Final = 2.5
"""How many standard deviations of the noise the largest contradiction in a curve is taken for: what
the largest of a hundred is."""

MIN_TIERS: Final = 6
"""Curves of fewer tiers are left alone: noise cannot be told from shape."""

REFRESH_STEPS: Final = 32
"""Steps between new curves: a curve's lookup table costs more than a plan."""

MAX_FACTOR: Final = 10.0
"""A curve is never stretched more than this: such times are another machine's."""


def smooth_curve(curve: StepCostCurve) -> StepCostCurve:
    """Return `curve` with the noise of single tiers taken out; the last slope stays.

    A smooth form a + b B + c sqrt(B) is fitted to all tiers. What the curve has beyond it is
    averaged over neighbouring tiers and kept as far as it exceeds what the noise would leave of
    itself. The noise is read from the samples that contradicted the curve, falling while the
    tokens rise (`misfit`). So a clean curve does not change, jumps included, and of a noisy one
    the smooth form remains.
    """
    tokens, ns = curve.tier_tokens.astype(np.float64), curve.tier_ns.astype(np.float64)
    if len(tokens) < MIN_TIERS or curve.is_flat:
        return curve
    form = _smooth_form(tokens, ns)
    beyond = ns / form - 1.0
    noise = curve.misfit / MISFIT_SIGMAS
    window = np.ones(2 * NEIGHBOURS + 1)
    counts = np.convolve(np.ones(len(beyond)), window, mode="same")
    local = np.convolve(beyond, window, mode="same") / counts
    kept = _share_kept(local, noise / np.sqrt(window.size))
    details = _share_kept(beyond - local, noise)
    smooth = form * (1.0 + kept * local + details * (beyond - local))
    smooth = np.maximum.accumulate(np.maximum(smooth, 1.0))
    return replace(curve, tier_ns=np.rint(smooth).astype(np.int64))


def _smooth_form(tokens: NDArray[np.float64], ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """a + b B + c sqrt(B) with the least relative squared error, at least a tenth of `ns`."""
    basis = np.stack((np.ones_like(tokens), tokens, np.sqrt(tokens)), axis=1) / ns[:, None]
    scale = np.linalg.norm(basis, axis=0)
    solution, *_ = np.linalg.lstsq(basis / scale, np.ones_like(ns), rcond=None)
    form: NDArray[np.float64] = np.maximum(basis @ (solution / scale), 0.1) * ns
    return form


def _share_kept(signal: NDArray[np.float64], noise: float) -> float:
    """The share of `signal`'s variance that `noise` does not explain."""
    variance = float(np.mean(signal**2))
    return max(0.0, 1.0 - noise**2 / variance) if variance > 0.0 else 0.0


class CurveTracker:
    """State: the curve that steps are planned with, moved by their measured times."""

    def __init__(
        self, start: StepCostCurve, *, memory: float = 500.0, caution: float = 0.005
    ) -> None:
        """`memory`: steps after which one has lost most of its weight. `caution`: how much is
        believed in the start: the variance of step times, relative, over that of the start's
        errors."""
        if memory < 1.0 or caution <= 0.0:
            raise ValueError(f"memory {memory} must be at least 1 and caution {caution} positive")
        self.start = smooth_curve(start)
        self.curve = self.start
        self.num_steps = 0
        self._keep = 1.0 - 1.0 / memory
        self._unit_seconds = float(self.start.tier_ns[0]) / 1e9
        self._caution = caution
        self._squares = np.zeros((2, 2))
        self._products = np.zeros(2)

    def apply(self, *, num_tokens: int, seconds: float) -> None:
        """Learn from one step: its tokens (>= 1) and its measured time without drafting."""
        if not (np.isfinite(seconds) and seconds > 0.0):
            raise ValueError(f"a step took {seconds} seconds; times are positive and finite")
        expected = self.start.seconds(num_tokens)
        # Relative errors: long steps must not outweigh short ones.
        features = np.array([self._unit_seconds, expected]) / expected
        self._squares = self._keep * self._squares + np.outer(features, features)
        self._products = self._keep * self._products + features * (seconds / expected)
        self.num_steps += 1
        if self.num_steps % REFRESH_STEPS == 0:
            self.curve = self._moved()

    @property
    def offset_seconds(self) -> float:
        """What is added to the start's time."""
        return float(self._solution()[0]) * self._unit_seconds

    @property
    def factor(self) -> float:
        """What the start's time is multiplied with."""
        return float(self._solution()[1])

    def _solution(self) -> NDArray[np.float64]:
        """Ridge around (0, 1)."""
        squares = self._squares + self._caution * np.eye(2)
        products = self._products + self._caution * np.array([0.0, 1.0])
        offset, factor = np.linalg.solve(squares, products)
        return np.array([offset, min(max(factor, 1.0 / MAX_FACTOR), MAX_FACTOR)])

    def _moved(self) -> StepCostCurve:
        ns = self.offset_seconds * 1e9 + self.factor * self.start.tier_ns
        return replace(
            self.start,
            tier_ns=np.rint(np.maximum(ns, 1.0)).astype(np.int64),
            slope_ns=self.factor * self.start.slope_ns,
        )
