"""What a parsed answer is made of: reasoning, content and tool calls, gathered piece by piece.

A parser (`dsched.frontdoor.hermes`, `dsched.frontdoor.deepseek`) reads the tokens of one answer and
writes into a `MessageBuilder`. A stream takes from it what is new since the last event; an answer
without a stream takes everything at its end. Both are therefore the same text by construction.

Why here and not in the engines: docs/adr/0006.

In: pieces, in the order in which the model wrote them. Out: OpenAI's `delta` and `message` objects.
Pure. O(1) a piece.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dsched.frontdoor.text import Detokenizer, StopFinder
from dsched.ids import RequestId

_NUM_ID_TOKENS = 64
"""Prompt tokens that call ids depend on, from its end."""


class MessageBuilder:
    """The message of one answer. Each piece is taken once.

    >>> builder = MessageBuilder("call_x", max_calls=None)
    >>> builder.add_content("Let me see.")
    >>> builder.open_call("look")
    >>> builder.add_arguments("{}")
    >>> delta = builder.take_delta()
    >>> delta["content"], delta["tool_calls"][0]["function"]
    ('Let me see.', {'name': 'look', 'arguments': '{}'})
    >>> builder.take_delta() is None
    True
    """

    __slots__ = (
        "_calls",
        "_content",
        "_id_prefix",
        "_max_calls",
        "_reasoning",
        "is_full",
        "num_calls",
    )

    def __init__(self, id_prefix: str, *, max_calls: int | None) -> None:
        """`id_prefix` begins the ids of the calls. With `max_calls` the answer is over where the
        next call begins (`is_full`), and what comes from there on is not taken up."""
        self._id_prefix = id_prefix
        self._max_calls = max_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[int, str | None, list[str]]] = []
        """Index of the call, its name where it is opened here, and pieces of its arguments."""
        self.num_calls = 0
        self.is_full = False

    def add_content(self, text: str) -> None:
        if text and not self.is_full:
            self._content.append(text)

    def add_reasoning(self, text: str) -> None:
        if text and not self.is_full:
            self._reasoning.append(text)

    def open_call(self, name: str) -> None:
        """Begin the next tool call."""
        if self.num_calls == self._max_calls:
            self.is_full = True
        if not self.is_full:
            self._calls.append((self.num_calls, name, []))
            self.num_calls += 1

    def add_arguments(self, text: str) -> None:
        """Go on with the arguments of the call that was opened last."""
        if self.is_full or not text:
            return
        if not self._calls:
            self._calls.append((self.num_calls - 1, None, []))
        self._calls[-1][2].append(text)

    def take_delta(self) -> dict[str, Any] | None:
        """Return what is new as a `delta`; `None` if nothing is."""
        if not (self._content or self._reasoning or self._calls):
            return None
        delta: dict[str, Any] = {}
        if self._reasoning:
            delta["reasoning_content"] = "".join(self._reasoning)
        if self._content:
            delta["content"] = "".join(self._content)
        if self._calls:
            delta["tool_calls"] = [
                {"index": index, **self._call(index, name, pieces)}
                for index, name, pieces in self._calls
            ]
        self.drop()
        return delta

    def drop(self) -> None:
        """Forget what is new: the client has it already."""
        self._content, self._reasoning, self._calls = [], [], []

    def message(self) -> dict[str, Any]:
        """Return the whole answer as a `message`, from which nothing may have been taken."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["content"] = content or None
            message["tool_calls"] = [self._call(*call) for call in self._calls]
        return message

    def _call(self, index: int, name: str | None, pieces: list[str]) -> dict[str, Any]:
        arguments = "".join(pieces)
        if name is None:
            return {"function": {"arguments": arguments}}
        return {
            "id": f"{self._id_prefix}{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


class AnswerParser(Protocol):
    """Reads the tokens of one answer into a `MessageBuilder`.

    What has been written after k tokens is a function of those tokens alone, whatever engines they
    came from and however they were grouped: this is what makes a handoff, and going on from
    `Last-Event-ID`, invisible.
    """

    is_over: bool
    """A stop string was found: nothing more is read, and the engine has to be told."""
    fault: str | None
    """Why the answer cannot be read on; it has failed then."""

    def feed(self, token_id: int) -> None:
        """Read the next token."""
        ...

    def finish(self, reason: str) -> str:
        """Write what was held back; return the finish reason, given the engine's."""
        ...

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Tokens of reasoning so far; `None` where none are told apart."""
        ...


MakeParser = Callable[[MessageBuilder, Detokenizer, StopFinder | None, int], AnswerParser]
"""(where to, text of the tokens, stop strings, `min_tokens`) to the parser of one answer."""


def call_id_prefix(request_id: RequestId, prompt_token_ids: Sequence[int]) -> str:
    """Return what the ids of an answer's calls begin with: the same for the same request.

    A request that is repeated under its id after a restart gives the same ids, and two turns of one
    conversation, whose prompts differ, do not share them even if they share their request id.
    """
    end = prompt_token_ids[-_NUM_ID_TOKENS:]
    text = f"{request_id} {len(prompt_token_ids)} {' '.join(map(str, end))}"
    return f"call_{hashlib.blake2s(text.encode(), digest_size=10).hexdigest()}"
