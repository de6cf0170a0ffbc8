"""Parsed answers: any split of the text gives the same message, and nothing written is lost."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from call_strategies import ARGUMENTS, CUTS
from hypothesis import example, given
from hypothesis import strategies as st

from dsched.frontdoor.deltas import MessageBuilder
from dsched.frontdoor.hermes import THINK_END, THINK_START, TextReader
from dsched.frontdoor.hermes_call import CALL_END, CALL_START

NAMES = st.text(min_size=1, max_size=8)
PIECES = st.sampled_from(
    [CALL_START, CALL_END, THINK_START, THINK_END, '{"name": ', '"f"', ', "arguments": ', "{", "}",
     '"', "\\", ":", ",", "[", "]", "null", "12", "\n", " ", "word", "<", "</tool", "é"]
)  # fmt: skip
ROUGH = st.lists(st.one_of(PIECES, st.text(max_size=3)), max_size=24).map("".join)
CUT_SHORT = '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'
TURNED_AROUND = ' <tool_call> {"arguments": {}, "name": "f",}x'


def read(
    pieces: Sequence[str], *, is_in_reasoning: bool = False, **options: bool
) -> MessageBuilder:
    builder = MessageBuilder("call_", max_calls=None)
    options = {"has_calls": True, "has_reasoning": True} | options
    reader = TextReader(builder, is_in_reasoning=is_in_reasoning, **options)
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    return builder


def split(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(places)]


def joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the deltas of a stream."""
    content, reasoning, calls = "", "", {}
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"arguments": ""})
            known["arguments"] += call["function"]["arguments"]
            if "id" in call:
                known |= {"id": call["id"], "name": call["function"]["name"]}
    return {"content": content, "reasoning": reasoning, "calls": list(calls.values())}


def whole(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{"id": each["id"], **each["function"]} for each in message.get("tool_calls", ())]
    reasoning = message.get("reasoning_content", "")
    return {"content": message["content"] or "", "reasoning": reasoning, "calls": calls}


@given(text=ROUGH, cuts=CUTS, is_in_reasoning=st.booleans(), has_calls=st.booleans())
@example(text=CUT_SHORT, cuts=[56], is_in_reasoning=False, has_calls=True)
@example(text=TURNED_AROUND, cuts=[5], is_in_reasoning=False, has_calls=True)
def test_any_split_gives_the_same_message(
    *, text: str, cuts: list[int], is_in_reasoning: bool, has_calls: bool
) -> None:
    """One piece, some pieces, single characters: whole and as a stream, what was written is the
    same, and also after each character of the way."""
    options = {"has_calls": has_calls, "is_in_reasoning": is_in_reasoning}
    message = read([text], **options).message()

    assert read(split(text, cuts), **options).message() == message
    assert read(list(text), **options).message() == message

    builder = MessageBuilder("call_", max_calls=None)
    reader = TextReader(builder, has_reasoning=True, **options)
    deltas = []
    for sign in text:
        reader.feed(sign)
        deltas.append(builder.take_delta())
    reader.finish()
    deltas.append(builder.take_delta())
    assert joined([delta for delta in deltas if delta]) == whole(message)


@given(ROUGH, CUTS)
def test_what_is_written_after_some_text_does_not_depend_on_its_pieces(
    text: str, cuts: list[int]
) -> None:
    """Going on from `Last-Event-ID` relies on it: without the end, too."""
    messages = []
    for pieces in (split(text, cuts), list(text)):
        builder = MessageBuilder("call_", max_calls=None)
        reader = TextReader(builder, has_calls=True, has_reasoning=True)
        for piece in pieces:
            reader.feed(piece)
        messages.append(builder.message())
    assert messages[0] == messages[1]


@given(ROUGH)
def test_text_without_a_call_or_reasoning_is_content(text: str) -> None:
    """Nothing is lost of text that is no call: also not of broken ones and of lonely markers."""
    message = read([text], has_reasoning=False).message()
    if "tool_calls" not in message:
        assert message["content"] == text
    without = read([text], has_calls=False, has_reasoning=False).message()
    assert without["content"] == text


@given(
    st.lists(
        st.tuples(NAMES, ARGUMENTS, st.booleans(), st.sampled_from(["", "\n", " so "])), max_size=3
    ),
    st.text(st.characters(exclude_characters="<"), max_size=10),
    CUTS,
)
def test_calls_come_back_as_they_were_written(
    calls: list[tuple[str, dict[str, Any], bool, str]], before: str, cuts: list[int]
) -> None:
    """In any order of the two members, with text around, in any pieces."""
    text = before
    for name, arguments, is_name_first, after in calls:
        members = [("name", name), ("arguments", arguments)]
        document = dict(members if is_name_first else members[::-1])
        text += (
            CALL_START + "\n" + json.dumps(document, ensure_ascii=False) + "\n" + CALL_END + after
        )

    message = whole(read(split(text, cuts), has_reasoning=False).message())

    assert [each["name"] for each in message["calls"]] == [name for name, *_ in calls]
    assert [json.loads(each["arguments"]) for each in message["calls"]] == [
        arguments for _, arguments, *_ in calls
    ]
    told = "".join(message["content"].split())
    assert told == "".join((before + "".join(after for *_, after in calls)).split())


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("a <tool_call>{x", "a <tool_call>{x", []),
        ("a\n<tool_call> tag", "a\n<tool_call> tag", []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}', "",
         [("f", '{"a": "</tool_call>"}')]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1</tool_call>b', "b", [("f", '{"a": [1')]),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call>b', "b", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "}</tool_call>", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', "",
         [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": <tool_call>{"name": "g"}</tool_call>', '<tool_call>{"name": ',
         [("g", "{}")]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"id": {"x": []}, "name": "f", "arguments": {}, "t": 1}x', "x", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "br', "", [("f", '{"a": "br')]),
    ],
)  # fmt: skip
def test_shapes_that_models_write(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    message = whole(read([text]).message())

    assert message["content"] == content
    assert [(each["name"], each["arguments"]) for each in message["calls"]] == calls


@pytest.mark.parametrize(
    ("text", "is_inside", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm\n", "yes"),
        ("\n<think>hm", False, "hm", ""),
        ("hm</think>yes", True, "hm", "yes"),
        ("hm</think>yes", False, "", "hm</think>yes"),
        ("so <think>hm</think>", False, "", "so <think>hm</think>"),
        ("<thin", False, "", "<thin"),
        ("<think></think>\n\n<tool_call> x", False, "", "<tool_call> x"),
    ],
)
def test_reasoning_is_told_apart(
    text: str, *, is_inside: bool, reasoning: str, content: str
) -> None:
    message = whole(read([text], is_in_reasoning=is_inside).message())

    assert (message["reasoning"], message["content"]) == (reasoning, content)


def test_a_long_call_is_read_in_one_pass() -> None:
    """Arguments of a megabyte in small pieces do not cost a megabyte a piece: the reader keeps only
    what it has not passed on."""
    builder = MessageBuilder("call_", max_calls=None)
    reader = TextReader(builder, has_calls=True, has_reasoning=False)
    reader.feed('<tool_call>{"name": "f", "arguments": {"a": "')
    for _ in range(2_000):
        reader.feed("some text " * 10)
        call = reader._call
        assert call is not None
        assert len(call._text) <= 100
    reader.feed('"}}</tool_call>')
    reader.finish()
    (call_made,) = builder.message()["tool_calls"]
    assert len(call_made["function"]["arguments"]) > 200_000
