"""One simulated worker that prefills and decodes: what a way of chunking does to its users.

The real `StepPlanner` plans every step; only the device is simulated. Time is virtual. The CPU and
the device overlap as in an engine with asynchronous scheduling: while the device computes step N,
the CPU takes in the facts of step N-1 and plans step N+1; a step starts when the device is free
*and* its plan is ready. With `is_overlapped=False` the plan waits for the facts of step N instead,
and the device for the plan.

A request met its targets if its first token came within max(`slo_seconds`, 3 x the time that the
prompt takes alone) and at most one in a hundred of its later tokens took more than 1.05 budgets.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.costs import DecodeCostModel, PrefillCostModel
from dsched.costs.kernels import curve_ns, step_parts
from dsched.costs.prefill import PARTS
from dsched.ids import RequestId
from dsched.scheduler import StepPlan, StepPlanner

NS = 1_000_000_000

BUCKET_SHARES = (0.74, 0.18, 0.065, 0.015)
"""Shares of requests in DeepSeek's four length buckets, as the public mix has them."""
BUCKET_RANGES = ((512, 16_384), (16_384, 65_536), (65_536, 262_144), (262_144, 786_432))
"""Prompt tokens in each bucket, drawn log-uniformly; 26 K on average over all."""

SLOW_GAP = 1.05
"""Budgets that the time between two tokens may take before it counts as slow."""
SLOW_GAP_SHARE = 0.01
"""Share of slow gaps that a request forgives."""
ISOLATED_FACTOR = 3.0
"""Times its own computing time that a prompt may wait for its first token."""

MAX_STEPS = 10_000_000
"""Steps of a run; more means that the planner makes no progress."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkWorkload:
    """Requests [N] in order of arrival."""

    arrival_ns: NDArray[np.int64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        *,
        num_requests: int,
        requests_per_second: float,
        mean_output_tokens: float = 256.0,
    ) -> "ChunkWorkload":
        """Draw Poisson arrivals of the four-bucket mix, with geometric output lengths."""
        gaps = rng.exponential(NS / requests_per_second, size=num_requests)
        bucket = rng.choice(len(BUCKET_SHARES), size=num_requests, p=BUCKET_SHARES)
        low, high = (np.array(side, dtype=np.float64) for side in zip(*BUCKET_RANGES, strict=True))
        exponent = rng.random(num_requests)
        prompts = low[bucket] * (high[bucket] / low[bucket]) ** exponent
        return cls(
            arrival_ns=np.cumsum(gaps).astype(np.int64),
            prompt_tokens=prompts.astype(np.int64),
            output_tokens=rng.geometric(1.0 / mean_output_tokens, size=num_requests),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimDevice:
    """What steps really take: true models, which no planner sees, and noise."""

    prefill: PrefillCostModel
    decode: DecodeCostModel
    noise: float = 0.01
    """Standard deviation of a step's time, as a share of it."""

    def step_ns(self, plan: StepPlan, past: NDArray[np.int64], noise: float) -> int:
        """Return what `plan` takes; `past` [n] are the tokens before each of its entries, `noise`
        a standard normal draw."""
        num_decodes = plan.num_decodes
        decode_tokens = 0
        ns = 0.0
        if num_decodes:
            tokens = plan.num_tokens[:num_decodes]
            decode_tokens = int(tokens.sum())
            kv = decode_tokens + int(past[:num_decodes].sum())
            factor, kv_token_ns = self.decode.coefficients
            ns = curve_ns(*self.decode.curve.arrays(), decode_tokens) * factor + kv * kv_token_ns
        if plan.slots.size > num_decodes:
            arrays = self.prefill.arrays
            parts = np.zeros(len(PARTS))
            step_parts(
                arrays.knot_tokens,
                arrays.knot_ns,
                arrays.coefficients,
                plan.num_tokens[num_decodes:],
                past[num_decodes:],
                decode_tokens,
                parts,
            )
            ns += float(parts.sum())
        return max(1, round(ns * (1.0 + self.noise * noise)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkResult:
    """What the requests [N] and the device saw."""

    ttft_ns: NDArray[np.int64]
    """[N] arrival to first token."""
    slow_gap_share: NDArray[np.float64]
    """[N] share of later tokens that took more than SLOW_GAP budgets."""
    end_ns: int
    busy_ns: int
    """Time the device computed."""
    waiting_ns: int
    """Time the device was free, work was there, and the plan was not ready."""
    num_steps: int
    num_slow_steps: int
    """Steps with decodes that took more than SLOW_GAP budgets."""

    @property
    def idle_share(self) -> float:
        """Share of the device's working time that it waited for the CPU."""
        return self.waiting_ns / max(self.busy_ns + self.waiting_ns, 1)

    def goodput(self, isolated_ns: NDArray[np.int64], *, slo_seconds: float) -> float:
        """Return the share of requests that met their targets; `isolated_ns` [N] is the time each
        prompt takes alone."""
        limit = np.maximum(slo_seconds * NS, ISOLATED_FACTOR * isolated_ns)
        is_good = (self.ttft_ns <= limit) & (self.slow_gap_share <= SLOW_GAP_SHARE)
        return float(is_good.mean())


def isolated_ns(
    prompt_tokens: NDArray[np.int64], device: SimDevice, *, budget_seconds: float
) -> NDArray[np.int64]:
    """Return the time that each prompt takes with the device to itself, in steps of the budget.

    One long prompt in budget-sized chunks passes every length on its way, so all lengths are read
    off one run.
    """
    model = device.prefill
    ends, times = [0], [0.0]
    while ends[-1] < int(prompt_tokens.max()):
        chunk = max(model.max_chunk(budget_seconds, ends[-1]), 64)
        times.append(times[-1] + model.predict(chunk, ends[-1]))
        ends.append(ends[-1] + chunk)
    return (np.interp(prompt_tokens, ends, times) * NS).astype(np.int64)


def simulate_chunking(
    workload: ChunkWorkload,
    planner: StepPlanner,
    device: SimDevice,
    *,
    rng: np.random.Generator,
    budget_seconds: float,
    plan_cpu_ns: Callable[[int], int] = lambda _: 0,
    is_overlapped: bool = True,
    is_learning: bool = True,
    before_plan: Callable[[StepPlanner, int], None] | None = None,
) -> ChunkResult:
    """Serve `workload` to its end.

    `plan_cpu_ns` tells how long the CPU takes for a step, given the requests it holds (facts and
    plan together). `is_learning` feeds measured times back to the planner's models. `before_plan`
    is called with the planner and the time before each plan.
    """
    run = _Run(workload, slow_gap_ns=round(SLOW_GAP * budget_seconds * NS))
    plan_from_ns = device_free_ns = busy_ns = waiting_ns = num_steps = num_slow = 0
    last: tuple[StepPlan, int] | None = None

    for _ in range(MAX_STEPS):
        run.add_arrived(planner, plan_from_ns)
        if not len(planner):
            if run.is_done:
                break
            # The device runs dry; the next request starts it again.
            plan_from_ns = max(plan_from_ns, run.next_arrival_ns)
            continue
        if before_plan is not None:
            before_plan(planner, plan_from_ns)
        plan = planner.plan()
        if last is not None and is_learning:
            planner.observe(*last)
        planned_ns = plan_from_ns + plan_cpu_ns(len(planner))
        start_ns = max(device_free_ns, planned_ns)
        waiting_ns += start_ns - max(device_free_ns, plan_from_ns)
        step_ns = device.step_ns(plan, planner.past_tokens(plan), float(rng.standard_normal()))
        device_free_ns = start_ns + step_ns
        busy_ns += step_ns
        num_steps += 1
        num_slow += bool(plan.num_decodes) and step_ns > run.slow_gap_ns
        run.emit(planner, plan, device_free_ns)
        last = (plan, step_ns)
        # With overlap the next plan is made right after this step was launched.
        plan_from_ns = start_ns if is_overlapped else device_free_ns
    else:
        raise RuntimeError(f"{len(planner)} requests are left after {MAX_STEPS} steps")

    return ChunkResult(
        ttft_ns=run.first_ns - workload.arrival_ns,
        slow_gap_share=run.num_slow_gaps / np.maximum(workload.output_tokens - 1, 1),
        end_ns=device_free_ns,
        busy_ns=busy_ns,
        waiting_ns=waiting_ns,
        num_steps=num_steps,
        num_slow_steps=num_slow,
    )


class _Run:
    """Where each request of a run stands."""

    def __init__(self, workload: ChunkWorkload, *, slow_gap_ns: int) -> None:
        count = len(workload.arrival_ns)
        self.slow_gap_ns = slow_gap_ns
        self.first_ns = np.zeros(count, dtype=np.int64)
        self.num_slow_gaps = np.zeros(count, dtype=np.int64)
        self._last_ns = np.zeros(count, dtype=np.int64)
        self._workload = workload
        self._next = 0
        self._request_of = np.zeros(count, dtype=np.int64)

    @property
    def is_done(self) -> bool:
        return self._next == len(self._workload.arrival_ns)

    @property
    def next_arrival_ns(self) -> int:
        return int(self._workload.arrival_ns[self._next])

    def add_arrived(self, planner: StepPlanner, now_ns: int) -> None:
        workload = self._workload
        while not self.is_done and self.next_arrival_ns <= now_ns:
            index = self._next
            slot = planner.add(
                RequestId(str(index)),
                num_prompt_tokens=int(workload.prompt_tokens[index]),
                max_output_tokens=int(workload.output_tokens[index]),
            )
            self._request_of[slot] = index
            self._next += 1

    def emit(self, planner: StepPlanner, plan: StepPlan, now_ns: int) -> None:
        """Hand out the tokens of a step that ends at `now_ns`; end the requests that are full."""
        slots = plan.slots[planner.emits(plan)]
        requests = self._request_of[slots]
        is_first = self.first_ns[requests] == 0
        self.first_ns[requests[is_first]] = now_ns
        later = requests[~is_first]
        self.num_slow_gaps[later] += now_ns - self._last_ns[later] > self.slow_gap_ns
        self._last_ns[requests] = now_ns
        for slot in slots[planner.at_limit(slots)].tolist():
            planner.finish(planner.request_id(slot))
