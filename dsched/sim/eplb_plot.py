"""Draw placement planners: balance by window, and what it cost in moves. Needs `plot`."""

from collections.abc import Sequence
from pathlib import Path

from dsched.errors import ConfigError
from dsched.sim.eplb import PlannerScore


def plot_planners(scores: Sequence[PlannerScore], path: Path, *, title: str) -> None:
    """Write a PNG.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dsched[plot]'") from error

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    balance, moves = figure.subplots(1, 2)
    for score in scores:
        windows = range(1, len(score.next_by_window) + 1)
        balance.plot(windows, score.next_by_window, marker="o", label=score.name)
    balance.set(xlabel="window", ylabel="balance on the next window (mean / heaviest)")
    balance.legend()
    moves.barh([score.name for score in scores], [score.moves_per_layer for score in scores])
    moves.set(xlabel="moves a layer and plan")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
