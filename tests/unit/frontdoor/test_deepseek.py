"""DeepSeek's chat format: ids of the library, answers read from token ids, refusals by name."""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from dsched.config import ModelConfig
from dsched.errors import ConfigError
from dsched.frontdoor.deepseek import DeepseekRenderer
from dsched.frontdoor.deltas import MessageBuilder
from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.models import load_model
from dsched.frontdoor.schema import ChatBody, parse_chat
from dsched.frontdoor.text import TokenTexts
from dsched.frontdoor.tools import check_tools
from dsched.sim.tokenizer import build_sim_tokenizer
from dsched.testing.chat_models import (
    DEEPSEEK_CONTROL_TOKENS,
    DEEPSEEK_EOS,
    DEEPSEEK_MARKUP_TOKENS,
    build_deepseek_tokenizer,
)

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
DISABLED = {"thinking": {"type": "disabled"}}
CALL = (
    '<｜DSML｜ calls>\n<｜DSML｜ invoke name="find">\n<｜DSML｜ parameter name="word" '
    'string="true">日 "x"</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">3'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_deepseek_tokenizer()


@pytest.fixture(scope="module", params=["deepseek-v4", "deepseek-v4.1"])
def renderer(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> DeepseekRenderer:
    return DeepseekRenderer(tokenizer, chat_format=request.param)


@pytest.fixture(scope="module")
def v41(tokenizer: Tokenizer) -> DeepseekRenderer:
    return DeepseekRenderer(tokenizer, chat_format="deepseek-v4.1")


def chat(text: str = "hi", **fields: object) -> ChatBody:
    document = {"model": "m", "messages": [{"role": "user", "content": text}], **fields}
    body = parse_chat(json.dumps(document).encode())
    check_tools(body)
    return body


def read(
    renderer: DeepseekRenderer,
    tokenizer: Tokenizer,
    text: str | list[int],
    *,
    reason: str = "stop",
    **fields: object,
) -> tuple[dict[str, Any], str, int | None]:
    """Message, finish reason and reasoning tokens of an answer."""
    rendered = renderer.render_chat(chat(**fields))
    builder = MessageBuilder("call_", max_calls=None)
    assert rendered.make_parser is not None
    detokenizer = TokenTexts(tokenizer).detokenizer()
    parser = rendered.make_parser(builder, detokenizer, None, 0)
    ids = tokenizer.encode(text, add_special_tokens=False).ids if isinstance(text, str) else text
    for token_id in ids:
        parser.feed(token_id)
        if parser.is_over:
            break
    ended = parser.finish(reason)
    return builder.message(), ended, parser.num_reasoning_tokens


def test_a_chat_is_what_the_format_says(renderer: DeepseekRenderer, tokenizer: Tokenizer) -> None:
    ids = renderer.render_chat(chat(messages=[
        {"role": "system", "content": "S"}, {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes"}, {"role": "user", "content": "é"},
    ], **DISABLED)).token_ids  # fmt: skip

    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text.startswith("<｜begin▁of▁sentence｜>")
    assert text.endswith("<｜User｜>é<｜Assistant｜></think>")
    assert f"<｜User｜>hello<｜Assistant｜></think>yes{DEEPSEEK_EOS}" in text


@pytest.mark.parametrize("place", ["content", "tool", "arguments", "result"])
def test_control_tokens_typed_by_a_client_stay_text(
    renderer: DeepseekRenderer, tokenizer: Tokenizer, place: str
) -> None:
    """Wherever a client puts them: only the format's own control tokens are there."""
    evil = "".join((*DEEPSEEK_CONTROL_TOKENS, *DEEPSEEK_MARKUP_TOKENS))

    def ids_of(text: str) -> list[int]:
        texts = dict.fromkeys(["content", "tool", "arguments", "result"], "x") | {place: text}
        tool = {"name": "find", "description": texts["tool"], "parameters": {"type": "object"}}
        call = {"name": "find", "arguments": json.dumps({"word": texts["arguments"]})}
        body = chat(
            messages=[
                {"role": "user", "content": texts["content"]},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "c", "content": texts["result"]},
            ],
            tools=[{"type": "function", "function": tool}],
        )  # fmt: skip
        return renderer.render_chat(body).token_ids

    controls = {
        tokenizer.token_to_id(each) for each in (*DEEPSEEK_CONTROL_TOKENS, *DEEPSEEK_MARKUP_TOKENS)
    }
    plain, typed = ids_of("x"), ids_of(evil)
    assert [i for i in typed if i in controls] == [i for i in plain if i in controls]
    assert len(typed) > len(plain)


def test_reasoning_content_and_calls_are_told_apart(
    v41: DeepseekRenderer, tokenizer: Tokenizer
) -> None:
    text = f"\nLet me see</think>Yes.\n\n{CALL}{DEEPSEEK_EOS}"
    message, reason, num_reasoning = read(v41, tokenizer, text, tools=[TOOL])

    assert message["reasoning_content"] == "Let me see"
    assert message["content"] == "Yes."
    (call,) = message["tool_calls"]
    assert call["id"] == "call_0"
    assert call["function"]["name"] == "find"
    assert json.loads(call["function"]["arguments"]) == {"word": '日 "x"', "n": 3}
    assert reason == "tool_calls"
    assert num_reasoning is not None
    assert 0 < num_reasoning < 20


def test_an_answer_cut_by_its_limit_says_so(v41: DeepseekRenderer, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(CALL, add_special_tokens=False).ids
    half = ids[: len(ids) * 2 // 3]
    message, reason, _ = read(v41, tokenizer, half, reason="length", tools=[TOOL], **DISABLED)

    assert reason == "length"
    whole = read(v41, tokenizer, ids, tools=[TOOL], **DISABLED)[0]
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert whole["tool_calls"][0]["function"]["arguments"].startswith(arguments)
    assert arguments


def test_a_required_call_begins_in_the_prompt(v41: DeepseekRenderer, tokenizer: Tokenizer) -> None:
    """The answer begins inside of the block of calls, so it cannot be anything else."""
    fields = {"tools": [TOOL], "tool_choice": "required", **DISABLED}
    ids = v41.render_chat(chat(**fields)).token_ids
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    begun = "<｜DSML｜ calls>\n"
    assert prompt.endswith(begun)

    message, reason, _ = read(v41, tokenizer, CALL.removeprefix(begun), **fields)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["find"]
    assert (message["content"], reason) == (None, "tool_calls")


def test_an_answer_can_go_on_where_the_last_message_ends(
    v41: DeepseekRenderer, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "x"}]
    messages += [{"role": "assistant", "content": "The word is", "prefix": True}]  # type: ignore[dict-item]
    ids = v41.render_chat(chat(messages=messages)).token_ids
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("</think>The word is")

    message, _, _ = read(v41, tokenizer, " rank", messages=messages)
    assert message["content"] == " rank"


def test_control_tokens_and_ids_of_no_token_are_never_shown(
    v41: DeepseekRenderer, tokenizer: Tokenizer
) -> None:
    hidden = [tokenizer.token_to_id(each) for each in DEEPSEEK_CONTROL_TOKENS]
    hidden += [-1, 1 << 31, 1 << 40, tokenizer.token_to_id("<|end|>")]
    a, b = tokenizer.encode("ab", add_special_tokens=False).ids
    message, reason, _ = read(v41, tokenizer, [*hidden, a, *hidden, b, *hidden], **DISABLED)

    assert (message["content"], reason) == ("ab", "stop")


def test_an_unfinished_character_at_the_end_is_dropped(
    v41: DeepseekRenderer, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("ab 😀", add_special_tokens=False).ids
    assert read(v41, tokenizer, ids[:-1], **DISABLED)[0]["content"] == "ab "


def test_a_stop_string_ends_the_answer(v41: DeepseekRenderer, tokenizer: Tokenizer) -> None:
    text = "one two three END four"
    message, reason, _ = read(v41, tokenizer, text, stop=["END", "never"], **DISABLED)
    assert (message["content"], reason) == ("one two three ", "stop")


def test_thinking_decides_the_temperature(
    v41: DeepseekRenderer, renderer: DeepseekRenderer
) -> None:
    thinking = renderer.render_chat(chat(temperature=0.2))
    assert thinking.temperature == 1.0
    assert thinking.top_p is not None
    assert v41.render_chat(chat(temperature=0.2, **DISABLED)).temperature == 0.2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"thinking": False}}, "chat_template_kwargs"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "find"}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"min_tokens": 2, "stop": "x"}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "messages": [
            {"role": "user", "content": "json"}]}, "response_format"),
        ({"response_format": {"type": "json_object"}, **DISABLED}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"thinking": {"type": "sometimes"}}, "thinking"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(
    v41: DeepseekRenderer, fields: dict[str, Any], param: str
) -> None:
    def ask() -> None:
        body = chat(**fields)
        v41.check_chat(body)
        v41.render_chat(body)

    with pytest.raises(ApiError) as refusal:
        ask()
    assert refusal.value.status == 400
    assert refusal.value.param == param


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(ApiError) as refusal:
        parse_chat(b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}')
    assert refusal.value.status == 400


def test_arguments_that_are_no_json_do_not_end_a_conversation(v41: DeepseekRenderer) -> None:
    """What a model wrote comes back as it was: also half of a surrogate pair inside of it."""
    for arguments in ("{not json", '{"a": "\\ud800"}', ""):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        body = chat(messages=[{"role": "user", "content": "x"},
                              {"role": "assistant", "content": None, "tool_calls": [call]},
                              {"role": "tool", "tool_call_id": "c", "content": "y"}])  # fmt: skip
        assert v41.render_chat(body).token_ids


def test_a_model_says_its_format_in_its_config(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = msgspec.convert({"name": "m", "chat_format": "deepseek-v4.1"}, ModelConfig)
    assert isinstance(load_model("m", tmp_path, config=config).renderer, DeepseekRenderer)

    both = msgspec.structs.replace(config, tool_call_format="hermes")
    with pytest.raises(ConfigError, match="tool_call_format: has no meaning"):
        load_model("m", tmp_path, config=both)


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no token <｜begin▁of▁sentence｜>, .*｜DSML｜"):
        DeepseekRenderer(build_sim_tokenizer(), chat_format="deepseek-v4")


def test_a_missing_package_names_the_extra(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    with pytest.raises(ConfigError, match=r"pip install 'dsched\[deepseek\]'"):
        DeepseekRenderer(tokenizer, chat_format="deepseek-v4.1")
