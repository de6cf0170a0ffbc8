"""W3C trace context: whose trace a request belongs to, read from its headers and passed on.

dsched passes the context on as it is, to the engine and back to the client, so that spans of both
sides meet although dsched makes none itself. With the extra `otel` it puts its own span between
them (`dsched.frontdoor.spans`). A header that breaks the rules is ignored, as the W3C asks: a new
trace is better than a refused request.
"""

import re
from collections.abc import Mapping
from typing import Final

from dsched.drivers.wire import TraceContext

TRACEPARENT: Final = b"traceparent"
TRACESTATE: Final = b"tracestate"
MAX_TRACESTATE_BYTES: Final = 512
"""Longer ones are left out, which the W3C allows."""
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)
_TRACESTATE = re.compile(rb"[\x20-\x7e]*")


def read_trace_context(fields: Mapping[bytes, bytes]) -> TraceContext | None:
    """Return the context of a request's headers; `None` without one, or with a broken one.

    >>> read_trace_context({b"traceparent": b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"}).parent
    '00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01'
    """
    parent = fields.get(TRACEPARENT)
    if parent is None or not _TRACEPARENT.fullmatch(parent):
        return None
    state = fields.get(TRACESTATE)
    if state is not None and (
        len(state) > MAX_TRACESTATE_BYTES or not _TRACESTATE.fullmatch(state)
    ):
        state = None
    return TraceContext(parent=parent.decode(), state=None if state is None else state.decode())
