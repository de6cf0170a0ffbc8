"""How many leading tokens of a prompt each worker has cached, from the KV events of the engines.

Engines hash blocks in ways of their own (some with a seed of the process), so their hashes mean
nothing outside. The index gives every block a key of its own, made from its tokens and its
parent's key, and remembers for each worker which engine hash is which key. A prompt is then looked
up without asking an engine: its blocks are keyed once, and the workers that hold block after block
are followed until none is left.

Only plain blocks on the GPU count: a block that belongs to an adapter, an image or a salt is not a
prefix of a plain prompt, and blocks whose parent is not known here have no place.

Messages carry a sequence number. A repeated one is ignored. After a gap the later ones wait, the
caller asks for a replay from `next_seq`, and `give_up_replay` says that what is missing cannot be
had any more: then the worker's blocks are forgotten, since a lost removal would promise a cache
that is gone. A lower number with a later time is a restarted publisher: forgotten too.

State: mutable. A message costs O(tokens in it), a look-up O(blocks of the prompt).
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

from dsched.routing.kv_events import (
    GPU_MEDIUM,
    AllCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    KvEvent,
    KvEventBatch,
)

DEFAULT_MAX_BLOCKS = 4_000_000
"""Blocks remembered over all workers. More: gigabytes. What does not fit is not known as cached."""
_PIECE_BLOCKS = 64
"""Blocks whose tokens are laid out at once. Below: the calls cost more than the hashes. Above: a
prompt that nobody has cached is laid out for nothing."""
MAX_WAITING_BATCHES = 10_000
"""Messages that wait for a replay, a worker; as many as the publishers keep."""


class EventOutcome(StrEnum):
    """What became of a message."""

    APPLIED = "applied"
    REPEATED = "repeated"
    GAP = "gap"
    """Something before it is missing: ask for a replay from `next_seq`."""
    RESTARTED = "restarted"
    """The publisher began anew; what was known of it is forgotten."""


@dataclass(slots=True)
class _Worker:
    keys: dict[BlockHash, bytes] = field(default_factory=dict)
    counts: Counter[bytes] = field(default_factory=Counter)
    next_seq: int | None = None
    time_s: float = float("-inf")
    waiting: dict[int, KvEventBatch] = field(default_factory=dict)
    block_tokens: int | None = None


class PrefixIndex:
    """Cached prefixes of W workers."""

    def __init__(self, *, num_workers: int = 0, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        if num_workers < 0 or max_blocks < 0:
            raise ValueError(
                f"num_workers {num_workers} and max_blocks {max_blocks} must not be negative"
            )
        self._workers = [_Worker() for _ in range(num_workers)]
        self._holders: dict[bytes, int] = {}
        """Bit w: worker w has the block."""
        self._max_blocks = max_blocks
        self._num_blocks = 0
        self.num_dropped_blocks = 0
        """Blocks not remembered: no room, no known parent, or not plain."""

    @property
    def num_blocks(self) -> int:
        """Blocks remembered, summed over workers."""
        return self._num_blocks

    def add_worker(self) -> int:
        """Add a worker; return its number."""
        self._workers.append(_Worker())
        return len(self._workers) - 1

    def next_seq(self, worker: int) -> int:
        """The first sequence number that has not been applied."""
        return self._worker(worker).next_seq or 0

    def apply_batch(self, worker: int, seq: int, batch: KvEventBatch) -> EventOutcome:
        """Take in a message, live or replayed."""
        state = self._worker(worker)
        outcome = EventOutcome.APPLIED
        if state.next_seq is not None and seq < state.next_seq:
            if batch.time_s <= state.time_s:
                return EventOutcome.REPEATED
            self.clear_worker(worker)
            outcome = EventOutcome.RESTARTED
        # The first message heard may be a late one: begin there, nothing before it is known.
        if state.next_seq is None:
            state.next_seq = seq
        if seq > state.next_seq:
            if len(state.waiting) < MAX_WAITING_BATCHES:
                state.waiting[seq] = batch
            return EventOutcome.GAP
        self._apply_in_order(worker, batch)
        while (following := state.waiting.pop(self.next_seq(worker), None)) is not None:
            self._apply_in_order(worker, following)
        return outcome

    def has_gap(self, worker: int) -> bool:
        """Whether messages wait for one that is missing."""
        return bool(self._worker(worker).waiting)

    def give_up_replay(self, worker: int) -> None:
        """What is missing cannot be replayed: forget the worker's blocks and go on."""
        state = self._worker(worker)
        waiting = dict(sorted(state.waiting.items()))
        self.clear_worker(worker)
        for seq, batch in waiting.items():
            state.next_seq = seq
            self._apply_in_order(worker, batch)

    def clear_worker(self, worker: int) -> None:
        """Forget a worker's blocks and its place in the sequence (it restarted or is gone)."""
        state = self._worker(worker)
        self._forget_blocks(worker)
        state.next_seq = None
        state.time_s = float("-inf")
        state.waiting.clear()

    def cached_tokens(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """[W] leading tokens of the prompt that each worker has cached. Whole blocks only."""
        cached = [0] * len(self._workers)
        sizes = {state.block_tokens for state in self._workers if state.block_tokens}
        for block_tokens in sorted(sizes):
            alive = sum(
                1 << worker
                for worker, state in enumerate(self._workers)
                if state.block_tokens == block_tokens
            )
            keys = _keys(_root(block_tokens), prompt_token_ids, block_tokens)
            for block, key in enumerate(keys):
                still = alive & self._holders.get(key, 0)
                if still != alive:
                    for worker in _bits(alive & ~still):
                        cached[worker] = block * block_tokens
                    alive = still
                    if not alive:
                        break
            for worker in _bits(alive):
                cached[worker] = len(prompt_token_ids) // block_tokens * block_tokens
        return cached

    # ---- inside

    def _worker(self, worker: int) -> _Worker:
        if not 0 <= worker < len(self._workers):
            raise ValueError(f"worker {worker} is not one of the {len(self._workers)} workers")
        return self._workers[worker]

    def _apply_in_order(self, worker: int, batch: KvEventBatch) -> None:
        for event in batch.events:
            self._apply_event(worker, event)
        state = self._workers[worker]
        state.next_seq = (state.next_seq or 0) + 1
        state.time_s = batch.time_s

    def _apply_event(self, worker: int, event: KvEvent) -> None:
        if isinstance(event, AllCleared):
            self._forget_blocks(worker)
        elif event.medium not in (None, GPU_MEDIUM):
            return
        elif isinstance(event, BlocksStored):
            self._store(worker, event)
        else:
            self._remove(worker, event)

    def _store(self, worker: int, event: BlocksStored) -> None:
        state = self._workers[worker]
        if event.parent_block_hash is None:
            key: bytes | None = _root(event.block_tokens)
        else:
            key = state.keys.get(event.parent_block_hash)
        if key is None or not event.is_plain or not _are_ids(event.token_ids):
            self.num_dropped_blocks += len(event.block_hashes)
            return
        state.block_tokens = event.block_tokens
        keys = _keys(key, event.token_ids, event.block_tokens)
        for index, (block_hash, key) in enumerate(zip(event.block_hashes, keys, strict=True)):
            if block_hash in state.keys:
                continue
            if self._num_blocks >= self._max_blocks:
                self.num_dropped_blocks += len(event.block_hashes) - index
                return
            state.keys[block_hash] = key
            state.counts[key] += 1
            self._holders[key] = self._holders.get(key, 0) | 1 << worker
            self._num_blocks += 1

    def _remove(self, worker: int, event: BlocksRemoved) -> None:
        for block_hash in event.block_hashes:
            key = self._workers[worker].keys.pop(block_hash, None)
            if key is not None:
                self._num_blocks -= 1
                self._drop_key(worker, key)

    def _drop_key(self, worker: int, key: bytes) -> None:
        counts = self._workers[worker].counts
        counts[key] -= 1
        if counts[key]:
            return
        del counts[key]
        holders = self._holders[key] & ~(1 << worker)
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]

    def _forget_blocks(self, worker: int) -> None:
        state = self._workers[worker]
        for key in state.keys.values():
            self._drop_key(worker, key)
        self._num_blocks -= len(state.keys)
        state.keys.clear()


def _root(block_tokens: int) -> bytes:
    return b"root" + block_tokens.to_bytes(8, "big")


def _are_ids(token_ids: Sequence[int]) -> bool:
    """Whether these can stand in a prompt: ids are kept in 32 bits everywhere."""
    return not token_ids or -(1 << 31) <= min(token_ids) <= max(token_ids) < 1 << 31


def _keys(parent: bytes, token_ids: Sequence[int], block_tokens: int) -> Iterator[bytes]:
    """Yield the key of each whole block of `token_ids` behind `parent`."""
    num_whole = len(token_ids) // block_tokens * block_tokens
    piece_tokens = _PIECE_BLOCKS * block_tokens
    for start in range(0, num_whole, piece_tokens):
        piece = array("i", token_ids[start : min(start + piece_tokens, num_whole)])
        data, size = piece.tobytes(), block_tokens * piece.itemsize
        for place in range(0, len(data), size):
            parent = blake2b(parent + data[place : place + size], digest_size=16).digest()
            yield parent


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found
