"""Plain twin of the chunk kernels in `dsched.scheduler.kernels`, over lists and dictionaries."""

from dataclasses import dataclass

from dsched.costs import PrefillCostModel
from dsched.costs import kernels as cost_kernels
from dsched.scheduler import ChunkRule, kernels


@dataclass
class Grants:
    """What the kernel writes."""

    chunks: list[int]
    spent_ns: float
    num_forced: int
    saved_ns: list[float]


def grant(
    past: list[int],
    remaining: list[int],
    *,
    cost: PrefillCostModel,
    rule: ChunkRule,
    saved_ns: list[float],
    step_tokens: int,
    budget_ns: float,
    quantum_ns: float,
) -> Grants:
    """Credit the buckets, let each spend what it saved, then hand round what is left."""
    count = len(past)
    arrays = cost.arrays
    parts = (arrays.knot_tokens, arrays.knot_ns, arrays.coefficients)

    def price(tokens: int, i: int, chunk: int) -> float:
        return float(cost_kernels.chunk_ns(*parts, float(tokens), float(past[i]), float(chunk)))

    def aligned(tokens: int, i: int, limit: int, allowance: float) -> int:
        if limit <= 0 or allowance <= 0:
            return 0
        chunk = cost_kernels.largest_chunk(*parts, float(tokens), float(past[i]), limit, allowance)
        return chunk if chunk == remaining[i] else chunk // rule.alignment * rule.alignment

    def bucket_of(i: int) -> int:
        return sum(past[i] + remaining[i] >= bound for bound in rule.bucket_bounds)

    queues: dict[int, list[int]] = {}
    for i in range(count):
        queues.setdefault(bucket_of(i), []).append(i)
    saved = list(saved_ns)
    total_weight = sum(rule.bucket_weights[j] for j in queues)
    limit_ns = kernels.MAX_SAVED_BUDGETS * quantum_ns
    for j, weight in enumerate(rule.bucket_weights):
        if j in queues:
            credit = saved[j] + quantum_ns * weight / total_weight
            saved[j] = max(min(credit, limit_ns), -limit_ns)
        else:
            saved[j] = 0.0

    def most_saved(unserved: set[int]) -> int:
        best = min(unserved)
        for j in sorted(unserved):
            if saved[j] * rule.bucket_weights[best] > saved[best] * rule.bucket_weights[j]:
                best = j
        return best

    chunks = [0] * count
    costs = [0.0] * count
    left, tokens, num_forced = budget_ns, step_tokens, 0
    unserved = set(queues)
    while unserved:
        j = most_saved(unserved)
        unserved.remove(j)
        for i in queues[j]:
            limit = min(remaining[i], rule.max_step_tokens - tokens)
            chunk = aligned(tokens, i, limit, min(saved[j], left))
            if chunk == 0:
                smallest = min(limit, rule.alignment)
                if tokens > step_tokens or smallest <= 0:
                    break
                smallest_ns = price(tokens, i, smallest)
                if smallest_ns <= budget_ns or saved[j] < min(smallest_ns, limit_ns):
                    break
                chunk = smallest
                num_forced += 1
            costs[i] = price(tokens, i, chunk)
            chunks[i] = chunk
            tokens += chunk
            left -= costs[i]
            saved[j] -= costs[i]
            if chunk < remaining[i]:
                break

    unserved = set(queues)
    while unserved and left > 0:
        j = most_saved(unserved)
        unserved.remove(j)
        for i in queues[j]:
            if left <= 0:
                break
            if chunks[i] == remaining[i]:
                continue
            before = tokens - chunks[i]
            limit = min(remaining[i], rule.max_step_tokens - before)
            chunk = aligned(before, i, limit, costs[i] + left)
            if chunk <= chunks[i]:
                break
            new_cost = price(before, i, chunk)
            saved[j] = max(0.0, saved[j] - (new_cost - costs[i]))
            left -= new_cost - costs[i]
            costs[i], chunks[i], tokens = new_cost, chunk, before + chunk
            if chunk < remaining[i]:
                break

    if tokens == step_tokens and queues:
        j = most_saved(set(queues))
        i = queues[j][0]
        chunk = min(remaining[i], rule.alignment, rule.max_step_tokens - tokens)
        if chunk > 0:
            chunks[i], costs[i] = chunk, price(tokens, i, chunk)
            saved[j] -= costs[i]
            left -= costs[i]
            num_forced += 1
    return Grants(chunks, budget_ns - left, num_forced, saved)
