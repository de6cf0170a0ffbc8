"""What dsched processes tell each other: read, believed, dropped, forgotten."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
from structlog.testing import capture_logs

from dsched.clock import ManualClock
from dsched.config import Config, RoutingConfig
from dsched.config_checks import check_config
from dsched.errors import ConfigError
from dsched.ids import DpRank, EngineId, RankId
from dsched.registry.peer_channel import PEER_VERSION, PeerChannel, PeerNews, PoolNews, RankNews
from dsched.routing.peers import (
    PeerMessage,
    PeerPrefillMessage,
    PeerRankLoad,
    PeerWorkerLoad,
)

S = 1_000_000_000
DEEP = b"\x91" * 100_000 + b"\xc0"


class FakePeering:
    """Keeps what it hears; has one rank to tell of."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, PeerMessage]] = []
        self.heard_prefills: list[tuple[str, PeerPrefillMessage]] = []
        self.prefill_news_due: list[tuple[str, list[PeerWorkerLoad]]] = []
        self.forgotten: list[str] = []
        self.is_listened_to = False
        self.touched = False

    def set_listened_to(self, *, is_listened_to: bool) -> None:
        self.is_listened_to = is_listened_to

    def news(self, *, is_full: bool) -> Iterator[tuple[str, tuple[PeerRankLoad, ...], int]]:
        if is_full or self.touched:
            self.touched = False
            rank_id = RankId(EngineId("e"), DpRank(1))
            yield "p", (PeerRankLoad(rank_id=rank_id, num_running=2, num_kv_tokens=30),), 20

    def apply(self, pool: str, message: PeerMessage) -> bool:
        self.heard.append((pool, message))
        return pool == "p"

    def prefill_news(self, *, is_full: bool) -> Iterator[tuple[str, list[PeerWorkerLoad]]]:
        yield from self.prefill_news_due

    def apply_prefills(self, pool: str, message: PeerPrefillMessage) -> bool:
        self.heard_prefills.append((pool, message))
        return pool == "prefill"

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)


class Sent:
    """A socket that keeps what is sent."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def send(self, payload: bytes, flags: int) -> None:
        self.payloads.append(payload)


class Wired:
    """A channel whose sockets are never read by themselves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.peering = FakePeering()
        self.channel = PeerChannel(
            endpoint="tcp://127.0.0.1:*",
            instance_id="me",
            peering=self.peering,  # type: ignore[arg-type]
            clock=self.clock,
            full_interval_s=3_600.0,
        )


@pytest.fixture
async def wired() -> AsyncIterator[Wired]:
    made = Wired()
    made.channel.start()
    made.channel.follow({"peer": "tcp://127.0.0.1:1", "me": made.channel.endpoint})
    yield made
    made.channel.close()
    made.channel.close()


def news(peer: str = "peer", *, seq: int = 1, version: int = PEER_VERSION) -> bytes:
    pool = PoolNews(pool="p", longest_tokens=9, ranks=(RankNews("e", 0, 1, 9),))
    return msgspec.msgpack.encode(
        PeerNews(peer_version=version, instance_id=peer, seq=seq, is_full=False, pools=(pool,))
    )


async def test_what_a_peer_says_is_applied(wired: Wired) -> None:
    wired.channel.receive(news())

    ((pool, message),) = wired.peering.heard
    assert (pool, message.peer, message.seq, message.longest_tokens) == ("p", "peer", 1, 9)
    assert message.ranks == (
        PeerRankLoad(rank_id=RankId(EngineId("e"), DpRank(0)), num_running=1, num_kv_tokens=9),
    )
    assert wired.channel.peers == ("peer",)
    assert wired.channel.num_messages["applied"] == 1


@pytest.mark.parametrize(
    ("payload", "outcome"),
    [
        (b"", "malformed"),
        (b"\xff\xff", "malformed"),
        (msgspec.msgpack.encode({"instance_id": "peer"}), "malformed"),
        (news().replace(b"\x09", b"\xff"), "malformed"),
        (news(version=0), "malformed"),
        (news(version=PEER_VERSION + 1), "version"),
        (msgspec.msgpack.encode({"instance_id": "peer", "peer_version": 9}), "version"),
        (msgspec.msgpack.encode({"instance_id": "peer", "more": None})[:-1] + DEEP, "malformed"),
        (news("nobody"), "foreign"),
        (news("me"), "foreign"),
    ],
)
async def test_what_cannot_be_used_is_counted(wired: Wired, payload: bytes, outcome: str) -> None:
    wired.channel.receive(payload)

    assert wired.peering.heard == []
    assert dict(wired.channel.num_messages) == {outcome: 1}
    assert wired.channel.peers == ()


async def test_work_on_prefill_workers_is_told_as_it_is_heard(wired: Wired) -> None:
    """Without other news too; a message of prefill pools alone is applied or old like others."""
    load = PeerWorkerLoad(
        rank_id=RankId(EngineId("e"), DpRank(3)), work_ns=30, head_ns=20, age_ns=10
    )
    wired.peering.prefill_news_due = [("prefill", [load]), ("other", [])]
    sent = Sent()
    wired.channel._out.close()
    wired.channel._out = sent  # type: ignore[assignment]

    wired.channel.publish()
    (payload,) = sent.payloads
    heard = payload.replace(b"\xa2me", b"\xa4peer")
    wired.channel.receive(heard)
    wired.channel.receive(heard.replace(b"\xa7prefill", b"\xa7unknown"))

    (pool, message), (other, _), *_ = wired.peering.heard_prefills
    assert (pool, other) == ("prefill", "other")
    assert message == PeerPrefillMessage(peer="peer", seq=1, is_full=False, workers=(load,))
    assert wired.peering.heard == []
    assert dict(wired.channel.num_messages) == {"sent": 1, "applied": 1, "old": 1}


async def test_what_a_newer_peer_adds_is_ignored(wired: Wired) -> None:
    """Fields, and numbers at the end of a rank."""
    message = msgspec.msgpack.decode(news())
    message["more"] = message["pools"][0]["more"] = {"a": 1}
    message["pools"][0]["ranks"][0] += [7, "new"]

    wired.channel.receive(msgspec.msgpack.encode(message))
    wired.channel.receive(news(seq=2))

    (_, grown), (_, known) = wired.peering.heard
    assert (grown.ranks, grown.longest_tokens) == (known.ranks, known.longest_tokens)
    assert dict(wired.channel.num_messages) == {"applied": 2}


async def test_a_peer_that_cannot_be_read_is_named_once(wired: Wired) -> None:
    """Until it has left; strangers are named together, as anybody may call himself anything."""
    newer = news(version=PEER_VERSION + 1)
    broken = msgspec.msgpack.encode({"instance_id": "peer"})
    with capture_logs() as logs:
        for payload in [newer, broken, news("who", version=9), b"?", b"!"] * 3:
            wired.channel.receive(payload)

    told = [(each["event"], each["instance_id"]) for each in logs]
    assert told == [
        ("peer.version_refused", "peer"),
        ("peer.message_unreadable", "peer"),
        ("peer.message_unreadable", "?"),
    ]
    assert (logs[0]["peer_version"], logs[0]["wanted"]) == (PEER_VERSION + 1, PEER_VERSION)
    assert logs[1]["reason"] == "Object missing required field `peer_version`"

    wired.channel.follow({})
    wired.channel.follow({"peer": "tcp://127.0.0.1:1"})
    with capture_logs() as logs:
        wired.channel.receive(newer)
    assert [each["event"] for each in logs] == ["peer.version_refused"]


async def test_a_silent_peer_is_forgotten_once_and_believed_again(wired: Wired) -> None:
    wired.channel.receive(news())
    wired.clock.advance_to(2 * S - 1)
    wired.channel.forget_silent()
    assert wired.peering.forgotten == []

    wired.clock.advance_to(2 * S)
    wired.channel.forget_silent()
    wired.channel.forget_silent()

    assert wired.peering.forgotten == ["peer"]
    assert wired.channel.peers == ()
    wired.channel.receive(news(seq=2))
    assert wired.channel.peers == ("peer",)


async def test_who_leaves_the_registry_is_forgotten_and_not_heard(wired: Wired) -> None:
    wired.channel.receive(news())
    assert wired.peering.is_listened_to

    wired.channel.follow({"me": wired.channel.endpoint})
    wired.channel.receive(news(seq=2))

    assert wired.peering.forgotten == ["peer"]
    assert len(wired.peering.heard) == 1
    assert wired.channel.num_messages["foreign"] == 1
    assert not wired.peering.is_listened_to


async def test_nothing_is_said_without_news_or_without_anybody_to_hear(wired: Wired) -> None:
    wired.channel.publish()
    assert wired.channel.num_messages["sent"] == 0

    wired.peering.touched = True
    wired.channel.publish()
    wired.channel.publish()
    assert wired.channel.num_messages["sent"] == 1

    wired.channel.follow({})
    wired.peering.touched = True
    wired.channel.publish()
    wired.channel.publish(is_full=True)
    assert wired.channel.num_messages["sent"] == 1


async def test_an_address_that_is_none_ends_nothing(wired: Wired) -> None:
    with capture_logs() as logs:
        wired.channel.follow({"peer": "nonsense", "other": "tcp://127.0.0.1:1"})
        wired.channel.follow({"other": "tcp://127.0.0.1:1"})

    assert [line["event"] for line in logs] == ["peer.unreachable"]


async def test_two_processes_hear_each_other() -> None:
    first, second = Wired(), Wired()
    second.channel._instance_id = "other"
    addresses = {}
    for one, name in ((first, "me"), (second, "other")):
        one.channel.start()
        addresses[name] = one.channel.endpoint
    for one in (first, second):
        one.channel.follow(addresses)

    async with asyncio.timeout(20):
        while not (first.peering.heard and second.peering.heard):
            for one in (first, second):
                one.channel.publish(is_full=True)
            await asyncio.sleep(0.01)
    for one in (first, second):
        one.channel.close()

    _, message = first.peering.heard[0]
    assert message.peer == "other"
    assert message.is_full
    assert message.ranks[0].num_kv_tokens == 30
    assert message.longest_tokens == 20


async def test_an_endpoint_in_use_is_refused(wired: Wired) -> None:
    second = Wired()
    second.channel._endpoint = wired.channel.endpoint

    with pytest.raises(ConfigError, match=r"\$\.routing\.peer_endpoint: .*in use"):
        second.channel.start()
    second.channel.close()


@pytest.mark.parametrize("endpoint", ["tcp://*:9000", "tcp://0.0.0.0:*", "tcp://[::]:9000"])
def test_an_address_that_nobody_can_connect_to_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.routing\.peer_endpoint: .* names no address"):
        check_config(Config(routing=RoutingConfig(peer_endpoint=endpoint)))


@pytest.mark.parametrize("endpoint", ["9000", "tcp://127.0.0.1", "http://127.0.0.1:1"])
def test_a_peer_endpoint_of_another_form_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.routing\.peer_endpoint: "):
        check_config(Config(routing=RoutingConfig(peer_endpoint=endpoint)))


def test_no_peer_endpoint_is_fine() -> None:
    check_config(Config(routing=RoutingConfig(peer_endpoint=None)))
