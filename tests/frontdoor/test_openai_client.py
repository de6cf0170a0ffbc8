"""The official client, which reads strictly, against a front door on a real port."""

from collections.abc import AsyncIterator
from itertools import chain

import openai
import pytest

from dsched.frontdoor import ServedModel
from dsched.testing.fake_control import FakeControlPlane

MESSAGES = [{"role": "user", "content": "one two"}]


@pytest.fixture
async def client(port: int) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def expected_text(control: FakeControlPlane, served: ServedModel, count: int) -> str:
    """Text of the answer to the last request; characters that are not whole at its end left out."""
    request = control.last_request
    assert request is not None
    ids = control.answer(request.prompt_token_ids, count)
    return served.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")


async def test_completion(
    client: openai.AsyncOpenAI, control: FakeControlPlane, served: ServedModel
) -> None:
    answer = await client.completions.create(model="tiny", prompt="hello", max_tokens=12)

    assert answer.choices[0].text == expected_text(control, served, 12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


async def test_completion_stream(
    client: openai.AsyncOpenAI, control: FakeControlPlane, served: ServedModel
) -> None:
    stream = await client.completions.create(
        model="tiny", prompt="hello", max_tokens=12, stream=True
    )
    chunks = [chunk async for chunk in stream]

    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text == expected_text(control, served, 12)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["length"]


async def test_chat(
    client: openai.AsyncOpenAI, control: FakeControlPlane, served: ServedModel
) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9)

    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected_text(control, served, 9))
    assert answer.id.startswith("chatcmpl-")


async def test_chat_stream_with_usage(
    client: openai.AsyncOpenAI, control: FakeControlPlane, served: ServedModel
) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected_text(control, served, 9)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=5, logprobs=True, top_logprobs=2
    )

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    assert [entry.logprob for entry in logprobs.content] == [-0.5] * 5
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert all(entry.bytes for entry in logprobs.content)


async def test_completion_logprobs_are_the_same_streamed_and_not(
    client: openai.AsyncOpenAI,
) -> None:
    arguments = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "logprobs": 3}
    whole = await client.completions.create(**arguments)
    stream = await client.completions.create(**arguments, stream=True)
    parts = [chunk.choices[0] async for chunk in stream]

    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 8
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(part.logprobs, name) for part in parts if part.logprobs]
        assert list(chain.from_iterable(pieces)) == getattr(logprobs, name)


async def test_models(client: openai.AsyncOpenAI) -> None:
    models = await client.models.list()

    assert [model.id for model in models.data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_errors_have_the_types_of_the_client(
    client: openai.AsyncOpenAI, control: FakeControlPlane
) -> None:
    """Each class of refusal reaches the client as its own exception."""
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="tiny", prompt="a", stop=[""])
    assert bad.value.param == "stop"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    control.set_available("tiny", is_available=False)
    with pytest.raises(openai.InternalServerError) as down:
        await client.completions.create(model="tiny", prompt="a")
    assert down.value.status_code == 503
    assert down.value.response.headers["retry-after"] == "1"
