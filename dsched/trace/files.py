"""A decision trace on disk: a header, then frames of records, each with its length and checksum.

    magic "DSCHEDT\\n" | frame | frame | ...        frame = length u32, CRC-32 u32, payload
    first payload: MessagePack map, `Header`       others: zlib(MessagePack array of records)

A frame is written whole or not at all as far as a reader can tell: a file that was cut off in the
middle, by a full disk or a killed process, gives all frames before the cut and says so (`damage`).
Numbers are little-endian.

The header is read before anything else, and its `format` before the rest of it, so that a file of a
newer dsched is refused by name instead of by a missing field.
"""

import contextlib
import struct
import zlib
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import msgspec

from dsched.errors import TraceError
from dsched.trace.recorder import RECORDS_OF_A_FRAME
from dsched.trace.records import FORMAT_VERSION, AnyRecord, Header, Record

MAGIC = b"DSCHEDT\n"
MAX_FRAME_BYTES = 1 << 28
"""Of a frame's payload, unpacked. A length above it is damage, not a frame."""
COMPRESSION = 1
"""zlib's fastest: the records are small differences, which any level packs well."""

_FRAME_HEAD = struct.Struct("<II")


class _HeaderVersion(msgspec.Struct, frozen=True):
    """What every version's header has."""

    format: int
    dsched_version: str = "another version"


def hash_of(values: object) -> str:
    """SHA-256 of plain values or a struct, whatever the order of its keys."""
    return sha256(msgspec.json.encode(values, order="sorted")).hexdigest()


class TraceWriter:
    """Writes one file. Methods raise `OSError` as the file does."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.num_records = 0
        self.num_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._file: BinaryIO = path.open("wb")
        try:
            self._write(MAGIC)
            self._write_frame(self._encoder.encode(header))
            self._file.flush()
        except OSError:
            self.close()
            raise

    def write(self, records: Sequence[Record]) -> None:
        """Append records; they are in the system's hands when this returns."""
        for start in range(0, len(records), RECORDS_OF_A_FRAME):
            part = records[start : start + RECORDS_OF_A_FRAME]
            self._write_frame(zlib.compress(self._encoder.encode(part), COMPRESSION))
            self.num_records += len(part)
        self._file.flush()

    def close(self) -> None:
        """Close; what cannot be written any more, after an error, is left out."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _write_frame(self, payload: bytes) -> None:
        self._write(_FRAME_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.num_bytes += len(data)


class TraceReader:
    """The records of one file, once, in order.

    Raises `TraceError` where the file is no trace, or of a newer version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        """After iteration: why it ended before the file did, for people; `None` if it did not."""
        self.num_records = 0
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from error
        try:
            self.header = self._read_header()
        except TraceError:
            self._file.close()
            raise

    def __iter__(self) -> Iterator[AnyRecord]:
        decoder = msgspec.msgpack.Decoder(list[AnyRecord])
        with self._file:
            while (payload := self._read_frame()) is not None:
                try:
                    records = decoder.decode(_unpack(payload))
                except (msgspec.MsgspecError, zlib.error) as error:
                    self._note_damage(f"a frame that cannot be understood ({error})")
                    return
                self.num_records += len(records)
                yield from records

    def _read_header(self) -> Header:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise TraceError(f"{self.path}: is not a decision trace of dsched")
        payload = self._read_frame()
        if payload is None:
            raise TraceError(f"{self.path}: is cut off before its header ends")
        try:
            version = msgspec.msgpack.decode(payload, type=_HeaderVersion)
            if version.format > FORMAT_VERSION:
                raise TraceError(
                    f"{self.path}: was written by dsched {version.dsched_version} in format "
                    f"{version.format}; this dsched reads formats up to {FORMAT_VERSION}"
                )
            return msgspec.msgpack.decode(payload, type=Header)
        except msgspec.MsgspecError as error:
            raise TraceError(f"{self.path}: has a header that cannot be read: {error}") from error

    def _read_frame(self) -> bytes | None:
        """The next payload; `None` at the end, or at damage, which is noted."""
        head = self._file.read(_FRAME_HEAD.size)
        if not head:
            return None
        if len(head) < _FRAME_HEAD.size:
            self._note_damage("cut off in the middle of a frame")
            return None
        size, checksum = _FRAME_HEAD.unpack(head)
        if size > MAX_FRAME_BYTES:
            self._note_damage(f"a frame of {size} bytes, which no trace has")
            return None
        payload = self._file.read(size)
        if len(payload) < size:
            self._note_damage("cut off in the middle of a frame")
            return None
        if zlib.crc32(payload) != checksum:
            self._note_damage("a frame whose checksum is wrong")
            return None
        return payload

    def _note_damage(self, what: str) -> None:
        self.damage = f"{self.path}: {what}; used the {self.num_records} records before it"


def _unpack(payload: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(payload, MAX_FRAME_BYTES)
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise zlib.error("not one whole frame")
    return data
