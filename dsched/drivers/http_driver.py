"""One engine behind HTTP, as dsched sees it: tokens in, tokens out, load reports, life and death.

In: `generate` and `abort` from the controller. Out: tokens and exactly one end for each attempt at
its sink; up, down and reports at the listener. It decides nothing, retries nothing and keeps no
token. Everything happens on the event loop that `start` was called on; nothing blocks. What differs
between engines is behind `Dialect`: `drivers/<engine>/driver.py` has one each.

An attempt is one streamed HTTP request. Closing its connection tells the engine to abort it; an
engine that needs a word besides gets that too.

When the watch finds the engine down, every open attempt fails at once, without waiting for its
socket: the listener hears of the engine first, so that no attempt is sent there again.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from dsched.drivers.base import (
    AttemptFinish,
    AttemptSink,
    EngineDescription,
    EngineListener,
    ExpertLoad,
    FinishReason,
)
from dsched.drivers.http import Headers, HttpExchange, HttpPool, SseSplitter
from dsched.drivers.reports import ReportReader
from dsched.drivers.stream import AnswerReader
from dsched.drivers.url import normalize_engine_url
from dsched.drivers.watch import EngineHints, EngineInspector, EngineWatch
from dsched.drivers.wire import (
    AgentGoodbye,
    AgentHello,
    GenerateCommand,
    RankReport,
    SetStepBudget,
    TraceContext,
)
from dsched.errors import DriverError, EngineUnreachableError, task_fault
from dsched.ids import AttemptId, DpRank, EngineId, RankId
from dsched.states import Evidence

MAX_REFUSAL_BYTES: Final = 65_536
"""Of an error answer that are read; the rest says nothing new."""
MAX_WHOLE_BYTES: Final = 16 * 1024 * 1024
"""Of an answer in one body: one token, and how its KV is fetched."""
JSON_HEADERS: Final = ((b"content-type", b"application/json"),)

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One POST to the engine."""

    path: str
    body: bytes
    headers: Headers = JSON_HEADERS


class Dialect(Protocol):
    """How one kind of engine is spoken to. Pure translation; keeps no attempt."""

    def generate(
        self, command: GenerateCommand, description: EngineDescription | None
    ) -> EngineRequest:
        """Return the request that streams the answer to `command`.

        Raises:
            DriverError: this engine cannot be asked for it; the attempt fails with that.
        """
        ...

    def abort(self, attempt_id: AttemptId) -> EngineRequest | None:
        """Return what to send besides closing the attempt's connection."""
        ...

    def reader(self, command: GenerateCommand) -> AnswerReader:
        """Return a reader for the answer to `command`."""
        ...

    def translate_refusal(self, status: int, body: bytes) -> DriverError:
        """Return the error for an answer whose status is not 200, in the engine's own words."""
        ...


def _trace_headers(trace: TraceContext) -> Headers:
    headers = [(b"traceparent", trace.parent.encode())]
    if trace.state is not None:
        headers.append((b"tracestate", trace.state.encode()))
    return headers


class HttpDriver:
    """Implements `Driver` for a server at a URL, whatever engine runs there."""

    def __init__(
        self,
        *,
        engine_id: EngineId,
        url: str,
        dialect: Dialect,
        inspector: EngineInspector,
        model: str | None = None,
        hints: EngineHints | None = None,
        reports: ReportReader | None = None,
        step_budget_ns: int | None = None,
    ) -> None:
        """Connect to nothing yet.

        `model` is the name that the server calls its model by; by default the first one it lists.
        Without `reports`, or for a server without dsched's agents, there are no load reports.

        Raises:
            ConfigError: `url` is not the address of an HTTP server.
        """
        self._engine_id = engine_id
        self._url = normalize_engine_url(url)
        self._dialect = dialect
        self._inspector = inspector
        self._model = model
        self._hints = hints or EngineHints()
        self._reports = reports
        self._step_budget_ns = step_budget_ns
        """Sent to each agent that greets; `None` leaves what its engine was started with."""
        self._pool = HttpPool(self._url)
        self._attempts: dict[AttemptId, _Attempt] = {}
        self._hellos: dict[int, AgentHello] = {}
        self._description: EngineDescription | None = None
        self._expert_load: ExpertLoad | None = None
        self._listener: EngineListener | None = None
        self._watch: EngineWatch | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def engine_id(self) -> EngineId:
        return self._engine_id

    @property
    def url(self) -> str:
        return self._url

    @property
    def num_open_attempts(self) -> int:
        return len(self._attempts)

    @property
    def engine_version(self) -> str | None:
        """The engine's own version, as far as it was told."""
        return None if self._watch is None else self._watch.version

    @property
    def lost_features(self) -> tuple[str, ...]:
        """Features that an agent of this engine could not attach or had to switch off."""
        names = {name: None for hello in self._hellos.values() for name in hello.missing}
        return tuple(sorted(names))

    # Driver: what the controller asks.

    def start(self, listener: EngineListener) -> None:
        """Begin to watch the engine; see `Driver.start`."""
        if self._watch is not None or self._is_closed:
            return
        self._listener = listener
        if self._reports is not None:
            self._reports.subscribe(self._engine_id, self)
        self._watch = EngineWatch(
            engine_id=self._engine_id,
            url=self._url,
            model=self._model,
            inspector=self._inspector,
            hints=self._hints,
            expects_agents=self._reports is not None,
            host=self,
        )
        self._watch_task = asyncio.get_running_loop().create_task(self._watch.run())
        self._watch_task.add_done_callback(self._watch_ended)

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        """Start an attempt; see `Driver.generate`."""
        attempt_id = AttemptId(command.attempt_id)
        if attempt_id in self._attempts:
            raise ValueError(f"attempt {attempt_id} was started before")
        if self._is_closed:
            error = EngineUnreachableError(f"the driver of {self._engine_id} is closed")
            sink.on_failure(attempt_id, error)
            return
        try:
            request = self._dialect.generate(command, self._description)
        except DriverError as error:
            sink.on_failure(attempt_id, error)
            return
        attempt = _Attempt(self, attempt_id, sink, reader=self._dialect.reader(command))
        self._attempts[attempt_id] = attempt
        headers = request.headers
        if command.trace is not None:
            headers = [*headers, *_trace_headers(command.trace)]
        attempt.exchange = self._pool.request(
            "POST", request.path, headers=headers, body=request.body, receiver=attempt
        )

    def abort(self, attempt_id: AttemptId) -> None:
        """Stop an attempt; see `Driver.abort`. Its sink hears `ABORT` after this call."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None:
            attempt.abort()
            self._tell_abort(attempt_id)

    def move(self, url: str) -> None:
        """Find the engine at another URL from now on; what runs at the old one fails.

        Raises:
            ConfigError: `url` is not the address of an HTTP server.
        """
        self._url = normalize_engine_url(url)
        old, self._pool = self._pool, HttpPool(self._url)
        if self._watch is not None:
            self._watch.move(self._url)
        old.close()

    def close(self) -> None:
        """Abort what runs and stop watching; every sink hears its end during this call, and nobody
        hears anything after it. The server lives on. See `Driver.close`."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch_task is not None:
            self._watch_task.cancel()
        if self._reports is not None and self._listener is not None:
            self._reports.unsubscribe(self._engine_id)
        self._listener = None
        for attempt in list(self._attempts.values()):
            attempt.end(AttemptFinish(reason=FinishReason.ABORT))
        # Closes the sockets of what ran, which tells the engine.
        self._pool.close()

    # ReportSubscriber: what the agents say.

    def on_hello(self, hello: AgentHello) -> None:
        known = self._hellos.get(hello.dp_rank)
        is_restart = known is not None and known.incarnation != hello.incarnation
        if is_restart and self._watch is not None:
            self._watch.note_hello(is_restart=True)
        self._hellos[hello.dp_rank] = hello
        if known is None or known.incarnation != hello.incarnation:
            log.info(
                "agent.greeted",
                engine_id=self._engine_id,
                dp_rank=hello.dp_rank,
                incarnation=hello.incarnation,
                engine_version=hello.engine_version,
                missing=hello.missing,
            )
            if self._watch is not None and not is_restart:
                self._watch.note_hello(is_restart=False)
            self._set_step_budget(RankId(self._engine_id, DpRank(hello.dp_rank)))
        elif known.missing != hello.missing:
            lost = [name for name in hello.missing if name not in known.missing]
            log.warning("feature.lost", engine_id=self._engine_id, features=lost)
        self._tell_lost_ranks(known, hello)

    def _tell_lost_ranks(self, known: AgentHello | None, hello: AgentHello) -> None:
        """Say at every hello what is lost, for what the listener knows ends with a restart."""
        if self._listener is None or self._description is None:
            return
        for dp_rank in hello.lost_dp_ranks:
            rank_id = RankId(self._engine_id, DpRank(dp_rank))
            reason = f"the engine itself, as its rank {hello.dp_rank} says, has stopped using it"
            self._listener.on_rank_lost(rank_id, reason)
        still_lost = {rank for each in self._hellos.values() for rank in each.lost_dp_ranks}
        before = known.lost_dp_ranks if known is not None else ()
        for dp_rank in sorted(set(before) - still_lost):
            self._listener.on_rank_back(RankId(self._engine_id, DpRank(dp_rank)))

    def _set_step_budget(self, rank_id: RankId) -> None:
        if self._reports is not None and self._step_budget_ns is not None:
            command = SetStepBudget(epoch=0, step_budget_ns=self._step_budget_ns)
            self._reports.send(rank_id, command)

    def on_report(self, report: RankReport) -> None:
        description = self._description
        if (
            description is not None
            and self._listener is not None
            and report.dp_rank < description.num_dp_ranks
        ):
            self._listener.on_report(report)

    def on_expert_load(self, load: ExpertLoad) -> None:
        self._expert_load = load

    def expert_load(self) -> ExpertLoad | None:
        """Implements `ExpertLoadSource`: what a worker of the engine said last."""
        return self._expert_load

    def on_goodbye(self, goodbye: AgentGoodbye) -> None:
        self._hellos.pop(goodbye.dp_rank, None)
        if self._watch is not None:
            self._watch.note_goodbye()

    # WatchHost: what the watch finds.

    def hellos(self) -> Mapping[int, AgentHello]:
        return self._hellos

    def on_up(self, description: EngineDescription) -> None:
        self._description = description
        if self._listener is not None:
            self._listener.on_engine_up(description)

    def on_down(self, reason: str, evidence: Evidence = Evidence.SOCKET) -> None:
        self._description = None
        self._expert_load = None
        # What they said was about the engine that is gone; a live agent greets again in a second.
        self._hellos.clear()
        if self._listener is not None:
            self._listener.on_engine_down(self._engine_id, reason, evidence)
        error = EngineUnreachableError(f"engine {self._engine_id} is down: {reason}")
        for attempt in list(self._attempts.values()):
            attempt.fail(error)

    # Helpers.

    def _tell_abort(self, attempt_id: AttemptId) -> None:
        request = self._dialect.abort(attempt_id)
        if request is not None and not self._is_closed:
            self._pool.request(
                "POST",
                request.path,
                headers=request.headers,
                body=request.body,
                receiver=_Nobody(),
            )

    def _release(self, attempt: "_Attempt") -> None:
        self._attempts.pop(attempt.attempt_id, None)

    def _suspect(self) -> None:
        """A stream broke: look at the engine now."""
        if self._watch is not None:
            self._watch.wake()

    def _watch_ended(self, task: asyncio.Task[None]) -> None:
        if (error := task_fault(task)) is not None:
            log.error("watch.failed", engine_id=self._engine_id, reason=repr(error))
            self.on_down(f"its watch failed: {error!r}")


class _Attempt:
    """One attempt and its HTTP exchange: from bytes to tokens and one end."""

    __slots__ = (
        "_body",
        "_driver",
        "_is_aborted",
        "_is_ended",
        "_reader",
        "_sink",
        "_splitter",
        "_status",
        "attempt_id",
        "exchange",
    )

    def __init__(
        self, driver: HttpDriver, attempt_id: AttemptId, sink: AttemptSink, *, reader: AnswerReader
    ) -> None:
        self.attempt_id = attempt_id
        self.exchange: HttpExchange | None = None
        self._driver = driver
        self._sink = sink
        self._reader = reader
        self._splitter = SseSplitter()
        self._status = 0
        self._body = bytearray()
        """Of an answer that is not a stream."""
        self._is_aborted = False
        self._is_ended = False

    def abort(self) -> None:
        """Close the connection now; the sink hears of it from the event loop. Idempotent."""
        self._is_aborted = True
        self._close_exchange()
        finish = AttemptFinish(reason=FinishReason.ABORT)
        asyncio.get_running_loop().call_soon(self.end, finish)

    def end(self, finish: AttemptFinish) -> None:
        """End well, unless it has ended."""
        if not self._is_ended:
            self._is_ended = True
            self._driver._release(self)
            self._sink.on_finish(self.attempt_id, finish)

    def fail(self, error: DriverError) -> None:
        """End badly, unless it has ended."""
        if not self._is_ended:
            self._is_ended = True
            self._driver._release(self)
            self._close_exchange()
            self._sink.on_failure(self.attempt_id, error)

    def _close_exchange(self) -> None:
        if self.exchange is not None:
            self.exchange.abort()

    # HttpReceiver.

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:  # noqa: ARG002
        self._status = status

    def on_body(self, data: bytes) -> None:
        if self._is_ended:
            return
        if self._status != 200:
            self._body += data[: MAX_REFUSAL_BYTES - len(self._body)]
        elif self._reader.is_whole:
            self._body += data[: MAX_WHOLE_BYTES - len(self._body)]
        else:
            self._read(self._splitter.feed(data))

    def _read(self, events: list[bytes]) -> None:
        """Hand on what these events say."""
        reader = self._reader
        error: DriverError | None = None
        try:
            reader.feed(events)
        except DriverError as raised:
            error = raised
        # Tokens that were read before the fault are the client's.
        if reader.token_ids:
            token_ids, logprobs = reader.token_ids, reader.logprobs
            reader.clear()
            self._sink.on_tokens(self.attempt_id, token_ids, logprobs or None)
        if self._is_aborted:
            return
        if error is not None:
            self._driver._suspect()
            self.fail(error)
        elif reader.is_done:
            if reader.is_cut:
                self._close_exchange()
                self._driver._tell_abort(self.attempt_id)
            self._end()

    def on_end(self) -> None:
        if self._status != 200:
            self.fail(self._driver._dialect.translate_refusal(self._status, bytes(self._body)))
            return
        if self._reader.is_whole and not self._is_ended:
            self._read([bytes(self._body)])
        self._end()

    def on_error(self, error: DriverError) -> None:
        self._driver._suspect()
        if self._reader.end is not None:
            self._end()
        else:
            self.fail(error)

    def _end(self) -> None:
        """The stream is over: well if the engine said why, badly if it just stopped."""
        end = self._reader.end
        if end is None:
            self.fail(EngineUnreachableError("the stream ended before the answer did"))
            return
        finish = AttemptFinish(
            reason=end.reason,
            stop_token_id=end.stop_token_id,
            num_cached_tokens=self._reader.num_cached_tokens,
            kv_transfer=self._reader.kv_transfer,
        )
        self.end(finish)


class _Nobody:
    """Receives an answer that nobody needs."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        pass

    def on_body(self, data: bytes) -> None:
        pass

    def on_end(self) -> None:
        pass

    def on_error(self, error: DriverError) -> None:
        pass
