"""HTTP/1.1 to one engine, made for token streams.

The client side is where a relay spends its time: general clients cost several times what the
tokens themselves do, so the token path has this small one, over `httptools` and the event loop's
own transports. It does what engines need (keep-alive, chunked answers, server-sent events, abort
by closing the socket) and refuses the rest by name.

Everything that arrived in one read reaches the receiver as one `on_body`, so tokens of a busy
engine coalesce by themselves. No task, future or timer exists per chunk.

In: requests from a driver, on the event loop's thread. Out: calls of the given `HttpReceiver`,
never during `request` itself. A request whose *reused* connection broke before the first byte of
the answer is sent once more on a fresh connection: the engine had closed an idle connection while
the request was on its way. Nothing else is repeated here.
"""

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from dsched.errors import DriverError, EngineUnreachableError

Headers = Sequence[tuple[bytes, bytes]]

METHODS = frozenset({"GET", "POST", "PUT", "DELETE"})
"""HEAD is missing on purpose: its answer has a length without a body."""

MAX_CONNECTIONS = 4_096
"""Open connections to one engine. A stream holds one; below the streams an engine should run,
requests wait here, far above it the process runs out of file descriptors."""
MAX_WAITING = 4_096
"""Requests that wait for a connection. More are refused at once instead of growing the queue."""
MAX_HEADER_BYTES = 65_536
"""Status line and headers of one answer; an engine needs well under one KiB."""
MAX_BODY_BYTES = 1 << 30
"""Body of one answer: above any stream of tokens, below what would fill the memory."""
MAX_EVENT_BYTES = 16 << 20
"""One server-sent event: above the logprobs of a long prompt, below what would fill the memory."""
CONNECT_TIMEOUT_S = 5.0
"""A live engine in the same data centre accepts within milliseconds."""
IDLE_TIMEOUT_S = 4.0
"""Longest rest of a connection before it is closed instead of reused: uvicorn, which the engines
run, closes after 5 s, and a race with that costs a retry."""

_HEADER_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(rb"[^\x00-\x08\x0a-\x1f\x7f]*")
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_PATH = re.compile(r"/[\x21-\x7e]*")


class HttpReceiver(Protocol):
    """Hears one answer: the head, body bytes in order, then exactly one of `on_end`, `on_error`.

    Methods must not raise and must not block. An `on_error` may come before any `on_head`.
    After `HttpExchange.abort` nothing is called any more.
    """

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_error(self, error: DriverError) -> None:
        """`EngineUnreachableError` when the socket was refused, reset or closed early."""
        ...


class HttpExchange:
    """One request and its answer. Made by `HttpPool.request`."""

    __slots__ = ("_connection", "_is_done", "_is_retry", "_message", "_pool", "_receiver")

    def __init__(self, pool: "HttpPool", message: bytes, receiver: HttpReceiver) -> None:
        self._pool = pool
        self._message = message
        self._receiver = receiver
        self._connection: _Connection | None = None
        self._is_retry = False
        self._is_done = False

    @property
    def is_done(self) -> bool:
        """The answer ended, well or badly, or `abort` was called."""
        return self._is_done

    def abort(self) -> None:
        """Close the socket, which is how an engine learns that nobody listens. Idempotent."""
        if self._is_done:
            return
        self._is_done = True
        if self._connection is not None:
            self._connection.close()

    def pause_reading(self) -> None:
        """Stop taking bytes from the engine until `resume_reading`."""
        if self._connection is not None:
            self._connection.set_paused(is_paused=True)

    def resume_reading(self) -> None:
        if self._connection is not None:
            self._connection.set_paused(is_paused=False)

    def _finish(self) -> None:
        self._is_done = True
        self._connection = None
        self._receiver.on_end()

    def _fail(self, error: DriverError) -> None:
        if self._is_done:
            return
        self._is_done = True
        self._connection = None
        self._receiver.on_error(error)


class HttpPool:
    """Connections to one engine. Lives on one event loop; no method blocks."""

    def __init__(
        self,
        base_url: str,
        *,
        max_connections: int = MAX_CONNECTIONS,
        max_waiting: int = MAX_WAITING,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_body_bytes: int = MAX_BODY_BYTES,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """Read `base_url` (`http://host:port`, a path prefix allowed); connect to nothing yet.

        Raises:
            ValueError: the URL is not one of plain HTTP, or a limit is not positive.
        """
        self.host, self.port, self._prefix = parse_base_url(base_url)
        if min(max_connections, max_header_bytes, max_body_bytes) < 1:
            raise ValueError(
                f"limits of {base_url} must be positive: {max_connections} connections, "
                f"{max_header_bytes} header bytes, {max_body_bytes} body bytes"
            )
        self.max_header_bytes = max_header_bytes
        self.max_body_bytes = max_body_bytes
        self.idle_timeout_s = idle_timeout_s
        self._max_connections = max_connections
        self._max_waiting = max_waiting
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[_Connection] = deque()
        self._open: dict[_Connection, None] = {}
        self._waiting: deque[HttpExchange] = deque()
        self._connecting: dict[HttpExchange, asyncio.Task[None]] = {}
        self._line_cache: dict[tuple[str, str], bytes] = {}
        self._header_cache: dict[tuple[bytes, bytes], bytes] = {}
        self._is_closed = False

    @property
    def num_connections(self) -> int:
        """Connections that are open or being opened."""
        return len(self._open) + len(self._connecting)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}{self._prefix}"

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        receiver: HttpReceiver,
    ) -> HttpExchange:
        """Send a request; the answer comes to `receiver`, never during this call.

        Raises:
            ValueError: a method, path or header that cannot stand in an HTTP/1.1 request.
        """
        message = self._message(method, path, headers, body)
        exchange = HttpExchange(self, message, receiver)
        self._dispatch(exchange)
        return exchange

    async def fetch(
        self,
        method: str,
        path: str,
        *,
        headers: Headers = (),
        body: bytes = b"",
        timeout_s: float = 10.0,
        max_body_bytes: int = MAX_EVENT_BYTES,
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        """Return status, headers (names in lower case, the last of a name wins) and whole body.

        Raises:
            EngineUnreachableError: no connection, a broken one, or no whole answer in `timeout_s`.
            DriverError: an answer that is not HTTP or is larger than `max_body_bytes`.
        """
        collector = _Collector(max_body_bytes)
        exchange = self.request(method, path, headers=headers, body=body, receiver=collector)
        try:
            async with asyncio.timeout(timeout_s):
                return await collector.future
        except TimeoutError as error:
            where = f"{method} {self.url}{path}"
            raise EngineUnreachableError(f"{where}: no answer in {timeout_s} s") from error
        finally:
            exchange.abort()

    def close(self) -> None:
        """Close all connections; exchanges that run end with an error. Idempotent."""
        self._is_closed = True
        error = EngineUnreachableError(f"the connection pool of {self.url} was closed")
        for task in list(self._connecting.values()):
            task.cancel()
        while self._waiting:
            self._waiting.popleft()._fail(error)
        for connection in list(self._open):
            connection.fail(error)

    def _message(self, method: str, path: str, headers: Headers, body: bytes) -> bytes:
        line = self._line_cache.get((method, path))
        if line is None:
            line = self._request_line(method, path)
        known = self._header_cache
        parts = [line, *[known.get(header) or self._header_line(*header) for header in headers]]
        if body or method != "GET":
            parts.append(b"content-length: %d\r\n" % len(body))
        parts += (b"\r\n", body)
        return b"".join(parts)

    def _request_line(self, method: str, path: str) -> bytes:
        if method not in METHODS:
            raise ValueError(f"method {method!r} is not one of {', '.join(sorted(METHODS))}")
        if not _PATH.fullmatch(path):
            raise ValueError(f"path {path!r} must start with / and be printable ASCII")
        line = f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
        if len(self._line_cache) < 64:
            self._line_cache[method, path] = line.encode()
        return line.encode()

    def _header_line(self, name: bytes, value: bytes) -> bytes:
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"header {name!r}: {value!r} cannot be sent")
        line = b"%b: %b\r\n" % (name, value)
        if len(self._header_cache) < 64 and len(line) < 256:
            self._header_cache[name, value] = line
        return line

    def _dispatch(self, exchange: HttpExchange) -> None:
        connection = None if exchange._is_retry else self._take_idle()
        if connection is not None:
            connection.send(exchange)
        elif self._is_closed:
            self._fail_soon(exchange, f"the connection pool of {self.url} was closed")
        elif self.num_connections < self._max_connections:
            self._connect(exchange)
        elif len(self._waiting) < self._max_waiting:
            self._waiting.append(exchange)
        else:
            rule = f"{len(self._waiting)} requests already wait for {self._max_connections}"
            self._fail_soon(exchange, f"{self.url}: {rule} connections")

    def _fail_soon(self, exchange: HttpExchange, message: str) -> None:
        error = EngineUnreachableError(message)
        asyncio.get_running_loop().call_soon(exchange._fail, error)

    def _take_idle(self) -> "_Connection | None":
        # The most recently used one is taken: the others age and are closed.
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable():
                return connection
            connection.close()
        return None

    def _connect(self, exchange: HttpExchange) -> None:
        task = asyncio.get_running_loop().create_task(self._open_connection(exchange))
        self._connecting[exchange] = task
        task.add_done_callback(lambda done: self._connect_ended(done, exchange))

    async def _open_connection(self, exchange: HttpExchange) -> None:
        loop = asyncio.get_running_loop()
        reason = ""
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self, loop), self.host, self.port
                )
        except TimeoutError:
            reason = f"no connection in {self._connect_timeout_s} s"
        except OSError as error:
            reason = error.strerror or str(error)
        self._connecting.pop(exchange, None)
        if reason:
            exchange._fail(EngineUnreachableError(f"{self.url}: {reason}"))
        elif exchange.is_done:
            connection.rest()
        else:
            connection.send(exchange)

    def _connect_ended(self, task: asyncio.Task[None], exchange: HttpExchange) -> None:
        self._connecting.pop(exchange, None)
        if task.cancelled():
            exchange._fail(EngineUnreachableError(f"the connection pool of {self.url} was closed"))
        elif (error := task.exception()) is not None:
            exchange._fail(DriverError(f"{self.url}: {error!r}"))
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        while self._waiting and (self._idle or self.num_connections < self._max_connections):
            exchange = self._waiting.popleft()
            if not exchange.is_done:
                self._dispatch(exchange)

    def _retry(self, exchange: HttpExchange) -> None:
        exchange._is_retry = True
        exchange._connection = None
        self._dispatch(exchange)


class _Connection(asyncio.Protocol):
    """One socket: either idle in the pool or busy with one exchange."""

    def __init__(self, pool: HttpPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: HttpExchange | None = None
        self._idle_since_s = 0.0
        self._num_answers = 0
        self._is_paused = False
        self._reset_answer()

    def _reset_answer(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._has_head = False
        self._is_head_told = False
        self._is_complete = False
        self._is_kept_alive = False
        self._ends_with_close = True

    # What the pool and the exchange ask.

    def is_reusable(self) -> bool:
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        return self._loop.time() - self._idle_since_s <= self._pool.idle_timeout_s

    def send(self, exchange: HttpExchange) -> None:
        """Write the request of `exchange` and read its answer."""
        self._reset_answer()
        self._exchange = exchange
        if self._transport is None or self._transport.is_closing():
            self._lost("the connection closed at once")
            return
        exchange._connection = self
        self._transport.write(exchange._message)

    def rest(self) -> None:
        """Go back to the pool, or close if the pool has closed."""
        if self._pool._is_closed or self._transport is None or self._transport.is_closing():
            self.close()
            return
        self.set_paused(is_paused=False)
        self._idle_since_s = self._loop.time()
        self._pool._idle.append(self)
        self._pool._serve_waiting()

    def close(self) -> None:
        """Close the socket and say nothing to anybody."""
        self._exchange = None
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: DriverError) -> None:
        """Close the socket; a running exchange ends with `error`."""
        exchange, self._exchange = self._exchange, None
        if self._transport is not None:
            self._transport.abort()
        if exchange is not None:
            exchange._fail(error)

    def set_paused(self, *, is_paused: bool) -> None:
        if self._transport is None or self._transport.is_closing() or self._is_paused == is_paused:
            return
        self._is_paused = is_paused
        if is_paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # What the event loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are transports without saying so.
        self._transport = cast("asyncio.Transport", transport)
        self._pool._open[self] = None

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            # An idle engine that talks has lost count of its answers.
            self.close()
            return
        if not self._has_head:
            self._num_header_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.fail(DriverError(f"{self._pool.url}: answered with a protocol upgrade"))
            return
        except httptools.HttpParserError as error:
            self.fail(DriverError(f"{self._pool.url}: the answer is not HTTP/1.1: {error}"))
            return
        self._tell(exchange)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool._open.pop(self, None)
        self._transport = None
        if self._exchange is None:
            if self in self._pool._idle:
                self._pool._idle.remove(self)
        elif self._has_head and self._ends_with_close and exc is None:
            exchange, self._exchange = self._exchange, None
            exchange._finish()
        else:
            self._lost(str(exc) if exc else "closed by the engine")
        if not self._pool._is_closed:
            self._pool._serve_waiting()

    def _lost(self, reason: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.is_done:
            return
        is_untouched = not self._has_head and self._num_header_bytes == 0
        if is_untouched and self._num_answers > 0 and not exchange._is_retry:
            self._pool._retry(exchange)
            return
        where = f"after {self._num_body_bytes} body bytes" if self._has_head else "before an answer"
        exchange._fail(EngineUnreachableError(f"{self._pool.url}: {reason} {where}"))

    # What the parser tells, during `feed_data`; the receiver hears it afterwards.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            self._headers = []
            return
        self._has_head = True
        # Most engines say that early, and in small letters.
        self._ends_with_close = not any(name in _FRAMING for name, _ in self._headers) and not any(
            name.lower() in _FRAMING for name, _ in self._headers
        )

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_complete = True
            # The parser knows it only here, before it turns to the next answer.
            self._is_kept_alive = self._parser.should_keep_alive()

    def _tell(self, exchange: HttpExchange) -> None:
        if not self._is_head_told:
            if not self._is_head_within_limit():
                rule = f"above the limit of {self._pool.max_header_bytes}"
                self.fail(DriverError(f"{self._pool.url}: header bytes {rule}"))
                return
            if not self._has_head:
                return
            self._is_head_told = True
            exchange._receiver.on_head(self._parser.get_status_code(), self._headers)
        if self._pieces and self._exchange is exchange:
            self._tell_body(exchange)
        if self._is_complete and self._exchange is exchange:
            self._complete(exchange)

    def _is_head_within_limit(self) -> bool:
        # What came until the head was whole bounds it; body bytes of the same read count too.
        limit = self._pool.max_header_bytes
        if self._num_header_bytes <= limit:
            return True
        if not self._has_head:
            return False
        return sum(len(name) + len(value) + 4 for name, value in self._headers) <= limit

    def _tell_body(self, exchange: HttpExchange) -> None:
        pieces, self._pieces = self._pieces, []
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._num_body_bytes += len(data)
        if self._num_body_bytes > self._pool.max_body_bytes:
            rule = f"above the limit of {self._pool.max_body_bytes}"
            self.fail(DriverError(f"{self._pool.url}: {self._num_body_bytes} body bytes, {rule}"))
            return
        exchange._receiver.on_body(data)

    def _complete(self, exchange: HttpExchange) -> None:
        self._exchange = None
        self._num_answers += 1
        # First free the socket, so that a request made in `on_end` can use it.
        if self._is_kept_alive:
            self.rest()
        else:
            self.close()
        exchange._finish()


class _Collector:
    """The receiver behind `HttpPool.fetch`."""

    def __init__(self, max_body_bytes: int) -> None:
        self.future: asyncio.Future[tuple[int, dict[bytes, bytes], bytes]] = (
            asyncio.get_running_loop().create_future()
        )
        self._max_body_bytes = max_body_bytes
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body = bytearray()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self._headers = {name.lower(): value for name, value in headers}

    def on_body(self, data: bytes) -> None:
        self._body += data
        if len(self._body) > self._max_body_bytes:
            rule = f"above the limit of {self._max_body_bytes}"
            self.on_error(DriverError(f"answer of {len(self._body)} bytes, {rule}"))

    def on_end(self) -> None:
        if not self.future.done():
            self.future.set_result((self._status, self._headers, bytes(self._body)))

    def on_error(self, error: DriverError) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class SseSplitter:
    r"""Cuts a byte stream into the data of its server-sent events, wherever the reads end.

    Lines end in LF or CRLF; comments and other fields than `data` are skipped; the data lines of
    one event are joined with LF.

    >>> splitter = SseSplitter()
    >>> splitter.feed(b'data: {"a":1}\n\ndata: [DO')
    [b'{"a":1}']
    >>> splitter.feed(b'NE]\r\n\r\n: ping\n\n')
    [b'[DONE]']
    """

    __slots__ = ("_lines", "_max_event_bytes", "_num_line_bytes", "_rest")

    def __init__(self, *, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_event_bytes = max_event_bytes
        self._rest = b""
        self._lines: list[bytes] = []
        self._num_line_bytes = 0

    @property
    def has_partial(self) -> bool:
        """Bytes of an event that has not ended are held back."""
        return bool(self._rest or self._lines)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes.

        Raises:
            DriverError: an event is longer than `max_event_bytes`.
        """
        if (
            not self._rest
            and not self._lines
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
        ):
            events = data[6:-2].split(b"\n\ndata: ")
            if data.count(b"\n") == 2 * len(events) and b"\r" not in data:
                return events
        return self._feed_lines(data)

    def _feed_lines(self, data: bytes) -> list[bytes]:
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            text = line.removesuffix(b"\r")
            if not text:
                if self._lines:
                    events.append(b"\n".join(self._lines))
                    self._lines = []
                    self._num_line_bytes = 0
            elif text.startswith(b"data:"):
                self._lines.append(text[6:] if text.startswith(b"data: ") else text[5:])
                self._num_line_bytes += len(text)
            elif text == b"data":
                self._lines.append(b"")
                self._num_line_bytes += 4
        num_bytes = self._num_line_bytes + len(self._rest)
        if num_bytes > self._max_event_bytes:
            rule = f"above the limit of {self._max_event_bytes}"
            raise DriverError(f"a server-sent event of {num_bytes} bytes, {rule}")
        return events


def parse_base_url(base_url: str) -> tuple[str, int, str]:
    """Return host, port and path prefix (without a slash at the end) of an engine's URL.

    >>> parse_base_url("http://127.0.0.1:8100/v2/")
    ('127.0.0.1', 8100, '/v2')
    >>> parse_base_url("https://h:1")
    Traceback (most recent call last):
        ...
    ValueError: engine URL 'https://h:1' must be http://HOST:PORT
    """
    try:
        parts = urlsplit(base_url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"engine URL {base_url!r}: {error}") from error
    is_plain = parts.scheme == "http" and not (parts.query or parts.fragment or parts.username)
    if not is_plain or not host or ":" in host:
        raise ValueError(f"engine URL {base_url!r} must be http://HOST:PORT")
    prefix = parts.path.rstrip("/")
    if prefix and not _PATH.fullmatch(prefix):
        raise ValueError(f"engine URL {base_url!r}: the path must be printable ASCII")
    return host, 80 if port is None else port, prefix
