"""SIGHUP on a live `dsched run`: other policies from the next tick on, and no stream notices."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from test_run_process import SIM_MODEL, RunningDsched, client, dsched, start, stop

pytestmark = pytest.mark.slow

POLICY = """
from fixed_rank.ranks import RANK

class Fixed:
    name = "fixed"
    api_version = 1

    def __init__(self, *, offset=0):
        self.offset = offset

    def pick(self, request, candidates):
        return RANK + self.offset
"""
CONFIG = """
routing:
  policy: fixed_rank:Fixed
  policy_args: {{offset: {offset}}}
  policy_budget_ms: 5000
  max_attempts: {max_attempts}
launch: {{replicas: 4}}
sim: {{num_dp_ranks: 1}}
"""


class Deployment:
    """A policy package, a configuration that names it, and the process that runs them."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "fixed_rank"
        self.package.mkdir()
        self.config = folder / "cluster.yaml"
        (self.package / "__init__.py").write_text(POLICY)
        self.write(rank=0)
        self.running = start(folder, "-c", str(self.config))

    def write(self, *, rank: int, offset: int = 0, max_attempts: int = 3) -> None:
        (self.package / "ranks.py").write_text(f"RANK = {rank}\n")
        text = CONFIG.format(offset=offset, max_attempts=max_attempts)
        self.config.write_text(text)

    def reload(self, event: str) -> dict[str, object]:
        """SIGHUP, and what the log says to it."""
        before = len(self._events(event))
        self.running.process.send_signal(signal.SIGHUP)
        self.running.wait_for_event(event=event)
        while len(self._events(event)) == before:
            threading.Event().wait(0.02)
        return self._events(event)[-1]

    def _events(self, event: str) -> list[dict[str, object]]:
        return [each for each in self.running.log_events() if each["event"] == event]

    def metric(self, name: str) -> dict[str, float]:
        """The values of a metric, by its labels."""
        with urllib.request.urlopen(self.running.url + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
        rows = re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in rows}

    def rank_of_one_more(self) -> int:
        """Send a request; the number of the engine that got it."""
        name = "dsched_rank_dispatched_total"
        before = self.metric(name)
        with client(self.running) as api:
            api.completions.create(model=SIM_MODEL, prompt="go", max_tokens=2)
        (changed,) = [
            labels for labels, value in self.metric(name).items() if value != before[labels]
        ]
        return int(changed.partition("sim-")[2][0])


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    deployment = Deployment(tmp_path)
    yield deployment
    assert stop(deployment.running) == 0


def stream_tokens(running: RunningDsched, number: int, answers: dict[int, int]) -> None:
    with client(running) as api:
        chunks = api.completions.create(
            model=SIM_MODEL,
            prompt=f"go {number}",
            max_tokens=120,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        last = list(chunks)[-1]
    assert isinstance(last.usage, openai.types.CompletionUsage)
    answers[number] = last.usage.completion_tokens


def test_policies_are_read_again_while_streams_run(deployment: Deployment) -> None:
    """An edited module of the package counts, arguments count, and every stream gets its tokens."""
    assert deployment.rank_of_one_more() == 0
    answers: dict[int, int] = {}
    threads = [
        threading.Thread(target=stream_tokens, args=(deployment.running, number, answers))
        for number in range(16)
    ]
    for thread in threads:
        thread.start()

    deployment.write(rank=2)
    event = deployment.reload("policies.loaded")
    for thread in threads:
        thread.join(60)

    assert event["policies"] == ["fixed"]
    assert answers == dict.fromkeys(range(16), 120)
    assert deployment.rank_of_one_more() == 2

    deployment.write(rank=2, offset=1, max_attempts=5)
    deployment.reload("policies.loaded")
    assert deployment.rank_of_one_more() == 3
    ignored = deployment.running.wait_for_event(event="config.ignored")
    assert ignored["keys"] == ["routing.max_attempts"]
    assert deployment.metric("dsched_policy_reloads_total") == {
        'outcome="loaded"': 2.0,
        'outcome="kept"': 0.0,
    }
    assert deployment.metric("dsched_policy_calls_total") == {'policy="fixed"': 19.0}


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("ranks.py", "RANK = (\n", "syntax error at"),
        ("ranks.py", "import not_there\n", "imports 'not_there', which is missing"),
        ("__init__.py", POLICY.replace("1\n", "2\n", 1), "api_version is 2"),
        ("__init__.py", POLICY.replace("request, ", ""), "does not take (request, candidates)"),
    ],
    ids=["syntax", "import", "version", "signature"],
)
def test_policies_that_cannot_be_used_leave_the_old_ones(
    deployment: Deployment, file: str, text: str, reason: str
) -> None:
    """A log event and a metric say so; requests go where they went."""
    assert deployment.rank_of_one_more() == 0
    deployment.write(rank=1)
    (deployment.package / file).write_text(text)

    event = deployment.reload("policies.kept")

    assert reason in str(event["reason"])
    assert "\n" not in str(event["reason"])
    assert deployment.rank_of_one_more() == 0
    assert deployment.metric("dsched_policy_reloads_total")['outcome="kept"'] == 1.0


IN_ITS_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # as a shell's
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_closed_terminal_ends_it(tmp_path: Path) -> None:
    """SIGHUP for that reason is no reload; what it writes then does not fail."""
    ours, theirs = pty.openpty()
    command = dsched(
        *("run", "--front-door-port", "0", "--admin-port", "0"),
        *("--state-dir", str(tmp_path / "state")),
    )
    process = subprocess.Popen(
        [sys.executable, "-c", IN_ITS_TERMINAL, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    text = b""
    while b"curl" not in text:
        text += os.read(ours, 4_096)

    os.close(ours)

    assert process.wait(30) == 0
