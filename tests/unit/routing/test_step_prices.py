"""Prices of a step are learned from what ranks report, and nothing absurd is believed."""

import numpy as np
import pytest

from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing import kernels as k
from dsched.routing.calibration import MAX_STEP_NS, EngineSteps, StepPrices
from dsched.routing.decode import DecodeRouter

TRUE = np.array([15e6, 2e5, 26.0])


def learn(prices: StepPrices, num_steps: int, *, seed: int = 0, noise: float = 0.02) -> None:
    """Steps of a group of eight ranks whose load wanders."""
    rng = stream(seed, "steps")
    running = rng.integers(20, 90, 8)
    kv = rng.integers(200_000, 900_000, 8)
    for _ in range(num_steps):
        running = np.clip(running + rng.integers(-3, 4, 8), 1, 120)
        kv = np.clip(kv + rng.integers(-30_000, 30_001, 8), 1000, 1_000_000)
        step = TRUE[0] + (TRUE[1] * running + TRUE[2] * kv).max()
        step *= 1.0 + noise * rng.standard_normal()
        prices.observe(step_ns=float(step), num_running=running, num_kv_tokens=kv)


@pytest.mark.parametrize("error", [0.25, 1.0, 4.0])
def test_a_wrong_start_is_corrected(error: float) -> None:
    prices = StepPrices(base_ns=15e6, request_ns=2e5, kv_token_ns=26.0 * error)
    learn(prices, 2000)
    ratio = prices.prices[k.REQUEST_NS] / prices.prices[k.KV_TOKEN_NS]
    assert ratio == pytest.approx(TRUE[1] / TRUE[2], rel=0.15)


def test_prices_stay_as_started_until_there_is_evidence() -> None:
    prices = StepPrices(base_ns=1.0, request_ns=2.0, kv_token_ns=3.0)
    learn(prices, 49)
    assert prices.prices.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("step_ns", [float("nan"), float("inf"), 0.0, -5.0, 2.0 * MAX_STEP_NS])
def test_impossible_times_are_left_out(step_ns: float) -> None:
    prices = StepPrices(base_ns=15e6, request_ns=2e5, kv_token_ns=26.0)
    learn(prices, 200)
    before = prices.prices
    one = np.array([10])
    assert not prices.observe(step_ns=step_ns, num_running=one, num_kv_tokens=one)
    assert prices.num_skipped == 1
    assert (prices.prices == before).all()


def test_a_pause_is_not_a_price_but_a_lasting_change_is() -> None:
    prices = StepPrices(base_ns=15e6, request_ns=2e5, kv_token_ns=26.0)
    learn(prices, 200)
    running, kv = np.array([50]), np.array([500_000])
    slow = 3.0 * float(TRUE @ [1, 50, 500_000])
    used = [prices.observe(step_ns=slow, num_running=running, num_kv_tokens=kv) for _ in range(6)]
    assert used == [False, False, False, False, True, True]


def test_no_part_becomes_free_or_endless() -> None:
    """Steps that nothing explains: prices stay within their limits."""
    prices = StepPrices(base_ns=1e6, request_ns=1e5, kv_token_ns=10.0)
    rng = stream(3, "noise")
    for _ in range(3000):
        prices.observe(
            step_ns=float(rng.exponential(1e9)),
            num_running=rng.integers(0, 3, 4),
            num_kv_tokens=rng.integers(0, 10, 4),
        )
    factors = prices.prices / np.array([1e6, 1e5, 10.0])
    assert np.isfinite(factors).all()
    assert (factors >= 0.0199).all()
    assert (factors <= 50.1).all()


def test_wrong_starts_are_named() -> None:
    with pytest.raises(ValueError, match="must be finite and not negative"):
        StepPrices(base_ns=0, request_ns=-1, kv_token_ns=1)


def make_report(
    seq: int, dp_rank: int, step_ns: int, *, prefill: int = 0, num_step_tokens: int = 0
) -> RankReport:
    return RankReport(
        engine_id="e", incarnation="i", dp_rank=dp_rank, seq=seq, step=seq,
        num_running=10 + dp_rank, num_waiting=0, num_kv_tokens=1000 * (1 + dp_rank),
        num_waiting_prefill_tokens=prefill, kv_capacity_tokens=10_000, step_ns=step_ns,
        num_step_tokens=num_step_tokens,
    )  # fmt: skip


def test_a_step_of_a_group_is_learned_once_and_prefill_steps_never() -> None:
    steps = EngineSteps(StepPrices(base_ns=1e6, request_ns=1e5, kv_token_ns=10.0))
    for seq in range(1, 11):
        for dp_rank in range(4):
            steps.apply_report(dp_rank, make_report(seq, dp_rank, 2_500_000))
    assert steps._prices.num_steps == 10
    for seq in range(11, 21):
        steps.apply_report(0, make_report(seq, 0, 9_000_000, prefill=500))
    assert steps._prices.num_steps == 10


def test_a_prompt_that_was_whole_when_its_step_ended_is_no_price() -> None:
    """Nothing waits any more, but the step computed it; drafts of its requests are no prompt."""
    steps = EngineSteps(StepPrices(base_ns=1e6, request_ns=1e5, kv_token_ns=10.0))
    for seq in range(1, 11):
        steps.apply_report(0, make_report(seq, 0, 9_000_000, num_step_tokens=10 + 500))
    assert steps._prices.num_steps == 0
    for seq in range(11, 21):
        steps.apply_report(0, make_report(seq, 0, 2_500_000, num_step_tokens=10 * 6))
    assert steps._prices.num_steps == 10


def test_a_router_learns_from_reports() -> None:
    router = DecodeRouter(base_ns=15e6, request_ns=2e5, kv_token_ns=104.0)
    rank = router.add_rank(
        RankId(EngineId("e"), DpRank(0)), kv_capacity_tokens=10**6, max_running_requests=300
    )
    rng = stream(1, "reports")
    for seq in range(1, 1500):
        running = int(rng.integers(10, 100))
        kv = int(rng.integers(100_000, 900_000))
        report = RankReport(
            engine_id="e", incarnation="i", dp_rank=0, seq=seq, step=seq, num_running=running,
            num_waiting=0, num_kv_tokens=kv, num_waiting_prefill_tokens=0,
            kv_capacity_tokens=10**6, step_ns=int(TRUE @ [1, running, kv]),
        )  # fmt: skip
        router.apply_report(rank, report, seq * 40_000_000)
    learned = router._prices[:, rank]
    assert learned == pytest.approx(TRUE, rel=0.05)
