"""docs/tutorial.md as a reader follows it: every command in its place, and what it must show."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsched.config import inherited_environment
from dsched.drivers.local import free_port

pytestmark = pytest.mark.slow

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(
    r"^```(sh|python)\n(.*?)^```\n(?:<!-- shows: (.*?) -->)?", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """A piece of the page that a reader types."""

    kind: str
    text: str
    shows: str
    """What the output must contain; empty without a word of it."""


def blocks() -> list[Block]:
    found = BLOCK.findall(TUTORIAL.read_text(encoding="utf-8"))
    return [Block(kind=kind, text=text, shows=shows) for kind, text, shows in found]


class Reader:
    """Two terminals in one folder; ports that are free here."""

    def __init__(self, folder: Path) -> None:
        self.folder = self.second = folder
        self.ports = {"8000": free_port(), "8001": free_port(), "8002": free_port()}
        self.process: subprocess.Popen[str] | None = None
        self.printed = ""
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = inherited_environment() | {
            "PATH": path,
            "COLUMNS": "120",
            "DSCHED_FRONT_DOOR_PORT": str(self.ports["8000"]),
            "DSCHED_ADMIN_PORT": str(self.ports["8001"]),
            "DSCHED_AGENT_ENDPOINT": f"tcp://127.0.0.1:{self.ports['8002']}",
            # Both starts have the same journal and registry, wherever they are called.
            "DSCHED_STATE_DIR": str(folder / "state"),
        }

    def type(self, block: Block) -> None:
        """Do what a block says."""
        if block.kind == "python":
            name = re.match(r"# (\S+)\n", block.text)
            assert name is not None, f"a file needs its name: {block.text[:40]}"
            (self.folder / name[1]).write_text(block.text.partition("\n")[2])
        elif "dsched run" in block.text:
            self._start(block.text)
        else:
            assert block.shows in self._run(block.text), block.text

    def _run(self, text: str) -> str:
        """One block in the second terminal; its output."""
        for port, free in self.ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{free}")
        if self.process is not None:
            text = text.replace("PID", str(self.process.pid))
        answer = subprocess.run(
            ["bash", "-euc", f"{text}\npwd > {self.folder}/pwd"],
            cwd=self.second,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert answer.returncode == 0, f"{text}\n{answer.stdout}\n{answer.stderr}"
        self.second = Path((self.folder / "pwd").read_text().strip())
        if "kill -HUP" in text:
            self._wait_for("policies.loaded")
        return answer.stdout

    def _start(self, text: str) -> None:
        """`dsched run` in the first terminal; the one before ends as with Ctrl-C."""
        self.stop()
        *before, command = text.strip().splitlines()
        log = (self.folder / "log").open("w")
        self.process = subprocess.Popen(
            ["bash", "-euc", "\n".join([*before, f"exec {command}"])],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        log.close()
        assert self.process.stdout is not None
        self.printed = ""
        while "curl" not in self.printed:
            line = self.process.stdout.readline()
            assert line, (self.folder / "log").read_text()
            self.printed += line

    def _wait_for(self, event: str) -> None:
        for _ in range(1_000):
            if event in (self.folder / "log").read_text():
                return
            threading.Event().wait(0.02)
        raise AssertionError(f"no {event}: {(self.folder / 'log').read_text()}")

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stdout is not None
            self.printed += process.stdout.read()
            process.stdout.close()


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    reader.stop()


def test_every_command_of_the_tutorial_works(reader: Reader) -> None:
    """From the first start to the changed policy, in the order of the page."""
    for block in blocks():
        reader.type(block)
    process = reader.process
    assert process is not None
    pid = process.pid
    reader.stop()

    assert f"policy gold-lane; to read it again: kill -HUP {pid}" in reader.printed


def test_the_page_is_found_to_have_commands() -> None:
    """A change of its form must not make the test above empty."""
    assert len(blocks()) >= 15
    assert sum(bool(block.shows) for block in blocks()) >= 11
