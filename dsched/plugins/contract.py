"""The contract of policies, version 1: what they see, and the one method of each kind.

Fields may be added to views within a version; nothing is removed or renamed without a new number.
A kind of policy is a protocol with one method, which answers with a position among the candidates
it was offered, with numbers, with a word, or with `None` for "use the default". It cannot name what
it was not offered. All methods should be pure; a policy that remembers something keeps it in its
own attributes, and is called on one thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, runtime_checkable

from dsched.ids import DpRank, EngineId

API_VERSION: Final = 1


# What policies see.


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One request, as policies see it: sizes and names, never its text."""

    model: str
    num_prompt_tokens: int
    max_output_tokens: int
    tenant: str = ""
    """From the client's `X-Tenant-Id`; empty without one."""
    session: str = ""
    """From the client's `X-Session-Id`; empty without one."""
    priority: int = 0
    """What the client asked for; it counts only where a policy makes it count."""
    num_held_ns: int = 0
    """How long it has waited at the router."""
    num_output_tokens: int = 0
    """Tokens emitted before its engine was lost; 0 for a request that has not begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCandidate:
    """One eligible DP rank: up, with room, and with the pinned number if there is one."""

    engine_id: EngineId
    dp_rank: DpRank
    num_running: int
    """Requests on it."""
    num_kv_tokens: int
    kv_capacity_tokens: int | None
    """`None` where the engine does not say."""
    cost_ns: float
    """Modelled step time after taking the request, without its constant part; the default takes
    the least."""
    num_cached_tokens: int = 0
    """Leading prompt tokens of the request in its KV cache, in whole blocks: where its engine
    publishes KV events (`kv_events`), else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionView:
    """How full the pool is when a request arrives."""

    num_running: int
    """Requests on the pool's ranks, those of other clients of the engines included."""
    num_held: int
    """Requests that wait at the router."""
    num_ranks_up: int
    load_share: float
    """KV tokens in use over KV tokens of the ranks that are up; 0 where no engine says."""
    tenant_share: float
    """The tenant's requests over all requests in work, this one not counted; 0 when idle."""


class AdmissionAnswer(StrEnum):
    """What to do with a request that arrives."""

    ACCEPT = "accept"
    REFUSE = "refuse"
    """429 with `Retry-After`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """Prompts that one DP rank has to compute, by length bucket; each tuple has one entry a bucket,
    shortest sequences first."""

    num_requests: tuple[int, ...]
    """Requests with prompt tokens left to compute."""
    num_tokens: tuple[int, ...]
    """Prompt tokens left to compute."""
    oldest_wait_ns: tuple[int, ...]
    """Since the oldest of them arrived; 0 in an empty bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceView:
    """How even the experts of an EP group are."""

    num_times_asked: int
    """Times that this question was asked since the group's experts were last placed; the time
    between two is `placement.interval_s`."""
    worst_balancedness: float
    """Of the worst layer, in (0, 1]."""
    mean_balancedness: float


# What policies are.


@runtime_checkable
class RoutingPolicy(Protocol):
    """Choose one of the candidates; they come sorted by engine and DP rank."""

    name: str
    api_version: int

    def pick(self, request: RequestView, candidates: Sequence[RankCandidate]) -> int | None:
        """Return a position in `candidates`, or `None` for the default."""
        ...


@runtime_checkable
class RoutingFilter(Protocol):
    """Leave candidates out. If none is left, all count again."""

    name: str
    api_version: int

    def keep(
        self, request: RequestView, candidates: Sequence[RankCandidate]
    ) -> Sequence[bool] | None:
        """Return one truth value for each candidate."""
        ...


@runtime_checkable
class RoutingScorer(Protocol):
    """Score the candidates: the least wins, ties go to the first."""

    name: str
    api_version: int

    def score(
        self, request: RequestView, candidates: Sequence[RankCandidate]
    ) -> Sequence[float] | None:
        """Return one finite number for each candidate."""
        ...


@runtime_checkable
class AdmissionPolicy(Protocol):
    """Accept or refuse a request that arrives. The default accepts."""

    name: str
    api_version: int

    def admit(self, request: RequestView, view: AdmissionView) -> AdmissionAnswer | None:
        """Return `"accept"`, `"refuse"`, or `None` for the default."""
        ...


@runtime_checkable
class PriorityPolicy(Protocol):
    """Give a request its priority; of those that wait for a rank, larger goes first. Asked once,
    when the request arrives. The default is 0 for all."""

    name: str
    api_version: int

    def priority(self, request: RequestView) -> int | None:
        """Return a whole number within ±2^53, or `None` for 0."""
        ...


@runtime_checkable
class ChunkWeightsPolicy(Protocol):
    """Share a step's prefill time among the length buckets. Runs inside the engine."""

    name: str
    api_version: int

    def weights(self, view: BucketView) -> Sequence[float] | None:
        """Return one weight above 0 for each bucket, or `None` to leave them as configured."""
        ...


@runtime_checkable
class RebalanceTrigger(Protocol):
    """Say whether the experts of a group should be placed anew now; asked by the elected dsched,
    every `placement.interval_s`. The default is yes. A lost rank is planned for without asking."""

    name: str
    api_version: int

    def should_rebalance(self, view: RebalanceView) -> bool | None:
        """Return `False` to keep the placement in use."""
        ...


@runtime_checkable
class HandoffPolicy(Protocol):
    """Choose where a request goes on after its engine was lost; the ranks that failed it are not
    among the candidates. `None` lets the routing policy choose, then the router."""

    name: str
    api_version: int

    def pick_handoff(self, request: RequestView, candidates: Sequence[RankCandidate]) -> int | None:
        """Return a position in `candidates`, or `None`."""
        ...


METHODS: Final[Mapping[type, str]] = {
    RoutingPolicy: "pick",
    RoutingFilter: "keep",
    RoutingScorer: "score",
    AdmissionPolicy: "admit",
    PriorityPolicy: "priority",
    ChunkWeightsPolicy: "weights",
    RebalanceTrigger: "should_rebalance",
    HandoffPolicy: "pick_handoff",
}
"""The one method of each kind of policy."""

ROUTING_KINDS: Final = (RoutingPolicy, RoutingFilter, RoutingScorer)
"""What `routing.policy` may be; one class may be several of them."""
