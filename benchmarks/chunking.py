"""What a way of chunking does to the users of one worker, in simulation.

Requests of the four-bucket mix (74 / 18 / 6.5 / 1.5 % below 16K, 64K, 256K and above; prompts of
26K tokens on average) arrive at random; each is prefilled and then decoded. A request is good if
its first token came within max(5 s, 3 x its prompt's own computing time) and at most 1 % of its
later tokens took more than 1.05 step budgets. The load is the share of the worker's time that
the prompts alone would take. Every way of chunking is planned by the real `StepPlanner`; the device
is simulated from the published cost of its steps with 1 % noise.

- fixed chunk: a step computes so many tokens, oldest prompt first (vLLM, SGLang);
- tuned fixed chunk: the same with our four buckets, the size chosen anew for each load;
- time budget: our cost model without buckets, oldest first;
- ours: time budget and buckets.

What buckets bring is ours less the time budget alone; what the cost model brings is ours less the
tuned fixed chunk with the same buckets.

    python benchmarks/chunking.py [--quick] [--json FILE]
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from _report import Row, arguments, half_quartile_range, report
from numpy.typing import NDArray

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.rng import stream
from dsched.scheduler import ChunkRule, StepPlanner
from dsched.sim.chunking import (
    NS,
    ChunkResult,
    ChunkWorkload,
    SimDevice,
    isolated_ns,
    simulate_chunking,
)

SLO_SECONDS = 5.0
FIXED_CHUNKS = (2_048, 8_192)
ONE_QUEUE = ChunkRule(bucket_bounds=(), bucket_weights=(1.0,))
MAX_RUNNING = 256
WRONG_START = 0.7
"""Factor by which the planner's model is wrong at first in the row on learning: it plans steps that
take 40 % longer than the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A model on a GPU: its step times, the step budget, loads and targets."""

    name: str
    fixed_s: float
    token_s: float
    attention_s: float
    decode_batches: tuple[int, ...]
    decode_seconds: tuple[float, ...]
    kv_token_s: float
    budget_seconds: float
    loads: tuple[float, ...]
    targets: tuple[float, ...]
    tuned_chunks: tuple[int, ...]

    def prefill(self, *, scale: float = 1.0) -> PrefillCostModel:
        return PrefillCostModel.from_coefficients(
            fixed_s=self.fixed_s * scale,
            token_s=self.token_s * scale,
            attention_s=self.attention_s * scale,
        )

    def decode(self) -> DecodeCostModel:
        curve = StepCostCurve.from_samples(
            self.decode_batches, self.decode_seconds, tiers=range(1, MAX_RUNNING + 1)
        )
        return DecodeCostModel.from_curve(curve, kv_token_s=self.kv_token_s)

    def device(self) -> SimDevice:
        return SimDevice(prefill=self.prefill(), decode=self.decode())


HARDWARE = (
    Hardware(
        name="v4flash-h200",
        fixed_s=16.6e-3,
        token_s=83.6e-6,
        attention_s=1.67e-10,
        decode_batches=(1, 8, 32, 64, 128, 256),
        decode_seconds=(0.0112, 0.0153, 0.0192, 0.0212, 0.0262, 0.0364),
        kv_token_s=5e-10,
        budget_seconds=0.2,
        loads=(0.37, 0.61, 0.78),
        targets=(0.99, 0.95, 0.90),
        tuned_chunks=(512, 1_024, 1_536),
    ),
    Hardware(
        name="dsv3-gb200",
        fixed_s=36.9e-3,
        token_s=140.7e-6,
        attention_s=3.40e-9,
        decode_batches=(1, 8, 32, 64, 128, 256),
        decode_seconds=(0.0112, 0.0125, 0.0145, 0.0187, 0.0262, 0.0425),
        kv_token_s=1.5e-9,
        budget_seconds=0.4,
        loads=(0.39, 0.61, 0.77),
        targets=(0.99, 0.98, 0.96),
        tuned_chunks=(256, 384, 512, 1_024),
    ),
)
"""Prefill: least squares on NVIDIA AIConfigurator 0.12's operator times; decode: read off the same
tables at 4K tokens a request."""


def timed_planner(
    hardware: Hardware, rule: ChunkRule, size: int, *, scale: float = 1.0
) -> StepPlanner:
    return StepPlanner(
        prefill_cost=hardware.prefill(scale=scale),
        decode_cost=hardware.decode(),
        budget_seconds=hardware.budget_seconds,
        max_running_requests=MAX_RUNNING,
        max_requests=size,
        rule=rule,
    )


def fixed_planner(num_tokens: int, rule: ChunkRule, size: int) -> StepPlanner:
    """A fixed number of tokens is a time budget where every token costs one nanosecond."""
    tokens = range(1, MAX_RUNNING + 1)
    curve = StepCostCurve.from_samples([1, MAX_RUNNING], [1e-9, MAX_RUNNING * 1e-9], tiers=tokens)
    return StepPlanner(
        prefill_cost=PrefillCostModel.from_coefficients(fixed_s=0, token_s=1e-9, attention_s=0),
        decode_cost=DecodeCostModel.from_curve(curve),
        budget_seconds=num_tokens * 1e-9,
        max_running_requests=MAX_RUNNING,
        max_requests=size,
        rule=rule,
    )


def planners(hardware: Hardware, size: int) -> Iterator[tuple[str, StepPlanner, bool]]:
    """Name, planner, and whether it learns, of every way of chunking."""
    for chunk in FIXED_CHUNKS:
        yield f"fixed {chunk}", fixed_planner(chunk, ONE_QUEUE, size), False
    for chunk in hardware.tuned_chunks:
        yield f"buckets, fixed {chunk}", fixed_planner(chunk, ChunkRule(), size), False
    yield "time budget", timed_planner(hardware, ONE_QUEUE, size), True
    yield "ours", timed_planner(hardware, ChunkRule(), size), True
    yield "ours, wrong start", timed_planner(hardware, ChunkRule(), size, scale=WRONG_START), True


def draw(
    hardware: Hardware, load: float, seed: int, num_requests: int
) -> tuple[ChunkWorkload, NDArray[np.int64]]:
    """A workload at the load, and the time each of its prompts takes alone."""
    unit = ChunkWorkload.draw(
        stream(seed, "workload"),
        num_requests=num_requests,
        requests_per_second=1.0,
        mean_output_tokens=128.0,
    )
    alone_ns = isolated_ns(
        unit.prompt_tokens, hardware.device(), budget_seconds=hardware.budget_seconds
    )
    stretch = float(alone_ns.mean()) / NS / load
    workload = ChunkWorkload(
        arrival_ns=(unit.arrival_ns * stretch).astype(np.int64),
        prompt_tokens=unit.prompt_tokens,
        output_tokens=unit.output_tokens,
    )
    return workload, alone_ns


def rows_of(hardware: Hardware, *, num_requests: int, seeds: range) -> Iterator[Row]:
    for name, load, target in zip(
        ("low", "mid", "high"), hardware.loads, hardware.targets, strict=True
    ):
        goodput: dict[str, list[float]] = {}
        slow: dict[str, list[float]] = {}
        short_p99: dict[str, list[float]] = {}
        for seed in seeds:
            workload, alone_ns = draw(hardware, load, seed, num_requests)
            for way, planner, is_learning in planners(hardware, num_requests):
                result = simulate_chunking(
                    workload,
                    planner,
                    hardware.device(),
                    rng=stream(seed, "noise"),
                    budget_seconds=hardware.budget_seconds,
                    is_learning=is_learning,
                )
                goodput.setdefault(way, []).append(
                    result.goodput(alone_ns, slo_seconds=SLO_SECONDS)
                )
                slow.setdefault(way, []).append(100 * result.num_slow_steps / result.num_steps)
                short_p99.setdefault(way, []).append(short_ttft_p99(workload, result))
        case = f"{hardware.name}/{name}"
        mean = {way: float(np.mean(values)) for way, values in goodput.items()}
        tuned = max((way for way in mean if way.startswith("buckets")), key=lambda way: mean[way])
        kept = {
            **{way: way for way in ("fixed 2048", "fixed 8192", "time budget")},
            tuned: "tuned fixed+buckets",
        }
        yield Row(
            metric="goodput",
            case=case,
            ours=mean["ours"],
            spread=half_quartile_range(goodput["ours"]),
            better="higher",
            target=target,
            peers={label: mean[way] for way, label in kept.items()},
        )
        yield Row(
            metric="goodput_learning",
            case=f"{case}, model 30 % too fast at first",
            ours=mean["ours, wrong start"],
            spread=half_quartile_range(goodput["ours, wrong start"]),
            better="higher",
        )
        for metric, other in (
            ("goodput_from_buckets", "time budget"),
            ("goodput_from_cost_model", tuned),
        ):
            gains = np.subtract(goodput["ours"], goodput[other]).tolist()
            yield Row(
                metric=metric,
                case=case if other != tuned else f"{case}, against {tuned}",
                ours=float(np.mean(gains)),
                spread=half_quartile_range(gains),
                better="higher",
            )
        for metric, values in (("slow_steps_pct", slow), ("ttft_p99_below_16k_s", short_p99)):
            yield Row(
                metric=metric,
                case=case,
                ours=float(np.mean(values["ours"])),
                spread=half_quartile_range(values["ours"]),
                better="lower",
                peers={label: float(np.mean(values[way])) for way, label in kept.items()},
            )


def short_ttft_p99(workload: ChunkWorkload, result: ChunkResult) -> float:
    """Seconds to the first token of prompts below 16K, 99th percentile."""
    return float(np.percentile(result.ttft_ns[workload.prompt_tokens < 16_384], 99)) / NS


def main() -> None:
    options = arguments("Goodput of ways to chunk, simulated").parse_args()
    num_requests, seeds = (100, range(2)) if options.quick else (500, range(5))
    rows = [
        row
        for hardware in HARDWARE
        for row in rows_of(hardware, num_requests=num_requests, seeds=seeds)
    ]
    report("chunking", rows, seeds=len(seeds), json_path=options.json)


if __name__ == "__main__":
    main()
