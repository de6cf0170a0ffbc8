"""What agents say, on dsched's side: one ZeroMQ socket for all engines of the cluster.

In: bytes from agents, or from anybody else who finds the port. Out: for each engine that somebody
subscribed to, `on_hello`, `on_report` and `on_goodbye`, on the event loop's thread, in the order in
which one agent sent them.

A message is dropped, and counted by reason, when it cannot be read (`malformed`), comes from
a higher wire version (`version`), names an engine that nobody subscribed to (`foreign`), belongs to
an incarnation that has ended (`old_incarnation`) or that has not said hello (`unknown_incarnation`;
it is asked to), or repeats an older report (`old_seq`). A restarted engine says hello with a new
incarnation, and from then on the old one is over, even if its last messages arrive late.

Nothing here raises for what arrives, and all memory is bounded. The socket's file descriptor is
watched by the event loop; one wake-up reads at most `MAX_MESSAGES_A_WAKE` messages, so a flood of
reports delays tokens by no more than that.
"""

import asyncio
import contextlib
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import structlog
import zmq

from dsched.clock import Clock, SystemClock
from dsched.drivers.base import ExpertLoad
from dsched.drivers.expert_report import decode_expert_load
from dsched.drivers.wire import (
    UNREADABLE,
    WIRE_VERSION,
    AgentCommand,
    AgentGoodbye,
    AgentHello,
    AgentMessage,
    ExpertLoadReport,
    RankReport,
    SayHello,
    Wire,
)
from dsched.errors import ConfigError
from dsched.ids import DpRank, EngineId, RankId

MAX_MESSAGE_BYTES: Final = 524_288
"""One message of an agent; the largest are expert loads, others a few hundred bytes. More closes
the connection."""
MAX_PENDING_MESSAGES: Final = 65_536
"""Messages that ZeroMQ holds for us. Below: bursts of many ranks are lost. Above: after a pause
dsched works through loads that are long out of date."""
MAX_MESSAGES_A_WAKE: Final = 512
"""Messages handled before other work of the event loop gets its turn; about 3 ms."""
MAX_RETIRED_INCARNATIONS: Final = 8
"""Ended incarnations remembered for each rank. A rank restarts more rarely than its last messages
can be late."""
MAX_DP_RANKS: Final = 4_096
"""DP ranks of one engine. More is a broken message, not a large engine."""
SILENCE_NS: Final = 3_000_000_000
"""Without a word for so long an agent counts as silent; it speaks at least once a second."""
MAX_MISSING_FEATURES: Final = 16
"""Names of lost features taken from one agent: they become label values of a metric."""
MAX_ASKED: Final = 4_096
"""Incarnations that were asked to say hello; an agent that does not answer is not asked again
until so many others were."""


DOUBLE_HELLOS: Final = 3
"""Hellos of a replaced incarnation after which it counts as alive; they come once a second. Fewer:
late ones of a restarted engine look like two engines."""
MAX_LOGGED_CHARS: Final = 64

log = structlog.get_logger(__name__)


class ReportSubscriber(Protocol):
    """Hears one engine's agents. Methods must not raise and must not block."""

    def on_hello(self, hello: AgentHello) -> None:
        """A rank's agent says what it is: after its start, and about once a second."""
        ...

    def on_report(self, report: RankReport) -> None: ...

    def on_expert_load(self, load: ExpertLoad) -> None:
        """A worker of the engine has counted what its experts had to do."""
        ...

    def on_goodbye(self, goodbye: AgentGoodbye) -> None:
        """The engine stops this rank on purpose."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """How dsched hears one rank's agent."""

    rank_id: RankId
    is_heard: bool
    """It spoke within `SILENCE_NS` and has not said goodbye."""
    missing: tuple[str, ...]
    """Features that it could not attach, or has lost since."""
    features: tuple[str, ...] = ()
    """Features that are attached."""


class _Head(Wire, frozen=True, kw_only=True):
    """What a hello of any wire version has. Other messages have no version."""

    wire_version: int
    engine_id: str
    dsched_version: str = "?"


class _Rank:
    """What is remembered of one rank's agent."""

    __slots__ = (
        "features",
        "heard_ns",
        "identity",
        "incarnation",
        "missing",
        "retired",
        "seq",
    )

    def __init__(self) -> None:
        self.heard_ns = 0
        self.missing: tuple[str, ...] = ()
        self.features: tuple[str, ...] = ()
        self.incarnation: str | None = None
        self.seq = -1
        self.identity = b""
        self.retired: OrderedDict[str, int] = OrderedDict()
        """Incarnations that were replaced or said goodbye, with the hellos they sent since."""

    def retire(self) -> None:
        if self.incarnation is not None:
            self.retired[self.incarnation] = 0
            if len(self.retired) > MAX_RETIRED_INCARNATIONS:
                self.retired.popitem(last=False)
        self.incarnation = None
        self.seq = -1


class ReportReader:
    """Receives agents' messages and hands them to the engines' drivers.

    Belongs to one event loop. `subscribe` may come before or after `start`.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        max_pending_messages: int = MAX_PENDING_MESSAGES,
        clock: Clock | None = None,
    ) -> None:
        self.drops: Counter[str] = Counter()
        """Dropped messages by reason; the reasons are those of the module's docstring."""
        self.num_received = 0
        self.num_commands_dropped = 0
        """Commands to agents that were not there."""
        self._endpoint = endpoint
        self._max_pending_messages = max_pending_messages
        self._clock = clock or SystemClock()
        self._subscribers: dict[str, ReportSubscriber] = {}
        self._ranks: dict[RankId, _Rank] = {}
        self._asked: OrderedDict[bytes, None] = OrderedDict()
        self._refused: dict[str, None] = {}
        """Engines whose agents are of a newer version, as far as they were named."""
        self._unreadable: dict[str, None] = {}
        """Engines of which a message could not be read, as far as they were named."""
        self._decoder: msgspec.msgpack.Decoder[AgentMessage] = msgspec.msgpack.Decoder(AgentMessage)
        self._head_decoder = msgspec.msgpack.Decoder(_Head)
        self._encoder = msgspec.msgpack.Encoder()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1

    @property
    def endpoint(self) -> str:
        """The endpoint that agents connect to; names the port once `start` has chosen it."""
        return self._endpoint

    def start(self) -> None:
        """Bind the socket and read it on the running event loop.

        Raises:
            ConfigError: the endpoint cannot be bound.
        """
        if self._socket is not None:
            return
        check_endpoint(self._endpoint)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.rcvhwm = self._max_pending_messages
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.linger = 0
        # An agent whose connection broke without a word comes back under its own identity.
        socket.router_handover = 1
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(f"agent endpoint {self._endpoint!r}: {error}") from error
        self._endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        self._context, self._socket = context, socket
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.get(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Close the socket. Idempotent; subscribers hear nothing more."""
        if self._socket is None or self._context is None or self._loop is None:
            return
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)
        self._socket = None

    def subscribe(self, engine_id: EngineId, subscriber: ReportSubscriber) -> None:
        """Hand what the agents of `engine_id` say to `subscriber`.

        Raises:
            ValueError: the engine has a subscriber already.
        """
        if engine_id in self._subscribers:
            raise ValueError(f"engine {engine_id!r} has a subscriber already")
        self._subscribers[engine_id] = subscriber

    def unsubscribe(self, engine_id: EngineId) -> None:
        """Forget the engine and its agents. Unknown ids are ignored."""
        self._subscribers.pop(engine_id, None)
        for rank_id in [each for each in self._ranks if each.engine_id == engine_id]:
            del self._ranks[rank_id]

    def agents(self) -> tuple[AgentStatus, ...]:
        """Return every agent that ever greeted under a subscribed engine, by rank id."""
        now_ns = self._clock.now_ns()
        return tuple(
            AgentStatus(
                rank_id=rank_id,
                is_heard=rank.incarnation is not None and now_ns - rank.heard_ns < SILENCE_NS,
                missing=rank.missing,
                features=rank.features,
            )
            for rank_id, rank in sorted(self._ranks.items())
        )

    def send(self, rank_id: RankId, command: AgentCommand) -> bool:
        """Send a command to a rank's agent; return whether one is connected to take it."""
        rank = self._ranks.get(rank_id)
        if rank is None or rank.incarnation is None:
            self.num_commands_dropped += 1
            return False
        return self._send(rank.identity, command)

    def _send(self, identity: bytes, command: AgentCommand) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send_multipart([identity, self._encoder.encode(command)], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.num_commands_dropped += 1
            return False
        if self._loop is not None:
            # Sending can swallow the edge that a message just arrived made.
            self._loop.call_soon(self._read)
        return True

    def _read(self) -> None:
        # ZeroMQ's descriptor signals edges, not levels: read until empty, or come back unasked,
        # also after a fault.
        is_empty = False
        try:
            is_empty = self._read_some()
        finally:
            if not is_empty and self._loop is not None:
                self._loop.call_soon(self._read)

    def _read_some(self) -> bool:
        """Whether nothing is left to read."""
        for _ in range(MAX_MESSAGES_A_WAKE):
            if self._socket is None:
                return True
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self.receive(frames)
        return False

    def receive(self, frames: list[bytes]) -> None:
        """Take one message as the socket delivers it: the sender's identity, then the payload."""
        self.num_received += 1
        message = self._decode(frames)
        if message is None:
            return
        subscriber = self._subscribers.get(message.engine_id)
        if subscriber is None:
            self.drops["foreign"] += 1
        elif isinstance(message, RankReport):
            if self._is_current_report(message, frames[0]):
                subscriber.on_report(message)
        elif isinstance(message, AgentHello):
            if self._is_current_hello(message, frames[0]):
                subscriber.on_hello(message)
        elif isinstance(message, ExpertLoadReport):
            self._take_expert_load(message, subscriber)
        elif self._is_current_goodbye(message):
            subscriber.on_goodbye(message)

    def _take_expert_load(self, report: ExpertLoadReport, subscriber: ReportSubscriber) -> None:
        try:
            load = decode_expert_load(report, now_ns=self._clock.now_ns())
        except ValueError:
            self.drops["malformed"] += 1
            return
        subscriber.on_expert_load(load)

    def _decode(self, frames: list[bytes]) -> AgentMessage | None:
        if len(frames) != 2:
            self.drops["malformed"] += 1
            return None
        try:
            return self._decoder.decode(frames[1])
        except UNREADABLE as error:
            self._drop_unreadable(frames, str(error))
        return None

    def _drop_unreadable(self, frames: list[bytes], reason: str) -> None:
        """Count a message, and name its sender once: as one of another version if it says so."""
        with contextlib.suppress(*UNREADABLE):
            head = self._head_decoder.decode(frames[1])
            if head.wire_version > WIRE_VERSION:
                self._refuse_version(head)
                return
        self.drops["malformed"] += 1
        engine_id = frames[0].partition(b"/")[0].decode(errors="replace")[:MAX_LOGGED_CHARS]
        if engine_id not in self._unreadable and len(self._unreadable) < MAX_ASKED:
            self._unreadable[engine_id] = None
            log.warning("agent.message_unreadable", engine_id=engine_id, reason=reason)

    def _refuse_version(self, hello: "AgentHello | _Head") -> None:
        """Count an agent of a newer dsched, and name it once."""
        self.drops["version"] += 1
        engine_id = hello.engine_id[:MAX_LOGGED_CHARS]
        if engine_id not in self._refused and len(self._refused) < MAX_ASKED:
            self._refused[engine_id] = None
            log.error(
                "agent.version_refused",
                engine_id=engine_id,
                dsched_version=hello.dsched_version[:MAX_LOGGED_CHARS],
                wire_version=hello.wire_version,
                wanted=WIRE_VERSION,
                reason="the engine has a newer dsched than this one; upgrade this one",
            )

    def _note_double(self, rank: _Rank, hello: AgentHello) -> None:
        """A replaced agent that goes on greeting lives: two engines have one id."""
        rank.retired[hello.incarnation] += 1
        if rank.retired[hello.incarnation] == DOUBLE_HELLOS and rank.incarnation is not None:
            log.error(
                "agent.id_taken",
                engine_id=hello.engine_id,
                dp_rank=hello.dp_rank,
                incarnation=hello.incarnation,
                taken_by=rank.incarnation,
                reason="two engines publish under one id; give each its own DSCHED_ENGINE_ID",
            )

    def _is_current_report(self, report: RankReport, identity: bytes) -> bool:
        rank = self._ranks.get(_rank_id(report))
        if rank is None or rank.incarnation != report.incarnation:
            if rank is not None and report.incarnation in rank.retired:
                self.drops["old_incarnation"] += 1
            else:
                self.drops["unknown_incarnation"] += 1
                self._ask_for_hello(identity)
            return False
        if report.seq <= rank.seq:
            self.drops["old_seq"] += 1
            return False
        rank.seq = report.seq
        rank.heard_ns = self._clock.now_ns()
        return True

    def _is_current_hello(self, hello: AgentHello, identity: bytes) -> bool:
        if hello.wire_version > WIRE_VERSION:
            self._refuse_version(hello)
            return False
        if not hello.dp_rank < hello.num_dp_ranks <= MAX_DP_RANKS:
            self.drops["malformed"] += 1
            return False
        rank = self._ranks.setdefault(_rank_id(hello), _Rank())
        if rank.incarnation != hello.incarnation:
            if hello.incarnation in rank.retired:
                self.drops["old_incarnation"] += 1
                self._note_double(rank, hello)
                return False
            rank.retire()
            rank.incarnation = hello.incarnation
        rank.identity = identity
        rank.heard_ns = self._clock.now_ns()
        rank.missing = hello.missing[:MAX_MISSING_FEATURES]
        rank.features = hello.features[:MAX_MISSING_FEATURES]
        self._asked.pop(identity, None)
        return True

    def _is_current_goodbye(self, goodbye: AgentGoodbye) -> bool:
        rank = self._ranks.get(_rank_id(goodbye))
        if rank is None or rank.incarnation != goodbye.incarnation:
            self.drops["old_incarnation"] += 1
            return False
        rank.retire()
        return True

    def _ask_for_hello(self, identity: bytes) -> None:
        if identity in self._asked:
            return
        self._asked[identity] = None
        if len(self._asked) > MAX_ASKED:
            self._asked.popitem(last=False)
        self._send(identity, SayHello())


def check_endpoint(endpoint: str) -> None:
    """Refuse a TCP port that does not exist: ZeroMQ would take it modulo 65536.

    Raises:
        ConfigError: the port is above 65535.
    """
    port = endpoint.rpartition(":")[2]
    if endpoint.startswith("tcp://") and port.isdecimal() and int(port) > 65_535:
        raise ConfigError(f"agent endpoint {endpoint!r}: port {port} is above 65535")


def _rank_id(message: RankReport | AgentHello | AgentGoodbye) -> RankId:
    return RankId(EngineId(message.engine_id), DpRank(message.dp_rank))
