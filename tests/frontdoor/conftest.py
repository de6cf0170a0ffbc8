"""A front door on a real port, over a control plane without engines, on uvloop as in production."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import uvloop

from dsched.config import FrontDoorConfig
from dsched.frontdoor import FrontDoor, ServedModel
from dsched.frontdoor.renderer import TemplateRenderer
from dsched.sim.tokenizer import CHAT_TEMPLATE, build_sim_tokenizer
from dsched.testing.fake_control import FakeControlPlane

MODEL = "tiny"
CONTEXT = 1_024

OpenDoor = Callable[..., Awaitable[FrontDoor]]


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def served() -> ServedModel:
    tokenizer = build_sim_tokenizer()
    renderer = TemplateRenderer(tokenizer, chat_template=CHAT_TEMPLATE)
    return ServedModel(name=MODEL, tokenizer=tokenizer, renderer=renderer)


@pytest.fixture
def control(served: ServedModel) -> FakeControlPlane:
    vocab_size = served.tokenizer.get_vocab_size()
    texts = [served.tokenizer.decode([token_id]) for token_id in range(vocab_size)]
    words = [i for i, text in enumerate(texts) if len(text) > 1 and "\ufffd" not in text]
    control = FakeControlPlane(token_ids=words)
    control.add_model(MODEL, max_model_len=CONTEXT, vocab_size=vocab_size)
    return control


@pytest.fixture
async def open_door(control: FakeControlPlane, served: ServedModel) -> AsyncIterator[OpenDoor]:
    """Open front doors with other settings; all are closed at the end."""
    doors: list[FrontDoor] = []

    async def open_one(**settings: object) -> FrontDoor:
        config = FrontDoorConfig(port=0, **settings)  # type: ignore[arg-type]
        door = FrontDoor(control=control, models={MODEL: served}, settings=config)
        await door.start()
        doors.append(door)
        return door

    yield open_one
    for door in doors:
        await door.stop(grace_s=0)


@pytest.fixture
async def door(open_door: OpenDoor) -> FrontDoor:
    return await open_door()


@pytest.fixture
def port(door: FrontDoor) -> int:
    return door.bound_port
