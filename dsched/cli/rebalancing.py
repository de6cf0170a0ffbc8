"""Rebalances experts now and then, while this dsched leads; see `dsched.controller.rebalance`.

The event loop only collects loads and sends commands: plans are made on a thread, one at a time.
The thread is a daemon: compiling the planner takes a minute the first time on a machine, and must
not keep a dsched alive that was told to stop.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

import structlog

from dsched.config import PlacementConfig
from dsched.controller.observer import ControllerObserver
from dsched.controller.rebalance import Rebalancer
from dsched.drivers.base import Driver
from dsched.eplb import warm_up
from dsched.errors import task_fault
from dsched.ids import EngineId
from dsched.plugins import RebalanceView

Result = TypeVar("Result")

log = structlog.get_logger(__name__)


class Rebalancing:
    """The task that rebalances; nothing at all with an interval of 0."""

    def __init__(
        self,
        config: PlacementConfig,
        drivers: Mapping[EngineId, Driver],
        *,
        leader_epoch: Callable[[], int | None],
        is_due: Callable[[RebalanceView], bool],
    ) -> None:
        self._interval_s = config.interval_s
        self.rebalancer = Rebalancer(
            drivers, leader_epoch=leader_epoch, max_moves=config.max_moves, is_due=is_due
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def observers(self) -> tuple[ControllerObserver, ...]:
        """Who is to hear the controller."""
        return (self.rebalancer,) if self._interval_s else ()

    async def warm(self) -> None:
        """Compile the planner, before anybody is served: the compiler leaves other threads little
        time. A minute of CPU the first time on a machine, then a second."""
        if self._interval_s:
            log.info("placement.compiling")
            await on_daemon_thread(warm_up)
            self.rebalancer.is_ready = True

    def start(self) -> None:
        """Rebalance on the running event loop until `stop`."""
        if self._interval_s:
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(_say_if_it_failed)

    async def stop(self) -> None:
        """Plan nothing new."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])  # what ended it before was said then

    async def _run(self) -> None:
        while True:
            await self._rebalance()
            await asyncio.sleep(self._interval_s)

    async def _rebalance(self) -> None:
        for task in list(self.rebalancer.prepare()):
            try:
                plan = await on_daemon_thread(task.plan)
            except ValueError as error:
                log.warning("placement.impossible", ep_group=task.ep_group, reason=str(error))
            else:
                self.rebalancer.apply(task, plan)


async def on_daemon_thread(function: Callable[[], Result]) -> Result:
    """Call `function` on a thread of its own; raises what it raises. It cannot be cancelled."""
    outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:  # the caller's, wherever it waits
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    outcome.set_running_or_notify_cancel()
    threading.Thread(target=run, name="dsched-planner", daemon=True).start()
    return await asyncio.wrap_future(outcome)


def _say_if_it_failed(task: "asyncio.Task[None]") -> None:
    """A fault of ours ends rebalancing and nothing else; it must not do so unheard."""
    if (error := task_fault(task)) is not None:
        log.error("placement.task_failed", reason=repr(error))
