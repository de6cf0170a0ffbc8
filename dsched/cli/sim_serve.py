"""`dsched sim serve`: replay a request trace through the controller over simulated engines."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from dsched.cli.output import write_json
from dsched.config import LoggingConfig
from dsched.errors import ConfigError
from dsched.logs import configure_logging
from dsched.rng import stream
from dsched.sim.cluster import SimCluster, SimPolicy
from dsched.sim.engine import KvPolicy, SimEngineConfig
from dsched.sim.plot import plot_replay
from dsched.sim.recording import recording
from dsched.sim.report import Quantiles, ReplayReport
from dsched.sim.traces import (
    RowCounts,
    Trace,
    read_trace,
    scale_rate,
    select_first,
    spread_ties,
    stagger_conversations,
)
from dsched.sim.workload import ClosedLoop, PoissonArrivals, generate_workload

ROUNDED_SHARE = 0.5
"""Share of equal stamps above which a trace is said to have rounded ones."""


def serve(
    *,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Trace to replay, CSV or JSON lines; generated without it."),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", help="DP ranks of each engine.")] = 8,
    engines: Annotated[int, typer.Option("--engines", help="Engines.")] = 1,
    prefill_engines: Annotated[
        int,
        typer.Option("--prefill-engines", min=0, help="More engines, that compute the prompts."),
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all randomness.")] = 0,
    policy: Annotated[
        SimPolicy, typer.Option("--policy", help="How requests are placed.")
    ] = SimPolicy.TWO_TERM,
    rate_scale: Annotated[
        float, typer.Option("--rate-scale", help="Let requests come this many times as fast.")
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Replay the first N requests only.")
    ] = None,
    jitter: Annotated[
        bool, typer.Option("--jitter", help="Spread requests with equal stamps, order kept.")
    ] = False,
    conversation_gap_s: Annotated[
        float,
        typer.Option(
            "--conversation-gap-s",
            help="Mean seconds between starts of conversations, in traces that have them.",
        ),
    ] = 10.0,
    requests: Annotated[
        int, typer.Option("--requests", min=1, help="Requests to generate.")
    ] = 1_000,
    rate: Annotated[
        float, typer.Option("--rate", help="Generated arrivals a second, Poisson.")
    ] = 10.0,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, help="Generate a closed loop of so many clients."),
    ] = None,
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", help="Tokens one rank computes in a step at most.")
    ] = 1_024,
    max_running_requests: Annotated[
        int, typer.Option("--max-running-requests", help="Requests one rank runs at once.")
    ] = 256,
    kv_capacity_tokens: Annotated[
        int, typer.Option("--kv-capacity-tokens", help="KV tokens one rank holds.")
    ] = 1_048_576,
    kv_policy: Annotated[
        KvPolicy, typer.Option("--kv-policy", help="What a running request holds KV for.")
    ] = KvPolicy.PREEMPT,
    prefix_cache_tokens: Annotated[
        int, typer.Option("--prefix-cache-tokens", help="Prompt tokens a rank remembers; 0: none.")
    ] = 0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the result here; - for standard output.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG here.")] = None,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write every decision here, for explain and replay."),
    ] = None,
) -> None:
    """Replay a request trace through the real controller and simulated engines.

    Prints TTFT, TPOT, throughput and balance. All times are simulated: they follow from the step
    cost model, not from hardware. The same arguments give the same result, bit for bit.
    """
    configure_logging(LoggingConfig(level="warning"))
    console = Console(stderr=json is not None and str(json) == "-")
    for path in (json, plot, record):
        _check_folder(path)
    options: dict[str, Any] = {
        "conversation_gap_s": conversation_gap_s,
        "jitter": jitter,
        "kv_capacity_tokens": kv_capacity_tokens,
        "kv_policy": kv_policy.value,
        "limit": limit,
        "max_running_requests": max_running_requests,
        "prefill_engines": prefill_engines,
        "prefix_cache_tokens": prefix_cache_tokens,
        "rate_scale": rate_scale,
        "step_tokens": step_tokens,
    }
    try:
        if trace is None:
            options |= {"concurrency": concurrency, "rate": rate, "requests": requests}
            arrivals = ClosedLoop(max_concurrency=concurrency) if concurrency else None
            workload = generate_workload(
                num_requests=requests,
                seed=seed,
                arrivals=arrivals or PoissonArrivals(rate_per_s=rate),
            )
        else:
            workload = _load(trace, seed=seed, conversation_gap_s=conversation_gap_s)
        workload = workload if limit is None else select_first(workload, limit)
        if jitter:
            workload = spread_ties(workload, stream(seed, "jitter"))
        workload = scale_rate(workload, rate_scale)
        engine = SimEngineConfig(
            num_dp_ranks=ranks,
            kv_capacity_tokens=kv_capacity_tokens,
            max_running_requests=max_running_requests,
            max_step_tokens=step_tokens,
            max_model_len=kv_capacity_tokens,
            kv_policy=kv_policy,
            prefix_cache_tokens=prefix_cache_tokens,
        )
        with recording(record, source="sim serve", seed=seed, options=options) as recorder:
            cluster = SimCluster(
                num_engines=engines,
                num_prefill_engines=prefill_engines,
                engine=engine,
                policy=policy,
                recorder=recorder,
                seed=seed,
            )
            report = _replay(cluster, workload, options)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    if json is not None:
        write_json(report.as_json(), json, sort_keys=True)
    if plot is not None:
        plot_replay(report, plot)
    console.print(make_table(report))
    if not jitter and workload.tied_share() > ROUNDED_SHARE and workload.max_concurrency is None:
        console.print(
            f"{workload.tied_share():.0%} of the requests share the stamp of the one before: the "
            "stamps look rounded, and the bursts are not real. --jitter spreads them.",
            style="yellow",
        )


def make_table(report: ReplayReport) -> Table:
    """Return the figures of a replay for people."""
    table = Table(
        title=f"Simulated replay of {report.source}",
        caption="All times are simulated: they follow from the step cost model, not from hardware.",
        show_header=False,
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    values = report.as_json()
    rows, times, steps = report.rows, report.times, report.steps
    seconds = values["throughput"]["makespan_s"]
    table.add_row(
        "cluster",
        f"{report.num_engines} engine{'s' if report.num_engines > 1 else ''} x "
        f"{report.num_dp_ranks} DP ranks, policy {report.policy}, seed {report.seed}",
    )
    table.add_row("rows", f"read {rows.num_read}, replayed {report.num_replayed}, {_dropped(rows)}")
    table.add_row(
        "tokens", f"{report.num_prompt_tokens:,} input, {report.num_output_tokens:,} output"
    )
    errors = ", ".join(f"{code} {count}" for code, count in sorted(report.num_errors.items()))
    table.add_row(
        "requests",
        f"{int(times.is_finished.sum()):,} finished, {sum(report.num_errors.values())} failed"
        + (f" ({errors})" if errors else "")
        + f", {report.num_preemptions} preemptions",
        end_section=True,
    )
    table.add_row("TTFT (simulated)", _quantiles(Quantiles.from_ns(times.ttft_ns)))
    table.add_row(
        "TPOT (simulated)", _quantiles(Quantiles.from_ns(times.tpot_ns)), end_section=True
    )
    table.add_row(
        "throughput (simulated)",
        f"{_number(values['throughput']['output_tokens_per_s'])} output tokens/s, "
        f"{_number(values['throughput']['requests_per_s'], 2)} requests/s over {seconds:,.1f} s",
    )
    table.add_row("steps", f"{steps.num_steps:,}, {steps.busy_ns / 1e9:,.1f} s busy (simulated)")
    table.add_row(
        "balance (mean / max rank work)",
        f"{_share(steps.balance)} all work, {_share(steps.decode_balance)} decode alone",
    )
    table.add_row(
        "fewer requests than ranks", f"{_share(times.share_below(report.num_ranks))} of the time"
    )
    return table


def _load(path: Path, *, seed: int, conversation_gap_s: float) -> Trace:
    loaded = read_trace(path)
    if loaded.conversation_id is None:
        return loaded
    return stagger_conversations(
        loaded, stream(seed, "conversations"), mean_gap_s=conversation_gap_s
    )


def _replay(cluster: SimCluster, workload: Trace, options: dict[str, Any]) -> ReplayReport:
    total = workload.num_requests
    progress = Progress(
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with progress:
        task = progress.add_task("replay", total=total)
        stride = max(1, total // 200)
        report_done: Callable[[int], None] = lambda done: (  # noqa: E731
            progress.update(task, completed=done) if done % stride == 0 or done == total else None
        )
        return cluster.replay(workload, on_progress=report_done, options=options)


def _check_folder(path: Path | None) -> None:
    """Complain before minutes of work, not after."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: the folder {path.parent} does not exist")


def _dropped(rows: RowCounts) -> str:
    if not rows.num_dropped:
        return "dropped 0"
    reasons = f"zero output {rows.num_zero_output}, of these zero input {rows.num_zero_both}"
    only_input = rows.num_zero_input - rows.num_zero_both
    if only_input:
        reasons += f"; zero input alone {only_input}"
    return f"dropped {rows.num_dropped} ({reasons})"


def _quantiles(values: Quantiles) -> str:
    if values.num_samples == 0:
        return "no sample"
    return (
        f"mean {_number(values.mean_ms)}  p50 {_number(values.p50_ms)}  "
        f"p90 {_number(values.p90_ms)}  p99 {_number(values.p99_ms)} ms"
    )


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
