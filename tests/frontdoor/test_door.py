"""The front door as a whole: its ports, its admin API, what it logs and whom it tells."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from dsched.config import AdminConfig, FrontDoorConfig
from dsched.errors import ConfigError
from dsched.frontdoor import FrontDoor, ServedModel
from dsched.frontdoor.stats import RequestRecord
from dsched.testing.fake_control import FakeControlPlane
from dsched.testing.raw_http import get, post

SECRET = "a secret prompt"
BODY = {"model": "tiny", "prompt": SECRET, "max_tokens": 3}


class Records:
    """Keeps what the metrics hook is told."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def on_request_end(self, record: RequestRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Records:
    return Records()


@pytest.fixture
async def whole_door(
    control: FakeControlPlane, served: ServedModel, records: Records
) -> AsyncIterator[FrontDoor]:
    door = FrontDoor(
        control=control,
        models={"tiny": served},
        settings=FrontDoorConfig(port=0),
        admin=AdminConfig(port=0),
        metrics=records,
        metrics_text=lambda: b"dsched_build_info 1.0\n",
        workers=lambda: [{"engine_id": "a"}],
        config=lambda: {"seed": 7},
    )
    await door.start()
    yield door
    await door.stop(0)


async def test_admin_api_has_its_own_port(whole_door: FrontDoor) -> None:
    """The cluster is shown there, and only there."""
    port = whole_door.bound_admin_port
    assert port is not None
    assert (await get(port, "/health")).json() == {"status": "live"}
    assert (await get(port, "/admin/v1/workers")).json()["workers"] == [{"engine_id": "a"}]
    assert (await get(port, "/admin/v1/config")).json() == {"seed": 7}
    assert (await get(whole_door.bound_port, "/admin/v1/config")).status == 404
    assert (await get(port, "/v1/models")).status == 404


async def test_metrics_are_rendered_by_whom_it_was_given(whole_door: FrontDoor) -> None:
    answer = await get(whole_door.bound_port, "/metrics")

    assert answer.body == b"dsched_build_info 1.0\n"
    assert answer.headers["content-type"].startswith("text/plain")


async def test_port_in_use_is_a_config_error(
    whole_door: FrontDoor, control: FakeControlPlane
) -> None:
    taken, taken_admin = whole_door.bound_port, whole_door.bound_admin_port
    assert taken_admin is not None
    for settings, admin in (
        (FrontDoorConfig(port=taken), None),
        (FrontDoorConfig(port=0), AdminConfig(port=taken_admin)),
    ):
        door = FrontDoor(control=control, models={}, settings=settings, admin=admin)
        with pytest.raises(ConfigError, match="cannot listen on 127"):
            await door.start()


def test_header_that_cannot_be_sent_is_a_config_error(control: FakeControlPlane) -> None:
    with pytest.raises(ConfigError, match="server_header"):
        FrontDoor(control=control, models={}, settings=FrontDoorConfig(server_header="a\r\nx: y"))


async def test_each_request_is_logged_once_without_its_text(
    control: FakeControlPlane, served: ServedModel
) -> None:
    structlog.reset_defaults()  # an earlier test may have raised the level
    with capture_logs() as logs:
        door = FrontDoor(control=control, models={"tiny": served}, settings=FrontDoorConfig(port=0))
        await door.start()
        for stream in (False, True):
            await post(
                door.bound_port,
                "/v1/completions",
                BODY | {"stream": stream},
                {"x-request-id": f"id-{stream}"},
            )
        await door.stop(0)

    finished: list[Any] = [log for log in logs if log["event"] == "request.finished"]
    assert [log["request_id"] for log in finished] == ["id-False", "id-True"]
    assert [(log["outcome"], log["output_tokens"]) for log in finished] == [("length", 3)] * 2
    assert SECRET not in repr(logs)


async def test_metrics_hook_hears_every_request(whole_door: FrontDoor, records: Records) -> None:
    await post(whole_door.bound_port, "/v1/completions", BODY)

    (record,) = records.records
    assert (record.num_output_tokens, record.is_stream) == (3, False)
    assert record.ttft_ns is not None
    assert 0 < record.ttft_ns <= record.duration_ns


async def test_model_without_a_tokenizer_is_not_a_missing_model(control: FakeControlPlane) -> None:
    """Its engine is up before its tokenizer is known: a client comes back."""
    door = FrontDoor(control=control, models={}, settings=FrontDoorConfig(port=0))
    await door.start()
    answer = await post(door.bound_port, "/v1/completions", BODY)
    await door.stop(0)

    assert (answer.status, answer.error()["code"]) == (503, "no_tokenizer")


def test_port_is_known_after_the_start_only(control: FakeControlPlane) -> None:
    door = FrontDoor(control=control, models={}, admin=AdminConfig(port=0))
    for read in (lambda: door.bound_port, lambda: door.bound_admin_port):
        with pytest.raises(RuntimeError, match="start"):
            read()
