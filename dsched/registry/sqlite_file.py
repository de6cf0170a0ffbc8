"""The registry in one SQLite file, for all dsched processes of one host. Synchronous core.

Each call is one transaction that first ends the leases that are over, so no process has to be alive
for that. Time is the host's monotonic clock, which all its processes share and which no change of
the wall clock moves; after a reboot it starts anew, so leases of an earlier boot end at once.

A file that was moved or deleted is made anew, a damaged one is set aside as `*.damaged`; both look
to everybody like lost leases, and everybody registers again. Revisions of a new file start at the
wall clock's seconds times 2**20, so that they go on rising.

Not for a network file system: SQLite's locks do not hold there.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsched.clock import Clock, wall_time_s
from dsched.errors import RegistryError
from dsched.registry.base import (
    ChangeKind,
    LeaseLostError,
    Listing,
    RegistryChange,
    RegistryEntry,
    WatchLostError,
)
from dsched.sqlite_wal import use_write_ahead_log

SCHEMA_VERSION = 1
MAX_HISTORY = 10_000
"""Changes kept for watchers. Fewer: a watcher that was away lists again. More: a larger file."""
BUSY_TIMEOUT_MS = 500
"""Time to wait for another process's transaction. Longer: a held file stalls renewals behind it."""
MAX_VALUE_BYTES = 256 * 1024
"""Largest value. The registry is for who is where; larger data belongs elsewhere."""
NS_PER_S = 1_000_000_000
DAMAGED_ERRORS = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
MEMORY = ":memory:"

SCHEMA = """
CREATE TABLE IF NOT EXISTS boot (id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    lease_id INTEGER PRIMARY KEY,
    ttl_ns INTEGER NOT NULL,
    expires_ns INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS leases_by_expiry ON leases (expires_ns);
CREATE TABLE IF NOT EXISTS entries (
    key TEXT PRIMARY KEY,
    value BLOB NOT NULL,
    create_revision INTEGER NOT NULL,
    mod_revision INTEGER NOT NULL,
    lease_id INTEGER
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS entries_by_lease ON entries (lease_id);
CREATE TABLE IF NOT EXISTS changes (
    revision INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    key TEXT NOT NULL,
    value BLOB
);
"""


class RegistryFile:
    """The registry's calls on one file. For one thread; raises `RegistryError`."""

    def __init__(
        self,
        path: str | Path,
        *,
        clock: Clock,
        boot_id: str,
        wall_time_s: Callable[[], int] = wall_time_s,
        max_history: int = MAX_HISTORY,
        create: bool = True,
    ) -> None:
        self._create = create
        self._path = str(path)
        self._clock = clock
        self._boot_id = boot_id
        self._wall_time_s = wall_time_s
        self._max_history = max_history
        self._connection: sqlite3.Connection | None = None
        self._inode: int | None = None

    def grant_lease(self, ttl_s: float) -> int:
        """Begin a lease; return its id, which no other lease of this file had."""
        if not ttl_s > 0:
            raise ValueError(f"a lease of {ttl_s} s has no time")
        ttl_ns = int(ttl_s * NS_PER_S)
        with self._transaction() as db:
            # An id is a revision: unlike a row number, it is not used again after a delete.
            lease_id = self._next_revision(db, ChangeKind.PUT, "", None)
            expires_ns = self._clock.now_ns() + ttl_ns
            db.execute("INSERT INTO leases VALUES (?, ?, ?)", (lease_id, ttl_ns, expires_ns))
        return lease_id

    def renew_lease(self, lease_id: int) -> None:
        """Start the lease's time anew."""
        with self._transaction() as db:
            self._check_lease(db, lease_id)
            db.execute(
                "UPDATE leases SET expires_ns = ? + ttl_ns WHERE lease_id = ?",
                (self._clock.now_ns(), lease_id),
            )

    def revoke_lease(self, lease_id: int) -> None:
        """End a lease and delete its keys."""
        with self._transaction() as db:
            self._end_lease(db, lease_id)

    def put(self, key: str, value: bytes, *, lease_id: int | None = None) -> int:
        """Set a key; return the revision."""
        with self._transaction() as db:
            return self._put(db, key, value, lease_id)

    def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease_id: int | None = None,
    ) -> int | None:
        """Set a key if its `mod_revision` is the expected one, or if it is missing for `None`."""
        with self._transaction() as db:
            row = db.execute("SELECT mod_revision FROM entries WHERE key = ?", (key,)).fetchone()
            if (row[0] if row is not None else None) != expected_revision:
                return None
            return self._put(db, key, value, lease_id)

    def delete(self, key: str) -> bool:
        """Delete a key; `False` if there was none."""
        with self._transaction() as db:
            return self._delete(db, key)

    def get(self, key: str) -> RegistryEntry | None:
        """Return a key's entry."""
        with self._transaction() as db:
            row = db.execute(f"{_SELECT} WHERE key = ?", (key,)).fetchone()
        return _to_entry(row) if row is not None else None

    def list_entries(self, prefix: str) -> Listing:
        """Return all entries whose key starts with `prefix`, sorted."""
        with self._transaction() as db:
            rows = db.execute(
                f"{_SELECT} WHERE substr(key, 1, ?) = ? ORDER BY key", (len(prefix), prefix)
            ).fetchall()
            revision = _revision(db)
        return Listing(entries=tuple(_to_entry(row) for row in rows), revision=revision)

    def read_changes(self, prefix: str, *, from_revision: int) -> tuple[list[RegistryChange], int]:
        """Return the changes from a revision on, and the revision to ask for next."""
        with self._transaction() as db:
            revision = _revision(db)
            (oldest,) = db.execute("SELECT MIN(revision) FROM changes").fetchone()
            if from_revision < oldest or from_revision > revision + 1:
                raise WatchLostError(
                    f"revision {from_revision} is not in {oldest}..{revision}; list again"
                )
            rows = db.execute(
                "SELECT kind, key, value, revision FROM changes WHERE revision >= ? AND key <> ''"
                " AND substr(key, 1, ?) = ? ORDER BY revision",
                (from_revision, len(prefix), prefix),
            ).fetchall()
        changes = [
            RegistryChange(kind=ChangeKind(kind), key=key, value=value, revision=number)
            for kind, key, value, number in rows
        ]
        return changes, revision + 1

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    # -- inside a transaction ----------------------------------------------------------------

    def _put(self, db: sqlite3.Connection, key: str, value: bytes, lease_id: int | None) -> int:
        if not key or len(value) > MAX_VALUE_BYTES:
            raise ValueError(f"key {key!r} with {len(value)} bytes; 1..{MAX_VALUE_BYTES} allowed")
        if lease_id is not None:
            self._check_lease(db, lease_id)
        revision = self._next_revision(db, ChangeKind.PUT, key, value)
        db.execute(
            "INSERT INTO entries VALUES (:key, :value, :revision, :revision, :lease)"
            " ON CONFLICT (key) DO UPDATE SET value = :value, mod_revision = :revision,"
            " lease_id = :lease",
            {"key": key, "value": value, "revision": revision, "lease": lease_id},
        )
        return revision

    def _delete(self, db: sqlite3.Connection, key: str) -> bool:
        if db.execute("DELETE FROM entries WHERE key = ?", (key,)).rowcount == 0:
            return False
        self._next_revision(db, ChangeKind.DELETED, key, None)
        return True

    def _check_lease(self, db: sqlite3.Connection, lease_id: int) -> None:
        found = db.execute("SELECT 1 FROM leases WHERE lease_id = ?", (lease_id,)).fetchone()
        if found is None:
            raise LeaseLostError(f"lease {lease_id} is over")

    def _end_lease(self, db: sqlite3.Connection, lease_id: int) -> None:
        keys = db.execute("SELECT key FROM entries WHERE lease_id = ? ORDER BY key", (lease_id,))
        for (key,) in keys.fetchall():
            self._delete(db, key)
        db.execute("DELETE FROM leases WHERE lease_id = ?", (lease_id,))

    def _end_leases_that_are_over(self, db: sqlite3.Connection) -> None:
        rows = db.execute(
            "SELECT lease_id FROM leases WHERE expires_ns <= ? ORDER BY lease_id",
            (self._clock.now_ns(),),
        )
        for (lease_id,) in rows.fetchall():
            self._end_lease(db, lease_id)

    def _next_revision(
        self, db: sqlite3.Connection, kind: ChangeKind, key: str, value: bytes | None
    ) -> int:
        revision = _revision(db) + 1
        db.execute("INSERT INTO changes VALUES (?, ?, ?, ?)", (revision, kind, key, value))
        db.execute("DELETE FROM changes WHERE revision <= ?", (revision - self._max_history,))
        return revision

    # -- the file ----------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            connection = self._open()
            connection.execute("BEGIN IMMEDIATE")
            try:
                self._end_leases_that_are_over(connection)
                yield connection
                connection.execute("COMMIT")
            finally:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
        except LeaseLostError:
            raise
        except (sqlite3.Error, OSError) as error:
            self._give_up_file(error)
            raise RegistryError(f"{self._path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None and self._inode == _inode_of(self._path):
            return self._connection
        self.close()
        if not self._create and _inode_of(self._path) is None:
            raise RegistryError(f"{self._path}: no such registry; is dsched running with this one?")
        if self._path != MEMORY:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self._path, isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1e3, check_same_thread=False
        )
        self._inode = _inode_of(self._path)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _prepare(self, db: sqlite3.Connection) -> None:
        use_write_ahead_log(db, timeout_s=BUSY_TIMEOUT_MS / 1e3)
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("BEGIN IMMEDIATE")
        try:
            self._prepare_schema(db)
            self._forget_earlier_boot(db)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        self._inode = _inode_of(self._path)

    def _prepare_schema(self, db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise RegistryError(
                f"{self._path} has registry format {version}; this dsched writes {SCHEMA_VERSION}"
            )
        if version == 0:
            for statement in SCHEMA.split(";"):
                db.execute(statement)
            first = self._wall_time_s() << 20
            db.execute("INSERT INTO changes VALUES (?, ?, '', NULL)", (first, ChangeKind.PUT))
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _forget_earlier_boot(self, db: sqlite3.Connection) -> None:
        row = db.execute("SELECT id FROM boot").fetchone()
        if row is not None and row[0] == self._boot_id:
            return
        for (lease_id,) in db.execute("SELECT lease_id FROM leases ORDER BY lease_id").fetchall():
            self._end_lease(db, lease_id)
        db.execute("DELETE FROM boot")
        db.execute("INSERT INTO boot VALUES (?)", (self._boot_id,))

    def _give_up_file(self, error: Exception) -> None:
        """Open anew next time; a damaged file is set aside, if it is still the one we opened."""
        if self._path == MEMORY:
            return
        self.close()
        is_damaged = getattr(error, "sqlite_errorcode", None) in DAMAGED_ERRORS
        if not is_damaged or self._inode != _inode_of(self._path):
            return
        for suffix in ("", "-wal", "-shm"):
            old = Path(self._path + suffix)
            if old.exists():
                old.rename(f"{self._path}.damaged{suffix}")


_SELECT = "SELECT key, value, create_revision, mod_revision, lease_id FROM entries"


def _to_entry(row: tuple[str, bytes, int, int, int | None]) -> RegistryEntry:
    key, value, create_revision, mod_revision, lease_id = row
    return RegistryEntry(
        key=key,
        value=value,
        create_revision=create_revision,
        mod_revision=mod_revision,
        lease_id=lease_id,
    )


def _revision(db: sqlite3.Connection) -> int:
    (revision,) = db.execute("SELECT MAX(revision) FROM changes").fetchone()
    return int(revision)


def _inode_of(path: str) -> int | None:
    try:
        return os.stat(path).st_ino if path != MEMORY else None
    except FileNotFoundError:
        return None
