"""The log: JSON on a stream, by level, and without anything that a client wrote or read."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from dsched.config import LoggingConfig
from dsched.logs import configure_logging

SECRET = "the client's own words"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_event_is_one_json_object_a_line() -> None:
    """Event, level, UTC time and the bound fields."""
    stream = io.StringIO()
    configure_logging(LoggingConfig(), stream=stream)

    structlog.get_logger("x").bind(request_id="r1").warning("plan.dropped", epoch=3)

    (line,) = lines(stream)
    assert (line["event"], line["level"], line["epoch"]) == ("plan.dropped", "warning", 3)
    assert line["request_id"] == "r1"
    assert str(line["timestamp"]).endswith("Z")


def test_level_hides_what_is_less_important() -> None:
    """The level of the configuration holds for structlog and for other libraries."""
    stream = io.StringIO()
    configure_logging(LoggingConfig(level="warning"), stream=stream)

    structlog.get_logger().info("a.done")
    structlog.get_logger().error("b.failed")
    logging.getLogger("other").info("chatter")
    logging.getLogger("other").warning("trouble %s", 7)

    assert [line["event"] for line in lines(stream)] == ["b.failed", "trouble 7"]


@pytest.mark.parametrize(
    "field", ["prompt", "messages", "content", "text", "token_ids", "prompt_token_ids", "body"]
)
def test_content_never_reaches_the_log(field: str) -> None:
    """Even if somebody logs it: the value is replaced by its length, in each format."""
    for log_format in ("json", "console"):
        stream = io.StringIO()
        configure_logging(LoggingConfig(format=log_format), stream=stream)

        structlog.get_logger().info("request.ended", **{field: SECRET})

        assert SECRET not in stream.getvalue()
        assert f"<{len(SECRET)} dropped>" in stream.getvalue()


def test_exception_is_a_field_of_one_line() -> None:
    """A traceback does not break the form of one object a line."""
    stream = io.StringIO()
    configure_logging(LoggingConfig(), stream=stream)

    try:
        int("boom")
    except ValueError:
        structlog.get_logger().exception("tick.failed")

    (line,) = lines(stream)
    assert "ValueError: invalid literal" in str(line["exception"])


def test_format_follows_the_terminal() -> None:
    """`auto` is JSON where nobody looks; `console` is not JSON."""
    plain, forced = io.StringIO(), io.StringIO()
    configure_logging(LoggingConfig(format="auto"), stream=plain)
    structlog.get_logger().info("a.done")
    configure_logging(LoggingConfig(format="console"), stream=forced)
    structlog.get_logger().info("a.done")

    assert plain.getvalue().startswith("{")
    assert not forced.getvalue().startswith("{")
