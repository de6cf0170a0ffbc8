"""A real SGLang server with two DP ranks under dsched: clients get exactly what it says.

Compared are sure answers (`dsched.testing.live_run`): greedy answers depend on rounding only where
two tokens are almost equally likely.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import structlog

from dsched.drivers.http import HttpPool
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.driver import SglangDriver
from dsched.drivers.sglang.protocol import SglangReader
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import EngineRefusedError
from dsched.ids import AttemptId, AttemptIds
from dsched.testing.engines import TinyEngines
from dsched.testing.live_run import (
    LiveRun,
    ask_all,
    ask_chat,
    cluster_file,
    dispatched,
    make_prompts,
    running_dsched,
    sure_answers,
)
from dsched.testing.recorders import RecordingListener, RecordingSink
from dsched.testing.sglang_engines import generate

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "tiny-sglang.yaml"
NUM_STREAMS = 32
NUM_TOKENS = 48
PROMPT = tuple(range(20, 60))


@pytest.fixture
def sglang_run(sglang_dp2: TinyEngines, tmp_path: Path) -> Iterator[LiveRun]:
    """dsched over the server."""
    with running_dsched(
        ("-c", str(cluster_file(tmp_path, EXAMPLE, sglang_dp2))),
        state_dir=tmp_path,
        num_engines=1,
        agent_endpoint=sglang_dp2.agent_endpoint,
    ) as run:
        yield run


class Client:
    """SGLang's driver over the server, up."""

    def __init__(self, engines: TinyEngines) -> None:
        self.server = engines.engines[0]
        self.pool = HttpPool(self.server.url)
        self.reports = ReportReader(endpoint=engines.agent_endpoint)
        self.reports.start()
        self.driver = SglangDriver(
            engine_id=self.server.engine_id, url=self.server.url, reports=self.reports
        )
        self.listener = RecordingListener()
        self._ids = AttemptIds(process_tag=id(self))

    def generate(
        self,
        *,
        dp_rank: int = 0,
        prompt: tuple[int, ...] = PROMPT,
        attempt_id: AttemptId | None = None,
        **sampling: object,
    ) -> RecordingSink:
        sink = RecordingSink(attempt_id or self._ids.next_id())
        fields = {"max_tokens": 24, "temperature": 0.0} | sampling
        command = GenerateCommand(
            attempt_id=sink.attempt_id,
            epoch=1,
            dp_rank=dp_rank,
            prompt_token_ids=prompt,
            sampling=SamplingParams(**fields),
        )
        self.driver.generate(command, sink)
        return sink

    async def answer(self, **fields: object) -> RecordingSink:
        sink = self.generate(**fields)
        await sink.ended(60)
        return sink

    def close(self) -> None:
        self.driver.close()
        self.reports.close()
        self.pool.close()


@pytest.fixture
async def client(sglang_dp2: TinyEngines) -> AsyncIterator[Client]:
    client = Client(sglang_dp2)
    client.driver.start(client.listener)
    await client.listener.up()
    yield client
    client.close()


async def test_streams_are_the_servers_own_and_both_ranks_serve(
    sglang_dp2: TinyEngines, sglang_run: LiveRun
) -> None:
    """32 concurrent greedy streams through dsched; no rank gets more than 60 %."""
    url = sglang_dp2.engines[0].url
    expected = await sure_answers(url, make_prompts(), NUM_STREAMS, max_tokens=NUM_TOKENS)

    streams = await ask_all(sglang_run, expected, max_tokens=NUM_TOKENS)
    counts = await dispatched(sglang_run)
    reported = await sglang_run.samples("dsched_rank_report_age_seconds")

    assert [finished(text) for text, _ in streams] == [finished(each) for each in expected.values()]
    assert len(set(expected.values())) == NUM_STREAMS
    assert [ends for _, ends in streams] == [["length", "[DONE]"]] * NUM_STREAMS
    assert sorted(counts) == [("sglang-dp2-0", "0"), ("sglang-dp2-0", "1")]
    assert sum(counts.values()) == NUM_STREAMS
    assert max(counts.values()) <= 0.6 * NUM_STREAMS, counts
    assert sorted(dict(labels)["dp_rank"] for labels in reported) == ["0", "1"]
    assert sglang_run.events("rank.ignored") == []
    assert sglang_run.events("engine.version_unknown") == []


def finished(text: str) -> str:
    """Without an unfinished character at the end: SGLang writes a replacement sign for it, while
    dsched, like vLLM, leaves it out."""
    return text.rstrip("\ufffd")


async def test_chat_is_rendered_as_the_server_renders_it(
    sglang_dp2: TinyEngines, sglang_run: LiveRun
) -> None:
    """Template and tokenizer in dsched give the tokens that the server itself would compute on."""
    direct, ours = await ask_chat(sglang_dp2.engines[0].url, sglang_run.url)

    assert ours["usage"]["prompt_tokens"] == direct["usage"]["prompt_tokens"]
    assert ours["choices"][0]["message"]["content"] == direct["choices"][0]["message"]["content"]


async def test_requests_run_on_the_rank_that_dsched_names(client: Client) -> None:
    """The rank that SGLang records is ours, and each rank's own agent reports what it got."""
    num_before = len(client.listener.reports)
    ranks = (0, 1, 1, 1, 0, 1, 1, 1)
    dialect = client.driver._dialect
    make_reader = dialect.reader
    readers: list[tuple[int, SglangReader]] = []

    def noting_reader(command: GenerateCommand) -> SglangReader:
        reader = make_reader(command)
        readers.append((command.dp_rank, reader))
        return reader

    dialect.reader = noting_reader
    with structlog.testing.capture_logs() as logs:
        sinks = [
            client.generate(dp_rank=rank, prompt=(*PROMPT, index), max_tokens=100, ignore_eos=True)
            for index, rank in enumerate(ranks)
        ]
        await asyncio.gather(*(sink.ended(60) for sink in sinks))
    most: Counter[int] = Counter()
    for report in client.listener.reports[num_before:]:
        most[report.dp_rank] = max(most[report.dp_rank], report.num_running)

    assert [(wanted, reader.dp_rank) for wanted, reader in readers] == [(r, r) for r in ranks]
    assert [each for each in logs if each["event"] == "rank.ignored"] == []
    assert most == {0: 2, 1: 6}
    assert all(len(sink.token_ids) == 100 for sink in sinks)


async def test_logprobs_come_once_and_in_order(client: Client) -> None:
    """Tokens and their logprobs, of many answers in one batch."""
    prompts = [tuple(range(10 + index, 40 + index)) for index in range(12)]
    expected = [
        (await generate(client.pool, prompt, max_tokens=24))["output_ids"] for prompt in prompts
    ]

    sinks = [
        client.generate(prompt=prompt, dp_rank=index % 2, logprobs=2)
        for index, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*(sink.ended(60) for sink in sinks))

    assert [sink.token_ids for sink in sinks] == expected
    for sink in sinks:
        assert [each.token_id for each in sink.logprobs] == sink.token_ids
        assert all(each.top[0] == (each.token_id, each.logprob) for each in sink.logprobs)


async def test_stop_tokens_count_even_if_the_end_of_sequence_does_not(client: Client) -> None:
    """SGLang itself ignores stop token ids together with the end of sequence."""
    whole = (await client.answer()).token_ids
    stop = whole[8]
    sampling = {"stop_token_ids": [stop], "ignore_eos": True}
    body = {"max_new_tokens": 24, "temperature": 0, **sampling}

    direct = await generate(client.pool, PROMPT, max_tokens=24, sampling_params=body)
    ours = await client.answer(stop_token_ids=(stop,), ignore_eos=True, max_tokens=900)

    assert direct["output_ids"] == whole, "if this fails, SGLang has changed: no cut is needed"
    assert ours.token_ids == whole[: whole.index(stop)]
    assert ours.finish is not None
    assert ours.finish.stop_token_id == stop


async def test_answer_goes_up_to_what_the_description_says(client: Client) -> None:
    """SGLang keeps some of the context for itself; what dsched is told is all usable."""
    limit = client.listener.ups[0].max_model_len

    most = await client.answer(prompt=(7,) * (limit - 1), max_tokens=1)
    rest = await client.answer(prompt=(7,) * (limit - 5), max_tokens=5, ignore_eos=True)

    assert limit == 1_024
    assert len(most.token_ids) == 1, most.error
    assert len(rest.token_ids) == 5, rest.error


async def test_sampling_parameters_reach_the_model(client: Client) -> None:
    """Bias, penalties, least lengths and formats do what they say."""
    biased = await client.answer(logit_bias={"9": 100.0}, max_tokens=6)
    stop = (await client.answer()).token_ids[0]
    least = await client.answer(stop_token_ids=(stop,), min_tokens=6, max_tokens=12)
    spread = await client.answer(temperature=5.0, top_k=0, max_tokens=12)
    narrow = await client.answer(temperature=5.0, top_k=1, max_tokens=12)
    whole = await client.answer(max_tokens=12)

    assert biased.token_ids == [9] * 6
    assert len(least.token_ids) >= 6
    assert narrow.token_ids == whole.token_ids
    assert spread.token_ids != whole.token_ids


async def test_refusals_are_the_servers_own(client: Client) -> None:
    """A rank that is not there, a length, and a token that would have killed the server."""
    nowhere = await client.answer(dp_rank=7)
    too_long = await client.answer(prompt=(7,) * 1_200)
    unknown = await client.answer(prompt=(7, 600_000))
    after = await client.answer(max_tokens=3)

    for sink, words in ((nowhere, "out of range"), (too_long, "1200"), (unknown, "600000")):
        assert isinstance(sink.error, EngineRefusedError)
        assert sink.error.status == 400
        assert words in str(sink.error)
    assert len(after.token_ids) == 3


async def test_abort_takes_no_other_along(client: Client) -> None:
    """SGLang aborts whatever begins with an id; ours end with a sign. The rank is free at once."""
    short = client.generate(attempt_id=AttemptId("ds-1"), max_tokens=900, ignore_eos=True)
    longer = client.generate(attempt_id=AttemptId("ds-11"), max_tokens=60, ignore_eos=True)
    await short.wait(lambda each: len(each.token_ids) > 2, 30)

    client.driver.abort(AttemptId("ds-1"))
    await longer.ended(60)
    await client.listener.wait(lambda each: each.reports[-1].num_running == 0, 10)

    assert short.finish is not None
    assert len(longer.token_ids) == 60
