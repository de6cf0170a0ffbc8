"""Expert placement: balance, moves and solve time beside vLLM, SGLang and DeepSeek's greedy.

    python benchmarks/eplb.py [--quick] [--json FILE]

The load is generated (`dsched.sim.eplb`): power law .8 with 25 % spread over layers, 5 % drift a
window, E/64 experts trading places. The first window is not scored. Times are CPU time of one
thread (`time.thread_time`), the median over plans. The engines' own policies run in the same run
where their environments are found (`.venv-vllm`, `.venv-sglang`); DeepSeek's greedy is rewritten
(`dsched.sim.eplb.plan_greedy`).
"""

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from _report import Row, arguments, half_quartile_range, report
from numpy.typing import NDArray

from dsched.eplb import (
    ExpertPlacement,
    PlacementOptions,
    balancedness,
    check_placement,
    count_moves,
    plan_placement,
    split_traffic,
    warm_up,
)
from dsched.sim.eplb import LoadShape, generate_expert_load, plan_greedy

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One setup, with the targets of the fresh and the greedy plan."""

    name: str
    shape: LoadShape
    num_slots: int
    num_ranks: int
    avg: float | None = None
    worst: float | None = None
    ms: float | None = None
    greedy_ms: float | None = None
    has_peers: bool = True


CASES = (
    Case(
        name="288/32",
        shape=LoadShape(),
        num_slots=288,
        num_ranks=32,
        avg=0.9990,
        worst=0.998,
        ms=10,
        greedy_ms=2,
    ),
    Case(
        name="320/64",
        shape=LoadShape(),
        num_slots=320,
        num_ranks=64,
        avg=0.9985,
        worst=0.995,
        ms=30,
    ),
    Case(
        name="384/128",
        shape=LoadShape(),
        num_slots=384,
        num_ranks=128,
        avg=0.988,
        worst=0.96,
        ms=60,
    ),
    Case(
        name="1152/128",
        shape=LoadShape(num_layers=61, num_experts=1024),
        num_slots=1152,
        num_ranks=128,
        greedy_ms=13,
        has_peers=False,
    ),
)
TOP1 = Case(
    name="top1-144/16",
    shape=LoadShape(num_layers=12, num_experts=128, dominating=(0.1, 0.3)),
    num_slots=144,
    num_ranks=16,
)
WARM = PlacementOptions(trigger=0.028, stop=0.017)
"""Close to the defaults; the room up to 12 moves a layer is used."""
# At most 40 moves a layer on average, shared by what they gain.
CLOSE = PlacementOptions(
    trigger=0.001, stop=0.0005, max_bytes=40 * 58 * 44_040_192, expert_bytes=44_040_192
)
TOP1_EQUAL = PlacementOptions(trigger=0.018, stop=0.0103)
TOP1_WEIGHTED = PlacementOptions(trigger=0.005, stop=0.001, split="weighted")


@dataclass(frozen=True, kw_only=True, eq=False)
class Score:
    """One planner over one seed's windows."""

    fit: NDArray[np.float64]
    """[W, L] balance on the window planned from."""
    after: NDArray[np.float64]
    """[W, L] balance on the next window."""
    weighted: NDArray[np.float64]
    """[W, L] balance on the window planned from with optimal split."""
    moves: float
    ms: float


def score(
    placements: Sequence[ExpertPlacement], times: Sequence[float], windows: NDArray[np.int64]
) -> Score:
    """Score placements made from windows 0, 1, ...; the first is not scored."""
    planned = list(zip(placements, windows, strict=False))[1:-1]
    following = windows[2:]
    moves = [count_moves(old, new)[0].mean() for old, new in pairwise(placements[:-1])]
    return Score(
        fit=np.array([balancedness(placement, load) for placement, load in planned]),
        after=np.array(
            [
                balancedness(placement, load)
                for (placement, _), load in zip(planned, following, strict=True)
            ]
        ),
        weighted=np.array(
            [balancedness(placement, load, split="weighted") for placement, load in planned]
        ),
        moves=float(np.mean(moves)),
        ms=float(np.median(times[1:])),
    )


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e6


def run_ours(
    case: Case,
    windows: NDArray[np.int64],
    options: PlacementOptions,
    *,
    is_warm: bool,
    repeats: int = 3,
) -> Score:
    placements: list[ExpertPlacement] = []
    times = []
    for load in windows:
        current = placements[-1] if is_warm and placements else None

        def plan(
            load: NDArray[np.int64] = load, current: ExpertPlacement | None = current
        ) -> ExpertPlacement:
            return plan_placement(
                load,
                num_slots=case.num_slots,
                num_ranks=case.num_ranks,
                current=current,
                options=options,
            ).placement

        times.append(min(cpu_ms(plan) for _ in range(repeats)))
        placements.append(plan())
        check_placement(placements[-1])
    return score(placements, times, windows)


def run_greedy(case: Case, windows: NDArray[np.int64]) -> Score:
    placements, times = [], []
    for load in windows:
        start = time.thread_time_ns()
        slots = plan_greedy(load, num_slots=case.num_slots, num_ranks=case.num_ranks)
        times.append((time.thread_time_ns() - start) / 1e6)
        placements.append(as_placement(case, slots))
    return score(placements, times, windows)


Job = tuple[Case, int]
"""A case and a seed."""


def run_engine(name: str, jobs: dict[Job, NDArray[np.int64]]) -> dict[Job, Score]:
    """Score an engine's policy on all windows, in one process of its Python; empty without it."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        print(f"{name}: no environment at {python.relative_to(ROOT)}; not compared")
        return {}
    arrays = {}
    for number, ((case, _), windows) in enumerate(jobs.items()):
        arrays[f"windows_{number}"] = windows
        arrays[f"group_{number}"] = np.array([case.num_slots, case.num_ranks])
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "jobs.npz", Path(folder) / "out.npz"
        np.savez(source, **arrays)
        script = Path(__file__).parent / "_eplb_peers.py"
        command = [str(python), str(script), name, str(source), str(target)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, capture_output=True)
        found = np.load(target)
        return {
            job: score(
                [as_placement(job[0], slots) for slots in found[f"slots_{number}"]],
                found[f"ms_{number}"].tolist(),
                windows,
            )
            for number, (job, windows) in enumerate(jobs.items())
        }


def as_placement(case: Case, slots: NDArray[np.int32]) -> ExpertPlacement:
    return ExpertPlacement(
        slot_expert=slots, num_ranks=case.num_ranks, num_experts=case.shape.num_experts
    )


def row(
    metric: str,
    case: str,
    values: Sequence[float],
    *,
    better: str,
    target: float | None = None,
    peers: dict[str, float] | None = None,
    worst: bool = False,
) -> Row:
    """Mean over seeds, or the worst of them."""
    value = min(values) if worst else float(np.mean(values))
    return Row(
        metric=metric,
        case=case,
        ours=value,
        spread=half_quartile_range(values),
        better=better,  # type: ignore[arg-type]
        target=target,
        peers=peers or {},
    )


Peers = dict[str, list[Score]]


def peer_values(
    peers: Peers, read: Callable[[Score], float], *, worst: bool = False
) -> dict[str, float]:
    pick = min if worst else (lambda values: float(np.mean(values)))
    return {name: pick([read(one) for one in scores]) for name, scores in peers.items() if scores}


def rows_of(
    name: str,
    ours: list[Score],
    peers: Peers,
    *,
    avg: float | None = None,
    worst: float | None = None,
    moves: float | None = None,
    next_avg: float | None = None,
    ms: float | None = None,
) -> list[Row]:
    return [
        row("balance_avg", name, [one.fit.mean() for one in ours], better="higher", target=avg,
            peers=peer_values(peers, lambda one: float(one.fit.mean()))),
        row("balance_worst", name, [one.fit.min() for one in ours], better="higher", target=worst,
            worst=True, peers=peer_values(peers, lambda one: float(one.fit.min()), worst=True)),
        row("next_balance_avg", name, [one.after.mean() for one in ours], better="higher",
            target=next_avg, peers=peer_values(peers, lambda one: float(one.after.mean()))),
        row("moves_per_layer", name, [one.moves for one in ours], better="lower", target=moves,
            peers=peer_values(peers, lambda one: one.moves)),
        row("solve_ms", name, [one.ms for one in ours], better="lower", target=ms,
            peers=peer_values(peers, lambda one: one.ms)),
    ]  # fmt: skip


class Run:
    """Load of every case and seed, and what vLLM makes of it."""

    def __init__(self, *, is_quick: bool) -> None:
        self.seeds = range(5)
        self.is_quick = is_quick
        num_windows = 4 if is_quick else 6
        self.windows: dict[Job, NDArray[np.int64]] = {
            (case, seed): generate_expert_load(case.shape, num_windows=num_windows, seed=seed)
            for case in (*CASES, TOP1)
            for seed in self.seeds
            if case.has_peers or not is_quick
        }
        compared = {job: w for job, w in self.windows.items() if job[0].has_peers}
        self.engines = {name: run_engine(name, compared) for name in ("vllm", "sglang")}

    def peers(self, case: Case) -> Peers:
        """Score the peers on every seed; the greedy is slow in Python, so once where quick."""
        seeds = [seed for seed in self.seeds if (case, seed) in self.windows]
        greedy = seeds[:1] if self.is_quick else seeds
        return {
            **{
                name: [scores[case, seed] for seed in seeds if (case, seed) in scores]
                for name, scores in self.engines.items()
            },
            "deepseek greedy": [run_greedy(case, self.windows[case, seed]) for seed in greedy]
            if case.has_peers
            else [],
        }

    def ours(
        self, case: Case, options: PlacementOptions, *, is_warm: bool, repeats: int = 1
    ) -> list[Score]:
        return [
            run_ours(case, self.windows[case, seed], options, is_warm=is_warm, repeats=repeats)
            for seed in self.seeds
        ]


def placement_rows(run: Run, case: Case) -> list[Row]:
    is_main = case.name == "288/32"
    peers = run.peers(case)
    fresh = run.ours(case, WARM, is_warm=False, repeats=2)
    rows = rows_of(f"{case.name} cold", fresh, peers, avg=case.avg, worst=case.worst, ms=case.ms)
    if is_main or not run.is_quick:
        greedy = run.ours(case, PlacementOptions(search=False), is_warm=False, repeats=2)
        rows.append(
            row("solve_ms", f"{case.name} greedy only", [one.ms for one in greedy],
                better="lower", target=case.greedy_ms)
        )  # fmt: skip
    warm = run.ours(case, WARM, is_warm=True)
    vllm_next = [float(one.after.mean()) for one in peers["vllm"]]
    rows += rows_of(
        f"{case.name} warm",
        warm,
        peers,
        moves=12 if is_main else None,
        next_avg=float(np.mean(vllm_next)) - 0.002 if is_main and vllm_next else None,
    )
    if is_main:
        close = run.ours(case, CLOSE, is_warm=True)
        rows += rows_of(f"{case.name} warm to .999", close, peers, avg=0.999, moves=40)
    return rows


def top1_rows(run: Run) -> list[Row]:
    """One dominating expert a layer: planned for equal and for weighted split."""
    peers = run.peers(TOP1)
    rows = rows_of(
        f"{TOP1.name} warm",
        run.ours(TOP1, TOP1_EQUAL, is_warm=True),
        peers,
        avg=0.99,
        worst=0.92,
        moves=10,
    )
    split = run.ours(TOP1, TOP1_WEIGHTED, is_warm=True)
    name = f"{TOP1.name} warm, weighted"
    weighted = [one.weighted for one in split]
    averages = peer_values(peers, lambda one: float(one.weighted.mean()))
    worst = peer_values(peers, lambda one: float(one.weighted.min()), worst=True)
    rows += [
        row("weighted_balance_avg", name, [one.mean() for one in weighted], better="higher",
            target=0.998, peers=averages),
        row("weighted_balance_worst", name, [one.min() for one in weighted], better="higher",
            target=0.97, worst=True, peers=worst),
        row("moves_per_layer", name, [one.moves for one in split], better="lower", target=10),
    ]  # fmt: skip
    return rows


def untouched_row(repeats: int) -> Row:
    """Nothing over the trigger: the check of 58 layers alone."""
    load = generate_expert_load(LoadShape(), num_windows=1, seed=0)[0]
    current = plan_placement(load, num_slots=288, num_ranks=32).placement

    def plan() -> None:
        planned = plan_placement(load, num_slots=288, num_ranks=32, current=current)
        assert planned.is_unchanged

    times = sorted(cpu_ms(plan) for _ in range(repeats))
    return row("solve_ms", "288/32 nothing over the trigger", [times[repeats // 2]],
               better="lower", target=0.3)  # fmt: skip


def split_row(repeats: int) -> Row:
    """One layer, as an engine would call it every step."""
    windows = generate_expert_load(LoadShape(num_layers=1), num_windows=2, seed=0)
    placement = plan_placement(windows[0], num_slots=288, num_ranks=32).placement
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        split_traffic(placement, windows[1])
        times.append((time.perf_counter_ns() - start) / 1e3)
    return row("split_us", "288/32 one layer", [float(np.median(times))], better="lower", target=20)


def loss_rows(seeds: range) -> list[Row]:
    """One of 32 ranks dies: every expert live again, and the moves that takes."""
    rank_up = np.ones(32, np.bool_)
    rank_up[11] = False
    times, extra, balances = [], [], []
    for seed in seeds:
        load = generate_expert_load(LoadShape(), num_windows=1, seed=seed)[0]
        current = plan_placement(load, num_slots=288, num_ranks=32).placement
        by_rank = current.slot_expert.reshape(58, 32, 9)
        survivors = np.delete(by_rank, 11, axis=1).reshape(58, -1)
        lost = np.array([256 - len(np.unique(layer)) for layer in survivors])

        def plan(load: NDArray[np.int64] = load, current: ExpertPlacement = current) -> object:
            return plan_placement(
                load,
                num_slots=288,
                num_ranks=32,
                current=current,
                rank_up=rank_up,
                max_moves=0,
            )

        times.append(min(cpu_ms(plan) for _ in range(5)))
        planned = plan()
        check_placement(planned.placement, rank_up=rank_up)  # type: ignore[attr-defined]
        extra.append(float((planned.num_moves - lost).sum()))  # type: ignore[attr-defined]
        balances.append(float(planned.balance.mean()))  # type: ignore[attr-defined]
    return [
        row("solve_ms", "288/32 one rank lost", times, better="lower", target=2),
        row("moves_beyond_lost_experts", "288/32 one rank lost", extra, better="lower", target=0),
        row("balance_avg", "288/32 one rank lost, no other moves", balances, better="higher"),
    ]


def greedy_only_row(case: Case) -> Row:
    windows = generate_expert_load(case.shape, num_windows=3, seed=0)
    found = run_ours(case, windows, PlacementOptions(search=False), is_warm=False)
    return row("solve_ms", f"{case.name} greedy only", [found.ms], better="lower",
               target=case.greedy_ms)  # fmt: skip


def main() -> None:
    parsed = arguments(__doc__ or "").parse_args()
    warm_up()
    run = Run(is_quick=parsed.quick)
    rows: list[Row] = []
    for case in CASES:
        if case.has_peers or not parsed.quick:
            rows += placement_rows(run, case)
        else:
            rows.append(greedy_only_row(case))
    rows += top1_rows(run)
    rows += [untouched_row(50), split_row(500), *loss_rows(run.seeds)]
    report("eplb", rows, seeds=len(run.seeds), json_path=parsed.json)


if __name__ == "__main__":
    main()
