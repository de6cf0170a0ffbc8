"""Checks and measures that all fits share."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FLAT_RELATIVE_RISE = 0.01
"""Times whose last value is at most this much above the first are flat: the rise is below what
repeated measurements of one shape differ by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitError:
    """How far predictions are from measurements, in percent of the measurement."""

    mape_pct: float
    """Mean."""
    p95_pct: float
    """95th percentile."""
    max_pct: float

    @classmethod
    def of(cls, predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> "FitError":
        """Compare two arrays of one shape; `measured` is positive."""
        errors = np.abs(predicted / measured - 1.0) * 100.0
        return cls(
            mape_pct=float(errors.mean()),
            p95_pct=float(np.percentile(errors, 95)),
            max_pct=float(errors.max()),
        )


def whole_numbers(values: ArrayLike, name: str, *, minimum: int) -> NDArray[np.int64]:
    """Return a flat array of token counts. Raises ValueError with the first wrong value."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be a flat list")
    wrong = ~(np.isfinite(array) & (array >= minimum) & (array == np.floor(array)))
    if wrong.any():
        raise ValueError(f"{name} holds {array[wrong][0]}; whole numbers >= {minimum} are needed")
    return array.astype(np.int64)


def positive_seconds(values: ArrayLike, name: str = "seconds") -> NDArray[np.float64]:
    """Return a flat array of step times. Raises ValueError with the first wrong value."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be a flat list")
    wrong = ~(np.isfinite(array) & (array > 0))
    if wrong.any():
        raise ValueError(f"{name} holds {array[wrong][0]}; step times are positive and finite")
    return array


def check_seconds(seconds: float) -> None:
    """Raise ValueError unless a step can have taken this long."""
    if not 0 < seconds < float("inf"):
        raise ValueError(f"seconds holds {seconds}; step times are positive and finite")


def check_lengths(**arrays: NDArray[np.generic]) -> int:
    """Return the length that all arrays share. Raises ValueError naming them if they differ."""
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"samples differ in length: {lengths}; all must have one length")
    return next(iter(lengths.values()))


def check_tiers(tiers: Iterable[int]) -> NDArray[np.int64]:
    """Return captured graph shapes as an array. Raises ValueError unless they increase."""
    grid = whole_numbers(list(tiers), "tiers", minimum=1)
    if not grid.size or (np.diff(grid) <= 0).any():
        raise ValueError("tiers must be strictly increasing, and at least one")
    return grid


def pad_to_tier(tokens: NDArray[np.int64], tiers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the graph shape that each batch ran in; above the last shape nothing is padded."""
    index = np.minimum(np.searchsorted(tiers, tokens), len(tiers) - 1)
    padded: NDArray[np.int64] = np.maximum(tiers[index], tokens)
    return padded


def last_slope(
    tokens: NDArray[np.int64] | NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[float, bool]:
    """Return the slope to use above the last of non-decreasing `values`, and whether they are flat.

    The slope of the last rise, but not less than the mean slope of the upper half: two last
    values that differ by noise only must not make all further tokens free. Flat values say
    nothing of tokens; above them the time grows in proportion to the tokens.
    """
    last = float(values[-1])
    if last <= float(values[0]) * (1.0 + FLAT_RELATIVE_RISE):
        return last / float(tokens[-1]), True
    below = int(np.flatnonzero(values < last)[-1])
    half = max(int(np.searchsorted(tokens, tokens[-1] / 2, side="right")) - 1, 0)
    slopes = [(last - float(values[i])) / float(tokens[-1] - tokens[i]) for i in (below, half)]
    return max(slopes), False
