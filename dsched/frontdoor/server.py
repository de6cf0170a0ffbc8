"""A port with its connections: accepts, counts, sweeps deadlines, and stops gracefully."""

import asyncio
from email.utils import formatdate

from dsched.clock import wall_time_s
from dsched.config import FrontDoorConfig
from dsched.errors import ConfigError
from dsched.frontdoor.connection import Application, ClientConnection
from dsched.frontdoor.heads import KnownHeads

BACKLOG = 2_048
"""Connections that the kernel holds for us; a burst of clients beyond it is refused."""
MAX_SWEEP_S = 1.0
"""Deadlines are seconds and more; looking once a second is exact enough."""


class HttpServer:
    """Serves one application on one port. Lives on the running event loop."""

    def __init__(self, application: Application, settings: FrontDoorConfig) -> None:
        """Keep what `start` needs.

        Raises:
            ConfigError: `server_header` cannot stand in a header.
        """
        if not settings.server_header.isprintable() or not settings.server_header.isascii():
            raise ConfigError(f"server_header {settings.server_header!r} is not printable ASCII")
        self.application = application
        self.settings = settings
        self.is_stopping = False
        self.common_headers = b""
        self.heads = KnownHeads()
        self.num_accepted = 0
        self._connections: dict[ClientConnection, None] = {}
        self._listener: asyncio.AbstractServer | None = None
        self._sweep_timer: asyncio.TimerHandle | None = None
        shortest_s = min(
            settings.header_timeout_s,
            settings.body_timeout_s,
            settings.keep_alive_timeout_s,
            settings.slow_reader_timeout_s,
        )
        self._sweep_interval_s = min(MAX_SWEEP_S, shortest_s / 4)

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    @property
    def bound_port(self) -> int:
        """The port in use, also when the setting is 0.

        Raises:
            RuntimeError: `start` was not called.
        """
        sockets = getattr(self._listener, "sockets", None)
        if not sockets:
            raise RuntimeError("the server does not listen: call start() first")
        port: int = sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is in use or not ours.
        """
        self.loop = asyncio.get_running_loop()
        self._refresh_headers()
        host, port = self.settings.host, self.settings.port
        try:
            self._listener = await self.loop.create_server(
                lambda: ClientConnection(self), host, port, backlog=BACKLOG
            )
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        self._schedule_sweep()

    def stop_accepting(self) -> None:
        """Close the port and the idle connections; answers that run go on."""
        self.is_stopping = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close_when_idle()

    def close(self) -> None:
        """Cut everything off."""
        self.stop_accepting()
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        for connection in list(self._connections):
            connection.abort()

    def admit(self, connection: ClientConnection) -> bool:
        """Count a connection; false when there are too many."""
        self.num_accepted += 1
        has_room = len(self._connections) < self.settings.max_connections
        self._connections[connection] = None
        return has_room and not self.is_stopping

    def forget(self, connection: ClientConnection) -> None:
        self._connections.pop(connection, None)

    def _schedule_sweep(self) -> None:
        self._sweep_timer = self.loop.call_later(self._sweep_interval_s, self._sweep)

    def _sweep(self) -> None:
        now_s = self.loop.time()
        for connection in list(self._connections):
            connection.sweep(now_s)
        self._refresh_headers()
        self._schedule_sweep()

    def _refresh_headers(self) -> None:
        lines = f"date: {formatdate(wall_time_s(), usegmt=True)}\r\n"
        if self.settings.server_header:
            lines += f"server: {self.settings.server_header}\r\n"
        self.common_headers = lines.encode("latin-1")
