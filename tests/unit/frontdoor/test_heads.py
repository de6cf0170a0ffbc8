"""KnownHeads: a request with a head that was read before is the request that the parser makes."""

import asyncio

import pytest

from dsched.config import FrontDoorConfig
from dsched.frontdoor import heads as heads_module
from dsched.frontdoor.connection import ClientConnection
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.heads import HttpRequest, KnownHeads


class Recorder:
    """An application and a server in one: keeps what it is asked, and answers 200 at once."""

    def __init__(self, heads: KnownHeads) -> None:
        self.settings = FrontDoorConfig()
        self.application = self
        self.loop = asyncio.get_running_loop()
        self.common_headers = b""
        self.is_stopping = False
        self.heads = heads
        self.requests: list[HttpRequest] = []

    def admit(self, connection: ClientConnection) -> bool:
        return True

    def forget(self, connection: ClientConnection) -> None:
        pass

    def refusal(self, method: bytes, path: bytes) -> ApiError | None:
        return ApiError(405, "no") if path == b"/refused" else None

    def handle(self, request: HttpRequest, connection: ClientConnection) -> None:
        self.requests.append(request)
        connection.respond(200, [], b"ok")


class Pipe(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self._is_closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def write_eof(self) -> None:
        self.written += b"<eof>"

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True

    abort = close


def send(heads: KnownHeads, *reads: bytes) -> tuple[list[HttpRequest], bytes, bool]:
    """Return what a new connection asks of the application, writes, and whether it closed."""
    server, pipe = Recorder(heads), Pipe()
    connection = ClientConnection(server)
    connection.connection_made(pipe)
    for read in reads:
        connection.data_received(read)
    return server.requests, pipe.written, pipe.is_closing()


POST = b"POST /a?b=c HTTP/1.1\r\nHost: h\r\nX-Id: one\r\nx-id: two\r\nContent-Length: 3\r\n\r\nabc"
WHOLE = [
    POST,
    b"GET /a HTTP/1.1\r\nhost: h\r\n\r\n",
    b"HEAD /a HTTP/1.1\r\nhost: h\r\n\r\n",
    b"POST / HTTP/1.0\r\ncontent-length: 1\r\n\r\nx",
    b"POST / HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: 1\r\n\r\nx",
    b"POST / HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx",
    b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 8\r\n\r\n\r\n\r\nGET ",
]
OTHERS = [
    b"POST / HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nx",
    b"POST / HTTP/1.1\r\nhost: h\r\nupgrade: h2c\r\ncontent-length: 1\r\n\r\nx",
    POST + POST,
    POST + b"GET",
    POST[:-1],
    b"POST /refused HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n\r\nx",
    b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 99999999999\r\n\r\nx",
    b"no http at all\r\n\r\n",
    b"\r\n\r\n",
]


@pytest.mark.parametrize("data", WHOLE)
async def test_the_second_request_is_the_same_as_the_first(data: bytes) -> None:
    heads = KnownHeads()

    first = send(heads, data)
    num_known = len(heads)
    second = send(heads, data)

    assert num_known == len(heads) == 1
    assert second == first
    assert len(first[0]) == 1


@pytest.mark.parametrize("data", OTHERS)
async def test_everything_else_is_parsed_each_time(data: bytes) -> None:
    heads = KnownHeads()

    first, second = send(heads, data), send(heads, data)

    assert len(heads) == 0
    assert second == first


@pytest.mark.parametrize("cut", [1, 20, len(POST) - 3, len(POST) - 1])
async def test_known_head_in_pieces_or_with_another_body(cut: int) -> None:
    """A known head says nothing about a request that is not whole, or about bytes behind it."""
    heads = KnownHeads()
    send(heads, POST)

    pieces, _, _ = send(heads, POST[:cut], POST[cut:])
    other, _, _ = send(heads, POST[:-3] + b"xyz")
    two, _, _ = send(heads, POST + POST[:-3] + b"def")

    assert [each.body for each in pieces] == [b"abc"]
    assert [each.body for each in other] == [b"xyz"]
    assert [each.body for each in two] == [b"abc", b"def"]


async def test_a_request_does_not_change_what_is_known() -> None:
    """The connection marks its requests as the last; the next one must not inherit that."""
    heads = KnownHeads()
    for _ in range(2):
        requests, _, _ = send(heads, POST)
        requests[0].is_kept_alive = False

    requests, written, is_closed = send(heads, POST, POST)

    assert len(requests) == 2
    assert b"connection: close" not in written
    assert not is_closed


async def test_heads_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_module, "MAX_HEADS", 4)
    heads = KnownHeads()
    for number in range(11):
        send(heads, b"GET /%d HTTP/1.1\r\nhost: h\r\n\r\n" % number)
    send(heads, b"GET /long HTTP/1.1\r\nhost: h\r\ncookie: " + b"x" * 3_000 + b"\r\n\r\n")

    assert len(heads) == 3
