"""SqliteJournal's file: what a restarted dsched finds, and what happens when it cannot be written.

Tests wait for the writer thread with `flush`; one waits for what happens without.
"""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from shutil import copyfile

import pytest

from dsched.drivers.wire import SamplingParams
from dsched.errors import JournalError
from dsched.faults import SqliteJournal, journal_file, read_unfinished
from dsched.faults.journal_file import read_request
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId


@pytest.fixture(autouse=True)
def fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "RETRY_INTERVAL_S", 0.01)
    monkeypatch.setattr(journal_file, "BUSY_TIMEOUT_MS", 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "journal.sqlite3"


@pytest.fixture
def journal(path: Path) -> Iterator[SqliteJournal]:
    made = SqliteJournal(path, flush_interval_s=0.001)
    yield made
    made.close()
    made.validate()


def serve(
    journal: SqliteJournal, name: str, tokens: list[int], *, end: str | None = "stop"
) -> RequestId:
    request_id = RequestId(name)
    journal.open_request(
        request_id,
        model="m",
        prompt_token_ids=tuple(range(5)),
        sampling=SamplingParams(max_tokens=99, stop_token_ids=(2,)),
    )
    journal.begin_attempt(
        request_id, attempt_id=AttemptId(name), epoch=1, target=RankId(EngineId("e"), DpRank(0))
    )
    journal.record(request_id, epoch=1, first_index=0, token_ids=tokens)
    if end is not None:
        journal.finish(request_id, reason=end)
    return request_id


def test_unfinished_requests_are_found_after_a_restart(path: Path, journal: SqliteJournal) -> None:
    """Everything needed to go on is in the file, of the requests that have no end."""
    serve(journal, "done", [1, 2])
    open_id = serve(journal, "open", [1, 2, 3], end=None)
    journal.record(open_id, epoch=1, first_index=3, token_ids=[4])
    assert journal.flush()

    (found,) = read_unfinished(path)

    assert found == journal.read_request(open_id)
    assert found.output_token_ids == (1, 2, 3, 4)
    assert found.prompt_token_ids == (0, 1, 2, 3, 4)
    assert found.sampling.stop_token_ids == (2,)


def test_close_writes_what_is_pending(path: Path) -> None:
    """A clean stop loses nothing, however long the flush interval is."""
    journal = SqliteJournal(path, flush_interval_s=3_600)
    request_id = serve(journal, "r", [5, 6])
    journal.close()

    found = read_request(path, request_id)

    assert found is not None
    assert (found.output_token_ids, found.finish_reason) == ((5, 6), "stop")


def test_finished_request_leaves_memory_and_is_read_from_the_file(
    journal: SqliteJournal,
) -> None:
    """Memory holds what is open or unwritten; the rest comes from the file, prompt included."""
    request_id = serve(journal, "r", [5, 6])
    assert journal.flush()

    found = journal.read_request(request_id)

    assert journal._ended == {}
    assert found is not None
    assert (found.prompt_token_ids, found.output_token_ids) == ((0, 1, 2, 3, 4), (5, 6))


def test_owners_share_a_file(path: Path, journal: SqliteJournal) -> None:
    """Two processes may write one file; each request is its owner's, also with one id."""
    other = SqliteJournal(path, owner="other", flush_interval_s=0.001)
    serve(journal, "same", [1], end=None)
    serve(other, "same", [2], end=None)
    assert journal.flush()
    assert other.flush()
    other.close()

    assert [r.output_token_ids for r in read_unfinished(path, owner="")] == [(1,)]
    assert [r.output_token_ids for r in read_unfinished(path, owner="other")] == [(2,)]
    assert len(list(read_unfinished(path))) == 2


def test_locked_file_degrades_and_recovers(path: Path, journal: SqliteJournal) -> None:
    """While another process holds the file, serving goes on and durability is not claimed; when
    it lets go, the file catches up."""
    assert journal.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        request_id = serve(journal, "r", [1, 2, 3])
        assert not journal.flush()
        status = journal.status()
        seen = journal.read_request(request_id)
        holder.execute("ROLLBACK")

    assert not status.is_durable
    assert status.degraded_reason is not None
    assert "locked" in status.degraded_reason
    assert status.num_write_errors >= 1
    assert seen is not None
    assert seen.output_token_ids == (1, 2, 3)
    assert journal.flush()
    assert journal.status().is_durable
    found = read_request(path, request_id)
    assert found is not None
    assert found.output_token_ids == (1, 2, 3)


def test_full_disk_degrades_and_recovers(path: Path, journal: SqliteJournal) -> None:
    """A write that does not fit is rolled back whole; nothing is half written."""
    assert journal.flush()
    connection = journal._file._connection
    assert connection is not None
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    request_id = serve(journal, "big", list(range(20_000)))

    is_written = journal.flush()
    status = journal.status()

    # The writer opens the file anew after an error, which lifts the limit of this test.
    assert not is_written
    assert status.num_write_errors >= 1
    assert journal.flush()
    found = read_request(path, request_id)
    assert found is not None
    assert found.output_token_ids == tuple(range(20_000))


def test_deleted_file_is_written_again(path: Path, journal: SqliteJournal) -> None:
    """SQLite would go on writing into the deleted file; the journal notices and starts over, with
    all that memory holds."""
    open_id = serve(journal, "open", [1, 2], end=None)
    assert journal.flush()
    for file in path.parent.iterdir():
        file.unlink()
    journal.record(open_id, epoch=1, first_index=2, token_ids=[3])
    assert journal.flush()

    (found,) = read_unfinished(path)

    assert found.output_token_ids == (1, 2, 3)
    assert found.prompt_token_ids == (0, 1, 2, 3, 4)


def left_by_a_kill(path: Path, folder: Path) -> Path:
    """What would be there if every dsched were killed now: copies without those that hold it."""
    folder.mkdir()
    for file in path.parent.glob(f"{path.name}*"):
        if not file.name.endswith("-shm"):
            copyfile(file, folder / file.name)
    return folder / path.name


@pytest.mark.parametrize("is_shared_memory_lost", [False, True])
def test_deleted_write_ahead_log_is_noticed(
    path: Path, tmp_path: Path, journal: SqliteJournal, *, is_shared_memory_lost: bool
) -> None:
    """Alone: nothing is lost, for what SQLite has of it goes to the file. With the shared memory
    beside it: the file is begun anew, with all that memory holds."""
    open_id = serve(journal, "open", [1, 2], end=None)
    ended_id = serve(journal, "ended", [7])
    assert journal.flush()
    path.with_name(path.name + "-wal").unlink()
    if is_shared_memory_lost:
        path.with_name(path.name + "-shm").unlink()
    journal.record(open_id, epoch=1, first_index=2, token_ids=[3])
    assert journal.flush()
    journal.record(open_id, epoch=1, first_index=3, token_ids=[4])
    assert journal.flush()

    left = left_by_a_kill(path, tmp_path / "left")

    (found,) = read_unfinished(left)
    assert found.output_token_ids == (1, 2, 3, 4)
    assert (read_request(left, ended_id) is None) is is_shared_memory_lost
    assert path.with_name(path.name + ".damaged").exists() is is_shared_memory_lost
    assert journal.status().is_durable


def test_deleted_write_ahead_log_of_a_shared_file(path: Path, tmp_path: Path) -> None:
    """All that share the file begin a new one, and none writes into what the others cannot see."""
    journals = [SqliteJournal(path, owner=name, flush_interval_s=0.001) for name in "ab"]
    ids = [serve(each, name, [1], end=None) for each, name in zip(journals, "ab", strict=True)]
    ended_id = serve(journals[0], "ended", [7])
    for journal in journals:
        assert journal.flush()
    path.with_name(path.name + "-wal").unlink()
    for index in (1, 2, 3):
        for journal, request_id in zip(journals, ids, strict=True):
            journal.record(request_id, epoch=1, first_index=index, token_ids=[index])
            assert journal.flush()

    found = read_unfinished(left_by_a_kill(path, tmp_path / "left"))
    for journal in journals:
        journal.close()

    assert {each.request_id: each.output_token_ids for each in found} == {
        "a": (1, 1, 2, 3),
        "b": (1, 1, 2, 3),
    }
    aside = read_request(path.with_name(path.name + ".damaged"), ended_id)
    assert aside is not None
    assert aside.output_token_ids == (7,)


def test_short_request_is_one_row(path: Path) -> None:
    """What begins and ends between two flushes costs the file one row, and nothing is left out."""
    journal = SqliteJournal(path, flush_interval_s=3_600)
    ids = [serve(journal, f"r{n}", [n, n + 1]) for n in range(150)]
    longer = serve(journal, "longer", [7], end=None)
    journal.begin_attempt(
        longer, attempt_id=AttemptId("2nd"), epoch=2, target=RankId(EngineId("f"), DpRank(1))
    )
    journal.record(longer, epoch=2, first_index=1, token_ids=[8])
    assert journal.flush()
    with closing(sqlite3.connect(path)) as connection:
        counts = [
            connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            for table in ("requests", "attempts", "tokens")
        ]
    found = [read_request(path, request_id) for request_id in ids]
    unfinished = list(read_unfinished(path))
    journal.close()

    assert counts == [151, 0, 0]
    assert [r and (r.output_token_ids, r.finish_reason) for r in found] == [
        ((n, n + 1), "stop") for n in range(150)
    ]
    assert [[a.epoch for a in r.attempts] for r in unfinished] == [[1, 2]]
    assert unfinished[0].epoch_of(1) == 2


def counts_of(path: Path) -> tuple[int, int]:
    """Rows of tokens that belong to one request, and rows of flushes."""
    with closing(sqlite3.connect(path)) as connection:
        (num_own,) = connection.execute("SELECT COUNT(*) FROM tokens").fetchone()
        (num_flushes,) = connection.execute("SELECT COUNT(*) FROM flushes").fetchone()
    return num_own, num_flushes


def go_on(journal: SqliteJournal, names: list[str], *, first: int, until: int) -> None:
    """Give open requests a token each in every flush."""
    for index in range(first, until):
        for name in names:
            journal.record(RequestId(name), epoch=1, first_index=index, token_ids=[index])
        assert journal.flush()


def test_flushes_of_open_requests_are_gathered(path: Path, journal: SqliteJournal) -> None:
    """However long requests run, a reader looks through few flushes, and finds every token."""
    names = ["a", "b", "c"]
    for name in names:
        serve(journal, name, [0], end=None)
    assert journal.flush()
    num_steps = 3 * journal_file.GATHER_FLUSHES + 5
    go_on(journal, names, first=1, until=num_steps)
    num_own, num_flushes = counts_of(path)
    found = {record.request_id: record.output_token_ids for record in read_unfinished(path)}
    journal.finish(RequestId("a"), reason="stop")
    assert journal.flush()
    ended = read_request(path, RequestId("a"))

    assert num_flushes <= journal_file.GATHER_FLUSHES
    assert 2 * len(names) <= num_own <= 3 * len(names)
    assert found == dict.fromkeys(names, tuple(range(num_steps)))
    assert ended is not None
    assert ended.output_token_ids == tuple(range(num_steps))


def test_gathering_leaves_what_others_wrote(path: Path) -> None:
    """A dsched that died left flushes behind, under another name or the same: they stay until its
    requests are forgotten."""
    now = [1_000]

    def start(owner: str) -> SqliteJournal:
        return SqliteJournal(
            path, owner=owner, flush_interval_s=0.001, wall_time_s=lambda: now[0], retention_s=100
        )

    for owner in ("dead", "me"):
        before = start(owner)
        serve(before, f"{owner}-before", [0], end=None)
        assert before.flush()
        go_on(before, [f"{owner}-before"], first=1, until=4)
        before.close()
    journal = start("me")
    serve(journal, "now", [0], end=None)
    assert journal.flush()
    go_on(journal, ["now"], first=1, until=2 * journal_file.GATHER_FLUSHES)
    found = {record.request_id: record.output_token_ids for record in read_unfinished(path)}
    now[0] += 101
    serve(journal, "trigger", [1])
    assert journal.flush()
    now[0] += 11
    serve(journal, "trigger again", [1])
    assert journal.flush()
    with closing(sqlite3.connect(path)) as connection:
        owners = {owner for (owner,) in connection.execute("SELECT owner FROM flushes")}
    journal.close()

    assert found["dead-before"] == found["me-before"] == (0, 1, 2, 3)
    assert found["now"] == tuple(range(2 * journal_file.GATHER_FLUSHES))
    assert owners == {"me"}


@pytest.mark.parametrize("content", [b"", b"not a database at all, but long enough " * 40])
def test_damaged_file_at_start_is_set_aside(path: Path, content: bytes) -> None:
    """A file that is no database does not stop dsched, and is kept for people to look at."""
    path.parent.mkdir()
    path.write_bytes(content)
    journal = SqliteJournal(path, flush_interval_s=0.001)
    request_id = serve(journal, "r", [1])
    journal.flush()  # the first try may still meet the damaged file

    assert journal.flush()
    assert journal.status().is_durable
    journal.close()
    found = read_request(path, request_id)
    assert found is not None
    assert found.output_token_ids == (1,)
    if content:
        assert path.with_name(path.name + ".damaged").read_bytes() == content


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_file_at_start(path: Path, share: float) -> None:
    """What a cut file still gives or not, new requests are durable and the old file is kept or
    readable."""
    before = SqliteJournal(path, flush_interval_s=0.001)
    for number in range(50):
        serve(before, f"old{number}", list(range(2_000)))
    before.close()
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(int(size * share))

    journal = SqliteJournal(path, flush_interval_s=0.001)
    request_id = serve(journal, "new", [1, 2])
    for _ in range(3):
        if journal.flush():
            break
    journal.close()

    assert journal.status().is_durable
    found = read_request(path, request_id)
    assert found is not None
    assert found.output_token_ids == (1, 2)


def test_path_that_cannot_be_made(tmp_path: Path) -> None:
    """Where no file can be, dsched serves, and says at once that nothing is durable."""
    (tmp_path / "file").write_text("")
    journal = SqliteJournal(tmp_path / "file" / "journal.sqlite3", flush_interval_s=0.001)
    at_start = journal.status()
    request_id = serve(journal, "r", [1], end=None)

    assert at_start.degraded_reason is not None
    assert not journal.flush()
    assert journal.output_token_ids(request_id) == (1,)
    assert not journal.status().is_durable
    journal.close()


@pytest.mark.parametrize("version", [2, 99])
def test_file_of_another_version_is_left_alone(path: Path, version: int) -> None:
    """An older or newer dsched's journal is neither written nor set aside."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    journal = SqliteJournal(path, flush_interval_s=0.001)
    serve(journal, "r", [1])

    assert not journal.flush()
    assert f"journal format {version}" in str(journal.status().degraded_reason)
    journal.close()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_stalled_file_bounds_memory_and_counts_what_it_drops(path: Path) -> None:
    """Beyond `max_pending_requests`, ends are kept out of the file and counted; a request that the
    file knows as open still gets its end."""
    journal = SqliteJournal(path, flush_interval_s=0.001, max_pending_requests=3)
    known = serve(journal, "known", [1], end=None)
    assert journal.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        for number in range(10):
            serve(journal, f"r{number}", [number])
        journal.finish(known, reason="stop")
        assert not journal.flush()
        num_kept = len(journal._ended)
        holder.execute("ROLLBACK")
    assert journal.flush()
    status = journal.status()
    journal.close()

    assert num_kept == 4
    assert status.num_dropped_requests == 7
    assert list(read_unfinished(path)) == []
    assert read_request(path, RequestId("r9")) is None
    assert read_request(path, RequestId("r2")) is not None


def test_old_and_surplus_requests_expire(path: Path) -> None:
    """Finished requests leave the file by age and by number; open ones of living owners stay."""
    now = [1_000]
    journal = SqliteJournal(
        path,
        owner="me",
        flush_interval_s=0.001,
        max_retained_requests=3,
        retention_s=100,
        wall_time_s=lambda: now[0],
    )
    dead = SqliteJournal(path, owner="dead", flush_interval_s=0.001, wall_time_s=lambda: now[0])
    serve(dead, "orphan", [1], end=None)
    dead.close()
    serve(journal, "open", [1], end=None)
    for number in range(5):
        serve(journal, f"r{number}", [1])
        assert journal.flush()
    now[0] += 20
    serve(journal, "last", [1])
    assert journal.flush()
    by_number = [read_request(path, RequestId(f"r{n}")) is not None for n in range(5)]
    now[0] += 101
    serve(journal, "trigger", [1])
    assert journal.flush()
    by_age = [read_request(path, RequestId(name)) is not None for name in ("r4", "last", "orphan")]
    journal.close()

    assert by_number == [False, False, False, True, True]
    assert by_age == [False, False, False]
    assert [r.request_id for r in read_unfinished(path)] == ["open"]


def test_many_threads_of_time_lose_nothing(path: Path) -> None:
    """The recording thread races the writer; afterwards the file has every token once."""
    journal = SqliteJournal(path, flush_interval_s=0.0001, max_batch_requests=3)
    ids = [serve(journal, f"r{n}", [n], end=None) for n in range(7)]
    for index in range(1, 400):
        for request_id in ids:
            journal.record(request_id, epoch=1, first_index=index, token_ids=[index])
    assert journal.flush()

    found = {record.request_id: record.output_token_ids for record in read_unfinished(path)}
    journal.close()

    assert found == {f"r{n}": (n, *range(1, 400)) for n in range(7)}


def during_writes(monkeypatch: pytest.MonkeyPatch, happen: Callable[[], None]) -> None:
    """Let `happen` come between the reading of the entries and the end of each transaction."""
    insert = journal_file._Rows.insert

    def insert_slowly(rows: journal_file._Rows, connection: sqlite3.Connection) -> int | None:
        flush_id = insert(rows, connection)
        happen()
        return flush_id

    monkeypatch.setattr(journal_file._Rows, "insert", insert_slowly)


def test_tokens_that_come_while_their_request_is_written(
    path: Path, journal: SqliteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not in the row that is being written, and reach the file with the next flush."""
    done: list[bool] = []

    def happen() -> None:
        if not done:
            done.append(journal.record(RequestId("r"), epoch=1, first_index=2, token_ids=[3, 4]))

    during_writes(monkeypatch, happen)
    serve(journal, "r", [1, 2], end=None)
    assert journal.flush()
    assert journal.flush()

    (found,) = read_unfinished(path)

    assert done == [True]
    assert found.output_token_ids == (1, 2, 3, 4)


def test_tokens_that_could_not_be_written(path: Path, journal: SqliteJournal) -> None:
    """They are written once the file takes them, also if nothing else happens to their request."""
    serve(journal, "r", [1, 2], end=None)
    assert journal.flush()
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        journal.record(RequestId("r"), epoch=1, first_index=2, token_ids=[3])
        assert not journal.flush()
        assert journal.status().num_pending_requests == 1
        holder.execute("ROLLBACK")
    assert journal.flush()

    (found,) = read_unfinished(path)

    assert found.output_token_ids == (1, 2, 3)
    assert journal.status().num_pending_requests == 0


def test_fault_of_ours_does_not_end_the_writer(
    path: Path, journal: SqliteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal says that it does not write, and writes what it has once it can."""

    def fail(*_: object) -> None:
        raise OverflowError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(journal_file._Rows, "insert", fail)
        serve(journal, "r", [1, 2], end=None)
        assert not journal.flush()
        reason = str(journal.status().degraded_reason)
        assert not journal.status().is_durable
    assert journal.flush()

    (found,) = read_unfinished(path)

    assert "a fault of ours" in reason
    assert found.output_token_ids == (1, 2)
    assert journal.status().is_durable


def test_tokens_alone_wake_the_writer(path: Path, journal: SqliteJournal) -> None:
    """Nobody has to ask for a flush."""
    request_id = serve(journal, "r", [1, 2], end=None)
    assert journal.flush()
    journal.record(request_id, epoch=1, first_index=2, token_ids=[3])

    for _ in range(2_000):
        found = read_request(path, request_id)
        if found is not None and len(found.output_token_ids) == 3:
            break
        time.sleep(0.005)

    assert found is not None
    assert found.output_token_ids == (1, 2, 3)


@pytest.mark.parametrize("num_flushes_before", [0, 1])
def test_end_that_comes_while_its_request_is_written(
    path: Path, journal: SqliteJournal, monkeypatch: pytest.MonkeyPatch, num_flushes_before: int
) -> None:
    """It is heard of twice, or late; the file has it once, and memory forgets the request."""
    request_id = serve(journal, "r", [1, 2], end=None)
    for _ in range(num_flushes_before):
        assert journal.flush()
    at = {"insert": 0}
    read_end = journal_file._Rows.add_rest if num_flushes_before else journal_file._Rows.add_new

    def end_first(rows: object, entry: object, *, row_id: int) -> None:
        at["insert"] += 1
        if at["insert"] == 1:
            journal.finish(request_id, reason="stop")
        read_end(rows, entry, row_id=row_id)  # type: ignore[arg-type]

    monkeypatch.setattr(journal_file._Rows, read_end.__name__, end_first)
    journal.begin_attempt(
        request_id, attempt_id=AttemptId("2nd"), epoch=2, target=RankId(EngineId("e"), DpRank(0))
    )
    for _ in range(3):
        assert journal.flush()
    found = read_request(path, request_id)

    assert found is not None
    assert (found.output_token_ids, found.finish_reason) == ((1, 2), "stop")
    assert journal._ended == {}
    assert journal._file.open_entries == {}
    assert journal.status().num_write_errors == 0


def test_tokens_that_are_listed_and_in_a_row(path: Path, journal: SqliteJournal) -> None:
    """A request that changed otherwise has its tokens written with it; in a flush they are again,
    and a reader takes them once."""
    request_id = serve(journal, "r", [1], end=None)
    assert journal.flush()
    journal.record(request_id, epoch=1, first_index=1, token_ids=[2, 3])
    journal.begin_attempt(
        request_id, attempt_id=AttemptId("2nd"), epoch=2, target=RankId(EngineId("f"), DpRank(1))
    )
    journal.record(request_id, epoch=2, first_index=3, token_ids=[4])
    assert journal.flush()
    journal.record(request_id, epoch=2, first_index=4, token_ids=[5])
    assert journal.flush()

    (found,) = read_unfinished(path)

    assert counts_of(path) == (1, 2)
    assert found.output_token_ids == (1, 2, 3, 4, 5)
    assert [found.epoch_of(index) for index in range(5)] == [1, 1, 1, 2, 2]


def test_work_that_never_ends_does_not_keep_a_flush(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under load something changes during every write. It waits for the next one: the writer does
    not write on and on, a few rows each time."""
    journal = SqliteJournal(path, flush_interval_s=3_600)
    numbers = iter(range(1_000))

    def happen() -> None:
        number = next(numbers, None)
        if number is not None:
            serve(journal, f"next-{number}", [1])

    with monkeypatch.context() as patch:
        during_writes(patch, happen)
        serve(journal, "r", [1])
        assert journal.flush()
        num_writes = next(numbers)
    journal.close()

    assert num_writes == 1
    assert read_request(path, RequestId("next-0")) is not None


def test_a_new_file_uses_no_row_number_again(path: Path, journal: SqliteJournal) -> None:
    """Tokens that were listed for the lost file must not become another request's."""
    serve(journal, "a", [1], end=None)
    serve(journal, "b", [2], end=None)
    assert journal.flush()
    for file in list(path.parent.iterdir()):
        file.unlink()
    journal.finish(RequestId("a"), reason="stop")
    serve(journal, "c", [3], end=None)
    journal._pieces.append((1, 1, b"\x09\0\0\0"))  # as if recorded before the loss was seen
    journal._pieces.append((2, 1, b"\x09\0\0\0"))
    assert journal.flush()
    with closing(sqlite3.connect(path)) as connection:
        ids = [row_id for (row_id,) in connection.execute("SELECT row_id FROM requests")]
    found = {record.request_id: record.output_token_ids for record in read_unfinished(path)}

    assert min(ids) > 2
    assert found == {"b": (2,), "c": (3,)}


def test_file_of_the_version_before_is_used_on(path: Path) -> None:
    """Its tables are the same; from now on only this version's readers understand it."""
    before = SqliteJournal(path, owner="before", flush_interval_s=0.001)
    serve(before, "old", [1, 2], end=None)
    before.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 5")
    journal = SqliteJournal(path, owner="after", flush_interval_s=0.001)
    serve(journal, "new", [3], end=None)
    assert journal.flush()
    found = {record.request_id: record.output_token_ids for record in read_unfinished(path)}
    journal.close()
    with closing(sqlite3.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()

    assert found == {"old": (1, 2), "new": (3,)}
    assert version == journal_file.SCHEMA_VERSION


def test_missing_and_broken_files_cannot_be_read(tmp_path: Path) -> None:
    """A reader says so, and makes no file."""
    missing = tmp_path / "missing"
    with pytest.raises(JournalError, match="unable to open"):
        list(read_unfinished(missing))
    assert not missing.exists()
    broken = tmp_path / "broken"
    broken.write_bytes(b"x" * 4_096)
    with pytest.raises(JournalError, match="not a database"):
        read_request(broken, RequestId("r"))


def test_row_that_is_missing_in_the_file_is_not_glossed_over(
    path: Path, journal: SqliteJournal
) -> None:
    """A request with a hole in its tokens cannot be continued; reading it says where."""
    request_id = serve(journal, "r", [1, 2], end=None)
    for index in (2, 3):
        assert journal.flush()
        journal.record(request_id, epoch=1, first_index=index, token_ids=[9])
    assert journal.flush()
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM flushes WHERE flush_id = 1")

    with pytest.raises(JournalError, match="request r: tokens from 3, expected 2"):
        list(read_unfinished(path))


def test_no_thread_is_left_behind(path: Path) -> None:
    """`close` ends the writer."""
    journal = SqliteJournal(path)
    journal.close()

    assert not any(thread.name == "dsched-journal" for thread in threading.enumerate())


def test_ids_that_nobody_had_need_no_look_into_the_file(tmp_path: Path) -> None:
    """Known are those of the file at the start and our own; others only when asked for certain."""
    path = tmp_path / "journal.sqlite3"
    first = SqliteJournal(path, owner="first")
    open_and_emit(first, "old")
    first.close()
    second = SqliteJournal(path, owner="second")
    other = SqliteJournal(path, owner="other")
    open_and_emit(other, "late")
    other.flush()
    open_and_emit(second, "own")
    second.finish(RequestId("own"), reason="cancelled")
    second.flush()

    known = {
        name: second.read_request(RequestId(name), is_known_only=True) is not None
        for name in ("old", "own", "late", "never")
    }
    found = second.read_request(RequestId("late"))
    second.close()
    other.close()

    assert known == {"old": True, "own": True, "late": False, "never": False}
    assert found is not None


def open_and_emit(journal: SqliteJournal, name: str) -> None:
    request_id = RequestId(name)
    journal.open_request(
        request_id, model="m", prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=9)
    )
    target = RankId(EngineId("e"), DpRank(0))
    journal.begin_attempt(request_id, attempt_id=AttemptId(name), epoch=1, target=target)
    journal.record(request_id, epoch=1, first_index=0, token_ids=(4, 5))


class _Interrupted(threading.Event):
    """Work for a writer; `at_clear` runs once, at the moment when the writer takes it on."""

    at_clear: Callable[[], None] | None = None

    def clear(self) -> None:
        super().clear()
        at_clear, self.at_clear = self.at_clear, None
        if at_clear is not None:
            at_clear()


def test_after_a_flush_the_writer_is_idle(path: Path) -> None:
    """Also when the flush comes as the writer takes its work on: it must not wake for nothing. An
    extra pass, amid the deletion of the file's parts, made a file whose parts then went, too."""
    journal = SqliteJournal(path, flush_interval_s=0.05)
    is_left: list[bool] = []

    def flush() -> None:
        assert journal.flush()
        is_left.append(journal._has_work.is_set())

    second = threading.Thread(target=flush)

    def come_between() -> None:
        second.start()
        second.join(0.1)

    work = _Interrupted()
    work.at_clear = come_between
    old, journal._has_work = journal._has_work, work
    old.set()  # the writer waits for this one; from here on it has ours
    serve(journal, "open", [1], end=None)
    assert journal.flush()
    second.join()
    journal.close()

    assert is_left == [False]
