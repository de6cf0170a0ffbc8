"""Draw verify-length policies: throughput and budget by concurrency. Needs the `plot` extra."""

from collections.abc import Sequence
from pathlib import Path

from dsched.errors import ConfigError
from dsched.sim.spec import PolicyResult


def plot_spec(results: Sequence[PolicyResult], path: Path, *, title: str) -> None:
    """Write a PNG.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dsched[plot]'") from error

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    throughput, budget = figure.subplots(1, 2)
    for policy in dict.fromkeys(result.policy for result in results):
        own = [result for result in results if result.policy == policy]
        counts = [result.num_requests for result in own]
        throughput.plot(counts, [each.tokens_per_s for each in own], marker="o", label=policy)
        budget.plot(counts, [each.mean_verify_length for each in own], marker="o")
    throughput.set_ylabel("tokens/s of one rank (simulated)")
    budget.set_ylabel("draft tokens verified a request and step")
    for axes in (throughput, budget):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("requests a rank")
        axes.grid(visible=True, alpha=0.3)
    throughput.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
