"""The front door as one object: both ports, the token path, and a graceful end."""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from dsched.clock import Clock, SystemClock
from dsched.config import AdminConfig, FrontDoorConfig
from dsched.controller.request import ControlPlane
from dsched.frontdoor.admin import AdminServer, EngineControl, Snapshot, make_admin_app
from dsched.frontdoor.api import CompletionApi
from dsched.frontdoor.app import make_app
from dsched.frontdoor.asgi import AsgiRunner
from dsched.frontdoor.connection import ClientConnection
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.heads import HttpRequest
from dsched.frontdoor.live_routes import LiveSource
from dsched.frontdoor.models import ServedModel
from dsched.frontdoor.server import HttpServer
from dsched.frontdoor.spans import RequestTracer
from dsched.frontdoor.stats import Api, FrontDoorMetrics, FrontDoorStats, NoMetrics
from dsched.frontdoor.trace_routes import TraceControl
from dsched.metrics import MetricsExporter

log = structlog.get_logger(__name__)

TOKEN_PATHS = {b"/v1/completions": Api.COMPLETIONS, b"/v1/chat/completions": Api.CHAT}
"""Paths of the token path; all others belong to the ASGI application."""

STOP_POLL_S = 0.02
"""How often a stopping front door looks whether its answers have ended."""


class FrontDoor:
    """Serves clients of a control plane. `start` and `stop` run on one event loop.

    `models` may gain entries while the front door runs; a model without an entry answers 503.
    """

    def __init__(
        self,
        *,
        control: ControlPlane,
        models: Mapping[str, ServedModel],
        settings: FrontDoorConfig | None = None,
        admin: AdminConfig | None = None,
        metrics: FrontDoorMetrics | None = None,
        metrics_text: Callable[[], bytes] | None = None,
        workers: Snapshot = list,
        config: Snapshot = dict,
        engines: EngineControl | None = None,
        live: LiveSource | None = None,
        tracer: RequestTracer | None = None,
        trace: TraceControl | None = None,
        clock: Clock | None = None,
        process_tag: int = 0,
    ) -> None:
        """`metrics_text` renders `/metrics`, by default what the process itself knows.

        `workers` and `config` are asked for plain values at each call of the admin API, which is
        served only where `admin` is given. `process_tag` makes the request ids of this process
        differ from those of others.

        Raises:
            ConfigError: a setting cannot be used.
        """
        self.settings = settings or FrontDoorConfig()
        self.stats = FrontDoorStats(sorted(models))
        self._control = control
        self._api = CompletionApi(
            control=control,
            models=models,
            settings=self.settings,
            stats=self.stats,
            metrics=metrics or NoMetrics(),
            clock=clock or SystemClock(),
            process_tag=process_tag,
            tracer=tracer,
        )
        app = make_app(
            control=control,
            models=models,
            not_ready_reason=self.not_ready_reason,
            metrics_text=metrics_text or MetricsExporter().render,
        )
        self._server = HttpServer(_Router(self._api, AsgiRunner(app)), self.settings)
        self._admin: AdminServer | None = None
        if admin is not None:
            self._admin = AdminServer(
                make_admin_app(
                    workers=workers, config=config, engines=engines, live=live, trace=trace
                ),
                admin,
            )

    @property
    def bound_port(self) -> int:
        """The public port in use, also when the setting is 0."""
        return self._server.bound_port

    @property
    def bound_admin_port(self) -> int | None:
        """The admin port in use; `None` without an admin API."""
        return None if self._admin is None else self._admin.bound_port

    @property
    def num_connections(self) -> int:
        return self._server.num_connections

    @property
    def num_open_requests(self) -> int:
        return self._api.num_open

    def not_ready_reason(self) -> str | None:
        """Return why requests cannot be served now; `None` when they can."""
        if self._api.is_stopping:
            return "the server is stopping"
        return self._control.not_ready_reason()

    async def start(self) -> None:
        """Listen on both ports.

        Raises:
            ConfigError: a port is in use.
        """
        await self._server.start()
        if self._admin is not None:
            try:
                await self._admin.start()
            except BaseException:
                self._server.close()
                raise
        log.info(
            "frontdoor.started",
            host=self.settings.host,
            port=self.bound_port,
            admin_port=self.bound_admin_port,
        )

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop accepting, let answers end for `grace_s` (default: the setting), end the rest."""
        grace = self.settings.stop_grace_s if grace_s is None else grace_s
        self._api.is_stopping = True
        self._server.stop_accepting()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + grace
        while self._api.num_open and loop.time() < end_s:
            await asyncio.sleep(min(STOP_POLL_S, grace))
        num_cut = self._api.num_open
        self._api.stop_answers()
        # Give the last bytes one turn of the loop to leave before the sockets are cut.
        for _ in range(5):
            if not self._server.num_connections:
                break
            await asyncio.sleep(STOP_POLL_S)
        self._server.close()
        self._api.close()
        if self._admin is not None:
            await self._admin.stop()
        log.info("frontdoor.stopped", num_cut_requests=num_cut)


class _Router:
    """Decides by method and path who answers."""

    def __init__(self, api: CompletionApi, others: AsgiRunner) -> None:
        self._api = api
        self._others = others

    def refusal(self, method: bytes, path: bytes) -> ApiError | None:
        if method != b"POST" and path in TOKEN_PATHS:
            return MethodNotAllowedError()
        return None

    def handle(self, request: HttpRequest, connection: ClientConnection) -> None:
        api = TOKEN_PATHS.get(request.path)
        if api is not None:
            self._api.handle(api, request, connection)
        else:
            self._others.handle(request, connection)


class MethodNotAllowedError(ApiError):
    """The token path takes POST alone."""

    def __init__(self) -> None:
        super().__init__(405, "the method must be POST")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"allow", b"POST")]
