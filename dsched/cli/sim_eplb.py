"""`dsched sim eplb`: compare expert placement planners on generated or recorded load, simulated."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from dsched.cli.output import write_json
from dsched.clock import SystemClock
from dsched.drivers.sglang.eplb import sglang_planner
from dsched.drivers.vllm.eplb import vllm_planner
from dsched.eplb import PlacementOptions, Planner, read_load_file
from dsched.errors import ConfigError
from dsched.sim.eplb import (
    LoadShape,
    PlannerScore,
    compare_planners,
    dsched_planner,
    generate_expert_load,
    greedy_planner,
)


def eplb(
    *,
    load: Annotated[
        Path | None,
        typer.Option("--load", help="Load recorded by LoadRecorder; default: generated."),
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=1, help="MoE layers.")] = 58,
    experts: Annotated[int, typer.Option("--experts", min=2, help="Logical experts.")] = 256,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Physical expert slots.")] = 288,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="EP ranks.")] = 32,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Nodes the ranks are on.")] = 4,
    windows: Annotated[int, typer.Option("--windows", min=3, help="Load windows to generate.")] = 6,
    drift: Annotated[
        float, typer.Option("--drift", min=0.0, help="Change of log popularity a window.")
    ] = 0.05,
    dominating: Annotated[
        bool,
        typer.Option("--dominating", help="One expert a layer takes 10-30 % (top-1 routing)."),
    ] = False,
    trigger: Annotated[
        float, typer.Option("--trigger", min=0.0, help="Overload that starts moves.")
    ] = 0.03,
    stop: Annotated[
        float, typer.Option("--stop", min=0.0, help="Overload that ends them; at most trigger.")
    ] = 0.02,
    max_moves: Annotated[
        int | None, typer.Option("--max-moves", min=0, help="Moves a layer and plan.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the generated load.")] = 1,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the results here; - for standard output.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a PNG here.")] = None,
) -> None:
    """Compare expert placements: balance, moves and solve time, window by window.

    `dsched` starts from the placement in use; `dsched fresh` plans anew each time; `greedy` is
    DeepSeek's published method, rewritten. vLLM's and SGLang's own planners take part if dsched
    runs in an environment that has them.
    """
    console = Console(stderr=json is not None and str(json) == "-")
    counts = _windows(
        load,
        layers=layers,
        experts=experts,
        windows=windows,
        drift=drift,
        dominating=dominating,
        seed=seed,
    )
    try:
        options = PlacementOptions(trigger=trigger, stop=stop)
        planners: dict[str, Planner] = {
            name: dsched_planner(
                num_slots=slots,
                num_ranks=ranks,
                num_nodes=nodes,
                options=options,
                max_moves=max_moves,
                from_current=from_current,
            )
            for name, from_current in (("dsched", True), ("dsched fresh", False))
        }
        planners["greedy"] = greedy_planner(num_slots=slots, num_ranks=ranks)
        for name, find in (("vllm", vllm_planner), ("sglang", sglang_planner)):
            engine_planner = find(num_slots=slots, num_ranks=ranks)
            if engine_planner is not None:
                planners[name] = engine_planner
        with console.status("planning (the first run compiles for a minute)"):
            scores = compare_planners(planners, counts, clock=SystemClock(), num_nodes=nodes)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shape = f"{counts.shape[1]} x {counts.shape[2]} experts, {slots} slots on {ranks} ranks"
    if json is not None:
        write_json(
            {
                "load": str(load) if load else f"generated, seed {seed}",
                "case": shape,
                "planners": [asdict(score) for score in scores],
            },
            json,
        )
    if plot is not None:
        from dsched.sim.eplb_plot import plot_planners

        plot_planners(scores, plot, title=f"Simulated: {shape}")
    console.print(_table(scores, shape))


def _windows(
    load: Path | None,
    *,
    layers: int,
    experts: int,
    windows: int,
    drift: float,
    dominating: bool,
    seed: int,
) -> NDArray[np.int64]:
    if load is not None:
        _, counts = read_load_file(load)
        return counts
    shape = LoadShape(
        num_layers=layers,
        num_experts=experts,
        drift=drift,
        dominating=(0.1, 0.3) if dominating else None,
    )
    return generate_expert_load(shape, num_windows=windows, seed=seed)


def _table(scores: list[PlannerScore], shape: str) -> Table:
    table = Table(
        title=f"Expert placements, simulated: {shape}",
        caption="balance: mean over heaviest rank load, 1 is even; moves a layer and plan",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("planner")
    for column in ("balance", "worst", "next", "worst", "next, weighted", "moves", "far", "ms"):
        table.add_column(column, justify="right")
    for score in scores:
        table.add_row(
            score.name,
            f"{score.balance_avg:.4f}",
            f"{score.balance_worst:.4f}",
            f"{score.next_balance_avg:.4f}",
            f"{score.next_balance_worst:.4f}",
            f"{score.next_weighted_avg:.4f}",
            f"{score.moves_per_layer:.1f}",
            f"{score.cross_node_moves_per_layer:.1f}",
            f"{score.solve_ms:.2f}",
        )
    return table
