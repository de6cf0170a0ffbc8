"""`dsched policy`: the package it writes works as written, and what a trial tells."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.cli.main import main
from dsched.cli.policy_package import (
    MAX_NAME_LENGTH,
    PolicyKind,
    class_name,
    module_name,
    package_files,
)
from dsched.config import inherited_environment
from dsched.config_load import parse_config
from dsched.errors import ConfigError

BIN = Path(sys.executable).parent
TRIAL = ("--requests", "80", "--engines", "2", "--ranks", "2", "--budget-ms", "5000")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, as a terminal has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", [*sys.path])
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0].startswith("try_"):
            del sys.modules[name]


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    """`dsched policy ...` in this process; the exit status."""
    monkeypatch.setattr(sys, "argv", ["dsched", "policy", *args])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


@pytest.mark.parametrize("length", [20, MAX_NAME_LENGTH])
@pytest.mark.parametrize("kind", PolicyKind)
def test_a_new_package_is_clean_and_its_configuration_is_one(
    kind: PolicyKind, length: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formatted and linted by its own rules, whatever its name; the read-me's YAML is valid."""
    name = f"try-{kind.value}-x".ljust(length, "x")
    assert run(monkeypatch, "new", name, "--kind", kind.value) == 0

    for command in (["check"], ["format", "--check"]):
        answer = subprocess.run(
            [BIN / "ruff", *command, "--no-cache", "."],
            cwd=here / name,
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 0, answer.stdout
    parse_config((here / name / "README.md").read_text().split("```yaml\n")[1].split("```")[0])


def pytest_in(folder: Path, *args: str, path: str = "") -> None:
    """Run pytest as a person does; it must pass something."""
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *args],
        cwd=folder,
        env=inherited_environment() | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout
    assert " passed" in answer.stdout


@pytest.mark.slow
def test_new_packages_pass_their_own_tests(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in its own folder, as its author runs it; the other kinds together, to save time."""
    first, *others = [f"try-{kind.value}" for kind in PolicyKind]
    for name in (first, *others):
        run(monkeypatch, "new", name, "--kind", name.removeprefix("try-"))

    pytest_in(here / first)
    path = os.pathsep.join(str(here / name) for name in others)
    pytest_in(here, *others, path=path)


@pytest.mark.slow
def test_an_installed_package_is_found_by_its_entry_point(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the metadata that an editable installation writes, and named by its name alone."""
    run(monkeypatch, "new", "try-installed")
    subprocess.run(
        [sys.executable, "-c", "import setuptools; setuptools.setup()", "egg_info"],
        cwd=here / "try-installed",
        check=True,
        capture_output=True,
    )
    monkeypatch.syspath_prepend(here / "try-installed")
    capfd.readouterr()

    assert run(monkeypatch, "test", "try-installed", *TRIAL, "--json", "-") == 0

    out, _ = capfd.readouterr()
    assert json.loads(out)["results"][0]["policy"] == "try-installed"


@pytest.mark.parametrize(
    "name",
    ["", "-x", "9lives", "a b", "a/b", "..", "json", "class", "dsched", "numpy", "a--b", "x" * 41],
)
def test_a_name_that_cannot_be_a_package_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        package_files(name, PolicyKind.ROUTING)


def test_names_are_translated() -> None:
    assert (module_name("My-policy.two"), class_name("My-policy.two")) == (
        "my_policy_two",
        "MyPolicyTwo",
    )


def test_nothing_is_overwritten(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "try-there").mkdir()

    assert run(monkeypatch, "new", "try-there") == 2
    assert "exists already; nothing was written" in capfd.readouterr().err
    assert list((here / "try-there").iterdir()) == []


def write(here: Path, module: str, body: str, *, method: str = "pick") -> str:
    """A policy module in the working folder; its reference."""
    arguments = "view" if method == "admit" else "candidates"
    (here / f"{module}.py").write_text(
        f"class Policy:\n    name = 'mine'\n    api_version = 1\n\n"
        f"    def {method}(self, request, {arguments}):\n        {body}\n"
    )
    return f"{module}:Policy"


@pytest.mark.slow
def test_a_trial_compares_with_every_rule_of_ours(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The policy that does what `least_requests` does gets its figures; a table and JSON."""
    reference = write(
        here,
        "try_idlest",
        "return min(range(len(candidates)), key=lambda at: candidates[at].num_running)",
    )

    assert run(monkeypatch, "test", reference, *TRIAL, "--json", "result.json") == 0

    table = capfd.readouterr().out
    result = json.loads((here / "result.json").read_text())
    names = [row["policy"] for row in result["results"]]
    assert names == ["mine", "two_term", "least_requests", "least_kv", "round_robin"]
    assert all(name in table for name in names)
    assert "time per decision (this machine)" in table
    assert result["simulated"] is True
    decisions = result["decisions"]
    assert (decisions["num_calls"], decisions["num_defaults"], decisions["num_failures"]) == (
        80,
        0,
        {},
    )
    assert 0 < decisions["time_us"]["p50"] <= decisions["time_us"]["max"]
    for row in result["results"]:
        assert 0 < row["decode_balance"] <= 1
        assert row["ttft"]["num_samples"] == 80


@pytest.mark.slow
def test_fallbacks_of_a_bad_policy_are_told(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is served by the default all the same, and gets its figures."""
    reference = write(here, "try_bad", "return len(candidates)")

    assert run(monkeypatch, "test", reference, *TRIAL, "--json", "-") == 0

    result = json.loads(capfd.readouterr().out)
    failures = result["decisions"]["num_failures"]
    assert failures["wrong_answer"] >= 5
    own, two_term, *_ = result["results"]
    assert own["ttft"] == two_term["ttft"]
    assert own["num_errors"] == {}


@pytest.mark.slow
def test_chunk_weights_and_triggers_are_tried_where_they_are_asked(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No request replay; the default's row stands beside. Never moving experts moves none."""
    (here / "try_inside.py").write_text(
        "class Policy:\n    name = 'inside'\n    api_version = 1\n"
        "    def weights(self, view): return [1, 1, 1, 20]\n"
        "    def should_rebalance(self, view): return False\n"
    )

    args = ("try_inside:Policy", "--json", "result.json", "--budget-ms", "5000")
    assert run(monkeypatch, "test", *args) == 0

    table = capfd.readouterr().out
    result = json.loads((here / "result.json").read_text())
    own, default = result["chunks"]
    never, always = result["placements"]
    assert result["results"] == []
    assert (own["name"], default["name"], never["name"]) == ("inside", "4, 3, 2, 1", "inside")
    assert own["short_ttft_p99_ms"] > default["short_ttft_p99_ms"]
    assert never["moves_per_layer"] == 0 < always["moves_per_layer"]
    assert never["next_balance"] < always["next_balance"]
    assert "goodput" in table
    assert "moves per layer and window" in table


def test_a_trace_file_and_arguments(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An admission policy that refuses every third request of a file."""
    rows = "".join(f"{index * 0.1:.1f},50,5\n" for index in range(30))
    (here / "t.csv").write_text("t_s,input_tokens,output_tokens\n" + rows)
    (here / "try_admit.py").write_text(
        "class Policy:\n    name = 'third'\n    api_version = 1\n    count = 0\n"
        "    def __init__(self, *, every): self.every = every\n"
        "    def admit(self, request, view):\n        self.count += 1\n"
        "        return 'refuse' if self.count % self.every == 0 else 'accept'\n"
    )
    args = ("--trace", "t.csv", "--args", "{every: 3}", "--json", "-", "--budget-ms", "5000")

    assert run(monkeypatch, "test", "try_admit:Policy", *args) == 0

    result = json.loads(capfd.readouterr().out)
    assert result["trace"] == "t.csv"
    assert result["results"][0]["num_errors"] == {"not_admitted": 10}
    assert result["results"][1]["num_errors"] == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("no_such:Policy",), "policy: there is no module 'no_such' to import"),
        (("try_ok:Policy", "--args", "[1]"), "--args: '[1]' is no mapping"),
        (("try_ok:Policy", "--args", "{x: 1}"), "--args: try_ok:Policy: "),
        (("try_ok:Policy", "--rate", "-1"), "rate_per_s -1.0 must be positive"),
        (("try_ok:Policy", "--trace", "gone.csv"), "gone.csv"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    args: tuple[str, ...],
    message: str,
) -> None:
    write(here, "try_ok", "return 0")

    assert run(monkeypatch, "test", *args) == 2

    err = capfd.readouterr().err
    assert message in err
    assert err.count("\n") == 1
