"""`dsched run` ends when it is told to, whatever its engines do."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.testing.engines import is_running

pytestmark = pytest.mark.slow

LIMIT_S = 40
"""10 s for engines to end by themselves, and time for a busy machine."""
STUBBORN = """#!/bin/sh
case "$*" in *tiny_model*) exit 1;; esac
trap '' TERM INT
echo $$ >> {pids}
while :; do sleep 0.2; done
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model; no engine ever loads it."""
    from dsched.sim.tokenizer import CHAT_TEMPLATE, build_sim_tokenizer

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    build_sim_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@contextlib.contextmanager
def run_dsched(folder: Path, *args: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A `dsched run` that is gone at the end, whatever the test does."""
    command = [
        *(sys.executable, "-m", "dsched.cli.main", "run"),
        *("--front-door-port", "0", "--admin-port", "0", "--agent-endpoint", "tcp://127.0.0.1:*"),
        *("--state-dir", str(folder / "state"), "--logging-format", "json", *args),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(folder: Path, text: str) -> None:
    deadline_s = time.monotonic() + 180
    while text not in (folder / "log").read_text():
        assert time.monotonic() < deadline_s, (folder / "log").read_text()
        time.sleep(0.05)


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never says a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_engines_that_ignore_sigterm_are_ended_together(tmp_path: Path, model: Path) -> None:
    """Three of them take as long as one."""
    pids = tmp_path / "pids"
    python = tmp_path / "python"
    python.write_text(STUBBORN.format(pids=pids))
    python.chmod(0o755)
    launch = ("--launch-python", str(python), "--replicas", "3")
    with run_dsched(tmp_path, "--engine", "vllm", "--model", str(model), *launch) as process:
        wait_for(tmp_path, "service.started")
        while not pids.exists() or len(pids.read_text().split()) < 3:
            time.sleep(0.05)

        process.send_signal(signal.SIGINT)

        assert process.wait(LIMIT_S) == 0
    assert not any(map(is_running, map(int, pids.read_text().split())))


def test_an_engine_that_says_nothing_does_not_keep_dsched(tmp_path: Path, model: Path) -> None:
    """Neither its driver nor its rank watch waits for it at the end."""
    with silent_server() as url:
        config = tmp_path / "cluster.yaml"
        config.write_text(
            "pools:\n  p:\n"
            f"    model: {{name: m, tokenizer: {model}}}\n"
            f"    engines: [{{url: '{url}'}}]\n"
        )
        with run_dsched(tmp_path, "-c", str(config)) as process:
            wait_for(tmp_path, "service.started")

            process.send_signal(signal.SIGTERM)

            assert process.wait(LIMIT_S) == 0


def test_a_signal_before_it_is_up_ends_it(tmp_path: Path, model: Path) -> None:
    """Here it waits for an etcd that does not answer."""
    with silent_server() as url:
        registry = url.replace("http", "etcd")
        with run_dsched(tmp_path, "--registry-url", registry) as process:
            while not (tmp_path / "state").exists():
                time.sleep(0.05)

            process.send_signal(signal.SIGINT)

            assert process.wait(LIMIT_S) == 0
    assert "service.started" not in (tmp_path / "log").read_text()
