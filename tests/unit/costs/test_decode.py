"""DecodeCostModel: each docstring is a sentence of its contract."""

import math

import pytest

from dsched.costs import DecodeCostModel, StepCostCurve


def curve() -> StepCostCurve:
    return StepCostCurve.from_samples([1, 8, 16, 32], [0.010, 0.011, 0.013, 0.017])


def test_time_is_the_padded_batch_and_its_kv() -> None:
    """9 tokens run in the shape of 16; each KV token adds its share."""
    model = DecodeCostModel.from_curve(curve(), kv_token_s=2e-9)

    assert model.predict(9, 0) == 0.013
    assert model.predict(9, 1_000_000) == pytest.approx(0.015)


def test_fit_separates_batch_and_kv() -> None:
    """Samples of an exact model give it back."""
    truth = DecodeCostModel.from_curve(curve(), kv_token_s=2e-9)
    samples = [(b, kv * b) for b in (1, 8, 16, 32) for kv in (1_000, 50_000)]

    model = DecodeCostModel.fit(
        [b for b, _ in samples], [kv for _, kv in samples], [truth.predict(*s) for s in samples]
    )

    assert model.predict(16, 300_000) == pytest.approx(truth.predict(16, 300_000), rel=1e-6)
    assert model.error([32], [9_000], [truth.predict(32, 9_000)]).max_pct < 1e-3


def test_fit_pools_samples_into_graph_shapes() -> None:
    """Batches of 3 and 4 run in one shape and share one time."""
    model = DecodeCostModel.fit([3, 4, 7], [0, 0, 0], [0.010, 0.012, 0.020], tiers=[4, 8])

    assert model.predict(1, 0) == model.predict(4, 0) == pytest.approx(0.0109, abs=2e-4)
    assert model.predict(5, 0) == pytest.approx(0.020)


def test_dip_is_pooled() -> None:
    """A larger batch never takes less time."""
    model = DecodeCostModel.fit([1, 8, 16], [0, 0, 0], [0.010, 0.009, 0.012])

    assert model.predict(1, 0) == pytest.approx(model.predict(8, 0))


def test_kv_alone_cannot_make_tokens_cost_nothing() -> None:
    """Where KV explains everything a step without KV still takes time."""
    model = DecodeCostModel.fit([1, 2, 4], [1_000, 2_000, 4_000], [0.01, 0.02, 0.04])

    assert model.predict(1, 0) > 0


def test_flat_samples_are_reported() -> None:
    """A model whose tokens have no price says so."""
    assert DecodeCostModel.fit([1, 8], [0, 0], [0.01, 0.01]).is_flat
    assert not DecodeCostModel.fit([1, 8], [0, 0], [0.01, 0.02]).is_flat


@pytest.mark.parametrize(
    ("tokens", "kv", "seconds", "message"),
    [
        ([], [], [], "0 samples"),
        ([1], [0], [0.1], "1 samples"),
        ([1, 1], [0, 100], [0.1, 0.2], "one tier"),
        ([1, 2], [0], [0.1, 0.2], "one length"),
        ([1, 2], [0, 0], [0.1, -1.0], "seconds holds -1"),
        ([1, 2], [0, 0], [math.inf, 1.0], "seconds holds inf"),
        ([0, 2], [0, 0], [0.1, 0.2], "num_tokens holds 0"),
        ([1, 2], [0, -5], [0.1, 0.2], "num_kv_tokens holds -5"),
    ],
)
def test_samples_that_cannot_be_are_refused(
    tokens: list[int], kv: list[int], seconds: list[float], message: str
) -> None:
    """Wrong input is a ValueError that names the value."""
    with pytest.raises(ValueError, match=message):
        DecodeCostModel.fit(tokens, kv, seconds)


def test_unsorted_tiers_are_refused() -> None:
    """Graph shapes increase."""
    with pytest.raises(ValueError, match="tiers"):
        DecodeCostModel.fit([1, 2], [0, 0], [0.1, 0.2], tiers=[8, 4])


def test_steps_that_cannot_be_are_refused() -> None:
    """No tokens, or less than no KV, is no step."""
    model = DecodeCostModel.from_curve(curve())

    with pytest.raises(ValueError, match="not 0"):
        model.predict(0, 0)
    with pytest.raises(ValueError, match="num_kv_tokens is -1"):
        model.predict(1, -1)
    with pytest.raises(ValueError, match="kv_token_ns is -1"):
        DecodeCostModel(curve(), -1.0)


def test_json_keeps_what_was_fitted_and_learned() -> None:
    """A model read back predicts the same."""
    model = DecodeCostModel.from_curve(curve(), kv_token_s=2e-9)
    for _ in range(20):
        model.observe(model.predict(8, 100_000) * 1.1, 8, 100_000)

    again = DecodeCostModel.from_json(model.to_json())

    assert again.predict(8, 100_000) == model.predict(8, 100_000)
    assert again.to_json() == model.to_json()
    with pytest.raises(ValueError, match="decode cost model"):
        DecodeCostModel.from_json("[]")


def test_observe_learns_both_parts() -> None:
    """Tokens that take 20 % less and KV that takes half as much again are told apart."""
    model = DecodeCostModel.from_curve(curve(), kv_token_s=2e-9)
    truth = DecodeCostModel.from_curve(curve(), kv_token_s=3e-9)
    for step in range(200):
        tokens, kv = (1, 8, 16, 32)[step % 4], (10_000, 4_000_000)[step % 2 ^ (step // 4) % 2]
        seconds = truth.predict(tokens, kv) - 0.2 * curve().seconds(tokens)
        model.observe(seconds, tokens, kv)

    assert model.online.factors[0] == pytest.approx(0.8, rel=0.02)
    assert model.online.factors[1] == pytest.approx(1.5, rel=0.02)


def test_time_spent_elsewhere_is_not_learned() -> None:
    """Of a mixed step only the decode part counts; a part without time teaches nothing."""
    model = DecodeCostModel.from_curve(curve())
    for _ in range(10):
        model.observe(0.111, 8, 0, other_seconds=0.1)
    assert model.predict(8, 0) == pytest.approx(0.011)

    model.observe(0.1, 8, 0, other_seconds=0.2)
    assert model.predict(8, 0) == pytest.approx(0.011)
