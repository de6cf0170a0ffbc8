"""From token ids to text, a piece at a time.

Two things make this more than a lookup. A character may be spread over several tokens, so text is
held back until it is whole (`Detokenizer`). A stop string may be spread over several pieces, so
text that may be its beginning is held back until it is known not to be (`StopFinder`).

Almost all of today's models decode byte by byte: a token's bytes do not depend on its neighbours.
For them the text of each token is looked up, and only characters that are spread over several
tokens are decoded together (`TokenTexts`, `ByteDetokenizer`). For all others the tokenizer's own
decoder follows the answer from the end of its prompt (`StreamDetokenizer`).

An incomplete character at the very end of an answer is dropped, as vLLM does: half of a character
is not text, and a replacement sign would be text that the model did not write.
"""

import json
from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_PRIME_TOKENS = 4
"""Prompt tokens that the decoder sees before the answer: enough to know whether a space belongs
between prompt and answer, in tokenizers that leave out the first one."""
_MAX_PRIME_TOKENS = 24
"""A clean place in the prompt is looked for this far; a character has at most four bytes."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """The text of one answer, incrementally. O(1) per token; never gives part of a character."""

    def feed(self, token_id: int) -> str:
        """Return the text that `token_id` completes, often one token's, sometimes none."""
        ...


class TokenTexts:
    """The texts of one tokenizer's tokens, where they do not depend on their neighbours.

    Filled as tokens are met: one entry for each token that has been in an answer.
    """

    __slots__ = ("_tokenizer", "_whole")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._whole: dict[int, str] | None = {} if decodes_by_byte(tokenizer) else None

    def detokenizer(self, prompt_token_ids: Sequence[int] = ()) -> Detokenizer:
        """Return the detokenizer of an answer to this prompt."""
        if self._whole is not None and self._ends_whole(prompt_token_ids):
            return ByteDetokenizer(self._tokenizer, self._whole)
        return StreamDetokenizer(self._tokenizer, prompt_token_ids)

    def _ends_whole(self, token_ids: Sequence[int]) -> bool:
        """Whether a prompt ends between two characters; special tokens at its end say nothing."""
        assert self._whole is not None
        for token_id in reversed(token_ids[-_PRIME_TOKENS:]):
            text = self._whole.get(token_id)
            if text is None:
                ByteDetokenizer(self._tokenizer, self._whole).feed(token_id)
                text = self._whole.get(token_id)
            if text or text is None:
                return text is not None
        return len(token_ids) <= _PRIME_TOKENS


def decodes_by_byte(tokenizer: Tokenizer) -> bool:
    """Whether the text of several tokens is their bytes one after the other."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return bool(decoder.get("type") == "ByteLevel")


class ByteDetokenizer:
    """A `Detokenizer` for tokens whose bytes stand for themselves."""

    __slots__ = ("_held", "_tokenizer", "_whole")

    def __init__(self, tokenizer: Tokenizer, whole: dict[int, str]) -> None:
        """`whole`: texts of tokens that begin and end between characters; gains what is met."""
        self._tokenizer = tokenizer
        self._whole = whole
        self._held: list[int] = []
        """Tokens since the last whole character."""

    def feed(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        if not self._held:
            text = self._whole.get(token_id)
            if text is not None:
                return text
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        held = [*self._held, token_id]
        try:
            text: str = self._tokenizer.decode(held, skip_special_tokens=True)
        except (OverflowError, TypeError):
            # Not an unsigned 32-bit number: an engine's mistake; it has no text.
            return ""
        if text.endswith(_REPLACEMENT):
            self._held = held
            return ""
        if not self._held and _REPLACEMENT not in text and _is_known(self._tokenizer, token_id):
            self._whole[token_id] = text
        self._held = []
        return text


def _is_known(tokenizer: Tokenizer, token_id: int) -> bool:
    # What is outside the vocabulary is not remembered: there is no end of it.
    return tokenizer.id_to_token(token_id) is not None


class StreamDetokenizer:
    """A `Detokenizer` for every tokenizer: its own decoder sees the whole answer."""

    __slots__ = ("_stream", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        prime = _clean_suffix(tokenizer, prompt_token_ids)
        if prime is not None:
            self._stream = DecodeStream(ids=prime, skip_special_tokens=True)
            return
        # The prompt ends inside a character: only a decoder that saw it grow knows what is new.
        self._stream = DecodeStream(skip_special_tokens=True)
        for token_id in prompt_token_ids[-_MAX_PRIME_TOKENS:]:
            self.feed(token_id)

    def feed(self, token_id: int) -> str:
        """Return the text that `token_id` completes, often one token's, sometimes none."""
        try:
            return self._stream.step(self._tokenizer, token_id) or ""
        except (OverflowError, TypeError):
            # Not an unsigned 32-bit number: an engine's mistake; it has no text.
            return ""
        except Exception as error:  # the library raises bare Exception
            return self._restart(token_id, error)

    def _restart(self, token_id: int, error: Exception) -> str:
        # The decoder compares each text with the one before and gives up when a token changed
        # what came before it. Starting anew at this token loses nothing but that comparison.
        if "prefix" not in str(error).lower():
            raise error
        self._stream = DecodeStream(skip_special_tokens=True)
        return self._stream.step(self._tokenizer, token_id) or ""


def _clean_suffix(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int] | None:
    """Return the last few prompt tokens whose text is whole; `None` if there are none such."""
    for count in range(_PRIME_TOKENS, _MAX_PRIME_TOKENS):
        suffix = list(token_ids[-count:])
        if _REPLACEMENT not in tokenizer.decode(suffix):
            return suffix
        if count >= len(token_ids):
            break
    return None


class StopFinder:
    """Finds the first stop string in text that arrives in pieces, and cuts the text before it.

    >>> finder = StopFinder(("END",))
    >>> finder.feed("an E"), finder.feed("N"), finder.feed("t E"), finder.feed("ND.")
    ('an ', '', 'ENt ', '')
    >>> finder.is_found, finder.flush()
    (True, '')
    """

    __slots__ = ("_held", "_starts", "_stops", "is_found")

    def __init__(self, stops: Sequence[str]) -> None:
        if not stops or "" in stops:
            raise ValueError(f"stop strings must not be empty: {stops!r}")
        self._stops = tuple(stops)
        self._starts = frozenset(stop[0] for stop in stops)
        self._held = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        """Return the text that is certain not to be part of a stop string.

        O(length of `text` and of the stop strings). After a stop string was found: nothing.
        """
        if self.is_found:
            return ""
        buffer = self._held + text
        places = [place for stop in self._stops if (place := buffer.find(stop)) >= 0]
        if places:
            self.is_found = True
            self._held = ""
            return buffer[: min(places)]
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def skip(self, text: str) -> str:
        """Pass `text` on unsearched, after what is held back."""
        held, self._held = self._held, ""
        return held + text

    def flush(self) -> str:
        """Return what was held back: the answer has ended, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """Index of the longest end of `buffer` that begins a stop string; else its length."""
        longest = max(map(len, self._stops))
        for place in range(max(0, len(buffer) - longest + 1), len(buffer)):
            if buffer[place] in self._starts:
                tail = buffer[place:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return place
        return len(buffer)
