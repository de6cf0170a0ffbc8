"""`tool_choice` that demands calls, read by the official client over engines that keep to the
grammar they are given: what they say is made from the schema alone."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionChunk
from tokenizers import Tokenizer

from dsched.controller.request import InferenceRequest, RequestStream
from dsched.drivers.base import EngineCapabilities, FinishReason
from dsched.frontdoor import ServedModel
from dsched.frontdoor.renderer import TemplateRenderer
from dsched.sim.driver import CAPABILITIES
from dsched.sim.tokenizer import build_sim_tokenizer
from dsched.testing.chat_models import HERMES_TEMPLATE
from dsched.testing.fake_control import FakeControlPlane, FakeRun

MESSAGES = [{"role": "user", "content": "weather?"}]


class Place(pydantic.BaseModel):
    city: str
    country: str | None


class Weather(pydantic.BaseModel):
    """Tells the weather."""

    place: Place
    days: int


WEATHER = openai.pydantic_function_tool(Weather)
TOOLS = [WEATHER, {"type": "function", "function": {"name": "now"}}]
PLACE = {"city": "é <b>", "country": "é <b>"}
ARGUMENTS = {"place": PLACE, "days": 7}
NAMED = {"type": "function", "function": {"name": "Weather"}}


def instance(schema: Mapping[str, Any], root: Mapping[str, Any], index: int = 0) -> Any:  # noqa: ANN401
    """A value of the schema; of several ways the one at `index`."""
    if "$ref" in schema:
        value: Any = root
        for key in schema["$ref"].split("/")[1:]:
            value = value[key]
        return instance(value, root)
    if "anyOf" in schema:
        options = schema["anyOf"]
        return instance(options[index % len(options)], root)
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "array":
        count = min(2, schema.get("maxItems", 2))
        return [instance(schema["items"], root, place) for place in range(count)]
    simple = {"string": "é <b>", "integer": 7}
    if schema.get("type") in simple:
        return simple[schema["type"]]
    return {key: instance(value, root) for key, value in schema.get("properties", {}).items()}


@dataclass(slots=True, eq=False)
class GrammarControl(FakeControlPlane):
    """Keeps to the grammar of a request, and ends when its value is whole."""

    tokenizer: Tokenizer = None
    before: str = ""
    """Text before the value."""
    text: str | None = None
    """Said instead, by an engine that ignores the grammar."""

    def submit(self, request: InferenceRequest, stream: RequestStream) -> None:
        self.last_request = request
        asked = request.sampling.structured_output
        assert asked is not None
        assert asked["type"] == "json_schema"
        schema = asked["json_schema"]["schema"]
        text = self.text
        if text is None:
            text = self.before + json.dumps(instance(schema, schema), ensure_ascii=False)
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        run = FakeRun(request, stream, ids[: request.sampling.max_tokens])
        self.runs[request.request_id] = run
        is_whole = len(ids) < request.sampling.max_tokens
        reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        asyncio.get_running_loop().call_soon(self._say, run, reason)

    def _say(self, run: FakeRun, reason: FinishReason) -> None:
        while run.num_left and not run.is_over:
            run.send(1)
        if not run.is_over:
            run.finish(reason)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    """A model without a format of its own for calls."""
    tokenizer = build_sim_tokenizer()
    renderer = TemplateRenderer(tokenizer, chat_template=HERMES_TEMPLATE, reasoning_format="think")
    return ServedModel(name="tiny", tokenizer=tokenizer, renderer=renderer)


@pytest.fixture
def control(served: ServedModel) -> GrammarControl:
    control = GrammarControl(token_ids=[], tokenizer=served.tokenizer)
    control.add_model("tiny", max_model_len=8_192)
    return control


@pytest.fixture
async def client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:  # noqa: ANN401
    fields = {"messages": MESSAGES, "tools": TOOLS} | fields
    return await client.chat.completions.create(model="tiny", **fields)


async def read(stream: AsyncIterator[ChatCompletionChunk]) -> list[ChatCompletionChunk]:
    return [chunk async for chunk in stream]


def calls_of(chunks: list[ChatCompletionChunk]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call; only its first piece has the first two."""
    calls: dict[int, tuple[str, str, str]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                assert call.function is not None
                assert call.function.arguments is not None
                if call.index not in calls:
                    assert call.type == "function"
                    calls[call.index] = (call.id or "", call.function.name or "", "")
                else:
                    assert (call.id, call.type, call.function.name) == (None, None, None)
                known = calls[call.index]
                calls[call.index] = (*known[:2], known[2] + call.function.arguments)
    assert sorted(calls) == list(range(len(calls)))
    return [calls[index] for index in range(len(calls))]


def whole_calls(message: Any) -> list[tuple[str, str, str]]:  # noqa: ANN401
    return [
        (each.id, each.function.name, each.function.arguments) for each in message.tool_calls or ()
    ]


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def reasons(chunks: list[ChatCompletionChunk]) -> list[str]:
    found = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    return [each for each in found if each]


async def test_a_named_function_is_called(
    client: openai.AsyncOpenAI, control: GrammarControl
) -> None:
    """Its arguments keep to its schema; the finish reason is OpenAI's."""
    answer = await ask(client, tool_choice=NAMED)

    (choice,) = answer.choices
    assert choice.message.content is None
    ((call_id, name, arguments),) = whole_calls(choice.message)
    assert (name, json.loads(arguments)) == ("Weather", ARGUMENTS)
    assert call_id.startswith("call_")
    assert choice.finish_reason == "stop"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert control.last_request is not None
    assert control.last_request.sampling.structured_output == {
        "type": "json_schema",
        "json_schema": {"name": "tool_calls", "schema": WEATHER["function"]["parameters"]},
    }


@pytest.mark.parametrize("before", ["", "<think>\nso</think>\n\n"])
@pytest.mark.parametrize("choice", [NAMED, "required"])
async def test_streamed_and_whole_are_the_same(
    client: openai.AsyncOpenAI,
    control: GrammarControl,
    choice: Any,  # noqa: ANN401
    before: str,
) -> None:
    """With and without reasoning before; usage and ids too."""
    control.before = before
    fields = {"tool_choice": choice, "extra_headers": {"x-request-id": "one"}}
    answer = await ask(client, **fields)
    chunks = await read(
        await ask(client, **fields, stream=True, stream_options={"include_usage": True})
    )

    calls = calls_of(chunks)
    assert calls == whole_calls(answer.choices[0].message)
    assert json.loads(calls[0][2]) == ARGUMENTS
    assert [name for _, name, _ in calls] == ["Weather", "now"][: len(calls)]
    assert text_of(chunks) == ""
    assert reasons(chunks) == [answer.choices[0].finish_reason]
    assert chunks[-1].usage == answer.usage
    assert (answer.usage.completion_tokens_details.reasoning_tokens > 0) == bool(before)
    assert getattr(answer.choices[0].message, "reasoning_content", "") == ("so" if before else "")
    assert len(chunks) > 10


async def test_required_calls_what_it_likes(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, tool_choice="required")

    (choice,) = answer.choices
    assert choice.message.content is None
    calls = whole_calls(choice.message)
    assert [(name, json.loads(text)) for _, name, text in calls] == [
        ("Weather", ARGUMENTS),
        ("now", {}),
    ]
    assert choice.finish_reason == "tool_calls"
    assert len({call_id for call_id, _, _ in calls}) == 2


async def test_required_without_parallel_calls_is_one(client: openai.AsyncOpenAI) -> None:
    answer = await ask(client, tool_choice="required", parallel_tool_calls=False)

    assert [name for _, name, _ in whole_calls(answer.choices[0].message)] == ["Weather"]
    assert answer.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("choice", [NAMED, "required"])
async def test_the_client_library_parses_the_arguments(
    client: openai.AsyncOpenAI,
    choice: Any,  # noqa: ANN401
) -> None:
    """Into the type that the tool was made of, whole and from a stream."""
    fields: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER]}
    parsed = await client.chat.completions.parse(**fields, tool_choice=choice)
    async with client.chat.completions.stream(**fields, tool_choice=choice) as stream:
        streamed = await stream.get_final_completion()

    expected = Weather(place=Place(**PLACE), days=7)
    for answer in (parsed, streamed):
        (choice_read,) = answer.choices
        calls = choice_read.message.tool_calls or []
        assert [call.function.parsed_arguments for call in calls] == [expected] * len(calls)
        assert calls


@pytest.mark.parametrize("choice", [NAMED, "required"])
async def test_an_answer_cut_at_any_length_says_so(
    client: openai.AsyncOpenAI,
    choice: Any,  # noqa: ANN401
) -> None:
    """Arguments are cut as they are, the same streamed and not."""
    full = await ask(client, tool_choice=choice)
    whole = whole_calls(full.choices[0].message)
    num_tokens = full.usage.completion_tokens

    for limit in range(1, num_tokens, 5):
        fields = {"tool_choice": choice, "max_tokens": limit}
        answer = await ask(client, **fields)
        chunks = await read(await ask(client, **fields, stream=True))
        message = answer.choices[0].message

        assert reasons(chunks) == [answer.choices[0].finish_reason] == ["length"]
        calls = [each[1:] for each in whole_calls(message)]
        assert [each[1:] for each in calls_of(chunks)] == calls
        assert text_of(chunks) == (message.content or "")
        assert calls or message.content
        for cut, each in zip(calls, whole, strict=False):
            assert (cut[0], each[2].startswith(cut[1])) == (each[1], True)


@pytest.mark.parametrize("choice", [NAMED, "required"])
async def test_logprobs_and_token_ids_cover_every_token(
    client: openai.AsyncOpenAI,
    choice: Any,  # noqa: ANN401
) -> None:
    body = {"return_token_ids": True}
    answer = await ask(client, tool_choice=choice, logprobs=True, extra_body=body)

    count = answer.usage.completion_tokens
    assert len(answer.choices[0].logprobs.content) == count
    assert len(answer.choices[0].model_extra["token_ids"]) == count


async def test_a_stop_string_ends_the_arguments(client: openai.AsyncOpenAI) -> None:
    """It is looked for in all that the model writes; a call that breaks off is none."""
    for choice in (NAMED, "required"):
        answer = await ask(client, tool_choice=choice, stop="<b>")
        ((_, name, arguments),) = whole_calls(answer.choices[0].message)
        assert (name, arguments) == ("Weather", '{"place": {"city": "é ')
        assert answer.choices[0].finish_reason == "stop"


async def test_an_engine_that_ignores_the_grammar_loses_no_text(
    client: openai.AsyncOpenAI, control: GrammarControl
) -> None:
    """A named call gets all of it; of required calls it is content."""
    control.text = "I will <b> call it."
    named = (await ask(client, tool_choice=NAMED)).choices[0]
    required = (await ask(client, tool_choice="required")).choices[0]

    assert whole_calls(named.message)[0][1:] == ("Weather", control.text)
    assert named.message.content is None
    assert required.message.content == control.text
    assert required.message.tool_calls is None
    assert (named.finish_reason, required.finish_reason) == ("stop", "stop")


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize("capabilities", [CAPABILITIES, EngineCapabilities()])
async def test_engines_without_grammars_refuse(
    client: openai.AsyncOpenAI,
    control: GrammarControl,
    choice: Any,  # noqa: ANN401
    capabilities: EngineCapabilities,
) -> None:
    """The simulated one among them."""
    control.add_model("tiny", capabilities=capabilities)

    with pytest.raises(openai.BadRequestError, match="'auto' and 'none'") as refused:
        await ask(client, tool_choice=choice)

    assert refused.value.param == "tool_choice"
    assert control.last_request is None


async def test_what_is_wrong_is_named(client: openai.AsyncOpenAI) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    with pytest.raises(openai.BadRequestError, match="'other' is not among tools") as refused:
        await ask(client, tool_choice=other)
    assert refused.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError, match="calls are not read") as refused:
        await ask(client, tool_choice="auto")
    assert refused.value.param == "tools"
