"""What each worker has cached, from the KV events of vLLM and SGLang."""

import msgspec
import pytest

from dsched.routing.kv_events import (
    END_OF_REPLAY,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    KvEventBatch,
    KvEventError,
    decode_batch,
    read_message,
    replay_request,
)
from dsched.routing.prefix_index import EventOutcome, PrefixIndex

TOKENS = tuple(range(100, 116))
"""Four blocks of four."""


def stored(first: int, count: int, *, parent: int | None = None, **fields: object) -> BlocksStored:
    """Blocks `first`.. of TOKENS; a block's engine hash is 1000 + its number."""
    return BlocksStored(
        block_hashes=tuple(1000 + first + index for index in range(count)),
        parent_block_hash=parent,
        token_ids=TOKENS[4 * first : 4 * (first + count)],
        block_tokens=4,
        **fields,  # type: ignore[arg-type]
    )


def batch(*events: object, time_s: float = 0.0) -> KvEventBatch:
    return KvEventBatch(time_s=time_s, events=events, dp_rank=0)  # type: ignore[arg-type]


def test_a_prefix_is_found_block_by_block() -> None:
    index = PrefixIndex(num_workers=3)
    index.apply_batch(0, 0, batch(stored(0, 4)))
    index.apply_batch(1, 0, batch(stored(0, 2)))
    assert index.cached_tokens(TOKENS) == [16, 8, 0]
    assert index.cached_tokens(TOKENS[:11]) == [8, 8, 0], "whole blocks only"
    assert index.cached_tokens((1, 2, 3, 4)) == [0, 0, 0]
    assert index.cached_tokens(()) == [0, 0, 0]


def test_a_block_counts_only_behind_its_parent() -> None:
    """The same four tokens in another place are another block."""
    index = PrefixIndex(num_workers=1)
    index.apply_batch(0, 0, batch(stored(0, 1), stored(1, 1, parent=1000)))
    assert index.cached_tokens(TOKENS[4:8] + TOKENS[4:8]) == [0]
    assert index.cached_tokens(TOKENS) == [8]


def test_removal_cuts_the_prefix() -> None:
    index = PrefixIndex(num_workers=1)
    index.apply_batch(0, 0, batch(stored(0, 4)))
    index.apply_batch(0, 1, batch(BlocksRemoved(block_hashes=(1001, 77))))
    assert index.cached_tokens(TOKENS) == [4]
    assert index.num_blocks == 3
    index.apply_batch(0, 2, batch(AllCleared()))
    assert index.cached_tokens(TOKENS) == [0]
    assert index.num_blocks == 0


def test_a_block_held_twice_stays_until_both_are_gone() -> None:
    index = PrefixIndex(num_workers=1)
    twin = BlocksStored(
        block_hashes=(5,), parent_block_hash=None, token_ids=TOKENS[:4], block_tokens=4
    )
    index.apply_batch(0, 0, batch(stored(0, 1), twin))
    index.apply_batch(0, 1, batch(BlocksRemoved(block_hashes=(5,))))
    assert index.cached_tokens(TOKENS) == [4]


@pytest.mark.parametrize(
    "event",
    [
        stored(0, 1, medium="CPU"),
        stored(0, 1, is_plain=False),
        stored(1, 1, parent=424242),
    ],
    ids=["other medium", "adapter", "unknown parent"],
)
def test_blocks_that_are_no_plain_prefix_do_not_count(event: BlocksStored) -> None:
    index = PrefixIndex(num_workers=1)
    index.apply_batch(0, 0, batch(event))
    assert index.cached_tokens(TOKENS) == [0]
    index.apply_batch(0, 1, batch(stored(0, 2, medium="GPU")))
    index.apply_batch(0, 2, batch(BlocksRemoved(block_hashes=(1000,), medium="CPU")))
    assert index.cached_tokens(TOKENS) == [8], "a copy elsewhere went, not this one"


def test_a_gap_waits_for_the_replay() -> None:
    index = PrefixIndex(num_workers=1)
    assert index.apply_batch(0, 0, batch(stored(0, 1))) is EventOutcome.APPLIED
    assert index.apply_batch(0, 2, batch(stored(2, 1, parent=1001))) is EventOutcome.GAP
    assert index.next_seq(0) == 1
    assert index.cached_tokens(TOKENS) == [4]
    assert index.apply_batch(0, 1, batch(stored(1, 1, parent=1000))) is EventOutcome.APPLIED
    assert index.cached_tokens(TOKENS) == [12]
    assert index.next_seq(0) == 3
    assert index.apply_batch(0, 2, batch(stored(2, 1))) is EventOutcome.REPEATED


def test_what_cannot_be_replayed_is_forgotten() -> None:
    """A lost message may have been a removal: nothing may be promised from before it."""
    index = PrefixIndex(num_workers=1)
    index.apply_batch(0, 0, batch(stored(0, 3)))
    index.apply_batch(0, 5, batch(stored(0, 1)))
    index.give_up_replay(0)
    assert index.cached_tokens(TOKENS) == [4]
    assert index.next_seq(0) == 6


def test_a_restarted_publisher_starts_anew() -> None:
    index = PrefixIndex(num_workers=1)
    for seq in range(3):
        index.apply_batch(0, seq, batch(stored(0, 3), time_s=seq))
    outcome = index.apply_batch(0, 0, batch(stored(0, 1), time_s=50.0))
    assert outcome is EventOutcome.RESTARTED
    assert index.cached_tokens(TOKENS) == [4]
    assert index.apply_batch(0, 0, batch(stored(0, 4), time_s=50.0)) is EventOutcome.REPEATED


def test_memory_is_bounded() -> None:
    index = PrefixIndex(num_workers=1, max_blocks=2)
    index.apply_batch(0, 0, batch(stored(0, 4)))
    assert index.num_blocks == 2
    assert index.num_dropped_blocks == 2
    assert index.cached_tokens(TOKENS) == [8]
    with pytest.raises(ValueError, match="worker 1 is not one of the 1 workers"):
        index.apply_batch(1, 0, batch())


VLLM = {
    "type": "BlockStored",
    "block_hashes": [b"h1", b"h2"],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
}
SGLANG = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None]


@pytest.mark.parametrize(("event", "hashes"), [(VLLM, (b"h1", b"h2")), (SGLANG, (11, 12))])
def test_both_engines_shapes_are_read(event: object, hashes: tuple[object, ...]) -> None:
    removed = (
        {"type": "BlockRemoved", "block_hashes": [b"h1"], "medium": "GPU"}
        if isinstance(event, dict)
        else ["BlockRemoved", [11]]
    )
    cleared = {"type": "AllBlocksCleared"} if isinstance(event, dict) else ["AllBlocksCleared"]
    payload = msgspec.msgpack.encode([12.5, [event, removed, cleared], 3])
    decoded = decode_batch(payload)
    assert (decoded.time_s, decoded.dp_rank) == (12.5, 3)
    first, second, third = decoded.events
    assert isinstance(first, BlocksStored)
    assert first.block_hashes == hashes
    assert (first.token_ids, first.block_tokens, first.is_plain) == ((1, 2, 3, 4), 2, True)
    assert isinstance(second, BlocksRemoved)
    assert isinstance(third, AllCleared)
    index = PrefixIndex(num_workers=1)
    index.apply_batch(0, 0, KvEventBatch(time_s=0, events=(first,), dp_rank=None))
    assert index.cached_tokens([1, 2, 3, 4, 5]) == [4]


@pytest.mark.parametrize(
    "change",
    [
        {"lora_id": 3},
        {"lora_name": "adapter"},
        {"extra_keys": [["salt"], None]},
        {"group_idx": 1},
    ],
)
def test_blocks_with_more_identity_than_tokens_are_not_plain(change: dict) -> None:
    decoded = decode_batch(msgspec.msgpack.encode([0.0, [{**VLLM, **change}]]))
    (event,) = decoded.events
    assert isinstance(event, BlocksStored)
    assert not event.is_plain


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"\xc1", "not MessagePack"),
        (msgspec.msgpack.encode({"a": 1}), "expected"),
        (msgspec.msgpack.encode(["now", []]), "the time"),
        (msgspec.msgpack.encode([0, [["Moved", 1]]]), "unknown KV event 'Moved'"),
        (msgspec.msgpack.encode([0, [5]]), "expected a map or an array"),
        (msgspec.msgpack.encode([0, [["BlockRemoved", ["x"]]]]), "not integers or bytes"),
        (msgspec.msgpack.encode([0, [{**VLLM, "token_ids": [1]}]]), "1 token_ids for 2 blocks"),
        (msgspec.msgpack.encode([0, [{**VLLM, "block_size": 0}]]), "block_size 0"),
    ],
)
def test_broken_messages_are_named(payload: bytes, message: str) -> None:
    with pytest.raises(KvEventError, match=message):
        decode_batch(payload)


def test_frames_of_publishers_and_of_replays() -> None:
    seq = (7).to_bytes(8, "big")
    assert read_message((b"topic", seq, b"data")) == (7, b"data")
    assert read_message((b"", seq, b"data")) == (7, b"data")
    assert read_message((b"", b"topic", seq, b"data")) == (7, b"data")
    end = (END_OF_REPLAY).to_bytes(8, "big", signed=True)
    assert read_message((b"", end, b"")) == (END_OF_REPLAY, b"")
    assert replay_request(7) == [b"", seq]
    with pytest.raises(KvEventError, match="1 frames"):
        read_message((b"x",))
    with pytest.raises(ValueError, match="first_seq is -1"):
        replay_request(-1)


@pytest.mark.parametrize("block_tokens", [1, 3])
@pytest.mark.parametrize("num_known", [0, 1, 63, 64, 65, 128, 199])
def test_long_prompts_are_followed_to_the_last_known_block(
    block_tokens: int, num_known: int
) -> None:
    """However many blocks are laid out at once, and in whichever events they came."""
    tokens = tuple(range(7, 7 + 200 * block_tokens))
    index = PrefixIndex(num_workers=2)
    for block in range(num_known):
        event = BlocksStored(
            block_hashes=(block,),
            parent_block_hash=block - 1 if block else None,
            token_ids=tokens[block * block_tokens : (block + 1) * block_tokens],
            block_tokens=block_tokens,
        )
        index.apply_batch(0, block, batch(event))
    whole = BlocksStored(
        block_hashes=tuple(range(200)),
        parent_block_hash=None,
        token_ids=tokens,
        block_tokens=block_tokens,
    )
    index.apply_batch(1, 0, batch(whole))

    assert index.cached_tokens(tokens) == [num_known * block_tokens, 200 * block_tokens]


def test_ids_of_no_vocabulary_are_not_remembered() -> None:
    """They cannot stand in a prompt; counted with what has no place."""
    index = PrefixIndex(num_workers=1)
    event = BlocksStored(
        block_hashes=(1, 2),
        parent_block_hash=None,
        token_ids=(5, 1 << 31),
        block_tokens=1,
    )

    index.apply_batch(0, 0, batch(event))

    assert (index.num_dropped_blocks, index.num_blocks) == (2, 0)
    assert index.cached_tokens((5,)) == [0]
