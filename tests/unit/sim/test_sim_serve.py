"""`dsched sim serve`: what people and programs read."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from dsched.cli.main import main

TR_03 = (
    "t_s,input_tokens,output_tokens\n0,472,18\n5,1087,0\n5,417,276\n9,0,0\n12,1360,647\n45,185,0\n"
)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """The command sets up logging for a whole process."""
    root = logging.getLogger()
    config = structlog.get_config() if structlog.is_configured() else None
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    if config is not None:
        structlog.configure(**config)
    root.handlers[:] = handlers
    root.setLevel(level)


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """Run the command in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["dsched", "sim", "serve", *args])
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *args: str) -> dict[str, Any]:
    path = tmp_path / "out.json"
    assert run(monkeypatch, "--json", str(path), *args) == 0
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    return str(path)


def test_dropped_rows_and_the_idle_share_are_stated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TR-03, for people and in JSON."""
    values = replay(monkeypatch, tmp_path, "--trace", write(tmp_path, TR_03), "--ranks=4")
    screen = capsys.readouterr().out

    assert "read 6, replayed 3, dropped 3 (zero output 3, of these zero input 1)" in screen
    assert "fewer requests than ranks" in screen
    assert "100.0% of the time" in screen
    assert "nan" not in screen.lower()
    assert values["rows"] == {
        "num_read": 6,
        "num_replayed": 3,
        "num_dropped": 3,
        "num_zero_output": 3,
        "num_zero_input": 1,
        "num_zero_input_and_output": 1,
    }
    assert values["tokens"] == {"num_prompt": 2249, "num_output": 941}
    assert values["balance"]["share_of_time_with_fewer_requests_than_ranks"] == 1.0


def test_everything_says_that_it_is_simulated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = replay(monkeypatch, tmp_path, "--requests=20")
    screen = capsys.readouterr().out

    assert "All times are simulated" in screen
    for name in ("TTFT", "TPOT", "throughput"):
        assert f"{name} (simulated)" in screen
    assert values["simulated"] is True
    assert values["latency"]["ttft"]["num_samples"] == 20


def test_answers_of_one_token_have_no_tpot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No division by zero, no NaN: the figure is absent."""
    trace = write(tmp_path, "t_s,input_tokens,output_tokens\n0,5,1\n")

    values = replay(monkeypatch, tmp_path, "--trace", trace, "--ranks=1")

    assert values["latency"]["tpot"] == {
        "num_samples": 0,
        "mean_ms": None,
        "p50_ms": None,
        "p90_ms": None,
        "p99_ms": None,
    }
    assert "no sample" in capsys.readouterr().out


def test_json_can_go_to_standard_output_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--json", "-", "--requests=5") == 0
    captured = capsys.readouterr()

    assert json.loads(captured.out)["requests"]["num_finished"] == 5
    assert "Simulated replay" in captured.err


def test_options_reach_the_simulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = replay(
        monkeypatch,
        tmp_path,
        "--requests=60",
        "--ranks=3",
        "--engines=2",
        "--seed=9",
        "--policy=round_robin",
        "--limit=30",
        "--concurrency=4",
        "--kv-policy=reserve",
    )

    assert values["cluster"] == {"num_dp_ranks": 3, "num_engines": 2, "num_ranks": 6}
    assert (values["seed"], values["policy"]) == (9, "round_robin")
    assert values["requests"]["num_finished"] == 30
    assert values["options"]["concurrency"] == 4
    assert sum(values["balance"]["requests_per_rank"]) == 30


def test_rate_scale_brings_requests_closer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    args = ("--requests=40", "--rate=1", "--ranks=8")
    plain = replay(monkeypatch, tmp_path, *args)
    fast = replay(monkeypatch, tmp_path, *args, "--rate-scale=20")

    assert fast["throughput"]["makespan_s"] < plain["throughput"]["makespan_s"] / 2
    assert fast["tokens"] == plain["tokens"]


def test_rounded_stamps_are_pointed_out_and_can_be_spread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path, "t_s,input_tokens,output_tokens\n" + "0,9,2\n" * 9 + "3,9,2\n" * 9)

    plain = replay(monkeypatch, tmp_path, "--trace", trace, "--ranks=2")
    said = capsys.readouterr().out
    spread = replay(monkeypatch, tmp_path, "--trace", trace, "--ranks=2", "--jitter")

    assert "94% of the requests share the stamp of the one before" in said
    assert "share the stamp" not in capsys.readouterr().out
    assert plain["digest"] != spread["digest"]


def test_conversations_start_one_after_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Their stamps are relative; without gaps they would all begin at once."""
    rows = "".join(f"{conv},{10 * k},50,3\n" for conv in range(20) for k in range(2))
    trace = write(tmp_path, "conv,t_s,input_tokens,output_tokens\n" + rows)

    together = replay(monkeypatch, tmp_path, "--trace", trace, "--conversation-gap-s=0")
    apart = replay(monkeypatch, tmp_path, "--trace", trace, "--conversation-gap-s=30")

    assert together["throughput"]["makespan_s"] < 12
    assert apart["throughput"]["makespan_s"] > 200


@pytest.mark.slow
def test_plot_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"

    assert run(monkeypatch, "--requests=20", "--plot", str(path)) == 0

    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "text", "message"),
    [
        ((), "time,in,out\n0,1,1\n", "unknown header: found columns 'time,in,out'; expected"),
        ((), "t_s,input_tokens,output_tokens\n5,1,1\n4,1,1\n", "stamp '4' is before '5'"),
        ((), "t_s,input_tokens,output_tokens\n0,1,0\n", "nothing to replay (1 rows read, 1 drop"),
        (("--ranks=0",), "t_s,input_tokens,output_tokens\n0,1,1\n", "num_dp_ranks 0 must be"),
        (("--engines=0",), "t_s,input_tokens,output_tokens\n0,1,1\n", "num_engines 0 must be"),
        (("--seed=-1",), "t_s,input_tokens,output_tokens\n0,1,1\n", "seed -1 must not"),
        (("--rate-scale=0",), "t_s,input_tokens,output_tokens\n0,1,1\n", "rate scale 0"),
        (("--rate-scale=nan",), "t_s,input_tokens,output_tokens\n0,1,1\n", "rate scale nan"),
        (("--step-tokens=9",), "t_s,input_tokens,output_tokens\n0,1,1\n", "max_step_tokens 9"),
        (
            ("--json", "no/such/folder/out.json"),
            "t_s,input_tokens,output_tokens\n0,1,1\n",
            "out.json: cannot be written: the folder no/such/folder does not exist",
        ),
    ],
)
def test_what_the_operator_can_mend_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    text: str,
    message: str,
) -> None:
    status = run(monkeypatch, "--trace", write(tmp_path, text), *args)
    captured = capsys.readouterr()

    assert status == 2
    assert message in captured.err
    assert captured.err.startswith("dsched: ")
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_result_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--requests=3", "--json", str(tmp_path)) == 2
    assert "cannot be written: Is a directory" in capsys.readouterr().err


def test_missing_trace_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--trace", str(tmp_path / "nowhere.csv")) == 2
    assert "nowhere.csv: cannot be read: No such file" in capsys.readouterr().err
