"""One request on its way: the link between the attempts on engines and the client's stream.

The token path does not wait for a tick: a chunk that arrives is fenced, recorded in the journal,
booked, and handed to the stream, in that order, in one call. Only what needs a decision (an
attempt that ended badly) becomes an event.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from dsched.clock import Clock
from dsched.controller.request import InferenceRequest, RequestStream
from dsched.drivers.base import AttemptFinish
from dsched.drivers.wire import TokenLogprob
from dsched.errors import DriverError
from dsched.faults import RecoveryGuarantee, RecoveryPlan, TokenJournal
from dsched.ids import AttemptId, EngineId
from dsched.routing import DecodeRouter


class Phase(IntEnum):
    """Where a request is."""

    WAITING = 0
    """No attempt runs: it waits for a rank."""
    RUNNING = 1
    ENDED = 2
    """Its terminal event was given; what an engine still says of it is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The attempt that runs now."""

    attempt_id: AttemptId
    epoch: int
    """Counts the attempts of the request; the journal's fence."""
    engine_id: EngineId
    rank: int
    """Rank number of the pool's router."""
    num_prompt_tokens: int
    """Tokens of the attempt's own prompt: after a handoff also what was emitted before."""


class RunOwner(Protocol):
    """What a run tells its controller."""

    num_fenced_tokens: int

    def on_run_finished(self, run: "RequestRun", finish: AttemptFinish) -> None: ...

    def on_attempt_failed(self, run: "RequestRun", error: DriverError) -> None: ...

    def on_replay_differs(self, run: "RequestRun") -> None: ...

    def on_handed_off(self, run: "RequestRun", now_ns: int) -> None: ...

    def on_first_token(self, run: "RequestRun", now_ns: int) -> None: ...

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
        "expected_token_ids",
        "guarantee",
        "lost_ns",
        "num_attempt_tokens",
        "num_attempts",
        "num_handoffs",
        "num_moves",
        "num_output_tokens",
        "phase",
        "pool",
        "priority",
        "recovery",
        "request",
        "router",
        "stream",
        "time_ns",
        "token_ns",
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
        self.router = router
        self._journal = journal
        self._owner = owner
        self._clock = clock
        self.priority = priority
        """Of those that wait at the router, larger goes first."""
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

    def begin_attempt(self, attempt: Attempt, now_ns: int) -> None:
        """The attempt counts from now on; an older one is fenced."""
        self.attempt = attempt
        self.num_attempts = attempt.epoch
        self.phase = Phase.RUNNING
        self.dispatch_ns = now_ns
        self.num_attempt_tokens = 0

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

    def on_failure(self, attempt_id: AttemptId, error: DriverError) -> None:
        self._owner.on_attempt_released(attempt_id)
        if self._is_current(attempt_id):
            self._owner.on_attempt_failed(self, error)

    def _is_current(self, attempt_id: AttemptId) -> bool:
        return (
            self.phase is Phase.RUNNING
            and self.attempt is not None
            and self.attempt.attempt_id == attempt_id
        )
