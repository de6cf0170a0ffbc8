"""Engines of unequal speed in one pool, under the real controller: what the factor is worth.

240 clients, each with one request at a time, over four simulated engines of one DP rank. Judged are
the requests that begin after the pool has had time to learn.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from dsched.ids import EngineId
from dsched.rng import stream
from dsched.routing import DecodeRouter
from dsched.sim import SimCluster, generate_workload
from dsched.sim.engine import SimEngineConfig
from dsched.sim.workload import ClosedLoop, LogNormalLength

pytestmark = pytest.mark.slow

NUM_REQUESTS = 2_400
NUM_LEARNING = 1_200
"""Requests in which the pool learns, about 55 seconds: half of the steps have prompts in them."""
SLOW = EngineId("sim-000")
NS_PER_MS = 1_000_000


def make_cluster(*, seed: int, has_factors: bool = True) -> SimCluster:
    cluster = SimCluster(num_engines=4, engine=SimEngineConfig(num_dp_ranks=1), seed=seed)
    if not has_factors:
        router_of(cluster)._engines_in_groups = frozenset(cluster.drivers)
    return cluster


def router_of(cluster: SimCluster) -> DecodeRouter:
    return cluster.controller._state.pools["sim"].router


def factors_of(cluster: SimCluster) -> list[float]:
    router = router_of(cluster)
    return [router.time_factor(rank) for rank in range(router.num_ranks)]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of the judged requests."""

    p99_tpot_ms: float
    requests_per_s: float
    """Ends between the first judged arrival and the last."""
    num_requests: list[int]
    """By engine."""


def replay(
    cluster: SimCluster, *, num_requests: int = NUM_REQUESTS, num_learning: int = NUM_LEARNING
) -> Outcome:
    trace = generate_workload(
        num_requests=num_requests,
        seed=cluster.seed,
        prompt=LogNormalLength(median_tokens=200, sigma=0.8, max_tokens=2_000),
        output=LogNormalLength(median_tokens=250, sigma=0.6, max_tokens=1_500),
        arrivals=ClosedLoop(max_concurrency=240),
    )
    times = cluster.replay(trace).times
    cluster.validate()
    assert times.is_finished.all()
    start_ns, end_ns = times.arrival_ns[num_learning], times.arrival_ns.max()
    num_ended = np.count_nonzero((times.end_ns > start_ns) & (times.end_ns <= end_ns))
    decode_ns = times.end_ns - times.first_token_ns
    tpot_ns = (decode_ns / np.maximum(times.num_output_tokens - 1, 1))[num_learning:]
    return Outcome(
        p99_tpot_ms=float(np.percentile(tpot_ns, 99)) / NS_PER_MS,
        requests_per_s=num_ended / (end_ns - start_ns) * 1e9,
        num_requests=np.bincount(times.rank[num_learning:], minlength=4).tolist(),
    )


@pytest.mark.parametrize("seed", range(2))
def test_one_engine_of_half_the_speed_stretches_no_stream(seed: int) -> None:
    """p99 TPOT falls by a third against prices that are alike, and throughput by at most 2 %."""
    outcomes = []
    for has_factors in (False, True):
        cluster = make_cluster(seed=seed, has_factors=has_factors)
        cluster.drivers[SLOW].slow(2.0)
        outcomes.append(replay(cluster))
        expected = [2.0, 1.0, 1.0, 1.0] if has_factors else [1.0] * 4
        assert factors_of(cluster) == pytest.approx(expected, rel=0.08)

    alike, told = outcomes
    assert told.p99_tpot_ms < 0.67 * alike.p99_tpot_ms, outcomes
    assert told.requests_per_s > 0.98 * alike.requests_per_s, outcomes
    assert 0 < told.num_requests[0] < 0.5 * alike.num_requests[0], outcomes


def test_an_engine_that_recovers_gets_its_share_again() -> None:
    """Slow for 70 seconds; judged is what begins some 60 seconds later."""
    cluster = make_cluster(seed=1)
    cluster.drivers[SLOW].slow(2.0)
    seen: list[float] = []

    def recover() -> None:
        seen.append(factors_of(cluster)[0])
        cluster.drivers[SLOW].slow(1.0)

    cluster.start()
    cluster.loop.call_at(cluster.loop.now_ns() + 70_000 * NS_PER_MS, recover)
    outcome = replay(cluster, num_requests=3_600, num_learning=2_900)

    assert seen == pytest.approx([2.0], rel=0.1)
    assert factors_of(cluster) == [1.0] * 4
    assert min(outcome.num_requests) > 0.15 * sum(outcome.num_requests), outcome


@pytest.mark.parametrize("seed", range(2))
def test_equal_engines_that_jitter_stay_equal(seed: int) -> None:
    """Step times jitter by 30 %, one in a hundred is a pause, and one engine is held up for 3 s."""
    cluster = make_cluster(seed=seed)
    rng = stream(seed, "jitter")

    def jitter() -> None:
        for driver in cluster.drivers.values():
            factor = float(np.exp(0.3 * rng.standard_normal()))
            factor *= 1.0 + 3.0 * float(rng.pareto(1.5)) * (rng.random() < 0.01)
            is_held_up = driver is cluster.drivers[SLOW] and 20_000 < now_ms() < 23_000
            driver.slow(min(20.0, factor * (3.0 if is_held_up else 1.0)))
        cluster.loop.call_at(cluster.loop.now_ns() + 30 * NS_PER_MS, jitter)

    def now_ms() -> int:
        return cluster.loop.now_ns() // NS_PER_MS

    cluster.start()
    cluster.loop.call_at(cluster.loop.now_ns(), jitter)
    outcome = replay(cluster)

    assert router_of(cluster)._factors.num_changes == 0
    assert max(outcome.num_requests) < 1.2 * min(outcome.num_requests), outcome
