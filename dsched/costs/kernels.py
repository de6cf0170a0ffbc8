"""Cost models as numba kernels call them: arrays and numbers, no objects.

A prefill model is three arrays, changed in place when the model learns, so that a planner that
holds them always plans with the newest:

- `knot_tokens` [K], `knot_ns` [K]: the part of the time that depends on all tokens of the step,
  straight lines between the knots; the first knot is 0 tokens, its value the fixed time of a step;
- `coefficients` [NUM_COEFFICIENTS]: the rest, at the positions named below, in nanoseconds.

All functions are O(log K) or better and allocate nothing.
"""

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel

SLOPE = 0
"""Per token above the last knot."""
ATTENTION = 1
"""Per pair of a chunk token and a token it attends to: c of c·x·(P + x/2)."""
CONTEXT = 2
"""Per token of context, once a chunk, whatever the chunk's size."""
TILE = 3
"""First of three: per context token and token of the chunk, the chunk counted as at least
TILE_TOKENS: attention works on whole tiles of queries."""
TOPK = 6
"""Per attended token where attention is sparse: d of d·Σ min(P + i, k)."""
SWITCH = 7
"""Once for a chunk that ends beyond k tokens: the sparse kernels' own fixed time."""
TOPK_TOKENS = 8
"""k, or 0 for dense attention."""
NUM_COEFFICIENTS = 9

TILE_TOKENS = (1024, 2048, 4096)

Floats = NDArray[np.float64]


@kernel
def curve_ns(
    tier_tokens: NDArray[np.int64], tier_ns: NDArray[np.int64], slope_ns: float, num_tokens: int
) -> float:
    """Return the nanoseconds of a step of `num_tokens`, as `StepCostCurve.seconds`. O(log T)."""
    last = len(tier_tokens) - 1
    if num_tokens > tier_tokens[last]:
        above: float = tier_ns[last] + (num_tokens - tier_tokens[last]) * slope_ns
        return above
    low = 0
    high = last
    while low < high:
        middle = (low + high) // 2
        if tier_tokens[middle] < num_tokens:
            low = middle + 1
        else:
            high = middle
    return float(tier_ns[low])


@kernel
def tokens_ns(knot_tokens: Floats, knot_ns: Floats, slope_ns: float, num_tokens: float) -> float:
    """Return the part of a step that depends on its number of tokens only, fixed time included."""
    last = len(knot_tokens) - 1
    if num_tokens >= knot_tokens[last]:
        above: float = knot_ns[last] + (num_tokens - knot_tokens[last]) * slope_ns
        return above
    index = _segment(knot_tokens, num_tokens)
    left = knot_tokens[index]
    share = (num_tokens - left) / (knot_tokens[index + 1] - left)
    value: float = knot_ns[index] + share * (knot_ns[index + 1] - knot_ns[index])
    return value


@kernel
def topk_sum(past: float, chunk: float, k: float) -> float:
    """Return sum of min(past + i, k) for i = 0 .. chunk - 1: attended tokens under top-k."""
    short = min(max(k - past, 0.0), chunk)
    return short * past + short * (short - 1.0) / 2.0 + (chunk - short) * k


@kernel
def dense_ns(coefficients: Floats, past: float, chunk: float) -> float:
    """Return the part of a chunk's attention that grows with all of its context."""
    ns: float = coefficients[ATTENTION] * chunk * (past + chunk / 2.0)
    ns += coefficients[CONTEXT] * past
    for tile in range(len(TILE_TOKENS)):
        ns += coefficients[TILE + tile] * max(chunk, float(TILE_TOKENS[tile])) * past
    return ns


@kernel
def sparse_ns(coefficients: Floats, past: float, chunk: float) -> float:
    """Return the part of a chunk's attention that sees at most k tokens; 0 where all is dense."""
    k = coefficients[TOPK_TOKENS]
    if k <= 0:
        return 0.0
    ns: float = coefficients[TOPK] * topk_sum(past, chunk, k)
    if past + chunk > k:
        ns += coefficients[SWITCH]
    return ns


@kernel
def attention_ns(coefficients: Floats, past: float, chunk: float) -> float:
    """Return what a chunk of at least one token costs besides its number of tokens."""
    ns: float = dense_ns(coefficients, past, chunk) + sparse_ns(coefficients, past, chunk)
    return ns


@kernel
def step_parts(
    knot_tokens: Floats,
    knot_ns: Floats,
    coefficients: Floats,
    chunks: NDArray[np.int64],
    pasts: NDArray[np.int64],
    num_decode_tokens: int,
    parts: Floats,
) -> None:
    """Write the time of `chunks` [N] into `parts`: fixed, tokens, attention, top-k.

    With decodes in the step, whose own time is not counted here, the chunks add no fixed time.
    """
    parts[:] = 0.0
    total = float(num_decode_tokens)
    for i in range(len(chunks)):
        if chunks[i] > 0:
            total += chunks[i]
            parts[2] += dense_ns(coefficients, float(pasts[i]), float(chunks[i]))
            parts[3] += sparse_ns(coefficients, float(pasts[i]), float(chunks[i]))
    slope = coefficients[SLOPE]
    before = tokens_ns(knot_tokens, knot_ns, slope, float(num_decode_tokens))
    parts[0] = 0.0 if num_decode_tokens else knot_ns[0]
    parts[1] = tokens_ns(knot_tokens, knot_ns, slope, total) - before


@kernel
def chunk_ns(
    knot_tokens: Floats,
    knot_ns: Floats,
    coefficients: Floats,
    step_tokens: float,
    past: float,
    chunk: float,
) -> float:
    """Return what a chunk adds to a step that already has `step_tokens`; 0 for no chunk."""
    if chunk <= 0:
        return 0.0
    slope = coefficients[SLOPE]
    before = tokens_ns(knot_tokens, knot_ns, slope, step_tokens)
    after = tokens_ns(knot_tokens, knot_ns, slope, step_tokens + chunk)
    total: float = after - before + attention_ns(coefficients, past, chunk)
    return total


@kernel
def largest_chunk(
    knot_tokens: Floats,
    knot_ns: Floats,
    coefficients: Floats,
    step_tokens: float,
    past: float,
    max_chunk: int,
    budget_ns: float,
) -> int:
    """Return the largest whole chunk in 0..max_chunk whose `chunk_ns` is within `budget_ns`.

    Between two breakpoints (knots, tiles, the end of dense attention) the cost is one quadratic,
    solved in closed form; the breakpoints are searched first.
    """
    if max_chunk <= 0 or budget_ns <= 0:
        return 0
    if (
        chunk_ns(knot_tokens, knot_ns, coefficients, step_tokens, past, float(max_chunk))
        <= budget_ns
    ):
        return max_chunk
    low = 0.0  # affordable
    high = float(max_chunk)  # not affordable
    for tile in range(len(TILE_TOKENS) + 1):
        at = (
            float(TILE_TOKENS[tile])
            if tile < len(TILE_TOKENS)
            else coefficients[TOPK_TOKENS] - past
        )
        if low < at < high:
            ns = chunk_ns(knot_tokens, knot_ns, coefficients, step_tokens, past, at)
            if ns <= budget_ns:
                low = at
            else:
                high = at
    first = _segment(knot_tokens, step_tokens + low) + 1
    behind = len(knot_tokens)
    while first < behind:
        middle = (first + behind) // 2
        at = knot_tokens[middle] - step_tokens
        if at <= low:
            first = middle + 1
        elif at >= high:
            behind = middle
        elif chunk_ns(knot_tokens, knot_ns, coefficients, step_tokens, past, at) <= budget_ns:
            low = at
            first = middle + 1
        else:
            high = at
            behind = middle
    return _solve_segment(
        knot_tokens, knot_ns, coefficients, step_tokens, past, low, high, budget_ns
    )


@kernel
def _solve_segment(
    knot_tokens: Floats,
    knot_ns: Floats,
    coefficients: Floats,
    step_tokens: float,
    past: float,
    low: float,
    high: float,
    budget_ns: float,
) -> int:
    """`largest_chunk` where no breakpoint lies strictly between `low` and `high`."""
    anchor = low + 1.0  # a jump may lie right behind `low`
    if anchor >= high:
        return int(low)
    left = budget_ns - chunk_ns(knot_tokens, knot_ns, coefficients, step_tokens, past, anchor)
    if left < 0:
        return int(low)
    # Cost of y tokens more than the anchor: slope·y + curve·y².
    slope = _token_slope(knot_tokens, knot_ns, coefficients[SLOPE], step_tokens + low)
    curve = coefficients[ATTENTION] / 2.0
    slope += coefficients[ATTENTION] * (past + anchor)
    for tile in range(len(TILE_TOKENS)):
        if low >= TILE_TOKENS[tile]:
            slope += coefficients[TILE + tile] * past
    k = coefficients[TOPK_TOKENS]
    if k > 0:
        if past + low >= k:
            slope += coefficients[TOPK] * k
        else:
            curve += coefficients[TOPK] / 2.0
            slope += coefficients[TOPK] * (past + anchor - 0.5)
    if curve > 0:
        more = 2.0 * left / (slope + np.sqrt(slope * slope + 4.0 * curve * left))
    elif slope > 0:
        more = left / slope
    else:
        more = high
    # The exact integer: rounding of the root may be off by one either way.
    chunk = min(anchor + np.floor(more), high - 1.0)
    cost = chunk_ns(knot_tokens, knot_ns, coefficients, step_tokens, past, chunk)
    if cost > budget_ns:
        return int(chunk - 1.0)
    if chunk + 1.0 < high:
        cost = chunk_ns(knot_tokens, knot_ns, coefficients, step_tokens, past, chunk + 1.0)
        if cost <= budget_ns:
            return int(chunk + 1.0)
    return int(chunk)


@kernel
def _segment(knot_tokens: Floats, num_tokens: float) -> int:
    """Index of the last knot that is not above `num_tokens`."""
    low = 0
    high = len(knot_tokens) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if knot_tokens[middle] <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return low


@kernel
def _token_slope(knot_tokens: Floats, knot_ns: Floats, slope_ns: float, num_tokens: float) -> float:
    """Nanoseconds a token just above `num_tokens`."""
    index = _segment(knot_tokens, num_tokens)
    if index == len(knot_tokens) - 1:
        return slope_ns
    slope: float = (knot_ns[index + 1] - knot_ns[index]) / (
        knot_tokens[index + 1] - knot_tokens[index]
    )
    return slope
