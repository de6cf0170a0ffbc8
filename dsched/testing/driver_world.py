"""A driver of one kind, stand-in servers for it, and what they said: for tests of that driver."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dsched.drivers.http_driver import HttpDriver
from dsched.drivers.reports import ReportReader
from dsched.drivers.wire import GenerateCommand, KvMeeting, SamplingParams
from dsched.ids import AttemptId, AttemptIds, EngineId
from dsched.testing.engine_double import EngineDouble
from dsched.testing.recorders import RecordingListener, RecordingSink

ENGINE = EngineId("double-0")
PROMPT = (5, 6, 7, 8)

AnyDriver = TypeVar("AnyDriver", bound=HttpDriver)
AnyDouble = TypeVar("AnyDouble", bound=EngineDouble)


class DriverWorld(Generic[AnyDriver, AnyDouble]):
    """Makes drivers and doubles as a test needs them, and ends them all."""

    def __init__(
        self,
        make_driver: Callable[..., AnyDriver],
        make_double: Callable[..., AnyDouble],
        *,
        reports: ReportReader | None = None,
    ) -> None:
        """With `reports`, doubles have agents that are heard by the drivers."""
        self.listener = RecordingListener()
        self.ids = AttemptIds(process_tag=7)
        self.doubles: list[AnyDouble] = []
        self.drivers: list[AnyDriver] = []
        self._make_driver = make_driver
        self._make_double = make_double
        self._reports = reports

    async def double(
        self,
        *,
        port: int = 0,
        has_agent: bool = True,
        **fields: Any,  # noqa: ANN401
    ) -> AnyDouble:
        """Start a stand-in server."""
        if self._reports is not None and has_agent:
            fields.setdefault("agent_endpoint", self._reports.endpoint)
        double = self._make_double(**({"engine_id": ENGINE} | fields))
        self.doubles.append(double)
        await double.start(port)
        return double

    def driver(
        self,
        url: str,
        *,
        has_reports: bool = True,
        **fields: Any,  # noqa: ANN401
    ) -> AnyDriver:
        """Start a driver; its listener is the world's."""
        if self._reports is not None and has_reports:
            fields.setdefault("reports", self._reports)
        driver = self._make_driver(engine_id=ENGINE, url=url, **fields)
        self.drivers.append(driver)
        driver.start(self.listener)
        return driver

    async def up(self, double: AnyDouble, **fields: Any) -> AnyDriver:  # noqa: ANN401
        """Start a driver over a double and wait until it has found it."""
        driver = self.driver(double.url, **fields)
        await self.listener.wait(lambda each: bool(each.ups), 10)
        return driver

    def generate(
        self,
        max_tokens: int = 8,
        *,
        dp_rank: int = 0,
        prompt: tuple[int, ...] = PROMPT,
        attempt_id: AttemptId | None = None,
        meeting: KvMeeting | None = None,
        driver: AnyDriver | None = None,
        **sampling: Any,  # noqa: ANN401
    ) -> RecordingSink:
        """Start an attempt, of the driver that was made last unless one is named."""
        sink = RecordingSink(attempt_id or self.ids.next_id())
        command = GenerateCommand(
            attempt_id=str(sink.attempt_id),
            epoch=1,
            dp_rank=dp_rank,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            kv_meeting=meeting,
        )
        (driver or self.drivers[-1]).generate(command, sink)
        return sink

    async def close(self) -> None:
        """End all."""
        for driver in self.drivers:
            driver.close()
        for double in self.doubles:
            await double.stop()
