"""Registration: when it renews, and that an outage of the registry loses nothing that lives."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import TypeVar

import pytest

from dsched.clock import ManualClock
from dsched.errors import RegistryError
from dsched.registry import Registration, RegistryChange, RegistryEntry
from dsched.registry.base import Listing
from dsched.registry.registration import next_renewal_ns
from dsched.registry.sqlite_file import MEMORY, RegistryFile

NS_PER_S = 1_000_000_000
TTL_S = 10.0
Answer = TypeVar("Answer")


class FlakyRegistry:
    """A registry in memory that can be unreachable; writes down when it was called."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.file = RegistryFile(MEMORY, clock=clock, boot_id="b")
        self.is_reachable = True
        self.is_heard = True
        """The answers of calls that change a key arrive."""
        self.call_takes_ns = 0
        self.renewals_s: list[float] = []

    def _check(self) -> None:
        if not self.is_reachable:
            raise RegistryError("unreachable")

    def _answer(self, answer: Answer) -> Answer:
        if not self.is_heard:
            raise RegistryError("no answer in 1 s")
        return answer

    async def grant_lease(self, ttl_s: float) -> int:
        self._check()
        lease_id = self.file.grant_lease(ttl_s)
        self._clock.advance_to(self._clock.now_ns() + self.call_takes_ns)
        return lease_id

    async def renew_lease(self, lease_id: int) -> None:
        self.renewals_s.append(self._clock.now_ns() / NS_PER_S)
        self._check()
        self.file.renew_lease(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        self._check()
        self.file.revoke_lease(lease_id)

    async def put(self, key: str, value: bytes, *, lease_id: int | None = None) -> int:
        self._check()
        return self._answer(self.file.put(key, value, lease_id=lease_id))

    async def delete(self, key: str) -> bool:
        self._check()
        return self._answer(self.file.delete(key))

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease_id: int | None = None,
    ) -> int | None:
        raise NotImplementedError

    async def get(self, key: str) -> RegistryEntry | None:
        raise NotImplementedError

    async def list_entries(self, prefix: str) -> Listing:
        self._check()
        return self.file.list_entries(prefix)

    def watch(self, prefix: str, *, from_revision: int) -> AsyncIterator[RegistryChange]:
        raise NotImplementedError

    async def close(self) -> None:
        self.file.close()

    def keys(self) -> list[str]:
        return [entry.key for entry in self.file.list_entries("").entries]


class World:
    """A registration, its registry, and time that passes in steps."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.registry = FlakyRegistry(self.clock)
        self.registration = Registration(self.registry, clock=self.clock, ttl_s=TTL_S)
        self.due_ns = 0

    async def run_until(self, time_s: float, *, outage_s: tuple[float, float] = (0, 0)) -> None:
        """Let every step come at its time; the registry is away during the outage."""
        while self.due_ns <= time_s * NS_PER_S:
            self.clock.advance_to(self.due_ns)
            now_s = self.due_ns / NS_PER_S
            self.registry.is_reachable = not outage_s[0] <= now_s < outage_s[1]
            self.due_ns = await self.registration.step()
        self.clock.advance_to(int(time_s * NS_PER_S))
        self.registry.is_reachable = True


def run(world: World, time_s: float, *, outage_s: tuple[float, float] = (0, 0)) -> None:
    asyncio.run(world.run_until(time_s, outage_s=outage_s))


def test_renewal_is_due_at_half_of_what_is_left() -> None:
    """Half of the rest, rounded down, but never at once and never in the past."""
    assert next_renewal_ns(0, expires_ns=10 * NS_PER_S) == 5 * NS_PER_S
    assert next_renewal_ns(5 * NS_PER_S, expires_ns=10 * NS_PER_S) == 7.5 * NS_PER_S
    assert next_renewal_ns(100, expires_ns=100, min_retry_ns=7) == 107
    assert next_renewal_ns(100, expires_ns=0, min_retry_ns=7) == 107


def test_outage_over_one_renewal_keeps_the_lease() -> None:
    """Away from 4.9 to 7.0 s: renewals at 5.0 (fails) and 7.5 (works). A fixed timer of half the
    length would try next at 10.0, when the lease is over."""
    world = World()
    world.registration.set("k", b"v")

    run(world, 8.0, outage_s=(4.9, 7.0))

    assert world.registry.renewals_s == [5.0, 7.5]
    assert world.registry.keys() == ["k"]
    assert world.registration.status().num_leases_lost == 0


def test_outage_until_just_before_the_end_keeps_the_lease() -> None:
    """Away from 4.9 to 9.2 s: 5.0, 7.5 and 8.75 fail, 9.375 works."""
    world = World()
    world.registration.set("k", b"v")

    run(world, 9.5, outage_s=(4.9, 9.2))
    during_s = world.registry.renewals_s[:]
    run(world, 18.0)

    assert during_s == [5.0, 7.5, 8.75, 9.375]
    assert world.registry.keys() == ["k"]
    assert world.registration.status().num_leases_lost == 0


def test_long_outage_registers_again_under_the_same_keys() -> None:
    """Away for three lengths of the lease: the entries are gone, and back within a moment after;
    values changed meanwhile are the new ones."""
    world = World()
    world.registration.set("engines/a", b"old")
    run(world, 1.0)
    run(world, 35.0, outage_s=(4.0, 34.0))
    status = world.registration.status()

    assert world.registry.keys() == ["engines/a"]
    assert status.num_leases_lost == 1
    assert status.is_registered
    assert status.failed_reason is None
    assert status.num_failures > 3


def test_a_lease_that_may_be_over_counts_as_unregistered() -> None:
    """From its end on, and not from the first failure; one answer later it counts again."""
    world = World()
    world.registration.set("k", b"v")
    run(world, 1.0)
    run(world, 9.99, outage_s=(1.0, 30.0))
    before = world.registration.status().is_registered
    run(world, 10.0, outage_s=(1.0, 30.0))
    during = world.registration.status().is_registered
    run(world, 31.0, outage_s=(1.0, 30.0))

    assert (before, during) == (True, False)
    assert world.registration.status().is_registered


def test_a_change_on_its_way_leaves_the_process_registered() -> None:
    """A load changes every second; an entry that nobody has seen yet is another matter."""
    world = World()
    world.registration.set("k", b"v")
    unknown = world.registration.status().is_registered
    run(world, 1.0)
    world.registration.set("k", b"w")
    changed = world.registration.status().is_registered
    world.registration.set("new", b"v")
    grown = world.registration.status().is_registered
    world.registration.remove("new")
    world.registration.remove("k")
    removed = world.registration.status().is_registered

    assert (unknown, changed, grown, removed) == (False, True, False, True)


def test_slow_call_does_not_lengthen_the_lease() -> None:
    """The lease may have begun when the call was sent: of 10 s, 3 s in the call, 7 s are left."""
    world = World()
    world.registry.call_takes_ns = 3 * NS_PER_S

    due_ns = asyncio.run(world.registration.step())

    assert due_ns == 6.5 * NS_PER_S


def test_failures_are_spaced() -> None:
    """However long the registry is away, it is asked at most five times a second."""
    world = World()
    world.registration.set("k", b"v")
    run(world, 60.0, outage_s=(1.0, 60.0))

    gaps = [b - a for a, b in pairwise(world.registry.renewals_s)]

    assert min(gaps) >= 0.2 - 1e-9


def test_only_changes_are_written() -> None:
    """A value set twice is put once; a removed key is deleted."""
    world = World()
    world.registration.set("a", b"1")
    world.registration.set("b", b"1")
    run(world, 0.0)
    before = world.registry.file.list_entries("")
    world.registration.set("a", b"1")
    world.registration.remove("b")
    world.registration.remove("never")
    run(world, 6.0)
    after = world.registry.file.list_entries("")

    assert [entry.key for entry in before.entries] == ["a", "b"]
    assert after.entries == before.entries[:1]


@pytest.mark.parametrize(
    ("before", "meanwhile", "after"),
    [
        (None, b"1", None),
        (b"1", b"2", b"1"),
        (b"1", b"2", None),
        (b"1", None, b"1"),
        (b"1", None, None),
    ],
)
def test_what_was_done_without_an_answer_is_made_good(
    before: bytes | None, meanwhile: bytes | None, after: bytes | None
) -> None:
    """Each is the value that is wanted; the registry's answers are lost meanwhile."""
    world = World()

    def want(value: bytes | None) -> None:
        if value is None:
            world.registration.remove("k")
        else:
            world.registration.set("k", value)

    world.registration.set("other", b"1")
    want(before)
    run(world, 0.0)
    world.registry.is_heard = False
    want(meanwhile)
    run(world, 5.0)
    world.registry.is_heard = True
    want(after)
    run(world, 20.0)

    found = {entry.key: entry.value for entry in world.registry.file.list_entries("").entries}
    assert world.registration.status().num_leases_lost == 0
    assert found == {"other": b"1"} | ({} if after is None else {"k": after})


def test_leaving_deletes_the_entries() -> None:
    """A cancelled `run` leaves at once; others need not wait for the lease to end."""

    async def scenario() -> tuple[list[str], list[str]]:
        clock = ManualClock()
        registry = FlakyRegistry(clock)
        started = asyncio.Event()

        async def sleep(delay_s: float) -> None:
            started.set()
            await asyncio.Event().wait()

        registration = Registration(registry, clock=clock, ttl_s=TTL_S, sleep=sleep)
        registration.set("k", b"v")
        task = asyncio.create_task(registration.run())
        await started.wait()
        during = registry.keys()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return during, registry.keys()

    assert asyncio.run(scenario()) == (["k"], [])


def test_news_are_written_before_the_next_renewal() -> None:
    """`set` wakes a running registration; it does not wait for half of the lease."""

    async def scenario() -> list[str]:
        clock = ManualClock()
        registry = FlakyRegistry(clock)
        registration = Registration(registry, clock=clock, ttl_s=3_600)
        task = asyncio.create_task(registration.run())
        await asyncio.sleep(0)
        registration.set("late", b"v")
        while not registry.keys():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [entry.key for entry in (await registry.list_entries("")).entries]

    assert asyncio.run(asyncio.wait_for(scenario(), timeout=10)) == []


def test_many_entries_over_a_slow_registry_do_not_cost_the_lease() -> None:
    """A hundred puts of half a second each, under a lease of ten: renewed in between, all written,
    nothing lost."""
    world = World()
    clock, registry = world.clock, world.registry
    put = registry.put

    async def slow_put(key: str, value: bytes, *, lease_id: int | None = None) -> int:
        revision = await put(key, value, lease_id=lease_id)
        clock.advance_to(clock.now_ns() + NS_PER_S // 2)
        return revision

    registry.put = slow_put  # type: ignore[method-assign]
    for number in range(100):
        world.registration.set(f"k{number:03}", b"v")

    async def scenario() -> None:
        for _ in range(100):
            if world.registration.status().is_registered:
                break
            clock.advance_to(max(await world.registration.step(), clock.now_ns()))

    asyncio.run(scenario())

    assert len(registry.keys()) == 100
    assert world.registration.status().num_leases_lost == 0
    assert clock.now_ns() <= 60 * NS_PER_S


def test_the_first_entries_can_be_waited_for() -> None:
    """Until they are all written; a registry that is away is not waited for longer than told."""

    async def scenario(*, is_reachable: bool) -> tuple[bool, list[str]]:
        clock = ManualClock()
        registry = FlakyRegistry(clock)
        registry.is_reachable = is_reachable
        registration = Registration(registry, clock=clock, ttl_s=TTL_S)
        registration.set("a", b"v")
        registration.set("b", b"v")
        task = asyncio.create_task(registration.run())
        is_there = await registration.wait(5.0 if is_reachable else 0.05)
        keys = registry.keys()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return is_there, keys

    assert asyncio.run(scenario(is_reachable=True)) == (True, ["a", "b"])
    assert asyncio.run(scenario(is_reachable=False)) == (False, [])


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_cancellation_that_meets_news_is_not_lost(num_turns: int) -> None:
    """However many turns of the loop lie between them, it leaves and is over."""
    registry = FlakyRegistry(ManualClock())
    registration = Registration(registry, clock=ManualClock(), ttl_s=TTL_S)
    registration.set("k", b"v")
    running = asyncio.create_task(registration.run())
    assert await registration.wait(30)
    await asyncio.sleep(0)

    registration.set("k", b"news")
    for _ in range(num_turns):
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running], timeout=10)

    assert running.cancelled()
    assert registry.keys() == []


@pytest.mark.parametrize("num_turns", range(3))
async def test_a_cancellation_that_meets_the_first_entry_is_not_lost(num_turns: int) -> None:
    """A start that waits for it is told to stop at that moment."""
    clock = ManualClock()
    registration = Registration(FlakyRegistry(clock), clock=clock, ttl_s=TTL_S)
    registration.set("k", b"v")
    waiting = asyncio.create_task(registration.wait(30))
    for _ in range(3):
        await asyncio.sleep(0)

    stepping = asyncio.create_task(registration.step())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    is_over = waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting, stepping])

    assert waiting.cancelled() or is_over
