"""A small strict HTTP client for tests: sends raw bytes, refuses answers that are malformed."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

TIMEOUT_S = 10.0


@dataclass(slots=True)
class RawAnswer:
    """One whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    def json(self) -> Any:  # noqa: ANN401 - any JSON value
        return json.loads(self.body.decode("utf-8", "strict"))

    def error(self) -> dict[str, Any]:
        """The error object; its shape is checked."""
        document = self.json()
        assert set(document) == {"error"}, document
        error: dict[str, Any] = document["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str)
        assert error["message"]
        return error

    def events(self) -> list[str]:
        """The data of the server-sent events."""
        return parse_events(self.body)


def parse_events(body: bytes) -> list[str]:
    """Return the data of the events of a whole stream, which must be well formed."""
    text = body.decode("utf-8", "strict")
    assert not text or text.endswith("\n\n"), text[-80:]
    events = text.split("\n\n")[:-1]
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    return [event.removeprefix("data: ") for event in events]


class RawClient:
    """One connection to a server on 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> "RawClient":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a POST request with a length."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = f"POST {path} HTTP/1.1\r\nhost: t\r\n{lines}content-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Read status and headers."""
        async with asyncio.timeout(TIMEOUT_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        lines = raw.decode("ascii").split("\r\n")
        version, status, _ = lines[0].split(" ", 2)
        assert version == "HTTP/1.1", lines[0]
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(status), headers

    async def chunk(self) -> bytes:
        """Read one chunk of a chunked body; empty at its end."""
        async with asyncio.timeout(TIMEOUT_S):
            size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def answer(self, *, is_head: bool = False) -> RawAnswer:
        """Read one whole answer."""
        status, headers = await self.head()
        chunks: list[bytes] = []
        if is_head:
            return RawAnswer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                chunks.append(chunk)
            return RawAnswer(status, headers, b"".join(chunks), chunks)
        async with asyncio.timeout(TIMEOUT_S):
            if "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
        return RawAnswer(status, headers, body)

    async def closed(self) -> bytes:
        """Read until the server closes; return what came."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""


async def post(
    port: int, path: str, body: bytes | object, headers: Mapping[str, str] | None = None
) -> RawAnswer:
    """Send one POST request on a connection of its own; other bodies than bytes become JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with RawClient(port) as client:
        client.post(path, data, headers)
        return await client.answer()


async def get(port: int, path: str) -> RawAnswer:
    """Send one GET request on a connection of its own."""
    async with RawClient(port) as client:
        client.send(f"GET {path} HTTP/1.1\r\nhost: t\r\n\r\n".encode())
        return await client.answer()
