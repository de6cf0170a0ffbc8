"""Records the decisions of a simulation into the same file that a running dsched writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsched import __version__
from dsched.errors import ConfigError
from dsched.trace import Header, Recorder, RingRecorder, TraceWriter, hash_of

MIN_RING_RECORDS = 1_024
"""Nobody asks a simulation's ring; the file has everything."""


@contextmanager
def recording(
    path: Path | None, *, source: str, seed: int, options: dict[str, Any]
) -> Iterator[Recorder | None]:
    """Yield a recorder that writes to `path`, or `None` without one.

    `options` say what was simulated; they stand in the header.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    header = Header(
        dsched_version=__version__,
        config_hash=hash_of(options),
        source=source,
        seed=seed,
        wall_s=0,
        clock_ns=0,
        options=options,
    )
    try:
        writer = TraceWriter(path, header)
        try:
            ring = RingRecorder(max_records=MIN_RING_RECORDS, write=writer.write)
            ring.start_taking(0)
            yield ring
            writer.write(ring.stop_taking())
        finally:
            writer.close()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
