"""Tries the two kinds of policy that no request replay asks: chunk weights and rebalance triggers.

In:  a guarded policy and a seed. Out: a row with the policy and one without. Prompts are drawn from
the four-bucket mix over one simulated rank that is nearly full; expert loads drift from window to
window (`dsched.sim.chunking`, `dsched.sim.eplb`). Everything is simulated.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dsched.cli.policy_measure import MeasuredGuard
from dsched.clock import ManualClock, SystemClock
from dsched.costs.presets import load_cost_models
from dsched.drivers.chunk_weights import ChunkWeights
from dsched.eplb import ExpertPlacement, PlacementOptions, Planner, balancedness
from dsched.plugins import PolicySet, RebalanceView
from dsched.rng import stream
from dsched.scheduler import ChunkRule, StepPlanner
from dsched.sim.chunking import (
    ChunkWorkload,
    SimDevice,
    isolated_ns,
    simulate_chunking,
)
from dsched.sim.eplb import LoadShape, dsched_planner, generate_expert_load, score_planner

CHUNK_REQUESTS = 300
CHUNK_LOAD = 0.85
"""Of what the device can compute: below, nobody waits for prefill time and weights say nothing."""
BUDGET_SECONDS = 0.05
SLO_SECONDS = 2.0
NUM_WINDOWS = 12
NUM_SLOTS = 72
NUM_RANKS = 8
LOAD_SHAPE = LoadShape(num_layers=8, num_experts=64, drift=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRow:
    """One way to share prefill time."""

    name: str
    goodput: float
    """Requests that met their targets, of all."""
    short_ttft_p99_ms: float
    """Of the shortest bucket."""
    long_ttft_p99_ms: float
    """Of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRow:
    """One way to choose the moment of a rebalance."""

    name: str
    next_balance: float
    """Mean over heaviest rank load of the window after each plan, averaged."""
    moves_per_layer: float
    """Expert copies moved, per layer and window."""


def try_chunk_weights(guard: MeasuredGuard, *, seed: int) -> tuple[ChunkRow, ...]:
    """Serve the same prompts with the policy's weights and with the default ones."""
    with_policy = _serve_prompts(guard.name, seed, guard=guard)
    return with_policy, _serve_prompts("4, 3, 2, 1", seed, guard=None)


def _serve_prompts(name: str, seed: int, *, guard: MeasuredGuard | None) -> ChunkRow:
    prefill, decode = load_cost_models(None)
    device = SimDevice(prefill=prefill, decode=decode)
    rule = ChunkRule()
    draw = partial(ChunkWorkload.draw, num_requests=CHUNK_REQUESTS)
    alone = isolated_ns(
        draw(stream(seed, "chunks"), requests_per_second=1.0).prompt_tokens,
        device,
        budget_seconds=BUDGET_SECONDS,
    )
    rate = CHUNK_LOAD * 1e9 / float(alone.mean())
    workload = draw(stream(seed, "chunks"), requests_per_second=rate)
    own_prefill, own_decode = load_cost_models(None)
    planner = StepPlanner(
        prefill_cost=own_prefill,
        decode_cost=own_decode,
        budget_seconds=BUDGET_SECONDS,
        max_running_requests=CHUNK_REQUESTS,
        rule=rule,
    )
    result = simulate_chunking(
        workload,
        planner,
        device,
        rng=stream(seed, "chunks.noise"),
        budget_seconds=BUDGET_SECONDS,
        before_plan=None if guard is None else _asker(guard, rule),
    )
    bucket = np.array([bisect_right(rule.bucket_bounds, n) for n in workload.prompt_tokens])
    return ChunkRow(
        name=name,
        goodput=result.goodput(alone, slo_seconds=SLO_SECONDS),
        short_ttft_p99_ms=_p99_ms(result.ttft_ns[bucket == 0]),
        long_ttft_p99_ms=_p99_ms(result.ttft_ns[bucket > 0]),
    )


def _asker(guard: MeasuredGuard, rule: ChunkRule) -> Callable[[StepPlanner, int], None]:
    """Ask as an engine's scheduler does."""
    clock = ManualClock()
    guard.follow(clock)
    weights = ChunkWeights(guard, rule, clock)

    def before_plan(planner: StepPlanner, now_ns: int) -> None:
        clock.advance_to(max(now_ns, clock.now_ns()))
        slots, lengths, left = (array.tolist() for array in planner.backlog())
        names = [planner.request_id(slot) for slot in slots]
        for name in names:
            weights.note(name)
        if weights.is_due():
            answer = weights.ask(zip(names, lengths, left, strict=True))
            if answer is not None:
                planner.bucket_weights = answer

    return before_plan


def _p99_ms(times_ns: NDArray[np.int64]) -> float:
    return float(np.percentile(times_ns, 99)) / 1e6 if len(times_ns) else 0.0


def try_rebalance(guard: MeasuredGuard, *, seed: int) -> tuple[PlacementRow, ...]:
    """Renew placements when the policy says so, and after every window."""
    guard.follow(SystemClock())
    windows = generate_expert_load(LOAD_SHAPE, num_windows=NUM_WINDOWS, seed=seed)
    always = dsched_planner(num_slots=NUM_SLOTS, num_ranks=NUM_RANKS, options=PlacementOptions())
    rows = []
    for name, planner in ((guard.name, _asking(always, guard)), ("always", always)):
        score = score_planner(name, planner, windows, clock=SystemClock())
        rows.append(
            PlacementRow(
                name=name,
                next_balance=score.next_balance_avg,
                moves_per_layer=score.moves_per_layer,
            )
        )
    return tuple(rows)


def _asking(planner: Planner, guard: MeasuredGuard) -> Planner:
    policies = PolicySet(rebalance=guard)
    times_asked = 0

    def plan(load: NDArray[np.int64], current: ExpertPlacement | None) -> ExpertPlacement:
        nonlocal times_asked
        if current is None:
            return planner(load, None)
        balance = balancedness(current, load)
        view = RebalanceView(
            num_times_asked=times_asked,
            worst_balancedness=float(balance.min()),
            mean_balancedness=float(balance.mean()),
        )
        times_asked += 1
        if not policies.should_rebalance(view):
            return current
        times_asked = 0
        return planner(load, current)

    return plan
