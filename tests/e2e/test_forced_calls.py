"""`tool_choice` that demands calls, through dsched to real engines: weights that are random keep to
the schema, so the calls are the grammar's doing."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from live_service import serving

from dsched.testing.engines import MODEL_NAME, TinyEngines

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
CITY = {"enum": ["Rome", "Oslo"]}
PLACE = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FORECAST = {
    "type": "object",
    "$defs": {"Place": PLACE},
    "properties": {"place": {"$ref": "#/$defs/Place"}, "is_long": {"type": "boolean"}},
    "required": ["place", "is_long"],
}
NOW = {"type": "object", "properties": {"zone": {"enum": ["CET", "UTC"]}}, "required": ["zone"]}
TOOLS = [
    {"type": "function", "function": {"name": "forecast", "parameters": FORECAST}},
    {"type": "function", "function": {"name": "now", "parameters": NOW}},
]
NUM_QUESTIONS = 4


@pytest.fixture(
    params=[
        pytest.param("vllm_engines", marks=pytest.mark.vllm),
        pytest.param("sglang_engines", marks=pytest.mark.sglang),
    ]
)
def engines(request: pytest.FixtureRequest) -> TinyEngines:
    """One server."""
    engines: TinyEngines = request.getfixturevalue(request.param)
    return engines


@pytest.fixture
async def client(engines: TinyEngines, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """dsched over the server; the model has no format of its own for calls."""
    engine = engines.engines[0]
    section = {"url": engine.url, "id": engine.engine_id, "kind": engines.kind}
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    tokenizer = str(engines.model_path)
    model = {"name": MODEL_NAME, "tokenizer": tokenizer, "chat_template": str(template)}
    document = {
        "state_dir": str(tmp_path / "state"),
        "front_door": {"port": 0, "stop_grace_s": 1.0},
        "admin": {"port": 0},
        "agent": {"endpoint": engines.agent_endpoint},
        "pools": {"p": {"model": model, "engines": [section]}},
    }
    async with serving(document) as service:
        base_url = f"{service.front_door_url}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
            yield client


async def ask(client: openai.AsyncOpenAI, number: int, **fields: Any) -> Any:  # noqa: ANN401
    messages = [{"role": "user", "content": f"question {number}"}]
    fields = {"messages": messages, "tools": TOOLS, "max_tokens": 600} | fields
    return await client.chat.completions.create(model=MODEL_NAME, **fields)


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "now":
        assert value in ({"zone": "CET"}, {"zone": "UTC"})
        return
    assert name == "forecast"
    assert sorted(value) == ["is_long", "place"]
    assert value["place"] in ({"city": "Rome"}, {"city": "Oslo"})
    assert isinstance(value["is_long"], bool)


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("choice", "reason"),
    [(named("forecast"), "stop"), (named("now"), "stop"), ("required", "tool_calls")],
    ids=["forecast", "now", "required"],
)
async def test_demanded_calls_keep_to_their_schemas(
    client: openai.AsyncOpenAI,
    choice: Any,  # noqa: ANN401
    reason: str,
) -> None:
    """For several seeds, whole and streamed: one call that parses, and no content."""
    for seed in range(NUM_QUESTIONS):
        fields = {"tool_choice": choice, "seed": seed, "temperature": 1}
        fields |= {"parallel_tool_calls": False}
        (told,) = (await ask(client, seed, **fields)).choices
        assert (told.finish_reason, told.message.content) == (reason, None)
        (call,) = told.message.tool_calls
        assert choice in ("required", named(call.function.name))
        check_call(call.function.name, call.function.arguments)

        # SGLang draws anew for the same seed, so this need not be the same call.
        name, arguments, reasons = "", "", []
        async for chunk in await ask(client, seed, **fields, stream=True):
            (part,) = chunk.choices
            for piece in part.delta.tool_calls or ():
                name += piece.function.name or ""
                arguments += piece.function.arguments
            assert not part.delta.content
            reasons += [part.finish_reason] if part.finish_reason else []
        check_call(name, arguments)
        assert reasons == [reason]
