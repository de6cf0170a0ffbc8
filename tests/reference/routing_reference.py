"""Plain twins of the compiled loops in `dsched.routing`: the same answers, no speed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsched.routing import kernels as k
from dsched.routing.migration import (
    MAX_EVALUATIONS,
    MAX_PAIR_SEQUENCES,
    MigrationConfig,
    MigrationView,
)


def rank_cost(table: np.ndarray, prices: np.ndarray, rank: int, prompt_tokens: int) -> float:
    """Cost of `rank` after taking the request, less the least base of all."""
    running = table[k.OWN_RUNNING, rank] + table[k.OTHER_RUNNING, rank] + 1
    tokens = table[k.OWN_KV, rank] + table[k.OTHER_KV, rank] + prompt_tokens
    more_base = prices[k.BASE_NS, rank] - prices[k.BASE_NS].min()
    return prices[k.REQUEST_NS, rank] * running + prices[k.KV_TOKEN_NS, rank] * tokens + more_base


def has_room(table: np.ndarray, rank: int, wanted_tokens: int) -> bool:
    """Whether `rank` can start a request of `wanted_tokens` now."""
    running = table[k.OWN_RUNNING, rank] + table[k.OTHER_RUNNING, rank]
    used = table[k.OWN_KV, rank] + table[k.OTHER_KV, rank] - table[k.SHARED_KV, rank]
    used = max(0, used)
    if running >= table[k.MAX_RUNNING, rank]:
        return False
    if used + wanted_tokens <= table[k.KV_LIMIT, rank]:
        return True
    return bool(running == 0 and used == 0 and wanted_tokens <= table[k.KV_CAPACITY, rank])


def pick_rank(
    table: np.ndarray,
    prices: np.ndarray,
    num_ranks: int,
    prompt_tokens: int,
    wanted_tokens: int,
    dp_rank: int,
    excluded: Sequence[int],
    tie_offset: int,
    max_state: int,
    level_tokens: int,
    is_away: np.ndarray,
    ignore_room: bool,  # noqa: FBT001  as the compiled one
) -> tuple[int, float, int, int, int]:
    """`kernels.pick_rank` as filters and sorts."""
    usable = [
        rank
        for rank in range(num_ranks)
        if table[k.STATE, rank] <= max_state
        and (dp_rank == k.ANY_DP_RANK or table[k.DP_RANK, rank] == dp_rank)
        and rank not in excluded
    ]
    large = [rank for rank in usable if prompt_tokens < table[k.KV_CAPACITY, rank]]
    roomy = [rank for rank in large if has_room(table, rank, wanted_tokens)]
    counts = (len(usable), len(large), len(roomy))
    candidates = large if ignore_room else roomy
    if not candidates:
        return (k.NO_RANK, np.inf, *counts)

    def cost(rank: int) -> float:
        own = rank_cost(table, prices, rank, prompt_tokens)
        request_ns, token_ns = prices[k.REQUEST_NS, rank], prices[k.KV_TOKEN_NS, rank]
        if not len(is_away) or is_away[rank] == k.HERE:
            return own
        if is_away[rank] == k.AWAY_HEARD:
            return own + k.HEARD_MARGIN * request_ns
        return own + k.HOME_MARGIN * (request_ns + token_ns * prompt_tokens)

    def place(rank: int) -> int:
        return (rank - tie_offset) % num_ranks

    def level(rank: int) -> float:
        more_base = prices[k.BASE_NS, rank] - prices[k.BASE_NS].min()
        lone = prices[k.REQUEST_NS, rank] + prices[k.KV_TOKEN_NS, rank] * level_tokens
        return float(lone + more_base)

    below = [rank for rank in candidates if level_tokens and cost(rank) <= level(rank)]
    if below:
        best = min(below, key=lambda rank: (-cost(rank), place(rank)))
    else:
        best = min(candidates, key=lambda rank: (cost(rank), place(rank)))
    return (best, cost(best), *counts)


@dataclass
class _Change:
    after: float
    tokens: int
    num_moves: int
    give: int
    partner: int
    take: tuple[int, ...]


def plan_moves(view: MigrationView, config: MigrationConfig) -> list[tuple[int, int]]:
    """`plan_migrations` as plain loops: (sequence, to rank) in the order of the plan."""
    running = view.num_running.copy()
    kv = view.num_kv_tokens.copy()
    room = view.room_tokens.copy()
    link = view.link_tokens.copy()
    movable = view.is_movable.copy()
    members = [
        [int(at) for at in np.flatnonzero(view.sequence_rank == rank)]
        for rank in range(len(running))
    ]
    lone = max(
        (
            view.prices[:2, rank].sum() + view.prices[2, rank] * view.sequence_kv_tokens[at]
            for rank, group in enumerate(members)
            for at in group
        ),
        default=0.0,
    )
    moves: list[tuple[int, int]] = []
    if len(running) < 2:
        return moves
    num_requests = int(running.sum())

    def cost(rank: int, more: int = 0, tokens: int = 0) -> float:
        a, b, c = view.prices[:, rank]
        return float(a + b * (running[rank] + more) + c * (kv[rank] + tokens))

    while len(moves) < config.max_moves:
        costs = [cost(rank) for rank in range(len(running))]
        mean = sum(costs) / len(costs)
        high = max(range(len(costs)), key=lambda rank: (costs[rank], -rank))
        if costs[high] <= max((1.0 + config.hysteresis) * mean, lone):
            break
        floor = max((1.0 + 0.5 * config.hysteresis) * mean, lone)
        best: _Change | None = None
        num_tried = 0
        for partner in sorted(range(len(costs)), key=lambda rank: (costs[rank], rank)):
            limit = best.after if best else costs[high]
            if partner == high or costs[partner] >= limit:
                continue
            if num_tried > MAX_EVALUATIONS:
                break
            for give in members[high]:
                tokens = int(view.sequence_kv_tokens[give])
                if not movable[give] or tokens > room[partner]:
                    continue
                if tokens > link[0, high] or tokens > link[1, partner]:
                    continue
                offers: list[tuple[int, ...]] = [()]
                left = config.max_moves - len(moves)
                for at, take in enumerate(members[partner]):
                    if left < 2 or not movable[take]:
                        continue
                    offers.append((take,))
                    if left >= 3 and len(members[partner]) <= MAX_PAIR_SEQUENCES:
                        offers += [(take, other) for other in members[partner][at + 1 :]]
                for offer in offers:
                    back = int(sum(view.sequence_kv_tokens[one] for one in offer))
                    first = int(view.sequence_kv_tokens[offer[0]]) if offer else 0
                    if offer and (
                        not all(movable[one] for one in offer)
                        or back >= tokens
                        or back > room[high]
                        or back > link[0, partner]
                        or back > link[1, high]
                        or first >= tokens
                    ):
                        continue
                    num_tried += 1
                    after = max(
                        floor,
                        cost(high, len(offer) - 1, back - tokens),
                        cost(partner, 1 - len(offer), tokens - back),
                    )
                    change = _Change(after, tokens + back, 1 + len(offer), give, partner, offer)
                    if best is None:
                        better = after < costs[high]
                    else:
                        better = (after, change.tokens, change.num_moves) < (
                            best.after, best.tokens, best.num_moves,
                        )  # fmt: skip
                    if better:
                        best = change
        if best is None:
            break
        back = best.tokens - int(view.sequence_kv_tokens[best.give])
        tokens = int(view.sequence_kv_tokens[best.give])
        after = max(
            cost(high, len(best.take) - 1, back - tokens),
            cost(best.partner, 1 - len(best.take), tokens - back),
        )
        gain = (costs[high] - after) * num_requests * config.expected_steps
        if gain <= config.stall_ns_per_token * best.tokens:
            break
        running[high] += len(best.take) - 1
        running[best.partner] += 1 - len(best.take)
        kv[high] += back - tokens
        kv[best.partner] += tokens - back
        room[best.partner] -= tokens
        room[high] -= back
        link[0, high] -= tokens
        link[1, best.partner] -= tokens
        link[0, best.partner] -= back
        link[1, high] -= back
        moves.append((best.give, best.partner))
        moves += [(one, high) for one in best.take]
        for one in (best.give, *best.take):
            movable[one] = False
    return moves
