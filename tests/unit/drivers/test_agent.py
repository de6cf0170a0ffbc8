"""The agent: it tells dsched everything, and whatever happens to it, the engine goes on."""

import asyncio
import logging
import select
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
import zmq

from dsched.drivers.agent import (
    LOAD_REPORTS,
    MAX_FAULTS,
    SEND_QUEUE_MESSAGES,
    Agent,
    AgentState,
    StepRecord,
    agent_identity,
    is_engine_id,
)
from dsched.drivers.reports import ReportReader
from dsched.drivers.wire import (
    AbortAttempts,
    AgentCommand,
    AgentGoodbye,
    AgentHello,
    AgentMessage,
    PlaceExperts,
    RankReport,
    SayHello,
    SetStepBudget,
)
from dsched.ids import DpRank, EngineId, RankId

MS = 1_000_000
HEARTBEAT_NS = 30 * MS
ENGINE = EngineId("e0")
MakeAgent = Callable[..., Agent]


def make_hello(**changes: object) -> AgentHello:
    fields: dict = {
        "dsched_version": "0",
        "engine_id": ENGINE,
        "incarnation": "00aa",
        "engine": "vllm",
        "engine_version": "0.32.0",
        "model": "tiny",
        "max_model_len": 100,
        "dp_rank": 0,
        "num_dp_ranks": 1,
        "kv_capacity_tokens": 1_000,
        "max_running_requests": 8,
        "features": (LOAD_REPORTS,),
    }
    return AgentHello(**(fields | changes))


def make_record(step: int, **changes: int) -> StepRecord:
    record = StepRecord(
        step=step,
        num_running=3,
        num_waiting=2,
        num_kv_tokens=40,
        num_waiting_prefill_tokens=9,
        step_ns=5 * MS,
        num_step_tokens=7,
    )
    return record._replace(**changes)


class Heard:
    """A subscriber that remembers, and can be waited for."""

    def __init__(self) -> None:
        self.messages: list[AgentMessage] = []
        self._news = asyncio.Event()

    def _hear(self, message: AgentMessage) -> None:
        self.messages.append(message)
        self._news.set()

    on_hello = on_report = on_goodbye = _hear

    def of(self, kind: type) -> list:
        return [each for each in self.messages if isinstance(each, kind)]

    async def wait(self, is_enough: Callable[["Heard"], bool], timeout_s: float = 10) -> None:
        async with asyncio.timeout(timeout_s):
            while not is_enough(self):
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def reader() -> AsyncIterator[ReportReader]:
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    reader.start()
    yield reader
    reader.close()


@pytest.fixture
def agents() -> Iterator[MakeAgent]:
    """Makes agents that end with the test."""
    made: list[Agent] = []

    def make(endpoint: str, **changes: object) -> Agent:
        fields: dict = {
            "endpoint": endpoint,
            "hello": make_hello(),
            "heartbeat_ns": HEARTBEAT_NS,
            "retry_ns": 1 * MS,
        }
        agent = Agent(**(fields | changes))
        made.append(agent)
        agent.start()
        return agent

    yield make
    for agent in made:
        agent.abandon()


async def test_steps_arrive_once_in_order(reader: ReportReader, agents: MakeAgent) -> None:
    """Every step becomes one report, with its counts, under a rising seq."""
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    agent = agents(reader.endpoint, heartbeat_ns=60_000 * MS)
    await heard.wait(lambda each: each.of(AgentHello))

    for step in range(1, 21):
        agent.record_step(make_record(step, num_kv_tokens=step * 10))
    await heard.wait(lambda each: each.messages[-1:] and last_step(each) == 20)

    reports = [each for each in heard.of(RankReport) if each.step]
    assert [each.step for each in reports] == list(range(1, 21))
    assert [each.num_kv_tokens for each in reports] == [step * 10 for step in range(1, 21)]
    assert [each.seq for each in reports] == list(range(reports[0].seq, reports[0].seq + 20))
    assert reports[0] == RankReport(
        engine_id=ENGINE,
        incarnation="00aa",
        dp_rank=0,
        seq=reports[0].seq,
        step=1,
        num_running=3,
        num_waiting=2,
        num_kv_tokens=10,
        num_waiting_prefill_tokens=9,
        kv_capacity_tokens=1_000,
        step_ns=5 * MS,
        num_step_tokens=7,
    )
    assert sum(reader.drops.values()) == 0


async def test_idle_agent_repeats_its_load_and_its_hello(
    reader: ReportReader, agents: MakeAgent
) -> None:
    """Without steps the last counts come again, with a step time of 0 and an unchanged step."""
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    agent = agents(reader.endpoint)
    agent.record_step(make_record(4))

    await heard.wait(lambda each: len(each.of(AgentHello)) >= 3 and len(each.of(RankReport)) >= 4)

    idle = heard.of(RankReport)[-1]
    assert (idle.step, idle.num_running, idle.num_kv_tokens) == (4, 3, 40)
    assert (idle.step_ns, idle.num_step_tokens) == (0, 0)


async def test_close_says_goodbye(reader: ReportReader, agents: MakeAgent) -> None:
    """An engine that stops on purpose says so; nothing follows."""
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    agent = agents(reader.endpoint)
    await heard.wait(lambda each: each.of(AgentHello))

    await asyncio.to_thread(agent.close)
    await heard.wait(lambda each: each.of(AgentGoodbye))
    agent.record_step(make_record(9))
    agent.close()

    assert agent.state is AgentState.CLOSED
    assert isinstance(heard.messages[-1], AgentGoodbye)


async def test_hello_is_said_when_asked(reader: ReportReader, agents: MakeAgent) -> None:
    """A dsched that has restarted need not wait for the next heartbeat."""
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    agents(reader.endpoint, heartbeat_ns=60_000 * MS)
    await heard.wait(lambda each: each.of(AgentHello))

    assert reader.send(RankId(ENGINE, DpRank(0)), SayHello())

    await heard.wait(lambda each: len(each.of(AgentHello)) == 2)


async def test_commands_reach_the_hook_and_a_hook_that_raises_changes_nothing(
    reader: ReportReader, agents: MakeAgent
) -> None:
    """A command goes to `on_command`; its fault is counted and the agent goes on."""
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    commands: list[AgentCommand] = []

    def on_command(command: AgentCommand) -> None:
        commands.append(command)
        raise RuntimeError("hook")

    agent = agents(reader.endpoint, on_command=on_command)
    await heard.wait(lambda each: each.of(AgentHello))
    command = AbortAttempts(epoch=3, attempt_ids=("a", "b"))

    reader.send(RankId(ENGINE, DpRank(0)), command)
    await until(lambda: agent.num_errors == 1)
    num_heard = len(heard.messages)
    agent.record_step(make_record(11))
    await heard.wait(lambda each: last_step(each) == 11 and len(each.messages) > num_heard)

    assert commands == [command]
    assert agent.state is AgentState.RUNNING


async def test_command_without_a_hook_is_counted(reader: ReportReader, agents: MakeAgent) -> None:
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    agent = agents(reader.endpoint)
    await heard.wait(lambda each: each.of(AgentHello))

    reader.send(RankId(ENGINE, DpRank(0)), AbortAttempts(epoch=1, attempt_ids=()))

    await until(lambda: agent.num_refused_commands == 1)
    assert agent.num_errors == 0


async def test_command_of_an_older_leader_is_refused(
    reader: ReportReader, agents: MakeAgent
) -> None:
    """A leader that was frozen and wakes up changes nothing; commands that need no leader pass."""
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    commands: list[AgentCommand] = []
    agent = agents(reader.endpoint, on_command=commands.append)
    await heard.wait(lambda each: each.of(AgentHello))
    budgets = [
        SetStepBudget(epoch=1, step_budget_ns=number, leader_epoch=leader_epoch)
        for number, leader_epoch in enumerate((7, 7, 9, 7, 8, None, 9, 10))
    ]
    placements = [
        PlaceExperts(epoch=1, leader_epoch=leader_epoch, slot_expert=((0, 1),))
        for leader_epoch in (9, 10, 11)
    ]
    abort = AbortAttempts(epoch=1, attempt_ids=("a",))

    for command in (*budgets, *placements, abort):
        reader.send(RankId(ENGINE, DpRank(0)), command)
    await until(lambda: abort in commands)

    passed = [each.step_budget_ns for each in commands if isinstance(each, SetStepBudget)]
    assert passed == [0, 1, 2, 5, 6, 7]
    assert [each for each in commands if isinstance(each, PlaceExperts)] == placements[1:]
    assert agent.num_refused_commands == 3


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1garbage"],
        [b"\x81\xa4type\xa3new"],
        [b"a", b"b", b"c"],
        [b"x" * 60_000],
        [b"\x82\xa4type\xa9say_hello\xa4more" + b"\x91" * 60_000 + b"\xc0"],
    ],
)
async def test_garbage_from_the_other_side_is_counted(
    agents: MakeAgent, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever comes from the endpoint, the agent keeps reporting; it says so once."""
    with raw_router() as (router, endpoint):
        agent = agents(endpoint)
        identity = (await recv(router))[0]

        for _ in range(20):
            router.send_multipart([identity, *frames])
        await until(lambda: agent.num_refused_commands == 20)
        agent.record_step(make_record(77))

        assert await is_step_seen(router, 77)
        assert agent.num_errors == 0
        told = [each.message for each in caplog.records if "command_unreadable" in each.message]
        assert len(told) == 1


async def test_fields_that_a_newer_dsched_adds_to_a_command_are_ignored(agents: MakeAgent) -> None:
    commands: list[AgentCommand] = []
    command = SetStepBudget(epoch=1, step_budget_ns=5)
    fields = msgspec.to_builtins(command) | {"surprise": [1]}
    with raw_router() as (router, endpoint):
        agent = agents(endpoint, on_command=commands.append)
        identity = (await recv(router))[0]

        router.send_multipart([identity, msgspec.msgpack.encode(fields)])
        await until(lambda: bool(commands))

    assert commands == [command]
    assert agent.num_refused_commands == 0


async def test_steps_cost_nothing_while_nobody_listens(agents: MakeAgent) -> None:
    """Without dsched, records are dropped, not kept: memory stays bounded, no step waits."""
    agent = agents("tcp://127.0.0.1:9", max_pending_steps=16)

    for step in range(20_000):
        agent.record_step(make_record(step))
    await until(lambda: not agent._records)

    assert agent.num_dropped > 0
    assert agent.num_errors == 0
    assert agent.state is AgentState.RUNNING


async def test_stuck_dsched_gets_a_bounded_queue(agents: MakeAgent) -> None:
    """A dsched that is connected and reads nothing costs the engine a bounded queue."""
    with raw_router(rcvhwm=1, rcvbuf=4_096) as (router, endpoint):
        agent = agents(endpoint)
        await recv(router)
        num_sent = 0

        async with asyncio.timeout(30):
            while agent.num_dropped < 1_000:
                for _ in range(200):
                    num_sent += 1
                    agent.record_step(make_record(num_sent))
                await asyncio.sleep(0.001)

        assert len(agent._records) <= 1_024
        assert agent.num_errors == 0
        assert SEND_QUEUE_MESSAGES < 1_000


async def test_dsched_that_starts_later_or_again_is_told_everything(agents: MakeAgent) -> None:
    """The agent connects by itself, and greets every dsched it finds."""
    first = ReportReader(endpoint="tcp://127.0.0.1:0")
    first.start()
    endpoint = first.endpoint
    first.close()
    agent = agents(endpoint)
    for round_number in (1, 2):
        reader = ReportReader(endpoint=endpoint)
        heard = Heard()
        reader.subscribe(ENGINE, heard)
        reader.start()

        await heard.wait(lambda each: each.of(AgentHello))
        agent.record_step(make_record(round_number))
        await heard.wait(lambda each, step=round_number: last_step(each) == step)

        reader.close()
    assert agent.num_errors == 0


async def test_unusable_endpoint_switches_the_agent_off_and_nothing_else(
    agents: MakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    """After `MAX_FAULTS` the agent says once that it gives up; steps go on as before."""
    with caplog.at_level(logging.WARNING, logger="dsched.agent"):
        agent = agents("tcp://not a host")
        await until(lambda: agent.state is AgentState.FAILED)
        agent.record_step(make_record(1))
        agent.close()

    assert agent.num_errors == MAX_FAULTS
    assert [each.message.split()[0] for each in caplog.records] == [
        "agent.disturbed",
        "agent.failed",
    ]


async def test_news_shorten_no_pause_after_a_fault(agents: MakeAgent) -> None:
    """They would have the agent give up within milliseconds; `close` does end a pause."""
    agent = agents("tcp://not a host", retry_ns=600_000 * MS)
    await until(lambda: agent.num_errors == 1)

    agent.drop_feature(LOAD_REPORTS)
    await until(lambda: agent.state is AgentState.FAILED or not has_bytes(agent._wake_read))

    assert agent.num_errors == 1
    assert agent.state is AgentState.RUNNING
    await asyncio.to_thread(agent.close, 10)
    assert agent.state is AgentState.CLOSED


def has_bytes(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_agent_that_cannot_be_started_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a system that has no thread left; steps cost nothing, and no descriptor is left open."""
    agent = Agent(endpoint="tcp://127.0.0.1:9", hello=make_hello())

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    agent.start()
    agent.record_step(make_record(1))
    agent.close()

    assert agent.state is AgentState.FAILED
    assert agent._wake_read == agent._wake_write == -1


async def test_lost_feature_ends_the_reports_and_is_named(
    reader: ReportReader, agents: MakeAgent
) -> None:
    """Without its load hook an agent must not repeat old counts as if they were the present."""
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    agent = agents(reader.endpoint)
    agent.record_step(make_record(1))
    await heard.wait(lambda each: each.of(RankReport))

    agent.drop_feature(LOAD_REPORTS)
    await heard.wait(lambda each: LOAD_REPORTS in each.of(AgentHello)[-1].missing)
    num_reports = len(heard.of(RankReport))
    num_hellos = len(heard.of(AgentHello))
    agent.record_step(make_record(2))
    await heard.wait(lambda each: len(each.of(AgentHello)) >= num_hellos + 3)

    assert heard.of(AgentHello)[-1].features == ()
    assert len(heard.of(RankReport)) == num_reports


@pytest.mark.parametrize("engine_id", ["", "a/b", "x" * 129])
def test_engine_id_that_is_no_identity_is_refused(engine_id: str) -> None:
    assert not is_engine_id(engine_id)
    with pytest.raises(ValueError, match="no slash"):
        Agent(endpoint="tcp://127.0.0.1:9", hello=make_hello(engine_id=engine_id))


def test_identity_fits_zeromq() -> None:
    """ZeroMQ's identities have at most 255 bytes."""
    assert len(agent_identity("x" * 128, "f" * 16, 4_095)) <= 255


# Helpers.


class raw_router:  # noqa: N801 - used as a function
    """A ROUTER that a test reads and writes itself."""

    def __init__(self, **options: int) -> None:
        self._options = options

    def __enter__(self) -> tuple[zmq.Socket, str]:
        self._context = zmq.Context()
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        for name, value in self._options.items():
            setattr(router, name, value)
        router.bind("tcp://127.0.0.1:0")
        return router, router.get_string(zmq.LAST_ENDPOINT)

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)


async def recv(router: zmq.Socket) -> list[bytes]:
    async with asyncio.timeout(10):
        while True:
            try:
                return router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.002)


async def is_step_seen(router: zmq.Socket, step: int) -> bool:
    for _ in range(1_000):
        message = msgspec.msgpack.decode((await recv(router))[1], type=AgentMessage)
        if isinstance(message, RankReport) and message.step == step:
            return True
    return False


def last_step(heard: Heard) -> int:
    reports = heard.of(RankReport)
    return reports[-1].step if reports else -1


async def until(is_true: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.002)
