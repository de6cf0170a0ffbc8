"""Write windows of expert load to a file and read them back, to replay one's own load.

The file is a sequence of MessagePack frames, each with its length before it: a header, then one
frame a window, compressed. It may be appended to, and a frame that a crash cut off is left out when
reading; everything before it is intact.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsched.errors import TraceError

LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 28
"""A longer frame is no load window (61 layers of 1 024 experts have half a megabyte)."""


class LoadHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file holds."""

    format: Literal["dsched.expert_load.1"] = "dsched.expert_load.1"
    num_layers: int
    num_experts: int
    window_steps: int
    """Steps of a window, as configured."""
    model: str = ""


class LoadFrame(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One window."""

    num_steps: int
    counts: bytes
    """[L, E] int64, little-endian, compressed by zlib."""


class LoadRecorder:
    """Appends windows to a file; use as a context manager."""

    def __init__(self, path: Path, header: LoadHeader) -> None:
        """Start a file, or go on with one of the same header."""
        is_new = not path.exists() or path.stat().st_size == 0
        if not is_new:
            with path.open("rb") as file:
                found = read_header(file, path)
            if found != header:
                raise TraceError(f"{path}: holds {found}; cannot append {header}")
        self._header = header
        self._file = path.open("ab")
        if is_new:
            self._write(msgspec.msgpack.encode(header))

    def write(self, counts: NDArray[np.int64], *, num_steps: int) -> None:
        """Append one window, [L, E]."""
        expected = (self._header.num_layers, self._header.num_experts)
        if counts.shape != expected:
            raise ValueError(f"counts have shape {counts.shape}; the file is for {expected}")
        raw = np.ascontiguousarray(counts, dtype="<i8").tobytes()
        frame = LoadFrame(num_steps=num_steps, counts=zlib.compress(raw, level=6))
        self._write(msgspec.msgpack.encode(frame))
        self._file.flush()

    def _write(self, payload: bytes) -> None:
        self._file.write(LENGTH.pack(len(payload)) + payload)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "LoadRecorder":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_load_file(path: Path) -> tuple[LoadHeader, NDArray[np.int64]]:
    """Return the header and all windows, [W, L, E].

    Raises:
        TraceError: the file is missing, of another kind, or damaged before its last frame.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    with file:
        header = read_header(file, path)
        shape = (header.num_layers, header.num_experts)
        windows = [decode_window(payload, shape, path) for payload in read_frames(file, path)]
    if not windows:
        return header, np.zeros((0, *shape), np.int64)
    return header, np.stack(windows)


def read_header(file: BinaryIO, path: Path) -> LoadHeader:
    payload = next(read_frames(file, path, limit=1), None)
    if payload is None:
        raise TraceError(f"{path}: no header; not a file of expert load")
    try:
        return msgspec.msgpack.decode(payload, type=LoadHeader)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: not a file of expert load: {error}") from error


def read_frames(file: BinaryIO, path: Path, *, limit: int | None = None) -> Iterator[bytes]:
    """Yield frames; ends quietly at one that was cut off."""
    num_read = 0
    while limit is None or num_read < limit:
        prefix = file.read(LENGTH.size)
        if len(prefix) < LENGTH.size:
            return
        (size,) = LENGTH.unpack(prefix)
        if size > MAX_FRAME_BYTES:
            raise TraceError(f"{path}: a frame of {size} bytes; not a file of expert load")
        payload = file.read(size)
        if len(payload) < size:
            return
        num_read += 1
        yield payload


def decode_window(payload: bytes, shape: tuple[int, int], path: Path) -> NDArray[np.int64]:
    try:
        frame = msgspec.msgpack.decode(payload, type=LoadFrame)
        counts = np.frombuffer(zlib.decompress(frame.counts), dtype="<i8").astype(np.int64)
        return counts.reshape(shape)
    except (msgspec.DecodeError, zlib.error, ValueError) as error:
        raise TraceError(f"{path}: damaged window: {error}") from error
