"""From token ids to text, a piece at a time.

Two things make this more than a lookup. A character may be spread over several tokens, so text is
held back until it is whole (`Detokenizer`). A stop string may be spread over several pieces, so
text that may be its beginning is held back until it is known not to be (`StopFinder`).

An incomplete character at the very end of an answer is dropped, as vLLM does: half of a character
is not text, and a replacement sign would be text that the model did not write.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_PRIME_TOKENS = 4
"""Prompt tokens that the decoder sees before the answer: enough to know whether a space belongs
between prompt and answer, in tokenizers that leave out the first one."""
_MAX_PRIME_TOKENS = 24
"""A clean place in the prompt is looked for this far; a character has at most four bytes."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one answer, incrementally. O(1) per token; never gives part of a character."""

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
