"""What peers said last of every rank, and the sums over them.

State: mutable, a part of `LoadLedger` or of `PrefillRouter`, which say what it means. Cost: O(1) a
rank and peer of `PeerLoads`, O(peers) a worker of `PeerWork`.
"""

from dsched.errors import InvariantError


class _Heard:
    """Numbers of the newest messages, by peer."""

    def __init__(self) -> None:
        self._seqs: dict[str, int] = {}

    def accepts(self, peer: str, seq: int) -> bool:
        """Whether a message is newer than all that were heard of this peer; it counts as heard."""
        if seq <= self._seqs.get(peer, -1):
            return False
        self._seqs[peer] = seq
        return True

    def peers(self) -> tuple[str, ...]:
        """Everybody who was heard and not forgotten, by name."""
        return tuple(sorted(self._seqs))


class PeerLoads(_Heard):
    """Requests and KV tokens by peer and rank number; ranks without any are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self._loads: dict[str, dict[int, tuple[int, int]]] = {}
        self._sums: dict[int, tuple[int, int]] = {}

    def put(self, peer: str, rank: int, num_running: int, num_kv_tokens: int) -> tuple[int, int]:
        """Replace what a peer has on a rank; return by how much both numbers grew.

        Raises `ValueError` for a negative number.
        """
        if num_running < 0 or num_kv_tokens < 0:
            raise ValueError(
                f"peer {peer!r} has {num_running} requests and {num_kv_tokens} KV tokens on rank "
                f"{rank}; neither can be negative"
            )
        ranks = self._loads.setdefault(peer, {})
        old_running, old_kv = ranks.get(rank, (0, 0))
        if num_running or num_kv_tokens:
            ranks[rank] = (num_running, num_kv_tokens)
        else:
            ranks.pop(rank, None)
        grown = num_running - old_running, num_kv_tokens - old_kv
        self._add(rank, *grown)
        return grown

    def sums(self, rank: int) -> tuple[int, int]:
        """Running requests and KV tokens of all peers on a rank."""
        return self._sums.get(rank, (0, 0))

    def ranks_of(self, peer: str) -> set[int]:
        """Ranks that a peer has something on."""
        return set(self._loads.get(peer, ()))

    def forget(self, peer: str) -> None:
        """Drop a peer on whom nothing is booked any more, and the number of its last message."""
        self._loads.pop(peer, None)
        self._seqs.pop(peer, None)

    def forget_rank(self, rank: int) -> None:
        """The number is given to another rank."""
        for ranks in self._loads.values():
            ranks.pop(rank, None)
        self._sums.pop(rank, None)

    def validate(self) -> None:
        """Check the sums against what they sum. O(peers * D)."""
        sums: dict[int, tuple[int, int]] = {}
        for ranks in self._loads.values():
            for rank, (num_running, num_kv_tokens) in ranks.items():
                running, kv = sums.get(rank, (0, 0))
                sums[rank] = (running + num_running, kv + num_kv_tokens)
        if sums != self._sums:
            raise InvariantError(f"peers have {sums}, the sums say {self._sums}")

    def _add(self, rank: int, running: int, kv: int) -> None:
        old_running, old_kv = self.sums(rank)
        new = old_running + running, old_kv + kv
        if any(new):
            self._sums[rank] = new
        else:
            self._sums.pop(rank, None)


class PeerWork(_Heard):
    """Prefill work by peer and worker number; workers without any are not kept."""

    def __init__(self) -> None:
        super().__init__()
        self._work: dict[str, dict[int, tuple[int, int]]] = {}

    def put(self, peer: str, worker: int, work_ns: int, head_ns: int) -> None:
        """Replace what a peer has on a worker.

        Raises `ValueError` for a negative number, and for an oldest prompt above the whole.
        """
        if not 0 <= head_ns <= work_ns:
            raise ValueError(
                f"peer {peer!r} has {work_ns} ns of work on worker {worker}, {head_ns} of them for "
                "its oldest prompt; that must be 0 at least and no more than all"
            )
        workers = self._work.setdefault(peer, {})
        if work_ns:
            workers[worker] = (work_ns, head_ns)
        else:
            workers.pop(worker, None)

    def of(self, worker: int) -> tuple[int, int]:
        """Work of all peers on a worker, and the largest of their oldest prompts, in ns."""
        told = [workers[worker] for workers in self._work.values() if worker in workers]
        return sum(work for work, _ in told), max((head for _, head in told), default=0)

    def workers_of(self, peer: str) -> set[int]:
        """Workers that a peer has something on."""
        return set(self._work.get(peer, ()))

    def forget(self, peer: str) -> None:
        """Drop a peer with all it said, and the number of its last message."""
        self._work.pop(peer, None)
        self._seqs.pop(peer, None)
