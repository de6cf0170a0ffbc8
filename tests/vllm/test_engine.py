"""A real vLLM server with dsched's scheduler: whatever happens to dsched, it serves on."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from dsched.drivers.http import HttpPool
from dsched.drivers.reports import ReportReader
from dsched.drivers.vllm import VllmDriver
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams
from dsched.ids import AttemptIds
from dsched.testing.hostile import hostile_dsched, receive
from dsched.testing.recorders import RecordingListener, RecordingSink
from dsched.testing.vllm_engines import TinyEngines, complete

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = tuple(range(30, 70))


@pytest.fixture(params=["vllm_engines", "vllm_group"])
def served(request: pytest.FixtureRequest) -> TinyEngines:
    """One server: of one rank, and of an EP group."""
    engines: TinyEngines = request.getfixturevalue(request.param)
    return engines


@pytest.fixture
async def pool(served: TinyEngines) -> AsyncIterator[HttpPool]:
    """A way to ask the server without dsched."""
    pool = HttpPool(served.engines[0].url)
    yield pool
    pool.close()


async def answers(pool: HttpPool, num_requests: int = 8) -> list[list[int]]:
    """Greedy answers to some prompts at once."""
    prompts = [tuple(range(10 + index, 50 + index)) for index in range(num_requests)]
    choices = await asyncio.gather(
        *(complete(pool, prompt, max_tokens=40, ignore_eos=True) for prompt in prompts)
    )
    return [choice["token_ids"] for choice in choices]


async def test_engine_serves_without_dsched(pool: HttpPool) -> None:
    """Nobody listens at the endpoint; the agent waits, the engine does not."""
    first = await answers(pool)

    assert first == await answers(pool)
    assert all(len(each) == 40 for each in first)


async def test_engine_serves_while_dsched_is_stuck(pool: HttpPool, served: TinyEngines) -> None:
    """A dsched that accepts and never reads fills a bounded queue, and no step waits for it."""
    expected = await answers(pool)
    with hostile_dsched(served.agent_endpoint, rcvhwm=1, rcvbuf=2_048):
        await asyncio.sleep(2.5)
        rounds = [await answers(pool) for _ in range(6)]

    assert rounds == [expected] * 6


async def test_engine_serves_while_dsched_dies_again_and_again(
    pool: HttpPool, served: TinyEngines
) -> None:
    """Its connections break amid reports; the answers are the same, and agents come back."""
    expected = await answers(pool)
    rounds = []
    for _ in range(4):
        with hostile_dsched(served.agent_endpoint) as router:
            await receive(router)
            running = asyncio.create_task(answers(pool))
            await receive(router)
        rounds.append(await running)

    assert rounds == [expected] * 4


async def test_engine_serves_while_garbage_comes_from_dsched(
    pool: HttpPool, served: TinyEngines
) -> None:
    """Bytes that are no command are counted by every agent and change nothing."""
    expected = await answers(pool)
    with hostile_dsched(served.agent_endpoint) as router:
        num_ranks = 2 if served.engines[0].engine_id.startswith("group") else 1
        identities: dict[bytes, None] = {}
        while len(identities) < num_ranks:
            identities[(await receive(router))[0]] = None
        for index in range(200):
            for identity in identities:
                router.send_multipart([identity, bytes([index % 256]) * (index + 1)])
        rounds = [await answers(pool) for _ in range(2)]
        heard: set[bytes] = set()
        while len(heard) < num_ranks:
            heard.add((await receive(router))[0])

    assert rounds == [expected] * 2
    assert heard == set(identities)


async def test_reports_come_back_with_a_new_dsched(vllm_engines: TinyEngines) -> None:
    """After all that, a real dsched hears of every step again."""
    engine = vllm_engines.engines[0]
    pool = HttpPool(engine.url)
    reports = ReportReader(endpoint=vllm_engines.agent_endpoint)
    reports.start()
    driver = VllmDriver(engine_id=engine.engine_id, url=engine.url, reports=reports)
    listener = RecordingListener()
    driver.start(listener)
    description = await listener.up()
    num_before = len(listener.reports)
    expected = await answers(pool, 4)
    await listener.wait(lambda each: is_idle(each.reports[-1]), 10)
    steps = [each for each in listener.reports[num_before:] if each.num_step_tokens]

    assert description.capabilities.has_load_reports
    assert driver.lost_features == ()
    assert all(len(each) == 40 for each in expected)
    # 4 prompts of 40 tokens, of which prefix reuse may spare some; then 39 steps of 4 tokens.
    assert len(steps) >= 40
    assert max(each.num_running for each in steps) == 4
    assert 4 * 39 <= sum(each.num_step_tokens for each in steps) <= 4 * (40 + 39)
    assert all(0 < each.step_ns < 60_000_000_000 for each in steps)
    assert sum(reports.drops.values()) == 0
    pool.close()
    driver.close()
    reports.close()


async def test_streams_come_token_by_token_and_cached_prompts_are_told(
    vllm_engines: TinyEngines,
) -> None:
    """Tokens are handed on as they are computed, and prefix reuse is reported."""
    engine = vllm_engines.engines[0]
    driver = VllmDriver(engine_id=engine.engine_id, url=engine.url)
    listener = RecordingListener()
    driver.start(listener)
    await listener.up()
    ids = AttemptIds(process_tag=id(driver))
    prompt = tuple((7 * index) % 400 + 20 for index in range(300))

    sinks = []
    for _ in range(2):
        sink = RecordingSink(ids.next_id())
        command = GenerateCommand(
            attempt_id=sink.attempt_id,
            epoch=1,
            dp_rank=0,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True),
        )
        driver.generate(command, sink)
        await sink.ended(60)
        sinks.append(sink)
    driver.close()

    first, second = sinks
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 300
    assert first.num_chunks > 3
    assert first.finish is not None
    assert first.finish.num_cached_tokens == 0
    assert second.finish is not None
    # Whole blocks of 32 tokens, but the last token is always computed.
    assert second.finish.num_cached_tokens == 288


async def test_seeded_sampling_and_structured_output_reach_the_engine(
    vllm_engines: TinyEngines,
) -> None:
    """One seed gives one answer, another seed another; a JSON schema is kept."""
    engine = vllm_engines.engines[0]
    driver = VllmDriver(engine_id=engine.engine_id, url=engine.url)
    listener = RecordingListener()
    driver.start(listener)
    await listener.up()
    ids = AttemptIds(process_tag=id(driver))

    async def ask(**sampling: object) -> list[int]:
        sink = RecordingSink(ids.next_id())
        command = GenerateCommand(
            attempt_id=sink.attempt_id,
            epoch=1,
            dp_rank=0,
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=24, **sampling),
        )
        driver.generate(command, sink)
        await sink.ended(120)
        assert sink.error is None
        return sink.token_ids

    one = await ask(temperature=1.0, seed=1)
    again = await ask(temperature=1.0, seed=1)
    other = await ask(temperature=1.0, seed=2)
    schema = {"name": "x", "schema": {"enum": ["yes", "no"]}}
    chosen = await ask(
        temperature=0.0,
        structured_output={"type": "json_schema", "json_schema": schema},
    )
    driver.close()

    assert one == again
    assert one != other
    text = decode(vllm_engines, chosen)
    assert json.loads(text) in ("yes", "no")


def is_idle(report: RankReport) -> bool:
    return report.num_running == report.num_waiting == 0


def decode(engines: TinyEngines, token_ids: list[int]) -> str:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engines.model_path / "tokenizer.json"))
    return str(tokenizer.decode(token_ids))
