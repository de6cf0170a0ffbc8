"""What other routers over the same ranks say they have there.

Requests that arrive at two routers within one step cannot see each other in the ranks' reports, and
both take the rank that was least loaded before. So routers tell each other, within a millisecond or
so, what each has on every rank: running requests and KV tokens as they stand, not the change. A
message that was lost is made good by the next one about the rank, one that comes twice says the
same, one that is older than what was heard is dropped (`PeerLoads.accepts`).

What peers say is a part of the ledger's *other* load (`LoadLedger.tell`); reports correct it as
before. Nobody is believed for longer than they speak: who is silent, or leaves the registry, is
forgotten (`forget_peer`), and then reports alone say what is there.

Of prefill workers they tell the work that they have booked, as time, and how long the worker has
been at its present prompt (`PrefillRouter.tell`).

In: messages of peers, as values. Out: changes of a router's ledger, and what to tell others.
State: mutable, owned by one router. Cost: O(ranks named).
"""

from collections.abc import Iterable

import msgspec

from dsched.ids import RankId
from dsched.routing.decode import DecodeRouter
from dsched.routing.prefill import PrefillRouter


class PeerRankLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one router has on one rank."""

    rank_id: RankId
    num_running: int
    num_kv_tokens: int
    """Prompts and emitted tokens."""


class PeerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What one router says of itself."""

    peer: str
    """Who says it; another name after a restart."""
    seq: int
    """Larger in each message."""
    is_full: bool
    """Ranks that are not named have nothing of the peer; else they are as they were."""
    ranks: tuple[PeerRankLoad, ...]
    longest_tokens: int
    """KV tokens of its longest running request; 0 without one."""


def apply_peer_message(router: DecodeRouter, message: PeerMessage) -> bool:
    """Correct the load of the ranks named; `False` for a message that is not newer than the last.

    Ranks that this router does not know are left out: a full message names them again.
    """
    ledger = router.ledger
    if not ledger.peers.accepts(message.peer, message.seq):
        return False
    rest = ledger.peers.ranks_of(message.peer) if message.is_full else set()
    for load in message.ranks:
        rank = ledger.index_of(load.rank_id)
        if rank is not None:
            rest.discard(rank)
            ledger.tell(
                message.peer,
                rank,
                num_running=load.num_running,
                num_kv_tokens=load.num_kv_tokens,
            )
    for rank in sorted(rest):
        ledger.tell(message.peer, rank, num_running=0, num_kv_tokens=0)
    router.longest.tell(message.peer, message.longest_tokens)
    return True


def forget_peer(router: DecodeRouter, peer: str) -> None:
    """Believe nothing of what a peer said any more; unknown ones are ignored."""
    router.ledger.forget_peer(peer)
    router.longest.tell(peer, 0)


def own_loads(router: DecodeRouter, ranks: Iterable[int]) -> tuple[PeerRankLoad, ...]:
    """What this router has on each of `ranks`, for its peers.

    Removed ranks are left out: their number may belong to nobody any more.
    """
    ledger = router.ledger
    loads = []
    for rank in ranks:
        rank_id = ledger.rank_id(rank)
        if ledger.index_of(rank_id) != rank:
            continue
        running, kv = ledger.own_load(rank)
        loads.append(PeerRankLoad(rank_id=rank_id, num_running=running, num_kv_tokens=kv))
    return tuple(loads)


class PeerWorkerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What one router has on one prefill worker, by its own estimate."""

    rank_id: RankId
    work_ns: int
    """Of all that it has booked and that is not over."""
    head_ns: int
    """Of the oldest of that; 0 without any."""
    age_ns: int
    """How long the worker has been at its present prompt, whoever sent it."""


class PeerPrefillMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What one router says of itself on prefill workers; fields as those of `PeerMessage`."""

    peer: str
    seq: int
    is_full: bool
    workers: tuple[PeerWorkerLoad, ...]


def apply_prefill_message(router: PrefillRouter, message: PeerPrefillMessage, now_ns: int) -> bool:
    """Correct the work of the workers named; `False` for a message that is not newer than the last.

    Workers that this router does not know are left out: a full message names them again. Where a
    full message names a worker no more, its prompt is taken to have ended now.
    """
    if not router.peers.accepts(message.peer, message.seq):
        return False
    rest = router.peers.workers_of(message.peer) if message.is_full else set()
    for load in message.workers:
        worker = router.index_of(load.rank_id)
        if worker is not None:
            rest.discard(worker)
            router.tell(
                message.peer,
                worker,
                work_ns=load.work_ns,
                head_ns=min(load.head_ns, load.work_ns),
                age_ns=load.age_ns,
                now_ns=now_ns,
            )
    for worker in sorted(rest):
        router.tell(message.peer, worker, work_ns=0, head_ns=0, age_ns=0, now_ns=now_ns)
    return True


def own_work(router: PrefillRouter, workers: Iterable[int], now_ns: int) -> list[PeerWorkerLoad]:
    """What this router has on each of `workers`, for its peers."""
    loads = []
    for worker in workers:
        work_ns, head_ns, age_ns = router.own_work(worker, now_ns)
        loads.append(
            PeerWorkerLoad(
                rank_id=router.rank_id(worker), work_ns=work_ns, head_ns=head_ns, age_ns=age_ns
            )
        )
    return loads
