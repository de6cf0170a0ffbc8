"""The admin API: what the cluster looks like from here, on a port of its own.

It has no authentication and shows configuration, so it listens on 127.0.0.1 unless told otherwise,
and never on the public port.
"""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import msgspec
import uvicorn
from msgspec import Meta
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dsched.config import AdminConfig
from dsched.errors import ConfigError
from dsched.frontdoor.live_routes import LiveSource, live_routes
from dsched.frontdoor.trace_routes import TraceControl, trace_routes

Snapshot = Callable[[], Any]
"""Returns plain values: what JSON can hold."""


class EngineControl(Protocol):
    """What operators may do to engines. Answers are plain values."""

    def drain(self, engine_id: str, *, deadline_s: float | None) -> Any:  # noqa: ANN401
        """Take an engine out of service. Raises `ValueError` for an unknown engine."""
        ...

    def undrain(self, engine_id: str) -> Any:  # noqa: ANN401
        """Put it back. Raises `ValueError` for an unknown engine."""
        ...

    def engine(self, engine_id: str) -> Any:  # noqa: ANN401
        """State, reason and number of requests. Raises `ValueError` for an unknown engine."""
        ...

    def capacity(self) -> Any:  # noqa: ANN401
        """What each pool runs and may run."""
        ...


class DrainBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to drain an engine."""

    deadline_s: Annotated[float, Meta(ge=0, le=604_800)] | None = None
    """When what still runs is handed over; `null` lets it finish."""


def make_admin_app(
    *,
    workers: Snapshot,
    config: Snapshot,
    engines: EngineControl | None = None,
    live: LiveSource | None = None,
    trace: TraceControl | None = None,
) -> Starlette:
    """Return the ASGI application; each request takes a fresh snapshot."""

    async def get_workers(_: Request) -> Response:
        return JSONResponse({"workers": workers()})

    async def get_config(_: Request) -> Response:
        return JSONResponse(config())

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "live"})

    routes = [
        Route("/health", health),
        Route("/admin/v1/workers", get_workers),
        Route("/admin/v1/config", get_config),
    ]
    if engines is not None:
        routes += _engine_routes(engines)
    if live is not None:
        routes += live_routes(live)
    if trace is not None:
        routes += trace_routes(trace)
    return Starlette(routes=routes)


def _engine_routes(engines: EngineControl) -> list[Route]:
    async def get_engine(request: Request) -> Response:
        return _answer(lambda: engines.engine(request.path_params["engine_id"]))

    async def drain(request: Request) -> Response:
        try:
            body = msgspec.json.decode(await request.body() or b"{}", type=DrainBody)
        except msgspec.DecodeError as error:
            return JSONResponse({"error": str(error)}, 400)
        engine_id = request.path_params["engine_id"]
        return _answer(lambda: engines.drain(engine_id, deadline_s=body.deadline_s))

    async def undrain(request: Request) -> Response:
        return _answer(lambda: engines.undrain(request.path_params["engine_id"]))

    async def capacity(_: Request) -> Response:
        return JSONResponse(engines.capacity())

    return [
        Route("/admin/v1/capacity", capacity),
        Route("/admin/v1/engines/{engine_id}", get_engine),
        Route("/admin/v1/engines/{engine_id}/drain", drain, methods=["POST"]),
        Route("/admin/v1/engines/{engine_id}/undrain", undrain, methods=["POST"]),
    ]


def _answer(act: Snapshot) -> Response:
    try:
        return JSONResponse(act())
    except ValueError as error:
        return JSONResponse({"error": str(error)}, 404)


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
        # Before uvicorn's task runs: whoever reads the address may connect at once.
        listener.listen()
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error
    return listener
