"""Demanded calls: the grammar that engines get, and what is refused."""

import json
from typing import Any

import pytest

from dsched.frontdoor.errors import ApiError
from dsched.frontdoor.forced import forced_calls
from dsched.frontdoor.renderer import TemplateRenderer
from dsched.frontdoor.schema import ChatBody, parse_chat
from dsched.sim.tokenizer import CHAT_TEMPLATE, build_sim_tokenizer
from dsched.testing.chat_models import HERMES_TEMPLATE

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REQUIRED = ["name", "parameters"]


def tool(name: str, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"type": "function", "function": {"name": name, **fields}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat(**fields: object) -> ChatBody:
    messages = [{"role": "user", "content": "hi"}]
    return parse_chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def renderer(template: str = HERMES_TEMPLATE, **formats: Any) -> TemplateRenderer:  # noqa: ANN401
    return TemplateRenderer(build_sim_tokenizer(), chat_template=template, **formats)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_model_that_may_choose_gets_no_grammar(choice: str | None) -> None:
    assert forced_calls(chat(tools=[tool("f")], tool_choice=choice)) is None


def test_a_named_function_is_constrained_by_its_parameters() -> None:
    """As they are, definitions included: they are the root."""
    schema = {"type": "object", "$defs": {"P": CITY}, "properties": {"p": {"$ref": "#/$defs/P"}}}
    tools = [tool("f", parameters=CITY), tool("g", parameters=schema)]

    forced = forced_calls(chat(tools=tools, tool_choice=named("g")))

    assert forced is not None
    assert (forced.name, forced.schema) == ("g", schema)
    named_schema = {"name": "tool_calls", "schema": schema}
    assert forced.response_format == {"type": "json_schema", "json_schema": named_schema}


@pytest.mark.parametrize("fields", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_takes_any_object(fields: dict[str, Any]) -> None:
    forced = forced_calls(chat(tools=[tool("f", **fields)], tool_choice=named("f")))

    assert forced is not None
    assert forced.schema == {"type": "object"}


def test_of_two_functions_with_one_name_the_last_counts() -> None:
    tools = [tool("f"), tool("f", parameters=CITY)]

    forced = forced_calls(chat(tools=tools, tool_choice=named("f")))

    assert forced is not None
    assert forced.schema == CITY


def test_required_is_an_array_of_calls_as_in_vllm() -> None:
    """One schema a function; definitions move to the root, where their references point to."""
    first = {"type": "object", "$defs": {"P": CITY}, "properties": {"p": {"$ref": "#/$defs/P"}}}
    second = {"type": "object", "$defs": {"P": CITY}, "definitions": {"Q": CITY}}
    tools = [tool("f", parameters=first), tool("g", parameters=second), tool("h")]
    body = chat(tools=tools, tool_choice="required")

    forced = forced_calls(body)

    assert forced is not None
    assert forced.name is None
    bare = {key: value for key, value in first.items() if key != "$defs"}
    parameters = {"f": bare, "g": {"type": "object"}, "h": {"type": "object"}}
    assert forced.schema == {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "anyOf": [
                {
                    "properties": {
                        "name": {"type": "string", "enum": [name]},
                        "parameters": schema,
                    },
                    "required": REQUIRED,
                }
                for name, schema in parameters.items()
            ],
        },
        "$defs": {"P": CITY},
        "definitions": {"Q": CITY},
    }
    assert body.tools == tools, "the tools that the template shows were changed"


@pytest.mark.parametrize(("parallel", "most"), [(None, None), (True, None), (False, 1)])
def test_without_parallel_calls_the_array_holds_one(
    parallel: bool | None,  # noqa: FBT001
    most: int | None,
) -> None:
    body = chat(tools=[tool("f")], tool_choice="required", parallel_tool_calls=parallel)

    forced = forced_calls(body)

    assert forced is not None
    assert forced.schema.get("maxItems") == most


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tool_choice": named("x" * 500)}, "tool_choice", "is not among tools"),
        ({"tool_choice": {}}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "function", "function": {"name": 5}}}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "custom", "function": {"name": "f"}}}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "function", "function": "f"}}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice", "must be"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice", "must be"),
        (
            {"tools": [tool("f", parameters="x")], "tool_choice": "required"},
            "tools",
            r"tools\[0\].function.parameters must be a JSON schema",
        ),
        (
            {"tools": [tool("f", parameters={"type": "array"})], "tool_choice": named("f")},
            "tools",
            "of type 'object'",
        ),
        (
            {"tools": [tool("f", parameters={"$defs": []})], "tool_choice": "required"},
            "tools",
            r"\$defs must be an object",
        ),
        (
            {
                "tools": [
                    tool("f", parameters={"$defs": {"P": CITY}}),
                    tool("g", parameters={"$defs": {"P": {}}}),
                ],
                "tool_choice": "required",
            },
            "tools",
            r"tools\[1\].*'P' is defined otherwise before",
        ),
        (
            {"tool_choice": named("f"), "response_format": {"type": "json_object"}},
            "response_format",
            "with tools",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str, says: str
) -> None:
    body = chat(**{"tools": [tool("f")], **fields})

    with pytest.raises(ApiError, match=says) as refused:
        renderer(tool_call_format="hermes").check_chat(body)

    assert (refused.value.status, refused.value.param) == (400, param)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("choice", ["required", named("f")])
def test_demanded_calls_need_no_format_of_the_model(choice: object) -> None:
    """The JSON is the format, but the template has to show the tools."""
    body = chat(tools=[tool("f", parameters=CITY)], tool_choice=choice)

    renderer().check_chat(body)
    rendered = renderer().render_chat(body)

    forced = forced_calls(body)
    assert forced is not None
    assert rendered.structured_output == forced.response_format
    assert rendered.make_parser is not None
    with pytest.raises(ApiError, match="template does not show it the tools") as refused:
        renderer(CHAT_TEMPLATE, tool_call_format="hermes").check_chat(body)
    assert refused.value.param == "tool_choice"
    with pytest.raises(ApiError, match="calls are not read"):
        renderer().check_chat(chat(tools=[tool("f")]))


def test_a_template_that_only_reads_a_field_called_tools_does_not_show_them() -> None:
    template = "{{ messages[0].tools }}{{ messages[0].content }}"
    body = chat(tools=[tool("f")], tool_choice="required")

    with pytest.raises(ApiError, match="does not show"):
        renderer(template).check_chat(body)
