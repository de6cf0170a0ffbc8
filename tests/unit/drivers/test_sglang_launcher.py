"""The SGLang launcher, with a stand-in for the engine's Python.

How a local engine ends is the same for every kind: `test_vllm_launcher.py`.
"""

import os
from pathlib import Path

import pytest

from dsched.drivers.sglang.launcher import (
    engine_environment,
    find_sglang_python,
    launch_sglang_engine,
    plan_server,
)
from dsched.errors import ConfigError
from dsched.ids import EngineId
from dsched.testing.processes import make_model_folder, make_python, wait_for_text

ENGINE = EngineId("e0")


async def launched_text(tmp_path: Path, script: str, **changes: object) -> tuple[str, int]:
    """What the stand-in wrote, and the port it was given."""
    fields: dict = {
        "engine_id": ENGINE,
        "agent_endpoint": "tcp://127.0.0.1:9",
        "state_dir": tmp_path / "state",
        "served_model_name": "tiny",
        "python": make_python(tmp_path, f"{script}; echo end"),
    }
    engine = await launch_sglang_engine(make_model_folder(tmp_path), **(fields | changes))
    try:
        return await wait_for_text(engine.log_path, "end"), engine.port
    finally:
        await engine.stop(grace_s=0)


async def test_command_names_model_port_and_streams(tmp_path: Path) -> None:
    """What the server is told, in the order that lets `extra_args` win."""
    text, port = await launched_text(
        tmp_path, 'echo "$@"', extra_args=("--dtype", "float32"), device="cpu"
    )

    words = text.split()
    assert words[:4] == [
        "-m",
        "dsched.drivers.serve_child",
        str(os.getpid()),
        "sglang.launch_server",
    ]
    assert words[words.index("--model-path") + 1] == str(tmp_path / "model")
    assert words[words.index("--port") + 1] == str(port)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--served-model-name") + 1] == "tiny"
    assert words[words.index("--device") + 1] == "cpu"
    assert "--incremental-streaming-output" in words
    assert words[-3:-1] == ["--dtype", "float32"]


async def test_gpu_is_left_to_sglang(tmp_path: Path) -> None:
    text, _ = await launched_text(tmp_path, 'echo "$@"', device="cuda")

    assert "--device" not in text
    assert "torch_native" not in text


async def test_agents_know_where_to_report_and_what_to_plan(tmp_path: Path) -> None:
    text, _ = await launched_text(
        tmp_path,
        'echo "$DSCHED_ENDPOINT $DSCHED_ENGINE_ID $DSCHED_STEP_BUDGET_MS $MORE"',
        step_budget_ms=12.5,
        variables={"MORE": "x"},
    )

    assert text.split()[:4] == ["tcp://127.0.0.1:9", "e0", "12.5", "x"]


def test_variables_of_the_environment_win_except_a_harmful_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's own CPU engine needs kernels that are on no package index."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("DSCHED_ENDPOINT", "tcp://elsewhere:1")

    silent = engine_environment(None, engine_id=ENGINE, device="cpu")

    assert silent["OMP_NUM_THREADS"] == "7"
    assert silent["HF_HUB_OFFLINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in silent
    assert "DSCHED_ENDPOINT" not in silent


def test_each_rank_has_a_core() -> None:
    """SGLang refuses more ranks than memory nodes unless it is told where they go."""
    plan = plan_server(ENGINE, num_dp_ranks=3, is_expert_parallel=False)

    assert plan.args == ("--dp-size", "3")
    bound = plan.variables["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(bound) == 3
    assert {int(core) for core in bound} <= os.sched_getaffinity(0)


def test_expert_parallel_ranks_attend_to_their_own_requests() -> None:
    """In SGLang DP ranks that share experts are those of one tensor-parallel group."""
    plan = plan_server(ENGINE, num_dp_ranks=4, is_expert_parallel=True)

    assert plan.args == (
        *("--dp-size", "4", "--tp-size", "4", "--ep-size", "4"),
        "--enable-dp-attention",
    )


def test_single_rank_needs_no_words() -> None:
    plan = plan_server(ENGINE, num_dp_ranks=1, is_expert_parallel=True)

    assert (plan.args, dict(plan.variables)) == ((), {})
    with pytest.raises(ValueError, match="num_dp_ranks is 0"):
        plan_server(ENGINE, num_dp_ranks=0, is_expert_parallel=False)


def test_stated_python_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_sglang_python(tmp_path / "nowhere")
