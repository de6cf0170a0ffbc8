"""plan_placement on inputs with a known right answer."""

import numpy as np
import pytest
from eplb_reference import best_of_pairs, heaviest_equal, moves_as_sets

from dsched.eplb import (
    ExpertPlacement,
    balancedness,
    check_placement,
    count_moves,
    plan_placement,
    rank_loads,
    split_evenly,
    split_traffic,
)

SKEWED = [600, 560, 120, 120, 20, 10, 10, 10]
README = (
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
)


def heaviest(load: list[int], num_slots: int, num_ranks: int) -> float:
    """Heaviest rank of a fresh plan, checked and summed in exact fractions."""
    plan = plan_placement([load], num_slots=num_slots, num_ranks=num_ranks)
    check_placement(plan.placement)
    slots = plan.placement.slot_expert[0].tolist()
    return float(heaviest_equal(slots, load, num_ranks))


def test_two_experts_with_nearly_all_load_reach_the_optimum() -> None:
    """FlashLB's example: the greedy counts give 232, the optimum is 560/3 + 10."""
    optimum = best_of_pairs(SKEWED, num_slots=16, num_ranks=8)

    assert float(optimum) == pytest.approx(560 / 3 + 10)
    assert heaviest(SKEWED, 16, 8) == pytest.approx(float(optimum))


@pytest.mark.parametrize(("layer", "right"), [(0, 136.0), (1, 172.0)])
def test_readme_layers_reach_their_optimum(layer: int, right: float) -> None:
    """deepseek-ai/EPLB's own example: its planner reaches 138.5 and 172 with a doubled expert."""
    assert float(best_of_pairs(README[layer], num_slots=16, num_ranks=8)) <= right
    assert heaviest(README[layer], 16, 8) == right


def test_weighted_split_of_the_skewed_layer_is_even() -> None:
    """With parts chosen freely every rank can carry the mean, 181.25."""
    slots = [[3, 1, 2, 1, 0, 1, 0, 1, 0, 7, 0, 6, 0, 5, 1, 4]]
    placement = ExpertPlacement(slot_expert=slots, num_ranks=8)

    loads = rank_loads(placement, split_traffic(placement, [SKEWED]))

    assert loads == pytest.approx(np.full((1, 8), 181.25), rel=1e-4)


def test_even_shares_balance_exactly() -> None:
    """32 experts with 2000 and 224 with 1000: every share is 1000, every rank carries 9000."""
    load = [[2000] * 32 + [1000] * 224]
    plan = plan_placement(load, num_slots=288, num_ranks=32)

    assert balancedness(plan.placement, load).tolist() == [1.0]
    assert rank_loads(plan.placement, split_evenly(plan.placement, load)).max() == 9000


@pytest.mark.parametrize("value", [0, 7])
def test_equal_or_no_load_is_even_and_moves_nothing(value: int) -> None:
    """All equal, all zero: 1, no NaN, and a valid plan stays."""
    load = np.full((2, 256), value)
    plan = plan_placement(load, num_slots=288, num_ranks=32)
    again = plan_placement(load, num_slots=288, num_ranks=32, current=plan.placement)

    if value == 0:
        assert balancedness(plan.placement, load).tolist() == [1.0, 1.0]
    assert again.num_moves.tolist() == [0, 0]
    assert again.is_unchanged
    assert again.placement.slot_expert.tobytes() == plan.placement.slot_expert.tobytes()


def test_no_load_yet_keeps_any_valid_plan() -> None:
    """A silent layer is no reason to move, whatever is in use."""
    rng = np.random.default_rng(5)
    slots = np.concatenate([rng.permutation(16), rng.permutation(16)[:8]])[None, :]
    current = ExpertPlacement(slot_expert=slots, num_ranks=8, num_experts=16)

    plan = plan_placement(np.zeros((1, 16)), num_slots=24, num_ranks=8, current=current)

    assert plan.num_moves.tolist() == [0]
    assert plan.balance.tolist() == [1.0]


@pytest.mark.parametrize(("share", "right"), [(0.3, 0.9991), (0.9, 0.999)])
def test_a_hot_expert_gets_one_copy_a_rank_at_most(share: float, right: float) -> None:
    """With 90 % of the load: 32 copies, not 33, and balance .999 where greedy ends at .565."""
    rng = np.random.default_rng(0)
    rest = rng.random(255)
    load = np.concatenate([[share], rest / rest.sum() * (1 - share)])[None, :] * 1e9
    plan = plan_placement(load, num_slots=288, num_ranks=32)
    check_placement(plan.placement)

    assert balancedness(plan.placement, load)[0] >= right
    if share == 0.9:
        assert plan.placement.count_copies()[0, 0] == 32


def test_three_equal_hot_experts_reach_the_equal_split_optimum() -> None:
    """11, 11 and 10 copies, one share a rank: .9375. With 33 or more copies two shares meet."""
    load = [[100_000] * 3 + [0] * 253]
    plan = plan_placement(load, num_slots=288, num_ranks=32)

    assert balancedness(plan.placement, load)[0] == pytest.approx(0.9375)
    assert sorted(plan.placement.count_copies()[0, :3]) == [10, 11, 11]


@pytest.mark.parametrize("num_ranks", [2, 16])
def test_one_expert_with_all_load_is_everywhere(num_ranks: int) -> None:
    """Exactly one copy a rank and balance 1 where the greedy's extra copy gives .53."""
    num_experts = 8 * num_ranks
    load = [[1_000_000] + [0] * (num_experts - 1)]
    plan = plan_placement(load, num_slots=num_experts + num_ranks, num_ranks=num_ranks)

    assert plan.placement.count_copies()[0, 0] == num_ranks
    assert balancedness(plan.placement, load).tolist() == [1.0]


@pytest.mark.parametrize(
    ("slots", "num_ranks", "load", "right"),
    [
        ([0, 0, 1, -1], 2, [6, 2], [6, 0, 2, 0]),
        ([0, -1, 0, 1], 2, [6, 2], [4, 0, 2, 2]),
        ([0, -1, 0, 1, 1, 2], 3, [9, 3, 0], [4.5, 0, 4.5, 0, 3, 0]),
    ],
    ids=["doubled on a rank", "two ranks", "tight pair of ranks"],
)
def test_traffic_is_split_to_the_optimum(
    slots: list[int], num_ranks: int, load: list[int], right: list[float]
) -> None:
    """Small cases solved by hand."""
    placement = ExpertPlacement(slot_expert=[slots], num_ranks=num_ranks)

    assert split_traffic(placement, [load])[0] == pytest.approx(right)


def test_reordering_inside_a_rank_is_no_move() -> None:
    """Moves are counted as sets of rank and expert."""
    old = ExpertPlacement(slot_expert=[[0, 1, 2, 3]], num_ranks=2)
    same = ExpertPlacement(slot_expert=[[1, 0, 3, 2]], num_ranks=2)
    other = ExpertPlacement(slot_expert=[[0, 2, 1, 3]], num_ranks=2)

    assert count_moves(old, same)[0].tolist() == [0]
    assert count_moves(old, other)[0].tolist() == [2]
    assert moves_as_sets(old.slot_expert, other.slot_expert, 2) == [2]


def test_too_few_live_slots_names_the_numbers() -> None:
    """288 slots on 32 ranks survive three lost ranks, not four."""
    rank_up = np.ones(32, bool)
    rank_up[:4] = False
    with pytest.raises(ValueError, match="252 live slots cannot hold 256 experts; 1 of 4 lost"):
        plan_placement(np.ones((1, 256)), num_slots=288, num_ranks=32, rank_up=rank_up)


def test_balance_is_reported_per_layer() -> None:
    """Layers of (mean, max) = (1, 2) and (9, 9): .5 and 1, average .75; not 10/11."""
    placement = ExpertPlacement(slot_expert=[[0, 1], [0, 1]], num_ranks=2)

    balance = balancedness(placement, [[2, 0], [9, 9]])

    assert balance.tolist() == [0.5, 1.0]
    assert balance.mean() == 0.75
