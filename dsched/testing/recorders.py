"""Sinks, listeners and streams that remember what they heard and refuse what breaks a contract."""

import asyncio
from collections.abc import Callable, Sequence

from dsched.controller.request import RequestError, RequestFinish
from dsched.drivers.base import AttemptFinish, EngineDescription
from dsched.drivers.wire import RankReport, TokenLogprob
from dsched.errors import DriverError
from dsched.ids import AttemptId, EngineId, RankId
from dsched.states import Evidence


class RecordingSink:
    """An `AttemptSink` for one attempt.

    A token after the end, a second end, or logprobs that do not fit the tokens are kept in
    `violations`, because an exception here would be lost in an event loop.
    """

    def __init__(self, attempt_id: AttemptId | None = None) -> None:
        self.attempt_id = attempt_id
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.num_chunks = 0
        self.finish: AttemptFinish | None = None
        self.error: DriverError | None = None
        self.violations: list[str] = []
        self._news = asyncio.Event()

    @property
    def is_ended(self) -> bool:
        return self.finish is not None or self.error is not None

    def on_tokens(
        self,
        attempt_id: AttemptId,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
    ) -> None:
        self._check(attempt_id, f"{len(token_ids)} tokens")
        if not token_ids:
            self.violations.append("a chunk without tokens")
        if logprobs is not None and [each.token_id for each in logprobs] != list(token_ids):
            self.violations.append("logprobs of other tokens")
        self.token_ids += token_ids
        self.logprobs += logprobs or ()
        self.num_chunks += 1
        self._news.set()

    def on_finish(self, attempt_id: AttemptId, finish: AttemptFinish) -> None:
        self._check(attempt_id, repr(finish))
        self.finish = finish
        self._news.set()

    def on_failure(self, attempt_id: AttemptId, error: DriverError) -> None:
        self._check(attempt_id, repr(error))
        self.error = error
        self._news.set()

    async def wait(self, is_enough: Callable[["RecordingSink"], bool], timeout_s: float) -> None:
        """Wait until `is_enough(self)`; raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while not is_enough(self):
                self._news.clear()
                await self._news.wait()

    async def ended(self, timeout_s: float = 30.0) -> None:
        """Wait for the end; raises `TimeoutError`."""
        await self.wait(lambda sink: sink.is_ended, timeout_s)

    def _check(self, attempt_id: AttemptId, what: str) -> None:
        if self.attempt_id is not None and attempt_id != self.attempt_id:
            self.violations.append(f"{what} for attempt {attempt_id}")
        if self.is_ended:
            self.violations.append(f"{what} after the end")


class RecordingListener:
    """An `EngineListener` for one engine, or several."""

    def __init__(self) -> None:
        self.ups: list[EngineDescription] = []
        self.downs: list[tuple[EngineId, str]] = []
        self.evidence: list[Evidence] = []
        """Of each of them."""
        self.lost_ranks: list[tuple[RankId, str]] = []
        """Rank and reason, each time one was told."""
        self.ranks_back: list[RankId] = []
        self.reports: list[RankReport] = []
        self._news = asyncio.Event()

    def on_engine_up(self, description: EngineDescription) -> None:
        self.ups.append(description)
        self._news.set()

    def on_engine_down(
        self,
        engine_id: EngineId,
        reason: str,
        evidence: Evidence = Evidence.SOCKET,
    ) -> None:
        self.downs.append((engine_id, reason))
        self.evidence.append(evidence)
        self._news.set()

    def on_rank_lost(self, rank_id: RankId, reason: str) -> None:
        self.lost_ranks.append((rank_id, reason))
        self._news.set()

    def on_rank_back(self, rank_id: RankId) -> None:
        self.ranks_back.append(rank_id)
        self._news.set()

    def on_report(self, report: RankReport) -> None:
        self.reports.append(report)
        self._news.set()

    async def wait(
        self, is_enough: Callable[["RecordingListener"], bool], timeout_s: float
    ) -> None:
        """Wait until `is_enough(self)`; raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            while not is_enough(self):
                self._news.clear()
                await self._news.wait()

    async def up(self, timeout_s: float = 30.0) -> EngineDescription:
        """Wait for the first engine that comes up, and return what it is."""
        await self.wait(lambda listener: bool(listener.ups), timeout_s)
        return self.ups[-1]


class RecordingStream:
    """A `RequestStream`: what the client of one request heard. A token that is lost, repeated or
    late fails the test at once."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ends: list[RequestFinish | RequestError] = []

    def on_tokens(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,  # noqa: ARG002
    ) -> None:
        assert first_index == len(self.token_ids), "a token was lost or repeated"
        assert not self.ends, "a token after the end"
        self.token_ids += token_ids

    def on_finish(self, finish: RequestFinish) -> None:
        self.ends.append(finish)

    def on_error(self, error: RequestError) -> None:
        self.ends.append(error)

    @property
    def finish(self) -> RequestFinish:
        """Its one end, which must be a good one."""
        assert len(self.ends) == 1
        assert isinstance(self.ends[0], RequestFinish), self.ends[0]
        return self.ends[0]

    @property
    def error(self) -> RequestError:
        """Its one end, which must be a bad one."""
        assert len(self.ends) == 1
        assert isinstance(self.ends[0], RequestError), self.ends[0]
        return self.ends[0]
