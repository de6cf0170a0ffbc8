"""Priorities of held requests: who goes first, and what they cannot do."""

from hypothesis import given
from hypothesis import strategies as st

from dsched.ids import DpRank, EngineId, RankId
from dsched.routing import DecodeRouter, RoutingReason, RoutingRequest

CAPACITY = 1_000


def full_router(*, max_hold_ns: int = 10**9) -> DecodeRouter:
    """One rank with one place, which is taken."""
    router = DecodeRouter(max_hold_ns=max_hold_ns)
    rank = router.add_rank(
        RankId(EngineId("e"), DpRank(0)), kv_capacity_tokens=CAPACITY, max_running_requests=1
    )
    router.book(rank, "running", num_prompt_tokens=10, now_ns=0)
    return router


def hold(router: DecodeRouter, key: str, *, priority: int, num_tokens: int = 10) -> None:
    request = RoutingRequest(num_prompt_tokens=num_tokens, priority=priority)
    assert router.hold(request, key, 0)


def drain(router: DecodeRouter) -> list[str]:
    """Free the one place again and again; the order in which held requests get it."""
    order: list[str] = []
    running = "running"
    while router.num_held:
        router.release(running)
        held = router.next_held(0)
        assert held is not None
        assert held.decision.rank is not None
        running = str(held.request_key)
        router.book(held.decision.rank, running, num_prompt_tokens=10, now_ns=0)
        order.append(running)
        router.validate()
    return order


def test_the_greatest_priority_goes_first_and_equal_ones_in_order() -> None:
    router = full_router()
    for key, priority in (("a", 0), ("b", 5), ("c", -3), ("d", 5)):
        hold(router, key, priority=priority)

    assert drain(router) == ["b", "d", "a", "c"]


@given(st.lists(st.integers(-(2**53), 2**53), min_size=1, max_size=20))
def test_places_are_taken_in_the_order_of_priority(priorities: list[int]) -> None:
    """Ties end in the order of arrival, whatever else is held."""
    router = full_router()
    for index, priority in enumerate(priorities):
        hold(router, f"{index:02d}", priority=priority)

    expected = sorted(range(len(priorities)), key=lambda index: (-priorities[index], index))
    assert drain(router) == [f"{index:02d}" for index in expected]


def test_what_fits_nowhere_is_overtaken() -> None:
    """A long prompt of great priority does not keep the place from what fits."""
    router = DecodeRouter()
    rank = router.add_rank(
        RankId(EngineId("e"), DpRank(0)), kv_capacity_tokens=CAPACITY, max_running_requests=9
    )
    router.book(rank, "running", num_prompt_tokens=950, now_ns=0)
    hold(router, "long", priority=9, num_tokens=500)
    hold(router, "short", priority=0, num_tokens=10)

    held = router.next_held(0)

    assert held is not None
    assert held.request_key == "short"


def test_nobody_waits_longer_than_allowed() -> None:
    """The wait is bounded whatever the others' priorities are."""
    router = full_router(max_hold_ns=100)
    hold(router, "old", priority=-(2**53))
    request = RoutingRequest(num_prompt_tokens=10, priority=2**53)
    assert router.hold(request, "new", 50)

    held = router.next_held(100)

    assert held is not None
    assert (held.request_key, held.decision.reason) == ("old", RoutingReason.HOLD_EXPIRED)
