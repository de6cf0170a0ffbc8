"""Compiled inner loops of decode routing.

Each has a plain numpy twin with the same answers in `tests/reference/routing_decode.py`.

The load of all ranks is one int64 table of shape [NUM_ROWS, D], so that a call passes one array
and a choice reads each row once. Row numbers are the constants below.

All choices are total: by cost first, then the rank that comes first when counting from
`tie_offset` and wrapping around. Costs are compared exactly; equal loads give equal costs.
"""

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel

OWN_RUNNING = 0
"""Requests that this router sent and that have not ended."""
OWN_KV = 1
"""Their KV tokens: prompt and emitted."""
OTHER_RUNNING = 2
"""Requests on the rank that this router did not send, as far as reports show."""
OTHER_KV = 3
SHARED_KV = 4
"""KV tokens counted more than once in OWN_KV + OTHER_KV, because prefixes are shared."""
KV_CAPACITY = 5
KV_LIMIT = 6
"""Capacity less the headroom that running requests grow into."""
MAX_RUNNING = 7
STATE = 8
DP_RANK = 9
NUM_ROWS = 10

UP = 0
SUSPECT = 1
DRAINING = 2
DOWN = 3
REMOVED = 4

BASE_NS = 0
"""Row of the price table [3, D]: a, what a step costs when nothing runs. Choices depend on it only
where ranks differ in it."""
REQUEST_NS = 1
"""b: what one more running request adds to a step."""
KV_TOKEN_NS = 2
"""c: what one more KV token adds to a step."""

NO_LIMIT_TOKENS = 1 << 62

HOME_MARGIN = 4.0
"""Requests that another router is assumed to have just sent to its own ranks. Lower: routers with
the same view fill the same rank (1 costs 1.2 points with four routers in simulation). Higher: a
router that gets more traffic than the others cannot use their ranks."""
HEARD_MARGIN = 1.0
"""Requests, whatever their prompt, that a router which tells what it sends is assumed to have sent
to its own ranks and not yet told. Lower: those that arrive within a millisecond or so fill the same
rank (0 costs 0.8 points with four routers in simulation). Higher: as above, and where requests are
few and long it keeps routers from each other's ranks (4 prompts cost 4 points)."""

HERE = 0
"""Values of `is_away`: the rank is at home with this router."""
AWAY = 1
"""With one that is known by reports alone."""
AWAY_HEARD = 2
"""With one that tells what it sends."""

NO_RANK = -1
ANY_DP_RANK = -1


@kernel
def _is_listed(excluded: NDArray[np.int64], rank: int) -> bool:
    found = False
    for index in range(excluded.shape[0]):
        found |= excluded[index] == rank
    return found


@kernel
def has_room(table: NDArray[np.int64], rank: int, wanted_tokens: int) -> bool:
    """Whether `rank` can start a request that wants `wanted_tokens` of KV now.

    An empty rank takes whatever its capacity holds; the headroom is for sharing.
    """
    running = table[OWN_RUNNING, rank] + table[OTHER_RUNNING, rank]
    if running >= table[MAX_RUNNING, rank]:
        return False
    used = table[OWN_KV, rank] + table[OTHER_KV, rank] - table[SHARED_KV, rank]
    if used < 0:
        used = 0
    if used + wanted_tokens <= table[KV_LIMIT, rank]:
        return True
    return bool(running == 0 and used == 0 and wanted_tokens <= table[KV_CAPACITY, rank])


@kernel
def least_base(prices: NDArray[np.float64], num_ranks: int) -> float:
    """Least base of all ranks. Costs count what a rank's own is longer, so that they are the same
    as without bases where all are alike. O(D)."""
    least = np.inf
    for rank in range(num_ranks):
        least = min(least, prices[BASE_NS, rank])
    return least


@kernel
def home_margin(prices: NDArray[np.float64], rank: int, prompt_tokens: int, is_away: int) -> float:
    """Return what its home router may just have sent to a rank, in ns; 0 `HERE`."""
    if is_away == AWAY_HEARD:
        return float(HEARD_MARGIN * prices[REQUEST_NS, rank])
    if is_away == AWAY:
        one = prices[REQUEST_NS, rank] + prices[KV_TOKEN_NS, rank] * prompt_tokens
        return float(HOME_MARGIN * one)
    return 0.0


@kernel
def pick_rank(
    table: NDArray[np.int64],
    prices: NDArray[np.float64],
    num_ranks: int,
    prompt_tokens: int,
    wanted_tokens: int,
    dp_rank: int,
    excluded: NDArray[np.int64],
    tie_offset: int,
    max_state: int,
    level_tokens: int,
    is_away: NDArray[np.int8],
    ignore_room: bool,  # noqa: FBT001  compiled functions take no keyword-only arguments
) -> tuple[int, float, int, int, int]:
    """Choose an eligible rank by its cost after adding the request. O(D).

    The fullest of those that cost at most what a lone request of `level_tokens` costs; if there is
    none (always with 0), the one with the least cost.

    With several routers each rank has a home router. A rank that is at home elsewhere (`is_away`
    [D], or empty where all are here) is taken as if that router had just sent it something
    (`home_margin`): it is chosen only where it is cheaper by that much, so routers with the same
    view do not all fill the same rank.

    Returns (rank or NO_RANK, cost in ns, ranks that may be used, those whose whole KV could hold
    the request, those with room now).
    """
    base = least_base(prices, num_ranks)
    best = NO_RANK
    best_cost = np.inf
    fullest = NO_RANK
    fullest_cost = -1.0
    num_usable = 0
    num_large_enough = 0
    num_with_room = 0
    for position in range(num_ranks):
        rank = position + tie_offset
        if rank >= num_ranks:
            rank -= num_ranks
        if table[STATE, rank] > max_state:
            continue
        if dp_rank != ANY_DP_RANK and table[DP_RANK, rank] != dp_rank:
            continue
        if excluded.shape[0] and _is_listed(excluded, rank):
            continue
        num_usable += 1
        if prompt_tokens >= table[KV_CAPACITY, rank]:
            continue
        num_large_enough += 1
        if has_room(table, rank, wanted_tokens):
            num_with_room += 1
        elif not ignore_room:
            continue
        more_base = prices[BASE_NS, rank] - base
        running = table[OWN_RUNNING, rank] + table[OTHER_RUNNING, rank] + 1
        tokens = table[OWN_KV, rank] + table[OTHER_KV, rank] + prompt_tokens
        cost = prices[REQUEST_NS, rank] * running + prices[KV_TOKEN_NS, rank] * tokens + more_base
        if is_away.shape[0]:
            cost += home_margin(prices, rank, prompt_tokens, is_away[rank])
        if cost < best_cost:
            best = rank
            best_cost = cost
        if level_tokens and cost > fullest_cost:
            level = prices[REQUEST_NS, rank] + prices[KV_TOKEN_NS, rank] * level_tokens + more_base
            if cost <= level:
                fullest = rank
                fullest_cost = cost
    if fullest != NO_RANK:
        return fullest, fullest_cost, num_usable, num_large_enough, num_with_room
    return best, best_cost, num_usable, num_large_enough, num_with_room


@kernel
def largest_room(table: NDArray[np.int64], num_ranks: int, dp_rank: int, max_state: int) -> int:
    """KV tokens that the roomiest usable rank can still take; -1 if none takes a request. O(D)."""
    largest = -1
    for rank in range(num_ranks):
        if table[STATE, rank] > max_state:
            continue
        if dp_rank != ANY_DP_RANK and table[DP_RANK, rank] != dp_rank:
            continue
        running = table[OWN_RUNNING, rank] + table[OTHER_RUNNING, rank]
        if running >= table[MAX_RUNNING, rank]:
            continue
        used = max(0, table[OWN_KV, rank] + table[OTHER_KV, rank] - table[SHARED_KV, rank])
        room = table[KV_LIMIT, rank] - used
        if running == 0 and used == 0:
            room = table[KV_CAPACITY, rank]
        largest = max(largest, room)
    return largest


@kernel
def level_tokens(
    table: NDArray[np.int64], prices: NDArray[np.float64], num_ranks: int, longest_tokens: int
) -> int:
    """Return the prompt whose cost alone is the mean cost of up ranks, or `longest_tokens` if more.

    A request up to that length does not have to stretch the group's step. With less than one
    request a rank there is nobody to slow down, so no limit. O(D).
    """
    total = 0.0
    num_running = 0
    request_ns = 0.0
    kv_token_ns = 0.0
    num_up = 0
    for rank in range(num_ranks):
        if table[STATE, rank] != UP:
            continue
        num_up += 1
        num_running += table[OWN_RUNNING, rank] + table[OTHER_RUNNING, rank]
        total += prices[REQUEST_NS, rank] * (table[OWN_RUNNING, rank] + table[OTHER_RUNNING, rank])
        total += prices[KV_TOKEN_NS, rank] * (table[OWN_KV, rank] + table[OTHER_KV, rank])
        request_ns += prices[REQUEST_NS, rank]
        kv_token_ns += prices[KV_TOKEN_NS, rank]
    if num_running < num_up or kv_token_ns <= 0.0:
        return NO_LIMIT_TOKENS
    return max(longest_tokens, int((total - request_ns) / kv_token_ns))
