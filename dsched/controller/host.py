"""Calls the controller's tick from an event loop.

Many facts arrive in one pass of the loop (a burst of requests in one read); the tick runs once
after them.
"""

import asyncio
from collections.abc import Callable

from dsched.clock import Clock

NS_PER_S = 1_000_000_000


class LoopTickHost:
    """A `TickHost` over asyncio. Call `attach` before the first tick is asked for."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._tick: Callable[[], None] | None = None
        self._is_asked = False
        self._timer: asyncio.TimerHandle | None = None

    def attach(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    def request_tick(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._loop.call_soon(self._run)

    def request_tick_at(self, time_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, (time_ns - self._clock.now_ns()) / NS_PER_S)
        self._timer = self._loop.call_later(delay_s, self.request_tick)

    def close(self) -> None:
        """Ask for nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tick = None

    def _run(self) -> None:
        self._is_asked = False
        if self._tick is not None:
            self._tick()
