"""How long a step takes that computes B tokens: the step cost curve.

A step is padded up to a captured graph shape, so its time is a staircase: `seconds(B)` is the
value of the first tier that is not below B (looking down instead makes the last tokens before a
riser look free). Above the last tier the time grows with the slope of the last rise.

Samples are noisy, so the staircase is fitted: repeats are merged by their median, samples are
pooled into their tier, and the tiers are made non-decreasing. Samples that do not rise at all
cannot tell one token from a hundred. Such a curve says so (`is_flat`), and beyond its last tier
it charges in proportion to the tokens instead of nothing.

An optional second part costs per request in the batch (a draft model's step). The tables of
SGLang (`SpsCostTable`, `SpsAdditiveCostTable`) and of TensorRT-LLM (`SpsCostTable`) are read and
written; their lookups go down to the probe (SGLang) or in a straight line between probes
(SGLang additive, TensorRT-LLM), and a table that we write gives those engines our values at
every whole number of tokens.

Times are whole nanoseconds inside, so that every process compares the same numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, overload

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.costs.isotonic import isotonic
from dsched.costs.samples import (
    check_lengths,
    check_tiers,
    last_slope,
    pad_to_tier,
    positive_seconds,
    whole_numbers,
)
from dsched.costs.tables import (
    CurveTable,
    DschedTable,
    SglangAdditiveTable,
    SglangTable,
    TrtllmTable,
    read_table,
)

NS_PER_SECOND = 1_000_000_000
NS_PER_MS = 1_000_000
MAX_EXTRA_NS = 1 << 62
"""Longest time above the last tier: 146 years. Beyond, a whole number of 64 bits turns negative."""

MAX_DENSE_TIERS = 65_536
"""Tiers that a straight-line table is expanded to, one a token; longer tables get wider tiers."""


def _empty() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


class CurveArrays(NamedTuple):
    """A curve as numba kernels take it; see `dsched.costs.kernels.curve_ns`."""

    tier_tokens: NDArray[np.int64]
    """[T] strictly increasing."""
    tier_ns: NDArray[np.int64]
    """[T] non-decreasing."""
    slope_ns: float
    """Nanoseconds a token above the last tier."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepCostCurve:
    """Step time as a function of the tokens in the batch: a non-decreasing staircase.

    Made by `from_samples` or from an engine's table; immutable. Takes ownership of its arrays.
    """

    tier_tokens: NDArray[np.int64]
    """[T] largest token count of each tier, strictly increasing, at least 1."""
    tier_ns: NDArray[np.int64]
    """[T] step time of each tier, positive, non-decreasing."""
    slope_ns: float
    """Nanoseconds a token above the last tier; positive."""
    is_flat: bool = False
    """The samples do not rise with the tokens: do not conclude that tokens are free."""
    misfit: float = 0.0
    """Largest relative distance of a sample from the curve: how much the samples contradict."""
    overhead_requests: NDArray[np.int64] = field(default_factory=_empty)
    """[G] request counts at which the part that costs per request is known; may be empty."""
    overhead_ns: NDArray[np.int64] = field(default_factory=_empty)
    """[G] that part's time; straight lines between, constant outside."""

    def __post_init__(self) -> None:
        _check_points(self.tier_tokens, self.tier_ns, "tier")
        if not self.tier_tokens.size:
            raise ValueError("a step cost curve needs at least one tier")
        if self.tier_ns[0] <= 0:
            raise ValueError(f"tier time {self.tier_ns[0]} ns is not positive")
        if not (np.isfinite(self.slope_ns) and self.slope_ns > 0):
            raise ValueError(f"slope_ns is {self.slope_ns}; tokens are never free")
        _check_points(self.overhead_requests, self.overhead_ns, "overhead")
        for array in (self.tier_tokens, self.tier_ns, self.overhead_requests, self.overhead_ns):
            array.flags.writeable = False

    @classmethod
    def from_samples(
        cls,
        num_tokens: ArrayLike,
        seconds: ArrayLike,
        *,
        tiers: Iterable[int] | None = None,
    ) -> "StepCostCurve":
        """Fit the staircase to measured steps.

        `num_tokens` [N] whole numbers >= 1 and `seconds` [N] positive, in any order, with or
        without repeats; at least two different token counts. `tiers` are the graph shapes that
        the engine captured (default: the sampled token counts). A tier without a sample lies on
        the straight line between its sampled neighbours.

        Raises ValueError for anything else, with the value.

        >>> curve = StepCostCurve.from_samples([1, 2, 4, 8], [0.010, 0.0105, 0.0115, 0.0135])
        >>> curve.seconds(3), curve.seconds(16)
        (0.0115, 0.0175)
        """
        tokens, times = _check_samples(num_tokens, seconds)
        sample_tiers = tokens if tiers is None else pad_to_tier(tokens, check_tiers(tiers))
        known, index = np.unique(sample_tiers, return_inverse=True)
        medians = np.array([np.median(times[index == i]) for i in range(len(known))])
        fitted = isotonic(medians, np.bincount(index).astype(np.float64))
        if len(known) < 2:
            raise ValueError(
                f"all {len(tokens)} samples fall into one tier ({known[0]} tokens); "
                "a curve needs samples of at least two tiers"
            )
        slope, is_flat = last_slope(known, fitted)
        misfit = float(np.max(np.abs(times / fitted[index] - 1.0)))
        grid = known if tiers is None else np.union1d(known, check_tiers(tiers))
        values = np.interp(grid, known, fitted)
        beyond = grid > known[-1]
        values[beyond] += (grid[beyond] - known[-1]) * slope
        return cls(
            tier_tokens=grid,
            tier_ns=_to_ns(values),
            slope_ns=slope * NS_PER_SECOND,
            is_flat=is_flat,
            misfit=misfit,
        )

    @classmethod
    def fit(
        cls, num_tokens: ArrayLike, seconds: ArrayLike, *, tiers: Iterable[int] | None = None
    ) -> "StepCostCurve":
        """`from_samples` under the name that all cost models share."""
        return cls.from_samples(num_tokens, seconds, tiers=tiers)

    @overload
    def seconds(self, num_tokens: int, num_requests: int | None = None) -> float: ...
    @overload
    def seconds(
        self, num_tokens: NDArray[np.integer[Any]], num_requests: int | None = None
    ) -> NDArray[np.float64]: ...
    def seconds(
        self, num_tokens: int | NDArray[np.integer[Any]], num_requests: int | None = None
    ) -> float | NDArray[np.float64]:
        """Return the time of a step of `num_tokens` (>= 1), a number or an array of any shape.

        `num_requests` adds the part that costs per request, if the curve has one.
        """
        tokens = np.asarray(num_tokens, dtype=np.int64)
        if tokens.size and tokens.min() < 1:
            raise ValueError(f"a step computes at least 1 token, not {tokens.min()}")
        ns = self._ns(tokens) + (0 if num_requests is None else self.overhead(num_requests))
        return float(ns) / NS_PER_SECOND if tokens.ndim == 0 else ns / NS_PER_SECOND

    predict = seconds

    def overhead(self, num_requests: int) -> int:
        """Return the nanoseconds that `num_requests` add on top of their tokens."""
        if not self.overhead_requests.size:
            return 0
        return round(float(np.interp(num_requests, self.overhead_requests, self.overhead_ns)))

    def arrays(self) -> CurveArrays:
        """Return the staircase as numba kernels take it."""
        return CurveArrays(self.tier_tokens, self.tier_ns, self.slope_ns)

    def table_ns(self, max_tokens: int) -> NDArray[np.int64]:
        """Return [max_tokens + 1] nanoseconds for 0..max_tokens tokens; entry 0 is 0."""
        table = self._ns(np.arange(max_tokens + 1, dtype=np.int64))
        table[0] = 0
        return table

    def observe(self, num_tokens: int, seconds: float, *, gain: float = 0.05) -> "StepCostCurve":
        """Return the curve moved by `gain` (0..1) towards one measured step.

        The tier that ran moves; the neighbours follow only as far as monotony asks. A step
        beyond the last tier moves the slope.
        """
        tokens, times = _check_samples([num_tokens], [seconds], min_samples=1)
        if not 0.0 < gain <= 1.0:
            raise ValueError(f"gain is {gain}; it must be in (0, 1]")
        index = int(np.searchsorted(self.tier_tokens, tokens[0]))
        measured_ns = float(times[0]) * NS_PER_SECOND
        if index == len(self.tier_tokens):
            extra_tokens = int(tokens[0] - self.tier_tokens[-1])
            slope = (measured_ns - int(self.tier_ns[-1])) / extra_tokens
            new_slope = self.slope_ns + gain * (slope - self.slope_ns)
            # A step that was faster than the last tier says nothing about the slope above it.
            return replace(self, slope_ns=new_slope) if slope > 0 else self
        ns = self.tier_ns.astype(np.float64)
        ns[index] += gain * (measured_ns - ns[index])
        np.minimum(ns[:index], ns[index], out=ns[:index])
        np.maximum(ns[index:], ns[index], out=ns[index:])
        return replace(self, tier_ns=np.rint(ns).astype(np.int64))

    def to_json(self) -> str:
        """Return the curve in dsched's own form; `from_json` gives it back unchanged."""
        return _encode(
            DschedTable(
                tier_tokens=self.tier_tokens.tolist(),
                tier_ns=self.tier_ns.tolist(),
                slope_ns=self.slope_ns,
                is_flat=self.is_flat,
                misfit=self.misfit,
                overhead_requests=self.overhead_requests.tolist(),
                overhead_ns=self.overhead_ns.tolist(),
            )
        )

    def to_sglang(self) -> str:
        """Return SGLang's `SpsCostTable`. Its part that costs per request is left out: the form
        has no place for it."""
        tokens, ns = self._steps()
        return _encode(
            SglangTable(
                sample_batch_tokens=tokens,
                sample_steps_per_sec=[NS_PER_SECOND / value for value in ns],
                max_batch_tokens=tokens[-1],
            )
        )

    def to_sglang_additive(self) -> str:
        """Return SGLang's `SpsAdditiveCostTable`."""
        tokens, ns = self._steps()
        # The form wants at least one probe of the part that costs per request.
        requests = self.overhead_requests.tolist() or [1]
        overhead = (self.overhead_ns / NS_PER_SECOND).tolist() or [0.0]
        return _encode(
            SglangAdditiveTable(
                bias_seconds=0.0,
                bs_probes=requests,
                alpha_seconds=overhead,
                m_probes=tokens,
                theta_seconds=[value / NS_PER_SECOND for value in ns],
            )
        )

    def to_trtllm(self, *, minimum_predicted_gain: float = 0.01) -> str:
        """Return TensorRT-LLM's `SpsCostTable`."""
        tokens, ns = self._steps()
        return _encode(
            TrtllmTable(
                token_counts=tokens,
                step_time_ms=[value / NS_PER_MS for value in ns],
                batch_sizes=self.overhead_requests.tolist(),
                batch_overhead_ms=(self.overhead_ns / NS_PER_MS).tolist(),
                minimum_predicted_gain=minimum_predicted_gain,
            )
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> "StepCostCurve":
        """Read a curve: dsched's form, or a table of SGLang or TensorRT-LLM, told by its keys.

        A table of an engine is fitted like samples: sorted, merged, made non-decreasing.
        Raises ValueError with the place or the value for a table that is none of them.
        """
        return _curve_of_table(read_table(text))

    def _steps(self) -> tuple[list[int], list[int]]:
        """Both ends of each stair, as (tokens, ns): looking down to the last end, or along the
        straight line between two, then gives this curve at every whole number of tokens."""
        starts = np.concatenate(([1], self.tier_tokens[:-1] + 1))
        ends = np.stack((starts, self.tier_tokens), axis=1)
        is_wide = np.stack((starts < self.tier_tokens, np.ones(len(starts), dtype=bool)), axis=1)
        ns = np.stack((self.tier_ns, self.tier_ns), axis=1)
        return ends[is_wide].tolist(), ns[is_wide].tolist()

    def _ns(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        last = len(self.tier_tokens) - 1
        index = np.searchsorted(self.tier_tokens, tokens)
        ns: NDArray[np.int64] = self.tier_ns[np.minimum(index, last)]
        extra_tokens = np.maximum(tokens - self.tier_tokens[last], 0)
        ns += np.minimum(np.rint(extra_tokens * self.slope_ns), MAX_EXTRA_NS).astype(np.int64)
        return ns


def _curve_of_table(table: CurveTable) -> StepCostCurve:
    match table:
        case DschedTable():
            return StepCostCurve(
                tier_tokens=np.array(table.tier_tokens, dtype=np.int64),
                tier_ns=np.array(table.tier_ns, dtype=np.int64),
                slope_ns=table.slope_ns,
                is_flat=table.is_flat,
                misfit=table.misfit,
                overhead_requests=np.array(table.overhead_requests, dtype=np.int64),
                overhead_ns=np.array(table.overhead_ns, dtype=np.int64),
            )
        case SglangTable():
            rates = np.array(table.sample_steps_per_sec, dtype=np.float64)
            if not (np.isfinite(rates).all() and (rates > 0).all()):
                raise ValueError(f"sample_steps_per_sec holds {rates.min()}; rates are positive")
            return StepCostCurve.from_samples(table.sample_batch_tokens, 1.0 / rates)
        case SglangAdditiveTable():
            seconds = table.bias_seconds + np.array(table.theta_seconds, dtype=np.float64)
            curve = _curve_of_line(table.m_probes, seconds)
            return _with_overhead(curve, table.bs_probes, table.alpha_seconds)
        case TrtllmTable():
            ms = table.fixed_overhead_ms + np.array(table.step_time_ms, dtype=np.float64)
            curve = _curve_of_line(table.token_counts, ms / 1e3)
            overhead = [value / 1e3 for value in table.batch_overhead_ms]
            return _with_overhead(curve, table.batch_sizes, overhead)


def _curve_of_line(num_tokens: list[int], seconds: NDArray[np.float64]) -> StepCostCurve:
    """The curve of a table that is read along straight lines: one tier a token, so that looking
    up is looking along the line."""
    last = max(num_tokens, default=1)
    stride = -(-last // MAX_DENSE_TIERS)
    return StepCostCurve.from_samples(
        num_tokens, seconds, tiers=sorted({*range(stride, last + 1, stride), last})
    )


def _with_overhead(
    curve: StepCostCurve, num_requests: list[int], seconds: list[float]
) -> StepCostCurve:
    if len(num_requests) != len(seconds):
        raise ValueError(f"{len(num_requests)} batch sizes have {len(seconds)} times")
    return replace(
        curve,
        overhead_requests=np.array(num_requests, dtype=np.int64),
        overhead_ns=_to_ns(np.array(seconds, dtype=np.float64)),
    )


def _check_samples(
    num_tokens: ArrayLike, seconds: ArrayLike, *, min_samples: int = 2
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Both as flat arrays, after refusing what cannot be a measured step."""
    tokens = whole_numbers(num_tokens, "num_tokens", minimum=1)
    times = positive_seconds(seconds)
    if check_lengths(num_tokens=tokens, seconds=times) < min_samples:
        raise ValueError(f"{len(tokens)} samples cannot make a curve; {min_samples} are needed")
    return tokens, times


def _check_points(at: NDArray[np.int64], ns: NDArray[np.int64], name: str) -> None:
    if at.shape != ns.shape or at.ndim != 1:
        raise ValueError(f"{at.shape} {name} counts have {ns.shape} times")
    if at.size and at[0] < 1:
        raise ValueError(f"{name} count {at[0]} is below 1")
    if (np.diff(at) <= 0).any():
        raise ValueError(f"{name} counts must be strictly increasing")
    if (np.diff(ns) < 0).any():
        raise ValueError(f"{name} times must not decrease")
    if ns.size and ns[0] < 0:
        raise ValueError(f"{name} time {ns[0]} ns is negative")


def _to_ns(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    if not np.isfinite(seconds).all():
        raise ValueError("step times must be finite")
    # Below a nanosecond a positive time would become zero.
    ns: NDArray[np.int64] = np.rint(seconds * NS_PER_SECOND).astype(np.int64)
    return np.where(seconds > 0, np.maximum(ns, 1), ns)


def _encode(table: CurveTable) -> str:
    return msgspec.json.encode(table).decode()
