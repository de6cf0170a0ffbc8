"""Ids of text that was tokenised before.

Every turn of a chat sends the whole conversation again, and every user of a service the same system
prompt. `token_cuts` says where a prompt falls into parts that do not depend on each other; their
ids are kept here, the least recently used part makes room, and a prompt costs what is new in it.
"""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import structlog
from tokenizers import Tokenizer

from dsched.frontdoor.token_cuts import MIN_SEGMENT_CHARS, Cuts, find_cuts

log = structlog.get_logger(__name__)

ENTRY_BYTES = 128
"""What a kept part takes besides its text and its ids: the place in an ordered dictionary."""
MAX_SHARE = 4
"""A part that takes more than this fraction of the memory is not kept: one document that is seen
once would push out all chats."""


class TokenCache:
    """Parts of prompts with their ids, least recently used first. Safe to use from any thread: the
    lock is held to look up and to keep, never to tokenise."""

    def __init__(self, max_bytes: int, *, model: str | None = None) -> None:
        """Keep texts and ids of up to `max_bytes` together; `model` is for the log."""
        self.max_bytes = max_bytes
        self.model = model
        self.num_bytes = 0
        """What the kept parts take. An id counts as its place: the numbers are shared."""
        self.num_hit_tokens = 0
        """Tokens that were found."""
        self.num_missed_tokens = 0
        """Tokens of parts that were looked for and tokenised."""
        self._parts: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._parts)

    def items(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return what is kept, least recently used first. O(parts)."""
        with self._lock:
            return list(self._parts.items())

    def ids_of(
        self, parts: Sequence[str | int], encode: Callable[[str], Sequence[int]]
    ) -> list[int]:
        """Return the ids of `parts`, one after the other. A part that is a number is an id already;
        `encode` makes the ids of texts that are not kept. O(characters + ids)."""
        ids: list[int] = []
        known = self._look_up(parts)
        fresh: dict[str, tuple[int, ...]] = {}
        num_given = 0
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                num_given += 1
                continue
            part_ids = known.get(part)
            if part_ids is None:
                new_ids = encode(part)
                # One object a number, or each id would take the memory of four.
                part_ids = tuple(map(self._numbers.setdefault, new_ids, new_ids))
                known[part] = fresh[part] = part_ids
            ids += part_ids
        self._keep(fresh, num_tokens=len(ids) - num_given)
        return ids

    def _look_up(self, parts: Sequence[str | int]) -> dict[str, tuple[int, ...]]:
        known: dict[str, tuple[int, ...]] = {}
        with self._lock:
            for part in parts:
                if isinstance(part, str) and part in self._parts:
                    self._parts.move_to_end(part)
                    known[part] = self._parts[part]
        return known

    def _keep(self, fresh: dict[str, tuple[int, ...]], *, num_tokens: int) -> None:
        """Keep what was made for a prompt of `num_tokens`."""
        num_missed_tokens = sum(map(len, fresh.values()))
        with self._lock:
            self.num_hit_tokens += num_tokens - num_missed_tokens
            self.num_missed_tokens += num_missed_tokens
            for part, ids in fresh.items():
                num_bytes = entry_bytes(part, ids)
                # Another thread may have been faster.
                if part not in self._parts and num_bytes <= self.max_bytes // MAX_SHARE:
                    self._parts[part] = ids
                    self.num_bytes += num_bytes
            while self.num_bytes > self.max_bytes:
                self.num_bytes -= entry_bytes(*self._parts.popitem(last=False))


def entry_bytes(part: str, ids: tuple[int, ...]) -> int:
    """Memory that a kept part takes."""
    return sys.getsizeof(part) + sys.getsizeof(ids) + ENTRY_BYTES


class PromptEncoder:
    """Makes ids of texts with one tokenizer, and looks up what it can. Called from any thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        cache: TokenCache | None = None,
        min_chars: int = MIN_SEGMENT_CHARS,
    ) -> None:
        """Use `cache`, unless the tokenizer is of a kind that cannot be cut; the log says which.
        Texts below `min_chars` are not looked up."""
        self._tokenizer = tokenizer
        self._cache = cache
        self._cuts = Cuts()
        if cache is not None:
            self._cuts = find_cuts(tokenizer, min_chars=min_chars)
            if not is_usable(self._cuts, cache):
                self._cache = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids that the tokenizer gives `text`; `add_special_tokens` for a text that
        stands for itself. O(characters)."""
        if self._cache is None or len(text) < self._cuts.min_chars:
            return encode_whole(self._tokenizer, text, add_special_tokens=add_special_tokens)
        cuts = self._cuts
        ids = self._cache.ids_of(cuts.split(text), self._encode_part)
        return [*cuts.before_ids, *ids, *cuts.after_ids] if add_special_tokens else ids

    def _encode_part(self, text: str) -> list[int]:
        return encode_whole(self._tokenizer, text, add_special_tokens=False)


def is_usable(cuts: Cuts, cache: TokenCache) -> bool:
    """Whether texts may be cut so; if not, the log says why the cache stays empty."""
    if cuts.reason is not None:
        log.info("token_cache.unused", model=cache.model, reason=cuts.reason)
    return cuts.reason is None


def encode_whole(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of `text`, all of it tokenised."""
    # The batch call is the one that can leave out where each token lies in the text, which takes a
    # quarter of the time and nobody asks for.
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids
