"""What an agent inside an engine reads, and what importing dsched costs."""

import subprocess
import sys

import pytest

from dsched.config import agent_environment, agent_settings_from_environment, dsched_environment
from dsched.errors import ConfigError

HEAVY = ("numpy", "numba", "torch", "vllm", "sglang", "zmq", "typer", "rich", "aiohttp", "yaml")


def imported_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after `statement`."""
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_import_of_dsched_brings_nothing_heavy() -> None:
    """`import dsched` is the standard library and dsched alone."""
    assert imported_by("import dsched") & {*HEAVY, "msgspec", "structlog"} == set()


def test_import_of_config_brings_nothing_heavy() -> None:
    """An agent inside an engine can afford the configuration module: no numpy, YAML or CLI."""
    assert imported_by("import dsched.config") & set(HEAVY) == set()


def test_vllms_scheduler_parts_do_not_load_numba() -> None:
    """With numba loaded, vLLM's CPU worker cannot be made in the same process."""
    parts = "import dsched.drivers.vllm.chunking, dsched.drivers.vllm.verify"

    assert "numba" not in imported_by(parts)


def test_command_line_does_not_import_its_subcommands() -> None:
    """`dsched --help` needs no numerics, no engine and no server."""
    modules = imported_by("from dsched.cli.main import make_command; make_command()")

    assert "typer" in modules
    assert modules & {"numpy", "numba", "torch", "vllm", "sglang", "zmq", "aiohttp"} == set()


def test_agent_reads_what_dsched_gives_its_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two ends of the variables agree."""
    variables = agent_environment(endpoint="tcp://127.0.0.1:5", engine_id="e0")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    settings = agent_settings_from_environment()

    assert (settings.endpoint, settings.engine_id) == ("tcp://127.0.0.1:5", "e0")
    assert settings.max_pending_messages == 1_024
    assert set(variables) <= set(dsched_environment())


def test_agent_without_variables_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty and missing are the same."""
    monkeypatch.setenv("DSCHED_ENDPOINT", "")
    monkeypatch.delenv("DSCHED_ENGINE_ID", raising=False)

    settings = agent_settings_from_environment()

    assert (settings.endpoint, settings.engine_id) == (None, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("DSCHED_ENDPOINT", "127.0.0.1:5"), ("DSCHED_AGENT_QUEUE", "0"), ("DSCHED_AGENT_QUEUE", "x")],
)
def test_agent_variable_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """The variable is named."""
    monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError, match=f"^{name}: '{value}'"):
        agent_settings_from_environment()
