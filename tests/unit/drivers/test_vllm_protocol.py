"""vLLM's HTTP API in dsched's words."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsched.drivers.base import FinishReason
from dsched.drivers.http import SseSplitter
from dsched.drivers.vllm.protocol import (
    StreamEnd,
    StreamReader,
    encode_request,
    translate_refusal,
)
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import DriverError, EngineRefusedError, EngineUnreachableError


def command(**sampling: object) -> GenerateCommand:
    fields: dict = {"max_tokens": 8}
    return GenerateCommand(
        attempt_id="ds-1",
        epoch=1,
        dp_rank=0,
        prompt_token_ids=(5, 6, 7),
        sampling=SamplingParams(**(fields | sampling)),
    )


def event(token_ids: list[int] | None, finish_reason: str | None = None, **choice: object) -> bytes:
    """One event as vLLM 0.32 writes it, with fields that nobody reads."""
    fields = {
        "index": 0,
        "text": "x",
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "prompt_token_ids": [5, 6, 7],
        "token_ids": token_ids,
    }
    return json.dumps(
        {
            "id": "cmpl-ds-1",
            "object": "text_completion",
            "created": 1,
            "model": "tiny",
            "choices": [fields | choice],
        }
    ).encode()


def test_request_asks_for_token_ids_and_leaves_defaults_to_the_engine() -> None:
    """What the client did not say is not sent: the engine's own default holds."""
    body = json.loads(encode_request(command(), model="tiny"))

    assert body == {
        "model": "tiny",
        "prompt": [5, 6, 7],
        "request_id": "ds-1",
        "max_tokens": 8,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {},
    } | {"stream_options": {"include_usage": True}}


def test_every_sampling_parameter_reaches_the_engine() -> None:
    """One field lost here is a wrong answer that nobody notices."""
    sampling = {
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 0,
        "presence_penalty": -1.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.5,
        "logit_bias": {"9": -100.0},
        "stop_token_ids": (3, 4),
        "ignore_eos": True,
        "logprobs": 0,
        "structured_output": {"type": "json_object"},
    }
    assert set(sampling) | {"max_tokens"} == set(SamplingParams.__struct_fields__)

    body = json.loads(encode_request(command(**sampling), model=None))

    expected = sampling | {"stop_token_ids": [3, 4], "response_format": {"type": "json_object"}}
    del expected["structured_output"]
    assert {name: body.get(name) for name in expected} == expected
    assert body["return_tokens_as_token_ids"] is True
    assert "model" not in body


def test_tokens_are_read_in_order_up_to_the_length() -> None:
    reader = StreamReader(has_logprobs=False)

    reader.feed([event([1]), event([2, 3]), event([4], "length")])

    assert reader.token_ids == [1, 2, 3, 4]
    assert reader.end == StreamEnd(reason=FinishReason.LENGTH)
    assert not reader.is_done


def test_stop_token_is_the_end_and_no_output() -> None:
    """vLLM hands out the token that stopped the answer; for dsched it is not part of it."""
    reader = StreamReader(has_logprobs=False)

    reader.feed([event([1]), event([2, 9], "stop", stop_reason=9), b"[DONE]"])

    assert reader.token_ids == [1, 2]
    assert reader.end == StreamEnd(reason=FinishReason.STOP, stop_token_id=9)
    assert reader.is_done


def test_stop_token_that_comes_alone_leaves_no_token() -> None:
    reader = StreamReader(has_logprobs=True)
    entry = {"tokens": ["token_id:9"], "token_logprobs": [-0.1], "top_logprobs": None}

    reader.feed([event([9], "stop", logprobs=entry)])

    assert reader.token_ids == []
    assert reader.logprobs == []
    assert reader.end == StreamEnd(reason=FinishReason.STOP, stop_token_id=9)


def test_stop_without_a_token_takes_none_back() -> None:
    """A stop that brings no token of its own must not swallow the one before it."""
    reader = StreamReader(has_logprobs=False)

    reader.feed([event([1, 2]), event([], "stop")])

    assert reader.token_ids == [1, 2]
    assert reader.end == StreamEnd(reason=FinishReason.STOP)


def test_cached_tokens_come_with_the_usage() -> None:
    reader = StreamReader(has_logprobs=False)
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}

    reader.feed([json.dumps({"choices": [], "usage": usage}).encode()])

    assert reader.num_cached_tokens == 8


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens_details": None}])
def test_usage_without_details_means_nothing_cached(usage: object) -> None:
    """The server tells of cached tokens only with a flag that an operator may not have set."""
    reader = StreamReader(has_logprobs=False)

    reader.feed([json.dumps({"choices": [], "usage": usage}).encode()])

    assert reader.num_cached_tokens == 0


def test_alternatives_are_sorted_best_first_then_by_id() -> None:
    """vLLM puts the chosen token first, wherever it ranks."""
    reader = StreamReader(has_logprobs=True)
    entry = {
        "tokens": ["token_id:4"],
        "token_logprobs": [-3.0],
        "top_logprobs": [{"token_id:4": -3.0, "token_id:8": -1.0, "token_id:2": -1.0}],
    }

    reader.feed([event([4], logprobs=entry)])

    [logprob] = reader.logprobs
    assert (logprob.token_id, logprob.logprob) == (4, -3.0)
    assert logprob.top == ((2, -1.0), (8, -1.0), (4, -3.0))


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {"tokens": [], "token_logprobs": []},
        {"tokens": ["token_id:4", "token_id:5"], "token_logprobs": [-1.0, -2.0]},
        {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}]},
    ],
)
def test_logprobs_that_do_not_fit_are_an_error(entry: object) -> None:
    reader = StreamReader(has_logprobs=True)

    with pytest.raises(DriverError, match="logprobs"):
        reader.feed([event([4], logprobs=entry)])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "not vLLM's"),
        (b"[]", "not vLLM's"),
        (b'{"choices": 3}', "not vLLM's"),
        (event(None), "no token ids"),
        (event([1], "repetition"), "'repetition'"),
        (b'{"error": {"message": "boom", "code": 500}}', "boom"),
        (b'{"error": {}}', "without a message"),
    ],
)
def test_event_that_cannot_be_is_an_error(data: bytes, words: str) -> None:
    with pytest.raises(DriverError, match=words):
        StreamReader(has_logprobs=False).feed([data])


def test_an_answer_that_the_engine_aborts_is_lost_not_wrong() -> None:
    """vLLM does so when its EP group broke: the request goes on elsewhere."""
    with pytest.raises(EngineUnreachableError, match="aborted the answer by itself"):
        StreamReader(has_logprobs=False).feed([event([], "abort")])


def test_tokens_after_the_end_are_an_error() -> None:
    reader = StreamReader(has_logprobs=False)
    reader.feed([event([1], "length")])

    with pytest.raises(DriverError, match="after the end"):
        reader.feed([event([2])])


def test_tokens_before_a_fault_are_kept() -> None:
    """They were computed and belong to the client."""
    reader = StreamReader(has_logprobs=False)

    with pytest.raises(DriverError):
        reader.feed([event([1]), event([2]), b"nonsense"])

    assert reader.token_ids == [1, 2]


DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, {"error": {"message": "too long", "code": 400}}, EngineRefusedError, "too long"),
        (404, {"error": {"message": "no model", "code": 404}}, EngineRefusedError, "no model"),
        (422, {"message": "old shape", "code": 422}, EngineRefusedError, "old shape"),
        (500, {"error": {"message": DEAD, "code": 500}}, EngineUnreachableError, "died"),
        (503, {"error": None}, EngineRefusedError, "HTTP status 503"),
        (418, [1, 2], EngineRefusedError, "HTTP status 418"),
    ],
)
def test_refusal_is_told_in_the_engines_words(
    status: int, body: object, kind: type[DriverError], words: str
) -> None:
    """A dead engine core is not a refusal, even though its API server still answers."""
    error = translate_refusal(status, json.dumps(body).encode())

    assert type(error) is kind
    assert words in str(error)
    if isinstance(error, EngineRefusedError):
        assert error.status == status


def test_dead_core_in_the_stream_is_a_lost_engine() -> None:
    reader = StreamReader(has_logprobs=False)
    data = json.dumps({"error": {"message": DEAD, "type": "InternalServerError", "code": 500}})

    with pytest.raises(EngineUnreachableError):
        reader.feed([data.encode()])


@given(st.binary(max_size=200))
def test_any_event_is_read_or_refused(data: bytes) -> None:
    """No bytes of an engine raise anything but a `DriverError`."""
    reader = StreamReader(has_logprobs=True)
    try:
        reader.feed([data])
    except DriverError:
        return
    assert reader.token_ids == []


@given(
    st.lists(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4), min_size=1, max_size=8),
    st.data(),
)
def test_stream_reads_the_same_wherever_it_is_cut(chunks: list[list[int]], data) -> None:  # noqa: ANN001
    """Tokens do not depend on how the network cut the bytes."""
    events = [event(chunk) for chunk in chunks[:-1]] + [event(chunks[-1], "length"), b"[DONE]"]
    stream = b"".join(b"data: " + each + b"\n\n" for each in events)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6).map(sorted))
    reader = StreamReader(has_logprobs=False)
    splitter = SseSplitter()

    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(splitter.feed(stream[start:end]))

    assert reader.token_ids == [token for chunk in chunks for token in chunk]
    assert reader.is_done


def test_body_is_small_json() -> None:
    """Encoding does not grow with what was not asked for."""
    body = encode_request(command(), model="m")

    assert len(body) < 200
    assert msgspec.json.decode(body)["prompt"] == [5, 6, 7]
