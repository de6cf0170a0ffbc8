"""`dsched sim prefill`: compare prefill routing and chunk rules."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.output import write_json
from dsched.errors import ConfigError
from dsched.rng import stream
from dsched.routing.prefill import DEFAULT_BUCKET_BOUNDS, PrefillConfig
from dsched.sim.prefill import (
    PREFILL_POLICIES,
    ChunkRule,
    PrefillGroup,
    PrefillResult,
    backlog_balance_pct,
    scale_to_load,
    shuffle_arrivals,
    simulate_prefill,
)
from dsched.sim.traces import Trace, read_trace, spread_ties
from dsched.sim.workload import PoissonArrivals, generate_workload


def prefill(
    *,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="CSV or JSON lines; generated without it.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="Prefill ranks.")] = 32,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help=f"One or more of: {', '.join(PREFILL_POLICIES)}."),
    ] = None,
    load: Annotated[
        float | None,
        typer.Option("--load", help="Stretch the stamps to this share of the ranks' time."),
    ] = None,
    step_s: Annotated[
        float, typer.Option("--step-s", help="Time budget of a step, in seconds.")
    ] = 0.3,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", help="Fixed chunk instead of a time budget.")
    ] = None,
    bucket_bounds: Annotated[
        str, typer.Option("--bucket-bounds", help="Effective tokens where a bucket begins.")
    ] = ",".join(map(str, DEFAULT_BUCKET_BOUNDS)),
    tokens_per_s: Annotated[
        float, typer.Option("--tokens-per-s", help="Speed of a rank without context.")
    ] = 12_000.0,
    context_tokens: Annotated[
        float,
        typer.Option("--context-tokens", help="Context at which attention doubles the time."),
    ] = 24_000.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all randomness.")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results here; - for standard output.")
    ] = None,
) -> None:
    """Compare prefill routing and chunk rules on ranks that step together.

    Prints step balance (mean over longest chunk time) and TTFT by prompt length, and the balance
    that the chunk rule keeps when every rank always has work. Everything is simulated.
    """
    console = Console(stderr=json is not None and str(json) == "-")
    try:
        workload = _workload(trace, seed=seed)
        group = PrefillGroup(
            num_ranks=ranks, tokens_per_s=tokens_per_s, context_tokens=context_tokens
        )
        if load is not None:
            workload = scale_to_load(workload, group, load=load)
        rule = (
            ChunkRule(step_s=step_s)
            if chunk_tokens is None
            else ChunkRule(chunk_tokens=chunk_tokens)
        )
        config = PrefillConfig(bucket_bounds=_bounds(bucket_bounds))
        with console.status("simulating"):
            backlog_pct = backlog_balance_pct(workload, rule, group=group, seed=seed)
            results = [
                simulate_prefill(workload, name, rule, group=group, config=config)
                for name in dict.fromkeys(policy or PREFILL_POLICIES)
            ]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if json is not None:
        write_json(_as_json(workload, results, rule, backlog_pct), json)
    console.print(_table(workload, results, ranks))
    console.print(f"step balance while every rank has work: {backlog_pct:.1f} %")


def _bounds(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ValueError(f"bucket bounds {text!r} are not whole numbers with commas") from error


def _workload(path: Path | None, *, seed: int) -> Trace:
    if path is None:
        return generate_workload(
            num_requests=5_000, seed=seed, arrivals=PoissonArrivals(rate_per_s=100.0)
        )
    workload = read_trace(path)
    if workload.conversation_id is not None:
        return shuffle_arrivals(workload, seed=seed)
    return spread_ties(workload, stream(seed, "jitter"))


def _table(workload: Trace, results: list[PrefillResult], num_ranks: int) -> Table:
    table = Table(
        title=f"Simulated prefill of {workload.source} on {num_ranks} ranks",
        caption="balance by bucket; p99 TTFT by prompt length: <16K / <64K / <256K / longer",
    )
    table.add_column("policy", no_wrap=True)
    for name in ("step balance %", "busy %", "p99 TTFT s", "spilled"):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.policy,
            _joined(result.step_balance_pct),
            f"{result.busy_pct:.1f}",
            _joined(result.ttft_p99_s),
            f"{result.num_spilled}",
        )
    return table


def _joined(values: tuple[float, ...]) -> str:
    return " / ".join("-" if math.isnan(value) else f"{value:.1f}" for value in values)


def _as_json(
    workload: Trace, results: list[PrefillResult], rule: ChunkRule, backlog_pct: float
) -> dict[str, Any]:
    return {
        "trace": workload.source,
        "rule": asdict(rule),
        "backlog_step_balance_pct": backlog_pct,
        "policies": [
            {
                name: [None if math.isnan(one) else one for one in value]
                if isinstance(value, tuple)
                else value
                for name, value in asdict(result).items()
            }
            for result in results
        ],
    }
