"""Ends the parts of a process in the other order of their start, each within its time.

Whatever hangs, hangs alone: it is named in the log and left behind, and the next part is stopped.
Last of all a watchdog ends a process whose threads do not let it go.
"""

import asyncio
import contextlib
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

PART_LIMIT_S: Final = 10.0
"""For one part. Below: a busy machine's parts are cut off in their work. Above: one that hangs
keeps the process for so long."""
WATCHDOG_S: Final = 20.0
"""From the end of all parts until the process is ended by force."""
EXIT_STUCK: Final = 70
"""Status of a process that had to be ended by force; `EX_SOFTWARE` of sysexits."""

log = structlog.get_logger(__name__)


class StopStack:
    """What to stop, and how long each may take."""

    def __init__(self) -> None:
        self._stack = contextlib.AsyncExitStack()

    def add(
        self,
        name: str,
        stop: Callable[[], Awaitable[None] | None],
        *,
        limit_s: float = PART_LIMIT_S,
    ) -> None:
        """Stop this part before those that were added earlier."""

        async def stop_in_time() -> None:
            try:
                async with asyncio.timeout(limit_s):
                    waiting = stop()
                    if inspect.isawaitable(waiting):
                        await waiting
            except TimeoutError:
                log.warning("service.part_hung", part=name, limit_s=limit_s)

        self._stack.push_async_callback(stop_in_time)

    async def stop(self) -> None:
        """Stop all parts; raises what one of them raised, once all were stopped."""
        await self._stack.aclose()


def end_if_stuck(after_s: float = WATCHDOG_S) -> threading.Timer:
    """End this process by force in a while, unless it has ended; `cancel` calls that off."""

    def end() -> None:
        log.error("service.stuck", after_s=after_s, status=EXIT_STUCK)
        os._exit(EXIT_STUCK)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
    return timer
