"""RegistryFile: leases, revisions and history, on a clock that the test moves."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier

import pytest

from dsched.clock import ManualClock
from dsched.errors import RegistryError
from dsched.registry import ChangeKind, LeaseLostError, WatchLostError
from dsched.registry.sqlite_file import MAX_VALUE_BYTES, RegistryFile

NS_PER_S = 1_000_000_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NS_PER_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "registry.sqlite3"


@pytest.fixture
def file(path: Path, clock: ManualClock) -> RegistryFile:
    return open_file(path, clock)


def open_file(
    path: Path, clock: ManualClock, *, boot: str = "boot", **options: int
) -> RegistryFile:
    return RegistryFile(path, clock=clock, boot_id=boot, wall_time_s=lambda: 1_000, **options)


def keys(file: RegistryFile, prefix: str = "") -> list[str]:
    return [entry.key for entry in file.list_entries(prefix).entries]


def test_listing_is_sorted_and_by_prefix(file: RegistryFile) -> None:
    """A prefix is plain text: no sign in it has a meaning."""
    for key in ("b/2", "a%", "b/1", "a_", "ab"):
        file.put(key, b"v")

    assert keys(file) == ["a%", "a_", "ab", "b/1", "b/2"]
    assert keys(file, "b/") == ["b/1", "b/2"]
    assert keys(file, "a_") == ["a_"]
    assert keys(file, "a%") == ["a%"]


def test_revisions_rise_and_tell_creation_from_change(file: RegistryFile) -> None:
    """A key's creation fences: a key made anew has a higher one."""
    first = file.put("k", b"1")
    second = file.put("k", b"2")
    entry = file.get("k")
    file.delete("k")
    third = file.put("k", b"3")
    again = file.get("k")

    assert first < second < third
    assert entry is not None
    assert again is not None
    assert (entry.create_revision, entry.mod_revision) == (first, second)
    assert (again.create_revision, again.mod_revision) == (third, third)


def test_lease_that_is_not_renewed_takes_its_keys_along(
    file: RegistryFile, clock: ManualClock
) -> None:
    """To the nanosecond: alive before the end, gone at it; keys without a lease stay."""
    lease = file.grant_lease(10)
    file.put("leased", b"v", lease_id=lease)
    file.put("free", b"v")
    clock.advance_to(11 * NS_PER_S - 1)
    before = keys(file)
    clock.advance_to(11 * NS_PER_S)

    assert before == ["free", "leased"]
    assert keys(file) == ["free"]


def test_renewal_starts_the_time_anew(file: RegistryFile, clock: ManualClock) -> None:
    """Renewed a moment before its end, a lease lives a whole length more."""
    lease = file.grant_lease(10)
    file.put("leased", b"v", lease_id=lease)
    clock.advance_to(11 * NS_PER_S - 1)
    file.renew_lease(lease)
    clock.advance_to(21 * NS_PER_S - 2)
    before = keys(file)
    clock.advance_to(21 * NS_PER_S - 1)

    assert before == ["leased"]
    assert keys(file) == []


def test_lease_that_is_over_cannot_be_used(file: RegistryFile, clock: ManualClock) -> None:
    """Neither renewed nor put under; its number is never given again."""
    lease = file.grant_lease(1)
    clock.advance_to(3 * NS_PER_S)

    with pytest.raises(LeaseLostError, match=f"lease {lease} is over"):
        file.renew_lease(lease)
    with pytest.raises(LeaseLostError):
        file.put("k", b"v", lease_id=lease)
    assert file.grant_lease(1) > lease
    assert keys(file) == []


def test_revoked_lease_deletes_at_once(file: RegistryFile) -> None:
    """A process that leaves takes its keys along; leaving twice is no error."""
    lease = file.grant_lease(10)
    file.put("k", b"v", lease_id=lease)
    file.revoke_lease(lease)
    file.revoke_lease(lease)

    assert keys(file) == []


def test_key_moves_to_the_lease_of_its_last_put(file: RegistryFile, clock: ManualClock) -> None:
    """An engine taken over by another process does not die with the first one."""
    old, new = file.grant_lease(5), file.grant_lease(50)
    file.put("k", b"v", lease_id=old)
    file.put("k", b"v", lease_id=new)
    clock.advance_to(20 * NS_PER_S)

    assert keys(file) == ["k"]


def test_compare_and_set_lets_one_win(file: RegistryFile) -> None:
    """Of two that expect the same, the first wins, for a new key and for a change."""
    made = file.compare_and_set("leader", b"a", expected_revision=None)
    lost = file.compare_and_set("leader", b"b", expected_revision=None)
    changed = file.compare_and_set("leader", b"c", expected_revision=made)
    stale = file.compare_and_set("leader", b"d", expected_revision=made)
    absent = file.compare_and_set("nobody", b"e", expected_revision=made)
    entry = file.get("leader")

    assert made is not None
    assert changed is not None
    assert (lost, stale, absent) == (None, None, None)
    assert entry is not None
    assert entry.value == b"c"


def test_history_has_every_change_once(file: RegistryFile, clock: ManualClock) -> None:
    """Puts, deletes and the ends of leases, in order, of the prefix asked for."""
    start = file.list_entries("").revision + 1
    lease = file.grant_lease(5)
    file.put("a/1", b"x", lease_id=lease)
    file.put("b/1", b"y")
    file.delete("b/1")
    file.delete("b/none")
    clock.advance_to(10 * NS_PER_S)

    changes, following = file.read_changes("", from_revision=start)
    only_a, _ = file.read_changes("a/", from_revision=start)
    nothing, _ = file.read_changes("", from_revision=following)

    assert [(c.kind, c.key, c.value) for c in changes] == [
        (ChangeKind.PUT, "a/1", b"x"),
        (ChangeKind.PUT, "b/1", b"y"),
        (ChangeKind.DELETED, "b/1", None),
        (ChangeKind.DELETED, "a/1", None),
    ]
    assert [c.kind for c in only_a] == [ChangeKind.PUT, ChangeKind.DELETED]
    assert nothing == []


def test_history_is_bounded_and_says_when_it_is_too_short(path: Path, clock: ManualClock) -> None:
    """A watcher that was away too long, or comes from another file, has to list again."""
    file = open_file(path, clock, max_history=5)
    start = file.list_entries("").revision + 1
    for number in range(8):
        file.put("k", bytes([number]))
    now = file.list_entries("").revision

    with pytest.raises(WatchLostError):
        file.read_changes("", from_revision=start)
    with pytest.raises(WatchLostError):
        file.read_changes("", from_revision=now + 2)
    changes, _ = file.read_changes("", from_revision=now - 4)
    assert [c.value for c in changes] == [bytes([n]) for n in range(3, 8)]


def test_two_processes_share_one_file(path: Path, clock: ManualClock) -> None:
    """What one writes the other reads; either ends a lease that is over."""
    one, two = open_file(path, clock), open_file(path, clock)
    lease = one.grant_lease(5)
    one.put("k", b"1", lease_id=lease)
    seen = two.get("k")
    clock.advance_to(10 * NS_PER_S)

    assert seen is not None
    assert seen.value == b"1"
    assert keys(two) == []


def test_leases_of_an_earlier_boot_end(path: Path, clock: ManualClock) -> None:
    """After a reboot monotonic time is low again; old leases must not live for days."""
    before = open_file(path, clock)
    before.put("k", b"v", lease_id=before.grant_lease(10))
    before.put("free", b"v")
    before.close()

    assert keys(open_file(path, ManualClock(0), boot="next")) == ["free"]


def test_lost_file_is_a_lost_lease_and_revisions_go_on_rising(
    path: Path, clock: ManualClock
) -> None:
    """A deleted or moved file is made anew; revisions follow the wall clock upwards."""
    wall = [1_000]
    file = RegistryFile(path, clock=clock, boot_id="b", wall_time_s=lambda: wall[0])
    lease = file.grant_lease(10)
    before = file.put("k", b"v", lease_id=lease)
    for part in path.parent.iterdir():
        part.unlink()
    wall[0] += 1

    with pytest.raises(LeaseLostError):
        file.renew_lease(lease)
    assert file.put("k", b"v") > before


def test_locked_file_is_an_error_that_passes(
    path: Path, file: RegistryFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While another process holds the file, calls fail by name; afterwards all is there."""
    monkeypatch.setattr("dsched.registry.sqlite_file.BUSY_TIMEOUT_MS", 10)
    file.put("k", b"v")
    file.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(RegistryError, match="locked"):
            file.get("k")
        holder.execute("ROLLBACK")

    assert keys(file) == ["k"]


def test_processes_that_make_the_file_together_all_get_it(tmp_path: Path) -> None:
    """Leaving a new file's mode is refused at once, without SQLite's own wait, to all but one."""
    num_openers = 4
    with ThreadPoolExecutor(num_openers) as threads:
        for index in range(50):
            start = Barrier(num_openers)

            def join(number: int, path: Path, start: Barrier) -> int:
                file = open_file(path, ManualClock(NS_PER_S))
                start.wait()
                revision = file.put(str(number), b"v")
                file.close()
                return revision

            path = tmp_path / f"{index}.sqlite3"
            joins = [threads.submit(join, n, path, start) for n in range(num_openers)]
            assert len({one.result() for one in joins}) == num_openers


def test_damaged_file_is_set_aside(path: Path, file: RegistryFile) -> None:
    """One error, then a new registry; the damaged file is kept."""
    path.parent.mkdir()
    path.write_bytes(b"no database, but long enough to look like one " * 100)

    with pytest.raises(RegistryError, match="not a database"):
        file.list_entries("")
    assert keys(file) == []
    assert path.with_name(path.name + ".damaged").exists()


def test_file_of_another_version_is_left_alone(path: Path, file: RegistryFile) -> None:
    """A newer dsched's registry is not touched."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")

    for _ in range(2):
        with pytest.raises(RegistryError, match="registry format 99"):
            file.list_entries("")


def test_reading_does_not_make_a_registry(path: Path, clock: ManualClock) -> None:
    """`dsched workers` with a misspelt folder says so."""
    reader = RegistryFile(path, clock=clock, boot_id="b", create=False)

    with pytest.raises(RegistryError, match="no such registry"):
        reader.list_entries("")
    assert not path.parent.exists()


def test_wrong_values_are_refused(file: RegistryFile) -> None:
    """No empty key, no large value, no lease without time; and nothing is left half done."""
    with pytest.raises(ValueError, match="''"):
        file.put("", b"v")
    with pytest.raises(ValueError, match=str(MAX_VALUE_BYTES + 1)):
        file.put("k", bytes(MAX_VALUE_BYTES + 1))
    for ttl_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="no time"):
            file.grant_lease(ttl_s)
    assert keys(file) == []
