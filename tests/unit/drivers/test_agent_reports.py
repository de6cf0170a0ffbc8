"""The report reader: what is current reaches its subscriber, everything else is counted."""

import asyncio
from itertools import pairwise

import msgspec
import pytest
import structlog
import zmq
from hypothesis import given
from hypothesis import strategies as st

from dsched.clock import ManualClock
from dsched.drivers.reports import MAX_RETIRED_INCARNATIONS, SILENCE_NS, ReportReader
from dsched.drivers.wire import (
    WIRE_VERSION,
    AgentGoodbye,
    AgentHello,
    AgentMessage,
    RankReport,
    SayHello,
)
from dsched.errors import ConfigError
from dsched.ids import DpRank, EngineId, RankId

ENGINE = EngineId("e0")
ENCODER = msgspec.msgpack.Encoder()


class Heard:
    """A subscriber that remembers."""

    def __init__(self) -> None:
        self.messages: list[AgentMessage] = []

    def _hear(self, message: AgentMessage) -> None:
        self.messages.append(message)

    on_hello = on_report = on_goodbye = _hear


def hello(incarnation: str = "i1", **changes: object) -> AgentHello:
    fields: dict = {
        "dsched_version": "0",
        "engine_id": ENGINE,
        "incarnation": incarnation,
        "engine": "vllm",
        "engine_version": "0.32.0",
        "model": "tiny",
        "max_model_len": 100,
        "dp_rank": 0,
        "num_dp_ranks": 2,
        "kv_capacity_tokens": 1_000,
        "max_running_requests": 8,
    }
    return AgentHello(**(fields | changes))


def report(seq: int, incarnation: str = "i1", **changes: object) -> RankReport:
    fields: dict = {
        "engine_id": ENGINE,
        "incarnation": incarnation,
        "dp_rank": 0,
        "seq": seq,
        "step": seq,
        "num_running": 1,
        "num_waiting": 0,
        "num_kv_tokens": 10,
        "num_waiting_prefill_tokens": 0,
        "kv_capacity_tokens": 1_000,
        "step_ns": 5,
    }
    return RankReport(**(fields | changes))


def goodbye(incarnation: str = "i1") -> AgentGoodbye:
    return AgentGoodbye(engine_id=ENGINE, incarnation=incarnation, dp_rank=0)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def reader(heard: Heard) -> ReportReader:
    """A reader without a socket; `receive` is what its socket would call."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    reader.subscribe(ENGINE, heard)
    return reader


def receive(reader: ReportReader, *messages: AgentMessage) -> None:
    for message in messages:
        reader.receive([b"sender", ENCODER.encode(message)])


def test_reports_of_a_greeted_incarnation_pass_in_order(reader: ReportReader, heard: Heard) -> None:
    messages = [hello(), report(1), report(2), report(5), hello(), report(6), goodbye()]

    receive(reader, *messages)

    assert heard.messages == messages
    assert reader.drops == {}


def test_report_that_repeats_or_goes_back_is_dropped(reader: ReportReader, heard: Heard) -> None:
    """Only a higher seq is news."""
    receive(reader, hello(), report(3), report(3), report(2), report(4))

    assert [each.seq for each in heard.messages if isinstance(each, RankReport)] == [3, 4]
    assert reader.drops == {"old_seq": 2}


def test_restart_ends_the_old_incarnation_for_good(reader: ReportReader, heard: Heard) -> None:
    """After the new hello, late words of the old one are dropped, its hello and goodbye too."""
    receive(reader, hello("old"), report(9, "old"), hello("new"))
    num_heard = len(heard.messages)

    receive(reader, report(10, "old"), hello("old"), goodbye("old"), report(1, "new"))

    assert heard.messages[num_heard:] == [report(1, "new")]
    assert reader.drops == {"old_incarnation": 3}


def test_two_engines_with_one_id_are_named_once(reader: ReportReader, heard: Heard) -> None:
    """The second stays, the first is dropped, and the log says what to do."""
    receive(reader, hello("one"), hello("two"))
    with structlog.testing.capture_logs() as logs:
        receive(reader, *[hello("one"), hello("two")] * 5)

    (taken,) = logs
    assert (taken["event"], taken["log_level"]) == ("agent.id_taken", "error")
    assert (taken["incarnation"], taken["taken_by"]) == ("one", "two")
    assert [each.incarnation for each in heard.messages] == ["one", "two"] + ["two"] * 5


def test_one_late_hello_of_a_restarted_engine_is_no_second_engine(reader: ReportReader) -> None:
    """It was under way when the engine ended."""
    receive(reader, hello("old"), hello("new"))
    with structlog.testing.capture_logs() as logs:
        receive(reader, hello("old"), hello("new"))

    assert logs == []


def test_an_agent_of_another_version_is_named_once(reader: ReportReader, heard: Heard) -> None:
    """It keeps greeting; the log does not."""
    with structlog.testing.capture_logs() as logs:
        receive(reader, *[hello(wire_version=99)] * 3)

    assert [each["event"] for each in logs] == ["agent.version_refused"]
    assert (logs[0]["engine_id"], logs[0]["dsched_version"]) == ("e0", "0")
    assert (logs[0]["wire_version"], logs[0]["wanted"]) == (99, WIRE_VERSION)
    assert heard.messages == []
    assert reader.drops == {"version": 3}


def test_goodbye_ends_the_incarnation(reader: ReportReader, heard: Heard) -> None:
    receive(reader, hello(), report(1), goodbye(), report(2), hello())

    assert heard.messages == [hello(), report(1), goodbye()]
    assert reader.drops == {"old_incarnation": 2}


def test_report_before_any_hello_is_dropped(reader: ReportReader, heard: Heard) -> None:
    """Its seq and size mean nothing until the incarnation is known."""
    receive(reader, report(1), report(2))

    assert heard.messages == []
    assert reader.drops == {"unknown_incarnation": 2}


def test_engine_nobody_asked_about_is_foreign(reader: ReportReader, heard: Heard) -> None:
    receive(reader, hello(engine_id="other"), report(1, engine_id="other"))

    assert heard.messages == []
    assert reader.drops == {"foreign": 2}


def test_ranks_of_one_engine_are_apart(reader: ReportReader, heard: Heard) -> None:
    """Each rank has its own incarnation and its own seq."""
    messages = [
        hello("a"),
        hello("b", dp_rank=1),
        report(7, "a"),
        report(1, "b", dp_rank=1),
        report(8, "a"),
    ]

    receive(reader, *messages)

    assert heard.messages == messages


def test_unsubscribed_engine_is_forgotten(reader: ReportReader, heard: Heard) -> None:
    receive(reader, hello())
    reader.unsubscribe(ENGINE)
    reader.unsubscribe(ENGINE)

    receive(reader, report(1))
    reader.subscribe(ENGINE, heard)
    receive(reader, report(2))

    assert heard.messages == [hello()]
    assert reader.drops == {"foreign": 1, "unknown_incarnation": 1}


def test_silence_and_lost_features_are_seen(heard: Heard) -> None:
    """An agent that fails goes silent or says what it lost; the operator can see both."""
    clock = ManualClock()
    reader = ReportReader(endpoint="tcp://127.0.0.1:0", clock=clock)
    reader.subscribe(ENGINE, heard)
    receive(reader, hello("a"), hello("b", dp_rank=1, missing=("load_reports",)))
    assert [each.is_heard for each in reader.agents()] == [True, True]
    assert [each.missing for each in reader.agents()] == [(), ("load_reports",)]

    clock.advance_to(SILENCE_NS - 1)
    receive(reader, report(1, "a"))
    clock.advance_to(SILENCE_NS)
    assert [each.is_heard for each in reader.agents()] == [True, False]

    receive(reader, goodbye("a"))
    assert [each.is_heard for each in reader.agents()] == [False, False]


def test_engine_has_one_subscriber(reader: ReportReader) -> None:
    with pytest.raises(ValueError, match="'e0' has a subscriber already"):
        reader.subscribe(ENGINE, Heard())


def test_old_incarnations_are_remembered_in_bounds(reader: ReportReader, heard: Heard) -> None:
    """A rank that restarts for ever costs a few names; the latest of them stay refused."""
    names = [f"i{index}" for index in range(3 * MAX_RETIRED_INCARNATIONS)]

    receive(reader, *(hello(name) for name in names))
    receive(reader, report(1, names[-2]), report(1, names[-1]))

    assert heard.messages[-1] == report(1, names[-1])
    assert reader.drops == {"old_incarnation": 1}
    [rank] = reader._ranks.values()
    assert len(rank.retired) == MAX_RETIRED_INCARNATIONS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"wire_version": WIRE_VERSION + 1}, "version"),
        ({"wire_version": WIRE_VERSION + 1, "new_field": 1}, "version"),
        ({"dp_rank": 2}, "malformed"),
        ({"num_dp_ranks": 1 << 40}, "malformed"),
        ({"kv_capacity_tokens": -1}, "malformed"),
        ({"kv_capacity_tokens": "many"}, "malformed"),
        ({"wire_version": 0}, "malformed"),
        ({"wire_version": WIRE_VERSION + 1, "dp_rank": "many"}, "version"),
        ({"type": "unheard"}, "malformed"),
    ],
)
def test_hello_that_cannot_be_used_is_dropped_by_reason(
    reader: ReportReader, heard: Heard, change: dict[str, object], reason: str
) -> None:
    """Another wire version is named as such: the operator can act on it."""
    fields = msgspec.to_builtins(hello()) | change

    reader.receive([b"sender", msgspec.msgpack.encode(fields)])

    assert heard.messages == []
    assert reader.drops == {reason: 1}


@pytest.mark.parametrize("message", [hello(), report(1), goodbye()])
def test_fields_that_a_newer_agent_adds_are_ignored(
    reader: ReportReader, heard: Heard, message: AgentMessage
) -> None:
    """Engines are upgraded one by one."""
    receive(reader, hello())
    fields = msgspec.to_builtins(message) | {"surprise": [1, {"a": None}]}

    reader.receive([b"sender", msgspec.msgpack.encode(fields)])

    assert heard.messages == [hello(), message]
    assert reader.drops == {}


def test_what_nests_without_end_is_malformed(reader: ReportReader, heard: Heard) -> None:
    """In a field that would be ignored."""
    payload = msgspec.msgpack.encode(msgspec.to_builtins(hello()) | {"surprise": None})
    assert payload.endswith(b"\xc0")

    reader.receive([b"sender", payload[:-1] + b"\x91" * 100_000 + b"\xc0"])

    assert heard.messages == []
    assert reader.drops == {"malformed": 1}


def test_a_sender_that_cannot_be_read_is_named_once(reader: ReportReader) -> None:
    """The reason is that of its first message; other engines are named for themselves."""
    fields = msgspec.to_builtins(report(1))
    broken = msgspec.msgpack.encode(fields | {"num_running": "many"})
    unheard = msgspec.msgpack.encode(fields | {"type": "unheard"})

    with structlog.testing.capture_logs() as logs:
        for identity in (b"e0/00/0", b"e0/00/1", b"e1/00/0", b"\x00\xff"):
            for payload in (broken, unheard, broken):
                reader.receive([identity, payload])

    told = [(each["event"], each["engine_id"]) for each in logs]
    assert told == [("agent.message_unreadable", name) for name in ("e0", "e1", "\x00\ufffd")]
    assert logs[0]["reason"] == "Expected `int`, got `str` - at `$.num_running`"
    assert reader.drops == {"malformed": 12}


@pytest.mark.parametrize("num_frames", [0, 1, 3])
def test_message_of_another_shape_is_malformed(reader: ReportReader, num_frames: int) -> None:
    reader.receive([ENCODER.encode(hello())] * num_frames)

    assert reader.drops == {"malformed": 1}


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_any_bytes_are_counted_and_harmless(frames: list[bytes]) -> None:
    """Nothing that arrives raises, and each message is either heard or counted."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    heard = Heard()
    reader.subscribe(ENGINE, heard)

    reader.receive(frames)

    assert sum(reader.drops.values()) + len(heard.messages) == reader.num_received == 1


@given(st.lists(st.sampled_from("habcABCgG"), max_size=40))
def test_no_history_brings_an_old_incarnation_back(story: list[str]) -> None:
    """Two incarnations in any order of messages: each is heard in one piece, seqs rise."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    for seq, letter in enumerate(story):
        incarnation = "i1" if letter.islower() else "i2"
        kind = letter.lower()
        if kind in "ah":
            receive(reader, hello(incarnation))
        elif kind == "g":
            receive(reader, goodbye(incarnation))
        else:
            receive(reader, report(seq if kind == "b" else max(0, seq - 3), incarnation))

    order = [each.incarnation for each in heard.messages]
    changes = sum(before != after for before, after in pairwise(order))
    assert changes <= 1
    for incarnation in ("i1", "i2"):
        seqs = [
            each.seq
            for each in heard.messages
            if isinstance(each, RankReport) and each.incarnation == incarnation
        ]
        assert seqs == sorted(set(seqs))


async def test_unknown_sender_is_asked_for_a_hello_once() -> None:
    """A dsched that restarts does not wait for the heartbeat of agents that know nothing of it."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    reader.start()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(reader.endpoint)
    try:
        for seq in (1, 2, 3):
            dealer.send(ENCODER.encode(report(seq)))
        answer = await recv(dealer)
        dealer.send(ENCODER.encode(hello()))
        dealer.send(ENCODER.encode(report(4)))
        async with asyncio.timeout(10):
            while len(heard.messages) < 2:
                await asyncio.sleep(0.002)

        assert msgspec.msgpack.decode(answer, type=SayHello) == SayHello()
        assert heard.messages == [hello(), report(4)]
        with pytest.raises(zmq.Again):
            dealer.recv(zmq.NOBLOCK)
    finally:
        context.destroy(linger=0)
        reader.close()


async def test_a_fault_of_a_subscriber_makes_nobody_deaf() -> None:
    """ZeroMQ tells of what comes after what was read, not of what lies there unread."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")

    class Faulty(Heard):
        def on_hello(self, hello: AgentHello) -> None:
            raise ZeroDivisionError

    heard = Faulty()
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: faults.append(context["exception"])
    )
    reader.subscribe(ENGINE, heard)
    reader.start()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(reader.endpoint)
    try:
        for message in (hello(), report(1), report(2)):
            dealer.send(ENCODER.encode(message))
        async with asyncio.timeout(10):
            while len(heard.messages) < 2:
                await asyncio.sleep(0.002)
    finally:
        context.destroy(linger=0)
        reader.close()

    assert heard.messages == [report(1), report(2)]
    assert list(map(type, faults)) == [ZeroDivisionError]


async def test_flood_leaves_the_event_loop_its_turns() -> None:
    """Thousands of waiting messages are read in portions, and all of them are read."""
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    heard = Heard()
    reader.subscribe(ENGINE, heard)
    reader.start()
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.sndhwm = 0
    dealer.connect(reader.endpoint)
    num_turns = 0
    try:
        dealer.send(ENCODER.encode(hello()))
        for seq in range(5_000):
            dealer.send(ENCODER.encode(report(seq)))
        async with asyncio.timeout(20):
            while len(heard.messages) < 5_001:
                num_turns += 1
                await asyncio.sleep(0)

        assert num_turns > 5
    finally:
        context.destroy(linger=0)
        reader.close()


async def test_command_to_an_absent_agent_is_counted() -> None:
    reader = ReportReader(endpoint="tcp://127.0.0.1:0")
    reader.start()

    assert not reader.send(RankId(ENGINE, DpRank(0)), SayHello())
    reader.close()
    reader.close()

    assert reader.num_commands_dropped == 1


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:99999", "nonsense", "tcp://256.0.0.1:1"])
async def test_endpoint_that_cannot_be_bound_is_the_operators(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="agent endpoint"):
        ReportReader(endpoint=endpoint).start()


async def test_taken_port_is_named() -> None:
    first = ReportReader(endpoint="tcp://127.0.0.1:0")
    first.start()

    with pytest.raises(ConfigError, match="in use"):
        ReportReader(endpoint=first.endpoint).start()

    first.close()


async def recv(socket: zmq.Socket) -> bytes:
    async with asyncio.timeout(10):
        while True:
            try:
                return socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                await asyncio.sleep(0.002)
