"""LoopTickHost: one tick for many asks, and never before its time."""

import asyncio

from dsched.clock import ManualClock
from dsched.controller import LoopTickHost

MS = 1_000_000


async def test_many_asks_of_one_pass_are_one_tick() -> None:
    """A burst is one tick, after all of it."""
    ticks: list[int] = []
    host = LoopTickHost(loop=asyncio.get_running_loop(), clock=ManualClock())
    host.attach(lambda: ticks.append(1))

    for _ in range(5):
        host.request_tick()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert ticks == [1]


async def test_a_timer_that_fires_early_waits_for_its_time() -> None:
    """The loop's clock and ours differ: the tick comes when ours says so."""
    ticks: list[int] = []
    clock = ManualClock()
    host = LoopTickHost(loop=asyncio.get_running_loop(), clock=clock)
    host.attach(lambda: ticks.append(clock.now_ns()))

    host.request_tick_at(2 * MS)
    await asyncio.sleep(0.02)
    early = list(ticks)
    clock.advance_to(2 * MS)
    await asyncio.sleep(0.02)

    assert early == []
    assert ticks == [2 * MS]


async def test_a_closed_host_calls_nobody() -> None:
    """What was asked before the end is not done after it."""
    ticks: list[int] = []
    host = LoopTickHost(loop=asyncio.get_running_loop(), clock=ManualClock())
    host.attach(lambda: ticks.append(1))

    host.request_tick()
    host.request_tick_at(0)
    host.close()
    await asyncio.sleep(0.01)

    assert ticks == []
