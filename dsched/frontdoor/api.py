"""The token path: a completion request from its bytes to the controller.

The order of the checks is the order in which a client can act: a body that cannot be read (400),
a model that nobody configured (404), a model whose engines are down (503), too many requests (429),
a field that this model cannot honour (400), a prompt that is too long (400). Nothing reaches the
controller before all of them passed.

Long texts are rendered on a small thread pool (the tokenizer releases the GIL), short ones at once:
the way to a thread and back costs more than a short text.
"""

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog
from msgspec.structs import replace

from dsched.clock import Clock, wall_time_s
from dsched.config import FrontDoorConfig
from dsched.controller.request import ControlPlane, InferenceRequest, ModelInfo
from dsched.drivers.wire import TraceContext
from dsched.frontdoor.answer import Answer
from dsched.frontdoor.connection import ClientConnection, Headers
from dsched.frontdoor.deltas import MessageBuilder, call_id_prefix
from dsched.frontdoor.errors import ApiError, bad_request, echo
from dsched.frontdoor.format import AnswerFormat, LogprobWriter
from dsched.frontdoor.heads import HttpRequest
from dsched.frontdoor.intake import Intake, make_intake
from dsched.frontdoor.models import ServedModel
from dsched.frontdoor.parsed_answer import ParsedAnswer
from dsched.frontdoor.renderer import RenderedPrompt
from dsched.frontdoor.schema import ChatBody, parse_chat, parse_completion
from dsched.frontdoor.spans import RequestTracer
from dsched.frontdoor.stats import MS, Api, FrontDoorMetrics, FrontDoorStats, RequestRecord
from dsched.frontdoor.text import StopFinder
from dsched.frontdoor.trace_context import TRACEPARENT, read_trace_context
from dsched.ids import RequestId
from dsched.logs import EventLog

log = structlog.get_logger(__name__)

INLINE_CHARS = 4_096
"""Longest text that is rendered on the event loop: about a millisecond."""
NUM_RENDER_THREADS = 2
"""Threads for longer texts. More: they compete with the event loop for cores."""
RETRY_AFTER_S = 1
"""Engines come back, and requests end, within seconds."""

NAME_HEADERS = ((b"x-tenant-id", "tenant"), (b"x-session-id", "session"))
"""Headers that name whose request it is; policies and fair queues look at them."""

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._~:/+=@-]{1,128}")


class CompletionApi:
    """Both completion APIs over one control plane. Lives on one event loop."""

    def __init__(
        self,
        *,
        control: ControlPlane,
        models: Mapping[str, ServedModel],
        settings: FrontDoorConfig,
        stats: FrontDoorStats,
        metrics: FrontDoorMetrics,
        clock: Clock,
        process_tag: int,
        tracer: RequestTracer | None = None,
    ) -> None:
        """`process_tag` makes this process's request ids differ from those of others."""
        self._control = control
        self._models = models
        self._settings = settings
        self._stats = stats
        self._metrics = metrics
        self._tracer = tracer
        self._clock = clock
        self._id_prefix = f"{process_tag & 0xFFFFFFFF:08x}"
        self._num_ids = 0
        self._open: dict[RequestId, Answer] = {}
        self._rendering: dict[RequestId, Call] = {}
        """Requests whose prompts are on their way through a thread."""
        self._threads = ThreadPoolExecutor(NUM_RENDER_THREADS, thread_name_prefix="render")
        self._log = EventLog(__name__, call_soon=_call_soon)
        self.is_stopping = False

    @property
    def num_open(self) -> int:
        """Requests in work, those that are being rendered included."""
        return len(self._open) + len(self._rendering)

    def handle(self, api: Api, request: HttpRequest, connection: ClientConnection) -> None:
        """Answer one request of `api`, now or through an `Answer`."""
        start_ns = self._clock.now_ns()
        request_id, headers, is_given = self._identify(request)
        call = Call(self, connection, request_id, headers, start_ns)
        try:
            if is_given:
                call.may_resume = True
                call.num_client_tokens = _last_event_id(request.header(b"last-event-id"))
            parse = parse_completion if api is Api.COMPLETIONS else parse_chat
            body = parse(request.body)
            served, info = self._find_model(body.model)
            call.names = _names_of(request)
            if TRACEPARENT in request.fields:
                call.trace = read_trace_context(request.fields)
            rank = request.header(b"x-data-parallel-rank")
            intake = make_intake(body, served=served, info=info, rank_header=rank)
            if intake.num_chars <= INLINE_CHARS:
                self.submit(call, intake, intake.render())
            else:
                self._render_in_thread(call, intake)
        except ApiError as error:
            call.refuse(error)

    def count_refusal(self, status: int) -> None:
        """Count a request that does not get to the controller."""
        refused = self._stats.num_refused
        refused[status] = refused.get(status, 0) + 1

    def stop_answers(self) -> None:
        """End all requests in work with an error."""
        for answer in list(self._open.values()):
            answer.stop()
        calls = list(self._rendering.values())
        self._rendering.clear()
        for call in calls:
            call.refuse(_unavailable("the server is stopping", "stopping"))

    def close(self) -> None:
        self._log.flush()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def submit(self, call: "Call", intake: Intake, rendered: RenderedPrompt) -> None:
        """Hand a request to the controller.

        Raises:
            ApiError: the rendered prompt breaks a rule.
        """
        request = intake.make_request(call.request_id, rendered)
        if call.may_resume:
            request = replace(request, may_resume=True, num_client_tokens=call.num_client_tokens)
        if call.names:
            names = call.names
            request = replace(
                request, tenant=names.get("tenant", ""), session=names.get("session", "")
            )
        if self._tracer is not None:
            call.trace = self._tracer.begin_request(
                request.request_id,
                model=request.model,
                start_ns=call.start_ns,
                context=call.trace,
            )
        if call.trace is not None:
            request = replace(request, trace=call.trace)
            call.headers = [*call.headers, (TRACEPARENT, call.trace.parent.encode())]
        answer = self._make_answer(call, intake, request, rendered)
        call.connection.attach(answer)
        self._open[request.request_id] = answer
        self._stats.of(request.model).num_open += 1
        self._control.submit(request, answer)

    def _find_model(self, name: str) -> tuple[ServedModel, ModelInfo]:
        info = self._control.models().get(name)
        if info is None:
            message = f"The model {echo(name)!r} does not exist"
            raise ApiError(404, message, param="model", code="model_not_found")
        served = self._models.get(name)
        if self.is_stopping:
            raise _unavailable("the server is stopping", "stopping")
        if not info.is_available or served is None:
            what = "tokenizer" if info.is_available else "engine"
            raise _unavailable(f"the model {echo(name)!r} has no {what} now", f"no_{what}")
        limit = self._settings.max_open_requests
        if self.num_open >= limit:
            message = f"{limit} requests are in work already"
            raise ApiError(429, message, code="overloaded", retry_after_s=RETRY_AFTER_S)
        return served, info

    def _make_answer(
        self, call: "Call", intake: Intake, request: InferenceRequest, rendered: RenderedPrompt
    ) -> Answer:
        api, body, tokenizer = intake.api, intake.body, intake.served.tokenizer
        has_usage = bool(body.stream_options and body.stream_options.include_usage)
        has_logprobs = request.sampling.logprobs is not None
        prefix = "cmpl" if api is Api.COMPLETIONS else "chatcmpl"
        make: Callable[..., Answer] = Answer
        if rendered.make_parser is not None:
            builder = _make_builder(intake, request)
            make = partial(ParsedAnswer, builder=builder, make_parser=rendered.make_parser)
        return make(
            connection=call.connection,
            control=self._control,
            clock=self._clock,
            stats=self._stats.of(request.model),
            on_end=self._ended,
            request_id=request.request_id,
            api=api,
            model=request.model,
            format=AnswerFormat(
                api,
                answer_id=f"{prefix}-{request.request_id}",
                model=request.model,
                created_s=wall_time_s(),
                has_usage=has_usage,
                is_stream=bool(body.stream),
            ),
            detokenizer=intake.served.texts.detokenizer(request.prompt_token_ids),
            finder=StopFinder(intake.stops) if intake.stops else None,
            logprobs=LogprobWriter(api, tokenizer) if has_logprobs else None,
            headers=call.headers,
            is_stream=bool(body.stream),
            has_usage=has_usage,
            has_token_ids=bool(body.return_token_ids),
            min_tokens=request.sampling.min_tokens,
            num_prompt_tokens=len(request.prompt_token_ids),
            start_ns=call.start_ns,
            num_client_tokens=call.num_client_tokens,
        )

    def _identify(self, request: HttpRequest) -> tuple[RequestId, Headers, bool]:
        """Take the client's request id, or draw one; return it with the answer's headers, and
        whether it is the client's own."""
        given = request.header(b"x-request-id")
        self._num_ids += 1
        drawn = f"{self._id_prefix}{self._num_ids:08x}"
        if given is None or not _REQUEST_ID.fullmatch(given):
            return RequestId(drawn), [(b"x-request-id", drawn.encode())], False
        request_id = RequestId(given.decode())
        if request_id in self._open or request_id in self._rendering:
            # Two requests in work share their client's id: inside they need different ones.
            return RequestId(f"{request_id}~{drawn}"), [(b"x-request-id", given)], False
        return request_id, [(b"x-request-id", given)], True

    def _render_in_thread(self, call: "Call", intake: Intake) -> None:
        call.connection.attach(call)
        self._rendering[call.request_id] = call
        future = asyncio.get_running_loop().run_in_executor(self._threads, intake.render)

        def rendered(future: "asyncio.Future[RenderedPrompt]") -> None:
            is_wanted = self._rendering.pop(call.request_id, None) is not None
            if future.cancelled():
                return
            error = future.exception()
            if error is not None and not isinstance(error, ApiError):
                log.error("request.failed", request_id=call.request_id, exc_info=error)
                error = ApiError(500, "internal error", code="internal")
            if not is_wanted:  # all that was in work has been ended
                return
            if error is not None:
                call.refuse(error)
            elif not call.is_cancelled:
                try:
                    self.submit(call, intake, future.result())
                except ApiError as refusal:
                    call.refuse(refusal)

        future.add_done_callback(rendered)

    def _ended(
        self, record: RequestRecord, status: int, code: str | None, num_cached_tokens: int
    ) -> None:
        del self._open[record.request_id]
        stats = self._stats.of(record.model)
        stats.num_open -= 1
        key = (record.api, record.outcome)
        stats.num_requests[key] = stats.num_requests.get(key, 0) + 1
        stats.num_prompt_tokens += record.num_prompt_tokens
        stats.num_cached_tokens += num_cached_tokens
        stats.num_output_tokens += record.num_output_tokens
        stats.duration.observe(record.duration_ns)
        self._metrics.on_request_end(record)
        if not self._log.is_enabled:
            return
        self._log.info(
            "request.finished",
            request_id=record.request_id,
            model=record.model,
            api=record.api.value,
            outcome=record.outcome.value,
            status=status,
            code=code,
            prompt_tokens=record.num_prompt_tokens,
            output_tokens=record.num_output_tokens,
            duration_ms=record.duration_ns // MS,
            ttft_ms=None if record.ttft_ns is None else record.ttft_ns // MS,
        )


class Call:
    """One HTTP request until its `Answer` takes over: where it came from and what it is called.

    A `Job` while its prompt is rendered on a thread.
    """

    __slots__ = (
        "_api",
        "connection",
        "headers",
        "is_cancelled",
        "may_resume",
        "names",
        "num_client_tokens",
        "request_id",
        "start_ns",
        "trace",
    )

    def __init__(
        self,
        api: CompletionApi,
        connection: ClientConnection,
        request_id: RequestId,
        headers: Headers,
        start_ns: int,
    ) -> None:
        self._api = api
        self.connection = connection
        self.request_id = request_id
        self.headers = headers
        self.start_ns = start_ns
        self.is_cancelled = False
        self.may_resume = False
        """The client gave the id, so it may repeat a request from before a restart."""
        self.num_client_tokens: int | None = None
        self.names: dict[str, str] = {}
        """Tenant and session, where the client says them."""
        self.trace: TraceContext | None = None
        """The trace that the request belongs to."""

    def refuse(self, error: ApiError) -> None:
        self._api.count_refusal(error.status)
        if not self.is_cancelled:
            self.connection.respond_error(error, self.headers)

    def on_disconnect(self) -> None:
        self.is_cancelled = True

    def on_writable(self) -> None:
        pass


def _make_builder(intake: Intake, request: InferenceRequest) -> MessageBuilder:
    body = intake.body
    is_single = isinstance(body, ChatBody) and body.parallel_tool_calls is False
    prefix = call_id_prefix(request.request_id, request.prompt_token_ids)
    return MessageBuilder(prefix, max_calls=1 if is_single else None)


def _call_soon(function: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(function)


def _names_of(request: HttpRequest) -> dict[str, str]:
    """Return the names of `NAME_HEADERS` that the client gave.

    Raises:
        ApiError: 400 for one that is no name.
    """
    names = {}
    for header, field in NAME_HEADERS:
        value = request.header(header)
        if value is not None:
            if not _REQUEST_ID.fullmatch(value):
                name = header.decode()
                rule = "1 to 128 letters, digits or any of ._~:/+=@-"
                raise bad_request(f"the header {name} must be {rule}", param=name)
            names[field] = value.decode()
    return names


def _last_event_id(header: bytes | None) -> int | None:
    """Return how many tokens the client has, by the id of the last event it read."""
    if header is None:
        return None
    if not (header.isdigit() and len(header) <= 9):
        shown = echo(header.decode("latin-1"))
        raise ApiError(400, f"Last-Event-ID {shown!r} is not a count of tokens")
    return int(header)


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, retry_after_s=RETRY_AFTER_S)
