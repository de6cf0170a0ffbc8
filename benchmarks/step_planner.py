"""What planning a step costs, beside vLLM's own scheduler in the same run.

A full plan takes the finished requests out, gives every decode its token and its KV block, chooses
chunks for the waiting prompts from four buckets, and writes the step; one request in four steps
ends and another comes. vLLM's `schedule` and `update_from_output` do the same for their engine and
more (prefix hashing, outputs), in Python objects. CPU time of the thread, so that a busy machine
counts less.

`vllm_mixin_us_per_request` is what `DschedScheduler` with chunk control adds to vLLM's step: both
step in turn in one process.

`overlap_idle_pct` is simulated: the share of time that a device with steps of 5 to 100 ms waits for
a CPU that needs our measured plan times, tail included, and 3 ms for the rest of the engine (vLLM's
scheduler at some 200 requests), planned ahead or after each step.

    python benchmarks/step_planner.py [--quick] [--json FILE] [--vllm-python FILE]

The peer needs an environment with vLLM (`.venv-vllm` beside this checkout, or the option); without
it the row has no peer.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from _report import Row, arguments, half_quartile_range, report

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.ids import RequestId
from dsched.rng import stream
from dsched.scheduler import StepPlanner
from dsched.sim.chunking import ChunkWorkload, SimDevice, simulate_chunking

ROOT = Path(__file__).parents[1]
TARGETS = {64: 25.0, 256: 50.0, 1_024: 120.0, 4_096: 500.0}
PROMPTS = (300, 5_000, 40_000, 120_000)
DEVICE_STEPS_MS = (5, 10, 20, 50, 100)
REST_OF_ENGINE_NS = 3e6


def models(scale: float = 1.0) -> tuple[PrefillCostModel, DecodeCostModel]:
    """DeepSeek V4-Flash on H200; `scale` stretches the decode step."""
    curve = StepCostCurve.from_samples(
        [1, 64, 256, 1_024, 4_096],
        [each * scale for each in (0.011, 0.021, 0.036, 0.107, 0.4)],
    )
    prefill = PrefillCostModel.from_coefficients(
        fixed_s=16.6e-3, token_s=83.6e-6, attention_s=1.67e-10
    )
    return prefill, DecodeCostModel.from_curve(curve, kv_token_s=5e-10)


def running_planner(num_running: int) -> StepPlanner:
    """A planner with `num_running` decodes."""
    prefill, decode = models()
    planner = StepPlanner(
        prefill_cost=prefill,
        decode_cost=decode,
        budget_seconds=60.0,
        max_running_requests=num_running + 16,
        max_requests=num_running + 1_024,
        kv_capacity_tokens=(num_running + 100) * 8_192,
    )
    rng = stream(0, "prompts")
    for index in range(num_running):
        planner.add(
            RequestId(f"r{index}"),
            num_prompt_tokens=int(rng.integers(20, 400)),
            max_output_tokens=6_000,
        )
    while planner.plan().num_decodes < num_running:
        pass
    planner.budget_seconds = 0.2 if num_running <= 1_024 else 0.5
    return planner


def plan_times_us(num_running: int, num_steps: int) -> list[float]:
    """Microseconds of `num_steps` plans."""
    planner = running_planner(num_running)
    rng = stream(1, "churn")
    times = []
    for step in range(num_steps):
        if step % 4 == 0 and step // 4 < num_running:
            index = step // 4
            planner.finish(RequestId(f"r{index}"))
            planner.add(
                RequestId(f"new{index}"),
                num_prompt_tokens=int(rng.choice(PROMPTS)),
                max_output_tokens=400,
            )
        start = time.thread_time_ns()
        plan = planner.plan()
        times.append((time.thread_time_ns() - start) / 1e3)
        planner.observe(plan, plan.estimated_ns)
    planner.validate()
    return times


def vllm_times(python: Path | None, num_steps: int) -> dict[int, dict[str, Any]]:
    """What vLLM's environment measures, by batch size; empty without one."""
    if python is None or not python.exists():
        return {}
    environment = os.environ | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "DSCHED_STEP_BUDGET_MS": "1000",
    }
    sizes = ",".join(str(size) for size in TARGETS)
    with tempfile.TemporaryDirectory() as folder:
        make = [str(python), "-m", "dsched.drivers.vllm.tiny_model", folder + "/tiny"]
        subprocess.run(make, check=True, env=environment, stdout=subprocess.DEVNULL)
        command = [
            str(python), str(ROOT / "benchmarks" / "_vllm_scheduler.py"),
            folder + "/tiny", sizes, str(num_steps),
        ]  # fmt: skip
        result = subprocess.run(
            command, check=False, env=environment, capture_output=True, text=True
        )
    if result.returncode:
        sys.exit(f"the vLLM peer failed:\n{result.stderr[-2000:]}")
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return {line["requests"]: line for line in lines}


def speed_rows(*, python: Path | None, is_quick: bool) -> list[Row]:
    num_steps, num_repeats = (200, 5) if is_quick else (1_000, 9)
    peer_steps = 12 if is_quick else 60
    vllm = vllm_times(python, peer_steps)
    rows = []
    for size, target in TARGETS.items():
        repeats = [plan_times_us(size, num_steps) for _ in range(num_repeats)]
        medians = [float(np.median(times)) for times in repeats]
        tails = [float(np.percentile(times, 99)) for times in repeats]
        peers = {"vllm": vllm[size]["vllm_p50_us"]} if vllm else {}
        rows.append(
            Row(
                metric="full_plan_p50_us",
                case=f"R={size}",
                ours=float(np.median(medians)),
                spread=half_quartile_range(medians),
                better="lower",
                target=target,
                peers=peers,
            )
        )
        rows.append(
            Row(
                metric="full_plan_p99_us",
                case=f"R={size}",
                ours=float(np.median(tails)),
                spread=half_quartile_range(tails),
                better="lower",
            )
        )
        if vllm:
            rows.append(
                Row(
                    metric="vllm_mixin_us_per_request",
                    case=f"R={size}",
                    ours=vllm[size]["added_p50_us"] / size,
                    spread=half_quartile_range([each / size for each in vllm[size]["added_us"]]),
                    better="lower",
                    target=1.0,
                    peers={"vllm itself": vllm[size]["vllm_p50_us"] / size},
                )
            )
    return rows


def overlap_rows(*, num_requests: int) -> list[Row]:
    """Idle share of a simulated device, with plan times drawn from the measured ones."""
    cpu_ns = np.array(plan_times_us(256, 400)) * 1e3 + REST_OF_ENGINE_NS
    rows = []
    for step_ms in DEVICE_STEPS_MS:
        shares = []
        for is_overlapped in (True, False):
            # 64 running requests take about `step_ms`.
            prefill, decode = models(scale=step_ms / 20)
            device = SimDevice(prefill=prefill, decode=decode)
            planner = StepPlanner(
                prefill_cost=prefill,
                decode_cost=decode,
                budget_seconds=0.2,
                max_running_requests=64,
                max_requests=num_requests,
            )
            workload = ChunkWorkload(
                arrival_ns=np.arange(num_requests, dtype=np.int64),
                prompt_tokens=np.full(num_requests, 200, dtype=np.int64),
                output_tokens=np.full(num_requests, 200, dtype=np.int64),
            )
            draws = stream(2, "plan times")
            result = simulate_chunking(
                workload,
                planner,
                device,
                rng=stream(3, "noise"),
                budget_seconds=0.2,
                plan_cpu_ns=lambda _, draws=draws: int(draws.choice(cpu_ns)),
                is_overlapped=is_overlapped,
            )
            shares.append(100 * result.idle_share)
        rows.append(
            Row(
                metric="overlap_idle_pct",
                case=f"device steps of {step_ms} ms, simulated",
                ours=shares[0],
                better="lower",
                target=0.5,
                peers={"planned after each step": shares[1]},
            )
        )
    return rows


def main() -> None:
    parser: argparse.ArgumentParser = arguments("CPU time of a step's plan")
    default = ROOT / ".venv-vllm" / "bin" / "python"
    parser.add_argument("--vllm-python", type=Path, default=default, metavar="FILE")
    options = parser.parse_args()
    rows = speed_rows(python=options.vllm_python, is_quick=options.quick)
    rows += overlap_rows(num_requests=128 if options.quick else 512)
    report("step_planner", rows, seeds=5 if options.quick else 9, json_path=options.json)


if __name__ == "__main__":
    main()
