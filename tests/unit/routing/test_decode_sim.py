"""The decode simulator: the choices of each policy, and the same ones as the real routers."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from dsched.cli.main import make_command
from dsched.errors import ConfigError, TraceError
from dsched.sim.decode import DecodeGroup, DecodeRun, simulate_decode
from dsched.sim.decode_routers import simulate_routers
from dsched.sim.policies import POLICIES
from dsched.sim.prefill import (
    ChunkRule,
    PrefillGroup,
    backlog_balance_pct,
    scale_to_load,
    simulate_prefill,
)
from dsched.sim.traces import Trace, read_trace
from dsched.sim.workload import LogNormalLength, PoissonArrivals, generate_workload

BY_CHANCE = ("random", "p2c_requests", "p2c_kv")
"""Policies that spread on average only."""
HEADER = "t_s,input_tokens,output_tokens\n"
SMALL_GROUP = DecodeGroup(num_ranks=8)


def write_trace(folder: Path, lines: list[str]) -> Path:
    path = folder / "trace.csv"
    path.write_text(HEADER + "".join(line + "\n" for line in lines))
    return path


def mixed_trace() -> Trace:
    """Chat with long prompts in it: a generated twin of the public traces."""
    return generate_workload(
        num_requests=2000,
        seed=4,
        prompt=LogNormalLength(median_tokens=4000, sigma=1.3, max_tokens=120_000),
        output=LogNormalLength(median_tokens=60, sigma=0.8, max_tokens=400),
        arrivals=PoissonArrivals(rate_per_s=60.0),
    )


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        ("two_term", [0, 1, 1, 1, 0, 1]),
        ("dsched", [0, 1, 1, 1, 0, 1]),
        ("dsched_late", [0, 1, 1, 1, 0, 1]),
        ("dsched_migrate", [0, 1, 1, 1, 0, 1]),
        ("least_requests", [0, 1, 0, 1, 0, 1]),
        ("least_kv", [0, 1, 1, 1, 1, 1]),
        ("sglang", [0, 1, 1, 1, 1, 1]),
        ("round_robin", [0, 1, 0, 1, 0, 1]),
        ("dynamo", [0, 1, 1, 1, 1, 1]),
    ],
)
def test_requests_and_tokens_weigh_what_they_cost(
    tmp_path: Path, policy: str, ranks: list[int]
) -> None:
    """RT-05, as the trace file says it."""
    tokens = [15000, 1000, 1000, 1000, 1000, 1000]
    lines = [f"0.00{index},{count},2000" for index, count in enumerate(tokens)]
    trace = read_trace(write_trace(tmp_path, lines))
    result = simulate_decode(trace, policy, group=DecodeGroup(num_ranks=2))
    assert result.request_rank.tolist() == ranks


@pytest.mark.parametrize("policy", [name for name in POLICIES if name not in BY_CHANCE])
@pytest.mark.parametrize("count", [8, 7])
def test_the_first_burst_is_spread(tmp_path: Path, policy: str, count: int) -> None:
    """RT-01."""
    trace = read_trace(write_trace(tmp_path, ["0.0,1000,100"] * count))
    result = simulate_decode(trace, policy, group=DecodeGroup(num_ranks=4))
    per_rank = np.bincount(result.request_rank, minlength=4)
    assert per_rank.max() - per_rank.min() <= 1


@pytest.mark.parametrize(("is_late", "policy"), [(True, "dsched_late"), (False, "dsched")])
def test_the_compiled_loop_chooses_as_the_real_router(policy: str, *, is_late: bool) -> None:
    run = DecodeRun(requests_per_rank=12.0, num_steps=250, warm_steps=50)
    real = simulate_routers(
        mixed_trace(), num_routers=1, report_delay_steps=0, group=SMALL_GROUP, run=run,
        is_late=is_late,
    )  # fmt: skip
    compiled = simulate_decode(mixed_trace(), policy, group=SMALL_GROUP, run=run)
    assert real.request_rank == tuple(compiled.request_rank.tolist())
    assert real.share_pct == pytest.approx(compiled.share_pct, abs=1e-6)
    assert sum(rank >= 0 for rank in real.request_rank) > 300


def test_full_ranks_hold_requests_and_the_same_ones_in_both_simulations() -> None:
    run = DecodeRun(requests_per_rank=12.0, num_steps=250, warm_steps=50)
    tight = DecodeGroup(num_ranks=4, kv_capacity_tokens=130_000, max_running_requests=9)
    real = simulate_routers(
        mixed_trace(), num_routers=1, report_delay_steps=0, group=tight, run=run
    )
    compiled = simulate_decode(mixed_trace(), "dsched_late", group=tight, run=run)
    assert compiled.max_held > 5
    same = np.array(real.request_rank) == compiled.request_rank
    # Growth that overruns the KV is preempted only by the compiled loop.
    assert same[:60].all()


def test_late_reports_cost_one_router_nothing_and_four_little() -> None:
    run = DecodeRun(requests_per_rank=24.0, num_steps=300, warm_steps=100)
    shares = {
        (count, delay): simulate_routers(
            mixed_trace(), num_routers=count, report_delay_steps=delay, group=SMALL_GROUP, run=run
        ).share_pct
        for count, delay in ((1, 0), (1, 20), (4, 0))
    }
    assert shares[1, 20] == pytest.approx(shares[1, 0], abs=0.3)
    assert shares[4, 0] > shares[1, 0] - 4.0


def test_two_terms_beat_either_one_and_moving_beats_placing() -> None:
    """The order that the public traces show, on the generated twin; means over seeds."""
    group = DecodeGroup(num_ranks=16)

    def share(policy: str, **changes: object) -> float:
        runs = [
            DecodeRun(seed=seed, requests_per_rank=30.0, num_steps=900, **changes)  # type: ignore[arg-type]
            for seed in range(4)
        ]
        return float(
            np.mean([simulate_decode(mixed_trace(), policy, group=group, run=run).share_pct
                     for run in runs])
        )  # fmt: skip

    two_term = share("two_term")
    assert two_term > share("least_requests") + 0.5
    assert two_term > share("least_kv") + 0.5
    assert two_term > share("round_robin") + 3.0
    late = share("dsched_late")
    assert late > two_term
    assert share("dsched_migrate") > late + 0.5
    assert share("dsched_late", price_error=4.0, calibrates=True) > late - 1.0


SHARED = Path(os.environ.get("DSCHED_SHARED") or Path(__file__).parents[4] / "shared")


@pytest.mark.parametrize(
    ("name", "per_rank", "floor"),
    [
        ("mooncake_conversation.csv", 53, 95.0),
        ("servegen_deepseek_r1_sample.csv", 128, 98.5),
        ("azure2023_conv.csv", 128, 99.0),
        ("weka_claude_code_half.csv", 4.7, 78.0),
    ],
)
def test_public_traces_reach_their_floor(name: str, per_rank: float, floor: float) -> None:
    path = SHARED / "traces" / name
    if not path.is_file():
        pytest.skip(f"no {name}; the generated twin above runs always")
    num_steps = 4000 if per_rank < 10 else 1500
    run = DecodeRun(requests_per_rank=per_rank, num_steps=num_steps, warm_steps=num_steps // 4)
    assert simulate_decode(read_trace(path), "dsched", run=run).share_pct >= floor


def test_runs_repeat_and_seeds_differ() -> None:
    run = DecodeRun(requests_per_rank=10.0, num_steps=200, warm_steps=50)
    first, again = (
        simulate_decode(mixed_trace(), "p2c_kv", group=SMALL_GROUP, run=run) for _ in range(2)
    )
    assert first.request_rank.tolist() == again.request_rank.tolist()
    other = DecodeRun(seed=9, requests_per_rank=10.0, num_steps=200, warm_steps=50)
    differing = simulate_decode(mixed_trace(), "p2c_kv", group=SMALL_GROUP, run=other)
    assert first.request_rank.tolist() != differing.request_rank.tolist()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: simulate_decode(mixed_trace(), "best"), "policy 'best' is not one of"),
        (lambda: DecodeGroup(num_ranks=0), "num_ranks is 0"),
        (lambda: DecodeGroup(kv_token_ns=float("nan")), "kv_token_ns is nan"),
        (lambda: DecodeRun(num_steps=5, warm_steps=5), "warm_steps 5 must be less than"),
        (lambda: DecodeRun(stale_steps=-1), "stale_steps is -1"),
        (lambda: DecodeRun(speed=0), "speed is 0"),
        (lambda: simulate_decode(generate_workload(num_requests=0), "vllm"), "has no requests"),
        (
            lambda: simulate_decode(
                mixed_trace(), "vllm", group=DecodeGroup(kv_capacity_tokens=100)
            ),
            "KV tokens; a rank holds 100",
        ),
        (ChunkRule, "not both and not neither"),
        (lambda: ChunkRule(step_s=0), "must be positive"),
        (
            lambda: simulate_prefill(mixed_trace(), "best", ChunkRule(step_s=1)),
            "policy 'best' is not one of",
        ),
    ],
)
def test_wrong_input_is_named(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_a_time_budget_keeps_steps_level_and_a_fixed_chunk_does_not() -> None:
    long = generate_workload(
        num_requests=500, prompt=LogNormalLength(median_tokens=12_000, sigma=1.2)
    )
    group = PrefillGroup(num_ranks=16)
    assert backlog_balance_pct(long, ChunkRule(step_s=0.5), group=group, num_steps=80) > 97.0
    assert backlog_balance_pct(long, ChunkRule(chunk_tokens=4096), group=group, num_steps=80) < 75.0


@pytest.mark.slow
def test_every_prompt_is_computed_whatever_the_policy() -> None:
    group = PrefillGroup(num_ranks=8)
    trace = scale_to_load(mixed_trace(), group, load=0.7)
    results = {
        name: simulate_prefill(trace, name, ChunkRule(step_s=0.3), group=group)
        for name in ("round_robin", "least_requests", "least_tokens", "least_cost", "buckets")
    }
    assert {result.num_finished for result in results.values()} == {2000}
    assert results["least_cost"].ttft_p99_s[0] < results["round_robin"].ttft_p99_s[0]


def run_cli(*arguments: str) -> object:
    """`dsched` with arguments."""
    command = make_command()
    return command.main(args=list(arguments), prog_name="dsched", standalone_mode=False)


def test_the_command_compares_policies(tmp_path: Path) -> None:
    path = write_trace(tmp_path, ["0.0,1000,100"] * 8)
    target = tmp_path / "out.json"
    run_cli(
        "sim", "decode", "--trace", str(path), "--ranks", "4", "--policy", "dsched_late",
        "--policy", "vllm", "--json", str(target), "--plot", str(tmp_path / "out.png"),
    )  # fmt: skip
    values = json.loads(target.read_text())
    assert [one["policy"] for one in values["policies"]] == ["dsched_late", "vllm"]
    assert [one["per_rank"] for one in values["policies"]] == [[2, 2, 2, 2]] * 2
    assert (tmp_path / "out.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t_s,input_tokens\n0,1\n", "unknown header"),
        (HEADER + "1.0,5,5\n0.5,5,5\n", "stamps must not go back"),
        (HEADER + "0.0,-5,5\n", "input_tokens -5"),
    ],
)
def test_broken_traces_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        run_cli("sim", "decode", "--trace", str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--policy", "best"), "policy 'best'"),
        (("decode", "--ranks", "0"), "num_ranks is 0"),
        (("prefill", "--bucket-bounds", "9,x"), "bucket bounds '9,x'"),
        (("prefill", "--load", "0"), "load is 0"),
    ],
)
def test_wrong_options_are_the_operators_to_mend(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_cli("sim", *arguments)


def test_the_prefill_command_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.json"
    lines = [f"{index / 10},{500 + index * 40},10" for index in range(200)]
    path = write_trace(tmp_path, lines)
    run_cli(
        "sim", "prefill", "--trace", str(path), "--ranks", "4", "--load", "0.8", "--json",
        str(target),
    )  # fmt: skip
    values = json.loads(target.read_text())
    assert {one["num_finished"] for one in values["policies"]} == {200}
    assert "round_robin" in capsys.readouterr().out
