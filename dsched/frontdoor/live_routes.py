"""The live picture on the admin port: one snapshot, a stream of them, the past, and the web page.

| path | answers |
|---|---|
| `/` | the page, one file without any other request |
| `/admin/v1/live` | the latest `LiveSnapshot` |
| `/admin/v1/live/stream` | server-sent events, one snapshot each sample |
| `/admin/v1/live/history` | the last minutes of every rank |

A reader that is slow gets the latest snapshot when it reads again, not a queue of old ones.
"""

import re
from base64 import b64encode
from collections.abc import AsyncIterator
from hashlib import sha256
from importlib.resources import files
from typing import Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dsched.frontdoor.live import LiveHistory

MAX_READERS: Final = 64
"""Streams open at once. More: so many copies of each message are written beside the tokens."""
NO_STORE: Final = {"cache-control": "no-store"}
PAGE_FILE: Final = "live.html"


class LiveSource(Protocol):
    """What the routes read: `LiveSampler`, or a stand-in."""

    def encoded(self) -> bytes | None:
        """The latest snapshot as JSON; `None` before the first."""
        ...

    async def next_encoded(self) -> bytes | None:
        """Wait for the next snapshot; `None` when there will be none."""
        ...

    def history(self) -> LiveHistory: ...


def live_routes(source: LiveSource) -> list[Route]:
    """Return the routes over a source that may have nothing yet."""
    readers = _Readers()
    page = read_page()
    page_headers = {**NO_STORE, **security_headers(page)}

    async def get_page(_: Request) -> Response:
        return Response(page, media_type="text/html; charset=utf-8", headers=page_headers)

    async def get_snapshot(_: Request) -> Response:
        data = source.encoded()
        if data is None:
            return JSONResponse(
                {"error": "no sample has been taken yet"}, 503, {"retry-after": "1"}
            )
        return Response(data, media_type="application/json", headers=NO_STORE)

    async def get_history(_: Request) -> Response:
        data = msgspec.json.encode(source.history())
        return Response(data, media_type="application/json", headers=NO_STORE)

    async def get_stream(_: Request) -> Response:
        if readers.num_open >= MAX_READERS:
            return JSONResponse({"error": f"{MAX_READERS} readers watch already"}, 503)
        return _LiveStream(source, readers)

    return [
        Route("/", get_page),
        Route("/admin/v1/live", get_snapshot),
        Route("/admin/v1/live/history", get_history),
        Route("/admin/v1/live/stream", get_stream),
    ]


class _Readers:
    """Counts the open streams."""

    def __init__(self) -> None:
        self.num_open = 0


class _LiveStream(StreamingResponse):
    """Events until the source closes or the reader goes."""

    def __init__(self, source: LiveSource, readers: _Readers) -> None:
        super().__init__(_events(source), media_type="text/event-stream", headers=NO_STORE)
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._readers.num_open += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._readers.num_open -= 1


async def _events(source: LiveSource) -> AsyncIterator[bytes]:
    data = source.encoded()
    if data is not None:
        yield b"data: " + data + b"\n\n"
    while (data := await source.next_encoded()) is not None:
        yield b"data: " + data + b"\n\n"


def read_page() -> bytes:
    """The web page, as it is in the package."""
    return files("dsched.frontdoor").joinpath(PAGE_FILE).read_bytes()


def security_headers(page: bytes) -> dict[str, str]:
    """Headers that let the page run its own script and style, talk to its own port, and no more.

    Names and reasons on the page come from engines; should one of them ever become markup, the
    browser still runs nothing of it.
    """
    sources = {}
    for tag in ("script", "style"):
        (body,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), page, re.DOTALL)
        sources[tag] = "'sha256-" + b64encode(sha256(body).digest()).decode() + "'"
    policy = (
        f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
