"""The decision trace of a running dsched: its ring, and a file while one is wanted.

The controller's thread makes records; this takes them four times a second, and a thread writes
them. A disk that is full or too slow ends the file with a line in the log, and nothing else.
"""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import structlog

from dsched import __version__
from dsched.clock import Clock, wall_time_s
from dsched.config import Config
from dsched.errors import ConfigError, task_fault
from dsched.trace import (
    Header,
    Recorder,
    RingRecorder,
    TraceWriter,
    as_document,
    as_text,
    hash_of,
    null_recorder,
    tell,
)

log = structlog.get_logger(__name__)

FLUSH_INTERVAL_S = 0.25
"""Between two writes. Shorter: small frames, which pack badly. Longer: more is lost to a kill."""
MEGABYTE = 1_000_000


class TraceService:
    """Owns the recorder of one process. Implements `TraceControl` for the admin API."""

    def __init__(self, config: Config, *, clock: Clock) -> None:
        self._config = config.trace
        self._folder = Path(config.state_dir)
        self._clock = clock
        self._ring: RingRecorder | None = None
        self.recorder: Recorder = null_recorder()
        """For the controller."""
        if self._config.enabled:
            self.recorder = self._ring = RingRecorder(max_records=self._config.ring_records)
        self._header = Header(
            dsched_version=__version__,
            config_hash=hash_of(config),
            source="run",
            seed=config.seed,
            wall_s=wall_time_s(),
            clock_ns=clock.now_ns(),
        )
        self._writer: TraceWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = asyncio.Event()
        self._stop_reason = ""

    async def start(self) -> None:
        """Begin the file that the configuration names.

        Raises:
            ConfigError: it cannot be written.
        """
        if self._config.file is None or self._ring is None:
            return
        path = Path(self._config.file)
        try:
            if path.is_file():
                path.replace(path.with_name(path.name + ".old"))
            self._open(path)
        except OSError as error:
            raise ConfigError(f"$.trace.file: {path}: {error.strerror or error}") from error

    async def stop(self) -> None:
        """Write what is left and close the file."""
        if self._task is not None:
            await self._end("the service stops")

    # ---- TraceControl

    def explain(self, request_id: str) -> tuple[dict[str, object], str] | None:
        """JSON and text of a request's story. May run on another thread."""
        if self._ring is None:
            return None
        story = tell(self._ring.records(), request_id)  # type: ignore[arg-type]
        if story is None:
            return None
        return as_document(story), as_text(story, self._header)

    def why_unknown(self, request_id: str) -> str:
        """What to say of a request that nothing is known of."""
        if self._ring is None:
            return "tracing is off here (trace.enabled)"
        records = self._ring.records()
        if not records:
            return f"request {request_id!r} is not in the trace, which is empty"
        span_s = (records[-1].time_ns - max(records[0].time_ns, self._header.clock_ns)) / 1e9
        return (
            f"request {request_id!r} is not in the trace, which has the last "
            f"{len(records):,} records ({max(0.0, span_s):,.0f} s)"
        )

    def status(self) -> dict[str, Any]:
        """What the ring and the file have."""
        writer, ring = self._writer, self._ring
        return {
            "enabled": ring is not None,
            "num_records": 0 if ring is None else ring.num_records,
            "ring_records": self._config.ring_records,
            "file": None if writer is None else str(writer.path),
            "file_records": None if writer is None else writer.num_records,
            "file_bytes": None if writer is None else writer.num_bytes,
        }

    def start_file(self, name: str) -> dict[str, Any]:
        """Record to `name` in `state_dir` from now on. Raises `ValueError`."""
        if self._ring is None:
            raise ValueError("tracing is off; set trace.enabled and restart")
        if self._writer is not None:
            raise ValueError(f"{self._writer.path} is being recorded already; stop it first")
        path = self._folder / name
        if path.exists():
            raise ValueError(f"{path} exists; choose another name")
        try:
            self._open(path)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from error
        return self.status()

    async def stop_file(self) -> dict[str, Any]:
        """Close the file. Raises `ValueError` where none is open."""
        if self._writer is None:
            raise ValueError("nothing is being recorded")
        writer = self._writer
        await self._end("an operator asked")
        return {
            "file": str(writer.path),
            "file_records": writer.num_records,
            "file_bytes": writer.num_bytes,
        }

    # ---- the file

    def _open(self, path: Path) -> None:
        ring = self._ring
        assert ring is not None
        self._writer = TraceWriter(path.absolute(), self._header)
        self._stop_reason = ""
        self._is_stopping.clear()
        ring.start_taking(self._clock.now_ns())
        self._task = asyncio.get_running_loop().create_task(self._write_on(ring, self._writer))
        self._task.add_done_callback(_say_if_it_failed)
        log.info("trace.started", path=str(self._writer.path))

    async def _end(self, reason: str) -> None:
        """Let the writing task finish what it has, and wait for it."""
        task = self._task
        self._stop_reason = reason
        self._is_stopping.set()
        if task is not None:
            # Who waits may be cancelled (an operator's request at the end of its time); the file
            # is not.
            await asyncio.wait([task])

    async def _write_on(self, ring: RingRecorder, writer: TraceWriter) -> None:
        """Write until asked to stop, or until it cannot go on, and close the file."""
        problem = ""
        try:
            problem = await self._write_until_told(ring, writer)
        finally:
            ring.stop_taking()
            writer.close()
            self._writer = self._task = None
        path = str(writer.path)
        if problem:
            log.warning("trace.failed", path=path, reason=problem)
        else:
            log.info(
                "trace.stopped",
                path=path,
                reason=self._stop_reason,
                num_records=writer.num_records,
            )

    async def _write_until_told(self, ring: RingRecorder, writer: TraceWriter) -> str:
        """Return what keeps the file from going on; nothing if it was ended on purpose."""
        is_last = False
        while not is_last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_INTERVAL_S):
                    await self._is_stopping.wait()
            if writer.num_bytes > self._config.max_file_mb * MEGABYTE:
                self._stop_reason = self._stop_reason or "trace.max_file_mb is reached"
            is_last = bool(self._stop_reason) or ring.overflowed
            records = ring.stop_taking() if is_last else ring.take()
            try:
                await asyncio.to_thread(writer.write, records)
            except OSError as error:
                return f"cannot be written: {error}"
        return "the disk is slower than the records come" if ring.overflowed else ""


def _say_if_it_failed(task: "asyncio.Task[None]") -> None:
    """A fault of ours ends the file and nothing else; it must not do so unheard."""
    if (error := task_fault(task)) is not None:
        log.error("trace.task_failed", reason=repr(error))
