"""Plain twins of the kernels in `dsched.costs`: slow, and simple enough to be seen right."""

from itertools import pairwise

from dsched.costs import kernels
from dsched.costs.prefill_fit import PrefillArrays


def table_ns(arrays: PrefillArrays, num_tokens: float) -> float:
    """Straight lines between knots, the slope above the last."""
    points = list(zip(arrays.knot_tokens.tolist(), arrays.knot_ns.tolist(), strict=True))
    for (left, left_ns), (right, right_ns) in pairwise(points):
        if left <= num_tokens < right:
            return left_ns + (num_tokens - left) / (right - left) * (right_ns - left_ns)
    last, last_ns = points[-1]
    return last_ns + (num_tokens - last) * float(arrays.coefficients[kernels.SLOPE])


def chunk_ns(arrays: PrefillArrays, step_tokens: int, past: int, chunk: int) -> float:
    """What a chunk adds to a step, term by term as the model's docstring has it."""
    if chunk == 0:
        return 0.0
    c = arrays.coefficients
    ns = table_ns(arrays, step_tokens + chunk) - table_ns(arrays, step_tokens)
    ns += c[kernels.ATTENTION] * chunk * (past + chunk / 2)
    ns += c[kernels.CONTEXT] * past
    for offset, tile in enumerate(kernels.TILE_TOKENS):
        ns += c[kernels.TILE + offset] * max(chunk, tile) * past
    k = int(c[kernels.TOPK_TOKENS])
    if k:
        ns += c[kernels.TOPK] * sum(min(past + i, k) for i in range(chunk))
        ns += c[kernels.SWITCH] * (past + chunk > k)
    return float(ns)


def largest_chunk(
    arrays: PrefillArrays, step_tokens: int, past: int, max_chunk: int, budget_ns: float
) -> int:
    """Bisection: the cost never falls with the chunk."""
    low, high = 0, max_chunk
    while low < high:
        middle = (low + high + 1) // 2
        if chunk_ns(arrays, step_tokens, past, middle) <= budget_ns:
            low = middle
        else:
            high = middle - 1
    return low
