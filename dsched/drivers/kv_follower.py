"""Follows the KV cache events of engines, so that prompts go where their beginning is cached.

In:  ZeroMQ messages of vLLM and SGLang (`dsched.routing.kv_events`), one publisher a DP rank, and
which ranks are up. Out: how many leading tokens of a prompt each rank has cached.

A rank is followed while it is up. First the publisher is asked to send what it still remembers,
from the first message on; live messages wait until that is done. After a gap it is asked again from
the first missing one. What cannot be had in time is given up: the rank's blocks are forgotten and
built up anew, since a lost removal would promise a cache that is gone. A rank that goes down is
forgotten at once.

Nothing here raises for what arrives. The sockets are read on the event loop; one wake-up handles at
most `MAX_MESSAGES_A_WAKE` messages. Belongs to one event loop.
"""

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
import zmq

from dsched.controller import HandoffGap
from dsched.faults import MembershipView
from dsched.ids import EngineId, RankId
from dsched.routing import PrefixIndex
from dsched.routing.kv_events import (
    END_OF_REPLAY,
    KvEventBatch,
    KvEventError,
    decode_batch,
    read_message,
    replay_request,
)
from dsched.routing.prefix_index import EventOutcome
from dsched.states import RankState

MAX_MESSAGES_A_WAKE: Final = 64
"""Messages handled before other work of the event loop gets its turn; a large one takes 0.1 ms."""
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""One batch of events; more closes the connection."""
MAX_PENDING_MESSAGES: Final = 100_000
"""Messages that ZeroMQ holds for us, as many as the publishers do."""
MAX_HELD_MESSAGES: Final = 10_000
"""Live messages that wait for the replay at the beginning. More: it is given up."""
REPLAY_TIMEOUT_S: Final = 5.0
"""Wait for a replay. Shorter: a busy engine's cache is forgotten. Longer: its prompts are thought
uncached for longer."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventSource:
    """Where an engine publishes; DP rank r at the port of rank 0 plus r."""

    endpoint: str
    """`tcp://host:port`."""
    replay_endpoint: str | None = None
    """Where it answers requests for what was missed; `None`: nothing can be had again."""


class KvFollower:
    """The prefix index of the engines that publish their events."""

    def __init__(
        self,
        sources: Mapping[EngineId, KvEventSource],
        *,
        index: PrefixIndex | None = None,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self._sources = dict(sources)
        self.index = index or PrefixIndex()
        self._replay_timeout_s = replay_timeout_s
        self._numbers: dict[RankId, int] = {}
        """Of the ranks in the index; a rank keeps its number."""
        self._followed: dict[RankId, _Followed] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self.num_batches: Counter[str] = Counter()
        """Messages by what became of them; labels of a metric."""

    # ---- what the controller sees

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        """Nothing to follow in that."""

    @property
    def has_sources(self) -> bool:
        """Whether any engine publishes."""
        return bool(self._sources)

    def on_membership_changed(self, view: MembershipView) -> None:
        """Follow ranks that came up, forget ranks that went away."""
        for group in view.groups:
            for rank in group.ranks:
                rank_id = rank.rank_id
                if rank_id.engine_id not in self._sources:
                    continue
                is_up = rank.state < RankState.DOWN
                if is_up and rank_id not in self._followed:
                    self._follow(rank_id)
                elif not is_up and rank_id in self._followed:
                    self._followed.pop(rank_id).close()
                    self.index.clear_worker(self._numbers[rank_id])

    def cached_tokens(self, prompt_token_ids: Sequence[int]) -> Mapping[RankId, int]:
        """Leading tokens of a prompt that each followed rank has cached; whole blocks."""
        if not self._followed:
            return {}
        counts = self.index.cached_tokens(prompt_token_ids)
        return {rank_id: counts[number] for rank_id, number in self._numbers.items()}

    def close(self) -> None:
        """Close all sockets. Idempotent."""
        for followed in self._followed.values():
            followed.close()
        self._followed.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    # ---- ranks

    def _follow(self, rank_id: RankId) -> None:
        if self._context is None:
            self._context = zmq.Context()
        number = self._numbers.get(rank_id)
        if number is None:
            number = self._numbers[rank_id] = self.index.add_worker()
        self._followed[rank_id] = _Followed(
            self, rank_id, number, self._sources[rank_id.engine_id], self._context
        )

    def apply(self, rank_id: RankId, number: int, seq: int, batch: KvEventBatch) -> EventOutcome:
        """Take in a message; see `PrefixIndex.apply_batch`."""
        outcome = self.index.apply_batch(number, seq, batch)
        self.num_batches[outcome.value] += 1
        if outcome is EventOutcome.RESTARTED:
            log.info("kv_events.restarted", engine_id=rank_id.engine_id, dp_rank=rank_id.dp_rank)
        return outcome

    @property
    def replay_timeout_s(self) -> float:
        return self._replay_timeout_s


class _Followed:
    """One rank's two sockets."""

    def __init__(
        self,
        follower: KvFollower,
        rank_id: RankId,
        number: int,
        source: KvEventSource,
        context: "zmq.Context[zmq.Socket[bytes]]",
    ) -> None:
        self._follower = follower
        self._rank_id = rank_id
        self._number = number
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[int, KvEventBatch]] = deque()
        """Live messages, while what was before them is on its way."""
        self._is_beginning = source.replay_endpoint is not None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._events = self._connect(context, zmq.SUB, source.endpoint)
        self._events.subscribe(b"")
        self._replays: zmq.Socket[bytes] | None = None
        if source.replay_endpoint is not None:
            self._replays = self._connect(context, zmq.DEALER, source.replay_endpoint)
            self._ask_replay(0)
        for socket in self._sockets():
            self._loop.add_reader(int(socket.get(zmq.FD)), self._read)
        self._loop.call_soon(self._read)

    def _connect(
        self, context: "zmq.Context[zmq.Socket[bytes]]", kind: int, endpoint: str
    ) -> "zmq.Socket[bytes]":
        socket = context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = MAX_PENDING_MESSAGES
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        socket.connect(offset_port(endpoint, self._rank_id.dp_rank))
        return socket

    def _sockets(self) -> list["zmq.Socket[bytes]"]:
        return [self._events] if self._replays is None else [self._events, self._replays]

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for socket in self._sockets():
            self._loop.remove_reader(int(socket.get(zmq.FD)))
            socket.close(linger=0)

    # ---- messages

    def _read(self) -> None:
        # ZeroMQ's descriptor signals edges, not levels: read until empty, or come back unasked,
        # also after a fault.
        is_empty = False
        try:
            is_empty = self._read_some()
        finally:
            if not is_empty:
                self._loop.call_soon(self._read)

    def _read_some(self) -> bool:
        """Whether nothing is left to read."""
        for _ in range(MAX_MESSAGES_A_WAKE):
            if self._is_closed:
                return True
            # Replays first: live messages may wait for them.
            if not (self._receive(self._replays) or self._receive(self._events)):
                return True
        return False

    def _receive(self, socket: "zmq.Socket[bytes] | None") -> bool:
        """Take one message; `False` if there is none."""
        if socket is None:
            return False
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        is_replay = socket is self._replays
        try:
            seq, payload = read_message(frames)
            if is_replay and seq == END_OF_REPLAY:
                self._end_replay()
                return True
            batch = decode_batch(payload)
        except KvEventError as error:
            self._follower.num_batches["unreadable"] += 1
            if self._follower.num_batches["unreadable"] == 1:
                log.warning("kv_events.unreadable", reason=str(error), **self._names())
            return True
        if self._is_beginning and not is_replay:
            self._hold(seq, batch)
        else:
            self._apply(seq, batch)
        return True

    def _hold(self, seq: int, batch: KvEventBatch) -> None:
        self._held.append((seq, batch))
        if len(self._held) > MAX_HELD_MESSAGES:
            self._give_up()

    def _apply(self, seq: int, batch: KvEventBatch) -> None:
        outcome = self._follower.apply(self._rank_id, self._number, seq, batch)
        if outcome is not EventOutcome.GAP or self._timer is not None:
            return
        if self._replays is None:
            self._give_up()
        else:
            self._ask_replay(self._follower.index.next_seq(self._number))

    # ---- replays

    def _ask_replay(self, first_seq: int) -> None:
        assert self._replays is not None
        with contextlib.suppress(zmq.ZMQError):  # no room to send: the timer ends the wait
            self._replays.send_multipart(replay_request(first_seq), zmq.NOBLOCK)
        self._timer = self._loop.call_later(self._follower.replay_timeout_s, self._give_up)
        # Sending can swallow the edge that a message just arrived made.
        self._loop.call_soon(self._read)

    def _end_replay(self) -> None:
        """All that the publisher had is here; a gap that is left cannot be filled."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_beginning:
            self._begin()
        elif self._follower.index.has_gap(self._number):
            self._give_up()

    def _begin(self) -> None:
        self._is_beginning = False
        held, self._held = self._held, deque()
        for seq, batch in held:
            self._apply(seq, batch)

    def _give_up(self) -> None:
        self._timer = None
        self._follower.num_batches["given_up"] += 1
        log.warning("kv_events.given_up", **self._names())
        if self._is_beginning:
            self._begin()
        else:
            self._follower.index.give_up_replay(self._number)

    def _names(self) -> dict[str, object]:
        return {"engine_id": self._rank_id.engine_id, "dp_rank": self._rank_id.dp_rank}


def offset_port(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint of a DP rank: engines publish rank r at the port of rank 0 plus r.

    >>> offset_port("tcp://10.0.0.1:5557", 3), offset_port("ipc:///run/kv", 0)
    ('tcp://10.0.0.1:5560', 'ipc:///run/kv')
    """
    base, colon, port = endpoint.rpartition(":")
    if not dp_rank or not colon or not port.isdecimal():
        return endpoint
    return f"{base}:{int(port) + dp_rank}"
