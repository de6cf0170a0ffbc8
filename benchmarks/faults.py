"""What a lost engine costs: gaps, goodput, time to first token, and the journal.

Everything but the journal is simulated: the real controller over simulated engines (four EP groups
of four DP ranks) on virtual time. Seconds are true of the cost model, which is
`dsched.costs.affine.AffineStepCost` as it comes.

- `gap_p99_s` (kill, freeze): pause in answers whose engine was lost, at half load.
- `tokens_lost`, `tokens_repeated`: over seeds of `dsched sim faults`.
- `recovery_s`: one of four groups is killed at 80 % load; simulated time until clients get as many
  tokens a second as three groups give on the same arrivals, which are 7 % more than they can serve
  (90 % of their mean, over two seconds); `survivors_share` is the share from 5 to 18 s after it.
- `ttft_p50_s`, `ttft_p99_s`: requests that arrive in the five seconds after the kill, where the
  lost group held long contexts (4,000 prompt tokens and long answers), with the ration of prompts
  computed again (the default, and half of it) and without it; `gap_p50_s` is what the ration costs
  those who lost their engine.
- `journal_us_per_token`, `journal_inserts_per_s`: recording single tokens into the SQLite journal.
"""

import logging
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import structlog
from _report import Row, arguments, half_quartile_range, report

from dsched.clock import SystemClock
from dsched.controller import ControllerSettings, HandoffGap
from dsched.costs.affine import AffineStepCost
from dsched.drivers.wire import SamplingParams
from dsched.faults import MembershipView, SqliteJournal
from dsched.faults.progress import ProgressLimits
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId
from dsched.sim.cluster import SimCluster, SimPolicy, patient_settings
from dsched.sim.engine import SimEngineConfig
from dsched.sim.faults import run_faults
from dsched.sim.traces import Trace
from dsched.sim.workload import LogNormalLength, PoissonArrivals, generate_workload

S = 1_000_000_000
NUM_GROUPS = 4
ENGINE = SimEngineConfig(
    num_dp_ranks=4, kv_capacity_tokens=1_000_000, max_running_requests=64, max_step_tokens=1_024
)
PROMPT = LogNormalLength(median_tokens=500, sigma=0.8, max_tokens=8_000)
LONG_OUTPUT = LogNormalLength(median_tokens=600, sigma=0.4, max_tokens=2_000)
LONG_PROMPT = LogNormalLength(median_tokens=4_000, sigma=0.6, max_tokens=32_000)
OUTPUT = LogNormalLength(median_tokens=80, sigma=0.5, max_tokens=400)
KILL_S = 20.0
LONG_KILL_S = 60.0
"""Long answers need a minute until as many end as begin."""
LONG_RATE = 14.0
RATION_TOKENS = 8_192
"""The configuration's default."""


@dataclass(slots=True)
class Gaps:
    """Hears the pauses."""

    total_s: list[float] = field(default_factory=list)

    def on_handoff(self, method: str, gap: HandoffGap) -> None:  # noqa: ARG002
        self.total_s.append(gap.total_ns / S)

    def on_membership_changed(self, view: MembershipView) -> None:
        pass


@dataclass(slots=True)
class Outcome:
    """One run."""

    gaps: Gaps
    tokens: np.ndarray
    """[seconds * 2] tokens that clients got in each half second."""
    arrival_s: np.ndarray
    ttft_s: np.ndarray


def settings(ration: int | None) -> ControllerSettings:
    return replace(
        patient_settings(AffineStepCost(), SimPolicy.TWO_TERM),
        handoff_deadline_ns=60 * S,
        reprefill_tokens_per_rank=ration,
        progress=ProgressLimits(),
    )


def workload(rate_per_s: float, duration_s: float, seed: int, *, is_long: bool = False) -> Trace:
    return generate_workload(
        num_requests=int(rate_per_s * duration_s),
        seed=seed,
        prompt=LONG_PROMPT if is_long else PROMPT,
        output=LONG_OUTPUT if is_long else OUTPUT,
        arrivals=PoissonArrivals(rate_per_s=rate_per_s),
    )


def serve(
    rate_per_s: float,
    *,
    seed: int,
    num_groups: int = NUM_GROUPS,
    duration_s: float = 40.0,
    is_long: bool = False,
    fault: str | None = None,
    ration: int | None = RATION_TOKENS,
) -> Outcome:
    gaps = Gaps()
    cluster = SimCluster(
        num_engines=num_groups,
        engine=ENGINE,
        settings=settings(ration),
        observer=gaps,
        seed=seed,
        is_batching=False,
    )
    trace = workload(rate_per_s, duration_s, seed, is_long=is_long)
    tokens = np.zeros(int(duration_s * 2) + 2_000)

    def on_tokens(_: int, __: int, token_ids: object) -> None:
        place = min(int(cluster.loop.now_ns() / S * 2), len(tokens) - 1)
        tokens[place] += len(token_ids)  # type: ignore[arg-type]

    if fault is not None:
        victim = cluster.drivers[EngineId("sim-000")]
        kill_s = LONG_KILL_S if is_long else KILL_S
        cluster.loop.call_at(int(kill_s * S), getattr(victim, fault))
    result = cluster.replay(trace, on_tokens=on_tokens)
    times = result.times
    return Outcome(
        gaps=gaps,
        tokens=tokens[: int(duration_s * 2)],
        arrival_s=times.arrival_ns / S,
        ttft_s=(times.first_token_ns - times.arrival_ns) / S,
    )


def capacity() -> float:
    """Tokens a second of all groups when they get a little more than they can do."""
    outcome = serve(105.0, seed=99, duration_s=50.0)
    return float(outcome.tokens[40:100].mean() * 2)


def recovery_s(outcome: Outcome, wanted: float) -> float:
    """Seconds from the kill until four half seconds together reach `wanted` tokens a second."""
    start = int(KILL_S * 2)
    for place in range(start, len(outcome.tokens) - 4):
        if outcome.tokens[place : place + 4].mean() * 2 >= wanted:
            return (place - start) / 2
    return float("inf")


def mean_output() -> float:
    return float(workload(50.0, 40.0, 0).num_output_tokens.mean())


def fault_rows(seeds: range) -> list[Row]:
    per_request = mean_output()
    full = capacity()
    rows = []
    for fault, target in (("kill", 1.0), ("freeze", 4.0)):
        runs = [serve(0.5 * full / per_request, seed=seed, fault=fault) for seed in seeds]
        p99 = [float(np.quantile(run.gaps.total_s, 0.99)) for run in runs]
        rows.append(row("gap_p99_s", fault, p99, "lower", target))
    found, share = [], []
    for seed in seeds:
        rate = 0.8 * full / per_request
        run = serve(rate, seed=seed, fault="kill")
        survivors = serve(rate, seed=seed, num_groups=NUM_GROUPS - 1).tokens[40:76].mean() * 2
        found.append(recovery_s(run, 0.9 * float(survivors)))
        share.append(float(run.tokens[50:76].mean() * 2 / survivors))
    rows.append(row("recovery_s", "kill 1 of 4 at 80 %", found, "lower", 5.0))
    rows.append(row("survivors_share", "kill 1 of 4 at 80 %", share, "higher", 0.95))
    return rows


def ration_rows(seeds: range) -> list[Row]:
    rations = {"without": None, "half": RATION_TOKENS // 2, "default": RATION_TOKENS}
    values: dict[tuple[str, str], list[float]] = {}
    for name, ration in rations.items():
        for seed in seeds:
            run = serve(
                LONG_RATE, seed=seed, fault="kill", ration=ration, is_long=True, duration_s=75.0
            )
            is_late = (run.arrival_s >= LONG_KILL_S) & (run.arrival_s < LONG_KILL_S + 5)
            for metric, found, quantile in (
                ("ttft_p50_s", run.ttft_s[is_late], 0.5),
                ("ttft_p99_s", run.ttft_s[is_late], 0.99),
                ("gap_p50_s", run.gaps.total_s, 0.5),
            ):
                values.setdefault((name, metric), []).append(float(np.quantile(found, quantile)))
    rows = []
    for name in ("default", "half"):
        for metric in ("ttft_p50_s", "ttft_p99_s", "gap_p50_s"):
            without = statistics.median(values["without", metric])
            case = f"long contexts, {name} ration"
            rows.append(row(metric, case, values[name, metric], "lower", None, no=without))
    return rows


def seed_rows(seeds: range) -> list[Row]:
    reports = [run_faults(seed) for seed in seeds]
    case = f"{len(seeds)} fault seeds"
    return [
        Row(metric=name, case=case, ours=float(total), better="lower", target=0.0)
        for name, total in (
            ("tokens_lost", sum(each.num_tokens_lost for each in reports)),
            ("tokens_repeated", sum(each.num_tokens_repeated for each in reports)),
        )
    ]


def journal_rows(num_tokens: int) -> list[Row]:
    """Single tokens of 64 open requests, recorded by the thread that serves."""
    with tempfile.TemporaryDirectory() as folder:
        journal = SqliteJournal(Path(folder) / "journal.sqlite3", owner="bench")
        names = [RequestId(f"r{index}") for index in range(64)]
        for name in names:
            journal.open_request(
                name, model="m", prompt_token_ids=(1,) * 100, sampling=SamplingParams(max_tokens=1)
            )
            target = RankId(EngineId("e"), DpRank(0))
            journal.begin_attempt(name, attempt_id=AttemptId(name), epoch=1, target=target)
        clock = SystemClock()
        begin_ns, begin_cpu_ns = clock.now_ns(), time.thread_time_ns()
        for index in range(num_tokens // 64):
            for name in names:
                journal.record(name, epoch=1, first_index=index, token_ids=(7,))
        cpu_ns = time.thread_time_ns() - begin_cpu_ns
        is_durable = journal.flush(60)
        wall_ns = clock.now_ns() - begin_ns
        journal.close()
    assert is_durable
    count = num_tokens // 64 * 64
    return [
        Row(
            metric="journal_us_per_token",
            case="sqlite, 64 requests",
            ours=cpu_ns / count / 1e3,
            better="lower",
            target=50.0,
        ),
        Row(
            metric="journal_inserts_per_s",
            case="sqlite, to the file",
            ours=count / wall_ns * S,
            better="higher",
            target=10_000.0,
        ),
    ]


def row(
    metric: str, case: str, values: list[float], better: str, target: float | None, **peers: float
) -> Row:
    return Row(
        metric=metric,
        case=case,
        ours=statistics.median(values),
        spread=half_quartile_range(values),
        better=better,  # type: ignore[arg-type]
        target=target,
        peers={f"{name} ration": value for name, value in peers.items()},
    )


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    options = arguments(__doc__.splitlines()[0]).parse_args()
    seeds = range(2 if options.quick else 20)
    rows = fault_rows(seeds) + ration_rows(seeds)
    rows += seed_rows(range(20 if options.quick else 500))
    rows += journal_rows(64_000 if options.quick else 640_000)
    report("faults", rows, seeds=len(seeds), json_path=options.json)


if __name__ == "__main__":
    main()
