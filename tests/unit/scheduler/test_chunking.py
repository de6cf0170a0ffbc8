"""plan_chunks: each docstring is a sentence of its contract."""

import math

import numpy as np
import pytest

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.scheduler import ChunkPlan, ChunkRule, plan_chunks

V4_FLASH = PrefillCostModel.from_coefficients(
    fixed_s=16.6e-3, token_s=83.6e-6, attention_s=1.67e-10
)
# One microsecond a token and nothing else: chunks can be read off the budget.
PLAIN = PrefillCostModel.from_coefficients(fixed_s=0.0, token_s=1e-6, attention_s=0.0)
DECODE = DecodeCostModel.from_curve(
    StepCostCurve.from_samples([1, 64, 256], [0.010, 0.020, 0.040]), kv_token_s=1e-9
)


def plan(
    *requests: tuple[int, int],
    budget: float,
    cost: PrefillCostModel = PLAIN,
    rule: ChunkRule | None = None,
    saved_ns: np.ndarray | None = None,
) -> ChunkPlan:
    """Plan for (computed, missing) tokens."""
    return plan_chunks(
        [past for past, _ in requests],
        [missing for _, missing in requests],
        budget_seconds=budget,
        prefill_cost=cost,
        decode_cost=DECODE,
        rule=rule,
        saved_ns=saved_ns,
    )


def test_budget_after_a_long_context_buys_the_hand_value() -> None:
    """200 ms after 131072 tokens are 1728 tokens."""
    assert plan((131_072, 300_000), budget=0.2, cost=V4_FLASH).num_tokens.tolist() == [1728]


def test_decode_is_served_before_an_older_prefill() -> None:
    """A decode runs even when an older prompt could take the whole budget, and its time counts."""
    result = plan((0, 100_000), (999, 1), budget=0.0145)

    assert result.num_tokens.tolist() == [4_480, 1]
    assert result.decode_seconds == pytest.approx(0.010 + 1_000e-9)
    # 14.5 ms less 10.001 ms are 4499 tokens, 4480 in whole tiles.
    assert result.unused_seconds == pytest.approx(19e-6)


def test_buckets_share_the_time_by_weight() -> None:
    """Four buckets with work get 4:3:2:1 of the step."""
    result = plan((0, 16_000), (0, 60_000), (0, 200_000), (0, 300_000), budget=0.064)

    # The shortest is done with 16 000 of its 25 600; the rest goes round, shortest first.
    assert result.num_tokens.tolist() == [16_000, 19_200 + 9_600, 12_800, 6_400]


def test_share_is_charged_in_time_not_tokens() -> None:
    """After a long context a bucket gets fewer tokens for the same time."""
    cost = PrefillCostModel.from_coefficients(fixed_s=0.0, token_s=1e-6, attention_s=1e-11)
    rule = ChunkRule(bucket_weights=(1.0, 1.0, 1.0, 1.0))

    result = plan((0, 16_000), (400_000, 400_000), budget=0.02, cost=cost, rule=rule)

    near, far = result.num_tokens.tolist()
    assert near > 9_000
    assert far < 2_500
    # Shares of 10 ms; the short one's rounding goes to the long one or stays unused.
    assert cost.predict(far, 400_000) == pytest.approx(0.010, rel=0.05)


def test_several_requests_of_a_bucket_run_in_arrival_order() -> None:
    """The oldest ends first; the next of its bucket gets the rest."""
    result = plan((0, 1_000), (0, 1_000), (0, 1_000), budget=0.0015)

    assert result.num_tokens.tolist() == [1_000, 448, 0]


def test_unused_share_goes_round_again() -> None:
    """A bucket with little to do leaves its time to the others."""
    result = plan((0, 100), (0, 300_000), budget=0.01)

    assert result.num_tokens.tolist() == [100, 9_856]
    assert result.unused_seconds == pytest.approx(44e-6)


def test_savings_let_an_expensive_chunk_through() -> None:
    """A bucket whose chunk costs more than its share of a step saves until it can pay."""
    cost = PrefillCostModel.from_coefficients(fixed_s=0.0, token_s=1e-6, attention_s=5e-10)
    saved = None
    far = []
    for _ in range(12):
        # 64 tokens after 300 000 cost 9.7 ms of a 10 ms step; the bucket's share is 2 ms.
        result = plan((0, 16_000), (300_000, 9_000), budget=0.01, cost=cost, saved_ns=saved)
        saved = result.saved_ns
        far.append(int(result.num_tokens[1]))

    assert sum(count > 0 for count in far) == 2
    assert result.num_forced == 0


def test_budget_below_the_smallest_chunk_gives_one_aligned_chunk() -> None:
    """Progress is made, and counted as beyond the budget."""
    result = plan((500_000, 9_000), budget=0.001, cost=V4_FLASH)

    assert result.num_tokens.tolist() == [64]
    assert result.num_forced == 1
    assert result.unused_seconds == 0


def test_forced_chunks_take_turns() -> None:
    """Where no step has room every bucket still gets its turn, by weight."""
    saved = None
    totals = np.zeros(2)
    for _ in range(60):
        result = plan((0, 16_000), (0, 300_000), budget=1e-7, saved_ns=saved)
        saved = result.saved_ns
        totals += result.num_tokens

    assert totals.min() > 0
    assert totals.sum() == 60 * 64


def test_decodes_that_fill_the_budget_leave_one_chunk() -> None:
    """Long decode steps do not starve prefills: one aligned chunk rides along."""
    result = plan((10, 1), (0, 9_000), budget=0.005)

    assert result.num_tokens.tolist() == [1, 64]
    assert result.num_forced == 1


def test_step_token_limit_holds() -> None:
    """The engine's buffers bound the step whatever time is left."""
    rule = ChunkRule(max_step_tokens=100)

    assert plan((0, 9_000), (5, 1), budget=1.0, rule=rule).num_tokens.tolist() == [64, 1]
    assert plan(*[(5, 1)] * 120, budget=1.0, rule=rule).num_tokens.sum() == 100


def test_no_requests_give_an_empty_plan() -> None:
    """Nothing to do is not an error."""
    result = plan(budget=0.1)

    assert result.num_tokens.size == 0
    assert result.unused_seconds == 0.1


def test_idle_bucket_saves_nothing() -> None:
    """Savings are for who waits: an empty bucket starts from nothing."""
    result = plan((0, 1_000), budget=0.1, saved_ns=np.array([0.0, 5e8, 5e8, 5e8]))

    assert result.saved_ns[1:].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("past", "remaining", "budget", "message"),
    [
        ([0], [0], 0.1, "num_remaining_tokens holds 0"),
        ([-1], [5], 0.1, "num_past_tokens holds -1"),
        ([0, 0], [5], 0.1, "2 contexts have 1"),
        ([0], [5.5], 0.1, "num_remaining_tokens holds 5.5"),
        ([0], [5], 0.0, "budget_seconds is 0.0"),
        ([0], [5], -1.0, "budget_seconds is -1.0"),
        ([0], [5], math.inf, "budget_seconds is inf"),
        ([0], [5], math.nan, "budget_seconds is nan"),
    ],
)
def test_input_that_cannot_be_is_refused(
    past: list[int], remaining: list[float], budget: float, message: str
) -> None:
    """Wrong input is a ValueError that names the value."""
    with pytest.raises(ValueError, match=message):
        plan_chunks(past, remaining, budget_seconds=budget, prefill_cost=PLAIN, decode_cost=DECODE)


def test_savings_of_other_buckets_are_refused() -> None:
    """Savings belong to a rule."""
    with pytest.raises(ValueError, match="must be 4 finite numbers"):
        plan((0, 5), budget=0.1, saved_ns=np.zeros(3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bucket_bounds": (10, 5), "bucket_weights": (1.0, 1.0, 1.0)}, "increasing"),
        ({"bucket_bounds": (0,), "bucket_weights": (1.0, 1.0)}, "increasing and positive"),
        ({"bucket_bounds": (10,)}, "1 bounds make 2 buckets"),
        ({"bucket_weights": (1.0, 0.0, 1.0, 1.0)}, "no bucket may starve"),
        ({"bucket_weights": (1.0, math.nan, 1.0, 1.0)}, "no bucket may starve"),
        ({"alignment": 0}, "alignment is 0"),
        ({"max_step_tokens": 0}, "max_step_tokens is 0"),
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, object], message: str) -> None:
    """A rule is checked when it is made."""
    with pytest.raises(ValueError, match=message):
        ChunkRule(**fields)
