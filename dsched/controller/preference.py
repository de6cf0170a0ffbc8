"""What an operator's routing policies are offered, and how their answer becomes a decision.

In:  a router, a request, and the router's own decision for it.
Out: the same decision, or another of the eligible ranks that a policy prefers.

Candidates are exactly the ranks that the router itself could have chosen: of the best state that
has any (up before suspect), with the pinned number, not excluded, large enough, and with room now
unless the wait has expired. They come sorted by engine and DP rank, so a policy's positions mean
the same in every process. Decided: docs/policies.md.

O(D) Python for each request; only paid where a policy is configured. What ranks have cached comes
from the caller: looking that up costs more than all else here.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from dsched.controller.request import InferenceRequest
from dsched.ids import RankId
from dsched.plugins import PolicySet, RankCandidate, RequestView
from dsched.routing import DecodeRouter, RankState, RoutingDecision, RoutingReason, RoutingRequest
from dsched.routing import kernels as k


def request_view(
    request: InferenceRequest, *, held_ns: int = 0, num_output_tokens: int = 0
) -> RequestView:
    """Say what policies may know of a request."""
    return RequestView(
        model=request.model,
        num_prompt_tokens=len(request.prompt_token_ids),
        max_output_tokens=request.sampling.max_tokens,
        tenant=request.tenant,
        session=request.session,
        priority=request.priority,
        num_held_ns=held_ns,
        num_output_tokens=num_output_tokens,
    )


def eligible_ranks(
    router: DecodeRouter,
    request: RoutingRequest,
    *,
    ignores_room: bool,
    cached_tokens: Mapping[RankId, int],
) -> list[tuple[int, RankCandidate]]:
    """List (rank number, candidate) of every rank that the router may choose, sorted by id.

    `cached_tokens`: leading prompt tokens in the KV cache of a rank; 0 for those not named.
    """
    for states in ((RankState.UP,), (RankState.UP, RankState.SUSPECT)):
        usable = [
            (rank, candidate)
            for rank in range(router.num_ranks)
            if (candidate := _candidate(router, request, rank, states, cached_tokens)) is not None
        ]
        if usable:
            break
    wanted = request.num_prompt_tokens + request.num_reserved_tokens
    table = router.ledger.table
    offered = [
        (rank, candidate)
        for rank, candidate in usable
        if request.num_prompt_tokens < table[k.KV_CAPACITY, rank]
        and (ignores_room or k.has_room(table, rank, wanted))
    ]
    return sorted(offered, key=lambda each: (each[1].engine_id, each[1].dp_rank))


def prefer(
    policies: PolicySet,
    decision: RoutingDecision,
    view: RequestView,
    offered: Sequence[tuple[int, RankCandidate]],
    *,
    is_handoff: bool = False,
) -> tuple[RoutingDecision, str | None]:
    """Let policies choose among what was offered; return the decision and who made it.

    The name is `None` when the router's own decision stands.
    """
    if decision.rank is None or not offered:
        return decision, None
    candidates = [candidate for _, candidate in offered]
    ranks = [rank for rank, _ in offered]
    default = ranks.index(decision.rank) if decision.rank in ranks else None
    chosen = policies.choose(view, candidates, is_handoff=is_handoff, default=default)
    if chosen is None:
        return decision, None
    rank, candidate = offered[chosen[0]]
    return replace(decision, rank=rank, cost_ns=candidate.cost_ns), chosen[1]


def ignores_room(decision: RoutingDecision) -> bool:
    """Whether the router chose among full ranks too."""
    return decision.reason is RoutingReason.HOLD_EXPIRED


def _candidate(
    router: DecodeRouter,
    request: RoutingRequest,
    rank: int,
    states: Sequence[RankState],
    cached_tokens: Mapping[RankId, int],
) -> RankCandidate | None:
    load = router.load_of(rank)
    if load.state not in states or rank in request.excluded_ranks:
        return None
    engine_id, dp_rank = load.rank_id
    if request.pinned_dp_rank is not None and dp_rank != request.pinned_dp_rank:
        return None
    num_running = load.num_own_running + load.num_other_running
    num_kv_tokens = load.num_own_kv_tokens + load.num_other_kv_tokens
    request_ns, kv_token_ns = router.prices_of(rank)
    return RankCandidate(
        engine_id=engine_id,
        dp_rank=dp_rank,
        num_running=num_running,
        num_kv_tokens=num_kv_tokens,
        kv_capacity_tokens=load.kv_capacity_tokens,
        num_cached_tokens=cached_tokens.get(load.rank_id, 0),
        cost_ns=request_ns * (num_running + 1)
        + kv_token_ns * (num_kv_tokens + request.num_prompt_tokens)
        + router.more_base_ns(rank),
    )
