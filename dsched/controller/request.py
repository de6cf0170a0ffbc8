"""A request as the controller sees it, and the stream that its caller hears.

The front door (or the simulator's workload) makes an `InferenceRequest`; the controller answers
through the `RequestStream` given with it: tokens in order, each once, then exactly one terminal
call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dsched.drivers.base import EngineCapabilities, FinishReason
from dsched.drivers.wire import SamplingParams, TokenLogprob, TraceContext
from dsched.ids import DpRank, RequestId


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted request: tokens in."""

    request_id: RequestId
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    pinned_dp_rank: DpRank | None = None
    """From `X-data-parallel-rank`: only ranks with this number are candidates."""
    priority: int = 0
    tenant: str = ""
    session: str = ""
    """Requests of one conversation share it, for policies that like to keep them together."""
    may_resume: bool = False
    """The client gave the id itself, so the journal may know the request from before a restart."""
    num_client_tokens: int | None = None
    """Output tokens that the client has already, by its `Last-Event-ID`."""
    trace: TraceContext | None = None
    """The trace that it belongs to; passed on to engines."""


class RequestFinish(msgspec.Struct, frozen=True, kw_only=True):
    """The good end of a request. Counts are for `usage`."""

    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_handoffs: int = 0
    """Engines that were lost on the way after tokens had been sent."""
    guarantee: str | None = None
    """After a handoff: `exact` or `continuation` (see `dsched.faults.recovery`)."""


class RequestStream(Protocol):
    """What the caller of a request hears. Methods must not raise and must not block."""

    def on_tokens(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """Output tokens `first_index`, `first_index + 1`, ... of the request; never a gap."""
        ...

    def on_finish(self, finish: RequestFinish) -> None: ...

    def on_error(self, error: "RequestError") -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """The bad end of a request, in words that a client can act on."""

    status: int
    """HTTP status that fits: 400 bad input, 404 unknown model, 429 full, 502 engine lost,
    503 no engine up."""
    code: str
    """Short machine-readable name, e.g. `engine_lost`, `no_engine`, `overloaded`."""
    message: str
    retry_after_s: int | None = None
    param: str | None = None
    guarantee: str | None = None
    """`refused` where an answer had begun and could not be continued honestly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that the cluster serves, or would serve if an engine were up."""

    name: str
    max_model_len: int | None
    """Tokens of prompt and output together; `None` until an engine has said."""
    vocab_size: int | None
    is_available: bool
    """At least one rank that can serve it is up."""
    capabilities: EngineCapabilities
    """What every engine of the pool can do."""


class ControlPlane(Protocol):
    """The controller, as the front door calls it. Nothing here blocks or raises for bad luck."""

    def submit(self, request: InferenceRequest, stream: RequestStream) -> None:
        """Take a request; the answer comes through `stream`, possibly during this call."""
        ...

    def cancel(self, request_id: RequestId) -> RequestFinish | None:
        """The client went away or has what it wanted: abort in the engine, free the booking. The
        stream hears no more. Returns how the request stood; `None` for unknown and ended ids."""
        ...

    def models(self) -> Mapping[str, ModelInfo]:
        """Every configured model by name, also those without a live engine."""
        ...

    def not_ready_reason(self) -> str | None:
        """`None` when requests can be served, else a sentence that says why not."""
        ...
