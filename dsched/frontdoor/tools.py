"""Tools of a chat request: what is offered, and how chat templates read calls of earlier turns.

Pure: a body in, checked values or an `ApiError` out.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dsched.frontdoor.errors import bad_request, echo
from dsched.frontdoor.schema import ChatBody, ChatMessage, text_of

MAX_TOOLS = 1_024
"""Tools of one request; OpenAI's own limit is 128. More: prompts of megabytes."""
MAX_NAME_CHARS = 256
"""Longest name of a function; OpenAI's own limit is 64."""


def check_tools(body: ChatBody) -> None:
    """Check the shape of `tools` and `tool_choice`.

    Raises:
        ApiError: 400 with the name of the field.
    """
    for name, value in (("functions", body.functions), ("function_call", body.function_call)):
        if value not in (None, "none", "auto", []):
            raise bad_request(f"{name} is not supported: use tools", param=name)
    if len(body.tools or ()) > MAX_TOOLS:
        rule = f"above the limit of {MAX_TOOLS}"
        raise bad_request(f"{len(body.tools or ())} tools, {rule}", param="tools")
    for index, tool in enumerate(body.tools or ()):
        _check_tool(f"tools[{index}]", tool)
    choice = body.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        rule = "is not one of none, auto, required"
        raise bad_request(f"tool_choice: {echo(choice)!r} {rule}", param="tool_choice")
    if choice not in (None, "none", "auto") and not body.tools:
        raise bad_request("tool_choice needs tools", param="tool_choice")


def _check_tool(where: str, tool: Mapping[str, Any]) -> None:
    if tool.get("type") != "function":
        raise bad_request(f"{where}.type: only 'function' is supported", param="tools")
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        rule = f"must be a text of 1 to {MAX_NAME_CHARS} characters"
        raise bad_request(f"{where}.function.name {rule}", param="tools")


def offered_tools(body: ChatBody) -> list[dict[str, Any]] | None:
    """Return the tools that the model may call; `None` if there are none."""
    return None if body.tool_choice == "none" or not body.tools else body.tools


def asks_for_json(body: ChatBody) -> bool:
    """Whether the answer has to follow a grammar."""
    return body.response_format is not None and body.response_format.type != "text"


def num_chars(body: ChatBody) -> int:
    """Return the size of the text that a chat is rendered from. O(its size)."""
    count = len(msgspec.json.encode(body.tools)) if body.tools else 0
    for message in body.messages:
        count += len(text_of(message)) + len(message.reasoning_content or "")
        if message.tool_calls:
            count += len(msgspec.json.encode(message.tool_calls))
    return count


def template_message(index: int, message: ChatMessage) -> dict[str, Any]:
    """Return a message as chat templates read it: text instead of parts, no empty fields.

    Raises:
        ApiError: 400 for a tool call without a function.
    """
    role = "system" if message.role == "developer" else message.role
    values: dict[str, Any] = {"role": role, "content": text_of(message)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            values[name] = value
    if message.tool_calls:
        where = f"messages[{index}].tool_calls"
        values["tool_calls"] = [
            _template_call(f"{where}[{place}]", call)
            for place, call in enumerate(message.tool_calls)
        ]
    return values


def _template_call(where: str, call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.function needs a name", param="messages")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _as_object(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: str) -> object:
    """Arguments as the object that templates want; a text where a model wrote them broken."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return arguments
