"""Compare decode routing policies on ranks that step together, on the same arrivals.

In:  a trace, a policy, the group's constants, a seed. Out: a `DecodeResult`.

- **Closed loop**: `requests_per_rank` requests a rank are in the system at any time; lengths are
  drawn from the trace. The first ones are drawn in proportion to their output length and placed at
  a random point of it, which is what a running system looks like.
- **Open loop**: the trace's own stamps, divided by `speed`.

The value is the share of the throughput of the same load spread perfectly (a fluid reference: at
every step each rank carries the mean of everything in the system, and nothing waits).
`bound_pct` is what no placement of whole requests can pass: the longest running request has to be
somewhere. Simulated, with assumed constants; the numbers compare policies, not clusters.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.rng import stream
from dsched.sim import decode_kernels as kernels
from dsched.sim.policies import POLICIES, TWO_TERM, SimPolicy
from dsched.sim.traces import Trace

NUM_DRAWS = 4096
OPEN_LOOP_WARM_SHARE = 0.1
"""Share of the trace's duration that fills the ranks and is not measured."""
MIN_OPEN_LOOP_STEPS = 200
"""A trace shorter than this many steps is measured from the first arrival to the last token."""
MAX_STEPS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeGroup:
    """One synchronised group. The step's three constants are assumed, see docs/routing.md."""

    num_ranks: int = 64
    base_ns: float = 15_000_000.0
    request_ns: float = 200_000.0
    kv_token_ns: float = 26.0
    """70 KB of KV a token read at 2.7 TB/s."""
    kv_capacity_tokens: int = 1_000_000
    max_running_requests: int = 1024
    kv_token_bytes: float = 70_000.0
    link_bytes_per_s: float = 50e9

    def __post_init__(self) -> None:
        for name in ("num_ranks", "kv_capacity_tokens", "max_running_requests"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("base_ns", "request_ns", "kv_token_ns", "kv_token_bytes", "link_bytes_per_s"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} is {value}; it must be finite and positive")

    @property
    def prices(self) -> NDArray[np.float64]:
        """[3] a, b, c in ns."""
        return np.array([self.base_ns, self.request_ns, self.kv_token_ns])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRun:
    """How to run a policy."""

    seed: int = 0
    requests_per_rank: float | None = None
    """Closed loop with so many; `None`: open loop."""
    speed: float = 1.0
    """Open loop: the stamps are divided by it."""
    num_steps: int = 3000
    warm_steps: int = 600
    """Closed loop: steps before the measured ones."""
    stale_steps: int = 0
    """Age of all load information, also of the router's own requests' ends."""
    price_error: float = 1.0
    """Factor on c that the router starts with."""
    calibrates: bool = False
    step_noise: float = 0.02
    """Standard deviation of the relative error of the step times that calibration sees."""
    max_hold_ns: int = 10_000_000_000
    gather_ns: int = 20_000_000_000
    max_moves: int = 4
    hysteresis: float = 0.005
    expected_steps: float = 100.0

    def __post_init__(self) -> None:
        if self.requests_per_rank is not None and not 0 < self.requests_per_rank < 1e6:
            raise ValueError(f"requests_per_rank is {self.requests_per_rank}; it must be positive")
        if not 0 < self.speed < np.inf:
            raise ValueError(f"speed is {self.speed}; it must be positive")
        if not 0 <= self.warm_steps < self.num_steps:
            raise ValueError(
                f"warm_steps {self.warm_steps} must be less than num_steps {self.num_steps}"
            )
        if self.stale_steps < 0:
            raise ValueError(f"stale_steps is {self.stale_steps}; it must not be negative")
        if not 0 < self.price_error < np.inf:
            raise ValueError(f"price_error is {self.price_error}; it must be positive")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeResult:
    """What one policy reached."""

    policy: str
    share_pct: float
    """Throughput in percent of the fluid reference."""
    balance_pct: float
    """Fluid step time in percent of the step time: what imbalance alone costs."""
    bound_pct: float
    """The most that any placement of whole requests could reach on this run's load."""
    tokens_per_s: float
    """Of the whole group."""
    step_ms: float
    moves_per_step: float
    num_preemptions: int
    num_finished: int
    held_ms: float
    """Mean wait of the requests that were held for longer than a step."""
    max_held: int
    learned_prices: tuple[float, float, float]
    """a, b, c in ns that the router ended with."""
    request_rank: NDArray[np.int64]
    """[N] rank of each request in order of arrival; -1 if it was never bound."""


def simulate_decode(
    trace: Trace, policy: str, *, group: DecodeGroup | None = None, run: DecodeRun | None = None
) -> DecodeResult:
    """Run `policy` (a key of `POLICIES`) over `trace`.

    Raises:
        ValueError: an unknown policy, an empty trace, or a request that no rank can hold.
    """
    group = group or DecodeGroup()
    run = run or DecodeRun()
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {', '.join(POLICIES)}")
    if trace.num_requests == 0:
        raise ValueError(f"{trace.source} has no requests")
    _check_fits(trace, group)
    requests, concurrency = draw_requests(trace, group, run)
    chosen = POLICIES[policy]
    if run.requests_per_rank is None:
        window = _measured_window(requests.arrival_ns, group)
        num_steps, warm_steps = MAX_STEPS, 0
    else:
        window = (0.0, 0.0)
        num_steps, warm_steps = run.num_steps, run.warm_steps
    start_prices = group.prices
    start_prices[2] *= run.price_error
    rng = stream(run.seed, "sim.decode.draws")
    state = kernels.run_group(
        kernels.Limits(
            num_ranks=group.num_ranks,
            kv_capacity_tokens=group.kv_capacity_tokens,
            max_running=group.max_running_requests,
            prices=group.prices,
            kv_token_bytes=group.kv_token_bytes,
            link_bytes_per_s=group.link_bytes_per_s,
            is_closed=run.requests_per_rank is not None,
        ),
        _rules(chosen, run),
        requests,
        concurrency,
        start_prices,
        rng.random((NUM_DRAWS, 2)),
        1.0 + run.step_noise * rng.standard_normal(NUM_DRAWS),
        num_steps,
        warm_steps,
        window,
    )
    return _result(policy, state)


def _measured_window(arrival_ns: NDArray[np.int64], group: DecodeGroup) -> tuple[float, float]:
    """From when the ranks are filled until the last arrival; all of it for short traces."""
    end_ns = float(arrival_ns[-1])
    if end_ns < MIN_OPEN_LOOP_STEPS * group.base_ns:
        return 0.0, np.inf
    return OPEN_LOOP_WARM_SHARE * end_ns, end_ns


def _check_fits(trace: Trace, group: DecodeGroup) -> None:
    tokens = trace.num_prompt_tokens.astype(np.int64) + trace.num_output_tokens
    largest = int(np.argmax(tokens))
    if tokens[largest] > group.kv_capacity_tokens:
        raise ValueError(
            f"request {largest} of {trace.source} needs {tokens[largest]} KV tokens; "
            f"a rank holds {group.kv_capacity_tokens}"
        )


def draw_requests(trace: Trace, group: DecodeGroup, run: DecodeRun) -> tuple[kernels.Requests, int]:
    """Return the requests of a run in order, and how many are in the system (0: open loop)."""
    prompt = trace.num_prompt_tokens.astype(np.int64)
    output = trace.num_output_tokens.astype(np.int64)
    if run.requests_per_rank is None:
        if np.any(np.diff(trace.arrival_ns) < 0):
            raise ValueError(
                f"{trace.source}: stamps go back; put its conversations on one time line first"
            )
        arrival_ns = (trace.arrival_ns / run.speed).astype(np.int64)
        return kernels.Requests(prompt, output, arrival_ns, np.zeros(0, np.int64)), 0
    concurrency = max(1, round(run.requests_per_rank * group.num_ranks))
    rng = stream(run.seed, "sim.decode.requests")
    # A request is found running in proportion to how long it runs, at any point of its output.
    first = rng.choice(len(prompt), concurrency, p=output / output.sum())
    done = (rng.random(concurrency) * output[first]).astype(np.int64)
    # A step ends concurrency / mean output requests; half as many again leave a margin.
    num_later = int(1.5 * concurrency * run.num_steps / output.mean()) + 4 * concurrency
    chosen = np.concatenate([first, rng.integers(len(prompt), size=num_later)])
    return kernels.Requests(
        prompt[chosen], output[chosen], np.zeros(0, np.int64), done
    ), concurrency


def _rules(policy: SimPolicy, run: DecodeRun) -> kernels.Rules:
    return kernels.Rules(
        policy=policy.number,
        packs=policy.packs,
        is_late=policy.is_late,
        migrates=policy.migrates,
        calibrates=run.calibrates and policy.number == TWO_TERM,
        stale_steps=run.stale_steps,
        max_hold_ns=float(max(run.max_hold_ns, run.gather_ns if policy.gathers else 0)),
        gather_ns=float(run.gather_ns) if policy.gathers else 0.0,
        max_moves=run.max_moves,
        hysteresis=run.hysteresis,
        expected_steps=run.expected_steps,
    )


def _result(policy: str, state: kernels.State) -> DecodeResult:
    out = state.out
    if not out[kernels.OUT_STEPS]:
        raise ValueError("no step fell into the measured time; run longer or at a lower speed")
    steps = out[kernels.OUT_STEPS]
    reached = out[kernels.OUT_TOKENS] / out[kernels.OUT_NS]
    fluid = out[kernels.OUT_IN_SYSTEM] / out[kernels.OUT_FLUID_NS]
    return DecodeResult(
        policy=policy,
        share_pct=float(100.0 * reached / fluid),
        balance_pct=float(100.0 * out[kernels.OUT_FLUID_NS] / out[kernels.OUT_NS]),
        bound_pct=float(100.0 * out[kernels.OUT_FLUID_NS] / out[kernels.OUT_BOUND_NS]),
        tokens_per_s=float(reached * 1e9),
        step_ms=float(out[kernels.OUT_NS] / steps / 1e6),
        moves_per_step=float(out[kernels.OUT_MOVES] / steps),
        num_preemptions=int(out[kernels.OUT_PREEMPTIONS]),
        num_finished=int(out[kernels.OUT_FINISHED]),
        held_ms=float(out[kernels.OUT_HELD_NS] / max(1.0, out[kernels.OUT_HELD]) / 1e6),
        max_held=int(out[kernels.OUT_MAX_HELD]),
        learned_prices=(
            float(state.own_prices[0, 0]),
            float(state.own_prices[1, 0]),
            float(state.own_prices[2, 0]),
        ),
        request_rank=state.request_rank,
    )
