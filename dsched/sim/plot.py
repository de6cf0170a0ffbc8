"""Draw a replay: latencies, load over time, work of each rank. Needs the `plot` extra."""

from pathlib import Path

import numpy as np

from dsched.errors import ConfigError
from dsched.sim.report import ReplayReport
from dsched.sim.traces import NS_PER_MS, NS_PER_S


def plot_replay(report: ReplayReport, path: Path) -> None:
    """Write a PNG.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dsched[plot]'") from error

    times = report.times
    figure = Figure(figsize=(10, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"Simulated: {report.source}, {report.num_engines} x {report.num_dp_ranks} DP ranks, "
        f"{report.policy}, seed {report.seed}"
    )
    (ttft, tpot), (load, ranks) = figure.subplots(2, 2)
    for axes, values_ns, name, scale in (
        (ttft, times.ttft_ns, "TTFT", "log"),
        (tpot, times.tpot_ns, "TPOT", "linear"),
    ):
        values_ms = np.sort(np.asarray(values_ns, dtype=np.float64)) / NS_PER_MS
        if len(values_ms):
            axes.plot(values_ms, np.arange(1, len(values_ms) + 1) / len(values_ms))
            axes.set_xscale(scale)
        axes.set_xlabel(f"{name} (ms, simulated)")
        axes.set_ylabel("share of requests")
        axes.grid(visible=True, alpha=0.3)

    events = np.concatenate((times.arrival_ns, times.end_ns))
    change = np.repeat([1, -1], len(times.arrival_ns))
    order = np.argsort(events, kind="stable")
    load.step((events[order] - events[order[0]]) / NS_PER_S, np.cumsum(change[order]), where="post")
    load.axhline(report.num_ranks, color="grey", linestyle=":", label="one request a rank")
    load.set_xlabel("time (s, simulated)")
    load.set_ylabel("requests in the system")
    load.legend()

    served = np.bincount(times.rank[times.rank >= 0], minlength=report.num_ranks)
    ranks.bar(np.arange(report.num_ranks), served)
    ranks.set_xlabel("DP rank")
    ranks.set_ylabel("requests")
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
