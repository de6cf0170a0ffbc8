"""Prefill routers that tell each other what they booked: no prompt is counted twice or missed.

Workers are simulated, on virtual time: each computes its prompts in order of arrival, in exactly
the time that routers estimate. Without the channel, and without reports, routers do not know of
each other.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.costs.prefill import PrefillCostModel
from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing.peers import (
    PeerPrefillMessage,
    PeerWorkerLoad,
    apply_prefill_message,
    own_work,
)
from dsched.routing.prefill import PrefillConfig, PrefillRouter

NUM_WORKERS = 4
MS = 1_000_000
S = 1_000 * MS
SIZES = (500, 2_000, 8_000, 30_000)
LONGEST_NS = 4_062_500_000
"""What 30,000 tokens take at 12K tokens a second, attention as costly as the rest at 24K."""


def worker_name(index: int) -> RankId:
    return RankId(EngineId("e"), DpRank(index))


def make_router() -> PrefillRouter:
    model = PrefillCostModel.from_coefficients(
        fixed_s=0.0, token_s=1 / 12_000, attention_s=1 / 12_000 / 24_000
    )
    router = PrefillRouter(model, config=PrefillConfig(bucket_bounds=()))
    for index in range(NUM_WORKERS):
        router.add_worker(worker_name(index))
    return router


@dataclass
class Peer:
    """One dsched process, by the router that it has."""

    name: str
    router: PrefillRouter = field(default_factory=make_router)
    seq: int = 0

    def message(self, now_ns: int, *, is_full: bool = False) -> PeerPrefillMessage:
        touched = self.router.take_touched()
        self.seq += 1
        loads = own_work(self.router, range(NUM_WORKERS) if is_full else touched, now_ns)
        if is_full:
            loads = [one for one in loads if one.work_ns]
        return PeerPrefillMessage(
            peer=self.name, seq=self.seq, is_full=is_full, workers=tuple(loads)
        )


@dataclass
class Prompt:
    key: str
    peer: Peer
    arrival_ns: int
    work_ns: int


class Group:
    """Workers, and the routers that send to them."""

    def __init__(self, seed: int, *, num_routers: int, talks: bool) -> None:
        self.rng = stream(seed, "prompts")
        self.which = stream(seed, "routers")
        self.peers = [Peer(f"p{index}") for index in range(num_routers)]
        self.talks = talks
        self.queues: list[deque[Prompt]] = [deque() for _ in range(NUM_WORKERS)]
        self.since_ns = [0] * NUM_WORKERS
        self.ends: list[tuple[int, int]] = []
        """(when a worker ends its prompt, worker)."""
        self.now_ns = 0
        self.count = 0
        self.latencies_ns: list[int] = []

    def run(self, num_prompts: int, *, gap_ns: float, after: Callable[[], None]) -> None:
        """Prompts at random times; `after` looks at the group after everything that happens."""
        for _ in range(num_prompts):
            arrival_ns = self.now_ns + int(self.rng.exponential(gap_ns))
            while self.ends and self.ends[0][0] <= arrival_ns:
                self.end_one()
                after()
            self.now_ns = arrival_ns
            after()
            self.arrive()
            after()
        while self.ends:
            self.end_one()
            after()

    def arrive(self) -> None:
        peer = self.peers[int(self.which.integers(len(self.peers)))]
        size = int(self.rng.choice(SIZES, p=[0.4, 0.3, 0.2, 0.1]))
        decision = peer.router.pick(num_prompt_tokens=size, now_ns=self.now_ns)
        worker = decision.worker
        assert worker is not None
        self.count += 1
        prompt = Prompt(f"r{self.count}", peer, self.now_ns, decision.work_ns)
        peer.router.book(worker, prompt.key, work_ns=prompt.work_ns, bucket=0, now_ns=self.now_ns)
        self.queues[worker].append(prompt)
        if len(self.queues[worker]) == 1:
            self.begin(worker)
        self.tell(peer)

    def begin(self, worker: int) -> None:
        self.since_ns[worker] = self.now_ns
        heappush(self.ends, (self.now_ns + self.queues[worker][0].work_ns, worker))

    def end_one(self) -> None:
        self.now_ns, worker = heappop(self.ends)
        prompt = self.queues[worker].popleft()
        self.latencies_ns.append(self.now_ns - prompt.arrival_ns)
        if self.queues[worker]:
            self.begin(worker)
        assert prompt.peer.router.release(prompt.key, self.now_ns)
        self.tell(prompt.peer)

    def tell(self, peer: Peer) -> None:
        message = peer.message(self.now_ns)
        for other in self.peers:
            if self.talks and other is not peer:
                assert apply_prefill_message(other.router, message, self.now_ns)

    def left_ns(self) -> list[int]:
        """What every worker still has to do, in truth."""
        return [
            sum(prompt.work_ns for prompt in queue) - (self.now_ns - since_ns if queue else 0)
            for queue, since_ns in zip(self.queues, self.since_ns, strict=True)
        ]


@given(seed=st.integers(0, 1 << 30), num_routers=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_all_routers_know_what_is_left_to_do(seed: int, num_routers: int) -> None:
    """To the nanosecond, whoever sent the prompt that a worker is at; so work stays level."""
    group = Group(seed, num_routers=num_routers, talks=True)

    def check() -> None:
        left = group.left_ns()
        for peer in group.peers:
            assert peer.router.backlog_ns(group.now_ns).tolist() == left
            peer.router.validate()
        assert max(left) - min(left) <= LONGEST_NS

    group.run(40, gap_ns=0.3 * S, after=check)
    assert group.left_ns() == [0] * NUM_WORKERS


@pytest.mark.slow
def test_routers_that_do_not_talk_load_workers_unevenly() -> None:
    """What the channel is for, on the same prompts: simulated, 20 seeds, no reports."""
    latency_s, spread_s = {}, {}
    for num_routers, talks in ((1, False), (2, False), (2, True)):
        spreads: list[int] = []
        latencies: list[int] = []
        for seed in range(20):
            group = Group(seed, num_routers=num_routers, talks=talks)
            look = lambda: spreads.append(max(group.left_ns()) - min(group.left_ns()))  # noqa: B023, E731
            group.run(60, gap_ns=0.3 * S, after=look)
            latencies += group.latencies_ns
        spread_s[num_routers, talks] = max(spreads) / S
        latency_s[num_routers, talks] = float(np.mean(latencies)) / S

    assert spread_s[2, True] <= LONGEST_NS / S < 1.5 * LONGEST_NS / S < spread_s[2, False]
    assert latency_s[2, True] == latency_s[1, False], "as if there were one router"
    assert latency_s[2, False] > 1.3 * latency_s[2, True]


@given(seed=st.integers(0, 1 << 30))
@settings(max_examples=20, deadline=None)
def test_a_full_message_mends_whatever_was_lost(seed: int) -> None:
    """Lost, late, repeated, of somebody who is gone: sums hold, and the next words are enough."""
    rng = stream(seed, "mail")
    me, peers = Peer("me"), [Peer("p0"), Peer("p1")]
    booked: list[tuple[Peer, str]] = []
    mail: list[PeerPrefillMessage] = []
    for step in range(60):
        now_ns = step * 100 * MS
        owner = (me, *peers)[int(rng.integers(3))]
        if rng.random() < 0.6:
            worker, work_ns = int(rng.integers(NUM_WORKERS)), int(rng.integers(1, S))
            owner.router.book(worker, f"r{step}", work_ns=work_ns, bucket=0, now_ns=now_ns)
            booked.append((owner, f"r{step}"))
        elif booked:
            owner, key = booked.pop(int(rng.integers(len(booked))))
            owner.router.release(key, now_ns)
        if owner is not me:
            mail += [owner.message(now_ns, is_full=rng.random() < 0.3)] * int(rng.integers(3))
        for index in rng.permutation(len(mail))[: int(rng.integers(3))].tolist():
            apply_prefill_message(me.router, mail[index], now_ns)
        if rng.random() < 0.05:
            me.router.forget_peer(peers[int(rng.integers(2))].name)
        me.router.validate()
        assert (me.router.backlog_ns(now_ns) >= 0).all()

    for peer in peers:
        apply_prefill_message(me.router, peer.message(60 * S, is_full=True), 60 * S)

    for worker in range(NUM_WORKERS):
        works = [peer.router.own_work(worker, 60 * S)[:2] for peer in peers]
        told = sum(work for work, _ in works), max(head for _, head in works)
        assert me.router.peers.of(worker) == told
    for peer in peers:
        me.router.forget_peer(peer.name)
    own = [me.router.own_work(worker, 0)[0] for worker in range(NUM_WORKERS)]
    assert me.router.backlog_ns(0).tolist() == own


def message(
    seq: int, *, work_ns: int, worker: int = 0, is_full: bool = False, age_ns: int = 0
) -> PeerPrefillMessage:
    load = PeerWorkerLoad(
        rank_id=worker_name(worker), work_ns=work_ns, head_ns=min(work_ns, S), age_ns=age_ns
    )
    return PeerPrefillMessage(peer="p", seq=seq, is_full=is_full, workers=(load,))


def report(num_tokens: int) -> RankReport:
    return RankReport(
        engine_id="e", incarnation="a", dp_rank=0, seq=1, step=1, num_running=1, num_waiting=0,
        num_kv_tokens=0, num_waiting_prefill_tokens=num_tokens, kv_capacity_tokens=1, step_ns=0,
    )  # fmt: skip


@pytest.mark.parametrize("is_report_first", [False, True])
def test_work_is_counted_once_whoever_is_faster(*, is_report_first: bool) -> None:
    router = make_router()
    work_ns = router.estimate_work_ns(num_uncached_tokens=2_000, num_cached_tokens=0)
    steps = [
        lambda: router.apply_report(0, report(2_000), 0),
        lambda: apply_prefill_message(router, message(1, work_ns=work_ns), 0),
    ]

    for step in steps if is_report_first else reversed(steps):
        step()

    assert router.backlog_ns(0).tolist() == [work_ns, 0, 0, 0]


def test_what_a_peer_says_is_replaced_by_what_is_newer_alone() -> None:
    router = make_router()

    assert apply_prefill_message(router, message(5, work_ns=3 * S), 0)
    assert not apply_prefill_message(router, message(5, work_ns=9 * S), 0)
    assert not apply_prefill_message(router, message(4, work_ns=9 * S), 0)
    assert router.backlog_ns(0).tolist() == [3 * S, 0, 0, 0]

    assert apply_prefill_message(router, message(6, work_ns=S, worker=1), 0)
    assert router.backlog_ns(0).tolist() == [3 * S, S, 0, 0]
    assert apply_prefill_message(router, message(7, work_ns=S, worker=1, is_full=True), 0)
    assert apply_prefill_message(router, message(8, work_ns=S, worker=NUM_WORKERS), 0)
    assert router.backlog_ns(0).tolist() == [0, S, 0, 0], "unknown workers are left out"

    router.forget_peer("p")
    router.forget_peer("nobody")
    assert router.backlog_ns(0).tolist() == [0, 0, 0, 0]
    assert apply_prefill_message(router, message(1, work_ns=S), 0), "heard again from the beginning"


def test_a_worker_is_at_one_prompt_at_a_time() -> None:
    """Booked behind a peer's prompt that began 400 ms ago, ours has not begun; then theirs ends."""
    router = make_router()
    apply_prefill_message(router, message(1, work_ns=S, age_ns=400 * MS), 10 * S)
    router.book(0, "r", work_ns=2 * S, bucket=0, now_ns=10 * S)
    assert router.backlog_ns(10 * S)[0] == 2_600 * MS
    assert router.own_work(0, 10 * S) == (2 * S, 2 * S, 400 * MS)

    later = 10 * S + 600 * MS
    apply_prefill_message(router, message(2, work_ns=0), later)
    assert router.backlog_ns(later)[0] == 2 * S
    assert router.backlog_ns(later + S)[0] == S


def test_numbers_that_cannot_be_are_refused() -> None:
    router = make_router()

    with pytest.raises(ValueError, match="'p' has 5 ns of work on worker 0, 6 of them"):
        router.tell("p", 0, work_ns=5, head_ns=6, age_ns=0, now_ns=0)
    with pytest.raises(ValueError, match="age_ns is -1"):
        router.tell("p", 0, work_ns=5, head_ns=5, age_ns=-1, now_ns=0)
    with pytest.raises(ValueError, match="worker 4 is not one of the 4 workers"):
        router.tell("p", 4, work_ns=5, head_ns=5, age_ns=0, now_ns=0)
