"""Telling engines apart by speed: what holds for every load, noise and report."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing import DecodeRouter, RoutingRequest
from dsched.routing.calibration import MAX_STEP_NS
from dsched.routing.time_factors import TimeFactors

pytestmark = pytest.mark.slow

PRICES = np.array([15e6, 2e5, 26.0])
STEPS_TO_FORGET = 1_400
"""Steps after which what held an engine up is forgotten."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A time with one kind of load, the same for all engines."""

    num_steps: int
    low: int
    high: int
    """Running requests."""
    tokens_a_request: int
    is_alone: bool
    """Only the first engine works."""


@st.composite
def phases(draw: st.DrawFn) -> Phase:
    low = draw(st.sampled_from([1, 3, 8, 40]))
    return Phase(
        num_steps=draw(st.integers(20, 600)),
        low=low,
        high=low * draw(st.sampled_from([1, 2, 10])),
        tokens_a_request=draw(st.sampled_from([20, 1_000, 30_000])),
        is_alone=draw(st.booleans()),
    )


def true_step_ns(truth: str, running: int, kv: int) -> float:
    """How long a step of any engine takes; the prices do not have to be right."""
    match truth:
        case "as priced":
            return float(PRICES @ [1.0, running, kv])
        case "flat":
            return 3e6
        case "steep":
            return 1e6 + 3e6 * running + 0.1 * kv
        case "bent":
            return 5e6 * running**0.6 + 10.0 * kv**0.9
        case _:
            return 4e6 * (1 + running // 8) + 26.0 * kv


@given(
    num_engines=st.integers(2, 4),
    before=st.lists(phases(), max_size=3),
    last=phases(),
    truth=st.sampled_from(["as priced", "flat", "steep", "bent", "in tiers"]),
    noise=st.sampled_from([0.0, 0.05, 0.3]),
    pause_share=st.sampled_from([0.0, 0.01]),
    hold_up=st.sampled_from([1.0, 1.5, 4.0]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_equal_engines_end_equal(
    num_engines: int,
    before: list[Phase],
    last: Phase,
    truth: str,
    noise: float,
    pause_share: float,
    hold_up: float,
    seed: int,
) -> None:
    """Whatever they ran, however a step depends on it, with noise, pauses, and one held up."""
    rng = stream(seed, "steps")
    factors = TimeFactors()

    def work(phase: Phase, num_steps: int, engines: range, slow: float = 1.0) -> None:
        for _ in range(num_steps):
            for engine in engines:
                running = int(rng.integers(phase.low, phase.high + 1))
                kv = running * int(rng.integers(1, 2 * phase.tokens_a_request))
                step_ns = true_step_ns(truth, running, kv) * np.exp(noise * rng.standard_normal())
                if rng.random() < pause_share:
                    step_ns *= 1.0 + 10.0 * rng.pareto(1.5)
                factors.observe(
                    EngineId(f"e{engine}"),
                    step_ns=float(step_ns) * (slow if engine == 0 else 1.0),
                    num_running=running,
                    num_kv_tokens=kv,
                    prices=PRICES,
                )

    for phase in before:
        work(phase, phase.num_steps, range(1 if phase.is_alone else num_engines))
    assert factors.num_changes == 0
    if hold_up > 1.0:
        work(last, 100, range(num_engines), slow=hold_up)
        assert factors.num_changes == 0
    work(last, STEPS_TO_FORGET, range(num_engines))

    assert [factors.factor(EngineId(f"e{each}")) for each in range(num_engines)] == (
        [1.0] * num_engines
    )


def make_router(scale: float = 1.0) -> DecodeRouter:
    router = DecodeRouter(base_ns=15e6 * scale, request_ns=2e5 * scale, kv_token_ns=26.0 * scale)
    for name in "abc":
        router.add_rank(
            RankId(EngineId(name), DpRank(0)), kv_capacity_tokens=10**7, max_running_requests=500
        )
    return router


def make_report(step: int, rank: int, step_ns: float, running: int, kv: int) -> RankReport:
    return RankReport(
        engine_id="abc"[rank], incarnation="i", dp_rank=0, seq=step, step=step,
        num_running=running, num_waiting=0, num_kv_tokens=kv, num_waiting_prefill_tokens=0,
        kv_capacity_tokens=10**7, step_ns=step_ns, num_step_tokens=running,  # type: ignore[arg-type]
    )  # fmt: skip


def choices(router: DecodeRouter) -> list[int]:
    """Where a burst of requests of mixed length goes."""
    ranks = []
    for number in range(60):
        tokens = (300, 5_000, 40_000)[number % 3]
        rank = router.pick(RoutingRequest(num_prompt_tokens=tokens), 0).rank
        assert rank is not None
        router.book(rank, f"r{number}", num_prompt_tokens=tokens, now_ns=0)
        ranks.append(rank)
    return ranks


@given(
    speeds=st.tuples(*[st.sampled_from([0.5, 1.0, 1.3, 2.0])] * 3),
    exponent=st.integers(-6, 20),
    seed=st.integers(0, 1_000),
)
@settings(max_examples=15, deadline=None)
def test_in_another_unit_of_time_every_choice_is_the_same(
    speeds: tuple[float, ...], exponent: int, seed: int
) -> None:
    """All step times and the prices to start with times one factor: only ratios count."""
    routers = [make_router(), make_router(2.0**exponent)]
    rng = stream(seed, "steps")
    for step in range(1, 1_001):
        for rank, speed in enumerate(speeds):
            running, kv = int(rng.integers(10, 60)), int(rng.integers(20_000, 200_000))
            step_ns = float(PRICES @ [1.0, running, kv]) * speed
            step_ns *= float(np.exp(0.1 * rng.standard_normal()))
            for router, scale in zip(routers, (1.0, 2.0**exponent), strict=True):
                report = make_report(step, rank, step_ns * scale, running, kv)
                router.apply_report(rank, report, step * 10**7)
    one, other = routers
    factors = [one.time_factor(rank) for rank in range(3)]
    assert factors == [other.time_factor(rank) for rank in range(3)]
    assert other.price_table().tolist() == (one.price_table() * 2.0**exponent).tolist()
    assert choices(one) == choices(other)


@given(
    speeds=st.tuples(*[st.sampled_from([1.0, 2.0])] * 3),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1_000),
)
@settings(max_examples=15, deadline=None)
def test_factors_do_not_depend_on_how_long_steps_are(
    speeds: tuple[float, ...], scale: float, seed: int
) -> None:
    """With the same prices: a pool that is slower as a whole has the same factors."""
    pools = [TimeFactors(), TimeFactors()]
    rng = stream(seed, "steps")
    for _ in range(900):
        for engine, speed in enumerate(speeds):
            running, kv = int(rng.integers(10, 60)), int(rng.integers(20_000, 200_000))
            step_ns = float(PRICES @ [1.0, running, kv]) * speed
            step_ns *= float(np.exp(0.1 * rng.standard_normal()))
            for factors, by in zip(pools, (1.0, scale), strict=True):
                factors.observe(
                    EngineId(f"e{engine}"),
                    step_ns=step_ns * by,
                    num_running=running,
                    num_kv_tokens=kv,
                    prices=PRICES,
                )
    used = [[each.factor(EngineId(f"e{engine}")) for engine in range(3)] for each in pools]
    assert used[0] == used[1]


@given(
    bad=st.lists(
        st.sampled_from(
            [float("nan"), float("inf"), -float("inf"), -5, 0, 2 * MAX_STEP_NS, 10**40]
        ),
        min_size=1,
        max_size=6,
    ),
    every=st.integers(1, 30),
    seed=st.integers(0, 1_000),
)
@settings(max_examples=15, deadline=None)
def test_times_that_cannot_be_change_no_price(bad: list[float], every: int, seed: int) -> None:
    """Also many in a row, and from the first step on."""
    with_bad, without = make_router(), make_router()
    rng = stream(seed, "steps")
    step = 0
    for at in range(900):
        for rank, speed in enumerate((2.0, 1.0, 1.0)):
            running, kv = int(rng.integers(10, 60)), int(rng.integers(20_000, 200_000))
            step_ns = int(PRICES @ [1.0, running, kv] * speed)
            for router in (with_bad, without):
                router.apply_report(
                    rank, make_report(step + 1, rank, step_ns, running, kv), (step + 1) * 10**7
                )
        step += 1
        if at % every == 0:
            for value in bad:
                step += 1
                for rank in range(3):
                    report = make_report(step, rank, value, 20, 100_000)
                    with_bad.apply_report(rank, report, step * 10**7)
    assert with_bad.price_table().tolist() == without.price_table().tolist()
    assert with_bad.time_factor(0) > 1.5
