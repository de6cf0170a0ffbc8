"""The simulation of expert placement: generated load, scores, and the command."""

import json
from pathlib import Path

import numpy as np
import pytest

from dsched.cli.main import make_command
from dsched.clock import ManualClock
from dsched.eplb import ExpertPlacement, LoadHeader, LoadRecorder, PlacementOptions
from dsched.errors import ConfigError
from dsched.sim.eplb import (
    LoadShape,
    compare_planners,
    dsched_planner,
    generate_expert_load,
    greedy_planner,
    plan_greedy,
)

SHAPE = LoadShape(num_layers=3, num_experts=64, drift=0.2)


def test_one_seed_gives_one_load() -> None:
    """Windows drift, totals stay, and another seed is another load."""
    load = generate_expert_load(SHAPE, num_windows=3, seed=1)

    assert np.array_equal(load, generate_expert_load(SHAPE, num_windows=3, seed=1))
    assert not np.array_equal(load, generate_expert_load(SHAPE, num_windows=3, seed=2))
    assert not np.array_equal(load[0], load[1])
    assert load.sum(axis=2) == pytest.approx(np.full((3, 3), 64 * 20_000), rel=1e-4)


def test_a_dominating_expert_keeps_its_share() -> None:
    """Between the bounds in every layer and window."""
    shape = LoadShape(num_layers=4, num_experts=32, dominating=(0.1, 0.3))
    load = generate_expert_load(shape, num_windows=5, seed=1)
    share = load.max(axis=2) / load.sum(axis=2)

    assert (share >= 0.0999).all()
    assert (share <= 0.3001).all()


def test_the_greedy_doubles_a_very_hot_expert_on_a_rank() -> None:
    """The fault that made it worth rewriting: 40 and 640/7 where 26 and 83 are possible."""
    for load, num_slots, right in (
        ([100, 1, 1, 1], 8, 40.0),
        ([300, 8, 7, 6, 5, 4], 12, 91.714),
    ):
        slots = plan_greedy(np.array([load]), num_slots=num_slots, num_ranks=4)[0]
        copies = np.bincount(slots, minlength=len(load))
        heaviest = (np.array(load) / copies)[slots].reshape(4, -1).sum(axis=1).max()
        assert heaviest == pytest.approx(right, abs=1e-3)


def test_planners_are_scored_on_the_same_windows() -> None:
    """The first plan is not scored; what stays in place has no moves; ours moves least."""
    windows = generate_expert_load(SHAPE, num_windows=5, seed=1)
    fixed = greedy_planner(num_slots=72, num_ranks=8)(windows[0], None)

    def keep(load: np.ndarray, current: ExpertPlacement | None) -> ExpertPlacement:
        return fixed

    group = {"num_slots": 72, "num_ranks": 8}
    scores = {
        score.name: score
        for score in compare_planners(
            {
                "keep": keep,
                "dsched": dsched_planner(**group, options=PlacementOptions()),
                "greedy": greedy_planner(**group),
            },
            windows,
            clock=ManualClock(),
            num_nodes=2,
        )
    }

    assert scores["keep"].moves_per_layer == 0
    assert scores["dsched"].moves_per_layer < scores["greedy"].moves_per_layer / 3
    assert scores["keep"].balance_avg < scores["dsched"].balance_avg
    assert all(len(score.next_by_window) == 3 for score in scores.values())
    assert all(
        score.balance_worst <= score.balance_avg
        and score.next_balance_worst <= score.next_balance_avg <= score.next_weighted_avg
        and score.cross_node_moves_per_layer <= score.moves_per_layer
        for score in scores.values()
    )


def test_too_few_windows_are_refused() -> None:
    """One to start, one to plan from, one to score on."""
    windows = generate_expert_load(SHAPE, num_windows=2, seed=1)
    with pytest.raises(ValueError, match="2 load windows are too few"):
        compare_planners(
            {"greedy": greedy_planner(num_slots=72, num_ranks=8)}, windows, clock=ManualClock()
        )


def test_the_command_compares_recorded_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`dsched sim eplb --load FILE --json -` prints one result for each planner."""
    path = tmp_path / "load.dsched"
    header = LoadHeader(num_layers=3, num_experts=64, window_steps=1000)
    with LoadRecorder(path, header) as recorder:
        for counts in generate_expert_load(SHAPE, num_windows=4, seed=1):
            recorder.write(counts, num_steps=1000)
    arguments = ["sim", "eplb", "--load", str(path), "--slots", "72", "--ranks", "8"]
    make_command().main([*arguments, "--nodes", "2", "--json", "-"], standalone_mode=False)

    answer = json.loads(capsys.readouterr().out)
    assert answer["case"] == "3 x 64 experts, 72 slots on 8 ranks"
    names = [score["name"] for score in answer["planners"]]
    assert names[:3] == ["dsched", "dsched fresh", "greedy"]


def test_the_command_names_what_does_not_fit() -> None:
    """Slots that ranks do not divide are the operator's to mend."""
    arguments = ["sim", "eplb", "--layers", "1", "--experts", "8", "--slots", "10", "--ranks", "4"]
    with pytest.raises(ConfigError, match="10 slots cannot be split over 4 EP ranks; 8 or 12"):
        make_command().main([*arguments, "--nodes", "2"], standalone_mode=False)
