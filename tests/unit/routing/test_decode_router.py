"""Which rank a request goes to, and what is said when there is none."""

from collections.abc import Callable, Iterator

import pytest

from dsched.ids import DpRank, EngineId, RankId
from dsched.routing.decode import DecodeRouter, RoutingReason, RoutingRequest
from dsched.routing.ledger import RankState


def rank_name(index: int) -> RankId:
    return RankId(EngineId("engine"), DpRank(index))


def make_router(
    num_ranks: int, *, kv: int = 1_000_000, running: int = 256, **kwargs: object
) -> DecodeRouter:
    router = DecodeRouter(**kwargs)
    for index in range(num_ranks):
        router.add_rank(rank_name(index), kv_capacity_tokens=kv, max_running_requests=running)
    return router


def send(
    router: DecodeRouter, key: str, tokens: int, now_ns: int = 0, **kwargs: object
) -> int | None:
    """Pick and book as the controller does; hold when it says so."""
    request = RoutingRequest(num_prompt_tokens=tokens, **kwargs)
    decision = router.pick(request, now_ns)
    if decision.rank is not None:
        router.book(decision.rank, key, num_prompt_tokens=tokens, now_ns=now_ns)
    elif decision.reason is RoutingReason.QUEUED:
        assert router.hold(request, key, now_ns)
    return decision.rank


@pytest.fixture
def router() -> Iterator[DecodeRouter]:
    made = make_router(4)
    yield made
    made.validate()


def test_a_first_burst_without_reports_is_spread(router: DecodeRouter) -> None:
    """RT-01: the first requests must not all go to rank 0."""
    ranks = [send(router, f"r{index}", 1000) for index in range(8)]
    assert sorted(ranks) == [0, 0, 1, 1, 2, 2, 3, 3]
    more = make_router(4)
    seven = [send(more, f"r{index}", 1000) for index in range(7)]
    counts = [seven.count(rank) for rank in range(4)]
    assert sorted(counts) == [1, 2, 2, 2]


def test_both_signals_count() -> None:
    """RT-05: one huge prompt and many small requests weigh what they cost."""
    router = make_router(2, request_ns=200_000, kv_token_ns=26)
    tokens = [15000, 1000, 1000, 1000, 1000, 1000]
    assert [send(router, str(i), n) for i, n in enumerate(tokens)] == [0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("num_routers", "each", "most"), [(16, 1, 4), (4, 4, 4), (64, 1, 16), (3, 3, 3)]
)
def test_routers_with_one_view_choose_different_ranks(
    num_routers: int, each: int, most: int
) -> None:
    """RT-03: each router starts its ties at its own number."""
    counts = [0, 0, 0, 0]
    for index in range(num_routers):
        router = make_router(4, router_index=index)
        for key in range(each):
            counts[send(router, str(key), 500)] += 1
    assert max(counts) <= most
    assert sum(counts) == num_routers * each


def test_homes_are_the_same_whatever_order_engines_came_up_in() -> None:
    """Every rank is at home with exactly one of the routers, and those that come later too."""
    names = ["e1", "e3", "e0", "e2"]
    routers = []
    for index, order in enumerate((names, names[::-1])):
        router = DecodeRouter(router_index=index, num_routers=2)
        for name in order:
            for dp_rank in range(2):
                router.add_rank(
                    RankId(EngineId(name), DpRank(dp_rank)),
                    kv_capacity_tokens=1_000,
                    max_running_requests=8,
                )
        routers.append(router)

    away = [
        {router.rank_id(rank) for rank in range(8) if router.is_home_elsewhere(rank)}
        for router in routers
    ]

    assert [len(each) for each in away] == [4, 4]
    assert not away[0] & away[1]


def test_routers_that_come_and_go_change_homes() -> None:
    """A router that is told that it is alone is at home everywhere."""
    router = make_router(4, router_index=1)
    router.set_peers(router_index=1, num_routers=2)
    assert sum(router.is_home_elsewhere(rank) for rank in range(4)) == 2

    router.set_peers(router_index=0, num_routers=1)

    assert not any(router.is_home_elsewhere(rank) for rank in range(4))
    with pytest.raises(ValueError, match="router_index 2 is not one of 2 routers"):
        router.set_peers(router_index=2, num_routers=2)


def test_a_router_that_hears_the_others_keeps_a_request_away_from_their_ranks() -> None:
    """Blind, it keeps four away, and as many prompts: the others may just have sent them."""
    counts = {}
    for hears_peers in (False, True):
        router = make_router(2)
        router.set_peers(router_index=0, num_routers=2, hears_peers=hears_peers)
        for key in range(8):
            rank = router.pick(RoutingRequest(num_prompt_tokens=1_000), 0).rank
            assert rank is not None
            router.book(rank, key, num_prompt_tokens=1_000, now_ns=0)
        counts[hears_peers] = [router.load_of(rank).num_own_running for rank in (0, 1)]
        assert router.home_margin_ns(0, 1_000) == 0.0

    assert counts == {False: [6, 2], True: [5, 3]} or counts == {False: [6, 2], True: [4, 4]}
    assert router.home_margin_ns(1, 1_000) == router.prices_of(1)[0]


def test_sequential_requests_use_every_rank(router: DecodeRouter) -> None:
    """One request at a time on idle ranks: none is starved (ai-dynamo/dynamo#7836)."""
    ranks = []
    for index in range(8):
        ranks.append(send(router, str(index), 100))
        router.release(str(index))
    assert sorted(ranks) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("state", [RankState.DOWN, RankState.DRAINING, RankState.SUSPECT])
def test_only_up_ranks_get_new_requests(router: DecodeRouter, state: RankState) -> None:
    for rank in (0, 1, 3):
        router.set_rank_state(rank, state)
    assert {send(router, str(index), 100) for index in range(5)} == {2}


def test_suspect_ranks_serve_when_nothing_is_up(router: DecodeRouter) -> None:
    """RT-07: silence must not turn a pool into an outage."""
    for rank in range(4):
        router.set_rank_state(rank, RankState.SUSPECT)
    router.set_rank_state(1, RankState.DOWN)
    decisions = [router.pick(RoutingRequest(num_prompt_tokens=5), 0)]
    assert decisions[0].reason is RoutingReason.SUSPECT_ONLY
    ranks = [send(router, str(index), 100) for index in range(30)]
    assert sorted(set(ranks)) == [0, 2, 3]
    assert [ranks.count(rank) for rank in (0, 2, 3)] == [10, 10, 10]


def test_no_rank_up_says_so(router: DecodeRouter) -> None:
    for rank in range(4):
        router.set_rank_state(rank, RankState.DOWN)
    decision = router.pick(RoutingRequest(num_prompt_tokens=5), 0)
    assert (decision.rank, decision.reason) == (None, RoutingReason.NO_RANK_UP)
    empty = DecodeRouter().pick(RoutingRequest(num_prompt_tokens=5), 0)
    assert (empty.rank, empty.reason) == (None, RoutingReason.NO_RANK_UP)


def test_a_pin_is_hard(router: DecodeRouter) -> None:
    assert [send(router, str(index), 100, pinned_dp_rank=2) for index in range(3)] == [2, 2, 2]
    router.set_rank_state(2, RankState.DOWN)
    down = router.pick(RoutingRequest(num_prompt_tokens=1, pinned_dp_rank=2), 0)
    assert (down.rank, down.reason) == (None, RoutingReason.NO_RANK_UP)
    absent = router.pick(RoutingRequest(num_prompt_tokens=1, pinned_dp_rank=9), 0)
    assert (absent.rank, absent.reason) == (None, RoutingReason.NO_SUCH_RANK)


def test_an_excluded_rank_is_not_chosen(router: DecodeRouter) -> None:
    assert send(router, "a", 100, excluded_ranks=(0, 1)) == 2


def test_a_request_larger_than_any_rank_is_refused_by_name() -> None:
    router = make_router(2, kv=1000)
    assert router.pick(RoutingRequest(num_prompt_tokens=999), 0).rank == 0
    decision = router.pick(RoutingRequest(num_prompt_tokens=1000), 0)
    assert (decision.rank, decision.reason) == (None, RoutingReason.TOO_LARGE)


def test_full_ranks_hold_the_request_and_the_longest_goes_first() -> None:
    router = make_router(2, kv=1000)
    assert [send(router, "a", 900), send(router, "b", 950)] == [0, 1]
    assert [send(router, key, n) for key, n in (("c", 300), ("d", 800), ("e", 200))] == [None] * 3
    assert router.num_held == 3
    assert router.next_held(1) is None
    router.release("a")
    first = router.next_held(2)
    assert first is not None
    assert (first.request_key, first.decision.rank) == ("d", 0)
    router.book(0, "d", num_prompt_tokens=800, now_ns=2)
    second = router.next_held(2)
    assert second is not None
    assert second.request_key == "e", "300 tokens do not fit beside 800; 200 do"
    router.book(0, "e", num_prompt_tokens=200, now_ns=2)
    assert router.next_held(2) is None
    router.validate()


def test_the_wait_is_bounded() -> None:
    router = make_router(1, kv=1000, max_hold_ns=100)
    assert send(router, "a", 900) == 0
    assert send(router, "b", 500, now_ns=50) is None
    assert router.next_hold_expiry_ns() == 150
    assert router.next_held(149) is None
    held = router.next_held(150)
    assert held is not None
    assert (held.decision.rank, held.decision.reason) == (0, RoutingReason.HOLD_EXPIRED)
    assert held.held_ns == 50


def test_held_requests_wait_for_a_rank_to_come_back() -> None:
    """An expired hold cannot be sent to ranks that are down; it goes when one returns."""
    router = make_router(1, kv=1000, max_hold_ns=10)
    send(router, "a", 900)
    assert send(router, "b", 500) is None
    router.set_rank_state(0, RankState.DOWN)
    assert router.next_held(1000) is None
    router.set_rank_state(0, RankState.UP)
    assert router.next_held(1000) is not None


def test_tenants_share_the_freed_room() -> None:
    """A burst of one tenant does not hold up the other: released tokens stay close."""
    router = make_router(1, kv=1000, running=1)
    send(router, "running", 10)
    for index in range(6):
        send(router, f"big-{index}", 400, tenant="big")
    for index in range(3):
        send(router, f"small-{index}", 100, tenant="small")
    order = []
    current = "running"
    while router.num_held:
        router.release(current)
        held = router.next_held(0)
        assert held is not None
        current = str(held.request_key)
        order.append(current)
        tokens = 400 if current.startswith("big") else 100
        router.book(0, current, num_prompt_tokens=tokens, now_ns=0)
    assert order[:5] == ["big-0", "small-0", "small-1", "small-2", "big-1"]
    assert order[5:] == ["big-2", "big-3", "big-4", "big-5"]


def test_the_hold_queue_is_bounded() -> None:
    router = make_router(1, kv=100, max_held_requests=1)
    send(router, "a", 99)
    request = RoutingRequest(num_prompt_tokens=50)
    assert router.hold(request, "b", 0)
    assert not router.hold(request, "c", 0)
    assert router.drop_held("b")
    assert not router.drop_held("b")
    assert router.hold(request, "c", 0)


def test_growth_counts_like_prompt(router: DecodeRouter) -> None:
    assert send(router, "a", 1000) == 0
    router.add_tokens("a", 500)
    router.add_tokens("unknown", 5)
    load = router.load_of(0)
    assert (load.num_own_running, load.num_own_kv_tokens) == (1, 1500)
    assert router.release("a")
    assert not router.release("a")
    assert router.load_of(0).num_own_kv_tokens == 0


def test_a_removed_rank_keeps_its_bookings_and_gets_nothing(router: DecodeRouter) -> None:
    assert send(router, "a", 10) == 0
    router.remove_rank(0)
    assert 0 not in {send(router, f"b{index}", 10) for index in range(9)}
    with pytest.raises(ValueError, match="rank 0 was removed"):
        router.book(0, "c", num_prompt_tokens=1, now_ns=0)
    again = router.add_rank(rank_name(0), kv_capacity_tokens=10, max_running_requests=1)
    assert again == 4, "number 0 still has a booking"
    router.release("a")
    assert router.add_rank(rank_name(9), kv_capacity_tokens=10, max_running_requests=1) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: RoutingRequest(num_prompt_tokens=-1), "num_prompt_tokens is -1"),
        (lambda _: RoutingRequest(num_prompt_tokens=1, pinned_dp_rank=-2), "pinned_dp_rank is -2"),
        (lambda r: r.set_prices(request_ns=float("nan"), kv_token_ns=1), "request_ns is nan"),
        (lambda r: r.set_prices(request_ns=0, kv_token_ns=0), "both 0"),
        (lambda r: r.set_prices(request_ns=1, kv_token_ns=-1), "kv_token_ns is -1"),
        (lambda r: r.book(7, "x", num_prompt_tokens=1, now_ns=0), "rank number 7"),
        (lambda r: r.move("x", 1), "'x' is not booked"),
        (
            lambda r: r.add_rank(rank_name(5), kv_capacity_tokens=0, max_running_requests=1),
            "kv_capacity_tokens 0",
        ),
        (lambda _: DecodeRouter(router_index=-1), "router_index is -1"),
        (lambda _: DecodeRouter(kv_headroom_fraction=1.0), "kv_headroom_fraction is 1.0"),
    ],
)
def test_wrong_input_is_named(
    router: DecodeRouter, call: Callable[[DecodeRouter], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(router)


def test_a_request_is_booked_once(router: DecodeRouter) -> None:
    send(router, "a", 10)
    with pytest.raises(ValueError, match="'a' is already booked on rank 0"):
        router.book(1, "a", num_prompt_tokens=1, now_ns=0)
