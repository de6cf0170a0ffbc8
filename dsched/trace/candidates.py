"""Every rank of a router at one decision: what it would have cost, or why it was out.

For people: the router itself decides in compiled code over the same numbers. A rank's cost is

    request_ns * (running + 1)  +  kv_token_ns * (KV tokens + the request's tokens)

and what its base is longer than the least, where engines differ in speed; with several routers over
the same ranks, also a surcharge on those that are at home elsewhere.
"""

from dataclasses import dataclass

from dsched.routing import DecodeRouter, RankState, RoutingRequest
from dsched.routing import kernels as k

ELIGIBLE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    """Parts of a cost, ns of step time."""

    requests_ns: float
    kv_ns: float
    base_ns: float
    """What a step without work takes longer than on the fastest rank; 0 where all are alike."""
    home_ns: float
    """Surcharge on a rank that is at home at another router; 0 with one router."""

    @property
    def total_ns(self) -> float:
        return self.requests_ns + self.kv_ns + self.base_ns + self.home_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One rank at one decision."""

    rank: int
    """The router's number."""
    engine_id: str
    dp_rank: int
    num_running: int
    num_kv_tokens: int
    cost: CostTerms
    """After adding the request."""
    verdict: str
    """Why it could not be chosen; empty for one that could."""

    @property
    def name(self) -> str:
        return f"{self.engine_id}/{self.dp_rank}"

    @property
    def is_eligible(self) -> bool:
        return self.verdict == ELIGIBLE


def list_candidates(
    router: DecodeRouter, request: RoutingRequest, *, ignores_room: bool
) -> list[Candidate]:
    """All ranks: those that could be chosen by cost, then the others by name.

    Ties are in the order in which the router looks at them, so the first is what it chooses
    (unless it is synchronised and fills ranks up). O(D log D).
    """
    table = router.ledger.table
    states = [RankState(int(table[k.STATE, rank])) for rank in range(router.num_ranks)]
    best = RankState.UP
    if not any(_why_out(router, request, rank, best) is None for rank in range(router.num_ranks)):
        best = RankState.SUSPECT
    candidates = [
        _candidate(router, request, rank, best, ignores_room=ignores_room)
        for rank in range(router.num_ranks)
        if states[rank] is not RankState.REMOVED
    ]
    count = max(1, router.num_ranks)
    first = router.tie_offset % count
    return sorted(
        candidates,
        key=lambda each: (
            (0, each.cost.total_ns, (each.rank - first) % count, "")
            if each.is_eligible
            else (1, 0.0, 0, each.name.rjust(256))
        ),
    )


def cost_of(router: DecodeRouter, request: RoutingRequest, rank: int) -> CostTerms:
    """What a rank costs after taking the request."""
    table = router.ledger.table
    request_ns, kv_token_ns = router.prices_of(rank)
    running = int(table[k.OWN_RUNNING, rank] + table[k.OTHER_RUNNING, rank])
    tokens = int(table[k.OWN_KV, rank] + table[k.OTHER_KV, rank])
    return CostTerms(
        requests_ns=request_ns * (running + 1),
        kv_ns=kv_token_ns * (tokens + request.num_prompt_tokens),
        base_ns=router.more_base_ns(rank),
        home_ns=router.home_margin_ns(rank, request.num_prompt_tokens),
    )


def _candidate(
    router: DecodeRouter,
    request: RoutingRequest,
    rank: int,
    best: RankState,
    *,
    ignores_room: bool,
) -> Candidate:
    table = router.ledger.table
    verdict = _why_out(router, request, rank, best)
    if verdict is None:
        verdict = _why_no_room(router, request, rank, ignores_room=ignores_room)
    engine_id, dp_rank = router.rank_id(rank)
    return Candidate(
        rank=rank,
        engine_id=engine_id,
        dp_rank=dp_rank,
        num_running=int(table[k.OWN_RUNNING, rank] + table[k.OTHER_RUNNING, rank]),
        num_kv_tokens=int(table[k.OWN_KV, rank] + table[k.OTHER_KV, rank]),
        cost=cost_of(router, request, rank),
        verdict=verdict,
    )


def _why_out(
    router: DecodeRouter, request: RoutingRequest, rank: int, best: RankState
) -> str | None:
    """Why a rank may not be used at all; `None` if it may."""
    state = RankState(int(router.ledger.table[k.STATE, rank]))
    if state > best:
        return state.name.lower()
    pin = request.pinned_dp_rank
    if pin is not None and router.rank_id(rank).dp_rank != pin:
        return f"the request is pinned to DP rank {pin}"
    if rank in request.excluded_ranks:
        return "lost this request before"
    return None


def _why_no_room(
    router: DecodeRouter, request: RoutingRequest, rank: int, *, ignores_room: bool
) -> str:
    table = router.ledger.table
    capacity = int(table[k.KV_CAPACITY, rank])
    if request.num_prompt_tokens >= capacity:
        return f"holds {capacity:,} KV tokens at most"
    wanted = request.num_prompt_tokens + request.num_reserved_tokens
    if ignores_room or k.has_room(table, rank, wanted):
        return ELIGIBLE
    running = int(table[k.OWN_RUNNING, rank] + table[k.OTHER_RUNNING, rank])
    limit = int(table[k.MAX_RUNNING, rank])
    if running >= limit:
        return f"full: {running} of {limit} running"
    used = table[k.OWN_KV, rank] + table[k.OTHER_KV, rank] - table[k.SHARED_KV, rank]
    free = max(0, int(table[k.KV_LIMIT, rank]) - max(0, int(used)))
    return f"full: {free:,} KV tokens free"
