"""Reads reasoning and tool calls out of an answer's text.

Two shapes that many open models write, each read only where the model's config says so:

- `tool_call_format: hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes,
  Qwen2.5 and Qwen3 write it, any number of times, with text before, between and after;
- `reasoning_format: think`: an answer that begins with `<think>` ... `</think>`, or inside of it
  when the prompt ends with `<think>`.

Arguments are passed on as the model writes them, never parsed and written anew, so that the pieces
of a stream join up to exactly the arguments of an answer without one. A call is opened for the
client when its name is known and its arguments begin.

Rules where the text is not what it should be. Nothing the model wrote is lost, except that white
space around a call and the line breaks around reasoning belong to the markup, as do members of a
call other than its name and arguments.

- No JSON object with a name: what was read of it stays content, the marker included.
- Arguments that break off, or that `</tool_call>` ends early: they are passed on broken.
- A name that the request did not offer is passed on: the client can tell the model, we cannot.
- Whatever follows a whole call without its end marker is content.

Where the request demands calls (`dsched.frontdoor.forced`), what follows the reasoning is JSON. The
engine's grammar may wait for the end of the reasoning, as vLLM's does with `--reasoning-parser`, or
begin at once. So where the prompt ended inside of the reasoning, an answer that begins as that JSON
does is no reasoning.

In: text in any pieces. Out: pieces for a `MessageBuilder`. Pure. Amortised O(1) a character.
"""

from enum import Enum, auto

from tokenizers import Tokenizer

from dsched.frontdoor.deltas import MessageBuilder
from dsched.frontdoor.forced_calls import ForcedCallReader
from dsched.frontdoor.hermes_call import CALL_END, CALL_START, SPACE, CallReader
from dsched.frontdoor.text import Detokenizer, StopFinder

THINK_START, THINK_END = "<think>", "</think>"
MARKERS = (CALL_START, CALL_END, THINK_START, THINK_END)


class _Stage(Enum):
    START = auto()
    """Nothing but white space yet: it may become reasoning."""
    UNDECIDED = auto()
    """The prompt ended inside of reasoning, but the engine's grammar may have begun at once."""
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()


class TextReader:
    """Splits text into reasoning, content and tool calls.

    >>> builder = MessageBuilder("call_x", max_calls=None)
    >>> reader = TextReader(builder, has_calls=True, has_reasoning=True)
    >>> for piece in ("<think>hm</thin", 'k>Yes. <tool_call>{"name": "f", "argu', 'ments": {}}'):
    ...     reader.feed(piece)
    >>> reader.finish()
    >>> message = builder.message()
    >>> message["reasoning_content"], message["content"], message["tool_calls"][0]["function"]
    ('hm', 'Yes.', {'name': 'f', 'arguments': '{}'})
    """

    __slots__ = (
        "_builder",
        "_call",
        "_forced",
        "_has_calls",
        "_held",
        "_is_after_call",
        "_is_fresh",
        "_stage",
        "is_reasoning_left_out",
    )

    def __init__(
        self,
        builder: MessageBuilder,
        *,
        has_calls: bool,
        has_reasoning: bool,
        is_in_reasoning: bool = False,
        forced: ForcedCallReader | None = None,
    ) -> None:
        """`is_in_reasoning`: the prompt ended inside of it. `forced` reads what comes after it, if
        the request demands calls."""
        self._builder = builder
        self._forced = forced
        self._has_calls = has_calls
        self._held = ""
        self._is_fresh = has_reasoning
        """Line breaks that come now belong to a marker before them."""
        self._is_after_call = False
        self._call: CallReader | None = None
        self._stage = _Stage.CONTENT
        if has_reasoning:
            self._stage = _Stage.REASONING if is_in_reasoning else _Stage.START
        if forced is not None and self._stage is _Stage.REASONING:
            self._stage = _Stage.UNDECIDED
        self.is_reasoning_left_out = False
        """The prompt ended inside of the reasoning, and the answer began after it."""

    @property
    def is_in_reasoning(self) -> bool:
        return self._stage in (_Stage.REASONING, _Stage.UNDECIDED)

    @property
    def is_in_call(self) -> bool:
        """A call has been opened and is not whole."""
        if self._forced is not None:
            return self._forced.is_in_call
        return self._call is not None and self._call.is_open

    def feed(self, text: str) -> None:
        """Read the next piece."""
        self._held += text
        while self._held and self._step():
            pass

    def finish(self) -> None:
        """The answer has ended: nothing that was held back begins a marker."""
        if self._stage is _Stage.UNDECIDED:
            # White space, or the first signs of the JSON.
            self._decide(is_json=bool(self._held.strip()))
            self._held = self._held.lstrip("\n")
        held, self._held = self._held, ""
        if self._stage is _Stage.REASONING:
            self._builder.add_reasoning(held)
        elif self._forced is not None:
            self._forced.feed(held)
            self._forced.finish()
        elif self._call is not None:
            self._call.finish()
        elif not (self._is_after_call and held.isspace()):
            self._builder.add_content(held)

    def _step(self) -> bool:
        """Read what is held as far as it is certain; whether there may be more to read."""
        if self._stage is _Stage.CALL:
            return self._read_call()
        if self._stage is _Stage.START:
            return self._read_start()
        if self._stage is _Stage.UNDECIDED and not self._decide_by_text():
            return False
        if self._is_fresh:
            self._held = self._held.lstrip("\n")
            if not self._held:
                return False
            self._is_fresh = False
        if self._stage is _Stage.REASONING:
            return self._read_reasoning()
        return self._read_content()

    def _read_start(self) -> bool:
        begin = self._held.lstrip()
        if begin.startswith(THINK_START):
            self._held = begin[len(THINK_START) :]
            self._stage = _Stage.REASONING
            return True
        if THINK_START.startswith(begin):
            return False
        self._is_fresh = False
        self._stage = _Stage.CONTENT
        return True

    def _decide_by_text(self) -> bool:
        """Whether it is certain by now what the answer begins with."""
        assert self._forced is not None
        is_json = self._forced.begins(self._held)
        if is_json is None:
            return False
        self._decide(is_json=is_json)
        return True

    def _decide(self, *, is_json: bool) -> None:
        self._stage = _Stage.CONTENT if is_json else _Stage.REASONING
        self.is_reasoning_left_out = is_json

    def _read_reasoning(self) -> bool:
        before, marker, after = self._held.partition(THINK_END)
        if marker:
            self._builder.add_reasoning(before)
            self._held = after
            self._stage = _Stage.CONTENT
            self._is_fresh = True
            return True
        keep = _marker_start(self._held, THINK_END)
        self._builder.add_reasoning(self._held[:keep])
        self._held = self._held[keep:]
        return False

    def _read_content(self) -> bool:
        if self._forced is not None:
            self._forced.feed(self._held)
            self._held = ""
            return False
        if not self._has_calls:
            self._builder.add_content(self._held)
            self._held = ""
            return False
        before, marker, after = self._held.partition(CALL_START)
        if marker:
            text = before.rstrip(SPACE)
            self._builder.add_content(text)
            self._held = after
            self._stage = _Stage.CALL
            self._call = CallReader(self._builder, before=before[len(text) :] + CALL_START)
            return True
        keep = len(self._held[: _marker_start(self._held, CALL_START)].rstrip(SPACE))
        if keep:
            self._builder.add_content(self._held[:keep])
            self._held = self._held[keep:]
            self._is_after_call = False
        return False

    def _read_call(self) -> bool:
        call = self._call
        assert call is not None
        rest = call.feed(self._held)
        self._held = ""
        if rest is None:
            return False
        self._is_after_call = call.was_opened
        self._call = None
        self._held = rest
        self._stage = _Stage.CONTENT
        return True


def _marker_start(text: str, marker: str) -> int:
    """Index of the longest end of `text` that begins `marker`; else its length."""
    for place in range(max(0, len(text) - len(marker) + 1), len(text)):
        if text[place] == marker[0] and marker.startswith(text[place:]):
            return place
    return len(text)


class TextParser:
    """An `AnswerParser` for answers whose markup is text."""

    __slots__ = (
        "_builder",
        "_detokenizer",
        "_finder",
        "_has_reasoning",
        "_marker_texts",
        "_min_tokens",
        "_num_reasoning_tokens",
        "_num_tokens",
        "_reader",
        "fault",
        "is_over",
    )

    def __init__(
        self,
        builder: MessageBuilder,
        reader: TextReader,
        *,
        detokenizer: Detokenizer,
        finder: StopFinder | None,
        min_tokens: int,
        marker_texts: dict[int, str],
        has_reasoning: bool,
    ) -> None:
        """`marker_texts`: markers that are control tokens, which have no text otherwise."""
        self._builder = builder
        self._reader = reader
        self._detokenizer = detokenizer
        self._finder = finder
        self._min_tokens = min_tokens
        self._marker_texts = marker_texts
        self._has_reasoning = has_reasoning
        self._num_tokens = 0
        self._num_reasoning_tokens = 0
        self.is_over = False
        self.fault: str | None = None

    @property
    def num_reasoning_tokens(self) -> int | None:
        if not self._has_reasoning:
            return None
        return 0 if self._reader.is_reasoning_left_out else self._num_reasoning_tokens

    def feed(self, token_id: int) -> None:
        """Read the next token. Stop strings are looked for in all that the model writes."""
        text = self._marker_texts.get(token_id)
        if text is None:
            text = self._detokenizer.feed(token_id)
        finder = self._finder
        if finder is not None:
            is_exempt = self._num_tokens < self._min_tokens
            text = finder.skip(text) if is_exempt else finder.feed(text)
            self.is_over = finder.is_found
        self._num_tokens += 1
        self._num_reasoning_tokens += self._reader.is_in_reasoning
        if text:
            self._reader.feed(text)

    def finish(self, reason: str) -> str:
        """See `AnswerParser`. A call that is not whole is no reason to call it."""
        if self._finder is not None and not self._finder.is_found:
            self._reader.feed(self._finder.flush())
        is_cut = self._reader.is_in_call
        self._reader.finish()
        if reason == "stop" and self._builder.num_calls and not is_cut:
            return "tool_calls"
        return reason


def special_markers(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the markers that are special tokens, which decoders leave out, by their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return {
        token_id: token.content
        for token_id, token in sorted(added.items())
        if token.special and token.content in MARKERS
    }
