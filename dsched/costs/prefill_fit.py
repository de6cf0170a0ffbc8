"""Fit the prefill model: a table and coefficients together, none of them negative.

The table's rises and the coefficients are columns of one non-negative least squares problem over
relative errors, so a short chunk counts as much as a long one and neither explains what belongs
to the other. How many columns are used depends on the samples: a table needs different contexts
(without them its bend and that of attention cannot be told apart) and enough steps.
"""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsched.costs import kernels
from dsched.costs.nnls import nonnegative_least_squares
from dsched.costs.samples import FLAT_RELATIVE_RISE, last_slope

NS = 1e9
MAX_KNOTS = 16
"""Knots of the T0 table; more follow the noise of single samples."""
MIN_SAMPLES_PER_COLUMN = 2
"""A table is fitted only if there are this many samples for each of its coefficients."""
MIN_TOKEN_SHARE = 0.01
"""A token costs at least this share of the mean price of a token in the largest sampled chunk."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillArrays:
    """A model as numba kernels take it. Changed in place by `observe`; see `kernels`."""

    knot_tokens: NDArray[np.float64]
    knot_ns: NDArray[np.float64]
    coefficients: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros(kernels.NUM_COEFFICIENTS)
    )

    def copy(self) -> "PrefillArrays":
        return PrefillArrays(
            knot_tokens=self.knot_tokens.copy(),
            knot_ns=self.knot_ns.copy(),
            coefficients=self.coefficients.copy(),
        )


def choose_knots(tokens: NDArray[np.int64], *, is_table: bool) -> NDArray[np.float64]:
    """Token counts at which the table bends: the sampled sizes, or MAX_KNOTS spread over them."""
    if not is_table:
        return np.zeros(0)
    sizes = np.unique(tokens).astype(np.float64)
    if len(sizes) > MAX_KNOTS:
        spread = np.geomspace(sizes[0], sizes[-1], MAX_KNOTS)
        sizes = np.unique(sizes[np.searchsorted(sizes, spread * (1 - 1e-9))])
    return sizes


def has_enough_samples(num_samples: int, num_knots: int) -> bool:
    num_columns = num_knots + kernels.NUM_COEFFICIENTS
    return num_samples >= MIN_SAMPLES_PER_COLUMN * num_columns


def fit_arrays(
    tokens: NDArray[np.int64],
    past: NDArray[np.int64],
    times: NDArray[np.float64],
    knots: NDArray[np.float64],
    topk_tokens: int,
    *,
    has_context: bool,
) -> PrefillArrays:
    """Non-negative least squares over the table's rises and the coefficients together."""
    x, p = tokens.astype(np.float64), past.astype(np.float64)
    edges = np.concatenate(([0.0], knots))
    table = [np.ones_like(x)]
    table += [np.clip(x, left, right) - left for left, right in pairwise(edges)]
    table.append(np.maximum(x - edges[-1], 0.0))
    used = _used_coefficients(topk_tokens, is_rich=len(knots) > 0, has_context=has_context)
    columns = table + [_feature(index, x, p, float(topk_tokens)) for index in used]
    relative = np.stack(columns, axis=1) / times[:, None]
    solution = nonnegative_least_squares(relative, np.ones_like(times)) * NS

    rises = solution[1 : len(edges)] * np.diff(edges)
    arrays = PrefillArrays(
        knot_tokens=edges, knot_ns=solution[0] + np.concatenate(([0.0], np.cumsum(rises)))
    )
    arrays.coefficients[kernels.SLOPE] = solution[len(edges)]
    arrays.coefficients[used] = solution[len(edges) + 1 :]
    arrays.coefficients[kernels.TOPK_TOKENS] = topk_tokens
    if len(knots):
        # No sample lies above the last knot.
        arrays.coefficients[kernels.SLOPE] = last_slope(edges, arrays.knot_ns)[0]
    return arrays


def _used_coefficients(topk_tokens: int, *, is_rich: bool, has_context: bool) -> list[int]:
    used = [kernels.ATTENTION]
    if is_rich and has_context:
        used += [kernels.CONTEXT, *range(kernels.TILE, kernels.TOPK)]
    if topk_tokens:
        used += [kernels.TOPK, kernels.SWITCH]
    return used


def _feature(
    index: int, x: NDArray[np.float64], p: NDArray[np.float64], k: float
) -> NDArray[np.float64]:
    """The column of one coefficient: what `kernels.attention_ns` multiplies it by."""
    if index == kernels.ATTENTION:
        return x * (p + x / 2.0)
    if index == kernels.CONTEXT:
        return p
    if index == kernels.TOPK:
        return np.array(
            [kernels.topk_sum(past, chunk, k) for past, chunk in zip(p, x, strict=True)]
        )
    if index == kernels.SWITCH:
        return (p + x > k).astype(np.float64)
    return np.maximum(x, float(kernels.TILE_TOKENS[index - kernels.TILE])) * p


def price_free_tokens(base: PrefillArrays, max_tokens: int) -> bool:
    """Give every token a price, and say whether the samples gave it none.

    Flat samples: above the largest sampled chunk the time grows in proportion to the tokens.
    """
    slope = base.coefficients[kernels.SLOPE]
    first = kernels.chunk_ns(base.knot_tokens, base.knot_ns, base.coefficients, 0.0, 0.0, 1.0)
    last = kernels.chunk_ns(
        base.knot_tokens, base.knot_ns, base.coefficients, 0.0, 0.0, float(max_tokens)
    )
    fixed = base.knot_ns[0]
    is_flat = bool(last + fixed <= (first + fixed) * (1.0 + FLAT_RELATIVE_RISE))
    mean_price = (last + fixed) / max_tokens
    floor = mean_price if is_flat else mean_price * MIN_TOKEN_SHARE
    base.coefficients[kernels.SLOPE] = max(slope, floor)
    return is_flat


def check_arrays(base: PrefillArrays) -> None:
    knots, ns, coefficients = base.knot_tokens, base.knot_ns, base.coefficients
    if knots.shape != ns.shape or knots.ndim != 1 or not len(knots) or knots[0] != 0:
        raise ValueError(
            "the table of a prefill model needs one time a knot, the first at 0 tokens"
        )
    if (np.diff(knots) <= 0).any():
        raise ValueError("knots must be strictly increasing")
    if not np.isfinite(ns).all() or ns[0] < 0 or (np.diff(ns) < 0).any():
        raise ValueError("times of a prefill table must be finite, not negative, not decreasing")
    if coefficients.shape != (kernels.NUM_COEFFICIENTS,):
        raise ValueError(f"{kernels.NUM_COEFFICIENTS} coefficients are needed")
    if not np.isfinite(coefficients).all() or (coefficients < 0).any():
        raise ValueError(f"coefficients hold {coefficients.min()}; none may be negative")
    if coefficients[kernels.SLOPE] <= 0:
        raise ValueError("the price of a token is 0; tokens are never free")
