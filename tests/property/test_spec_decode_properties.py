"""plan_verify_lengths: equal to its plain twin, and what holds for every input."""

import numpy as np
import pytest
import spec_reference as twin
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dsched.costs import StepCostCurve
from dsched.spec_decode import ContextCost, VerifyPlan, plan_verify_lengths
from dsched.spec_decode.kernels import ONE

MAX_REQUESTS = 12
MAX_POSITIONS = 5

# Few distinct values make ties, the bounds 0 and 1 make equal survivals over whole requests.
# Survivals near 1e-9 are left out: what they decide is rounding.
confidences = st.one_of(st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.floats(0.05, 1.0))


@st.composite
def matrices(draw: st.DrawFn, shape: tuple[int, int] | None = None) -> np.ndarray:
    shape = shape or (draw(st.integers(1, MAX_REQUESTS)), draw(st.integers(1, MAX_POSITIONS)))
    return draw(hnp.arrays(np.float64, shape, elements=confidences))


@st.composite
def curves(draw: st.DrawFn) -> StepCostCurve:
    """Rising curves: a line, or a staircase of random tiers and risers."""
    if draw(st.booleans()):
        slope = draw(st.floats(0.01, 5.0))
        return StepCostCurve.from_samples(
            [1, 200], [10e-3, 10e-3 + 199e-3 * slope], tiers=range(1, 201)
        )
    tiers = sorted(draw(st.sets(st.integers(1, 90), min_size=2, max_size=12)))
    risers = draw(st.lists(st.floats(0.0, 4.0), min_size=len(tiers), max_size=len(tiers)))
    risers[-1] += 1.0
    return StepCostCurve.from_samples(tiers, (10.0 + np.cumsum(risers)) / 1e3, tiers=tiers)


def costs(curve: StepCostCurve, base_tokens: int, num_tokens: int) -> list[float]:
    """Seconds with 0..num_tokens drafts."""
    return [curve.seconds(base_tokens + n) for n in range(num_tokens + 1)]


def exact_rates(units: np.ndarray, cost: list[float]) -> list[float]:
    return twin.rates(units / ONE, twin.in_order(units), cost)


@given(st.data(), curves(), st.integers(0, 40))
@settings(deadline=None)
def test_asynchronous_plan_equals_its_twin(
    data: st.DataObject, curve: StepCostCurve, num_other_tokens: int
) -> None:
    """The budget is the best over the history, and goes to the best current tokens in order."""
    confidence = data.draw(matrices())
    history = data.draw(matrices(shape=confidence.shape))

    plan = plan_verify_lengths(
        confidence, step_cost=curve, history=history, num_other_tokens=num_other_tokens
    )

    base = num_other_tokens + len(confidence)
    cost = costs(curve, base, confidence.size)
    rate = exact_rates(twin.survival_units(history), cost)
    assert rate[plan.budget] >= max(rate) * (1 - 2e-9)
    assert plan.budget == twin.best_budget(rate, cost)
    chosen = twin.in_order(twin.survival_units(confidence))[: plan.budget]
    assert plan.lengths.tolist() == twin.lengths_of(chosen, len(confidence))
    emitted = len(confidence) + sum(twin.survival(confidence)[place] for place in chosen)
    np.testing.assert_allclose(plan.expected_emitted, emitted, rtol=1e-6)
    np.testing.assert_allclose(plan.expected_seconds, curve.seconds(base + plan.budget))


@given(st.data(), curves(), st.integers(0, 40))
@settings(deadline=None)
def test_synchronous_plan_equals_its_twin(
    data: st.DataObject, curve: StepCostCurve, num_other_tokens: int
) -> None:
    confidence = data.draw(matrices())

    plan = plan_verify_lengths(
        confidence, step_cost=curve, mode="synchronous", num_other_tokens=num_other_tokens
    )

    units = twin.survival_units(confidence)
    base = num_other_tokens + len(confidence)
    cost = costs(curve, base, units.size)
    emitted = np.cumsum([len(units), *(units[place] / ONE for place in twin.in_order(units))])
    assert plan.budget == twin.early_stop(emitted.tolist(), twin.convex_minorant(cost), cost)
    chosen = twin.in_order(units)[: plan.budget]
    assert plan.lengths.tolist() == twin.lengths_of(chosen, len(units))


@given(matrices(), st.integers(0, 80), st.data())
@settings(deadline=None)
def test_given_budget_goes_to_the_best_tokens_that_exist(
    confidence: np.ndarray, budget: int, data: st.DataObject
) -> None:
    num_requests, num_positions = confidence.shape
    num_drafts = np.array(
        data.draw(
            st.lists(st.integers(0, num_positions), min_size=num_requests, max_size=num_requests)
        )
    )
    curve = StepCostCurve.from_samples([1, 2], [0.01, 0.02])

    plan = plan_verify_lengths(confidence, step_cost=curve, budget=budget, num_drafts=num_drafts)

    # Conservation: the budget is spent, or nothing is left to spend it on.
    assert plan.lengths.sum() == min(budget, num_drafts.sum())
    assert (plan.lengths <= num_drafts).all()
    units = twin.survival_units(confidence)
    exist = [place for place in twin.in_order(units) if place[1] < num_drafts[place[0]]]
    assert plan.lengths.tolist() == twin.lengths_of(exist[:budget], num_requests)


@pytest.mark.slow
@given(st.data(), curves(), st.sampled_from(["asynchronous", "synchronous", "density"]))
@settings(max_examples=300, deadline=None)
def test_no_admission_depends_on_the_admitted_token(
    data: st.DataObject, curve: StepCostCurve, mode: str
) -> None:
    """A draft token changes the confidences behind it only. Whatever they become, the token at
    their front keeps its place: it is admitted in both worlds or in neither."""
    confidence = data.draw(matrices())
    history = data.draw(matrices(shape=confidence.shape))
    request = data.draw(st.integers(0, confidence.shape[0] - 1))
    position = data.draw(st.integers(0, confidence.shape[1] - 1))
    other = confidence.copy()
    other[request, position + 1 :] = data.draw(
        hnp.arrays(np.float64, confidence.shape[1] - position - 1, elements=confidences)
    )

    def plan(world: np.ndarray) -> VerifyPlan:
        if mode == "synchronous":
            return plan_verify_lengths(world, step_cost=curve, mode=mode)
        context = None
        if mode == "density":
            kv_tokens = 1000 * (1 + np.arange(len(world)) % 5)
            context = ContextCost(kv_tokens=kv_tokens, seconds_per_kv_token=1e-6)
        return plan_verify_lengths(world, step_cost=curve, history=history, context=context)

    is_admitted = [plan(world).lengths[request] > position for world in (confidence, other)]

    assert is_admitted[0] == is_admitted[1]


@given(st.data(), st.floats(0.0, 1.0), st.floats(0.0, 1e-5))
@settings(deadline=None)
def test_density_plan_equals_its_twin(
    data: st.DataObject, fairness: float, seconds_per_kv_token: float
) -> None:
    """Budget by the best rate in the order of survival a second; a share by survival alone."""
    confidence = data.draw(matrices())
    history = data.draw(matrices(shape=confidence.shape))
    num_requests = len(confidence)
    kv_tokens = data.draw(hnp.arrays(np.int64, num_requests, elements=st.integers(0, 9_999)))
    curve = StepCostCurve.from_samples([1, 200], [10.5e-3, 110e-3], tiers=range(1, 201))

    plan = plan_verify_lengths(
        confidence,
        step_cost=curve,
        history=history,
        context=ContextCost(
            kv_tokens=kv_tokens, seconds_per_kv_token=seconds_per_kv_token, fairness=fairness
        ),
    )

    kv_ns = kv_tokens * (seconds_per_kv_token * 1e9)
    table = curve.table_ns(num_requests + confidence.size)
    token_ns = np.maximum((table[-1] - table[num_requests]) / confidence.size + kv_ns, 1.0)
    older = twin.survival_units(history)
    order = twin.in_order(older / token_ns[:, None])
    spent = np.cumsum([kv_ns.sum(), *(kv_ns[r] for r, _ in order)])
    cost = (table[num_requests:] + spent).tolist()
    assert plan.budget == twin.best_budget(twin.rates(older / ONE, order, cost), range(len(cost)))
    units = twin.survival_units(confidence)
    chosen = twin.in_order(units)[: int(fairness * plan.budget)]
    for place in twin.in_order(units / token_ns[:, None]):
        if place not in chosen and len(chosen) < plan.budget:
            chosen.append(place)
    assert plan.lengths.tolist() == twin.lengths_of(chosen, num_requests)


def test_large_plans_equal_their_twin() -> None:
    """Sizes at which the bins are shared by many tokens, smooth and tied."""
    rng = np.random.default_rng(0)
    tiers = [*range(8, 257, 8), *range(272, 513, 16), *range(544, 1025, 32), *range(1088, 9000, 64)]
    stairs = StepCostCurve.from_samples(tiers, [0.015 + 3e-5 * b for b in tiers], tiers=tiers)
    line = StepCostCurve.from_samples([1, 9000], [0.015, 0.285], tiers=range(1, 9001))
    for num_requests in (60, 257, 1024):
        for make in (lambda s: rng.beta(4, 1, s), lambda s: rng.choice([0.5, 0.75, 0.9375], s)):
            history, confidence = make((num_requests, 5)), make((num_requests, 5))
            units = twin.survival_units(confidence)
            for curve in (stairs, line):
                plan = plan_verify_lengths(confidence, step_cost=curve, history=history)
                cost = costs(curve, num_requests, confidence.size)
                rate = exact_rates(twin.survival_units(history), cost)
                assert plan.budget == twin.best_budget(rate, cost)
                chosen = twin.in_order(units)[: plan.budget]
                assert plan.lengths.tolist() == twin.lengths_of(chosen, num_requests)
