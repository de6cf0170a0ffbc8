"""Which sequences are moved, and when none is."""

import numpy as np
import pytest

from dsched.routing.migration import MigrationConfig, MigrationView, plan_migrations


def make_view(
    groups: list[list[int]],
    *,
    capacity: int = 10_000,
    link: int = 10_000,
    base_ns: float = 1000.0,
    frozen: tuple[int, ...] = (),
) -> MigrationView:
    """Ranks given by the KV tokens of their sequences; b = 100 ns, c = 1 ns."""
    ranks = np.array([rank for rank, group in enumerate(groups) for _ in group], np.int64)
    kv = np.array([tokens for group in groups for tokens in group], np.int64)
    num_ranks = len(groups)
    held = np.array([sum(group) for group in groups], np.int64)
    movable = np.ones(len(kv), bool)
    movable[list(frozen)] = False
    return MigrationView(
        sequence_rank=ranks,
        sequence_kv_tokens=kv,
        is_movable=movable,
        num_running=np.array([len(group) for group in groups], np.int64),
        num_kv_tokens=held,
        prices=np.tile([[base_ns], [100.0], [1.0]], num_ranks),
        room_tokens=np.maximum(0, capacity - held),
        link_tokens=np.full((2, num_ranks), link),
    )


def moves(view: MigrationView, **changes: float) -> list[tuple[int, int]]:
    plan = plan_migrations(view, MigrationConfig(**changes))  # type: ignore[arg-type]
    return [(move.sequence, move.to_rank) for move in plan.moves]


def test_nothing_moves_when_level() -> None:
    assert moves(make_view([[500, 500], [500, 500], [500, 500]])) == []


def test_hysteresis_leaves_small_differences() -> None:
    view = make_view([[510, 500], [500, 500]])
    assert moves(view, hysteresis=0.05) == []


def test_one_sequence_goes_to_the_cheapest_rank() -> None:
    assert moves(make_view([[500, 400, 300], [500], [100]])) == [(0, 2)]


def test_an_exchange_levels_what_no_single_move_can() -> None:
    """Any one-way move of 3000 or 2800 would only swap who is costly."""
    view = make_view([[3000, 2800], [2000, 1800]], base_ns=0.0)
    plan = plan_migrations(view)
    assert [(move.sequence, move.to_rank) for move in plan.moves] == [(1, 1), (3, 0)]
    assert plan.step_ns == 6000.0
    assert plan.planned_step_ns == 5000.0


def test_one_goes_for_two() -> None:
    view = make_view([[6000, 6000], [700] * 4], base_ns=0.0, capacity=30_000, link=30_000)
    plan = plan_migrations(view)
    assert [(move.sequence, move.to_rank) for move in plan.moves] == [(0, 1), (2, 0), (3, 0)]
    assert plan.planned_step_ns == 7700.0
    assert moves(view, max_moves=2) == [(0, 1), (2, 0)]


def test_a_lone_giant_is_left_alone() -> None:
    """Nothing lowers the step while the longest sequence has a rank to itself."""
    assert moves(make_view([[5000], [100, 100], [900, 900]])) == []


def test_a_giant_gets_its_rank_to_itself() -> None:
    assert moves(make_view([[5000, 200], [100], [900]])) == [(1, 1)]


def test_never_to_a_rank_without_room() -> None:
    groups = [[500, 400], [300], []]
    assert moves(make_view(groups, capacity=250)) == []
    view = make_view(groups, capacity=10_000)
    view.room_tokens[2] = 0
    assert all(to_rank != 2 for _, to_rank in moves(view))


def test_link_allowance_is_kept() -> None:
    assert moves(make_view([[500, 400], []], link=399)) == []
    assert moves(make_view([[500, 400], []], link=400)) == [(1, 1)]


def test_what_moves_already_stays() -> None:
    assert moves(make_view([[500, 400], []], frozen=(1,))) == [(0, 1)]
    assert moves(make_view([[500, 400], []], frozen=(0, 1))) == []


def test_a_gain_that_does_not_pay_for_the_stall_is_left() -> None:
    view = make_view([[500, 400], []], base_ns=0.0)
    assert moves(view, expected_steps=1.0, stall_ns_per_token=1.0) == [(1, 1)]
    assert moves(view, expected_steps=1.0, stall_ns_per_token=10.0) == []


def test_at_most_max_moves() -> None:
    groups = [[100] * 20, [], [], []]
    assert len(moves(make_view(groups), max_moves=4)) == 4
    assert moves(make_view(groups), max_moves=0) == []


def test_one_rank_and_no_rank_plan_nothing() -> None:
    assert moves(make_view([[1, 2, 3]])) == []
    empty = make_view([])
    assert plan_migrations(empty).moves == ()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sequence_kv_tokens", np.array([1]), r"sequence_kv_tokens has shape \(1,\)"),
        ("prices", np.full((3, 2), np.nan), "prices must be finite"),
        ("sequence_rank", np.array([0, 5]), "sequence_rank is within 0..5; there are 2 ranks"),
        ("room_tokens", np.zeros(3, np.int64), r"room_tokens has shape \(3,\)"),
    ],
)
def test_wrong_views_are_named(field: str, value: np.ndarray, message: str) -> None:
    good = make_view([[1, 2], []])
    fields = {name: getattr(good, name) for name in good.__dataclass_fields__}
    with pytest.raises(ValueError, match=message):
        MigrationView(**{**fields, field: value})


def test_wrong_limits_are_named() -> None:
    with pytest.raises(ValueError, match="max_moves is -1"):
        MigrationConfig(max_moves=-1)
    with pytest.raises(ValueError, match="hysteresis is nan"):
        MigrationConfig(hysteresis=float("nan"))
