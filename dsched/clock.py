"""Time as an argument: the only module that may read the machine's clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time."""

    def now_ns(self) -> int:
        """Monotonic time in nanoseconds since an arbitrary origin."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


def thread_time_ns() -> int:
    """Processor time of this thread, to limit what a task beside the token path may cost."""
    return time.thread_time_ns()


def wall_time_ns() -> int:
    """Nanoseconds since 1970, for spans that meet those of other programs."""
    return time.time_ns()


def wall_time_s() -> int:
    """Seconds since 1970, for fields that a client reads (`created`). Never used to decide."""
    return int(time.time())


class ManualClock:
    """A clock that stands still until it is told to move.

    >>> clock = ManualClock()
    >>> clock.advance_to(5)
    >>> clock.now_ns()
    5
    >>> clock.advance_to(4)
    Traceback (most recent call last):
        ...
    ValueError: time cannot go back: 5 ns -> 4 ns
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_to(self, time_ns: int) -> None:
        if time_ns < self._now_ns:
            raise ValueError(f"time cannot go back: {self._now_ns} ns -> {time_ns} ns")
        self._now_ns = time_ns


def boot_id() -> str:
    """Name the boot that monotonic time counts from; empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
