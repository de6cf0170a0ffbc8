"""PrefillCostModel: each docstring is a sentence of its contract."""

import itertools
import json
import math

import numpy as np
import pytest

from dsched.costs import PrefillCostModel, kernels
from dsched.rng import stream


def v4_flash() -> PrefillCostModel:
    """DeepSeek V4-Flash on H200: 16.6 ms, .0836 ms a token, 1.67e-7 ms a token pair."""
    return PrefillCostModel.from_coefficients(
        fixed_s=16.6e-3, token_s=83.6e-6, attention_s=1.67e-10
    )


def grid(chunks: list[int], pasts: list[int]) -> tuple[list[int], list[int]]:
    pairs = list(itertools.product(chunks, pasts))
    return [chunk for chunk, _ in pairs], [past for _, past in pairs]


def test_hand_values_of_the_quadratic() -> None:
    """t(2048, 0) = 188.163 ms and t(2048, 131072) = 232.992 ms."""
    model = v4_flash()

    assert model.predict(2048, 0) * 1e3 == pytest.approx(188.163, abs=5e-4)
    assert model.predict(2048, 131_072) * 1e3 == pytest.approx(232.992, abs=5e-4)


def test_chunk_of_a_budget_by_hand() -> None:
    """200 ms after 131072 tokens buy 1736 tokens, 1728 in whole tiles of 64."""
    model = v4_flash()

    assert model.max_chunk(0.2, 131_072, alignment=1) == 1736
    assert model.max_chunk(0.2, 131_072) == 1728
    assert model.predict(1736, 131_072) <= 0.2 < model.predict(1737, 131_072)


def test_last_chunk_is_not_aligned() -> None:
    """What is left of a prompt is computed whole if it fits, and aligned if it does not."""
    model = v4_flash()

    assert model.max_chunk(0.2, 131_072, num_remaining_tokens=1_001) == 1_001
    assert model.max_chunk(0.2, 131_072, num_remaining_tokens=1_737) == 1_728


def test_budget_below_the_fixed_time_buys_nothing() -> None:
    """The model does not round up; whoever plans decides whether to go beyond the budget."""
    assert v4_flash().max_chunk(0.010, 0) == 0
    assert v4_flash().max_chunk(0.017, 0) == 0
    assert v4_flash().max_chunk(0.017, 0, alignment=1) == 4


def test_topk_sum_by_hand() -> None:
    """Tokens 1000..3999 see 1000, 1001, ... 2047, then 2048 each: 5 594 324 in all."""
    assert kernels.topk_sum(1000.0, 3000.0, 2048.0) == 5_594_324


def test_topk_term_is_charged() -> None:
    """Sparse attention costs by the tokens it sees."""
    model = PrefillCostModel.from_coefficients(
        fixed_s=0.01, token_s=1e-5, attention_s=0.0, topk_s=1e-9, topk_tokens=2048
    )

    assert model.predict(3000, 1000) == pytest.approx(0.01 + 0.03 + 5_594_324e-9)


def test_step_of_several_chunks_pays_the_fixed_time_once() -> None:
    """The step's time is one fixed part, all tokens, and each chunk's own attention."""
    model = v4_flash()

    both = model.predict([2048, 512], [0, 65_536])

    alone = model.predict(2048, 0) + model.predict(512, 65_536)
    assert both == pytest.approx(alone - 16.6e-3)


def test_fit_finds_the_quadratic() -> None:
    """Samples of an exact quadratic give it back, also where no sample was."""
    truth = v4_flash()
    chunks, pasts = grid([512, 2048, 8192], [0, 16_384, 131_072])
    seconds = [truth.predict(x, p) for x, p in zip(chunks, pasts, strict=True)]

    model = PrefillCostModel.fit(chunks, pasts, seconds)

    for chunk, past in [(512, 0), (1000, 50_000), (6000, 262_144)]:
        assert model.predict(chunk, past) == pytest.approx(truth.predict(chunk, past), rel=1e-6)


def test_table_follows_a_kink_that_a_line_cannot() -> None:
    """With enough samples T0 is a table: a kernel that gets slower at 1024 tokens is seen."""

    def kinked(chunk: int, past: int) -> float:
        slope = 0.05e-3 * chunk + 0.1e-3 * max(0, chunk - 1024)
        return 0.02 + slope + 1e-10 * chunk * (past + chunk / 2)

    chunks, pasts = grid(
        [128, 256, 512, 1024, 2048, 4096, 8192], [0, 4096, 16_384, 65_536, 262_144]
    )
    seconds = [kinked(x, p) for x, p in zip(chunks, pasts, strict=True)]

    table = PrefillCostModel.fit(chunks, pasts, seconds)
    line = PrefillCostModel.fit(chunks, pasts, seconds, use_table=False)

    assert table.error(chunks, pasts, seconds).max_pct < 0.01
    assert line.error(chunks, pasts, seconds).max_pct > 3


def test_without_different_contexts_the_bend_is_attention() -> None:
    """Samples with no context price it by the curvature; a table would say it is free."""
    truth = PrefillCostModel.from_coefficients(fixed_s=0.01, token_s=1e-4, attention_s=1e-8)
    chunks = [2**n for n in range(6, 15)] * 4
    seconds = [truth.predict(chunk, 0) for chunk in chunks]

    model = PrefillCostModel.fit(chunks, [0] * len(chunks), seconds)

    assert not model.has_context_samples
    assert model.predict(1024, 100_000) == pytest.approx(truth.predict(1024, 100_000), rel=1e-6)


def test_flat_samples_are_reported_and_planned_high() -> None:
    """Times that do not rise cannot price a token: beyond the largest chunk they cost in
    proportion, and a budget never buys all."""
    model = PrefillCostModel.fit([128, 512, 2048], [0, 0, 0], [0.010, 0.010, 0.010])

    assert model.is_flat
    assert model.predict(2048, 0) >= 0.010
    assert model.predict(20_480, 0) >= 0.09
    assert model.max_chunk(0.1, 0) < 25_000


def test_noise_cannot_make_a_part_negative() -> None:
    """Samples that contradict each other give the nearest model without negative work."""
    rng = stream(3, "noise")
    chunks, pasts = grid([512, 1024, 2048, 4096, 8192], [0, 8192, 65_536] * 4)
    seconds = [0.05 * rng.lognormal(0, 0.5) for _ in chunks]

    model = PrefillCostModel.fit(chunks, pasts, seconds)

    assert (model.arrays.coefficients >= 0).all()
    assert (np.diff(model.arrays.knot_ns) >= 0).all()
    assert model.predict(8192, 65_536) >= model.predict(8192, 0) >= model.predict(512, 0)


@pytest.mark.parametrize(
    ("chunks", "pasts", "seconds", "message"),
    [
        ([], [], [], "0 samples"),
        ([512], [0], [0.1], "1 samples of 1 chunk sizes"),
        ([512, 512], [0, 1024], [0.1, 0.2], "2 samples of 1 chunk sizes"),
        ([512, 1024], [0], [0.1, 0.2], "one length"),
        ([512, 1024], [0, 0], [0.1, -0.2], "seconds holds -0.2"),
        ([512, 1024], [0, 0], [0.1, math.nan], "seconds holds nan"),
        ([512, 1024], [0, 0], [0.1, math.inf], "seconds holds inf"),
        ([512, 0], [0, 0], [0.1, 0.2], "num_tokens holds 0"),
        ([512, 1024], [0, -1], [0.1, 0.2], "num_past_tokens holds -1"),
        ([512, 1024.5], [0, 0], [0.1, 0.2], "num_tokens holds 1024.5"),
    ],
)
def test_samples_that_cannot_be_are_refused(
    chunks: list[float], pasts: list[int], seconds: list[float], message: str
) -> None:
    """Wrong input is a ValueError that names the value."""
    with pytest.raises(ValueError, match=message):
        PrefillCostModel.fit(chunks, pasts, seconds)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({"fixed_s": -1.0, "token_s": 1e-4, "attention_s": 0.0}, "not negative"),
        ({"fixed_s": 0.01, "token_s": 0.0, "attention_s": 1e-9}, "never free"),
        ({"fixed_s": 0.01, "token_s": 1e-4, "attention_s": -1e-9}, "none may be negative"),
        ({"fixed_s": math.nan, "token_s": 1e-4, "attention_s": 0.0}, "finite"),
    ],
)
def test_coefficients_that_cannot_be_are_refused(
    coefficients: dict[str, float], message: str
) -> None:
    """No part is negative and no token is free."""
    with pytest.raises(ValueError, match=message):
        PrefillCostModel.from_coefficients(**coefficients)


@pytest.mark.parametrize(("chunk", "past"), [(0, 0), (-1, 0), (1, -1)])
def test_chunks_that_cannot_be_are_refused(chunk: int, past: int) -> None:
    """There is no chunk of no tokens."""
    with pytest.raises(ValueError, match="cannot be computed"):
        v4_flash().predict(chunk, past)


def test_budgets_and_alignments_that_cannot_be_are_refused() -> None:
    """A budget is not negative, an alignment is at least a token."""
    with pytest.raises(ValueError, match="budget_seconds is -1"):
        v4_flash().max_chunk(-1, 0)
    with pytest.raises(ValueError, match="budget_seconds is nan"):
        v4_flash().max_chunk(math.nan, 0)
    with pytest.raises(ValueError, match="alignment is 0"):
        v4_flash().max_chunk(1, 0, alignment=0)
    with pytest.raises(ValueError, match="after -1 cannot be computed"):
        v4_flash().max_chunk(1, -1)
    with pytest.raises(ValueError, match="-5 tokens after 0"):
        v4_flash().max_chunk(1, 0, num_remaining_tokens=-5)


def test_numbers_of_numpy_are_numbers() -> None:
    """A chunk taken out of an array is a chunk."""
    assert v4_flash().predict(np.int64(2048), np.int64(0)) == v4_flash().predict(2048, 0)
    assert v4_flash().predict(np.array([2048]), np.array([0])) == v4_flash().predict(2048, 0)


def test_json_keeps_what_was_fitted_and_learned() -> None:
    """A model read back predicts the same and goes on learning from where it was."""
    model = v4_flash()
    for _ in range(30):
        model.observe(model.predict(2048, 4096) * 1.05, 2048, 4096)

    again = PrefillCostModel.from_json(model.to_json())

    assert again.predict(2048, 4096) == model.predict(2048, 4096) != v4_flash().predict(2048, 4096)
    model.observe(0.2, 1024, 0)
    again.observe(0.2, 1024, 0)
    assert again.to_json() == model.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"knot_ns": [5.0, 1.0]}, "first at 0"),
        ({"knot_tokens": [0.0, 8.0, 4.0], "knot_ns": [1.0, 2.0, 3.0]}, "strictly increasing"),
        ({"knot_tokens": [0.0, 8.0], "knot_ns": [2.0, 1.0]}, "not decreasing"),
        ({"coefficients": [1.0]}, "coefficients are needed"),
        ({"extra": 1}, "extra"),
        ({"knot_tokens": "x"}, "knot_tokens"),
    ],
)
def test_json_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    """A broken file is a ValueError that says what is wrong in it."""
    state = json.loads(v4_flash().to_json()) | change

    with pytest.raises(ValueError, match=message):
        PrefillCostModel.from_json(json.dumps(state))


def test_text_that_is_not_json_is_refused() -> None:
    """The model's name is in the message."""
    with pytest.raises(ValueError, match="prefill cost model"):
        PrefillCostModel.from_json("nonsense")
