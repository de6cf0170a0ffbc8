"""What routing must keep whatever the input: twins agree, limits hold, nothing is lost."""

import numpy as np
import pytest
import routing_reference as twin
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsched.ids import DpRank, EngineId, RankId
from dsched.routing import kernels as k
from dsched.routing.decode import DecodeRouter, RoutingReason, RoutingRequest
from dsched.routing.migration import MigrationConfig, MigrationView, plan_migrations
from dsched.routing.prefill import SMALLEST_SHARE, PrefillConfig, PrefillRouter, _split
from dsched.sim.prefill import PrefillGroup

SMALL = st.integers(0, 3)


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Loads from few values, so that ties are common."""
    num_ranks = draw(st.integers(1, 7))
    row = st.lists(SMALL, min_size=num_ranks, max_size=num_ranks)
    table = np.zeros((k.NUM_ROWS, num_ranks), np.int64)
    for index in (k.OWN_RUNNING, k.OTHER_RUNNING):
        table[index] = draw(row)
    for index in (k.OWN_KV, k.OTHER_KV, k.SHARED_KV):
        table[index] = 100 * np.array(draw(row))
    table[k.KV_CAPACITY] = 200 + 100 * np.array(draw(row))
    table[k.KV_LIMIT] = table[k.KV_CAPACITY] - 50
    table[k.MAX_RUNNING] = 1 + np.array(draw(row))
    table[k.STATE] = draw(row)
    table[k.DP_RANK] = np.arange(num_ranks) % 3
    prices = np.ones((3, num_ranks))
    prices[k.REQUEST_NS] = draw(st.sampled_from([1.0, 100.0, 0.0]))
    prices[k.KV_TOKEN_NS] = draw(st.sampled_from([1.0, 0.25]))
    prices[k.BASE_NS] += 100.0 * np.array(draw(row))
    return table, prices


@pytest.mark.slow
@given(
    table=tables(),
    prompt=st.sampled_from([0, 50, 100, 150, 300, 499, 500]),
    reserve=st.sampled_from([0, 100]),
    pin=st.sampled_from([-1, 0, 2]),
    excluded=st.lists(st.integers(0, 6), max_size=3),
    offset=st.integers(0, 6),
    max_state=st.integers(0, 1),
    level=st.sampled_from([0, 100, 300]),
    routers=st.sampled_from([(1, 0), (2, 1), (4, 2), (9, 8)]),
    away=st.sampled_from([k.AWAY, k.AWAY_HEARD]),
    ignore_room=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_a_choice_is_that_of_its_plain_twin(
    table: tuple[np.ndarray, np.ndarray],
    prompt: int,
    reserve: int,
    pin: int,
    excluded: list[int],
    offset: int,
    max_state: int,
    level: int,
    routers: tuple[int, int],
    away: int,
    *,
    ignore_room: bool,
) -> None:
    loads, prices = table
    num_ranks = loads.shape[1]
    arguments = (loads, prices, num_ranks, prompt, prompt + reserve, pin)
    num_routers, router_index = routers
    is_away = np.where(np.arange(num_ranks) % num_routers != router_index, away, k.HERE)
    is_away = is_away.astype(np.int8)
    if not 1 < num_routers <= num_ranks:
        is_away = is_away[:0]
    rest = (offset % num_ranks, max_state, level, is_away, ignore_room)
    fast = k.pick_rank(*arguments, np.array(excluded, np.int64), *rest)
    assert fast == twin.pick_rank(*arguments, excluded, *rest)
    rank = fast[0]
    if rank != k.NO_RANK:
        assert loads[k.STATE, rank] <= max_state, "never a rank in a worse state than allowed"
        assert rank not in excluded
        assert pin in (-1, loads[k.DP_RANK, rank])
        assert ignore_room or twin.has_room(loads, rank, prompt + reserve)


@st.composite
def migration_views(draw: st.DrawFn) -> MigrationView:
    num_ranks = draw(st.integers(2, 5))
    num_sequences = draw(st.integers(0, 14))
    size = st.sampled_from([1, 5, 10, 10, 20, 40, 80])
    ranks = np.array(
        draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_sequences,
                      max_size=num_sequences)),
        np.int64,
    )  # fmt: skip
    kv = np.array(draw(st.lists(size, min_size=num_sequences, max_size=num_sequences)), np.int64)
    prices = np.ones((3, num_ranks)) * np.array([[10.0], [2.0], [1.0]])
    capacity = draw(st.sampled_from([60, 200, 1000]))
    held = np.bincount(ranks, kv, minlength=num_ranks).astype(np.int64)
    return MigrationView(
        sequence_rank=ranks,
        sequence_kv_tokens=kv,
        is_movable=np.array(
            draw(st.lists(st.booleans(), min_size=num_sequences, max_size=num_sequences)), bool
        ),
        num_running=np.bincount(ranks, minlength=num_ranks).astype(np.int64),
        num_kv_tokens=held,
        prices=prices,
        room_tokens=np.maximum(0, capacity - held),
        link_tokens=np.full((2, num_ranks), draw(st.sampled_from([15, 100, 1000]))),
    )


@pytest.mark.slow
@given(view=migration_views(), max_moves=st.integers(0, 5), stall=st.sampled_from([0.0, 30.0]))
@settings(max_examples=300, deadline=None)
def test_moves_keep_every_limit_and_help(view: MigrationView, max_moves: int, stall: float) -> None:
    config = MigrationConfig(max_moves=max_moves, stall_ns_per_token=stall, expected_steps=1.0)
    plan = plan_migrations(view, config)
    assert [(move.sequence, move.to_rank) for move in plan.moves] == twin.plan_moves(view, config)
    assert len(plan.moves) <= max_moves
    moved = [move.sequence for move in plan.moves]
    assert len(set(moved)) == len(moved)
    assert view.is_movable[moved].all()
    received = np.zeros(len(view.num_running), np.int64)
    sent = received.copy()
    for move in plan.moves:
        assert move.from_rank != move.to_rank
        received[move.to_rank] += move.num_kv_tokens
        sent[move.from_rank] += move.num_kv_tokens
    assert (received <= view.room_tokens).all(), "both copies exist during a transfer"
    assert (sent <= view.link_tokens[0]).all()
    assert (received <= view.link_tokens[1]).all()
    if plan.moves:
        assert plan.planned_step_ns <= plan.step_ns
    else:
        assert plan.planned_step_ns == plan.step_ns


@given(
    tokens=st.lists(st.integers(1, 900), min_size=1, max_size=40),
    ends=st.lists(st.integers(0, 60), max_size=60),
    tenants=st.integers(1, 3),
    hold_ns=st.sampled_from([5, 10_000]),
)
@settings(max_examples=150, deadline=None)
def test_every_held_request_gets_a_place(
    tokens: list[int], ends: list[int], tenants: int, hold_ns: int
) -> None:
    """Nothing is lost in the hold queue, and no rank is overfilled before a wait is too long."""
    router = DecodeRouter(max_hold_ns=hold_ns)
    for index in range(2):
        router.add_rank(
            RankId(EngineId("e"), DpRank(index)), kv_capacity_tokens=1000, max_running_requests=3
        )
    running: dict[int, int] = {}
    placed: list[int] = []

    def drain(now_ns: int) -> None:
        while (held := router.next_held(now_ns)) is not None:
            key = held.request_key
            assert isinstance(key, int)
            assert held.decision.rank is not None
            if held.decision.reason is RoutingReason.LEAST_COST:
                load = router.load_of(held.decision.rank)
                assert load.num_own_running < 3
                assert load.num_own_kv_tokens + tokens[key] <= 1000
            else:
                assert now_ns - held.held_ns >= hold_ns
            router.book(held.decision.rank, key, num_prompt_tokens=tokens[key], now_ns=now_ns)
            running[key] = held.decision.rank
            placed.append(key)

    now_ns = 0
    for key, count in enumerate(tokens):
        now_ns += 1
        request = RoutingRequest(num_prompt_tokens=count, tenant=str(key % tenants))
        assert router.hold(request, key, now_ns)
        drain(now_ns)
        router.validate()
    for end in ends:
        now_ns += 1
        if end in running:
            del running[end]
            router.release(end)
        drain(now_ns)
        router.validate()
    while router.num_held:
        now_ns += 1
        assert running, "held requests with nothing running"
        key = min(running)
        del running[key]
        router.release(key)
        drain(now_ns)
    assert sorted(placed) == list(range(len(tokens)))
    router.validate()


@given(
    budget=st.floats(0.05, 2.0),
    past=st.integers(0, 900_000),
    left=st.integers(1, 200_000),
)
@settings(max_examples=200, deadline=None)
def test_a_chunk_fits_its_budget_and_wastes_less_than_a_block(
    budget: float, past: int, left: int
) -> None:
    group = PrefillGroup()
    chunk = group.chunk(budget, past, left)
    assert 0 <= chunk <= left
    assert group.seconds(chunk, past) <= budget * (1 + 1e-9)
    if chunk < left:
        assert group.seconds(chunk + 64, past) > budget * (1 - 1e-9)


@given(
    work=st.lists(st.floats(0.0, 1e6), min_size=4, max_size=4),
    num_workers=st.integers(1, 40),
)
@settings(max_examples=200, deadline=None)
@example(work=[0.0, 1.0, 2.0, 99_997.0], num_workers=2)
def test_every_worker_has_one_bucket_and_every_busy_bucket_a_worker(
    work: list[float], num_workers: int
) -> None:
    """Where there are enough workers for all of them; else the largest share counts."""
    router = PrefillRouter(PrefillGroup().cost_model(), config=PrefillConfig())
    for index in range(num_workers):
        router.add_worker(RankId(EngineId("p"), DpRank(index)))
    router._bucket_work = np.array(work)
    split = _split(router._ideal_workers(), num_workers)
    assert len(split) == num_workers
    assert split == sorted(split)
    total = router._bucket_work.sum()
    busy = [bucket for bucket, one in enumerate(work) if one > SMALLEST_SHARE * total]
    if len(busy) <= num_workers:
        assert set(busy) <= set(split)
