"""Request bodies of the two completion APIs, as their clients send them.

Types are strict: a number in quotes, `true` for a number and `1.0` for an integer are refused, so
that a mistake is told instead of guessed. `null` means absent for every optional field. Fields
that no rule here knows are ignored, because clients send what newer APIs understand; fields that
would change the answer and cannot be honoured are refused by name. Of a repeated key the last one
counts.

Pure: bytes in, a struct or an `ApiError` out. O(size of the body).
"""

import json
import math
import re
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from dsched.frontdoor.errors import ApiError, bad_request, echo

MAX_LOGPROBS = 20
"""Alternatives a token; engines compute and send them for every position."""
MAX_STOP_STRINGS = 4
"""OpenAI's limit, on different strings."""
MAX_STOP_CHARS = 1_024
"""Longest stop string: text that may begin one is held back, and searched at every token."""
MAX_LOGIT_BIAS = 1_024
"""Tokens with a bias; OpenAI's own limit is 300."""
MAX_MESSAGES = 16_384
"""Messages of one chat; more come from a loop that went wrong."""

Probability = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str
    json_schema: dict[str, Any] | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both APIs have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None

    # Beyond OpenAI's, with vLLM's names and meanings.
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[int] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)] | None = None
    return_token_ids: bool | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[int | str | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None
    """DeepSeek's: the answer goes on where this last message ends."""


class ChatBody(SamplingFields, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    reasoning_effort: str | None = None


_Body = TypeVar("_Body")

_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_ERROR_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_MISSING_FIELD = re.compile(r"missing required field `(?P<name>[^`]+)`")


def parse_completion(body: bytes) -> CompletionBody:
    """Read a body of `/v1/completions`.

    Raises:
        ApiError: 400, with the name of the field.
    """
    request = _decode(_completion_decoder, body)
    _check_common(request)
    if request.echo:
        raise bad_request("echo is not supported: only the answer is returned", param="echo")
    if request.suffix:
        raise bad_request("suffix is not supported: text cannot be inserted", param="suffix")
    if request.best_of not in (None, 1):
        raise bad_request(f"best_of must be 1, not {_number(request.best_of)}", param="best_of")
    return request


def parse_chat(body: bytes) -> ChatBody:
    """Read a body of `/v1/chat/completions`.

    Raises:
        ApiError: 400, with the name of the field.
    """
    request = _decode(_chat_decoder, body)
    _check_common(request)
    _check_max_tokens("max_completion_tokens", request.max_completion_tokens)
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", param="top_logprobs")
    if not request.messages:
        raise bad_request("messages must not be empty", param="messages")
    if len(request.messages) > MAX_MESSAGES:
        rule = f"above the limit of {MAX_MESSAGES}"
        raise bad_request(f"{len(request.messages)} messages, {rule}", param="messages")
    for index, message in enumerate(request.messages):
        _check_message(index, message)
    return request


def single_prompt(prompt: str | list[int | str | list[int]]) -> str | list[int]:
    """Return the one prompt that `prompt` holds: a text or token ids.

    >>> single_prompt("a"), single_prompt(["a"]), single_prompt([1, 2]), single_prompt([[1, 2]])
    ('a', 'a', [1, 2], [1, 2])

    Raises:
        ApiError: 400 when it holds none, several, or a mixture.
    """
    if isinstance(prompt, str):
        return prompt
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return prompt  # type: ignore[return-value]
    if not prompt:
        raise bad_request("prompt must not be an empty list", param="prompt")
    if int in kinds or len(kinds) > 1:
        raise bad_request("prompt mixes token ids, texts and lists", param="prompt")
    if len(prompt) > 1:
        rule = "send one prompt a request"
        raise bad_request(f"prompt holds {len(prompt)} prompts: {rule}", param="prompt")
    only = prompt[0]
    if isinstance(only, int) or (isinstance(only, list) and not only):
        raise bad_request("prompt must not be an empty list", param="prompt")
    return only


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the different stop strings, in the order of the request.

    Raises:
        ApiError: 400 for an empty one, which would end every answer at once, for too many, and
            for one that is too long.
    """
    if stop is None:
        return ()
    strings = tuple(dict.fromkeys([stop] if isinstance(stop, str) else stop))
    if "" in strings:
        raise bad_request("stop holds an empty string", param="stop")
    if len(strings) > MAX_STOP_STRINGS:
        rule = f"above the limit of {MAX_STOP_STRINGS}"
        raise bad_request(f"stop holds {len(strings)} different strings, {rule}", param="stop")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_CHARS:
        rule = f"above the limit of {MAX_STOP_CHARS}"
        raise bad_request(f"stop holds a string of {longest} characters, {rule}", param="stop")
    return strings


def text_of(message: ChatMessage) -> str:
    """Return the text of a message; its parts are joined as they are."""
    if isinstance(message.content, list):
        return "".join(part.text or "" for part in message.content)
    return message.content or ""


def _check_common(request: SamplingFields) -> None:
    if request.n not in (None, 1):
        raise bad_request(f"n must be 1, not {_number(request.n)}", param="n")
    _check_max_tokens("max_tokens", request.max_tokens)
    if request.stream_options is not None and not request.stream:
        raise bad_request(
            "stream_options is allowed only with stream: true", param="stream_options"
        )
    if request.logit_bias and len(request.logit_bias) > MAX_LOGIT_BIAS:
        rule = f"above the limit of {MAX_LOGIT_BIAS}"
        raise bad_request(
            f"logit_bias holds {len(request.logit_bias)} tokens, {rule}", param="logit_bias"
        )
    if request.top_k == 0:
        raise bad_request("top_k must be at least 1, or -1 for all tokens, not 0", param="top_k")


def _check_max_tokens(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise bad_request(f"{name} must be at least 1, not {_number(value)}", param=name)


def _check_message(index: int, message: ChatMessage) -> None:
    where = f"messages[{index}]"
    if message.role not in ROLES:
        known = ", ".join(sorted(ROLES))
        rule = f"is not one of {known}"
        raise bad_request(f"{where}.role: {echo(message.role)!r} {rule}", param="messages")
    if isinstance(message.content, list):
        for place, part in enumerate(message.content):
            if part.type != "text" or part.text is None:
                rule = "only parts of type 'text' with a text are supported"
                raise bad_request(f"{where}.content[{place}]: {rule}", param="messages")
    elif message.content is None and message.role != "assistant":
        raise bad_request(f"{where}.content must not be null", param="messages")


def _number(value: int | None) -> str:
    # Thousands of digits belong in no message, and Python refuses to print them.
    if value is None or -(1 << 64) < value < 1 << 64:
        return str(value)
    return "a number above 64 bits"


def _decode(decoder: msgspec.json.Decoder[_Body], body: bytes) -> _Body:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _syntax_error(body, error) from error


def _validation_error(text: str) -> ApiError:
    """Translate msgspec's sentence, which ends with the path of the field."""
    found = _ERROR_PATH.search(text)
    path = found["path"] if found else ""
    sentence = text[: found.start()] if found else text
    missing = _MISSING_FIELD.search(sentence)
    if missing and not path:
        return bad_request(f"{missing['name']} is required", param=missing["name"])
    if not path:
        return bad_request(f"the body: {_lower_first(sentence)}")
    param = re.split(r"[.\[]", path, maxsplit=1)[0]
    return bad_request(f"{path}: {_lower_first(sentence)}", param=param)


def _lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _syntax_error(body: bytes, error: Exception) -> ApiError:
    """Say what is wrong with a body that is not JSON; find the field where Python's reader can.

    Half surrogates, `NaN` and `Infinity` pass Python's lenient reader, and then have a place.
    """
    if isinstance(error, RecursionError):
        return bad_request("the body is nested too deeply")
    try:
        document = json.loads(body)
        for path, value in _walk(document):
            reason = _unencodable(value)
            if reason:
                param = re.split(r"[.\[]", path, maxsplit=1)[0]
                place = path.encode("ascii", "backslashreplace").decode()
                is_name = param.isascii() and len(param) <= 64
                return bad_request(f"{echo(place)}: {reason}", param=param if is_name else None)
    except (ValueError, RecursionError):
        # Not JSON for Python either: the first reader's sentence says why.
        pass
    return bad_request(f"the body is not valid JSON: {_lower_first(str(error))}")


def _walk(document: object) -> Iterator[tuple[str, object]]:
    """Every string and number of a document with its path; keys count as strings."""
    stack: list[tuple[str, object]] = [("", document)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            for key, item in value.items():
                inner = f"{path}.{key}" if path else key
                yield inner, key
                stack.append((inner, item))
        elif isinstance(value, list):
            stack += [(f"{path}[{index}]", item) for index, item in enumerate(value)]
        else:
            yield path, value


def _unencodable(value: object) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a JSON number"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return "half of a UTF-16 surrogate pair is not text"
    return ""
