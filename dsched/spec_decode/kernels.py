"""The hot loops of verify-length planning, compiled by numba.

Survival is counted in whole units of 2**-30. Sums of integers do not depend on their order, so
every rank and every run gets the same plan from the same numbers, and equal survivals are equal.
Rounding is downwards: a token is never worth more than its survival.

`budget_for` finds the exact best budget without sorting. A histogram of the survivals gives the
sum of the n best tokens at every bin's end exactly, and bounds between; only the few bins that
can still hold the best budget are sorted. Inside a tier of the cost curve every further token is
free, so only the last token count of each tier is tried. `select_best` finds the lengths from a
histogram and one partial selection inside the bin that the budget ends in.

Survival arrays are position-major, [K, R]: a scan meets tokens in the order of the tie rule,
position first, then request. Cost O(R * K).

The plain twins are in `tests/reference/spec_reference.py`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel

UNIT_BITS = 30
ONE = 1 << UNIT_BITS
"""Survival 1, in units."""

NOT_DRAFTED = -1
"""Marks a place in a survival array where no draft token exists."""

MAX_TOKENS = (1 << 16) - 1
"""Draft tokens in one plan at most: with one more, all certain, the sum in a histogram cell would
run into the count (both share one 64-bit number)."""

TIE_GAIN = 1.0 + 1e-9
"""A larger budget must be better by this factor; below it the gain is rounding and fewer win."""

_COUNT_SHIFT = 46
_SUM_MASK = (1 << _COUNT_SHIFT) - 1
_MAX_BIN_BITS = 10

_CHORD_ROUNDING = 1.0 - 1e-12
"""Keeps a bound that was rounded up from ruling out the very budget it was computed for."""

OK = -1
"""No wrong value: what `fill_survival` returns when all is well; else the value's flat index."""

WRONG_HISTORY = -1
WRONG_CONFIDENCE = -2
"""Budgets that `plan_asynchronous` returns when an input is not in [0, 1]."""


@kernel
def _bin_shift(num_tokens: int) -> int:
    """Bits that a bin covers: a few tokens a bin, but no more bins than fit the cache."""
    bits = 4
    while bits < _MAX_BIN_BITS and (4 << bits) < num_tokens:
        bits += 1
    return UNIT_BITS - bits


@kernel
def num_bins(num_tokens: int) -> int:
    """Cells of the histogram of up to `num_tokens` survivals."""
    cells: int = (ONE >> _bin_shift(num_tokens)) + 1
    return cells


@kernel
def fill_survival(
    confidence: NDArray[Any],
    acceptance: NDArray[np.float64],
    num_drafts: NDArray[np.int64],
    units: NDArray[np.int32],
    histogram: NDArray[np.int64],
) -> int:
    """Fill `units` [K, R] with the survival of every draft token, and count it in `histogram`.

    `confidence` [R, K]. NaN is replaced by `acceptance` [K] of its position; with an empty
    `acceptance` NaN is wrong. `num_drafts` (or empty: K each) says how many tokens exist; of fewer
    requests than R, where the same requests follow each other several times. `histogram`, zeros of
    `num_bins` cells, gets count and sum of each bin packed into one number, best survivals first.
    Returns `OK`, or the flat index of the first wrong confidence.
    """
    num_requests, num_positions = confidence.shape
    has_counts = num_drafts.size > 0
    shift = _bin_shift(units.size)
    for r in range(num_requests):
        survival = 1.0
        last = num_drafts[r % num_drafts.size] if has_counts else num_positions
        for k in range(num_positions):
            if k >= last:
                units[k, r] = NOT_DRAFTED
                continue
            c = np.float64(confidence[r, k])
            if not (c >= 0.0 and c <= 1.0):
                if not np.isnan(c) or acceptance.size == 0:
                    wrong: int = r * num_positions + k
                    return wrong
                c = acceptance[k]
            survival *= c
            u = np.int64(survival * ONE)
            units[k, r] = u
            histogram[(ONE - u) >> shift] += (1 << _COUNT_SHIFT) + u
    return OK


@kernel
def _num_tokens(histogram: NDArray[np.int64]) -> int:
    num_tokens = 0
    for cell in histogram:
        num_tokens += cell >> _COUNT_SHIFT
    return num_tokens


@kernel
def _candidate_bins(
    histogram: NDArray[np.int64],
    shift: int,
    num_steps: int,
    num_tokens: int,
    base_units: int,
    base_tokens: int,
    cost_ns: NDArray[np.float64],
    tier_end: NDArray[np.int64],
    extra_ns: float,
) -> tuple[int, int]:
    """The first and last bin in which the best budget can lie; (0, -1) if it must be 0.

    S, the sum of the best survivals, is concave: inside a bin it lies above the chord of its
    ends and below the lines through them with the bin's largest and smallest survival.
    Rates here are `num_steps` times as high.
    """
    best = base_units / (cost_ns[base_tokens] + extra_ns)
    start, total = 0, base_units
    for b in range(histogram.size):
        if histogram[b] > 0:
            count, units = histogram[b] >> _COUNT_SHIFT, histogram[b] & _SUM_MASK
            n = (start + count) // num_steps
            if n * num_steps > start:
                lower = total + (n * num_steps - start) * (units / count)
                rate = lower / (cost_ns[base_tokens + n] + extra_ns)
                best = max(best, rate * _CHORD_ROUNDING)
            start, total = start + count, total + units
    first, last = 0, -1
    start, total = 0, base_units
    for b in range(histogram.size):
        count, units = histogram[b] >> _COUNT_SHIFT, histogram[b] & _SUM_MASK
        if count == 0:
            continue
        end, end_total = start + count, total + units
        n = start // num_steps
        if end_total / (cost_ns[base_tokens + n + 1] + extra_ns) >= best:
            largest = ONE - (b << shift)
            smallest = max(largest - (1 << shift) + 1, 0)
            mean = units / count
            while n * num_steps < end:
                n = min(tier_end[base_tokens + n + 1] - base_tokens, num_tokens)
                at = n * num_steps
                if at > end:
                    break
                ns = cost_ns[base_tokens + n] + extra_ns
                upper = min(total + (at - start) * largest, end_total - (end - at) * smallest)
                if upper / ns >= best:
                    first = b if last < 0 else first
                    last = b
                lower = total + (at - start) * mean
                best = max(best, lower / ns * _CHORD_ROUNDING)
        start, total = end, end_total
    return first, last


@kernel
def budget_for(
    units: NDArray[np.int32],
    histogram: NDArray[np.int64],
    num_requests: int,
    base_tokens: int,
    cost_ns: NDArray[np.float64],
    tier_end: NDArray[np.int64],
    extra_ns: float,
) -> tuple[int, float]:
    """The budget n that maximises (R + S(n)) / (cost_ns[base_tokens + n] + extra_ns).

    `units` [K, H * R] survivals of R requests in H steps, and their histogram; S(n) is the sum of
    the H * n best, over H: what the n best of a step are worth. `base_tokens` are the tokens of the
    step without drafts; `tier_end` [B] is the last token count that costs as much as B tokens.
    Of equal rates the smallest n counts, filled up to the end of its tier, which is paid for: these
    tokens may have become better since. Returns n and its rate, in units a nanosecond.
    """
    num_steps = units.shape[1] // num_requests
    shift = _bin_shift(units.size)
    num_tokens = _num_tokens(histogram) // num_steps
    base_units = num_requests * num_steps * ONE
    first, last = _candidate_bins(
        histogram,
        shift,
        num_steps,
        num_tokens,
        base_units,
        base_tokens,
        cost_ns,
        tier_end,
        extra_ns,
    )
    at, total = 0, base_units
    for b in range(first):
        at += histogram[b] >> _COUNT_SHIFT
        total += histogram[b] & _SUM_MASK
    scratch = np.empty(units.size, dtype=np.int32)
    count = _gather(units, ONE - (first << shift), ONE - ((last + 1) << shift) + 1, scratch)
    scratch[:count].sort()
    best, best_n = base_units / (cost_ns[base_tokens] + extra_ns), 0
    end, n = at + count, at // num_steps
    while n * num_steps < end:
        n = min(tier_end[base_tokens + n + 1] - base_tokens, num_tokens)
        if n * num_steps > end:
            break
        while at < n * num_steps:
            total += scratch[end - at - 1]
            at += 1
        rate = total / (cost_ns[base_tokens + n] + extra_ns)
        if rate > best * TIE_GAIN:
            best, best_n = rate, n
    return min(tier_end[base_tokens + best_n] - base_tokens, num_tokens), best / num_steps


@kernel
def _gather(
    units: NDArray[np.int32], largest: int, smallest: int, scratch: NDArray[np.int32]
) -> int:
    """Copy the survivals in [smallest, largest] to `scratch`; return how many there are."""
    low = max(smallest, 0)
    count = 0
    for k in range(units.shape[0]):
        for r in range(units.shape[1]):
            u = units[k, r]
            if low <= u <= largest:
                scratch[count] = u
                count += 1
    return count


@kernel
def _kth_largest(values: NDArray[np.int32], rank: int) -> int:
    """The value at `rank` (0 is the largest) of `values`, which are reordered. O(n) on average,
    also when all are equal."""
    low, high = 0, values.size - 1
    while low < high:
        pivot = values[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if rank <= j:
            high = j
        elif rank >= i:
            low = i
        else:
            break
    kth: int = values[rank]
    return kth


@kernel
def select_best(
    units: NDArray[np.int32],
    histogram: NDArray[np.int64],
    budget: int,
    lengths: NDArray[np.int32],
) -> tuple[int, int]:
    """Give `budget` tokens to the best survivals; ties by position, then request.

    Fills `lengths` [R]. Returns the tokens chosen (fewer than `budget` if fewer exist) and the sum
    of their survivals. Whether a token is chosen depends on survivals that come before it in the
    order only, never on its own value or on what follows it in its request.
    """
    lengths[:] = 0
    shift = _bin_shift(units.size)
    num_tokens = _num_tokens(histogram)
    wanted = min(budget, num_tokens)
    if wanted <= 0:
        return 0, 0
    b, above, total = 0, 0, 0
    while above + (histogram[b] >> _COUNT_SHIFT) < wanted:
        above += histogram[b] >> _COUNT_SHIFT
        total += histogram[b] & _SUM_MASK
        b += 1
    largest = ONE - (b << shift)
    if above + (histogram[b] >> _COUNT_SHIFT) == wanted:
        threshold, num_ties = max(largest - (1 << shift), -1), 0
        total += histogram[b] & _SUM_MASK
    else:
        scratch = np.empty(histogram[b] >> _COUNT_SHIFT, dtype=np.int32)
        count = _gather(units, largest, largest - (1 << shift) + 1, scratch)
        threshold = _kth_largest(scratch[:count], wanted - above - 1)
        num_ties = wanted - above
        for i in range(count):
            if scratch[i] > threshold:
                num_ties -= 1
                total += scratch[i]
        total += num_ties * threshold
    limit = np.int32(threshold)
    for k in range(units.shape[0]):
        for r in range(units.shape[1]):
            lengths[r] += units[k, r] > limit
    for k in range(units.shape[0]):
        if num_ties == 0:
            break
        for r in range(units.shape[1]):
            if units[k, r] == threshold and num_ties > 0:
                lengths[r] += 1
                num_ties -= 1
    return wanted, total


@kernel
def plan_asynchronous(
    confidence: NDArray[Any],
    history: NDArray[Any],
    acceptance: NDArray[np.float64],
    num_drafts: NDArray[np.int64],
    base_tokens: int,
    cost_ns: NDArray[np.float64],
    tier_end: NDArray[np.int64],
    draft_ns: float,
    lengths: NDArray[np.int32],
) -> tuple[int, int, float, int, int]:
    """The whole asynchronous plan in one call: budget from `history` [H * R, K], H steps below
    each other, tokens from `confidence` [R, K].

    Fills `lengths`. Returns (budget, wrong index, gain of drafting, tokens chosen, sum of their
    survivals); with a wrong value the budget says in which input, and the index where.
    """
    num_requests, num_positions = confidence.shape
    older = np.empty((num_positions, history.shape[0]), dtype=np.int32)
    histogram = np.zeros(num_bins(older.size), dtype=np.int64)
    wrong = fill_survival(history, acceptance, num_drafts, older, histogram)
    if wrong != OK:
        return WRONG_HISTORY, wrong, 0.0, 0, 0
    budget, rate = budget_for(
        older, histogram, num_requests, base_tokens, cost_ns, tier_end, draft_ns
    )
    gain = rate * cost_ns[base_tokens] / (num_requests * ONE) - 1.0
    if gain <= 0.0 and draft_ns > 0.0:
        # These tokens are drafted already; only the cost of the next draft can still be saved.
        budget, rate = budget_for(
            older, histogram, num_requests, base_tokens, cost_ns, tier_end, 0.0
        )
    units = np.empty((num_positions, num_requests), dtype=np.int32)
    histogram = np.zeros(num_bins(units.size), dtype=np.int64)
    wrong = fill_survival(confidence, acceptance[:0], num_drafts, units, histogram)
    if wrong != OK:
        return WRONG_CONFIDENCE, wrong, 0.0, 0, 0
    given, total = select_best(units, histogram, budget, lengths)
    return budget, OK, gain, given, total


@kernel
def _order_by_survival(units: NDArray[np.int32]) -> NDArray[np.int64]:
    """Flat [K * R] indices, best survival first, ties by position, then request. Places without a
    draft token come last."""
    return np.argsort(-units.ravel(), kind="mergesort")


@kernel
def _convex_minorant(
    cost_ns: NDArray[np.float64], base_tokens: int, num_tokens: int
) -> NDArray[np.float64]:
    """The largest convex function below `cost_ns[base_tokens + n]`, n = 0..num_tokens."""
    hull = np.empty(num_tokens + 1, dtype=np.int64)
    size = 0
    for n in range(num_tokens + 1):
        while size >= 2:
            a, b = hull[size - 2], hull[size - 1]
            rise_ab = (cost_ns[base_tokens + b] - cost_ns[base_tokens + a]) * (n - a)
            rise_an = (cost_ns[base_tokens + n] - cost_ns[base_tokens + a]) * (b - a)
            if rise_ab < rise_an:
                break
            size -= 1
        hull[size] = n
        size += 1
    minorant = np.empty(num_tokens + 1)
    minorant[0] = cost_ns[base_tokens]
    for i in range(1, size):
        a, b = hull[i - 1], hull[i]
        start, end = cost_ns[base_tokens + a], cost_ns[base_tokens + b]
        for n in range(a + 1, b + 1):
            minorant[n] = start + (end - start) * (n - a) / (b - a)
    return minorant


@kernel
def early_stop(
    units: NDArray[np.int32],
    base_tokens: int,
    cost_ns: NDArray[np.float64],
    tier_end: NDArray[np.int64],
    extra_ns: float,
) -> int:
    """The budget of Algorithm 1 on the convex minorant of the cost, filled up to its tier.

    Takes the tokens in order and stops at the first that does not raise the rate. To stop, it has
    looked at no survival behind that token, so no choice depends on a draft token it admits. The
    tier that the last token lies in is paid for; whether it is filled was settled when its first
    token was admitted.
    """
    flat = units.ravel()
    num_tokens = (flat >= 0).sum()
    order = _order_by_survival(units)
    minorant = _convex_minorant(cost_ns, base_tokens, num_tokens)
    n, total = 0, units.shape[1] * ONE
    best = total / (minorant[0] + extra_ns)
    while n < num_tokens:
        total += flat[order[n]]
        rate = total / (minorant[n + 1] + extra_ns)
        if rate <= best * TIE_GAIN:
            break
        best = rate
        n += 1
    filled: int = min(tier_end[base_tokens + n] - base_tokens, num_tokens)
    return filled


@kernel
def _order_by_density(units: NDArray[np.int32], token_ns: NDArray[np.float64]) -> NDArray[np.int64]:
    """Flat [K * R] indices, most survival a nanosecond first, ties by position, then request."""
    density = np.empty(units.size)
    i = 0
    for k in range(units.shape[0]):
        for r in range(units.shape[1]):
            density[i] = -units[k, r] / token_ns[r % token_ns.size] if units[k, r] >= 0 else np.inf
            i += 1
    return np.argsort(density, kind="mergesort")


@kernel
def budget_by_density(
    units: NDArray[np.int32],
    token_ns: NDArray[np.float64],
    kv_ns: NDArray[np.float64],
    base_tokens: int,
    cost_ns: NDArray[np.float64],
    extra_ns: float,
) -> tuple[int, float]:
    """As `budget_for`, where a token of request r costs `kv_ns[r]` more and the tokens with the
    most survival a nanosecond, `token_ns[r]` each, come first. O(R K log(R K))."""
    num_requests = kv_ns.size
    num_steps = units.shape[1] // num_requests
    flat = units.ravel()
    order = _order_by_density(units, token_ns)
    total, attention_ns = num_requests * ONE * num_steps, kv_ns.sum() + extra_ns
    best, best_n = total / (cost_ns[base_tokens] + attention_ns), 0
    for at in range(order.size):
        i = order[at]
        if flat[i] < 0:
            break
        total += flat[i]
        attention_ns += kv_ns[i % num_requests] / num_steps
        n = (at + 1) // num_steps
        if n * num_steps == at + 1:
            rate = total / (cost_ns[base_tokens + n] + attention_ns)
            if rate > best * TIE_GAIN:
                best, best_n = rate, n
    return best_n, best / num_steps


@kernel
def select_by_density(
    units: NDArray[np.int32],
    histogram: NDArray[np.int64],
    token_ns: NDArray[np.float64],
    budget: int,
    num_by_survival: int,
    lengths: NDArray[np.int32],
) -> tuple[int, int]:
    """As `select_best`: `num_by_survival` tokens by survival, the rest of `budget` by density.

    A request's own later tokens never come before an earlier one in either order, so what is
    chosen still depends on nothing behind a token.
    """
    given, total = select_best(units, histogram, num_by_survival, lengths)
    num_requests = units.shape[1]
    flat = units.ravel()
    order = _order_by_density(units, token_ns)
    floor = lengths.copy()
    for i in order:
        if given >= budget or flat[i] < 0:
            break
        request = i % num_requests
        if i // num_requests >= floor[request]:
            lengths[request] += 1
            total += flat[i]
            given += 1
    return given, total
