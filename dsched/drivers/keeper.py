"""Keeps the servers that were started here running: what dies is started again.

In: which servers there are and how to start one. Out: running servers; where they are, each time
that this changes.

Servers that are one EP group, each with a front door of its own, die together: their cores wait for
each other, so one that comes back alone finds no group. A keeper has all servers of one engine and
starts them again as a whole.

Before a start nothing of the last one is left: every process group got SIGKILL and was seen to end,
however long the kernel takes. So there are never two of one engine on a device.

A server keeps its port, which people and scrapers know, unless somebody else has it by now. That
also mends the time between choosing a port and binding it, half a minute for an engine that loads:
the server dies of the taken port and comes back on another.

It never gives up. What ended an engine may pass (memory or a device that another program held, a
file system that was away), a try a minute costs nothing, and `engine.died` says each time why.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import structlog

from dsched.clock import Clock
from dsched.drivers.local import LocalEngine, ServerPlan, free_port, is_port_free, local_url
from dsched.errors import DschedError, task_fault
from dsched.ids import EngineId

FIRST_PAUSE_S: Final = 1.0
"""Before the first restart; twice as long before each further one."""
MAX_PAUSE_S: Final = 60.0
"""Shorter: an engine that cannot start keeps the machine busy with loading. Longer: an engine whose
trouble has passed stays away for so long."""
STEADY_NS: Final = 300_000_000_000
"""An engine that lived so long starts again with the first pause. Shorter: one that loads for long
and then dies is started every second."""
END_POLL_S: Final = 0.05
"""Between two looks at processes that got SIGKILL and are still there."""

PlanServers = Callable[[], Sequence[ServerPlan]]
"""Return the servers to start; asked before each start, for ports that they share may be taken."""
LaunchServer = Callable[[ServerPlan, int], Awaitable[LocalEngine]]
"""Start one server on a port."""

log = structlog.get_logger(__name__)


def restart_pause_s(num_failures: int) -> float:
    """Return how long to wait after so many ends in a row.

    >>> [restart_pause_s(count) for count in range(8)]
    [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    """
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures, 16), MAX_PAUSE_S)


class EngineKeeper:
    """Keeps the servers of one engine running, on the event loop that `start` was called on."""

    def __init__(
        self,
        name: str,
        *,
        plan: PlanServers,
        launch: LaunchServer,
        on_moved: Callable[[EngineId, str], None],
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`on_moved(engine_id, url)` is told where a server will be before it starts there, when
        that is not where it was."""
        self._name = name
        self._plan = plan
        self._launch_server = launch
        self._on_moved = on_moved
        self._clock = clock
        self._sleep = sleep
        self._ports: dict[EngineId, int] = {}
        self._started_ns = 0
        self._is_stopping = False
        self._launching: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self.plans: tuple[ServerPlan, ...] = ()
        """The servers, as they were planned last."""
        self.servers: dict[EngineId, LocalEngine] = {}
        """As they were started last."""
        self.num_restarts = 0

    async def start(self) -> None:
        """Start the servers and keep them until `stop`; return while they load.

        Raises:
            ConfigError: there is no such engine or model.
            DriverError: a process cannot be started. `stop` ends what was started.
        """
        await self._launch()
        if self._is_stopping:  # nobody would end the task
            return
        self._task = asyncio.get_running_loop().create_task(self._keep())
        self._task.add_done_callback(self._say_if_it_failed)

    async def stop(self) -> None:
        """End the servers, in whatever phase this finds them, and start none any more.

        Idempotent.
        """
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._launching is not None:
            # A process that is being made cannot be left to itself: it would be nobody's.
            await asyncio.wait([self._launching])
            if not self._launching.cancelled():
                self._launching.exception()  # whoever waited for it has gone
        await asyncio.gather(*(server.stop() for server in self.servers.values()))

    async def _keep(self) -> None:
        num_failures = 0
        while True:
            await self._wait_for_an_end()
            if self._clock.now_ns() - self._started_ns >= STEADY_NS:
                num_failures = 0
            is_started = False
            while not is_started:
                await self._end()
                pause_s = restart_pause_s(num_failures)
                num_failures += 1
                log.warning("engine.restarting", engine_id=self._name, pause_s=pause_s)
                await self._sleep(pause_s)
                is_started = await self._try_launch()
            self.num_restarts += 1

    async def _wait_for_an_end(self) -> None:
        """Wait until a server ended, and say why."""
        waiting = [asyncio.create_task(server.wait()) for server in self.servers.values()]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        for engine_id, server in self.servers.items():
            if not server.is_alive:
                status, tail = server.exit_status, server.log_tail()
                log.error("engine.died", engine_id=engine_id, status=status, log=tail)

    async def _end(self) -> None:
        """End what is left, and wait until nothing is."""
        servers = self.servers.values()
        await asyncio.gather(*(server.stop() for server in servers))
        while not all(server.is_gone for server in servers):
            await asyncio.sleep(END_POLL_S)

    async def _try_launch(self) -> bool:
        try:
            await self._launch()
        except (DschedError, OSError) as error:
            log.warning("engine.not_started", engine_id=self._name, reason=str(error))
            return False
        return True

    async def _launch(self) -> None:
        """Start the servers. Cancelled, it returns at once, and `stop` waits for what is made."""
        self._launching = asyncio.get_running_loop().create_task(self._launch_all())
        await asyncio.shield(self._launching)

    async def _launch_all(self) -> None:
        self.plans = tuple(self._plan())
        for plan in self.plans:
            if self._is_stopping:
                return
            port = self._port_of(plan.engine_id)
            self.servers[plan.engine_id] = await self._launch_server(plan, port)
        self._started_ns = self._clock.now_ns()

    def _port_of(self, engine_id: EngineId) -> int:
        """Return the port to start on: the one it had, unless it is taken."""
        old = self._ports.get(engine_id)
        if old is not None and is_port_free(old):
            return old
        new = self._ports[engine_id] = free_port()
        if old is not None:
            log.warning("engine.port_changed", engine_id=engine_id, port=new, taken_port=old)
            self._on_moved(engine_id, local_url(new))
        return new

    def _say_if_it_failed(self, task: "asyncio.Task[None]") -> None:
        """A fault of ours ends the keeping and nothing else; it must not do so unheard."""
        if (error := task_fault(task)) is not None:
            log.error("engine.abandoned", engine_id=self._name, reason=repr(error))
