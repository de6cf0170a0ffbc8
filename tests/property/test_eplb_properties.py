"""Expert placement: what holds for every input. Small layers, many ties."""

from typing import Any

import numpy as np
import pytest
from eplb_reference import greedy_counts, heaviest_equal, lightest_split, moves_as_sets
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.eplb import (
    ExpertPlacement,
    PlacementOptions,
    balancedness,
    check_placement,
    plan_placement,
    rank_loads,
    split_evenly,
    split_traffic,
    split_whole_tokens,
)

BARE = PlacementOptions(search=False)


@st.composite
def layers(draw: st.DrawFn) -> dict[str, Any]:
    """A load and a group that can hold it; loads tie, vanish and dominate."""
    num_ranks = draw(st.integers(1, 6))
    width = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, num_ranks * width))
    value = st.one_of(st.sampled_from([0, 1, 7]), st.integers(0, 50), st.just(10_000))
    load = draw(
        st.lists(
            st.lists(value, min_size=num_experts, max_size=num_experts), min_size=1, max_size=2
        )
    )
    return {"load": np.array(load), "num_slots": num_ranks * width, "num_ranks": num_ranks}


@pytest.mark.slow
@given(layers())
@settings(max_examples=150, deadline=None)
def test_a_fresh_plan_keeps_every_rule(case: dict[str, Any]) -> None:
    plan = plan_placement(**case)
    bare = plan_placement(**case, options=BARE)
    for one in (plan, bare):
        check_placement(one.placement)
        assert one.num_moves.tolist() == [0] * len(case["load"])

    # An empty slot only where the rank holds every expert.
    num_experts = case["load"].shape[1]
    by_rank = plan.placement.slot_expert.reshape(-1, case["num_slots"] // case["num_ranks"])
    for slots in by_rank:
        assert (slots >= 0).all() or len(set(slots[slots >= 0])) == num_experts
    # What the plan says of its balance is true, and search makes nothing worse.
    assert plan.balance == pytest.approx(balancedness(plan.placement, case["load"]), rel=1e-6)
    assert (plan.balance >= bare.balance - 1e-9).all()


@given(layers())
@settings(max_examples=100, deadline=None)
def test_the_greedy_counts_are_those_of_the_plain_twin(case: dict[str, Any]) -> None:
    if case["num_slots"] > case["num_ranks"] * case["load"].shape[1]:
        return  # more slots than copies allowed: what is left over is filled otherwise
    plan = plan_placement(**case, options=BARE)
    for layer, load in enumerate(case["load"].tolist()):
        twin = greedy_counts(
            [value * 10**6 for value in load] if any(load) else [1] * len(load),
            num_slots=case["num_slots"],
            max_copies=case["num_ranks"],
        )
        copies = plan.placement.count_copies()[layer].tolist()
        # Packing may find no rank for a copy; then another expert gets the slot.
        assert sum(abs(a - b) for a, b in zip(copies, twin, strict=True)) <= 2 * len(twin)
        if case["num_slots"] == case["num_ranks"]:
            assert copies == twin


@pytest.mark.slow
@given(layers(), st.integers(0, 2**32 - 1), st.integers(0, 8))
@settings(max_examples=150, deadline=None)
def test_a_plan_from_any_placement_keeps_every_rule(
    case: dict[str, Any], seed: int, max_moves: int
) -> None:
    rng = np.random.default_rng(seed)
    num_experts = case["load"].shape[1]
    # Any content: experts missing, doubled on a rank, slots empty.
    shape = (len(case["load"]), case["num_slots"])
    current = ExpertPlacement(
        slot_expert=rng.integers(-1, num_experts, shape),
        num_experts=num_experts,
        num_ranks=case["num_ranks"],
    )
    rank_up = rng.random(case["num_ranks"]) < 0.8
    width = case["num_slots"] // case["num_ranks"]
    if rank_up.sum() * width < num_experts:
        rank_up[:] = True
    plan = plan_placement(**case, current=current, rank_up=rank_up, max_moves=max_moves)
    plan.placement.validate()
    down = np.repeat(~rank_up, width)
    assert (plan.placement.slot_expert[:, down] == -1).all()

    alive = np.where(down, -1, current.slot_expert)
    lost = [num_experts - len(set(row[row >= 0])) for row in alive]
    assert plan.num_covered.tolist() == lost
    moves = moves_as_sets(alive, plan.placement.slot_expert, case["num_ranks"])
    assert plan.num_moves.tolist() == moves
    assert all(m <= max(max_moves, n) for m, n in zip(moves, lost, strict=True))
    for layer in np.flatnonzero(np.array(moves) > 0):
        one = ExpertPlacement(
            slot_expert=plan.placement.slot_expert[layer : layer + 1],
            num_experts=num_experts,
            num_ranks=case["num_ranks"],
        )
        check_placement(one, rank_up=rank_up)


@pytest.mark.slow
@given(layers(), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_moves_never_make_it_worse(case: dict[str, Any], seed: int) -> None:
    start = plan_placement(np.roll(case["load"], seed % 5, axis=1), **{
        key: case[key] for key in ("num_slots", "num_ranks")
    }).placement  # fmt: skip
    plan = plan_placement(**case, current=start)
    check_placement(plan.placement)
    for layer, load in enumerate(case["load"].tolist()):
        before = heaviest_equal(start.slot_expert[layer].tolist(), load, case["num_ranks"])
        after = heaviest_equal(plan.placement.slot_expert[layer].tolist(), load, case["num_ranks"])
        assert after <= before * (1 + 1e-9)
        if plan.num_moves[layer] == 0:
            assert after == before


@pytest.mark.slow
@given(layers(), st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_the_split_is_optimal_and_loses_nothing(case: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = plan_placement(**case).placement
    load = case["load"] * rng.integers(0, 4, case["load"].shape)
    tokens = split_traffic(placement, load)
    whole = split_whole_tokens(placement, load)

    assert (tokens >= 0).all()
    assert (tokens[placement.slot_expert < 0] == 0).all()
    for layer in range(len(load)):
        slots = placement.slot_expert[layer]
        for parts in (tokens, whole):
            totals = np.bincount(
                slots[slots >= 0], weights=parts[layer][slots >= 0], minlength=load.shape[1]
            )
            assert totals == pytest.approx(load[layer], abs=1e-6)
        heaviest = rank_loads(placement, tokens)[layer].max()
        assert heaviest == pytest.approx(
            lightest_split(slots, load[layer], case["num_ranks"]), rel=1e-3, abs=1e-6
        )
    assert (np.abs(whole - tokens) < 1 + 1e-6).all()
    even = rank_loads(placement, split_evenly(placement, load)).max(axis=1)
    assert (rank_loads(placement, tokens).max(axis=1) <= even * (1 + 1e-6) + 1e-9).all()
