"""plan_placement with its options: lost ranks, limits, prices, groups, nodes, weighted split."""

import numpy as np
import pytest
from eplb_reference import moves_as_sets

from dsched.eplb import (
    ExpertPlacement,
    MovePrices,
    Outcome,
    Payback,
    PlacementOptions,
    PlacementPlan,
    balancedness,
    check_placement,
    count_moves,
    plan_placement,
)
from dsched.sim.eplb import LoadShape, generate_expert_load

SHAPE = LoadShape(num_layers=6, num_experts=64)
GROUP = {"num_slots": 80, "num_ranks": 16, "num_nodes": 4}


@pytest.fixture(scope="module")
def windows() -> np.ndarray:
    return generate_expert_load(SHAPE, num_windows=4, seed=3)


@pytest.fixture(scope="module")
def current(windows: np.ndarray) -> ExpertPlacement:
    return plan_placement(windows[0], **GROUP).placement


def check_plan(plan: PlacementPlan, current: ExpertPlacement, load: np.ndarray) -> None:
    """Everything a plan says of itself, recomputed."""
    old, new = current.slot_expert, plan.placement.slot_expert
    assert plan.num_moves.tolist() == moves_as_sets(old, new, current.num_ranks)
    all_moves, far = count_moves(current, plan.placement, num_nodes=4)
    assert plan.num_moves.tolist() == all_moves.tolist()
    assert plan.num_cross_node_moves.tolist() == far.tolist()
    assert plan.balance == pytest.approx(balancedness(plan.placement, load), rel=1e-6)


def test_a_plan_from_the_placement_in_use_moves_little(
    windows: np.ndarray, current: ExpertPlacement
) -> None:
    """Layers end below the trigger, with a tenth of a fresh plan's moves."""
    plan = plan_placement(windows[1], **GROUP, current=current)
    fresh = plan_placement(windows[1], **GROUP)
    check_placement(plan.placement)
    check_plan(plan, current, windows[1])

    assert (plan.balance >= 1 / 1.03 - 1e-9).all()
    assert plan.num_moves.sum() < count_moves(current, fresh.placement)[0].sum() / 5
    assert (plan.balance >= plan.balance_before - 1e-12).all()


def test_a_lost_rank_costs_as_many_moves_as_experts(
    windows: np.ndarray, current: ExpertPlacement
) -> None:
    """With no other move allowed, exactly the experts without a live copy are placed."""
    rank_up = np.ones(16, bool)
    rank_up[5] = False
    by_rank = np.delete(current.slot_expert.reshape(6, 16, 5), 5, axis=1).reshape(6, -1)
    lost = [64 - len(np.unique(row)) for row in by_rank]

    plan = plan_placement(windows[0], **GROUP, current=current, rank_up=rank_up, max_moves=0)
    check_placement(plan.placement, rank_up=rank_up)

    assert sum(lost) > 0
    assert plan.num_moves.tolist() == lost
    assert plan.num_covered.tolist() == lost


def test_balance_moves_after_a_loss_keep_to_their_limit(
    windows: np.ndarray, current: ExpertPlacement
) -> None:
    """Coverage comes first; what the limit leaves goes into balance, and never beyond it."""
    rank_up = np.ones(16, bool)
    rank_up[5] = False
    bare = plan_placement(windows[0], **GROUP, current=current, rank_up=rank_up, max_moves=0)
    plan = plan_placement(windows[0], **GROUP, current=current, rank_up=rank_up, max_moves=9)
    check_placement(plan.placement, rank_up=rank_up)

    assert (plan.num_moves <= 9).all()
    assert (plan.balance >= bare.balance - 1e-12).all()
    assert plan.balance.mean() > bare.balance.mean() + 0.02


def test_a_rank_that_returns_is_used_again(windows: np.ndarray, current: ExpertPlacement) -> None:
    """Its empty slots are filled and its share of the load comes back."""
    rank_up = np.ones(16, bool)
    rank_up[5] = False
    without = plan_placement(windows[0], **GROUP, current=current, rank_up=rank_up)
    plan = plan_placement(windows[0], **GROUP, current=without.placement)
    check_placement(plan.placement)

    assert (plan.placement.slot_expert >= 0).all()
    assert (plan.balance >= 1 / 1.03 - 1e-9).all()


def test_the_shared_budget_goes_where_it_helps(
    windows: np.ndarray, current: ExpertPlacement
) -> None:
    """Bytes are kept to over all layers, and more bytes never balance worse in the sum."""
    free = plan_placement(windows[1], **GROUP, current=current)
    saved = []
    for num_moves in (0, 4, 8, 16, int(free.num_moves.sum())):
        options = PlacementOptions(max_bytes=num_moves * 100, expert_bytes=100)
        plan = plan_placement(windows[1], **GROUP, current=current, options=options)
        check_placement(plan.placement)
        check_plan(plan, current, windows[1])
        assert plan.num_moves.sum() <= num_moves
        saved.append((windows[1].sum(axis=1) / plan.balance).sum())

    assert saved[0] == pytest.approx((windows[1].sum(axis=1) / free.balance_before).sum())
    assert saved == sorted(saved, reverse=True)
    assert saved[0] > saved[1] > saved[-1]


def test_moves_that_do_not_pay_are_not_made(windows: np.ndarray, current: ExpertPlacement) -> None:
    """With few steps until the next plan nothing moves; with many, everything does."""
    free = plan_placement(windows[1], **GROUP, current=current)
    for steps, moves in ((0, 0), (10**9, int(free.num_moves.sum()))):
        payback = Payback(ns_per_token=100.0, window_steps=1000, steps_to_next=steps)
        plan = plan_placement(
            windows[1], **GROUP, current=current, options=PlacementOptions(payback=payback)
        )
        assert plan.num_moves.sum() == moves
        check_plan(plan, current, windows[1])
    assert moves > 0


def test_moves_inside_a_node_are_preferred(windows: np.ndarray, current: ExpertPlacement) -> None:
    """Where crossing nodes costs eight times as much, fewer copies cross."""
    flat = PlacementOptions(prices=MovePrices(same_node_ns=1, cross_node_ns=1))
    priced = plan_placement(windows[1], **GROUP, current=current)
    plain = plan_placement(windows[1], **GROUP, current=current, options=flat)

    assert priced.num_cross_node_moves.sum() < plain.num_cross_node_moves.sum()
    assert (priced.balance >= 1 / 1.03 - 1e-9).all()


def node_of_experts(placement: ExpertPlacement) -> list[dict[int, set[int]]]:
    """For each layer, the nodes that hold each expert group of eight."""
    result = []
    for row in placement.slot_expert:
        nodes: dict[int, set[int]] = {}
        for slot, expert in enumerate(row.tolist()):
            if expert >= 0:
                nodes.setdefault(expert // 8, set()).add(slot // 20)
        result.append(nodes)
    return result


def test_groups_stay_on_one_node(windows: np.ndarray) -> None:
    """All copies of a group's experts are on one node, fresh and later, with few moves."""
    options = PlacementOptions(num_groups=8)
    first = plan_placement(windows[0], **GROUP, options=options)
    then = plan_placement(windows[1], **GROUP, options=options, current=first.placement)
    check_plan(then, first.placement, windows[1])
    for plan in (first, then):
        check_placement(plan.placement)
        for nodes in node_of_experts(plan.placement):
            assert all(len(where) == 1 for where in nodes.values())

    assert then.num_moves.sum() < 6 * 80 / 2


def test_a_node_with_too_few_slots_for_its_groups_is_named(windows: np.ndarray) -> None:
    """Groups cannot leave their node, so lost ranks there are fatal sooner."""
    rank_up = np.ones(16, bool)
    rank_up[:1] = False
    with pytest.raises(ValueError, match="15 live slots of node 0 cannot hold its 16 experts"):
        plan_placement(windows[0], **GROUP, rank_up=rank_up, options=PlacementOptions(num_groups=8))
    with pytest.raises(ValueError, match="64 experts cannot be split into 7 groups"):
        plan_placement(windows[0], **GROUP, options=PlacementOptions(num_groups=7))


def test_copies_can_be_spread_over_nodes(windows: np.ndarray, current: ExpertPlacement) -> None:
    """Every expert with several copies then survives the loss of a node."""
    options = PlacementOptions(spread_nodes=True)
    first = plan_placement(windows[0], **GROUP, options=options)
    then = plan_placement(windows[1], **GROUP, options=options, current=first.placement)

    for plan in (first, then):
        check_placement(plan.placement, num_nodes=4)
        assert (plan.balance > 0.95).all()


def test_a_layer_that_cheap_steps_cannot_mend_is_planned_afresh() -> None:
    """A placement made for another load is given up where that is allowed, not else."""
    rng = np.random.default_rng(2)
    old, new = rng.zipf(1.3, (2, 4, 64)).clip(max=3000).astype(np.int64)
    current = plan_placement(old, **GROUP).placement
    plan = plan_placement(new, **GROUP, current=current)
    limited = plan_placement(new, **GROUP, current=current, max_moves=4)
    check_placement(plan.placement)

    assert (limited.num_moves <= 4).all()
    assert set(plan.outcome.tolist()) <= {int(outcome) for outcome in Outcome}
    assert (plan.balance >= limited.balance - 1e-12).all()


def test_weighted_split_needs_few_copies(windows: np.ndarray) -> None:
    """Judged by the optimal split, a dominating expert is balanced with a few moves."""
    shape = LoadShape(num_layers=4, num_experts=64, dominating=(0.1, 0.3))
    load = generate_expert_load(shape, num_windows=3, seed=1)
    options = PlacementOptions(split="weighted", trigger=0.005, stop=0.001)
    current = plan_placement(load[0], num_slots=80, num_ranks=8, options=options).placement
    for window in load[1:]:
        plan = plan_placement(window, num_slots=80, num_ranks=8, current=current, options=options)
        check_placement(plan.placement)
        assert plan.num_moves.tolist() == moves_as_sets(
            current.slot_expert, plan.placement.slot_expert, 8
        )
        balance = balancedness(plan.placement, window, split="weighted")
        assert (balance >= 0.99).all()
        assert plan.num_moves.mean() <= 6
        current = plan.placement
