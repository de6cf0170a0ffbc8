"""HttpPool on the production event loop, against the front door's own server."""

import asyncio
import json

import pytest

from dsched.drivers.http import HttpPool, SseSplitter
from dsched.errors import DriverError, EngineUnreachableError
from dsched.testing.fake_control import FakeControlPlane


class Reader:
    """A receiver that splits events and can abort."""

    def __init__(self) -> None:
        self.status = 0
        self.events: list[bytes] = []
        self.ended = asyncio.Event()
        self.error: DriverError | None = None
        self.splitter = SseSplitter()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status

    def on_body(self, data: bytes) -> None:
        self.events += self.splitter.feed(data)

    def on_end(self) -> None:
        self.ended.set()

    def on_error(self, error: DriverError) -> None:
        self.error = error
        self.ended.set()


def body(**fields: object) -> bytes:
    return json.dumps(
        {"model": "tiny", "prompt": "a", "max_tokens": 5, "stream": True} | fields
    ).encode()


async def test_streams_over_one_pool(port: int) -> None:
    """Several streams at once, then their connections rest and are used again."""
    pool = HttpPool(f"http://127.0.0.1:{port}")
    for _ in range(2):
        readers = [Reader() for _ in range(8)]
        for reader in readers:
            pool.request("POST", "/v1/completions", body=body(), receiver=reader)
        async with asyncio.timeout(10):
            for reader in readers:
                await reader.ended.wait()
        assert [reader.status for reader in readers] == [200] * 8
        assert all(reader.events[-1] == b"[DONE]" for reader in readers)
        assert pool.num_connections == pool.num_idle == 8
    status, headers, _ = await pool.fetch("GET", "/live")
    pool.close()

    assert (status, headers[b"content-type"]) == (200, b"application/json")


async def test_abort_is_a_disconnect_for_the_server(port: int, control: FakeControlPlane) -> None:
    control.is_holding = True
    pool, reader = HttpPool(f"http://127.0.0.1:{port}"), Reader()
    exchange = pool.request("POST", "/v1/completions", body=body(), receiver=reader)
    async with asyncio.timeout(10):
        while not control.runs:
            await asyncio.sleep(0.001)
        exchange.abort()
        while not control.cancelled:
            await asyncio.sleep(0.001)
    pool.close()

    assert not reader.ended.is_set()


async def test_refused_connection(port: int) -> None:
    pool = HttpPool("http://127.0.0.1:1")
    with pytest.raises(EngineUnreachableError, match=r"127\.0\.0\.1:1"):
        await pool.fetch("GET", "/")
    pool.close()
