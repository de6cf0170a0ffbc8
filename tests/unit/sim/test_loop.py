"""SimLoop and AsyncioTimers: time moves only as far as it was told, events keep their order."""

import asyncio

import pytest

from dsched.clock import SystemClock
from dsched.errors import InvariantError
from dsched.sim.loop import AsyncioTimers, SimLoop


def test_events_run_in_order_of_time_then_of_asking() -> None:
    loop = SimLoop()
    seen: list[str] = []
    for name, time_ns in (("b", 20), ("a", 10), ("c", 20), ("late", 31)):
        loop.call_at(time_ns, lambda name=name: seen.append(f"{name}{loop.now_ns()}"))

    loop.run_until(30)

    assert seen == ["a10", "b20", "c20"]
    assert loop.now_ns() == 30


def test_past_times_run_next_but_not_now() -> None:
    loop = SimLoop()
    loop.run_until(50)
    seen: list[int] = []

    loop.call_at(10, lambda: seen.append(loop.now_ns()))

    assert seen == []
    loop.run_until(50)
    assert seen == [50]


def test_event_asked_for_at_the_present_runs_at_the_present() -> None:
    loop = SimLoop()
    seen: list[int] = []

    def first() -> None:
        loop.call_at(loop.now_ns(), lambda: seen.append(loop.now_ns()))

    loop.call_at(7, first)
    loop.run_until(7)

    assert seen == [7]


def test_cancelled_event_does_not_run() -> None:
    loop = SimLoop()
    timer = loop.call_at(5, lambda: pytest.fail("cancelled"))

    timer.cancel()
    loop.run_until(10)

    assert loop.now_ns() == 10


def test_run_while_stops_when_it_is_satisfied() -> None:
    loop = SimLoop()
    seen: list[int] = []
    for time_ns in range(10):
        loop.call_at(time_ns, lambda: seen.append(loop.now_ns()))

    loop.run_while(lambda: len(seen) < 4)

    assert seen == [0, 1, 2, 3]
    assert loop.now_ns() == 3


def test_kept_output_comes_out_before_every_visible_event() -> None:
    """Hidden events run without a flush; the flush still stands at the time of the last of them."""
    loop = SimLoop()
    seen: list[tuple[str, int]] = []
    loop.batch.add(lambda: seen.append(("flush", loop.now_ns())))
    for time_ns in (10, 20, 30):
        loop.call_at(time_ns, lambda: seen.append(("hidden", loop.now_ns())), is_hidden=True)
    loop.call_at(25, lambda: seen.append(("visible", loop.now_ns())))

    loop.run_until(40)

    assert seen == [
        ("hidden", 10),
        ("hidden", 20),
        ("flush", 20),
        ("visible", 25),
        ("hidden", 30),
        ("flush", 30),
    ]


def test_event_that_a_flush_leads_to_runs_before_a_later_one() -> None:
    """Output is handed out at 10, and what it leads to happens at 10, not after the event at 25."""
    loop = SimLoop()
    seen: list[tuple[str, int]] = []
    loop.batch.add(lambda: loop.call_at(0, lambda: seen.append(("led to", loop.now_ns()))) and None)
    loop.call_at(10, lambda: None, is_hidden=True)
    loop.call_at(25, lambda: seen.append(("later", loop.now_ns())))

    loop.run_until(30)

    assert seen == [("led to", 10), ("later", 25)]


def test_flush_inside_a_flush_does_nothing() -> None:
    loop = SimLoop()
    calls: list[int] = []

    def flush() -> None:
        calls.append(1)
        loop.batch.flush()

    loop.batch.add(flush)
    loop.batch.flush()
    loop.batch.flush()

    assert len(calls) == 2


def test_event_must_not_run_the_loop() -> None:
    loop = SimLoop()
    loop.call_at(1, lambda: loop.run_until(5))

    with pytest.raises(InvariantError):
        loop.run_until(2)


async def test_wall_timers_call_in_order_and_can_be_cancelled() -> None:
    timers = AsyncioTimers(SystemClock(), asyncio.get_running_loop())
    seen: list[str] = []
    done = asyncio.Event()
    start_ns = timers.now_ns()

    timers.call_at(start_ns + 4_000_000, done.set)
    timers.call_at(start_ns + 2_000_000, lambda: seen.append("b"))
    timers.call_at(start_ns - 5, lambda: seen.append("a"), is_hidden=True)
    timers.call_at(start_ns + 1_000_000, lambda: seen.append("never")).cancel()
    assert seen == []
    await asyncio.wait_for(done.wait(), 5)

    assert seen == ["a", "b"]
    assert timers.now_ns() - start_ns >= 3_900_000
