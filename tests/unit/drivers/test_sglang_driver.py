"""SGLang's driver against a stand-in server: what is SGLang's own.

What every driver must do is in `tests/conformance`, which runs over the same stand-in.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
import structlog

from dsched.drivers import watch as watch_module
from dsched.drivers.base import FinishReason
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.driver import SglangDriver
from dsched.drivers.wire import KvMeeting
from dsched.errors import EngineRefusedError, EngineUnreachableError
from dsched.ids import AttemptId
from dsched.testing.driver_world import ENGINE, PROMPT, DriverWorld
from dsched.testing.recorders import RecordingListener, RecordingSink
from dsched.testing.sglang_double import KvRooms, SglangDouble


@pytest.fixture(autouse=True)
def _quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often than production does, so that tests need not wait."""
    monkeypatch.setattr(watch_module, "HEALTH_INTERVAL_S", 0.05)
    monkeypatch.setattr(watch_module, "MAX_RETRY_S", 0.1)
    monkeypatch.setattr(watch_module, "HELLO_PATIENCE_S", 0.5)


World = DriverWorld[SglangDriver, SglangDouble]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = DriverWorld(SglangDriver, SglangDouble)
    yield world
    await world.close()


async def test_engine_without_agents_is_described_by_itself(world: World) -> None:
    """Ranks, sizes, vocabulary and what requests may ask for come from the server."""
    double = await world.double(num_dp_ranks=2, kv_capacity_tokens=4_096, max_running_requests=9)

    await world.up(double)

    description = world.listener.ups[0]
    assert description.kind == "sglang"
    assert description.model == "tiny"
    assert description.num_dp_ranks == 2
    assert description.kv_capacity_tokens == 4_096
    assert description.max_running_requests == 9
    assert description.vocab_size == 512
    assert description.max_model_len == double.context_tokens - 6
    assert description.capabilities.can_structured_output
    assert not description.capabilities.can_seed
    assert not description.capabilities.has_load_reports
    assert double.bodies == [], "no question was computed"


async def test_seeds_count_where_sampling_is_deterministic(world: World) -> None:
    """Otherwise SGLang takes a seed and draws as it likes."""
    double = await world.double()
    double.is_deterministic = True

    await world.up(double)

    assert world.listener.ups[0].capabilities.can_seed


async def test_agents_say_their_ranks_sizes(world: World) -> None:
    """Reports of both ranks arrive, and counts are the agents'."""
    reports = ReportReader(endpoint="tcp://127.0.0.1:0")
    reports.start()
    double = await world.double(num_dp_ranks=2, agent_endpoint=reports.endpoint)

    await world.up(double, reports=reports)
    await world.generate(5, dp_rank=1).ended(5)
    await world.listener.wait(
        lambda each: {report.dp_rank for report in each.reports if report.step} == {1}, 10
    )

    assert world.listener.ups[0].capabilities.has_load_reports
    world.drivers[-1].close()
    reports.close()


@pytest.mark.parametrize("is_incremental", [True, False])
async def test_stream_is_exact_either_way(world: World, *, is_incremental: bool) -> None:
    """A server that repeats all tokens in every event is told apart from one that does not."""
    double = await world.double()
    double.is_incremental = is_incremental
    await world.up(double)

    sinks = [world.generate(40, prompt=(9, index), logprobs=1) for index in range(5)]
    await asyncio.gather(*(sink.ended(10) for sink in sinks))

    for index, sink in enumerate(sinks):
        assert sink.token_ids == double.model.stream((9, index), 40)
        assert [each.token_id for each in sink.logprobs] == sink.token_ids
        assert sink.violations == []


async def test_rank_is_steered_only_where_there_are_several(world: World) -> None:
    """Without a name SGLang's own balancer would choose, also for rank 0."""
    double = await world.double(num_dp_ranks=3)
    await world.up(double)
    for dp_rank in (2, 0, 1):
        await world.generate(1, dp_rank=dp_rank).ended(5)
    assert [body["routed_dp_rank"] for body in double.bodies] == [2, 0, 1]

    single = await world.double()
    world.listener = RecordingListener()
    await world.up(single)
    await world.generate(1).ended(5)
    assert "routed_dp_rank" not in single.bodies[0]


async def test_abort_is_said_and_takes_no_other_along(world: World) -> None:
    """SGLang aborts whatever begins with the given id; ours end with a sign."""
    double = await world.double()
    driver = await world.up(double)
    short = world.generate(900, attempt_id=AttemptId("ds-1"))
    longer = world.generate(300, attempt_id=AttemptId("ds-11"))
    await short.wait(lambda each: len(each.token_ids) > 2, 10)

    driver.abort(AttemptId("ds-1"))
    await short.ended(5)
    await longer.ended(20)

    assert short.finish is not None
    assert short.finish.reason is FinishReason.ABORT
    assert longer.token_ids == double.model.stream(PROMPT, 300)
    assert (double.num_running, double.num_waiting) == (0, 0)


async def test_abort_by_somebody_else_fails_the_attempt(world: World) -> None:
    """The answer is not passed off as whole, and the token that SGLang repeats is not taken."""
    double = await world.double()
    await world.up(double)
    sink = world.generate(900)
    await sink.wait(lambda each: len(each.token_ids) > 2, 10)

    run = double.ranks[0].running[0]
    double.ranks[0].forget(run)
    run.output.put_nowait(None)
    await sink.ended(5)

    assert sink.error is not None
    assert "Abort in waiting queue" in str(sink.error)
    assert sink.token_ids == double.model.stream(PROMPT, len(sink.token_ids))


async def test_stop_tokens_count_even_if_the_end_of_sequence_does_not(world: World) -> None:
    """SGLang's `ignore_eos` ignores stop token ids; the answer ends there all the same, and the
    engine computes nothing more for it."""
    double = await world.double()
    await world.up(double)
    expected = double.model.stream(PROMPT, 60)
    stop = expected[30]

    sink = world.generate(900, stop_token_ids=(stop,), ignore_eos=True)
    await sink.ended(10)
    async with asyncio.timeout(5):
        while double.num_running:
            await asyncio.sleep(0.01)

    assert sink.finish is not None
    assert sink.finish.reason is FinishReason.STOP
    assert sink.finish.stop_token_id == stop
    assert sink.token_ids == expected[: expected.index(stop)]
    assert sink.violations == []


@pytest.mark.parametrize("token_id", [512, 600_000, -1])
async def test_prompt_that_would_kill_the_engine_is_refused(world: World, token_id: int) -> None:
    """SGLang looks up whatever it is given and dies of it."""
    double = await world.double()
    await world.up(double)

    sink = world.generate(prompt=(7, token_id, 8))
    await sink.ended(5)
    healthy = world.generate()
    await healthy.ended(5)

    assert isinstance(sink.error, EngineRefusedError)
    assert sink.error.status == 400
    assert str(token_id) in str(sink.error)
    assert healthy.finish is not None
    assert len(double.bodies) == 1


async def test_death_of_the_server_fails_every_attempt(world: World) -> None:
    """The whole server goes with any of its schedulers."""
    double = await world.double(num_dp_ranks=2)
    await world.up(double)
    sinks = [world.generate(900, dp_rank=dp_rank) for dp_rank in (0, 1)]
    await sinks[1].wait(lambda each: len(each.token_ids) > 2, 10)

    await double.kill()
    await asyncio.gather(*(sink.ended(5) for sink in sinks))
    await world.listener.wait(lambda each: bool(each.downs), 5)

    assert all(isinstance(sink.error, EngineUnreachableError) for sink in sinks)


async def test_paused_server_gets_nothing_new(world: World) -> None:
    """`/ready` says no while generation is paused: down for dsched until it says yes."""
    double = await world.double()
    await world.up(double)

    double.is_paused = True
    await world.listener.wait(lambda each: bool(each.downs), 5)
    double.is_paused = False
    await world.listener.wait(lambda each: len(each.ups) == 2, 5)

    assert "503" in world.listener.downs[0][1]


async def test_server_without_ready_is_asked_for_its_health(world: World) -> None:
    double = SglangDouble(engine_id=ENGINE)
    double.has_ready = False
    world.doubles.append(double)
    await double.start()

    await world.up(double)
    await world.generate(2).ended(5)

    assert world.listener.downs == []


async def test_untried_version_warns_and_runs_with_what_is_there(world: World) -> None:
    """It is named in the log, is not asked what it might compute, and serves."""
    double = await world.double()
    double.version = "0.9.1"
    with structlog.testing.capture_logs() as logs:
        await world.up(double)
        await double.kill()
        await world.listener.wait(lambda each: bool(each.downs), 5)
        again = await world.double()
        again.version = "0.9.1"
        world.drivers[-1].close()
        await world.up(again)
    sink = world.generate(4)
    await sink.ended(5)

    named = [each for each in logs if each["event"] == "engine.version_unknown"]
    assert {each["engine_version"] for each in named} == {"0.9.1"}
    assert named[0]["tried"] == ("0.5.23",)
    assert world.listener.ups[0].vocab_size is None
    assert sink.token_ids == again.model.stream(PROMPT, 4)


async def test_tried_version_warns_of_nothing(world: World) -> None:
    double = await world.double()
    with structlog.testing.capture_logs() as logs:
        await world.up(double)

    assert [each for each in logs if each["log_level"] == "warning"] == []


async def test_refusal_in_a_stream_is_a_refusal(world: World) -> None:
    """SGLang answers 200 and tells of the fault in the stream."""
    double = await world.double(num_dp_ranks=2)
    await world.up(double)

    sink = world.generate(dp_rank=7)
    await sink.ended(5)

    assert isinstance(sink.error, EngineRefusedError)
    assert sink.error.status == 400
    assert "out of range" in str(sink.error)


async def test_format_without_a_word_fails_the_attempt_alone(world: World) -> None:
    double = await world.double()
    await world.up(double)

    sink = world.generate(structured_output={"type": "grammar"})

    assert isinstance(sink.error, EngineRefusedError)
    assert double.bodies == []


async def test_json_schema_reaches_the_engine(world: World) -> None:
    double = await world.double()
    await world.up(double)
    schema = {"type": "array"}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    await world.generate(1, structured_output=named).ended(5)

    sent = double.bodies[0]["sampling_params"]["json_schema"]
    assert msgspec.json.decode(sent) == schema


async def test_engine_that_routes_by_itself_is_told_of(world: World) -> None:
    """The recorded rank is compared with ours; a difference is said once and counted."""
    double = await world.double(num_dp_ranks=2)
    driver = await world.up(double)
    with structlog.testing.capture_logs() as logs:
        await world.generate(3, dp_rank=1).ended(5)
        double.is_own_router = True
        for dp_rank in (0, 1):
            await world.generate(3, dp_rank=dp_rank).ended(5)

    said = [each for each in logs if each["event"] == "rank.ignored"]
    assert [(each["wanted_dp_rank"], each["dp_rank"]) for each in said] == [(0, 1)]
    assert driver._dialect.num_misrouted == 2


# -- separate pools


class Split:
    """A prefill server with two DP ranks, a decode server, and a driver for each."""

    def __init__(self, world: World, *, timeout_s: float) -> None:
        self.world = world
        self.rooms = KvRooms(timeout_s=timeout_s)
        self.doubles: dict[str, SglangDouble] = {}
        self.drivers: dict[str, SglangDriver] = {}

    async def start(self) -> None:
        for mode, num_dp_ranks in (("prefill", 2), ("decode", 1)):
            double = await self.world.double(
                num_dp_ranks=num_dp_ranks, disaggregation_mode=mode, rooms=self.rooms
            )
            self.world.listener = RecordingListener()
            self.doubles[mode] = double
            self.drivers[mode] = await self.world.up(double)

    def ask(self, half: str, meeting: KvMeeting | None, **fields: object) -> RecordingSink:
        return self.world.generate(driver=self.drivers[half], meeting=meeting, **fields)


async def make_split(world: World, *, timeout_s: float = 5.0) -> Split:
    split = Split(world, timeout_s=timeout_s)
    await split.start()
    return split


async def test_halves_say_what_they_are(world: World) -> None:
    """A prefill server names where it is met; a decode server computes no prompts."""
    split = await make_split(world)

    prefill, decode = (split.drivers[half]._description for half in ("prefill", "decode"))

    assert prefill is not None
    assert decode is not None
    assert prefill.kv_meeting == ("127.0.0.1", 8_998)
    assert prefill.capabilities.can_prefill
    assert decode.kv_meeting is None
    assert not decode.capabilities.can_prefill


async def test_pair_meets_in_its_room(world: World) -> None:
    """Both halves are told the same room at the same time, and the answer is the model's own."""
    split = await make_split(world)
    meeting = KvMeeting(host="127.0.0.1", port=8_998, room=41)

    decode = split.ask("decode", meeting)
    prefill = split.ask("prefill", meeting, max_tokens=1, dp_rank=1)
    await asyncio.gather(prefill.ended(5), decode.ended(5))

    for half in ("prefill", "decode"):
        sent = split.doubles[half].bodies[0]
        assert (sent["bootstrap_host"], sent["bootstrap_port"]) == ("127.0.0.1", 8_998)
        assert sent["bootstrap_room"] == 41
    assert split.doubles["prefill"].bodies[0]["routed_dp_rank"] == 1
    assert prefill.token_ids == decode.token_ids[:1]
    assert decode.token_ids == split.doubles["decode"].model.stream(PROMPT, 8)


async def test_kv_that_does_not_come_fails_before_the_first_token(world: World) -> None:
    """The decode engine says so; no token is made up."""
    split = await make_split(world, timeout_s=0.1)

    decode = split.ask("decode", KvMeeting(host="127.0.0.1", port=8_998, room=42))
    await decode.ended(5)

    assert decode.token_ids == []
    assert decode.error is not None
    assert "transfer failed" in str(decode.error)


async def test_room_of_another_rank_is_no_meeting(world: World) -> None:
    """SGLang looks for the KV at the rank that is the room's remainder."""
    split = await make_split(world, timeout_s=0.3)
    meeting = KvMeeting(host="127.0.0.1", port=8_998, room=41)

    decode = split.ask("decode", meeting)
    await split.ask("prefill", meeting, max_tokens=1, dp_rank=0).ended(5)
    await decode.ended(5)

    assert decode.error is not None
