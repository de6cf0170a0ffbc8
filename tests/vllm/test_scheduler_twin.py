"""vLLM's real schedulers decide the same with dsched's mixin, and its counts are right.

Model-free, in vLLM's own Python: this is also where the asynchronous class runs, which vLLM's CPU
engine cannot (it forces asynchronous scheduling off).
"""

import json
from pathlib import Path

import pytest

from dsched.testing.vllm_engines import is_vllm_there, run_vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

STATE_DIR = Path(__file__).parents[2] / ".dsched" / "tests"
SCRIPT = Path(__file__).parent / "scheduler_twin.py"
CLASSES = {"sync": "DschedScheduler", "async": "DschedAsyncScheduler"}
VLLM_CLASSES = {"sync": "Scheduler", "async": "AsyncScheduler"}


@pytest.fixture(scope="module")
def model() -> Path:
    """The tiny model; vLLM's configuration wants to read one."""
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    folder = STATE_DIR / "models" / "tiny-moe"
    run_vllm_python("-m", "dsched.drivers.vllm.tiny_model", str(folder))
    return folder


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_mixin_changes_no_decision_and_counts_right(model: Path, mode: str) -> None:
    """Over hundreds of steps with chunked prefill, preemption, prefix reuse and aborts."""
    output = run_vllm_python(str(SCRIPT), str(model), mode, "7")
    answer = json.loads(output.strip().splitlines()[-1])

    assert answer["classes"][0] == CLASSES[mode]
    assert VLLM_CLASSES[mode] in answer["classes"]
    assert answer["num_unequal"] == 0
    assert answer["num_wrong"] == 0
    assert answer["num_errors"] == 0
    assert answer["num_records"] > 250
    assert answer["num_preempted"] > 0
    assert answer["num_left"] == 0
    assert answer["last"][1:5] == [0, 0, 0, 0]
    assert {"load_reports", "waiting_prefill_tokens"} <= set(answer["features"])
    assert answer["missing"] == []
    assert answer["kv_capacity_tokens"] == 60 * 16
