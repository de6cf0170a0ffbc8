"""Verify lengths: how fast they are planned, and what they gain in simulation.

    python benchmarks/spec_decode.py [--quick] [--json FILE]

Everything but `plan_p50_us` is simulated (`dsched.sim.spec`): draft length 5, graph tiers, five
seeds. The curves are fits to the DSpark paper's Fig. 8 and, where the folder of cost tables is
found (`DSCHED_SHARED`, or `shared` beside the checkout), tables derived with NVIDIA AIConfigurator.
The engines' own host planners are timed in the same run where their environments are found
(`.venv-vllm`, `.venv-sglang`).
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from _report import Row, arguments, half_quartile_range, report
from _spec_peers import NUM_POSITIONS, SIZES

from dsched.costs import StepCostCurve
from dsched.rng import stream
from dsched.sim.spec import (
    APPENDIX_A_CONFIDENCE,
    APPENDIX_A_TARGET,
    PAPER_FITS,
    V32_STEP_MS,
    Fixed,
    NoDraft,
    Oracle,
    Planned,
    SpecCost,
    appendix_a_cost,
    context_lengths,
    draft_trace,
    graph_tiers,
    paper_cost,
    run_contexts,
    run_group,
    share_of_a,
    v32_cost,
)
from dsched.spec_decode import plan_verify_lengths
from dsched.spec_decode.calibration import OnlineCalibration, expected_calibration_error

ROOT = Path(__file__).parents[1]
AIC_TABLES = (
    "sps_h200_dsv3_ep64_4k",
    "sps_gb200_dsv3_ep64_4k",
    "sps_h200_v4flash_ep8_8k",
    "sps_gb200_v4pro_ep4_8k",
)
CONCURRENCIES = (8, 16, 32, 64, 128, 256)
GAIN_TARGETS = {64: 2.5, 128: 6.0, 256: 10.0}
PLAN_TARGETS_US = {64: 10.0, 256: 20.0, 1024: 50.0, 4096: 150.0}


class Run:
    """How much is computed: seeds and steps."""

    def __init__(self, *, is_quick: bool) -> None:
        self.seeds = range(5)
        self.num_steps = 120 if is_quick else 500
        self.num_draws = 200_000 if is_quick else 1_000_000
        self.repeats = 300 if is_quick else 2_000


def row(
    metric: str,
    case: str,
    values: Sequence[float],
    *,
    better: str = "higher",
    target: float | None = None,
    peers: dict[str, float] | None = None,
) -> Row:
    return Row(
        metric=metric,
        case=case,
        ours=fmean(values),
        spread=half_quartile_range(values),
        better=better,  # type: ignore[arg-type]
        target=target,
        peers=peers or {},
    )


def shared_costs() -> Path | None:
    """The folder of cost tables, if there is one."""
    folder = Path(os.environ.get("DSCHED_SHARED", ROOT.parent / "shared")) / "costs"
    return folder if folder.is_dir() else None


def all_costs() -> list[SpecCost]:
    """The paper's fits and, with a guessed draft cost (three layers of the target's), the tables
    derived with AIConfigurator."""
    costs = [paper_cost(name) for name in PAPER_FITS]
    folder = shared_costs()
    if folder is None:
        print("cost tables not found: the paper's fits only")
        return costs
    for name in AIC_TABLES:
        table = json.loads((folder / f"{name}.sglang.json").read_text())
        seconds = [1.0 / rate for rate in table["sample_steps_per_sec"]]
        curve = StepCostCurve.from_samples(
            table["sample_batch_tokens"], seconds, tiers=graph_tiers()
        )
        half_share = 0.5 * 3 / 61
        base = half_share * curve.seconds(1) + 0.3e-3
        per_request = half_share * (curve.seconds(1024) - curve.seconds(1)) / 1024 * 5
        costs.append(
            SpecCost(
                name=name.removeprefix("sps_"),
                step_cost=curve,
                draft_base_seconds=base,
                draft_request_seconds=per_request,
            )
        )
    return costs


def time_plans(run: Run) -> Iterator[Row]:
    """The call an engine makes, at p50."""
    peers = {name: time_peer(name, run.repeats // 3) for name in ("vllm", "sglang")}
    tiers = graph_tiers(32_768)
    curve = StepCostCurve.from_samples(
        tiers, [(15.24 + 0.0285 * b) / 1e3 for b in tiers], tiers=tiers
    )
    for num_requests in SIZES:
        medians = []
        for seed in run.seeds:
            rng = stream(seed, "spec-plan")
            shape = (num_requests, NUM_POSITIONS)
            history = rng.beta(4, 1, shape).astype(np.float32)
            confidence = rng.beta(4, 1, shape).astype(np.float32)
            times = []
            for repeat in range(run.repeats + 20):
                start = time.perf_counter_ns()
                plan_verify_lengths(confidence, step_cost=curve, history=history)
                if repeat >= 20:
                    times.append(time.perf_counter_ns() - start)
            medians.append(float(np.median(times)) / 1e3)
        case = f"R={num_requests}"
        yield row(
            "plan_p50_us",
            case,
            medians,
            better="lower",
            target=PLAN_TARGETS_US[num_requests],
            peers={name: found[case] for name, found in peers.items() if found},
        )


def time_peer(name: str, repeats: int) -> dict[str, float]:
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        print(f"{name}: no environment at {python.relative_to(ROOT)}; not timed")
        return {}
    command = [str(python), str(Path(__file__).parent / "_spec_peers.py"), name, str(repeats)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}; not timed")
        return {}
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare_policies(run: Run, costs: Sequence[SpecCost]) -> Iterator[Row]:
    """Share of the best non-anticipating bound, and gains over what needs no confidences."""
    shares: dict[str, dict[int, list[tuple[str, list[float]]]]] = {
        "asynchronous": {},
        "synchronous": {},
    }
    against_best: list[tuple[str, list[float]]] = []
    for cost in costs:
        for num_requests in CONCURRENCIES:
            case = f"{cost.name} R={num_requests}"
            reached: dict[str, list[float]] = {}
            for seed in run.seeds:
                trace = draft_trace(
                    seed, num_requests=num_requests, num_steps=run.num_steps, mixes=cost.mixes
                )
                policies = [
                    NoDraft(),
                    *(Fixed(length) for length in (1, 3, 5)),
                    Planned(),
                    Planned(name="synchronous", mode="synchronous"),
                    Planned(name="bound", uses_current=True),
                    Planned(name="bound, always drafting", uses_current=True, has_gate=False),
                    Oracle(),
                ]
                for policy in policies:
                    rate = policy.run(trace, cost).tokens_per_s
                    reached.setdefault(policy.name, []).append(rate)
            bounds = (reached["bound"], reached["bound, always drafting"])
            reached["bound"] = [max(pair) for pair in zip(*bounds, strict=True)]
            for mode, by_size in shares.items():
                share = percent(reached[mode], reached["bound"], offset=0.0)
                by_size.setdefault(num_requests, []).append((cost.name, share))
            ours = reached["asynchronous"]
            best = [max(pair) for pair in zip(reached["none"], reached["fixed 5"], strict=True)]
            against_best.append((case, percent(ours, best)))
            if cost.name == "v4flash-mixed" and num_requests in GAIN_TARGETS:
                yield row(
                    "gain_vs_fixed5_pct",
                    f"R={num_requests}",
                    percent(ours, reached["fixed 5"]),
                    target=GAIN_TARGETS[num_requests],
                    peers={
                        "vs_none": fmean(percent(ours, reached["none"])),
                        "oracle": fmean(percent(reached["oracle"], reached["fixed 5"])),
                    },
                )
    for mode, by_size in shares.items():
        metric = "bound_share_pct" if mode == "asynchronous" else "synchronous_bound_share_pct"
        for num_requests, found in by_size.items():
            name, share = min(found, key=lambda pair: fmean(pair[1]))
            target = 95.0 if mode == "synchronous" else 99.5 if num_requests >= 64 else 98.5
            case = f"R={num_requests}, worst of {len(costs)}: {name}"
            yield row(metric, case, share, target=target)
    case, gain = min(against_best, key=lambda pair: fmean(pair[1]))
    yield row("gain_vs_best_of_none_and_fixed5_pct", f"worst of all: {case}", gain, target=-0.5)


def compare_contexts(run: Run) -> Iterator[Row]:
    """Survival a second against survival, contexts log-normal around 6K up to 112K."""
    for name in V32_STEP_MS:
        cost, seconds_per_kv_token = v32_cost(name)
        for num_requests in (32, 64, 128):
            gains, longest = [], []
            for seed in run.seeds:
                trace = draft_trace(seed, num_requests=num_requests, num_steps=run.num_steps)
                kv_tokens = context_lengths(seed, num_requests=num_requests)
                plain, dense = (
                    run_contexts(
                        trace,
                        cost,
                        kv_tokens,
                        seconds_per_kv_token=seconds_per_kv_token,
                        fairness=fairness,
                    )
                    for fairness in (None, 0.1)
                )
                gains += percent([dense.tokens_per_s], [plain.tokens_per_s])
                longest.append(dense.longest_decile_length)
            case = f"{name} R={num_requests}"
            yield row("density_gain_pct", case, gains, target=3.0)
            yield row("longest_decile_verify_length", case, longest)


def compare_groups(run: Run) -> Iterator[Row]:
    """One budget for eight ranks against each its own."""
    for name, num_requests in (("v4flash-mixed", 16), ("v4flash-mixed", 64), ("v4pro-mixed", 128)):
        cost = paper_cost(name)
        gains = []
        for seed in run.seeds:
            traces = [
                draft_trace(
                    seed,
                    num_requests=num_requests,
                    num_steps=max(run.num_steps // 4, 40),
                    name=f"spec-rank-{dp_rank}",
                )
                for dp_rank in range(8)
            ]
            common, alone = (
                run_group(traces, cost, is_common=is_common).tokens_per_s
                for is_common in (True, False)
            )
            gains += percent([common], [alone])
        yield row("common_budget_gain_pct", f"8 ranks, {name} R={num_requests}", gains, target=0.5)


def compare_tables(run: Run, costs: Sequence[SpecCost]) -> Iterator[Row]:
    """What wrong cost tables cost: worst mean over curves and batch sizes."""
    tiers = graph_tiers()
    num_steps = max(run.num_steps, 300)
    losses: dict[str, list[tuple[str, list[float]]]] = {}
    for cost in costs:
        truth = cost.step_cost.seconds(np.array(tiers))
        bent = truth[0] + 0.5 * (truth - truth[0])
        for num_requests in (16, 64, 256):
            case = f"{cost.name} R={num_requests}"
            by_kind: dict[str, list[float]] = {}
            for seed in run.seeds:
                trace = draft_trace(
                    seed, num_requests=num_requests, num_steps=num_steps, mixes=cost.mixes
                )
                noise = stream(seed, "spec-table-noise").normal(0.0, 0.1, len(tiers))
                noisy = StepCostCurve.from_samples(tiers, truth * (1.0 + noise), tiers=tiers)
                half = StepCostCurve.from_samples(tiers, bent, tiers=tiers)
                learning = num_steps // 2
                exact = Planned(learning_steps=learning).run(trace, cost).tokens_per_s
                for kind, policy in (
                    (
                        "noise 10 %, smoothed",
                        Planned(believed=noisy, is_smoothed=True, learning_steps=learning),
                    ),
                    ("noise 10 %, as it is", Planned(believed=noisy, learning_steps=learning)),
                    (
                        "slope halved, tracked",
                        Planned(believed=half, is_tracked=True, learning_steps=learning),
                    ),
                    ("slope halved, as it is", Planned(believed=half, learning_steps=learning)),
                ):
                    loss = -percent([policy.run(trace, cost).tokens_per_s], [exact])[0]
                    by_kind.setdefault(kind, []).append(loss)
            for kind, values in by_kind.items():
                losses.setdefault(kind, []).append((case, values))
    targets = {"noise 10 %, smoothed": 3.6, "slope halved, tracked": 1.5}
    for kind, found in losses.items():
        case, values = max(found, key=lambda pair: fmean(pair[1]))
        yield row(
            "wrong_table_loss_pct",
            f"{kind}, worst: {case}",
            values,
            better="lower",
            target=targets.get(kind),
        )


def calibrate_online(run: Run) -> Iterator[Row]:
    """Calibration error of the products after 10 000 blocks, of which only the planned tokens were
    verified."""
    num_requests = 64
    num_learned = 10_000 // num_requests
    cost = paper_cost("v4flash-chat")
    for case, scale, shift in (
        ("over-confident", 2.0, 0.3),
        ("shifted", 1.0, 0.5),
        ("shy", 0.6, 0.0),
    ):
        before, after = [], []
        for seed in run.seeds:
            trace = draft_trace(
                seed, num_requests=num_requests, num_steps=2 * num_learned, mixes=("chat",)
            )
            logits = np.log(trace.confidence / (1.0 - trace.confidence))
            shown = 1.0 / (1.0 + np.exp(-(scale * logits + shift)))
            calibration = OnlineCalibration(trace.confidence.shape[2])
            for step in range(num_learned):
                confidence = calibration.calibrate(shown[step])
                plan = plan_verify_lengths(confidence, step_cost=cost.step_cost, history=confidence)
                calibration.apply(
                    shown[step],
                    verified=plan.lengths,
                    accepted=np.minimum(plan.lengths, trace.accepted[step]),
                )
            learned = np.stack([calibration.calibrate(part) for part in shown[num_learned:]])
            before.append(product_error(shown[num_learned:], trace.accepted[num_learned:]))
            after.append(product_error(learned, trace.accepted[num_learned:]))
        yield row(
            "calibration_error_pct",
            f"{case}, after 10 000 blocks",
            after,
            better="lower",
            target=3.0,
            peers={"before": fmean(before)},
        )


def product_error(confidence: np.ndarray, accepted: np.ndarray) -> float:
    """Largest calibration error over the positions, of survivals [S, R, K], in per cent."""
    survival = np.cumprod(confidence, axis=2)
    return 100.0 * max(
        expected_calibration_error(survival[:, :, k], accepted > k)
        for k in range(confidence.shape[2])
    )


def play_appendix_a(run: Run) -> Iterator[Row]:
    """Losslessness: the share of A in the first token, which must be the target's .7."""

    def length_of(mode: str, *, is_retrospective: bool = False) -> Callable[[str, str], int]:
        def length(now: str, before: str) -> int:
            plan = plan_verify_lengths(
                APPENDIX_A_CONFIDENCE[now],
                step_cost=appendix_a_cost(),
                history=APPENDIX_A_CONFIDENCE[now if is_retrospective else before],
                mode=mode,
            )
            return int(plan.lengths[0])

        return length

    sigma = (APPENDIX_A_TARGET * (1 - APPENDIX_A_TARGET) / run.num_draws) ** 0.5
    modes = {mode: length_of(mode) for mode in ("asynchronous", "synchronous", "fixed")}
    modes["planted retrospective search"] = length_of("asynchronous", is_retrospective=True)
    for name, length in modes.items():
        shares = [share_of_a(length, seed=seed, num_draws=run.num_draws) for seed in run.seeds]
        is_planted = name.startswith("planted")
        yield Row(
            metric="first_token_deviation_sigmas",
            case=f"{name}: P(A) = {fmean(shares):.4f}",
            ours=max(abs(share - APPENDIX_A_TARGET) / sigma for share in shares),
            better="lower",
            target=None if is_planted else 3.0,
        )


def percent(ours: Sequence[float], theirs: Sequence[float], *, offset: float = 1.0) -> list[float]:
    return [100.0 * (a / b - offset) for a, b in zip(ours, theirs, strict=True)]


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    run = Run(is_quick=options.quick)
    costs = all_costs()
    rows = [
        *time_plans(run),
        *compare_policies(run, costs),
        *compare_contexts(run),
        *compare_groups(run),
        *compare_tables(run, costs),
        *calibrate_online(run),
        *play_appendix_a(run),
    ]
    report("spec_decode", rows, seeds=len(run.seeds), json_path=options.json)


if __name__ == "__main__":
    main()
