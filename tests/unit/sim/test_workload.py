"""generate_workload: the distributions say what they give, and the seed decides alone."""

import re
from collections.abc import Callable

import numpy as np
import pytest

from dsched.sim.workload import (
    ClosedLoop,
    EmpiricalLength,
    FixedLength,
    GammaArrivals,
    LengthDistribution,
    LogNormalLength,
    MixtureLength,
    PoissonArrivals,
    empirical,
    generate_workload,
)


def test_same_seed_same_trace_other_seed_other_trace() -> None:
    one, same, other = (generate_workload(num_requests=50, seed=seed) for seed in (4, 4, 5))

    assert np.array_equal(one.arrival_ns, same.arrival_ns)
    assert np.array_equal(one.num_prompt_tokens, same.num_prompt_tokens)
    assert np.array_equal(one.num_output_tokens, same.num_output_tokens)
    assert not np.array_equal(one.arrival_ns, other.arrival_ns)
    assert not np.array_equal(one.num_prompt_tokens, other.num_prompt_tokens)


def test_arrivals_leave_the_lengths_as_they_are() -> None:
    """Two rates compare the same requests."""
    slow = generate_workload(num_requests=50, arrivals=PoissonArrivals(rate_per_s=1))
    fast = generate_workload(num_requests=50, arrivals=GammaArrivals(rate_per_s=9, cv=3))

    assert np.array_equal(slow.num_prompt_tokens, fast.num_prompt_tokens)
    assert np.array_equal(slow.num_output_tokens, fast.num_output_tokens)


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [
        (PoissonArrivals(rate_per_s=20), 1.0),
        (GammaArrivals(rate_per_s=20, cv=3.0), 3.0),
        (GammaArrivals(rate_per_s=20, cv=0.25), 0.25),
    ],
)
def test_arrivals_have_the_rate_and_the_burstiness(
    arrivals: PoissonArrivals | GammaArrivals, cv: float
) -> None:
    trace = generate_workload(num_requests=20_000, seed=1, arrivals=arrivals)
    gaps = np.diff(trace.arrival_ns) / 1e9

    assert trace.arrival_ns[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_log_normal_has_its_median_and_limits() -> None:
    lengths = LogNormalLength(median_tokens=300, sigma=1.0, min_tokens=10, max_tokens=2_000)

    sample = generate_workload(num_requests=20_000, prompt=lengths).num_prompt_tokens

    assert np.median(sample) == pytest.approx(300, rel=0.05)
    assert sample.min() == 10
    assert sample.max() == 2_000


def test_mixture_draws_from_its_parts_by_weight() -> None:
    mixture = MixtureLength(
        parts=(FixedLength(num_tokens=5), FixedLength(num_tokens=9)), weights=(3.0, 1.0)
    )

    sample = generate_workload(num_requests=20_000, output=mixture).num_output_tokens

    assert set(sample.tolist()) == {5, 9}
    assert np.mean(sample == 5) == pytest.approx(0.75, abs=0.02)


def test_empirical_gives_back_only_what_was_seen() -> None:
    sample = generate_workload(num_requests=500, prompt=empirical([3, 3, 80])).num_prompt_tokens

    assert set(sample.tolist()) == {3, 80}
    assert np.mean(sample == 3) == pytest.approx(2 / 3, abs=0.1)


def test_closed_loop_has_no_times_but_a_concurrency() -> None:
    trace = generate_workload(num_requests=7, arrivals=ClosedLoop(max_concurrency=3))

    assert trace.arrival_ns.tolist() == [0] * 7
    assert trace.max_concurrency == 3


def test_no_requests_is_an_empty_trace() -> None:
    assert generate_workload(num_requests=0).num_requests == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedLength(num_tokens=0), "num_tokens 0 must be at least 1"),
        (lambda: LogNormalLength(median_tokens=0, sigma=1), "median_tokens 0 must be positive"),
        (lambda: LogNormalLength(median_tokens=9, sigma=float("nan")), "sigma nan"),
        (
            lambda: LogNormalLength(median_tokens=9, sigma=1, min_tokens=5, max_tokens=4),
            "max_tokens 4 is below min_tokens 5",
        ),
        (lambda: EmpiricalLength(seen_tokens=()), "seen_tokens is empty"),
        (lambda: EmpiricalLength(seen_tokens=(4, 0)), "seen_tokens 0 must be at least 1"),
        (
            lambda: MixtureLength(parts=(FixedLength(num_tokens=1),), weights=(1.0, 2.0)),
            "1 parts need as many weights",
        ),
        (
            lambda: MixtureLength(parts=(FixedLength(num_tokens=1),), weights=(0.0,)),
            "not all zero",
        ),
        (lambda: PoissonArrivals(rate_per_s=0), "rate_per_s 0 must be positive"),
        (lambda: GammaArrivals(rate_per_s=1, cv=0), "cv 0 must be positive"),
        (lambda: ClosedLoop(max_concurrency=0), "max_concurrency 0 must be at least 1"),
        (lambda: generate_workload(num_requests=-1), "num_requests -1"),
        (lambda: generate_workload(seed=-1), "seed -1"),
    ],
)
def test_impossible_workloads_are_refused(
    make: Callable[[], LengthDistribution], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()
