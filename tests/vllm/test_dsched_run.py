"""`dsched run --engine vllm --replicas 2`: clients get exactly what the engines say.

Compared are sure answers; see `dsched.testing.live_run`.
"""

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import pytest
from tokenizers import Tokenizer

from dsched.testing.live_run import (
    LiveRun,
    ask_chat,
    ask_engine,
    fresh_connections,
    running_dsched,
    stream_text,
    sure_answers,
)
from dsched.testing.vllm_engines import ENGINE_ARGS, NO_VLLM, is_vllm_there

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_STREAMS = 64
NUM_TOKENS = 64
STORY = (
    "the router sends each request to a rank that answers it first and computes one step after "
    "another a chunk of prompt then token by token while experts wait on many devices until the "
    "slowest of them is done and the cache stays warm"
)


@pytest.fixture(scope="module")
def dsched_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """`dsched run` as an operator starts it, up with both engines; everything ends with it."""
    if not is_vllm_there():
        pytest.skip(NO_VLLM)
    args = ("--engine", "vllm", "--model", "tiny", "--replicas", "2")
    engine_args = ("--launch-args", json.dumps(ENGINE_ARGS))
    with running_dsched(
        (*args, *engine_args), state_dir=tmp_path_factory.mktemp("state"), num_engines=2
    ) as run:
        yield run


async def dispatched(run: LiveRun) -> dict[str, int]:
    """Attempts sent to each engine so far."""
    samples = await run.samples("dsched_rank_dispatched_total")
    return {dict(labels)["engine"]: int(value) for labels, value in samples.items()}


def make_prompts() -> Iterator[str]:
    story = STORY.split()
    for index in range(1, 1_000):
        words = [story[(index * 7 + position**2) % len(story)] for position in range(4 + index % 9)]
        yield f"{index} {' '.join(words)}"


async def test_64_streams_are_the_engines_own_and_both_engines_serve(dsched_run: LiveRun) -> None:
    """Every stream's text equals the engine's direct answer; no engine gets more than 60 %."""
    first_url, second_url = (each.url for each in dsched_run.engines.values())
    expected = await sure_answers(first_url, make_prompts(), NUM_STREAMS, max_tokens=NUM_TOKENS)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for prompt in list(expected)[:8]:
            choice = await ask_engine(session, second_url, prompt, max_tokens=NUM_TOKENS)
            assert choice["text"] == expected[prompt]
        before = await dispatched(dsched_run)

        streams = await asyncio.gather(
            *(
                stream_text(session, dsched_run.url, each, max_tokens=NUM_TOKENS)
                for each in expected
            )
        )

        after = await dispatched(dsched_run)

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


async def test_chat_is_rendered_as_the_engine_renders_it(dsched_run: LiveRun) -> None:
    """Template and tokenizer in dsched give the tokens that the engine itself would compute on."""
    url = next(iter(dsched_run.engines.values())).url
    direct, ours = await ask_chat(url, dsched_run.url)

    assert ours["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert ours["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]


async def test_client_that_leaves_frees_the_engine(dsched_run: LiveRun) -> None:
    """The disconnect reaches the engine: soon nothing runs any more, as its agent reports."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession(connector=fresh_connections()) as session:
        answer = await session.post(f"{dsched_run.url}/v1/completions", json=body)
        assert answer.status == 200
        await answer.content.readline()
        await wait_for_running(dsched_run, 1)
        answer.close()
        await wait_for_running(dsched_run, 0)


async def wait_for_running(run: LiveRun, count: int) -> None:
    """Wait until the agents of both engines report `count` running requests together."""
    async with asyncio.timeout(10):
        while True:
            running = await run.samples("dsched_rank_running_requests")
            assert len(running) == 2
            if sum(running.values()) == count:
                return
            await asyncio.sleep(0.02)


def test_tokens_are_text_whatever_they_are(dsched_run: LiveRun) -> None:
    """The tiny model's tokenizer decodes every token, alone or amid a character."""
    folder = dsched_run.state_dir / "models" / "tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert tokenizer.get_vocab_size() == 512
    assert all(isinstance(tokenizer.decode([each]), str) for each in range(512))
    text = "Größe 专家 🚀"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("🧠").ids) > 1
