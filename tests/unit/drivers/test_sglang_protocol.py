"""SGLang's words and ours: every field out, every event back."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsched.drivers.base import FinishReason
from dsched.drivers.sglang.protocol import (
    MIN_LOGPROB,
    SglangReader,
    encode_abort,
    encode_request,
    request_id_of,
    translate_format,
    translate_refusal,
)
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import DriverError, EngineRefusedError

ANSWER = [11, 12, 13, 14]


def command(**sampling: object) -> GenerateCommand:
    return GenerateCommand(
        attempt_id="ds-1",
        epoch=1,
        dp_rank=0,
        prompt_token_ids=(5, 6),
        sampling=SamplingParams(**({"max_tokens": 4} | sampling)),
    )


def body(**sampling: object) -> dict:
    return json.loads(encode_request(command(**sampling), dp_rank=None))


def event(
    output_ids: list[int], num_total: int, finish: dict | None = None, **meta: object
) -> bytes:
    info = {"completion_tokens": num_total, "cached_tokens": 3, "finish_reason": finish}
    return msgspec.json.encode(
        {"text": "", "output_ids": output_ids, "meta_info": {"id": "ds-1$", **info, **meta}}
    )


def read(*events: bytes, cut_at: frozenset[int] = frozenset()) -> SglangReader:
    reader = SglangReader(has_logprobs=False, cut_at=cut_at)
    reader.feed(list(events))
    return reader


# -- requests


def test_request_without_wishes_is_short() -> None:
    """What is not asked for is left to the server."""
    assert body() == {
        "rid": "ds-1$",
        "input_ids": [5, 6],
        "sampling_params": {"max_new_tokens": 4},
        "stream": True,
    }


def test_every_wish_has_a_word() -> None:
    """No sampling parameter is lost on the way."""
    wishes = {
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 9,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"4": 1.5},
        "stop_token_ids": (8, 9),
        "ignore_eos": True,
        "logprobs": 2,
        "structured_output": {"type": "json_object"},
    }
    assert set(wishes) | {"max_tokens"} == set(SamplingParams.__struct_fields__)

    sent = body(**wishes)

    assert sent["sampling_params"] == {
        "max_new_tokens": 4,
        "min_new_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "sampling_seed": 9,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"4": 1.5},
        "stop_token_ids": [8, 9],
        "ignore_eos": True,
        "json_schema": '{"type": "object"}',
    }
    assert sent["return_logprob"] is True
    assert sent["top_logprobs_num"] == 2


@pytest.mark.parametrize(("top_k", "sent"), [(0, -1), (-1, -1), (5, 5)])
def test_no_limit_of_candidates_is_minus_one(top_k: int, sent: int) -> None:
    """SGLang refuses a `top_k` of 0, by which others mean all tokens."""
    assert body(top_k=top_k)["sampling_params"]["top_k"] == sent


def test_logprob_of_the_chosen_token_alone() -> None:
    sent = body(logprobs=0)

    assert sent["return_logprob"] is True
    assert "top_logprobs_num" not in sent


def test_rank_is_named_if_asked_for() -> None:
    """Also rank 0: without a name SGLang's own balancer would choose."""
    assert json.loads(encode_request(command(), dp_rank=0))["routed_dp_rank"] == 0
    assert "routed_dp_rank" not in body()


def test_schema_travels_as_text() -> None:
    """SGLang takes a JSON schema as a string of JSON."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    assert json.loads(str(translate_format(named))) == schema
    assert translate_format({"type": "text"}) is None
    assert translate_format(None) is None


@pytest.mark.parametrize(
    "response_format",
    [{"type": "grammar"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}],
)
def test_format_without_a_word_is_refused(response_format: dict) -> None:
    with pytest.raises(EngineRefusedError, match="response_format"):
        translate_format(response_format)


@given(st.text("ab-", min_size=1), st.text("ab-", min_size=1))
def test_no_request_id_begins_another(first: str, second: str) -> None:
    """SGLang would abort both."""
    if first != second:
        assert not request_id_of(first).startswith(request_id_of(second))


@pytest.mark.parametrize("attempt_id", ["", "a$b", "a$"])
def test_attempt_id_with_the_end_sign_is_refused(attempt_id: str) -> None:
    with pytest.raises(ValueError, match=r"without '\$'"):
        request_id_of(attempt_id)


def test_abort_names_one_request() -> None:
    assert json.loads(encode_abort("ds-1")) == {"rid": "ds-1$"}


# -- answers


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=8),
    is_incremental=st.booleans(),
    is_stop=st.booleans(),
)
def test_each_token_comes_once(sizes: list[int], *, is_incremental: bool, is_stop: bool) -> None:
    """Whether the server repeats what it sent before or not, and however it groups tokens."""
    tokens = list(range(100, 100 + sum(sizes)))
    finish = {"type": "stop", "matched": tokens[-1]} if is_stop else {"type": "length"}
    reader = SglangReader(has_logprobs=False)
    got = []
    num_sent = 0
    for size in sizes:
        num_total = num_sent + size
        sent = tokens[num_sent if is_incremental else 0 : num_total]
        reader.feed([event(sent, num_total, finish if num_total == len(tokens) else None)])
        got += reader.token_ids
        reader.clear()
        num_sent = num_total
    reader.feed([b"[DONE]"])

    assert got == (tokens[:-1] if is_stop else tokens)
    assert reader.is_done
    assert reader.end is not None
    assert reader.end.stop_token_id == (tokens[-1] if is_stop else None)
    assert reader.end.reason is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
    assert reader.num_cached_tokens == 3


def test_events_of_one_read_come_together() -> None:
    reader = read(event([11], 1), event([12], 2), event([13, 14], 4, {"type": "length"}))

    assert reader.token_ids == ANSWER


def test_last_event_may_be_without_tokens() -> None:
    """The end can be told after the last token was sent."""
    reader = read(event([11, 12], 2), event([], 2, {"type": "length"}))

    assert reader.token_ids == [11, 12]
    assert reader.end is not None


def test_stop_that_is_no_token_keeps_the_answer() -> None:
    """Without a matched token nothing is taken off."""
    reader = read(event([11, 12], 2, {"type": "stop", "matched": None}))

    assert reader.token_ids == [11, 12]
    assert reader.end is not None
    assert reader.end.stop_token_id is None


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((event([11], 1), event([13], 3)), "sent 1 tokens after 1, but counts 3"),
        ((event([11, 12], 2), event([11], 1)), "sent 1 tokens after 2, but counts 1"),
        ((event([11, 12], 1),), "sent 2 tokens after 0, but counts 1"),
        ((event([11], 1, {"type": "length"}), event([12], 2)), "after the end"),
    ],
)
def test_lost_or_repeated_tokens_are_a_fault(events: tuple[bytes, ...], message: str) -> None:
    """The engine's own count tells; a wrong answer is worse than none."""
    with pytest.raises(DriverError, match=message):
        read(*events)


def test_logits_that_are_no_numbers_are_a_fault() -> None:
    """SGLang ends such an answer as if it had met a stop string."""
    with pytest.raises(DriverError, match="NaN happened"):
        read(event([11], 1, {"type": "stop", "matched": "NaN happened"}))


@pytest.mark.parametrize("is_incremental", [True, False])
def test_stop_tokens_count_even_if_the_end_of_sequence_does_not(*, is_incremental: bool) -> None:
    """SGLang's `ignore_eos` ignores them too; the answer is cut here and the engine stopped."""
    second = [13, 14] if is_incremental else ANSWER
    reader = read(event([11, 12], 2), event(second, 4), cut_at=frozenset({13}))

    assert reader.token_ids == [11, 12]
    assert reader.end is not None
    assert reader.end.reason is FinishReason.STOP
    assert reader.end.stop_token_id == 13
    assert reader.is_cut
    assert reader.is_done


def test_nothing_follows_a_cut() -> None:
    """What the engine says until it has heard of it is not read."""
    reader = read(event([11], 1), event([12], 2), event([13], 3), cut_at=frozenset({12}))

    assert reader.token_ids == [11]


def test_rank_is_what_the_engine_says() -> None:
    assert read(event([11], 1)).dp_rank is None
    assert read(event([11], 1, dp_rank=1)).dp_rank == 1


@pytest.mark.parametrize("is_incremental", [True, False])
def test_logprobs_are_sliced_like_tokens(*, is_incremental: bool) -> None:
    """Best alternatives first, ties by token id; minus infinity has a number."""
    pairs = [[-0.5, 11, None], [None, 12, "b"]]
    tops = [[[-2.0, 4, None], [-0.5, 11, None], [-2.0, 3, None]], None]
    reader = SglangReader(has_logprobs=True)
    reader.feed([event([11], 1, output_token_logprobs=pairs[:1], output_top_logprobs=tops[:1])])
    first = 1 if is_incremental else 0
    reader.feed(
        [
            event(
                [11, 12][first:],
                2,
                output_token_logprobs=pairs[first:],
                output_top_logprobs=tops[first:],
            )
        ]
    )

    assert [each.token_id for each in reader.logprobs] == reader.token_ids == [11, 12]
    assert [each.logprob for each in reader.logprobs] == [-0.5, MIN_LOGPROB]
    assert reader.logprobs[0].top == ((11, -0.5), (3, -2.0), (4, -2.0))
    assert reader.logprobs[1].top == ()


def test_stop_token_takes_its_logprob_along() -> None:
    reader = SglangReader(has_logprobs=True)
    pairs = [[-0.1, 11, None], [-0.2, 12, None]]
    reader.feed([event([11, 12], 2, {"type": "stop", "matched": 12}, output_token_logprobs=pairs)])

    assert reader.token_ids == [11]
    assert [each.token_id for each in reader.logprobs] == [11]


@pytest.mark.parametrize("pairs", [None, [], [[-0.1, 12, None]], [[-0.1, 11, None]] * 2])
def test_logprobs_that_do_not_fit_are_a_fault(pairs: list | None) -> None:
    reader = SglangReader(has_logprobs=True)
    is_repeat = pairs is not None and len(pairs) == 2

    def feed() -> None:
        reader.feed([event([11], 1, output_token_logprobs=pairs)])

    if is_repeat:
        feed()  # the last entries belong to the new tokens
        assert [each.token_id for each in reader.logprobs] == [11]
    else:
        with pytest.raises(DriverError, match="logprobs"):
            feed()


# -- errors


@pytest.mark.parametrize(
    ("finish", "kind", "status"),
    [
        ({"type": "abort", "message": "full", "status_code": 503}, EngineRefusedError, 503),
        ({"type": "abort", "message": "too long", "status_code": 400}, EngineRefusedError, 400),
        ({"type": "abort", "message": "Aborted", "status_code": None}, DriverError, None),
        ({"type": "else"}, DriverError, None),
    ],
)
def test_answer_that_was_given_up_is_a_failure(
    finish: dict, kind: type[DriverError], status: int | None
) -> None:
    """Its tokens are not taken: SGLang repeats the last one there."""
    reader = SglangReader(has_logprobs=False)
    reader.feed([event([11], 1)])
    reader.clear()

    with pytest.raises(kind) as raised:
        reader.feed([event([11], 1, finish)])

    assert reader.token_ids == []
    assert getattr(raised.value, "status", None) == status


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b"{", DriverError, "not SGLang's"),
        (b'{"text": "a"}', DriverError, "no token ids"),
        (b'{"output_ids": ["a"], "meta_info": {}}', DriverError, "not SGLang's"),
        (b'{"error": {"message": "too long", "code": 400}}', EngineRefusedError, "too long"),
        (b'{"error": {"message": "", "code": null}}', DriverError, "without a message"),
        (b'{"error": "rid must be text"}', EngineRefusedError, "rid must be text"),
    ],
)
def test_event_that_is_an_error(data: bytes, kind: type[DriverError], message: str) -> None:
    with pytest.raises(kind, match=message):
        read(data)


@given(st.binary(max_size=80))
def test_no_bytes_break_the_reader(data: bytes) -> None:
    """Whatever an event holds, it is read or refused."""
    try:
        read(data)
    except DriverError:
        pass
    else:
        # Only what looks like an answer passes.
        assert data == b"[DONE]" or msgspec.json.decode(data)["meta_info"] is not None


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"object": "error", "message": "no rank 7", "code": 400}', "no rank 7"),
        (b'{"error": {"message": "gone"}}', "gone"),
        (b"", "HTTP status 500"),
        (b"[]", "HTTP status 500"),
    ],
)
def test_refusal_has_the_engines_words(raw: bytes, message: str) -> None:
    error = translate_refusal(500, raw)

    assert str(error) == message
    assert isinstance(error, EngineRefusedError)
    assert error.status == 500
