"""`dsched sim decode`: compare routing policies on decode ranks that step together."""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.output import write_json
from dsched.errors import ConfigError
from dsched.rng import stream
from dsched.sim.decode import DecodeGroup, DecodeResult, DecodeRun, simulate_decode
from dsched.sim.policies import POLICIES
from dsched.sim.traces import Trace, read_trace, spread_ties, stagger_conversations
from dsched.sim.workload import PoissonArrivals, generate_workload

DEFAULT_POLICIES = ("round_robin", "vllm", "sglang", "dynamo", "aibrix", "dsched_late")
MAX_LISTED_REQUESTS = 100_000
"""Requests whose rank is listed in the JSON. More: a file larger than its reader expects."""


def decode(
    *,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV or JSON lines; generated without it.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="DP ranks of the group.")] = 64,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help=f"One or more of: {', '.join(POLICIES)}."),
    ] = None,
    requests_per_rank: Annotated[
        float | None,
        typer.Option(
            "--requests-per-rank",
            help="Closed loop: keep so many requests a rank in the system. Without it the trace's "
            "own stamps decide.",
        ),
    ] = None,
    speed: Annotated[
        float, typer.Option("--speed", help="Open loop: let requests come this much faster.")
    ] = 1.0,
    jitter: Annotated[
        bool, typer.Option("--jitter", help="Spread requests with equal stamps, order kept.")
    ] = False,
    steps: Annotated[int, typer.Option("--steps", help="Closed loop: steps to run.")] = 3000,
    warm_steps: Annotated[
        int | None,
        typer.Option("--warm-steps", help="Closed loop: first steps, not measured. [a fifth]"),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all randomness.")] = 0,
    stale_steps: Annotated[
        int, typer.Option("--stale-steps", help="Age of all load information, in steps.")
    ] = 0,
    price_error: Annotated[
        float, typer.Option("--price-error", help="Factor on c that dsched's policies start with.")
    ] = 1.0,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Let dsched's policies learn the prices.")
    ] = False,
    base_ms: Annotated[float, typer.Option("--base-ms", help="a of a step.")] = 15.0,
    request_ms: Annotated[
        float, typer.Option("--request-ms", help="b: a running request adds this.")
    ] = 0.2,
    kv_token_ns: Annotated[
        float, typer.Option("--kv-token-ns", help="c: a KV token adds this.")
    ] = 26.0,
    kv_capacity_tokens: Annotated[
        int, typer.Option("--kv-capacity-tokens", help="KV tokens one rank holds.")
    ] = 1_000_000,
    max_running_requests: Annotated[
        int, typer.Option("--max-running-requests", help="Requests one rank runs at once.")
    ] = 1024,
    link_gb_per_s: Annotated[
        float, typer.Option("--link-gb-per-s", help="Link of a rank, for moved sequences.")
    ] = 50.0,
    max_moves: Annotated[
        int, typer.Option("--max-moves", min=0, help="Sequences moved in a step at most.")
    ] = 4,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results here; - for standard output.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG here.")] = None,
) -> None:
    """Compare decode routing policies on ranks that step together, on the same arrivals.

    A step takes as long as its slowest rank: a + b x running requests + c x KV tokens. Prints the
    share of the throughput of the same load spread perfectly. Everything is simulated, with the
    constants given; the policies of other systems are their published formulas.
    """
    console = Console(stderr=json is not None and str(json) == "-")
    names = list(dict.fromkeys(policy or DEFAULT_POLICIES))
    try:
        workload = _workload(trace, seed=seed, jitter=jitter)
        group = DecodeGroup(
            num_ranks=ranks,
            base_ns=base_ms * 1e6,
            request_ns=request_ms * 1e6,
            kv_token_ns=kv_token_ns,
            kv_capacity_tokens=kv_capacity_tokens,
            max_running_requests=max_running_requests,
            link_bytes_per_s=link_gb_per_s * 1e9,
        )
        run = DecodeRun(
            seed=seed,
            requests_per_rank=requests_per_rank,
            speed=speed,
            num_steps=steps,
            warm_steps=steps // 5 if warm_steps is None else warm_steps,
            stale_steps=stale_steps,
            price_error=price_error,
            calibrates=calibrate,
            max_moves=max_moves,
        )
        with console.status("simulating (the first run compiles for half a minute)"):
            results = [simulate_decode(workload, name, group=group, run=run) for name in names]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if json is not None:
        write_json(_as_json(workload, results, group, run), json)
    if plot is not None:
        from dsched.sim.decode_plot import plot_decode

        plot_decode(results, plot, title=f"{workload.source}, {ranks} ranks, seed {seed}")
    console.print(_table(workload, results, ranks))


def _workload(path: Path | None, *, seed: int, jitter: bool) -> Trace:
    if path is None:
        return generate_workload(
            num_requests=5_000, seed=seed, arrivals=PoissonArrivals(rate_per_s=100.0)
        )
    workload = read_trace(path)
    if workload.conversation_id is not None:
        workload = stagger_conversations(workload, stream(seed, "conversations"), mean_gap_s=10.0)
    return spread_ties(workload, stream(seed, "jitter")) if jitter else workload


def _table(workload: Trace, results: list[DecodeResult], num_ranks: int) -> Table:
    table = Table(
        title=f"Simulated decode of {workload.source} on {num_ranks} ranks",
        caption="share: throughput in % of the same load spread perfectly; "
        "bound: the most that placing whole requests allows; moves: sequences moved a step",
    )
    table.add_column("policy", no_wrap=True)
    columns = ("share %", "bound %", "step ms", "tokens/s", "moves", "held ms", "preempted")
    for name in columns:
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.policy,
            f"{result.share_pct:.2f}",
            f"{result.bound_pct:.2f}",
            f"{result.step_ms:.2f}",
            f"{result.tokens_per_s:,.0f}",
            f"{result.moves_per_step:.2f}",
            f"{result.held_ms:.0f}",
            f"{result.num_preemptions}",
        )
    return table


def _as_json(
    workload: Trace, results: list[DecodeResult], group: DecodeGroup, run: DecodeRun
) -> dict[str, Any]:
    return {
        "trace": workload.source,
        "num_requests": workload.num_requests,
        "ranks": group.num_ranks,
        "loop": "open" if run.requests_per_rank is None else "closed",
        "requests_per_rank": run.requests_per_rank,
        "speed": run.speed,
        "seed": run.seed,
        "step": {
            "base_ns": group.base_ns,
            "request_ns": group.request_ns,
            "kv_token_ns": group.kv_token_ns,
        },
        "policies": [_policy_json(result, group, run) for result in results],
    }


def _policy_json(result: DecodeResult, group: DecodeGroup, run: DecodeRun) -> dict[str, Any]:
    bound = result.request_rank[result.request_rank >= 0]
    values: dict[str, Any] = {
        "policy": result.policy,
        "source": POLICIES[result.policy].source,
        "throughput_share_pct": result.share_pct,
        "balance_pct": result.balance_pct,
        "bound_pct": result.bound_pct,
        "tokens_per_s": result.tokens_per_s,
        "step_ms": result.step_ms,
        "moves_per_step": result.moves_per_step,
        "num_preemptions": result.num_preemptions,
        "num_finished": result.num_finished,
        "held_ms": result.held_ms,
        "max_held": result.max_held,
        "learned_prices_ns": list(result.learned_prices),
        "per_rank": np.bincount(bound, minlength=group.num_ranks).tolist(),
    }
    if run.requests_per_rank is None and len(result.request_rank) <= MAX_LISTED_REQUESTS:
        values["request_rank"] = result.request_rank.tolist()
    return values
