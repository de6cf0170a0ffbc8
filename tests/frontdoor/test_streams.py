"""Streams: every token once and in order, whole characters, one end, and nobody computes for
clients that are gone."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dsched.controller.request import RequestError
from dsched.drivers.base import FinishReason
from dsched.frontdoor import FrontDoor, ServedModel
from dsched.testing.fake_control import FakeControlPlane, FakeRun
from dsched.testing.raw_http import RawClient, get, post

OpenDoor = Callable[..., Awaitable[FrontDoor]]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LOST = RequestError(status=502, code="engine_lost", message="the engine was lost")


def chat(**fields: object) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "one two"}]}
    return body | {"max_tokens": 6} | fields


def completion(**fields: object) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "one two", "max_tokens": 6} | fields


async def held_run(control: FakeControlPlane, request_id: str | None = None) -> FakeRun:
    """Wait for a request to reach the control plane."""
    async with asyncio.timeout(20):
        while True:
            for key, run in control.runs.items():
                if request_id is None or key == request_id:
                    return run
            await asyncio.sleep(0.001)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def texts(events: list[str]) -> list[str]:
    """Text pieces of a stream of either API."""
    pieces: list[str] = []
    for event in events:
        for choice in json.loads(event)["choices"] if event != "[DONE]" else []:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            pieces += [text] if text else []
    return pieces


@pytest.mark.parametrize("chunk_tokens", [1, 2, 3, 7, 100])
async def test_streamed_text_is_the_whole_text(
    port: int, control: FakeControlPlane, chunk_tokens: int
) -> None:
    """However the tokens arrive, the pieces join to the text of the request without a stream."""
    control.chunk_tokens = chunk_tokens
    whole = await post(port, COMPLETIONS, completion(max_tokens=200))
    streamed = await post(port, COMPLETIONS, completion(max_tokens=200, stream=True))

    pieces = texts(streamed.events())
    assert "".join(pieces) == whole.json()["choices"][0]["text"]
    assert [piece for piece in pieces if "\N{REPLACEMENT CHARACTER}" in piece] == []
    assert len(pieces) <= -(-200 // chunk_tokens)


async def test_split_character_waits_for_its_second_half(
    port: int, control: FakeControlPlane, served: ServedModel
) -> None:
    """Half of a character is never sent; at the very end it is dropped."""
    ids = served.tokenizer.encode("\N{GRINNING FACE}", add_special_tokens=False).ids
    assert len(ids) > 1
    control.is_holding = True
    async with RawClient(port) as client:
        client.post(COMPLETIONS, json.dumps(completion(stream=True, max_tokens=9)).encode())
        run = await held_run(control)
        run.answer = ids + ids[:1]
        for _ in range(len(ids) + 1):
            run.send()
        run.finish()
        answer = await client.answer()

    assert texts(answer.events()) == ["\N{GRINNING FACE}"]
    assert answer.events()[-1] == "[DONE]"


async def test_tokens_of_one_chunk_are_one_event(port: int, control: FakeControlPlane) -> None:
    control.chunk_tokens = 6
    answer = await post(port, COMPLETIONS, completion(stream=True))

    assert len(texts(answer.events())) == 1


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        (None, False),
        ({"include_usage": None}, False),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_comes_when_asked_for(
    port: int, path: str, options: object, has_usage: object
) -> None:
    """One chunk with usage and no choice, after the finish and before the end; else none."""
    body = chat if path == CHAT else completion
    plain = (await post(port, path, body())).json()["usage"]
    answer = await post(port, path, body(stream=True, stream_options=options))

    *events, done = answer.events()
    chunks = [json.loads(event) for event in events]
    usages = [chunk.get("usage") for chunk in chunks]
    assert done == "[DONE]"
    if has_usage:
        assert chunks[-1]["choices"] == []
        assert usages == [None] * (len(chunks) - 1) + [plain]
        assert plain["completion_tokens"] == 6
        assert plain["total_tokens"] == plain["prompt_tokens"] + 6
        chunks.pop()
    else:
        assert usages == [None] * len(chunks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 50])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_stop_string_cuts_the_text_and_cancels(
    port: int, control: FakeControlPlane, served: ServedModel, chunk_tokens: int, is_stream: object
) -> None:
    """The text ends before the stop string, which may lie across tokens and chunks."""
    control.chunk_tokens = chunk_tokens
    whole = (await post(port, COMPLETIONS, completion(max_tokens=50))).json()
    text = whole["choices"][0]["text"]
    middle = len(text) // 2
    stop = text[middle : middle + 9]
    place = text.index(stop)

    body = completion(max_tokens=50, stop=["\x01", stop], stream=is_stream)
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    answer = await post(port, COMPLETIONS, body)

    if is_stream:
        events = answer.events()
        assert "".join(texts(events)) == text[:place]
        assert json.loads(events[-3])["choices"][0]["finish_reason"] == "stop"
        usage = json.loads(events[-2])["usage"]
    else:
        choice = answer.json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[:place], "stop")
        usage = answer.json()["usage"]
    request = control.last_request
    assert request is not None
    ids = control.answer(request.prompt_token_ids, 50)
    needed = next(count for count in range(51) if stop in served.tokenizer.decode(ids[:count]))
    assert usage["completion_tokens"] == needed
    assert control.cancelled == [request.request_id] or needed == 50


async def test_min_tokens_come_before_a_stop_string_counts(port: int) -> None:
    whole = (await post(port, COMPLETIONS, completion(max_tokens=20))).json()
    first_word = whole["choices"][0]["text"].split()[0]
    body = completion(max_tokens=20, stop=[first_word], min_tokens=20)

    answer = (await post(port, COMPLETIONS, body)).json()

    assert answer["choices"] == whole["choices"]


async def test_finish_by_the_model_flushes_what_a_stop_string_held_back(
    port: int, control: FakeControlPlane
) -> None:
    """Text that looked like the beginning of a stop string comes at the end."""
    control.is_holding = True
    async with RawClient(port) as client:
        whole = None
        client.post(COMPLETIONS, json.dumps(completion()).encode())
        run = await held_run(control)
        run.send(6)
        run.finish()
        whole = (await client.answer()).json()["choices"][0]["text"]
        control.runs.clear()
        stop = whole[-3:] + "\x01"
        client.post(COMPLETIONS, json.dumps(completion(stop=stop, stream=True)).encode())
        run = await held_run(control)
        run.send(6)
        run.finish(FinishReason.STOP)
        answer = await client.answer()

    assert "".join(texts(answer.events())) == whole
    assert '"finish_reason":"stop"' in answer.events()[-2]


@pytest.mark.parametrize("num_sent", [0, 1, 3])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_failure_is_told_and_never_looks_like_an_end(
    port: int, control: FakeControlPlane, path: str, is_stream: object, num_sent: int
) -> None:
    """Before the first byte an HTTP error; later one error event, no [DONE], no finish reason."""
    control.is_holding = True
    body = (chat if path == CHAT else completion)(stream=is_stream)
    async with RawClient(port) as client:
        client.post(path, json.dumps(body).encode())
        run = await held_run(control)
        for _ in range(num_sent):
            run.send()
        run.fail(LOST)
        answer = await client.answer()
        if is_stream and num_sent:
            *events, last = answer.events()
            assert json.loads(last)["error"]["code"] == "engine_lost"
            assert len(texts(events)) >= 1
            assert "[DONE]" not in answer.body.decode()
            assert not any(json.loads(e)["choices"][0]["finish_reason"] for e in events)
            assert await client.closed() == b""
        else:
            assert (answer.status, answer.error()["code"]) == (502, "engine_lost")


async def test_nothing_after_the_end_reaches_the_client(
    port: int, control: FakeControlPlane
) -> None:
    """Late calls of the stream are dropped: one end, and the connection serves on."""
    control.is_holding = True
    async with RawClient(port) as client:
        client.post(COMPLETIONS, json.dumps(completion(stream=True)).encode())
        run = await held_run(control)
        run.send(6)
        run.finish()
        run.stream.on_tokens(6, [300], None)
        run.stream.on_error(LOST)
        run.is_over = False
        run.finish()
        answer = await client.answer()
        client.send(b"GET /live HTTP/1.1\r\nhost: t\r\n\r\n")
        assert (await client.answer()).status == 200

    assert answer.events().count("[DONE]") == 1
    assert "error" not in answer.body.decode()


@pytest.mark.parametrize(
    ("body", "num_sent"),
    [
        (completion(max_tokens=900), 0),
        (completion(max_tokens=900), 3),
        (completion(max_tokens=900, stream=True), 0),
        (completion(max_tokens=900, stream=True), 3),
        (chat(max_tokens=900, stream=True), 3),
        (completion(prompt="x" * 900, max_tokens=90), 0),
    ],
    ids=["whole", "whole later", "stream", "stream later", "chat", "prefill"],
)
async def test_client_that_goes_away_is_cancelled(
    port: int, door: FrontDoor, control: FakeControlPlane, body: dict[str, Any], num_sent: int
) -> None:
    """At once, streamed or not, also before the first token."""
    control.is_holding = True
    path = CHAT if "messages" in body else COMPLETIONS
    async with RawClient(port) as client:
        client.post(path, json.dumps(body).encode())
        run = await held_run(control)
        for _ in range(num_sent):
            run.send()
    await until(lambda: control.cancelled)

    assert control.cancelled == [run.request.request_id]
    assert door.num_open_requests == 0
    run.is_over = False
    run.send()
    run.finish()
    (outcome,) = door.stats.of("tiny").num_requests
    assert outcome[1] == "disconnected"


async def test_client_that_goes_away_while_its_long_prompt_is_rendered(
    open_door: OpenDoor, control: FakeControlPlane
) -> None:
    """Nothing is submitted for it, and the count of open requests goes back."""
    control.add_model("tiny", max_model_len=1 << 22)
    door = await open_door()
    async with RawClient(door.bound_port) as client:
        client.post(COMPLETIONS, json.dumps(completion(prompt="x" * 100_000)).encode())
        await until(lambda: door.num_open_requests == 1 or control.num_submitted)
    await until(lambda: door.num_open_requests == 0)

    assert control.num_submitted == len(control.cancelled)


async def test_one_of_many_goes_away(port: int, door: FrontDoor, control: FakeControlPlane) -> None:
    """49 of 50 clients close; the fiftieth gets its whole answer."""
    control.is_holding = True
    clients = [RawClient(port) for _ in range(50)]
    for index, client in enumerate(clients):
        await client.__aenter__()
        client.post(
            COMPLETIONS, json.dumps(completion()).encode(), {"x-request-id": f"req-{index}"}
        )
    await until(lambda: len(control.runs) == 50)
    for client in clients[1:]:
        client.writer.close()
    await until(lambda: len(control.cancelled) == 49)
    (run,) = control.runs.values()
    run.send(6)
    run.finish()
    answer = await clients[0].answer()
    clients[0].writer.close()

    assert run.request.request_id == "req-0"
    assert answer.json()["usage"]["completion_tokens"] == 6
    assert door.num_open_requests == 0


async def test_ids_that_begin_alike_are_different_requests(
    port: int, control: FakeControlPlane
) -> None:
    control.is_holding = True
    async with RawClient(port) as first, RawClient(port) as second:
        first.post(COMPLETIONS, json.dumps(completion()).encode(), {"x-request-id": "req-1"})
        second.post(COMPLETIONS, json.dumps(completion()).encode(), {"x-request-id": "req-11"})
        await until(lambda: len(control.runs) == 2)
        first.writer.close()
        await until(lambda: control.cancelled)
        assert control.cancelled == ["req-1"]
        run = await held_run(control, "req-11")
        run.send(6)
        run.finish()
        assert (await second.answer()).status == 200


async def test_same_id_twice_at_once_is_two_requests(port: int, control: FakeControlPlane) -> None:
    """A client's id need not be unique: both are served, both hear their id."""
    control.is_holding = True
    async with RawClient(port) as first, RawClient(port) as second:
        for client in (first, second):
            client.post(COMPLETIONS, json.dumps(completion()).encode(), {"x-request-id": "twin"})
        await until(lambda: len(control.runs) == 2)
        for run in list(control.runs.values()):
            run.send(6)
            run.finish()
        for client in (first, second):
            assert (await client.answer()).headers["x-request-id"] == "twin"


async def test_stop_lets_answers_end(open_door: OpenDoor, control: FakeControlPlane) -> None:
    """A stopping front door refuses what is new and completes what runs."""
    door = await open_door()
    control.is_holding = True
    async with RawClient(door.bound_port) as client, RawClient(door.bound_port) as idle:
        client.post(COMPLETIONS, json.dumps(completion(stream=True)).encode())
        run = await held_run(control)
        run.send(3)
        stopping = asyncio.create_task(door.stop(grace_s=5))
        assert await idle.closed() == b""
        assert door.not_ready_reason() == "the server is stopping"
        run.send(3)
        run.finish()
        assert (await client.answer()).events()[-1] == "[DONE]"
        await stopping


async def test_stop_ends_what_does_not_end_in_time(
    open_door: OpenDoor, control: FakeControlPlane
) -> None:
    """After the grace the client gets an error event and the engine is told."""
    door = await open_door()
    control.is_holding = True
    async with RawClient(door.bound_port) as client:
        client.post(COMPLETIONS, json.dumps(completion(stream=True)).encode())
        run = await held_run(control)
        run.send(3)
        stopping = asyncio.create_task(door.stop(grace_s=0.05))
        answer = await client.answer()
        await stopping

    assert json.loads(answer.events()[-1])["error"]["code"] == "stopping"
    assert "[DONE]" not in answer.body.decode()
    assert control.cancelled == [run.request.request_id]
    with pytest.raises(ConnectionError):
        await get(door.bound_port if door.num_connections else 1, "/live")


@pytest.mark.parametrize("stream", [True, False])
async def test_time_to_the_first_token_is_counted_when_it_is_there(
    port: int, door: FrontDoor, control: FakeControlPlane, *, stream: bool
) -> None:
    """Long before the end, and once, whatever pauses come later, as after a lost engine."""
    control.is_holding = True
    stats = door.stats.of("tiny")
    async with RawClient(port) as client:
        client.post(COMPLETIONS, json.dumps(completion(stream=stream)).encode())
        run = await held_run(control)
        before = sum(stats.ttft.counts)
        run.send()
        first = sum(stats.ttft.counts)
        run.send(2)
        run.send(3)
        run.finish()
        await client.answer()

    assert (before, first) == (0, 1)
    assert (sum(stats.ttft.counts), sum(stats.itl.counts), stats.num_open) == (1, 5, 0)


async def test_request_without_a_token_has_no_time_to_the_first(
    port: int, door: FrontDoor, control: FakeControlPlane
) -> None:
    control.is_holding = True
    async with RawClient(port) as client:
        client.post(COMPLETIONS, json.dumps(completion(stream=True)).encode())
        (await held_run(control)).fail(LOST)
        await client.answer()

    stats = door.stats.of("tiny")
    assert (sum(stats.ttft.counts), sum(stats.duration.counts)) == (0, 1)


async def test_counts_of_ended_requests(
    port: int, door: FrontDoor, control: FakeControlPlane
) -> None:
    for stream in (False, True):
        await post(port, COMPLETIONS, completion(stream=stream))

    stats = door.stats.of("tiny")
    assert list(stats.num_requests.values()) == [2]
    assert (stats.num_output_tokens, stats.num_open) == (12, 0)
    assert (sum(stats.ttft.counts), sum(stats.itl.counts), sum(stats.duration.counts)) == (2, 10, 2)
