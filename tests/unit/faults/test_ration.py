"""plan_ration: who computes its prompt again now."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsched.faults import LostRequest, RationView, plan_ration
from dsched.ids import RequestId


def lost(name: str, num_tokens: int, *, lost_ns: int = 0, stored: int = 0) -> LostRequest:
    return LostRequest(
        request_id=RequestId(name), lost_ns=lost_ns, num_tokens=num_tokens, num_stored_tokens=stored
    )


def view(*waiting: LostRequest, under_way: int = 0, ranks: int = 1) -> RationView:
    return RationView(waiting=waiting, num_tokens_under_way=under_way, num_ranks_up=ranks)


def test_the_ration_grows_with_the_ranks_that_are_up() -> None:
    """Two ranks take twice as much."""
    waiting = [lost(name, 60) for name in "abcd"]

    assert plan_ration(view(*waiting), tokens_per_rank=100).released == ("a",)
    assert plan_ration(view(*waiting, ranks=2), tokens_per_rank=100).released == ("a", "b", "c")


def test_who_was_lost_first_goes_first_then_the_shortest_then_the_id() -> None:
    """A total order."""
    waiting = [lost("late", 1, lost_ns=9), lost("b", 7), lost("a", 7), lost("short", 3)]

    plan = plan_ration(view(*waiting), tokens_per_rank=1_000)

    assert plan.released == ("short", "a", "b", "late")
    assert plan.num_tokens == 18


def test_nobody_overtakes_one_that_does_not_fit() -> None:
    """A long request is not starved by short ones behind it."""
    waiting = [lost("long", 90), lost("short", 5, lost_ns=1)]

    assert plan_ration(view(*waiting, under_way=20), tokens_per_rank=100).released == ()


def test_a_request_above_the_whole_ration_goes_alone() -> None:
    """When nothing else is under way."""
    waiting = [lost("huge", 5_000), lost("b", 10, lost_ns=1)]

    assert plan_ration(view(*waiting), tokens_per_rank=100).released == ("huge",)
    assert plan_ration(view(*waiting, under_way=1), tokens_per_rank=100).released == ()


def test_a_stored_prefix_is_nearly_free() -> None:
    """What the engines' KV store has is loaded, not computed."""
    waiting = [lost("stored", 1_000, stored=1_000), lost("other", 60)]

    plan = plan_ration(view(*waiting), tokens_per_rank=110)

    assert plan.released == ("stored", "other")
    assert plan.num_tokens == 50 + 60


def test_without_a_ration_everybody_goes() -> None:
    """`None` is no limit."""
    waiting = [lost(str(index), 10_000) for index in range(9)]

    assert len(plan_ration(view(*waiting), tokens_per_rank=None).released) == 9


@pytest.mark.parametrize(
    ("tokens_per_rank", "under_way", "message"),
    [(0, 0, "tokens_per_rank is 0"), (5, -1, "-1 tokens under way")],
)
def test_wrong_input_is_named(tokens_per_rank: int, under_way: int, message: str) -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match=message):
        plan_ration(view(under_way=under_way), tokens_per_rank=tokens_per_rank)
    with pytest.raises(ValueError, match="7 stored of 5 tokens"):
        lost("a", 5, stored=7)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3)), max_size=30),
    st.integers(1, 500),
    st.integers(0, 500),
    st.integers(0, 4),
)
def test_ration_keeps_its_contract(
    sizes: list[tuple[int, int]], ration: int, under_way: int, ranks: int
) -> None:
    """Conservation, the limit, and progress."""
    waiting = [lost(f"{index:03d}", size, lost_ns=ns) for index, (size, ns) in enumerate(sizes)]

    plan = plan_ration(view(*waiting, under_way=under_way, ranks=ranks), tokens_per_rank=ration)

    by_id = {each.request_id: each for each in waiting}
    assert plan.num_tokens == sum(by_id[each].num_tokens for each in plan.released)
    limit = ration * max(1, ranks)
    total = under_way + plan.num_tokens
    assert total <= limit or (under_way == 0 and len(plan.released) == 1) or not plan.released
    # Whoever waits on waits because of the limit, and something is under way that will end.
    if len(plan.released) < len(waiting):
        assert total > 0
        rest = sorted(
            (each for each in waiting if each.request_id not in plan.released),
            key=lambda each: (each.lost_ns, each.num_tokens, each.request_id),
        )
        assert total + rest[0].num_tokens > limit
