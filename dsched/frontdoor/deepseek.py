"""Chats of DeepSeek V4 and V4.1, rendered and read by `deepseek-recipe`.

Their prompt is no chat template and their tool calls are a markup of their own (DSML), so the
library does both: `encode` makes the ids of a conversation, in which the client's spellings of
control tokens stay text, and its stream processor turns the answer's token ids into reasoning,
content and calls. A rendered text is never tokenised again.

With a token cache dsched makes the ids itself: the library says where the rendered text holds its
special tokens, and encodes what lies between two of them by itself, as if there were no added
tokens. So these pieces can be looked up, and their ids are the library's.

What stays dsched's: limits, stop bookkeeping, usage, one end a stream. Control tokens that the
model emits never reach the library, which would show them. Temperature and `top_p` are the
library's to decide, because thinking is made for certain ones. What the library would leave out
silently, and what it cannot promise, is refused by name.

The package is the extra `deepseek`, and is imported when a model needs it.
"""

import json
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer

from dsched.config import ChatFormat
from dsched.errors import ConfigError
from dsched.frontdoor.deltas import MakeParser, MessageBuilder
from dsched.frontdoor.errors import ApiError, bad_request
from dsched.frontdoor.renderer import RenderedPrompt, control_spellings, encode_prompt
from dsched.frontdoor.schema import ChatBody, stop_strings
from dsched.frontdoor.text import Detokenizer, StopFinder
from dsched.frontdoor.token_cache import TokenCache, encode_whole, is_usable
from dsched.frontdoor.token_cuts import find_cuts
from dsched.frontdoor.tools import asks_for_json, offered_tools

if TYPE_CHECKING:
    import deepseek_recipe as recipe

_MODEL = "model"
"""What the library is told as the model's name; clients' names are looked up by dsched."""
_DIGITS = 6
"""The library counts in 32-bit floats: 0.95 comes as 0.949999988079071."""
_FIELDS = ("tool_choice", "response_format", "reasoning_effort", "thinking", "tools")
"""Fields that the library's sentences name."""


class DeepseekRenderer:
    """A `Renderer` of DeepSeek's own chat format."""

    def __init__(
        self, tokenizer: Tokenizer, *, chat_format: ChatFormat, cache: TokenCache | None = None
    ) -> None:
        """Hand the tokenizer to the library, and try it. `cache` is for this renderer's chats
        alone; without, the library tokenises each of them whole.

        Raises:
            ConfigError: the extra is not installed, or this is not the format's tokenizer.
        """
        try:
            import deepseek_recipe
        except ImportError as error:
            raise ConfigError(
                f"chat_format {chat_format}: needs the extra `deepseek`: "
                f"pip install 'dsched[deepseek]' ({error})"
            ) from error
        self._recipe = deepseek_recipe
        self._plain = tokenizer
        is_v4 = chat_format == "deepseek-v4"
        version = deepseek_recipe.ModelVersion
        self._options = deepseek_recipe.ConversionOptions().with_model_versions_by_name(
            {_MODEL: version.DeepseekV4Pro if is_v4 else version.DeepseekV41Flash}
        )
        self._tokenizer = deepseek_recipe.Tokenizer.from_str(tokenizer.to_str())
        encoding: recipe.DeepseekV4Encoding | recipe.DeepseekV41Encoding = (
            deepseek_recipe.DeepseekV4Encoding() if is_v4 else deepseek_recipe.DeepseekV41Encoding()
        )
        self._encoding = encoding.with_tokenizer(self._tokenizer)
        self._cache: TokenCache | None = None
        if cache is not None and is_usable(find_cuts(tokenizer), cache):
            self._cache = cache
            self._bare = _without_added_tokens(tokenizer)
            added = tokenizer.get_added_tokens_decoder()
            self._added_ids = {token.content: token_id for token_id, token in added.items()}
        # Ids of added tokens may leave a gap, so their number says nothing of the largest.
        self._vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self._hidden_ids = self._find_control_ids(chat_format)

    def _find_control_ids(self, chat_format: ChatFormat) -> frozenset[int]:
        """Ids that no client may see; those that the library reads the answer by are not hidden."""
        kinds = self._recipe.SpecialToken
        read = (kinds.ThinkingStart, kinds.ThinkingEnd, kinds.Dsml)
        needed = (kinds.Bos, kinds.Eos, kinds.User, kinds.Assistant, *read)
        missing = [
            kind.default_str()
            for kind in needed
            if self._plain.token_to_id(kind.default_str()) is None
        ]
        if missing:
            raise ConfigError(
                f"chat_format {chat_format}: the tokenizer has no token {', '.join(missing)}"
            )
        names = [name for name in dir(kinds) if name[0].isupper()]
        spellings = {getattr(kinds, name).default_str() for name in names}
        spellings |= set(control_spellings(self._plain))
        spellings -= {kind.default_str() for kind in read}
        ids = map(self._plain.token_to_id, sorted(spellings))
        return frozenset(each for each in ids if each is not None)

    def encode_text(self, text: str) -> list[int]:
        return encode_prompt(self._plain, text)

    def check_chat(self, body: ChatBody) -> None:
        if body.chat_template_kwargs:
            rule = "this model has no chat template; use thinking and reasoning_effort"
            raise bad_request(f"chat_template_kwargs: {rule}", param="chat_template_kwargs")
        if isinstance(body.tool_choice, dict):
            rule = "a named function cannot be promised: use 'auto', 'none' or 'required'"
            raise bad_request(f"tool_choice: {rule}", param="tool_choice")
        if body.min_tokens and body.stop:
            rule = "cannot be honoured together with stop by this model"
            raise bad_request(f"min_tokens {rule}", param="min_tokens")
        if asks_for_json(body) and offered_tools(body) is not None:
            rule = "the answer's grammar would rule calls out"
            raise bad_request(f"response_format with tools: {rule}", param="response_format")

    def render_chat(self, body: ChatBody) -> RenderedPrompt:
        request = self._convert(body)
        if asks_for_json(body) and request.parsing_options.thinking_initial_stage is not None:
            rule = "the answer's grammar would rule thinking out; send thinking: {type: disabled}"
            raise bad_request(f"response_format: {rule}", param="response_format")
        try:
            token_ids = self._encode(request.conversation)
        except RuntimeError as error:
            rule = f"the model's chat format refused them: {error}"
            raise bad_request(f"messages: {rule}", param="messages") from error
        options = request.inference_options
        return RenderedPrompt(
            token_ids=token_ids,
            make_parser=self._parser_maker(request, len(token_ids)),
            temperature=_rounded(options.temperature),
            top_p=_rounded(options.top_p),
        )

    def _encode(self, conversation: "recipe.Conversation") -> list[int]:
        if self._cache is None:
            return self._encoding.encode(conversation)
        rendered = self._encoding.render_conversation(conversation)
        prompt = rendered.prompt
        parts: list[str | int] = []
        end = 0
        for start, stop in rendered.special_ranges:
            parts.append(prompt[end:start])
            token_id = self._added_ids.get(prompt[start:stop])
            if token_id is None:
                return self._encoding.encode(conversation)  # the library says what is wrong
            parts.append(token_id)
            end = stop
        parts.append(prompt[end:])
        return self._cache.ids_of([part for part in parts if part != ""], self._encode_bare)

    def _encode_bare(self, text: str) -> list[int]:
        return encode_whole(self._bare, text, add_special_tokens=False)

    def _convert(self, body: ChatBody) -> "recipe.ConversationRequest":
        try:
            request = self._recipe.ChatCompletionRequest(_document(body))
            return request.convert(self._options)
        except self._recipe.ConversionError as error:
            raise _refusal(error) from error
        except ValueError as error:
            param = _field_of(body, str(error))
            raise bad_request(f"{param}: {error}", param=param) from error

    def _parser_maker(
        self, request: "recipe.ConversationRequest", num_prompt_tokens: int
    ) -> MakeParser:
        def make_parser(
            builder: MessageBuilder,
            detokenizer: Detokenizer,  # noqa: ARG001 - the library has its own
            finder: StopFinder | None,  # noqa: ARG001
            min_tokens: int,  # noqa: ARG001
        ) -> DeepseekParser:
            recipe = self._recipe
            processor = recipe.StreamProcessor(
                recipe.ChatCompletionRequest.chunk_generator(request, _MODEL, _MODEL),
                request.parsing_options,
                self._tokenizer,
            )
            usage = recipe.PromptUsage(prompt_tokens=num_prompt_tokens)
            processor.push(recipe.InferenceChunk.ready(prompt_usage=usage))
            return DeepseekParser(
                builder,
                processor,
                library=recipe,
                hidden_ids=self._hidden_ids,
                vocab_size=self._vocab_size,
            )

        return make_parser


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    function: _Function


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] = []


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_read_chunk = msgspec.json.Decoder(_Chunk).decode


class DeepseekParser:
    """An `AnswerParser` over the library's stream processor."""

    __slots__ = (
        "_builder",
        "_hidden_ids",
        "_num_reasoning_tokens",
        "_processor",
        "_reason",
        "_recipe",
        "_vocab_size",
        "fault",
        "is_over",
    )

    def __init__(
        self,
        builder: MessageBuilder,
        processor: "recipe.StreamProcessor",
        *,
        library: Any,  # noqa: ANN401 - the module
        hidden_ids: frozenset[int],
        vocab_size: int,
    ) -> None:
        self._builder = builder
        self._processor = processor
        self._recipe = library
        self._hidden_ids = hidden_ids
        self._vocab_size = vocab_size
        self._reason: str | None = None
        self._num_reasoning_tokens: int | None = None
        self.is_over = False
        self.fault: str | None = None

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._num_reasoning_tokens

    def feed(self, token_id: int) -> None:
        """Read the next token. Control tokens, and ids of no token, have no text."""
        if token_id in self._hidden_ids or not 0 <= token_id < self._vocab_size:
            return
        try:
            chunks = self._processor.push(self._recipe.InferenceChunk.tokens([token_id]))
        except RuntimeError as error:
            self.fault = str(error)
            return
        for chunk in chunks:
            self._write(chunk)
        self.is_over = self._processor.finished

    def finish(self, reason: str) -> str:
        """See `AnswerParser`. Never called for an answer that failed: the library would end it
        well."""
        processor, recipe = self._processor, self._recipe
        if not processor.finished:
            reasons = recipe.InferenceFinishReason
            ended = reasons.Length if reason == "length" else reasons.Stop
            for chunk in processor.push(recipe.InferenceChunk.finish(ended)):
                self._write(chunk)
        for chunk in processor.finish():
            self._write(chunk)
        return self._reason or reason

    def _write(self, chunk: Any) -> None:  # noqa: ANN401 - the library's
        document = _read_chunk(chunk.to_json())
        builder = self._builder
        for choice in document.choices:
            delta = choice.delta
            builder.add_reasoning(delta.reasoning_content or "")
            builder.add_content(delta.content or "")
            for call in delta.tool_calls:
                # The library draws an id at random; dsched's are the same after a restart.
                if call.function.name is not None:
                    builder.open_call(call.function.name)
                builder.add_arguments(call.function.arguments or "")
            self._reason = choice.finish_reason or self._reason
        details = document.usage and document.usage.completion_tokens_details
        if details:
            self._num_reasoning_tokens = details.reasoning_tokens


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = []
    document["post_processor"] = None
    return Tokenizer.from_str(json.dumps(document))


def _document(body: ChatBody) -> bytes:
    """What the library has to know of a request; the rest is dsched's."""
    messages = []
    for message in body.messages:
        fields = msgspec.to_builtins(message)
        if message.role == "developer":
            fields["role"] = "system"
        if message.content is None and message.role == "assistant":
            fields["content"] = None
        messages.append(fields)
    fields = {
        "model": _MODEL,
        "messages": messages,
        "tools": body.tools or None,
        "tool_choice": body.tool_choice if body.tools else None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stop": stop_strings(body.stop) or None,
        "response_format": body.response_format,
        "thinking": body.thinking,
        "reasoning_effort": body.reasoning_effort,
    }
    return msgspec.json.encode({name: each for name, each in fields.items() if each is not None})


def _refusal(error: Any) -> ApiError:  # noqa: ANN401 - the library's
    """The library's refusal with the name of the field, which it leaves out."""
    try:
        message = json.loads(error.body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = str(error)
    named = next((field for field in _FIELDS if field in message), None)
    return bad_request(message, param=named or "messages")


def _field_of(body: ChatBody, sentence: str) -> str:
    """The field that a sentence about a wrong value, which it quotes, is about."""
    thinking = (body.thinking or {}).get("type")
    for param, value in (("reasoning_effort", body.reasoning_effort), ("thinking", thinking)):
        if value is not None and f"`{value}`" in sentence:
            return param
    return "messages"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
