"""The cost curve while running: smoothed where it is noisy, moved to what is measured."""

import numpy as np
import pytest

from dsched.costs import StepCostCurve
from dsched.sim.spec import graph_tiers
from dsched.spec_decode.tracker import REFRESH_STEPS, CurveTracker, smooth_curve

TIERS = np.array(graph_tiers(1024))


def curve_of(seconds: np.ndarray) -> StepCostCurve:
    return StepCostCurve.from_samples(TIERS, seconds, tiers=TIERS)


LINE = 0.015 + 3e-5 * TIERS


class TestSmoothCurve:
    @pytest.mark.parametrize("seed", range(5))
    def test_noise_of_ten_percent_becomes_small(self, seed: int) -> None:
        noise = np.random.default_rng(seed).normal(0.0, 0.1, len(TIERS))
        noisy = curve_of(LINE * (1.0 + noise))

        smooth = smooth_curve(noisy)

        error = np.abs(smooth.tier_ns / 1e9 / LINE - 1.0)
        assert error.mean() < 0.04
        assert error.mean() < 0.75 * np.abs(noisy.tier_ns / 1e9 / LINE - 1.0).mean()
        assert (np.diff(smooth.tier_ns) >= 0).all()

    def test_clean_curve_with_a_jump_stays(self) -> None:
        jump = curve_of(LINE + 0.02 * (TIERS > 256))

        np.testing.assert_allclose(smooth_curve(jump).tier_ns, jump.tier_ns, rtol=1e-6)

    def test_short_and_flat_curves_are_left_alone(self) -> None:
        short = StepCostCurve.from_samples([1, 2, 4], [0.01, 0.009, 0.02])
        flat = curve_of(np.full(len(TIERS), 0.01))

        assert smooth_curve(short) is short
        assert smooth_curve(flat) is flat


class TestCurveTracker:
    def run(self, truth: np.ndarray, start: StepCostCurve, *, noise: float = 0.01) -> CurveTracker:
        """A thousand steps in a handful of tiers around 300 tokens."""
        tracker = CurveTracker(start)
        rng = np.random.default_rng(0)
        for _ in range(1_000):
            index = int(rng.integers(30, 45))
            seconds = truth[index] * (1.0 + rng.normal(0.0, noise))
            tracker.apply(num_tokens=int(TIERS[index]), seconds=seconds)
        return tracker

    def test_a_halved_slope_is_found(self) -> None:
        """Also at tiers that never ran: the correction is one for the whole curve."""
        tracker = self.run(LINE, curve_of(0.015 + 1.5e-5 * TIERS))

        slope = np.diff(tracker.curve.tier_ns[[10, 60]]) / 1e9 / np.diff(LINE[[10, 60]])
        assert slope == pytest.approx(1.0, abs=0.2)
        np.testing.assert_allclose(tracker.curve.tier_ns[30:45] / 1e9, LINE[30:45], rtol=0.01)

    def test_a_slower_machine_is_found(self) -> None:
        tracker = self.run(1.4 * LINE, curve_of(LINE))

        np.testing.assert_allclose(tracker.curve.tier_ns / 1e9, 1.4 * LINE, rtol=0.1)

    def test_a_right_curve_stays(self) -> None:
        tracker = self.run(LINE, curve_of(LINE))

        np.testing.assert_allclose(tracker.curve.tier_ns / 1e9, LINE, rtol=0.05)
        np.testing.assert_allclose(tracker.curve.tier_ns[30:45] / 1e9, LINE[30:45], rtol=0.005)

    def test_curves_come_seldom(self) -> None:
        """A new curve is a new lookup table."""
        tracker = CurveTracker(curve_of(LINE))
        curves = set()
        for _ in range(2 * REFRESH_STEPS):
            tracker.apply(num_tokens=64, seconds=0.02)
            curves.add(id(tracker.curve))

        assert len(curves) == 3

    def test_absurd_times_cannot_turn_the_curve(self) -> None:
        tracker = CurveTracker(curve_of(LINE))
        for tokens, seconds in [(8, 1e3), (1024, 1e-6)] * REFRESH_STEPS:
            tracker.apply(num_tokens=tokens, seconds=seconds)

        assert (np.diff(tracker.curve.tier_ns) >= 0).all()
        assert (tracker.curve.tier_ns > 0).all()

    @pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
    def test_impossible_times_are_refused(self, seconds: float) -> None:
        with pytest.raises(ValueError, match="times are positive"):
            CurveTracker(curve_of(LINE)).apply(num_tokens=8, seconds=seconds)

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="memory 0"):
            CurveTracker(curve_of(LINE), memory=0.0)
