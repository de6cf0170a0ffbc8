"""Chats with tools, whatever a client sends and a model says: one well-formed answer each."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dsched.config import FrontDoorConfig
from dsched.frontdoor import FrontDoor, ServedModel
from dsched.frontdoor.api import INLINE_CHARS
from dsched.frontdoor.deepseek import DeepseekRenderer
from dsched.frontdoor.deltas import MessageBuilder
from dsched.frontdoor.renderer import Renderer, TemplateRenderer
from dsched.frontdoor.schema import parse_chat
from dsched.frontdoor.text import TokenTexts
from dsched.sim.tokenizer import SPECIAL_TOKENS, build_sim_tokenizer
from dsched.testing.chat_models import (
    DEEPSEEK_CONTROL_TOKENS,
    DEEPSEEK_MARKUP_TOKENS,
    HERMES_TEMPLATE,
    build_deepseek_tokenizer,
)
from dsched.testing.fake_control import FakeControlPlane
from dsched.testing.raw_http import RawClient

SIM, DEEPSEEK = build_sim_tokenizer(), build_deepseek_tokenizer()
RENDERERS: dict[str, tuple[Tokenizer, Renderer]] = {
    "hermes": (
        SIM,
        TemplateRenderer(
            SIM, chat_template=HERMES_TEMPLATE, tool_call_format="hermes", reasoning_format="think"
        ),
    ),
    "deepseek-v4": (DEEPSEEK, DeepseekRenderer(DEEPSEEK, chat_format="deepseek-v4")),
    "deepseek-v4.1": (DEEPSEEK, DeepseekRenderer(DEEPSEEK, chat_format="deepseek-v4.1")),
}
CONTROLS = (*SPECIAL_TOKENS, *DEEPSEEK_CONTROL_TOKENS, *DEEPSEEK_MARKUP_TOKENS)

TEXTS = st.one_of(st.text(max_size=12), st.sampled_from(CONTROLS))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
CALLS = st.fixed_dictionaries(
    {
        "id": TEXTS,
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": TEXTS, "arguments": st.one_of(TEXTS, VALUES.map(json.dumps), VALUES)}
        ),
    }
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]),
            "content": st.one_of(st.none(), TEXTS, VALUES),
        },
        optional={
            "tool_calls": st.lists(st.one_of(CALLS, VALUES), max_size=2),
            "tool_call_id": TEXTS,
            "reasoning_content": TEXTS,
            "prefix": st.booleans(),
            "name": TEXTS,
        },
    ),
    min_size=1,
    max_size=4,
)
TOOLS = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {
                "type": st.just("function"),
                "function": st.fixed_dictionaries(
                    {"name": TEXTS}, optional={"parameters": VALUES, "description": VALUES}
                ),
            }
        ),
        VALUES,
    ),
    max_size=2,
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("tiny"), "max_tokens": st.integers(1, 12), "messages": MESSAGES},
    optional={
        "tools": TOOLS,
        "tool_choice": st.one_of(st.sampled_from(["auto", "none", "required"]), VALUES),
        "parallel_tool_calls": st.booleans(),
        "stream": st.booleans(),
        "stop": TEXTS,
        "thinking": st.one_of(st.just({"type": "disabled"}), VALUES),
        "reasoning_effort": st.sampled_from(["low", "high", "max", "none", "?"]),
        "response_format": st.sampled_from([{"type": "json_object"}, {"type": "text"}]),
        "chat_template_kwargs": st.dictionaries(TEXTS, VALUES, max_size=2),
        "logprobs": st.booleans(),
        "temperature": st.floats(0, 2),
    },
)


async def ask(name: str, bodies: list[dict[str, Any]]) -> list[int]:
    """The statuses of the answers."""
    tokenizer, renderer = RENDERERS[name]
    vocab_size = tokenizer.get_vocab_size()
    control = FakeControlPlane(token_ids=range(vocab_size))
    control.add_model("tiny", max_model_len=1 << 16, vocab_size=vocab_size)
    served = ServedModel(name="tiny", tokenizer=tokenizer, renderer=renderer)
    door = FrontDoor(control=control, models={"tiny": served}, settings=FrontDoorConfig(port=0))
    await door.start()
    statuses = []
    try:
        async with RawClient(door.bound_port) as client:
            for body in bodies:
                client.post("/v1/chat/completions", json.dumps(body).encode())
                answer = await client.answer()
                statuses.append(answer.status)
                if answer.status != 200:
                    assert answer.status == 400, answer
                    assert answer.error()["type"] == "invalid_request_error"
                elif answer.headers["content-type"].startswith("text/event-stream"):
                    assert answer.events()[-1] == "[DONE]"
                else:
                    (choice,) = answer.json()["choices"]
                    assert choice["message"]["role"] == "assistant"
        assert door.num_open_requests == 0
        assert control.runs == {}
    finally:
        await door.stop(0)
    return statuses


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERERS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(bodies=st.lists(BODIES, min_size=1, max_size=12))
def test_every_chat_gets_one_answer(name: str, bodies: list[dict[str, Any]]) -> None:
    """On a live socket, over a model that says any token; nothing is left open."""
    asyncio.run(ask(name, bodies))


@pytest.mark.slow
@pytest.mark.parametrize("name", RENDERERS)
def test_long_chats_are_rendered_beside_the_event_loop(name: str) -> None:
    """On other threads, several at once, with the same answer."""
    tools = [{"type": "function", "function": {"name": "find", "description": "word " * 2_000}}]
    long = {"role": "user", "content": "word " * INLINE_CHARS}
    body = {"model": "tiny", "max_tokens": 6, "messages": [long], "tools": tools}

    assert asyncio.run(ask(name, [body] * 4)) == [200] * 4


@settings(deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(RENDERERS)))
def test_any_tokens_are_a_message(data: st.DataObject, name: str) -> None:
    """Tokens in any order, ids of no token included: no parser fails, and control tokens are never
    in what a client reads."""
    tokenizer, renderer = RENDERERS[name]
    tools = [{"type": "function", "function": {"name": "find"}}]
    document = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    rendered = renderer.render_chat(parse_chat(json.dumps(document).encode()))
    assert rendered.make_parser is not None
    ids = data.draw(
        st.lists(
            st.one_of(
                st.integers(-1, tokenizer.get_vocab_size() + 3),
                st.sampled_from([tokenizer.token_to_id(each) or 0 for each in CONTROLS]),
            ),
            max_size=40,
        )
    )
    builder = MessageBuilder("call_", max_calls=None)
    detokenizer = TokenTexts(tokenizer).detokenizer(rendered.token_ids)
    parser = rendered.make_parser(builder, detokenizer, None, 0)
    for token_id in ids:
        parser.feed(token_id)
    assert parser.finish("length") == "length"

    assert parser.fault is None
    told = json.dumps(builder.message(), ensure_ascii=False)
    assert not [each for each in DEEPSEEK_CONTROL_TOKENS if each in told]
