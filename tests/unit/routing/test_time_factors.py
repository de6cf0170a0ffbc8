"""Engines of a pool are told apart by their step times at equal load, and by nothing else."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import time_factors_reference as twin

from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing import DecodeRouter, RoutingRequest
from dsched.routing import kernels as k
from dsched.routing.time_factors import (
    BAND,
    BLOCK_STEPS,
    FADE_STEPS,
    GRAIN,
    MIN_BLOCKS,
    TimeFactors,
)

PRICES = np.array([15e6, 2e5, 26.0])
MAX_STEPS_TO_BELIEVE = 40 * BLOCK_STEPS
"""Steps of an engine after which a change of its speed must be believed."""

Load = tuple[int, int]


def wandering(rng: np.random.Generator, engine: int) -> Load:
    """A load that all engines have alike."""
    return int(rng.integers(10, 60)), int(rng.integers(20_000, 200_000))


@dataclass
class Pool:
    """Engines whose step times follow the prices, times their speed, times noise."""

    speeds: list[float]
    load: Callable[[np.random.Generator, int], Load] = wandering
    noise: float = 0.3
    seed: int = 0
    factors: TimeFactors = field(default_factory=TimeFactors)
    steps: list[twin.Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = stream(self.seed, "steps")

    def work(self, num_steps: int, engines: Sequence[int] | None = None) -> None:
        """Let every engine take so many steps in turn."""
        for _ in range(num_steps):
            for engine in range(len(self.speeds)) if engines is None else engines:
                running, kv = self.load(self.rng, engine)
                step_ns = float(PRICES @ [1.0, running, kv]) * self.speeds[engine]
                step_ns *= float(np.exp(self.noise * self.rng.standard_normal()))
                self.steps.append((engine, step_ns, running, kv))
                self.factors.observe(
                    EngineId(f"e{engine}"),
                    step_ns=step_ns,
                    num_running=running,
                    num_kv_tokens=kv,
                    prices=PRICES,
                )

    def used(self) -> list[float]:
        return [self.factors.factor(EngineId(f"e{each}")) for each in range(len(self.speeds))]


@pytest.mark.parametrize("num_engines", [2, 3, 8])
def test_equal_engines_stay_equal(num_engines: int) -> None:
    pool = Pool([1.0] * num_engines)
    pool.work(1_500)
    assert pool.used() == [1.0] * num_engines
    assert pool.factors.num_changes == 0


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ([2.0, 1.0, 1.0], [2.0, 1.0, 1.0]),
        ([1.0, 1.0, 1.0, 1.4], [1.0, 1.0, 1.0, 1.4]),
        ([1.0, 1.0, 0.5], [1.0, 1.0, 0.5]),
        ([2.0, 1.0], [2.0**0.5, 0.5**0.5]),
    ],
)
def test_a_slower_engine_is_priced_by_its_ratio(speeds: list[float], expected: list[float]) -> None:
    """Against the pool's middle engine; of two, each is half of the way from their middle."""
    pool = Pool(speeds)
    pool.work(MAX_STEPS_TO_BELIEVE)
    assert pool.used() == pytest.approx(expected, rel=0.08)


def test_of_two_engines_the_slower_is_known_too() -> None:
    """The faster has shown enough first, and then the other gets less load than anybody had."""

    def load(rng: np.random.Generator, engine: int) -> Load:
        is_told = pool.factors.factor(EngineId("e1")) < 1.0
        running = int(rng.integers(40, 60)) if not is_told else (10, 90)[engine]
        return running, running * 1_000

    pool = Pool([2.0, 1.0], load=load, noise=0.1)
    for _ in range(MAX_STEPS_TO_BELIEVE):
        pool.work(1)
        pool.work(1, engines=[1])
    assert pool.used() == pytest.approx([2.0**0.5, 0.5**0.5], rel=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_factors_are_those_of_one_fit_to_all_steps(seed: int) -> None:
    """Loads that overlap in part: a slow engine that is given less."""

    def load(rng: np.random.Generator, engine: int) -> Load:
        low, high = [(5, 40), (20, 90), (20, 90)][engine]
        running = int(rng.integers(low, high))
        return running, running * int(rng.integers(900, 1_100))

    pool = Pool([1.6, 1.0, 1.3], load=load, seed=seed)
    pool.work(1_500)
    fitted = twin.engine_factors(pool.steps, num_engines=3, prices=PRICES)
    assert pool.used() == pytest.approx(fitted.tolist(), rel=2 * GRAIN)


def test_an_engine_that_recovers_is_believed_soon() -> None:
    pool = Pool([2.0, 1.0, 1.0])
    pool.work(MAX_STEPS_TO_BELIEVE)
    pool.speeds[0] = 1.0
    pool.work(MAX_STEPS_TO_BELIEVE)
    assert pool.used() == [1.0, 1.0, 1.0]


def test_an_engine_that_recovers_where_nobody_else_is_is_believed_too() -> None:
    """It was given little load since it was slow, and is compared with itself."""
    light = {"is_light": False}

    def load(rng: np.random.Generator, engine: int) -> Load:
        if engine == 0 and light["is_light"]:
            return int(rng.integers(2, 8)), int(rng.integers(2_000, 9_000))
        return wandering(rng, engine)

    pool = Pool([2.0, 1.0, 1.0], load=load, noise=0.1)
    pool.work(MAX_STEPS_TO_BELIEVE)
    light["is_light"] = True
    pool.work(MAX_STEPS_TO_BELIEVE)
    assert pool.used() == pytest.approx([2.0, 1.0, 1.0], rel=0.08)
    pool.speeds[0] = 1.0
    pool.work(MAX_STEPS_TO_BELIEVE)
    assert pool.used() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("truth", [0.0, 1.0, 2.0])
def test_engines_that_never_had_the_same_load_are_not_compared(truth: float) -> None:
    """However steps depend on the load: one ran single requests, the other many."""

    def load(rng: np.random.Generator, engine: int) -> Load:
        return (1, 50) if engine else (int(rng.integers(8, 16)), 1_500)

    pool = Pool([8.0**truth, 1.0], load=load, noise=0.05)
    pool.work(MAX_STEPS_TO_BELIEVE)
    assert pool.used() == [1.0, 1.0]


def test_an_engine_that_works_alone_shows_nothing() -> None:
    """The machine was quiet for the one and busy for the other; neither is slower."""
    pool = Pool([1.0, 1.0], noise=0.1)
    pool.work(500, engines=[0])
    pool.speeds = [2.0, 2.0]
    pool.work(500, engines=[1])
    assert pool.used() == [1.0, 1.0]


def test_an_engine_that_was_held_up_for_a_moment_is_no_slower() -> None:
    """Three times as slow for 128 steps in a row, then as before."""
    pool = Pool([1.0, 1.0, 1.0])
    pool.work(MAX_STEPS_TO_BELIEVE)
    pool.speeds[0] = 3.0
    pool.work(4 * BLOCK_STEPS)
    assert pool.used() == [1.0, 1.0, 1.0]
    pool.speeds[0] = 1.0
    pool.work(MAX_STEPS_TO_BELIEVE)
    assert pool.used() == [1.0, 1.0, 1.0]


def test_pauses_are_no_speed() -> None:
    """One step in fifty of one engine takes twenty times as long."""
    pool = Pool([1.0, 1.0])
    for _ in range(40):
        pool.work(49)
        pool.speeds[0] = 20.0
        pool.work(1)
        pool.speeds[0] = 1.0
    assert pool.used() == [1.0, 1.0]


def test_few_steps_are_not_believed() -> None:
    pool = Pool([3.0, 1.0, 1.0], load=lambda _, __: (30, 30_000), noise=0.01)
    pool.work(MIN_BLOCKS * BLOCK_STEPS)
    assert pool.used() == [1.0, 1.0, 1.0]
    pool.work(4 * BLOCK_STEPS)
    assert pool.used() == pytest.approx([3.0, 1.0, 1.0], rel=0.1)


def test_a_difference_within_the_band_is_left_alone() -> None:
    pool = Pool([1.0 + 0.8 * BAND, 1.0, 1.0], noise=0.02)
    pool.work(2_000)
    assert pool.used() == [1.0, 1.0, 1.0]


def test_an_engine_that_is_avoided_is_tried_again() -> None:
    """Without requests it shows nothing; after a while it is as good as any."""
    pool = Pool([2.0, 1.0, 1.0])
    pool.work(MAX_STEPS_TO_BELIEVE)
    pool.work(FADE_STEPS, engines=[1, 2])
    assert pool.used()[0] == pytest.approx(2.0, rel=0.1)
    pool.work(FADE_STEPS, engines=[1, 2])
    assert pool.used() == [1.0, 1.0, 1.0]


def test_a_new_start_of_an_engine_is_a_new_engine() -> None:
    pool = Pool([2.0, 1.0, 1.0])
    pool.work(MAX_STEPS_TO_BELIEVE)
    pool.factors.forget(EngineId("e0"))
    pool.factors.forget(EngineId("never seen"))
    assert pool.used() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("step_ns", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_time_that_cannot_be_changes_nothing(step_ns: float) -> None:
    pools = [Pool([1.5, 1.0, 1.0]), Pool([1.5, 1.0, 1.0])]
    for _ in range(800):
        for pool in pools:
            pool.work(1)
        changed = pools[0].factors.observe(
            EngineId("e1"), step_ns=step_ns, num_running=5, num_kv_tokens=5, prices=PRICES
        )
        assert not changed
    assert pools[0].used() == pools[1].used() != [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("running", "kv"), [(0, 0), (-1, 5), (5, -1), (5, 0)])
def test_a_load_that_costs_nothing_changes_nothing(running: int, kv: int) -> None:
    """Also under prices without a base and with none for a request."""
    factors = TimeFactors()
    for _ in range(100):
        for name in "ab":
            assert not factors.observe(
                EngineId(name),
                step_ns=1e6 if name == "a" else 1e9,
                num_running=running,
                num_kv_tokens=kv,
                prices=np.array([0.0, 0.0, 26.0]),
            )
    assert factors.num_changes == 0


def make_router(**fields: bool | tuple[EngineId, ...]) -> DecodeRouter:
    router = DecodeRouter(**fields)  # type: ignore[arg-type]
    for name in "abc":
        router.add_rank(
            RankId(EngineId(name), DpRank(0)), kv_capacity_tokens=10**6, max_running_requests=500
        )
    return router


def report_steps(router: DecodeRouter, speeds: Sequence[float], *, start: str = "i") -> None:
    """Report 1 000 steps of each engine, then idle ranks."""
    rng = stream(1, "reports")
    for step in range(1, 1_002):
        for rank, speed in enumerate(speeds):
            is_idle = step == 1_001
            running, kv = (0, 0) if is_idle else wandering(rng, rank)
            step_ns = float(PRICES @ [1.0, running, kv]) * speed
            step_ns *= float(np.exp(0.1 * rng.standard_normal()))
            report = RankReport(
                engine_id=router.rank_id(rank).engine_id, incarnation=start, dp_rank=0, seq=step,
                step=min(step, 1_000), num_running=running, num_waiting=0, num_kv_tokens=kv,
                num_waiting_prefill_tokens=0, kv_capacity_tokens=10**6,
                step_ns=0 if is_idle else int(step_ns), num_step_tokens=running,
            )  # fmt: skip
            router.apply_report(rank, report, step * 10**7)


def spread(router: DecodeRouter, num_requests: int) -> np.ndarray:
    """Send a burst; return how many each rank got."""
    counts = np.zeros(router.num_ranks, np.int64)
    for number in range(num_requests):
        decision = router.pick(RoutingRequest(num_prompt_tokens=1_000), 0)
        assert decision.rank is not None
        router.book(decision.rank, f"r{number}", num_prompt_tokens=1_000, now_ns=0)
        counts[decision.rank] += 1
    return counts


def test_load_is_given_so_that_steps_take_equally_long() -> None:
    """An engine that takes twice as long gets what makes its step as long as the others'."""
    router = make_router()
    report_steps(router, [2.0, 1.0, 1.0])
    counts = spread(router, 300)
    step_ns = np.array([2.0, 1.0, 1.0]) * (PRICES[0] + counts * (PRICES[1] + 1_000 * PRICES[2]))
    assert step_ns / step_ns.mean() == pytest.approx(np.ones(3), rel=0.1)
    assert counts[0] > 0


def test_equal_engines_get_equal_load() -> None:
    router = make_router()
    report_steps(router, [1.0, 1.0, 1.0])
    assert spread(router, 300).tolist() == [100, 100, 100]


def test_prices_are_the_pools_times_the_factor_of_an_engine() -> None:
    router = make_router()
    report_steps(router, [2.0, 1.0, 1.0])
    table = router.price_table()
    assert router.time_factor(0) == pytest.approx(2.0, rel=0.08)
    assert table[:, 0] == pytest.approx(table[:, 1] * router.time_factor(0))
    assert table[:, 1].tolist() == table[:, 2].tolist()
    assert router.more_base_ns(0) == table[k.BASE_NS, 0] - table[k.BASE_NS, 1]
    assert router.more_base_ns(1) == 0.0


def test_ranks_without_reports_have_the_prices_of_the_pool() -> None:
    router = make_router()
    report_steps(router, [2.0, 1.0])
    late = router.add_rank(
        RankId(EngineId("late"), DpRank(0)), kv_capacity_tokens=10**6, max_running_requests=500
    )
    for rank in (2, late):
        assert router.time_factor(rank) == 1.0
        prices = router.price_table()
        middle = np.sqrt(prices[:, 0] * prices[:, 1])
        assert prices[:, rank] == pytest.approx(middle, rel=0.05)


def test_engines_that_step_together_are_never_told_apart() -> None:
    """One EP group, or two engines of one group among others: their step is the slowest rank's."""
    for router in (
        make_router(is_synchronised=True),
        make_router(engines_in_groups=(EngineId("a"), EngineId("b"))),
    ):
        report_steps(router, [2.0, 1.0, 1.0])
        assert [router.time_factor(rank) for rank in range(3)] == [1.0, 1.0, 1.0]


def test_an_engine_that_starts_again_has_the_prices_of_the_pool() -> None:
    router = make_router()
    report_steps(router, [2.0, 1.0, 1.0])
    assert router.time_factor(0) > 1.5
    report_steps(router, [1.0, 1.0, 1.0], start="j")
    assert [router.time_factor(rank) for rank in range(3)] == [1.0, 1.0, 1.0]
    assert spread(router, 300).tolist() == [100, 100, 100]
