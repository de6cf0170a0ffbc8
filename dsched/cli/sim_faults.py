"""`dsched sim faults`: serve while engines crash and freeze and messages get lost."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dsched.cli.output import write_json
from dsched.errors import ConfigError
from dsched.sim.faults import FaultPlan, FaultReport, SafetyError, run_faults
from dsched.sim.recording import recording
from dsched.trace import Recorder

EXIT_UNSAFE = 1


def faults(
    *,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the run.")] = 0,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="A..B", help="Run all seeds from A to B instead."),
    ] = None,
    engines: Annotated[int, typer.Option("--engines", min=1, help="Engines.")] = 3,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="DP ranks of each.")] = 2,
    prefill_engines: Annotated[
        int,
        typer.Option("--prefill-engines", min=0, help="More engines, that compute the prompts."),
    ] = 0,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests a seed.")] = 40,
    faults_per_s: Annotated[
        float, typer.Option("--faults-per-s", min=0, help="Crashes, freezes and so on.")
    ] = 1.0,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write every seed's result here; - for stdout.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            "--record", help="Write every decision of --seed here, for explain and replay."
        ),
    ] = None,
) -> None:
    """Serve on simulated engines while everything breaks, and check every promise after each tick.

    Engines crash, freeze, slow down, lose ranks; connections break; load reports are lost, late,
    repeated and reordered; leases run out all at once; operators drain; clients leave. Then faults
    stop and everything must finish. Status 1 and a line with the seed when a promise was broken.
    """
    plan = FaultPlan(
        num_engines=engines,
        num_prefill_engines=prefill_engines,
        num_ranks=ranks,
        num_requests=requests,
        faults_per_s=faults_per_s,
    )
    wanted = parse_seeds(seeds) if seeds is not None else range(seed, seed + 1)
    if record is not None and seeds is not None:
        raise ConfigError("--record takes one --seed, not --seeds")
    reports: list[FaultReport] = []
    broken: list[str] = []
    console = Console(stderr=json is not None and str(json) == "-")
    with (
        console.status("simulating") as status,
        recording(record, source="sim faults", seed=seed, options=asdict(plan)) as recorder,
    ):
        for report in _run_all(wanted, plan, broken, recorder):
            reports.append(report)
            status.update(f"simulating: {len(reports)} of {len(wanted)} seeds")
    if json is not None:
        seeds_told = [asdict(report) for report in reports]
        write_json({"seeds": seeds_told, "broken": broken}, json)
    console.print(_table(reports))
    for line in broken:
        console.print(line, highlight=False, markup=False, soft_wrap=True, style="red")
    if broken:
        raise typer.Exit(EXIT_UNSAFE)


def parse_seeds(text: str) -> range:
    """Read `A..B`, both included.

    >>> list(parse_seeds("3..5"))
    [3, 4, 5]
    """
    found = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--seeds {text!r} is not A..B with A not above B")
    return range(int(found[1]), int(found[2]) + 1)


def _run_all(
    seeds: range, plan: FaultPlan, broken: list[str], recorder: Recorder | None
) -> Iterator[FaultReport]:
    for seed in seeds:
        try:
            yield run_faults(seed, plan, recorder=recorder)
        except SafetyError as error:
            broken.append(f"{error}. Again: dsched sim faults --seed {seed}")


def _table(reports: list[FaultReport]) -> Table:
    table = Table(title=f"Simulated faults, {len(reports)} seeds kept every promise")
    for name in ("what", "sum"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name in (
        "num_requests",
        "num_finished",
        "num_refused",
        "num_unserved",
        "num_cancelled",
        "num_tokens",
        "num_tokens_lost",
        "num_tokens_repeated",
        "num_fenced_tokens",
    ):
        total = sum(getattr(report, name) for report in reports)
        table.add_row(name.removeprefix("num_").replace("_", " "), f"{total:,}")
    for kind in ("handoffs", "prefills", "faults"):
        counts: dict[str, int] = {}
        for report in reports:
            for name, count in getattr(report, kind).items():
                counts[name] = counts.get(name, 0) + count
        for name, count in sorted(counts.items()):
            table.add_row(f"{kind.removesuffix('s')}: {name}", f"{count:,}")
    if reports:
        table.add_row("longest gap, s", f"{max(report.max_gap_s for report in reports):.2f}")
    if len(reports) == 1:
        table.add_row("digest", reports[0].digest[:16])
    return table
