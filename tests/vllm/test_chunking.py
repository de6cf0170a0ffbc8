"""Chunk sizes by time inside a real vLLM engine: planned, obeyed, and invisible in the answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsched.testing.vllm_engines import is_vllm_there, run_vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STATE_DIR = Path(__file__).parents[2] / ".dsched" / "tests"
SCRIPT = Path(__file__).parent / "chunking_run.py"
TWIN = Path(__file__).parent / "chunking_twin.py"
NUM_REPEATS = 7
SHORT, LONG = 120, 900


@pytest.fixture(scope="module")
def model() -> Path:
    """The tiny model with random weights."""
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    folder = STATE_DIR / "models" / "tiny-moe"
    run_vllm_python("-m", "dsched.drivers.vllm.tiny_model", str(folder))
    return folder


def run_engine(model: Path, mode: str, repeats: int) -> dict[str, Any]:
    output = run_vllm_python(str(SCRIPT), str(model), mode, str(repeats))
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def unmodified(model: Path) -> dict[str, Any]:
    """vLLM as it is."""
    return run_engine(model, "vllm", 1)


@pytest.fixture(scope="module")
def ours(model: Path) -> dict[str, Any]:
    """vLLM with our scheduler, with and without chunk control in turn."""
    return run_engine(model, "dsched", NUM_REPEATS)


def chunks_of(run: dict[str, Any], name: str) -> list[int]:
    """Prompt tokens of a request in each step that it was given any."""
    return [
        count
        for step in run["steps"]
        for key, count in step["planned"].items()
        if f"-{name}-" in f"{key}-"
    ]


def test_each_scheduled_chunk_is_the_planned_one(ours: dict[str, Any]) -> None:
    """In every step of every repeat; the long prompt is cut, the whole prompt is computed."""
    for run in ours["ours"]:
        for step in run["steps"]:
            scheduled = {
                key: count for key, count in step["scheduled"].items() if key in step["planned"]
            }
            assert scheduled == step["planned"]
            # What was not planned decodes: one token each.
            others = {
                count for key, count in step["scheduled"].items() if key not in step["planned"]
            }
            assert others <= {1}
        assert sum(chunks_of(run, "long")) == LONG
        assert sum(chunks_of(run, "short")) == SHORT
        assert len(chunks_of(run, "long")) > 1
        assert all(chunk % 32 == 0 for chunk in chunks_of(run, "long")[:-1])
    assert ours["num_differed"] == 0
    assert ours["num_fallbacks"] == 0


def test_answers_equal_those_of_an_unmodified_engine(
    ours: dict[str, Any], unmodified: dict[str, Any]
) -> None:
    """Token by token, for the stream and for both prompts."""
    expected = unmodified["fixed"][0]["tokens"]

    assert {name: len(tokens) for name, tokens in expected.items()} == {
        "stream": 60,
        "long": 8,
        "short": 8,
    }
    for run in ours["ours"] + ours["fixed"]:
        assert run["tokens"] == expected


def test_unmodified_engine_computes_both_prompts_in_one_step(unmodified: dict[str, Any]) -> None:
    """What is compared with: vLLM's fixed number of tokens a step swallows both prompts."""
    largest = max(sum(step["scheduled"].values()) for step in unmodified["fixed"][0]["steps"])

    assert largest == LONG + SHORT + 1


def test_longest_gap_of_a_running_stream_is_shorter(ours: dict[str, Any]) -> None:
    """The best of several repeats, in turn in one engine: what the machine's noise cannot hide."""
    planned = min(run["gap_s"] for run in ours["ours"])
    fixed = min(run["gap_s"] for run in ours["fixed"])

    assert planned < 0.8 * fixed, f"{planned * 1e3:.1f} ms against {fixed * 1e3:.1f} ms"


def test_measured_steps_teach_the_models(ours: dict[str, Any]) -> None:
    """Every step that ran as planned is learned from."""
    assert ours["num_observed"] > 5 * NUM_REPEATS / 2


@pytest.mark.parametrize(
    ("mode", "name"), [("sync", "DschedScheduler"), ("async", "DschedAsyncScheduler")]
)
def test_real_schedulers_serve_everything_under_planned_chunks(
    model: Path, mode: str, name: str
) -> None:
    """Without a model, so that the asynchronous class runs too: with preemption, prefix hits and
    aborts every request ends with its tokens, and no chunk is larger than planned."""
    answer = json.loads(run_vllm_python(str(TWIN), str(model), mode, "7").splitlines()[-1])

    assert answer["class"] == name
    assert answer["num_requests"] > 40
    assert answer["num_left"] == answer["num_planner_left"] == 0
    assert answer["num_wrong"] == 0
    assert answer["num_over"] == 0
    assert answer["num_chunks"] > 1.5 * answer["num_requests"]
    assert answer["num_preempted"] > 0
    assert answer["num_differed"] < answer["num_chunks"] / 4
    assert answer["num_weight_changes"] > 0, "the operator's policy was not heard"
    assert answer["is_on"]
    assert answer["num_errors"] == 0
