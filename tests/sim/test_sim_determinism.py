"""One seed, one result: also across processes whose string hashes differ."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("DSCHED_SHARED", Path(__file__).parents[3] / "shared"))
MOONCAKE = SHARED / "traces" / "mooncake_conversation.csv"


def serve(tmp_path: Path, hash_seed: int, *args: str) -> bytes:
    """The JSON of `dsched sim serve` from a fresh interpreter."""
    path = tmp_path / f"out-{hash_seed}.json"
    command = [sys.executable, "-m", "dsched.cli.main", "sim", "serve", "--json", str(path), *args]
    env = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return path.read_bytes()


@pytest.mark.slow
def test_generated_workload_is_replayed_bit_identically(tmp_path: Path) -> None:
    """Several engines, preemption, a queue at the router: all of it the same twice."""
    args = [
        "--requests=250",
        "--rate=40",
        "--ranks=3",
        "--engines=2",
        "--kv-capacity-tokens=40000",
        "--max-running-requests=10",
        "--seed=11",
    ]

    one, other = (serve(tmp_path, hash_seed, *args) for hash_seed in (1, 2))

    assert one == other
    values = json.loads(one)
    assert values["requests"]["num_finished"] == 250
    assert values["seed"] == 11


@pytest.mark.slow
def test_head_of_a_public_trace_is_replayed_bit_identically(tmp_path: Path) -> None:
    """The first 300 requests of the Mooncake trace at five times its rate."""
    if not MOONCAKE.exists():
        pytest.skip(f"the trace {MOONCAKE.name} is not beside this checkout")
    args = f"--trace={MOONCAKE} --ranks=64 --limit=300 --rate-scale=5 --jitter".split()

    one, other = (serve(tmp_path, hash_seed, *args) for hash_seed in (1, 2))

    assert one == other
    assert json.loads(one)["rows"]["num_replayed"] == 300


@pytest.mark.slow
def test_whole_public_trace_is_replayed(tmp_path: Path) -> None:
    """All 12,031 requests finish on 64 ranks."""
    if not MOONCAKE.exists():
        pytest.skip(f"the trace {MOONCAKE.name} is not beside this checkout")

    values = json.loads(serve(tmp_path, 3, f"--trace={MOONCAKE}", "--ranks=64"))

    assert values["requests"]["num_finished"] == values["rows"]["num_read"] == 12_031
    assert values["tokens"] == {"num_output": 4_122_048, "num_prompt": 144_793_823}
