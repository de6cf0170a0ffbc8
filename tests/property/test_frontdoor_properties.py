"""The front door, whatever a client sends: one well-formed answer, and text that joins up."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from dsched.config import FrontDoorConfig
from dsched.frontdoor import FrontDoor, ServedModel
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.renderer import TemplateRenderer
from dsched.frontdoor.schema import parse_chat, parse_completion
from dsched.frontdoor.text import StopFinder, TokenTexts
from dsched.sim.tokenizer import CHAT_TEMPLATE, build_sim_tokenizer
from dsched.testing.fake_control import FakeControlPlane
from dsched.testing.raw_http import RawClient

TOKENIZER = build_sim_tokenizer()

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.text(st.characters(categories=["Cs"]), max_size=3),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    "model", "prompt", "messages", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "n", "stop", "temperature", "top_p", "seed", "presence_penalty",
    "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "user", "echo", "suffix",
    "best_of", "tools", "tool_choice", "functions", "response_format", "ignore_eos", "min_tokens",
    "stop_token_ids", "priority", "top_k", "min_p", "repetition_penalty", "return_token_ids",
    "chat_template_kwargs", "unknown",
]  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "x"])},
        optional={"content": st.one_of(st.text(max_size=20), VALUES), "name": VALUES},
    ),
    max_size=3,
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly right requests with some fields that are anything."""
    document: dict[str, Any] = {"model": "tiny", "max_tokens": draw(st.integers(1, 8))}
    if draw(st.booleans()):
        document["prompt"] = draw(
            st.one_of(st.text(max_size=30), st.lists(st.integers(-2, 1_600), max_size=9))
        )
    if draw(st.booleans()):
        document["messages"] = draw(MESSAGES)
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=4, unique=True)):
        document[name] = draw(VALUES)
    return document


BODIES = st.one_of(
    documents().map(lambda document: json.dumps(document).encode()),
    st.binary(max_size=60),
    st.tuples(documents(), st.integers(0, 80), st.binary(max_size=3)).map(
        lambda parts: (
            (raw := json.dumps(parts[0]).encode())[: parts[1]] + parts[2] + raw[parts[1] :]
        )
    ),
)


@given(BODIES)
def test_every_body_is_read_or_refused(body: bytes) -> None:
    """The parsers raise nothing but a refusal of the client, which JSON can hold."""
    for parse in (parse_completion, parse_chat):
        refusal = None
        try:
            parse(body)
        except ApiError as error:
            refusal = error
        if refusal is not None:
            assert refusal.status == 400
            assert json.loads(refusal.body().decode())["error"]["message"] == refusal.message


async def _answers(bodies: list[tuple[str, bytes]]) -> None:
    control = FakeControlPlane(token_ids=range(300, 700))
    control.add_model("tiny", max_model_len=256, vocab_size=TOKENIZER.get_vocab_size())
    renderer = TemplateRenderer(TOKENIZER, chat_template=CHAT_TEMPLATE)
    served = ServedModel(name="tiny", tokenizer=TOKENIZER, renderer=renderer)
    door = FrontDoor(control=control, models={"tiny": served}, settings=FrontDoorConfig(port=0))
    await door.start()
    try:
        async with RawClient(door.bound_port) as client:
            for path, body in bodies:
                client.post(path, body)
                answer = await client.answer()
                assert answer.status in (200, 400, 404), answer
                if answer.status != 200:
                    assert answer.error()["type"] == "invalid_request_error"
                elif answer.headers["content-type"].startswith("text/event-stream"):
                    assert answer.events()[-1] == "[DONE]"
                else:
                    assert answer.json()["usage"]["completion_tokens"] >= 1
        assert door.num_open_requests == 0
        assert control.runs == {}
    finally:
        await door.stop(0)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["/v1/completions", "/v1/chat/completions"]), BODIES),
        min_size=1,
        max_size=20,
    )
)
def test_process_survives_every_body(bodies: list[tuple[str, bytes]]) -> None:
    """On a live socket each request of one connection gets one well-formed answer."""
    asyncio.run(_answers(bodies))


async def _garbage(data: bytes) -> None:
    control = FakeControlPlane(token_ids=range(300, 700))
    door = FrontDoor(control=control, models={}, settings=FrontDoorConfig(port=0))
    await door.start()
    try:
        async with RawClient(door.bound_port) as client:
            client.send(data)
            client.writer.write_eof()
            answer = await client.closed()
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    finally:
        await door.stop(0)


FRAGMENTS = [
    b"POST /v1/completions HTTP/1.1\r\n",
    b"GET / HTTP/1.0\r\n",
    b"host: t\r\n",
    b"\r\n",
    b"content-length: 2\r\n",
    b"transfer-encoding: chunked\r\n",
    b"{}",
    b"0\r\n\r\n",
    b"expect: 100-continue\r\n",
    b"connection: upgrade\r\nupgrade: x\r\n",
    b"5\r\nabc",
]
BYTES = st.one_of(
    st.binary(max_size=200), st.lists(st.sampled_from(FRAGMENTS), max_size=10).map(b"".join)
)


@settings(deadline=None, max_examples=25)
@given(BYTES)
def test_process_survives_every_byte(data: bytes) -> None:
    """What is not HTTP ends the connection, or gets an answer that is."""
    asyncio.run(_garbage(data))


@given(
    st.text(alphabet="ab\u00e9\u20ac\U0001f600 ", max_size=40),
    st.lists(st.text(alphabet="ab\u00e9 ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_stop_strings_cut_as_if_the_text_came_at_once(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """However the text is cut into pieces, it ends before the first stop string in it."""
    places = [text.find(stop) for stop in stops if stop in text]
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    finder, given_text, num_given = StopFinder(stops), "", 0
    for start, end in itertools.pairwise(edges):
        given_text += finder.feed(text[start:end])
        num_given = end
        if finder.is_found:
            break
    if not finder.is_found:
        given_text += finder.flush()

    # A stop string may be complete in a piece before an earlier one is: the first found counts.
    seen = text[:num_given]
    expected = min((seen.find(stop) for stop in stops if stop in seen), default=len(text))
    assert given_text == text[:expected]
    assert finder.is_found == bool(places)


RENDERER = TemplateRenderer(TOKENIZER)
TOKEN_IDS = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1), max_size=12)


@given(prompt=TOKEN_IDS, ids=TOKEN_IDS)
def test_texts_looked_up_are_those_of_the_decoder(prompt: list[int], ids: list[int]) -> None:
    """Any tokens in any order, also those that are parts of characters or of none, become the text
    that the tokenizer itself makes of prompt and answer together."""
    whole = TOKENIZER.decode([*prompt, *ids])
    assume(not TOKENIZER.decode(prompt).endswith("\N{REPLACEMENT CHARACTER}"))
    assume(not whole.endswith("\N{REPLACEMENT CHARACTER}"))
    detokenizer = TokenTexts(TOKENIZER).detokenizer(prompt)

    text = "".join(map(detokenizer.feed, ids))

    assert TOKENIZER.decode(prompt) + text == whole


@given(text=st.text(max_size=200))
def test_ids_are_those_of_the_tokenizer(text: str) -> None:
    """Leaving out where tokens lie changes no token."""
    try:
        expected = TOKENIZER.encode(text).ids
    except UnicodeEncodeError:
        reject()  # half of a surrogate pair is refused before it gets here
    assert RENDERER.encode_text(text) == expected


@given(st.text(max_size=60))
def test_pieces_join_to_the_text(text: str) -> None:
    """Every text comes back unchanged from its tokens, and no piece shows half of a character."""
    try:
        ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    except UnicodeEncodeError:
        pytest.skip("half of a surrogate pair is refused before it gets here")
    detokenizer = TokenTexts(TOKENIZER).detokenizer()
    pieces = [detokenizer.feed(token_id) for token_id in ids]

    # The decoder waits behind a replacement sign that the text itself holds.
    if "\N{REPLACEMENT CHARACTER}" not in text and not any(token in text for token in ("<|", "|>")):
        assert "".join(pieces) == text
