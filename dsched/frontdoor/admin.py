"""The admin API: what the cluster looks like from here, on a port of its own.

It has no authentication and shows configuration, so it listens on 127.0.0.1 unless told otherwise,
and never on the public port.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dsched.config import AdminConfig
from dsched.errors import ConfigError

Snapshot = Callable[[], Any]
"""Returns plain values: what JSON can hold."""


def make_admin_app(*, workers: Snapshot, config: Snapshot) -> Starlette:
    """Return the ASGI application; each request takes a fresh snapshot."""

    async def get_workers(_: Request) -> Response:
        return JSONResponse({"workers": workers()})

    async def get_config(_: Request) -> Response:
        return JSONResponse(config())

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/admin/v1/workers", get_workers),
            Route("/admin/v1/config", get_config),
        ]
    )


class AdminServer:
    """Serves the admin application with uvicorn on the running event loop."""

    def __init__(self, app: Starlette, settings: AdminConfig) -> None:
        self._settings = settings
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = _EmbeddedServer(config)
        self._task: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    @property
    def bound_port(self) -> int:
        """The port in use, also when the setting is 0.

        Raises:
            RuntimeError: `start` was not called.
        """
        if self._listener is None:
            raise RuntimeError("the admin API does not listen: call start() first")
        port: int = self._listener.getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use or not ours.
        """
        self._listener = _bind(self._settings)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))

    async def stop(self) -> None:
        """Close the port. Idempotent."""
        self._server.should_exit = True
        task, self._task = self._task, None
        if task is not None:
            await task
        if self._listener is not None:
            self._listener.close()


class _EmbeddedServer(uvicorn.Server):
    """A server that leaves the process's signals to whoever runs the event loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(settings: AdminConfig) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error
    return listener
