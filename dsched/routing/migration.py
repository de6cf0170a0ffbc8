"""Move running sequences from costly ranks to cheap ones.

In:  a `MigrationView`: every running sequence with its rank and KV tokens, the load that each rank
     will have once the transfers under way are done, its room, and what its links may still carry.
Out: a `MigrationPlan`: at most `max_moves` moves, in the order in which they were found.

Placement decides once, lengths reveal themselves later: a rank whose requests all turn out long
holds up every step of the whole group. Where requests are few and huge (agentic traffic: five a
rank, single ones of 0.9M tokens) no placement rule keeps ranks level, and moving is the only lever
short of splitting one request's KV over ranks.

The rule, repeated while moves are left: take the costliest rank h. Try, with every rank l that has
room, to hand over one sequence, to exchange one against one, or one against two; the change is as
good as it makes max(cost of h, cost of l) small. Below `floor` (the mean, or the cost of the
longest sequence alone, which nothing can lower) further levelling gains nothing, so among changes
that get there the one with the fewest tokens to transfer wins; then fewer moves, the cheaper l, the
lower numbers. One-way moves alone get stuck as soon as every sequence is larger than the gap;
exchanges do not.

Nothing moves when (step time of h) <= (1 + hysteresis) * (mean step time), nor when the modelled
gain does not pay for the transfer: `gain_ns * all running requests * expected_steps` of saved time
against the time that the moved requests stand still.

Never: to a rank without room for the sequence (both copies exist during the transfer, so an
exchange needs room on both sides), over a link's allowance, from or to a rank that is not up, or a
sequence that is moving already.

Pure: no clock, no randomness. O(R log R + max_moves * max_evaluations). A plain twin is in
tests/reference/routing_migration.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.jit import kernel
from dsched.routing.kernels import BASE_NS, KV_TOKEN_NS, REQUEST_NS

DEFAULT_MAX_MOVES = 4
DEFAULT_HYSTERESIS = 0.005
"""Excess of the costliest rank's step over the mean step that is left alone. Lower: moves for
gains within the noise of the cost model. Higher: throughput left behind, one for one."""
MAX_EVALUATIONS = 20_000
"""Changes tried for each costliest rank, cheapest partner first. Lower: with many sequences only
the cheapest few ranks are partners. Higher: time."""
MAX_PAIR_SEQUENCES = 16
"""Two-for-one exchanges are tried with ranks that have at most this many sequences; with more of
them one-for-one exchanges are fine enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationConfig:
    """Limits of migration."""

    max_moves: int = DEFAULT_MAX_MOVES
    """Moves in one plan."""
    hysteresis: float = DEFAULT_HYSTERESIS
    expected_steps: float = 100.0
    """Steps for which a gain is expected to last."""
    stall_ns_per_token: float = 0.0
    """Time for which a moved request stands still, for each of its KV tokens."""

    def __post_init__(self) -> None:
        if self.max_moves < 0:
            raise ValueError(f"max_moves is {self.max_moves}; it must not be negative")
        for name in ("hysteresis", "expected_steps", "stall_ns_per_token"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} is {value}; it must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MigrationView:
    """Running sequences and ranks. R sequences, D ranks."""

    sequence_rank: NDArray[np.int64]
    """[R] rank that each sequence is on."""
    sequence_kv_tokens: NDArray[np.int64]
    """[R]"""
    is_movable: NDArray[np.bool_]
    """[R] false for sequences that are moving already or that their engine cannot move."""
    num_running: NDArray[np.int64]
    """[D] once the transfers under way are done; may count more than the sequences here."""
    num_kv_tokens: NDArray[np.int64]
    """[D] the same, in KV tokens."""
    prices: NDArray[np.float64]
    """[3, D] a, b, c of each rank in ns."""
    room_tokens: NDArray[np.int64]
    """[D] KV tokens that each rank can take now; 0 for ranks that are not up."""
    link_tokens: NDArray[np.int64]
    """[2, D] KV tokens that each rank may still send and receive; 0 for ranks that are not up."""

    def __post_init__(self) -> None:
        num_ranks = len(self.num_running)
        num_sequences = len(self.sequence_rank)
        shapes = (
            ("sequence_kv_tokens", self.sequence_kv_tokens.shape, (num_sequences,)),
            ("is_movable", self.is_movable.shape, (num_sequences,)),
            ("num_kv_tokens", self.num_kv_tokens.shape, (num_ranks,)),
            ("prices", self.prices.shape, (3, num_ranks)),
            ("room_tokens", self.room_tokens.shape, (num_ranks,)),
            ("link_tokens", self.link_tokens.shape, (2, num_ranks)),
        )
        for name, shape, expected in shapes:
            if shape != expected:
                raise ValueError(f"{name} has shape {shape}; it must be {expected}")
        if num_sequences and not (
            self.sequence_rank.min() >= 0 and self.sequence_rank.max() < num_ranks
        ):
            raise ValueError(
                f"sequence_rank is within {self.sequence_rank.min()}..{self.sequence_rank.max()}; "
                f"there are {num_ranks} ranks"
            )
        if not np.isfinite(self.prices).all() or (num_ranks and self.prices.min() < 0.0):
            raise ValueError("prices must be finite and not negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One sequence to transfer."""

    sequence: int
    """Position in the view."""
    from_rank: int
    to_rank: int
    num_kv_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """Moves to start now."""

    moves: tuple[Move, ...]
    step_ns: float
    """Modelled step time before, over all ranks."""
    planned_step_ns: float
    """Modelled step time when the moves are done."""


def plan_migrations(view: MigrationView, config: MigrationConfig | None = None) -> MigrationPlan:
    """Choose the moves that lower the modelled step time most.

    >>> one = np.ones(2, np.int64)
    >>> view = MigrationView(
    ...     sequence_rank=np.array([0, 0]), sequence_kv_tokens=np.array([500, 400]),
    ...     is_movable=np.array([True, True]), num_running=np.array([2, 0]),
    ...     num_kv_tokens=np.array([900, 0]), prices=np.array([[0.0, 0], [1, 1], [1, 1]]),
    ...     room_tokens=1000 * one, link_tokens=np.full((2, 2), 1000),
    ... )
    >>> [(move.sequence, move.to_rank) for move in plan_migrations(view).moves]
    [(1, 1)]
    """
    config = config or MigrationConfig()
    order, start = sort_by_rank(view.sequence_rank, len(view.num_running))
    running = view.num_running.copy()
    kv = view.num_kv_tokens.copy()
    move_sequence = np.empty(max(1, config.max_moves), np.int64)
    move_to = np.empty_like(move_sequence)
    num_moves = plan_moves(
        view.sequence_kv_tokens,
        view.is_movable.copy(),
        order,
        start,
        running,
        kv,
        view.prices,
        view.room_tokens.copy(),
        view.link_tokens.copy(),
        config.max_moves,
        config.hysteresis,
        config.expected_steps,
        config.stall_ns_per_token,
        move_sequence,
        move_to,
    )
    moves = tuple(
        Move(
            sequence=int(sequence),
            from_rank=int(view.sequence_rank[sequence]),
            to_rank=int(to_rank),
            num_kv_tokens=int(view.sequence_kv_tokens[sequence]),
        )
        for sequence, to_rank in zip(move_sequence[:num_moves], move_to[:num_moves], strict=True)
    )
    return MigrationPlan(
        moves=moves,
        step_ns=_step_ns(view.num_running, view.num_kv_tokens, view.prices),
        planned_step_ns=_step_ns(running, kv, view.prices),
    )


def _step_ns(
    running: NDArray[np.int64], kv: NDArray[np.int64], prices: NDArray[np.float64]
) -> float:
    if not len(running):
        return 0.0
    costs = prices[BASE_NS] + prices[REQUEST_NS] * running + prices[KV_TOKEN_NS] * kv
    return float(costs.max())


@kernel
def sort_by_rank(
    sequence_rank: NDArray[np.int64], num_ranks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return positions grouped by rank [R] and where each group starts [D + 1]. O(R + D)."""
    start = np.zeros(num_ranks + 1, np.int64)
    for rank in sequence_rank:
        start[rank + 1] += 1
    for rank in range(num_ranks):
        start[rank + 1] += start[rank]
    order = np.empty(len(sequence_rank), np.int64)
    fill = start[:-1].copy()
    for position, rank in enumerate(sequence_rank):
        order[fill[rank]] = position
        fill[rank] += 1
    return order, start


@kernel
def _cost(
    prices: NDArray[np.float64],
    running: NDArray[np.int64],
    kv: NDArray[np.int64],
    rank: int,
    more_requests: int,
    more_tokens: int,
) -> float:
    return float(
        prices[BASE_NS, rank]
        + prices[REQUEST_NS, rank] * (running[rank] + more_requests)
        + prices[KV_TOKEN_NS, rank] * (kv[rank] + more_tokens)
    )


@kernel
def plan_moves(
    sequence_kv: NDArray[np.int64],
    is_movable: NDArray[np.bool_],
    order: NDArray[np.int64],
    start: NDArray[np.int64],
    running: NDArray[np.int64],
    kv: NDArray[np.int64],
    prices: NDArray[np.float64],
    room: NDArray[np.int64],
    link: NDArray[np.int64],
    max_moves: int,
    hysteresis: float,
    expected_steps: float,
    stall_ns_per_token: float,
    move_sequence: NDArray[np.int64],
    move_to: NDArray[np.int64],
) -> int:
    """Fill `move_sequence`, `move_to`; return how many. Changes the load and room arrays.

    A moved sequence is out of the game for the rest of the plan: it stays in `order` at its old
    rank, marked as not movable.
    """
    num_ranks = len(running)
    num_moves = 0
    if num_ranks < 2:
        return 0
    num_requests = 0
    for rank in range(num_ranks):
        num_requests += running[rank]
    lone = _costliest_alone(sequence_kv, order, start, prices)
    best = np.empty(4, np.int64)
    costs = np.empty(num_ranks, np.float64)
    while num_moves < max_moves:
        mean = 0.0
        high = 0
        for rank in range(num_ranks):
            costs[rank] = _cost(prices, running, kv, rank, 0, 0)
            mean += costs[rank]
            if costs[rank] > costs[high]:
                high = rank
        mean /= num_ranks
        if costs[high] <= max((1.0 + hysteresis) * mean, lone):
            break
        floor = max((1.0 + 0.5 * hysteresis) * mean, lone)
        found = _best_change(
            high,
            floor,
            costs,
            sequence_kv,
            is_movable,
            order,
            start,
            running,
            kv,
            prices,
            room,
            link,
            max_moves - num_moves,
            best,
        )
        if not found:
            break
        give, to_rank, take, take_too = best[0], best[1], best[2], best[3]
        tokens = sequence_kv[give]
        back = 0
        if take >= 0:
            back += sequence_kv[take]
        if take_too >= 0:
            back += sequence_kv[take_too]
        num_back = (1 if take >= 0 else 0) + (1 if take_too >= 0 else 0)
        after = max(
            _cost(prices, running, kv, high, num_back - 1, back - tokens),
            _cost(prices, running, kv, to_rank, 1 - num_back, tokens - back),
        )
        gain = (costs[high] - after) * num_requests * expected_steps
        if gain <= stall_ns_per_token * (tokens + back):
            break
        running[high] += num_back - 1
        running[to_rank] += 1 - num_back
        kv[high] += back - tokens
        kv[to_rank] += tokens - back
        # Both copies exist until a transfer is done, so a sender's room does not grow yet.
        room[to_rank] -= tokens
        room[high] -= back
        link[0, high] -= tokens
        link[1, to_rank] -= tokens
        link[0, to_rank] -= back
        link[1, high] -= back
        move_sequence[num_moves] = give
        move_to[num_moves] = to_rank
        is_movable[give] = False
        num_moves += 1
        for taken in (take, take_too):
            if taken >= 0:
                move_sequence[num_moves] = taken
                move_to[num_moves] = high
                is_movable[taken] = False
                num_moves += 1
    return num_moves


@kernel
def _costliest_alone(
    sequence_kv: NDArray[np.int64],
    order: NDArray[np.int64],
    start: NDArray[np.int64],
    prices: NDArray[np.float64],
) -> float:
    """Cost of the rank that would be costliest if each sequence had a rank to itself."""
    lone = 0.0
    for rank in range(len(start) - 1):
        for at in range(start[rank], start[rank + 1]):
            cost = (
                prices[BASE_NS, rank]
                + prices[REQUEST_NS, rank]
                + prices[KV_TOKEN_NS, rank] * sequence_kv[order[at]]
            )
            lone = max(lone, cost)
    return lone


@kernel
def _best_change(
    high: int,
    floor: float,
    costs: NDArray[np.float64],
    sequence_kv: NDArray[np.int64],
    is_movable: NDArray[np.bool_],
    order: NDArray[np.int64],
    start: NDArray[np.int64],
    running: NDArray[np.int64],
    kv: NDArray[np.int64],
    prices: NDArray[np.float64],
    room: NDArray[np.int64],
    link: NDArray[np.int64],
    moves_left: int,
    best: NDArray[np.int64],
) -> bool:
    """Fill `best` with (give, partner rank, take or -1, take too or -1); false if none helps."""
    is_tried = np.zeros(len(costs), np.bool_)
    best_after = costs[high]
    best_tokens = np.int64(0)
    best_moves = 0
    found = False
    num_evaluations = 0
    while num_evaluations <= MAX_EVALUATIONS:
        partner = -1
        for rank in range(len(costs)):
            if rank == high or is_tried[rank] or costs[rank] >= best_after:
                continue
            if partner < 0 or costs[rank] < costs[partner]:
                partner = rank
        if partner < 0:
            break
        is_tried[partner] = True
        first, last = start[partner], start[partner + 1]
        for give_at in range(start[high], start[high + 1]):
            give = order[give_at]
            tokens = sequence_kv[give]
            if not is_movable[give] or tokens > room[partner]:
                continue
            if tokens > link[0, high] or tokens > link[1, partner]:
                continue
            # One way.
            num_evaluations += 1
            after = max(
                floor,
                _cost(prices, running, kv, high, -1, -tokens),
                _cost(prices, running, kv, partner, 1, tokens),
            )
            if after < best_after or (
                found
                and after == best_after
                and (tokens < best_tokens or (tokens == best_tokens and best_moves > 1))
            ):
                found = True
                best_after, best_tokens, best_moves = after, tokens, 1
                best[0], best[1], best[2], best[3] = give, partner, -1, -1
            if moves_left < 2:
                continue
            for take_at in range(first, last):
                take = order[take_at]
                back = sequence_kv[take]
                if not is_movable[take] or back >= tokens:
                    continue
                if back > room[high] or back > link[0, partner] or back > link[1, high]:
                    continue
                num_evaluations += 1
                after = max(
                    floor,
                    _cost(prices, running, kv, high, 0, back - tokens),
                    _cost(prices, running, kv, partner, 0, tokens - back),
                )
                total = tokens + back
                if after < best_after or (
                    found
                    and after == best_after
                    and (total < best_tokens or (total == best_tokens and best_moves > 2))
                ):
                    found = True
                    best_after, best_tokens, best_moves = after, total, 2
                    best[0], best[1], best[2], best[3] = give, partner, take, -1
                if moves_left < 3 or last - first > MAX_PAIR_SEQUENCES:
                    continue
                for take_too_at in range(take_at + 1, last):
                    take_too = order[take_too_at]
                    both = back + sequence_kv[take_too]
                    if not is_movable[take_too] or both >= tokens:
                        continue
                    if both > room[high] or both > link[0, partner] or both > link[1, high]:
                        continue
                    num_evaluations += 1
                    after = max(
                        floor,
                        _cost(prices, running, kv, high, 1, both - tokens),
                        _cost(prices, running, kv, partner, -1, tokens - both),
                    )
                    total = tokens + both
                    if after < best_after or (
                        found and after == best_after and total < best_tokens
                    ):
                        found = True
                        best_after, best_tokens, best_moves = after, total, 3
                        best[0], best[1], best[2], best[3] = give, partner, take, take_too
    return found
