"""The one form of all benchmark results: rows on the screen, and the same rows as JSON."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure beside its target and its peers."""

    metric: str
    """Name with its unit last, e.g. `full_plan_p50_us`."""
    case: str
    ours: float
    spread: float | None = None
    """Half of the distance between the quartiles of the repeats, in the metric's unit."""
    better: Literal["lower", "higher"]
    target: float | None = None
    """The value to reach; `None` where the aim is to beat the peers."""
    peers: Mapping[str, float] = field(default_factory=dict)


def arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the two options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="about a minute on two cores")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    return parser


def half_quartile_range(values: Sequence[float]) -> float | None:
    """Return the spread of repeats, `None` for fewer than two.

    >>> half_quartile_range([1.0, 2.0, 3.0, 4.0, 5.0])
    1.0
    """
    if len(values) < 2:
        return None
    ordered = sorted(values)

    def quantile(share: float) -> float:
        position = share * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    return (quantile(0.75) - quantile(0.25)) / 2


def report(benchmark: str, rows: Sequence[Row], *, seeds: int, json_path: Path | None) -> None:
    """Print the rows as a table and, where asked, write them to `json_path`."""
    peers = sorted({name for row in rows for name in row.peers})
    table = Table(title=benchmark)
    for name in ("metric", "case"):
        table.add_column(name)
    for name in ("ours", "spread", "target", *peers):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.metric,
            row.case,
            _text(row.ours),
            _text(row.spread),
            f"{'≤' if row.better == 'lower' else '≥'} {_text(row.target)}" if row.target else "",
            *(_text(row.peers.get(name)) for name in peers),
        )
    Console().print(table)
    if json_path is not None:
        document = {"benchmark": benchmark, "seeds": seeds, "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(document, indent=1) + "\n")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
