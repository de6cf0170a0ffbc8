"""An engine that has worked and one that has not are equal until steps say otherwise."""

import numpy as np

from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing import DecodeRouter, RoutingRequest

WARM, COLD = RankId(EngineId("warm"), DpRank(0)), RankId(EngineId("cold"), DpRank(0))


def make_router() -> DecodeRouter:
    router = DecodeRouter()
    for rank_id in (WARM, COLD):
        router.add_rank(rank_id, kv_capacity_tokens=1_000_000, max_running_requests=256)
    return router


def work(router: DecodeRouter, rank_id: RankId, *, steps: int, step_ns: int, seed: int = 1) -> None:
    """Report steps whose time hardly depends on their load, then an idle rank."""
    rng = stream(seed, "steps")
    rank = router.index_of(rank_id)
    for step in range(1, steps + 1):
        running = int(rng.integers(1, 32))
        noise = 1.0 + 0.01 * float(rng.standard_normal())
        router.apply_report(
            rank,
            RankReport(
                engine_id=rank_id.engine_id,
                incarnation="i",
                dp_rank=rank_id.dp_rank,
                seq=step,
                step=step,
                num_running=running,
                num_waiting=0,
                num_kv_tokens=running * 50,
                num_waiting_prefill_tokens=0,
                kv_capacity_tokens=1_000_000,
                step_ns=int(step_ns * noise),
            ),
            now_ns=step,
        )
    router.apply_report(
        rank,
        RankReport(
            engine_id=rank_id.engine_id,
            incarnation="i",
            dp_rank=rank_id.dp_rank,
            seq=steps + 1,
            step=steps,
            num_running=0,
            num_waiting=0,
            num_kv_tokens=0,
            num_waiting_prefill_tokens=0,
            kv_capacity_tokens=1_000_000,
            step_ns=0,
        ),
        now_ns=steps + 1,
    )


def spread(router: DecodeRouter, *, num_requests: int = 16) -> list[int]:
    """Send a burst; return how many each rank got."""
    counts = np.zeros(2, np.int64)
    for number in range(num_requests):
        decision = router.pick(RoutingRequest(num_prompt_tokens=20), 0)
        assert decision.rank is not None
        router.book(decision.rank, f"r{number}", num_prompt_tokens=20, now_ns=0)
        counts[decision.rank] += 1
    return counts.tolist()


def test_an_engine_that_has_not_worked_gets_its_half() -> None:
    """Learned prices are far from the configured ones; both engines get them."""
    router = make_router()
    work(router, WARM, steps=400, step_ns=3_000_000)

    assert spread(router) == [8, 8]


def test_a_rank_that_is_added_later_is_priced_like_the_others() -> None:
    """Not by the configuration, which the pool has long left behind."""
    router = make_router()
    work(router, WARM, steps=400, step_ns=3_000_000)

    late = router.add_rank(
        RankId(EngineId("late"), DpRank(0)),
        kv_capacity_tokens=1_000_000,
        max_running_requests=256,
    )

    warm = router.index_of(WARM)
    assert warm is not None
    assert router.prices_of(late) == router.prices_of(warm) != (200_000.0, 26.0)


def test_engines_that_showed_different_steps_are_priced_alike() -> None:
    """What an engine happened to run is no difference of the machines; both get their half."""
    router = make_router()
    work(router, WARM, steps=400, step_ns=3_000_000)
    work(router, COLD, steps=400, step_ns=30_000_000, seed=2)

    warm, cold = router.index_of(WARM), router.index_of(COLD)
    assert warm is not None
    assert cold is not None
    assert router.prices_of(warm) == router.prices_of(cold) != (200_000.0, 26.0)
    assert spread(router) == [8, 8]
