"""Messages between dsched and the agents inside engines, and what a request is made of.

Everything here is `msgspec.Struct`, frozen and keyword-only; on the wire it is MessagePack. One
union, `AgentMessage`, is what an agent publishes; it is tagged by type, so a reader of an older
version says which message it does not know.

Agents and dsched of neighbouring versions read each other (docs/adr/0007): a reader ignores fields
of a message that it does not know, every field that is added has a default, and tuples of a fixed
length are not used, as they cannot grow. A field that changes meaning, and one that must not be
ignored, raises `WIRE_VERSION`. Commands are written in the version that an agent's hello says,
which is never higher than dsched's. What a request is made of leaves its process for the journal
alone, and there a field that is not known is a fault.

Counts are tokens or requests, never fractions or blocks; durations are integer nanoseconds.
"""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

WIRE_VERSION = 1
"""Raised when a message changes meaning. An agent of a higher version is refused by name."""
UNREADABLE: Final = (msgspec.MsgspecError, RecursionError)
"""What decoding raises for bytes that somebody else wrote; the second one for what is nested deeply
in a field that would be ignored."""

Count = Annotated[int, Meta(ge=0)]


class Wire(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages. Unknown fields are ignored: a newer dsched may say more."""


class RequestPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what a request is made of."""


class SamplingParams(RequestPart, frozen=True, kw_only=True, omit_defaults=True):
    """How the engine chooses tokens. OpenAI's names; `None` means the engine's default."""

    max_tokens: Annotated[int, Meta(ge=1)]
    """Output tokens at most, already limited to what the model's context leaves."""
    min_tokens: Count = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: Count | None = None
    """Alternatives a token to report; 0 reports the chosen token only."""
    structured_output: dict[str, Any] | None = None
    """The OpenAI `response_format` value, passed on to engines that can enforce it."""


class TokenLogprob(RequestPart, frozen=True, kw_only=True):
    """Log-probability of one emitted token and of its best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the best alternatives, best first."""


class KvMeeting(RequestPart, frozen=True, kw_only=True):
    """Where a prefill engine hands the KV of one request to the decode engine that waits for it.

    Both halves of a pair are told the same and run at the same time (SGLang's bootstrap fields).
    """

    host: str
    port: Annotated[int, Meta(ge=0, le=65_535)]
    room: Count
    """Drawn for each pair."""


class TraceContext(RequestPart, frozen=True, kw_only=True):
    """W3C trace context of a request, checked: the values of its two headers."""

    parent: str
    """`traceparent`."""
    state: str | None = None
    """`tracestate`."""


class GenerateCommand(RequestPart, frozen=True, kw_only=True):
    """Compute one attempt of one request on one DP rank.

    In separate pools a request has two: the prefill half computes the prompt and one token that
    nobody hears, the decode half goes on from its KV.
    """

    attempt_id: str
    epoch: Count
    """Membership epoch that the routing decision was made for."""
    dp_rank: Count
    prompt_token_ids: tuple[int, ...]
    """Prompt; after a handoff also the tokens that were emitted before it."""
    sampling: SamplingParams
    priority: int = 0
    is_prefill: bool = False
    """The prefill half of a pair: keep the KV of the prompt for another engine to fetch."""
    kv_transfer: dict[str, Any] | None = None
    """For the decode half: what the prefill engine said of the KV that it keeps
    (`AttemptFinish.kv_transfer`), passed on as it is. `None`: nothing, or a store that both share.
    """
    kv_meeting: KvMeeting | None = None
    """For both halves, where the engines meet for every request."""
    trace: TraceContext | None = None
    """Passed on to the engine, so that its spans join the client's trace."""


class RankReport(Wire, frozen=True, kw_only=True, tag="report"):
    """Load of one DP rank after a step. Published at every step that changed it, and when idle
    once a second."""

    engine_id: str
    incarnation: str
    """Drawn at each start of the agent; a report of an older incarnation is dropped."""
    dp_rank: Count
    seq: Count
    """Raised by one at every report of this incarnation and rank."""
    step: Count
    """Steps completed since the start."""
    num_running: Count
    num_waiting: Count
    num_kv_tokens: Count
    """KV tokens held by running requests."""
    num_waiting_prefill_tokens: Count
    """Prompt tokens that waiting and running requests still have to compute."""
    kv_capacity_tokens: Count
    step_ns: Count
    """Duration of the last step; 0 when idle."""
    num_step_tokens: Count = 0
    """Tokens computed in the last step, prefill and decode together."""


class AgentHello(Wire, frozen=True, kw_only=True, tag="hello"):
    """What an agent says first, and again whenever dsched asks."""

    wire_version: Annotated[int, Meta(ge=1)] = WIRE_VERSION
    dsched_version: str
    engine_id: str
    incarnation: str
    engine: str
    """`vllm`, `sglang` or `sim`."""
    engine_version: str
    model: str
    max_model_len: Annotated[int, Meta(ge=1)]
    dp_rank: Count
    num_dp_ranks: Annotated[int, Meta(ge=1)]
    kv_capacity_tokens: Count
    kv_block_tokens: Annotated[int, Meta(ge=1)] = 1
    max_running_requests: Annotated[int, Meta(ge=1)]
    features: tuple[str, ...] = ()
    """Hooks that are attached, e.g. `chunk_budget`, `verify_length`, `eplb`."""
    missing: tuple[str, ...] = ()
    """Hooks that could not be attached; each turns off just its feature."""
    lost_dp_ranks: tuple[Count, ...] = ()
    """DP ranks of its engine that the engine itself has stopped using."""


MAX_EXPERT_CELLS = 131_072
"""Layers times experts of one report of expert load."""


class ExpertLoadReport(Wire, frozen=True, kw_only=True, tag="expert_load"):
    """Expert load of an engine's last load window, from one of its workers."""

    engine_id: str
    num_layers: Annotated[int, Meta(ge=1, le=MAX_EXPERT_CELLS)]
    num_experts: Annotated[int, Meta(ge=1, le=MAX_EXPERT_CELLS)]
    num_steps: Count = 0
    """Steps of the window; 0: the engine does not say."""
    largest: tuple[Count, ...]
    """[L] load of the hottest expert of each layer."""
    shares: bytes
    """[L, E] little-endian uint16, load over the largest of its layer times 65535, deflated."""
    balance: tuple[Annotated[float, Meta(ge=0, le=1)], ...] | None = None
    """[L] balancedness of the placement that was planned from it."""


class AgentGoodbye(Wire, frozen=True, kw_only=True, tag="goodbye"):
    """The engine stops on purpose."""

    engine_id: str
    incarnation: str
    dp_rank: Count


AgentMessage = RankReport | AgentHello | AgentGoodbye | ExpertLoadReport


class SetStepBudget(Wire, frozen=True, kw_only=True, tag="set_step_budget"):
    """Change the time budget of a step; `None` returns to the engine's own rule."""

    epoch: Count
    step_budget_ns: Count | None
    leader_epoch: Count | None = None
    """Of the dsched that was elected to command this; an agent refuses one lower than it has seen.
    `None` when nobody was elected, as by a single dsched."""


class PlaceExperts(Wire, frozen=True, kw_only=True, tag="place_experts"):
    """Bring experts to these slots. Only the elected dsched commands it."""

    epoch: Count
    """Membership epoch that the placement was planned for."""
    leader_epoch: Count
    """An agent refuses one lower than it has seen."""
    slot_expert: tuple[tuple[Annotated[int, Meta(ge=-1)], ...], ...]
    """[L][P] logical expert of each slot; -1 in slots of ranks that are down."""


class AbortAttempts(Wire, frozen=True, kw_only=True, tag="abort"):
    """Stop computing these attempts, by exact id."""

    epoch: Count
    attempt_ids: tuple[str, ...]


class SayHello(Wire, frozen=True, kw_only=True, tag="say_hello"):
    """Ask for an `AgentHello`."""


AgentCommand = SetStepBudget | PlaceExperts | AbortAttempts | SayHello
