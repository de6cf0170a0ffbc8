"""A `dsched run` process with real engines under it, for tests; and what engines answer by
themselves.

It ends as an operator ends it: SIGINT, and it must be gone in `STOP_TIMEOUT_S` with every engine it
started, or the test fails.

**Sure answers.** Greedy answers depend on rounding only where two tokens are almost equally likely,
and rounding depends on the batch. So answers are compared for prompts whose best token leads at
every position by `MIN_LEAD`, which the engine itself tells; with float32, rounding is far below it.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml

from dsched.clock import SystemClock
from dsched.config import inherited_environment
from dsched.drivers.local import free_port
from dsched.testing.engines import MODEL_NAME, TinyEngines, is_running

READY_TIMEOUT_S: Final = 400.0
STOP_TIMEOUT_S: Final = 60.0
MIN_LEAD: Final = 1e-3
"""Of the best token's logprob over the second: about 100 times the rounding of float32 here."""
LOG_CHARS: Final = 3_000
ORDER: Final = "Be brief, Größe ist relativ."  # codespell:ignore ist,relativ
"""Of a conversation, in two languages: its tokens are more than its letters."""
BATCH: Final = 8
SUBJECTS: Final = (
    "the router",
    "each rank",
    "an expert",
    "one token",
    "the slowest step",
    "a long prompt",
)
VERBS: Final = ("waits for", "goes to", "shares", "computes", "moves")
OBJECTS: Final = (
    "the experts",
    "its group",
    "both ranks",
    "every chunk",
    "the cache",
    "nobody",
    "all of it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine that `dsched run` has started."""

    url: str
    pid: int
    """Of its server, which leads its process group."""


@dataclass(slots=True, kw_only=True)
class LiveRun:
    """A running `dsched run`."""

    url: str
    process: "subprocess.Popen[bytes]"
    state_dir: Path
    log_path: Path

    def log_text(self) -> str:
        return self.log_path.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The log events with this name so far."""
        lines = (line for line in self.log_text().splitlines() if line.startswith("{"))
        return [event for event in map(json.loads, lines) if event["event"] == name]

    @property
    def engines(self) -> dict[str, StartedEngine]:
        """What it started, by engine id."""
        return {
            each["engine_id"]: StartedEngine(
                url=f"http://127.0.0.1:{each['port']}", pid=each["pid"]
            )
            for each in self.events("engine.started")
        }

    async def metrics(self) -> str:
        """Its metrics; empty while it does not answer."""
        timeout = aiohttp.ClientTimeout(total=5)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(f"{self.url}/metrics") as answer,
            ):
                return await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def samples(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The values of a metric, by its labels in order of name."""
        return read_samples(await self.metrics(), name)

    async def num_up(self) -> int:
        """Engines that are up."""
        states = await self.samples("dsched_worker_state")
        return sum(value == 1 and ("state", "up") in labels for labels, value in states.items())

    async def wait_until_up(self, count: int, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait for `count` engines; fails with the end of the log."""
        clock = SystemClock()
        deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
        while await self.num_up() < count:
            tail = self.log_text()[-LOG_CHARS:]
            assert self.process.poll() is None, tail
            assert clock.now_ns() < deadline_ns, tail
            await asyncio.sleep(0.2)

    def stop(self) -> None:
        """End it as Ctrl-C does."""
        pids = [engine.pid for engine in self.engines.values()]
        for pid in pids:  # a stopped process does not hear SIGTERM
            signal_group(pid, signal.SIGCONT)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(
                f"dsched run has not ended {STOP_TIMEOUT_S:g} s after SIGINT: "
                f"{self.log_text()[-LOG_CHARS:]}"
            ) from None
        assert [pid for pid in pids if is_running(pid)] == []


@contextmanager
def running_dsched(
    args: Sequence[str],
    *,
    state_dir: Path,
    num_engines: int,
    agent_endpoint: str | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[LiveRun]:
    """Start `dsched run ARGS`, wait until `num_engines` engines are up, and stop it at the end."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "dsched.cli.main", "run", *args),
        *("--port", str(port), "--admin-port", str(free_port())),
        *("--agent-endpoint", agent_endpoint or f"tcp://127.0.0.1:{free_port()}"),
        *("--state-dir", str(state_dir), "--logging-format", "json"),
    ]
    log_path = state_dir / "dsched.log"
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(
            command,
            stdout=log_file,
            stderr=log_file,
            env=inherited_environment() | dict(variables or {}),
        )
    run = LiveRun(
        url=f"http://127.0.0.1:{port}", process=process, state_dir=state_dir, log_path=log_path
    )
    try:
        asyncio.run(run.wait_until_up(num_engines))
        yield run
    finally:
        run.stop()


def read_samples(text: str, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    r"""Read a metric from a page of them.

    >>> read_samples('a_total{y="2",x="1"} 3.0\na_total_more 1\n', "a_total")
    {(('x', '1'), ('y', '2')): 3.0}
    """
    found = re.findall(rf"^{name}(?:\{{(.*)\}})? ([0-9.e+-]+|[+-]Inf|NaN)$", text, re.MULTILINE)
    return {
        tuple(sorted(re.findall(r'(\w+)="([^"]*)"', labels))): float(value)
        for labels, value in found
    }


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a whole process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def core_pid(server_pid: int, *, dp_rank: int) -> int | None:
    """The process of one rank's engine core, a child of its server; vLLM names its processes."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == server_pid and f"EngineCore_DP{dp_rank}" in name:
            return int(folder.name)
    return None


def fresh_connections() -> aiohttp.TCPConnector:
    """A connection for each request: vLLM closes idle ones after 5 s, amid a reuse."""
    return aiohttp.TCPConnector(force_close=True, limit=0)


async def ask_engine(
    session: aiohttp.ClientSession,
    url: str,
    prompt: str | list[int],
    *,
    max_tokens: int,
    **fields: object,
) -> dict[str, Any]:
    """Ask a server directly: its greedy answer with the best two logprobs of each token."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "return_tokens_as_token_ids": True,
        **fields,
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        choice: dict[str, Any] = (await answer.json())["choices"][0]
        return choice


async def ask_chat(*urls: str) -> list[dict[str, Any]]:
    """Each server's whole answer to one conversation, greedy."""
    body = {
        "model": MODEL_NAME,
        "messages": [
            {"role": "system", "content": ORDER},
            {"role": "user", "content": "Why does every step wait? 🚀"},
        ],
        "max_tokens": 24,
        "temperature": 0,
    }
    answers = []
    async with aiohttp.ClientSession(connector=fresh_connections()) as session:
        for url in urls:
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                answers.append(await answer.json())
    return answers


def smallest_lead(choice: Mapping[str, Any]) -> float:
    """By how much the best token leads, where it leads least."""
    leads: list[float] = []
    for top in choice["logprobs"]["top_logprobs"]:
        best, second, *_ = sorted(top.values(), reverse=True)
        leads.append(best - second)
    return min(leads)


async def sure_answers(
    url: str, prompts: Iterable[str], count: int, *, max_tokens: int, **fields: object
) -> dict[str, str]:
    """Return the first `count` prompts whose answers are sure, with the server's own answers."""
    found: dict[str, str] = {}
    source = iter(prompts)
    async with aiohttp.ClientSession(connector=fresh_connections()) as session:
        while batch := [prompt for _, prompt in zip(range(BATCH), source, strict=False)]:
            choices = await asyncio.gather(
                *(ask_engine(session, url, each, max_tokens=max_tokens, **fields) for each in batch)
            )
            for prompt, choice in zip(batch, choices, strict=True):
                if smallest_lead(choice) >= MIN_LEAD and len(found) < count:
                    found[prompt] = choice["text"]
            if len(found) == count:
                return found
    raise AssertionError(f"only {len(found)} prompts with sure answers")


async def stream_text(
    session: aiohttp.ClientSession, url: str, prompt: str, *, max_tokens: int
) -> tuple[str, list[str]]:
    """Ask for a greedy stream; return its text, and every finish reason and `[DONE]` in it."""
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    text, ends = "", []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                ends.append("[DONE]")
                continue
            document = json.loads(line[6:])
            assert "error" not in document, document
            for choice in document["choices"]:
                text += choice["text"]
                if choice["finish_reason"] is not None:
                    ends.append(choice["finish_reason"])
    return text, ends


async def ask_all(
    run: LiveRun, prompts: Iterable[str], *, max_tokens: int
) -> list[tuple[str, list[str]]]:
    """Ask for a greedy stream of each prompt at once; return text and ends of each, in order."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(180):
        asked = (stream_text(session, run.url, each, max_tokens=max_tokens) for each in prompts)
        return await asyncio.gather(*asked)


async def dispatched(run: LiveRun) -> Counter[tuple[str, str]]:
    """Attempts sent to each rank so far, by engine and rank."""
    samples = await run.samples("dsched_rank_dispatched_total")
    counts: Counter[tuple[str, str]] = Counter()
    for labels, value in samples.items():
        names = dict(labels)
        counts[names["engine"], names["dp_rank"]] += int(value)
    return counts


def cluster_file(folder: Path, example: Path, *clusters: TinyEngines) -> Path:
    """Write a cluster file of `examples/` with the running engines in place of its own.

    Engines of the example that nobody runs are left out.
    """
    document = yaml.safe_load(example.read_text())
    running = [(each.kind, engine) for each in clusters for engine in each.engines]
    for pool in document["pools"].values():
        stated, pool["engines"] = pool["engines"], []
        for engine in stated:
            kind, server = next((pair for pair in running if pair[0] == engine["kind"]), ("", None))
            if server is not None:
                running.remove((kind, server))
                pool["engines"].append(engine | {"id": str(server.engine_id), "url": server.url})
        pool["model"] = {"name": MODEL_NAME, "tokenizer": str(clusters[0].model_path)}
    assert not running, f"{example} has no place for {running}"
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def make_prompts() -> Iterator[str]:
    """Prompts that differ from each other."""
    for index in range(1_000):
        parts = (SUBJECTS[index % 6], VERBS[index % 5], OBJECTS[index % 7])
        yield f"{index} {' '.join(parts)}"
