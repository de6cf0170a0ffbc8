"""Calls the controller's tick from an event loop.

Many facts arrive in one pass of the loop (a burst of requests in one read); the tick runs once
after them.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from dsched.clock import Clock

NS_PER_S = 1_000_000_000


class TickHost(Protocol):
    """Calls the controller back. Implemented over an event loop and by the simulator."""

    def request_tick(self) -> None:
        """Call `tick` soon, once, however often this is asked before."""
        ...

    def request_tick_at(self, time_ns: int) -> None:
        """Call `tick` at `time_ns` of the controller's clock, or a little later."""
        ...


class LoopTickHost:
    """A `TickHost` over asyncio. Call `attach` before the first tick is asked for."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._tick: Callable[[], None] | None = None
        self._is_asked = False
        self._timer: asyncio.TimerHandle | None = None
        self._time_ns = 0

    def attach(self, tick: Callable[[], None]) -> None:
        self._tick = tick

    def request_tick(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._loop.call_soon(self._run)

    def request_tick_at(self, time_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._time_ns = time_ns
        delay_s = max(0.0, (time_ns - self._clock.now_ns()) / NS_PER_S)
        self._timer = self._loop.call_later(delay_s, self._fire)

    def close(self) -> None:
        """Ask for nothing more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._tick = None

    def _fire(self) -> None:
        self._timer = None
        if self._clock.now_ns() < self._time_ns:
            # Event loops round to milliseconds and may be early; a tick before its time finds
            # nothing due and would not ask again.
            self.request_tick_at(self._time_ns)
        else:
            self.request_tick()

    def _run(self) -> None:
        self._is_asked = False
        if self._tick is not None:
            self._tick()
