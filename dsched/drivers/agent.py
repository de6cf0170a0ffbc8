"""The agent: a thread inside an engine process that tells dsched how the engine is doing.

It knows no engine. A driver's hook (a scheduler mixin, a plug-in) hands it one `StepRecord` a step
and one `AgentHello`; the agent publishes them over ZeroMQ and passes commands back.

What it must never do is disturb the engine, so:

- `record_step` is the whole step path: one append to a bounded deque, and one byte into a pipe if
  the thread sleeps; 10 to 30 us. No lock is taken, nothing blocks, nothing raises. (Letting the
  thread look every 2 ms instead spares the byte, but costs more CPU in all and delays reports.)
- Everything else happens in a daemon thread. A fault there is counted in `num_errors`, logged
  once, and answered with a new socket; after `MAX_FAULTS` in a row the agent switches itself off.
- All queues are bounded. When dsched is away, slow or stuck, reports are dropped and counted; the
  memory of the engine does not grow, and the next report that arrives is a fresh one.

One socket, both ways: the agent connects a DEALER to dsched's ROUTER. dsched binds, so any number
of engines needs one endpoint, and engines may start before it. The socket's identity is
`ENGINE_ID/INCARNATION/DP_RANK`. PUB/SUB would drop as well, but needs a second socket for
commands and hides from dsched who is connected.

What is sent: an `AgentHello` at the start, every second, and when asked (dsched may have
restarted); a `RankReport` for each step; without a step, one each second with `step_ns` 0, in which
an unchanged `step` beside running requests means that a step takes long or hangs; an
`AgentGoodbye` at the end.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Final, NamedTuple

import msgspec
import zmq

from dsched.clock import Clock, SystemClock
from dsched.drivers.base import LeaderFence
from dsched.drivers.wire import (
    UNREADABLE,
    AgentCommand,
    AgentGoodbye,
    AgentHello,
    AgentMessage,
    PlaceExperts,
    RankReport,
    SayHello,
    SetStepBudget,
)

HEARTBEAT_NS: Final = 1_000_000_000
"""Between two hellos, and between two reports of an idle rank. dsched's patience with a silent
agent is a multiple of it."""
HELLO_RETRY_NS: Final = 100_000_000
"""Between two attempts to greet a dsched that is not connected."""
MAX_PENDING_STEPS: Final = 1_024
"""Step records that wait for the thread. Beyond it the oldest are lost: that many steps are
seconds of decoding, after which only the newest load matters."""
MAX_ENGINE_ID_BYTES: Final = 128
"""The engine id is part of the socket's identity, and ZeroMQ's holds 255 bytes."""
SEND_QUEUE_MESSAGES: Final = 64
"""ZeroMQ's queue to a slow dsched. A longer one would deliver loads that are long out of date."""
RECEIVE_QUEUE_MESSAGES: Final = 1_000
MAX_COMMAND_BYTES: Final = 1 << 20
"""One command; the largest names the attempts to abort."""
MAX_COMMANDS_A_ROUND: Final = 64
"""A flood of commands must not keep the thread from reporting."""
LINGER_MS: Final = 200
"""How long the goodbye may delay the end of the thread."""
MAX_FAULTS: Final = 5
"""Faults without a round that went well in between, before the agent gives up."""
RETRY_NS: Final = 500_000_000
"""Pause after a fault, so that a lasting one cannot make the thread spin."""


class StepRecord(NamedTuple):
    """What one step did and left behind, as counts. Cheap to make: it is made at every step."""

    step: int
    num_running: int
    num_waiting: int
    num_kv_tokens: int
    num_waiting_prefill_tokens: int
    step_ns: int
    num_step_tokens: int


LOAD_REPORTS: Final = "load_reports"
"""The feature, as `AgentHello` names it, that makes an agent send reports."""
WAITING_PREFILL_TOKENS: Final = "waiting_prefill_tokens"
"""The prompt tokens that wait are known."""
CHUNK_BUDGET: Final = "chunk_budget"
"""Prompts are cut by time."""


class AgentState(StrEnum):
    """Where an agent is in its life."""

    NEW = "new"
    RUNNING = "running"
    FAILED = "failed"
    """It gave up after `MAX_FAULTS`; the engine goes on alone."""
    CLOSED = "closed"


def new_incarnation() -> str:
    """Draw the name of one start of an agent."""
    return secrets.token_hex(8)


def default_engine_id() -> str:
    """The name of an engine that was given none: its host's."""
    return socket.gethostname().replace("/", "-")[:MAX_ENGINE_ID_BYTES] or "engine"


def agent_identity(engine_id: str, incarnation: str, dp_rank: int) -> bytes:
    """The ZeroMQ identity of an agent.

    >>> agent_identity("a", "00ff", 3)
    b'a/00ff/3'
    """
    return f"{engine_id}/{incarnation}/{dp_rank}".encode()


def is_engine_id(text: str) -> bool:
    """Whether an engine may be called `text`: short enough, no slash."""
    return 0 < len(text.encode(errors="replace")) <= MAX_ENGINE_ID_BYTES and "/" not in text


class Agent:
    """Publishes one DP rank's load from a thread of its own.

    `record_step` belongs to the step thread, `start` and `close` to the thread that owns the
    engine. `on_command` is called on the agent's thread for every command but `SayHello`.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        hello: AgentHello,
        on_command: Callable[[AgentCommand], None] | None = None,
        clock: Clock | None = None,
        log: logging.Logger | None = None,
        max_pending_steps: int = MAX_PENDING_STEPS,
        heartbeat_ns: int = HEARTBEAT_NS,
        retry_ns: int = RETRY_NS,
    ) -> None:
        """Raises `ValueError` for an engine id that cannot be part of a socket's identity."""
        if not is_engine_id(hello.engine_id):
            rule = f"must have 1 to {MAX_ENGINE_ID_BYTES} bytes and no slash"
            raise ValueError(f"engine id {hello.engine_id!r} {rule}")
        self.hello = hello
        self.num_errors = 0
        """Faults of the agent so far; `dsched_agent_errors_total` where metrics are shown."""
        self.num_dropped = 0
        """Reports that dsched did not take: away, or too slow."""
        self.num_refused_commands = 0
        """Commands that could not be read, that no hook of this engine carries out, or that came
        from a leader after its successor's."""
        self.state = AgentState.NEW
        self._endpoint = endpoint
        self._on_command = on_command
        self._fence = LeaderFence()
        self._has_told_unreadable = False
        self._has_news = False
        """The hello has changed in a way that does not wait for the next one."""
        self._heartbeat_ns = heartbeat_ns
        self._retry_ns = retry_ns
        self._clock = clock or SystemClock()
        self._log = log or logging.getLogger("dsched.agent")
        self._records: deque[StepRecord] = deque(maxlen=max_pending_steps)
        self._last = StepRecord(0, 0, 0, 0, 0, 0, 0)
        self._seq = 0
        self._num_faults = 0
        self._is_asleep = False
        self._must_stop = False
        self._has_goodbye = True
        self._wake_read = self._wake_write = -1
        self._thread: threading.Thread | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[AgentCommand] = msgspec.msgpack.Decoder(AgentCommand)

    def start(self) -> None:
        """Start the thread. Never raises: a system that cannot start it has no agent."""
        if self.state is not AgentState.NEW:
            return
        try:
            self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            thread = threading.Thread(target=self._run, name="dsched-agent", daemon=True)
            self.state = AgentState.RUNNING
            thread.start()
        except (OSError, RuntimeError) as error:
            self._close_pipe()
            self._give_up(error)
        else:
            self._thread = thread

    def record_step(self, record: StepRecord) -> None:
        """Hand over what a step did. Never blocks or raises."""
        self._records.append(record)
        if self._is_asleep:
            self._is_asleep = False
            self._wake()

    def drop_feature(self, feature: str) -> None:
        """Tell dsched that a hook of the engine is lost. Without `load_reports` no report follows,
        so that dsched does not take the last counts for the present ones."""
        hello = self.hello
        self.hello = msgspec.structs.replace(
            hello,
            features=tuple(each for each in hello.features if each != feature),
            missing=(*(each for each in hello.missing if each != feature), feature),
        )
        self._wake()

    def set_lost_ranks(self, dp_ranks: Iterable[int]) -> None:
        """Tell dsched which DP ranks of the engine the engine has stopped using; none if it uses
        all again. Cheap where nothing has changed."""
        lost = tuple(sorted(dp_ranks))
        if lost != self.hello.lost_dp_ranks:
            self.hello = msgspec.structs.replace(self.hello, lost_dp_ranks=lost)
            self._has_news = True
            self._wake()

    def close(self, timeout_s: float = 1.0) -> None:
        """Say goodbye and end the thread; wait for it at most `timeout_s`. Idempotent."""
        self._must_stop = True
        self._wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                return
        self._thread = None
        self._close_pipe()
        if self.state is not AgentState.FAILED:
            self.state = AgentState.CLOSED

    def abandon(self) -> None:
        """End the thread without a goodbye, as a process that dies does. For tests."""
        self._has_goodbye = False
        self.close()

    def _close_pipe(self) -> None:
        ends = (self._wake_read, self._wake_write)
        self._wake_read = self._wake_write = -1
        for end in ends:
            if end >= 0:
                os.close(end)

    def _wake(self) -> None:
        # A full pipe wakes as well as one more byte; a closed one has nobody to wake.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def _give_up(self, error: BaseException) -> None:
        self.num_errors += 1
        self.state = AgentState.FAILED
        self._log.warning("agent.failed reason=%r; the engine goes on without dsched", error)

    # Everything below runs on the agent's thread.

    def _run(self) -> None:
        try:
            context = zmq.Context()
            try:
                while not self._must_stop and self.state is AgentState.RUNNING:
                    self._serve_until_fault(context)
            finally:
                context.destroy(linger=LINGER_MS)
        except Exception as error:  # the door: nothing of ours may reach the engine
            self._give_up(error)

    def _serve_until_fault(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        try:
            with context.socket(zmq.DEALER) as link:
                self._connect(link)
                self._serve(link)
        except Exception as error:  # the door: nothing of ours may reach the engine
            self._num_faults += 1
            if self._num_faults >= MAX_FAULTS:
                self._give_up(error)
                return
            self.num_errors += 1
            if self.num_errors == 1:
                self._log.warning("agent.disturbed reason=%r; it tries again", error)
            self._sleep(self._retry_ns)

    def _sleep(self, duration_ns: int) -> None:
        """Only `close` ends it sooner: a hook that is lost meanwhile mends no fault."""
        poller = zmq.Poller()
        poller.register(self._wake_read, zmq.POLLIN)
        end_ns = self._clock.now_ns() + duration_ns
        while not self._must_stop and (left_ns := end_ns - self._clock.now_ns()) > 0:
            if poller.poll(-(-left_ns // 1_000_000)):
                os.read(self._wake_read, 4_096)

    def _connect(self, link: "zmq.Socket[bytes]") -> None:
        hello = self.hello
        link.identity = agent_identity(hello.engine_id, hello.incarnation, hello.dp_rank)
        link.sndhwm = SEND_QUEUE_MESSAGES
        link.rcvhwm = RECEIVE_QUEUE_MESSAGES
        link.maxmsgsize = MAX_COMMAND_BYTES
        link.linger = LINGER_MS
        # Queue only towards a dsched that is there: one that comes back gets news, not history.
        link.immediate = 1
        link.reconnect_ivl = 100
        link.reconnect_ivl_max = 2_000
        link.connect(self._endpoint)

    def _serve(self, link: "zmq.Socket[bytes]") -> None:
        poller = zmq.Poller()
        poller.register(link, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        next_hello_ns = next_report_ns = self._clock.now_ns()
        while not self._must_stop:
            is_asked = self._sleep_until(poller, link, min(next_hello_ns, next_report_ns))
            if is_asked and self._answer_commands(link):
                next_hello_ns = 0
            if self._has_news:
                self._has_news = False
                next_hello_ns = 0
            now_ns = self._clock.now_ns()
            if now_ns >= next_hello_ns:
                is_sent = self._send(link, self.hello)
                next_hello_ns = now_ns + (self._heartbeat_ns if is_sent else HELLO_RETRY_NS)
            if LOAD_REPORTS not in self.hello.features:
                self._records.clear()
                next_report_ns = now_ns + self._heartbeat_ns
            elif self._report_steps(link):
                next_report_ns = now_ns + self._heartbeat_ns
            elif now_ns >= next_report_ns:
                self._report_idle(link)
                next_report_ns = now_ns + self._heartbeat_ns
            self._num_faults = 0
        if not self._has_goodbye:
            return
        goodbye = AgentGoodbye(
            engine_id=self.hello.engine_id,
            incarnation=self.hello.incarnation,
            dp_rank=self.hello.dp_rank,
        )
        self._send(link, goodbye)

    def _sleep_until(self, poller: zmq.Poller, link: "zmq.Socket[bytes]", wake_ns: int) -> bool:
        """Sleep until there is something to do; return whether a command has arrived."""
        # Set before the look at the deque: a record that arrives in between finds the flag.
        self._is_asleep = True
        timeout_ns = min(wake_ns - self._clock.now_ns(), self._heartbeat_ns)
        if self._records or self._must_stop:
            timeout_ns = 0
        events = dict(poller.poll(max(0, timeout_ns // 1_000_000)))
        self._is_asleep = False
        if self._wake_read in events:
            os.read(self._wake_read, 4_096)
        return link in events

    def _answer_commands(self, link: "zmq.Socket[bytes]") -> bool:
        """Carry out what dsched asks; return whether it asked for a hello."""
        is_hello_wanted = False
        for _ in range(MAX_COMMANDS_A_ROUND):
            try:
                frames = link.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                command = self._decoder.decode(frames[-1])
            except UNREADABLE as error:
                self.num_refused_commands += 1
                if not self._has_told_unreadable:
                    self._has_told_unreadable = True
                    self._log.warning("agent.command_unreadable reason=%r", str(error))
                continue
            if isinstance(command, SayHello):
                is_hello_wanted = True
            elif self._on_command is None or self._is_of_old_leader(command):
                self.num_refused_commands += 1
            else:
                self._on_command(command)
        return is_hello_wanted

    def _is_of_old_leader(self, command: AgentCommand) -> bool:
        """Whether a later leader has commanded before. Commands without a leader's epoch, as
        aborts, are anybody's."""
        if isinstance(command, SetStepBudget | PlaceExperts):
            return not self._fence.admits(command.leader_epoch)
        return False

    def _report_steps(self, link: "zmq.Socket[bytes]") -> bool:
        """Publish the steps that were handed over; return whether there was one."""
        is_any = False
        for _ in range(len(self._records)):
            self._last = self._records.popleft()
            self._send(link, self._report(self._last))
            is_any = True
        return is_any

    def _report_idle(self, link: "zmq.Socket[bytes]") -> None:
        self._send(link, self._report(self._last._replace(step_ns=0, num_step_tokens=0)))

    def _report(self, record: StepRecord) -> RankReport:
        hello = self.hello
        self._seq += 1
        return RankReport(
            engine_id=hello.engine_id,
            incarnation=hello.incarnation,
            dp_rank=hello.dp_rank,
            seq=self._seq,
            step=record.step,
            num_running=record.num_running,
            num_waiting=record.num_waiting,
            num_kv_tokens=record.num_kv_tokens,
            num_waiting_prefill_tokens=record.num_waiting_prefill_tokens,
            kv_capacity_tokens=hello.kv_capacity_tokens,
            step_ns=record.step_ns,
            num_step_tokens=record.num_step_tokens,
        )

    def _send(self, link: "zmq.Socket[bytes]", message: AgentMessage) -> bool:
        try:
            link.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self.num_dropped += 1
            return False
        return True
