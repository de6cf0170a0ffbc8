"""What a client may send wrong: each gets one well-formed refusal, and the next request works."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dsched.config import FrontDoorConfig
from dsched.drivers.base import EngineCapabilities
from dsched.frontdoor import FrontDoor
from dsched.testing.fake_control import FakeControlPlane
from dsched.testing.raw_http import RawClient, get, post

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "one two"}]


def chat(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 4} | fields


def completion(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "one two", "max_tokens": 4} | fields


async def check_works(port: int) -> None:
    answer = await post(port, COMPLETIONS, completion())
    assert (answer.status, answer.json()["usage"]["completion_tokens"]) == (200, 4)
    assert (await get(port, "/ready")).status == 200


REFUSED_EVERYWHERE = [
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["zz", ""]}, "stop"),
    ({"stop": [7]}, "stop"),
    ({"stop": list("abcde")}, "stop"),
    ({"stop": "x" * 2_000}, "stop"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 2}, "n"),
    ({"n": 10_000_000}, "n"),
    ({"n": True}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"seed": 18_446_744_073_709_551_616}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"top_k": 0}, "top_k"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"user": 7}, "user"),
    ({"priority": "high"}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED_EVERYWHERE, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_wrong_field_is_named(
    port: int, control: FakeControlPlane, fields: dict[str, Any], param: str, is_stream: object
) -> None:
    """A wrong value is refused with its name, the same with and without a stream; no engine
    hears of it."""
    if is_stream and "stream" not in fields and "stream_options" not in fields:
        fields = fields | {"stream": True}
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
        answer = await post(port, path, body)
        assert (answer.status, answer.error()["param"]) == (400, param)
        assert answer.error()["type"] == "invalid_request_error"
    assert control.num_submitted == 0


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[]]}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
        (COMPLETIONS, {"prompt": [True]}, "prompt"),
        (COMPLETIONS, {"prompt": [-1]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**6]}, "prompt"),
        (COMPLETIONS, {"prompt": [10**30]}, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"prompt": [7] * 1_024}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 5_000}, "prompt"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"suffix": "b"}, "suffix"),
        (COMPLETIONS, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages"),
        (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5_000}]}, "messages"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"logprobs": 3}, "logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_wrong_field_of_one_api_is_named(
    port: int, control: FakeControlPlane, path: str, fields: dict[str, Any], param: str
) -> None:
    body = (chat if path == CHAT else completion)(**fields)
    answer = await post(port, path, body)

    assert (answer.status, answer.error()["param"]) == (400, param)
    assert control.num_submitted == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"{}",
        b'{"model":"tiny"}',
        b'{"model":"tiny","prompt":"a"} x',
        b"\xef\xbb\xbf{}",
        b"\x00\x01\x02",
        b'{"model":"tiny","prompt":"a\xff","messages":[{"role":"user","content":"a\xff"}]}',
        b'{"model":"tiny","messages":' + b"[" * 200_000,
        b'{"model":"tiny","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":"tiny","x":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_000 + b"}",
        b'{"model":"tiny","prompt":"a","max_tokens":' + b"9" * 5_000 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_body_that_is_not_a_request_is_refused(port: int, path: str, body: bytes) -> None:
    answer = await post(port, path, body)

    assert answer.status == 400
    assert answer.error()["message"]
    await check_works(port)


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (r'{"model":"tiny","messages":[{"role":"user","content":"a\ud83cb"}]}', "messages"),
        (r'{"model":"tiny","messages":[{"role":"user","content":"a","\udfff":1}]}', "messages"),
        (r'{"model":"tiny","messages":[{"role":"user","content":"a"}],"stop":["\ud800"]}', "stop"),
        (r'{"model":"x\udc8d","messages":[{"role":"user","content":"a"}]}', "model"),
        (r'{"model":"tiny","messages":[],"temperature":NaN}', "temperature"),
        (r'{"model":"tiny","messages":[],"temperature":Infinity}', "temperature"),
        (r'{"model":"tiny","messages":[],"temperature":1e999}', "temperature"),
        (r'{"model":"tiny","messages":[],"top_p":-Infinity}', "top_p"),
    ],
)
async def test_half_character_and_no_number_are_named(port: int, raw: str, param: str) -> None:
    """Half of a surrogate pair, and numbers that JSON does not have, are told with their place."""
    answer = await post(port, CHAT, raw.encode())

    assert (answer.status, answer.error()["param"]) == (400, param)
    await check_works(port)


async def test_whole_surrogate_pair_is_text(port: int) -> None:
    raw = r'{"model":"tiny","messages":[{"role":"user","content":"a\ud83c\udf0db"}],"max_tokens":4}'
    assert (await post(port, CHAT, raw.encode())).status == 200


async def test_last_of_a_repeated_key_counts(port: int) -> None:
    raw = b'{"model":"tiny","prompt":"a","max_tokens":9,"max_tokens":2}'
    assert (await post(port, COMPLETIONS, raw)).json()["usage"]["completion_tokens"] == 2


async def test_unknown_model_is_not_found(port: int) -> None:
    """404 with OpenAI's code, also for names that are hard to write."""
    for name in ("other", "", "é\x00\n", "x" * 10_000, "../tiny", "tiny "):
        answer = await post(port, CHAT, chat(model=name))
        assert (answer.status, answer.error()["code"]) == (404, "model_not_found")
        assert answer.error()["param"] == "model"
        assert len(answer.body) < 1_000


async def test_known_model_without_engines_is_unavailable(
    port: int, control: FakeControlPlane
) -> None:
    """Engines that are down are not a missing model: 503, listed, and served again by itself."""
    control.set_available("tiny", is_available=False)
    control.reason = "no engine of the model 'tiny' is up"

    answer = await post(port, CHAT, chat())
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    ready = await get(port, "/ready")
    assert (ready.status, ready.json()["reason"]) == (503, control.reason)
    assert (await get(port, "/live")).status == 200
    assert (await get(port, "/health")).json()["unavailable_models"] == ["tiny"]
    listed = (await get(port, "/v1/models")).json()["data"]
    assert [(model["id"], model["is_available"]) for model in listed] == [("tiny", False)]
    assert (await post(port, CHAT, chat(model="other"))).status == 404

    control.set_available("tiny", is_available=True)
    control.reason = None
    await check_works(port)


async def test_null_means_absent(port: int) -> None:
    """A request with every optional field null is the request without them."""
    optional = [
        "temperature", "top_p", "n", "stop", "seed", "logprobs", "presence_penalty",
        "frequency_penalty", "logit_bias", "user", "response_format", "stream", "stream_options",
        "top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids",
        "priority", "return_token_ids",
    ]  # fmt: skip
    chat_only = ["top_logprobs", "tools", "tool_choice", "functions", "max_completion_tokens"]
    completion_only = ["echo", "suffix", "best_of"]
    for path, plain, names in (
        (CHAT, chat(), optional + chat_only),
        (COMPLETIONS, completion(), optional + completion_only),
    ):
        bare = (await post(port, path, plain)).json()
        nulls = (await post(port, path, plain | dict.fromkeys(names))).json()
        assert nulls["choices"] == bare["choices"]
        assert nulls["usage"] == bare["usage"]


async def test_stop_that_stops_nothing_changes_nothing(port: int) -> None:
    """No stop, null, an empty list and a string that does not occur give one answer."""
    bare = (await post(port, COMPLETIONS, completion(max_tokens=16))).json()
    for stop in (None, [], ["\x01"], ["x\x01"] * 5):
        answer = (await post(port, COMPLETIONS, completion(max_tokens=16, stop=stop))).json()
        assert (answer["choices"], answer["usage"]) == (bare["choices"], bare["usage"])


async def test_max_tokens_is_a_cap(port: int, control: FakeControlPlane) -> None:
    """What the context does not leave is cut; a prompt that leaves nothing is refused."""
    prompt = [7] * 1_000
    for asked, given in ((1, 1), (24, 24), (25, 24), (2**63, 24), (10**300, 24)):
        for stream in (False, True):
            body = completion(prompt=prompt, max_tokens=asked, stream=stream)
            answer = await post(port, COMPLETIONS, body)
            assert answer.status == 200
            assert control.last_request is not None
            assert control.last_request.sampling.max_tokens == given

    full = await post(port, COMPLETIONS, completion(prompt=[7] * 1_024, max_tokens=3))
    assert full.error()["code"] == "context_length_exceeded"
    for number in ("1024", "3"):
        assert number in full.error()["message"]


async def test_defaults_of_max_tokens(port: int, control: FakeControlPlane) -> None:
    """A chat may use the context, a completion gets OpenAI's 16; of two caps the smaller counts."""
    await post(port, CHAT, {"model": "tiny", "messages": MESSAGES})
    request = control.last_request
    assert request is not None
    assert request.sampling.max_tokens == 1_024 - len(request.prompt_token_ids)
    await post(port, COMPLETIONS, {"model": "tiny", "prompt": "a"})
    assert control.last_request is not None
    assert control.last_request.sampling.max_tokens == 16
    for caps in ((3, 5), (5, 3)):
        body = chat(max_tokens=caps[0], max_completion_tokens=caps[1])
        answer = await post(port, CHAT, body)
        assert answer.json()["usage"]["completion_tokens"] == 3


async def test_sampling_reaches_the_engine(port: int, control: FakeControlPlane) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "seed": -7, "presence_penalty": 1.5,
        "frequency_penalty": -1.5, "logit_bias": {"7": -100}, "top_k": 5, "min_p": 0.1,
        "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2, "stop_token_ids": [9],
    }  # fmt: skip
    headers = {"X-data-parallel-rank": "3", "X-Request-Id": "abc"}
    answer = await post(port, COMPLETIONS, completion(priority=4, **fields), headers)

    assert answer.headers["x-request-id"] == "abc"
    request = control.last_request
    assert request is not None
    assert (request.request_id, request.pinned_dp_rank, request.priority) == ("abc", 3, 4)
    sent = {name: getattr(request.sampling, name) for name in fields}
    assert sent == fields | {"stop_token_ids": (9,)}


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "", "99999", "1 2"])
async def test_rank_that_is_no_number_is_refused(port: int, value: str) -> None:
    answer = await post(port, COMPLETIONS, completion(), {"X-data-parallel-rank": value})

    assert (answer.status, answer.error()["param"]) == (400, "X-data-parallel-rank")


@pytest.mark.parametrize("value", ["", "a b", "x" * 129, "é", "a\tb", "<x>"])
async def test_request_id_that_cannot_be_kept_is_replaced(port: int, value: str) -> None:
    answer = await post(port, COMPLETIONS, completion(), {"X-Request-Id": value})

    assert answer.status == 200
    assert answer.headers["x-request-id"] != value
    assert len(answer.headers["x-request-id"]) == 16


async def test_capability_that_is_missing_is_refused_or_left_out(
    port: int, control: FakeControlPlane
) -> None:
    """Log-probabilities and formats are refused; a seed is best effort and left out."""
    control.add_model("tiny", capabilities=EngineCapabilities())
    for fields, param in (
        ({"logprobs": 1}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ):
        answer = await post(port, COMPLETIONS, completion(**fields))
        assert (answer.status, answer.error()["param"]) == (400, param)
    seeded = await post(port, COMPLETIONS, completion(seed=5, response_format={"type": "text"}))
    assert seeded.status == 200
    assert control.last_request is not None
    assert control.last_request.sampling.seed is None


async def test_body_above_the_limit_is_refused(port: int) -> None:
    """Ten megabytes get 413, with a length and in chunks; the connection ends cleanly."""
    body = json.dumps(completion(prompt="x" * (10 << 20))).encode()
    answer = await post(port, COMPLETIONS, body)
    assert answer.status == 413
    assert answer.headers["connection"] == "close"
    async with RawClient(port) as client:
        client.send(
            b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        for start in range(0, len(body), 1 << 20):
            piece = body[start : start + (1 << 20)]
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        assert (await client.answer()).status == 413
    await check_works(port)


async def test_too_many_open_requests_are_refused(
    control: FakeControlPlane, open_door: Callable[..., Awaitable[FrontDoor]]
) -> None:
    """Above the limit a client is told to come back; below it is served again."""
    door = await open_door(max_open_requests=1)
    control.is_holding = True
    async with RawClient(door.bound_port) as client:
        client.post(COMPLETIONS, json.dumps(completion()).encode())
        while control.num_submitted == 0:
            await get(door.bound_port, "/live")
        answer = await post(door.bound_port, COMPLETIONS, completion())
        assert (answer.status, answer.error()["code"]) == (429, "overloaded")
        assert answer.headers["retry-after"] == "1"
        (run,) = control.runs.values()
        run.send(4)
        run.finish()
        assert (await client.answer()).status == 200
    assert door.num_open_requests == 0
    assert door.stats.num_refused == {429: 1}
    assert FrontDoorConfig().max_open_requests > 1
