"""Routing: throughput share in simulation, and what a decision costs.

    python benchmarks/routing.py [--quick] [--json FILE] [--traces FOLDER]
                                 [--parts PART ...] [--cases TRACE ...]

All of it takes about an hour of one core; `--parts` and `--cases` measure a part.

Throughput is that of the same load spread perfectly over 64 ranks that step together, in percent:
simulated, with step = max over ranks of (15 ms + 0.2 ms a request + 26 ns a KV token), 1M KV tokens
a rank, 70 KB of KV a token and 50 GB/s a link (all assumed). Peers are their published formulas
(`dsched/sim/policies.py`) on the same arrivals. Decision times are measured beside vLLM's real
scoring method and Dynamo's in-process router where their environments are there (`--vllm-python`,
`--dynamo-python`).

The traces are not part of the project (`DSCHED_SHARED`, or `shared` beside the checkout); without
them one generated workload stands in.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from _report import Row, arguments, half_quartile_range, report

from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing import DecodeRouter, PrefillConfig, RoutingRequest
from dsched.sim.decode import DecodeGroup, DecodeRun, simulate_decode
from dsched.sim.decode_routers import simulate_routers
from dsched.sim.prefill import (
    ChunkRule,
    PrefillGroup,
    backlog_balance_pct,
    scale_to_load,
    shuffle_arrivals,
    simulate_prefill,
)
from dsched.sim.traces import Trace, read_trace, select, spread_ties
from dsched.sim.workload import generate_workload

ROOT = Path(__file__).parents[1]
PEERS = (
    "round_robin", "random", "p2c_requests", "p2c_kv", "least_requests", "least_kv", "vllm",
    "sglang", "dynamo", "dynamo_tuned", "smg", "aibrix", "llm_d", "two_term",
)  # fmt: skip
PARTS = ("decisions", "shares", "routers", "stale", "scale", "open_loop", "prefill")
QUICK_PEERS = ("round_robin", "vllm", "sglang", "dynamo", "aibrix", "two_term")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A trace, its concurrency, and the shares to reach."""

    name: str
    file: str
    requests_per_rank: float
    num_steps: int
    placement: float
    late: float
    migration: float


CASES = (
    Case(name="mooncake", file="mooncake_conversation.csv", requests_per_rank=53, num_steps=3000,
         placement=95.5, late=96.0, migration=99.0),
    Case(name="r1", file="servegen_deepseek_r1_sample.csv", requests_per_rank=128, num_steps=3000,
         placement=98.5, late=99.0, migration=99.5),
    Case(name="azure", file="azure2023_conv.csv", requests_per_rank=128, num_steps=3000,
         placement=99.0, late=99.5, migration=99.5),
    Case(name="agentic", file="weka_claude_code_half.csv", requests_per_rank=4.7, num_steps=8000,
         placement=78.0, late=79.5, migration=91.0),
)  # fmt: skip


def main() -> None:
    """Measure everything and report it."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--traces", type=Path, default=default_traces(), metavar="FOLDER")
    for name in ("vllm", "dynamo"):
        default = ROOT / f".venv-{name}" / "bin" / "python"
        parser.add_argument(f"--{name}-python", type=Path, default=default, metavar="FILE")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cases", nargs="+", choices=[case.name for case in CASES])
    options = parser.parse_args()
    num_seeds = 2 if options.quick else 5
    parts: list[str] = options.parts
    rows = []
    if "decisions" in parts:
        rows += decision_rows(options.vllm_python, options.dynamo_python)
    cases = [
        case
        for case in CASES
        if (options.traces / case.file).is_file() and case.name in (options.cases or case.name)
    ]
    if not cases:
        print(f"no traces in {options.traces}: generated lengths instead", file=sys.stderr)
        rows += share_rows(GENERATED, generate_workload(num_requests=5000), 2, quick=options.quick)
    for case in cases:
        trace = read_trace(options.traces / case.file)
        if "shares" in parts:
            rows += share_rows(case, trace, num_seeds, quick=options.quick)
        if "routers" in parts:
            rows += router_rows(case, trace, quick=options.quick)
        if "stale" in parts:
            rows += stale_rows(case, trace, num_seeds)
        if "scale" in parts and case.name == "mooncake":
            rows += scale_rows(case, trace, num_seeds, quick=options.quick)
        if "open_loop" in parts and case.name == "mooncake":
            rows += open_loop_rows(trace, num_seeds)
        if "prefill" in parts and case.name in ("mooncake", "agentic"):
            rows += prefill_rows(case.name, trace, num_seeds, quick=options.quick)
            if not options.quick:
                rows += balance_rows(case.name, trace, num_seeds)
    report("routing", rows, seeds=num_seeds, json_path=options.json)


GENERATED = Case(
    name="generated", file="", requests_per_rank=53, num_steps=1500, placement=95.0, late=95.5,
    migration=98.5,
)  # fmt: skip


def default_traces() -> Path:
    """Where the traces are, if they are."""
    shared = os.environ.get("DSCHED_SHARED")
    return (Path(shared) if shared else ROOT.parent / "shared") / "traces"


# ---- throughput


def share_rows(case: Case, trace: Trace, num_seeds: int, *, quick: bool) -> list[Row]:
    """Placement, late binding and migration beside the peers."""
    peers = {
        name: statistics.mean(shares(case, trace, name, num_seeds, quick=quick))
        for name in (QUICK_PEERS if quick else PEERS)
    }
    rows = [
        share_row(f"{case.name}/placement", case.placement, peers,
                  shares(case, trace, "dsched", num_seeds, quick=quick)),
        share_row(f"{case.name}/late", case.late, peers,
                  shares(case, trace, "dsched_late", num_seeds, quick=quick, price_error=4.0,
                         calibrates=True)),
        share_row(f"{case.name}/migration", case.migration, peers,
                  shares(case, trace, "dsched_migrate", num_seeds, quick=quick)),
    ]  # fmt: skip
    if case.name == "agentic":
        rows.append(
            share_row(f"{case.name}/gather", case.migration, peers,
                      shares(case, trace, "dsched_gather", num_seeds, quick=quick))
        )  # fmt: skip
        rows.append(bound_row(case, trace, num_seeds, quick=quick))
    return rows


def shares(
    case: Case, trace: Trace, policy: str, num_seeds: int, *, quick: bool, **changes: object
) -> list[float]:
    """Throughput share of `policy` for each seed."""
    return [
        simulate_decode(trace, policy, run=closed(case, seed, quick=quick, **changes)).share_pct
        for seed in range(num_seeds)
    ]


def closed(case: Case, seed: int, *, quick: bool = False, **changes: object) -> DecodeRun:
    """A closed loop long enough to forget its start."""
    num_steps = case.num_steps // 2 if quick and case.num_steps < 5000 else case.num_steps
    values: dict[str, object] = {
        "seed": seed,
        "requests_per_rank": case.requests_per_rank,
        "num_steps": num_steps,
        "warm_steps": num_steps // 5,
        **changes,
    }
    return DecodeRun(**values)  # type: ignore[arg-type]


def share_row(
    name: str, target: float | None, peers: dict[str, float], values: Sequence[float]
) -> Row:
    """One row of shares."""
    return Row(
        metric="throughput_share_pct",
        case=name,
        ours=statistics.mean(values),
        spread=half_quartile_range(values),
        better="higher",
        target=target,
        peers=peers,
    )


def bound_row(case: Case, trace: Trace, num_seeds: int, *, quick: bool) -> Row:
    """How much of what whole requests allow at all migration reaches."""
    values = []
    for seed in range(num_seeds):
        result = simulate_decode(trace, "dsched_migrate", run=closed(case, seed, quick=quick))
        values.append(100.0 * result.share_pct / result.bound_pct)
    return Row(
        metric="share_of_whole_request_bound_pct",
        case=f"{case.name}/migration",
        ours=statistics.mean(values),
        spread=half_quartile_range(values),
        better="higher",
    )


def router_rows(case: Case, trace: Trace, *, quick: bool) -> list[Row]:
    """Points that four routers lose against one, all real routers.

    Each is the loss of the four that hear what the others send as late as dsched processes do, or
    that know each other by the ranks' reports alone; the one router has reports every step.
    """
    num_steps = 300 if quick else 400
    if case.name == "agentic":
        # All requests arrive in the first step, and live 440: the start has to be forgotten.
        num_steps = 2000 if quick else case.num_steps
    seeds = range(1 if quick else 5)

    def share(seed: int, num_routers: int, delay_steps: int, peer_ms: int | None) -> float:
        run = DecodeRun(
            seed=seed, requests_per_rank=case.requests_per_rank, num_steps=num_steps,
            warm_steps=num_steps // 4,
        )  # fmt: skip
        return simulate_routers(
            trace, num_routers=num_routers, report_delay_steps=delay_steps, run=run,
            peer_delay_ns=None if peer_ms is None else peer_ms * 1_000_000,
        ).share_pct  # fmt: skip

    one = [share(seed, 1, 0, None) for seed in seeds]
    rows = []
    for name, delay_steps, peer_ms in (
        ("heard 1 ms late", 0, 1),
        ("heard 4 ms late", 0, 4),
        ("heard 1 ms late, reports 1 step late", 1, 1),
        ("not heard", 0, None),
        ("not heard, reports 1 step late", 1, None),
    ):
        lost = [one[seed] - share(seed, 4, delay_steps, peer_ms) for seed in seeds]
        rows.append(
            Row(metric="four_routers_loss_points", case=f"{case.name}/{name}",
                ours=statistics.mean(lost), spread=half_quartile_range(lost), better="lower",
                target=None if peer_ms is None else 2.0)
        )  # fmt: skip
    return rows


def stale_rows(case: Case, trace: Trace, num_seeds: int) -> list[Row]:
    """Points lost when all load information is 20 steps old, even the ends of own requests.

    A single dsched router is better informed: it sees its own requests end (`one router`).
    """
    lost = []
    for seed in range(num_seeds):
        fresh, stale = (
            simulate_decode(trace, "dsched", run=closed(case, seed, stale_steps=steps)).share_pct
            for steps in (0, 20)
        )
        lost.append(fresh - stale)
    num_steps = 2000 if case.name == "agentic" else 300
    run = DecodeRun(requests_per_rank=case.requests_per_rank, num_steps=num_steps,
                    warm_steps=num_steps // 4)  # fmt: skip
    fresh, stale = (
        simulate_routers(trace, num_routers=1, report_delay_steps=steps, run=run, is_late=False)
        for steps in (0, 20)
    )
    return [
        Row(metric="stale_loss_points", case=f"{case.name}/one router, reports 20 steps late",
            ours=fresh.share_pct - stale.share_pct, better="lower", target=1.5),
        Row(metric="stale_loss_points", case=f"{case.name}/everything 20 steps late",
            ours=statistics.mean(lost), spread=half_quartile_range(lost), better="lower",
            target=1.5),
    ]  # fmt: skip


def scale_rows(case: Case, trace: Trace, num_seeds: int, *, quick: bool) -> list[Row]:
    """320 ranks."""
    group = DecodeGroup(num_ranks=320)
    seeds = range(1 if quick else num_seeds)
    ours = [
        simulate_decode(
            trace, "dsched_late", group=group, run=closed(case, seed, quick=quick)
        ).share_pct
        for seed in seeds
    ]
    peers = {
        name: simulate_decode(trace, name, group=group, run=closed(case, 0, quick=quick)).share_pct
        for name in QUICK_PEERS
    }
    return [share_row("mooncake/late, 320 ranks", 96.0, peers, ours)]


def open_loop_rows(trace: Trace, num_seeds: int) -> list[Row]:
    """The trace's own stamps, ties spread, 40 times faster."""
    rows = []
    peers: dict[str, float] = {}
    for policy, target in (*((name, None) for name in QUICK_PEERS), ("dsched_late", 93.0),
                           ("dsched_migrate", 98.5)):  # fmt: skip
        values = [
            simulate_decode(
                spread_ties(trace, stream(seed, "jitter")),
                policy,
                run=DecodeRun(seed=seed, speed=40.0),
            ).share_pct
            for seed in range(num_seeds)
        ]
        if target is None:
            peers[policy] = statistics.mean(values)
        else:
            rows.append(share_row(f"mooncake/open loop x40, {policy}", target, peers, values))
    return rows


# ---- prefill


def prefill_rows(name: str, trace: Trace, num_seeds: int, *, quick: bool) -> list[Row]:
    """Chunk rules in full backlog, TTFT and step balance under load; 32 ranks."""
    group = PrefillGroup()
    short = select(trace, np.flatnonzero(trace.num_prompt_tokens <= 262_144))
    rows = []
    for step_s in (0.3, 0.7):
        values = [
            backlog_balance_pct(short, ChunkRule(step_s=step_s), seed=seed, num_steps=150)
            for seed in range(num_seeds)
        ]
        peers = {
            f"fixed {tokens}": backlog_balance_pct(
                short, ChunkRule(chunk_tokens=tokens), num_steps=150
            )
            for tokens in (2048, 8192)
        }
        rows.append(
            Row(metric="backlog_step_balance_pct", case=f"{name} <=256K, {step_s} s a step",
                ours=statistics.mean(values), spread=half_quartile_range(values),
                better="higher", target=97.0, peers=peers)
        )  # fmt: skip
    load = 0.85 if name == "mooncake" else 0.6
    if quick and name != "mooncake":
        return rows
    by_policy: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(1 if quick else min(num_seeds, 3)):
        stamped = (
            spread_ties(trace, stream(seed, "jitter"))
            if name == "mooncake"
            else shuffle_arrivals(trace, seed=seed)
        )
        stamped = scale_to_load(stamped, group, load=load)
        for policy in ("round_robin", "least_requests", "least_tokens", "least_cost", "buckets"):
            result = simulate_prefill(
                stamped, policy, ChunkRule(step_s=0.3), config=PrefillConfig()
            )
            by_policy.setdefault(policy, []).append(
                (result.ttft_p99_s[0], *result.step_balance_pct)
            )
    first = {policy: [one[0] for one in values] for policy, values in by_policy.items()}
    rows.extend(
        Row(metric="ttft_p99_s", case=f"{name} <16K at {load:.0%} load, {policy}",
            ours=statistics.mean(first[policy]), spread=half_quartile_range(first[policy]),
            better="lower", target=4.0 if name == "mooncake" else None,
            peers={one: statistics.mean(values) for one, values in first.items()
                   if one not in ("least_cost", "buckets")})
        for policy in ("least_cost", "buckets")
    )  # fmt: skip
    one_group = statistics.mean(one[1] for one in by_policy["least_cost"])
    # No target: ranks that keep up wait for work, so the balance of all is the load.
    for bucket in range(len(by_policy["buckets"][0]) - 1):
        values = [one[1 + bucket] for one in by_policy["buckets"]]
        rows.append(
            Row(metric="step_balance_pct", case=f"{name} at {load:.0%} load, bucket {bucket}",
                ours=statistics.mean(values), spread=half_quartile_range(values),
                better="higher", peers={"one group": one_group})
        )  # fmt: skip
    return rows


def balance_rows(name: str, trace: Trace, num_seeds: int) -> list[Row]:
    """Step balance of the bucket groups at 130 % load, where no rank waits for work.

    Beside it one group with the same time budget, and one with 8192 tokens a step as engines have.
    """
    group = PrefillGroup()
    budget, tokens = ChunkRule(step_s=0.3), ChunkRule(chunk_tokens=8192)
    found: dict[str, list[tuple[float, ...]]] = {}
    for seed in range(min(num_seeds, 3)):
        if name == "mooncake":
            stamped = spread_ties(trace, stream(seed, "jitter"))
        else:
            stamped = shuffle_arrivals(trace, seed=seed)
        stamped = scale_to_load(stamped, group, load=1.3)
        for label, policy, rule in (
            ("buckets", "buckets", budget),
            ("one group", "least_cost", budget),
            ("one group, 8192 tokens", "least_cost", tokens),
        ):
            result = simulate_prefill(stamped, policy, rule, config=PrefillConfig())
            found.setdefault(label, []).append(result.step_balance_pct)
    peers = {
        label: statistics.mean(one[0] for one in values)
        for label, values in found.items()
        if label != "buckets"
    }
    rows = []
    for bucket, values in enumerate(zip(*found["buckets"], strict=True)):
        rows.append(
            Row(metric="step_balance_pct", case=f"{name} at 130% load, bucket {bucket}",
                ours=statistics.mean(values), spread=half_quartile_range(values),
                better="higher", target=max(85.0, 2.0 * peers["one group, 8192 tokens"]),
                peers=peers)
        )  # fmt: skip
    return rows


# ---- decisions


def decision_rows(vllm_python: Path, dynamo_python: Path) -> list[Row]:
    """Microseconds of a decision, CPU time of one thread, and of booking it."""
    router = loaded_router(320)
    rows = []
    for num_tokens in (1_000, 120_000):
        request = RoutingRequest(num_prompt_tokens=num_tokens)
        peers = peer_decisions(vllm_python, dynamo_python, num_tokens)
        values = [per_call_us(lambda: router.pick(request, 0)) for _ in range(9)]  # noqa: B023
        rows.append(
            Row(metric="decision_us", case=f"N=320, {num_tokens} prompt tokens",
                ours=statistics.median(values), spread=half_quartile_range(values),
                better="lower", target=10.0, peers=peers)
        )  # fmt: skip
    keys = iter(range(10**9))

    def book() -> None:
        key = next(keys)
        router.book(key % 320, key, num_prompt_tokens=10, now_ns=0)
        router.release(key)

    for name, call in (
        ("book_and_release_us", book),
        ("add_tokens_us", lambda: router.add_tokens("r5", 1)),
    ):
        values = [per_call_us(call) for _ in range(9)]
        rows.append(
            Row(metric=name, case="N=320", ours=statistics.median(values),
                spread=half_quartile_range(values), better="lower",
                target=1.0 if name == "add_tokens_us" else None)
        )  # fmt: skip
    return rows


def loaded_router(num_ranks: int) -> DecodeRouter:
    """A router in the middle of its work: 40 requests a rank."""
    router = DecodeRouter(is_synchronised=True)
    for index in range(num_ranks):
        router.add_rank(
            RankId(EngineId(f"engine-{index // 8}"), DpRank(index % 8)),
            kv_capacity_tokens=1_000_000,
            max_running_requests=256,
        )
    rng = stream(0, "bench")
    for number, tokens in enumerate(rng.integers(100, 20_000, 40 * num_ranks).tolist()):
        decision = router.pick(RoutingRequest(num_prompt_tokens=tokens), 0)
        assert decision.rank is not None
        router.book(decision.rank, f"r{number}", num_prompt_tokens=tokens, now_ns=0)
    return router


def per_call_us(call: Callable[[], object], count: int = 2000) -> float:
    """CPU microseconds of one call."""
    start = time.thread_time()
    for _ in range(count):
        call()
    return (time.thread_time() - start) / count * 1e6


def peer_decisions(vllm_python: Path, dynamo_python: Path, num_tokens: int) -> dict[str, float]:
    """The peers' own code, where its environment is there."""
    commands = {
        "vllm": [str(vllm_python), str(ROOT / "benchmarks" / "_vllm_router.py"), "320", "1000"],
        "dynamo": [
            str(dynamo_python), str(ROOT / "benchmarks" / "_dynamo_router.py"), "320",
            str(num_tokens), "30",
        ],
    }  # fmt: skip
    found = {}
    for name, command in commands.items():
        if not Path(command[0]).exists():
            continue
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            print(f"{name}: {done.stderr.strip()[-300:]}", file=sys.stderr)
            continue
        found[name] = float(json.loads(lines[0])["p50_us"])
    return found


if __name__ == "__main__":
    main()
