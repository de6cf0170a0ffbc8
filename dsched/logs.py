"""The log: one JSON object a line on stderr, or coloured lines on a terminal.

What is logged for every request goes through `EventLog`, which writes the same lines in batches.

Events are `noun.past_participle` with fields, as in `log.warning("plan.dropped", epoch=3)`; the
list is in `docs/operations.md`. What belongs to one request binds `request_id`. Prompts, answers
and token ids are never fields; `drop_content` removes them if somebody tries.
"""

import logging
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import msgspec
import structlog

from dsched.config import LoggingConfig

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

CONTENT_FIELDS = frozenset(
    {
        "prompt", "messages", "content", "text", "completion", "answer", "delta", "body",
        "token_ids", "prompt_token_ids", "output_token_ids", "tokens",
    }
)  # fmt: skip
"""Names of fields that would hold what clients write or read."""


_stamp_time = structlog.processors.TimeStamper(fmt="iso", utc=True)
_encode_line = msgspec.json.Encoder().encode
_lines_to: tuple[TextIO, object] | None = None
"""Where JSON lines go, and the processor that marks structlog as configured by us."""


class EventLog:
    """A logger for what happens with every request.

    structlog takes some 50 µs for a line, a third of what a small request costs. Where the log is
    lines of JSON these are encoded here, with the same fields, and written together at the end of
    the event loop's turn; everywhere else structlog does it. Call `flush` before the loop ends.
    """

    def __init__(self, name: str, *, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """Look up how logging is configured now. `call_soon` calls a function in the loop's next
        turn."""
        # Bound once: the lazy logger would look its configuration up every time.
        self._log = structlog.get_logger(name).bind()
        self._call_soon = call_soon
        self._stream: TextIO | None = None
        self._lines: list[bytes] = []
        processors = structlog.get_config()["processors"]
        if _lines_to is not None and processors and processors[-1] is _lines_to[1]:
            self._stream = _lines_to[0]
        self.is_enabled = self._log.is_enabled_for(logging.INFO)
        """Nothing has to be put together for a log that leaves it out."""

    def info(self, event: str, **fields: object) -> None:
        """Log an event that every request has."""
        if not self.is_enabled:
            return
        if self._stream is None:
            self._log.info(event, **fields)
            return
        fields["event"] = event
        fields["level"] = "info"
        if not self._lines:
            self._call_soon(self.flush)
        self._lines.append(_encode_line(_stamp_time(None, "info", fields)))

    def flush(self) -> None:
        """Write what was logged."""
        if self._lines and self._stream is not None:
            lines, self._lines = self._lines, []
            lines.append(b"")
            self._stream.write(b"\n".join(lines).decode())
            self._stream.flush()


def configure_logging(config: LoggingConfig, *, stream: TextIO | None = None) -> None:
    """Send structlog, and the standard library's loggers of our dependencies, to stderr.

    Call once, at the start of a process; other libraries' records take the same form.
    """
    global _lines_to  # noqa: PLW0603 - logging is the process's own
    target = stream if stream is not None else sys.stderr
    is_console = config.format == "console" or (config.format == "auto" and target.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _stamp_time,
        drop_content,
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=target.isatty())
        if is_console
        else structlog.processors.JSONRenderer()
    )
    finish: list[Any] = [] if is_console else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[*shared, *finish, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[config.level]),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    _lines_to = None if is_console else (target, renderer)
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *finish,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Dependencies say little that an operator can use, and some say it for every request.
    root.setLevel(max(LEVELS[config.level], logging.WARNING))


def stay_quiet_unless_configured() -> None:
    """Let only warnings through, to stderr, where nobody has said what to do with the log.

    For the simulator as a library: structlog's own default prints everything to stdout.
    """
    if not structlog.is_configured():
        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(sys.stderr),
            cache_logger_on_first_use=False,
        )


def drop_content(
    logger: object,  # noqa: ARG001 - structlog's shape of a processor
    method_name: str,  # noqa: ARG001
    event: MutableMapping[str, Any],
) -> MutableMapping[str, Any]:
    """Replace what a client wrote or read by its length.

    >>> drop_content(None, "info", {"event": "request.ended", "prompt": "secret"})
    {'event': 'request.ended', 'prompt': '<6 dropped>'}
    """
    for name in CONTENT_FIELDS & event.keys():
        value = event[name]
        length = len(value) if hasattr(value, "__len__") else 1
        event[name] = f"<{length} dropped>"
    return event
