"""Asks the operator's policies what the controller wants to know, in the words of `plugins`.

In:  a request or a run, and the state. Out: refused or not, a priority, a decision. Where no policy
is configured nothing is worked out.

O(D) for admission and for a preference, and O(blocks of the prompt) more where engines publish KV
events; only paid where a policy of that kind is configured.
"""

from dsched.controller.preference import eligible_ranks, ignores_room, prefer, request_view
from dsched.controller.request import InferenceRequest
from dsched.controller.run import RequestRun
from dsched.controller.spare import UNKNOWN_CAPACITY, pool_load
from dsched.controller.state import ControllerState
from dsched.plugins import AdmissionView
from dsched.routing import DecodeRouter, RankState, RoutingDecision, RoutingRequest


def is_refused(state: ControllerState, request: InferenceRequest, *, pool: str) -> bool:
    """Whether the admission policy refuses a request that arrives."""
    if state.policies.admission is None:
        return False
    return state.policies.is_refused(
        request_view(request), admission_view(state, pool=pool, tenant=request.tenant)
    )


def priority_of(state: ControllerState, request: InferenceRequest) -> int:
    """The priority of a request that arrives."""
    if state.policies.priority is None:
        return 0
    return state.policies.priority_of(request_view(request))


def admission_view(state: ControllerState, *, pool: str, tenant: str) -> AdmissionView:
    """How full a pool is now."""
    router = state.pools[pool].router
    num_open = len(state.runs)
    return AdmissionView(
        num_running=pool_load(router).num_running,
        num_held=router.num_held,
        num_ranks_up=state.num_ranks_up(pool),
        load_share=_load_share(router),
        tenant_share=state.runs.num_of_tenant(tenant) / num_open if num_open else 0.0,
    )


def asks_for(state: ControllerState, run: RequestRun) -> bool:
    """Whether a policy wants a say in where a run goes."""
    policies = state.policies
    return policies.routing is not None or (
        policies.handoff is not None and run.recovery is not None
    )


def preferred(
    state: ControllerState,
    run: RequestRun,
    request: RoutingRequest,
    decision: RoutingDecision,
    now_ns: int,
) -> RoutingDecision:
    """Let policies choose among the ranks that the router could have chosen."""
    policies, is_handoff = state.policies, run.recovery is not None
    prefixes = state.pools[run.pool].prefixes
    offered = eligible_ranks(
        run.router,
        request,
        ignores_room=ignores_room(decision),
        cached_tokens=prefixes.cached_tokens(run.request.prompt_token_ids) if prefixes else {},
    )
    view = request_view(
        run.request, held_ns=now_ns - run.time_ns, num_output_tokens=run.num_output_tokens
    )
    chosen, policy = prefer(policies, decision, view, offered, is_handoff=is_handoff)
    state.recorder.on_preference(run.request.request_id, chosen, policy, now_ns)
    return chosen


def _load_share(router: DecodeRouter) -> float:
    """KV tokens in use over KV tokens, of the ranks that are up and say how many they hold."""
    used = capacity = 0
    for rank in range(router.num_ranks):
        load = router.load_of(rank)
        if load.state is RankState.UP and load.kv_capacity_tokens < UNKNOWN_CAPACITY:
            used += load.num_own_kv_tokens + load.num_other_kv_tokens
            capacity += load.kv_capacity_tokens
    return used / capacity if capacity else 0.0
