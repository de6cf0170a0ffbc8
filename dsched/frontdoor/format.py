"""The JSON of answers: OpenAI's shapes of both APIs, streamed and whole.

An event of a stream differs from the one before it in its text alone, so everything else is put
together once per request; a token costs the encoding of its text and one concatenation.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from dsched.drivers.wire import TokenLogprob
from dsched.frontdoor.stats import Api

encode_json = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"

MIN_LOGPROB = -9_999.0
"""What OpenAI sends for minus infinity, which JSON does not have."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    num_reasoning_tokens: int | None = None
    """Part of the output tokens; `None` where reasoning is not told apart."""

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_reasoning_tokens is not None:
            document["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return document


class AnswerFormat:
    """Documents of one answer."""

    __slots__ = (
        "_api",
        "_base",
        "_created_s",
        "_head",
        "_id",
        "_model",
        "_suffix",
        "_tail",
        "prefix",
    )

    def __init__(
        self,
        api: Api,
        *,
        answer_id: str,
        model: str,
        created_s: int,
        has_usage: bool,
        is_stream: bool = True,
    ) -> None:
        """`has_usage`: the client asked for usage, so other events carry an explicit null.

        Without `is_stream` only `document` may be asked for.
        """
        self._api = api
        self._id = answer_id
        self._model = model
        self._created_s = created_s
        if is_stream:
            self._put_together(api, answer_id, model, created_s, has_usage=has_usage)

    def _put_together(
        self, api: Api, answer_id: str, model: str, created_s: int, *, has_usage: bool
    ) -> None:
        kind = b"text_completion" if api is Api.COMPLETIONS else b"chat.completion.chunk"
        self._base = b'data: {"id":"%b","object":"%b","created":%d,"model":%b,"choices":[' % (
            answer_id.encode(),
            kind,
            created_s,
            encode_json(model),
        )
        is_chat = api is Api.CHAT
        self.prefix = self._base + (
            b'{"index":0,"delta":{"content":' if is_chat else b'{"index":0,"text":'
        )
        self._head = b"}" if is_chat else b""
        self._tail = b'}],"usage":null}\n\n' if has_usage else b"}]}\n\n"
        self._suffix = self._head + b',"logprobs":null,"finish_reason":null' + self._tail

    def opening(self) -> bytes:
        """Return the event before all text: chat names the role, completions need none."""
        if self._api is Api.COMPLETIONS:
            return b""
        delta = b'{"index":0,"delta":{"role":"assistant","content":""}'
        return self._base + delta + b',"logprobs":null,"finish_reason":null' + self._tail

    def text_event(self, text: str) -> bytes:
        """Return the event of a piece of text."""
        return self.prefix + encode_json(text) + self._suffix

    def rich_event(
        self, text: str, *, logprobs: dict[str, Any] | None, token_ids: Sequence[int] | None
    ) -> bytes:
        """Return the event of a piece of text with what was asked for beside it."""
        ids = b"" if token_ids is None else b',"token_ids":' + encode_json(token_ids)
        return b"".join(
            (
                self.prefix,
                encode_json(text),
                self._head,
                b',"logprobs":',
                encode_json(logprobs),
                b',"finish_reason":null',
                ids,
                self._tail,
            )
        )

    def delta_event(
        self,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None,
        token_ids: Sequence[int] | None,
    ) -> bytes:
        """Return the event of a piece of a parsed answer."""
        ids = b"" if token_ids is None else b',"token_ids":' + encode_json(token_ids)
        return b"".join(
            (
                self._base,
                b'{"index":0,"delta":',
                encode_json(delta),
                b',"logprobs":',
                encode_json(logprobs),
                b',"finish_reason":null',
                ids,
                self._tail,
            )
        )

    def closing(
        self,
        reason: str,
        usage: Usage | None,
        *,
        handoff: dict[str, Any] | None = None,
        delta: dict[str, Any] | None = None,
    ) -> bytes:
        """Return the last events: the reason, the usage if it was asked for, and the end mark.

        `handoff` says in the event of the reason what the client may rely on after a lost engine.
        `delta` is the end of the answer, which goes into that event too.
        """
        if self._api is Api.CHAT:
            rest = b'{"index":0,"delta":' + encode_json(delta or {})
        else:
            rest = b'{"index":0,"text":' + encode_json((delta or {}).get("content", ""))
        finish = b',"logprobs":null,"finish_reason":"%b"' % reason.encode()
        tail = self._tail
        if handoff is not None:
            tail = b'}],"dsched":' + encode_json(handoff) + tail.removeprefix(b"}]")
        parts = [self._base, rest, finish, tail]
        if usage is not None:
            parts += [self._base, b'],"usage":', encode_json(usage.document()), b"}\n\n"]
        parts.append(DONE)
        return b"".join(parts)

    def document(
        self,
        text: str,
        *,
        reason: str,
        usage: Usage,
        logprobs: dict[str, Any] | None,
        token_ids: Sequence[int] | None,
        handoff: dict[str, Any] | None = None,
        message: dict[str, Any] | None = None,
    ) -> bytes:
        """Return the whole answer of a request without a stream; `message` is a parsed one."""
        is_chat = self._api is Api.CHAT
        choice: dict[str, Any] = {"index": 0}
        if message is not None:
            choice["message"] = message
        elif is_chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        if token_ids is not None:
            choice["token_ids"] = token_ids
        answer = {
            "id": self._id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self._created_s,
            "model": self._model,
            "choices": [choice],
            "usage": usage.document(),
        }
        if handoff is not None:
            answer["dsched"] = handoff
        return encode_json(answer)


class LogprobWriter:
    """Translates token log-probabilities into the shape of one API."""

    __slots__ = ("_api", "_offset", "_tokenizer")

    def __init__(self, api: Api, tokenizer: Tokenizer) -> None:
        self._api = api
        self._tokenizer = tokenizer
        self._offset = 0

    def write(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the `logprobs` value of some tokens, in order after the ones before."""
        if self._api is Api.CHAT:
            return {"content": [self._chat_entry(each) for each in entries], "refusal": None}
        tokens = [self._text(each.token_id) for each in entries]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(each.logprob) for each in entries],
            "top_logprobs": [self._alternatives(each) for each in entries],
            "text_offset": offsets,
        }

    @staticmethod
    def merge(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Join the values of consecutive tokens."""
        merged: dict[str, Any] = {}
        for value in values:
            for name, items in value.items():
                merged[name] = merged.get(name, []) + items if items is not None else None
        return merged

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float | None]:
        # The emitted token is listed too, also when it is not among the best.
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {self._text(token_id): _finite(logprob) for token_id, logprob in pairs}

    def _chat_entry(self, entry: TokenLogprob) -> dict[str, Any]:
        value = self._chat_token(entry.token_id, entry.logprob)
        value["top_logprobs"] = [self._chat_token(*pair) for pair in entry.top]
        return value

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._text(token_id)
        raw = token_bytes(self._tokenizer, token_id, text)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer, token_id)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the text of one token by itself; special tokens by their spelling."""
    if not 0 <= token_id < 1 << 32:
        return ""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return text


def token_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> bytes:
    """Return the bytes of one token, also where they are only a part of a character."""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        return text.encode()
    piece = tokenizer.id_to_token(token_id) or ""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes.fromhex(piece[3:5])
    if all(sign in _BYTE_OF_SIGN for sign in piece):
        return bytes(_BYTE_OF_SIGN[sign] for sign in piece)
    return text.encode()


def _byte_of_sign() -> dict[str, int]:
    """Byte-level vocabularies spell each byte as a printable sign: this is the way back."""
    signs = set(ByteLevel.alphabet())
    own = {chr(byte): byte for byte in range(256) if chr(byte) in signs}
    others = sorted(signs - set(own))
    rest = [byte for byte in range(256) if chr(byte) not in signs]
    return own | dict(zip(others, rest, strict=True))


_BYTE_OF_SIGN = _byte_of_sign()


def _finite(logprob: float) -> float | None:
    """A number JSON has: minus infinity becomes `MIN_LOGPROB`, not-a-number null."""
    if logprob != logprob:
        return None
    return max(logprob, MIN_LOGPROB)
