"""vLLM's HTTP API in dsched's words: one request out, the events of its stream back.

`POST /v1/completions` with `prompt: [ids]` and `return_token_ids` carries token ids both ways on
every vLLM server, without an extra server flag (`/inference/v1/generate` needs one). Its cost: the
server makes text that nobody reads, and the first event repeats the prompt's ids, which are skipped
unread. Fields and their meaning: vLLM 0.32, `vllm/entrypoints/openai/completion/`.

What differs from vLLM's own words:

- vLLM ends `token_ids` with the token that stopped the answer; here that token is no output but
  `StreamEnd.stop_token_id`.
- vLLM reports the chosen token among the alternatives; here they are the best ones, best first.
"""

from typing import Any, Final

import msgspec

from dsched.drivers.base import FinishReason
from dsched.drivers.stream import AnswerReader, StreamEnd
from dsched.drivers.wire import GenerateCommand, SamplingParams, TokenLogprob
from dsched.errors import DriverError, EngineRefusedError, EngineUnreachableError

TOKEN_ID_PREFIX: Final = "token_id:"
"""How vLLM writes a token in logprobs under `return_tokens_as_token_ids`."""
MIN_LOGPROB: Final = -9999.0
"""vLLM's stand-in for minus infinity."""
ENGINE_DEAD_MARK: Final = "EngineCore encountered an issue"
"""How every answer of an API server begins whose engine core has died; see vLLM's
`EngineDeadError`. A fault of one request reads otherwise."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the usage event, which alone names the cached prompt tokens."""

    include_usage: bool = True


class CompletionBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/completions`; what is left out is vLLM's default."""

    prompt: tuple[int, ...]
    request_id: str
    max_tokens: int
    stream: bool
    return_token_ids: bool
    stream_options: StreamOptions | None = None
    model: str | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


PREFILL_PARAMS: Final[dict[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Asks a connector to keep the KV of the prompt and to say how it is fetched. Connectors that share
a store ignore it, and say nothing."""

_encoder = msgspec.json.Encoder()


def encode_request(command: GenerateCommand, *, model: str | None) -> bytes:
    """Return the JSON body that computes `command`; without `model` the server's first is meant.

    `command.priority` is not sent: a server without priority scheduling refuses any but 0.
    """
    sampling: SamplingParams = command.sampling
    body = CompletionBody(
        model=model,
        prompt=command.prompt_token_ids,
        request_id=command.attempt_id,
        # Only an answer in one body says how the KV is fetched.
        stream=not command.is_prefill,
        return_token_ids=True,
        stream_options=None if command.is_prefill else StreamOptions(),
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        return_tokens_as_token_ids=sampling.logprobs is not None,
        response_format=sampling.structured_output,
        kv_transfer_params=PREFILL_PARAMS if command.is_prefill else command.kv_transfer,
    )
    return _encoder.encode(body)


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _ErrorInfo(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    """One event of the stream; only the fields that are read, the rest is skipped."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _ErrorInfo | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorInfo | None = None
    message: str = ""
    detail: Any = None


_event_decoder = msgspec.json.Decoder(_Event)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


class StreamReader(AnswerReader):
    """Reads the events of one stream of vLLM's."""

    __slots__ = ()

    def _read_event(self, data: bytes) -> None:
        try:
            event = _event_decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise DriverError(f"an event that is not vLLM's: {error}") from error
        if event.error is not None:
            raise translate_error(event.error)
        if event.choices:
            self._read_choice(event.choices[0])
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            self.num_cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
        if event.kv_transfer_params is not None:
            self.kv_transfer = event.kv_transfer_params

    def _read_choice(self, choice: _Choice) -> None:
        if choice.token_ids is None:
            raise DriverError("the engine sends no token ids; it must be vLLM 0.10 or newer")
        if self.end is not None and choice.token_ids:
            raise DriverError("the engine sent tokens after the end of the answer")
        if self._has_logprobs:
            self.logprobs += translate_logprobs(choice)
        self.token_ids += choice.token_ids
        if choice.finish_reason is not None:
            self._read_end(choice.finish_reason, has_tokens=bool(choice.token_ids))

    def _read_end(self, finish_reason: str, *, has_tokens: bool) -> None:
        if finish_reason == "length":
            self.end = StreamEnd(reason=FinishReason.LENGTH)
        elif finish_reason == "stop":
            # Only a token of the last event can be it: those before were handed out as output.
            stop_token_id = self.token_ids.pop() if has_tokens else None
            if has_tokens and self._has_logprobs:
                self.logprobs.pop()
            self.end = StreamEnd(reason=FinishReason.STOP, stop_token_id=stop_token_id)
        elif finish_reason == "abort":
            # Our own abort hears nothing more. vLLM aborts by itself when its EP group broke.
            raise EngineUnreachableError("the engine aborted the answer by itself")
        else:
            raise DriverError(f"the engine ended the answer with {finish_reason!r}")


class PrefillReader(StreamReader):
    """Reads the answer to a prefill half: one body, which alone says how the KV is fetched."""

    __slots__ = ()
    is_whole = True


def translate_logprobs(choice: _Choice) -> list[TokenLogprob]:
    """Return one entry a token, in order; alternatives best first, ties by token id.

    Raises:
        DriverError: the entries and the tokens do not match.
    """
    token_ids = choice.token_ids or []
    entries = choice.logprobs or _Logprobs()
    if not len(entries.tokens) == len(entries.token_logprobs) == len(token_ids):
        raise DriverError(f"{len(entries.tokens)} logprobs for {len(token_ids)} tokens")
    tops = entries.top_logprobs or [None] * len(token_ids)
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=MIN_LOGPROB if logprob is None else logprob,
            top=_translate_top(top),
        )
        for token_id, logprob, top in zip(token_ids, entries.token_logprobs, tops, strict=True)
    ]


def _translate_top(top: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    if not top:
        return ()
    try:
        pairs = [(int(token.removeprefix(TOKEN_ID_PREFIX)), each) for token, each in top.items()]
    except ValueError as error:
        raise DriverError("the engine names tokens in logprobs by text, not by id") from error
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def translate_error(info: _ErrorInfo) -> DriverError:
    """Return the error that an event of the stream tells of."""
    message = info.message or "the engine reports an error without a message"
    if message.startswith(ENGINE_DEAD_MARK):
        return EngineUnreachableError("the engine core has died")
    if isinstance(info.code, int) and 400 <= info.code < 500:
        return EngineRefusedError(info.code, message)
    return DriverError(f"the engine failed: {message}")


def translate_refusal(status: int, body: bytes) -> DriverError:
    """Return the error for an answer whose status is not 200, in the engine's own words.

    >>> str(translate_refusal(400, b'{"error": {"message": "too long", "code": 400}}'))
    'too long'
    >>> str(translate_refusal(502, b"<html>"))
    'HTTP status 502'
    """
    message = ""
    try:
        answer = _error_decoder.decode(body)
        message = answer.error.message if answer.error is not None else answer.message
    except msgspec.MsgspecError:
        pass
    if message.startswith(ENGINE_DEAD_MARK):
        return EngineUnreachableError("the engine core has died")
    return EngineRefusedError(status, message or f"HTTP status {status}")
