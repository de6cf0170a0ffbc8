"""The parts of the engine hooks that need no engine; `tests/vllm` runs vLLM's own path."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dsched.config import EplbSettings, eplb_settings_from_environment
from dsched.drivers.eplb import plan_slots
from dsched.drivers.sglang.eplb import ExpertRebalance, attach_eplb, maps_of, sglang_planner
from dsched.drivers.vllm.eplb import activate, vllm_planner
from dsched.errors import ConfigError

SETTINGS = EplbSettings(is_on=True)
GROUP: dict[str, Any] = {"num_slots": 12, "num_ranks": 4, "num_nodes": 2, "num_groups": 4}


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off without `DSCHED_EPLB`; each value has a variable."""
    assert not eplb_settings_from_environment().is_on
    for name, value in {"": "1", "_TRIGGER": "0.1", "_STOP": "0.05", "_MAX_MOVES": "7"}.items():
        monkeypatch.setenv(f"DSCHED_EPLB{name}", value)
    monkeypatch.setenv("DSCHED_EPLB_GROUPS", "1")

    assert eplb_settings_from_environment() == EplbSettings(
        is_on=True, trigger=0.1, stop=0.05, max_moves=7, keep_groups=True
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DSCHED_EPLB", "yes", "DSCHED_EPLB: 'yes' is neither 0 nor 1"),
        ("DSCHED_EPLB_TRIGGER", "much", "DSCHED_EPLB_TRIGGER: 'much' is not a number"),
        ("DSCHED_EPLB_STOP", "0.5", "0.5 is above DSCHED_EPLB_TRIGGER 0.03"),
        ("DSCHED_EPLB_MAX_MOVES", "-1", "max_moves"),
    ],
)
def test_wrong_settings_are_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    """The message has the variable and the value."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        eplb_settings_from_environment()


def test_plug_ins_do_nothing_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed beside an engine, dsched changes nothing by itself, and imports no engine."""
    monkeypatch.delenv("DSCHED_EPLB", raising=False)

    activate()
    assert attach_eplb() is None


def test_planners_of_engines_that_are_not_there_are_none() -> None:
    """Comparisons leave them out."""
    for find in (vllm_planner, sglang_planner):
        planner = find(num_slots=12, num_ranks=4)
        assert planner is None or callable(planner)


def test_plans_start_from_the_placement_in_use() -> None:
    """A balanced placement stays; one of another size is not started from."""
    load = np.full((2, 8), 10)
    first = plan_slots(load, **GROUP, current=None, settings=SETTINGS)
    again = plan_slots(load, **GROUP, current=first, settings=SETTINGS)
    grown = plan_slots(load, **(GROUP | {"num_slots": 16}), current=first, settings=SETTINGS)

    assert first.dtype == np.int64
    assert np.array_equal(first, again)
    assert grown.shape == (2, 16)


def test_engine_slots_are_never_empty() -> None:
    """Where a rank has more slots than experts to hold, one of its experts fills them."""
    slots = plan_slots(
        np.array([[3, 1]]),
        num_slots=6,
        num_ranks=2,
        num_nodes=1,
        num_groups=None,
        current=None,
        settings=SETTINGS,
    )

    assert (slots >= 0).all()
    assert all(set(rank) == {0, 1} for rank in slots.reshape(2, 3).tolist())


def test_groups_are_kept_on_nodes_if_wanted() -> None:
    """Four groups of two experts on two nodes."""
    load = np.random.default_rng(0).integers(1, 100, (3, 8))
    settings = EplbSettings(is_on=True, keep_groups=True)
    slots = plan_slots(load, **GROUP, current=None, settings=settings)

    for row in slots.reshape(3, 2, 6):
        assert not set((row[0] // 2).tolist()) & set((row[1] // 2).tolist())


def test_sglangs_maps_agree_with_each_other() -> None:
    """Slot to expert, expert to slots padded by -1, and counts."""
    slots = np.array([[0, 1, 0, 2], [2, 1, 1, 0]])
    to_expert, to_slots, counts = maps_of(slots, num_experts=3)

    assert to_expert.tolist() == slots.tolist()
    assert to_slots.tolist() == [[[0, 2], [1, -1], [3, -1]], [[3, -1], [1, 2], [0, -1]]]
    assert counts.tolist() == [[2, 1, 1], [1, 2, 1]]


def test_sglangs_own_algorithm_is_used_when_a_plan_fails() -> None:
    """The hook answers with what the original says, and counts the error."""
    hook = ExpertRebalance(settings=SETTINGS)
    answer = hook.around_rebalance(
        lambda **_: "sglang's",
        tokens_per_expert="no tensor",
        num_physical_experts=12,
        num_local_physical_experts=3,
        num_groups=None,
        num_nodes=1,
        algorithm=SimpleNamespace(name="deepseek"),
    )

    assert answer == "sglang's"
    assert (hook.num_errors, hook.num_plans) == (1, 0)
    assert hook.around_metadata(lambda value: value + 1, 1) == 2
