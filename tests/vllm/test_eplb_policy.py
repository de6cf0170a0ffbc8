"""vLLM loads dsched's placement policy as a plug-in, and its own code asks it for plans."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from dsched.drivers.expert_report import decode_expert_load
from dsched.drivers.wire import ExpertLoadReport
from dsched.testing.vllm_engines import is_vllm_there, run_vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "eplb_policy_run.py"


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.rcvtimeo = 10_000
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    output = run_vllm_python(
        str(SCRIPT),
        variables={
            "DSCHED_EPLB": "1",
            "DSCHED_ENDPOINT": f"tcp://127.0.0.1:{port}",
            "DSCHED_ENGINE_ID": "wide-0",
        },
    )
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    found["report"] = socket.recv_multipart()[1]
    context.destroy(linger=0)
    return found


def test_the_load_that_was_planned_from_is_reported(answer: dict[str, Any]) -> None:
    """For dsched's live picture: the first plan with a load, and how even it made the ranks."""
    report = msgspec.msgpack.decode(answer["report"], type=ExpertLoadReport)
    load = decode_expert_load(report, now_ns=0)

    assert report.engine_id == "wide-0"
    assert load.counts.shape == (6, 64)
    assert load.counts.max() <= 100_000
    assert load.balance is not None
    assert 0.9 < load.balance.mean() <= 1.0


def test_the_plug_in_puts_our_policy_into_vllms_table(answer: dict[str, Any]) -> None:
    """vLLM's state takes it from there, under the only name its configuration allows."""
    assert answer["policy"] == "DschedEplbPolicy"
    assert answer["in_table"]


def test_answers_have_the_form_that_vllm_wants(answer: dict[str, Any]) -> None:
    """int64 on the CPU, [layers, slots]; a group of another size gets a placement of its size."""
    assert answer["dtype"] == "torch.int64"
    assert answer["device"] == "cpu"
    assert answer["shape"] == [6, 80]
    assert answer["shrunk_shape"] == [6, 72]


def test_profiling_without_load_keeps_the_placement(answer: dict[str, Any]) -> None:
    """The first call, which also compiles, moves nothing."""
    assert answer["idle_is_kept"]


def test_plans_move_little_and_stay_balanced(answer: dict[str, Any]) -> None:
    """Against vLLM's own policy, from the same placement and the same load."""
    assert answer["moves"] < answer["vllm_moves"] / 4
    assert answer["balance"] > answer["vllm_balance"] - 0.03


def test_a_failed_plan_is_vllms_own(answer: dict[str, Any]) -> None:
    """A load that dsched refuses is planned by the policy that was replaced."""
    assert answer["failed_is_vllms"]
