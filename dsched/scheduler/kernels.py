"""The step planner's arithmetic: numba kernels over arrays, without allocation.

Times are float64 nanoseconds. Requests are slots of a struct of arrays `state` [NUM_FIELDS, S];
`order` [S] lists the occupied slots in arrival order. Rules and reasons are told in
`dsched.scheduler.chunking` and `dsched.scheduler.planner`.
"""

import numpy as np
from numpy.typing import NDArray

from dsched.costs.kernels import chunk_ns, curve_ns, largest_chunk
from dsched.jit import kernel

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Fields of `state`.
COMPUTED = 0
"""Leading tokens whose KV exists after all planned steps."""
TOKENS = 1
"""Tokens of the sequence after all planned steps, each assumed to emit one."""
LIMIT = 2
"""Tokens of the sequence at which it ends at the latest."""
VERIFY = 3
"""Draft tokens to verify beside the next decode."""
BLOCKS = 4
"""KV blocks held."""
IS_GONE = 5
"""1 once the request finished or was aborted; its slot is freed by the next plan."""
IS_RUNNING = 6
"""1 while it holds KV."""
OVERTAKEN = 7
"""Plans that found no room for it although it was first of its bucket."""
NUM_FIELDS = 8

# Numbers that tell of a plan, in `facts`.
NUM_DECODES = 0
NUM_CHUNKS = 1
NUM_PREEMPTED = 2
NUM_FORCED = 3
NUM_FREED = 4
STEP_TOKENS = 5
DECODE_TOKENS = 6
DECODE_KV = 7
DECODE_NS = 8
PREFILL_NS = 9
NUM_FACTS = 10

# Numbers that change rarely, in `limits`.
MAX_TOKENS = 0
MAX_RUNNING = 1
ALIGNMENT = 2
BLOCK_TOKENS = 3
NUM_LIMITS = 4

MAX_CANDIDATES = 64
"""Requests of one bucket that one step may give chunks to. Below: many tiny prompts take several
steps. Above: the plan takes longer than it saves."""

MAX_OVERTAKEN_PLANS = 256
"""Plans for which a request without room may be overtaken by shorter ones. Below: one long prompt
empties the device while it waits for KV. Above: it waits long."""

# Rows of `bucket_facts` [3, J].
_LISTED = 0
_LISTED_TOKENS = 1
_IS_BLOCKED = 2
NUM_BUCKET_FACTS = 3

MAX_SAVED_BUDGETS = 4.0
"""Step budgets that a bucket may save up. Below: a chunk that costs more than a step is rare.
Above: a bucket that was idle takes the device for long."""

MIN_QUANTUM_SHARE = 0.01
"""Share of the step budget that buckets are credited even where decodes leave none: it decides
whose turn the forced chunk is."""


@kernel
def bucket_of(bounds: Ints, num_tokens: int) -> int:
    """Return the index of the length bucket: the first whose bound is above `num_tokens`."""
    for bucket in range(len(bounds)):
        if num_tokens < bounds[bucket]:
            return bucket
    return len(bounds)


@kernel
def credit(
    deficits: Floats, weights: Floats, buckets: Ints, num_candidates: int, quantum_ns: float
) -> None:
    """Share `quantum_ns` among the buckets that have work; an empty bucket saves nothing."""
    total = 0.0
    for bucket in range(len(weights)):
        if _first_of(buckets, num_candidates, bucket) < num_candidates:
            total += weights[bucket]
        else:
            deficits[bucket] = 0.0
    limit = MAX_SAVED_BUDGETS * quantum_ns
    for bucket in range(len(weights)):
        if _first_of(buckets, num_candidates, bucket) < num_candidates:
            saved = deficits[bucket] + quantum_ns * weights[bucket] / total
            deficits[bucket] = max(min(saved, limit), -limit)


@kernel
def grant_chunks(
    knot_tokens: Floats,
    knot_ns: Floats,
    coefficients: Floats,
    weights: Floats,
    deficits: Floats,
    past: Ints,
    remaining: Ints,
    buckets: Ints,
    chunks: Ints,
    costs: Floats,
    served: Ints,
    num_candidates: int,
    step_tokens: int,
    max_tokens: int,
    alignment: int,
    budget_ns: float,
    saved_limit_ns: float,
) -> tuple[float, int]:
    """Write the chunk of each candidate; return their time and the number of forced chunks.

    Candidates [C] are in arrival order. `deficits` is charged in place. `served` [J] is scratch.
    """
    for i in range(num_candidates):
        chunks[i] = 0
        costs[i] = 0.0
    left = budget_ns
    tokens = step_tokens
    num_forced = 0
    served[:] = 0
    # First pass: each bucket spends what it saved, the one that waits longest for its share first.
    for _ in range(len(weights)):
        bucket = _next_bucket(deficits, weights, buckets, num_candidates, served)
        if bucket < 0:
            break
        served[bucket] = 1
        i = _first_of(buckets, num_candidates, bucket)
        while i < num_candidates:
            limit = min(remaining[i], max_tokens - tokens)
            allowance = min(deficits[bucket], left)
            chunk = _aligned_chunk(
                knot_tokens, knot_ns, coefficients, tokens, past[i], remaining[i], limit,
                allowance, alignment,
            )  # fmt: skip
            if chunk == 0:
                smallest = min(limit, alignment)
                if tokens > step_tokens or smallest <= 0:
                    break
                # Nobody has a chunk yet: one that costs more than the whole step still has its
                # turn once its bucket has saved for it.
                cost = chunk_ns(
                    knot_tokens,
                    knot_ns,
                    coefficients,
                    float(tokens),
                    float(past[i]),
                    float(smallest),
                )
                if cost <= budget_ns or deficits[bucket] < min(cost, saved_limit_ns):
                    break
                chunk = smallest
                num_forced += 1
            costs[i] = chunk_ns(
                knot_tokens, knot_ns, coefficients, float(tokens), float(past[i]), float(chunk)
            )
            chunks[i] = chunk
            tokens += chunk
            left -= costs[i]
            deficits[bucket] -= costs[i]
            if chunk < remaining[i]:
                break
            i = _next_of(buckets, num_candidates, bucket, i)
    # Second pass: what is left goes to whoever can use it, in the same order of buckets.
    served[:] = 0
    for _ in range(len(weights)):
        bucket = _next_bucket(deficits, weights, buckets, num_candidates, served)
        if bucket < 0 or left <= 0:
            break
        served[bucket] = 1
        i = _first_of(buckets, num_candidates, bucket)
        while i < num_candidates and left > 0:
            if chunks[i] < remaining[i]:
                before = tokens - chunks[i]
                limit = min(remaining[i], max_tokens - before)
                chunk = _aligned_chunk(
                    knot_tokens, knot_ns, coefficients, before, past[i], remaining[i], limit,
                    costs[i] + left, alignment,
                )  # fmt: skip
                if chunk <= chunks[i]:
                    break
                cost = chunk_ns(
                    knot_tokens, knot_ns, coefficients, float(before), float(past[i]), float(chunk)
                )
                deficits[bucket] = max(0.0, deficits[bucket] - (cost - costs[i]))
                left -= cost - costs[i]
                costs[i] = cost
                chunks[i] = chunk
                tokens = before + chunk
                if chunk < remaining[i]:
                    break
            i = _next_of(buckets, num_candidates, bucket, i)
    if tokens == step_tokens and num_candidates > 0:
        served[:] = 0
        bucket = _next_bucket(deficits, weights, buckets, num_candidates, served)
        i = _first_of(buckets, num_candidates, bucket)
        chunk = min(remaining[i], alignment, max_tokens - tokens)
        if chunk > 0:
            chunks[i] = chunk
            costs[i] = chunk_ns(
                knot_tokens, knot_ns, coefficients, float(tokens), float(past[i]), float(chunk)
            )
            deficits[bucket] -= costs[i]
            left -= costs[i]
            num_forced += 1
    return budget_ns - left, num_forced


@kernel
def plan_step(
    state: Ints,
    order: Ints,
    counters: Ints,
    limits: Ints,
    bounds: Ints,
    weights: Floats,
    deficits: Floats,
    knot_tokens: Floats,
    knot_ns: Floats,
    prefill: Floats,
    tier_tokens: Ints,
    tier_ns: Ints,
    tier_slope_ns: float,
    decode: Floats,
    candidate_ints: Ints,
    candidate_costs: Floats,
    bucket_facts: Ints,
    plan_slots: Ints,
    plan_tokens: Ints,
    plan_past: Ints,
    freed: Ints,
    preempted: Ints,
    facts: Floats,
    budget_ns: float,
) -> None:
    """Plan one step and move `state` to what it will be after it. O(R + grants).

    `counters`: occupied slots, free KV blocks. `candidate_ints` [5, C] is scratch for the
    candidates: slot, past, remaining, bucket, chunk; `bucket_facts` [3, J] is scratch too.
    """
    facts[:] = 0.0
    num_active = _drop_gone(state, order, counters, freed, facts)
    _admit_decodes(
        state, order, counters, limits, plan_slots, plan_tokens, plan_past, preempted, facts,
        num_active,
    )  # fmt: skip
    num_decodes = int(facts[NUM_DECODES])
    if num_decodes:
        tokens = int(facts[DECODE_TOKENS])
        t0 = curve_ns(tier_tokens, tier_ns, tier_slope_ns, tokens)
        facts[DECODE_NS] = t0 * decode[0] + facts[DECODE_KV] * decode[1]
    num_candidates = _collect_candidates(
        state, order, counters, limits, bounds, candidate_ints, bucket_facts, num_active
    )
    if num_candidates == 0:
        deficits[:] = 0.0
        return
    base_ns = facts[DECODE_NS] if num_decodes else knot_ns[0]
    available = budget_ns - base_ns
    quantum = max(available, MIN_QUANTUM_SHARE * budget_ns)
    credit(deficits, weights, candidate_ints[3], num_candidates, quantum)
    spent, num_forced = grant_chunks(
        knot_tokens, knot_ns, prefill, weights, deficits,
        candidate_ints[1], candidate_ints[2], candidate_ints[3], candidate_ints[4],
        candidate_costs, bucket_facts[0], num_candidates,
        int(facts[STEP_TOKENS]), limits[MAX_TOKENS], limits[ALIGNMENT], available,
        MAX_SAVED_BUDGETS * quantum,
    )  # fmt: skip
    _apply_chunks(
        state, counters, limits, candidate_ints, plan_slots, plan_tokens, plan_past, facts,
        num_candidates,
    )  # fmt: skip
    facts[PREFILL_NS] = spent + (0.0 if num_decodes else knot_ns[0])
    facts[NUM_FORCED] = num_forced


@kernel
def _drop_gone(state: Ints, order: Ints, counters: Ints, freed: Ints, facts: Floats) -> int:
    """Free the slots of finished requests; keep the rest in arrival order."""
    kept = 0
    num_freed = 0
    for position in range(counters[0]):
        slot = order[position]
        if state[IS_GONE, slot]:
            counters[1] += state[BLOCKS, slot]
            state[BLOCKS, slot] = 0
            freed[num_freed] = slot
            num_freed += 1
        else:
            order[kept] = slot
            kept += 1
    counters[0] = kept
    facts[NUM_FREED] = num_freed
    return kept


@kernel
def _admit_decodes(
    state: Ints,
    order: Ints,
    counters: Ints,
    limits: Ints,
    plan_slots: Ints,
    plan_tokens: Ints,
    plan_past: Ints,
    preempted: Ints,
    facts: Floats,
    num_active: int,
) -> None:
    """Give every running decode its token (and its draft tokens), oldest first."""
    block = limits[BLOCK_TOKENS]
    tokens_left = limits[MAX_TOKENS]
    num_decodes = 0
    kv = 0
    last = num_active  # behind it, requests lost their KV to older ones
    position = 0
    while position < last:
        slot = order[position]
        position += 1
        computed = state[COMPUTED, slot]
        if not state[IS_RUNNING, slot] or state[TOKENS, slot] - computed != 1:
            continue
        if state[TOKENS, slot] >= state[LIMIT, slot]:
            continue  # its last token comes from the step before this one
        count = 1 + min(state[VERIFY, slot], state[LIMIT, slot] - state[TOKENS, slot] - 1)
        if count > tokens_left:
            count = 1
        if tokens_left < 1:
            break
        need = (computed + count + block - 1) // block - state[BLOCKS, slot]
        while need > counters[1] and last > position:
            last -= 1
            _preempt(state, counters, preempted, facts, order[last])
        if need > counters[1]:
            _preempt(state, counters, preempted, facts, slot)
            continue
        counters[1] -= max(need, 0)
        state[BLOCKS, slot] += max(need, 0)
        plan_slots[num_decodes] = slot
        plan_tokens[num_decodes] = count
        plan_past[num_decodes] = computed
        num_decodes += 1
        tokens_left -= count
        kv += computed + count
        # At least one token comes of it; what more was accepted is told by the facts.
        state[COMPUTED, slot] = computed + 1
        state[TOKENS, slot] += 1
    facts[NUM_DECODES] = num_decodes
    facts[STEP_TOKENS] = limits[MAX_TOKENS] - tokens_left
    facts[DECODE_TOKENS] = facts[STEP_TOKENS]
    facts[DECODE_KV] = kv


@kernel
def _preempt(state: Ints, counters: Ints, preempted: Ints, facts: Floats, slot: int) -> None:
    """Take a request's KV back; it computes its tokens again later."""
    if not state[IS_RUNNING, slot]:
        return
    counters[1] += state[BLOCKS, slot]
    state[BLOCKS, slot] = 0
    state[COMPUTED, slot] = 0
    state[IS_RUNNING, slot] = 0
    preempted[int(facts[NUM_PREEMPTED])] = slot
    facts[NUM_PREEMPTED] += 1


@kernel
def _collect_candidates(
    state: Ints,
    order: Ints,
    counters: Ints,
    limits: Ints,
    bounds: Ints,
    candidates: Ints,
    bucket_facts: Ints,
    num_active: int,
) -> int:
    """List the requests that may get a chunk, in arrival order; return how many.

    A bucket lists no more than a step could compute. A waiting request needs a place among the
    running and KV blocks for its whole sequence; both are counted here and taken with its first
    chunk. One that finds none holds back the later ones of its bucket, and after
    MAX_OVERTAKEN_PLANS those of all buckets, so nobody is overtaken for ever.
    """
    block = limits[BLOCK_TOKENS]
    free = counters[1]
    room = limits[MAX_RUNNING]
    for position in range(num_active):
        room -= state[IS_RUNNING, order[position]]
    bucket_facts[:] = 0
    is_open = True
    count = 0
    for position in range(num_active):
        slot = order[position]
        remaining = state[TOKENS, slot] - state[COMPUTED, slot]
        is_running = state[IS_RUNNING, slot]
        if (is_running and remaining <= 1) or not (is_running or is_open):
            continue
        bucket = bucket_of(bounds, state[TOKENS, slot])
        if (
            bucket_facts[_LISTED_TOKENS, bucket] >= limits[MAX_TOKENS]
            or bucket_facts[_LISTED, bucket] == MAX_CANDIDATES
        ):
            continue
        if not is_running:
            if bucket_facts[_IS_BLOCKED, bucket]:
                continue
            need = (state[TOKENS, slot] + block - 1) // block
            if room < 1 or need > free:
                bucket_facts[_IS_BLOCKED, bucket] = 1
                state[OVERTAKEN, slot] += 1
                is_open = state[OVERTAKEN, slot] < MAX_OVERTAKEN_PLANS
                continue
            room -= 1
            free -= need
        candidates[0, count] = slot
        candidates[1, count] = state[COMPUTED, slot]
        candidates[2, count] = remaining
        candidates[3, count] = bucket
        bucket_facts[_LISTED, bucket] += 1
        bucket_facts[_LISTED_TOKENS, bucket] += remaining
        count += 1
    return count


@kernel
def _apply_chunks(
    state: Ints,
    counters: Ints,
    limits: Ints,
    candidates: Ints,
    plan_slots: Ints,
    plan_tokens: Ints,
    plan_past: Ints,
    facts: Floats,
    num_candidates: int,
) -> None:
    """Append the granted chunks to the plan and compute them in `state`."""
    block = limits[BLOCK_TOKENS]
    at = int(facts[NUM_DECODES])
    for i in range(num_candidates):
        chunk = candidates[4, i]
        if chunk == 0:
            continue
        slot = candidates[0, i]
        if not state[IS_RUNNING, slot]:
            need = (state[TOKENS, slot] + block - 1) // block
            state[IS_RUNNING, slot] = 1
            state[BLOCKS, slot] = need
            counters[1] -= need
        plan_slots[at] = slot
        plan_tokens[at] = chunk
        plan_past[at] = state[COMPUTED, slot]
        at += 1
        state[COMPUTED, slot] += chunk
        if state[COMPUTED, slot] == state[TOKENS, slot]:
            state[TOKENS, slot] += 1
        facts[STEP_TOKENS] += chunk
    facts[NUM_CHUNKS] = at - int(facts[NUM_DECODES])


@kernel
def _aligned_chunk(
    knot_tokens: Floats,
    knot_ns: Floats,
    coefficients: Floats,
    step_tokens: int,
    past: int,
    remaining: int,
    limit: int,
    allowance_ns: float,
    alignment: int,
) -> int:
    """The largest chunk the allowance buys, rounded down unless it is the request's last."""
    if limit <= 0 or allowance_ns <= 0:
        return 0
    chunk = largest_chunk(
        knot_tokens, knot_ns, coefficients, float(step_tokens), float(past), limit, allowance_ns
    )
    if chunk == remaining:
        return chunk
    return chunk // alignment * alignment


@kernel
def _next_bucket(
    deficits: Floats, weights: Floats, buckets: Ints, num_candidates: int, served: Ints
) -> int:
    """The bucket with work, not served yet, that has saved most for its weight; ties go to the
    shortest requests. -1 for none."""
    best = -1
    for bucket in range(len(weights)):
        if served[bucket] or _first_of(buckets, num_candidates, bucket) == num_candidates:
            continue
        if best < 0 or deficits[bucket] * weights[best] > deficits[best] * weights[bucket]:
            best = bucket
    return best


@kernel
def _first_of(buckets: Ints, num_candidates: int, bucket: int) -> int:
    return _next_of(buckets, num_candidates, bucket, -1)


@kernel
def _next_of(buckets: Ints, num_candidates: int, bucket: int, after: int) -> int:
    """The next candidate of a bucket behind position `after`; `num_candidates` for none."""
    i = after + 1
    while i < num_candidates and buckets[i] != bucket:
        i += 1
    return i
