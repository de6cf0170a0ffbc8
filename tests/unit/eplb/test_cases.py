"""Inputs that hurt public planners (issue numbers in the names), each as a test of its kind."""

import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from eplb_reference import heaviest_equal

from dsched.eplb import (
    ExpertPlacement,
    PlacementOptions,
    balancedness,
    check_placement,
    plan_placement,
    planner,
    rank_loads,
    split_evenly,
    split_traffic,
)
from dsched.eplb.layers import LayerResults
from dsched.eplb.planner import plan_layers
from dsched.errors import InvariantError
from dsched.sim.expert_load import LoadShape, generate_expert_load

TIED = ([[7] * 12], 16, 8, 10.5)
README = ([[20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]], 16, 8, 172)
LARGE = ([[16777216, 16777217, 16777218, 16777219]], 6, 2, 33554435.5)


@pytest.mark.parametrize(
    ("load", "num_slots", "right"),
    [([100, 1, 1, 1], 8, 26), ([300, 8, 7, 6, 5, 4], 12, 83)],
)
def test_a_very_hot_expert_is_never_doubled_on_a_rank(
    load: list[int], num_slots: int, right: float
) -> None:
    """deepseek-ai/EPLB#22: more copies than ranks puts two shares on one."""
    plan = plan_placement([load], num_slots=num_slots, num_ranks=4)
    check_placement(plan.placement)

    assert plan.placement.count_copies()[0, 0] == 4
    assert heaviest_equal(plan.placement.slot_expert[0].tolist(), load, 4) == right


def variants(load: list[list[int]]) -> dict[str, Any]:
    """The same counts as other types, layouts and multiples."""
    ints = np.array(load, np.int64)
    strided = np.zeros((ints.shape[0], 2 * ints.shape[1]), np.int64)
    strided[:, ::2] = ints
    frozen = ints.copy()
    frozen.flags.writeable = False
    return {
        "list": load,
        "int64": ints,
        "int32": ints.astype(np.int32),
        "uint64": ints.astype(np.uint64),
        "float64": ints.astype(np.float64),
        "fortran": np.asfortranarray(ints),
        "strided": strided[:, ::2],
        "read-only": frozen,
        "x8": ints * 8,
        "x24": ints * 24,
        "float x2**70": ints.astype(np.float64) * 2.0**70,
        "float /1024": ints.astype(np.float64) / 1024,
    }


@pytest.mark.parametrize(("load", "num_slots", "num_ranks", "right"), [TIED, README, LARGE])
def test_equal_counts_give_equal_bytes(
    load: list[list[int]], num_slots: int, num_ranks: int, right: float
) -> None:
    """deepseek-ai/EPLB#8, sglang#32962, vllm#22167: types, layouts and multiples change nothing."""
    inputs = variants(load)
    if right < 1e6:
        inputs["x2**40"] = np.array(load, np.int64) * 2**40
    before = {name: np.array(value, copy=True) for name, value in inputs.items()}

    plans = {
        name: plan_placement(value, num_slots=num_slots, num_ranks=num_ranks)
        for name, value in inputs.items()
    }

    first = plans["int64"].placement.slot_expert
    assert {plan.placement.slot_expert.tobytes() for plan in plans.values()} == {first.tobytes()}
    assert all(plan.placement.slot_expert.dtype == np.int32 for plan in plans.values())
    assert float(heaviest_equal(first[0].tolist(), load[0], num_ranks)) == right
    for name, value in inputs.items():
        assert np.array_equal(before[name], value), f"{name} was modified"


PRINT_DIGEST = """
import hashlib, numpy as np
from dsched.eplb import plan_placement
rng = np.random.default_rng(3)
load = rng.zipf(1.5, (2, 24)).clip(0, 10**6) // 3 * 3
first = plan_placement(load, num_slots=32, num_ranks=8, num_nodes=2)
then = plan_placement(
    np.roll(load, 1, axis=1), num_slots=32, num_ranks=8, num_nodes=2, current=first.placement
)
print(hashlib.sha256(first.placement.slot_expert.tobytes()
                     + then.placement.slot_expert.tobytes()).hexdigest())
"""


def digest(**variables: str) -> str:
    """The digest of two plans, made by a fresh interpreter."""
    command = [sys.executable, "-c", PRINT_DIGEST]
    env = os.environ | variables
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_plans_are_equal_across_processes_threads_and_compilers() -> None:
    """Hash seeds and thread counts change nothing; neither does running without the compiler."""
    digests = {
        digest(PYTHONHASHSEED="0", OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1"),
        digest(PYTHONHASHSEED="1", OMP_NUM_THREADS="4"),
        digest(NUMBA_DISABLE_JIT="1"),
    }

    assert len(digests) == 1
    assert len(digests.pop().strip()) == hashlib.sha256().digest_size * 2


CURRENT = [[0, 1, 2, 3, 4, 5, 0, 3, 1]]
UNEVEN = [[30, 20, 10, 60, 40, 20]]


def heaviest_with(max_moves: int | None) -> tuple[float, int, np.ndarray]:
    plan = plan_placement(UNEVEN, num_slots=9, num_ranks=3, current=CURRENT, max_moves=max_moves)
    check_placement(plan.placement)
    slots = plan.placement.slot_expert[0]
    heaviest = heaviest_equal(slots.tolist(), UNEVEN[0], 3)
    return float(heaviest), int(plan.num_moves[0]), slots


@pytest.mark.parametrize(
    ("max_moves", "right"), [(0, 90.0), (1, 70.0), (2, 60.0), (3, 60.0), (None, 60.0)]
)
def test_moves_are_few_and_well_used(max_moves: int | None, right: float) -> None:
    """vllm#50647, deepseek-ai/EPLB#25: each allowed number of moves gives its optimum."""
    heaviest, num_moves, slots = heaviest_with(max_moves)

    assert heaviest == right
    assert max_moves is None or num_moves <= max_moves
    assert (slots != np.array(CURRENT[0])).sum() == num_moves, "unmoved slots keep their place"


def test_a_perfect_placement_stays() -> None:
    """What two moves made perfect needs none."""
    _, _, slots = heaviest_with(2)
    plan = plan_placement(UNEVEN, num_slots=9, num_ranks=3, current=slots[None, :])

    assert plan.num_moves.tolist() == [0]
    assert plan.placement.slot_expert.tobytes() == slots.tobytes()


@pytest.mark.slow
def test_more_moves_are_never_worse() -> None:
    """The heaviest rank never grows with the moves allowed, on many random layers."""
    rng = np.random.default_rng(1)
    options = PlacementOptions(trigger=0.0, stop=0.0)
    for _ in range(20):
        old, new = rng.integers(1, 100, (2, 1, 12))
        current = plan_placement(old, num_slots=16, num_ranks=4).placement
        loads = []
        for max_moves in range(12):
            plan = plan_placement(
                new,
                num_slots=16,
                num_ranks=4,
                current=current,
                max_moves=max_moves,
                options=options,
            )
            check_placement(plan.placement)
            assert plan.num_moves[0] <= max_moves
            loads.append(heaviest_equal(plan.placement.slot_expert[0].tolist(), new[0].tolist(), 4))
        assert loads == sorted(loads, reverse=True)


@pytest.mark.parametrize(
    ("slots", "num_ranks", "load", "right", "rank_max", "equal_max"),
    [
        ([0, 1, 0, 2], 2, [10, 6, 2], [3, 6, 7, 2], 9, 11),
        ([0, 1, 0, 2], 2, [2, 9, 1], [0, 9, 2, 1], 9, 10),
        ([0, 1, 1, 2, 2, 3], 3, [9, 6, 3, 0], [9, 0, 6, 0, 3, 0], 9, 12),
        ([0, 1, -1, -1, 0, 2], 3, [8, 3, 1], [3, 3, 0, 0, 5, 1], 6, 7),
        ([0, 1, 0, 2], 2, [0, 0, 0], [0, 0, 0, 0], 0, 0),
    ],
)
def test_the_copy_on_the_idle_rank_gets_more(
    slots: list[int],
    num_ranks: int,
    load: list[int],
    right: list[float],
    rank_max: float,
    equal_max: float,
) -> None:
    """sglang#6739, vllm-ascend#1116: an even split fills the busy rank's copy as full as others."""
    placement = ExpertPlacement(slot_expert=[slots], num_ranks=num_ranks)

    tokens = split_traffic(placement, [load])

    assert tokens[0] == pytest.approx(right)
    assert rank_loads(placement, tokens).max() == pytest.approx(rank_max)
    assert rank_loads(placement, split_evenly(placement, [load])).max() == equal_max
    assert balancedness(placement, [load], split="weighted") >= balancedness(placement, [load])


def test_no_expert_is_lost_by_a_step_that_was_found_before_others_were_made() -> None:
    """Where nothing helps the heaviest rank, all ranks exchange; an overwriting that was found
    before these exchanges once took the only copy of what had come to its slot (one layer in some
    25 000 of this shape)."""
    load = generate_expert_load(LoadShape(), num_windows=5, seed=4)[4][19:20]
    placement = plan_placement(load, num_slots=384, num_ranks=128).placement
    check_placement(placement)


def test_a_plan_that_loses_an_expert_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_one(*args: object) -> LayerResults:
        results = plan_layers(*args)  # type: ignore[arg-type]
        results.slots[results.slots == 3] = 0
        return results

    monkeypatch.setattr(planner, "plan_layers", lose_one)
    with pytest.raises(InvariantError, match="layer 0: no slot holds expert 3"):
        plan_placement([[1, 1, 1, 1]], num_slots=4, num_ranks=2)
