"""Demanded calls: any split of the text gives the same message, and nothing written is lost."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from call_strategies import ARGUMENTS, CUTS
from hypothesis import example, given
from hypothesis import strategies as st

from dsched.frontdoor.deltas import MessageBuilder
from dsched.frontdoor.forced_calls import NamedCallReader, RequiredCallsReader
from dsched.frontdoor.hermes import TextReader

PIECES = st.sampled_from(
    ["<think>", "</think>", "[", "]", "{", "}", ",", ":", '"', "\\", '{"name": ', '"f"',
     ', "parameters": ', '{"a": 1}', "null", "12", "\n", " ", "word", "<", "</tool_call>", "é"]
)  # fmt: skip
CALL = '{"name": "f", "parameters": {"a": 1}}'
ROUGH = st.lists(st.one_of(PIECES, st.just(CALL), st.text(max_size=3)), max_size=24).map("".join)
CALLS = st.lists(
    st.tuples(st.text(min_size=1, max_size=8), ARGUMENTS, st.booleans()), min_size=1, max_size=3
)


class Reading:
    """An answer while it is read."""

    def __init__(
        self, *, is_named: bool, has_reasoning: bool = False, is_in_reasoning: bool = False
    ) -> None:
        self.builder = MessageBuilder("call_", max_calls=None)
        forced: NamedCallReader | RequiredCallsReader
        forced = (
            NamedCallReader(self.builder, "f") if is_named else RequiredCallsReader(self.builder)
        )
        self.reader = TextReader(
            self.builder,
            has_calls=True,
            has_reasoning=has_reasoning,
            is_in_reasoning=is_in_reasoning,
            forced=forced,
        )

    def feed(self, pieces: Sequence[str]) -> "Reading":
        for piece in pieces:
            self.reader.feed(piece)
        return self

    def message(self) -> dict[str, Any]:
        self.reader.finish()
        return self.builder.message()


def split(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


def told(message: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and name and arguments of each call."""
    calls = [each["function"] for each in message.get("tool_calls", ())]
    pairs = [(each["name"], each["arguments"]) for each in calls]
    return message.get("reasoning_content", ""), message["content"] or "", pairs


def joined(deltas: Sequence[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    """What a client makes of the deltas of a stream."""
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            name, arguments = calls.get(call["index"], ("", ""))
            name += call["function"].get("name", "")
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    reasoning, content = (
        "".join(delta.get(key, "") for delta in deltas) for key in ("reasoning_content", "content")
    )
    return reasoning, content, [calls[index] for index in sorted(calls)]


STATES = st.sampled_from([(False, False), (True, False), (True, True)])
"""Whether reasoning is told apart, and whether the prompt ended inside of it."""


@given(text=ROUGH, cuts=CUTS, is_named=st.booleans(), state=STATES)
@example(text='[{"name": "f", "parameters": {}} ,', cuts=[33], is_named=False, state=(False, False))
@example(text='\n{"a": 1}', cuts=[1, 2], is_named=True, state=(True, True))
@example(text="\n[so</think>[", cuts=[1, 2, 12], is_named=False, state=(True, True))
def test_any_split_gives_the_same_message(
    *, text: str, cuts: list[int], is_named: bool, state: tuple[bool, bool]
) -> None:
    """One piece, some pieces, single characters: whole and as a stream, what was written is the
    same, at the end and before it."""
    options = dict(zip(("has_reasoning", "is_in_reasoning"), state, strict=True))
    several, single = ([text], split(text, cuts)), list(text)
    whole, parts = (Reading(is_named=is_named, **options).feed(each) for each in several)
    reading = Reading(is_named=is_named, **options)
    deltas = []
    for sign in single:
        reading.feed([sign])
        deltas.append(reading.builder.take_delta())
    before_end = joined([each for each in deltas if each])
    reading.reader.finish()
    deltas.append(reading.builder.take_delta())

    assert told(whole.builder.message()) == told(parts.builder.message()) == before_end
    message = told(whole.message())
    assert message == told(parts.message()) == joined([each for each in deltas if each])


@given(ROUGH)
def test_of_an_answer_that_is_not_json_nothing_is_lost(text: str) -> None:
    """All of it is the named call's arguments; without a call all of it is content."""
    named = Reading(is_named=True).feed([text]).message()
    required = Reading(is_named=False).feed([text]).message()

    assert told(named) == ("", "", [("f", text)] if text else [])
    if "tool_calls" not in required:
        assert told(required) == ("", text, [])


@given(CALLS, st.sampled_from([None, 1]), st.sampled_from(["", "\n", " "]), CUTS)
def test_calls_come_back_as_they_were_written(
    calls: list[tuple[str, dict[str, Any], bool]], indent: int | None, space: str, cuts: list[int]
) -> None:
    """In any order of the two members, with white space, in any pieces; no content."""
    document = []
    for name, arguments, is_name_first in calls:
        members = [("name", name), ("parameters", arguments)]
        document.append(dict(members if is_name_first else members[::-1]))
    text = space + json.dumps(document, ensure_ascii=False, indent=indent) + space

    message = Reading(is_named=False).feed(split(text, cuts)).message()

    assert message["content"] is None
    read = [(name, json.loads(arguments)) for name, arguments in told(message)[2]]
    assert read == [(name, arguments) for name, arguments, _ in calls]
    assert all(arguments in text for _, arguments in told(message)[2])


@given(CALLS, st.integers(0, 400))
def test_a_cut_answer_has_the_beginning_of_the_whole_one(
    calls: list[tuple[str, dict[str, Any], bool]], place: int
) -> None:
    """Calls before the cut are whole, the one at the cut breaks off, and what has not become a call
    is content."""
    document = [{"name": name, "parameters": arguments} for name, arguments, _ in calls]
    text = json.dumps(document, ensure_ascii=False)

    _, _, whole = told(Reading(is_named=False).feed([text]).message())
    _, content, begun = told(Reading(is_named=False).feed([text[:place]]).message())

    assert begun[:-1] == whole[: max(0, len(begun) - 1)]
    for cut, full in zip(begun[-1:], whole[len(begun) - 1 :], strict=False):
        assert cut[0] == full[0]
        assert full[1].startswith(cut[1])
    assert content in text[:place]


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ('[{"name": "f", "parameters": {"a": [1]}}]', "", ['{"a": [1]}']),
        ('[{"name": "f"}]', "", ["{}"]),
        ('[{"name": "f", "parameters": null}, {"name": "f", "parameters": 5}]', "", ["{}", "5"]),
        ('[{"name": "f", "parameters": {"a": "</tool_call>"}}]', "", ['{"a": "</tool_call>"}']),
        ('[{"name": "f", "parameters": {}}', "", ["{}"]),
        ('[{"name": "f", "parameters": {}},', "", ["{}"]),
        ('[{"name": "f", "parameters": {}}] so', " so", ["{}"]),
        ('[{"name": "f", "parameters": {}} so', " so", ["{}"]),
        ('[{"name": "f", "parameters": {}}, {"na', ', {"na', ["{}"]),
        ('[{"name": "f", "parameters": {"a": ', "", ['{"a": ']),
        ('[{"name": "f", "para', '[{"name": "f", "para', []),
        ('{"name": "f", "parameters": {}}', '{"name": "f", "parameters": {}}', []),
        ('[{"parameters": {}}]', '[{"parameters": {}}]', []),
        ('[{"name": "f", "parameters": {"a": <}}]', "", ['{"a": <}']),
        ("[{]", "[{]", []),
        ("[]", "[]", []),
        (" [", " [", []),
        ("", "", []),
        ("I will call f.", "I will call f.", []),
    ],
)
def test_what_of_required_is_content(text: str, content: str, arguments: list[str]) -> None:
    message = Reading(is_named=False).feed([text]).message()

    assert told(message) == ("", content, [("f", each) for each in arguments])


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        # The grammar waits for the end of the reasoning.
        ("so\n</think>\n\n{}", "so\n", "{}"),
        ("\n[a, b] or {c}</think>{}", "[a, b] or {c}", "{}"),
        ("{x} it is</think>{}", "{x} it is", "{}"),
        # It begins at once.
        ('{"a": "</think>"}', "", '{"a": "</think>"}'),
        ('\n { "a": 1}', "", ' { "a": 1}'),
        ("{}", "", "{}"),
        ("{", "", "{"),
        # It never came to the call.
        ("so", "so", ""),
        ("\n", "", ""),
    ],
)
def test_inside_of_reasoning_the_json_may_begin_at_once(
    text: str, reasoning: str, rest: str
) -> None:
    reading = Reading(is_named=True, has_reasoning=True, is_in_reasoning=True).feed(list(text))

    assert told(reading.message()) == (reasoning, "", [("f", rest)] if rest else [])
    assert reading.reader.is_reasoning_left_out == bool(rest and not reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "num_calls"),
    [
        (f"[The user</think>[{CALL}]", "[The user", 1),
        (f"[{CALL}, {CALL}]", "", 2),
        (f"[ {CALL}]", "", 1),
        (f"<think>so</think>[{CALL}]", "<think>so", 1),
    ],
)
def test_inside_of_reasoning_the_array_may_begin_at_once(
    text: str, reasoning: str, num_calls: int
) -> None:
    reading = Reading(is_named=False, has_reasoning=True, is_in_reasoning=True).feed(list(text))

    assert told(reading.message()) == (reasoning, "", [("f", '{"a": 1}')] * num_calls)


def test_a_long_call_is_read_in_one_pass() -> None:
    """Arguments of a megabyte in small pieces do not cost a megabyte a piece: the reader keeps only
    what it has not passed on."""
    reading = Reading(is_named=False).feed(['[{"name": "f", "parameters": {"a": "'])
    for _ in range(2_000):
        reading.feed(["some text " * 10])
        assert isinstance(reading.reader._forced, RequiredCallsReader)
        call = reading.reader._forced._call
        assert call is not None
        assert len(call._text) <= 100
    ((_, arguments),) = told(reading.feed(['"}}]']).message())[2]
    assert len(arguments) > 200_000
