"""Load windows and the file of recorded load."""

from pathlib import Path

import numpy as np
import pytest

from dsched.eplb import LoadHeader, LoadRecorder, LoadWindow, read_load_file
from dsched.errors import TraceError

HEADER = LoadHeader(num_layers=2, num_experts=3, window_steps=10)


def test_warm_up_and_dummy_batches_are_left_out() -> None:
    """Only real steps after the warm-up count."""
    window = LoadWindow(num_layers=1, num_experts=2, warm_up_steps=2)
    for _ in range(4):
        window.apply_step(np.array([[1, 2]]))
        window.apply_step(np.array([[100, 100]]), is_dummy=True)
    closed = window.close()

    assert closed.counts.tolist() == [[2, 4]]
    assert closed.num_steps == 2


def test_ranks_merge_in_any_order_to_the_same_load() -> None:
    """int64 sums, beyond what float32 holds."""
    parts = [np.array([[2**40 + rank, rank]]) for rank in range(4)]

    def merged(order: list[int]) -> list[list[int]]:
        windows = []
        for rank in order:
            window = LoadWindow(num_layers=1, num_experts=2)
            window.apply_step(parts[rank])
            windows.append(window)
        for other in windows[1:]:
            windows[0].merge(other)
        windows[0].validate()
        closed = windows[0].close()
        assert closed.num_steps == 1
        assert closed.counts.dtype == np.int64
        return closed.counts.tolist()

    assert merged([0, 1, 2, 3]) == merged([3, 1, 0, 2]) == [[4 * 2**40 + 6, 6]]


def test_smoothing_keeps_a_part_of_older_windows() -> None:
    """Half of each: 8, then (8 + 16) / 2; a window without steps changes nothing."""
    window = LoadWindow(num_layers=1, num_experts=1, keep_parts=128)
    closed = []
    for tokens in (8, 16):
        window.apply_step(np.array([[tokens]]))
        closed.append(window.close().counts.item())
    silent = window.close()

    assert closed == [8, 12]
    assert (silent.counts.item(), silent.num_steps) == (12, 0)


def test_recorded_windows_come_back(tmp_path: Path) -> None:
    """Also after the file was closed and gone on with."""
    path = tmp_path / "load.dsched"
    windows = np.random.default_rng(1).integers(0, 2**50, (4, 2, 3))
    for part in (windows[:2], windows[2:]):
        with LoadRecorder(path, HEADER) as recorder:
            for counts in part:
                recorder.write(counts, num_steps=10)
    header, found = read_load_file(path)

    assert header == HEADER
    assert np.array_equal(found, windows)


def test_a_frame_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """A crash while writing costs one window."""
    path = tmp_path / "load.dsched"
    with LoadRecorder(path, HEADER) as recorder:
        for value in range(3):
            recorder.write(np.full((2, 3), value), num_steps=1)
    path.write_bytes(path.read_bytes()[:-1])

    assert read_load_file(path)[1][:, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x02\x00\x00\x00{}"])
def test_other_files_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    """Empty, short, huge and foreign ones."""
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="other: "):
        read_load_file(path)


def test_a_file_of_another_shape_is_not_appended_to(tmp_path: Path) -> None:
    """One file holds one model's load; a window of another shape is refused, too."""
    path = tmp_path / "load.dsched"
    with LoadRecorder(path, HEADER) as recorder, pytest.raises(ValueError, match="shape"):
        recorder.write(np.zeros((1, 3), np.int64), num_steps=1)
    other = LoadHeader(num_layers=2, num_experts=4, window_steps=10)
    with pytest.raises(TraceError, match="cannot append"):
        LoadRecorder(path, other)
    with pytest.raises(TraceError, match="No such file"):
        read_load_file(tmp_path / "missing")
