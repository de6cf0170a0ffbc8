"""From a request's text to token ids.

A `Renderer` belongs to one model. `TemplateRenderer` serves every model that comes with a
`tokenizer.json` and a chat template; models whose prompt format is not a template bring their own.

A client's text must not become control tokens: `<|im_end|>` typed by a user is text, not the end of
the user's turn. So before a template is filled, the control tokens' spellings in messages are
replaced by marks that no text contains, and afterwards each mark is encoded as plain text. All
other text goes through the template and the tokenizer unchanged, so the ids equal the engine's own.
What was tokenised before is looked up; see `token_cache`.
A prompt of `/v1/completions` is the client's own template: there, spellings do become tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from dsched.config import ReasoningFormat, ToolCallFormat
from dsched.errors import ConfigError
from dsched.frontdoor.deltas import MakeParser, MessageBuilder
from dsched.frontdoor.errors import bad_request
from dsched.frontdoor.forced import ForcedCalls, forced_calls
from dsched.frontdoor.forced_calls import (
    ForcedCallReader,
    NamedCallReader,
    RequiredCallsReader,
)
from dsched.frontdoor.hermes import THINK_START, TextParser, TextReader, special_markers
from dsched.frontdoor.schema import ChatBody
from dsched.frontdoor.text import Detokenizer, StopFinder
from dsched.frontdoor.token_cache import PromptEncoder, TokenCache, encode_whole
from dsched.frontdoor.token_cuts import spelling_pattern
from dsched.frontdoor.tools import asks_for_json, offered_tools, template_message

DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for models that come without a template of their own."""

_PRIVATE_USE = range(0xE000, 0xF8FF)
"""Code points that Unicode gives no meaning: one that occurs in no message becomes the mark."""


_TEMPLATE_FAILURES = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises over messages that it was not made for."""


class RenderedPrompt(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A prompt in tokens, and what the model's format says of its answer."""

    token_ids: list[int]
    make_parser: MakeParser | None = None
    """Reads the answer; `None` if it is all text."""
    temperature: float | None = None
    """Goes before the request's."""
    top_p: float | None = None
    """Goes before the request's."""
    structured_output: dict[str, Any] | None = None
    """Grammar of the answer, where `tool_choice` demands calls; see `SamplingParams`."""


class Renderer(Protocol):
    """Makes token ids of one model's requests. Called from several threads at once."""

    def encode_text(self, text: str) -> list[int]:
        """Return the ids of a prompt as `/v1/completions` gets it, special tokens included."""
        ...

    def check_chat(self, body: ChatBody) -> None:
        """Refuse what this model's format cannot honour. O(size of the tools).

        Raises:
            ApiError: 400 with the name of the field.
        """
        ...

    def render_chat(self, body: ChatBody) -> RenderedPrompt:
        """Return the ids of a chat, up to where the assistant's answer begins.

        Raises:
            ApiError: 400 when the model's format cannot hold these messages.
        """
        ...


class TemplateRenderer:
    """Renders with a Jinja chat template in a sandbox, as `transformers` does."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        tool_call_format: ToolCallFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
        cache: TokenCache | None = None,
    ) -> None:
        """Compile `chat_template`; `special_tokens` are its variables, as `bos_token`. Answers are
        read by `tool_call_format` and `reasoning_format`; without, they are all text. `cache` is
        for this renderer alone; without, every prompt is tokenised whole.

        Raises:
            ConfigError: the template is not valid Jinja.
        """
        self._tool_call_format = tool_call_format
        self._has_reasoning = reasoning_format is not None
        self._marker_texts = special_markers(tokenizer)
        self._encoder = PromptEncoder(tokenizer, cache=cache)
        self._plain = Tokenizer.from_str(tokenizer.to_str())
        self._plain.encode_special_tokens = True
        self._variables = dict(special_tokens or {})
        source = chat_template or DEFAULT_CHAT_TEMPLATE
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            # A template that never looks at `tools` does not show them to the model.
            names = environment.parse(source).find_all(nodes.Name)
            self._has_tools = any(each.name == "tools" for each in names)
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: {error}") from error
        spellings = control_spellings(tokenizer)
        self._control = spelling_pattern(spellings) if spellings else None

    def encode_text(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=True)

    def check_chat(self, body: ChatBody) -> None:
        if offered_tools(body) is None:
            return
        forced = forced_calls(body)
        if forced is not None and not self._has_tools:
            rule = "the model's chat template does not show it the tools"
            raise bad_request(f"tool_choice: {rule}", param="tool_choice")
        if forced is None and self._tool_call_format is None:
            keys = "pools.POOL.model.tool_call_format, or launch.tool_call_format"
            rule = f"say in {keys} how it writes them"
            raise bad_request(f"tools: this model's calls are not read; {rule}", param="tools")
        if asks_for_json(body):
            rule = "the answer's grammar would rule calls out"
            raise bad_request(f"response_format with tools: {rule}", param="response_format")

    def render_chat(self, body: ChatBody) -> RenderedPrompt:
        messages = [template_message(*each) for each in enumerate(body.messages)]
        tools = offered_tools(body)
        forced = forced_calls(body)
        args = body.chat_template_kwargs or {}
        rendered, mark, spellings = self._fill(messages, tools, args)
        make_parser = None
        if tools is not None or self._has_reasoning:
            make_parser = self._parser_maker(
                has_calls=tools is not None,
                is_in_reasoning=rendered.rstrip().endswith(THINK_START),
                forced=forced,
            )
        return RenderedPrompt(
            token_ids=self._encode_marked(rendered, mark, spellings),
            make_parser=make_parser,
            structured_output=None if forced is None else forced.response_format,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_args: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return the ids of messages as templates read them.

        Raises:
            ApiError: 400 when the template refuses them.
        """
        return self._encode_marked(*self._fill(messages, tools, template_args))

    def _parser_maker(
        self, *, has_calls: bool, is_in_reasoning: bool, forced: ForcedCalls | None
    ) -> MakeParser:
        def make_parser(
            builder: MessageBuilder,
            detokenizer: Detokenizer,
            finder: StopFinder | None,
            min_tokens: int,
        ) -> TextParser:
            reader = TextReader(
                builder,
                has_calls=has_calls,
                has_reasoning=self._has_reasoning,
                is_in_reasoning=is_in_reasoning,
                forced=None if forced is None else _forced_reader(forced, builder),
            )
            return TextParser(
                builder,
                reader,
                detokenizer=detokenizer,
                finder=finder,
                min_tokens=min_tokens,
                marker_texts=self._marker_texts,
                has_reasoning=self._has_reasoning,
            )

        return make_parser

    def _fill(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
    ) -> tuple[str, str | None, list[str]]:
        """Fill the template; return the text, and the mark with the control spellings that marks
        stand for."""
        if self._control is None or not any(map(self._control.search, _texts(messages, tools))):
            return self._render(messages, tools, template_args), None, []
        (messages, tools), mark, spellings = self._mark((messages, tools), self._control)
        return self._render(messages, tools, template_args), mark, spellings

    def _encode_marked(self, rendered: str, mark: str | None, spellings: list[str]) -> list[int]:
        if mark is None:
            return self._encoder.encode(rendered, add_special_tokens=False)
        ids: list[int] = []
        for place, piece in enumerate(rendered.split(mark)):
            # Marks come in pairs around a number, so every second piece is one.
            if place % 2 and piece.isdigit() and int(piece) < len(spellings):
                ids += encode_whole(self._plain, spellings[int(piece)], add_special_tokens=False)
            elif piece:
                ids += self._encoder.encode(piece, add_special_tokens=False)
        return ids

    def _mark(self, values: "_Json", control: re.Pattern[str]) -> tuple["_Json", str, list[str]]:
        """Replace control spellings in `values`; return the mark, and what the marks stand for."""
        used = set().union(*_strings(values))
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        spellings: list[str] = []

        def replace(match: re.Match[str]) -> str:
            spellings.append(match[0])
            return f"{mark}{len(spellings) - 1}{mark}"

        marked = _map_strings(values, lambda text: control.sub(replace, text))
        return marked, mark, spellings

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
    ) -> str:
        variables = {**template_args, **self._variables}
        variables |= {"messages": messages, "add_generation_prompt": True}
        if tools is not None:
            variables["tools"] = tools
        variables.setdefault("tools", None)
        try:
            return self._template.render(variables)
        except _TEMPLATE_FAILURES as error:
            # A template is the model author's program; what stops it are messages it was not
            # made for, so the client has to act.
            rule = f"the model's chat template refused the messages: {error}"
            raise bad_request(rule, param="messages") from error


def _forced_reader(forced: ForcedCalls, builder: MessageBuilder) -> ForcedCallReader:
    if forced.name is None:
        return RequiredCallsReader(builder)
    return NamedCallReader(builder, forced.name)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that stands for itself, special tokens included."""
    return encode_whole(tokenizer, text, add_special_tokens=True)


def control_spellings(tokenizer: Tokenizer) -> list[str]:
    """Return the texts that the tokenizer turns into special tokens, in order of their ids."""
    added = tokenizer.get_added_tokens_decoder()
    return [token.content for _, token in sorted(added.items()) if token.special and token.content]


def load_tokenizer(path: Path) -> Tokenizer:
    """Read `tokenizer.json`, given itself or its folder.

    Raises:
        ConfigError: the file is missing or is not a tokenizer.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for everything
        raise ConfigError(f"tokenizer {file}: {error}") from error


def load_renderer(
    path: Path,
    tokenizer: Tokenizer,
    *,
    template_path: Path | None = None,
    tool_call_format: ToolCallFormat | None = None,
    reasoning_format: ReasoningFormat | None = None,
    cache: TokenCache | None = None,
) -> TemplateRenderer:
    """Make a renderer from a model folder's `tokenizer_config.json` and `chat_template.jinja`.

    `template_path` goes before both; without any template the default is ChatML. For the formats
    and the cache see `TemplateRenderer`.

    Raises:
        ConfigError: a file cannot be read, or the template is not valid.
    """
    folder = path if path.is_dir() else path.parent
    try:
        config_file = folder / "tokenizer_config.json"
        config = json.loads(config_file.read_text()) if config_file.is_file() else {}
        beside = folder / "chat_template.jinja"
        if template_path is None and beside.is_file():
            template_path = beside
        template = template_path.read_text() if template_path else _configured_template(config)
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat template of {folder}: {error}") from error
    return TemplateRenderer(
        tokenizer,
        chat_template=template,
        special_tokens=_special_tokens(config),
        tool_call_format=tool_call_format,
        reasoning_format=reasoning_format,
        cache=cache,
    )


def _configured_template(config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and its like: given as a text, or as an object with a `content`."""
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: object,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    *,
    ensure_ascii: bool = False,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models are not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _texts(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[str]:
    """All texts of a chat that are the client's; the keys of messages are ours."""
    texts: list[str] = []
    for message in messages:
        for value in message.values():
            if isinstance(value, str):
                texts.append(value)
            else:
                texts += _strings(value)
    return texts if tools is None else texts + _strings(tools)


def _strings(value: object) -> list[str]:
    """All texts inside a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in _strings(item)]
    if isinstance(value, Sequence):
        return [text for item in value for text in _strings(item)]
    return []


_Json = TypeVar("_Json")


def _map_strings(value: _Json, change: Callable[[str], str]) -> _Json:
    """Return `value` with every text inside it changed, keys included: those of a tool's schema
    and of a call's arguments are the client's."""
    return cast(_Json, _mapped(value, change))


def _mapped(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(item, change) for item in value]
    return value
