"""plan_verify_lengths: right values worked out by hand, and inputs that hurt public systems."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from dsched.costs import StepCostCurve
from dsched.spec_decode import (
    ContextCost,
    VerifyMode,
    VerifyPlan,
    kernels,
    plan_verify_lengths,
)

THREE = [[0.9, 0.8, 0.5], [0.6, 0.5, 0.9], [0.95, 0.9, 0.9]]


def curve_of(milliseconds: Callable[[int], float], max_tokens: int = 64) -> StepCostCurve:
    tokens = range(1, max_tokens + 1)
    return StepCostCurve.from_samples(tokens, [milliseconds(b) / 1e3 for b in tokens])


LINE = curve_of(lambda b: 10 + 0.5 * b)
STAIRS = curve_of(lambda b: 10 + 2 * math.ceil(b / 4))


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_line_leaves_out_the_token_that_does_not_pay(mode: str) -> None:
    """T = 10 + B/2: eight of nine tokens; the rate is 8.4545 tokens in 15.5 ms."""
    plan = plan_verify_lengths(THREE, step_cost=LINE, history=THREE, mode=mode)

    assert plan.budget == 8
    assert plan.lengths.tolist() == [3, 2, 3]
    assert plan.lengths.dtype == np.int32
    assert plan.expected_emitted == pytest.approx(8.4545)
    assert plan.expected_seconds == pytest.approx(15.5e-3)
    assert plan.draft_gain == pytest.approx(8.4545 / 15.5 / (3 / 11.5) - 1)


@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_stairs_are_climbed_over_a_step_that_does_not_pay_alone(mode: str) -> None:
    """T = 10 + 2 ceil(B/4): all nine. A plain early stop ends at five, on the second stair."""
    plan = plan_verify_lengths(THREE, step_cost=STAIRS, history=THREE, mode=mode)

    assert plan.budget == 9
    assert plan.lengths.tolist() == [3, 3, 3]


def test_equal_survivals_go_by_position_then_request() -> None:
    plan = plan_verify_lengths(np.full((4, 2), 0.5), step_cost=LINE, budget=2)

    assert plan.lengths.tolist() == [1, 1, 0, 0]


def test_other_tokens_move_the_step_up_the_curve() -> None:
    """One token above a tier costs the next tier: with 2 + 6 tokens the tier of 8 is full."""
    tiers = [8, 16]
    curve = StepCostCurve.from_samples(tiers, [0.010, 0.030], tiers=tiers)
    confidence = np.full((2, 3), 0.6)

    def budget(num_other_tokens: int) -> int:
        return plan_verify_lengths(
            confidence, step_cost=curve, history=confidence, num_other_tokens=num_other_tokens
        ).budget

    assert budget(0) == 6
    assert budget(3) == 3
    assert budget(6) == 0
    plan = plan_verify_lengths(confidence, step_cost=curve, budget=1, num_other_tokens=6)
    assert plan.expected_seconds == pytest.approx(0.030)


@pytest.mark.parametrize("mode", list(VerifyMode))
def test_flat_curve_trims_nothing_and_says_so(mode: VerifyMode) -> None:
    flat = StepCostCurve.from_samples([1, 2, 4, 8, 16], [0.01] * 5)
    confidence = np.full((40, 3), 0.1)

    plan = plan_verify_lengths(confidence, step_cost=flat, history=confidence, mode=mode)

    assert plan.is_cost_flat
    assert plan.lengths.tolist() == [3] * 40
    assert not plan_verify_lengths(THREE, step_cost=LINE, history=THREE).is_cost_flat


def test_fixed_length_is_for_every_request_up_to_what_was_drafted() -> None:
    plan = plan_verify_lengths(
        THREE, step_cost=LINE, mode="fixed", fixed_length=2, num_drafts=[3, 1, 0]
    )

    assert plan.lengths.tolist() == [2, 1, 0]
    assert plan.budget == 3
    assert plan.expected_emitted == pytest.approx(3 + 0.9 + 0.72 + 0.6)


class TestTotalFollowsTheHistoryAlone:
    """Ranks that read slightly different confidences must still agree on the total (SP-01)."""

    @staticmethod
    def plan(confidence: object, history: object = THREE) -> VerifyPlan:
        return plan_verify_lengths(
            np.asarray(confidence), step_cost=LINE, history=np.asarray(history)
        )

    def test_equal(self) -> None:
        assert self.plan(THREE).lengths.tolist() == [3, 2, 3]

    @pytest.mark.parametrize("seed", range(8))
    def test_noise(self, seed: int) -> None:
        noise = np.random.default_rng(seed).uniform(-1e-3, 1e-3, (3, 3))
        plan = self.plan(np.clip(THREE + noise, 0, 1))

        assert plan.budget == plan.lengths.sum() == 8

    def test_constant(self) -> None:
        assert self.plan(np.full((3, 3), 0.5)).lengths.tolist() == [3, 3, 2]
        assert self.plan(np.full((3, 3), 0.999)).lengths.sum() == 8

    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
    def test_precision(self, dtype: type) -> None:
        history = np.array(THREE, dtype=dtype)

        assert self.plan(THREE, history).budget == 8
        assert self.plan(history, history).lengths.tolist() == [3, 2, 3]


class TestNoSpeculation:
    """A token that is usually accepted can still be a loss (SP-03)."""

    @pytest.mark.parametrize(("two_tokens_ms", "lengths"), [(33, [1]), (34, [0]), (36, [0])])
    @pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
    def test_one_token(self, two_tokens_ms: float, lengths: list[int], mode: str) -> None:
        curve = StepCostCurve.from_samples([1, 2], [0.020, two_tokens_ms / 1e3])

        plan = plan_verify_lengths([[0.7]], step_cost=curve, history=[[0.7]], mode=mode)

        assert plan.lengths.tolist() == lengths

    def test_an_exact_tie_takes_the_fewest_tokens(self) -> None:
        """1 token in 20 ms, 1.5 in 30, 1.75 in 35: all the same rate, to the last bit."""
        curve = StepCostCurve.from_samples([1, 2, 3], [0.020, 0.030, 0.035])

        plan = plan_verify_lengths([[0.5, 0.5]], step_cost=curve, history=[[0.5, 0.5]])

        assert plan.lengths.tolist() == [0]

    def test_five_dear_tokens(self) -> None:
        curve = curve_of(lambda b: 20 + 15 * (b - 1), max_tokens=6)
        confidence = np.full((1, 5), 0.7)

        plan = plan_verify_lengths(confidence, step_cost=curve, history=confidence)

        assert plan.lengths.sum() == 0
        assert plan.draft_gain == 0.0

    def test_draft_cost_can_make_drafting_a_loss(self) -> None:
        """1.8 tokens in 15 ms beat one in 10, but not if the draft takes 4 ms more: then this
        draft is still used, and the next is better not made."""
        curve = StepCostCurve.from_samples([1, 2], [0.010, 0.015])

        def plan(draft_seconds: float) -> VerifyPlan:
            return plan_verify_lengths(
                [[0.8]], step_cost=curve, history=[[0.8]], draft_seconds=draft_seconds
            )

        assert plan(0.002).draft_gain == pytest.approx(1.8 / 17 * 10 - 1)
        assert plan(0.004).draft_gain == pytest.approx(1.8 / 19 * 10 - 1)
        assert plan(0.004).lengths.tolist() == [1]
        assert plan(0.004).expected_seconds == pytest.approx(0.019)

    def test_a_lost_draft_does_not_make_tokens_look_cheap(self) -> None:
        """With the draft's 100 ms in the sum, all four tokens would look worth verifying."""

        def lengths(draft_seconds: float) -> list[int]:
            confidence = [[0.9, 0.3], [0.8, 0.2]]
            return plan_verify_lengths(
                confidence,
                step_cost=curve_of(lambda b: 2 + b),
                history=confidence,
                draft_seconds=draft_seconds,
            ).lengths.tolist()

        assert lengths(0.1) == lengths(0.0) == [1, 1]

    def test_draft_cost_comes_from_the_curve_unless_given(self) -> None:
        text = (
            '{"bias_seconds":0.01,"bs_probes":[1,2],"alpha_seconds":[0.002,0.003],'
            '"m_probes":[1,2,3,4],"theta_seconds":[0,0.001,0.002,0.003]}'
        )
        curve = StepCostCurve.from_json(text)

        plan = plan_verify_lengths([[1.0], [1.0]], step_cost=curve, history=[[1.0], [1.0]])

        assert plan.expected_seconds == pytest.approx(0.016)


def test_curve_that_ends_early_does_not_make_tokens_free() -> None:
    """The last slope goes on: 16 of 32 tokens. Holding the last value would verify all (SP-05)."""
    curve = StepCostCurve.from_samples([1, 2, 4, 8], [0.010, 0.0105, 0.0115, 0.0135])
    confidence = np.full((16, 2), 0.6)

    plan = plan_verify_lengths(confidence, step_cost=curve, history=confidence)

    assert plan.lengths.tolist() == [1] * 16


def test_noisy_curve_that_dips_is_planned_on_as_if_level() -> None:
    """10, 9, 12 ms is read as 9.5, 9.5, 12: the second token is free, the third is not."""
    curve = StepCostCurve.from_samples([1, 2, 3], [0.010, 0.009, 0.012])

    plan = plan_verify_lengths([[0.9, 0.2]], step_cost=curve, history=[[0.9, 0.2]])

    assert plan.lengths.tolist() == [1]


class TestRequestsWithoutHistory:
    """They start from what is usual, not from certainty."""

    def test_given_acceptance_is_used(self) -> None:
        history = [[0.9, 0.9], [math.nan, math.nan]]
        confidence = [[0.9, 0.9], [0.9, 0.9]]

        def budget(acceptance: object) -> int:
            return plan_verify_lengths(
                confidence, step_cost=curve, history=history, acceptance=acceptance
            ).budget

        # 2 + n tokens cost 3 + (2 + n): a token pays from a survival of .4 to .5 on.
        curve = curve_of(lambda b: 3 + b)
        assert budget(1.0) == 4
        assert budget([0.9, 0.1]) == 3
        assert budget(0.1) == 2

    def test_default_is_the_mean_of_the_others(self) -> None:
        history = [[0.9, 0.9], [0.7, 0.7], [math.nan, math.nan]]
        confidence = np.full((3, 2), 0.8)
        filled = [[0.9, 0.9], [0.7, 0.7], [0.8, 0.8]]

        for base_ms in range(1, 20):
            curve = StepCostCurve.from_samples(range(1, 10), (base_ms + np.arange(9)) / 1e3)
            plan = plan_verify_lengths(confidence, step_cost=curve, history=history)
            same = plan_verify_lengths(confidence, step_cost=curve, history=filled)
            assert plan.budget == same.budget

    def test_acceptance_alone_is_a_history(self) -> None:
        plan = plan_verify_lengths(THREE, step_cost=LINE, acceptance=0.9)

        assert plan.mode is VerifyMode.ASYNCHRONOUS
        assert (
            plan.budget
            == plan_verify_lengths(THREE, step_cost=LINE, history=np.full((3, 3), 0.9)).budget
        )

    @pytest.mark.parametrize("history", [None, np.full((3, 3), math.nan)])
    def test_nothing_known_is_planned_synchronously(self, history: object) -> None:
        """This step's own survivals may not set a budget without the early stop."""
        plan = plan_verify_lengths(THREE, step_cost=LINE, history=history)

        assert plan.mode is VerifyMode.SYNCHRONOUS
        assert plan.lengths.tolist() == [3, 2, 3]


class TestContextCost:
    """Tokens of long contexts cost attention time."""

    KV_TOKENS = (1_000, 100_000)

    def plan(self, *, fairness: float, seconds_per_kv_token: float = 1e-7) -> VerifyPlan:
        confidence = [[0.9, 0.9, 0.9], [0.95, 0.95, 0.95]]
        context = ContextCost(
            kv_tokens=self.KV_TOKENS,
            seconds_per_kv_token=seconds_per_kv_token,
            fairness=fairness,
        )
        return plan_verify_lengths(
            confidence, step_cost=curve_of(lambda b: 5 + b), history=confidence, context=context
        )

    def test_short_context_goes_first(self) -> None:
        """1.1 ms against 11 ms a token: nothing of the long request pays."""
        plan = self.plan(fairness=0.0)

        assert plan.lengths.tolist() == [3, 0]
        # 5 tokens on the curve, then attention: 4 tokens over 1K and one over 100K.
        assert plan.expected_seconds == pytest.approx(10e-3 + 4 * 0.1e-3 + 10e-3)

    def test_fair_share_is_given_by_survival(self) -> None:
        assert self.plan(fairness=0.4).lengths.tolist() == [2, 1]
        assert self.plan(fairness=1.0).lengths.tolist() == [1, 2]

    def test_tokens_of_a_draft_that_was_a_loss_are_still_used(self) -> None:
        """The draft is made; with its cost in the sum all tokens would look worth verifying."""
        context = ContextCost(kv_tokens=[1_000, 1_000], seconds_per_kv_token=1e-7, fairness=0.0)

        def plan(draft_seconds: float) -> VerifyPlan:
            return plan_verify_lengths(
                [[0.9, 0.3], [0.8, 0.2]],
                step_cost=curve_of(lambda b: 2 + b),
                history=[[0.9, 0.3], [0.8, 0.2]],
                context=context,
                draft_seconds=draft_seconds,
            )

        assert plan(0.1).draft_gain < 0.0
        assert plan(0.1).lengths.tolist() == plan(0.0).lengths.tolist() == [1, 1]

    def test_without_context_cost_it_changes_nothing(self) -> None:
        free = self.plan(fairness=0.0, seconds_per_kv_token=0.0)

        assert free.lengths.tolist() == [3, 3]


class TestWrongInput:
    @pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
    @pytest.mark.parametrize("mode", list(VerifyMode))
    def test_confidence_outside_its_range(self, value: float, mode: VerifyMode) -> None:
        confidence = np.full((2, 3), 0.5)
        confidence[1, 2] = value

        with pytest.raises(ValueError, match=f"confidence of request 1 at position 2 is {value}"):
            plan_verify_lengths(confidence, step_cost=LINE, history=np.full((2, 3), 0.5), mode=mode)

    def test_history_outside_its_range(self) -> None:
        with pytest.raises(ValueError, match="history of request 0 at position 0 is 2"):
            plan_verify_lengths([[0.5]], step_cost=LINE, history=[[2.0]])

    def test_shapes(self) -> None:
        with pytest.raises(ValueError, match=r"confidence has shape \(3,\)"):
            plan_verify_lengths([0.5, 0.5, 0.5], step_cost=LINE)
        with pytest.raises(ValueError, match=r"history has shape \(1, 1\)"):
            plan_verify_lengths(THREE, step_cost=LINE, history=[[0.5]])
        with pytest.raises(ValueError, match=r"acceptance has shape \(2,\)"):
            plan_verify_lengths(THREE, step_cost=LINE, acceptance=[0.5, 0.5])
        with pytest.raises(ValueError, match=r"num_drafts has shape \(1,\)"):
            plan_verify_lengths(THREE, step_cost=LINE, num_drafts=[3])
        context = ContextCost(kv_tokens=[5], seconds_per_kv_token=1e-6)
        with pytest.raises(ValueError, match=r"kv_tokens has shape \(1,\)"):
            plan_verify_lengths(THREE, step_cost=LINE, context=context)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_other_tokens": -1}, "num_other_tokens is -1"),
            ({"budget": -1}, "budget is -1"),
            ({"mode": "fixed", "fixed_length": 4}, r"fixed_length 4 is not in 0\.\.3"),
            ({"mode": "sometimes"}, "sometimes"),
            ({"acceptance": 1.5}, "acceptance is 1.5"),
            ({"num_drafts": [3, 4, 0]}, "num_drafts holds 4"),
            ({"num_drafts": [3, -1, 0]}, "num_drafts holds -1"),
            ({"draft_seconds": -1.0}, "draft_seconds is -1.0"),
            ({"draft_seconds": math.nan}, "draft_seconds is nan"),
        ],
    )
    def test_numbers(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            plan_verify_lengths(THREE, step_cost=LINE, **arguments)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("kv_tokens", [1, -2, 3], "kv_tokens holds -2"),
            ("seconds_per_kv_token", -1.0, "seconds_per_kv_token is -1.0"),
            ("fairness", 1.5, "fairness is 1.5"),
        ],
    )
    def test_context(self, field: str, value: object, message: str) -> None:
        fields = {"kv_tokens": [1, 2, 3], "seconds_per_kv_token": 1e-6, field: value}

        with pytest.raises(ValueError, match=message):
            plan_verify_lengths(THREE, step_cost=LINE, context=ContextCost(**fields))

    def test_more_tokens_than_a_plan_can_hold(self) -> None:
        with pytest.raises(ValueError, match="65535"):
            plan_verify_lengths(np.full((13_108, 5), 0.5), step_cost=LINE)

    def test_as_many_tokens_as_a_plan_can_hold(self) -> None:
        """All certain: the sums are the largest there can be."""
        certain = np.ones((13_107, 5), dtype=np.float32)

        plan = plan_verify_lengths(certain, step_cost=LINE, history=certain)

        assert plan.budget == 65_535
        assert plan.lengths.min() == 5
        assert plan.expected_emitted == 13_107 * 6


@pytest.mark.parametrize("mode", list(VerifyMode))
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_nothing_to_verify_is_a_plan_too(shape: tuple[int, int], mode: VerifyMode) -> None:
    plan = plan_verify_lengths(np.zeros(shape), step_cost=LINE, history=np.zeros(shape), mode=mode)

    assert plan.lengths.tolist() == [0] * shape[0]
    assert plan.budget == 0
    assert plan.expected_emitted == shape[0]
    assert plan.draft_gain == 0.0


def test_more_requests_than_the_curve_covers() -> None:
    """Beyond the last tier a token costs the last slope, and the plan is as on a longer curve."""
    confidence = np.random.default_rng(0).uniform(0.5, 1, (500, 5))
    long = curve_of(lambda b: 10 + 0.5 * b, max_tokens=3000)

    plan = plan_verify_lengths(confidence, step_cost=LINE, history=confidence)
    same = plan_verify_lengths(confidence, step_cost=long, history=confidence)

    assert plan.lengths.tolist() == same.lengths.tolist()
    assert 0 < plan.budget < confidence.size


def test_plan_is_read_only_and_carries_its_epoch() -> None:
    plan = plan_verify_lengths(THREE, step_cost=LINE, epoch=7)

    assert plan.epoch == 7
    with pytest.raises(ValueError, match="read-only"):
        plan.lengths[0] = 1


def test_all_ways_to_call_share_one_compiled_kernel() -> None:
    """Another numba type would make an engine's first step wait for the compiler."""
    confidence = np.full((2, 3), 0.5)
    arguments = [
        {"history": confidence},
        {"history": confidence, "num_drafts": [1, 2]},
        {"history": confidence, "acceptance": 0.5},
        {"acceptance": np.array([0.5, 0.5, 0.5])},
        {"history": np.where([[True], [False]], confidence, math.nan), "draft_seconds": 0.1},
        {"history": confidence[None]},
    ]

    def kinds() -> set[tuple[str, ...]]:
        """Types of everything but confidence and history, which may be float32 or float64."""
        signatures = kernels.plan_asynchronous.signatures
        return {tuple(str(kind) for kind in signature[2:]) for signature in signatures}

    plan_verify_lengths(confidence, step_cost=LINE, **arguments[0])
    before = kinds()

    for each in arguments:
        plan_verify_lengths(confidence, step_cost=LINE, **each)
        plan_verify_lengths(confidence.astype(np.float32), step_cost=LINE, **each)

    assert kinds() == before
