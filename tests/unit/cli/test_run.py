"""`dsched run` that is told to stop while it starts."""

import asyncio
import threading
from pathlib import Path
from typing import cast

import msgspec
import pytest

from dsched.cli import run as run_module
from dsched.cli import service as service_module
from dsched.cli.run import _start_unless
from dsched.cli.service import Service
from dsched.config import Config
from dsched.config_load import LoadedConfig


@pytest.fixture(autouse=True)
def _no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process of the tests."""
    monkeypatch.setattr(run_module, "end_if_stuck", lambda: None)


class LateService:
    """Comes up although it is told to stop."""

    def __init__(self) -> None:
        self.is_starting = asyncio.Event()
        self.events: list[str] = []

    def note_told(self) -> None:
        """From here on a second Ctrl-C ends at once, however long the stop takes."""
        self.events.append("told")

    async def start(self) -> None:
        self.is_starting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.events.append("cancelled")

    async def stop(self) -> None:
        self.events.append("stopped")


async def test_a_service_that_comes_up_while_it_is_told_to_stop_is_stopped() -> None:
    """Its engines and its journal would be left as they are."""
    service = LateService()
    stopping = asyncio.Event()
    running = asyncio.create_task(
        _start_unless(cast(Service, service), stopping, on_told=service.note_told)
    )
    await service.is_starting.wait()

    stopping.set()

    assert await running is False
    assert service.events == ["told", "cancelled", "stopped"]


async def test_a_stop_does_not_wait_for_what_is_compiled_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute the first time on a machine; Python waits at its end for threads of other kinds."""
    compiling = asyncio.Event()
    loop = asyncio.get_running_loop()
    goes_on = threading.Event()
    threads: list[threading.Thread] = []

    def compile_for_long() -> None:
        threads.append(threading.current_thread())
        loop.call_soon_threadsafe(compiling.set)
        goes_on.wait(30)

    monkeypatch.setattr(service_module, "warm_router", compile_for_long)
    document = {
        "state_dir": str(tmp_path),
        "front_door": {"port": 0},
        "admin": {"port": 0},
        "registry": {"url": "memory://"},
    }
    config = msgspec.convert(document, Config)
    service = Service(LoadedConfig(config=config, origins={}))
    stopping = asyncio.Event()
    running = asyncio.create_task(_start_unless(service, stopping, on_told=lambda: None))
    async with asyncio.timeout(30):
        await compiling.wait()

    stopping.set()
    try:
        assert await running is False
    finally:
        goes_on.set()

    assert [thread.daemon for thread in threads] == [True]
