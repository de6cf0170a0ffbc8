"""Virtual time: a queue of events that owns the clock, and the same interface over wall time.

Events run in order of (time, order of asking), so one seed gives one run. Nothing happens between
two events, which is used once: a simulated engine's steps are *hidden* events, whose output may
stay with the engine until somebody could see it. `SimLoop` hands out what was kept back
(`OutputBatch.flush`) before every visible event and whenever it returns to its caller, so no
observer can tell the difference, except by asking for the time inside the delivery of a token
that was neither the first nor the last of its request.
"""

import asyncio
import heapq
from collections.abc import Callable
from typing import Protocol

from dsched.clock import Clock, ManualClock
from dsched.errors import InvariantError

NS_PER_S = 1_000_000_000


class Timer(Protocol):
    """A call that was asked for and can be taken back."""

    def cancel(self) -> None: ...


class Timers(Clock, Protocol):
    """A clock that calls back."""

    def call_at(
        self, time_ns: int, callback: Callable[[], None], *, is_hidden: bool = False
    ) -> Timer:
        """Call `callback` at `time_ns`, at once (but not now) when that is past.

        `is_hidden`: nobody but its owner can notice that it ran, unless it says so by
        `OutputBatch.flush`.
        """
        ...


class OutputBatch:
    """Engines that keep output back until somebody could see it."""

    def __init__(self) -> None:
        self._flushes: list[Callable[[], None]] = []
        self._is_flushing = False
        self.is_watched: Callable[[], bool] = lambda: False
        """Whether somebody acts on every step now, so that nothing may be kept back."""

    def add(self, flush: Callable[[], None]) -> None:
        self._flushes.append(flush)

    def flush(self) -> None:
        """Let every engine hand out what it kept, in the order they were added."""
        if self._is_flushing:
            return
        self._is_flushing = True
        try:
            for flush in self._flushes:
                flush()
        finally:
            self._is_flushing = False


class _SimTimer:
    __slots__ = ("callback", "is_hidden")

    def __init__(self, callback: Callable[[], None], *, is_hidden: bool) -> None:
        self.callback: Callable[[], None] | None = callback
        self.is_hidden = is_hidden

    def cancel(self) -> None:
        self.callback = None


class SimLoop:
    """A discrete-event queue.

    >>> loop = SimLoop()
    >>> timer = loop.call_at(30, lambda: print("at", loop.now_ns()))
    >>> loop.run_until(20), loop.now_ns()
    (None, 20)
    >>> loop.run_until(40)
    at 30
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.batch = OutputBatch()
        self._queue: list[tuple[int, int, _SimTimer]] = []
        self._count = 0
        self._is_running = False
        self._is_dirty = False
        """A hidden event ran since the last flush."""

    def now_ns(self) -> int:
        return self.clock.now_ns()

    def call_at(
        self, time_ns: int, callback: Callable[[], None], *, is_hidden: bool = False
    ) -> _SimTimer:
        """Call `callback` at `time_ns`, or next if that is past; equal times in order of asking."""
        timer = _SimTimer(callback, is_hidden=is_hidden)
        heapq.heappush(self._queue, (max(time_ns, self.now_ns()), self._count, timer))
        self._count += 1
        return timer

    def run_until(self, time_ns: int) -> None:
        """Run every event up to and including `time_ns`, then stand at `time_ns`."""
        self._run(time_ns, lambda: True)
        self.clock.advance_to(max(time_ns, self.now_ns()))

    def run_while(self, is_wanted: Callable[[], bool]) -> None:
        """Run events as long as `is_wanted()` and there are any."""
        self._run(None, is_wanted)

    def _run(self, limit_ns: int | None, is_wanted: Callable[[], bool]) -> None:
        if self._is_running:
            raise InvariantError("an event must not run the loop")
        self._is_running = True
        try:
            while is_wanted() and self._run_next(limit_ns):
                pass
            if self._is_dirty:
                self._flush()
        finally:
            self._is_running = False

    def _run_next(self, limit_ns: int | None) -> bool:
        """Run the next event, or hand out what was kept back before it; `False` when at rest."""
        queue = self._queue
        while queue and queue[0][2].callback is None:
            heapq.heappop(queue)
        is_next = bool(queue) and (limit_ns is None or queue[0][0] <= limit_ns)
        if self._is_dirty and not (is_next and queue[0][2].is_hidden):
            # Still at the time of the last hidden event: what comes out has happened by now, and
            # may lead to events before the one that was next.
            self._flush()
            return True
        if not is_next:
            return False
        time_ns, _, timer = heapq.heappop(queue)
        self._is_dirty = timer.is_hidden
        self.clock.advance_to(time_ns)
        assert timer.callback is not None
        timer.callback()
        return True

    def _flush(self) -> None:
        self._is_dirty = False
        self.batch.flush()


class AsyncioTimers:
    """The same over wall time, on the running event loop."""

    def __init__(self, clock: Clock, loop: asyncio.AbstractEventLoop) -> None:
        self._clock = clock
        self._loop = loop

    def now_ns(self) -> int:
        return self._clock.now_ns()

    def call_at(
        self,
        time_ns: int,
        callback: Callable[[], None],
        *,
        is_hidden: bool = False,  # noqa: ARG002
    ) -> asyncio.TimerHandle:
        """Call `callback` at `time_ns` of the clock, as late as the event loop is."""
        delay_ns = max(0, time_ns - self.now_ns())
        return self._loop.call_later(delay_ns / NS_PER_S, callback)
