"""The token journal on disk: a SQLite file that a restarted dsched reads.

In: the same calls as `MemoryJournal`, from the controller's thread. Out: one transaction every
`flush_interval_s`, written by a thread of its own. A request that begins and ends within one
interval is one row; the tokens that all others got in an interval are one row together. So that
nobody has to read through many of these to find one request, its tokens are gathered in a row of
its own at its end, and every `GATHER_FLUSHES` flushes before it.

The thread that records never waits for the disk. It only lists the entries that changed otherwise
than by tokens, and the tokens of those that the file has; from a listed entry the writer copies
what the file lacks. Most of what happens is tokens, and the writer, whose work in Python holds up
the thread that records, passes them on without looking at them one by one. So memory is always
ahead of the file, by at most the flush interval while `status().is_durable` is true, and a file
that was lost can be written again from memory. When the file cannot be written (locked, full,
truncated, deleted), dsched serves on, `status()` says why, and the writer tries again once a
second. A damaged file is set aside under the name `*.damaged`, never deleted.

A killed process loses at most the flush interval; a power cut also what the system had not written,
unless `sync_full`. Several processes may share one file; each row carries its owner.
"""

import os
import sqlite3
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from dsched.clock import wall_time_s
from dsched.drivers.wire import SamplingParams
from dsched.errors import JournalError
from dsched.faults.journal import (
    AttemptRecord,
    JournalEntry,
    JournalStatus,
    MemoryJournal,
    RequestRecord,
    TokenPiece,
)
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId
from dsched.sqlite_wal import use_write_ahead_log

SCHEMA_VERSION = 6
READABLE_VERSIONS = (5, SCHEMA_VERSION)
"""Format 5 had the same tables, but no token twice, as 6 may (see `_join`)."""
RETRY_INTERVAL_S = 1.0
EXPIRE_INTERVAL_S = 10
MAX_EXPIRED_PER_PASS = 512
"""Finished requests deleted in one transaction; more would hold the file for long."""
BUSY_TIMEOUT_MS = 1_000
"""Time to wait for another process's transaction before the file counts as locked."""
CLOSE_TIMEOUT_S = 5.0
DAMAGED_ERRORS = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    row_id INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    model TEXT NOT NULL,
    sampling TEXT NOT NULL,
    opened_s INTEGER NOT NULL,
    finished_s INTEGER,
    finish_reason TEXT,
    prompt BLOB NOT NULL,
    first_attempts TEXT NOT NULL,
    first_tokens BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS requests_by_id ON requests (request_id);
CREATE TABLE IF NOT EXISTS attempts (
    row_id INTEGER NOT NULL REFERENCES requests ON DELETE CASCADE,
    epoch INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    engine_id TEXT NOT NULL,
    dp_rank INTEGER NOT NULL,
    first_index INTEGER NOT NULL,
    prefill_engine_id TEXT,
    prefill_dp_rank INTEGER,
    PRIMARY KEY (row_id, epoch)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tokens (
    row_id INTEGER NOT NULL REFERENCES requests ON DELETE CASCADE,
    first_index INTEGER NOT NULL,
    token_ids BLOB NOT NULL,
    PRIMARY KEY (row_id, first_index)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS flushes (
    flush_id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner TEXT NOT NULL,
    tokens BLOB NOT NULL
);
"""
"""Token ids are 32-bit numbers; `sampling` and `first_attempts` are JSON. What a request had when
it was first written is in its own row; `attempts` and `tokens` have what came later, except for
the newest tokens of open requests, which are in `flushes` as (row_id, first_index, token ids) in
MessagePack."""

GATHER_FLUSHES = 16
"""Flushes after which the tokens in them are gathered by request. Below: more rows are written.
Above: more is read through to find the tokens of a request that was open when dsched died."""

CHUNK_ROWS = 64
"""Rows of one statement at most: of the widest table they stay below the 999 values that an old
SQLite takes."""
CACHED_STATEMENTS = 4 * CHUNK_ROWS
"""Prepared statements to keep: one for each number of rows and table."""

UPDATE_ENDS = (
    "UPDATE requests SET finished_s = ended.at_s, finish_reason = ended.reason FROM"
    " (SELECT json_extract(value, '$[0]') AS at_s, json_extract(value, '$[1]') AS reason,"
    " json_extract(value, '$[2]') AS row_id FROM json_each(?)) AS ended"
    " WHERE requests.row_id = ended.row_id"
)

_encode_json = msgspec.json.Encoder().encode
_encode_pieces = msgspec.msgpack.Encoder().encode
_decode_pieces = msgspec.msgpack.Decoder(list[TokenPiece]).decode


class SqliteJournal(MemoryJournal):
    """A `MemoryJournal` that a writer thread copies into a SQLite file.

    Never raises for the file's state; ask `status()`. Open requests are held in memory, ended ones
    until the file has them.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        owner: str = "",
        flush_interval_s: float = 0.02,
        max_batch_requests: int = 4_096,
        max_pending_requests: int = 65_536,
        max_retained_requests: int = 10_000,
        retention_s: float = 3_600.0,
        sync_full: bool = False,
        wall_time_s: Callable[[], int] = wall_time_s,
    ) -> None:
        super().__init__(max_retained_requests=max_retained_requests)
        if max_batch_requests < 1:
            raise ValueError(f"max_batch_requests {max_batch_requests} is below 1")
        self._file = JournalFile(
            Path(path), owner=owner, sync_full=sync_full, wall_time_s=wall_time_s
        )
        self._flush_interval_s = flush_interval_s
        self._max_batch_requests = max_batch_requests
        self._max_pending_requests = max_pending_requests
        self._retention_s = retention_s
        # Shared with the writer. Appending and popping at the ends needs no lock; an entry that is
        # in it twice is written once.
        self._dirty: deque[JournalEntry] = deque()
        self._pieces: list[TokenPiece] = []
        # Shared with the writer, under the lock.
        self._lock = threading.Lock()
        self._ended: dict[RequestId, JournalEntry] = {}
        self._waiters: list[threading.Event] = []
        self._degraded_reason: str | None = None
        self._num_write_errors = 0
        self._num_dropped_requests = 0
        self._last_expire_s: int | None = None
        self._has_work = threading.Event()
        self._stop = threading.Event()
        self._open_file()
        self._known_ids: dict[RequestId, None] = dict.fromkeys(
            _read_ids(self._file.path, max_retained_requests)
        )
        """Ids that the file may have, oldest first; for reading without looking."""
        self._writer = threading.Thread(target=self._run, name="dsched-journal", daemon=True)
        self._writer.start()

    def read_request(
        self, request_id: RequestId, *, is_known_only: bool = False
    ) -> RequestRecord | None:
        """Return a request from memory, else the last one of that id from the file.

        A look into the file costs 0.15 ms; with `is_known_only` most ids need none.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            with self._lock:
                entry = self._ended.get(request_id)
        if entry is not None:
            return entry.to_record()
        if is_known_only and request_id not in self._known_ids:
            return None
        try:
            return read_request(self._file.path, request_id)
        except JournalError:
            return None

    def status(self) -> JournalStatus:
        """Return how the file keeps up. O(open requests)."""
        with self._lock:
            reason = self._degraded_reason
        return JournalStatus(
            degraded_reason=reason,
            is_durable=reason is None,
            num_open_requests=len(self._entries),
            num_recorded_tokens=self._num_recorded_tokens(),
            num_fenced_tokens=self._num_fenced_tokens,
            num_pending_requests=len(self._dirty) + len({row_id for row_id, _, _ in self._pieces}),
            num_write_errors=self._num_write_errors,
            num_dropped_requests=self._num_dropped_requests,
        )

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the file has all that was recorded before; `False` if it could not be."""
        done = threading.Event()
        with self._lock:
            self._waiters.append(done)
            self._has_work.set()
        return done.wait(timeout_s) and self._degraded_reason is None

    def close(self) -> None:
        """Write what is pending and end the writer thread."""
        self._stop.set()
        self._has_work.set()
        self._writer.join(CLOSE_TIMEOUT_S)

    # -- the recording thread ----------------------------------------------------------------

    def _on_opened(self, entry: JournalEntry) -> None:
        entry.is_dirty = False
        self._on_changed(entry)

    def _on_changed(self, entry: JournalEntry) -> None:
        # The writer clears `is_dirty` before it reads the entry: what was recorded before a true
        # value was seen here is therefore read.
        if entry.is_dirty:
            return
        entry.is_dirty = True
        self._dirty.append(entry)
        if not self._has_work.is_set():
            self._has_work.set()

    def _on_tokens(self, piece: TokenPiece) -> None:
        pieces = self._pieces
        pieces.append(piece)
        if len(pieces) == 1:  # the first since the last flush; see `_take_pieces`
            self._has_work.set()

    def _on_finished(self, entry: JournalEntry) -> None:
        self._known_ids[entry.request_id] = None
        if len(self._known_ids) > self._max_retained_requests:
            del self._known_ids[next(iter(self._known_ids))]
        with self._lock:
            if entry.row_id is None and len(self._ended) >= self._max_pending_requests:
                # Entries that the file already knows are kept: without their end a restarted
                # dsched would take them for unfinished. There are no more of them than were open.
                entry.is_abandoned = True
                self._num_dropped_requests += 1
                return
            self._ended[entry.request_id] = entry
        self._on_changed(entry)

    # -- the writer thread -------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._has_work.wait()
            if not self._waiters:
                self._stop.wait(self._flush_interval_s)
            if not self._write_all():
                self._stop.wait(RETRY_INTERVAL_S)
                self._has_work.set()
        self._write_all()
        self._file.close()

    def _write_all(self) -> bool:
        """Write what changed before; `False` after an error. Wakes everyone in `flush`."""
        with self._lock:
            # Together: a `flush` that is served here must not wake the writer for nothing.
            self._has_work.clear()
            waiters, self._waiters = self._waiters, []
        is_written = self._open_file()
        # First the tokens: the entries listed by now have the attempts that these came from. What
        # changes meanwhile waits for the next flush: under load there is always something.
        pieces = self._take_pieces()
        num_left = len(self._dirty)
        while is_written and (num_left > 0 or pieces):
            num_taken = min(num_left, self._max_batch_requests)
            num_left -= num_taken
            # The tokens with the last batch: what comes before them is in the file then.
            is_written = self._write_batch(
                self._take_batch(num_taken), pieces if num_left == 0 else []
            )
            if num_left == 0:
                pieces = []
        if is_written:
            is_written = self._keep_house()
        with self._lock:
            self._degraded_reason = None if is_written else self._degraded_reason
        for waiter in waiters:
            waiter.set()
        return is_written

    def _open_file(self) -> bool:
        try:
            is_another_file = self._file.open()
        except Exception as error:  # the door, see `_write_batch`
            self._note_failure(error, [])
            return False
        if is_another_file:
            self._write_everything_again()
        return True

    def _take_pieces(self) -> list[TokenPiece]:
        num_pieces = len(self._pieces)
        pieces = self._pieces[:num_pieces]
        del self._pieces[:num_pieces]
        if self._pieces:  # came meanwhile, and was not the first then
            self._has_work.set()
        return pieces

    def _take_batch(self, num_entries: int) -> list[JournalEntry]:
        batch: dict[JournalEntry, None] = {}
        for _ in range(num_entries):
            entry = self._dirty.popleft()
            entry.is_dirty = False
            if not entry.is_abandoned:
                batch[entry] = None
        return list(batch)

    def _write_batch(self, batch: list[JournalEntry], pieces: list[TokenPiece]) -> bool:
        try:
            ended = self._file.write(batch, pieces)
        except Exception as error:
            # The door: also a fault of ours must not end the thread, and nobody the wiser.
            self._note_failure(error, batch)
            return False
        with self._lock:
            for entry in ended:
                if self._ended.get(entry.request_id) is entry:
                    del self._ended[entry.request_id]
            for entry in batch:
                if entry.is_abandoned:  # its opening was under way when its end was dropped
                    entry.is_abandoned = False
                    self._num_dropped_requests -= 1
                    self._on_changed(entry)
        for entry in self._file.take_outgrown():
            self._on_changed(entry)
        return True

    def _note_failure(self, error: Exception, batch: list[JournalEntry]) -> None:
        self._file.close()
        if getattr(error, "sqlite_errorcode", None) in DAMAGED_ERRORS:
            self._file.set_aside()
        with self._lock:
            self._num_write_errors += 1
            self._degraded_reason = f"{self._file.path}: {error}"
        # The tokens that were listed are taken from the entries, at the next try.
        for entry in {**dict.fromkeys(batch), **self._file.open_entries}:
            self._on_changed(entry)

    def _write_everything_again(self) -> None:
        """The file is a new one: list all that memory holds."""
        for entry in [*self._entries.values(), *self._ended.values()]:
            entry.forget_file()
            self._on_changed(entry)

    def _keep_house(self) -> bool:
        """Delete what is too old, now and then."""
        now_s = self._file.wall_time_s()
        if self._last_expire_s is not None and now_s - self._last_expire_s < EXPIRE_INTERVAL_S:
            return True
        self._last_expire_s = now_s
        try:
            self._file.expire(
                max_retained_requests=self._max_retained_requests, retention_s=self._retention_s
            )
        except Exception as error:  # the door, see `_write_batch`
            self._note_failure(error, [])
            return False
        return True


class JournalFile:
    """The writing end of one SQLite file. For one thread at a time; raises `sqlite3.Error`,
    `OSError` and `JournalError`."""

    def __init__(
        self, path: Path, *, owner: str, sync_full: bool, wall_time_s: Callable[[], int]
    ) -> None:
        self.path = path
        self._log_path = Path(f"{path}-wal")
        self.owner = owner
        self.wall_time_s = wall_time_s
        self._sync_full = sync_full
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None
        self._log_inode: int | None = None
        """Of the write-ahead log, which stays the same file while a connection is open."""
        self._flush_ids: list[int] = []
        """Rows of `flushes` that are ours and not gathered yet."""
        self._last_row_id = 0
        """Largest that an entry ever had, in this file or one before it: tokens may still be listed
        for rows of a lost file, which must not be others in this one."""
        self.open_entries: dict[JournalEntry, None] = {}
        """Entries in the file without their end."""
        self._outgrown: list[JournalEntry] = []
        """New entries that got tokens while they were written."""

    def open(self) -> bool:
        """Open the file if it is not open; `True` if it is another one than before.

        A file deleted under us, or its write-ahead log, is noticed here: SQLite itself would write
        on into nothing.
        """
        inode = _inode_of(self.path)
        if self._connection is not None and inode == self._inode:
            if _inode_of(self._log_path) == self._log_inode:
                return False
            self._leave_lost_log()
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self.path,
            isolation_level=None,
            check_same_thread=False,
            timeout=BUSY_TIMEOUT_MS / 1e3,
            cached_statements=CACHED_STATEMENTS,
        )
        try:
            is_new = self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        # The number alone does not tell: a new file often gets the one that the lost file had.
        is_another = self._inode is not None and (is_new or inode != self._inode)
        self._connection = connection
        self._inode, self._log_inode = _inode_of(self.path), _inode_of(self._log_path)
        if is_another:
            self._flush_ids, self.open_entries = [], {}
        return is_another

    def _prepare(self, connection: sqlite3.Connection) -> bool:
        """Make the tables where they are missing; return whether they were."""
        use_write_ahead_log(connection, timeout_s=BUSY_TIMEOUT_MS / 1e3)
        connection.execute(f"PRAGMA synchronous = {'FULL' if self._sync_full else 'NORMAL'}")
        connection.execute("PRAGMA foreign_keys = ON")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version not in (0, *READABLE_VERSIONS):
            rule = f"this dsched writes {SCHEMA_VERSION}"
            if version < SCHEMA_VERSION:
                rule += "; move the file away and start again"
            raise JournalError(f"{self.path} has journal format {version}; {rule}")
        if version == 0:
            connection.executescript(SCHEMA)
        if version != SCHEMA_VERSION:
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return bool(version == 0)

    def _leave_lost_log(self) -> None:
        """Close a file whose write-ahead log was deleted.

        SQLite still has the log, and copies it to the file when the last connection is closed: then
        it also deletes the shared memory beside, and nothing was lost. With others still in the
        file, their log and a new one would not go together, which damages it. So it is set aside;
        they notice that, and all begin the new file together.
        """
        assert self._connection is not None
        shared = Path(f"{self.path}-shm")
        was_there = shared.exists()
        with suppress(sqlite3.Error):  # for whoever looks into the file that is set aside
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self.close()
        is_whole = was_there and not shared.exists()
        if not is_whole and _inode_of(self.path) == self._inode:  # nobody was faster
            self.set_aside()

    def close(self) -> None:
        """Close the file; `open` opens it again."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with suppress(sqlite3.Error):  # the file is gone; what was committed was committed
                connection.close()

    def set_aside(self) -> None:
        """Rename a damaged file, so that a new one takes its place."""
        for suffix in ("", "-wal", "-shm"):
            old = Path(f"{self.path}{suffix}")
            if old.exists():
                old.rename(f"{self.path}.damaged{suffix}")

    def write(self, batch: list[JournalEntry], pieces: list[TokenPiece]) -> list[JournalEntry]:
        """Write what the file lacks of each entry, and `pieces`, in one transaction; return the
        entries that ended."""
        assert self._connection is not None
        connection = self._connection
        gathers = len(self._flush_ids) >= GATHER_FLUSHES
        rows = _Rows(owner=self.owner, now_s=self.wall_time_s(), pieces=pieces)
        new = [entry for entry in batch if entry.row_id is None]
        for entry in batch:
            if entry.row_id is not None:
                rows.add_rest(entry, row_id=entry.row_id)
        if rows.is_only_tokens and not new and not gathers:
            flush_id = rows.insert(connection)  # one statement is a transaction by itself
        else:
            flush_id = self._write_together(connection, rows, new, gathers=gathers)
        for entry, row_id, num_attempts, num_tokens in rows.writes:
            entry.num_attempts_written = num_attempts
            entry.num_own_tokens = num_tokens
            if entry.row_id is None:
                entry.row_id = row_id
                self.open_entries[entry] = None
                if len(entry.tokens) > num_tokens:
                    self._outgrown.append(entry)
        for entry in rows.ended:
            self.open_entries.pop(entry, None)  # listed again when its end came meanwhile
        if gathers:
            self._flush_ids = []
        if flush_id is not None:
            self._flush_ids.append(flush_id)
        return rows.ended

    def take_outgrown(self) -> list[JournalEntry]:
        """Return the new entries whose first tokens the file lacks, once each."""
        outgrown, self._outgrown = self._outgrown, []
        return outgrown

    def _write_together(
        self,
        connection: sqlite3.Connection,
        rows: "_Rows",
        new: list[JournalEntry],
        *,
        gathers: bool,
    ) -> int | None:
        connection.execute("BEGIN IMMEDIATE")
        try:
            if new:
                first_row_id = max(_last_row_id(connection), self._last_row_id) + 1
                for row_id, entry in enumerate(new, first_row_id):
                    rows.add_new(entry, row_id=row_id)
                self._last_row_id = first_row_id + len(new) - 1
            if gathers:
                rows.gather(self.open_entries)
                self._delete_flushes(connection)
            flush_id = rows.insert(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return flush_id

    def _delete_flushes(self, connection: sqlite3.Connection) -> None:
        # Between ours may be those of others, and before them those of one that died.
        connection.execute(
            "DELETE FROM flushes WHERE flush_id BETWEEN ? AND ? AND owner = ?",
            (self._flush_ids[0], self._flush_ids[-1], self.owner),
        )

    def expire(self, *, max_retained_requests: int, retention_s: float) -> None:
        """Delete finished requests that are too many or too old, and what other owners left open
        for that long."""
        assert self._connection is not None
        cutoff_s = self.wall_time_s() - int(retention_s)
        self._connection.execute(
            "DELETE FROM requests WHERE row_id IN (SELECT row_id FROM requests WHERE"
            " (finished_s IS NOT NULL AND (finished_s < :cutoff OR row_id <= COALESCE(("
            "   SELECT row_id FROM requests WHERE finished_s IS NOT NULL"
            "   ORDER BY row_id DESC LIMIT 1 OFFSET :retained), -1)))"
            " OR (finished_s IS NULL AND owner <> :owner AND opened_s < :cutoff)"
            " ORDER BY row_id LIMIT :limit)",
            {
                "cutoff": cutoff_s,
                "retained": max_retained_requests,
                "owner": self.owner,
                "limit": MAX_EXPIRED_PER_PASS,
            },
        )
        self._connection.execute(
            "DELETE FROM flushes WHERE owner <> ? AND owner NOT IN"
            " (SELECT owner FROM requests WHERE finished_s IS NULL)",
            (self.owner,),
        )


class _Rows:
    """What one transaction writes, by table.

    Many rows go into one statement: SQLite gives up Python's lock for every statement, and the
    thread that serves tokens pays for each time it gets it back.
    """

    def __init__(self, *, owner: str, now_s: int, pieces: list[TokenPiece]) -> None:
        self._owner = owner
        self._now_s = now_s
        self._pieces = pieces
        self._requests: list[tuple[Any, ...]] = []
        self._attempts: list[tuple[Any, ...]] = []
        self._tokens: list[TokenPiece] = []
        self._ends: list[tuple[int, str, int]] = []
        self.writes: list[tuple[JournalEntry, int, int, int]] = []
        """Entry, its row, and how many attempts and tokens its own rows then have."""
        self.ended: list[JournalEntry] = []

    def add_new(self, entry: JournalEntry, *, row_id: int) -> None:
        """List all of an entry that the file does not know."""
        # Read in this order: an end is written only with all tokens, tokens with their attempt.
        finish_reason = entry.finish_reason
        num_tokens = len(entry.tokens)
        num_attempts = len(entry.attempts)
        attempts = [_attempt_columns(each) for each in entry.attempts[:num_attempts]]
        self._requests.append(
            (
                row_id,
                entry.request_id,
                self._owner,
                entry.model,
                _encode_json(entry.sampling).decode(),
                self._now_s,
                None if finish_reason is None else self._now_s,
                finish_reason,
                array("i", entry.prompt_token_ids).tobytes(),
                _encode_json(attempts).decode(),
                entry.tokens[:num_tokens].tobytes(),
            )
        )
        if finish_reason is not None:
            self.ended.append(entry)
        self.writes.append((entry, row_id, num_attempts, num_tokens))

    def add_rest(self, entry: JournalEntry, *, row_id: int) -> None:
        """List what the rows lack of an entry that the file knows."""
        finish_reason = entry.finish_reason  # in the same order
        num_tokens = len(entry.tokens)
        num_attempts = len(entry.attempts)
        for each in entry.attempts[entry.num_attempts_written : num_attempts]:
            self._attempts.append((row_id, *_attempt_columns(each)))
        self._add_tokens(entry, row_id, num_tokens)
        if finish_reason is not None:
            self.ended.append(entry)
            self._ends.append((self._now_s, finish_reason, row_id))
        self.writes.append((entry, row_id, num_attempts, num_tokens))

    @property
    def is_only_tokens(self) -> bool:
        """Nothing but one row of `flushes` is written."""
        return not (self._requests or self._attempts or self._tokens or self._ends)

    def gather(self, open_entries: Iterable[JournalEntry]) -> None:
        """Give each request a row of its own for what is in the flushes, this one included."""
        listed = {entry for entry, _, _, _ in self.writes}
        for entry in open_entries:
            num_tokens = len(entry.tokens)
            if num_tokens > entry.num_own_tokens and entry not in listed:
                assert entry.row_id is not None
                self._add_tokens(entry, entry.row_id, num_tokens)
                self.writes.append((entry, entry.row_id, entry.num_attempts_written, num_tokens))
        self._pieces = []

    def _add_tokens(self, entry: JournalEntry, row_id: int, num_tokens: int) -> None:
        first_index = entry.num_own_tokens
        if num_tokens > first_index:
            token_ids = entry.tokens[first_index:num_tokens].tobytes()
            self._tokens.append((row_id, first_index, token_ids))

    def insert(self, connection: sqlite3.Connection) -> int | None:
        """Write all rows; return the id of the one of all new tokens, if there are any."""
        _insert(connection, "requests", self._requests)
        _insert(connection, "attempts", self._attempts)
        _insert(connection, "tokens", self._tokens)
        if self._ends:
            connection.execute(UPDATE_ENDS, (_encode_json(self._ends).decode(),))
        if not self._pieces:
            return None
        return connection.execute(
            "INSERT INTO flushes (owner, tokens) VALUES (?, ?)",
            (self._owner, _encode_pieces(self._pieces)),
        ).lastrowid


def _insert(connection: sqlite3.Connection, table: str, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows that have all columns of `table`, many by one statement."""
    for start in range(0, len(rows), CHUNK_ROWS):
        chunk = rows[start : start + CHUNK_ROWS]
        values = list(chain.from_iterable(chunk))
        connection.execute(_insert_statement(table, len(rows[0]), len(chunk)), values)


@cache
def _insert_statement(table: str, num_columns: int, num_rows: int) -> str:
    row = f"({', '.join('?' * num_columns)})"
    return f"INSERT INTO {table} VALUES {', '.join([row] * num_rows)}"


_AttemptColumns = tuple[int, str, str, int, int, str | None, int | None]


def _attempt_columns(attempt: AttemptRecord) -> _AttemptColumns:
    prefill = attempt.prefill or (None, None)
    return (attempt.epoch, attempt.attempt_id, *attempt.target, attempt.first_index, *prefill)


def _last_row_id(connection: sqlite3.Connection) -> int:
    """The largest row id ever given; ids are not used again, also after deletions."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'requests'").fetchone()
    return int(row[0]) if row is not None else 0


def read_request(path: str | Path, request_id: RequestId) -> RequestRecord | None:
    """Return the last request of that id in the file. Raises `JournalError` if there is no reading
    it."""
    records = _read(path, "request_id = ? ORDER BY row_id DESC LIMIT 1", (request_id,))
    return next(records, None)


def _read_ids(path: Path, limit: int) -> Iterator[RequestId]:
    """Yield the ids of the newest requests in the file, oldest first; none if it cannot be read."""
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=0)) as connection:
            rows = connection.execute(
                "SELECT request_id FROM requests ORDER BY row_id DESC LIMIT ?", (limit,)
            ).fetchall()
    except sqlite3.Error:
        return
    for (request_id,) in reversed(rows):
        yield RequestId(request_id)


def read_unfinished(path: str | Path, *, owner: str | None = None) -> Iterator[RequestRecord]:
    """Yield the requests that have no end, oldest first; of one owner if it is given.

    Whether an owner is still alive, and its requests therefore in good hands, is the registry's to
    say. Raises `JournalError` if the file cannot be read.
    """
    if owner is None:
        return _read(path, "finish_reason IS NULL ORDER BY row_id", ())
    return _read(path, "finish_reason IS NULL AND owner = ? ORDER BY row_id", (owner,))


def _read(path: str | Path, where: str, values: tuple[str, ...]) -> Iterator[RequestRecord]:
    uri = f"{Path(path).absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=0)) as connection:
            # One read transaction: a request and its tokens are from the same moment.
            connection.execute("BEGIN")
            rows = connection.execute(
                "SELECT row_id, owner, request_id, model, sampling, finish_reason, prompt,"
                f" first_attempts, first_tokens FROM requests WHERE {where}",
                values,
            )
            pieces = _Pieces(connection)
            for row in rows:
                yield _to_record(connection, pieces, *row)
    except (sqlite3.Error, msgspec.DecodeError, ValueError) as error:
        raise JournalError(f"{path}: {error}") from error


class _Pieces:
    """The tokens in `flushes` of one read transaction, by request. Each owner's are read once."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._of_owner: dict[str, dict[int, list[tuple[int, bytes]]]] = {}

    def of(self, owner: str, row_id: int) -> list[tuple[int, bytes]]:
        """Return (first index, token ids) of an open request, in order."""
        if owner not in self._of_owner:
            self._of_owner[owner] = self._read(owner)
        return self._of_owner[owner].get(row_id, [])

    def _read(self, owner: str) -> dict[int, list[tuple[int, bytes]]]:
        rows = self._connection.execute(
            "SELECT tokens FROM flushes WHERE owner = ? ORDER BY flush_id", (owner,)
        )
        found: dict[int, list[tuple[int, bytes]]] = {}
        for (content,) in rows:
            for row_id, first_index, token_ids in _decode_pieces(content):
                found.setdefault(row_id, []).append((first_index, token_ids))
        return found


def _to_record(
    connection: sqlite3.Connection,
    pieces: _Pieces,
    row_id: int,
    owner: str,
    request_id: str,
    model: str,
    sampling: str,
    finish_reason: str | None,
    prompt: bytes,
    first_attempts: str,
    first_tokens: bytes,
) -> RequestRecord:
    prompt_token_ids = tuple(array("i", prompt))
    parts = connection.execute(
        "SELECT first_index, token_ids FROM tokens WHERE row_id = ? ORDER BY first_index",
        (row_id,),
    ).fetchall()
    if finish_reason is None:
        parts += pieces.of(owner, row_id)
    attempts = [
        *msgspec.json.decode(first_attempts, type=list[_AttemptColumns]),
        *connection.execute(
            "SELECT epoch, attempt_id, engine_id, dp_rank, first_index, prefill_engine_id,"
            " prefill_dp_rank FROM attempts"
            " WHERE row_id = ? ORDER BY epoch",
            (row_id,),
        ),
    ]
    return RequestRecord(
        request_id=RequestId(request_id),
        model=model,
        prompt_token_ids=prompt_token_ids,
        num_prompt_tokens=len(prompt_token_ids),
        sampling=msgspec.json.decode(sampling, type=SamplingParams),
        attempts=tuple(
            AttemptRecord(
                attempt_id=AttemptId(attempt_id),
                epoch=epoch,
                target=RankId(EngineId(engine_id), DpRank(dp_rank)),
                first_index=first_index,
                prefill=None
                if prefill_engine_id is None
                else RankId(EngineId(prefill_engine_id), DpRank(prefill_dp_rank)),
            )
            for (
                epoch,
                attempt_id,
                engine_id,
                dp_rank,
                first_index,
                prefill_engine_id,
                prefill_dp_rank,
            ) in attempts
        ),
        output_token_ids=tuple(_join(request_id, first_tokens, parts)),
        finish_reason=finish_reason,
    )


def _join(request_id: str, first_tokens: bytes, parts: list[tuple[int, bytes]]) -> "array[int]":
    """Return the tokens in order. Some may be there twice: those that were recorded while a row
    was written are in it and in a flush."""
    tokens = array("i", first_tokens)
    for first_index, token_ids in parts:
        num_known = len(tokens) - first_index
        if num_known < 0:
            raise JournalError(
                f"request {request_id}: tokens from {first_index}, expected {len(tokens)}"
            )
        tokens.frombytes(token_ids[num_known * tokens.itemsize :])
    return tokens


def _inode_of(path: Path) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None
