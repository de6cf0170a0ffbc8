"""Real vLLM engines die and freeze under `dsched run`: 16 live streams notice a pause, and no more.

Both faults hit one engine's whole process group, in one `dsched run` of this file's own (two engine
starts in all; the engines of other tests are not touched). The freeze comes first, because its
engine comes back; the kill is the end.

Compared are sure answers (`dsched.testing.live_run`): going on from prompt and emitted tokens
prefills what was decoded before, which rounds differently.
"""

import asyncio
import json
import multiprocessing
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from dsched.testing.live_run import (
    LiveRun,
    read_samples,
    running_dsched,
    signal_group,
    sure_answers,
)
from dsched.testing.vllm_engines import ENGINE_ARGS, NO_VLLM, is_vllm_there

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_STREAMS = 16
NUM_TOKENS = 800
"""Long enough that a busy machine's client sees every stream live before the first one ends."""
KV_TOKENS_BEFORE_FAULT = 24
"""Mean prompt and answer of the victim's streams when the fault comes; prompts have under 20."""
DECODE_TIMEOUT_S = 3.0
"""The default progress timeout, which `dsched run` uses here."""
WORDS = [
    "each",
    "rank",
    "waits",
    "for",
    "the",
    "slowest",
    "one",
    "while",
    "the",
    "router",
    "sends",
    "a",
    "chunk",
    "of",
    "prompt",
]


@dataclass(slots=True)
class Stream:
    """One answer as it came."""

    lines: list[bytes] = field(default_factory=list)
    """As they came; reading them waits until the end, so that the client keeps up."""
    times_s: list[float] = field(default_factory=list)
    text: str = ""
    ends: list[str] = field(default_factory=list)
    guarantee: str | None = None

    def read(self) -> None:
        """Make text, ends and guarantee of the lines."""
        for line in self.lines:
            if line.strip() == b"data: [DONE]":
                self.ends.append("[DONE]")
                continue
            document = json.loads(line[6:])
            assert "error" not in document, document
            self.guarantee = document.get("dsched", {}).get("guarantee", self.guarantee)
            if usage := document.get("usage"):
                self.ends.append(f"{usage['completion_tokens']} tokens")
            for choice in document["choices"]:
                self.text += choice["text"]
                if choice["finish_reason"] is not None:
                    self.ends.append(choice["finish_reason"])

    @property
    def longest_gap_s(self) -> float:
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max(after - before for before, after in pairs)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """`dsched run` with two engines of its own."""
    if not is_vllm_there():
        pytest.skip(NO_VLLM)
    args = ("--engine", "vllm", "--model", "tiny", "--replicas", "2")
    engine_args = ("--launch-args", json.dumps(ENGINE_ARGS))
    with running_dsched(
        (*args, *engine_args), state_dir=tmp_path_factory.mktemp("faults"), num_engines=2
    ) as run:
        yield run


async def gap_counts(run: LiveRun, part: str) -> dict[float, int]:
    """Handoffs whose `part` took at most so many seconds."""
    samples = await run.samples("dsched_handoff_gap_seconds_bucket")
    return {
        float(dict(labels)["le"]): int(value)
        for labels, value in samples.items()
        if ("part", part) in labels
    }


def make_prompt(number: int) -> str:
    words = (WORDS[(number * 3 + at) % len(WORDS)] for at in range(6))
    return " ".join([str(number), *words])


async def held_up_s(run: LiveRun) -> float:
    """Time in which dsched itself did not run."""
    return (await run.samples("dsched_held_up_seconds_total"))[()]


async def expected_answers(run: LiveRun) -> dict[str, str]:
    """Prompts and the engines' own undisturbed greedy answers, sure ones only."""
    url = next(iter(run.engines.values())).url
    prompts = map(make_prompt, range(1_000))
    return await sure_answers(url, prompts, NUM_STREAMS, max_tokens=NUM_TOKENS, ignore_eos=True)


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, stream: Stream) -> None:
    """Ask dsched; fill `stream` as the answer comes."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: "):
                stream.times_s.append(time.monotonic())
                stream.lines.append(line)
    stream.read()


class Saboteur:
    """Hits the engine that serves most streams when they are some tokens long.

    A process of its own that asks dsched's metrics: the client of sixteen streams may lag behind on
    a busy machine, and would see them live when they have ended.
    """

    def __init__(self, running: LiveRun, number: signal.Signals) -> None:
        context = multiprocessing.get_context("fork")
        self._victim = context.SimpleQueue()
        self._process = context.Process(
            target=sabotage, args=(running, number, self._victim), daemon=True
        )
        self._process.start()
        assert self._victim.get() == "ready"

    def victim(self) -> str:
        """The engine that was hit."""
        self._process.join(10)
        assert self._process.exitcode == 0
        return str(self._victim.get())


def sabotage(running: LiveRun, number: signal.Signals, victims: Any) -> None:  # noqa: ANN401
    """Wait until the streams of one engine are some tokens long, then hit it."""

    def look() -> tuple[dict[str, int], dict[str, int]]:
        """Attempts sent to each engine so far, and KV tokens of its requests now."""
        with urllib.request.urlopen(f"{running.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return read_ranks(text, "dispatched_total"), read_ranks(text, "kv_tokens")

    before, _ = look()
    victims.put("ready")
    while True:
        now, kv_tokens = look()
        sent = {name: now[name] - before.get(name, 0) for name in now}
        victim = max(sent, key=lambda name: (sent[name], name))
        if (
            sum(sent.values()) == NUM_STREAMS
            and kv_tokens[victim] >= sent[victim] * KV_TOKENS_BEFORE_FAULT
        ):
            break
        time.sleep(0.005)
    signal_group(running.engines[victim].pid, number)
    victims.put(victim)


def read_ranks(text: str, name: str) -> dict[str, int]:
    """The values of a metric of ranks, by engine."""
    samples = read_samples(text, f"dsched_rank_{name}")
    return {dict(labels)["engine"]: int(value) for labels, value in samples.items()}


async def run_streams(
    running: LiveRun, expected: dict[str, str], signal_number: signal.Signals
) -> tuple[list[Stream], str]:
    """Send all prompts, let one engine be hit amid them, and let them end; return the streams and
    the engine."""
    streams = [Stream() for _ in expected]
    saboteur = Saboteur(running, signal_number)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.timeout(180):
        await asyncio.gather(
            *(
                ask(session, running.url, prompt, stream)
                for prompt, stream in zip(expected, streams, strict=True)
            )
        )
    return streams, saboteur.victim()


def check(streams: list[Stream], expected: dict[str, str]) -> int:
    """Every answer is the undisturbed one with one end; returns how many were handed over."""
    assert [stream.text for stream in streams] == list(expected.values())
    ends = ["length", f"{NUM_TOKENS} tokens", "[DONE]"]
    assert [stream.ends for stream in streams] == [ends] * NUM_STREAMS
    continued = [stream for stream in streams if stream.guarantee is not None]
    assert {stream.guarantee for stream in continued} <= {"exact"}
    return len(continued)


async def test_a_frozen_engine_costs_a_pause_and_adds_no_token(running: LiveRun) -> None:
    """SIGSTOP: noticed within the progress timeout and a second; SIGCONT: nothing foreign."""
    expected = await expected_answers(running)

    for _ in range(3):  # on a busy machine the fault may come when its streams have ended
        streams, victim = await run_streams(running, expected, signal.SIGSTOP)
        num_continued = check(streams, expected)
        if num_continued:
            break
        signal_group(running.engines[victim].pid, signal.SIGCONT)
        await asyncio.sleep(15)
    assert num_continued >= 4
    detected = await gap_counts(running, "detect")
    dispatched = await gap_counts(running, "dispatch")
    # A machine that does not run dsched for a second or more puts the notice off by that.
    limit_s = DECODE_TIMEOUT_S + 1 + await held_up_s(running)
    bucket_s = min(each for each in detected if each >= limit_s)
    assert detected[bucket_s] == detected[float("inf")] == num_continued
    assert dispatched[1.0] == num_continued

    # It wakes up while others are served: what it still had belongs to nobody.
    second = [Stream() for _ in expected]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(ask(session, running.url, prompt, stream))
            for prompt, stream in zip(expected, second, strict=True)
        ]
        await asyncio.sleep(0.3)
        signal_group(running.engines[victim].pid, signal.SIGCONT)
        async with asyncio.timeout(120):
            await asyncio.gather(*tasks)
    assert [stream.text for stream in second] == list(expected.values())
    async with asyncio.timeout(60):
        while await running.num_up() < 2:
            await asyncio.sleep(0.2)


async def test_a_killed_engine_costs_a_pause(running: LiveRun) -> None:
    """SIGKILL of the whole group: all streams finish, and the loss is noticed by its sockets."""
    expected = await expected_answers(running)
    before = await gap_counts(running, "detect")

    streams, _ = await run_streams(running, expected, signal.SIGKILL)

    num_continued = check(streams, expected)
    assert num_continued >= 4
    after = await gap_counts(running, "detect")
    gaps = {le: after[le] - before.get(le, 0) for le in after}
    # A kernel frees a dead process's memory before it closes its sockets: a second on a busy
    # machine. Well below the progress timeout: it was the socket that told.
    assert gaps[2.0] == gaps[float("inf")] == num_continued, gaps
