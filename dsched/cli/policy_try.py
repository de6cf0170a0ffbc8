"""`dsched policy test`: try a policy offline."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.output import write_json
from dsched.cli.policy_trial import (
    PolicyTrial,
    TrialResult,
    TrialShape,
    run_trial,
    trial_as_json,
    trial_workload,
)
from dsched.config import LoggingConfig
from dsched.config_yaml import parse_yaml
from dsched.errors import ConfigError
from dsched.logs import configure_logging
from dsched.plugins import METHODS, kinds_of, load_policy


def try_policy(
    reference: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="The policy, or its entry point's name.")
    ],
    *,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Trace to replay, CSV or JSON lines; generated without it."),
    ] = None,
    args: Annotated[
        str, typer.Option("--args", metavar="YAML", help="Keyword arguments, as a YAML mapping.")
    ] = "{}",
    engines: Annotated[int, typer.Option("--engines", min=1, help="Engines.")] = 2,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="DP ranks of each engine.")] = 4,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests to generate.")
    ] = 1_000,
    rate: Annotated[float, typer.Option("--rate", help="Generated arrivals a second.")] = 20.0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Replay the first N requests only.")
    ] = None,
    tenants: Annotated[
        int, typer.Option("--tenants", min=1, help="Tenants that the requests are shared among.")
    ] = 3,
    max_running_requests: Annotated[
        int, typer.Option("--max-running-requests", min=1, help="Requests one rank runs at once.")
    ] = 64,
    prefix_cache_tokens: Annotated[
        int, typer.Option("--prefix-cache-tokens", help="Prompt tokens a rank remembers; 0: none.")
    ] = 0,
    budget_ms: Annotated[
        float, typer.Option("--budget-ms", min=0.01, help="Time of one call of the policy.")
    ] = 2.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of all randomness.")] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the result here; - for standard output.")
    ] = None,
) -> None:
    """Replay a workload with a policy and with dsched's own rules, side by side.

    The controller is the real one, engines are simulated, and so are all times but one: the time
    of a decision, which is this machine's. A policy of several kinds is tried as all of them; with
    a handoff policy one engine is killed on the way. Chunk weights are tried on prompts of four
    lengths, rebalance triggers on drifting expert load, whatever --trace says.
    """
    configure_logging(LoggingConfig(level="error"))
    console = Console(stderr=json is not None and str(json) == "-")
    policy = load_policy(
        tuple(METHODS), reference, _arguments(args), path="policy", arguments_path="--args"
    )
    shape = TrialShape(
        num_engines=engines,
        num_dp_ranks=ranks,
        max_running_requests=max_running_requests,
        prefix_cache_tokens=prefix_cache_tokens,
        num_tenants=tenants,
        seed=seed,
    )
    try:
        workload = trial_workload(
            trace, shape=shape, num_requests=requests, rate_per_s=rate, limit=limit
        )
        trial = run_trial(policy, workload, shape, budget_ns=int(budget_ms * 1e6))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if json is not None:
        write_json(trial_as_json(trial), json, sort_keys=True)
    kinds = ", ".join(METHODS[kind] for kind in kinds_of(policy))
    title = f"{reference} ({kinds})"
    if trial.results:
        console.print(make_table(trial, title=f"{title} on {workload.source}"))
    if trial.chunks:
        console.print(make_chunk_table(trial, title=title))
    if trial.placements:
        console.print(make_placement_table(trial, title=title))
    console.print(make_own_table(trial))


def _arguments(text: str) -> dict[str, object]:
    tree, _ = parse_yaml(text, where="--args")
    if not isinstance(tree, dict) or not all(isinstance(name, str) for name in tree):
        raise ConfigError(f"--args: {text!r} is no mapping, as in '{{tolerance: 1.1}}'")
    return msgspec.convert(tree, dict[str, object])


def make_table(trial: PolicyTrial, *, title: str) -> Table:
    """The policies side by side; balance is that of decodes, latencies are p50 and p99."""
    table = Table(
        title=title,
        caption="All simulated: times follow from the step cost model, not from hardware.",
        box=None,
        header_style="bold",
    )
    table.add_column("policy", no_wrap=True)
    for column in ("balance", "TTFT ms", "p99", "TPOT ms", "p99", "tokens/s", "refused"):
        table.add_column(column, justify="right", no_wrap=True)
    for result in trial.results:
        style = "bold" if result is trial.results[0] else ""
        table.add_row(result.name, *_cells(result), style=style)
    return table


def _cells(result: TrialResult) -> list[str]:
    return [
        _number(result.decode_balance, 3),
        _number(result.ttft.p50_ms),
        _number(result.ttft.p99_ms),
        _number(result.tpot.p50_ms),
        _number(result.tpot.p99_ms),
        _number(result.output_tokens_per_s, 0),
        str(sum(result.num_errors.values())),
    ]


def make_chunk_table(trial: PolicyTrial, *, title: str) -> Table:
    """Shares of prefill time on one nearly full rank."""
    table = Table(
        title=f"{title} on prompts of four lengths",
        caption="Simulated: one rank, 50 ms a step.",
        box=None,
        header_style="bold",
    )
    table.add_column("weights", no_wrap=True)
    for column in ("goodput", "short TTFT p99 ms", "longer TTFT p99 ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in trial.chunks:
        times = (_number(row.short_ttft_p99_ms), _number(row.long_ttft_p99_ms))
        table.add_row(row.name, f"{row.goodput:.1%}", *times)
    return table


def make_placement_table(trial: PolicyTrial, *, title: str) -> Table:
    """Moments of a rebalance, over drifting expert load."""
    table = Table(
        title=f"{title} on drifting expert load",
        caption="Simulated: 64 experts on 8 ranks, 8 layers.",
        box=None,
        header_style="bold",
    )
    table.add_column("rebalance", no_wrap=True)
    for column in ("balance of the next window", "moves per layer and window"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in trial.placements:
        table.add_row(row.name, _number(row.next_balance, 4), _number(row.moves_per_layer, 2))
    return table


def make_own_table(trial: PolicyTrial) -> Table:
    """How the policy itself did."""
    own = trial.decisions
    table = Table(title="decisions of the policy", show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("questions", f"{own.num_calls:,}")
    table.add_row("left to the default", f"{own.num_defaults:,}")
    fallbacks = ", ".join(f"{reason} {count}" for reason, count in own.num_failures.items())
    table.add_row("fallbacks", fallbacks or "none")
    table.add_row(
        "time per decision (this machine)",
        f"p50 {_number(own.p50_us)}  p99 {_number(own.p99_us)}  max {_number(own.max_us)} us",
    )
    return table


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
