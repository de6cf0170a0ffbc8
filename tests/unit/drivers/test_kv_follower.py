"""KvFollower over publishers that speak as vLLM and SGLang do: gaps, restarts, losses."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import zmq

from dsched.drivers.kv_follower import KvEventSource, KvFollower
from dsched.drivers.local import free_port
from dsched.faults import MembershipView
from dsched.faults.membership import GroupView, RankView
from dsched.ids import DpRank, EngineId, RankId
from dsched.routing.prefix_index import EventOutcome
from dsched.states import RankState

ENGINE = EngineId("p0")
RANK = RankId(ENGINE, DpRank(0))
BLOCK = 4
PROMPT = list(range(100, 140))


class Publisher:
    """One DP rank's side: what it published is remembered, and sent again on request."""

    def __init__(self, port: int, replay_port: int) -> None:
        self.context = zmq.Context()
        self.events = self.context.socket(zmq.PUB)
        self.events.linger = 0
        self.events.bind(f"tcp://127.0.0.1:{port}")
        self.replays = self.context.socket(zmq.ROUTER)
        self.replays.linger = 0
        self.replays.bind(f"tcp://127.0.0.1:{replay_port}")
        self.sent: list[bytes] = []
        self.first_kept = 0
        """What is older is forgotten, as by a full buffer."""
        self.num_requests = 0
        self.is_answering = True
        self.time_s = 0.0

    def store(self, num_blocks: int, *, first: int = 0, is_lost: bool = False) -> None:
        """Say that blocks `first`, `first + 1`, ... of the prompt are cached."""
        event = {
            "type": "BlockStored",
            "block_hashes": list(range(first + 1, first + num_blocks + 1)),
            "parent_block_hash": first or None,
            "token_ids": PROMPT[first * BLOCK : (first + num_blocks) * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
        }
        self.publish([event], is_lost=is_lost)

    def remove(self, *block_hashes: int, is_lost: bool = False) -> None:
        event = {"type": "BlockRemoved", "block_hashes": list(block_hashes)}
        self.publish([event], is_lost=is_lost)

    def publish(self, events: list[dict[str, object]], *, is_lost: bool = False) -> None:
        self.time_s += 1.0
        payload = msgspec.msgpack.encode([self.time_s, events, 0])
        seq = len(self.sent)
        self.sent.append(payload)
        if not is_lost:
            self.events.send_multipart([b"kv", seq.to_bytes(8, "big"), payload])

    def restart(self) -> None:
        self.sent = []

    def answer(self) -> None:
        """Answer requests for a replay, if there are any."""
        while True:
            try:
                client, _, start = self.replays.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.num_requests += 1
            if not self.is_answering:
                continue
            first = int.from_bytes(start, "big")
            for seq, payload in enumerate(self.sent):
                if seq >= max(first, self.first_kept):
                    frames = [client, b"", b"kv", seq.to_bytes(8, "big"), payload]
                    self.replays.send_multipart(frames)
            end = (-1).to_bytes(8, "big", signed=True)
            self.replays.send_multipart([client, b"", b"", end, b""])

    def close(self) -> None:
        self.context.destroy(linger=0)


class World:
    """A publisher and who follows it."""

    def __init__(self, *, has_replay: bool = True, replay_timeout_s: float = 30.0) -> None:
        port, replay_port = free_port(), free_port()
        self.publisher = Publisher(port, replay_port)
        source = KvEventSource(
            endpoint=f"tcp://127.0.0.1:{port}",
            replay_endpoint=f"tcp://127.0.0.1:{replay_port}" if has_replay else None,
        )
        self.follower = KvFollower({ENGINE: source}, replay_timeout_s=replay_timeout_s)

    def say(self, state: RankState, epoch: int = 1) -> None:
        rank = RankView(rank_id=RANK, pool="p", ep_group="g", state=state)
        group = GroupView(name="g", pool="p", state=state, ranks=(rank,), reason="")
        self.follower.on_membership_changed(MembershipView(epoch=epoch, groups=(group,)))

    def cached(self) -> int:
        return self.follower.cached_tokens(PROMPT).get(RANK, 0)

    async def until(self, is_so: Callable[[], bool], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_so():
                self.publisher.answer()
                await asyncio.sleep(0.005)

    async def connected(self) -> None:
        """Publish until something is heard: a subscription takes a moment to arrive."""
        async with asyncio.timeout(10.0):
            while not self.follower.num_batches:
                self.publisher.publish([])
                self.publisher.answer()
                await asyncio.sleep(0.01)

    def close(self) -> None:
        self.follower.close()
        self.publisher.close()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.close()


async def test_what_was_cached_before_is_learned_by_a_replay(world: World) -> None:
    """dsched comes up after the engine: its cache is known all the same."""
    world.publisher.store(5)
    world.publisher.remove(5)

    world.say(RankState.UP)
    await world.until(lambda: world.cached() == 4 * BLOCK)

    await world.connected()
    world.publisher.store(1, first=4)
    await world.until(lambda: world.cached() == 5 * BLOCK)


async def test_a_gap_is_filled_by_a_replay(world: World) -> None:
    """A lost message, and the later ones that waited for it, are applied in order."""
    world.say(RankState.UP)
    await world.connected()
    num_requests = world.publisher.num_requests
    world.publisher.store(2)
    world.publisher.store(2, first=2, is_lost=True)
    world.publisher.remove(1, is_lost=True)
    world.publisher.store(1, is_lost=True)
    world.publisher.store(1, first=4)

    await world.until(lambda: world.cached() == 5 * BLOCK)

    assert world.publisher.num_requests == num_requests + 1
    assert world.follower.num_batches["gap"] == 1
    assert world.follower.num_batches["given_up"] == 0


async def test_what_a_publisher_no_longer_has_is_given_up(world: World) -> None:
    """A lost removal would promise a cache that is gone: everything is forgotten."""
    world.say(RankState.UP)
    await world.connected()
    world.publisher.store(5)
    await world.until(lambda: world.cached() == 5 * BLOCK)
    world.publisher.remove(1, is_lost=True)
    world.publisher.first_kept = len(world.publisher.sent)
    world.publisher.store(1)

    await world.until(lambda: world.follower.num_batches["given_up"] == 1)

    assert world.cached() == BLOCK, "what came after it counts"


async def test_a_publisher_that_does_not_answer_is_given_up_in_time() -> None:
    world = World(replay_timeout_s=0.1)
    try:
        world.publisher.is_answering = False
        world.say(RankState.UP)

        await world.until(lambda: world.follower.num_batches["given_up"] == 1)
        await world.connected()
        world.publisher.store(3)

        await world.until(lambda: world.cached() == 3 * BLOCK)
    finally:
        world.close()


async def test_without_replays_a_gap_forgets_the_cache() -> None:
    world = World(has_replay=False)
    try:
        world.say(RankState.UP)
        await world.connected()
        world.publisher.store(5)
        await world.until(lambda: world.cached() == 5 * BLOCK)

        world.publisher.remove(3, is_lost=True)
        world.publisher.store(2)

        await world.until(lambda: world.cached() == 2 * BLOCK)
    finally:
        world.close()


async def test_a_rank_that_goes_down_is_forgotten_and_followed_again(world: World) -> None:
    world.say(RankState.UP)
    await world.connected()
    world.publisher.store(5)
    await world.until(lambda: world.cached() == 5 * BLOCK)

    world.say(RankState.DOWN, epoch=2)
    assert world.follower.cached_tokens(PROMPT) == {}
    assert world.follower.index.num_blocks == 0
    world.publisher.restart()
    world.publisher.store(2)
    world.say(RankState.UP, epoch=3)

    await world.until(lambda: world.cached() == 2 * BLOCK)


async def test_a_restart_that_nobody_noticed_is_noticed_here(world: World) -> None:
    """Lower numbers at a later time: the publisher began anew, with an empty cache."""
    world.say(RankState.UP)
    await world.connected()
    world.publisher.store(5)
    await world.until(lambda: world.cached() == 5 * BLOCK)

    world.publisher.restart()
    world.publisher.store(1)

    await world.until(lambda: world.cached() == BLOCK)
    assert world.follower.num_batches["restarted"] == 1


async def test_a_fault_of_ours_makes_no_rank_deaf(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ tells of what comes after what was read, not of what lies there unread."""
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: faults.append(context["exception"])
    )
    world.say(RankState.UP)
    await world.connected()
    own = world.follower.apply

    def fail_once(*args: Any) -> EventOutcome:
        monkeypatch.setattr(world.follower, "apply", own)
        raise ZeroDivisionError

    monkeypatch.setattr(world.follower, "apply", fail_once)
    for number in range(3):
        world.publisher.store(1, first=number)

    await world.until(lambda: world.cached() == 3 * BLOCK)
    assert list(map(type, faults)) == [ZeroDivisionError]


async def test_messages_that_cannot_be_read_change_nothing(world: World) -> None:
    world.say(RankState.UP)
    await world.connected()
    world.publisher.store(5)
    await world.until(lambda: world.cached() == 5 * BLOCK)

    world.publisher.events.send_multipart([b"kv", b"short", b"x"])
    world.publisher.events.send_multipart([b"kv", (999).to_bytes(8, "big"), b"\xff\xff"])

    await world.until(lambda: world.follower.num_batches["unreadable"] == 2)
    assert world.cached() == 5 * BLOCK


async def test_engines_that_publish_nothing_are_left_alone() -> None:
    follower = KvFollower({})
    rank = RankView(rank_id=RANK, pool="p", ep_group="g", state=RankState.UP)
    group = GroupView(name="g", pool="p", state=RankState.UP, ranks=(rank,), reason="")

    follower.on_membership_changed(MembershipView(epoch=1, groups=(group,)))

    assert follower.cached_tokens(PROMPT) == {}
    follower.close()
