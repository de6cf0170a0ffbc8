"""The registry contract (`dsched/registry/base.py`): the same in memory, in a file and in etcd.

Each test has a registry of its own and empty: another file, or another prefix of one real etcd.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise

import msgspec
import pytest
from first_forms import FIRST_FORMS
from registry_cases import RegistryCase

from dsched.clock import SystemClock
from dsched.registry import (
    ChangeKind,
    Election,
    LeaseLostError,
    Listing,
    Registry,
    RegistryChange,
    WatchLostError,
    read_workers,
)

SHORT_S = 2.0
"""The shortest lease that etcd grants."""


async def take(changes: AsyncIterator[RegistryChange], count: int) -> list[RegistryChange]:
    """The next `count` changes, and then no more."""
    found = []
    async with asyncio.timeout(20), aclosing(changes) as open_changes:  # type: ignore[type-var]
        async for change in open_changes:
            found.append(change)
            if len(found) == count:
                break
    return found


def keys(listing: Listing) -> list[str]:
    return [entry.key for entry in listing.entries]


async def test_what_is_put_is_read_back(registry: Registry) -> None:
    """Any bytes; an empty value is a value, an absent key is `None`."""
    for key, value in (("a", b"\x00\xff\n"), ("empty", b""), ("ä/ü", "größe".encode())):
        revision = await registry.put(key, value)
        entry = await registry.get(key)

        assert entry is not None
        assert (entry.key, entry.value, entry.lease_id) == (key, value, None)
        assert entry.create_revision == entry.mod_revision == revision
    assert await registry.get("b") is None


@pytest.mark.parametrize(("key", "size"), [("", 1), ("k", 256 * 1024 + 1)])
async def test_empty_keys_and_huge_values_are_refused(
    registry: Registry, key: str, size: int
) -> None:
    """The registry is for who is where."""
    with pytest.raises(ValueError, match="allowed"):
        await registry.put(key, b"x" * size)
    with pytest.raises(ValueError, match="allowed"):
        await registry.compare_and_set(key, b"x" * size, expected_revision=None)


async def test_largest_value_is_kept(registry: Registry) -> None:
    """The limit itself is allowed."""
    await registry.put("k", b"x" * 256 * 1024)

    entry = await registry.get("k")

    assert entry is not None
    assert len(entry.value) == 256 * 1024


async def test_revisions_rise_and_tell_creation_from_change(registry: Registry) -> None:
    """A key's creation fences: made anew, it has a higher one."""
    revisions = [await registry.put("k", b"1"), await registry.put("k", b"2")]
    before = await registry.get("k")
    await registry.delete("k")
    revisions.append(await registry.put("k", b"3"))
    after = await registry.get("k")

    assert all(a < b for a, b in pairwise(revisions))
    assert before is not None
    assert after is not None
    assert (before.create_revision, before.mod_revision) == (revisions[0], revisions[1])
    assert (after.create_revision, after.mod_revision) == (revisions[2], revisions[2])


async def test_delete_says_whether_there_was_one(registry: Registry) -> None:
    """Once, and no more."""
    await registry.put("k", b"v")

    assert await registry.delete("k") is True
    assert await registry.delete("k") is False
    assert await registry.get("k") is None


async def test_listing_is_sorted_and_by_plain_prefix(registry: Registry) -> None:
    """No sign in a prefix has a meaning; a key equal to it belongs to it."""
    in_order = ["a%", "a_", "ab", "b.", "b/", "b/1", "b/2", "b0", "c"]
    for key in reversed(in_order):
        await registry.put(key, b"v")

    assert keys(await registry.list_entries("")) == in_order
    assert keys(await registry.list_entries("b/")) == ["b/", "b/1", "b/2"]
    assert keys(await registry.list_entries("a_")) == ["a_"]
    assert keys(await registry.list_entries("x")) == []


async def test_compare_and_set_creates_once(registry: Registry) -> None:
    """`None` expects nothing there: of many, exactly one creates the key."""
    won = await asyncio.gather(
        *(
            registry.compare_and_set("k", bytes([number]), expected_revision=None)
            for number in range(8)
        )
    )
    entry = await registry.get("k")

    (winner,) = [number for number, revision in enumerate(won) if revision is not None]
    assert entry is not None
    assert entry.value == bytes([winner])
    assert entry.create_revision == won[winner]


async def test_compare_and_set_changes_only_what_it_expects(registry: Registry) -> None:
    """An older revision, and one of a key that is gone, change nothing."""
    first = await registry.put("k", b"1")
    second = await registry.compare_and_set("k", b"2", expected_revision=first)
    stale = await registry.compare_and_set("k", b"3", expected_revision=first)
    entry = await registry.get("k")
    await registry.delete("k")
    gone = await registry.compare_and_set("k", b"4", expected_revision=second)

    assert second is not None
    assert second > first
    assert (stale, gone) == (None, None)
    assert entry is not None
    assert (entry.value, entry.mod_revision, entry.create_revision) == (b"2", second, first)
    assert await registry.get("k") is None


async def test_revoked_lease_takes_its_keys_along(registry: Registry) -> None:
    """Those alone; revoking it again is nothing."""
    lease = await registry.grant_lease(60)
    other = await registry.grant_lease(60)
    await registry.put("leased", b"v", lease_id=lease)
    await registry.put("other", b"v", lease_id=other)
    await registry.put("free", b"v")
    entry = await registry.get("leased")
    await registry.revoke_lease(lease)
    await registry.revoke_lease(lease)

    assert lease != other
    assert entry is not None
    assert entry.lease_id == lease
    assert keys(await registry.list_entries("")) == ["free", "other"]


async def test_key_follows_the_lease_it_was_put_with_last(registry: Registry) -> None:
    """Put again without a lease, it stays when the first one ends."""
    lease = await registry.grant_lease(60)
    await registry.put("k", b"1", lease_id=lease)
    await registry.put("k", b"2")
    await registry.revoke_lease(lease)

    entry = await registry.get("k")

    assert entry is not None
    assert (entry.value, entry.lease_id) == (b"2", None)


async def test_a_lease_that_is_over_is_named_so(registry: Registry) -> None:
    """To renew, put or compare under it, whether it is over or never was."""
    over = await registry.grant_lease(60)
    await registry.revoke_lease(over)

    for lease in (over, 12_345):
        with pytest.raises(LeaseLostError, match=f"lease {lease} is over"):
            await registry.renew_lease(lease)
        with pytest.raises(LeaseLostError, match=f"lease {lease} is over"):
            await registry.put("k", b"v", lease_id=lease)
        with pytest.raises(LeaseLostError, match=f"lease {lease} is over"):
            await registry.compare_and_set("k", b"v", expected_revision=None, lease_id=lease)
    assert await registry.get("k") is None


@pytest.mark.parametrize("ttl_s", [0, -1.0])
async def test_a_lease_without_time_is_refused(registry: Registry, ttl_s: float) -> None:
    """A mistake of the caller, with the value."""
    with pytest.raises(ValueError, match="has no time"):
        await registry.grant_lease(ttl_s)


@pytest.mark.slow
async def test_unrenewed_lease_ends_and_a_renewed_one_does_not(registry: Registry) -> None:
    """The watcher sees one key go, within its time and two seconds; the renewed one stays."""
    dead, alive = await registry.grant_lease(SHORT_S), await registry.grant_lease(SHORT_S)
    await registry.put("alive", b"v", lease_id=alive)
    revision = await registry.put("dead", b"v", lease_id=dead)
    started_s = asyncio.get_running_loop().time()
    gone = asyncio.create_task(take(registry.watch("", from_revision=revision + 1), 1))
    while not gone.done():
        await asyncio.wait([gone], timeout=0.5)
        await registry.renew_lease(alive)
    waited_s = asyncio.get_running_loop().time() - started_s

    (change,) = await gone
    assert (change.kind, change.key, change.value) == (ChangeKind.DELETED, "dead", None)
    assert SHORT_S - 0.5 <= waited_s <= SHORT_S + 2.0
    assert keys(await registry.list_entries("")) == ["alive"]


async def test_watch_after_a_listing_misses_nothing(registry: Registry) -> None:
    """What happened in between is seen, once and in order; the rest of the registry is not."""
    await registry.put("a/1", b"0")
    listing = await registry.list_entries("a/")
    first = await registry.put("a/1", b"1")
    for key in ("b/1", "a.", "a0"):
        await registry.put(key, b"x")
    second = await registry.put("a/2", b"2")
    await registry.delete("a/1")

    changes = await take(registry.watch("a/", from_revision=listing.revision + 1), 3)

    seen = [(change.kind, change.key, change.value) for change in changes]
    assert seen == [
        (ChangeKind.PUT, "a/1", b"1"),
        (ChangeKind.PUT, "a/2", b"2"),
        (ChangeKind.DELETED, "a/1", None),
    ]
    assert [change.revision for change in changes[:2]] == [first, second]
    assert changes[2].revision > second


async def test_watch_sees_what_comes_later(registry: Registry) -> None:
    """From one past the present; several watches at once each see all of it."""
    revision = await registry.put("k", b"0")
    watches = [
        asyncio.create_task(take(registry.watch("", from_revision=revision + 1), 20))
        for _ in range(2)
    ]
    for number in range(20):
        await registry.put(f"k{number % 3}", bytes([number]))

    for changes in await asyncio.gather(*watches):
        assert [change.value for change in changes] == [bytes([n]) for n in range(20)]
        assert all(a.revision < b.revision for a, b in pairwise(changes))


async def test_watch_goes_on_from_where_another_ended(registry: Registry) -> None:
    """The revision after the last one seen: nothing twice, nothing missed."""
    first = await registry.put("k", bytes([0]))
    for number in range(1, 6):
        await registry.put("k", bytes([number]))

    before = await take(registry.watch("", from_revision=first), 3)
    after = await take(registry.watch("", from_revision=before[-1].revision + 1), 3)

    assert [change.value for change in (*before, *after)] == [bytes([n]) for n in range(6)]


async def test_watch_of_forgotten_history_says_so(registry_case: RegistryCase) -> None:
    """Changes that are kept no more are an error, never a gap."""
    registry = registry_case.registry
    first = await registry.put("k", b"0")
    for number in range(3):
        await registry.put("k", bytes([number]))
    listing = await registry.list_entries("")
    await registry_case.forget_history(listing.revision)

    with pytest.raises(WatchLostError, match="list again"):
        await take(registry.watch("k", from_revision=first), 1)
    await registry.put("k", b"new")
    (change,) = await take(registry.watch("k", from_revision=listing.revision + 1), 1)
    assert change.value == b"new"


async def test_watch_from_the_far_future_says_so(registry: Registry) -> None:
    """A revision the registry has not reached is one of a registry that is no more."""
    revision = await registry.put("k", b"v")

    with pytest.raises(WatchLostError, match="list again"):
        await take(registry.watch("", from_revision=revision + 1_000_000), 1)


async def test_elections_have_one_winner_and_rising_epochs(registry: Registry) -> None:
    """Of five candidates at once; when the leader steps down, its successor's epoch is higher."""
    clock = SystemClock()
    elections = [Election(registry, clock=clock, candidate_id=name, ttl_s=60) for name in "abcde"]
    epochs = []
    for _ in range(3):
        await asyncio.gather(*(election.step() for election in elections))
        await asyncio.gather(*(election.step() for election in elections))
        (leader,) = [each for each in elections if each.epoch_now() is not None]
        assert leader.leader is not None
        assert all(election.leader == leader.leader for election in elections)
        epochs.append(leader.leader.epoch)
        task = asyncio.create_task(leader.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert leader.epoch_now() is None
        elections.remove(leader)

    assert epochs == sorted(set(epochs))


async def test_close_leaves_leases_alone(registry_case: RegistryCase) -> None:
    """Another process, or the same one after a restart, finds what was put under them."""
    lease = await registry_case.registry.grant_lease(60)
    await registry_case.registry.put("k", b"v", lease_id=lease)
    if not registry_case.is_shared:
        pytest.skip("a registry in memory ends with its process")

    other = registry_case.open_again()
    await registry_case.registry.close()
    entry = await other.get("k")
    await other.renew_lease(lease)
    await other.close()

    assert entry is not None
    assert (entry.value, entry.lease_id) == (b"v", lease)


async def test_rows_of_a_newer_dsched_are_read(registry: Registry) -> None:
    """What it adds is ignored, in every kind of registry; a format that it raised is named."""
    ranks = [FIRST_FORMS["RankRow"] | {"temperature_c": 70}]
    rows = {
        "instances/i": FIRST_FORMS["InstanceRow"],
        "engines/e/i": FIRST_FORMS["EngineRow"] | {"ranks": ranks},
        "engines/f/i": FIRST_FORMS["EngineRow"] | {"engine_id": "f"},
        "election/rebalancing": FIRST_FORMS["LeaderRow"],
    }
    for key, row in rows.items():
        more = {"format": 2} if key == "engines/f/i" else {"colour": {"red": [1, None]}}
        await registry.put(key, msgspec.json.encode(row | more))

    view = read_workers(await registry.list_entries(""))

    assert [row.instance_id for row in view.instances] == ["i"]
    assert [(row.engine_id, len(row.ranks)) for row in view.engines] == [("e", 1)]
    assert view.leader is not None
    assert view.unreadable == ("engines/f/i",)
    assert view.why_unreadable["engines/f/i"].startswith("written by dsched 0.1.0, instance i: ")
