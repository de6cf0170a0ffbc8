"""What plan_placement and its kin refuse: each message has the value and the rule."""

from typing import Any

import numpy as np
import pytest

from dsched.eplb import (
    EMPTY,
    ExpertPlacement,
    LoadWindow,
    MovePrices,
    PlacementOptions,
    balancedness,
    check_placement,
    plan_placement,
    split_traffic,
    split_whole_tokens,
)
from dsched.errors import InvariantError

LOAD = np.arange(1, 9)[None, :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 10}, "10 slots cannot be split over 4 EP ranks; 8 or 12 would do"),
        ({"num_slots": 7, "num_ranks": 7}, "7 slots cannot hold 8 experts; 14 would do"),
        ({"num_slots": 0}, "0 slots cannot be split over 4 EP ranks; 8 would do"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_ranks": 8, "num_nodes": 3}, "8 EP ranks cannot be split over 3 nodes"),
        ({"num_nodes": 0}, "4 EP ranks cannot be split over 0 nodes"),
        ({"max_moves": -1}, "max_moves is -1"),
        ({"rank_up": [True, True, False]}, r"rank_up has shape \(3,\); it must be \(4,\)"),
        ({"rank_up": [False] * 4}, "all 4 ranks are down"),
        ({"rank_up": [1, 1, 2, 1]}, "must hold booleans"),
        ({"num_slots": 12, "rank_up": [1, 1, 0, 0]}, "6 live slots cannot hold 8 experts"),
        ({"current": [[0, 1, 2, 3]]}, r"current has \(1, 4\) slots"),
        ({"current": [[0, 1, 2, 3, 4, 5, 6, 9]]}, "a slot holds expert 9; experts are 0..7"),
        ({"current": [[0.0, 1, 2, 3, 4, 5, 6, 7]]}, "slots hold whole expert numbers"),
    ],
)
def test_impossible_shapes_are_named(change: dict[str, Any], message: str) -> None:
    """Shapes, masks, limits and current placements that cannot be."""
    with pytest.raises(ValueError, match=message):
        plan_placement(LOAD, **({"num_slots": 8, "num_ranks": 4} | change))


@pytest.mark.parametrize("value", [float("nan"), -1.0, float("inf"), -float("inf")])
def test_a_load_that_is_no_count_is_named_with_its_place(value: float) -> None:
    """Layer, expert and value are in the message."""
    load = np.ones((1, 8))
    load[0, 2] = value
    with pytest.raises(ValueError, match=f"layer 0, expert 2 is {value}"):
        plan_placement(load, num_slots=8, num_ranks=4)
    placement = ExpertPlacement(slot_expert=np.arange(8)[None, :], num_ranks=4)
    for use in (balancedness, split_traffic):
        with pytest.raises(ValueError, match=f"layer 0, expert 2 is {value}"):
            use(placement, load)


def test_a_negative_integer_load_is_named_with_its_place() -> None:
    """Integers take another way in."""
    load = np.ones((2, 8), np.int32)
    load[1, 3] = -5
    with pytest.raises(ValueError, match="layer 1, expert 3 is -5"):
        plan_placement(load, num_slots=8, num_ranks=4)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (np.ones(8), "it must be .layers, experts."),
        (np.ones((1, 0)), "at least one expert"),
        (np.ones((1, 2, 8)), "it must be .layers, experts."),
        (np.array([["a"] * 8]), "dtype"),
        (np.array([[object()] * 8]), "dtype"),
        (np.ones((1, 8), np.complex128), "dtype"),
    ],
    ids=["one axis", "no experts", "three axes", "text", "objects", "complex"],
)
def test_what_is_no_load_is_refused(load: np.ndarray, message: str) -> None:
    """Another number of axes, or no numbers."""
    with pytest.raises(ValueError, match=message):
        plan_placement(load, num_slots=8, num_ranks=4)


def test_no_layers_are_an_empty_plan() -> None:
    """A dense model has nothing to place."""
    plan = plan_placement(np.ones((0, 8)), num_slots=8, num_ranks=4)

    assert plan.placement.slot_expert.shape == (0, 8)
    assert plan.num_moves.tolist() == []


def test_booleans_count_as_zero_and_one() -> None:
    """A mask of used experts is a load."""
    mask = np.array([[True, False] * 4])
    of_mask = plan_placement(mask, num_slots=8, num_ranks=4)
    of_ints = plan_placement(mask.astype(int), num_slots=8, num_ranks=4)

    assert of_mask.placement.slot_expert.tolist() == of_ints.placement.slot_expert.tolist()


def test_more_slots_than_a_rank_can_use_stay_empty() -> None:
    """Three slots a rank and two experts: both on both ranks, the third slot empty."""
    plan = plan_placement([[3, 1]], num_slots=6, num_ranks=2)
    check_placement(plan.placement)

    by_rank = plan.placement.slot_expert.reshape(2, 3)
    assert [sorted(row.tolist()) for row in by_rank] == [[EMPTY, 0, 1]] * 2
    assert balancedness(plan.placement, [[3, 1]]).tolist() == [1.0]


def test_a_current_placement_may_lack_experts_or_double_them() -> None:
    """Missing experts are placed; a doubled one on a rank gives its place up when a move is due."""
    current = ExpertPlacement(slot_expert=[[0, 0, 1, 2]], num_ranks=2, num_experts=4)
    plan = plan_placement([[5, 5, 5, 5]], num_slots=4, num_ranks=2, current=current)
    check_placement(plan.placement)

    assert plan.num_covered.tolist() == [1]
    assert plan.num_moves.tolist() == [1]
    assert plan.placement.slot_expert.tolist() == [[0, 3, 1, 2]]


def test_options_and_prices_are_checked() -> None:
    """Impossible options name the value."""
    with pytest.raises(ValueError, match=r"stop 0.05 must be between 0 and trigger 0.03"):
        PlacementOptions(stop=0.05)
    with pytest.raises(ValueError, match="max_rounds -1"):
        PlacementOptions(max_rounds=-1)
    with pytest.raises(ValueError, match="crossing nodes is not cheaper"):
        MovePrices(same_node_ns=5, cross_node_ns=4)


def test_placement_rules_are_checked() -> None:
    """Each broken rule of a placement is named."""
    with pytest.raises(ValueError, match="5 slots cannot be split over 2"):
        ExpertPlacement(slot_expert=[[0, 1, 2, 3, 4]], num_ranks=2)
    with pytest.raises(InvariantError, match="no slot holds expert 3"):
        check_placement(ExpertPlacement(slot_expert=[[0, 1, 2, 0]], num_ranks=2, num_experts=4))
    with pytest.raises(InvariantError, match="EP rank 0 holds expert 1 twice"):
        check_placement(ExpertPlacement(slot_expert=[[1, 1, 0, 2]], num_ranks=2))
    with pytest.raises(InvariantError, match="EP rank 1 is down but holds expert 2"):
        check_placement(
            ExpertPlacement(slot_expert=[[0, 1, 2, -1]], num_ranks=2), rank_up=[True, False]
        )
    with pytest.raises(InvariantError, match="all copies of expert 0 are on one node"):
        check_placement(ExpertPlacement(slot_expert=[[0, 0, 1, 2]], num_ranks=4), num_nodes=2)


def test_split_refuses_what_it_cannot_split() -> None:
    """Load on an expert that nobody holds, another shape, and half tokens."""
    placement = ExpertPlacement(slot_expert=[[0, 1]], num_ranks=2, num_experts=3)
    with pytest.raises(ValueError, match="expert 2 has load but no slot holds it"):
        split_traffic(placement, [[1, 1, 1]])
    with pytest.raises(ValueError, match=r"load has shape \(1, 2\)"):
        split_traffic(placement, [[1, 1]])
    with pytest.raises(ValueError, match="only whole tokens"):
        split_whole_tokens(placement, [[0.5, 1, 0]])
    with pytest.raises(ValueError, match="split is 'even'"):
        balancedness(placement, [[1, 1, 0]], split="even")  # type: ignore[arg-type]


def test_load_window_refuses_what_cannot_be_counted() -> None:
    """Another shape and negative tokens."""
    window = LoadWindow(num_layers=1, num_experts=2)
    with pytest.raises(ValueError, match=r"counts have shape \(1, 3\)"):
        window.apply_step(np.ones((1, 3), np.int64))
    with pytest.raises(ValueError, match="counts hold -1"):
        window.apply_step(np.array([[-1, 0]]))
    with pytest.raises(ValueError, match="cannot be merged"):
        window.merge(LoadWindow(num_layers=2, num_experts=2))
