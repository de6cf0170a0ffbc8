"""A policy for the shares of length buckets inside an engine: what it sees, and what a bad one
costs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsched.clock import ManualClock
from dsched.config import (
    ChunkSettings,
    PolicyConfig,
    chunk_settings_from_environment,
    chunk_weights_environment,
)
from dsched.costs.presets import load_cost_models
from dsched.drivers.chunk_weights import ASK_PLANS, ChunkWeights, load_chunk_weights
from dsched.errors import ConfigError
from dsched.ids import RequestId
from dsched.plugins import BucketView, FailureReason, PolicyGuard
from dsched.scheduler import ChunkRule, StepPlanner

RULE = ChunkRule(bucket_bounds=(100, 1_000), bucket_weights=(3.0, 2.0, 1.0))
PROMPTS = [("a", 50, 50), ("b", 100, 40), ("c", 5_000, 5_000), ("d", 99, 99)]


class Told:
    name = "told"
    api_version = 1

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.views: list[BucketView] = []

    def weights(self, view: BucketView) -> Any:
        self.views.append(view)
        return self.answer() if callable(self.answer) else self.answer


def endless_sleep() -> None:
    time.sleep(0.2)


def make(answer: object, clock: ManualClock) -> tuple[ChunkWeights, Told]:
    policy = Told(answer)
    budget_ns = 20_000_000 if answer is endless_sleep else 5_000_000_000
    return ChunkWeights(PolicyGuard(policy, budget_ns=budget_ns), RULE, clock), policy


def test_it_sees_the_backlog_by_bucket_and_how_long_it_waits() -> None:
    """Requests are known from their arrival; those that are gone are forgotten."""
    clock = ManualClock()
    weights, policy = make([1.0, 1.0, 1.0], clock)
    weights.note("a")
    clock.advance_to(700)
    weights.note("c")
    clock.advance_to(1_000)

    assert weights.ask(PROMPTS) == (1.0, 1.0, 1.0)
    clock.advance_to(1_500)
    assert weights.ask(PROMPTS[1:3]) is None  # the same weights: nothing to change
    weights.ask(PROMPTS[:1])
    weights.guard.close()

    assert policy.views == [
        BucketView(
            num_requests=(2, 1, 1), num_tokens=(149, 40, 5_000), oldest_wait_ns=(1_000, 0, 300)
        ),
        BucketView(num_requests=(0, 1, 1), num_tokens=(0, 40, 5_000), oldest_wait_ns=(0, 500, 800)),
        BucketView(num_requests=(1, 0, 0), num_tokens=(50, 0, 0), oldest_wait_ns=(0, 0, 0)),
    ]
    assert weights.num_changes == 1


def test_it_is_asked_before_the_first_plan_and_then_now_and_then() -> None:
    weights, _ = make(None, ManualClock())

    due = [weights.is_due() for _ in range(2 * ASK_PLANS + 1)]

    assert [number for number, is_due in enumerate(due) if is_due] == [0, ASK_PLANS, 2 * ASK_PLANS]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: 1 / 0, FailureReason.RAISED),
        (endless_sleep, FailureReason.TIMEOUT),
        ([1.0, float("nan"), 1.0], FailureReason.WRONG_ANSWER),
        ([1.0, 0.0, 1.0], FailureReason.WRONG_ANSWER),
        ([1.0, 1.0], FailureReason.WRONG_ANSWER),
        (3.0, FailureReason.WRONG_ANSWER),
    ],
)
def test_a_bad_one_leaves_the_weights(
    answer: Callable[[], object] | object, reason: FailureReason, caplog: pytest.LogCaptureFixture
) -> None:
    weights, _ = make(answer, ManualClock())

    assert weights.ask(PROMPTS) is None
    weights.guard.close()

    assert weights.guard.num_failures[reason] == 1


def test_a_planner_plans_with_the_new_weights() -> None:
    """A heavy weight on the long bucket gives it most of the step, which it had least of before."""
    prefill, decode = load_cost_models(None)
    planner = StepPlanner(
        prefill_cost=prefill,
        decode_cost=decode,
        budget_seconds=0.05,
        max_running_requests=8,
        rule=ChunkRule(bucket_bounds=(4_000,), bucket_weights=(9.0, 1.0), alignment=1),
    )
    for name, length in (("short", 3_999), ("long", 300_000)):
        planner.add(RequestId(name), num_prompt_tokens=length, max_output_tokens=2)

    slots, lengths, left = (array.tolist() for array in planner.backlog())
    assert [planner.request_id(slot) for slot in slots] == ["short", "long"]
    assert (lengths, left) == ([3_999, 300_000], [3_999, 300_000])

    planner.bucket_weights = (1.0, 99.0)
    plan = planner.plan()
    chunks = dict(zip(map(planner.request_id, plan.slots.tolist()), plan.num_tokens, strict=True))

    assert planner.bucket_weights == (1.0, 99.0)
    assert chunks["long"] > 10 * chunks.get("short", 0)
    with pytest.raises(ValueError, match="must be positive"):
        planner.bucket_weights = (1.0, 0.0)
    with pytest.raises(ValueError, match="but 1 weights are given"):
        planner.bucket_weights = (1.0,)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ChunkSettings:
    """As an engine reads them that `dsched run` has started from `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "engine_policy.py").write_text(
        "class Even:\n    name = 'even'\n    api_version = 1\n"
        "    def __init__(self, *, weight): self.weight = weight\n"
        "    def weights(self, view): return [self.weight] * len(view.num_requests)\n"
    )
    policy = PolicyConfig(policy="engine_policy:Even", args={"weight": 2.0})
    for name, value in chunk_weights_environment(policy).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(tmp_path)
    return chunk_settings_from_environment()


def test_the_environment_names_the_policy_and_its_arguments(settings: ChunkSettings) -> None:
    weights = load_chunk_weights(settings, RULE)

    assert weights is not None
    weights.guard._budget_ns = 30_000_000_000  # a busy machine is no reason to fail
    assert weights.ask(PROMPTS) == (2.0, 2.0, 2.0)
    weights.guard.close()
    assert chunk_weights_environment(PolicyConfig()) == {}


def test_one_that_cannot_be_loaded_is_logged_and_the_engine_goes_on(
    settings: ChunkSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DSCHED_CHUNK_WEIGHTS_ARGS", "{}")

    assert load_chunk_weights(chunk_settings_from_environment(), RULE) is None
    assert "policy.skipped reason='DSCHED_CHUNK_WEIGHTS_ARGS: engine_policy:Even" in caplog.text

    monkeypatch.setenv("DSCHED_CHUNK_WEIGHTS_ARGS", "[1]")
    with pytest.raises(ConfigError, match="DSCHED_CHUNK_WEIGHTS_ARGS: '\\[1\\]' is not a JSON"):
        chunk_settings_from_environment()
