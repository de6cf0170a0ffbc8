"""An answer whose tokens are read by a parser: reasoning, content and tool calls.

What `Answer` does for text this does for messages: one event for the tokens that came together, the
same end, the same way on after a handoff or from `Last-Event-ID`. The parser sees token ids, so
which engine they came from does not matter.

Tokens that a client has from before a restart go through the parser without being sent.
"""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from dsched.drivers.base import FinishReason
from dsched.drivers.wire import TokenLogprob
from dsched.frontdoor.answer import Answer
from dsched.frontdoor.deltas import MakeParser, MessageBuilder
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.format import Usage

TOOL_CALLS = "tool_calls"
"""OpenAI's finish reason of an answer that ends with calls."""


class ParsedAnswer(Answer):
    """One request in work whose answer is a message. See `Answer`."""

    __slots__ = ("_builder", "_parser")

    def __init__(
        self,
        *,
        builder: MessageBuilder,
        make_parser: MakeParser,
        **fields: Any,  # noqa: ANN401 - those of `Answer`
    ) -> None:
        super().__init__(**fields)
        self._builder = builder
        self._parser = make_parser(builder, self._detokenizer, self._finder, self._min_tokens)
        # Keeps `on_tokens` off its short way for plain text.
        self._is_rich = True

    def _take(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        num_known = 0
        if self._has_event_ids:
            num_known = min(max(0, self._num_client_tokens - first_index), len(token_ids))
        num_read = self._read(token_ids, num_known)
        if self._parser.fault is not None:
            self._cancel(self.request_id)
            message = f"the engine's answer cannot be read: {self._parser.fault}"
            self._fail(ApiError(502, message, code="unreadable_answer"))
            return
        token_ids = token_ids[num_known:num_read]
        logprobs = None if logprobs is None else logprobs[num_known:num_read]
        self._event_id = first_index + num_read
        self._emit_delta(token_ids, logprobs)
        if self._parser.is_over or self._builder.is_full:
            self._end_early(self._flush(FinishReason.STOP.value), first_index + num_read)

    def _read(self, token_ids: Sequence[int], num_known: int) -> int:
        """Read tokens until the answer is over; return how many. The first ones may be known."""
        parser, builder = self._parser, self._builder
        for place, token_id in enumerate(token_ids):
            parser.feed(token_id)
            if place < num_known:
                builder.drop()
            if parser.is_over or builder.is_full or parser.fault is not None:
                return place + 1
        return len(token_ids)

    def _emit_delta(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        written = self._logprobs.write(logprobs) if self._logprobs and logprobs else None
        if not self._is_stream:
            if written is not None:
                self._written_logprobs.append(written)
            if self._kept_ids is not None:
                self._kept_ids += token_ids
            return
        delta = self._builder.take_delta()
        ids = token_ids if self._kept_ids is not None else None
        if delta is not None or written is not None or ids:
            event = self._format.delta_event(delta or {}, logprobs=written, token_ids=ids)
            self._send(event)

    def _flush(self, reason: str) -> str:
        reason = self._parser.finish(reason)
        return TOOL_CALLS if self._builder.is_full else reason

    def _last_delta(self) -> dict[str, Any] | None:
        return self._builder.take_delta()

    def _message(self) -> dict[str, Any] | None:
        return self._builder.message()

    def _succeed(self, reason: str, usage: Usage) -> None:
        num_reasoning_tokens = self._parser.num_reasoning_tokens
        super()._succeed(reason, replace(usage, num_reasoning_tokens=num_reasoning_tokens))
