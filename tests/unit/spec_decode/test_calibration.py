"""Calibration: metrics by hand, temperatures recovered, files of the engines, online learning."""

import json
import math

import numpy as np
import pytest
import spec_reference as twin

from dsched.sim.spec import draft_trace
from dsched.spec_decode import fit_temperatures
from dsched.spec_decode.calibration import (
    OnlineCalibration,
    Temperatures,
    brier_score,
    expected_calibration_error,
    learn_outcomes,
)


def distorted(confidence: np.ndarray, *, scale: float, shift: float = 0.0) -> np.ndarray:
    logits = np.log(confidence / (1.0 - confidence))
    return 1.0 / (1.0 + np.exp(-(scale * logits + shift)))


def product_error(confidence: np.ndarray, accepted: np.ndarray) -> float:
    """Largest calibration error of the products [..., K] over the positions."""
    survival = np.cumprod(confidence, axis=-1)
    return max(
        expected_calibration_error(survival[..., k], accepted > k)
        for k in range(confidence.shape[-1])
    )


class TestMetrics:
    def test_error_by_hand(self) -> None:
        """Bins of 1/10: .95 twice, one right, is off by .45; .15 twice, none right, by .15."""
        error = expected_calibration_error([0.95, 0.95, 0.15, 0.15], [1, 0, 0, 0], num_bins=10)

        assert error == pytest.approx((2 * 0.45 + 2 * 0.15) / 4)

    def test_brier_by_hand(self) -> None:
        assert brier_score([0.8, 0.4], [1, 0]) == pytest.approx((0.04 + 0.16) / 2)

    def test_certain_and_right_has_no_error(self) -> None:
        assert expected_calibration_error([1.0, 0.0], [1, 0]) == 0.0
        assert expected_calibration_error([], []) == 0.0
        assert brier_score([], []) == 0.0

    def test_wrong_input(self) -> None:
        with pytest.raises(ValueError, match=r"confidence holds 1\.5"):
            expected_calibration_error([1.5], [1])
        with pytest.raises(ValueError, match="2 predictions have 1 outcomes"):
            brier_score([0.5, 0.5], [1])


class TestFitTemperatures:
    def test_over_confidence_is_cured(self) -> None:
        """Logits twice too large: a temperature near 2 at each position."""
        trace = draft_trace(1, num_requests=100, num_steps=100)
        shown = distorted(trace.confidence, scale=2.0).reshape(-1, 5)
        accepted = trace.accepted.ravel()

        fit = fit_temperatures(shown, accepted, dataset="simulated")

        assert fit.temperatures == pytest.approx([2.0] * 5, rel=0.15)
        assert min(fit.ece_before) > 0.05
        assert max(fit.ece_after) < 0.02
        assert product_error(fit.apply(shown), accepted) == pytest.approx(max(fit.ece_after))
        assert (fit.num_samples, fit.dataset) == (10_000, "simulated")

    def test_outcomes_of_each_token_are_understood_too(self) -> None:
        """What comes behind a rejected token does not count, whatever it says."""
        confidence = np.random.default_rng(0).uniform(0.1, 0.9, (200, 2))
        kept = np.random.default_rng(1).integers(0, 3, 200)
        outcomes = np.stack((kept >= 1, np.where(kept == 0, kept % 2 == 0, kept >= 2)), axis=1)

        assert fit_temperatures(confidence, outcomes) == fit_temperatures(confidence, kept)
        with pytest.raises(ValueError, match="accepted holds 2"):
            fit_temperatures([[0.5, 0.5]], [[2, 0]])

    def test_true_confidences_stay(self) -> None:
        trace = draft_trace(2, num_requests=100, num_steps=100)

        fit = fit_temperatures(trace.confidence.reshape(-1, 5), trace.accepted.ravel())

        assert fit.temperatures == pytest.approx([1.0] * 5, rel=0.2)

    def test_trimmed_blocks_give_the_same_answer(self) -> None:
        """Verifying likely tokens only must not make the fit believe that they are likelier."""
        trace = draft_trace(3, num_requests=200, num_steps=100)
        shown = distorted(trace.confidence, scale=2.0).reshape(-1, 5)
        verified = (np.cumprod(shown, axis=1) > 0.4).sum(axis=1)

        fit = fit_temperatures(
            shown, np.minimum(trace.accepted.ravel(), verified), verified=verified
        )

        assert fit.temperatures[:3] == pytest.approx([2.0] * 3, rel=0.3)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([0.5], [1]), r"confidence has shape \(1,\)"),
            (([[1.5]], [1]), r"confidence holds 1\.5"),
            (([[0.5]], [2]), "2 accepted of 1"),
            (([[0.5]], [1, 1]), "shape"),
        ],
    )
    def test_wrong_input(self, arguments: tuple[object, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fit_temperatures(*arguments)


class TestTemperatures:
    def test_wrong_number_of_temperatures_raises(self) -> None:
        with pytest.raises(ValueError, match="3 temperatures do not fit"):
            Temperatures(temperatures=(1.0, 1.0, 1.0)).apply(np.full((2, 5), 0.5))

    @pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
    def test_temperature_that_is_none_raises(self, value: float) -> None:
        with pytest.raises(ValueError, match="is not positive"):
            Temperatures(temperatures=(1.0, value))

    def test_file_of_sglang(self) -> None:
        text = (
            '{"temperatures": [1.35, 1.3], "dataset": "d", "num_samples": 7, '
            '"ece_before": [0.1, 0.2], "ece_after": [0.01, 0.02]}'
        )

        read = Temperatures.from_json(text)

        assert read.temperatures == (1.35, 1.3)
        assert json.loads(read.to_json()) == json.loads(text)

    def test_file_of_tensorrt_llm(self) -> None:
        assert Temperatures.from_json('{"sts_temperatures": [1.5]}').temperatures == (1.5,)

    @pytest.mark.parametrize(
        "text", ["{}", "[]", '{"temperatures": "hot"}', "{", '{"temperatures": [-1]}']
    )
    def test_other_files_are_refused(self, text: str) -> None:
        with pytest.raises(ValueError):  # noqa: PT011 (each says what is wrong in its own words)
            Temperatures.from_json(text)


class TestOnlineCalibration:
    @pytest.mark.parametrize(
        ("scale", "shift"), [(2.0, 0.3), (1.0, 0.5), (0.6, 0.0)], ids=["sure", "shifted", "shy"]
    )
    def test_ten_thousand_blocks_bring_the_error_under_three_percent(
        self, scale: float, shift: float
    ) -> None:
        """From 10 % and more, though only likely tokens were verified."""
        trace = draft_trace(4, num_requests=64, num_steps=312, mixes=("chat",))
        shown = distorted(trace.confidence, scale=scale, shift=shift)
        calibration = OnlineCalibration(5)

        for confidence, accepted in zip(shown[:156], trace.accepted[:156], strict=True):
            survival = np.cumprod(calibration.calibrate(confidence), axis=1)
            verified = (survival > 0.3).sum(axis=1)
            calibration.apply(
                confidence, verified=verified, accepted=np.minimum(accepted, verified)
            )

        assert product_error(shown[156:], trace.accepted[156:]) > 0.1
        assert (
            product_error(
                calibration.calibrate(shown[156:].reshape(-1, 5)).reshape(156, 64, 5),
                trace.accepted[156:],
            )
            < 0.03
        )
        assert calibration.calibration_error[:2].max() < 0.06
        assert 0.0 < calibration.brier.min() < calibration.brier.max() < 0.3

    def test_starts_as_it_is_told(self) -> None:
        assert OnlineCalibration(2).calibrate([[0.3, 0.9]]).tolist() == [pytest.approx([0.3, 0.9])]
        start = Temperatures(temperatures=(2.0, 4.0))
        assert OnlineCalibration(2, start=start).calibrate([[0.3, 0.9]]).tolist() == [
            pytest.approx(start.apply([0.3, 0.9]).tolist())
        ]

    def test_only_reached_tokens_teach(self) -> None:
        """Tokens behind a rejected one, or not verified, say nothing."""
        calibration = OnlineCalibration(3)
        for _ in range(200):
            calibration.apply(np.full((10, 3), 0.5), verified=[2] * 10, accepted=[0] * 10)

        assert calibration.calibrate([[0.5, 0.5, 0.5]])[0, 0] < 0.1
        assert calibration.calibrate([[0.5, 0.5, 0.5]])[0, 1:].tolist() == [0.5, 0.5]

    def test_certain_tokens_that_fail_are_corrected(self) -> None:
        """A confidence of exactly 1 or 0 has no logit, and is still learned from."""
        calibration = OnlineCalibration(1)
        for _ in range(500):
            calibration.apply(np.ones((4, 1)), verified=[1] * 4, accepted=[1, 0, 1, 0])

        assert 0.4 < calibration.calibrate([[1.0]])[0, 0] < 0.75

    def test_learning_equals_its_twin(self) -> None:
        rng = np.random.default_rng(5)
        parameters = [np.array([[1.0, 0.0], [0.7, 0.2]]) for _ in range(2)]
        curvature = [np.full((2, 3), [5.0, 5.0, 0.0]) for _ in range(2)]
        for _ in range(20):
            confidence = rng.choice([0.0, 0.3, 0.9, 1.0], (6, 2))
            verified = rng.integers(0, 3, 6)
            accepted = np.minimum(rng.integers(0, 3, 6), verified)
            learn_outcomes(confidence, verified, accepted, parameters[0], curvature[0], 0.99)
            twin.learn_outcomes(confidence, verified, accepted, parameters[1], curvature[1], 0.99)

        np.testing.assert_allclose(parameters[0], parameters[1], rtol=1e-9)
        np.testing.assert_allclose(curvature[0], curvature[1], rtol=1e-9)

    def test_wrong_input(self) -> None:
        with pytest.raises(ValueError, match="2 temperatures do not fit 3 positions"):
            OnlineCalibration(3, start=Temperatures(temperatures=(1.0, 1.0)))
        with pytest.raises(ValueError, match=r"confidence has shape \(1, 2\)"):
            OnlineCalibration(3).calibrate([[0.5, 0.5]])
        with pytest.raises(ValueError, match="outcomes of 2 requests"):
            OnlineCalibration(1).apply([[0.5]], verified=[1, 1], accepted=[1, 1])
        with pytest.raises(ValueError, match=r"memory 0\.5"):
            OnlineCalibration(1, memory=0.5)
