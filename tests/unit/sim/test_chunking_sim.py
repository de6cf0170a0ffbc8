"""The chunking simulator: right times by hand, the overlap, and who starves whom."""

import numpy as np
import pytest

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.rng import stream
from dsched.scheduler import ChunkRule, StepPlanner
from dsched.sim.chunking import (
    ChunkResult,
    ChunkWorkload,
    SimDevice,
    isolated_ns,
    simulate_chunking,
)

MS = 1_000_000
ONE_QUEUE = ChunkRule(bucket_bounds=(), bucket_weights=(1.0,))


def prefill() -> PrefillCostModel:
    """10 ms a step and 0.1 ms a token."""
    return PrefillCostModel.from_coefficients(fixed_s=0.01, token_s=1e-4, attention_s=0.0)


def decode() -> DecodeCostModel:
    """20 ms for up to 64 decodes."""
    return DecodeCostModel.from_curve(StepCostCurve.from_samples([64, 128], [0.02, 0.03]))


def device(noise: float = 0.0) -> SimDevice:
    return SimDevice(prefill=prefill(), decode=decode(), noise=noise)


def workload(*requests: tuple[int, int, int]) -> ChunkWorkload:
    """(arrival ms, prompt, output)."""
    arrival, prompts, outputs = np.array(requests, dtype=np.int64).T
    return ChunkWorkload(arrival_ns=arrival * MS, prompt_tokens=prompts, output_tokens=outputs)


def simulate(
    requests: ChunkWorkload,
    *,
    rule: ChunkRule | None = None,
    budget: float = 0.11,
    cpu_ms: int = 0,
    is_overlapped: bool = True,
) -> ChunkResult:
    planner = StepPlanner(
        prefill_cost=prefill(),
        decode_cost=decode(),
        budget_seconds=budget,
        max_running_requests=64,
        max_requests=200,
        rule=rule,
    )
    return simulate_chunking(
        requests,
        planner,
        device(),
        rng=stream(0, "noise"),
        budget_seconds=budget,
        plan_cpu_ns=lambda _: cpu_ms * MS,
        is_overlapped=is_overlapped,
    )


def test_one_prompt_takes_the_time_of_its_steps() -> None:
    """1 500 tokens in steps of 110 ms (960 and 540): first token after 106 + 64 ms, then decodes
    of 20 ms each."""
    result = simulate(workload((0, 1_500, 3)))

    assert result.ttft_ns.tolist() == [106 * MS + 64 * MS]
    assert result.num_steps == 4
    assert result.end_ns == result.busy_ns == (106 + 64 + 20 + 20) * MS
    assert result.slow_gap_share.tolist() == [0.0]


def test_isolated_time_is_that_of_the_run() -> None:
    """What a prompt takes alone, read off one long run, is what the simulator gives."""
    lengths = np.array([960, 1_500, 10_000], dtype=np.int64)

    alone = isolated_ns(lengths, device(), budget_seconds=0.11)

    for length, expected in zip(lengths.tolist(), alone.tolist(), strict=True):
        result = simulate(workload((0, length, 1)))
        # The last, shorter step pays the fixed time in full; the line between two ends a share.
        assert result.ttft_ns[0] == pytest.approx(expected, abs=10 * MS)


def test_planning_ahead_hides_the_cpu_behind_the_device() -> None:
    """5 ms plans behind 20 ms steps: only the first is waited for; planned after each step, all
    are."""
    requests = workload((0, 100, 50))

    ahead = simulate(requests, cpu_ms=5)
    after = simulate(requests, cpu_ms=5, is_overlapped=False)

    assert ahead.waiting_ns == 5 * MS
    assert after.waiting_ns == 5 * MS * after.num_steps
    assert ahead.end_ns == ahead.busy_ns + 5 * MS
    assert after.idle_share == pytest.approx(0.2, rel=0.05)


def test_plan_longer_than_the_step_is_waited_for() -> None:
    """25 ms plans behind 20 ms steps: the device waits 5 ms in each."""
    result = simulate(workload((0, 100, 50)), cpu_ms=25)

    assert result.waiting_ns == pytest.approx(5 * MS * result.num_steps, rel=0.15)


def test_buckets_let_a_short_prompt_past_a_long_one() -> None:
    """Oldest first, a short prompt waits for all of a 300K-token prompt; with buckets it does
    not."""
    requests = workload((0, 300_000, 2), (200, 500, 2))

    queued = simulate(requests, rule=ONE_QUEUE)
    shared = simulate(requests)

    assert queued.ttft_ns[1] > 10_000 * MS
    assert shared.ttft_ns[1] < 500 * MS
    assert shared.ttft_ns[0] < 1.02 * queued.ttft_ns[0]


def test_goodput_counts_late_first_tokens_and_slow_streams() -> None:
    """A request is good only if both targets were met."""
    result = ChunkResult(
        ttft_ns=np.array([1_000, 9_000, 1_000, 9_000]) * MS,
        slow_gap_share=np.array([0.0, 0.0, 0.02, 0.01]),
        end_ns=1,
        busy_ns=1,
        waiting_ns=0,
        num_steps=1,
        num_slow_steps=0,
    )

    # The fourth has 3 x 4 s for its long prompt.
    alone = np.array([100, 100, 100, 4_000]) * MS
    assert result.goodput(alone, slo_seconds=5.0) == 0.5


def test_workload_has_the_public_mix() -> None:
    """Shares of the four buckets and the mean prompt, from a seed."""
    drawn = ChunkWorkload.draw(stream(1, "w"), num_requests=40_000, requests_per_second=2.0)

    bucket = np.searchsorted([16_384, 65_536, 262_144], drawn.prompt_tokens, side="right")
    shares = np.bincount(bucket, minlength=4) / 40_000
    np.testing.assert_allclose(shares, [0.74, 0.18, 0.065, 0.015], atol=0.01)
    assert drawn.prompt_tokens.mean() == pytest.approx(26_000, rel=0.05)
    assert drawn.arrival_ns[-1] == pytest.approx(20_000e9, rel=0.03)
    again = ChunkWorkload.draw(stream(1, "w"), num_requests=40_000, requests_per_second=2.0)
    assert (again.prompt_tokens == drawn.prompt_tokens).all()


def test_same_seed_gives_the_same_run() -> None:
    """Two runs agree in every first token."""
    drawn = ChunkWorkload.draw(
        stream(2, "w"), num_requests=30, requests_per_second=1.0, mean_output_tokens=20
    )

    assert (simulate(drawn).ttft_ns == simulate(drawn).ttft_ns).all()
