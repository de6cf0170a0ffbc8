"""Reads the calls of an answer that has to consist of them; see `dsched.frontdoor.forced`.

The text is JSON because the engine keeps to a grammar, and arguments are passed on as the model
writes them. An engine that does not keep to it must not lose what its model wrote either:

- A named call: all text is its arguments, whatever it is, as in vLLM.
- `required`: what is no array of calls is content from there on, with the signs before it. The
  signs around calls that were read (`[`, `,`, `]`, white space) are markup.

In: text in any pieces. Out: calls, or content, for a `MessageBuilder`. Pure. Amortised O(1) a
character.
"""

import re
from enum import Enum, auto
from typing import Protocol

from dsched.frontdoor.deltas import MessageBuilder
from dsched.frontdoor.hermes_call import SPACE, CallReader


class ForcedCallReader(Protocol):
    """Reads an answer from after its reasoning."""

    @property
    def is_in_call(self) -> bool:
        """A call has been opened and is not whole."""
        ...

    def begins(self, text: str) -> bool | None:
        """Whether an answer that begins with `text` is one of calls; `None`: not to be told yet."""
        ...

    def feed(self, text: str) -> None:
        """Read the next piece."""
        ...

    def finish(self) -> None:
        """The answer has ended."""
        ...


class NamedCallReader:
    """All text is the arguments of one call.

    >>> builder = MessageBuilder("call_x", max_calls=None)
    >>> reader = NamedCallReader(builder, "f")
    >>> reader.feed('{"a"')
    >>> reader.feed(": 1}")
    >>> builder.message()["tool_calls"][0]["function"]
    {'name': 'f', 'arguments': '{"a": 1}'}
    """

    __slots__ = ("_builder", "_name", "is_in_call")

    def __init__(self, builder: MessageBuilder, name: str) -> None:
        self._builder = builder
        self._name = name
        self.is_in_call = False
        """Once opened it stays so until the answer ends. So the finish reason stays the engine's:
        OpenAI's, too, is `stop` where the client named the function."""

    def begins(self, text: str) -> bool | None:
        """See `ForcedCallReader`."""
        return _begins(text, "{")

    def feed(self, text: str) -> None:
        """Read the next piece."""
        if not text:
            return
        if not self.is_in_call:
            self.is_in_call = True
            self._builder.open_call(self._name)
        self._builder.add_arguments(text)

    def finish(self) -> None:
        """The answer has ended; nothing was held back."""


class _Part(Enum):
    """What comes next in the array of calls."""

    ARRAY = auto()
    FIRST = auto()
    """A call, or the end of an array without any."""
    CALL = auto()
    NEXT = auto()
    END = auto()
    """The array is whole."""
    CONTENT = auto()
    """It was no such array."""


class RequiredCallsReader:
    """The text is an array of calls.

    >>> builder = MessageBuilder("call_x", max_calls=None)
    >>> reader = RequiredCallsReader(builder)
    >>> reader.feed('[{"name": "f", "param')
    >>> reader.feed('eters": {"a": 1}}]')
    >>> reader.finish()
    >>> builder.message()["tool_calls"][0]["function"]
    {'name': 'f', 'arguments': '{"a": 1}'}
    """

    __slots__ = ("_builder", "_call", "_markup", "_part")

    def __init__(self, builder: MessageBuilder) -> None:
        self._builder = builder
        self._part = _Part.ARRAY
        self._markup: list[str] = []
        """Signs since the last call: content if no call comes after them."""
        self._call: CallReader | None = None

    @property
    def is_in_call(self) -> bool:
        """See `ForcedCallReader`."""
        return self._call is not None and self._call.is_open

    def begins(self, text: str) -> bool | None:
        """See `ForcedCallReader`."""
        return _begins(text, "[")

    def feed(self, text: str) -> None:
        """Read the next piece."""
        rest: str | None = text
        while rest:
            if self._call is not None:
                rest = self._read_call(self._call, rest)
            elif self._part is _Part.CONTENT:
                self._builder.add_content(rest)
                return
            else:
                rest = self._read_sign(rest)

    def finish(self) -> None:
        """The answer has ended. Separators after a call carry nothing."""
        if self._call is not None:
            self._call.finish()
        elif self._part in (_Part.ARRAY, _Part.FIRST):
            self._give_up("")

    def _read_call(self, call: CallReader, text: str) -> str | None:
        rest = call.feed(text)
        if rest is not None:
            self._call = None
            self._part = _Part.NEXT if call.was_opened else _Part.CONTENT
        return rest

    def _read_sign(self, text: str) -> str:
        """Read one sign of the array and the white space before it; return the rest."""
        rest = text.lstrip(SPACE)
        self._markup.append(text[: len(text) - len(rest)])
        if not rest:
            return rest
        sign, part = rest[0], self._part
        if sign == "{" and part in (_Part.FIRST, _Part.CALL):
            self._call = CallReader(self._builder, before="".join(self._markup), end_marker="")
            self._markup.clear()
            return rest
        if (part, sign) not in _FOLLOWERS:
            return self._give_up(rest)
        self._part = _FOLLOWERS[part, sign]
        self._markup.append(sign)
        if self._part is _Part.END:
            self._markup.clear()
        return rest[1:]

    def _give_up(self, rest: str) -> str:
        """What has not become a call is content, and so is all that comes; return it."""
        self._part = _Part.CONTENT
        self._builder.add_content("".join(self._markup))
        self._markup.clear()
        return rest


_FOLLOWERS = {
    (_Part.ARRAY, "["): _Part.FIRST,
    (_Part.NEXT, ","): _Part.CALL,
    (_Part.NEXT, "]"): _Part.END,
}

_BEGINNINGS = {
    "{": (re.compile(r'\s*\{[\s"}]'), re.compile(r"\s*\{?")),
    "[": (re.compile(r"\s*\[[\s{]"), re.compile(r"\s*\[?")),
}
"""By the first sign of the JSON: what it has to begin with, and what may still become that. The
second sign tells it from reasoning that begins with a bracket, as "[The user wants ...": rare, but
no reason to take it for arguments."""


def _begins(text: str, sign: str) -> bool | None:
    beginning, undecided = _BEGINNINGS[sign]
    if beginning.match(text):
        return True
    return None if undecided.fullmatch(text) else False
