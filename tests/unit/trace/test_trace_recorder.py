"""RingRecorder: what it keeps of steps, and that it never grows without end."""

from typing import Any

import pytest

from dsched.drivers.wire import RankReport
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId
from dsched.routing import DecodeRouter
from dsched.trace import RingRecorder, null_recorder, tell
from dsched.trace.recorder import MAX_STEPS_OF_PREFILL, NUM_SEGMENTS, RECORDS_OF_A_FRAME
from dsched.trace.records import Keyframe, Record, Stepped

RANK = RankId(EngineId("e"), DpRank(0))


def make_recorder(**options: Any) -> RingRecorder:  # noqa: ANN401
    recorder = RingRecorder(**options)
    router = DecodeRouter()
    router.add_rank(RANK, kv_capacity_tokens=100, max_running_requests=4)
    recorder.watch("p", router)
    return recorder


def book(recorder: RingRecorder, name: str) -> RequestId:
    recorder.on_booking(
        RequestId(name),
        attempt_id=AttemptId(f"a-{name}"),
        number=1,
        rank_id=RANK,
        num_prompt_tokens=10,
        epoch=1,
        now_ns=1,
    )
    return RequestId(name)


def report(recorder: RingRecorder, *, num_step_tokens: int = 512, num_running: int = 1) -> None:
    recorder.on_report(
        RankReport(
            engine_id="e",
            incarnation="i",
            dp_rank=0,
            seq=1,
            step=7,
            num_running=num_running,
            num_waiting=0,
            num_kv_tokens=0,
            num_waiting_prefill_tokens=100,
            kv_capacity_tokens=100,
            step_ns=5,
            num_step_tokens=num_step_tokens,
        ),
        2,
    )


def num_steps(recorder: RingRecorder) -> int:
    return sum(isinstance(record, Stepped) for record in recorder.records())


def test_steps_are_kept_while_a_prompt_is_computed() -> None:
    """From the booking to the first token, those that computed more than a token a request."""
    recorder = make_recorder()
    report(recorder)
    request_id = book(recorder, "r")
    report(recorder)
    report(recorder, num_step_tokens=1)
    report(recorder)
    recorder.on_first_token(request_id, 3)
    report(recorder)

    assert num_steps(recorder) == 2
    story = tell(recorder.records(), "r")  # type: ignore[arg-type]
    assert story is not None
    kinds = [type(moment.record).__name__ for moment in story.moments]
    assert kinds == ["Booked", "Stepped", "Stepped", "FirstToken"]


def test_the_first_token_of_one_leaves_the_steps_of_another() -> None:
    """Two prompts on one rank: the later one is still computed."""
    recorder = make_recorder()
    first = book(recorder, "a")
    book(recorder, "b")
    recorder.on_first_token(first, 3)
    report(recorder)

    assert num_steps(recorder) == 1


def test_no_prompt_keeps_more_than_its_share_of_steps() -> None:
    """A prompt that waits inside its engine does not push everything else out."""
    recorder = make_recorder()
    book(recorder, "r")
    for _ in range(3 * MAX_STEPS_OF_PREFILL):
        report(recorder)

    assert num_steps(recorder) == MAX_STEPS_OF_PREFILL


def test_the_ring_is_bounded_and_begins_with_a_keyframe() -> None:
    """The oldest part is dropped whole."""
    recorder = make_recorder(max_records=512)
    for number in range(5_000):
        recorder.on_first_token(RequestId(f"r{number}"), number)
        records = recorder.records()
        assert isinstance(records[0], Keyframe)
        assert len(records) <= 512
    assert len(recorder.records()) >= 512 * (NUM_SEGMENTS - 1) // NUM_SEGMENTS
    assert recorder._prefill_of == {}


def test_a_writer_that_is_too_slow_loses_the_file_not_the_service() -> None:
    """What was not taken is dropped at the limit, and that is said."""
    recorder = make_recorder(max_untaken=10)
    recorder.start_taking(0)
    for number in range(20):
        recorder.on_first_token(RequestId("r"), number)

    assert recorder.overflowed
    assert recorder.take() == []
    assert len(recorder.records()) > 20


def test_full_frames_are_written_as_they_come() -> None:
    """For a host without a thread: in frames, all of them, in order."""
    written: list[list[Record]] = []
    recorder = make_recorder(write=lambda records: written.append(list(records)))
    recorder.start_taking(0)
    for number in range(2 * RECORDS_OF_A_FRAME):
        recorder.on_first_token(RequestId(f"r{number}"), number)
    rest = recorder.stop_taking()

    assert [len(each) for each in written] == [RECORDS_OF_A_FRAME] * 2
    taken = [record for each in written for record in each] + rest
    assert isinstance(taken[0], Keyframe)
    assert [record.time_ns for record in taken if not isinstance(record, Keyframe)] == list(
        range(2 * RECORDS_OF_A_FRAME)
    )


def test_a_ring_without_room_is_refused() -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match="max_records is 100; it must be at least 256"):
        RingRecorder(max_records=100)


def test_the_null_recorder_hears_everything_and_has_nothing_else() -> None:
    """A misspelt name is an error, not silence."""
    recorder = null_recorder()
    recorder.on_first_token(RequestId("r"), 1)
    recorder.watch("p", DecodeRouter())

    with pytest.raises(AttributeError):
        recorder.records()  # type: ignore[attr-defined]
