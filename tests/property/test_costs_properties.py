"""Cost models: what holds for every input, and fast against plain."""

import costs_reference as twin
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dsched.costs import PrefillCostModel, StepCostCurve, kernels
from dsched.costs.isotonic import isotonic
from dsched.costs.nnls import nonnegative_least_squares
from dsched.costs.prefill_fit import PrefillArrays

untimed = settings(deadline=None)  # the first call loads the compiled kernel


@st.composite
def prefill_models(draw: st.DrawFn) -> PrefillCostModel:
    # Whole numbers of nanoseconds, and knots that meet the tiles: ties and jumps are the hard part.
    knots = draw(
        st.lists(
            st.sampled_from([1, 64, 512, 1024, 1025, 4096, 20_000]), unique=True, max_size=3
        ).map(sorted)
    )
    rises = draw(
        st.lists(
            st.sampled_from([0, 10, 80_000, 5_000_000]),
            min_size=len(knots) + 1,
            max_size=len(knots) + 1,
        )
    )
    small = st.sampled_from([0.0, 0.25, 3.0])
    arrays = PrefillArrays(
        knot_tokens=np.array([0, *knots], dtype=np.float64),
        knot_ns=np.cumsum(np.array(rises, dtype=np.float64)),
    )
    arrays.coefficients[kernels.SLOPE] = draw(st.sampled_from([1.0, 500.0, 80_000.0]))
    arrays.coefficients[kernels.ATTENTION] = draw(small)
    for index in range(kernels.CONTEXT, kernels.TOPK):
        arrays.coefficients[index] = draw(small)
    arrays.coefficients[kernels.TOPK] = draw(small)
    arrays.coefficients[kernels.SWITCH] = draw(st.sampled_from([0.0, 1e6]))
    arrays.coefficients[kernels.TOPK_TOKENS] = draw(st.sampled_from([0, 7, 2048]))
    return PrefillCostModel(arrays)


past_tokens = st.sampled_from([0, 1, 5, 1000, 2047, 2048, 131_072])


@untimed
@given(prefill_models(), st.sampled_from([0, 3, 500]), past_tokens, st.integers(0, 5_000))
def test_cost_of_a_chunk_equals_the_twins(
    model: PrefillCostModel, step_tokens: int, past: int, chunk: int
) -> None:
    arrays = model.arrays
    fast = kernels.chunk_ns(
        arrays.knot_tokens,
        arrays.knot_ns,
        arrays.coefficients,
        float(step_tokens),
        float(past),
        float(chunk),
    )

    np.testing.assert_allclose(fast, twin.chunk_ns(arrays, step_tokens, past, chunk), rtol=1e-9)


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(
    prefill_models(),
    st.sampled_from([0, 3, 500]),
    past_tokens,
    st.sampled_from([0, 1, 63, 1_500, 3_000, 6_000]),
    st.one_of(st.integers(0, 6_000), st.sampled_from([1_023, 1_024, 1_025, 1_300, 2_100, 4_097])),
    st.sampled_from([0.999, 1.0, 1.001]),
)
def test_largest_chunk_is_the_largest_that_fits(
    model: PrefillCostModel,
    step_tokens: int,
    past: int,
    max_chunk: int,
    target: int,
    factor: float,
) -> None:
    arrays = model.arrays
    parts = (arrays.knot_tokens, arrays.knot_ns, arrays.coefficients, float(step_tokens))
    budget_ns = factor * twin.chunk_ns(arrays, step_tokens, past, target)

    chunk = kernels.largest_chunk(*parts, float(past), max_chunk, budget_ns)

    assert 0 <= chunk <= max_chunk
    assert kernels.chunk_ns(*parts, float(past), float(chunk)) <= budget_ns or chunk == 0
    if 0 < chunk < max_chunk:
        assert kernels.chunk_ns(*parts, float(past), float(chunk + 1)) > budget_ns
    # A step between tied values may go either way by rounding; nothing else may differ.
    expected = twin.largest_chunk(arrays, step_tokens, past, max_chunk, budget_ns)
    if budget_ns > 0 and chunk != expected:
        value = twin.chunk_ns(arrays, step_tokens, past, max(chunk, expected))
        np.testing.assert_allclose(value, budget_ns, rtol=1e-9)


@untimed
@given(st.integers(0, 5_000), st.integers(0, 3_000), st.integers(1, 4_096))
def test_topk_sum_is_the_discrete_sum(past: int, chunk: int, k: int) -> None:
    expected = sum(min(past + i, k) for i in range(chunk))

    assert kernels.topk_sum(float(past), float(chunk), float(k)) == expected


@untimed
@example([(1, 0.5), (2, 10.0)], 1)  # 9.5 s a token: more nanoseconds than 64 bits hold
@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-6, 10.0)), min_size=2, max_size=30).filter(
        lambda samples: len({tokens for tokens, _ in samples}) > 1
    ),
    st.integers(1, 2_000),
)
def test_curve_never_falls_and_never_stays_free(
    samples: list[tuple[int, float]], num_tokens: int
) -> None:
    curve = StepCostCurve.from_samples(*zip(*samples, strict=True))

    assert curve.seconds(num_tokens) <= curve.seconds(num_tokens + 1)
    last = int(curve.tier_tokens[-1])
    # Far out the price shows, whatever the samples were.
    assert curve.seconds(last + 1_000_000_000) > curve.seconds(last)
    times = [seconds for _, seconds in samples]
    assert min(times) - 1e-9 <= curve.seconds(1) <= curve.seconds(last) <= max(times) + 1e-9


@untimed
@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(0.1, 4)), min_size=1, max_size=20),
)
def test_isotonic_keeps_the_weighted_sum_and_the_order(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))

    fitted = isotonic(values, weights)

    assert (np.diff(fitted) >= -1e-12).all()
    np.testing.assert_allclose((fitted * weights).sum(), (values * weights).sum(), atol=1e-9)


def matrices(rows: int, columns: int) -> st.SearchStrategy[NDArray[np.float64]]:
    # Small whole numbers: equal and dependent columns are the hard cases.
    return st.lists(st.integers(-2, 2), min_size=rows * columns, max_size=rows * columns).map(
        lambda flat: np.array(flat, dtype=np.float64).reshape(rows, columns)
    )


@untimed
@given(matrices(7, 4), st.lists(st.integers(-3, 3), min_size=7, max_size=7))
def test_nonnegative_least_squares_meets_the_optimality_conditions(
    features: NDArray[np.float64], target: list[int]
) -> None:
    goal = np.array(target, dtype=np.float64)

    x = nonnegative_least_squares(features, goal)

    gradient = features.T @ (goal - features @ x)
    assert (x >= 0).all()
    # No column would help, and a column in use is at its best.
    assert (gradient <= 1e-6).all()
    np.testing.assert_allclose(gradient[x > 1e-12], 0.0, atol=1e-6)
