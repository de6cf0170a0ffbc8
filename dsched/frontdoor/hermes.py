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

In: text in any pieces. Out: pieces for a `MessageBuilder`. Pure. Amortised O(1) a character.
"""

import re
from enum import Enum, auto

import msgspec
from tokenizers import Tokenizer

from dsched.frontdoor.deltas import MessageBuilder
from dsched.frontdoor.text import Detokenizer, StopFinder

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"
MARKERS = (CALL_START, CALL_END, THINK_START, THINK_END)

_ARGUMENT_KEYS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]<]')
_SCALAR = re.compile(r"[^\s,}\]<\"{\[]*")


class _Stage(Enum):
    START = auto()
    """Nothing but white space yet: it may become reasoning."""
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
        "_has_calls",
        "_held",
        "_is_after_call",
        "_is_fresh",
        "_stage",
    )

    def __init__(
        self,
        builder: MessageBuilder,
        *,
        has_calls: bool,
        has_reasoning: bool,
        is_in_reasoning: bool = False,
    ) -> None:
        """`is_in_reasoning`: the prompt ended inside of it."""
        self._builder = builder
        self._has_calls = has_calls
        self._held = ""
        self._is_fresh = has_reasoning
        """Line breaks that come now belong to a marker before them."""
        self._is_after_call = False
        self._call: _CallReader | None = None
        self._stage = _Stage.CONTENT
        if has_reasoning:
            self._stage = _Stage.REASONING if is_in_reasoning else _Stage.START

    @property
    def is_in_reasoning(self) -> bool:
        return self._stage is _Stage.REASONING

    @property
    def is_in_call(self) -> bool:
        """A call has been opened and is not whole."""
        return self._call is not None and self._call.is_open

    def feed(self, text: str) -> None:
        """Read the next piece."""
        self._held += text
        while self._held and self._step():
            pass

    def finish(self) -> None:
        """The answer has ended: nothing that was held back begins a marker."""
        held, self._held = self._held, ""
        if self._stage is _Stage.REASONING:
            self._builder.add_reasoning(held)
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
        if not self._has_calls:
            self._builder.add_content(self._held)
            self._held = ""
            return False
        before, marker, after = self._held.partition(CALL_START)
        if marker:
            text = before.rstrip(_SPACE)
            self._builder.add_content(text)
            self._held = after
            self._stage = _Stage.CALL
            self._call = _CallReader(self._builder, before=before[len(text) :] + CALL_START)
            return True
        keep = len(self._held[: _marker_start(self._held, CALL_START)].rstrip(_SPACE))
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


class _Part(Enum):
    """What comes next in the JSON object of a call."""

    OBJECT = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()
    END = auto()
    """The object is whole; its end marker may follow."""


_FOLLOWERS = {
    (_Part.OBJECT, "{"): _Part.KEY,
    (_Part.KEY, "}"): _Part.END,
    (_Part.COLON, ":"): _Part.VALUE,
    (_Part.NEXT, ","): _Part.KEY,
    (_Part.NEXT, "}"): _Part.END,
}


class _Broken(Exception):  # noqa: N818 - never leaves this module
    """The text is not a call."""


class _CallReader:
    """One call, from after `<tool_call>`. Once opened its arguments are passed on as they come."""

    __slots__ = (
        "_builder",
        "_early",
        "_key",
        "_literal",
        "_name",
        "_part",
        "_place",
        "_scanner",
        "_spent",
        "_text",
        "was_opened",
    )

    def __init__(self, builder: MessageBuilder, *, before: str) -> None:
        """`before`: white space and marker, which are content if this is not a call."""
        self._builder = builder
        self._text = ""
        self._place = 0
        self._spent = [before]
        """What has been read before `_text`, until the call is opened."""
        self._part = _Part.OBJECT
        self._key = ""
        self._name: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""
        self._scanner: _ValueScanner | None = None
        self._literal: list[str] = []
        """Pieces of a value that is needed whole."""
        self.was_opened = False

    @property
    def is_open(self) -> bool:
        return self._scanner is not None and self._scanner.is_passed_on

    def feed(self, text: str) -> str | None:
        """Read on. Return the text after the call once it is over, or is found not to be one."""
        self._text = self._text[self._place :] + text
        self._place = 0
        try:
            is_over = self._read()
        except _Broken:
            return self._give_up()
        if is_over:
            return self._text[self._place :]
        if not self.was_opened:
            self._spent.append(self._text[: self._place])
        return None

    def finish(self) -> None:
        """The answer has ended inside the call."""
        rest = self._text[self._place :]
        if not self.was_opened:
            self._builder.add_content("".join(self._spent) + rest)
        elif self.is_open:
            self._builder.add_arguments(rest)
        elif rest.strip(_SPACE):
            self._builder.add_content(rest)

    def _give_up(self) -> str:
        if not self.was_opened:
            self._builder.add_content("".join(self._spent) + self._text[: self._place])
            return self._text[self._place :]
        return self._text[self._place :].removeprefix(CALL_END)

    def _read(self) -> bool:
        """Whether the call is over; else everything certain has been read."""
        while True:
            if self._part is _Part.VALUE and self._scanner is not None:
                if not self._read_value(self._scanner):
                    return False
                continue
            if self._part is _Part.END:
                return self._read_end()
            self._skip_space()
            if self._place == len(self._text):
                return False
            sign = self._text[self._place]
            if sign == "<" and self._is_end_marker_cut():
                return False
            if self._part is _Part.VALUE or (self._part is _Part.KEY and sign == '"'):
                self._begin_value(sign)
            else:
                self._read_sign(sign)

    def _is_end_marker_cut(self) -> bool:
        """Whether the text ends inside of what may become the end marker."""
        rest = self._text[self._place : self._place + len(CALL_END)]
        return rest != CALL_END and CALL_END.startswith(rest)

    def _skip_space(self) -> None:
        while self._place < len(self._text) and self._text[self._place] in _SPACE:
            self._place += 1

    def _read_sign(self, sign: str) -> None:
        follower = _FOLLOWERS.get((self._part, sign))
        if follower is None:
            raise _Broken
        if follower is _Part.END and not self.was_opened:
            self._open("{}" if self._early is None else self._early)
        self._part = follower
        self._place += 1

    def _open(self, arguments: str) -> None:
        if self._name is None:
            raise _Broken
        self._builder.open_call(self._name)
        self._builder.add_arguments(arguments)
        self.was_opened = True
        self._spent.clear()

    @property
    def _is_wanted(self) -> bool:
        """The value is the call's arguments, and the first such."""
        return self._key in _ARGUMENT_KEYS and not self.was_opened

    def _begin_value(self, sign: str) -> None:
        self._scanner = _ValueScanner(sign)
        if self._part is _Part.KEY:
            self._key = ""
            self._part = _Part.VALUE
            self._scanner.is_key = True
        elif sign in "{[" and self._is_wanted and self._name is not None:
            self._open("")
            self._scanner.is_passed_on = True

    def _read_value(self, scanner: "_ValueScanner") -> bool:
        """Read a key or a value on; whether it is whole."""
        start = self._place
        self._place, is_whole = scanner.scan(self._text, start)
        piece = self._text[start : self._place]
        if scanner.is_passed_on:
            self._builder.add_arguments(piece)
        else:
            self._literal.append(piece)
        if not is_whole:
            if scanner.is_cut:
                raise _Broken
            return False
        literal = "".join(self._literal)
        self._literal.clear()
        self._scanner = None
        if scanner.is_key:
            self._key = _decoded(literal)
            self._part = _Part.COLON
            return True
        self._part = _Part.NEXT
        if self._key == "name" and self._name is None:
            self._name = _decoded(literal)
        elif self._is_wanted:
            self._take_arguments(literal)
        return True

    def _take_arguments(self, literal: str) -> None:
        """Arguments that are a text or a number, or that came before the name."""
        if literal in ("null", '""'):
            literal = "{}"
        elif literal.startswith('"'):
            # Some models write the arguments as a text that holds their JSON.
            literal = _decoded(literal)
        if self._name is None:
            self._early = literal
        else:
            self._open(literal)

    def _read_end(self) -> bool:
        place = self._place
        while place < len(self._text) and self._text[place] in _SPACE:
            place += 1
        rest = self._text[place : place + len(CALL_END)]
        if rest == CALL_END:
            self._place = place + len(CALL_END)
            return True
        # The white space stays with what follows, in case that is content.
        return not CALL_END.startswith(rest)


class _ValueScanner:
    """Finds the end of one JSON value in text that comes in pieces, without looking back."""

    __slots__ = (
        "_depth",
        "_is_escaped",
        "_is_in_string",
        "_is_scalar",
        "is_cut",
        "is_key",
        "is_passed_on",
    )

    def __init__(self, sign: str) -> None:
        """`sign`: the first character of the value."""
        self._depth = 0
        self._is_scalar = sign not in '"{['
        self._is_in_string = False
        self._is_escaped = False
        self.is_key = False
        self.is_passed_on = False
        """Its text goes to the client as it comes."""
        self.is_cut = False
        """The end marker of the call stands inside of it."""

    def scan(self, text: str, place: int) -> tuple[int, bool]:
        """Return how far the value is read, and whether it is whole there."""
        if self._is_scalar:
            found = _SCALAR.match(text, place)
            assert found is not None
            end = found.end()
            self.is_cut = end == place and end < len(text) and self._depth == 0
            if end > place:
                self._depth = 1  # something of it is there
            return end, end < len(text) and not self.is_cut
        while place < len(text):
            if self._is_in_string:
                place = self._scan_string(text, place)
                if not self._is_in_string and self._depth == 0:
                    return place, True
                continue
            found = _IN_VALUE.search(text, place)
            if found is None:
                return len(text), False
            place = found.start()
            sign = text[place]
            if sign == "<":
                rest = text[place : place + len(CALL_END)]
                if CALL_END.startswith(rest):
                    self.is_cut = rest == CALL_END
                    return place, False
            elif sign == '"':
                self._is_in_string = True
            else:
                self._depth += 1 if sign in "{[" else -1
            place += 1
            if self._depth == 0 and not self._is_in_string:
                return place, True
        return place, False

    def _scan_string(self, text: str, place: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        found = _IN_STRING.search(text, place)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._is_escaped = True
        else:
            self._is_in_string = False
        return found.end()


def _decoded(literal: str) -> str:
    """The text of a JSON string that is not empty."""
    try:
        text = msgspec.json.decode(literal.encode(), type=str)
    except msgspec.DecodeError as error:
        raise _Broken from error
    if not text:
        raise _Broken
    return text


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
        return self._num_reasoning_tokens if self._has_reasoning else None

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
