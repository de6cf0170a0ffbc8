"""The file of a decision trace while others come in between: cancellations, faults, a slow disk."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog

from dsched.cli.trace_service import TraceService
from dsched.clock import SystemClock
from dsched.config import Config
from dsched.trace import TraceReader, TraceWriter
from dsched.trace.records import Record


class Disk:
    """Holds every write until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_writing = threading.Event()
        self.goes_on = threading.Event()
        own = TraceWriter.write

        def write(writer: TraceWriter, records: Sequence[Record]) -> None:
            self.is_writing.set()
            assert self.goes_on.wait(30)
            own(writer, records)

        monkeypatch.setattr(TraceWriter, "write", write)


@pytest.fixture
def service(tmp_path: Path) -> TraceService:
    return TraceService(Config(state_dir=str(tmp_path)), clock=SystemClock())


async def test_who_asked_for_the_end_may_go_and_the_file_ends_all_the_same(
    service: TraceService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator's request is cancelled at the end of its time, while the disk is slow."""
    disk = Disk(monkeypatch)
    service.start_file("a.dtrace")
    asking = asyncio.create_task(service.stop_file())
    await asyncio.to_thread(disk.is_writing.wait, 30)

    asking.cancel()
    await asyncio.wait([asking])
    disk.goes_on.set()
    async with asyncio.timeout(30):
        await service.stop()

    assert asking.cancelled()
    assert service.status()["file"] is None
    reader = TraceReader(tmp_path / "a.dtrace")
    list(reader)
    assert reader.damage is None
    service.start_file("b.dtrace")
    await service.stop()


async def test_a_fault_of_ours_ends_the_file_and_is_heard(
    service: TraceService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file can be begun."""

    def write(writer: TraceWriter, records: Sequence[Record]) -> None:
        raise TypeError("cannot be encoded")

    monkeypatch.setattr(TraceWriter, "write", write)
    with structlog.testing.capture_logs() as lines:
        service.start_file("a.dtrace")
        await service.stop()
        monkeypatch.undo()
        service.start_file("b.dtrace")
        await service.stop()

    failed = [line for line in lines if line["event"] == "trace.task_failed"]
    assert [line["reason"] for line in failed] == ["TypeError('cannot be encoded')"]
    assert service.status()["file"] is None
