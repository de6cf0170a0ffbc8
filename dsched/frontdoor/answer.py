"""The answer to one request: tokens from the controller, bytes to the client.

An `Answer` stands between two sides that do not know each other. To the controller it is a
`RequestStream`: it hears tokens in order and exactly one end. To the connection it is a `Job`: it
hears that the client went away or reads again. It owes the client exactly one end as well: after a
good one `[DONE]`, after a bad one an error and never `[DONE]` or a finish reason, so that a client
can always tell a whole answer from a cut one.

Tokens that arrive together become one event. While the client does not read, tokens are kept as
numbers and turned into one event when it does; the connection cuts it off if that takes too long.
"""

from collections.abc import Callable, Sequence
from typing import Any

from dsched.clock import Clock
from dsched.controller.request import ControlPlane, RequestError, RequestFinish
from dsched.drivers.base import FinishReason
from dsched.drivers.wire import TokenLogprob
from dsched.frontdoor.connection import ClientConnection, Headers
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.format import AnswerFormat, LogprobWriter, Usage
from dsched.frontdoor.stats import Api, ModelStats, Outcome, RequestRecord
from dsched.frontdoor.text import Detokenizer, StopFinder
from dsched.ids import RequestId

MAX_PENDING_TOKENS = 1 << 16
"""Tokens kept for a client that does not read; one that is further behind is cut off."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class Answer:
    """One request in work. `RequestStream` to the controller, `Job` to the connection."""

    __slots__ = (
        "_cancel",
        "_clock",
        "_connection",
        "_detokenizer",
        "_event_id",
        "_finder",
        "_first_token_ns",
        "_format",
        "_handoff",
        "_has_event_ids",
        "_has_usage",
        "_headers",
        "_is_over",
        "_is_rich",
        "_is_started",
        "_is_stream",
        "_itl",
        "_kept_ids",
        "_last_token_ns",
        "_logprobs",
        "_min_tokens",
        "_num_client_tokens",
        "_num_output_tokens",
        "_num_pending_tokens",
        "_num_prompt_tokens",
        "_on_end",
        "_pending",
        "_pending_finish",
        "_pieces",
        "_start_ns",
        "_ttft",
        "_written_logprobs",
        "api",
        "model",
        "request_id",
    )

    def __init__(
        self,
        *,
        connection: ClientConnection,
        control: ControlPlane,
        clock: Clock,
        stats: ModelStats,
        on_end: Callable[[RequestRecord, int, str | None, int], None],
        request_id: RequestId,
        api: Api,
        model: str,
        format: AnswerFormat,  # noqa: A002 - the word for it
        detokenizer: Detokenizer,
        finder: StopFinder | None,
        logprobs: LogprobWriter | None,
        headers: Headers,
        is_stream: bool,
        has_usage: bool,
        has_token_ids: bool,
        min_tokens: int,
        num_prompt_tokens: int,
        start_ns: int,
        num_client_tokens: int | None = None,
    ) -> None:
        """`num_client_tokens`: tokens whose text the client has from before; `None` for a client
        that does not count them. With a number the events carry the count as their id."""
        self._connection = connection
        self._cancel = control.cancel
        self._clock = clock
        self._ttft = stats.ttft
        self._itl = stats.itl
        self._on_end = on_end
        self.request_id = request_id
        self.api = api
        self.model = model
        self._format = format
        self._detokenizer = detokenizer
        self._finder = finder
        self._logprobs = logprobs
        self._headers = headers
        self._is_stream = is_stream
        self._has_usage = has_usage
        self._min_tokens = min_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._num_output_tokens = 0
        self._kept_ids: list[int] | None = [] if has_token_ids else None
        self._num_client_tokens = num_client_tokens or 0
        self._has_event_ids = num_client_tokens is not None and is_stream
        self._event_id = 0
        self._handoff: dict[str, Any] | None = None
        self._is_rich = has_token_ids or logprobs is not None or self._has_event_ids
        self._written_logprobs: list[dict[str, Any]] = []
        self._pieces: list[str] = []
        self._pending: list[tuple[Sequence[int], Sequence[TokenLogprob] | None]] = []
        self._num_pending_tokens = 0
        self._pending_finish: RequestFinish | RequestError | None = None
        self._is_started = False
        self._is_over = False
        self._start_ns = start_ns
        self._first_token_ns: int | None = None
        self._last_token_ns = 0

    # What the controller tells.

    def on_tokens(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        if self._is_over:
            return
        count = len(token_ids)
        now_ns = self._clock.now_ns()
        if self._first_token_ns is None:
            self._first_token_ns = now_ns
            self._ttft.observe(now_ns - self._start_ns)
        else:
            self._itl.observe((now_ns - self._last_token_ns) // count, count)
        self._last_token_ns = now_ns
        self._num_output_tokens = first_index + count
        if not self._connection.is_writable:
            self._keep(token_ids, logprobs)
        elif self._is_stream and not self._is_rich and self._finder is None and self._is_started:
            # The common case, in as few steps as possible.
            feed = self._detokenizer.feed
            text = feed(token_ids[0]) if count == 1 else "".join(map(feed, token_ids))
            if text:
                self._connection.write(self._format.text_event(text))
        else:
            self._take(first_index, token_ids, logprobs)

    def on_finish(self, finish: RequestFinish) -> None:
        if self._is_over:
            return
        if self._pending:
            self._pending_finish = finish
            return
        if finish.reason is FinishReason.ABORT:
            self._fail(ApiError(502, "the engine aborted the request", code="aborted"))
            return
        self._note_handoff(finish)
        usage = Usage(
            num_prompt_tokens=finish.num_prompt_tokens,
            num_output_tokens=finish.num_output_tokens,
            num_cached_tokens=finish.num_cached_tokens,
        )
        self._succeed(self._flush(finish.reason.value), usage)

    def on_error(self, error: RequestError) -> None:
        if self._is_over:
            return
        if self._pending:
            self._pending_finish = error
            return
        self._fail(ApiError.from_request_error(error))

    # What the connection tells.

    def on_disconnect(self) -> None:
        if not self._is_over:
            is_slow = not self._connection.is_writable
            self._end(Outcome.SLOW_READER if is_slow else Outcome.DISCONNECTED, 499)
            self._cancel(self.request_id)

    def on_writable(self) -> None:
        if self._pending:
            pending, self._pending = self._pending, []
            first_index = self._num_output_tokens - self._num_pending_tokens
            self._num_pending_tokens = 0
            token_ids = [each for ids, _ in pending for each in ids]
            entries = [each for _, logprobs in pending for each in logprobs or ()]
            self._take(first_index, token_ids, entries or None)
        finish, self._pending_finish = self._pending_finish, None
        if isinstance(finish, RequestFinish):
            self.on_finish(finish)
        elif finish is not None:
            self.on_error(finish)

    # What the front door tells.

    def stop(self) -> None:
        """End the answer because the front door stops."""
        if not self._is_over:
            self._cancel(self.request_id)
            self._fail(ApiError(503, "the server is stopping", code="stopping", retry_after_s=1))

    def _keep(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> None:
        self._pending.append((list(token_ids), logprobs))
        self._num_pending_tokens += len(token_ids)
        if self._num_pending_tokens > MAX_PENDING_TOKENS:
            self._connection.abort()
            self.on_disconnect()

    def _take(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """Turn tokens into text, look for stop strings, and emit."""
        if self._has_event_ids:
            num_known = min(max(0, self._num_client_tokens - first_index), len(token_ids))
            if num_known:
                known = None if logprobs is None else logprobs[:num_known]
                self._pass_over(first_index, token_ids[:num_known], known)
                logprobs = None if logprobs is None else logprobs[num_known:]
            token_ids, first_index = token_ids[num_known:], first_index + num_known
        if self._finder is None:
            text = "".join(map(self._detokenizer.feed, token_ids))
        else:
            num_taken, text = self._search(self._finder, first_index, token_ids)
            token_ids = token_ids[:num_taken]
            logprobs = None if logprobs is None else logprobs[:num_taken]
        self._event_id = first_index + len(token_ids)
        self._emit(text, token_ids, logprobs)
        if self._finder is not None and self._finder.is_found:
            self._end_early(FinishReason.STOP.value, first_index + len(token_ids))

    def _end_early(self, reason: str, num_output_tokens: int) -> None:
        """End here, before the engine does, and let it stop."""
        usage = Usage(
            num_prompt_tokens=self._num_prompt_tokens, num_output_tokens=num_output_tokens
        )
        stood = self._cancel(self.request_id)
        if stood is not None:
            self._note_handoff(stood)
        self._succeed(reason, usage)

    def _note_handoff(self, finish: RequestFinish) -> None:
        """Remember what the client may rely on after a lost engine."""
        if finish.guarantee is not None:
            self._handoff = {"guarantee": finish.guarantee, "handoffs": finish.num_handoffs}

    def _pass_over(
        self, first_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> None:
        """Read tokens whose text the client has already."""
        if self._finder is None:
            for token_id in token_ids:
                self._detokenizer.feed(token_id)
        else:
            self._search(self._finder, first_index, token_ids)
        if self._logprobs is not None and logprobs:
            self._logprobs.write(logprobs)

    def _search(
        self, finder: StopFinder, first_index: int, token_ids: Sequence[int]
    ) -> tuple[int, str]:
        """Return how many tokens were read until a stop string was found, and the text before."""
        parts = []
        for place, token_id in enumerate(token_ids):
            text = self._detokenizer.feed(token_id)
            is_exempt = first_index + place < self._min_tokens
            parts.append(finder.skip(text) if is_exempt else finder.feed(text))
            if finder.is_found:
                return place + 1, "".join(parts)
        return len(token_ids), "".join(parts)

    def _emit(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] | None = None,
    ) -> None:
        written = self._logprobs.write(logprobs) if self._logprobs and logprobs else None
        if not self._is_stream:
            self._pieces.append(text)
            if written is not None:
                self._written_logprobs.append(written)
            if self._kept_ids is not None:
                self._kept_ids += token_ids
            return
        if not (text or written or (self._kept_ids is not None and token_ids)):
            return
        if self._is_rich:
            ids = token_ids if self._kept_ids is not None else None
            self._send(self._format.rich_event(text, logprobs=written, token_ids=ids))
        else:
            self._send(self._format.text_event(text))

    def _send(self, data: bytes) -> None:
        if self._has_event_ids:
            data = b"id: %d\n%b" % (self._event_id, data)
        if self._is_started:
            self._connection.write(data)
        else:
            self._is_started = True
            headers = [*STREAM_HEADERS, *self._headers]
            self._connection.start_stream(200, headers, self._format.opening() + data)

    def _flush(self, reason: str) -> str:
        """Take what was held back, now that the answer has ended; return its finish reason."""
        if self._finder is not None:
            self._pieces.append(self._finder.flush())
        return reason

    def _last_delta(self) -> dict[str, Any] | None:
        """What goes into the same event as the finish reason: a client that breaks off has both or
        neither, and never gets the end of a text twice."""
        text = "".join(self._pieces)
        return {"content": text} if text else None

    def _message(self) -> dict[str, Any] | None:
        """The message of an answer without a stream; `None` if it is all text."""
        return None

    def _succeed(self, reason: str, usage: Usage) -> None:
        self._num_output_tokens = usage.num_output_tokens
        self._is_over = True
        # The client first: counting can wait for the time that its bytes are on their way.
        self._send_end(reason, usage)
        outcome = Outcome.LENGTH if reason == "length" else Outcome.STOP
        self._end(outcome, 200, num_cached_tokens=usage.num_cached_tokens)

    def _send_end(self, reason: str, usage: Usage) -> None:
        if self._is_stream:
            asked = usage if self._has_usage else None
            delta = self._last_delta()
            last = self._format.closing(reason, asked, handoff=self._handoff, delta=delta)
            if not self._is_started:
                self._send(last)
                last = b""
            self._connection.end_stream(last)
            return
        merged = LogprobWriter.merge(self._written_logprobs) if self._written_logprobs else None
        body = self._format.document(
            "".join(self._pieces),
            reason=reason,
            usage=usage,
            logprobs=merged,
            token_ids=self._kept_ids,
            handoff=self._handoff,
            message=self._message(),
        )
        headers = [(b"content-type", b"application/json"), *self._headers]
        if self._handoff is not None:
            headers.append((b"x-dsched-guarantee", self._handoff["guarantee"].encode()))
        self._connection.respond(200, headers, body)

    def _fail(self, error: ApiError) -> None:
        self._end(Outcome.ERROR, error.status, code=error.code)
        if self._is_started:
            event = b"data: " + error.body() + b"\n\n"
            self._connection.end_stream(event, is_kept_alive=False)
        else:
            self._connection.respond_error(error, self._headers)

    def _end(
        self,
        outcome: Outcome,
        status: int,
        *,
        num_cached_tokens: int = 0,
        code: str | None = None,
    ) -> None:
        self._is_over = True
        self._pending.clear()
        now_ns = self._clock.now_ns()
        first_ns = self._first_token_ns
        record = RequestRecord(
            request_id=self.request_id,
            model=self.model,
            api=self.api,
            outcome=outcome,
            is_stream=self._is_stream,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_output_tokens,
            duration_ns=now_ns - self._start_ns,
            ttft_ns=None if first_ns is None else first_ns - self._start_ns,
        )
        self._on_end(record, status, code, num_cached_tokens)
