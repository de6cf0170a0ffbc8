"""The synchronised decode step of many ranks, compiled.

One loop serves every policy on the same arrivals. A step lasts as long as the slowest rank needs,
`a + b * running + c * KV tokens`; every running request emits one token in it. Requests end when
their output is done; in a closed loop the next one arrives at once.

A rank admits bound requests in order while running requests and KV allow it. When growth overruns
the KV, the request admitted last goes back to the front of the rank's queue (its tokens are not
computed again: prefill is elsewhere).

A moved sequence stands still while its KV is copied, and its KV counts against the room of both
ranks until then. Transfers share links: each of a rank's transfers gets an equal part of the link,
sending and receiving apart.
"""

# ruff: noqa: FBT001, FBT003  compiled functions take no keyword-only arguments

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel
from dsched.routing import kernels as k
from dsched.routing.calibration import MIN_STEPS, fit_if_due, learn_step
from dsched.routing.migration import plan_moves, sort_by_rank
from dsched.sim import policies as p

FREE = 0
WAITING = 1
RUNNING = 2
HELD = 3
MOVING = 4

S_STATUS = 0
"""Rows of the slot table [NUM_SLOT_ROWS, S]."""
S_RANK = 1
S_TOKENS = 2
S_LEFT = 3
S_PROMPT = 4
S_NEXT = 5
S_REQUEST = 6
S_SINCE = 7
S_MOVE_TO = 8
S_ADMITTED = 9
S_BOOKED = 10
"""Tokens when it was bound."""
S_ORDER = 11
"""Number of the binding."""
NUM_SLOT_ROWS = 12

R_RUNNING = 0
"""Rows of the rank table [NUM_RANK_ROWS, N]."""
R_STALLED = 1
R_KV = 2
"""KV tokens that a step reads."""
R_MEMORY = 3
"""KV tokens that take room: read, standing still, or arriving."""
R_WAITING = 4
R_WAITING_TOKENS = 5
R_PROMPT = 6
R_HEAD = 7
R_TAIL = 8
R_SENDING = 9
R_RECEIVING = 10
NUM_RANK_ROWS = 11

C_NUM_FREE = 0
"""Counters."""
C_HIGH_WATER = 1
C_NUM_HELD = 2
C_IN_SYSTEM = 3
C_NEXT_REQUEST = 4
C_DECISIONS = 5
C_BOUND = 6
C_ADMITTED = 7
C_NUM_MOVING = 8
C_STEP = 9
NUM_COUNTERS = 10

OUT_STEPS = 0
"""Sums over the measured steps."""
OUT_NS = 1
OUT_FLUID_NS = 2
OUT_BOUND_NS = 3
OUT_TOKENS = 4
OUT_IN_SYSTEM = 5
OUT_MOVES = 6
OUT_MOVED_TOKENS = 7
OUT_STALLED = 8
OUT_PREEMPTIONS = 9
OUT_FINISHED = 10
OUT_HELD_NS = 11
OUT_HELD = 12
OUT_MAX_HELD = 13
NUM_OUT = 14

IN_FLIGHT_S = 0.25
"""A link is given at most this many seconds of transfers at once, or one transfer."""
MAX_SCAN = 64
"""As in dsched.routing.holding."""


class Limits(NamedTuple):
    """Constants of the simulated group."""

    num_ranks: int
    kv_capacity_tokens: int
    max_running: int
    prices: NDArray[np.float64]
    """[3] true a, b, c in ns."""
    kv_token_bytes: float
    link_bytes_per_s: float
    is_closed: bool


class Rules(NamedTuple):
    """What the router does."""

    policy: int
    packs: bool
    is_late: bool
    migrates: bool
    calibrates: bool
    stale_steps: int
    max_hold_ns: float
    gather_ns: float
    max_moves: int
    hysteresis: float
    expected_steps: float


class Requests(NamedTuple):
    """Requests in order of arrival."""

    num_prompt_tokens: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    arrival_ns: NDArray[np.int64]
    """Open loop only."""
    num_done_tokens: NDArray[np.int64]
    """Output tokens that the first requests have emitted at the start; may be shorter."""


class State(NamedTuple):
    """Everything that changes."""

    slots: NDArray[np.int64]
    ranks: NDArray[np.int64]
    counters: NDArray[np.int64]
    free: NDArray[np.int64]
    held: NDArray[np.int64]
    moving: NDArray[np.int64]
    move_left_bytes: NDArray[np.float64]
    load_view: NDArray[np.float64]
    history: NDArray[np.float64]
    """[stale + 1, NUM_VIEW_ROWS, N] what the ranks held in the last steps."""
    sent: NDArray[np.float64]
    """[stale + 1, 2, N] requests and tokens bound in the last steps."""
    table: NDArray[np.int64]
    own_prices: NDArray[np.float64]
    factors: NDArray[np.float64]
    sums: NDArray[np.float64]
    targets: NDArray[np.float64]
    request_rank: NDArray[np.int64]
    out: NDArray[np.float64]


@kernel
def make_state(limits: Limits, rules: Rules, max_slots: int, num_requests: int) -> State:
    """Return an empty group."""
    num_ranks = limits.num_ranks
    slots = np.zeros((NUM_SLOT_ROWS, max_slots), np.int64)
    for slot in range(max_slots):
        slots[S_MOVE_TO, slot] = -1
    ranks = np.zeros((NUM_RANK_ROWS, num_ranks), np.int64)
    counters = np.zeros(NUM_COUNTERS, np.int64)
    counters[C_NUM_FREE] = max_slots
    table = np.zeros((k.NUM_ROWS, num_ranks), np.int64)
    for rank in range(num_ranks):
        ranks[R_HEAD, rank] = -1
        ranks[R_TAIL, rank] = -1
        table[k.KV_CAPACITY, rank] = limits.kv_capacity_tokens
        table[k.KV_LIMIT, rank] = limits.kv_capacity_tokens
        table[k.MAX_RUNNING, rank] = limits.max_running
    return State(
        slots,
        ranks,
        counters,
        np.arange(max_slots - 1, -1, -1),
        np.empty(max_slots, np.int64),
        np.empty(max_slots, np.int64),
        np.zeros(max_slots, np.float64),
        np.zeros((p.NUM_VIEW_ROWS, num_ranks), np.float64),
        np.zeros((rules.stale_steps + 1, p.NUM_VIEW_ROWS, num_ranks), np.float64),
        np.zeros((rules.stale_steps + 1, 2, num_ranks), np.float64),
        table,
        np.empty((3, num_ranks), np.float64),
        np.ones(3, np.float64),
        np.zeros((3, 3), np.float64),
        np.zeros(3, np.float64),
        np.full(num_requests, -1, np.int64),
        np.zeros(NUM_OUT, np.float64),
    )


@kernel
def refresh_view(state: State, rules: Rules) -> None:
    """Set what the router knows at the start of a step: `stale_steps` old, plus what it sent."""
    view, ranks = state.load_view, state.ranks
    for rank in range(view.shape[1]):
        view[p.RUNNING, rank] = ranks[R_RUNNING, rank] + ranks[R_STALLED, rank]
        view[p.WAITING, rank] = ranks[R_WAITING, rank]
        view[p.KV, rank] = ranks[R_MEMORY, rank] + ranks[R_WAITING_TOKENS, rank]
        view[p.PROMPT, rank] = ranks[R_PROMPT, rank]
        view[p.WAITING_TOKENS, rank] = ranks[R_WAITING_TOKENS, rank]
    size = rules.stale_steps + 1
    if size == 1:
        return
    step = state.counters[C_STEP]
    for row in range(view.shape[0]):
        for rank in range(view.shape[1]):
            state.history[step % size, row, rank] = view[row, rank]
            view[row, rank] = 0.0
            if step >= rules.stale_steps:
                view[row, rank] = state.history[(step + 1) % size, row, rank]
    for rank in range(view.shape[1]):
        state.sent[step % size, 0, rank] = 0.0
        state.sent[step % size, 1, rank] = 0.0
        for row in range(size):
            _credit(view, rank, state.sent[row, 0, rank], state.sent[row, 1, rank])


@kernel
def _credit(view: NDArray[np.float64], rank: int, num_requests: float, tokens: float) -> None:
    view[p.WAITING, rank] += num_requests
    view[p.KV, rank] += tokens
    view[p.PROMPT, rank] += tokens
    view[p.WAITING_TOKENS, rank] += tokens


@kernel
def arrive(state: State, limits: Limits, requests: Requests, now_ns: float) -> int:
    """Take in what has arrived; return how many. They are the last of the held ones."""
    counters, slots = state.counters, state.slots
    num_new = 0
    while counters[C_NUM_FREE] > 0 and counters[C_NEXT_REQUEST] < len(requests.num_prompt_tokens):
        request = counters[C_NEXT_REQUEST]
        if not limits.is_closed and requests.arrival_ns[request] > now_ns:
            break
        counters[C_NUM_FREE] -= 1
        slot = state.free[counters[C_NUM_FREE]]
        counters[C_HIGH_WATER] = max(counters[C_HIGH_WATER], slot + 1)
        done = 0
        if request < len(requests.num_done_tokens):
            done = requests.num_done_tokens[request]
        slots[S_REQUEST, slot] = request
        slots[S_PROMPT, slot] = requests.num_prompt_tokens[request]
        slots[S_TOKENS, slot] = requests.num_prompt_tokens[request] + done
        slots[S_LEFT, slot] = requests.num_output_tokens[request] - done
        slots[S_SINCE, slot] = int(now_ns)
        slots[S_MOVE_TO, slot] = -1
        slots[S_STATUS, slot] = HELD
        counters[C_NEXT_REQUEST] += 1
        counters[C_IN_SYSTEM] += 1
        state.held[counters[C_NUM_HELD]] = slot
        counters[C_NUM_HELD] += 1
        num_new += 1
    return num_new


@kernel
def _bind(state: State, rules: Rules, slot: int, rank: int) -> None:
    """Send a request to a rank: last in its engine's queue."""
    slots, ranks, counters = state.slots, state.ranks, state.counters
    tokens = slots[S_TOKENS, slot]
    slots[S_STATUS, slot] = WAITING
    slots[S_RANK, slot] = rank
    slots[S_NEXT, slot] = -1
    slots[S_BOOKED, slot] = tokens
    slots[S_ORDER, slot] = counters[C_BOUND]
    counters[C_BOUND] += 1
    if ranks[R_TAIL, rank] < 0:
        ranks[R_HEAD, rank] = slot
    else:
        slots[S_NEXT, ranks[R_TAIL, rank]] = slot
    ranks[R_TAIL, rank] = slot
    ranks[R_WAITING, rank] += 1
    ranks[R_WAITING_TOKENS, rank] += tokens
    ranks[R_PROMPT, rank] += slots[S_PROMPT, slot]
    _credit(state.load_view, rank, 1.0, float(tokens))
    if rules.stale_steps > 0:
        row = counters[C_STEP] % (rules.stale_steps + 1)
        state.sent[row, 0, rank] += 1.0
        state.sent[row, 1, rank] += tokens
    state.request_rank[slots[S_REQUEST, slot]] = rank


@kernel
def longest_tokens(state: State) -> int:
    """KV tokens of the bound request that was longest when bound (as `LongestBooking`)."""
    slots = state.slots
    longest = -1
    for slot in range(state.counters[C_HIGH_WATER]):
        if slots[S_STATUS, slot] == FREE or slots[S_STATUS, slot] == HELD:
            continue
        if (
            longest < 0
            or slots[S_BOOKED, slot] > slots[S_BOOKED, longest]
            or (
                slots[S_BOOKED, slot] == slots[S_BOOKED, longest]
                and slots[S_ORDER, slot] < slots[S_ORDER, longest]
            )
        ):
            longest = slot
    return int(slots[S_TOKENS, longest]) if longest >= 0 else 0


@kernel
def _pick_own(state: State, limits: Limits, tokens: int, level: int, ignore_room: bool) -> int:
    """Ask the compiled part of `DecodeRouter`."""
    rank, _, _, _, _ = k.pick_rank(
        state.table,
        state.own_prices,
        limits.num_ranks,
        tokens,
        tokens,
        k.ANY_DP_RANK,
        np.empty(0, np.int64),
        state.counters[C_BOUND] % limits.num_ranks,
        k.UP,
        level,
        np.empty(0, np.bool_),
        ignore_room,
    )
    return rank


@kernel
def route_bound(
    state: State, limits: Limits, rules: Rules, draws: NDArray[np.float64], num_new: int
) -> None:
    """Bind new requests in order of arrival."""
    counters = state.counters
    first = counters[C_NUM_HELD] - num_new
    longest = longest_tokens(state) if rules.packs else 0
    for at in range(first, counters[C_NUM_HELD]):
        slot = state.held[at]
        tokens = state.slots[S_TOKENS, slot]
        if rules.policy == p.TWO_TERM:
            p.fill_table(state.table, state.load_view)
            rank = _pick_own(state, limits, tokens, longest, False)
            if rank < 0:
                rank = _pick_own(state, limits, tokens, longest, True)
            if rules.packs:
                longest = max(longest, tokens)
        else:
            weight = state.own_prices[k.REQUEST_NS, 0] / state.own_prices[k.KV_TOKEN_NS, 0]
            rank = p.pick_peer(
                rules.policy,
                state.load_view,
                float(limits.kv_capacity_tokens),
                weight / p.DYNAMO_BLOCK_TOKENS,
                counters[C_DECISIONS],
                draws[counters[C_DECISIONS] % len(draws)],
            )
        counters[C_DECISIONS] += 1
        _bind(state, rules, slot, rank)
    counters[C_NUM_HELD] = first


@kernel
def _next_held(
    state: State, limits: Limits, rules: Rules, longest: int, now_ns: float
) -> tuple[int, int]:
    """Position of the held request to bind now, and its rank; (-1, -1) when none fits."""
    slots, held, num_held = state.slots, state.held, state.counters[C_NUM_HELD]
    if now_ns - slots[S_SINCE, held[0]] >= rules.max_hold_ns:
        return 0, _pick_own(state, limits, slots[S_TOKENS, held[0]], longest, True)
    limit = k.NO_LIMIT_TOKENS
    if rules.gather_ns > 0.0:
        limit = k.level_tokens(state.table, state.own_prices, limits.num_ranks, longest)
        for at in range(min(num_held, MAX_SCAN)):
            if now_ns - slots[S_SINCE, held[at]] < rules.gather_ns:
                break
            tokens = slots[S_TOKENS, held[at]]
            if tokens > limit:
                rank = _pick_own(state, limits, tokens, longest, False)
                if rank >= 0:
                    return at, rank
    room = min(k.largest_room(state.table, limits.num_ranks, k.ANY_DP_RANK, k.UP), limit)
    best = -1
    for at in range(num_held):
        tokens = slots[S_TOKENS, held[at]]
        if tokens <= room and (best < 0 or tokens > slots[S_TOKENS, held[best]]):
            best = at
    if best < 0:
        return -1, -1
    return best, _pick_own(state, limits, slots[S_TOKENS, held[best]], longest, False)


@kernel
def route_held(
    state: State, limits: Limits, rules: Rules, now_ns: float, is_measured: bool
) -> None:
    """Bind held requests while one fits: the longest first."""
    counters, slots = state.counters, state.slots
    longest = longest_tokens(state) if rules.packs else 0
    while counters[C_NUM_HELD] > 0:
        p.fill_table(state.table, state.load_view)
        at, rank = _next_held(state, limits, rules, longest, now_ns)
        if rank < 0:
            break
        slot = state.held[at]
        for later in range(at, counters[C_NUM_HELD] - 1):
            state.held[later] = state.held[later + 1]
        counters[C_NUM_HELD] -= 1
        counters[C_DECISIONS] += 1
        if rules.packs:
            longest = max(longest, slots[S_TOKENS, slot])
        if is_measured and now_ns > slots[S_SINCE, slot] + 1.0:
            state.out[OUT_HELD_NS] += now_ns - slots[S_SINCE, slot]
            state.out[OUT_HELD] += 1.0
        _bind(state, rules, slot, rank)


@kernel
def admit(state: State, limits: Limits) -> None:
    """Let each rank start its bound requests in order while there is room."""
    slots, ranks, counters = state.slots, state.ranks, state.counters
    for rank in range(limits.num_ranks):
        while ranks[R_HEAD, rank] >= 0:
            slot = ranks[R_HEAD, rank]
            tokens = slots[S_TOKENS, slot]
            if ranks[R_RUNNING, rank] + ranks[R_STALLED, rank] >= limits.max_running:
                break
            is_empty = ranks[R_MEMORY, rank] == 0
            if ranks[R_MEMORY, rank] + tokens > limits.kv_capacity_tokens and not is_empty:
                break
            ranks[R_HEAD, rank] = slots[S_NEXT, slot]
            if ranks[R_HEAD, rank] < 0:
                ranks[R_TAIL, rank] = -1
            ranks[R_WAITING, rank] -= 1
            ranks[R_WAITING_TOKENS, rank] -= tokens
            slots[S_STATUS, slot] = RUNNING
            slots[S_ADMITTED, slot] = counters[C_ADMITTED]
            counters[C_ADMITTED] += 1
            ranks[R_RUNNING, rank] += 1
            ranks[R_KV, rank] += tokens
            ranks[R_MEMORY, rank] += tokens


@kernel
def _planned_load(
    state: State, limits: Limits
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Requests, KV tokens, room and link allowance of each rank once all transfers are done."""
    slots, ranks = state.slots, state.ranks
    running = np.empty(limits.num_ranks, np.int64)
    kv = np.empty(limits.num_ranks, np.int64)
    room = np.empty(limits.num_ranks, np.int64)
    for rank in range(limits.num_ranks):
        running[rank] = ranks[R_RUNNING, rank]
        kv[rank] = ranks[R_KV, rank]
        room[rank] = max(0, limits.kv_capacity_tokens - ranks[R_MEMORY, rank])
        is_full = ranks[R_RUNNING, rank] + ranks[R_STALLED, rank] >= limits.max_running
        if is_full or ranks[R_WAITING, rank] > 0:
            room[rank] = 0
    allowance = int(limits.link_bytes_per_s * IN_FLIGHT_S / limits.kv_token_bytes)
    link = np.empty((2, limits.num_ranks), np.int64)
    for rank in range(limits.num_ranks):
        link[0, rank] = allowance
        link[1, rank] = allowance
    for at in range(state.counters[C_NUM_MOVING]):
        slot = state.moving[at]
        left = int(state.move_left_bytes[slot] / limits.kv_token_bytes) + 1
        to_rank = slots[S_MOVE_TO, slot]
        running[to_rank] += 1
        kv[to_rank] += slots[S_TOKENS, slot]
        link[0, slots[S_RANK, slot]] -= left
        link[1, to_rank] -= left
    for rank in range(limits.num_ranks):
        for row in range(2):
            if link[row, rank] >= allowance:
                # An idle link may start any one transfer.
                link[row, rank] = max(allowance, limits.kv_capacity_tokens)
    return running, kv, room, link


@kernel
def start_moves(state: State, limits: Limits, rules: Rules, is_measured: bool) -> None:
    """Plan and start transfers; the moved sequences stand still from now on."""
    slots, ranks, counters = state.slots, state.ranks, state.counters
    size = counters[C_HIGH_WATER]
    sequence_slot = np.empty(size, np.int64)
    sequence_rank = np.empty(size, np.int64)
    sequence_kv = np.empty(size, np.int64)
    is_movable = np.empty(size, np.bool_)
    num_sequences = 0
    for slot in range(size):
        if slots[S_STATUS, slot] == RUNNING:
            sequence_slot[num_sequences] = slot
            sequence_rank[num_sequences] = slots[S_RANK, slot]
            sequence_kv[num_sequences] = slots[S_TOKENS, slot]
            is_movable[num_sequences] = True
            num_sequences += 1
    sequence_rank = sequence_rank[:num_sequences]
    order, start = sort_by_rank(sequence_rank, limits.num_ranks)
    running, kv, room, link = _planned_load(state, limits)
    move_sequence = np.empty(max(1, rules.max_moves), np.int64)
    move_to = np.empty(max(1, rules.max_moves), np.int64)
    num_moves = plan_moves(
        sequence_kv,
        is_movable,
        order,
        start,
        running,
        kv,
        state.own_prices,
        room,
        link,
        rules.max_moves,
        rules.hysteresis,
        rules.expected_steps,
        limits.kv_token_bytes / limits.link_bytes_per_s * 1e9,
        move_sequence,
        move_to,
    )
    for at in range(num_moves):
        slot = sequence_slot[move_sequence[at]]
        from_rank = slots[S_RANK, slot]
        to_rank = move_to[at]
        tokens = slots[S_TOKENS, slot]
        slots[S_STATUS, slot] = MOVING
        slots[S_MOVE_TO, slot] = to_rank
        state.move_left_bytes[slot] = tokens * limits.kv_token_bytes
        ranks[R_RUNNING, from_rank] -= 1
        ranks[R_KV, from_rank] -= tokens
        ranks[R_STALLED, from_rank] += 1
        ranks[R_SENDING, from_rank] += 1
        ranks[R_MEMORY, to_rank] += tokens
        ranks[R_RECEIVING, to_rank] += 1
        state.moving[counters[C_NUM_MOVING]] = slot
        counters[C_NUM_MOVING] += 1
        if is_measured:
            state.out[OUT_MOVES] += 1.0
            state.out[OUT_MOVED_TOKENS] += tokens


@kernel
def transfer(state: State, limits: Limits, step_ns: float) -> None:
    """Copy for `step_ns`; sequences whose copy is complete go on at their new rank."""
    slots, ranks, counters = state.slots, state.ranks, state.counters
    for at in range(counters[C_NUM_MOVING]):
        slot = state.moving[at]
        sharing = max(
            ranks[R_SENDING, slots[S_RANK, slot]], ranks[R_RECEIVING, slots[S_MOVE_TO, slot]]
        )
        state.move_left_bytes[slot] -= limits.link_bytes_per_s * step_ns * 1e-9 / sharing
    kept = 0
    for at in range(counters[C_NUM_MOVING]):
        slot = state.moving[at]
        if state.move_left_bytes[slot] > 0.0:
            state.moving[kept] = slot
            kept += 1
            continue
        from_rank = slots[S_RANK, slot]
        to_rank = slots[S_MOVE_TO, slot]
        tokens = slots[S_TOKENS, slot]
        ranks[R_STALLED, from_rank] -= 1
        ranks[R_SENDING, from_rank] -= 1
        ranks[R_MEMORY, from_rank] -= tokens
        ranks[R_PROMPT, from_rank] -= slots[S_PROMPT, slot]
        ranks[R_RECEIVING, to_rank] -= 1
        ranks[R_PROMPT, to_rank] += slots[S_PROMPT, slot]
        ranks[R_RUNNING, to_rank] += 1
        ranks[R_KV, to_rank] += tokens
        slots[S_STATUS, slot] = RUNNING
        slots[S_RANK, slot] = to_rank
        slots[S_MOVE_TO, slot] = -1
    counters[C_NUM_MOVING] = kept


@kernel
def emit(state: State, is_measured: bool) -> None:
    """Every running request emits a token; some end."""
    slots, ranks, counters = state.slots, state.ranks, state.counters
    for slot in range(counters[C_HIGH_WATER]):
        if slots[S_STATUS, slot] != RUNNING:
            continue
        rank = slots[S_RANK, slot]
        slots[S_TOKENS, slot] += 1
        slots[S_LEFT, slot] -= 1
        ranks[R_KV, rank] += 1
        ranks[R_MEMORY, rank] += 1
        if slots[S_LEFT, slot] > 0:
            continue
        ranks[R_RUNNING, rank] -= 1
        ranks[R_KV, rank] -= slots[S_TOKENS, slot]
        ranks[R_MEMORY, rank] -= slots[S_TOKENS, slot]
        ranks[R_PROMPT, rank] -= slots[S_PROMPT, slot]
        slots[S_STATUS, slot] = FREE
        state.free[counters[C_NUM_FREE]] = slot
        counters[C_NUM_FREE] += 1
        counters[C_IN_SYSTEM] -= 1
        if is_measured:
            state.out[OUT_FINISHED] += 1.0


@kernel
def preempt(state: State, limits: Limits, is_measured: bool) -> None:
    """Where growth overran the KV, send the request admitted last back to the queue's front."""
    slots, ranks = state.slots, state.ranks
    for rank in range(limits.num_ranks):
        while ranks[R_MEMORY, rank] > limits.kv_capacity_tokens and ranks[R_RUNNING, rank] > 1:
            last = -1
            for slot in range(state.counters[C_HIGH_WATER]):
                if slots[S_STATUS, slot] != RUNNING or slots[S_RANK, slot] != rank:
                    continue
                if last < 0 or slots[S_ADMITTED, slot] > slots[S_ADMITTED, last]:
                    last = slot
            tokens = slots[S_TOKENS, last]
            slots[S_STATUS, last] = WAITING
            ranks[R_RUNNING, rank] -= 1
            ranks[R_KV, rank] -= tokens
            ranks[R_MEMORY, rank] -= tokens
            ranks[R_WAITING, rank] += 1
            ranks[R_WAITING_TOKENS, rank] += tokens
            slots[S_NEXT, last] = ranks[R_HEAD, rank]
            ranks[R_HEAD, rank] = last
            if ranks[R_TAIL, rank] < 0:
                ranks[R_TAIL, rank] = last
            if is_measured:
                state.out[OUT_PREEMPTIONS] += 1.0


@kernel
def step_time(state: State, limits: Limits, is_measured: bool) -> float:
    """Return how long the step takes, and add it to the sums beside the fluid reference."""
    slots, ranks, counters, out = state.slots, state.ranks, state.counters, state.out
    base_ns, request_ns, kv_token_ns = limits.prices
    step_ns = 0.0
    running = 0
    read_tokens = 0
    for rank in range(limits.num_ranks):
        cost = base_ns + request_ns * ranks[R_RUNNING, rank] + kv_token_ns * ranks[R_KV, rank]
        step_ns = max(step_ns, cost)
        running += ranks[R_RUNNING, rank]
        read_tokens += ranks[R_KV, rank]
    if not is_measured:
        return step_ns
    # The reference runs everything that is in the system, also what waits, is held, or moves.
    all_tokens = 0
    longest = 0
    for slot in range(counters[C_HIGH_WATER]):
        if slots[S_STATUS, slot] == FREE:
            continue
        all_tokens += slots[S_TOKENS, slot]
        if slots[S_STATUS, slot] != HELD:
            longest = max(longest, slots[S_TOKENS, slot])
    in_system = counters[C_IN_SYSTEM]
    fluid_ns = base_ns + (request_ns * in_system + kv_token_ns * all_tokens) / limits.num_ranks
    out[OUT_STEPS] += 1.0
    out[OUT_NS] += step_ns
    out[OUT_FLUID_NS] += fluid_ns
    out[OUT_BOUND_NS] += max(fluid_ns, base_ns + request_ns + kv_token_ns * longest)
    out[OUT_TOKENS] += running
    out[OUT_IN_SYSTEM] += in_system
    out[OUT_STALLED] += counters[C_NUM_MOVING]
    out[OUT_MAX_HELD] = max(out[OUT_MAX_HELD], counters[C_NUM_HELD])
    return step_ns


@kernel
def calibrate(
    state: State, limits: Limits, start_prices: NDArray[np.float64], measured_ns: float
) -> None:
    """As `StepPrices.observe`: learn from a step as explained by the costliest rank."""
    ranks = state.ranks
    prices = np.empty(3, np.float64)
    for row in range(3):
        prices[row] = start_prices[row] * state.factors[row]
    slowest = 0
    slowest_cost = -1.0
    for rank in range(limits.num_ranks):
        cost = prices[k.REQUEST_NS] * ranks[R_RUNNING, rank] + (
            prices[k.KV_TOKEN_NS] * ranks[R_KV, rank]
        )
        if cost > slowest_cost:
            slowest = rank
            slowest_cost = cost
    parts = start_prices.copy()
    parts[k.REQUEST_NS] *= ranks[R_RUNNING, slowest]
    parts[k.KV_TOKEN_NS] *= ranks[R_KV, slowest]
    learn_step(state.sums, state.targets, parts, measured_ns)
    fit_if_due(state.sums, state.targets, state.factors, state.counters[C_STEP] + 1)
    if state.counters[C_STEP] + 1 >= MIN_STEPS:
        for rank in range(limits.num_ranks):
            for row in range(3):
                state.own_prices[row, rank] = start_prices[row] * state.factors[row]


@kernel
def run_group(
    limits: Limits,
    rules: Rules,
    requests: Requests,
    concurrency: int,
    start_prices: NDArray[np.float64],
    draws: NDArray[np.float64],
    noise: NDArray[np.float64],
    num_steps: int,
    warm_steps: int,
    measure_ns: tuple[float, float],
) -> State:
    """Run the group for `num_steps`; measure after `warm_steps`, or within `measure_ns` if open.

    Closed loop when `limits.is_closed`: `concurrency` requests are in the system at any time.
    `noise` multiplies the step times that calibration sees.
    """
    num_requests = len(requests.num_prompt_tokens)
    max_slots = max(1, concurrency if limits.is_closed else num_requests)
    state = make_state(limits, rules, max_slots, num_requests)
    for rank in range(limits.num_ranks):
        for row in range(3):
            state.own_prices[row, rank] = start_prices[row]
    counters = state.counters
    now_ns = 0.0
    for step in range(num_steps):
        counters[C_STEP] = step
        is_measured = step >= warm_steps
        if not limits.is_closed:
            if counters[C_IN_SYSTEM] == 0:
                if counters[C_NEXT_REQUEST] >= num_requests:
                    break
                now_ns = max(now_ns, float(requests.arrival_ns[counters[C_NEXT_REQUEST]]))
            is_measured = measure_ns[0] <= now_ns < measure_ns[1]
        refresh_view(state, rules)
        num_new = arrive(state, limits, requests, now_ns)
        if rules.is_late:
            route_held(state, limits, rules, now_ns, is_measured)
        else:
            route_bound(state, limits, rules, draws, num_new)
        admit(state, limits)
        if rules.migrates:
            start_moves(state, limits, rules, is_measured)
        step_ns = step_time(state, limits, is_measured)
        if rules.calibrates:
            calibrate(state, limits, start_prices, step_ns * noise[step % len(noise)])
        now_ns += step_ns
        transfer(state, limits, step_ns)
        emit(state, is_measured)
        preempt(state, limits, is_measured)
    return state
