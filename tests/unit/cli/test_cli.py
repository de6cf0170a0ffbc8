"""The command line: exit statuses, one-line errors, and flags as the operator types them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsched import __version__
from dsched.cli import main as main_module
from dsched.cli.lazy import CommandRow, GroupRow
from dsched.cli.main import COMMANDS, main
from dsched.config import Config, dsched_environment
from dsched.config_load import parse_config
from dsched.errors import InvariantError
from dsched.testing.ports import refusing_port


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> "Runner":
    for name in dsched_environment():
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    return Runner(monkeypatch, capfd)


class Runner:
    """Runs `dsched …` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capfd = capfd

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """Return exit status, stdout and stderr."""
        self._monkeypatch.setattr(sys, "argv", ["dsched", *args])
        with pytest.raises(SystemExit) as caught:
            main()
        out, err = self._capfd.readouterr()
        return int(caught.value.code or 0), out, err


def config_of(out: str) -> dict[str, dict[str, object]]:
    config = json.loads(out)["config"]
    assert isinstance(config, dict)
    return config


def test_help_lists_the_commands_that_exist(run: Runner) -> None:
    """`--help` exits 0 and names what can be called."""
    status, out, _ = run("--help")

    assert status == 0
    for name in ("check", "workers", "version"):
        assert name in out


def test_version(run: Runner) -> None:
    """One line for scripts."""
    assert run("version") == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("args", [["chekc"], ["check", "--no-such-flag"], ["check", "--seed"]])
def test_usage_mistake_exits_2(run: Runner, args: list[str]) -> None:
    """A misspelt command or flag is an operator's mistake, without a traceback."""
    status, out, err = run(*args)

    assert (status, out) == (2, "")
    assert "Traceback" not in err


def test_check_prints_a_file_that_means_the_same(run: Runner, tmp_path: Path) -> None:
    """stdout is YAML only; it reads back as the checked configuration."""
    path = tmp_path / "c.yaml"
    path.write_text("seed: 3\n")

    status, out, err = run("check", "-c", str(path), "--front-door-port", "9000")

    assert (status, err) == (0, "")
    config = parse_config(out)
    assert (config.seed, config.front_door.port) == (3, 9000)
    assert out.splitlines()[0].split() == ["seed:", "3", "#", f"{path}:1"]


@pytest.mark.parametrize(
    "flag", ["--no-metrics-process", "--metrics-process=false", "--metrics-process=OFF"]
)
def test_flag_turns_off_what_the_file_turned_on(run: Runner, tmp_path: Path, flag: str) -> None:
    """Each way to say no works, and the origin is the flag."""
    path = tmp_path / "c.yaml"
    path.write_text("metrics: {process: true}\n")

    status, out, _ = run("check", "--json", "-c", str(path), flag)

    assert status == 0
    assert config_of(out)["metrics"]["process"] is False
    assert json.loads(out)["origins"] == {"$.metrics.process": "--metrics-process"}


@pytest.mark.parametrize(
    "flag", ["--debug-validate", "--debug-validate=true", "--debug-validate=1"]
)
def test_flag_turns_on(run: Runner, flag: str) -> None:
    """Each way to say yes works."""
    _, out, _ = run("check", "--json", flag)

    assert config_of(out)["debug"]["validate"] is True


def test_short_flags_are_the_same_keys(run: Runner) -> None:
    """What people type most has a second, shorter name."""
    _, out, _ = run(
        "check", "--json", "--port", "1", "--engine", "vllm", "--model", "x", "--replicas", "3"
    )

    config = config_of(out)
    assert config["front_door"]["port"] == 1
    assert config["launch"]["engine"] == "vllm"
    assert (config["launch"]["model"], config["launch"]["replicas"]) == ("x", 3)


def test_a_vllm_group_is_asked_for_by_vllms_own_flags(run: Runner) -> None:
    """As a person knows them; booleans take a value too."""
    args = ("check", "--json", "--engine", "vllm", "--model", "x", "--data-parallel-size", "2")

    _, out, _ = run(*args, "--enable-expert-parallel")
    _, without, _ = run(*args, "--enable-expert-parallel=false")

    assert config_of(out)["launch"]["data_parallel_size"] == 2
    assert config_of(out)["launch"]["expert_parallel"] is True
    assert config_of(without)["launch"]["expert_parallel"] is False


def test_simulated_engines_take_their_ranks_elsewhere(run: Runner) -> None:
    """The message names the key that does it."""
    status, _, err = run("check", "--data-parallel-size", "2")

    assert status == 2
    assert "$.launch.data_parallel_size: 2 is for real engines" in err
    assert "$.sim.num_dp_ranks" in err


def test_variables_are_read(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the real environment; a misspelt one warns on stderr and leaves stdout clean."""
    monkeypatch.setenv("DSCHED_ROUTING_MAX_QUEUED_REQUESTS", "0")
    monkeypatch.setenv("DSCHED_ROUTING_POLICE", "x")

    status, out, err = run("check", "--json")

    assert status == 0
    assert config_of(out)["routing"]["max_queued_requests"] == 0
    assert "DSCHED_ROUTING_POLICE: no such key; did you mean `DSCHED_ROUTING_POLICY`" in err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("front_door: {port: x}", "dsched: $.front_door.port: expected `int`, got `str`"),
        ("- not\n- a mapping", "dsched: $: expected a mapping of keys, got a list"),
        ("a: [", "not YAML"),
        ("pools: {d: {model: {name: m}, engines: []}}", "dsched: $.pools.d.engines: "),
        (
            "routing: {policy: 'no.such:X'}",
            "dsched: $.routing.policy: there is no module 'no' to import",
        ),
    ],
)
def test_wrong_file_is_one_line_and_status_2(
    run: Runner, tmp_path: Path, text: str, line: str
) -> None:
    """Nothing on stdout, one line on stderr, exit status 2."""
    path = tmp_path / "c.yaml"
    path.write_text(text)

    status, out, err = run("check", "-c", str(path))

    assert (status, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


def test_run_refuses_before_it_opens_a_port(run: Runner, tmp_path: Path) -> None:
    """`dsched run` makes the same checks as `dsched check`, first of all; no state is made."""
    path = tmp_path / "c.yaml"
    path.write_text("pools: {d: {model: {name: m}, engines: []}}\n")

    status, out, err = run("run", "-c", str(path), "--state-dir", str(tmp_path / "state"))

    assert (status, out) == (2, "")
    assert err == f"dsched: $.pools.d.engines: pool 'd' has no engine ({path}:1)\n"
    assert not (tmp_path / "state").exists()


def test_file_is_found_by_variable(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`DSCHED_CONFIG` names the file where no `-c` does; empty is as if it were not set."""
    path, other = tmp_path / "c.yaml", tmp_path / "other.yaml"
    path.write_text("seed: 5\n")
    other.write_text("seed: 6\n")
    monkeypatch.setenv("DSCHED_CONFIG", str(path))
    by_variable = run("check", "--json")
    by_flag = run("check", "--json", "-c", str(other))
    monkeypatch.setenv("DSCHED_CONFIG", "")
    by_nothing = run("check", "--json")

    seeds = [config_of(out)["seed"] for _, out, _ in (by_variable, by_flag, by_nothing)]
    assert seeds == [5, 6, 0]
    assert by_variable[2] == ""


def test_schema_describes_the_file(run: Runner) -> None:
    """It is JSON Schema with every section."""
    status, out, _ = run("check", "--schema")

    schema = json.loads(out)
    assert status == 0
    assert set(schema["$defs"]["Config"]["properties"]) == set(Config.__struct_fields__)
    assert schema["$defs"]["FrontDoorConfig"]["additionalProperties"] is False


def test_missing_file_is_named(run: Runner, tmp_path: Path) -> None:
    """Not a usage text of fifty flags."""
    status, _, err = run("check", "-c", str(tmp_path / "no.yaml"))

    assert (status, err) == (2, f"dsched: {tmp_path / 'no.yaml'}: No such file or directory\n")


def test_origins_show_only_what_was_set(run: Runner) -> None:
    """The table has a row for each value that is not a default."""
    status, out, _ = run("check", "--origins", "--seed", "9")

    rows = [line.split() for line in out.strip().splitlines()]
    assert status == 0
    assert rows == [["key", "value", "from"], ["seed", "9", "--seed"]]


def test_workers_without_a_registry_says_so(run: Runner, tmp_path: Path) -> None:
    """A misspelt folder is an error, and no folder is made; nobody listens at the admin port."""
    with refusing_port() as port:
        admin_port = ("--admin-port", str(port))
        status, out, err = run("workers", "--state-dir", str(tmp_path / "no"), *admin_port)

    assert (status, out) == (2, "")
    assert "no such registry" in err
    assert not (tmp_path / "no").exists()


def test_reader_that_stops_reading_is_no_error() -> None:
    """`dsched check | head -1` ends quietly."""
    done = subprocess.run(
        f"{sys.executable} -m dsched.cli.main check | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.startswith("seed: 0")
    assert done.stderr == ""


def test_our_own_mistake_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """An InvariantError is a bug: it is not dressed up as an operator's error."""
    monkeypatch.setattr(main_module, "make_command", _Broken)
    with pytest.raises(InvariantError, match="broken rule"):
        main()


class _Broken:
    def main(self, prog_name: str) -> None:
        raise InvariantError("broken rule")


def test_command_rows_have_help_that_fits() -> None:
    """Every row has one sentence, and no name appears twice in a group."""
    groups = [COMMANDS, *(row.rows for row in COMMANDS if isinstance(row, GroupRow))]
    for rows in groups:
        names = [row.name for row in rows]
        assert len(set(names)) == len(names)
        for row in rows:
            assert row.help.endswith(".")
            assert not isinstance(row, CommandRow) or ":" in row.target
