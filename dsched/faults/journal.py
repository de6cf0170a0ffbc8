"""The token journal: what each request has emitted, recorded before its client sees it.

A handoff continues a request from prompt + emitted tokens, so the journal decides two things: which
tokens count (those of the attempt that is open now, in order, each index once), and where the next
attempt starts. Everything else about a lost engine follows from these.

**Fencing.** Every attempt has an epoch that rises within its request. `record` answers `False` for
tokens of an older, fenced or ended attempt: an engine that wakes up late is normal, and its tokens
are dropped and counted. A gap or a repeat inside the open attempt is our own mistake and raises
`InvariantError`.

The record in memory is what handoff reads. A journal on disk (`dsched.faults.journal_file`) copies
it for a restarted dsched, a moment later, and says in `status()` whether it manages to.

Cost: `record` is O(tokens given), under a microsecond for one token; it neither blocks nor touches
the disk. Tokens take four bytes each.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from dsched.drivers.wire import SamplingParams
from dsched.errors import InvariantError
from dsched.ids import AttemptId, RankId, RequestId

MAX_TOKEN_ID = (1 << 31) - 1


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a request on one DP rank."""

    attempt_id: AttemptId
    epoch: int
    """Rises with every attempt of the request."""
    target: RankId
    first_index: int
    """Index of the first output token that this attempt may emit."""
    prefill: RankId | None = None
    """Who computed its prompt, where that was another engine's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What the journal knows of one request; a copy that does not change."""

    request_id: RequestId
    model: str
    prompt_token_ids: tuple[int, ...]
    """Empty for a finished request that only memory holds: its prompt is dropped at the end."""
    num_prompt_tokens: int
    sampling: SamplingParams
    attempts: tuple[AttemptRecord, ...]
    output_token_ids: tuple[int, ...]
    finish_reason: str | None
    """`None` while the request is open."""

    def epoch_of(self, index: int) -> int:
        """Return the epoch of the attempt that emitted output token `index`."""
        if not 0 <= index < len(self.output_token_ids):
            raise ValueError(f"request {self.request_id} has no output token {index}")
        return max(a.epoch for a in self.attempts if a.first_index <= index)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalStatus:
    """How the journal is doing, for `/health` and `/metrics`."""

    degraded_reason: str | None
    """Why tokens do not reach the file now; `None` when they do, and for a journal in memory,
    which never promised it."""
    is_durable: bool
    """A restarted dsched would find the tokens, up to the flush interval."""
    num_open_requests: int
    num_recorded_tokens: int
    num_fenced_tokens: int
    """Tokens refused because their attempt was over."""
    num_pending_requests: int = 0
    """Requests with something that the file does not have yet."""
    num_write_errors: int = 0
    num_dropped_requests: int = 0
    """Requests whose end never reached the file."""


class TokenJournal(Protocol):
    """Records tokens before their client sees them. All methods are for the one thread that owns
    the controller; none blocks."""

    def open_request(
        self,
        request_id: RequestId,
        *,
        model: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
    ) -> None:
        """Begin a request. Raises `ValueError` if one with this id is open."""
        ...

    def begin_attempt(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        epoch: int,
        target: RankId,
        prefill: RankId | None = None,
    ) -> int:
        """Fence the attempt before, open this one; return the index of its first output token.

        `prefill` is the rank of another engine that computes the prompt for `target`.

        Raises `InvariantError` for a request that is not open or an epoch that does not rise.
        """
        ...

    def fence_attempt(self, request_id: RequestId) -> None:
        """Accept no more tokens until the next `begin_attempt`. Ended requests are ignored."""
        ...

    def record(
        self, request_id: RequestId, *, epoch: int, first_index: int, token_ids: Sequence[int]
    ) -> bool:
        """Keep output tokens `first_index`, `first_index + 1`, ...; `False` means drop them.

        Raises `InvariantError` for a gap or repeat in the open attempt, or an epoch never begun.
        """
        ...

    def finish(self, request_id: RequestId, *, reason: str) -> None:
        """End a request, well or badly. Ended and unknown ids are ignored."""
        ...

    def output_token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """Return what an open request has emitted. Raises `InvariantError` if it is not open."""
        ...

    def read_request(
        self, request_id: RequestId, *, is_known_only: bool = False
    ) -> RequestRecord | None:
        """Return a request, open or still retained.

        `is_known_only`: look only for ids that were in the journal when this process began, or
        that it has had itself. That answers "no" without touching the disk.
        """
        ...

    def status(self) -> JournalStatus: ...

    def close(self) -> None:
        """Write what is pending, then release everything. May block for a moment."""
        ...


TokenPiece = tuple[int, int, bytes]
"""Row of a request in the file, index of the first token, token ids as 32-bit numbers."""


class JournalEntry:
    """One request in memory. `tokens` only grows."""

    __slots__ = (
        "attempts",
        "finish_reason",
        "is_abandoned",
        "is_dirty",
        "model",
        "num_attempts_written",
        "num_own_tokens",
        "num_prompt_tokens",
        "open_epoch",
        "prompt_token_ids",
        "request_id",
        "row_id",
        "sampling",
        "tokens",
    )

    def __init__(
        self,
        request_id: RequestId,
        model: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.sampling = sampling
        self.attempts: list[AttemptRecord] = []
        self.tokens = array("i")
        self.finish_reason: str | None = None
        self.open_epoch: int | None = None
        """Epoch whose tokens count; `None` while fenced."""
        self.is_dirty = True
        """Something waits for the file, or there is no file; then nobody needs to hear again."""
        self.is_abandoned = False
        """The file was away too long: this request stays out of it."""
        # What the file has in this request's own rows. Set by the thread that writes it.
        self.row_id: int | None = None
        self.num_attempts_written = 0
        self.num_own_tokens = 0

    def forget_file(self) -> None:
        """The file is gone: everything has to be written again."""
        self.row_id = None
        self.num_attempts_written = 0
        self.num_own_tokens = 0

    def to_record(self) -> RequestRecord:
        """Return an unchanging copy."""
        return RequestRecord(
            request_id=self.request_id,
            model=self.model,
            prompt_token_ids=self.prompt_token_ids,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            attempts=tuple(self.attempts),
            output_token_ids=tuple(self.tokens),
            finish_reason=self.finish_reason,
        )

    def validate(self) -> None:
        """Check the entry's own rules. O(attempts)."""
        epoch, first_index = -1, 0
        for attempt in self.attempts:
            if attempt.epoch <= epoch or attempt.first_index < first_index:
                raise InvariantError(f"request {self.request_id}: {attempt} is out of order")
            epoch, first_index = attempt.epoch, attempt.first_index
        if first_index > len(self.tokens):
            raise InvariantError(f"request {self.request_id}: an attempt starts after its tokens")
        if self.open_epoch is not None and self.open_epoch != epoch:
            raise InvariantError(f"request {self.request_id}: epoch {self.open_epoch} not begun")


class MemoryJournal:
    """A journal in memory: enough for handoff, gone with the process.

    It keeps the output of the last `max_retained_requests` finished requests.
    """

    def __init__(self, *, max_retained_requests: int = 10_000) -> None:
        if max_retained_requests < 0:
            raise ValueError(f"max_retained_requests {max_retained_requests} is negative")
        self._entries: dict[RequestId, JournalEntry] = {}
        self._finished: OrderedDict[RequestId, JournalEntry] = OrderedDict()
        self._max_retained_requests = max_retained_requests
        self._num_ended_tokens = 0
        self._num_fenced_tokens = 0

    def open_request(
        self,
        request_id: RequestId,
        *,
        model: str,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
    ) -> None:
        """Begin a request. Raises `ValueError` if one with this id is open."""
        if request_id in self._entries:
            raise ValueError(f"request {request_id!r} is already open")
        entry = JournalEntry(request_id, model, prompt_token_ids, sampling)
        self._entries[request_id] = entry
        self._finished.pop(request_id, None)
        self._on_opened(entry)

    def begin_attempt(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        epoch: int,
        target: RankId,
        prefill: RankId | None = None,
    ) -> int:
        """Fence the attempt before, open this one; return the index of its first output token."""
        entry = self._open_entry(request_id)
        if entry.attempts and epoch <= entry.attempts[-1].epoch:
            raise InvariantError(
                f"request {request_id}: attempt epoch {epoch} after {entry.attempts[-1].epoch}"
            )
        first_index = len(entry.tokens)
        entry.attempts.append(
            AttemptRecord(
                attempt_id=attempt_id,
                epoch=epoch,
                target=target,
                first_index=first_index,
                prefill=prefill,
            )
        )
        entry.open_epoch = epoch
        self._on_changed(entry)
        return first_index

    def fence_attempt(self, request_id: RequestId) -> None:
        """Accept no more tokens until the next `begin_attempt`."""
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.open_epoch = None

    def record(
        self, request_id: RequestId, *, epoch: int, first_index: int, token_ids: Sequence[int]
    ) -> bool:
        """Keep output tokens in order; `False` means that their attempt is over: drop them."""
        entry = self._entries.get(request_id)
        if entry is None or entry.open_epoch != epoch:
            return self._refuse(entry, epoch, token_ids)
        tokens = entry.tokens
        if first_index != len(tokens):
            raise InvariantError(
                f"request {request_id}: tokens from {first_index}, expected {len(tokens)}"
            )
        try:
            if len(token_ids) == 1:
                tokens.append(token_ids[0])
            else:
                # Apart: a value out of range must not leave half of the tokens behind.
                tokens.extend(array("i", token_ids))
        except OverflowError as error:
            raise ValueError(f"a token id of {request_id} is above {MAX_TOKEN_ID}") from error
        # In this order: the writer sets `row_id`, then looks for tokens that came meanwhile.
        row_id = entry.row_id
        if row_id is not None:
            self._on_tokens((row_id, first_index, tokens[first_index:].tobytes()))
        return True

    def finish(self, request_id: RequestId, *, reason: str) -> None:
        """End a request, well or badly. Ended and unknown ids are ignored."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        entry.finish_reason = reason
        self._num_ended_tokens += len(entry.tokens)
        self._on_finished(entry)

    def output_token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """Return what an open request has emitted."""
        return tuple(self._open_entry(request_id).tokens)

    def read_request(
        self,
        request_id: RequestId,
        *,
        is_known_only: bool = False,  # noqa: ARG002 - memory holds nothing else
    ) -> RequestRecord | None:
        """Return a request, open or still retained."""
        entry = self._entries.get(request_id) or self._finished.get(request_id)
        return entry.to_record() if entry is not None else None

    def status(self) -> JournalStatus:
        """Return the counters. O(open requests)."""
        return JournalStatus(
            degraded_reason=None,
            is_durable=False,
            num_open_requests=len(self._entries),
            num_recorded_tokens=self._num_recorded_tokens(),
            num_fenced_tokens=self._num_fenced_tokens,
        )

    def validate(self) -> None:
        """Check every entry."""
        for entry in self._entries.values():
            entry.validate()

    def close(self) -> None:
        """Nothing to release."""

    def _num_recorded_tokens(self) -> int:
        return self._num_ended_tokens + sum(len(e.tokens) for e in self._entries.values())

    def _open_entry(self, request_id: RequestId) -> JournalEntry:
        entry = self._entries.get(request_id)
        if entry is None:
            raise InvariantError(f"request {request_id} is not open")
        return entry

    def _refuse(self, entry: JournalEntry | None, epoch: int, token_ids: Sequence[int]) -> bool:
        if entry is not None and (not entry.attempts or epoch > entry.attempts[-1].epoch):
            raise InvariantError(f"request {entry.request_id}: attempt epoch {epoch} never began")
        self._num_fenced_tokens += len(token_ids)
        return False

    def _on_opened(self, entry: JournalEntry) -> None:
        """Hear of a new entry. Here `is_dirty` stays true, so that nothing is heard later."""

    def _on_changed(self, entry: JournalEntry) -> None:
        """Hear that an entry has something that the file lacks."""

    def _on_tokens(self, piece: TokenPiece) -> None:
        """Hear of tokens of an entry that the file has."""

    def _on_finished(self, entry: JournalEntry) -> None:
        entry.prompt_token_ids = ()
        self._finished[entry.request_id] = entry
        while len(self._finished) > self._max_retained_requests:
            self._finished.popitem(last=False)
