"""Online learning: each docstring is a sentence of its contract."""

from collections.abc import Iterator

import numpy as np
import pytest

from dsched.costs import PrefillCostModel
from dsched.costs.online import MAX_FACTOR, MIN_FACTOR, OnlineFactors, OnlineState
from dsched.rng import stream

CHUNKS = [512, 1024, 2048, 4096, 8192]
PASTS = [0, 2_048, 16_384, 65_536, 262_144]


def quadratic(scale: float = 1.0) -> PrefillCostModel:
    return PrefillCostModel.from_coefficients(
        fixed_s=16.6e-3 * scale, token_s=83.6e-6 * scale, attention_s=1.67e-10 * scale
    )


def steps(rng: np.random.Generator) -> Iterator[tuple[int, int, float]]:
    """Random chunks, contexts and a noise factor of 5 %."""
    while True:
        yield (
            int(rng.choice(CHUNKS)),
            int(rng.choice(PASTS)),
            1.0 + 0.05 * float(rng.standard_normal()),
        )


def error_pct(model: PrefillCostModel, truth: PrefillCostModel) -> float:
    """Mean error over the whole grid, without noise."""
    pairs = [(x, p) for x in CHUNKS for p in PASTS]
    return 100 * float(
        np.mean([abs(model.predict(x, p) / truth.predict(x, p) - 1) for x, p in pairs])
    )


def learn(
    model: PrefillCostModel,
    truth: PrefillCostModel,
    source: Iterator[tuple[int, int, float]],
    count: int,
) -> None:
    for _ in range(count):
        chunk, past, noise = next(source)
        model.observe(truth.predict(chunk, past) * noise, chunk, past)


def test_start_off_by_30_percent_is_right_after_50_steps() -> None:
    """Median over 20 seeds below 2 % with 5 % noise, from below and from above."""
    for scale in (0.7, 1.3):
        errors = []
        for seed in range(20):
            model = quadratic(scale)
            learn(model, quadratic(), steps(stream(seed, "steps")), 50)
            errors.append(error_pct(model, quadratic()))
        assert np.median(errors) < 2.0


def test_drift_of_20_percent_is_followed_within_40_steps() -> None:
    """Median over 20 seeds below 2 % after 40 steps of a world that got slower, or faster."""
    for drift in (1.2, 0.8):
        errors = []
        for seed in range(20):
            model, source = quadratic(), steps(stream(seed, "steps"))
            learn(model, quadratic(), source, 200)
            learn(model, quadratic(drift), source, 40)
            errors.append(error_pct(model, quadratic(drift)))
        assert np.median(errors) < 2.0


def test_single_outlier_is_left_out() -> None:
    """One step ten times too long changes nothing and is counted."""
    model, source = quadratic(), steps(stream(1, "steps"))
    learn(model, quadratic(), source, 50)
    before = model.predict(2048, 4096)

    model.observe(10 * before, 2048, 4096)

    assert model.predict(2048, 4096) == before
    assert model.online.num_skipped == 1


def test_outliers_that_agree_are_a_changed_world() -> None:
    """Twice as long for good is believed after three steps."""
    model, source = quadratic(), steps(stream(1, "steps"))
    learn(model, quadratic(), source, 50)

    learn(model, quadratic(2.0), source, 40)

    assert error_pct(model, quadratic(2.0)) < 5
    assert model.online.num_changes >= 1


def test_outliers_on_both_sides_are_not_a_change() -> None:
    """Too long, too short, too long: no side has three in a row."""
    model = quadratic()
    for factor in (3.0, 0.3, 3.0, 0.3, 3.0, 0.3):
        model.observe(model.predict(2048, 0) * factor, 2048, 0)

    assert model.online.num_steps == 0


def test_factors_stay_positive_and_bounded() -> None:
    """No measurement makes a part free or without limit."""
    model = quadratic()
    for _ in range(300):
        model.observe(1e-9, 2048, 0)
    assert model.online.factors.min() >= MIN_FACTOR

    for _ in range(300):
        model.observe(1e6, 2048, 65_536)
    assert model.online.factors.max() <= MAX_FACTOR


@pytest.mark.slow
def test_the_same_step_for_hours_does_not_wear_out_the_filter() -> None:
    """Without variety the parts cannot be told apart; their sum stays right, nothing overflows."""
    model = quadratic()
    for _ in range(20_000):
        model.observe(quadratic(1.1).predict(2048, 4096), 2048, 4096)

    assert model.predict(2048, 4096) == pytest.approx(quadratic(1.1).predict(2048, 4096), rel=1e-3)
    learn(model, quadratic(), steps(stream(2, "steps")), 100)
    assert error_pct(model, quadratic()) < 3


def test_measurement_that_cannot_be_is_refused() -> None:
    """What was learned stays when a clock goes wrong."""
    model = quadratic()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds holds"):
            model.observe(seconds, 2048, 0)
    assert model.online.num_steps == 0


@pytest.mark.parametrize("forgetting", [0.5, 1.1, float("nan")])
def test_forgetting_has_bounds(forgetting: float) -> None:
    """Too much forgetting follows noise; more than none is no forgetting."""
    with pytest.raises(ValueError, match="forgetting"):
        OnlineFactors(3, forgetting=forgetting)


def test_state_of_another_model_is_refused() -> None:
    """Factors are restored only where they fit."""
    state = OnlineFactors(3).save()
    with pytest.raises(ValueError, match="factors"):
        OnlineFactors.restore(state, num_factors=2)

    broken = OnlineState(
        factors=[1.0, float("nan")],
        covariance=[[1.0, 0.0], [0.0, 1.0]],
        facts=OnlineFactors(2).save().facts,
        forgetting=0.98,
    )
    with pytest.raises(ValueError, match="finite"):
        OnlineFactors.restore(broken, num_factors=2)
