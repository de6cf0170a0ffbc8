"""An engine's streamed answer, whichever engine wrote it.

In: the data of server-sent events, in order. Out: token ids, their logprobs, and how the answer
ended. The reader of each engine (`drivers/<engine>/protocol.py`) translates one event; what is the
same for all is here. No clock, no socket.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from dsched.drivers.base import FinishReason
from dsched.drivers.wire import TokenLogprob

DONE: Final = b"[DONE]"
"""Data of the event after which nothing follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnd:
    """How the engine ended a stream."""

    reason: FinishReason
    stop_token_id: int | None = None


class AnswerReader(ABC):
    """Reads the events of one stream, in order.

    `feed` collects; the caller takes `token_ids` and `logprobs` after each read and clears them
    with `clear`, so that tokens that arrived together are handed on together.
    """

    is_whole: ClassVar[bool] = False
    """The answer is one JSON body instead of a stream; it is read as one event when it is there."""

    __slots__ = (
        "_has_logprobs",
        "end",
        "is_cut",
        "is_done",
        "kv_transfer",
        "logprobs",
        "num_cached_tokens",
        "token_ids",
    )

    def __init__(self, *, has_logprobs: bool) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.end: StreamEnd | None = None
        """Set once the engine has said why the answer ended."""
        self.num_cached_tokens = 0
        self.kv_transfer: dict[str, Any] | None = None
        """See `AttemptFinish.kv_transfer`."""
        self.is_done = False
        """The answer is complete: nothing that follows counts."""
        self.is_cut = False
        """The answer is complete although the engine would go on: it must be told to stop."""
        self._has_logprobs = has_logprobs

    def clear(self) -> None:
        """Forget the tokens that were handed on."""
        self.token_ids = []
        self.logprobs = []

    def feed(self, events: list[bytes]) -> None:
        """Read events as they lie in the stream.

        Raises:
            DriverError: an event that cannot be read, or one that tells of an error in the engine.
        """
        for data in events:
            if data == DONE:
                self.is_done = True
            else:
                self._read_event(data)

    @abstractmethod
    def _read_event(self, data: bytes) -> None:
        """Take what one event says; raise `DriverError` for what it must not say."""
