"""Long prompts, which are tokenised on threads, and what comes in between."""

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from dsched.frontdoor import FrontDoor, ServedModel
from dsched.frontdoor.api import INLINE_CHARS
from dsched.testing.fake_control import FakeControlPlane
from dsched.testing.raw_http import RawClient

LONG = json.dumps({"model": "tiny", "prompt": "a " * INLINE_CHARS, "max_tokens": 3}).encode()
ID = {"x-request-id": "mine"}


class Renderer:
    """Holds prompts that are tokenised until it lets them go."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.threads: list[threading.Thread] = []
        self.goes_on = threading.Event()
        self.error: Exception | None = None

    def encode_text(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        self.num_begun += 1
        assert self.goes_on.wait(30)
        if self.error is not None:
            raise self.error
        return [len(text) % 7] * 5

    async def begin(self, count: int) -> None:
        """Wait until so many were begun."""
        async with asyncio.timeout(30):
            while self.num_begun < count:
                await asyncio.sleep(0.001)


@pytest.fixture
def renderer(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Renderer]:
    renderer = Renderer()
    monkeypatch.setattr(served.renderer, "encode_text", renderer.encode_text)
    yield renderer
    renderer.goes_on.set()


async def test_two_requests_of_one_id_get_two_inside(
    port: int, control: FakeControlPlane, renderer: Renderer
) -> None:
    """Also where neither was submitted when the other came."""
    async with RawClient(port) as first, RawClient(port) as second:
        first.post("/v1/completions", LONG, ID)
        await renderer.begin(1)
        second.post("/v1/completions", LONG, ID)
        await renderer.begin(2)
        renderer.goes_on.set()
        answers = [await first.answer(), await second.answer()]

    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    assert control.num_submitted == 2


async def test_a_fault_of_ours_is_answered(port: int, door: FrontDoor, renderer: Renderer) -> None:
    """A client that is never answered would wait for ever."""
    renderer.error = RuntimeError("a fault")
    renderer.goes_on.set()
    with capture_logs() as lines:
        async with RawClient(port) as client:
            client.post("/v1/completions", LONG)
            answer = await client.answer()

    assert answer.status == 500
    assert answer.error()["code"] == "internal"
    assert door.num_open_requests == 0
    failed = [line for line in lines if line["event"] == "request.failed"]
    assert [line["exc_info"] for line in failed] == [renderer.error]


async def test_a_prompt_that_is_not_tokenised_at_the_stop_is_answered(
    port: int, door: FrontDoor, control: FakeControlPlane, renderer: Renderer
) -> None:
    """As one that runs; it is not submitted afterwards."""
    async with RawClient(port) as client:
        client.post("/v1/completions", LONG)
        await renderer.begin(1)
        stopping = asyncio.create_task(door.stop(grace_s=0))
        answer = await client.answer()
        renderer.goes_on.set()
        await stopping
    (thread,) = renderer.threads
    await asyncio.to_thread(thread.join, 30)
    await asyncio.sleep(0)

    assert answer.status == 503
    assert answer.error()["code"] == "stopping"
    assert control.num_submitted == 0
