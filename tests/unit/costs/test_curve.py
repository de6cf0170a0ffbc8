"""StepCostCurve: each docstring is a sentence of its contract."""

import json
import math

import numpy as np
import pytest

from dsched.costs import StepCostCurve
from dsched.costs.kernels import curve_ns


def test_lookup_rounds_up_to_the_tier() -> None:
    """A step of 3 tokens runs in the shape of 4 and takes its time."""
    curve = StepCostCurve.from_samples([1, 2, 4], [0.010, 0.011, 0.013])

    assert [curve.seconds(b) for b in (1, 2, 3, 4)] == [0.010, 0.011, 0.013, 0.013]


def test_time_above_the_last_tier_grows_with_the_last_slope() -> None:
    """Half a millisecond a token between 4 and 8 goes on after 8."""
    curve = StepCostCurve.from_samples([1, 2, 4, 8], [0.010, 0.0105, 0.0115, 0.0135])

    assert curve.seconds(16) == pytest.approx(0.0175)
    assert curve.seconds(200) == pytest.approx(0.0135 + 192 * 0.0005)


def test_steeper_end_sets_the_slope() -> None:
    """Where the curve bends up, what lies above continues the last rise."""
    curve = StepCostCurve.from_samples([8, 16, 24, 32], [0.010, 0.011, 0.012, 0.016])

    assert curve.slope_ns == pytest.approx(500_000)


def test_shelf_at_the_end_does_not_make_tokens_free() -> None:
    """Two last tiers that differ by noise only: the slope is that of the upper half."""
    curve = StepCostCurve.from_samples([8, 16, 24, 32], [0.010, 0.012, 0.014, 0.014000001])

    assert curve.slope_ns == pytest.approx(125_000, rel=1e-3)
    assert not curve.is_flat


def test_flat_samples_are_reported_and_cost_in_proportion_beyond_the_last_tier() -> None:
    """Samples that do not rise cannot price a token: the curve says so and plans high."""
    curve = StepCostCurve.from_samples([1, 2, 4, 8, 16], [0.010] * 5)

    assert curve.is_flat
    assert curve.seconds(16) == 0.010
    assert curve.seconds(32) == pytest.approx(0.020)


def test_rise_below_the_noise_counts_as_flat_and_a_real_one_does_not() -> None:
    """The limit is one percent over the whole curve."""
    assert StepCostCurve.from_samples([1, 256], [0.0100, 0.0101]).is_flat
    assert not StepCostCurve.from_samples([1, 256], [0.0100, 0.01011]).is_flat


def test_dip_is_pooled() -> None:
    """More tokens never take less time: 10, 9, 12 ms become 9.5, 9.5, 12."""
    curve = StepCostCurve.from_samples([1, 2, 3], [0.010, 0.009, 0.012])

    assert curve.tier_ns.tolist() == [9_500_000, 9_500_000, 12_000_000]


def test_unsorted_and_repeated_samples_are_sorted_and_merged() -> None:
    """Order does not matter; repeats of one shape are merged by their median."""
    assert StepCostCurve.from_samples([8, 1, 4], [0.03, 0.01, 0.02]).tier_ns.tolist() == [
        10_000_000,
        20_000_000,
        30_000_000,
    ]
    merged = StepCostCurve.from_samples([4, 8, 4, 4], [0.010, 0.020, 0.014, 0.011])
    assert merged.seconds(4) == 0.011


def test_contradiction_between_samples_is_reported() -> None:
    """Two times for one shape are no error, but the curve says how far it is from them."""
    assert StepCostCurve.from_samples([4, 8], [0.01, 0.02]).misfit == 0.0
    curve = StepCostCurve.from_samples([4, 4, 8], [0.010, 0.014, 0.020])
    assert curve.misfit == pytest.approx(2 / 12)


def test_given_tiers_pool_samples_and_fill_gaps() -> None:
    """A sample belongs to the graph shape it ran in; a shape without samples is interpolated."""
    curve = StepCostCurve.from_samples(
        [3, 4, 16, 20], [0.010, 0.012, 0.017, 0.019], tiers=[4, 8, 16]
    )

    assert curve.tier_tokens.tolist() == [4, 8, 16, 20]
    assert curve.seconds(2) == curve.seconds(4) == 0.011
    assert curve.seconds(5) == curve.seconds(8) == pytest.approx(0.013)
    assert curve.seconds(9) == 0.017
    assert curve.seconds(17) == 0.019


def test_tiers_above_the_samples_follow_the_slope() -> None:
    """A captured shape that was never measured costs what the slope says, not the last value."""
    curve = StepCostCurve.from_samples([4, 8], [0.010, 0.012], tiers=[4, 8, 16, 32])

    assert curve.seconds(9) == pytest.approx(0.016)
    assert curve.seconds(32) == pytest.approx(0.024)


@pytest.mark.parametrize(
    ("num_tokens", "seconds", "message"),
    [
        ([], [], "0 samples"),
        ([4], [0.01], "1 samples"),
        ([4, 4], [0.01, 0.01], "one tier"),
        ([1, 2], [0.01], "one length"),
        ([[1, 2]], [[0.01, 0.02]], "flat list"),
        ([1, 2], [0.01, 0.0], "seconds holds 0.0"),
        ([1, 2], [0.01, -0.5], "seconds holds -0.5"),
        ([1, 2], [math.nan, 0.01], "seconds holds nan"),
        ([1, 2], [math.inf, 0.01], "seconds holds inf"),
        ([0, 2], [0.01, 0.02], "num_tokens holds 0"),
        ([-3, 2], [0.01, 0.02], "num_tokens holds -3"),
        ([1.5, 2], [0.01, 0.02], "num_tokens holds 1.5"),
    ],
)
def test_samples_that_cannot_be_are_refused(
    num_tokens: list[float], seconds: list[float], message: str
) -> None:
    """Wrong input is a ValueError that names the value."""
    with pytest.raises(ValueError, match=message):
        StepCostCurve.from_samples(num_tokens, seconds)


@pytest.mark.parametrize("tiers", [[], [0, 4], [8, 4], [4, 4], [1.5]])
def test_tiers_that_cannot_be_are_refused(tiers: list[int]) -> None:
    """Graph shapes are increasing whole numbers."""
    with pytest.raises(ValueError, match="tiers"):
        StepCostCurve.from_samples([1, 2], [0.01, 0.02], tiers=tiers)


def test_a_step_of_no_tokens_is_refused() -> None:
    """There is no such step; asking for its time is a mistake."""
    curve = StepCostCurve.from_samples([1, 2], [0.01, 0.02])

    with pytest.raises(ValueError, match="not 0"):
        curve.seconds(0)


def test_arrays_table_and_kernel_agree_with_seconds() -> None:
    """All four ways to look up give one answer."""
    curve = StepCostCurve.from_samples([1, 2, 4, 8, 24], [0.010, 0.0105, 0.0105, 0.0135, 0.02])
    tokens = np.arange(1, 60)

    table = curve.table_ns(59)
    kernel = [round(curve_ns(*curve.arrays(), b)) for b in tokens.tolist()]

    assert table[0] == 0
    np.testing.assert_array_equal(table[1:], kernel)
    np.testing.assert_allclose(curve.seconds(tokens), table[1:] / 1e9, rtol=1e-12)


def test_observed_step_moves_its_tier_and_keeps_the_order() -> None:
    """An update is a new curve: the tier moves by the gain, neighbours only as order asks."""
    curve = StepCostCurve.from_samples([1, 2, 4], [0.010, 0.011, 0.012])

    moved = curve.observe(2, 0.021, gain=0.5)

    assert moved.tier_ns.tolist() == [10_000_000, 16_000_000, 16_000_000]
    assert curve.tier_ns.tolist() == [10_000_000, 11_000_000, 12_000_000]
    assert curve.observe(4, 0.008, gain=0.5).tier_ns.tolist() == [10_000_000] * 3


def test_observed_step_above_the_last_tier_moves_the_slope() -> None:
    """Beyond the table the slope learns; a step faster than the last tier teaches nothing."""
    curve = StepCostCurve.from_samples([1, 2, 4], [0.010, 0.011, 0.013])

    assert curve.observe(14, 0.043, gain=0.5).slope_ns == pytest.approx(2_000_000)
    assert curve.observe(14, 0.012, gain=0.5).slope_ns == curve.slope_ns


@pytest.mark.parametrize(("tokens", "seconds", "gain"), [(0, 0.1, 0.5), (1, -1, 0.5), (1, 0.1, 0)])
def test_observation_that_cannot_be_is_refused(tokens: int, seconds: float, gain: float) -> None:
    """An impossible measurement never reaches the curve."""
    curve = StepCostCurve.from_samples([1, 2], [0.01, 0.02])

    with pytest.raises(ValueError, match=r"num_tokens|seconds|gain"):
        curve.observe(tokens, seconds, gain=gain)


def sglang_lookup(table: dict[str, list[float]], tokens: int) -> float:
    """SGLang looks down to the last probe that is not above."""
    index = np.searchsorted(table["sample_batch_tokens"], tokens, side="right") - 1
    return 1.0 / table["sample_steps_per_sec"][max(int(index), 0)]


def test_written_tables_mean_the_same_in_the_engines() -> None:
    """Looking down (SGLang) or along the line (TensorRT-LLM) gives our value at every token."""
    curve = StepCostCurve.from_samples([1, 2, 4, 8, 24], [0.010, 0.0105, 0.0115, 0.0135, 0.02])
    tokens = np.arange(1, 25)
    expected = curve.seconds(tokens)

    sglang = json.loads(curve.to_sglang())
    trtllm = json.loads(curve.to_trtllm())

    np.testing.assert_allclose([sglang_lookup(sglang, b) for b in tokens], expected)
    line = np.interp(tokens, trtllm["token_counts"], trtllm["step_time_ms"])
    np.testing.assert_allclose(line / 1e3, expected)
    assert sglang["max_batch_tokens"] == 24


@pytest.mark.parametrize("write", ["to_json", "to_sglang", "to_sglang_additive", "to_trtllm"])
def test_every_form_reads_back(write: str) -> None:
    """Written and read again, the curve is the same at every whole number of tokens."""
    curve = StepCostCurve.from_samples([1, 2, 4, 8, 24], [0.010, 0.0105, 0.0115, 0.0135, 0.02])
    tokens = np.arange(1, 25)

    again = StepCostCurve.from_json(getattr(curve, write)())

    np.testing.assert_array_equal(again.seconds(tokens), curve.seconds(tokens))


def test_additive_table_charges_tokens_and_requests() -> None:
    """SGLang's additive form: bias + theta(tokens) along the line, alpha(requests) on top."""
    curve = StepCostCurve.from_json(
        '{"bias_seconds": 0.01, "bs_probes": [1, 9], "alpha_seconds": [0.001, 0.003],'
        ' "m_probes": [8, 16], "theta_seconds": [0.002, 0.004]}'
    )

    assert curve.seconds(12) == pytest.approx(0.013)
    assert curve.seconds(12, num_requests=5) == pytest.approx(0.015)
    assert curve.seconds(12, num_requests=100) == pytest.approx(0.016)
    assert StepCostCurve.from_json(curve.to_json()).seconds(12, num_requests=5) == pytest.approx(
        0.015
    )


def test_flat_engine_table_is_flagged() -> None:
    """A table an engine would refuse to use is not taken at its word."""
    curve = StepCostCurve.from_json('{"token_counts": [1, 64], "step_time_ms": [10.0, 10.0]}')

    assert curve.is_flat


ZERO_RATE = json.dumps(
    {"sample_batch_tokens": [1, 2], "sample_steps_per_sec": [1.0, 0.0], "max_batch_tokens": 2}
)
BATCH_SIZE_WITHOUT_TIME = json.dumps(
    {"token_counts": [1, 2], "step_time_ms": [1, 2], "batch_sizes": [1], "batch_overhead_ms": []}
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "cost table"),
        ("[1, 2]", "cost table has keys"),
        ('{"foo": 1}', "foo"),
        ('{"token_counts": [1, 2]}', "step_time_ms"),
        ('{"token_counts": ["a"], "step_time_ms": [1.0]}', "token_counts"),
        ('{"token_counts": [1, 2], "step_time_ms": [1.0]}', "one length"),
        ('{"token_counts": [], "step_time_ms": []}', "0 samples"),
        (ZERO_RATE, "sample_steps_per_sec"),
        (BATCH_SIZE_WITHOUT_TIME, "batch sizes"),
        ('{"tier_tokens": [2, 1], "tier_ns": [1, 2], "slope_ns": 1.0}', "strictly increasing"),
        ('{"tier_tokens": [1, 2], "tier_ns": [2, 1], "slope_ns": 1.0}', "must not decrease"),
        ('{"tier_tokens": [1, 2], "tier_ns": [1, 2], "slope_ns": 0.0}', "never free"),
        ('{"tier_tokens": [], "tier_ns": [], "slope_ns": 1.0}', "at least one tier"),
        ('{"tier_tokens": [1], "tier_ns": [1], "slope_ns": 1.0, "x": 1}', "x"),
    ],
)
def test_tables_that_cannot_be_are_refused(text: str, message: str) -> None:
    """A broken file is a ValueError that says what is wrong in it."""
    with pytest.raises(ValueError, match=message):
        StepCostCurve.from_json(text)


def test_curve_is_immutable() -> None:
    """A planner may keep the arrays: nobody changes them under it."""
    curve = StepCostCurve.from_samples([1, 2], [0.01, 0.02])

    with pytest.raises(ValueError, match="read-only"):
        curve.tier_ns[0] = 1
