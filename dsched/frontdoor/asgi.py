"""Runs an ASGI application for the requests that are not on the token path.

The request's body is already here and bounded, so `receive` gives it in one piece and then waits
for the client to go away. Each request is one task; a failing application is answered with 500 and
logged, and harms nobody else.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

import structlog

from dsched.frontdoor.connection import ClientConnection
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.heads import HttpRequest

log = structlog.get_logger(__name__)

Message = MutableMapping[str, Any]
AsgiApp = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]],
    Awaitable[None],
]


class AsgiRunner:
    """Turns requests into calls of one ASGI application."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: HttpRequest, connection: ClientConnection) -> None:
        job = _AsgiJob(request, connection)
        connection.attach(job)
        task = asyncio.get_running_loop().create_task(job.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(job.ended)


class _AsgiJob:
    """One request of the application."""

    def __init__(self, request: HttpRequest, connection: ClientConnection) -> None:
        self._request = request
        self._connection = connection
        self._is_body_taken = False
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._start: Message | None = None
        self._first_body = b""
        self._is_streaming = False
        self._is_complete = False

    async def run(self, app: AsgiApp) -> None:
        request = self._request
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.0" if request.is_http_10 else "1.1",
            "method": request.method.decode("latin-1"),
            "scheme": "http",
            "path": unquote(request.path.decode("latin-1")),
            "raw_path": request.path,
            "query_string": request.query,
            "root_path": "",
            "headers": request.headers,
            "client": None,
            "server": None,
        }
        await app(scope, self._receive, self._send)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Complete what the application left open."""
        if task.cancelled():
            self._connection.abort()
            return
        error = task.exception()
        if error is not None:
            log.error("request.failed", path=self._request.path.decode("latin-1"), exc_info=error)
        if self._is_complete or self._gone.is_set():
            return
        if self._is_streaming:
            self._connection.abort()
        else:
            self._connection.respond_error(ApiError(500, "internal error", code="internal"))

    def on_disconnect(self) -> None:
        self._gone.set()
        self._writable.set()

    def on_writable(self) -> None:
        self._writable.set()

    async def _receive(self) -> Message:
        if not self._is_body_taken:
            self._is_body_taken = True
            return {"type": "http.request", "body": self._request.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set() or self._is_complete:
            return
        if message["type"] == "http.response.start":
            self._start = message
        elif message["type"] == "http.response.body" and self._start is not None:
            self._send_body(bytes(message.get("body", b"")), message.get("more_body", False))
            if not self._connection.is_writable and not self._is_complete:
                self._writable.clear()
                await self._writable.wait()

    def _send_body(self, data: bytes, has_more: bool) -> None:  # noqa: FBT001 - ASGI's own flag
        assert self._start is not None
        status = self._start["status"]
        # The connection frames answers itself.
        framing = (b"content-length", b"connection", b"transfer-encoding", b"date", b"server")
        headers = [
            (bytes(name), bytes(value))
            for name, value in self._start.get("headers", [])
            if bytes(name).lower() not in framing
        ]
        if not has_more and not self._is_streaming:
            self._is_complete = True
            self._connection.respond(status, headers, data)
        elif not self._is_streaming:
            self._is_streaming = True
            self._connection.start_stream(status, headers, data)
        elif has_more:
            if data:
                self._connection.write(data)
        else:
            self._is_complete = True
            self._connection.end_stream(data)
