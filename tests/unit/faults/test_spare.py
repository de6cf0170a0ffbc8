"""plan_spare: how much a pool may run so that it can lose its largest EP group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsched.faults import GroupCapacity, plan_spare


def group(name: str, running: int = 8, tokens: int = 100, *, is_up: bool = True) -> GroupCapacity:
    return GroupCapacity(
        name=name, is_up=is_up, max_running_requests=running, kv_capacity_tokens=tokens
    )


def test_room_for_the_largest_group_is_kept() -> None:
    """Of requests and of KV tokens, each by its own largest."""
    plan = plan_spare([group("a", 8, 300), group("b", 16, 100), group("c", 8, 100)], mode="n-1")

    assert (plan.max_running_requests, plan.kv_capacity_tokens) == (16, 200)
    assert (plan.absorbs_loss, plan.reserved_for) == (True, "a")


def test_after_the_loss_the_survivors_may_be_full() -> None:
    """The room was for this; another loss cannot be absorbed, and that is said."""
    plan = plan_spare([group("a"), group("b"), group("c", is_up=False)], mode="n-1")

    assert (plan.max_running_requests, plan.absorbs_loss) == (16, False)
    assert plan.reason == "2 of 3 EP groups are up: another loss cannot be absorbed"


def test_one_group_cannot_keep_room_for_itself() -> None:
    """It may be used whole."""
    plan = plan_spare([group("a")], mode="n-1")

    assert (plan.max_running_requests, plan.absorbs_loss) == (8, False)
    assert plan.reason == "1 EP group: nothing can absorb its loss"


def test_none_uses_everything() -> None:
    """What is up, all of it."""
    plan = plan_spare([group("a"), group("b"), group("c", is_up=False)], mode="none")

    assert (plan.max_running_requests, plan.reserved_for) == (16, None)


def test_an_idle_pool_takes_a_request_of_any_size() -> None:
    """Otherwise a long prompt would wait for ever."""
    plan = plan_spare([group("a"), group("b")], mode="n-1")

    assert plan.has_room(num_running=0, num_kv_tokens=0, num_new_tokens=150)
    assert not plan.has_room(num_running=1, num_kv_tokens=10, num_new_tokens=150)
    assert not plan.has_room(num_running=8, num_kv_tokens=10, num_new_tokens=1)


@pytest.mark.parametrize("mode", ["n-2", "", "N-1"])
def test_an_unknown_mode_is_named(mode: str) -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match=f"spare mode '{mode}'"):
        plan_spare([], mode=mode)  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.integers(1, 50), st.integers(1, 500), st.booleans()), min_size=2, max_size=6
    )
)
def test_what_is_promised_can_be_absorbed(sizes: list[tuple[int, int, bool]]) -> None:
    """Where the plan says so, any group that is up can go and the rest holds what may run."""
    groups = [group(str(i), r, t, is_up=u) for i, (r, t, u) in enumerate(sizes)]

    plan = plan_spare(groups, mode="n-1")

    up = [each for each in groups if each.is_up]
    assert plan.max_running_requests <= sum(each.max_running_requests for each in up)
    assert plan.kv_capacity_tokens <= sum(each.kv_capacity_tokens for each in up)
    if plan.absorbs_loss:
        for lost in up:
            rest = [each for each in up if each is not lost]
            assert sum(each.max_running_requests for each in rest) >= plan.max_running_requests
            assert sum(each.kv_capacity_tokens for each in rest) >= plan.kv_capacity_tokens
