"""`dsched run` as a person starts it: a process, its URL, the official client, signals."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

SIM_MODEL = "dsched-sim"
pytestmark = pytest.mark.slow


@dataclass
class RunningDsched:
    """A `dsched run` process that has printed its URLs."""

    process: subprocess.Popen[str]
    url: str
    admin_url: str
    curl: str
    state_dir: Path
    log_path: Path

    def log_events(self) -> list[dict[str, object]]:
        """The whole lines written so far; the last may still be half written."""
        text = self.log_path.read_text()
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_for_event(self, timeout_s: float = 10.0, **fields: object) -> dict[str, object]:
        """The first log event with these fields; a line may follow its answer by a moment."""
        until = time.monotonic() + timeout_s
        while True:
            for event in self.log_events():
                if fields.items() <= event.items():
                    return event
            if time.monotonic() > until:
                raise AssertionError(f"no log event with {fields} within {timeout_s} s")
            time.sleep(0.02)


def dsched(*args: str) -> list[str]:
    return [sys.executable, "-m", "dsched.cli.main", *args]


def start(folder: Path, *args: str) -> RunningDsched:
    """Start on free ports; return once the URLs are printed."""
    log_path = folder / "stderr.log"
    command = dsched(
        *("run", "--front-door-port", "0", "--admin-port", "0"),
        *("--state-dir", str(folder / "state"), "--logging-format", "json", *args),
    )
    with log_path.open("w") as log_file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log_file, text=True)
    assert process.stdout is not None
    text = ""
    while "curl" not in text:
        line = process.stdout.readline()
        assert line, f"dsched run ended early: {log_path.read_text()}"
        text += line
    urls = re.findall(r"http://127\.0\.0\.1:\d+", text)
    curl = next(line.strip() for line in text.splitlines() if line.strip().startswith("curl"))
    return RunningDsched(
        process=process,
        url=urls[0],
        admin_url=urls[1],
        curl=curl,
        state_dir=folder / "state",
        log_path=log_path,
    )


def stop(running: RunningDsched) -> int:
    running.process.send_signal(signal.SIGTERM)
    return wait(running)


def wait(running: RunningDsched) -> int:
    try:
        status = running.process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        running.process.kill()
        raise
    finally:
        assert running.process.stdout is not None
        running.process.stdout.close()
    return status


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDsched]:
    running = start(tmp_path_factory.mktemp("run"))
    yield running
    assert stop(running) == 0


def client(running: RunningDsched) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_the_printed_curl_line_streams_tokens(running: RunningDsched) -> None:
    """What a person pastes first works as printed."""
    answer = subprocess.run(
        running.curl + " --silent --max-time 20",
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    events = [line for line in answer.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    text = "".join(
        choice["delta"].get("content") or ""
        for event in events[:-1]
        for choice in json.loads(event.removeprefix("data: "))["choices"]
    )
    assert len(text.split()) > 10


@pytest.mark.parametrize("is_stream", [True, False])
def test_the_official_client_gets_the_same_chat_twice(
    running: RunningDsched, *, is_stream: bool
) -> None:
    """Greedy answers repeat, streamed or not, with usage."""
    with client(running) as api:

        def ask() -> str:
            request = {
                "model": SIM_MODEL,
                "messages": [{"role": "user", "content": "Count to three."}],
                "max_tokens": 12,
                "temperature": 0,
            }
            if not is_stream:
                answer = api.chat.completions.create(**request)
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 12
                return answer.choices[0].message.content or ""
            chunks = api.chat.completions.create(**request, stream=True)
            return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)

        first, second = ask(), ask()

    assert first == second != ""


def test_models_health_and_metrics_answer(running: RunningDsched) -> None:
    """What orchestrators and dashboards ask."""
    import urllib.request

    with client(running) as api:
        assert [model.id for model in api.models.list()] == [SIM_MODEL]
    for path in ("/health", "/live", "/ready", "/metrics"):
        with urllib.request.urlopen(running.url + path, timeout=10) as answer:
            assert answer.status == 200


def test_workers_lists_every_rank(running: RunningDsched) -> None:
    """`dsched workers` reads the registry of the running process."""
    answer = subprocess.run(
        dsched("workers", "--json", "--state-dir", str(running.state_dir)),
        capture_output=True,
        text=True,
        check=True,
    )
    view = json.loads(answer.stdout)
    ranks = {
        (e["engine_id"], r["dp_rank"]): r["state"] for e in view["engines"] for r in e["ranks"]
    }
    assert ranks == dict.fromkeys([("sim-0", 0), ("sim-0", 1), ("sim-1", 0), ("sim-1", 1)], "up")


def test_the_log_names_requests_and_holds_no_prompt(running: RunningDsched) -> None:
    """One line a request with its id; never what the client wrote."""
    with client(running) as api:
        api.chat.completions.create(
            model=SIM_MODEL,
            messages=[{"role": "user", "content": "xylophone secret"}],
            max_tokens=2,
            extra_headers={"x-request-id": "my-request-7"},
        )

    finished = running.wait_for_event(event="request.finished", request_id="my-request-7")
    assert finished["output_tokens"] == 2
    assert "xylophone" not in running.log_path.read_text()


def test_a_port_in_use_is_one_line_and_status_2(running: RunningDsched, tmp_path: Path) -> None:
    """The second dsched says which address and why; no traceback."""
    port = running.url.rsplit(":", 1)[1]
    answer = subprocess.run(
        dsched("run", "--front-door-port", port, "--admin-port", "0", "--state-dir", str(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    last_line = answer.stderr.strip().splitlines()[-1]
    assert answer.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in last_line
    assert "Traceback" not in answer.stderr


def test_sigterm_lets_a_stream_end(tmp_path: Path) -> None:
    """A client in the middle of its answer gets all of it before the process leaves."""
    running = start(tmp_path)
    with client(running) as api:
        chunks = api.completions.create(
            model=SIM_MODEL, prompt="go", max_tokens=60, temperature=0, stream=True
        )
        first = next(chunks)
        running.process.send_signal(signal.SIGTERM)
        rest = list(chunks)

    assert first.choices[0].finish_reason is None
    assert rest[-1].choices[0].finish_reason == "length"
    assert wait(running) == 0


def test_sigkill_leaves_a_state_that_a_new_process_starts_from(tmp_path: Path) -> None:
    """Nothing has to be cleaned up by hand."""
    first = start(tmp_path)
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(timeout=10)
    assert first.process.stdout is not None
    first.process.stdout.close()

    second = start(tmp_path)
    with client(second) as api:
        answer = api.completions.create(model=SIM_MODEL, prompt="go", max_tokens=2)

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
    assert stop(second) == 0
