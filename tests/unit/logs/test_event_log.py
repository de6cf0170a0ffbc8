"""EventLog: the lines of structlog, written together."""

import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from dsched.config import LoggingConfig
from dsched.logs import EventLog, configure_logging

FIELDS: dict[str, Any] = {"request_id": "r-1", "code": None, "status": 200, "model": 'a"b é'}


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def make(level: str = "info", form: str = "json") -> tuple[EventLog, io.StringIO, list[Any]]:
    """Return a log, what it writes to, and what it asks the loop to call."""
    stream = io.StringIO()
    asked: list[Callable[[], None]] = []
    config = LoggingConfig(level=level, format=form)  # type: ignore[arg-type]
    configure_logging(config, stream=stream)
    return EventLog("test", call_soon=asked.append), stream, asked


def test_line_has_what_structlog_writes() -> None:
    log, stream, asked = make()
    structlog.get_logger("test").info("request.finished", **FIELDS)
    log.info("request.finished", **FIELDS)
    asked[0]()

    theirs, ours = map(json.loads, stream.getvalue().splitlines())
    assert list(ours) == list(theirs)
    assert ours.keys() > FIELDS.keys()
    assert len(ours.pop("timestamp")) == len(theirs.pop("timestamp"))
    assert ours == theirs


def test_lines_of_one_turn_are_written_together() -> None:
    log, stream, asked = make()
    for number in range(3):
        log.info("request.finished", number=number)
    before = stream.getvalue()
    asked[0]()
    log.info("request.finished", number=3)
    log.flush()
    log.flush()

    assert before == ""
    assert len(asked) == 2
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == [0, 1, 2, 3]


def test_level_above_info_writes_nothing() -> None:
    log, stream, asked = make(level="error")
    log.info("request.finished", **FIELDS)

    assert not log.is_enabled
    assert (stream.getvalue(), asked) == ("", [])


def test_console_lines_come_from_structlog() -> None:
    log, stream, asked = make(form="console")
    log.info("request.finished", **FIELDS)

    assert asked == []
    assert "request.finished" in stream.getvalue()
    assert "r-1" in stream.getvalue()


def test_log_that_is_captured_stays_captured() -> None:
    make()
    with capture_logs() as logs:
        EventLog("test", call_soon=lambda _: None).info("request.finished", **FIELDS)

    assert [each["request_id"] for each in logs] == ["r-1"]
