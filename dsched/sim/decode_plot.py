"""Pictures of policy comparisons; needs the `plot` extra."""

from collections.abc import Sequence
from pathlib import Path

from dsched.errors import ConfigError
from dsched.sim.decode import DecodeResult


def plot_decode(results: Sequence[DecodeResult], path: Path, *, title: str) -> None:
    """Write a bar chart of the throughput share of each policy, with its bound, to `path`.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dsched[plot]'") from error
    figure = Figure(figsize=(8, 0.4 * len(results) + 1.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [result.policy for result in results]
    shares = [result.share_pct for result in results]
    axes.barh(names, shares, color="#4878a8")
    axes.plot([result.bound_pct for result in results], names, "k|", markersize=14)
    for row, share in enumerate(shares):
        axes.text(share, row, f" {share:.1f}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 109)
    axes.set_xlabel(
        "throughput, % of the same load spread perfectly (simulated); bar: bound for whole requests"
    )
    axes.set_title(title)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
