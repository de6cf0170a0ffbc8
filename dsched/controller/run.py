"""One request on its way: the link between the attempts on engines and the client's stream.

The token path does not wait for a tick: a chunk that arrives is fenced, recorded in the journal,
booked, and handed to the stream, in that order, in one call. Only what needs a decision (an
attempt that ended badly) becomes an event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import msgspec

from dsched.clock import Clock
from dsched.controller.request import InferenceRequest, RequestStream
from dsched.drivers.base import AttemptFinish
from dsched.drivers.wire import KvMeeting, SamplingParams, TokenLogprob
from dsched.errors import DriverError
from dsched.faults import RecoveryGuarantee, RecoveryPlan, TokenJournal
from dsched.ids import AttemptId, EngineId, RankId
from dsched.routing import DecodeRouter


class Phase(IntEnum):
    """Where a request is."""

    WAITING = 0
    """No attempt runs: it waits for a rank."""
    RUNNING = 1
    ENDED = 2
    """Its terminal event was given; what an engine still says of it is dropped."""
    PREFILLING = 3
    """Its rank is booked, and another engine computes its prompt."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that runs now."""

    attempt_id: AttemptId
    epoch: int
    """Counts the attempts of the request; the journal's fence."""
    engine_id: EngineId
    rank: int
    """Rank number of the pool's router."""
    prompt_token_ids: tuple[int, ...]
    """The attempt's own prompt: after a handoff also what was emitted before."""
    sampling: SamplingParams

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillHalf:
    """Another engine that computes the prompt of the attempt now."""

    attempt_id: AttemptId
    """Of the half: engines know it by this."""
    engine_id: EngineId
    rank_id: RankId
    worker: int
    """Worker number of the prefill pool's router."""
    meeting: KvMeeting | None
    """Where both engines meet; then the decode half runs at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTransfer:
    """KV of the attempt's prompt that waits on a prefill engine, or in a store."""

    params: dict[str, Any] | None
    """What the decode engine is told, as the prefill engine said it."""
    time_ns: int
    """Since when it waits."""


class RunOwner(Protocol):
    """What a run tells its controller."""

    num_fenced_tokens: int

    def on_run_finished(self, run: "RequestRun", finish: AttemptFinish) -> None: ...

    def on_attempt_failed(self, run: "RequestRun", error: DriverError) -> None: ...

    def on_replay_differs(self, run: "RequestRun") -> None: ...

    def on_handed_off(self, run: "RequestRun", now_ns: int) -> None: ...

    def on_first_token(self, run: "RequestRun", now_ns: int) -> None: ...

    def on_prefill_finished(self, run: "RequestRun", finish: AttemptFinish) -> None: ...

    def on_prefill_failed(self, run: "RequestRun", error: DriverError) -> None: ...

    def on_attempt_released(self, attempt_id: AttemptId) -> None: ...


class RequestRun:
    """State of one request; the sink of its attempts."""

    __slots__ = (
        "_clock",
        "_journal",
        "_owner",
        "attempt",
        "deadline_ns",
        "dispatch_ns",
        "excluded_ranks",
        "excluded_workers",
        "expected_token_ids",
        "guarantee",
        "is_handed_out",
        "is_prefill_local",
        "lost_ns",
        "move_to",
        "num_attempt_tokens",
        "num_attempts",
        "num_handoffs",
        "num_moves",
        "num_output_tokens",
        "phase",
        "pool",
        "prefill",
        "prefill_refusal",
        "prefilled_by",
        "priority",
        "recovery",
        "request",
        "router",
        "stream",
        "time_ns",
        "token_ns",
        "transfer",
    )

    def __init__(
        self,
        *,
        request: InferenceRequest,
        stream: RequestStream,
        pool: str,
        router: DecodeRouter,
        journal: TokenJournal,
        owner: RunOwner,
        clock: Clock,
        time_ns: int,
        priority: int = 0,
    ) -> None:
        self.request = request
        self.stream = stream
        self.pool = pool
        self.priority = priority
        """As the operator's policy says; of those that are held, larger goes first."""
        self.router = router
        self._journal = journal
        self._owner = owner
        self._clock = clock
        self.time_ns = time_ns
        """When it arrived."""
        self.token_ns = time_ns
        """When its last token came."""
        self.lost_ns: int | None = None
        """When the loss of its attempt was noticed; `None` again once a new token comes."""
        self.dispatch_ns = time_ns
        """When its attempt was handed out."""
        self.deadline_ns = time_ns
        """When it has waited too long; counts while it waits."""
        self.phase = Phase.WAITING
        self.attempt: Attempt | None = None
        self.num_attempts = 0
        self.num_moves = 0
        """Attempts that ended because their engine was drained: nobody's fault."""
        self.num_attempt_tokens = 0
        """Tokens of the attempt that runs, replayed ones included: its progress."""
        self.num_output_tokens = 0
        self.excluded_ranks: tuple[int, ...] = ()
        """Router's numbers of the ranks that failed it."""
        self.recovery: RecoveryPlan | None = None
        """How the attempt that runs or is wanted continues a lost one."""
        self.guarantee: RecoveryGuarantee | None = None
        """The weakest promise of all its handoffs; `None` before the first."""
        self.num_handoffs = 0
        self.expected_token_ids: list[int] = []
        """Tokens that a replay must give again before it gives new ones."""
        self.is_handed_out = False
        """The engine of the attempt was told of it; before, only its rank is booked."""
        self.prefill: PrefillHalf | None = None
        """The engine that computes the prompt of the attempt, while it does."""
        self.prefilled_by: RankId | None = None
        """Who computed it, or does."""
        self.transfer: KvTransfer | None = None
        """What a worker computed and no engine has taken over yet."""
        self.excluded_workers: tuple[int, ...] = ()
        """Prefill router's numbers of the workers that failed it."""
        self.move_to: RankId | None = None
        """The rank that a plan moves it to, until it is there."""
        self.is_prefill_local = False
        """The decode rank computes the prompt itself: elsewhere it did not work."""
        self.prefill_refusal: DriverError | None = None
        """What a prefill engine had against it."""

    def begin_attempt(self, attempt: Attempt, now_ns: int) -> None:
        """The attempt counts from now on; an older one is fenced."""
        self.attempt = attempt
        self.num_attempts = attempt.epoch
        self.is_handed_out = False
        self.dispatch_ns = now_ns
        self.num_attempt_tokens = 0

    def forget_transfer(self) -> None:
        """Nobody else has the KV of its prompt."""
        self.transfer = None
        self.prefilled_by = None

    @property
    def has_foreign_kv(self) -> bool:
        """Its attempt began, or waits, with KV that another engine computed."""
        return self.prefilled_by is not None or self.transfer is not None

    def worker_on(self, engine_id: EngineId) -> int | None:
        """Number of the rank, in its own pool, that works for the run on this engine."""
        if self.prefill is not None and self.prefill.engine_id == engine_id:
            return self.prefill.worker
        if self.attempt is not None and self.attempt.engine_id == engine_id:
            return self.attempt.rank
        return None

    @property
    def num_known_tokens(self) -> int:
        """Prompt and emitted tokens."""
        return len(self.request.prompt_token_ids) + self.num_output_tokens

    def on_tokens(
        self,
        attempt_id: AttemptId,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
    ) -> None:
        attempt = self.attempt
        if attempt is None or attempt.attempt_id != attempt_id or self.phase is not Phase.RUNNING:
            if not self._is_prefill(attempt_id):
                self._owner.num_fenced_tokens += len(token_ids)
            return
        self.num_attempt_tokens += len(token_ids)
        if self.expected_token_ids:
            num_replayed = self._check_replayed(attempt_id, token_ids)
            if num_replayed is None:
                self._owner.on_replay_differs(self)
                return
            token_ids = token_ids[num_replayed:]
            logprobs = logprobs[num_replayed:] if logprobs is not None else None
            if not token_ids:
                return
        first_index = self.num_output_tokens
        request_id = self.request.request_id
        is_ours = self._journal.record(
            request_id, epoch=attempt.epoch, first_index=first_index, token_ids=token_ids
        )
        if not is_ours:
            return
        num_tokens = len(token_ids)
        self.num_output_tokens = first_index + num_tokens
        now_ns = self._clock.now_ns()
        if self.lost_ns is not None:
            self._owner.on_handed_off(self, now_ns)
        if first_index == 0:
            self._owner.on_first_token(self, now_ns)
        self.token_ns = now_ns
        self.router.add_tokens(attempt_id, num_tokens)
        self.stream.on_tokens(first_index, token_ids, logprobs)

    def _check_replayed(self, attempt_id: AttemptId, token_ids: Sequence[int]) -> int | None:
        """Count the tokens at the start that the client has already; `None` if they differ."""
        num_replayed = min(len(token_ids), len(self.expected_token_ids))
        if list(token_ids[:num_replayed]) != self.expected_token_ids[:num_replayed]:
            return None
        del self.expected_token_ids[:num_replayed]
        self.router.add_tokens(attempt_id, num_replayed)
        return num_replayed

    def on_finish(self, attempt_id: AttemptId, finish: AttemptFinish) -> None:
        self._owner.on_attempt_released(attempt_id)
        if self._is_current(attempt_id):
            self._owner.on_run_finished(self, finish)
        elif self._is_prefill(attempt_id):
            self._owner.on_prefill_finished(self, finish)

    def on_failure(self, attempt_id: AttemptId, error: DriverError) -> None:
        self._owner.on_attempt_released(attempt_id)
        if self._is_current(attempt_id):
            self._owner.on_attempt_failed(self, error)
        elif self._is_prefill(attempt_id):
            self._owner.on_prefill_failed(self, error)

    def _is_prefill(self, attempt_id: AttemptId) -> bool:
        return self.prefill is not None and self.prefill.attempt_id == attempt_id

    def _is_current(self, attempt_id: AttemptId) -> bool:
        return (
            self.phase is Phase.RUNNING
            and self.attempt is not None
            and self.attempt.attempt_id == attempt_id
        )
