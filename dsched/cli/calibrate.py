"""`dsched calibrate`: cost models from measured steps, from a live engine, or from a named GPU.

Fits both models, prints how far they are from samples that the fit did not see, and writes the file
that `DSCHED_COSTS` takes.
"""

import asyncio
import csv
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from dsched.cli.calibrate_sources import StepSamples, aiconfigurator_samples, sweep_engine
from dsched.costs import DecodeCostModel, PrefillCostModel
from dsched.costs.accuracy import NUM_FOLDS, Fit, held_out_error
from dsched.costs.presets import write_cost_file
from dsched.errors import ConfigError

PREFILL_COLUMNS = ("chunk", "past", "step_ms")
DECODE_COLUMNS = ("batch", "kv", "step_ms")
"""`kv` is KV tokens a request."""
COLUMN_ALIASES = {"batch": ("batch_per_gpu",)}


@dataclass(slots=True, kw_only=True)
class CalibrationSamples:
    """What was measured, of both kinds."""

    prefill: StepSamples = field(default_factory=StepSamples)
    """Chunk, past, seconds."""
    decode: StepSamples = field(default_factory=StepSamples)
    """Batch, KV tokens of the whole batch, seconds."""


def calibrate(
    prefill_csv: Annotated[
        Path | None, typer.Option("--prefill", help="CSV with columns chunk, past, step_ms.")
    ] = None,
    decode_csv: Annotated[
        Path | None,
        typer.Option("--decode", help="CSV with columns batch, kv (tokens a request), step_ms."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="Use only rows with COLUMN=VALUE; repeatable.", metavar="C=V"),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Sweep a live vLLM engine at this URL.")
    ] = None,
    aic_model: Annotated[
        str | None,
        typer.Option("--aic-model", help="Model that aiconfigurator knows, by its id."),
    ] = None,
    aic_gpu: Annotated[
        str, typer.Option("--aic-gpu", help="System that aiconfigurator knows.")
    ] = "h200_sxm",
    aic_backend: Annotated[
        str, typer.Option("--aic-backend", help="Engine that aiconfigurator knows.")
    ] = "sglang",
    aic_ep: Annotated[int, typer.Option("--aic-ep", help="Expert-parallel size.", min=1)] = 8,
    topk: Annotated[
        int | None, typer.Option("--topk", help="k of a model with sparse attention.", min=1)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the models here (JSON).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw predicted over measured into this image.")
    ] = None,
) -> None:
    """Fit cost models and tell how well they predict."""
    sources = [prefill_csv or decode_csv, engine, aic_model]
    if sum(source is not None for source in sources) != 1:
        raise ConfigError(
            "give one source: --prefill and/or --decode files, --engine URL, or --aic-model NAME"
        )
    if engine is not None:
        samples = CalibrationSamples()
        samples.prefill, samples.decode = asyncio.run(sweep_engine(engine))
    elif aic_model is not None:
        samples = CalibrationSamples()
        samples.prefill, samples.decode = aiconfigurator_samples(
            aic_model, aic_gpu, aic_ep, backend=aic_backend
        )
    else:
        samples = _read_files(prefill_csv, decode_csv, parse_conditions(where or []))

    fits = _fits(topk)
    console = Console()
    console.print(_error_table(samples, fits))
    models = _fit_all(samples, fits)
    for name, model in models.items():
        if model.is_flat:
            console.print(f"{name}: the times do not rise with the tokens; their price is a guess")
    if out is not None:
        _write(out, models)
        console.print(f"wrote {out}")
    if plot is not None:
        _draw(plot, samples, models)
        console.print(f"drew {plot}")


Model = PrefillCostModel | DecodeCostModel


def parse_conditions(texts: list[str]) -> dict[str, str]:
    """Read `column=value` conditions. Raises ConfigError for one without `=`."""
    conditions = {}
    for text in texts:
        column, sign, value = text.partition("=")
        if not sign or not column:
            raise ConfigError(f"--where {text!r} is not of the form COLUMN=VALUE")
        conditions[column] = value
    return conditions


def read_csv(path: Path, columns: tuple[str, str, str], conditions: dict[str, str]) -> StepSamples:
    """Return the rows of `path` that meet `conditions`, times in seconds.

    Raises ConfigError, with the line, for a missing column and for what is not a number.
    """
    rows: list[tuple[int, int, float]] = []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = [_find_column(path, reader.fieldnames or [], column) for column in columns]
            for missing in conditions.keys() - set(reader.fieldnames or []):
                raise ConfigError(f"{path}: no column {missing!r} for --where")
            for row in reader:
                if any(row[column] != value for column, value in conditions.items()):
                    continue
                try:
                    first, second, time_ms = (float(row[name]) for name in names)
                except (TypeError, ValueError) as error:
                    raise ConfigError(f"{path}:{reader.line_num}: {error}") from error
                rows.append((int(first), int(second), time_ms / 1e3))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not rows:
        raise ConfigError(f"{path}: no rows match")
    return StepSamples.of(rows)


def _find_column(path: Path, names: Sequence[str], column: str) -> str:
    for name in (column, *COLUMN_ALIASES.get(column, ())):
        if name in names:
            return str(name)
    raise ConfigError(f"{path}: no column {column!r}; it has {', '.join(names) or 'none'}")


def _read_files(
    prefill_csv: Path | None, decode_csv: Path | None, conditions: dict[str, str]
) -> CalibrationSamples:
    samples = CalibrationSamples()
    if prefill_csv is not None:
        samples.prefill = read_csv(prefill_csv, PREFILL_COLUMNS, conditions)
    if decode_csv is not None:
        decode = read_csv(decode_csv, DECODE_COLUMNS, conditions)
        samples.decode = StepSamples(
            tokens=decode.tokens, context=decode.tokens * decode.context, seconds=decode.seconds
        )
    return samples


def _fits(topk: int | None) -> dict[str, Fit]:
    def prefill(
        tokens: NDArray[np.int64], past: NDArray[np.int64], seconds: NDArray[np.float64]
    ) -> PrefillCostModel:
        return PrefillCostModel.fit(tokens, past, seconds, topk_tokens=topk)

    def decode(
        tokens: NDArray[np.int64], kv: NDArray[np.int64], seconds: NDArray[np.float64]
    ) -> DecodeCostModel:
        return DecodeCostModel.fit(tokens, kv, seconds)

    return {"prefill": prefill, "decode": decode}


def _each(samples: CalibrationSamples) -> dict[str, StepSamples]:
    kinds = {"prefill": samples.prefill, "decode": samples.decode}
    return {name: each for name, each in kinds.items() if each.size}


def _error_table(samples: CalibrationSamples, fits: dict[str, Fit]) -> Table:
    table = Table(title=f"error on samples that the fit did not see ({NUM_FOLDS} folds)")
    for name in ("model", "samples", "mean %", "p95 %", "largest %"):
        table.add_column(name, justify="left" if name == "model" else "right")
    for name, each in _each(samples).items():
        try:
            error = held_out_error(fits[name], each.tokens, each.context, each.seconds)
        except ValueError as problem:
            table.add_row(name, str(each.size), str(problem), "", "")
            continue
        table.add_row(
            name,
            str(each.size),
            f"{error.mape_pct:.1f}",
            f"{error.p95_pct:.1f}",
            f"{error.max_pct:.1f}",
        )
    return table


def _fit_all(samples: CalibrationSamples, fits: dict[str, Fit]) -> dict[str, Model]:
    models: dict[str, Model] = {}
    for name, each in _each(samples).items():
        try:
            model = fits[name](each.tokens, each.context, each.seconds)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
        assert isinstance(model, PrefillCostModel | DecodeCostModel)
        models[name] = model
    return models


def _write(path: Path, models: dict[str, Model]) -> None:
    prefill, decode = models.get("prefill"), models.get("decode")
    if not isinstance(prefill, PrefillCostModel) or not isinstance(decode, DecodeCostModel):
        raise ConfigError(f"--out needs prefill and decode samples; only {', '.join(models)} given")
    try:
        write_cost_file(path, prefill, decode)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _draw(path: Path, samples: CalibrationSamples, models: dict[str, Model]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'dsched[plot]'") from error
    figure = Figure(figsize=(5 * len(models), 4.5), layout="constrained")
    for axes, (name, model) in zip(
        figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True
    ):
        each = _each(samples)[name]
        predicted = [
            model.predict(int(tokens), int(context)) * 1e3
            for tokens, context in zip(each.tokens, each.context, strict=True)
        ]
        axes.loglog(each.seconds * 1e3, predicted, ".", markersize=4)
        ends = [float(each.seconds.min() * 1e3), float(each.seconds.max() * 1e3)]
        axes.plot(ends, ends, linewidth=0.8, color="gray")
        axes.set(title=name, xlabel="measured, ms", ylabel="predicted, ms")
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
