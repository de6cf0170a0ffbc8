"""How dsched processes over the same engines tell each other what they have booked.

Requests that reach two processes within one step of the engines would take the same rank, since no
report can show either of them the other's. So each process publishes (ZeroMQ PUB, its address in
its registry entry) what it has on the ranks and prefill workers where something began or ended, at
the end of the tick that did it, and of all of them every `FULL_INTERVAL_S`; the others subscribe.
What is said is the state, not its change, so a lost message costs at most that interval.

In: addresses of peers from the registry, bytes from them. Out: `Peering.apply` and `forget`.

Nobody waits for a peer. One that is not heard for `SILENCE_S`, or has left the registry, is
forgotten, and its load is what the engines' reports say, as without the channel. A message that
cannot be read, is old, or comes from somebody who is not in the registry is dropped and counted;
a peer that cannot be read is named once. All memory is bounded; one wake-up reads at most
`MAX_MESSAGES_A_WAKE` messages.

Peers of neighbouring versions read each other (docs/adr/0007): what is not known is ignored, in
structs and at the end of those that travel as arrays.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import structlog
import zmq
from msgspec import Meta

from dsched.clock import Clock
from dsched.controller.peering import Peering
from dsched.drivers.wire import UNREADABLE
from dsched.errors import ConfigError
from dsched.ids import DpRank, EngineId, RankId
from dsched.routing.peers import (
    PeerMessage,
    PeerPrefillMessage,
    PeerRankLoad,
    PeerWorkerLoad,
)

PEER_VERSION: Final = 1
"""Raised when a message changes meaning; those of a higher one are dropped as `version`."""
DEFAULT_ENDPOINT: Final = "tcp://127.0.0.1:*"
"""For processes of one host."""
FULL_INTERVAL_S: Final = 0.25
"""Between two messages of all ranks. Longer: a lost message is made good later. Shorter: 320 ranks
are some 15 KB each time."""
SILENCE_S: Final = 2.0
"""Without a word for so long a peer is believed no more. Shorter: a pause of its event loop makes
it blind load. Longer: the load of a dead one stays where no report denies it."""
MAX_MESSAGE_BYTES: Final = 1 << 20
"""More closes the connection: 4,096 DP ranks of one engine are 150 KB."""
MAX_PENDING_MESSAGES: Final = 4_096
"""Messages that ZeroMQ holds for us or for one peer; more are lost, and made good by the next full
one."""
MAX_MESSAGES_A_WAKE: Final = 256
NS_PER_S: Final = 1_000_000_000

Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
DurationNs = Annotated[int, Meta(ge=0, lt=1 << 50)]
"""Up to 13 days, so that what thousands of peers say fits 64 bits."""

log = structlog.get_logger(__name__)


class RankNews(msgspec.Struct, frozen=True, array_like=True):
    """One DP rank as its sender uses it. Travels as an array; what is added goes to its end, with a
    default."""

    engine_id: str
    dp_rank: Count
    num_running: Count
    num_kv_tokens: Count


class PoolNews(msgspec.Struct, frozen=True, kw_only=True):
    """One pool as its sender uses it."""

    pool: str
    longest_tokens: Count
    """KV tokens of the sender's longest running request there."""
    ranks: tuple[RankNews, ...]


class WorkerNews(msgspec.Struct, frozen=True, array_like=True):
    """One prefill worker as its sender uses it; travels as `RankNews`. Fields: `PeerWorkerLoad`."""

    engine_id: str
    dp_rank: Count
    work_ns: DurationNs
    head_ns: DurationNs
    age_ns: Count


class PrefillNews(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill pool as its sender uses it."""

    pool: str
    workers: tuple[WorkerNews, ...]


class PeerNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message. What is empty is left out, so that it costs nothing where it is not used."""

    peer_version: Annotated[int, Meta(ge=1)]
    instance_id: str
    seq: Count
    is_full: bool
    """Ranks that are not named have nothing of the sender's."""
    pools: tuple[PoolNews, ...]
    prefills: tuple[PrefillNews, ...] = ()


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a message of any version has."""

    instance_id: str
    peer_version: int = PEER_VERSION


class PeerChannel:
    """One process's two sockets. Belongs to one event loop."""

    def __init__(
        self,
        *,
        endpoint: str,
        instance_id: str,
        peering: Peering,
        clock: Clock,
        full_interval_s: float = FULL_INTERVAL_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.num_messages: Counter[str] = Counter()
        """By what became of them: `sent`, `unsent`, `applied`, `old`, `malformed`, `version` or
        `foreign`."""
        self._endpoint = endpoint
        self._instance_id = instance_id
        self._peering = peering
        self._clock = clock
        self._full_interval_s = full_interval_s
        self._silence_ns = int(silence_s * NS_PER_S)
        self._seq = 0
        self._addresses: dict[str, str] = {}
        """Peers in the registry, by instance id."""
        self._heard_ns: dict[str, int] = {}
        """When each of them spoke last; those that are silent are left out."""
        self._told: set[tuple[str, str]] = set()
        """Peers and what is wrong with their messages, as far as it was logged."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(PeerNews)
        self._head_decoder = msgspec.msgpack.Decoder(_Head)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def endpoint(self) -> str:
        """Where peers subscribe; names the port once `start` has chosen it."""
        return self._endpoint

    @property
    def peers(self) -> tuple[str, ...]:
        """Instance ids of those that are heard now, sorted."""
        return tuple(sorted(self._heard_ns))

    def start(self) -> None:
        """Bind, and begin to speak and to listen on the running event loop.

        Raises:
            ConfigError: the endpoint cannot be bound.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._out, self._in = context.socket(zmq.PUB), context.socket(zmq.SUB)
        self._out.sndhwm = self._in.rcvhwm = MAX_PENDING_MESSAGES
        self._out.linger = self._in.linger = 0
        self._in.maxmsgsize = MAX_MESSAGE_BYTES
        self._in.subscribe(b"")
        try:
            self._out.bind(self._endpoint)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ConfigError(f"$.routing.peer_endpoint: {self._endpoint!r}: {error}") from error
        self._endpoint = self._out.get_string(zmq.LAST_ENDPOINT)
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._in.get(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._repeat()

    def close(self) -> None:
        """Close both sockets. Idempotent; peers notice by the registry, or by the silence."""
        if self._context is None or self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._fd)
        self._context.destroy(linger=0)
        self._context = None

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Say who is there now: the endpoint of every peer by instance id. O(peers)."""
        if self._context is None:
            return
        for peer in sorted(self._addresses):
            if addresses.get(peer) != self._addresses[peer]:
                with contextlib.suppress(zmq.ZMQError):  # it was never connected
                    self._in.disconnect(self._addresses[peer])
                del self._addresses[peer]
                self._told -= {(peer, "malformed"), (peer, "version")}
                self._forget(peer, "left")
        for peer, address in sorted(addresses.items()):
            if peer in self._addresses or peer == self._instance_id:
                continue
            self._addresses[peer] = address
            try:
                self._in.connect(address)
            except zmq.ZMQError as error:
                log.warning("peer.unreachable", instance_id=peer, reason=str(error))
        self._peering.set_listened_to(is_listened_to=bool(self._addresses))
        self._wake()

    def publish(self, *, is_full: bool = False) -> None:
        """Tell what began or ended since the last time, or everything. Nothing to tell is cheap."""
        if self._context is None or not self._addresses:
            return
        pools = tuple(
            PoolNews(
                pool=name,
                longest_tokens=longest_tokens,
                ranks=tuple(
                    RankNews(
                        one.rank_id.engine_id,
                        one.rank_id.dp_rank,
                        one.num_running,
                        one.num_kv_tokens,
                    )
                    for one in loads
                ),
            )
            for name, loads, longest_tokens in self._peering.news(is_full=is_full)
        )
        prefills = tuple(
            PrefillNews(pool=name, workers=tuple(map(_to_news, loads)))
            for name, loads in self._peering.prefill_news(is_full=is_full)
        )
        if not pools and not prefills:
            return
        self._seq += 1
        news = PeerNews(
            peer_version=PEER_VERSION,
            instance_id=self._instance_id,
            seq=self._seq,
            is_full=is_full,
            pools=pools,
            prefills=prefills,
        )
        try:
            self._out.send(self._encoder.encode(news), zmq.NOBLOCK)
        except zmq.ZMQError:
            self.num_messages["unsent"] += 1
        else:
            self.num_messages["sent"] += 1

    def receive(self, payload: bytes) -> None:
        """Take one message as the socket delivers it. Never raises for what it says."""
        outcome = self._take(payload)
        self.num_messages[outcome] += 1

    # ---- inside

    def _take(self, payload: bytes) -> str:
        try:
            news = self._decoder.decode(payload)
        except UNREADABLE as error:
            return self._name_unreadable(payload, str(error))
        if news.peer_version > PEER_VERSION:
            return self._refuse_version(news.instance_id, news.peer_version)
        peer = news.instance_id
        if peer not in self._addresses:
            return "foreign"
        if peer not in self._heard_ns:
            log.info("peer.heard", instance_id=peer)
        self._heard_ns[peer] = self._clock.now_ns()
        is_applied = False
        for pool in news.pools:
            is_applied |= self._peering.apply(pool.pool, _message(news, pool))
        for prefill in news.prefills:
            message = _prefill_message(news, prefill)
            is_applied |= self._peering.apply_prefills(prefill.pool, message)
        return "applied" if is_applied or not (news.pools or news.prefills) else "old"

    def _name_unreadable(self, payload: bytes, reason: str) -> str:
        """Say once of whom a message cannot be read; of nobody in the registry, once for all."""
        head = _Head(instance_id="?")
        with contextlib.suppress(*UNREADABLE):
            head = self._head_decoder.decode(payload)
        if head.peer_version > PEER_VERSION:
            return self._refuse_version(head.instance_id, head.peer_version)
        peer = head.instance_id if head.instance_id in self._addresses else "?"
        if self._is_untold(peer, "malformed"):
            log.warning("peer.message_unreadable", instance_id=peer, reason=reason)
        return "malformed"

    def _refuse_version(self, peer: str, version: int) -> str:
        """Say once which peer is of a newer dsched: the upgrade has not come here yet."""
        if peer in self._addresses and self._is_untold(peer, "version"):
            log.warning(
                "peer.version_refused", instance_id=peer, peer_version=version, wanted=PEER_VERSION
            )
        return "version"

    def _is_untold(self, peer: str, fault: str) -> bool:
        is_untold = (peer, fault) not in self._told
        self._told.add((peer, fault))
        return is_untold

    def _read(self) -> None:
        # ZeroMQ's descriptor signals edges, not levels: read until empty, or come back unasked.
        for _ in range(MAX_MESSAGES_A_WAKE):
            if self._context is None:
                return
            try:
                payload = self._in.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.receive(payload)
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None and self._context is not None:
            self._loop.call_soon(self._read)

    def _repeat(self) -> None:
        """Once an interval: tell everything, and look who is silent."""
        if self._loop is None or self._context is None:
            return
        self._timer = self._loop.call_later(self._full_interval_s, self._repeat)
        self.publish(is_full=True)
        self.forget_silent()

    def forget_silent(self) -> None:
        """Stop believing those that have not spoken for too long."""
        now_ns = self._clock.now_ns()
        for peer, heard_ns in sorted(self._heard_ns.items()):
            if now_ns - heard_ns >= self._silence_ns:
                self._forget(peer, "silent")

    def _forget(self, peer: str, reason: str) -> None:
        self._peering.forget(peer)
        if self._heard_ns.pop(peer, None) is not None:
            log.info("peer.lost", instance_id=peer, reason=reason)


def _message(news: PeerNews, pool: PoolNews) -> PeerMessage:
    return PeerMessage(
        peer=news.instance_id,
        seq=news.seq,
        is_full=news.is_full,
        ranks=tuple(
            PeerRankLoad(
                rank_id=RankId(EngineId(one.engine_id), DpRank(one.dp_rank)),
                num_running=one.num_running,
                num_kv_tokens=one.num_kv_tokens,
            )
            for one in pool.ranks
        ),
        longest_tokens=pool.longest_tokens,
    )


def _to_news(load: PeerWorkerLoad) -> WorkerNews:
    return WorkerNews(
        load.rank_id.engine_id, load.rank_id.dp_rank, load.work_ns, load.head_ns, load.age_ns
    )


def _prefill_message(news: PeerNews, prefill: PrefillNews) -> PeerPrefillMessage:
    return PeerPrefillMessage(
        peer=news.instance_id,
        seq=news.seq,
        is_full=news.is_full,
        workers=tuple(
            PeerWorkerLoad(
                rank_id=RankId(EngineId(one.engine_id), DpRank(one.dp_rank)),
                work_ns=one.work_ns,
                head_ns=one.head_ns,
                age_ns=one.age_ns,
            )
            for one in prefill.workers
        ),
    )
