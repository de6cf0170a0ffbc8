"""OpenTelemetry spans of each request, for whoever has the extra `otel` and says where they go.

    request                        arrival to the end, as the client sees it
      route                        until a rank was booked, waiting at the router included
      prefill                      until the first token
      decode                       until the end, or until the engine was lost
      handoff                      from the last token before a loss to the next one

Nothing here exists unless `otel.endpoint` is set. Then a request costs a few spans, made when
something happens to it; a token costs nothing. The engine is given the request's span as its
parent, so the engine's own spans hang under ours.

In: what the front door says of a request (`RequestTracer`, `FrontDoorMetrics`) and what the
controller tells its recorder, which hears everything as before. Times are those of the events.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from dsched.clock import Clock, wall_time_ns
from dsched.drivers.wire import TraceContext
from dsched.frontdoor.stats import Outcome, RequestRecord
from dsched.ids import AttemptId, EngineId, RankId, RequestId
from dsched.trace import Recorder

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

MAX_OPEN_REQUESTS: Final = 65_536
"""Requests with spans at once; more go without. Requests that never end would fill the memory."""


class RequestTracer(Protocol):
    """Hears of each request before the controller does."""

    def begin_request(
        self, request_id: RequestId, *, model: str, start_ns: int, context: TraceContext | None
    ) -> TraceContext | None:
        """Open the request's span; return what the engine and the client get."""
        ...


@dataclass(slots=True)
class _Open:
    """One request in work."""

    span: "Span"
    children: "dict[str, Span]" = field(default_factory=dict)
    """The open ones, by name."""
    num_attempts: int = 0


class RequestSpans:
    """Makes spans; implements `RequestTracer`, `FrontDoorMetrics` and, over another one,
    `Recorder`."""

    def __init__(self, tracer: "Tracer", *, clock: Clock, recorder: Recorder) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._api = trace
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = tracer
        self._recorder = recorder
        self._offset_ns = wall_time_ns() - clock.now_ns()
        """From our clock to the one of spans."""
        self._open: dict[RequestId, _Open] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def as_recorder(self) -> Recorder:
        """What the controller tells; calls that make no span go to the other recorder at once."""
        return cast(Recorder, _SpanRecorder(self, self._recorder))

    # ---- what the front door says

    def begin_request(
        self, request_id: RequestId, *, model: str, start_ns: int, context: TraceContext | None
    ) -> TraceContext | None:
        if len(self._open) >= MAX_OPEN_REQUESTS:
            return context
        carrier = {} if context is None else {"traceparent": context.parent}
        if context is not None and context.state is not None:
            carrier["tracestate"] = context.state
        span = self._tracer.start_span(
            "request",
            context=self._propagator.extract(carrier),
            kind=self._api.SpanKind.SERVER,
            start_time=self._time(start_ns),
            attributes={"gen_ai.request.model": model, "dsched.request_id": request_id},
        )
        self._open[request_id] = _Open(span=span)
        given: dict[str, str] = {}
        self._propagator.inject(given, context=self._api.set_span_in_context(span))
        if "traceparent" not in given:
            return context
        return TraceContext(parent=given["traceparent"], state=given.get("tracestate"))

    def on_request_end(self, record: RequestRecord) -> None:
        """The client has its answer, or is gone."""
        opened = self._open.pop(record.request_id, None)
        if opened is None:
            return
        span = opened.span
        start_ns = span.start_time if hasattr(span, "start_time") else None
        end_ns = None if start_ns is None else start_ns + record.duration_ns
        for child in opened.children.values():
            child.end(end_ns)
        span.set_attributes(
            {
                "gen_ai.operation.name": "chat"
                if "chat" in record.api.value
                else "text_completion",
                "gen_ai.usage.input_tokens": record.num_prompt_tokens,
                "gen_ai.usage.output_tokens": record.num_output_tokens,
                "dsched.outcome": record.outcome.value,
                "dsched.attempts": opened.num_attempts,
            }
        )
        if record.outcome is Outcome.ERROR:
            span.set_status(self._api.StatusCode.ERROR)
        span.end(end_ns)

    # ---- what the controller tells

    def start_child(
        self, request_id: RequestId, name: str, now_ns: int, **attributes: str | int
    ) -> None:
        """Open a child; one of that name that is open ends first."""
        opened = self._open.get(request_id)
        if opened is None:
            return
        self.end_child(request_id, name, now_ns)
        opened.children[name] = self._tracer.start_span(
            name,
            context=self._api.set_span_in_context(opened.span),
            start_time=self._time(now_ns),
            attributes=_named(attributes),
        )

    def end_child(
        self, request_id: RequestId, name: str, now_ns: int, **attributes: str | int
    ) -> None:
        """End a child if it is open."""
        opened = self._open.get(request_id)
        child = None if opened is None else opened.children.pop(name, None)
        if child is None:
            return
        if attributes:
            child.set_attributes(_named(attributes))
        child.end(self._time(now_ns))

    def fail_child(self, request_id: RequestId, name: str, now_ns: int, reason: str) -> None:
        """End a child as an error if it is open."""
        opened = self._open.get(request_id)
        child = None if opened is None else opened.children.get(name)
        if child is not None:
            child.set_status(self._api.StatusCode.ERROR, reason)
            self.end_child(request_id, name, now_ns)

    def count_attempt(self, request_id: RequestId, number: int) -> None:
        opened = self._open.get(request_id)
        if opened is not None:
            opened.num_attempts = number

    def _time(self, now_ns: int) -> int:
        return now_ns + self._offset_ns


class _SpanRecorder:
    """Turns what the controller tells into children, and tells it on."""

    def __init__(self, spans: RequestSpans, recorder: Recorder) -> None:
        self._spans = spans
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the other recorder's method
        method = getattr(self._recorder, name)
        self.__dict__[name] = method  # found at once the next time
        return method

    def on_arrival(self, request_id: RequestId, *, arrival_ns: int, **facts: Any) -> None:  # noqa: ANN401
        self._recorder.on_arrival(request_id, arrival_ns=arrival_ns, **facts)
        self._spans.start_child(request_id, "route", arrival_ns, pool=facts["pool"])

    def on_booking(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        number: int,
        rank_id: RankId,
        now_ns: int,
        **facts: Any,  # noqa: ANN401
    ) -> None:
        self._recorder.on_booking(
            request_id,
            attempt_id=attempt_id,
            number=number,
            rank_id=rank_id,
            now_ns=now_ns,
            **facts,
        )
        where: dict[str, str | int] = {
            "engine": rank_id.engine_id,
            "dp_rank": int(rank_id.dp_rank),
            "attempt": attempt_id,
        }
        spans = self._spans
        spans.count_attempt(request_id, number)
        spans.end_child(request_id, "route", now_ns, **where)
        if number == 1:
            spans.start_child(request_id, "prefill", now_ns, **where)

    def on_prefill(self, request_id: RequestId, *, rank_id: RankId, **facts: Any) -> None:  # noqa: ANN401
        self._recorder.on_prefill(request_id, rank_id=rank_id, **facts)
        self._spans.start_child(
            request_id,
            "prefill",
            facts["now_ns"],
            engine=rank_id.engine_id,
            dp_rank=int(rank_id.dp_rank),
            bucket=facts["bucket"],
            attempt=facts["attempt_id"],
        )

    def on_first_token(self, request_id: RequestId, now_ns: int) -> None:
        self._recorder.on_first_token(request_id, now_ns)
        self._spans.end_child(request_id, "prefill", now_ns)
        self._spans.start_child(request_id, "decode", now_ns)

    def on_loss(
        self,
        request_id: RequestId,
        *,
        engine_id: EngineId,
        layer: str,
        reason: str,
        now_ns: int,
        **facts: Any,  # noqa: ANN401
    ) -> None:
        self._recorder.on_loss(
            request_id, engine_id=engine_id, layer=layer, reason=reason, now_ns=now_ns, **facts
        )
        spans = self._spans
        for name in ("prefill", "decode"):
            spans.fail_child(request_id, name, now_ns, reason)
        spans.start_child(
            request_id, "handoff", now_ns, lost_engine=engine_id, layer=layer, reason=reason
        )

    def on_handoff(self, request_id: RequestId, *, now_ns: int, **facts: Any) -> None:  # noqa: ANN401
        self._recorder.on_handoff(request_id, now_ns=now_ns, **facts)
        self._spans.end_child(request_id, "handoff", now_ns, **facts)
        self._spans.start_child(request_id, "decode", now_ns)

    def on_end(self, request_id: RequestId, *, now_ns: int, **facts: Any) -> None:  # noqa: ANN401
        self._recorder.on_end(request_id, now_ns=now_ns, **facts)
        for name in ("route", "prefill", "decode", "handoff"):
            self._spans.end_child(request_id, name, now_ns)


def _named(attributes: dict[str, str | int]) -> dict[str, str | int]:
    return {f"dsched.{name}": value for name, value in attributes.items()}
