"""Routers that tell each other what they have: nothing is counted twice, nothing drifts."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing import kernels as k
from dsched.routing.decode import DecodeRouter
from dsched.routing.peers import (
    PeerMessage,
    PeerRankLoad,
    apply_peer_message,
    forget_peer,
    own_loads,
)

NUM_RANKS = 3
MS = 1_000_000
STEP_NS = 20 * MS


def rank_name(index: int) -> RankId:
    return RankId(EngineId("e"), DpRank(index))


def make_router() -> DecodeRouter:
    router = DecodeRouter(is_synchronised=True)
    for index in range(NUM_RANKS):
        router.add_rank(rank_name(index), kv_capacity_tokens=10**6, max_running_requests=64)
    return router


@dataclass
class Peer:
    """Another dsched process, by the router that it has."""

    name: str
    router: DecodeRouter = field(default_factory=make_router)
    bookings: dict[str, int] = field(default_factory=dict)
    seq: int = 0

    def message(self, *, is_full: bool) -> PeerMessage:
        ranks = self.router.ledger.take_touched()
        self.seq += 1
        return PeerMessage(
            peer=self.name,
            seq=self.seq,
            is_full=is_full,
            ranks=own_loads(self.router, range(NUM_RANKS) if is_full else ranks),
            longest_tokens=self.router.longest.num_own_tokens(),
        )


class World:
    """Ranks, one router that listens, peers that talk, and clients that go to engines directly."""

    def __init__(self, seed: int, *, has_reports: bool) -> None:
        self.rng = stream(seed, "peers")
        self.has_reports = has_reports
        self.me = Peer("me")
        self.peers = [Peer("p0"), Peer("p1")]
        self.dead: list[tuple[int, str]] = []
        """(when nobody believes it any more, name)."""
        self.running: list[dict[str, int]] = [{} for _ in range(NUM_RANKS)]
        """KV tokens of what runs on each rank."""
        self.mail: list[tuple[int, PeerMessage | tuple[int, RankReport]]] = []
        self.count = 0
        self.seq = 0
        self.now_ns = 0

    def step(self) -> None:
        self.now_ns += STEP_NS
        for owner in (self.me, *self.peers):
            for _ in range(int(self.rng.poisson(0.6))):
                self.book(owner)
        if self.has_reports and self.rng.random() < 0.2:
            self.count += 1
            self.running[int(self.rng.integers(NUM_RANKS))][f"direct-{self.count}"] = 500
        self.grow_and_end()
        self.talk()
        if self.has_reports:
            self.report(loss=0.2)
        self.deliver()
        if self.rng.random() < 0.02:
            self.kill(int(self.rng.integers(len(self.peers))))
        self.check()

    def book(self, owner: Peer) -> None:
        self.count += 1
        key, rank = f"{owner.name}-{self.count}", int(self.rng.integers(NUM_RANKS))
        tokens = int(self.rng.integers(1, 20_000))
        owner.router.book(rank, key, num_prompt_tokens=tokens, now_ns=self.now_ns)
        owner.bookings[key] = rank
        self.running[rank][key] = tokens

    def grow_and_end(self) -> None:
        owners = {key: one for one in (self.me, *self.peers) for key in one.bookings}
        for requests in self.running:
            for key in list(requests):
                requests[key] += 1
                owner = owners.get(key)
                if owner is not None:
                    owner.router.add_tokens(key, 1)
                if self.rng.random() < 0.1:
                    del requests[key]
                    if owner is not None:
                        owner.router.release(key)
                        del owner.bookings[key]

    def talk(self) -> None:
        """Most messages come at once; some never, twice, or late and so out of order."""
        for peer in self.peers:
            message = peer.message(is_full=bool(self.rng.random() < 0.1))
            self.send(message, loss=0.1, late=0.1)

    def report(self, *, loss: float) -> None:
        for rank in range(NUM_RANKS):
            self.send((rank, self.report_of(rank)), loss=loss, late=0.1)

    def report_of(self, rank: int) -> RankReport:
        self.seq += 1
        return RankReport(
            engine_id="e",
            incarnation="a",
            dp_rank=rank,
            seq=self.seq,
            step=self.seq,
            num_running=len(self.running[rank]),
            num_waiting=0,
            num_kv_tokens=sum(self.running[rank].values()),
            num_waiting_prefill_tokens=0,
            kv_capacity_tokens=10**6,
            step_ns=STEP_NS,
        )

    def send(self, item: PeerMessage | tuple[int, RankReport], *, loss: float, late: float) -> None:
        if self.rng.random() < loss:
            return
        due_ns = self.now_ns
        if self.rng.random() < late:
            due_ns += int(self.rng.integers(1, 10)) * STEP_NS
        self.mail.append((due_ns, item))
        if self.rng.random() < 0.1:
            self.mail.append((due_ns + STEP_NS, item))

    def deliver(self) -> None:
        due = [item for due_ns, item in self.mail if due_ns <= self.now_ns]
        self.mail = [entry for entry in self.mail if entry[0] > self.now_ns]
        for index in self.rng.permutation(len(due)):
            item = due[index]
            if isinstance(item, PeerMessage):
                apply_peer_message(self.me.router, item)
            else:
                self.me.router.apply_report(item[0], item[1], self.now_ns)
        for due_ns, name in self.dead:
            if due_ns <= self.now_ns:
                forget_peer(self.me.router, name)

    def kill(self, index: int) -> None:
        """A peer dies with its requests. What it said may still arrive, even after it is gone."""
        peer = self.peers[index]
        for requests in self.running:
            for key in list(requests):
                if key in peer.bookings:
                    del requests[key]
        for delay in (2, 15):  # the registry says so; then its silence does, for good
            self.dead.append((self.now_ns + delay * STEP_NS, peer.name))
        self.count += 1
        self.peers[index] = Peer(f"p{index}-{self.count}")

    def check(self) -> None:
        self.me.router.validate()  # no sum is off or negative; without reports others are as told
        for rank in range(NUM_RANKS):
            load = self.me.router.load_of(rank)
            own = [self.running[rank][key] for key in self.running[rank] if key in self.me.bookings]
            assert (load.num_own_running, load.num_own_kv_tokens) == (len(own), sum(own))

    def settle(self) -> None:
        """Nothing more happens, and messages get through."""
        for _ in range(20):
            self.now_ns += STEP_NS
            self.deliver()
        for _ in range(3):
            self.now_ns += 1_000 * MS
            for peer in self.peers:
                apply_peer_message(self.me.router, peer.message(is_full=True))
            if self.has_reports:
                for rank in range(NUM_RANKS):
                    self.me.router.apply_report(rank, self.report_of(rank), self.now_ns)

    def total(self, rank: int) -> tuple[int, int]:
        load = self.me.router.load_of(rank)
        return (
            load.num_own_running + load.num_other_running,
            load.num_own_kv_tokens + load.num_other_kv_tokens,
        )


@pytest.mark.slow
@given(seed=st.integers(0, 1 << 30), has_reports=st.booleans())
@settings(max_examples=25, deadline=None)
def test_the_ledger_ends_exact_whatever_happens(seed: int, *, has_reports: bool) -> None:
    world = World(seed, has_reports=has_reports)
    for _ in range(150):
        world.step()

    world.settle()

    for rank, requests in enumerate(world.running):
        assert world.total(rank) == (len(requests), sum(requests.values()))
    longest = max(
        (peer.router.longest.num_own_tokens() for peer in (world.me, *world.peers)), default=0
    )
    assert world.me.router.longest.num_tokens() == longest
    for requests in world.running:
        for key in [key for key in requests if key in world.me.bookings]:
            world.me.router.release(key)
    for peer in world.peers:
        forget_peer(world.me.router, peer.name)
    world.running = [{} for _ in range(NUM_RANKS)]
    world.peers = []
    world.settle()
    assert not world.me.router.ledger.table[: k.SHARED_KV + 1, :NUM_RANKS].any()


def message(seq: int, *, running: int, kv: int, is_full: bool = False) -> PeerMessage:
    load = PeerRankLoad(rank_id=rank_name(0), num_running=running, num_kv_tokens=kv)
    return PeerMessage(peer="p", seq=seq, is_full=is_full, ranks=(load,), longest_tokens=kv)


def report(seq: int, *, running: int, kv: int) -> RankReport:
    return RankReport(
        engine_id="e", incarnation="a", dp_rank=0, seq=seq, step=seq, num_running=running,
        num_waiting=0, num_kv_tokens=kv, num_waiting_prefill_tokens=0, kv_capacity_tokens=10**6,
        step_ns=STEP_NS,
    )  # fmt: skip


def others(router: DecodeRouter) -> tuple[int, int]:
    load = router.load_of(0)
    return load.num_other_running, load.num_other_kv_tokens


def test_a_booking_is_seen_before_any_report() -> None:
    router = make_router()

    assert apply_peer_message(router, message(1, running=1, kv=900))

    assert others(router) == (1, 900)
    assert router.longest.num_tokens() == 900
    router.validate()


@pytest.mark.parametrize("is_report_first", [False, True])
def test_a_booking_is_counted_once_whoever_is_faster(*, is_report_first: bool) -> None:
    router = make_router()
    router.apply_report(0, report(1, running=0, kv=0), 0)
    steps = [
        lambda: router.apply_report(0, report(2, running=1, kv=900), STEP_NS),
        lambda: apply_peer_message(router, message(1, running=1, kv=900)),
    ]

    for step in steps if is_report_first else reversed(steps):
        step()

    assert others(router) == (1, 900)


@pytest.mark.parametrize("is_report_first", [False, True])
def test_an_end_is_counted_once_whoever_is_faster(*, is_report_first: bool) -> None:
    router = make_router()
    apply_peer_message(router, message(1, running=2, kv=1_900))
    for seq in range(1, 20):
        router.apply_report(0, report(seq, running=2, kv=1_900), seq * STEP_NS)
    steps = [
        lambda: router.apply_report(0, report(20, running=1, kv=900), 20 * STEP_NS),
        lambda: apply_peer_message(router, message(2, running=1, kv=900)),
    ]

    for step in steps if is_report_first else reversed(steps):
        step()

    assert others(router) == (1, 900)


def test_a_report_that_is_older_than_a_booking_does_not_hide_it() -> None:
    router = make_router()
    router.apply_report(0, report(1, running=0, kv=0), 0)
    apply_peer_message(router, message(1, running=1, kv=900))

    router.apply_report(0, report(2, running=0, kv=0), STEP_NS)

    assert others(router) == (1, 900)


def test_load_of_a_peer_that_a_report_denies_is_given_up() -> None:
    """What a peer said last and cannot take back must not stay: its end was lost."""
    router = make_router()
    apply_peer_message(router, message(1, running=1, kv=900))

    for seq in range(1, 20):
        router.apply_report(0, report(seq, running=0, kv=0), seq * STEP_NS)

    assert others(router) == (0, 0)


def test_an_old_message_changes_nothing() -> None:
    router = make_router()
    assert apply_peer_message(router, message(5, running=1, kv=900))

    assert not apply_peer_message(router, message(4, running=3, kv=9_000))
    assert not apply_peer_message(router, message(5, running=1, kv=900))

    assert others(router) == (1, 900)


def test_a_full_message_ends_what_it_does_not_name() -> None:
    router = make_router()
    apply_peer_message(router, message(1, running=1, kv=900))

    apply_peer_message(
        router, PeerMessage(peer="p", seq=2, is_full=True, ranks=(), longest_tokens=0)
    )

    assert others(router) == (0, 0)
    assert router.longest.num_tokens() == 0


def test_a_new_start_of_an_engine_leaves_what_peers_say() -> None:
    """A peer that had the engine first is heard before the engine's own hello."""
    router = make_router()
    apply_peer_message(router, message(1, running=1, kv=900))

    router.set_incarnation(0, "b")

    assert others(router) == (1, 900)
    router.validate()


def test_a_rank_number_that_is_used_again_starts_without_peers() -> None:
    router = make_router()
    apply_peer_message(router, message(1, running=1, kv=900))
    router.remove_rank(0)

    rank = router.add_rank(
        RankId(EngineId("other"), DpRank(0)), kv_capacity_tokens=10, max_running_requests=1
    )

    assert rank == 0
    assert others(router) == (0, 0)
    router.validate()


def test_a_negative_load_is_refused() -> None:
    router = make_router()

    with pytest.raises(ValueError, match="-1 requests and 5 KV tokens on rank 0"):
        router.ledger.tell("p", 0, num_running=-1, num_kv_tokens=5)
