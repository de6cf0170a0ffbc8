"""HttpPool against small raw servers: every answer an engine can give, and every way to break."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from dsched.drivers.http import HttpPool, SseSplitter, parse_base_url
from dsched.errors import DriverError, EngineUnreachableError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Recorder:
    """A receiver that keeps what it hears, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.error: DriverError | None = None
        self.ended = asyncio.Event()
        self.got_body = asyncio.Event()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.calls.append("head")
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self.calls.append("body")
        self.body += data
        self.got_body.set()

    def on_end(self) -> None:
        self.calls.append("end")
        self.ended.set()

    def on_error(self, error: DriverError) -> None:
        self.calls.append("error")
        self.error = error
        self.ended.set()

    async def wait(self) -> None:
        await asyncio.wait_for(self.ended.wait(), 5)


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Return head and body; the head is empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b"", b""
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """Run `handler` for each connection; yield the base URL."""

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(guarded, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def replying(answer: bytes, *, num_answers: int = 1 << 30) -> Handler:
    """Give `answer` to each request of a connection, then close after `num_answers`."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(num_answers):
            head, _ = await read_request(reader)
            if not head:
                return
            writer.write(answer)
            await writer.drain()

    return handler


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


async def test_answer_is_told_in_order() -> None:
    """Head, body, end; the request carries method, path, headers and body."""
    seen: list[tuple[bytes, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(b"HTTP/1.1 201 Made\r\nX-A: b\r\ncontent-length: 2\r\n\r\nok")

    async with serving(handler) as url:
        pool, recorder = HttpPool(url + "/pre/"), Recorder()
        pool.request("POST", "/v1/x", headers=[(b"x-t", b"1")], body=b"hi", receiver=recorder)
        assert recorder.calls == []
        await recorder.wait()
        pool.close()

    assert recorder.calls == ["head", "body", "end"]
    assert (recorder.status, recorder.body) == (201, b"ok")
    assert (b"X-A", b"b") in recorder.headers
    head, body = seen[0]
    assert head.startswith(b"POST /pre/v1/x HTTP/1.1\r\nhost: 127.0.0.1:")
    assert b"\r\nx-t: 1\r\n" in head
    assert body == b"hi"


async def test_connection_is_reused() -> None:
    """Requests one after another use one connection."""
    connections = 0
    answer = replying(OK)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answer(reader, writer)

    async with serving(handler) as url:
        pool = HttpPool(url)
        bodies = [(await pool.fetch("GET", "/"))[2] for _ in range(5)]
        num_idle = pool.num_idle
        pool.close()

    assert bodies == [b"ok"] * 5
    assert (connections, num_idle) == (1, 1)


async def test_chunks_of_one_read_are_one_body_call() -> None:
    """Tokens that arrive together are handed over together."""
    chunks = b"".join(b"3\r\nab%d\r\n" % i for i in range(10)) + b"0\r\n\r\n"
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks
    async with serving(replying(answer)) as url:
        pool, recorder = HttpPool(url), Recorder()
        pool.request("GET", "/", receiver=recorder)
        await recorder.wait()
        pool.close()

    assert recorder.body == b"".join(b"ab%d" % i for i in range(10))
    assert recorder.calls.count("body") == 1


async def test_answer_cut_anywhere_is_the_same_answer() -> None:
    """One byte a write gives the same head, body and end."""
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for byte in answer:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(handler) as url:
        pool = HttpPool(url)
        status, _, body = await pool.fetch("GET", "/")
        pool.close()

    assert (status, body) == (200, b"hello")


async def test_body_without_length_ends_with_the_connection() -> None:
    """Neither length nor chunks: the end of the connection is the end of the body."""
    async with serving(replying(b"HTTP/1.1 200 OK\r\n\r\nrest", num_answers=1)) as url:
        pool = HttpPool(url)
        assert (await pool.fetch("GET", "/"))[2] == b"rest"
        pool.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
async def test_early_close_is_unreachable(answer: bytes) -> None:
    """A socket that closes before the answer ends is evidence of a dead engine, told once."""
    async with serving(replying(answer, num_answers=1)) as url:
        pool, recorder = HttpPool(url), Recorder()
        pool.request("POST", "/", receiver=recorder)
        await recorder.wait()
        pool.close()

    assert isinstance(recorder.error, EngineUnreachableError)
    assert recorder.calls.count("error") == 1
    assert "end" not in recorder.calls


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: zz\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 101 Switch\r\nconnection: upgrade\r\nupgrade: ws\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000,
    ],
)
async def test_answer_that_is_not_http_is_a_driver_error(answer: bytes) -> None:
    """Garbage, an upgrade and endless headers end the exchange with one error."""
    async with serving(replying(answer, num_answers=1)) as url:
        pool, recorder = HttpPool(url), Recorder()
        pool.request("GET", "/", receiver=recorder)
        await recorder.wait()
        pool.close()

    assert recorder.calls == ["error"]


async def test_body_above_the_limit_is_refused() -> None:
    """An endless answer does not fill the memory."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4000\r\n\r\n" + b"x" * 4000
    async with serving(replying(answer)) as url:
        pool = HttpPool(url, max_body_bytes=1000)
        with pytest.raises(DriverError, match="limit of 1000"):
            await pool.fetch("GET", "/")
        roomy = HttpPool(url)
        with pytest.raises(DriverError, match="limit of 100"):
            await roomy.fetch("GET", "/", max_body_bytes=100)
        pool.close()
        roomy.close()


async def test_refused_connection_is_unreachable() -> None:
    """A port that nobody listens on is told by name, and soon."""
    async with serving(replying(OK)) as url:
        pass
    pool = HttpPool(url)
    with pytest.raises(EngineUnreachableError, match=url):
        await pool.fetch("GET", "/")
    assert pool.num_connections == 0


async def test_request_on_a_stale_connection_is_sent_again_once() -> None:
    """The engine closed the idle connection meanwhile: the client never notices."""
    num_connections, num_requests = 0, 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections, num_requests
        num_connections += 1
        head, _ = await read_request(reader)
        num_requests += bool(head)
        writer.write(OK)
        if num_connections == 1:
            # Take the next request of this connection and close without an answer.
            head, _ = await read_request(reader)
            num_requests += bool(head)
        else:
            await read_request(reader)

    async with serving(handler) as url:
        pool = HttpPool(url)
        assert (await pool.fetch("POST", "/"))[0] == 200
        assert (await pool.fetch("POST", "/"))[0] == 200
        pool.close()

    assert (num_connections, num_requests) == (2, 3)


async def test_request_is_not_sent_a_third_time() -> None:
    """An engine that closes every connection without an answer gets each request at most twice."""
    num_requests = 0
    is_closing = False

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests, is_closing
        while True:
            head, _ = await read_request(reader)
            if not head:
                return
            num_requests += 1
            if is_closing:
                return
            writer.write(OK)
            is_closing = True

    async with serving(handler) as url:
        pool = HttpPool(url)
        await pool.fetch("POST", "/")
        with pytest.raises(EngineUnreachableError):
            await pool.fetch("POST", "/")
        pool.close()

    assert num_requests == 3


async def test_broken_after_a_first_byte_is_not_sent_again() -> None:
    """Once the engine began to answer, repeating could compute twice."""
    num_requests = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        while (await read_request(reader))[0]:
            num_requests += 1
            writer.write(OK if num_requests == 1 else b"HTTP")
            if num_requests > 1:
                return

    async with serving(handler) as url:
        pool = HttpPool(url)
        await pool.fetch("POST", "/")
        with pytest.raises(EngineUnreachableError):
            await pool.fetch("POST", "/")
        pool.close()

    assert num_requests == 2


async def test_abort_closes_the_socket_and_ends_the_calls() -> None:
    """The engine sees the end of the connection; the receiver hears no more."""
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n")
        assert await reader.read() == b""
        closed.set()

    async with serving(handler) as url:
        pool, recorder = HttpPool(url), Recorder()
        exchange = pool.request("POST", "/", receiver=recorder)
        await asyncio.wait_for(recorder.got_body.wait(), 5)
        exchange.abort()
        exchange.abort()
        await asyncio.wait_for(closed.wait(), 5)
        pool.close()

    assert recorder.calls == ["head", "body"]
    assert exchange.is_done


async def test_abort_while_connecting_says_nothing() -> None:
    """An exchange that was given up before its connection stood is never sent."""
    num_requests = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        while (await read_request(reader))[0]:
            num_requests += 1
            writer.write(OK)

    async with serving(handler) as url:
        pool, recorder = HttpPool(url), Recorder()
        pool.request("POST", "/", receiver=recorder).abort()
        await pool.fetch("GET", "/")
        pool.close()

    assert (recorder.calls, num_requests) == ([], 1)


async def test_paused_exchange_gets_nothing_until_resumed() -> None:
    """Backpressure reaches the engine's socket."""
    size = 8 << 20

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
        await writer.drain()

    class Pausing(Recorder):
        def on_body(self, data: bytes) -> None:
            if not self.body:
                exchange.pause_reading()
            super().on_body(data)

    async with serving(handler) as url:
        pool, recorder = HttpPool(url), Pausing()
        exchange = pool.request("GET", "/", receiver=recorder)
        await asyncio.wait_for(recorder.got_body.wait(), 5)
        taken = len(recorder.body)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(recorder.body) == taken < size
        exchange.resume_reading()
        await recorder.wait()
        pool.close()

    assert len(recorder.body) == size


async def test_requests_beyond_the_connections_wait_and_beyond_that_fail() -> None:
    """Both the connections and the queue before them are bounded."""
    async with serving(replying(OK)) as url:
        pool = HttpPool(url, max_connections=1, max_waiting=1)
        recorders = [Recorder() for _ in range(3)]
        for recorder in recorders:
            pool.request("GET", "/", receiver=recorder)
        for recorder in recorders:
            await recorder.wait()
        pool.close()

    assert [recorder.calls[-1] for recorder in recorders] == ["end", "end", "error"]
    assert "already wait" in str(recorders[2].error)


async def test_close_ends_what_runs() -> None:
    """Closing the pool fails running and later requests instead of leaving them open."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab")
        await reader.read()

    async with serving(handler) as url:
        pool, recorder, late = HttpPool(url), Recorder(), Recorder()
        pool.request("GET", "/", receiver=recorder)
        await asyncio.wait_for(recorder.got_body.wait(), 5)
        pool.close()
        pool.request("GET", "/", receiver=late)
        await late.wait()

    assert recorder.calls == ["head", "body", "error"]
    assert late.calls == ["error"]


async def test_fetch_gives_up_in_time() -> None:
    """An engine that accepts and stays silent does not hold the caller."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(handler) as url:
        pool = HttpPool(url)
        with pytest.raises(EngineUnreachableError, match=r"no answer in 0\.01 s"):
            await pool.fetch("GET", "/", timeout_s=0.01)
        pool.close()


async def test_continue_before_the_answer_is_skipped() -> None:
    """An interim answer is not the answer."""
    async with serving(replying(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)) as url:
        pool, recorder = HttpPool(url), Recorder()
        pool.request("POST", "/", receiver=recorder)
        await recorder.wait()
        pool.close()

    assert (recorder.status, recorder.body) == (200, b"ok")


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("HEAD", "/", []),
        ("GET", "x", []),
        ("GET", "/a b", []),
        ("GET", "/a\r\nx: y", []),
        ("GET", "/", [(b"x", b"a\r\nb: c")]),
        ("GET", "/", [(b"x y", b"a")]),
    ],
)
def test_request_that_cannot_be_sent_is_refused(
    method: str, path: str, headers: list[tuple[bytes, bytes]]
) -> None:
    """Nothing that a caller passes can smuggle a second request or header."""
    pool = HttpPool("http://127.0.0.1:1")
    with pytest.raises(ValueError, match=r"method|path|header"):
        pool._message(method, path, headers, b"")


@pytest.mark.parametrize(
    "url", ["", "x", "https://h:1", "http://", "http://h:99999", "http://h:1/?q", "ftp://h"]
)
def test_url_that_is_not_plain_http_is_refused(url: str) -> None:
    """The message names the URL."""
    with pytest.raises(ValueError, match="engine URL"):
        parse_base_url(url)


def test_event_above_the_limit_is_refused() -> None:
    """An event that never ends does not fill the memory."""
    splitter = SseSplitter(max_event_bytes=100)
    with pytest.raises(DriverError, match="limit of 100"):
        splitter.feed(b"data: " + b"x" * 200)
