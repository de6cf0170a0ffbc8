"""What an engine pays for dsched's load reports, and how old a report is when dsched has it.

    python benchmarks/agent.py [--quick] [--json FILE] [--vllm-python FILE]

`step_overhead_pct`: CPU time that the mixin adds to the step thread, against a step of vLLM's own
scheduler (`schedule` plus `update_from_output`, R requests decoding) and 10 ms on the device; the
reports go to a real reader. `added_us` beside `vllm_scheduler_us`: the same as times, the second
of vLLM's scheduler alone.
The same of a real engine that computes the tiny model on this CPU, by neighbouring steps with and
without the agent (`tiny model`): `step_overhead_pct`, `added_us_per_request` and `step_us`.
`agent_thread_us`: CPU time of the agent's thread for a step, while the device computes.
`report_delay_p50_us`: from the end of a step to the subscriber, on one machine.

Needs an environment with vLLM (`.venv-vllm` beside this checkout, or the option).
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from _report import Row, arguments, half_quartile_range, report

from dsched.drivers.agent import LOAD_REPORTS, Agent, StepRecord, new_incarnation
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.launcher import find_sglang_python
from dsched.drivers.vllm.launcher import find_vllm_python, make_tiny_model
from dsched.drivers.wire import AgentGoodbye, AgentHello, RankReport
from dsched.errors import ConfigError
from dsched.ids import EngineId

ROOT = Path(__file__).parents[1]
SIZES = (64, 256, 1_024)
TINY_SIZES = (16, 64)
TARGET_PCT = 2.0
TARGET_REQUEST_US = 1.0
ENGINE = EngineId("bench")


class Subscriber:
    """Counts reports, and notes when each step was heard of."""

    def __init__(self) -> None:
        self.heard_ns: dict[int, int] = {}
        self.is_greeted = asyncio.Event()

    def on_hello(self, _: AgentHello) -> None:
        self.is_greeted.set()

    def on_report(self, report: RankReport) -> None:
        self.heard_ns.setdefault(report.step, time.perf_counter_ns())

    def on_goodbye(self, _: AgentGoodbye) -> None: ...


async def measure_overhead(
    python: Path, sglang: Path | None, num_rounds: int, num_steps: int
) -> list[Row]:
    """The rows of vLLM, and of SGLang where it is there."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    reader.start()
    reader.subscribe(ENGINE, Subscriber())
    environment = os.environ | {
        "DSCHED_ENDPOINT": reader.endpoint,
        "DSCHED_ENGINE_ID": ENGINE,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    with tempfile.TemporaryDirectory() as folder:
        model = await make_tiny_model(Path(folder) / "tiny", python=python)

        async def run(
            script: str, sizes: tuple[int, ...], python: Path = python
        ) -> dict[int, list[dict]]:
            """The lines that a script prints, by number of requests."""
            process = await asyncio.create_subprocess_exec(
                *(str(python), str(ROOT / "benchmarks" / script)),
                *(str(model), ",".join(map(str, sizes)), str(num_rounds), str(num_steps)),
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
            output, _ = await process.communicate()
            if process.returncode != 0:
                sys.exit(f"{python} {script} failed with status {process.returncode}")
            lines = [json.loads(line) for line in output.splitlines() if line.startswith(b"{")]
            return {
                size: [line for line in lines if line["num_requests"] == size] for size in sizes
            }

        model_free = await run("_vllm_agent.py", SIZES)
        tiny = await run("_vllm_agent_engine.py", TINY_SIZES)
        tiny_sglang = {} if sglang is None else await run("_sglang_agent.py", TINY_SIZES, sglang)
    reader.close()
    return [
        *(row for size, rounds in model_free.items() for row in rows_of(size, rounds)),
        *(row for size, rounds in tiny.items() for row in tiny_rows_of("tiny model", size, rounds)),
        *(
            row
            for size, rounds in tiny_sglang.items()
            for row in tiny_rows_of("SGLang, tiny model", size, rounds)
        ),
    ]


def tiny_rows_of(name: str, size: int, rounds: list[dict]) -> list[Row]:
    """Of the real engine: the median round, with the spread over rounds."""
    values = {
        "step_overhead_pct": [100 * each["added_us"] / each["plain_us"] for each in rounds],
        "added_us_per_request": [each["added_us"] / size for each in rounds],
        "step_us": [each["plain_us"] for each in rounds],
    }
    targets = {"step_overhead_pct": TARGET_PCT, "added_us_per_request": TARGET_REQUEST_US}
    return [
        Row(
            metric=metric,
            case=f"{name}, R={size}",
            ours=statistics.median(each),
            spread=half_quartile_range(each),
            better="lower",
            target=targets.get(metric),
        )
        for metric, each in values.items()
    ]


def rows_of(size: int, rounds: list[dict]) -> list[Row]:
    """The median round, with the spread over rounds."""

    def row(metric: str, values: list[float], target: float | None = None) -> Row:
        return Row(
            metric=metric,
            case=f"R={size}",
            ours=statistics.median(values),
            spread=half_quartile_range(values),
            better="lower",
            target=target,
        )

    shares = [100 * each["added_us"] / (each["plain_us"] + each["device_us"]) for each in rounds]
    return [
        row("step_overhead_pct", shares, TARGET_PCT),
        row("added_us", [each["added_us"] for each in rounds]),
        row("vllm_scheduler_us", [each["plain_us"] for each in rounds]),
        row("agent_thread_us", [each["agent_thread_us"] for each in rounds]),
    ]


async def measure_delay(num_steps: int) -> Row:
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    reader.start()
    subscriber = Subscriber()
    reader.subscribe(ENGINE, subscriber)
    agent = Agent(endpoint=reader.endpoint, hello=make_hello())
    agent.start()
    await subscriber.is_greeted.wait()
    sent_ns = {}
    for step in range(1, num_steps + 1):
        sent_ns[step] = time.perf_counter_ns()
        agent.record_step(StepRecord(step, 8, 0, 1_000, 0, 5_000_000, 8))
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    agent.close()
    reader.close()
    heard = subscriber.heard_ns
    delays_us = [(heard[step] - sent_ns[step]) / 1e3 for step in sent_ns if step in heard]
    return Row(
        metric="report_delay_p50_us",
        case="one machine",
        ours=statistics.median(delays_us),
        spread=half_quartile_range(delays_us),
        better="lower",
    )


def make_hello() -> AgentHello:
    return AgentHello(
        dsched_version="0",
        engine_id=ENGINE,
        incarnation=new_incarnation(),
        engine="vllm",
        engine_version="0",
        model="tiny",
        max_model_len=1,
        dp_rank=0,
        num_dp_ranks=1,
        kv_capacity_tokens=1,
        max_running_requests=1,
        features=(LOAD_REPORTS,),
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, help="interpreter that has vLLM")
    parser.add_argument("--sglang-python", type=Path, help="interpreter that has SGLang")
    options = parser.parse_args()
    python = find_vllm_python(options.vllm_python)
    num_rounds, num_steps = (5, 50) if options.quick else (15, 150)
    try:
        sglang = find_sglang_python(options.sglang_python)
    except ConfigError as error:
        sys.stderr.write(f"SGLang is left out: {error}\n")
        sglang = None
    rows = asyncio.run(measure_overhead(python, sglang, num_rounds, num_steps))
    rows.append(asyncio.run(measure_delay(num_rounds * num_steps)))
    report("agent", rows, seeds=num_rounds, json_path=options.json)


if __name__ == "__main__":
    main()
