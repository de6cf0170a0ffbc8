"""`dsched sim spec`: compare verify lengths of speculative decoding, simulated."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from dsched.cli.output import write_json
from dsched.costs import StepCostCurve
from dsched.errors import ConfigError
from dsched.sim.spec import (
    ACCEPTANCE,
    PAPER_FITS,
    PolicyResult,
    SpecCost,
    compare_policies,
    paper_cost,
)

DEFAULT_CONCURRENCIES = (8, 16, 32, 64, 128, 256)


def spec(
    *,
    curve: Annotated[
        str,
        typer.Option(
            "--curve",
            help=f"Step cost: one of {', '.join(PAPER_FITS)}, or a JSON file of dsched, SGLang or "
            "TensorRT-LLM.",
        ),
    ] = "v4flash-mixed",
    requests: Annotated[
        list[int] | None,
        typer.Option("--requests", min=1, help="Requests a rank; repeat for several."),
    ] = None,
    draft_length: Annotated[
        int, typer.Option("--draft-length", min=1, max=7, help="Draft tokens a step.")
    ] = 5,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Ranks that step together, for `group`.")
    ] = 8,
    mix: Annotated[
        list[str] | None,
        typer.Option("--mix", help=f"Kinds of request: {', '.join(ACCEPTANCE)}; repeat."),
    ] = None,
    draft_ms: Annotated[
        float | None,
        typer.Option("--draft-ms", min=0.0, help="Time to draft. [the curve's own, else 0]"),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=20, help="Steps of each run.")] = 200,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs with different requests.")] = 3,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results here; - for standard output.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG here.")] = None,
) -> None:
    """Compare verify lengths on simulated requests: none, fixed, dsched's, and what is possible.

    Confidences and acceptance follow the DSpark paper's Fig. 2. `async` is what dsched plans on
    one rank, `oracle` knows what will be accepted. `alone` and `group` are ranks that wait for
    each other, each with its own budget or one for all.
    """
    console = Console(stderr=json is not None and str(json) == "-")
    cost = _read_cost(curve, draft_ms=draft_ms)
    mixes = tuple(mix) if mix else cost.mixes
    unknown = [name for name in mixes if name not in ACCEPTANCE]
    if unknown:
        raise ConfigError(f"--mix: {unknown[0]!r} is none of {', '.join(ACCEPTANCE)}")
    with console.status("simulating (the first run compiles for a few seconds)"):
        results = [
            result
            for count in requests or DEFAULT_CONCURRENCIES
            for result in compare_policies(
                cost,
                num_requests=count,
                num_positions=draft_length,
                num_ranks=ranks,
                num_steps=steps,
                num_seeds=seeds,
                mixes=mixes,
            )
        ]
    if json is not None:
        write_json(_as_json(results, cost, mixes, draft_length, ranks), json)
    if plot is not None:
        from dsched.sim.spec_plot import plot_spec

        plot_spec(results, plot, title=f"Simulated: {cost.name}, {'+'.join(mixes)}")
    console.print(_table(results, cost, mixes))


def _read_cost(curve: str, *, draft_ms: float | None) -> SpecCost:
    if curve in PAPER_FITS:
        cost = paper_cost(curve)
    else:
        path = Path(curve)
        if not path.is_file():
            raise ConfigError(f"--curve: {curve!r} is no file and none of {', '.join(PAPER_FITS)}")
        try:
            step_cost = StepCostCurve.from_json(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        cost = SpecCost.of_curve(path.stem, step_cost)
    return cost if draft_ms is None else cost.with_draft_seconds(draft_ms / 1e3)


def _table(results: list[PolicyResult], cost: SpecCost, mixes: tuple[str, ...]) -> Table:
    policies = list(dict.fromkeys(result.policy for result in results))
    table = Table(
        title=f"Simulated tokens/s of one rank on {cost.name}, {'+'.join(mixes)}",
        caption="R: requests a rank; in brackets: draft tokens verified a request and step",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("R", justify="right")
    for policy in policies:
        table.add_column(policy.removesuffix("hronous"), justify="right", no_wrap=True)
    by_case = {(result.num_requests, result.policy): result for result in results}
    for count in dict.fromkeys(result.num_requests for result in results):
        cells = []
        for policy in policies:
            result = by_case[count, policy]
            cells.append(f"{result.tokens_per_s:,.0f}\n({result.mean_verify_length:.1f})")
        table.add_row(str(count), *cells)
    return table


def _as_json(
    results: list[PolicyResult],
    cost: SpecCost,
    mixes: tuple[str, ...],
    draft_length: int,
    num_ranks: int,
) -> dict[str, Any]:
    return {
        "curve": cost.name,
        "mixes": list(mixes),
        "draft_length": draft_length,
        "ranks": num_ranks,
        "results": [
            {
                "requests": result.num_requests,
                "policy": result.policy,
                "tokens_per_s": result.tokens_per_s,
                "spread": result.spread,
                "mean_verify_length": result.mean_verify_length,
            }
            for result in results
        ],
    }
