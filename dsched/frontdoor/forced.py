"""Tool calls that a request demands: which ones, and the grammar that makes the model write them.

`tool_choice` names a function, or is `required`. No model can be trusted to obey, so the engine
gets a JSON schema, as vLLM 0.32 makes it for its own chat endpoint
(`vllm/tool_parsers/utils.py`, `get_json_schema_from_tools`):

- a named function: the answer is that call's arguments, by the schema of its `parameters`;
- `required`: an array of at least one `{"name": ..., "parameters": {...}}`, one schema a function;
  `parallel_tool_calls: false` allows one.

The JSON is the format, so the model needs none of its own for calls. What comes of it is read by
`dsched.frontdoor.forced_calls`.

Where this differs from vLLM: a function without `parameters` takes any object (vLLM's own schema
for it allows only an empty one), and a schema whose type is not `object` is refused, because
`arguments` are an object in OpenAI's API.

In: a chat body whose tools have been checked. Out: `ForcedCalls` or an `ApiError`. Pure. O(size of
the tools).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dsched.frontdoor.errors import bad_request, echo
from dsched.frontdoor.schema import ChatBody

_DEFINITION_KEYS = ("$defs", "definitions")
"""Where schemas keep what `$ref` points to, from the root."""


class ForcedCalls(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What an answer has to consist of."""

    name: str | None
    """The one function to call; `None` for at least one call of any that is offered."""
    schema: dict[str, Any]
    """JSON schema of the answer."""

    @property
    def response_format(self) -> dict[str, Any]:
        """The schema as engines are told of it."""
        named = {"name": "tool_calls", "schema": self.schema}
        return {"type": "json_schema", "json_schema": named}


def forced_calls(body: ChatBody) -> ForcedCalls | None:
    """Return what `tool_choice` demands; `None` where the model is free not to call.

    Raises:
        ApiError: 400 with the name of the field.
    """
    choice = body.tool_choice
    if not body.tools or choice in (None, "auto", "none"):
        return None
    functions = [tool["function"] for tool in body.tools]
    schemas = [_parameters(*each) for each in enumerate(functions)]
    if choice == "required":
        is_single = body.parallel_tool_calls is False
        return ForcedCalls(
            name=None, schema=_schema_of_calls(functions, schemas, is_single=is_single)
        )
    name = _named_function(choice)
    # Of several functions with one name the last counts, as in vLLM.
    by_name = {each["name"]: schema for each, schema in zip(functions, schemas, strict=True)}
    if name not in by_name:
        raise bad_request(f"tool_choice: {echo(name)!r} is not among tools", param="tool_choice")
    return ForcedCalls(name=name, schema=by_name[name])


def _named_function(choice: object) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    is_function = isinstance(choice, Mapping) and choice.get("type") == "function"
    if not is_function or not isinstance(name, str):
        rule = 'must be {"type": "function", "function": {"name": ...}}'
        raise bad_request(f"tool_choice: an object {rule}", param="tool_choice")
    return name


def _parameters(index: int, function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    if schema is None or schema == {}:
        return {"type": "object"}
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        where = f"tools[{index}].function.parameters"
        raise bad_request(f"{where} must be a JSON schema of type 'object'", param="tools")
    return schema


def _schema_of_calls(
    functions: Sequence[Mapping[str, Any]], schemas: Sequence[dict[str, Any]], *, is_single: bool
) -> dict[str, Any]:
    calls = [
        {
            "properties": {
                "name": {"type": "string", "enum": [function["name"]]},
                "parameters": {
                    key: value for key, value in schema.items() if key not in _DEFINITION_KEYS
                },
            },
            "required": ["name", "parameters"],
        }
        for function, schema in zip(functions, schemas, strict=True)
    ]
    items = {"type": "object", "anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": items}
    if is_single:
        schema["maxItems"] = 1
    return schema | _definitions(schemas)


def _definitions(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The definitions of all schemas, for the root of the one that holds them."""
    merged: dict[str, dict[str, Any]] = {}
    for index, schema in enumerate(schemas):
        for key in _DEFINITION_KEYS:
            where = f"tools[{index}].function.parameters.{key}"
            definitions = schema.get(key, {})
            if not isinstance(definitions, Mapping):
                raise bad_request(f"{where} must be an object", param="tools")
            known = merged.setdefault(key, {})
            for name, definition in definitions.items():
                if known.setdefault(name, definition) != definition:
                    rule = "tool_choice 'required' allows one definition a name in all tools"
                    message = f"{where}: {echo(name)!r} is defined otherwise before; {rule}"
                    raise bad_request(message, param="tools")
    return {key: definitions for key, definitions in merged.items() if definitions}
