"""One client's socket: HTTP/1.1 in, answers out, and every limit on the way.

The front door owns its port itself, because the token path must write a token with one call and
hear at once when a client goes away. Parsing is `httptools`' (llhttp); what is here is the order of
things: one request is answered at a time, the next ones of the same connection wait, and a client
that is too large, too slow or not speaking HTTP is told so and then cut off.

Limits (all in `FrontDoorConfig`): header and body bytes, time for headers, time for the body, time
between requests, unsent bytes and the time they may stay unsent. Deadlines are looked at by one
sweep of the server instead of a timer per connection.

The end of the client's half of the connection counts as the client going away, as in other servers:
whoever waits for an answer keeps the connection open in both directions.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from enum import Enum
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from dsched.config import FrontDoorConfig
from dsched.frontdoor.errors import ApiError, bad_request
from dsched.frontdoor.heads import HttpRequest, KnownHeads

Headers = Sequence[tuple[bytes, bytes]]

MAX_READY_REQUESTS = 32
"""Pipelined requests of one read that wait for their turn; a client that sends more is cut off."""
MAX_PIPELINED_BYTES = 64 * 1024
"""Bytes taken from a client that is still being answered; more stay in its socket."""
MAX_DRAINED_BYTES = 64 << 20
"""Bytes of a refused body that are read and thrown away, so that the client sees the refusal
instead of a reset."""
DRAIN_S = 5.0
"""Time for that."""

MAX_FRAMING = 8
"""Raw bytes per body byte: a chunk of one byte takes six."""

NEVER = float("inf")

STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OFFER_HEADERS = (b"upgrade", b"connection", b"http2-settings", b"expect")
"""Headers that are left out when a request with an offer is read again; `Expect` was answered."""
LAST_CHUNK = b"0\r\n\r\n"


class Job(Protocol):
    """Who answers the current request; told what happens to the client meanwhile."""

    def on_disconnect(self) -> None:
        """The client went away; nothing can be written any more."""
        ...

    def on_writable(self) -> None:
        """The client has read on: `ClientConnection.is_writable` is true again."""
        ...


class Application(Protocol):
    """What a server serves. Methods must not block."""

    def refusal(self, method: bytes, path: bytes) -> ApiError | None:
        """Refuse a request by its first line, before its body is read. Always the same answer for
        the same line."""
        ...

    def handle(self, request: HttpRequest, connection: "ClientConnection") -> None:
        """Answer through `connection`, now or later (then `attach` a job first)."""
        ...


class Server(Protocol):
    """What a connection needs of its server."""

    settings: FrontDoorConfig
    application: Application
    loop: asyncio.AbstractEventLoop
    common_headers: bytes
    """Header lines of every answer."""
    heads: KnownHeads
    is_stopping: bool

    def admit(self, connection: "ClientConnection") -> bool: ...

    def forget(self, connection: "ClientConnection") -> None: ...


class Phase(Enum):
    """What a connection waits for; each has its deadline."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    DRAIN = "drain"
    CLOSING = "closing"


class ClientConnection(asyncio.Protocol):
    """One connection of one client."""

    __slots__ = (
        "_body_pieces",
        "_has_completed",
        "_has_stream",
        "_headers",
        "_is_advancing",
        "_is_answering",
        "_is_chunked",
        "_is_deaf",
        "_is_reading_paused",
        "_is_told_to_continue",
        "_job",
        "_num_body_bytes",
        "_num_drained",
        "_num_fed",
        "_num_raw_bytes",
        "_parser",
        "_phase",
        "_pipelined",
        "_ready",
        "_request",
        "_server",
        "_stalled_until_s",
        "_transport",
        "_url",
        "deadline_s",
        "is_writable",
    )

    def __init__(self, server: Server) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._phase: Phase | None = None
        self._ready: deque[HttpRequest | ApiError] = deque()
        self._pipelined = bytearray()
        self._request: HttpRequest | None = None
        self._job: Job | None = None
        self._is_answering = False
        self._is_advancing = False
        self._is_deaf = False
        """Nothing more is parsed: the last request of this connection was refused or closes it."""
        self._is_reading_paused = False
        self._has_completed = False
        self._has_stream = False
        self._is_chunked = False
        self._num_drained = 0
        self._num_fed = 0
        self._stalled_until_s = NEVER
        self.deadline_s = NEVER
        self.is_writable = True
        self._begin_message()

    def _begin_message(self) -> None:
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._num_raw_bytes = 0
        self._body_pieces: list[bytes] = []
        self._num_body_bytes = 0
        self._is_told_to_continue = False

    # Answers, called by the application.

    @property
    def is_open(self) -> bool:
        """The client still can be told something."""
        return self._transport is not None and not self._transport.is_closing()

    def attach(self, job: Job) -> None:
        """Tell `job` about the client until the current answer has ended."""
        self._job = job

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer and turn to the next request."""
        request = self._request
        if not self._is_answering or request is None:
            return
        parts = [STATUS_LINES[status], self._server.common_headers]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"content-length: %d\r\n" % len(body))
        if not request.is_kept_alive or self._server.is_stopping:
            request.is_kept_alive = False
            parts.append(b"connection: close\r\n")
        elif request.is_http_10:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(b"\r\n")
        if request.method != b"HEAD":
            parts.append(body)
        self._write(b"".join(parts))
        self._end_answer()

    def respond_error(self, error: ApiError, headers: Headers = ()) -> None:
        """Send an error in OpenAI's shape as a whole answer."""
        all_headers = [(b"content-type", b"application/json"), *headers, *error.headers()]
        self.respond(error.status, all_headers, error.body())

    def start_stream(self, status: int, headers: Headers, data: bytes) -> None:
        """Send the head of an answer of unknown length, and its first bytes."""
        request = self._request
        if not self._is_answering or request is None:
            return
        self._has_stream = True
        self._is_chunked = not request.is_http_10
        parts = [STATUS_LINES[status], self._server.common_headers]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if self._is_chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            request.is_kept_alive = False
        if not request.is_kept_alive or self._server.is_stopping:
            request.is_kept_alive = False
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        if data and request.method != b"HEAD":
            parts.append(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._write(b"".join(parts))

    def write(self, data: bytes) -> None:
        """Send further bytes of a stream; `data` must not be empty."""
        if self._transport is not None and self._has_stream:
            is_chunked = self._is_chunked
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    def end_stream(self, data: bytes, *, is_kept_alive: bool = True) -> None:
        """Send the last bytes of a stream and turn to the next request."""
        if not self._has_stream or self._request is None:
            return
        if self._is_chunked:
            framed = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            self._write(framed + LAST_CHUNK)
        elif data:
            self._write(data)
        self._request.is_kept_alive &= is_kept_alive
        self._end_answer()

    def abort(self) -> None:
        """Cut the client off without another word. The job hears nothing."""
        self._job = None
        if self._transport is not None:
            self._transport.abort()

    def close_when_idle(self) -> None:
        """Close now if nothing is being answered, else after the answer."""
        if self._request is not None:
            self._request.is_kept_alive = False
        if not self._is_answering and not self._ready:
            self._close()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _end_answer(self) -> None:
        request, self._request = self._request, None
        self._job = None
        self._is_answering = False
        self._has_stream = False
        if request is None or not request.is_kept_alive:
            self._is_deaf = True
            self._ready.clear()
            self._close()
        elif not self._is_advancing:
            self._advance()

    def _close(self) -> None:
        # Unsent bytes still go out; a client that does not take them is aborted by the sweep.
        self._is_deaf = True
        self._phase = Phase.CLOSING
        self.deadline_s = self._server.loop.time() + self._server.settings.slow_reader_timeout_s
        if self._transport is not None:
            self._transport.close()

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are transports without saying so.
        self._transport = cast("asyncio.Transport", transport)
        high = self._server.settings.write_buffer_bytes
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        self.deadline_s = self._server.loop.time() + self._server.settings.header_timeout_s
        if not self._server.admit(self):
            self._refuse(ApiError(503, "too many connections", code="overloaded", retry_after_s=1))

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._drain(data)
        elif self._is_answering:
            self._pipelined += data
            if len(self._pipelined) > MAX_PIPELINED_BYTES and self._transport is not None:
                self._is_reading_paused = True
                self._transport.pause_reading()
        else:
            if self._phase is None or self._phase is Phase.IDLE:
                self._read_whole(data)
            else:
                self._feed(data)
            self._advance()

    def eof_received(self) -> bool:
        self._lose_job()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's signature
        self._transport = None
        self._is_deaf = True
        self._is_answering = False
        self._has_stream = False
        self._server.forget(self)
        self._lose_job()

    def _lose_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.on_disconnect()

    def pause_writing(self) -> None:
        self.is_writable = False
        self._stalled_until_s = (
            self._server.loop.time() + self._server.settings.slow_reader_timeout_s
        )

    def resume_writing(self) -> None:
        self.is_writable = True
        self._stalled_until_s = NEVER
        if self._job is not None:
            self._job.on_writable()

    def sweep(self, now_s: float) -> None:
        """Act on deadlines that have passed. Called by the server about once a second."""
        if now_s >= self._stalled_until_s:
            self._lose_job()
            self.abort()
        elif now_s >= self.deadline_s:
            self.deadline_s = NEVER
            if self._phase in (Phase.DRAIN, Phase.CLOSING):
                self.abort()
            elif self._phase in (Phase.HEAD, Phase.BODY):
                part = "headers" if self._phase is Phase.HEAD else "body"
                self._refuse(ApiError(408, f"the {part} of the request did not arrive in time"))
            else:
                self._close()

    # Reading.

    def _read_whole(self, data: bytes) -> None:
        """Read the first bytes of a request, most often all of it."""
        heads = self._server.heads
        known = heads.find(data)
        if known is not None:
            self._ready.append(known)
            return
        self._feed(data)
        if len(self._ready) == 1 and self._phase is None and not self._is_deaf:
            request = self._ready[0]
            if isinstance(request, HttpRequest):
                heads.learn(data, request)

    def _feed(self, data: bytes) -> None:
        self._has_completed = False
        self._num_fed = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if not self._is_deaf:
                self._give_up(bad_request(f"the request is not HTTP/1.1: {error}"))
        if not self._is_deaf and not self._has_completed:
            self._count_raw(len(data))

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read a request again without its offer of another protocol.

        The parser stops behind the head of such a request, with `rest` unread. Some clients offer
        HTTP/2 with every POST, so this is no mistake of theirs.
        """
        if self._is_deaf:
            return
        request = self._ready.pop()
        assert isinstance(request, HttpRequest)
        if request.method == b"CONNECT":
            self._give_up(ApiError(405, "this is not a proxy"))
            return
        version = b"1.0" if request.is_http_10 else b"1.1"
        lines = [b"%b %b HTTP/%b" % (request.method, self._url, version)]
        lines += [b"%b: %b" % each for each in request.headers if each[0] not in OFFER_HEADERS]
        self._parser = httptools.HttpRequestParser(self)
        self._feed(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _count_raw(self, num_bytes: int) -> None:
        """Bound what is neither a whole header nor body: long lines, chunk framing, trailers."""
        self._num_raw_bytes += num_bytes
        settings = self._server.settings
        if self._phase is Phase.HEAD:
            self._check_head_bytes(self._num_raw_bytes)
        elif (
            self._num_raw_bytes > MAX_FRAMING * settings.max_body_bytes + settings.max_header_bytes
        ):
            self._give_up(self._too_large())

    def _advance(self) -> None:
        """Answer what is ready, one after the other, and set the deadline for what is not."""
        self._is_advancing = True
        while not self._is_answering:
            if self._ready:
                self._answer(self._ready.popleft())
            elif self._pipelined and not self._is_deaf:
                data = bytes(self._pipelined)
                self._pipelined.clear()
                self._feed(data)
            else:
                break
        self._is_advancing = False
        if self._is_answering:
            self.deadline_s = NEVER
        elif self._is_deaf:
            pass
        elif self._phase is None:
            self._phase = Phase.IDLE
            self._set_deadline(self._server.settings.keep_alive_timeout_s)
        if self._is_reading_paused and len(self._pipelined) <= MAX_PIPELINED_BYTES:
            self._is_reading_paused = False
            if self._transport is not None:
                self._transport.resume_reading()

    def _set_deadline(self, seconds: float) -> None:
        self.deadline_s = self._server.loop.time() + seconds

    def _answer(self, entry: HttpRequest | ApiError) -> None:
        self._phase = None
        if isinstance(entry, ApiError):
            self._refuse(entry)
            return
        self._request = entry
        self._is_answering = True
        self._server.application.handle(entry, self)

    def _refuse(self, error: ApiError) -> None:
        """Answer what could not be read, then throw the rest away and close."""
        self._is_deaf = True
        self._ready.clear()
        self._pipelined.clear()
        if self._transport is None:
            return
        body = error.body()
        head = [STATUS_LINES[error.status], self._server.common_headers]
        head += [b"%b: %b\r\n" % header for header in error.headers()]
        head.append(b"content-type: application/json\r\nconnection: close\r\n")
        head.append(b"content-length: %d\r\n\r\n" % len(body))
        self._transport.write(b"".join(head))
        if self._parser.get_method() != b"HEAD":
            self._transport.write(body)
        # The client sees the end now; its own bytes are still taken, for a while.
        self._transport.write_eof()
        self._phase = Phase.DRAIN
        self._set_deadline(DRAIN_S)

    def _drain(self, data: bytes) -> None:
        self._num_drained += len(data)
        if self._num_drained > MAX_DRAINED_BYTES:
            self.abort()

    def _give_up(self, error: ApiError) -> None:
        """Refuse the request that is being read, after those that came before it."""
        self._is_deaf = True
        self._ready.append(error)

    # What the parser tells, during `_feed`.

    def on_message_begin(self) -> None:
        if self._is_deaf:
            return
        self._begin_message()
        self._phase = Phase.HEAD
        self._set_deadline(self._server.settings.header_timeout_s)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_deaf:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._is_deaf:
            return
        self._phase = Phase.BODY
        # Only a read that holds more than the limit can hold a head above it.
        if self._num_raw_bytes + self._num_fed > self._server.settings.max_header_bytes:
            size = len(self._url) + sum(len(name) + len(value) + 4 for name, value in self._headers)
            if not self._check_head_bytes(size):
                return
        error = self._head_refusal()
        if error is not None:
            self._give_up(error)
            return
        self._set_deadline(self._server.settings.body_timeout_s)

    def on_body(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._server.settings.max_body_bytes:
            self._give_up(self._too_large())
            self._body_pieces.clear()
        else:
            self._body_pieces.append(data)

    def on_message_complete(self) -> None:
        if self._is_deaf:
            return
        if len(self._ready) >= MAX_READY_REQUESTS:
            self._give_up(bad_request(f"more than {MAX_READY_REQUESTS} requests at once"))
            return
        path, _, query = self._url.partition(b"?")
        pieces = self._body_pieces
        fields: dict[bytes, bytes] = {}
        for name, value in self._headers:
            fields.setdefault(name, value)
        request = HttpRequest(
            method=self._parser.get_method(),
            path=path,
            query=query,
            headers=self._headers,
            fields=fields,
            body=pieces[0] if len(pieces) == 1 else b"".join(pieces),
            is_http_10=self._parser.get_http_version() == "1.0",
            is_kept_alive=self._parser.should_keep_alive(),
        )
        self._ready.append(request)
        self._has_completed = True
        self._phase = None

    def _check_head_bytes(self, num_bytes: int) -> bool:
        limit = self._server.settings.max_header_bytes
        if num_bytes <= limit:
            return True
        self._give_up(ApiError(431, f"header bytes above the limit of {limit}"))
        return False

    def _head_refusal(self) -> ApiError | None:
        is_expecting = False
        for name, value in self._headers:
            if name == b"content-length" and self._is_above_limit(value):
                return self._too_large()
            if name == b"expect":
                if value.lower() != b"100-continue":
                    return ApiError(417, "only Expect: 100-continue is supported")
                is_expecting = True
        path = self._url.partition(b"?")[0]
        error = self._server.application.refusal(self._parser.get_method(), path)
        if error is None and is_expecting and not self._ready and not self._is_answering:
            self._write(CONTINUE)
        return error

    def _is_above_limit(self, length: bytes) -> bool:
        limit = self._server.settings.max_body_bytes
        return len(length) > 18 or (length.isdigit() and int(length) > limit)

    def _too_large(self) -> ApiError:
        limit = self._server.settings.max_body_bytes
        return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
