"""The driver contract: what dsched asks of an engine, and what it is told.

A driver translates between one engine and dsched's words, and decides nothing. The same contract
holds for the simulator, for vLLM and for SGLang; `tests/conformance` checks each.

Calls never block and never raise for what the engine does: an answer arrives at the `AttemptSink`
or `EngineListener` that was given, always on the thread (event loop or simulation loop) that owns
the driver. For every accepted `generate` the sink gets token chunks and then **exactly one** of
`on_finish` or `on_failure`, also after `abort` and when the engine dies. After that it is never
called again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsched.drivers.wire import GenerateCommand, PlaceExperts, RankReport, TokenLogprob
from dsched.errors import DriverError
from dsched.ids import AttemptId, DpRank, EngineId, RankId
from dsched.states import Evidence


class FinishReason(StrEnum):
    """Why an attempt ended well."""

    STOP = "stop"
    """End-of-sequence token or a stop token id."""
    LENGTH = "length"
    """`max_tokens` or the model's context was reached."""
    ABORT = "abort"
    """`abort` was called; no token follows."""
    MOVED = "moved"
    """`KvMover.move_out` was called: the KV is kept for another engine, no token follows."""


class AttemptFinish(msgspec.Struct, frozen=True, kw_only=True):
    """The good end of an attempt."""

    reason: FinishReason
    stop_token_id: int | None = None
    """The token that ended it, if it was not handed out as output."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from prefix reuse."""
    kv_transfer: Mapping[str, Any] | None = None
    """Of a prefill half: how another engine fetches the KV that is kept for it, in the engines'
    own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do; what it cannot is refused before it is asked."""

    can_stream_logprobs: bool = False
    can_seed: bool = False
    can_structured_output: bool = False
    can_steer_dp_rank: bool = False
    can_migrate: bool = False
    """It hands running requests over with their KV; its driver is a `KvMover`."""
    can_prefill: bool = True
    """It computes prompts by itself. A decode engine that cannot needs a prefill engine for every
    request."""
    has_load_reports: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What an engine is, as it says itself. Constant during one incarnation."""

    engine_id: EngineId
    kind: str
    """`sim`, `vllm` or `sglang`."""
    model: str
    max_model_len: int
    vocab_size: int | None
    num_dp_ranks: int
    kv_capacity_tokens: int
    """KV tokens one DP rank can hold."""
    max_running_requests: int
    """Requests one DP rank runs at once."""
    capabilities: EngineCapabilities
    kv_meeting: tuple[str, int] | None = None
    """Host and port where decode engines meet this prefill engine (`wire.KvMeeting`); `None` for
    engines whose KV is fetched when the prompt is done."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertLoad:
    """What the experts of one engine had to do in its last load window."""

    counts: NDArray[np.int64]
    """[L, E] tokens routed to each logical expert."""
    num_steps: int
    """Steps of the window."""
    time_ns: int
    """When it ended."""
    balance: NDArray[np.float64] | None = None
    """[L] balancedness of the placement in use; `None`: the engine does not say where experts
    live."""
    is_simulated: bool = False


@runtime_checkable
class ExpertLoadSource(Protocol):
    """A driver whose engine reports expert load. Optional; for people, no plan is made of it."""

    def expert_load(self) -> ExpertLoad | None:
        """The last load window; `None` before the first. Cheap: called once a second."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSlots:
    """Where the experts of an engine live."""

    slot_expert: NDArray[np.int32]
    """[L, P] logical expert of each slot; -1 for none."""
    num_ranks: int
    """EP ranks that divide the slots evenly, in order of DP rank."""
    num_nodes: int = 1


@runtime_checkable
class PlacementTarget(Protocol):
    """A driver whose engine takes expert placements from the control plane. Optional: engines with
    dsched's planner inside plan for themselves."""

    def expert_slots(self) -> ExpertSlots | None:
        """The placement in use; `None` while it is not known."""
        ...

    def place_experts(self, command: PlaceExperts) -> None:
        """Bring experts to other slots. A command that is not for this engine as it is, or comes
        from a leader after its successor's, is refused and counted."""
        ...


class LeaderFence:
    """Keeps out a leader that was frozen and wakes up when another one has commanded.

    >>> fence = LeaderFence()
    >>> [fence.admits(epoch) for epoch in (3, 7, 3, 7, None)]
    [True, True, False, True, True]
    """

    def __init__(self) -> None:
        self._epoch = 0

    def admits(self, leader_epoch: int | None) -> bool:
        """Whether no later leader has commanded; `None` is anybody's command."""
        if leader_epoch is None:
            return True
        self._epoch = max(self._epoch, leader_epoch)
        return leader_epoch == self._epoch


class AttemptSink(Protocol):
    """Receives the answer of one attempt. Methods must not raise and must not block."""

    def on_tokens(
        self,
        attempt_id: AttemptId,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
    ) -> None:
        """One or more output tokens, in order. `logprobs`, where asked for, has equal length."""
        ...

    def on_finish(self, attempt_id: AttemptId, finish: AttemptFinish) -> None: ...

    def on_failure(self, attempt_id: AttemptId, error: DriverError) -> None:
        """The attempt ended badly: engine lost, refused, or answered what it must not."""
        ...


class EngineListener(Protocol):
    """Receives what an engine says of itself. Methods must not raise and must not block."""

    def on_engine_up(self, description: EngineDescription) -> None:
        """The engine answers and can serve. Also after each restart of the engine."""
        ...

    def on_engine_down(
        self, engine_id: EngineId, reason: str, evidence: Evidence = Evidence.SOCKET
    ) -> None:
        """The engine cannot serve now. Its attempts get their own `on_failure`."""
        ...

    def on_rank_lost(self, rank_id: RankId, reason: str) -> None:
        """One DP rank is gone while its engine answers. May be said again as long as it is so;
        ignored for a rank that is not there."""
        ...

    def on_rank_back(self, rank_id: RankId) -> None:
        """A lost rank works again, without a restart of its engine."""
        ...

    def on_report(self, report: RankReport) -> None: ...


class Driver(Protocol):
    """One engine, as dsched sees it."""

    @property
    def engine_id(self) -> EngineId: ...

    def start(self, listener: EngineListener) -> None:
        """Begin to watch the engine. The listener hears of it when it is up; never raises for an
        engine that is not there yet."""
        ...

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        """Start an attempt. `command.dp_rank` must exist; one attempt id is used once."""
        ...

    def abort(self, attempt_id: AttemptId) -> None:
        """Stop an attempt and free what it holds. Unknown and ended ids are ignored."""
        ...

    def close(self) -> None:
        """Abort what runs and release all resources. The engine lives on unless this driver
        started it."""
        ...


@runtime_checkable
class KvMover(Protocol):
    """A driver whose engine hands running requests over with their KV. Optional (`can_migrate`)."""

    def move_out(self, attempt_id: AttemptId) -> None:
        """Stop an attempt between two steps and keep its KV for another engine.

        Its sink hears the tokens that are out already, then `on_finish` with `MOVED` and a
        `kv_transfer` for an attempt elsewhere whose prompt is the prompt and every emitted token.
        An attempt that ends by itself meanwhile ends as it does. Unknown and ended ids are ignored.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTarget:
    """Where a plan sends an attempt."""

    engine_id: EngineId
    dp_rank: DpRank
