"""From a request body to what the controller takes: checks against the model, sampling, prompt.

Pure: a body and what is known of the model in, an `InferenceRequest` or an `ApiError` out. The one
heavy step, `Intake.render`, may run on another thread.

Rules where APIs differ or leave room:

- Of `max_tokens` and `max_completion_tokens` the smaller counts. Both are caps: a value above what
  the model's context leaves is lowered to that, because clients send one number to many models.
- Without either, a chat may use all that the context leaves; a completion gets 16 tokens.
- A prompt that leaves no room for one token is refused, with all three numbers.
- `seed` is best effort, as OpenAI defines it: an engine that cannot seed does not get it. What
  else the engine cannot do is refused, because an answer without it would be another answer.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from dsched.controller.request import InferenceRequest, ModelInfo
from dsched.drivers.wire import SamplingParams
from dsched.frontdoor.errors import bad_request, echo
from dsched.frontdoor.models import ServedModel
from dsched.frontdoor.renderer import RenderedPrompt
from dsched.frontdoor.schema import (
    ChatBody,
    CompletionBody,
    SamplingFields,
    single_prompt,
    stop_strings,
)
from dsched.frontdoor.stats import Api
from dsched.frontdoor.tools import check_tools, num_chars
from dsched.ids import DpRank, RequestId

DEFAULT_COMPLETION_TOKENS = 16
"""Answer of `/v1/completions` without `max_tokens`; OpenAI's default."""
DEFAULT_CHAT_TOKENS = 4_096
"""Answer of a chat without a limit, where no engine has said how long its context is."""
MAX_STOP_TOKEN_IDS = 1_024
"""Engines look through them at every token."""
MAX_TOKEN_ID = (1 << 31) - 1
"""Largest id of any vocabulary: engines keep ids in 32-bit integers."""


class Intake(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One request whose fields have been checked; its prompt is not rendered yet."""

    api: Api
    body: CompletionBody | ChatBody
    served: ServedModel
    info: ModelInfo
    prompt: str | list[int]
    """Text or token ids of a completion; of a chat nothing."""
    stops: tuple[str, ...]
    pinned_dp_rank: DpRank | None

    @property
    def num_chars(self) -> int:
        """Size of the text to render; token ids need none."""
        if isinstance(self.prompt, str):
            return len(self.prompt)
        if isinstance(self.body, ChatBody):
            return num_chars(self.body)
        return 0

    def render(self) -> RenderedPrompt:
        """Return the prompt in tokens. O(`num_chars`); may run on any thread.

        Raises:
            ApiError: 400 when the model's format cannot hold the messages.
        """
        renderer = self.served.renderer
        if isinstance(self.body, ChatBody):
            return renderer.render_chat(self.body)
        if isinstance(self.prompt, str):
            return RenderedPrompt(token_ids=renderer.encode_text(self.prompt))
        return RenderedPrompt(token_ids=self.prompt)

    def make_request(self, request_id: RequestId, rendered: RenderedPrompt) -> InferenceRequest:
        """Check the rendered prompt and return what the controller takes.

        Raises:
            ApiError: 400 for a prompt that is empty, too long or outside the vocabulary.
        """
        field = "messages" if self.api is Api.CHAT else "prompt"
        token_ids = rendered.token_ids
        if not token_ids:
            raise bad_request(f"{field} holds no token", param=field)
        if isinstance(self.prompt, list) and self.api is Api.COMPLETIONS:
            check_token_ids(token_ids, vocab_size=self.info.vocab_size, param="prompt")
        return InferenceRequest(
            request_id=request_id,
            model=self.body.model,
            prompt_token_ids=tuple(token_ids),
            sampling=self._sampling(rendered, field),
            pinned_dp_rank=self.pinned_dp_rank,
            priority=self.body.priority or 0,
        )

    def _sampling(self, rendered: RenderedPrompt, field: str) -> SamplingParams:
        body, can = self.body, self.info.capabilities
        max_tokens = self._max_tokens(len(rendered.token_ids), field)
        stated = rendered.temperature, rendered.top_p
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            message = f"min_tokens {min_tokens} is above the {max_tokens} tokens of the answer"
            raise bad_request(message, param="min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            temperature=body.temperature if stated[0] is None else stated[0],
            top_p=body.top_p if stated[1] is None else stated[1],
            top_k=None if body.top_k == -1 else body.top_k,
            min_p=body.min_p,
            seed=body.seed if can.can_seed else None,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias or None,
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=bool(body.ignore_eos),
            logprobs=_num_logprobs(body),
            structured_output=self._structured_output(rendered),
        )

    def _structured_output(self, rendered: RenderedPrompt) -> dict[str, Any] | None:
        forced = rendered.structured_output
        if forced is None:
            return _response_format(self.body)
        if not self.info.capabilities.can_structured_output:
            rule = "only 'auto' and 'none' can be honoured by this model's engines"
            raise bad_request(f"tool_choice: {rule}", param="tool_choice")
        return forced

    def _max_tokens(self, num_prompt_tokens: int, field: str) -> int:
        limits = [self.body.max_tokens]
        if isinstance(self.body, ChatBody):
            limits.append(self.body.max_completion_tokens)
        asked = min((each for each in limits if each is not None), default=None)
        context = self.info.max_model_len
        if context is None:
            default = DEFAULT_CHAT_TOKENS if self.api is Api.CHAT else DEFAULT_COMPLETION_TOKENS
            return min(default if asked is None else asked, MAX_TOKEN_ID)
        left = context - num_prompt_tokens
        if left < 1:
            asking = "" if asked is None else f" and {min(asked, MAX_TOKEN_ID)} were asked for"
            message = (
                f"The model's context is {context} tokens; the prompt has {num_prompt_tokens}"
                f"{asking}, so none is left for the answer"
            )
            raise bad_request(message, param=field, code="context_length_exceeded")
        if asked is None:
            asked = left if self.api is Api.CHAT else DEFAULT_COMPLETION_TOKENS
        return min(asked, left)


def make_intake(
    body: CompletionBody | ChatBody,
    *,
    served: ServedModel,
    info: ModelInfo,
    rank_header: bytes | None,
) -> Intake:
    """Check what can be checked before the prompt is rendered.

    Raises:
        ApiError: 400 with the name of the field.
    """
    prompt: str | list[int] = []
    if isinstance(body, ChatBody):
        check_tools(body)
        served.renderer.check_chat(body)
    else:
        prompt = single_prompt(body.prompt)
    _check_capabilities(body, info)
    _check_logit_bias(body.logit_bias, info.vocab_size)
    if body.stop_token_ids:
        if len(body.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            rule = f"above the limit of {MAX_STOP_TOKEN_IDS}"
            message = f"stop_token_ids holds {len(body.stop_token_ids)} ids, {rule}"
            raise bad_request(message, param="stop_token_ids")
        check_token_ids(body.stop_token_ids, vocab_size=info.vocab_size, param="stop_token_ids")
    return Intake(
        api=Api.CHAT if isinstance(body, ChatBody) else Api.COMPLETIONS,
        body=body,
        served=served,
        info=info,
        prompt=prompt,
        stops=stop_strings(body.stop),
        pinned_dp_rank=pinned_rank(rank_header),
    )


def pinned_rank(header: bytes | None) -> DpRank | None:
    """Return the DP rank that `X-data-parallel-rank` names.

    Raises:
        ApiError: 400 for anything but a small decimal number.
    """
    if header is None:
        return None
    if not (header.isdigit() and len(header) <= 4):
        shown = echo(header.decode("latin-1"))
        message = f"X-data-parallel-rank {shown!r} is not a number from 0 to 9999"
        raise bad_request(message, param="X-data-parallel-rank")
    return DpRank(int(header))


def check_token_ids(token_ids: list[int], *, vocab_size: int | None, param: str) -> None:
    """Raise `ApiError` for an id outside the vocabulary. O(ids)."""
    largest = (MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size) - 1
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id <= largest:
            shown = token_id if abs(token_id) < 1 << 64 else "above 64 bits"
            rule = f"is outside the vocabulary of 0 to {largest}"
            raise bad_request(f"{param}: token id {shown} {rule}", param=param)


def _check_capabilities(body: SamplingFields, info: ModelInfo) -> None:
    can = info.capabilities
    if body.response_format is not None and body.response_format.type != "text":
        kind = body.response_format.type
        if kind not in ("json_object", "json_schema"):
            raise bad_request(
                f"response_format: unknown type {echo(kind)!r}", param="response_format"
            )
        if not can.can_structured_output:
            message = f"response_format {kind!r} is not supported by this model's engines"
            raise bad_request(message, param="response_format")
    if _num_logprobs(body) is not None and not can.can_stream_logprobs:
        raise bad_request("logprobs are not supported by this model's engines", param="logprobs")


def _check_logit_bias(bias: Mapping[str, float] | None, vocab_size: int | None) -> None:
    if not bias:
        return
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            message = f"logit_bias: {echo(key)!r} is not a token id"
            raise bad_request(message, param="logit_bias")
    ids = [int(key) for key in bias]
    check_token_ids(ids, vocab_size=vocab_size, param="logit_bias")


def _num_logprobs(body: SamplingFields) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if isinstance(body, ChatBody) and body.logprobs:
        return body.top_logprobs or 0
    return None


def _response_format(body: SamplingFields) -> dict[str, Any] | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    value: dict[str, Any] = {"type": wanted.type}
    if wanted.json_schema is not None:
        value["json_schema"] = wanted.json_schema
    return value
