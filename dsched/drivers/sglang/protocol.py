"""SGLang's HTTP API in dsched's words: one request out, the events of its stream back.

`POST /generate` with `input_ids` carries token ids both ways on every SGLang server. Fields and
their meaning: SGLang 0.5.23, `sglang/srt/managers/io_struct.py`, `tokenizer_manager.py` and
`sampling/sampling_params.py`.

What differs from SGLang's own words:

- A stream repeats all tokens in every event, unless the server runs with
  `--incremental-streaming-output`; `completion_tokens` tells which, and that no token was lost.
- SGLang ends `output_ids` with the token that stopped the answer; here that token is no output but
  `StreamEnd.stop_token_id`.
- SGLang's `ignore_eos` ignores stop token ids too. Here it does not: the reader ends the answer at
  the first of them (`AnswerReader.is_cut`), and the driver stops the engine.
- Of a request in separate pools both halves name where their engines meet, and in which room
  (`KvMeeting`). SGLang finds the prefill DP rank by the room's remainder, so the controller draws
  rooms that fit the rank it chose.
- SGLang aborts every request whose id begins with the given one; `request_id_of` makes ids of which
  none begins another.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from dsched.drivers.base import FinishReason
from dsched.drivers.stream import AnswerReader, StreamEnd
from dsched.drivers.wire import GenerateCommand, SamplingParams, TokenLogprob
from dsched.errors import DriverError, EngineRefusedError

ID_END: Final = "$"
"""Ends every request id. Without an end, aborting `a` would abort `ab` as well."""
ANY_OBJECT: Final = '{"type": "object"}'
"""The JSON schema that SGLang's own front end sends for `json_object`."""
MIN_LOGPROB: Final = -9999.0
"""For minus infinity, which JSON cannot say."""


class SglangSampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`sampling_params` of a request; what is left out is SGLang's default."""

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    sampling_seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    json_schema: str | None = None


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /generate`."""

    rid: str
    input_ids: tuple[int, ...]
    sampling_params: SglangSampling
    stream: bool
    return_logprob: bool = False
    top_logprobs_num: int = 0
    routed_dp_rank: int | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class AbortBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `POST /abort_request`."""

    rid: str


_encoder = msgspec.json.Encoder()


def request_id_of(attempt_id: str) -> str:
    """Return SGLang's id for an attempt; no such id begins with another one.

    >>> request_id_of("ab").startswith(request_id_of("a"))
    False

    Raises:
        ValueError: the attempt id has the sign that ends ids in it.
    """
    if ID_END in attempt_id or not attempt_id:
        raise ValueError(f"attempt id {attempt_id!r} must be some text without {ID_END!r}")
    return attempt_id + ID_END


def encode_request(command: GenerateCommand, *, dp_rank: int | None) -> bytes:
    """Return the JSON body that computes `command`, on `dp_rank` if one is named.

    `command.priority` is not sent: a server without priority scheduling refuses it.

    Raises:
        EngineRefusedError: a `response_format` that SGLang has no words for.
    """
    num_top, meeting = command.sampling.logprobs, command.kv_meeting
    body = GenerateBody(
        rid=request_id_of(command.attempt_id),
        input_ids=command.prompt_token_ids,
        sampling_params=translate_sampling(command.sampling),
        stream=True,
        return_logprob=num_top is not None,
        top_logprobs_num=num_top or 0,
        routed_dp_rank=dp_rank,
        bootstrap_host=None if meeting is None else meeting.host,
        bootstrap_port=None if meeting is None else meeting.port,
        bootstrap_room=None if meeting is None else meeting.room,
    )
    return _encoder.encode(body)


def encode_abort(attempt_id: str) -> bytes:
    """Return the JSON body that stops an attempt."""
    return _encoder.encode(AbortBody(rid=request_id_of(attempt_id)))


def translate_sampling(sampling: SamplingParams) -> SglangSampling:
    """Return SGLang's words for how to choose tokens.

    Raises:
        EngineRefusedError: a `response_format` that SGLang has no words for.

    >>> translate_sampling(SamplingParams(max_tokens=4, top_k=0)).top_k
    -1
    """
    return SglangSampling(
        max_new_tokens=sampling.max_tokens,
        min_new_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        # All tokens are 0 or -1 to others, but only -1 to SGLang.
        top_k=-1 if sampling.top_k == 0 else sampling.top_k,
        min_p=sampling.min_p,
        sampling_seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        json_schema=translate_format(sampling.structured_output),
    )


def translate_format(response_format: Mapping[str, Any] | None) -> str | None:
    """Return the JSON schema that an OpenAI `response_format` asks for.

    Raises:
        EngineRefusedError: a format that SGLang has no words for.

    >>> translate_format({"type": "json_schema", "json_schema": {"schema": {"type": "array"}}})
    '{"type":"array"}'
    """
    if response_format is None or response_format.get("type") == "text":
        return None
    if response_format.get("type") == "json_object":
        return ANY_OBJECT
    named = response_format.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if response_format.get("type") == "json_schema" and schema is not None:
        return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    kind = str(response_format.get("type"))[:40]
    raise EngineRefusedError(400, f"response_format {kind!r} cannot be asked of SGLang")


class _Finish(msgspec.Struct):
    type: str
    matched: Any = None
    message: str = ""
    status_code: int | None = None


_Pair = tuple[float | None, int, Any]
"""Logprob, token id, and text or nothing."""


class _Meta(msgspec.Struct):
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: _Finish | None = None
    dp_rank: int | None = None
    output_token_logprobs: list[_Pair] | None = None
    output_top_logprobs: list[list[_Pair] | None] | None = None


class _ErrorInfo(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    """One event of the stream; only the fields that are read, the rest is skipped."""

    output_ids: list[int] | None = None
    meta_info: _Meta | None = None
    error: _ErrorInfo | str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorInfo | str | None = None
    message: str = ""


_event_decoder = msgspec.json.Decoder(_Event)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


class SglangReader(AnswerReader):
    """Reads the events of one stream of SGLang's."""

    __slots__ = ("_cut_at", "_num_tokens", "_on_dp_rank", "dp_rank")

    def __init__(
        self,
        *,
        has_logprobs: bool,
        cut_at: frozenset[int] = frozenset(),
        on_dp_rank: Callable[[int], None] | None = None,
    ) -> None:
        """`cut_at` are tokens that end the answer here although the engine would go on;
        `on_dp_rank` hears once which DP rank computes it."""
        super().__init__(has_logprobs=has_logprobs)
        self._on_dp_rank = on_dp_rank
        self.dp_rank: int | None = None
        """The DP rank that says it computes the answer; `None` until a server with several says."""
        self._cut_at = cut_at
        self._num_tokens = 0
        """Tokens taken from the stream so far, the one that ended it included."""

    def _read_event(self, data: bytes) -> None:
        try:
            event = _event_decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise DriverError(f"an event that is not SGLang's: {error}") from error
        if event.error is not None:
            raise translate_error(event.error)
        if event.meta_info is None or event.output_ids is None:
            raise DriverError("the engine sends no token ids; it must be SGLang 0.5 or newer")
        if self.is_done:
            return
        self._read_tokens(event.output_ids, event.meta_info)

    def _read_tokens(self, output_ids: list[int], meta: _Meta) -> None:
        finish = meta.finish_reason
        if finish is not None and finish.type not in ("stop", "length"):
            # What an aborted answer repeats of its tokens depends on the server; none is new.
            raise translate_abort(finish)
        if self.end is not None:
            raise DriverError("the engine sent more after the end of the answer")
        new_ids = self._new_tokens(output_ids, num_total=meta.completion_tokens)
        if self._has_logprobs:
            self.logprobs += translate_logprobs(new_ids, meta)
        self.token_ids += new_ids
        self._num_tokens = meta.completion_tokens
        self.num_cached_tokens = meta.cached_tokens
        if meta.dp_rank is not None and self.dp_rank is None:
            self.dp_rank = meta.dp_rank
            if self._on_dp_rank is not None:
                self._on_dp_rank(meta.dp_rank)
        if finish is not None:
            self._read_end(finish)
        if self._cut_at:
            self._cut(num_new=len(new_ids))

    def _new_tokens(self, output_ids: list[int], *, num_total: int) -> list[int]:
        """The tokens of an event that were not in one before, whether it repeats the others or not.

        Raises:
            DriverError: tokens are missing or too many.
        """
        num_new = num_total - self._num_tokens
        if num_new < 0 or len(output_ids) not in (num_new, num_total):
            raise DriverError(
                f"the engine sent {len(output_ids)} tokens after {self._num_tokens}, "
                f"but counts {num_total}"
            )
        return output_ids[len(output_ids) - num_new :]

    def _read_end(self, finish: _Finish) -> None:
        if finish.type == "length":
            self.end = StreamEnd(reason=FinishReason.LENGTH)
            return
        matched = finish.matched
        if isinstance(matched, str):
            # No stop string was sent: this is how SGLang tells of logits that are not numbers.
            raise DriverError(f"the engine ended the answer with {matched!r}")
        is_token = isinstance(matched, int) and self.token_ids[-1:] == [matched]
        if is_token:
            self._drop_last_token()
        self.end = StreamEnd(reason=FinishReason.STOP, stop_token_id=matched if is_token else None)

    def _cut(self, *, num_new: int) -> None:
        """End the answer at the first token of `cut_at` among the new ones."""
        first_new = max(0, len(self.token_ids) - num_new)
        for index in range(first_new, len(self.token_ids)):
            stop_token_id = self.token_ids[index]
            if stop_token_id in self._cut_at:
                del self.token_ids[index:]
                del self.logprobs[index:]
                self.end = StreamEnd(reason=FinishReason.STOP, stop_token_id=stop_token_id)
                self.is_cut = self.is_done = True
                return

    def _drop_last_token(self) -> None:
        self.token_ids.pop()
        if self._has_logprobs:
            self.logprobs.pop()


def translate_logprobs(new_ids: list[int], meta: _Meta) -> list[TokenLogprob]:
    """Return one entry for each new token, in order; alternatives best first, ties by token id.

    Raises:
        DriverError: the entries and the tokens do not match.
    """
    num_new = len(new_ids)
    entries = (meta.output_token_logprobs or [])[-num_new:] if num_new else []
    tops = (meta.output_top_logprobs or [None] * num_new)[-num_new:] if num_new else []
    if [token_id for _, token_id, _ in entries] != new_ids or len(tops) != num_new:
        raise DriverError(f"{len(entries)} logprobs do not fit {num_new} tokens")
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=MIN_LOGPROB if logprob is None else logprob,
            top=_translate_top(top),
        )
        for (logprob, token_id, _), top in zip(entries, tops, strict=True)
    ]


def _translate_top(top: list[_Pair] | None) -> tuple[tuple[int, float], ...]:
    pairs = [
        (token_id, MIN_LOGPROB if logprob is None else logprob)
        for logprob, token_id, _ in top or ()
    ]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def translate_error(info: _ErrorInfo | str) -> DriverError:
    """Return the error that an event of the stream tells of."""
    if isinstance(info, str):
        return EngineRefusedError(400, info)
    message = info.message or "the engine reports an error without a message"
    if isinstance(info.code, int) and 400 <= info.code < 600:
        return EngineRefusedError(info.code, message)
    return DriverError(f"the engine failed: {message}")


def translate_abort(finish: _Finish) -> DriverError:
    """Return the error of an answer that the engine gave up.

    Our own aborts close their connection and hear nothing: this is the engine's choice (a prompt
    that does not fit, a full queue, a fault) or somebody else's.
    """
    message = finish.message or f"the engine ended the answer with {finish.type!r}"
    if finish.status_code is not None and 400 <= finish.status_code < 600:
        return EngineRefusedError(finish.status_code, message)
    return DriverError(f"the engine gave the answer up: {message}")


def translate_refusal(status: int, body: bytes) -> DriverError:
    """Return the error for an answer whose status is not 200, in the engine's own words.

    >>> str(translate_refusal(400, b'{"error": {"message": "too long"}}'))
    'too long'
    >>> str(translate_refusal(400, b'{"error": "rid must be text"}'))
    'rid must be text'
    >>> str(translate_refusal(502, b"<html>"))
    'HTTP status 502'
    """
    message = ""
    try:
        answer = _error_decoder.decode(body)
    except msgspec.MsgspecError:
        pass
    else:
        info = answer.error
        told = info.message if isinstance(info, _ErrorInfo) else info
        message = told or answer.message
    return EngineRefusedError(status, message or f"HTTP status {status}")
