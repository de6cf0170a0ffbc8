"""The wrapper around SGLang's budget function, called as SGLang 0.5.23 calls it."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from dsched.drivers.sglang.verify import MAX_ERRORS, VerifyBudget, confidence_of, curve_of_table

CONFIG = SimpleNamespace(resolved_max_verify_len=lambda: 6)


class Decision(msgspec.Struct):
    """SGLang's `VerifyBudgetDecision`."""

    budget: int
    predicted_step_seconds: float | None = None
    predicted_theta: float | None = None


def sglang_budget(
    *, history_survival_probs: np.ndarray, sps_table: object, cfg: object
) -> Decision:
    """What SGLang's function does, from its description: the best of all budgets, cost looked up
    at the probe below."""
    scores = np.sort(history_survival_probs.ravel())[::-1]
    emitted = len(history_survival_probs) + np.concatenate(([0.0], np.cumsum(scores)))
    tokens = len(history_survival_probs) + np.arange(len(emitted))
    below = np.searchsorted(sps_table.sample_batch_tokens, tokens, side="right") - 1
    rates = emitted * np.array(sps_table.sample_steps_per_sec)[np.maximum(below, 0)]
    return Decision(budget=int(np.argmax(rates)))


def table(step: int = 1) -> SimpleNamespace:
    tokens = tuple(range(1, 400, step))
    return SimpleNamespace(
        sample_batch_tokens=tokens,
        sample_steps_per_sec=tuple(1e3 / (15.0 + 0.06 * b) for b in tokens),
        max_batch_tokens=400,
    )


@pytest.mark.parametrize("seed", range(10))
def test_budget_is_sglangs_where_both_know_the_same(seed: int) -> None:
    """A probe at every token, all requests known: the same search."""
    rng = np.random.default_rng(seed)
    survival = np.cumprod(rng.beta(3, 1, (40, 5)), axis=1)
    budget = VerifyBudget()
    arguments = {"history_survival_probs": survival, "sps_table": table(), "cfg": CONFIG}

    decision = budget(sglang_budget, **arguments)

    assert decision.budget == sglang_budget(**arguments).budget
    tokens = 40 + decision.budget
    assert decision.predicted_step_seconds == pytest.approx((15.0 + 0.06 * tokens) / 1e3)
    assert (budget.num_plans, budget.num_errors) == (1, 0)


def test_new_requests_are_not_certain() -> None:
    """SGLang gives requests without a history survivals of 1."""
    survival = np.full((64, 5), 1.0)
    survival[:32] = np.cumprod(np.full((32, 5), 0.4), axis=1)
    arguments = {"history_survival_probs": survival, "sps_table": table(), "cfg": CONFIG}

    assert (
        VerifyBudget()(sglang_budget, **arguments).budget < 0.7 * sglang_budget(**arguments).budget
    )


def test_tokens_before_a_riser_are_not_free() -> None:
    """With probes every 64 tokens SGLang's look-up takes 64 + 63 tokens for the price of 64."""
    survival = np.cumprod(np.full((60, 5), 0.55), axis=1)
    arguments = {"history_survival_probs": survival, "sps_table": table(64), "cfg": CONFIG}

    ours = VerifyBudget()(sglang_budget, **arguments)

    tokens = 60 + ours.budget
    assert tokens in table(64).sample_batch_tokens or ours.budget == survival.size


def test_failures_leave_sglangs_budget_and_end_the_attempts() -> None:
    budget = VerifyBudget()
    wrong = {
        "history_survival_probs": np.full((4, 5), np.nan),
        "sps_table": table(),
        "cfg": CONFIG,
    }

    def own(**_: object) -> Decision:
        return Decision(budget=17)

    answers = [budget(own, **wrong) for _ in range(MAX_ERRORS + 5)]

    assert all(answer == Decision(budget=17) for answer in answers)
    assert budget.num_errors == MAX_ERRORS


def test_older_versions_that_return_a_number_get_a_number() -> None:
    survival = np.cumprod(np.full((4, 5), 0.9), axis=1)

    answer = VerifyBudget()(
        lambda **_: 3, history_survival_probs=survival, sps_table=table(), cfg=CONFIG
    )

    assert isinstance(answer, int)


def test_table_that_was_never_profiled_is_flat(caplog: pytest.LogCaptureFixture) -> None:
    never = SimpleNamespace(
        sample_batch_tokens=(1,), sample_steps_per_sec=(1.0,), max_batch_tokens=400
    )
    survival = np.cumprod(np.full((4, 5), 0.1), axis=1)

    decision = VerifyBudget()(
        sglang_budget, history_survival_probs=survival, sps_table=never, cfg=CONFIG
    )

    assert curve_of_table(never).is_flat
    assert decision.budget == 20
    assert "verify.cost_flat" in caplog.text


def test_additive_table_brings_its_cost_a_request() -> None:
    additive = SimpleNamespace(
        bias_seconds=0.01,
        bs_probes=(1, 64),
        alpha_seconds=(0.001, 0.002),
        m_probes=(1, 400),
        theta_seconds=(0.0, 0.04),
    )

    curve = curve_of_table(additive)

    assert curve.overhead(64) == 2_000_000
    assert curve.seconds(400) == pytest.approx(0.05)


def test_confidences_of_survivals() -> None:
    survival = np.array([[0.9, 0.45, 0.0, 0.0], [1.0, 1.0, 1.0, 0.5]])

    assert confidence_of(survival).tolist() == [[0.9, 0.5, 0.0, 0.0], [1.0, 1.0, 1.0, 0.5]]
