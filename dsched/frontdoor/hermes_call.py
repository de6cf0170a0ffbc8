"""Reads one tool call of the Hermes shape while it is written.

The text after `<tool_call>` is a JSON object with a name and arguments. The arguments go to the
client as they come, so the object is followed sign by sign instead of being parsed at its end; only
what cannot be passed on in pieces (the name, keys, arguments before the name) is kept.

Such an object is also an item of the array that `tool_choice: required` makes a model write
(`dsched.frontdoor.forced_calls`); there no marker ends it.

In: text in any pieces. Out: an opened call and pieces of its arguments for a `MessageBuilder`, or,
where the text turns out to be no call, all of it as content. Pure. Amortised O(1) a character.
"""

import re
from enum import Enum, auto

import msgspec

from dsched.frontdoor.deltas import MessageBuilder

CALL_START, CALL_END = "<tool_call>", "</tool_call>"
SPACE = " \t\r\n"
"""White space of JSON."""

_ARGUMENT_KEYS = ("arguments", "parameters")
_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'["{}\[\]<]')
_SCALAR = re.compile(r"[^\s,}\]<\"{\[]*")


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


class CallReader:
    """One call, from after `<tool_call>`. Once opened its arguments are passed on as they come."""

    __slots__ = (
        "_builder",
        "_early",
        "_end_marker",
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

    def __init__(self, builder: MessageBuilder, *, before: str, end_marker: str = CALL_END) -> None:
        """`before`: white space and marker, which are content if this is not a call. With an empty
        `end_marker` the call ends with its object."""
        self._builder = builder
        self._end_marker = end_marker
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
        elif rest.strip(SPACE):
            self._builder.add_content(rest)

    def _give_up(self) -> str:
        if not self.was_opened:
            self._builder.add_content("".join(self._spent) + self._text[: self._place])
            return self._text[self._place :]
        return self._text[self._place :].removeprefix(self._end_marker)

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
        marker = self._end_marker
        rest = self._text[self._place : self._place + len(marker)]
        return rest != marker and marker.startswith(rest)

    def _skip_space(self) -> None:
        while self._place < len(self._text) and self._text[self._place] in SPACE:
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
        self._scanner = _ValueScanner(sign, end_marker=self._end_marker)
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
        while place < len(self._text) and self._text[place] in SPACE:
            place += 1
        marker = self._end_marker
        if not marker:
            return True
        rest = self._text[place : place + len(marker)]
        if rest == marker:
            self._place = place + len(marker)
            return True
        # The white space stays with what follows, in case that is content.
        return not marker.startswith(rest)


class _ValueScanner:
    """Finds the end of one JSON value in text that comes in pieces, without looking back."""

    __slots__ = (
        "_depth",
        "_end_marker",
        "_is_escaped",
        "_is_in_string",
        "_is_scalar",
        "is_cut",
        "is_key",
        "is_passed_on",
    )

    def __init__(self, sign: str, *, end_marker: str) -> None:
        """`sign`: the first character of the value."""
        self._end_marker = end_marker
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
                marker = self._end_marker
                rest = text[place : place + len(marker)]
                if marker and marker.startswith(rest):
                    self.is_cut = rest == marker
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
