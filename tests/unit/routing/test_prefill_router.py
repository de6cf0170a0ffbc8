"""Which worker computes a prompt."""

from collections.abc import Iterator

import numpy as np
import pytest

from dsched.costs.prefill import PrefillCostModel
from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.routing.ledger import RankState
from dsched.routing.prefill import PrefillConfig, PrefillReason, PrefillRouter

NS_PER_MS = 1_000_000


def make_router(num_workers: int, **config: object) -> PrefillRouter:
    """12K tokens/s, attention as costly as the rest at a context of 24K."""
    model = PrefillCostModel.from_coefficients(
        fixed_s=0.01, token_s=1 / 12_000, attention_s=1 / 12_000 / 24_000
    )
    router = PrefillRouter(model, config=PrefillConfig(**config))  # type: ignore[arg-type]
    for index in range(num_workers):
        router.add_worker(RankId(EngineId("prefill"), DpRank(index)))
    return router


def send(router: PrefillRouter, key: str, tokens: int, now_ns: int = 0, cached: int = 0) -> int:
    decision = router.pick(num_prompt_tokens=tokens, num_cached_tokens=cached, now_ns=now_ns)
    assert decision.worker is not None
    router.book(
        decision.worker, key, work_ns=decision.work_ns, bucket=decision.bucket, now_ns=now_ns
    )
    return decision.worker


def router_like(router: PrefillRouter) -> PrefillRouter:
    """The same that has learned nothing."""
    return make_router(router.num_workers)


@pytest.fixture
def router() -> Iterator[PrefillRouter]:
    made = make_router(4, bucket_bounds=())
    yield made
    made.validate()


def test_work_counts_attention(router: PrefillRouter) -> None:
    short = router.estimate_work_ns(num_uncached_tokens=12_000, num_cached_tokens=0)
    assert short == pytest.approx(1.25e9)
    after_context = router.estimate_work_ns(num_uncached_tokens=12_000, num_cached_tokens=24_000)
    assert after_context == pytest.approx(2.25e9)
    assert router.estimate_work_ns(num_uncached_tokens=0, num_cached_tokens=9) == 0


def test_work_is_learned_from_prompts_that_were_alone(router: PrefillRouter) -> None:
    """Twice as slow as thought, after context too; what is booked stays what it was."""
    send(router, "before", 12_000)
    for _ in range(50):
        for tokens, cached in ((3_000, 0), (12_000, 0), (12_000, 24_000)):
            work_ns = router_like(router).estimate_work_ns(
                num_uncached_tokens=tokens, num_cached_tokens=cached
            )
            router.observe(
                2 * (work_ns + 10 * NS_PER_MS),
                num_uncached_tokens=tokens,
                num_cached_tokens=cached,
            )
    for elapsed_ns, tokens, cached in ((0, 100, 0), (NS_PER_MS, 0, 100), (NS_PER_MS, 100, -1)):
        router.observe(elapsed_ns, num_uncached_tokens=tokens, num_cached_tokens=cached)

    learned = router.estimate_work_ns(num_uncached_tokens=12_000, num_cached_tokens=24_000)
    assert learned == pytest.approx(4.5e9, rel=0.02)
    assert router.backlog_ns(0).max() == pytest.approx(1.25e9)


def test_idle_workers_are_used_in_turn(router: PrefillRouter) -> None:
    assert sorted(send(router, str(index), 100) for index in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_one_long_prompt_weighs_more_than_many_short_ones(router: PrefillRouter) -> None:
    long_one = send(router, "long", 48_000)
    workers = [send(router, f"short{index}", 2_000) for index in range(12)]
    assert long_one not in workers


def test_cached_tokens_lower_the_estimate_of_that_worker(router: PrefillRouter) -> None:
    decision = router.pick(num_prompt_tokens=8_000, num_cached_tokens=[0, 0, 7_000, 0], now_ns=0)
    assert decision.worker == 2
    for index in range(3):
        router.book(2, f"busy{index}", work_ns=10**9, bucket=0, now_ns=0)
    busy = router.pick(num_prompt_tokens=8_000, num_cached_tokens=[0, 0, 7_000, 0], now_ns=0)
    assert busy.worker != 2, "a cache is not worth any wait"


def test_time_works_off_the_oldest_request_only(router: PrefillRouter) -> None:
    router.book(0, "a", work_ns=100 * NS_PER_MS, bucket=0, now_ns=0)
    router.book(0, "b", work_ns=50 * NS_PER_MS, bucket=0, now_ns=0)
    assert router.backlog_ns(40 * NS_PER_MS)[0] == 110 * NS_PER_MS
    overdue = router.backlog_ns(1000 * NS_PER_MS)[0]
    assert overdue == 50 * NS_PER_MS + 1, "not over, so that an idle worker does not tie with it"
    assert router.release("a", 120 * NS_PER_MS)
    assert router.backlog_ns(130 * NS_PER_MS)[0] == 40 * NS_PER_MS
    assert not router.release("a", 130 * NS_PER_MS)
    assert router.release("b", 200 * NS_PER_MS)
    assert router.backlog_ns(10**12).tolist() == [0, 0, 0, 0]


def test_buckets_follow_work_not_length() -> None:
    router = make_router(4)
    mostly_cached = router.estimate_work_ns(num_uncached_tokens=700, num_cached_tokens=100_000)
    assert router.bucket_of(mostly_cached) == 0
    bounds = (10_000, 40_000, 150_000, 600_000)
    buckets = [
        router.bucket_of(router.estimate_work_ns(num_uncached_tokens=count, num_cached_tokens=0))
        for count in bounds
    ]
    assert buckets == [0, 1, 3, 3]


def test_groups_follow_the_work_and_keep_short_prompts_apart() -> None:
    router = make_router(8)
    assert set(router.worker_buckets) == {0}
    for index in range(40):
        send(router, f"s{index}", 5_000, now_ns=index)
    for index in range(4):
        send(router, f"l{index}", 60_000, now_ns=100 + index)
    plan = router.plan_groups(200)
    assert plan is not None
    router.apply_groups(plan, 200)
    buckets = router.worker_buckets
    assert set(buckets) == {0, 2}
    assert list(buckets) == sorted(buckets)
    assert router.plan_groups(201) is None, "not again at once"
    later = 200 + PrefillConfig().min_regroup_ns
    assert router.plan_groups(later) is None, "the split is as it should be"
    assert buckets[send(router, "new", 4_000, now_ns=300)] in (0, 1)


def test_an_overloaded_group_gets_help_from_its_neighbour() -> None:
    router = make_router(2)
    send(router, "short", 2_000)
    send(router, "middle", 30_000)
    plan = router.plan_groups(0)
    assert plan is not None
    assert plan.worker_bucket == (0, 1)
    router.apply_groups(plan, 0)
    now_ns = 10**11
    for key in ("short", "middle"):
        router.release(key, now_ns)
    reasons = []
    for index in range(8):
        decision = router.pick(num_prompt_tokens=4_000, now_ns=now_ns)
        assert decision.worker is not None
        reasons.append(decision.reason)
        router.book(
            decision.worker, index, work_ns=decision.work_ns, bucket=decision.bucket,
            now_ns=now_ns,
        )  # fmt: skip
    assert reasons[0] is PrefillReason.LEAST_FINISH
    assert PrefillReason.SPILLED in reasons


def test_workers_that_are_not_up_get_nothing(router: PrefillRouter) -> None:
    router.set_worker_state(0, RankState.DOWN)
    router.set_worker_state(1, RankState.DRAINING)
    router.set_worker_state(2, RankState.SUSPECT)
    assert {send(router, str(index), 10) for index in range(4)} == {3}
    router.set_worker_state(3, RankState.DOWN)
    assert send(router, "suspect", 10) == 2
    router.set_worker_state(2, RankState.DOWN)
    decision = router.pick(num_prompt_tokens=10, now_ns=0)
    assert (decision.worker, decision.reason) == (None, PrefillReason.NO_WORKER_UP)
    assert make_router(0).pick(num_prompt_tokens=1, now_ns=0).worker is None


def test_work_that_others_sent_counts_until_a_report_says_it_is_gone(
    router: PrefillRouter,
) -> None:
    def report(tokens: int) -> RankReport:
        return RankReport(
            engine_id="prefill", incarnation="i", dp_rank=0, seq=1, step=1, num_running=0,
            num_waiting=1, num_kv_tokens=0, num_waiting_prefill_tokens=tokens,
            kv_capacity_tokens=1, step_ns=0,
        )  # fmt: skip

    router.apply_report(0, report(12_000), 0)
    assert router.backlog_ns(0)[0] == pytest.approx(1.25e9)
    router.apply_report(0, report(0), 0)
    assert router.backlog_ns(0)[0] == 0
    router.apply_report(0, report(-5), 0)
    assert router.backlog_ns(0)[0] == 0


def test_wrong_input_is_named(router: PrefillRouter) -> None:
    with pytest.raises(ValueError, match="num_prompt_tokens is -1"):
        router.pick(num_prompt_tokens=-1, now_ns=0)
    with pytest.raises(ValueError, match="num_cached_tokens 9 is not within the prompt's 5"):
        router.pick(num_prompt_tokens=5, num_cached_tokens=9, now_ns=0)
    with pytest.raises(ValueError, match="2 counts of cached tokens for 4 workers"):
        router.pick(num_prompt_tokens=5, num_cached_tokens=[0, 0], now_ns=0)
    with pytest.raises(ValueError, match="worker 9 is not one of the 4 workers"):
        router.book(9, "a", work_ns=1, bucket=0, now_ns=0)
    with pytest.raises(ValueError, match="bucket 3 is not one of the 1 buckets"):
        router.book(0, "a", work_ns=1, bucket=3, now_ns=0)
    with pytest.raises(ValueError, match=r"bucket_bounds \(5, 5\)"):
        PrefillConfig(bucket_bounds=(5, 5))
    with pytest.raises(ValueError, match=r"spill_ratio is 0\.5"):
        PrefillConfig(spill_ratio=0.5)


def test_sums_stay_whole_numbers() -> None:
    router = make_router(1, bucket_bounds=())
    for index in range(50):
        send(router, str(index), 777)
    assert router.backlog_ns(0).dtype == np.int64
