"""Election: one leader at a time, each with a higher epoch, on a clock that the test moves."""

import asyncio
from collections.abc import Sequence

import pytest

from dsched.clock import ManualClock
from dsched.errors import RegistryError
from dsched.registry import Election, RegistryEntry
from dsched.registry.records import ELECTION_KEY
from dsched.registry.sqlite_file import MEMORY, RegistryFile

NS_PER_S = 1_000_000_000
TTL_S = 8.0


class Registry:
    """A registry in memory; a link to it may be cut, or lose the answer of the next change."""

    def __init__(self, file: RegistryFile) -> None:
        self.file = file
        self.is_reachable = True
        self.loses_answer = False

    def _check(self) -> None:
        if not self.is_reachable:
            raise RegistryError("unreachable")

    async def grant_lease(self, ttl_s: float) -> int:
        self._check()
        return self.file.grant_lease(ttl_s)

    async def renew_lease(self, lease_id: int) -> None:
        self._check()
        self.file.renew_lease(lease_id)

    async def revoke_lease(self, lease_id: int) -> None:
        self._check()
        self.file.revoke_lease(lease_id)

    async def get(self, key: str) -> RegistryEntry | None:
        self._check()
        return self.file.get(key)

    async def compare_and_set(
        self,
        key: str,
        value: bytes,
        *,
        expected_revision: int | None,
        lease_id: int | None = None,
    ) -> int | None:
        self._check()
        revision = self.file.compare_and_set(
            key, value, expected_revision=expected_revision, lease_id=lease_id
        )
        if self.loses_answer:
            self.loses_answer = False
            raise RegistryError("the connection broke")
        return revision


class World:
    """Candidates over one registry, each with a link of its own."""

    def __init__(self, *names: str) -> None:
        self.clock = ManualClock()
        self.file = RegistryFile(MEMORY, clock=self.clock, boot_id="b")
        self.links = {name: Registry(self.file) for name in names}
        self.elections = {
            name: Election(link, clock=self.clock, candidate_id=name, ttl_s=TTL_S)  # type: ignore[arg-type]
            for name, link in self.links.items()
        }
        self.due_ns = dict.fromkeys(names, 0)
        self.epochs: list[int] = []

    async def run_until(self, time_s: float, *, frozen: Sequence[str] = ()) -> None:
        """Let every step come at its time; after each, at most one leads."""
        end_ns = int(time_s * NS_PER_S)
        awake = [name for name in self.elections if name not in frozen]
        while min(self.due_ns[name] for name in awake) <= end_ns:
            name = min(awake, key=lambda each: (self.due_ns[each], each))
            self.clock.advance_to(max(self.due_ns[name], self.clock.now_ns()))
            self.due_ns[name] = await self.elections[name].step()
            for epoch in self.leaders().values():
                if not self.epochs or epoch != self.epochs[-1]:
                    self.epochs.append(epoch)
            assert len(self.leaders()) <= 1
        self.clock.advance_to(end_ns)

    def leaders(self) -> dict[str, int]:
        epochs = {name: each.epoch_now() for name, each in self.elections.items()}
        return {name: epoch for name, epoch in epochs.items() if epoch is not None}


def run(world: World, time_s: float, *, frozen: Sequence[str] = ()) -> None:
    asyncio.run(world.run_until(time_s, frozen=frozen))


def test_one_of_many_leads_and_stays() -> None:
    """The others know who it is and under which epoch; renewals keep the epoch."""
    world = World("a", "b", "c")
    run(world, 100)

    ((name, epoch),) = world.leaders().items()
    assert world.epochs == [epoch]
    for election in world.elections.values():
        assert election.leader is not None
        assert (election.leader.instance_id, election.leader.epoch) == (name, epoch)


def test_a_frozen_leader_has_stopped_leading_before_the_next_begins() -> None:
    """It need not hear anything; its successor's epoch is higher; awake again, it follows."""
    world = World("a", "b")
    run(world, 3)
    assert list(world.leaders()) == ["a"]
    run(world, 3 + TTL_S + TTL_S / 4 + 0.1, frozen=["a"])
    assert list(world.leaders()) == ["b"]
    run(world, 40)

    assert list(world.leaders()) == ["b"]
    assert len(world.epochs) == 2
    assert world.epochs[0] < world.epochs[1]
    assert world.elections["a"].leader == world.elections["b"].leader


def test_an_outage_shorter_than_the_lease_changes_no_leader() -> None:
    """Nor its epoch."""
    world = World("a", "b")
    run(world, 4.0)
    for link in world.links.values():
        link.is_reachable = False
    run(world, 4.0 + TTL_S - 1.5)
    for link in world.links.values():
        link.is_reachable = True
    run(world, 60)

    assert list(world.leaders()) == ["a"]
    assert len(world.epochs) == 1


def test_a_leader_that_is_cut_off_stops_by_its_own_clock() -> None:
    """At the end of its lease and no renewal later, while the others take over."""
    world = World("a", "b")
    run(world, 1.0)
    world.links["a"].is_reachable = False
    during = world.leaders()
    run(world, 1.0 + TTL_S)
    still = "a" in world.leaders()
    run(world, 20)

    assert list(during) == ["a"]
    assert not still
    assert list(world.leaders()) == ["b"]


def test_a_lost_answer_makes_no_second_election() -> None:
    """The key is ours though we did not hear it: the next look finds that."""
    world = World("a", "b")
    world.links["a"].loses_answer = True
    run(world, 6)

    assert list(world.leaders()) == ["a"]
    entry = world.file.get(ELECTION_KEY)
    assert entry is not None
    assert world.leaders()["a"] == entry.create_revision


def test_a_deleted_key_is_a_new_election() -> None:
    """By an operator, or by an etcd that forgot everything; the epoch rises."""
    world = World("a", "b")
    run(world, 2)
    world.file.delete(ELECTION_KEY)
    run(world, 12)

    assert len(world.leaders()) == 1
    assert len(world.epochs) == 2
    assert world.epochs[0] < world.epochs[1]


def test_stepping_down_lets_others_lead_at_once() -> None:
    """A process that stops on purpose gives its lease back."""

    async def scenario() -> None:
        world = World("a", "b")
        await world.elections["a"].step()
        task = asyncio.create_task(world.elections["a"].run())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert world.elections["a"].epoch_now() is None
        await world.elections["b"].step()
        assert list(world.leaders()) == ["b"]

    asyncio.run(scenario())


def test_a_leader_of_another_version_counts() -> None:
    """What it wrote cannot be read; its epoch can."""
    world = World("a")
    lease = world.file.grant_lease(60)
    revision = world.file.put(ELECTION_KEY, b"\xff", lease_id=lease)
    run(world, 3)

    assert world.leaders() == {}
    assert world.elections["a"].leader is not None
    assert world.elections["a"].leader.epoch == revision
