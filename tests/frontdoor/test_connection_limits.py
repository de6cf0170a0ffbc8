"""The HTTP side: framing, limits, slow and rude clients."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable

import pytest

from dsched.frontdoor import FrontDoor
from dsched.testing.fake_control import FakeControlPlane
from dsched.testing.raw_http import RawClient, get, post

OpenDoor = Callable[..., Awaitable[FrontDoor]]

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"model": "tiny", "prompt": "one two", "max_tokens": 3}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n"


def request(body: bytes = BODY, extra: bytes = b"") -> bytes:
    return HEAD + extra + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_connection_serves_requests_one_after_the_other(port: int) -> None:
    async with RawClient(port) as client:
        for _ in range(3):
            client.send(request())
            assert (await client.answer()).status == 200


async def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    """Requests sent at once get their answers in order, whatever the first ones take."""
    async with RawClient(port) as client:
        bodies = [
            json.dumps({"model": "tiny", "prompt": "a", "max_tokens": n, "stream": n == 2}).encode()
            for n in (9, 2, 5)
        ]
        client.send(b"".join(map(request, bodies)) + b"GET /live HTTP/1.1\r\nhost: t\r\n\r\n")
        answers = [await client.answer() for _ in range(4)]

    counts = [answer.json()["usage"]["completion_tokens"] for answer in (answers[0], answers[2])]
    assert counts == [9, 5]
    assert answers[1].events()[-1] == "[DONE]"
    assert answers[3].json() == {"status": "live"}


async def test_pipelined_bytes_in_pieces_are_kept(port: int, control: FakeControlPlane) -> None:
    """What arrives while an answer runs is read after it, wherever it is cut."""
    control.delay_s = 0.005
    async with RawClient(port) as client:
        data = request() * 3
        for start in range(0, len(data), 50):
            client.send(data[start : start + 50])
            await client.writer.drain()
            await asyncio.sleep(0)
        answers = [await client.answer() for _ in range(3)]

    assert [answer.status for answer in answers] == [200] * 3


async def test_too_many_pipelined_requests_are_refused(port: int) -> None:
    """A flood of requests in one packet is cut off instead of queued."""
    async with RawClient(port) as client:
        client.send(b"GET /live HTTP/1.1\r\nhost: t\r\n\r\n" * 40)
        statuses = [(await client.answer()).status for _ in range(33)]
        assert await client.closed() == b""

    assert statuses == [200] * 32 + [400]


async def test_request_cut_anywhere_is_the_same_request(port: int) -> None:
    async with RawClient(port) as client:
        for byte in request():
            client.send(bytes([byte]))
            await client.writer.drain()
            await asyncio.sleep(0)
        answer = await client.answer()

    assert answer.json()["usage"]["completion_tokens"] == 3


async def test_chunked_request_body(port: int) -> None:
    async with RawClient(port) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(BODY), 7):
            piece = BODY[start : start + 7]
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200


async def test_expect_continue_is_answered_before_the_body(port: int) -> None:
    async with RawClient(port) as client:
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(BODY))
        assert (await client.head())[0] == 100
        client.send(BODY)
        assert (await client.answer()).status == 200
        client.send(HEAD + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
        assert (await client.answer()).status == 413


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions?x=1"])
async def test_wrong_method_is_refused(port: int, method: str, path: str) -> None:
    async with RawClient(port) as client:
        client.send(f"{method} {path} HTTP/1.1\r\nhost: t\r\ncontent-length: 0\r\n\r\n".encode())
        answer = await client.answer()

    assert (answer.status, answer.headers["allow"]) == (405, "post")
    assert answer.error()["type"] == "invalid_request_error"


async def test_head_has_no_body(port: int) -> None:
    """HEAD gets the head alone, so the next answer starts where it should."""
    async with RawClient(port) as client:
        client.send(b"HEAD /live HTTP/1.1\r\nhost: t\r\n\r\n")
        assert (await client.answer(is_head=True)).status == 200
        client.send(b"HEAD /v1/completions HTTP/1.1\r\nhost: t\r\n\r\n")
        assert (await client.answer(is_head=True)).status == 405
        assert await client.closed() == b""


@pytest.mark.parametrize(
    ("path", "status"), [("/", 404), ("/nope", 404), ("/v1/completions/x", 404), ("/%ff", 404)]
)
async def test_unknown_path_is_not_found(port: int, path: str, status: int) -> None:
    answer = await get(port, path)

    assert answer.status == status
    assert answer.error()["type"] == "invalid_request_error"


async def test_post_to_a_get_path_is_refused(port: int) -> None:
    assert (await post(port, "/v1/models", b"{}")).status == 405


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        HEAD + b"content-length: -1\r\n\r\n",
        HEAD + b"content-length: 5\r\ncontent-length: 6\r\n\r\nabcde",
        HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"bad header\r\n\r\n",
        HEAD + b"a: b\r\n c: d\r\n\r\n",
    ],
    ids=lambda data: repr(data[-24:]),
)
async def test_what_is_not_http_is_refused_and_closed(port: int, data: bytes) -> None:
    async with RawClient(port) as client:
        client.send(data)
        answer = await client.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert "not HTTP/1.1" in answer.error()["message"]
    assert (await post(port, COMPLETIONS, BODY)).status == 200


@pytest.mark.parametrize("cut", [0, 60, 140, 170])
async def test_offer_of_another_protocol_is_declined(port: int, cut: int) -> None:
    """Some clients offer HTTP/2 with every POST: they are answered in HTTP/1.1, body and all."""
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    async with RawClient(port) as client:
        data = request(extra=offer) * 2
        client.send(data[:cut])
        await client.writer.drain()
        await asyncio.sleep(0.001)
        client.send(data[cut:])
        for _ in range(2):
            answer = await client.answer()
            assert (answer.status, answer.json()["usage"]["completion_tokens"]) == (200, 3)


async def test_tunnel_is_refused(port: int) -> None:
    async with RawClient(port) as client:
        client.send(b"CONNECT other:443 HTTP/1.1\r\nhost: other\r\n\r\n")
        assert (await client.answer()).status == 405


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"x: " + b"y" * 5_000 + b"\r\n\r\n",
        HEAD + b"x: " + b"y" * 5_000,
        HEAD + b"x: y\r\n" * 1_000,
        b"GET /" + b"x" * 5_000,
    ],
    ids=["one header", "header without end", "many headers", "path"],
)
async def test_large_headers_are_refused(open_door: OpenDoor, data: bytes) -> None:
    door = await open_door(max_header_bytes=2_048)
    async with RawClient(door.bound_port) as client:
        client.send(data)
        answer = await client.answer()
        assert answer.status == 431
        assert "2048" in answer.error()["message"]


async def test_endless_trailers_are_refused(open_door: OpenDoor) -> None:
    """Bytes behind a chunked body count too."""
    door = await open_door(max_header_bytes=2_048, max_body_bytes=1_000)
    async with RawClient(door.bound_port) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        await client.writer.drain()
        for _ in range(20):
            client.send(b"x: " + b"y" * 1_000)
        assert (await client.answer()).status == 413


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"POST /v1/comp", 408),
        (HEAD, 408),
        (HEAD + b"content-length: 100\r\n\r\n{", 408),
    ],
    ids=["line", "headers", "body"],
)
async def test_slow_writer_is_told_and_cut_off(
    open_door: OpenDoor, sent: bytes, status: int
) -> None:
    """Half a request does not hold a connection, however slowly it grows."""
    door = await open_door(header_timeout_s=0.05, body_timeout_s=0.05)
    async with RawClient(door.bound_port) as client:
        client.send(sent)
        assert (await client.answer()).status == status


async def test_dripping_headers_do_not_extend_the_time(open_door: OpenDoor) -> None:
    door = await open_door(header_timeout_s=0.1)
    async with RawClient(door.bound_port) as client:
        answering = asyncio.create_task(client.answer())
        client.send(HEAD + b"x: ")
        for _ in range(200):
            client.send(b"a")
            if answering.done():
                break
            await asyncio.sleep(0.01)
        assert answering.done()
        assert (await answering).status == 408


async def test_silent_and_idle_connections_are_closed(open_door: OpenDoor) -> None:
    """A connection without a request, and one after its request, are closed without a word."""
    for_silent = await open_door(header_timeout_s=0.05)
    for_idle = await open_door(keep_alive_timeout_s=0.05)
    async with RawClient(for_silent.bound_port) as silent, RawClient(for_idle.bound_port) as idle:
        idle.send(request())
        assert (await idle.answer()).status == 200
        assert await silent.closed() == b""
        assert await idle.closed() == b""
    assert for_silent.num_connections == for_idle.num_connections == 0


async def test_too_many_connections_are_refused(open_door: OpenDoor) -> None:
    door = await open_door(max_connections=2)
    async with RawClient(door.bound_port) as first, RawClient(door.bound_port) as second:
        for client in (first, second):
            client.send(request())
            assert (await client.answer()).status == 200
        async with RawClient(door.bound_port) as third:
            answer = await third.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_connection_close_is_honoured(port: int) -> None:
    async with RawClient(port) as client:
        client.send(request(extra=b"connection: close\r\n"))
        answer = await client.answer()
        assert answer.headers["connection"] == "close"
        assert await client.closed() == b""


async def test_http_10_client_gets_a_stream_that_ends_with_the_connection(port: int) -> None:
    """A client of HTTP/1.0 does not know chunks."""
    body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True}).encode()
    async with RawClient(port) as client:
        client.send(
            b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = await client.answer()
        assert "transfer-encoding" not in answer.headers
        assert answer.events()[-1] == "[DONE]"


async def test_slow_reader_is_cut_off_and_its_request_cancelled(
    open_door: OpenDoor, control: FakeControlPlane
) -> None:
    """A client that stops reading costs its buffer and its time, then the engine is told."""
    control.is_holding = True
    control.add_model("tiny", max_model_len=1 << 20)
    door = await open_door(write_buffer_bytes=4_096, slow_reader_timeout_s=0.2)
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 100_000, "stream": True}
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", door.bound_port))
    data = request(json.dumps(body).encode())
    sock.sendall(data)
    while not control.runs:
        await asyncio.sleep(0.001)
    (run,) = control.runs.values()
    shrink_send_buffers(door)
    while run.num_left and not control.cancelled:
        run.send(10)
        await asyncio.sleep(0)

    async with asyncio.timeout(5):
        while not control.cancelled:
            await asyncio.sleep(0.01)

    sock.close()
    assert control.cancelled == [run.request.request_id]
    assert door.num_open_requests == 0


async def test_client_that_reads_again_gets_every_token(
    open_door: OpenDoor, control: FakeControlPlane
) -> None:
    """Tokens that came while the client did not read are not lost and not reordered."""
    control.is_holding = True
    control.add_model("tiny", max_model_len=1 << 20)
    door = await open_door(write_buffer_bytes=4_096)
    num_tokens = 20_000
    body = {
        "model": "tiny", "prompt": "one two", "max_tokens": num_tokens, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(("127.0.0.1", door.bound_port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4_096)
    writer.write(request(json.dumps(body).encode()))
    while not control.runs:
        await asyncio.sleep(0.001)
    (run,) = control.runs.values()
    shrink_send_buffers(door)
    while run.num_left:
        run.send(20)
        if run.num_left % 1_000 == 0:
            await asyncio.sleep(0)
    run.finish()
    data = await asyncio.wait_for(read_until_end(reader), 60)
    writer.close()

    events = [line for line in data.split(b"\n") if line.startswith(b"data: {")]
    ids: list[int] = []
    for event in events:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            ids += choice.get("token_ids", [])
    assert ids == list(run.answer)
    assert len(events) < num_tokens / 20
    assert b"data: [DONE]" in data


def shrink_send_buffers(door: FrontDoor) -> None:
    """Take away the megabytes that the kernel would hold for a client that does not read."""
    for connection in door._server._connections:
        assert connection._transport is not None
        sock = connection._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)


async def read_until_end(reader: asyncio.StreamReader) -> bytes:
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        piece = await reader.read(65_536)
        assert piece, "the connection was cut"
        data += piece
    return bytes(data)
