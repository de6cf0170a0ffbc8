"""Verify lengths inside the real vLLM: planned is executed, answers stay, less is wasted."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dsched.costs import StepCostCurve
from dsched.testing.vllm_engines import is_vllm_there, run_vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

HERE = Path(__file__).parent
MODEL = Path(__file__).parents[2] / ".dsched" / "tests" / "models" / "tiny-moe"
Answer = dict[str, object]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answer]:
    """Run the engine in one way; each way once."""
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    folder = tmp_path_factory.mktemp("verify")
    tokens = range(1, 257)
    curve = StepCostCurve.from_samples(tokens, [(4.0 + 0.4 * b) / 1e3 for b in tokens])
    (folder / "curve.json").write_text(curve.to_json())
    run_vllm_python("-m", "dsched.drivers.vllm.tiny_model", str(MODEL))
    answers: dict[str, Answer] = {}

    def run_once(kind: str) -> Answer:
        if kind not in answers:
            output = run_vllm_python(str(HERE / "verify_engine.py"), str(MODEL), str(folder), kind)
            answers[kind] = json.loads(output.strip().splitlines()[-1])
        return answers[kind]

    run_once("none")
    return run_once


def test_planned_lengths_are_executed(run: Callable[[str], Answer]) -> None:
    planned = run("planned")

    assert planned["num_plans"] > 20
    assert planned["num_differed"] == 0
    assert planned["num_short"] > 20
    assert planned["num_errors"] == 0


def test_answers_are_those_without_speculation(run: Callable[[str], Answer]) -> None:
    expected = run("none")["outputs"]

    assert run("fixed")["outputs"] == expected
    assert run("planned")["outputs"] == expected


def test_fewer_tokens_are_wasted_than_with_fixed_five(run: Callable[[str], Answer]) -> None:
    """At equal output the planned run verifies less in vain, and still speculates."""
    fixed, planned = run("fixed"), run("planned")

    assert wasted(planned) < 0.5 * wasted(fixed)
    assert planned["num_accepted"] > 0.6 * fixed["num_accepted"]
    assert planned["num_steps"] < run("none")["num_steps"]


def test_outcomes_are_counted_as_vllm_emitted_them(run: Callable[[str], Answer]) -> None:
    planned = run("planned")

    assert planned["counted_verified"] == planned["num_verified"]
    assert planned["counted_accepted"] == planned["num_accepted"]
    assert planned["num_requests_left"] == 0


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_drafters_without_confidences_are_planned_for(
    run: Callable[[str], Answer], kind: str
) -> None:
    """Acceptance is estimated from outcomes: n-grams hardly ever hit here, the model as its own
    drafter always does."""
    answer = run(kind)

    assert answer["outputs"] == run("none")["outputs"]
    assert answer["num_differed"] == 0
    assert answer["num_errors"] == 0
    assert answer["num_plans"] > 0
    if kind == "draft":
        assert answer["num_accepted"] == answer["num_verified"]


def test_adaptive_verification_gets_our_budget() -> None:
    """vLLM's own budget where both know the same; less for requests that nothing is known of."""
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    output = run_vllm_python(str(HERE / "verify_adaptive.py"))
    answer = json.loads(output.strip().splitlines()[-1])

    assert answer["num_equal"] == answer["num_cases"] == 30
    assert answer["ours_with_new_requests"] < answer["vllm_with_new_requests"]
    assert answer["ours_in_a_narrow_sampler"] <= 70
    assert answer["ours_when_broken"] > 0
    assert answer["is_replaced"]


def wasted(answer: Answer) -> int:
    return int(answer["num_verified"]) - int(answer["num_accepted"])  # type: ignore[call-overload]
