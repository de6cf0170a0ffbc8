"""Read the KV cache events that vLLM and SGLang publish.

Both send ZeroMQ messages of three frames: topic, sequence number (8 bytes, big-endian), and a
MessagePack batch `[time, [event, ...], dp rank]`. An event is a map with a `type` (vLLM 0.32) or an
array that begins with its type (SGLang, older vLLM):

    BlockStored  block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, ...
    BlockRemoved block_hashes, medium, ...
    AllBlocksCleared

A lost message shows as a gap in the sequence. The publisher keeps its last batches and resends
them on request: `replay_request` is what to send to its ROUTER socket, and each answer is
`[empty, (topic,) sequence, batch]`, the last with sequence -1.

Sources: vllm/distributed/kv_events.py (0.32), sglang/srt/disaggregation/kv_events.py @006d053.
Pure: bytes in, values out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dsched.errors import DriverError

BlockHash = int | bytes
END_OF_REPLAY = -1
GPU_MEDIUM = "GPU"


class KvEventError(DriverError):
    """A message is not what vLLM or SGLang send. Drop it; the gap that it leaves is replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksStored:
    """Blocks that a rank can reuse from now on."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_tokens: int
    medium: str | None = None
    is_plain: bool = True
    """Only tokens decide the block's identity: no LoRA adapter, image, salt or second KV group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlocksRemoved:
    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllCleared:
    """The rank forgot everything."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventBatch:
    """One message."""

    time_s: float
    """The publisher's clock."""
    events: tuple[KvEvent, ...]
    dp_rank: int | None


def read_message(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return (sequence number, batch) of a published message or of an answer to a replay.

    Raises:
        KvEventError: the frames are neither.
    """
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise KvEventError(f"{len(frames)} frames; expected topic, 8 bytes of sequence, batch")
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]


def replay_request(first_seq: int) -> list[bytes]:
    """Frames for the publisher's replay socket, from a DEALER socket."""
    if first_seq < 0:
        raise ValueError(f"first_seq is {first_seq}; it must not be negative")
    return [b"", first_seq.to_bytes(8, "big")]


def decode_batch(payload: bytes) -> KvEventBatch:
    """Decode a batch of either engine.

    Raises:
        KvEventError: it is not MessagePack, or not of a known shape.
    """
    try:
        batch = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        raise KvEventError(f"a KV event batch is not MessagePack: {error}") from error
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise KvEventError(f"a KV event batch is {batch!r:.80}; expected [time, [events], dp rank]")
    time_s = batch[0]
    if not isinstance(time_s, int | float):
        raise KvEventError(f"the time of a KV event batch is {time_s!r:.80}")
    dp_rank = batch[2] if len(batch) > 2 else None
    return KvEventBatch(
        time_s=float(time_s),
        events=tuple(_decode_event(event) for event in batch[1]),
        dp_rank=dp_rank if isinstance(dp_rank, int) else None,
    )


_ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}  # fmt: skip


def _decode_event(event: object) -> KvEvent:
    fields = _fields(event)
    kind = fields["type"]
    if kind == "AllBlocksCleared":
        return AllCleared()
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(one, int | bytes) for one in hashes):
        raise KvEventError(f"{kind}: block_hashes {hashes!r:.80} are not integers or bytes")
    medium = fields.get("medium")
    if kind == "BlockRemoved":
        return BlocksRemoved(block_hashes=tuple(hashes), medium=medium)
    return _stored(fields, tuple(hashes), medium)


def _stored(
    fields: dict[str, Any], hashes: tuple[BlockHash, ...], medium: str | None
) -> BlocksStored:
    token_ids = fields.get("token_ids")
    block_tokens = fields.get("block_size")
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise KvEventError(f"BlockStored: block_size {block_tokens!r:.80} is not a positive number")
    if not isinstance(token_ids, list) or len(token_ids) != len(hashes) * block_tokens:
        raise KvEventError(
            f"BlockStored: {len(token_ids) if isinstance(token_ids, list) else token_ids!r} "
            f"token_ids for {len(hashes)} blocks of {block_tokens}"
        )
    extra = fields.get("extra_keys")
    return BlocksStored(
        block_hashes=hashes,
        parent_block_hash=fields.get("parent_block_hash"),
        token_ids=tuple(token_ids),
        block_tokens=block_tokens,
        medium=medium,
        is_plain=(
            fields.get("lora_id") is None
            and fields.get("lora_name") is None
            and not any(extra or ())
            and fields.get("group_idx") in (None, 0)
        ),
    )


def _fields(event: object) -> dict[str, Any]:
    """The event as a map with its type, whichever way it was sent."""
    if isinstance(event, dict):
        fields = event
    elif isinstance(event, list) and event and isinstance(event[0], str):
        names = _ARRAY_FIELDS.get(event[0], ())
        fields = {"type": event[0], **dict(zip(names, event[1:], strict=False))}
    else:
        raise KvEventError(f"a KV event is {event!r:.80}; expected a map or an array with its type")
    if fields.get("type") not in _ARRAY_FIELDS:
        raise KvEventError(f"unknown KV event {fields.get('type')!r:.80}")
    return fields
