"""Trace files: what is written comes back, and what is broken says so in one line."""

import zlib
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from dsched.errors import TraceError
from dsched.trace import FORMAT_VERSION, Header, TraceReader, TraceWriter
from dsched.trace.files import _FRAME_HEAD, MAGIC
from dsched.trace.recorder import RECORDS_OF_A_FRAME
from dsched.trace.records import AnyRecord, Ended, FirstToken, Keyframe, Record

HEADER = Header(
    dsched_version="1.2.3", config_hash="c0ffee", source="test", seed=7, wall_s=0, clock_ns=0
)


def make_records(count: int) -> list[AnyRecord]:
    return [FirstToken(number, f"r{number}") for number in range(count)]


def write(path: Path, records: list[AnyRecord]) -> None:
    writer = TraceWriter(path, HEADER)
    writer.write(records)
    writer.close()
    assert writer.num_bytes == path.stat().st_size


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.dtrace"


@pytest.mark.parametrize("count", [0, 1, RECORDS_OF_A_FRAME, 2 * RECORDS_OF_A_FRAME + 1])
def test_what_is_written_comes_back(path: Path, count: int) -> None:
    """Header and records, over any number of frames."""
    records = make_records(count)
    write(path, records)

    reader = TraceReader(path)

    assert reader.header == HEADER
    assert list(reader) == records
    assert reader.damage is None


def test_a_file_cut_anywhere_gives_the_whole_frames_before_the_cut(path: Path) -> None:
    """And says so; it never raises once the header is there, and never invents a record."""
    records = make_records(3 * RECORDS_OF_A_FRAME)
    write(path, records)
    whole = path.read_bytes()
    header_end = len(whole_header(whole))
    ends = frame_ends(whole)

    for cut in range(header_end, len(whole), 173):
        path.write_bytes(whole[:cut])
        reader = TraceReader(path)
        found = list(reader)

        num_frames = sum(end <= cut for end in ends) - 1
        assert found == records[: num_frames * RECORDS_OF_A_FRAME]
        if cut in ends:
            assert reader.damage is None
        else:
            assert reader.damage is not None
            assert "cut off in the middle" in reader.damage
            assert f"used the {len(found)} records" in reader.damage


def frame_ends(data: bytes) -> list[int]:
    """Where each frame of a whole file ends, the header's first."""
    ends, place = [], len(MAGIC)
    while place < len(data):
        size, _ = _FRAME_HEAD.unpack_from(data, place)
        place += _FRAME_HEAD.size + size
        ends.append(place)
    return ends


def whole_header(data: bytes) -> bytes:
    return data[: frame_ends(data)[0]]


def test_a_file_cut_inside_its_header_is_refused(path: Path) -> None:
    """There is nothing to use."""
    write(path, [])
    path.write_bytes(path.read_bytes()[:-3])

    with pytest.raises(TraceError, match="is cut off before its header ends"):
        TraceReader(path)


@pytest.mark.parametrize("data", [b"", b"DSCHEDT", b"timestamp,tokens\n1,2\n", b"\x00" * 100])
def test_what_is_no_trace_is_refused(path: Path, data: bytes) -> None:
    """A request trace, an empty file, something else."""
    path.write_bytes(data)

    with pytest.raises(TraceError, match="is not a decision trace of dsched"):
        TraceReader(path)


def test_a_newer_version_is_refused_by_name(path: Path) -> None:
    """Also where its header has fields that we do not know."""
    payload = msgspec.msgpack.encode(
        {"format": FORMAT_VERSION + 1, "dsched_version": "9.9", "new_field": True}
    )
    path.write_bytes(MAGIC + _FRAME_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)

    with pytest.raises(
        TraceError, match=r"written by dsched 9\.9 in format 3; this dsched reads formats up to 2"
    ):
        TraceReader(path)


def test_a_file_of_format_1_is_read(path: Path) -> None:
    """Its keyframes do not say whether other dsched processes are heard: nobody was."""
    keyframe = Keyframe(
        5, "p", (0, 2, True, 0, 9, 10), (("e", 0),), b"", b"", 3, (), {}, 0, hears_peers=True
    )
    old = msgspec.msgpack.decode(msgspec.msgpack.encode([keyframe]))
    assert old[0].pop() is True
    writer = TraceWriter(path, msgspec.structs.replace(HEADER, format=1))
    writer.write(old)
    writer.close()

    assert list(TraceReader(path)) == [msgspec.structs.replace(keyframe, hears_peers=False)]


def test_a_flipped_bit_ends_the_reading_there(path: Path) -> None:
    """The frames before it are used."""
    records = make_records(2 * RECORDS_OF_A_FRAME)
    write(path, records)
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)

    reader = TraceReader(path)

    assert list(reader) == records[:RECORDS_OF_A_FRAME]
    assert "checksum is wrong" in str(reader.damage)


def test_a_file_that_is_not_there_is_named(path: Path) -> None:
    """With the system's reason."""
    with pytest.raises(TraceError, match="No such file"):
        TraceReader(path)


def kinds(kind: type[Record]) -> list[type[Record]]:
    return [kind, *(below for each in kind.__subclasses__() for below in kinds(each))]


def test_every_kind_of_record_has_its_own_number() -> None:
    """Numbers are the format: two kinds with one number could not be told apart."""
    own = [kind for kind in kinds(Record) if kind is not Record]
    tags = [kind.__struct_config__.tag for kind in own]

    assert len(set(tags)) == len(tags)
    assert set(get_args(AnyRecord)) == set(own), "a kind that no reader decodes"
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode(Ended(1, "r", "stop", None, 3, 0, None)), type=AnyRecord
    ) == Ended(1, "r", "stop", None, 3, 0, None)
