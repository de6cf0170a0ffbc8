"""The launcher, with a stand-in for the engine's Python: nothing survives `stop`, or us."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dsched.drivers import local
from dsched.drivers.local import LocalEngine, free_port, has_package, is_port_free
from dsched.drivers.vllm.launcher import (
    engine_environment,
    find_vllm_python,
    launch_vllm_engine,
    scheduler_args,
)
from dsched.errors import ConfigError, DriverError
from dsched.ids import EngineId
from dsched.testing.processes import make_model_folder, make_python, wait_for_text

ENGINE = EngineId("e0")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path)


@pytest.fixture
async def launch(model: Path, tmp_path: Path) -> AsyncIterator[Callable]:
    """Launches stand-ins that end with the test."""
    engines: list[LocalEngine] = []

    async def start(script: str, **changes: object) -> LocalEngine:
        fields: dict = {
            "engine_id": ENGINE,
            "agent_endpoint": "tcp://127.0.0.1:9",
            "state_dir": tmp_path / "state",
            "served_model_name": "tiny",
            "python": make_python(tmp_path, script),
        }
        engine = await launch_vllm_engine(model, **(fields | changes))
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.stop(grace_s=0)


async def test_command_names_model_port_and_scheduler(launch: Callable, model: Path) -> None:
    """What the engine is told, in the order that lets `extra_args` win."""
    engine = await launch('echo "$@"; echo end', extra_args=("--max-model-len", "64"))

    words = (await wait_for_text(engine.log_path, "end")).split()

    assert words[:2] == ["-m", "dsched.drivers.serve_child"]
    assert words[2:4] == [str(os.getpid()), "vllm.entrypoints.cli.main"]
    assert words[4:6] == ["serve", str(model)]
    assert words[words.index("--port") + 1] == str(engine.port)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--scheduler-cls") + 1] == "dsched.drivers.vllm.DschedScheduler"
    assert words[-3:-1] == ["--max-model-len", "64"]
    assert engine.url == f"http://127.0.0.1:{engine.port}"


async def test_engine_knows_where_to_report(launch: Callable) -> None:
    engine = await launch('echo "$DSCHED_ENDPOINT $DSCHED_ENGINE_ID $OMP_NUM_THREADS end"')

    text = await wait_for_text(engine.log_path, "end")

    assert text.split()[:2] == ["tcp://127.0.0.1:9", "e0"]


async def test_stop_ends_the_whole_group(launch: Callable) -> None:
    """Children of the server end too, also those that ignore SIGTERM."""
    engine = await launch(
        "(trap '' TERM; echo child $(exec sh -c 'echo $PPID'); while :; do sleep 0.05; done) &\n"
        "echo ready; wait"
    )
    text = await wait_for_text(engine.log_path, "child")
    child = int(text.split("child")[1].split()[0])

    await engine.stop(grace_s=5)

    assert not engine.is_alive
    async with asyncio.timeout(5):
        while is_running(child):
            await asyncio.sleep(0.01)


async def test_server_that_ignores_sigterm_is_killed(launch: Callable) -> None:
    engine = await launch("trap '' TERM; echo ready; while :; do sleep 0.05; done")
    await wait_for_text(engine.log_path, "ready")

    await engine.stop(grace_s=0.1)
    await engine.stop()

    assert not engine.is_alive


async def test_end_is_told_with_the_end_of_the_log(launch: Callable) -> None:
    """And the log of the start before is still there."""
    engine = await launch("echo what went wrong; exit 3")
    async with asyncio.timeout(10):
        status = await engine.wait()
    tail = engine.log_tail()
    again = await launch("while :; do sleep 0.05; done")
    await again.stop()
    previous = again.log_path.with_name("e0.previous.log").read_text()

    assert (status, engine.exit_status) == (3, 3)
    assert tail == previous == "what went wrong\n"
    assert again.exit_status == -signal.SIGTERM


async def test_engine_is_gone_with_its_last_child(launch: Callable) -> None:
    """A server can end before the processes that it started."""
    engine = await launch(
        "(trap '' TERM; echo ready; while :; do sleep 0.05; done) &\n"
        'until grep -q ready "$(dirname "$0")/state/engines/e0.log"; do sleep 0.01; done'
    )
    async with asyncio.timeout(10):
        await engine.wait()

    is_gone_before = engine.is_gone
    await engine.stop()

    assert not engine.is_alive
    assert (is_gone_before, engine.is_gone) == (False, True)


async def test_model_without_a_config_is_the_operators(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        await launch_vllm_engine(
            tmp_path,
            engine_id=ENGINE,
            agent_endpoint=None,
            state_dir=tmp_path,
            served_model_name="m",
            python=sys.executable,
        )


async def test_python_that_cannot_run_is_told(model: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("no program")

    with pytest.raises(DriverError, match="cannot be started"):
        await launch_vllm_engine(
            model,
            engine_id=ENGINE,
            agent_endpoint=None,
            state_dir=tmp_path,
            served_model_name="m",
            python=python,
        )


async def test_engine_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """No signal handler of ours runs then; the kernel must do it."""
    code = (
        "import subprocess, sys, os\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import os, sys, time; from dsched.drivers.serve_child import end_with_parent; "
        "end_with_parent(int(sys.argv[1])); print(os.getpid(), flush=True); time.sleep(60)', "
        "str(os.getpid())])\n"
        "child.wait()\n"
    )
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(await parent.stdout.readline())
    assert is_running(child)

    parent.kill()
    await parent.wait()

    async with asyncio.timeout(10):
        while is_running(child):
            await asyncio.sleep(0.01)


def test_stated_python_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        find_vllm_python(tmp_path / "nowhere")


def test_python_with_vllm_is_found_beside_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First our own interpreter, then the Makefile's environment; else a way out is named."""
    beside = tmp_path / ".venv-vllm"
    monkeypatch.setattr(local, "__file__", str(tmp_path / "a" / "b" / "x.py"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "own" / "bin" / "python"))
    with pytest.raises(ConfigError, match=r"make \.venv-vllm/\.ready"):
        find_vllm_python()

    package = beside / "lib" / "python3.11" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (beside / "bin").mkdir()
    (beside / "bin" / "python").touch()

    assert has_package(beside / "bin" / "python", "vllm")
    assert find_vllm_python() == beside / "bin" / "python"


def test_cpu_defaults_yield_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread and one GiB of KV cache on a CPU, unless the operator says otherwise."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("DSCHED_ENDPOINT", "tcp://elsewhere:1")

    silent = engine_environment(None, engine_id=ENGINE, device="cpu")
    gpu = engine_environment("tcp://127.0.0.1:9", engine_id=ENGINE, device="cuda")

    assert silent["OMP_NUM_THREADS"] == "7"
    assert silent["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "DSCHED_ENDPOINT" not in silent
    assert "VLLM_CPU_KVCACHE_SPACE" not in gpu
    assert gpu["DSCHED_ENDPOINT"] == "tcp://127.0.0.1:9"


def test_scheduler_class_fits_the_device() -> None:
    """vLLM schedules asynchronously on GPUs and never on CPUs."""
    assert scheduler_args("cpu")[1].endswith(".DschedScheduler")
    assert scheduler_args("cuda")[1].endswith(".DschedAsyncScheduler")


def test_free_ports_differ() -> None:
    assert 0 < free_port() < 65_536


def test_free_ports_are_none_that_an_outgoing_connection_takes() -> None:
    """The kernel gives those from its own range, while a server that was told its port loads."""
    low, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(50)]

    assert len(set(ports)) == 50
    assert max(ports) < low


def test_a_taken_port_is_passed_over() -> None:
    with socket.socket() as listener:
        taken = free_port() + 1
        listener.bind(("127.0.0.1", taken))

        assert free_port() != taken


def test_a_port_is_free_unless_somebody_listens() -> None:
    """Connections that linger after a server has gone do not hinder the next one."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = free_port()
        listener.bind(("127.0.0.1", port))
        listener.listen()
        while_listening = is_port_free(port)
        with socket.create_connection(("127.0.0.1", port)):
            server, _ = listener.accept()
            server.close()  # the side that closes first lingers
    assert not while_listening
    assert is_port_free(port)


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
