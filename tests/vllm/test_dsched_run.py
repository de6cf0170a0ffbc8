"""`dsched run --engine vllm --replicas 2`: clients get exactly what the engines say.

Greedy answers depend on rounding only where two tokens are almost equally likely, and rounding
depends on the batch. So the answers are compared for prompts whose best token leads by a margin at
every position, which the direct answer tells; float32 keeps rounding far below it.
"""

import asyncio
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
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from dsched.drivers.vllm.launcher import free_port
from dsched.testing.vllm_engines import ENGINE_ARGS, is_vllm_there

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_STREAMS = 64
NUM_TOKENS = 64
MIN_LEAD = 1e-3
"""Of the best token's logprob over the second: about 100 times the rounding of float32 here."""
READY_TIMEOUT_S = 400
STORY = (
    "the router sends each request to a rank that answers it first and computes one step after "
    "another a chunk of prompt then token by token while experts wait on many devices until the "
    "slowest of them is done and the cache stays warm"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running `dsched run` and its engines."""

    url: str
    engine_urls: dict[str, str]
    engine_pids: tuple[int, ...]
    state_dir: Path


def fresh_connections() -> aiohttp.TCPConnector:
    """A connection for each request: vLLM closes idle ones after 5 s, amid a reuse."""
    return aiohttp.TCPConnector(force_close=True, limit=0)


@pytest.fixture(scope="module")
def dsched_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`dsched run` as an operator starts it, up with both engines; everything ends with it."""
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    state_dir = tmp_path_factory.mktemp("state")
    log_path = state_dir / "dsched.log"
    port = free_port()
    command = [
        *(sys.executable, "-m", "dsched.cli.main", "run"),
        *("--engine", "vllm", "--model", "tiny", "--replicas", "2"),
        *("--port", str(port), "--admin-port", str(free_port())),
        *("--agent-endpoint", f"tcp://127.0.0.1:{free_port()}"),
        *("--state-dir", str(state_dir), "--logging-format", "json"),
        *("--launch-args", json.dumps(ENGINE_ARGS)),
    ]
    with log_path.open("wb") as log_file:
        process = subprocess.Popen(command, stdout=log_file, stderr=log_file)
    pids: tuple[int, ...] = ()
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_both_up(process, url, log_path)
        started = [each for each in events(log_path) if each["event"] == "engine.started"]
        pids = tuple(each["pid"] for each in started)
        yield Running(
            url=url,
            engine_urls={each["engine_id"]: f"http://127.0.0.1:{each['port']}" for each in started},
            engine_pids=pids,
            state_dir=state_dir,
        )
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert [pid for pid in pids if is_running(pid)] == []


def events(log_path: Path) -> list[dict[str, Any]]:
    lines = log_path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def wait_until_both_up(process: subprocess.Popen, url: str, log_path: Path) -> None:
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log_path.read_text(errors="replace")[-3_000:]
        text = asyncio.run(metrics_or_nothing(url))
        if len(re.findall(r'dsched_worker_state\{.*state="up"\} 1', text)) == 2:
            return
        time.sleep(1)
    pytest.fail(log_path.read_text(errors="replace")[-3_000:])


async def metrics_or_nothing(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await metrics(session, url)
    except (aiohttp.ClientError, TimeoutError):
        return ""


async def metrics(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/metrics") as answer:
        return await answer.text()


async def dispatched(session: aiohttp.ClientSession, url: str) -> dict[str, int]:
    """Attempts sent to each engine so far."""
    text = await metrics(session, url)
    found = re.findall(r"dsched_rank_dispatched_total\{(.*)\} ([0-9.e+]+)", text)
    return {re.findall(r'engine="([^"]*)"', labels)[0]: int(float(n)) for labels, n in found}


async def ask_engine(session: aiohttp.ClientSession, url: str, prompt: str) -> dict[str, Any]:
    """The engine's own greedy answer, with its token ids and the best two logprobs."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "logprobs": 2,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        choice: dict[str, Any] = (await answer.json())["choices"][0]
        return choice


def smallest_lead(choice: dict[str, Any]) -> float:
    leads = []
    for top in choice["logprobs"]["top_logprobs"]:
        best, second, *_ = sorted(top.values(), reverse=True)
        leads.append(best - second)
    return min(leads)


async def stream(session: aiohttp.ClientSession, url: str, prompt: str) -> tuple[str, list[str]]:
    """Ask dsched, streamed; return the text and every finish reason in the stream."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
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
            choice = json.loads(line[6:])["choices"][0]
            text += choice["text"]
            if choice["finish_reason"] is not None:
                ends.append(choice["finish_reason"])
    return text, ends


def make_prompts() -> Iterator[str]:
    story = STORY.split()
    for index in range(1, 1_000):
        words = [story[(index * 7 + position**2) % len(story)] for position in range(4 + index % 9)]
        yield f"{index} {' '.join(words)}"


async def test_64_streams_are_the_engines_own_and_both_engines_serve(dsched_run: Running) -> None:
    """Every stream's text equals the engine's direct answer; no engine gets more than 60 %."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        first_url, second_url = dsched_run.engine_urls.values()
        expected: dict[str, str] = {}
        num_unsure = 0
        for prompt in make_prompts():
            choice = await ask_engine(session, first_url, prompt)
            if smallest_lead(choice) < MIN_LEAD:
                num_unsure += 1
                continue
            expected[prompt] = choice["text"]
            if len(expected) == NUM_STREAMS:
                break
        for prompt in list(expected)[:8]:
            assert (await ask_engine(session, second_url, prompt))["text"] == expected[prompt]
        before = await dispatched(session, dsched_run.url)

        streams = await asyncio.gather(
            *(stream(session, dsched_run.url, prompt) for prompt in expected)
        )

        after = await dispatched(session, dsched_run.url)

    assert num_unsure < NUM_STREAMS // 2
    assert len(set(expected.values())) == NUM_STREAMS
    wrong = [
        (prompt, text, want)
        for (text, _), (prompt, want) in zip(streams, expected.items(), strict=True)
        if text != want
    ]
    assert wrong == []
    assert [ends for _, ends in streams] == [["length", "[DONE]"]] * NUM_STREAMS
    counts = {name: after[name] - before.get(name, 0) for name in after}
    assert sum(counts.values()) == NUM_STREAMS
    assert sorted(counts) == ["vllm-0", "vllm-1"]
    assert max(counts.values()) <= 0.6 * NUM_STREAMS, counts


async def test_chat_is_rendered_as_the_engine_renders_it(dsched_run: Running) -> None:
    """Template and tokenizer in dsched give the tokens that the engine itself would compute on."""
    url = next(iter(dsched_run.engine_urls.values()))
    body = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "Be brief, Größe ist relativ."},
            {"role": "user", "content": "Why does every step wait? 🚀"},
        ],
        "max_tokens": 24,
        "temperature": 0,
    }
    async with aiohttp.ClientSession(connector=fresh_connections()) as session:
        answers = []
        for base in (url, dsched_run.url):
            async with session.post(f"{base}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                answers.append(await answer.json())

    direct, ours = answers
    assert ours["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert ours["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]


async def test_client_that_leaves_frees_the_engine(dsched_run: Running) -> None:
    """The disconnect reaches the engine: soon nothing runs any more, as its agent reports."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=fresh_connections()) as session:
        answer = await session.post(f"{dsched_run.url}/v1/completions", json=body)
        assert answer.status == 200
        await answer.content.readline()
        await wait_for_running(session, dsched_run.url, 1)
        answer.close()
        await wait_for_running(session, dsched_run.url, 0)


async def wait_for_running(session: aiohttp.ClientSession, url: str, count: int) -> None:
    """Wait until the agents of both engines report `count` running requests together."""
    async with asyncio.timeout(10):
        while True:
            text = await metrics(session, url)
            running = re.findall(r"dsched_rank_running_requests\{.*\} ([0-9.]+)", text)
            assert len(running) == 2
            if sum(map(float, running)) == count:
                return
            await asyncio.sleep(0.02)


def test_tokens_are_text_whatever_they_are(dsched_run: Running) -> None:
    """The tiny model's tokenizer decodes every token, alone or amid a character."""
    folder = dsched_run.state_dir / "models" / "tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert tokenizer.get_vocab_size() == 512
    assert all(isinstance(tokenizer.decode([each]), str) for each in range(512))
    text = "Größe 专家 🚀"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("🧠").ids) > 1


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
