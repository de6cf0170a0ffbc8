"""Stopping a process: in order, and whatever hangs is left behind."""

import asyncio
import subprocess
import sys

import pytest

from dsched.cli.stopping import EXIT_STUCK, StopStack


async def test_parts_stop_in_the_other_order_and_a_hanging_one_is_left_behind() -> None:
    """Functions and coroutines alike."""
    stopped: list[str] = []
    parts = StopStack()

    async def hang() -> None:
        stopped.append("hangs")
        await asyncio.Event().wait()

    async def second() -> None:
        stopped.append("second")

    parts.add("first", lambda: stopped.append("first"))
    parts.add("hanging", hang, limit_s=0.01)
    parts.add("second", second)
    async with asyncio.timeout(5):
        await parts.stop()
        await parts.stop()

    assert stopped == ["second", "hangs", "first"]


async def test_a_part_that_fails_keeps_no_other_from_stopping() -> None:
    """Its error comes once all were stopped."""
    stopped: list[str] = []
    parts = StopStack()

    def fail() -> None:
        raise OSError("disk full")

    parts.add("first", lambda: stopped.append("first"))
    parts.add("failing", fail)

    with pytest.raises(OSError, match="disk full"):
        await parts.stop()
    assert stopped == ["first"]


def test_a_process_whose_threads_do_not_end_is_ended() -> None:
    """Python waits for them for ever at its end."""
    code = (
        "import threading, time\n"
        "from dsched.cli.stopping import end_if_stuck\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "end_if_stuck(after_s=0.1)\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], timeout=30, capture_output=True, text=True, check=False
    )

    assert done.returncode == EXIT_STUCK
    assert "service.stuck" in done.stdout + done.stderr
