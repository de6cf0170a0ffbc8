"""A recorded router is rebuilt exactly: whatever happened to it, every decision comes out again.

The router is driven by hand here, so that ranks come and go, reports correct the load and prices
are learned in any order; `test_trace_controller_properties.py` does the same to whole controllers.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_reference import plain_changes

from dsched.drivers.wire import RankReport
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId
from dsched.rng import stream
from dsched.routing import DecodeRouter, RankState, RoutingRequest
from dsched.routing import kernels as k
from dsched.routing.snapshot import NUM_VIEW_ROWS, ViewWatch, restore_router, take_snapshot
from dsched.trace import Changes, RingRecorder, replay
from dsched.trace.records import Picked, Record, Released
from dsched.trace.view import TraceViews, picked_request

STATES = (RankState.UP, RankState.UP, RankState.UP, RankState.SUSPECT, RankState.DOWN)
MS = 1_000_000


@dataclass
class Bench:
    """A router that anything may happen to, and its recorder."""

    seed: int
    is_synchronised: bool = False
    num_routers: int = 1
    max_records: int = 100_000
    now_ns: int = 1
    number: int = 0
    running: list[tuple[int, AttemptId]] = field(default_factory=list)
    seqs: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = stream(self.seed, "trace")
        self.router = DecodeRouter(
            router_index=1,
            num_routers=self.num_routers,
            is_synchronised=self.is_synchronised,
            gather_ns=20 * MS if self.is_synchronised else 0,
            max_held_requests=20,
            max_hold_ns=50 * MS,
            request_ns=200_000.0,
            kv_token_ns=26.0,
        )
        self.recorder = RingRecorder(max_records=self.max_records)
        self.recorder.watch("p", self.router)

    def run(self, num_actions: int) -> None:
        actions = (self.arrive, self.arrive, self.arrive, self.grow, self.report, self.end)
        rare = (
            *(self.add_rank, self.change_state, self.remove_rank, self.reprice),
            self.meet_peers,
        )
        for _ in range(2):
            self.add_rank()
        for _ in range(num_actions):
            self.now_ns += int(self.rng.integers(1, 10 * MS))
            pool = rare if self.rng.random() < 0.08 else actions
            pool[int(self.rng.integers(len(pool)))]()
            self.serve_held()
            self.router.validate()

    def add_rank(self) -> None:
        rank_id = RankId(EngineId(f"e{self.rng.integers(4)}"), DpRank(int(self.rng.integers(3))))
        self.router.add_rank(
            rank_id,
            kv_capacity_tokens=int(self.rng.integers(500, 2_000)),
            max_running_requests=int(self.rng.integers(1, 6)),
        )

    def live(self) -> list[int]:
        states = self.router.ledger.table[k.STATE, : self.router.num_ranks]
        return np.flatnonzero(states != k.REMOVED).tolist()

    def change_state(self) -> None:
        for rank in self.live()[:1]:
            self.router.set_rank_state(rank, STATES[int(self.rng.integers(len(STATES)))])

    def remove_rank(self) -> None:
        if len(self.live()) > 1:
            self.router.remove_rank(self.live()[int(self.rng.integers(len(self.live())))])

    def meet_peers(self) -> None:
        """Other dsched processes come and go."""
        num_routers = int(self.rng.integers(1, 4))
        index = int(self.rng.integers(num_routers))
        hears_peers = bool(self.rng.random() < 0.5)
        if self.router.set_peers(
            router_index=index, num_routers=num_routers, hears_peers=hears_peers
        ):
            self.recorder.on_peers("p", self.now_ns)

    def reprice(self) -> None:
        self.router.set_prices(
            request_ns=float(self.rng.integers(1, 400_000)), kv_token_ns=float(self.rng.random())
        )

    def arrive(self) -> None:
        self.number += 1
        request_id = RequestId(f"r{self.number}")
        request = RoutingRequest(
            num_prompt_tokens=int(self.rng.integers(1, 700)),
            pinned_dp_rank=int(self.rng.integers(3)) if self.rng.random() < 0.2 else None,
            excluded_ranks=(0,) if self.rng.random() < 0.1 else (),
            num_reserved_tokens=int(self.rng.integers(100)),
            tenant=f"t{self.rng.integers(3)}",
            priority=int(self.rng.integers(3)),
        )
        decision = self.router.pick(request, self.now_ns)
        self.recorder.on_pick("p", request_id, request, decision, self.now_ns)
        if decision.rank is not None and not self.router.num_held:
            self.book(decision.rank, request.num_prompt_tokens)
        elif decision.reason.value in ("queued", "no_rank_up"):
            is_accepted = self.router.hold(request, request_id, self.now_ns)
            self.recorder.on_hold(
                "p", request_id, request, is_accepted=is_accepted, now_ns=self.now_ns
            )

    def book(self, rank: int, num_tokens: int) -> None:
        self.number += 1
        attempt_id = AttemptId(f"a{self.number}")
        self.router.book(rank, attempt_id, num_prompt_tokens=num_tokens, now_ns=self.now_ns)
        self.running.append((rank, attempt_id))

    def serve_held(self) -> None:
        while (held := self.router.next_held(self.now_ns)) is not None:
            self.recorder.on_release("p", held, self.now_ns)
            is_served = held.decision.rank is not None
            self.router.drop_held(held.request_key, is_served=is_served)
            self.recorder.on_drop(
                "p", RequestId(str(held.request_key)), is_served=is_served, now_ns=self.now_ns
            )
            if held.decision.rank is not None:
                self.book(held.decision.rank, 100)

    def grow(self) -> None:
        for _, attempt_id in self.running:
            self.router.add_tokens(attempt_id, int(self.rng.integers(1, 4)))

    def end(self) -> None:
        if self.running:
            self.router.release(self.running.pop(int(self.rng.integers(len(self.running))))[1])

    def report(self) -> None:
        rank = self.live()[int(self.rng.integers(len(self.live())))]
        seq = self.seqs[rank] = self.seqs.get(rank, 0) + 1
        rank_id = self.router.rank_id(rank)
        self.router.apply_report(
            rank,
            RankReport(
                engine_id=rank_id.engine_id,
                incarnation="i",
                dp_rank=rank_id.dp_rank,
                seq=seq,
                step=seq,
                num_running=int(self.rng.integers(6)),
                num_waiting=0,
                num_kv_tokens=int(self.rng.integers(2_000)),
                num_waiting_prefill_tokens=0,
                kv_capacity_tokens=int(self.rng.integers(500, 2_000)),
                step_ns=int(self.rng.integers(10 * MS, 30 * MS)),
            ),
            self.now_ns,
        )


@pytest.mark.slow
@pytest.mark.parametrize("is_synchronised", [False, True])
@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 32), num_routers=st.integers(1, 3), num_actions=st.integers(0, 120))
def test_every_decision_comes_out_again(
    seed: int, num_routers: int, num_actions: int, *, is_synchronised: bool
) -> None:
    """No difference, and after the last decision the view is that of the live router."""
    bench = Bench(seed, is_synchronised=is_synchronised, num_routers=num_routers)
    bench.run(num_actions)
    records = bench.recorder.records()

    result = replay(records)

    assert result.first is None
    assert result.num_passed == 0
    num_decisions = sum(isinstance(record, Picked | Released) for record in records)
    assert sum(result.num_decisions.values()) == num_decisions


@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 32))
def test_a_ring_that_has_dropped_its_start_is_exact_from_its_first_keyframe(seed: int) -> None:
    """Every segment begins with a keyframe, so nothing of what is left is passed over."""
    bench = Bench(seed, max_records=256)
    bench.run(400)

    records = bench.recorder.records()
    result = replay(records)

    assert len(records) < bench.recorder.num_records
    assert (result.first, result.num_passed) == (None, 0)
    assert result.num_decisions["route"] > 20


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 32))
def test_the_view_is_rebuilt_bit_for_bit(seed: int) -> None:
    """Table, prices, held requests and counters, not just the choices they lead to."""
    bench = Bench(seed)
    bench.run(60)
    request = RoutingRequest(num_prompt_tokens=5)
    decision = bench.router.pick(request, bench.now_ns)
    bench.recorder.on_pick("p", RequestId("last"), request, decision, bench.now_ns)
    views = TraceViews()
    for record in bench.recorder.records():
        views.apply(record)
    router = views.router("p")
    assert router is not None

    rebuilt, live = take_snapshot(router), take_snapshot(bench.router)

    for one, other in ((rebuilt.table, live.table), (rebuilt.prices, live.prices)):
        np.testing.assert_array_equal(one, other)
    for name in ("rank_ids", "tie_offset", "held", "served_tokens", "next_number", "settings"):
        assert getattr(rebuilt, name) == getattr(live, name), name


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 32))
def test_another_price_is_found_where_it_matters(seed: int) -> None:
    """With requests for nothing: a plain replay of the changed choices gives them again."""
    bench = Bench(seed)
    bench.run(80)
    records = bench.recorder.records()

    result = replay(records, Changes(request_ns=0.0, kv_token_ns=1.0))

    num_different, first = choices_that_differ(records, request_ns=0.0, kv_token_ns=1.0)
    assert sum(result.num_different.values()) == num_different
    assert (None if result.first is None else result.first.record) == first


def choices_that_differ(
    records: list[Record], *, request_ns: float, kv_token_ns: float
) -> tuple[int, int | None]:
    """How many, and the place of the first: by hand over rebuilt views."""
    views = TraceViews()
    places = []
    for place, record in enumerate(records):
        views.apply(record)
        if not isinstance(record, Picked | Released):
            continue
        router = views.router("p")
        assert router is not None
        copy = restore_router(take_snapshot(router))
        copy.set_prices(request_ns=request_ns, kv_token_ns=kv_token_ns)
        if isinstance(record, Picked):
            decision = copy.pick(picked_request(record), record.time_ns)
            request_id = record.request_id
        else:
            held = copy.next_held(record.time_ns)
            assert held is not None
            decision, request_id = held.decision, str(held.request_key)
        recorded = (record.request_id, record.rank, record.reason, record.num_eligible)
        if recorded != (request_id, decision.rank, decision.reason.value, decision.num_eligible):
            places.append(place)
    return len(places), places[0] if places else None


@given(seed=st.integers(0, 1 << 32), num_ranks=st.integers(1, 40))
def test_changes_are_those_of_the_plain_twin(seed: int, num_ranks: int) -> None:
    """The compiled difference equals numpy's, on few changes, many and none."""
    rng = np.random.default_rng(seed)
    router = DecodeRouter()
    for number in range(num_ranks):
        router.add_rank(
            RankId(EngineId("e"), DpRank(number)), kv_capacity_tokens=9, max_running_requests=9
        )
    watch = ViewWatch(router)
    seen = np.zeros((NUM_VIEW_ROWS, num_ranks), np.int64)
    table = router.ledger.table[:, :num_ranks]
    prices = router._prices[:, :num_ranks]
    for share in (0.0, 0.05, 1.0, 0.0):
        changed = rng.random(table.shape) < share
        table[changed] = rng.integers(-(1 << 62), 1 << 62, table.shape)[changed]
        prices[rng.random(prices.shape) < share] = rng.normal()
        expected = plain_changes(table, np.ascontiguousarray(prices), seen)

        cells = np.frombuffer(watch.changes(), np.int64).reshape(-1, 2)

        assert [tuple(cell) for cell in cells.tolist()] == expected
        seen = np.vstack([table, np.ascontiguousarray(prices).view(np.int64)])
