"""vLLM's driver against a stand-in server: life, death, steering and odd servers.

What every driver must do is in `tests/conformance`; here is what is vLLM's own.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from dsched.drivers import watch as watch_module
from dsched.drivers.base import FinishReason
from dsched.drivers.reports import ReportReader
from dsched.drivers.url import normalize_engine_url
from dsched.drivers.vllm import VllmDriver
from dsched.drivers.vllm.launcher import free_port
from dsched.drivers.vllm.watch import CAPABILITIES, read_metrics
from dsched.drivers.watch import EngineFacts, EngineHints, ModelCard, describe, has_all_hellos
from dsched.drivers.wire import AgentHello, GenerateCommand, SamplingParams
from dsched.errors import ConfigError, DriverError, EngineRefusedError, EngineUnreachableError
from dsched.ids import DpRank, RankId
from dsched.states import Evidence
from dsched.testing.driver_world import ENGINE, PROMPT, DriverWorld
from dsched.testing.recorders import RecordingListener, RecordingSink
from dsched.testing.vllm_double import VllmDouble


@pytest.fixture(autouse=True)
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often than production does, so that tests need not wait."""
    monkeypatch.setattr(watch_module, "HEALTH_INTERVAL_S", 0.05)
    monkeypatch.setattr(watch_module, "HEALTH_TIMEOUT_S", 0.3)
    monkeypatch.setattr(watch_module, "MAX_RETRY_S", 0.1)
    monkeypatch.setattr(watch_module, "HELLO_PATIENCE_S", 0.5)


World = DriverWorld[VllmDriver, VllmDouble]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    reports = ReportReader(endpoint="tcp://127.0.0.1:0")
    reports.start()
    world = DriverWorld(VllmDriver, VllmDouble, reports=reports)
    yield world
    await world.close()
    reports.close()


async def test_engine_that_starts_late_comes_up(world: World) -> None:
    """A driver may be there long before its engine."""
    port = free_port()
    world.driver(f"http://127.0.0.1:{port}")
    await asyncio.sleep(0.2)
    assert world.listener.ups == []
    assert world.listener.downs == []

    await world.double(port=port)
    description = await world.listener.up()

    assert description.model == "tiny"
    assert description.capabilities.has_load_reports


async def test_restarted_engine_comes_up_again(world: World) -> None:
    """Down and up are each told once, and the new incarnation's reports count."""
    first = await world.double()
    world.driver(first.url)
    await world.listener.up()
    await world.generate(3).ended(10)
    await world.listener.wait(lambda each: bool(each.reports), 10)

    await first.kill()
    await world.listener.wait(lambda each: bool(each.downs), 5)
    await world.double(port=first.port)
    await world.listener.wait(lambda each: len(each.ups) == 2, 10)
    sink = world.generate()
    await sink.ended(10)
    await world.listener.wait(lambda each: each.reports[-1].step >= 8, 10)

    assert len(world.listener.downs) == 1
    assert sink.token_ids == first.model.stream(PROMPT, 8)
    assert len({each.incarnation for each in world.listener.reports}) == 2


async def test_engine_that_moved_is_driven_at_its_new_place(world: World) -> None:
    """What ran at the old place fails at once, though a server answers there: it is another's."""
    old, new = await world.double(has_agent=False), await world.double(has_agent=False)
    driver = await world.up(old, has_reports=False)
    cut = world.generate(100_000)
    await cut.wait(lambda each: bool(each.token_ids), 10)

    driver.move(new.url)
    downs_at_once = len(world.listener.downs)
    await world.listener.wait(lambda each: len(each.ups) == 2, 10)
    sink = world.generate(3)
    await sink.ended(10)

    assert (driver.url, downs_at_once) == (new.url, 1)
    assert isinstance(cut.error, EngineUnreachableError)
    assert sink.token_ids == new.model.stream(PROMPT, 3)
    assert (len(old.bodies), len(new.bodies)) == (1, 1)


async def test_goodbye_takes_the_engine_down_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that stops on purpose gets nothing new, before its sockets close."""
    double = await world.double()
    world.driver(double.url)
    await world.listener.up()
    monkeypatch.setattr(watch_module, "HEALTH_INTERVAL_S", 60.0)

    await double.stop()
    await world.listener.wait(lambda each: bool(each.downs), 5)

    assert "goodbye" in world.listener.downs[0][1]


async def test_engine_without_agents_is_described_from_its_metrics(world: World) -> None:
    """Any vLLM can be driven; it just reports no load."""
    double = await world.double(has_agent=False, kv_capacity_tokens=4_096)
    world.driver(double.url)

    description = await world.listener.up(10)
    sink = world.generate()
    await sink.ended(10)

    assert not description.capabilities.has_load_reports
    assert description.num_dp_ranks == 1
    assert description.kv_capacity_tokens == 4_096
    assert sink.token_ids == double.model.stream(PROMPT, 8)
    assert world.listener.reports == []


async def test_hints_fill_what_an_engine_without_agents_does_not_say(world: World) -> None:
    double = await world.double(has_agent=False)
    hints = EngineHints(num_dp_ranks=4, kv_capacity_tokens=99, max_running_requests=3)
    world.driver(double.url, has_reports=False, hints=hints)

    description = await world.listener.up()

    assert description.num_dp_ranks == 4
    assert description.kv_capacity_tokens == 99
    assert description.max_running_requests == 3


async def test_agent_that_greets_late_is_described_again(world: World) -> None:
    """The engine is used without load reports until its agent is there."""
    double = await world.double(has_agent=False)
    world.driver(double.url)
    assert not (await world.listener.up(10)).capabilities.has_load_reports

    await double.stop()
    await world.double(port=double.port)

    await world.listener.wait(lambda each: each.ups[-1].capabilities.has_load_reports, 10)


async def test_dead_core_fails_attempts_as_a_lost_engine(world: World) -> None:
    """The API server that outlives its core for a moment does not hide the loss."""
    double = await world.double()
    world.driver(double.url)
    await world.listener.up()
    sinks = [world.generate(900) for _ in range(3)]
    await sinks[0].wait(lambda each: len(each.token_ids) > 2, 10)

    double.kill_core()
    await asyncio.gather(*(sink.ended(2) for sink in sinks))
    await world.listener.wait(lambda each: bool(each.downs), 2)
    late = world.generate()
    await late.ended(2)

    for sink in [*sinks, late]:
        assert isinstance(sink.error, EngineUnreachableError)
    assert "503" in world.listener.downs[0][1]
    assert world.listener.evidence == [Evidence.SOCKET]


@pytest.mark.slow
async def test_frozen_engine_goes_down_after_some_unanswered_checks(world: World) -> None:
    """Sockets stay open and nothing answers: the watch decides, and the attempts fail with it."""
    double = await world.double()
    world.driver(double.url)
    await world.listener.up()
    sink = world.generate(900)
    await sink.wait(lambda each: len(each.token_ids) > 2, 10)

    double.freeze()
    await sink.ended(10)

    assert isinstance(sink.error, EngineUnreachableError)
    assert "no answer" in world.listener.downs[0][1]
    assert world.listener.evidence == [Evidence.LEASE], "nothing but silence speaks for it"


@pytest.mark.slow
async def test_one_slow_health_answer_is_no_death(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server is slow long before it is dead."""
    double = await world.double()
    world.driver(double.url)
    await world.listener.up()
    num_left = watch_module.MAX_TIMEOUTS - 1
    pass_on = double.pass_by

    async def slow(request: web.Request) -> None:
        nonlocal num_left
        if request.path == "/health" and num_left:
            num_left -= 1
            await asyncio.sleep(2 * watch_module.HEALTH_TIMEOUT_S)
        await pass_on(request)

    monkeypatch.setattr(double, "pass_by", slow)
    sink = world.generate(500)
    await sink.ended(10)

    assert num_left == 0
    assert len(sink.token_ids) == 500
    assert world.listener.downs == []


async def test_connection_that_breaks_before_the_end_is_a_failure(world: World) -> None:
    """A stream that just stops was not finished by anybody."""
    double = await world.double()
    world.driver(double.url)
    await world.listener.up()
    sink = world.generate(900)
    await sink.wait(lambda each: len(each.token_ids) > 2, 10)

    for transport in double._transports:
        transport.abort()
    await sink.ended(5)

    assert isinstance(sink.error, EngineUnreachableError)
    assert sink.token_ids == double.model.stream(PROMPT, len(sink.token_ids))


async def test_abort_in_the_middle_of_a_token_callback(world: World) -> None:
    """A sink may abort while it is being told tokens; it hears `ABORT` and nothing else."""
    double = await world.double()
    driver = world.driver(double.url)
    await world.listener.up()

    class Aborting(RecordingSink):
        def on_tokens(self, attempt_id, token_ids, logprobs) -> None:  # noqa: ANN001
            super().on_tokens(attempt_id, token_ids, logprobs)
            driver.abort(attempt_id)

    sink = Aborting(world.ids.next_id())
    command = GenerateCommand(
        attempt_id=sink.attempt_id,
        epoch=1,
        dp_rank=0,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=1),
    )
    driver.generate(command, sink)
    await sink.ended(5)
    await asyncio.sleep(0.05)

    assert sink.violations == []
    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.ABORT
    assert driver.num_open_attempts == 0


async def test_abort_before_the_connection_stands(world: World) -> None:
    """An attempt can be aborted in the same breath; the engine computes nothing for it."""
    double = await world.double(step_s=60.0)  # what it begins it does not end by itself
    driver = world.driver(double.url)
    await world.listener.up()

    sink = world.generate(900)
    driver.abort(sink.attempt_id)
    await sink.ended(5)
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        while double.num_running + double.num_waiting:
            await asyncio.sleep(0.01)

    assert sink.token_ids == []


async def test_rank_is_steered_only_where_there_are_several(world: World) -> None:
    """A single rank needs no header; a server with one rank refuses unknown ones."""
    double = await world.double(has_agent=False, num_dp_ranks=4)
    world.driver(double.url, has_reports=False, hints=EngineHints(num_dp_ranks=4))
    await world.listener.up()

    await world.generate(1, dp_rank=3).ended(5)
    world.drivers[-1].close()
    world.driver(double.url, has_reports=False)
    await world.listener.wait(lambda each: len(each.ups) == 2, 5)
    await world.generate(1).ended(5)

    assert double.headers[0]["x-data-parallel-rank"] == "3"
    assert "x-data-parallel-rank" not in double.headers[1]


async def test_attempt_id_is_the_engines_request_id(world: World) -> None:
    """Both logs name a request alike."""
    double = await world.double()
    world.driver(double.url)
    await world.listener.up()

    sink = world.generate(1)
    await sink.ended(5)

    assert double.bodies[0]["request_id"] == sink.attempt_id


async def test_stated_model_is_used_and_unknown_one_refused(world: World) -> None:
    """The engine's own refusal reaches the attempt."""
    double = await world.double(served_model_name="other")
    driver = world.driver(double.url, model="tiny")

    description = await world.listener.up()
    ok = world.generate(1)
    await ok.ended(5)
    driver._description = None
    refused = world.generate(1)
    await refused.ended(5)

    assert description.model == "other"
    assert ok.finish is not None
    assert isinstance(refused.error, EngineRefusedError)
    assert refused.error.status == 404


async def test_ranks_that_an_engine_gave_up_are_told_and_told_back(world: World) -> None:
    """An elastic engine goes on with the rest; one rank's agent is enough to say so."""
    double = await world.double(num_dp_ranks=3)
    world.driver(double.url)
    await world.listener.up()
    agent = double.ranks[0].agent
    assert agent is not None
    lost = RankId(ENGINE, DpRank(2))

    agent.set_lost_ranks([2])
    await world.listener.wait(lambda each: bool(each.lost_ranks), 5)
    agent.set_lost_ranks([2])
    agent.set_lost_ranks([])
    await world.listener.wait(lambda each: bool(each.ranks_back), 5)

    assert {rank for rank, _ in world.listener.lost_ranks} == {lost}
    assert "as its rank 0 says" in world.listener.lost_ranks[0][1]
    assert world.listener.ranks_back == [lost]
    assert world.listener.downs == []


@pytest.mark.slow
async def test_lost_feature_of_an_agent_is_known(world: World) -> None:
    """If the agent's hook fails, the engine goes on and dsched can say what is lost."""
    double = await world.double()
    driver = world.driver(double.url)
    await world.listener.up()
    assert driver.lost_features == ()

    agent = double.ranks[0].agent
    assert agent is not None
    agent.drop_feature("load_reports")
    async with asyncio.timeout(5):
        while not driver.lost_features:
            await asyncio.sleep(0.01)
    sink = world.generate()
    await sink.ended(5)

    assert driver.lost_features == ("load_reports",)
    assert sink.token_ids == double.model.stream(PROMPT, 8)


class OddServer:
    """Answers every request with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.num_asked = 0

    async def __aenter__(self) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            self.num_asked += 1
            writer.write(self.answer)
            await writer.drain()
            writer.close()

        self.server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        answer(b"<html>", "200 OK"),
        answer(b"not found", "404 Not Found"),
        answer(b'data: {"choices": []}\n\n'),
        answer(b"data: [DONE]\n\n"),
        answer(b'data: {"choices": [{"token_ids": [1], "finish_reason": null}]}\n\n'),
        answer(b'data: {"choices": [{"text": "no ids", "finish_reason": "stop"}]}\n\n'),
        answer(b"data: \xff\xfe\n\n"),
        b"HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\nda",
    ],
)
async def test_server_that_is_not_vllm_ends_each_attempt_once(raw: bytes) -> None:
    """Whatever answers at the URL, an attempt fails with a `DriverError`, once, and soon."""
    async with OddServer(raw) as url:
        driver = VllmDriver(engine_id=ENGINE, url=url)
        sink = RecordingSink()
        command = GenerateCommand(
            attempt_id="ds-1",
            epoch=1,
            dp_rank=0,
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(max_tokens=3),
        )

        driver.generate(command, sink)
        await sink.ended(5)
        driver.close()

    assert isinstance(sink.error, DriverError)
    assert sink.violations == []


async def test_server_that_is_not_vllm_never_comes_up() -> None:
    """A `200` at `/health` alone makes no engine."""
    listener = RecordingListener()
    server = OddServer(answer(b"ok"))
    async with server as url:
        driver = VllmDriver(engine_id=ENGINE, url=url)
        driver.start(listener)
        async with asyncio.timeout(10):
            while server.num_asked < 5:  # health and models, again and again
                await asyncio.sleep(0.01)
        driver.close()

    assert listener.ups == []


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://h:1", "http://h:1"),
        ("http://h:1/", "http://h:1"),
        ("http://h:1/v1", "http://h:1"),
        (" http://h:1/v1/ ", "http://h:1"),
        ("http://h:1/behind/proxy/v1", "http://h:1/behind/proxy"),
        ("http://h", "http://h"),
    ],
)
def test_url_is_taken_as_people_write_it(url: str, root: str) -> None:
    assert normalize_engine_url(url) == root


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "no scheme"),
        ("h:8000", "write 'http://h:8000'"),
        ("https://h:1", "https"),
        ("ftp://h:1", "ftp://h:1"),
        ("http://", "http://HOST:PORT"),
        ("http://h:port", "port"),
        ("http://h:1?x=1", "http://HOST:PORT"),
        ("http://user@h:1", "http://HOST:PORT"),
    ],
)
def test_url_that_cannot_be_is_the_operators(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match="engine URL") as caught:
        VllmDriver(engine_id=ENGINE, url=url)

    assert words in str(caught.value)


def hello(dp_rank: int, num_dp_ranks: int, kv_capacity_tokens: int = 100) -> AgentHello:
    return AgentHello(
        dsched_version="0",
        engine_id=ENGINE,
        incarnation=f"i{dp_rank}",
        engine="vllm",
        engine_version="0.32.0",
        model="tiny",
        max_model_len=100,
        dp_rank=dp_rank,
        num_dp_ranks=num_dp_ranks,
        kv_capacity_tokens=kv_capacity_tokens,
        max_running_requests=8,
        features=("load_reports",),
    )


def test_engine_is_described_once_all_ranks_have_spoken() -> None:
    """With unlike ranks the smallest counts: what is promised must fit everywhere."""
    hellos = {1: hello(1, 2, kv_capacity_tokens=80)}
    assert not has_all_hellos({})
    assert not has_all_hellos(hellos)

    hellos[0] = hello(0, 2, kv_capacity_tokens=100)
    description = describe(
        ENGINE,
        kind="vllm",
        card=ModelCard(id="tiny"),
        facts=EngineFacts(capabilities=CAPABILITIES),
        hints=EngineHints(kv_capacity_tokens=7),
        hellos=hellos,
    )

    assert has_all_hellos(hellos)
    assert description.num_dp_ranks == 2
    assert description.kv_capacity_tokens == 80


@pytest.mark.parametrize(
    ("text", "ranks", "capacity"),
    [
        ("", None, None),
        ('# HELP vllm:x y\nvllm:num_requests_running{engine="0"} 1.0\n', 1, None),
        (
            (
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="10",engine="0"} 1.0\n'
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="8",engine="1"} 1.0\n'
            ),
            2,
            128,
        ),
        ('vllm:cache_config_info{kv_cache_size_tokens="None",num_gpu_blocks="x"} 1.0', 1, None),
        ("vllm:garbage{", None, None),
    ],
)
def test_metrics_page_is_read_for_size(text: str, ranks: int | None, capacity: int | None) -> None:
    hints = read_metrics(text)

    assert hints.num_dp_ranks == ranks
    assert hints.kv_capacity_tokens == capacity
