"""The token journal's contract, kept by the one in memory and the one on disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.drivers.wire import SamplingParams
from dsched.errors import InvariantError
from dsched.faults import MemoryJournal, SqliteJournal, TokenJournal
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId

R = RequestId("r0")
TARGET = RankId(EngineId("e0"), DpRank(1))


@pytest.fixture(params=["memory", "sqlite"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TokenJournal]:
    made: MemoryJournal = (
        MemoryJournal() if request.param == "memory" else SqliteJournal(tmp_path / "j.sqlite3")
    )
    yield made
    made.validate()
    made.close()


def open_request(journal: TokenJournal, request_id: RequestId = R) -> None:
    journal.open_request(
        request_id,
        model="m",
        prompt_token_ids=(7, 8, 9),
        sampling=SamplingParams(max_tokens=5, seed=3),
    )


def begin(journal: TokenJournal, epoch: int, request_id: RequestId = R) -> int:
    return journal.begin_attempt(
        request_id, attempt_id=AttemptId(f"a{epoch}"), epoch=epoch, target=TARGET
    )


def test_tokens_of_two_attempts_are_one_answer(journal: TokenJournal) -> None:
    """A second attempt starts where the first was cut, and each token knows its epoch."""
    open_request(journal)
    first = begin(journal, 1)
    assert journal.record(R, epoch=1, first_index=0, token_ids=[10, 11])
    second = begin(journal, 2)
    assert journal.record(R, epoch=2, first_index=2, token_ids=(12,))

    record = journal.read_request(R)

    assert (first, second) == (0, 2)
    assert journal.output_token_ids(R) == (10, 11, 12)
    assert record is not None
    assert [record.epoch_of(index) for index in range(3)] == [1, 1, 2]
    assert record.prompt_token_ids == (7, 8, 9)
    assert record.sampling.seed == 3
    assert record.attempts[1].target == TARGET
    assert record.finish_reason is None


def test_tokens_of_an_older_attempt_are_dropped(journal: TokenJournal) -> None:
    """An engine that wakes up late is told to drop its tokens; nothing is raised."""
    open_request(journal)
    begin(journal, 1)
    journal.record(R, epoch=1, first_index=0, token_ids=[10])
    begin(journal, 2)

    assert not journal.record(R, epoch=1, first_index=1, token_ids=[99, 98])
    assert journal.output_token_ids(R) == (10,)
    assert journal.status().num_fenced_tokens == 2


def test_fence_holds_before_the_next_attempt_begins(journal: TokenJournal) -> None:
    """Between the loss of an engine and the new attempt nobody may add a token."""
    open_request(journal)
    begin(journal, 1)
    journal.fence_attempt(R)

    assert not journal.record(R, epoch=1, first_index=0, token_ids=[10])
    assert begin(journal, 2) == 0
    assert journal.record(R, epoch=2, first_index=0, token_ids=[11])


def test_tokens_after_the_end_are_dropped(journal: TokenJournal) -> None:
    """A finished request, and one that never was, take no tokens; both are normal."""
    open_request(journal)
    begin(journal, 1)
    journal.finish(R, reason="stop")

    assert not journal.record(R, epoch=1, first_index=0, token_ids=[10])
    assert not journal.record(RequestId("never"), epoch=1, first_index=0, token_ids=[10])
    journal.finish(R, reason="length")
    journal.fence_attempt(R)
    record = journal.read_request(R)
    assert record is not None
    assert record.finish_reason == "stop", "the first end counts"


@pytest.mark.parametrize("first_index", [0, 1, 3])
def test_gap_or_repeat_is_our_mistake(journal: TokenJournal, first_index: int) -> None:
    """Inside the open attempt every index comes once, in order."""
    open_request(journal)
    begin(journal, 1)
    journal.record(R, epoch=1, first_index=0, token_ids=[10, 11])

    with pytest.raises(InvariantError, match=f"tokens from {first_index}, expected 2"):
        journal.record(R, epoch=1, first_index=first_index, token_ids=[12])
    assert journal.output_token_ids(R) == (10, 11)


def test_epochs_rise(journal: TokenJournal) -> None:
    """An attempt cannot reuse an epoch, and tokens cannot come from one that never began."""
    open_request(journal)
    with pytest.raises(InvariantError, match="epoch 1 never began"):
        journal.record(R, epoch=1, first_index=0, token_ids=[10])
    begin(journal, 2)
    for epoch in (1, 2):
        with pytest.raises(InvariantError, match=f"epoch {epoch} after 2"):
            begin(journal, epoch)
    with pytest.raises(InvariantError, match="epoch 3 never began"):
        journal.record(R, epoch=3, first_index=0, token_ids=[10])


def test_only_open_requests_have_attempts(journal: TokenJournal) -> None:
    """Working on a request that is not open is our mistake; opening it twice the caller's."""
    with pytest.raises(InvariantError, match="r0 is not open"):
        begin(journal, 1)
    with pytest.raises(InvariantError, match="r0 is not open"):
        journal.output_token_ids(R)
    open_request(journal)
    with pytest.raises(ValueError, match="'r0' is already open"):
        open_request(journal)


def test_token_out_of_range_leaves_nothing_behind(journal: TokenJournal) -> None:
    """All tokens of a call or none: a value that does not fit refuses the call."""
    open_request(journal)
    begin(journal, 1)

    with pytest.raises(ValueError, match="above 2147483647"):
        journal.record(R, epoch=1, first_index=0, token_ids=[10, 1 << 31])
    assert journal.output_token_ids(R) == ()
    assert journal.record(R, epoch=1, first_index=0, token_ids=[(1 << 31) - 1])


def test_an_id_may_be_used_again_after_its_end(journal: TokenJournal) -> None:
    """A client that repeats its request id starts a new request; the last one is read."""
    open_request(journal)
    begin(journal, 1)
    journal.record(R, epoch=1, first_index=0, token_ids=[10])
    journal.finish(R, reason="stop")
    open_request(journal)
    begin(journal, 1)
    journal.record(R, epoch=1, first_index=0, token_ids=[20])

    record = journal.read_request(R)

    assert record is not None
    assert record.output_token_ids == (20,)
    assert record.finish_reason is None


def test_status_counts_tokens_once(journal: TokenJournal) -> None:
    """Recorded tokens keep counting after their request has ended."""
    open_request(journal)
    begin(journal, 1)
    journal.record(R, epoch=1, first_index=0, token_ids=[10, 11])
    before = journal.status()
    journal.finish(R, reason="stop")
    after = journal.status()

    assert (before.num_open_requests, after.num_open_requests) == (1, 0)
    assert before.num_recorded_tokens == after.num_recorded_tokens == 2


def test_epoch_of_a_token_that_is_not_there(journal: TokenJournal) -> None:
    """Asking beyond the end is refused with the index."""
    open_request(journal)
    record = journal.read_request(R)

    assert record is not None
    with pytest.raises(ValueError, match="no output token 0"):
        record.epoch_of(0)


def test_memory_journal_keeps_the_last_finished_requests() -> None:
    """Finished requests are bounded, oldest first out, and their prompts are dropped."""
    journal = MemoryJournal(max_retained_requests=2)
    for name in ("a", "b", "c"):
        open_request(journal, RequestId(name))
        begin(journal, 1, RequestId(name))
        journal.record(RequestId(name), epoch=1, first_index=0, token_ids=[1])
        journal.finish(RequestId(name), reason="stop")

    kept = journal.read_request(RequestId("b"))

    assert journal.read_request(RequestId("a")) is None
    assert kept is not None
    assert (kept.prompt_token_ids, kept.num_prompt_tokens) == ((), 3)
    assert kept.output_token_ids == (1,)


def test_journal_in_memory_never_claims_to_last() -> None:
    """Without a file nothing is durable, and that is no failure."""
    status = MemoryJournal().status()

    assert not status.is_durable
    assert status.degraded_reason is None
