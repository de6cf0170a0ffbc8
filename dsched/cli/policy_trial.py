"""Tries a policy offline: one workload, the real controller over simulated engines, each rule once.

In:  a policy, a workload, the shape of a cluster. Out: a row for the policy and one for each of
dsched's own rules, and how the policy itself did.

The policy stands behind the same guard as in production, with its time budget, so what would fall
back there falls back here; its breaker counts simulated time. Everything is simulated but the time
of a decision.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dsched.cli.policy_measure import Decisions, MeasuredGuard
from dsched.cli.policy_parts import ChunkRow, PlacementRow, try_chunk_weights, try_rebalance
from dsched.plugins import (
    ROUTING_KINDS,
    AdmissionPolicy,
    ChunkWeightsPolicy,
    HandoffPolicy,
    PolicySet,
    PriorityPolicy,
    RebalanceTrigger,
    RoutingPolicies,
    kinds_of,
)
from dsched.rng import stream
from dsched.sim.cluster import SimCluster, SimPolicy
from dsched.sim.engine import SimEngineConfig
from dsched.sim.report import Quantiles, ReplayReport
from dsched.sim.traces import Trace, read_trace, select_first, stagger_conversations
from dsched.sim.workload import PoissonArrivals, generate_workload

MEAN_SESSION_REQUESTS = 5
"""Requests of one session in a generated workload."""
KV_CAPACITY_TOKENS = 1_048_576
LONGEST_CONVERSATION_GAP_S = 10.0
"""Mean time between starts of conversations, in traces that have them."""
BUILTIN_POLICIES = tuple(SimPolicy)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialShape:
    """The simulated cluster, and what its requests are called."""

    num_engines: int
    num_dp_ranks: int
    max_running_requests: int
    prefix_cache_tokens: int
    num_tenants: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """One rule over the workload; all simulated."""

    name: str
    balance: float | None
    decode_balance: float | None
    """Mean over maximum of the ranks' decode work, in (0, 1]."""
    ttft: Quantiles
    tpot: Quantiles
    output_tokens_per_s: float | None
    num_errors: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTrial:
    """The policy's row comes first."""

    source: str
    num_requests: int
    results: tuple[TrialResult, ...]
    """Empty for a policy that the controller asks nothing."""
    chunks: tuple[ChunkRow, ...]
    """For chunk weights."""
    placements: tuple[PlacementRow, ...]
    """For rebalance triggers."""
    decisions: Decisions


def trial_workload(
    trace: Path | None,
    *,
    shape: TrialShape,
    num_requests: int,
    rate_per_s: float,
    limit: int | None,
) -> Trace:
    """Read a trace, or generate one with sessions.

    Raises:
        ValueError: a rate or count that cannot be. TraceError: the file cannot be read.
    """
    if trace is not None:
        workload = read_trace(trace)
        if workload.conversation_id is not None:
            rng = stream(shape.seed, "conversations")
            workload = stagger_conversations(workload, rng, mean_gap_s=LONGEST_CONVERSATION_GAP_S)
        return workload if limit is None else select_first(workload, limit)
    workload = generate_workload(
        num_requests=min(num_requests, limit or num_requests),
        seed=shape.seed,
        arrivals=PoissonArrivals(rate_per_s=rate_per_s),
    )
    num_sessions = max(1, workload.num_requests // MEAN_SESSION_REQUESTS)
    sessions = stream(shape.seed, "sessions").integers(num_sessions, size=workload.num_requests)
    return replace(workload, conversation_id=sessions)


def run_trial(policy: object, workload: Trace, shape: TrialShape, *, budget_ns: int) -> PolicyTrial:
    """Replay the workload once for the policy and once for each of dsched's own rules.

    Raises:
        ValueError: the workload is empty.
    """
    kinds = kinds_of(policy)
    has_weights, has_trigger = ChunkWeightsPolicy in kinds, RebalanceTrigger in kinds
    guard = MeasuredGuard(policy, budget_ns=budget_ns)
    try:
        return PolicyTrial(
            source=workload.source,
            num_requests=workload.num_requests,
            results=_replay_all(guard, workload, shape),
            chunks=try_chunk_weights(guard, seed=shape.seed) if has_weights else (),
            placements=try_rebalance(guard, seed=shape.seed) if has_trigger else (),
            decisions=guard.decisions(),
        )
    finally:
        guard.close()


def _replay_all(
    guard: MeasuredGuard, workload: Trace, shape: TrialShape
) -> tuple[TrialResult, ...]:
    """The policy's row, and one for each rule of ours; none if the controller asks it nothing."""
    policies = _policy_set(guard)
    if not any(policies.guards()):
        return ()
    cluster = _cluster(shape, SimPolicy.TWO_TERM)
    guard.follow(cluster.loop.clock)
    cluster.controller.use_policies(policies)
    kills = policies.handoff is not None
    results = [_result(guard.name, _replay(cluster, workload, shape, kills=kills))]
    for builtin in BUILTIN_POLICIES:
        report = _replay(_cluster(shape, builtin), workload, shape, kills=kills)
        results.append(_result(builtin.value, report))
    return tuple(results)


def trial_as_json(trial: PolicyTrial) -> dict[str, Any]:
    """Plain values; the first of `results` is the policy's."""
    decisions = trial.decisions
    return {
        "trace": trial.source,
        "num_requests": trial.num_requests,
        "simulated": True,
        "decisions": {
            "num_calls": decisions.num_calls,
            "num_defaults": decisions.num_defaults,
            "num_failures": decisions.num_failures,
            "time_us": {
                "p50": decisions.p50_us,
                "p99": decisions.p99_us,
                "max": decisions.max_us,
                "simulated": False,
            },
        },
        "results": [
            {
                "policy": result.name,
                "balance": result.balance,
                "decode_balance": result.decode_balance,
                "ttft": result.ttft.as_json(),
                "tpot": result.tpot.as_json(),
                "output_tokens_per_s": result.output_tokens_per_s,
                "num_errors": result.num_errors,
            }
            for result in trial.results
        ],
        "chunks": [asdict(row) for row in trial.chunks],
        "placements": [asdict(row) for row in trial.placements],
    }


def _cluster(shape: TrialShape, policy: SimPolicy) -> SimCluster:
    return SimCluster(
        num_engines=shape.num_engines,
        engine=SimEngineConfig(
            num_dp_ranks=shape.num_dp_ranks,
            kv_capacity_tokens=KV_CAPACITY_TOKENS,
            max_running_requests=shape.max_running_requests,
            prefix_cache_tokens=shape.prefix_cache_tokens,
        ),
        policy=policy,
        seed=shape.seed,
    )


def _policy_set(guard: MeasuredGuard) -> PolicySet:
    kinds = kinds_of(guard.policy)
    return PolicySet(
        routing=RoutingPolicies([(guard, 1.0)]) if any(k in kinds for k in ROUTING_KINDS) else None,
        admission=guard if AdmissionPolicy in kinds else None,
        priority=guard if PriorityPolicy in kinds else None,
        handoff=guard if HandoffPolicy in kinds else None,
    )


def _replay(
    cluster: SimCluster, workload: Trace, shape: TrialShape, *, kills: bool
) -> ReplayReport:
    cluster.start()
    if kills:
        _kill_one(cluster, workload)
    return cluster.replay(workload, tenants=_tenants(workload, shape))


def _kill_one(cluster: SimCluster, workload: Trace) -> None:
    """Lose the first engine when half of the requests have come, for a tenth of the time."""
    middle_ns = cluster.loop.now_ns() + int(workload.arrival_ns[len(workload.arrival_ns) // 2])
    back_ns = middle_ns + int(workload.arrival_ns[-1]) // 10 + 1
    driver = next(iter(cluster.drivers.values()))
    cluster.loop.call_at(middle_ns, driver.kill)
    cluster.loop.call_at(back_ns, driver.restart)


def _tenants(workload: Trace, shape: TrialShape) -> Sequence[str]:
    """Names by request; the first tenant sends most (1, 1/2, 1/3, ... of the requests)."""
    shares = 1.0 / np.arange(1, shape.num_tenants + 1)
    drawn = stream(shape.seed, "tenants").choice(
        shape.num_tenants, size=workload.num_requests, p=shares / shares.sum()
    )
    return [f"tenant-{number}" for number in drawn.tolist()]


def _result(name: str, report: ReplayReport) -> TrialResult:
    seconds = report.times.makespan_ns / 1e9
    return TrialResult(
        name=name,
        balance=report.steps.balance,
        decode_balance=report.steps.decode_balance,
        ttft=Quantiles.from_ns(report.times.ttft_ns),
        tpot=Quantiles.from_ns(report.times.tpot_ns),
        output_tokens_per_s=report.num_output_tokens / seconds if seconds else None,
        num_errors=dict(report.num_errors),
    )
