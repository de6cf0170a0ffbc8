"""ClusterView, RegistryMember and what they read: the view outlives an outage; ids that clash."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from dsched.cli.service import find_peers, peer_addresses
from dsched.clock import ManualClock, SystemClock
from dsched.config import Config, RegistryConfig
from dsched.controller import EngineSpec, PoolSpec
from dsched.errors import ConfigError, RegistryError
from dsched.ids import EngineId
from dsched.registry import (
    ClusterView,
    EngineRow,
    InstanceRow,
    LeaderRow,
    RankRow,
    RegistryChange,
    RegistryMember,
    WatchLostError,
    WorkersView,
    engine_key,
    instance_key,
    merge_workers,
    open_registry,
    read_workers,
)
from dsched.registry.base import ChangeKind, Listing, RegistryEntry
from dsched.registry.member import load_interval_s
from dsched.registry.records import ELECTION_KEY
from dsched.testing.ports import refusing_port

Step = RegistryChange | Exception


def instance(name: str, *, peer_endpoint: str | None = None) -> InstanceRow:
    return InstanceRow(
        instance_id=name,
        version="1",
        front_door_url="http://f",
        admin_url="http://a",
        started_s=1,
        peer_endpoint=peer_endpoint,
    )


def engine(engine_id: str, *, num_running: int = 0, **changes: object) -> EngineRow:
    rank = RankRow(
        dp_rank=0,
        state="up",
        num_running=num_running,
        num_waiting=0,
        num_kv_tokens=0,
        kv_capacity_tokens=None,
        step_ns=0,
        report_age_ns=None,
    )
    document = {"engine_id": engine_id, "pool": "p", "kind": "vllm", "model": "m", "state": "up"}
    return msgspec.convert({**document, "ranks": [msgspec.to_builtins(rank)], **changes}, EngineRow)


def entry(key: str, value: msgspec.Struct, revision: int) -> RegistryEntry:
    return RegistryEntry(
        key=key,
        value=msgspec.json.encode(value),
        create_revision=revision,
        mod_revision=revision,
        lease_id=None,
    )


def put(name: str, revision: int) -> RegistryChange:
    value = msgspec.json.encode(instance(name))
    return RegistryChange(
        kind=ChangeKind.PUT, key=instance_key(name), value=value, revision=revision
    )


def deleted(name: str, revision: int) -> RegistryChange:
    return RegistryChange(
        kind=ChangeKind.DELETED, key=instance_key(name), value=None, revision=revision
    )


class ScriptedRegistry:
    """Answers a listing and a watch as it was told; a watch without script ends the test."""

    def __init__(
        self, listings: Sequence[Listing | Exception], watches: Sequence[Sequence[Step]]
    ) -> None:
        self.listings = list(listings)
        self.watches = list(watches)
        self.from_revisions: list[int] = []

    async def list_entries(self, prefix: str) -> Listing:
        found = self.listings.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def watch(
        self, prefix: str, *, from_revision: int
    ) -> AsyncGenerator[RegistryChange, None]:
        self.from_revisions.append(from_revision)
        for step in self.watches.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


def follow(registry: ScriptedRegistry) -> tuple[ClusterView, list[tuple[list[str], bool]]]:
    """Run a view until its script is over; also what it showed at each pause."""
    shown: list[tuple[list[str], bool]] = []

    async def scenario() -> ClusterView:
        async def sleep(delay_s: float) -> None:
            names = [row.instance_id for row in view.workers().instances]
            shown.append((names, view.is_following))
            if not registry.watches and not registry.listings:
                raise asyncio.CancelledError

        view = ClusterView(registry, sleep=sleep)  # type: ignore[arg-type]
        with pytest.raises(asyncio.CancelledError):
            await view.run()
        return view

    return asyncio.run(scenario()), shown


def listing(*names: str, revision: int) -> Listing:
    entries = tuple(entry(instance_key(name), instance(name), revision) for name in names)
    return Listing(entries=entries, revision=revision)


def test_view_follows_changes() -> None:
    """Come, go, come again; the watch starts one after the listing."""
    registry = ScriptedRegistry(
        [listing("a", "b", revision=10)], [[put("c", 11), deleted("a", 12), put("c", 13)]]
    )
    _, shown = follow(registry)

    assert shown == [(["b", "c"], True)]
    assert registry.from_revisions == [11]


def test_view_stays_as_it_was_while_the_registry_is_away() -> None:
    """Nothing vanishes for not being heard; the watch goes on after the last change."""
    away = RegistryError("away")
    registry = ScriptedRegistry(
        [listing("a", revision=10)],
        [[put("b", 14), away], [away], [away], [deleted("a", 15)]],
    )
    _, shown = follow(registry)

    assert shown == [(["a", "b"], False)] * 3 + [(["b"], True)]
    assert registry.from_revisions == [11, 15, 15, 15]


def test_view_is_listed_anew_where_history_is_gone() -> None:
    """What went meanwhile goes then, and not before."""
    registry = ScriptedRegistry(
        [RegistryError("not yet"), listing("a", "b", revision=10), listing("b", "c", revision=90)],
        [[WatchLostError("list again")], [put("d", 91)]],
    )
    _, shown = follow(registry)

    assert shown == [([], False), (["a", "b"], True), (["b", "c", "d"], True)]
    assert registry.from_revisions == [11, 91]


def test_leader_is_shown_with_its_epoch() -> None:
    """The epoch is the revision that created the key, also when it came by a watch."""
    row = LeaderRow(instance_id="a")
    view = read_workers(Listing(entries=(entry(ELECTION_KEY, row, 42),), revision=50))

    assert view.leader == LeaderRow(instance_id="a", epoch=42)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"url": "http://y:1"}, "engine id e has more than one url: http://x:1, http://y:1"),
        ({"pool": "q"}, "engine id e has more than one pool: p, q"),
        ({"model": "n"}, "engine id e has more than one model: m, n"),
        ({"state": "down", "reason": "r"}, None),
        ({}, None),
    ],
)
def test_one_id_for_two_engines_is_named(changes: dict[str, object], text: str | None) -> None:
    """Views may differ in state and load, but not in which engine it is."""
    rows = [engine("e", url="http://x:1"), engine("e", **{"url": "http://x:1", **changes})]
    entries = tuple(entry(engine_key("e", f"i{n}"), row, n + 1) for n, row in enumerate(rows))

    view = read_workers(Listing(entries=entries, revision=9))

    assert view.conflicts == (() if text is None else (text,))


def test_own_view_counts_more_than_what_was_written() -> None:
    """Own engines as they are now, others as they were written last; sorted by id."""
    registered = WorkersView(
        instances=(instance("b"), instance("me")),
        engines=(engine("x", num_running=1), engine("z")),
        unreadable=("k",),
    )
    own = WorkersView(
        instances=(instance("me"),), engines=(engine("x", num_running=5), engine("a"))
    )

    merged = merge_workers(registered, own)

    assert [row.instance_id for row in merged.instances] == ["b", "me"]
    loads = [(row.engine_id, row.ranks[0].num_running) for row in merged.engines]
    assert loads == [("a", 0), ("x", 5), ("z", 0)]
    assert merged.unreadable == ("k",)


def written_by(member: RegistryMember) -> list[str]:
    """Ids and loads that the member wants registered now."""
    wanted = member.registration._wanted
    rows = [msgspec.json.decode(value, type=EngineRow) for _, value in sorted(wanted.items())]
    return [f"{row.engine_id}:{row.state}:{row.ranks[0].num_running}" for row in rows]


def test_loads_are_written_seldom_and_states_at_once() -> None:
    """Of 100 engines each load is due every five seconds; one that goes down, at the next look."""
    clock = ManualClock()
    member = RegistryMember(
        Config(registry=RegistryConfig(url="memory://")), clock=clock, instance_id="i"
    )
    names = [f"e{number:02}" for number in range(100)]
    member.refresh(engine(name) for name in names)
    clock.advance_to(1_000_000_000)
    rows = [engine(name, num_running=7) for name in names]
    rows[3] = engine("e03", num_running=7, state="down", reason="socket")
    member.refresh(rows)
    early = written_by(member)
    clock.advance_to(4_999_999_999)
    member.refresh(rows)
    almost = written_by(member)
    clock.advance_to(5_000_000_000)
    member.refresh(rows)

    assert early[:5] == ["e00:up:0", "e01:up:0", "e02:up:0", "e03:down:7", "e04:up:0"]
    assert almost == early
    assert written_by(member)[:5] == [
        *("e00:up:7", "e01:up:7", "e02:up:7", "e03:down:7", "e04:up:7")
    ]


def test_few_engines_are_written_at_every_look() -> None:
    """Up to the rate there is nothing to spare."""
    assert load_interval_s(20) == 0.0
    assert load_interval_s(21) == pytest.approx(1.05)


async def test_member_registers_leads_and_leaves(tmp_path: Path) -> None:
    """Everything that a single process does with its file, and nothing left of it afterwards."""
    url = f"sqlite:///{tmp_path / 'r.sqlite3'}"
    config = Config(registry=RegistryConfig(url=url))
    member = RegistryMember(config, clock=SystemClock(), instance_id="me")
    await member.check()
    member.start(instance=instance("me"), engines=lambda: [engine("e")])
    other = open_registry(url, clock=SystemClock())
    async with asyncio.timeout(10):
        while len((await other.list_entries("")).entries) < 3:
            await asyncio.sleep(0.02)
        while member.cluster.workers().leader is None:
            await asyncio.sleep(0.02)
    during = await other.list_entries("")
    epoch = member.election.epoch_now()
    view = member.workers(WorkersView())
    await member.stop()
    await member.close()
    after = await other.list_entries("")
    await other.close()

    assert [each.key for each in during.entries] == [
        *(ELECTION_KEY, "engines/e/me", "instances/me")
    ]
    assert view.leader == LeaderRow(instance_id="me", epoch=epoch)
    assert after.entries == ()


@pytest.mark.parametrize(
    ("error", "num_told"), [(KeyboardInterrupt(), 0), (ZeroDivisionError("ours"), 1)]
)
def test_a_fault_is_told_and_a_second_interrupt_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, num_told: int
) -> None:
    """A second Ctrl-C comes up in whatever task runs just then, and ends the process."""
    config = Config(registry=RegistryConfig(url=f"sqlite:///{tmp_path / 'r.sqlite3'}"))

    async def scenario() -> None:
        member = RegistryMember(config, clock=SystemClock(), instance_id="me")

        failed = asyncio.Event()

        async def fail() -> None:
            failed.set()
            raise error

        monkeypatch.setattr(member.cluster, "run", fail)
        member.start(instance=instance("me"), engines=list)
        await failed.wait()
        await asyncio.sleep(0)
        await member.stop()
        await member.close()

    is_interrupted = isinstance(error, KeyboardInterrupt)
    ends = pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext()
    with capture_logs() as logs, ends:
        asyncio.run(scenario())

    told = [each["reason"] for each in logs if each["event"] == "registry.task_failed"]
    assert told == ["ZeroDivisionError('ours')"] * num_told


def raw(key: str, document: object) -> RegistryEntry:
    value = msgspec.json.encode(document)
    return RegistryEntry(key=key, value=value, create_revision=1, mod_revision=1, lease_id=None)


def test_rows_of_a_higher_format_are_left_out_with_their_writer() -> None:
    """The other rows of that process are read, and its version is where every format has it."""
    engine_row = msgspec.to_builtins(engine("e"))
    rows = {
        instance_key("a"): msgspec.to_builtins(instance("a")),
        instance_key("b"): {"format": 3, "version": "9.9", "peer_endpoint": "tcp://h:1"},
        engine_key("e", "a"): engine_row | {"format": 1, "new": [None]},
        engine_key("e", "b"): engine_row | {"format": 2, "pool": 7},
        engine_key("e", "gone"): engine_row | {"state": "napping"},
        engine_key("e", "odd"): engine_row | {"format": 0},
        ELECTION_KEY: {"instance_id": "b", "format": 2},
    }
    listing = Listing(entries=tuple(raw(*each) for each in sorted(rows.items())), revision=1)

    view = read_workers(listing)

    assert [row.instance_id for row in view.instances] == ["a"]
    assert view.engines == (engine("e"),)
    assert view.leader is None
    assert view.unreadable == tuple(view.why_unreadable)
    assert view.why_unreadable == {
        "election/rebalancing": "format 2, and this dsched reads up to 1",
        "engines/e/b": "written by dsched 9.9, instance b: format 2, and this dsched reads up to 1",
        "engines/e/gone": "written by instance gone: Invalid enum value 'napping' - at `$.state`",
        "engines/e/odd": "written by instance odd: Expected `int` >= 1 - at `$.format`",
        "instances/b": "written by dsched 9.9, instance b: format 3, and this dsched reads up to 1",
    }


def test_a_row_that_cannot_be_read_is_logged_once(tmp_path: Path) -> None:
    """A row is written anew every second, and by each start of a process."""
    config = Config(registry=RegistryConfig(url=f"sqlite:///{tmp_path / 'r.sqlite3'}"))
    member = RegistryMember(config, clock=SystemClock(), instance_id="me")
    bad, worse = ({"format": number} for number in (2, 3))
    told = []
    for rows in ({"a": bad}, {"a": bad, "b": bad}, {"a": worse}, {}, {"a": worse}):
        entries = tuple(raw(instance_key(name), row) for name, row in rows.items())
        with capture_logs() as logs:
            member.tell_faults(read_workers(Listing(entries=entries, revision=1)))
        told.append([each["key"] for each in logs if each["event"] == "registry.row_unreadable"])

    assert told == [["instances/a"], ["instances/b"], ["instances/a"], [], ["instances/a"]]


async def test_conflicts_of_other_processes_are_seen(tmp_path: Path) -> None:
    """Another dsched calls another engine by the same id."""
    url = f"sqlite:///{tmp_path / 'r.sqlite3'}"
    other = open_registry(url, clock=SystemClock())
    row = engine("e", url="http://elsewhere:1")
    await other.put(engine_key("e", "other"), msgspec.json.encode(row))
    config = Config(registry=RegistryConfig(url=url))
    member = RegistryMember(config, clock=SystemClock(), instance_id="me")
    member.start(instance=instance("me"), engines=lambda: [engine("e", url="http://here:1")])
    async with asyncio.timeout(10):
        while not member.cluster.workers().conflicts:
            await asyncio.sleep(0.02)
    (conflict,) = member.cluster.workers().conflicts
    await member.stop()
    await member.close()
    await other.close()

    assert conflict == "engine id e has more than one url: http://elsewhere:1, http://here:1"


@pytest.fixture
def etcd_port() -> Iterator[int]:
    """Where nobody listens."""
    with refusing_port() as port:
        yield port


def etcd_member(port: int, *, is_required: bool) -> RegistryMember:
    """A member with one endpoint."""
    registry = RegistryConfig(url=f"etcd://127.0.0.1:{port}", required=is_required)
    return RegistryMember(
        Config(registry=registry), clock=SystemClock(), instance_id="me", start_wait_s=0.3
    )


async def test_start_waits_a_while_for_a_required_etcd_and_then_gives_up(etcd_port: int) -> None:
    """Not at the first refusal, and not for ever."""
    member = etcd_member(etcd_port, is_required=True)
    started_s = asyncio.get_running_loop().time()

    async with asyncio.timeout(10):
        with pytest.raises(ConfigError, match=r"^\$\.registry\.url: no etcd endpoint answers: "):
            await member.check()
    waited_s = asyncio.get_running_loop().time() - started_s
    await member.close()

    assert waited_s >= 0.3


async def test_start_does_not_wait_for_an_etcd_that_is_not_required(etcd_port: int) -> None:
    """It is registered once it can be."""
    member = etcd_member(etcd_port, is_required=False)

    async with asyncio.timeout(10):
        await member.check()
    await member.close()

    assert not member.registration.status().is_registered


def test_who_drives_an_engine_is_known_by_their_keys() -> None:
    """Each dsched process finds its own number among those over the same pool."""
    rows = [("e0", "b"), ("e0", "a"), ("e1", "c"), ("e00", "d")]
    entries = tuple(
        entry(engine_key(engine_id, instance_id), engine(engine_id), index + 1)
        for index, (engine_id, instance_id) in enumerate(rows)
    )
    view, _ = follow(ScriptedRegistry([Listing(entries=entries, revision=4)], [[]]))
    pools = [
        PoolSpec(name=name, model=name, engines=(EngineSpec(engine_id=first, model=name),))
        for name, first in (("p", EngineId("e0")), ("q", EngineId("e1")), ("r", EngineId("e9")))
    ]

    assert view.drivers_of("e0") == ("a", "b")
    found = list(find_peers(pools, view, own_id="b"))
    assert found == [("p", 1, 2, False), ("q", 0, 2, False), ("r", 0, 1, False)]
    found = list(find_peers(pools, view, own_id="b", heard=("a",)))
    assert found == [("p", 1, 2, True), ("q", 0, 2, False), ("r", 0, 1, False)]


def test_addresses_of_peers_are_those_of_processes_over_the_same_pool() -> None:
    """One tells nothing, one cannot be read, one is over other engines; a newer one is heard."""
    rows = {name: instance(name, peer_endpoint=f"tcp://h:{name}") for name in ("a", "b", "far")}
    rows["mute"] = instance("mute")
    entries = [entry(instance_key(name), row, 1) for name, row in sorted(rows.items())]
    document = msgspec.to_builtins(instance("new", peer_endpoint="tcp://h:new"))
    future = (
        raw(instance_key("broken"), {"instance_id": "broken", "more": 1}),
        raw(instance_key("new"), document | {"more": 1}),
        raw(instance_key("newest"), document | {"instance_id": "newest", "format": 2}),
    )
    names = ("a", "b", "broken", "mute", "new", "newest")
    entries += [entry(engine_key("e0", name), engine("e0"), 1) for name in names]
    entries.append(entry(engine_key("e1", "far"), engine("e1"), 1))
    listing = Listing(entries=(*entries, *future), revision=1)
    view, _ = follow(ScriptedRegistry([listing], [[]]))
    pool = PoolSpec(name="p", model="m", engines=(EngineSpec(engine_id=EngineId("e0"), model="m"),))

    addresses = {"a": "tcp://h:a", "b": "tcp://h:b", "new": "tcp://h:new"}
    assert peer_addresses([pool], view) == addresses
