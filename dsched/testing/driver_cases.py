"""One started driver for each kind of engine, behind one face, for the conformance tests.

`sim` is the simulator on wall time; `double` vLLM's driver over a stand-in server, `vllm` the same
driver over a real one, `vllm-group` over a real EP group of two DP ranks; `sglang-double`,
`sglang-double-dp2`, `sglang` and `sglang-dp2` the same for SGLang with one and two DP ranks.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from dsched.clock import SystemClock
from dsched.costs.affine import AffineStepCost
from dsched.drivers.base import Driver, EngineDescription
from dsched.drivers.http import HttpPool
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.driver import SglangDriver
from dsched.drivers.vllm import VllmDriver
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.ids import AttemptId, AttemptIds, EngineId
from dsched.sim.driver import SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig
from dsched.sim.kv_store import SimKvStore
from dsched.sim.loop import AsyncioTimers
from dsched.sim.model import SimModel
from dsched.testing.engine_double import EngineDouble
from dsched.testing.engines import TinyEngines
from dsched.testing.recorders import RecordingListener, RecordingSink
from dsched.testing.sglang_double import SglangDouble
from dsched.testing.vllm_double import VllmDouble


@dataclass(slots=True, kw_only=True)
class DriverCase:
    """A started driver whose engine is up."""

    driver: Driver
    listener: RecordingListener
    description: EngineDescription
    direct: Callable[[Sequence[int], int], Awaitable[list[int]]]
    """What the engine answers to (prompt, number of tokens) when it is asked without the driver."""
    kill: Callable[[], Awaitable[None]]
    ids: AttemptIds
    sinks: list[RecordingSink]

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        dp_rank: int = 0,
        kv_transfer: dict[str, Any] | None = None,
        **sampling: Any,  # noqa: ANN401
    ) -> RecordingSink:
        """Start a greedy attempt; its sink knows the attempt id."""
        attempt_id = self.ids.next_id()
        sink = RecordingSink(attempt_id)
        self.sinks.append(sink)
        command = GenerateCommand(
            attempt_id=attempt_id,
            epoch=1,
            dp_rank=dp_rank,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),
            kv_transfer=kv_transfer,
        )
        self.driver.generate(command, sink)
        return sink

    def abort(self, sink: RecordingSink) -> None:
        """Abort the attempt of `sink`."""
        assert sink.attempt_id is not None
        self.driver.abort(AttemptId(sink.attempt_id))


@asynccontextmanager
async def open_case(kind: str, engines: TinyEngines | None) -> AsyncIterator[DriverCase]:
    """Open a case; at the end close the driver and check what every sink was told."""
    opened = open_real(engines) if engines is not None else OPENERS[kind]()
    async with opened as case:
        yield case
        case.driver.close()
        for sink in case.sinks:
            assert sink.is_ended, f"attempt {sink.attempt_id} never ended"
            assert sink.violations == []


async def start_case(
    driver: Driver,
    direct: Callable[[Sequence[int], int], Awaitable[list[int]]],
    kill: Callable[[], Awaitable[None]],
) -> DriverCase:
    listener = RecordingListener()
    driver.start(listener)
    return DriverCase(
        driver=driver,
        listener=listener,
        description=await listener.up(),
        direct=direct,
        kill=kill,
        ids=AttemptIds(process_tag=id(listener)),
        sinks=[],
    )


@asynccontextmanager
async def open_sim() -> AsyncIterator[DriverCase]:
    model = SimModel(vocab_size=512)
    engine = SimEngine(
        SimEngineConfig(
            num_dp_ranks=2,
            kv_capacity_tokens=65_536,
            max_running_requests=64,
            max_step_tokens=512,
            max_model_len=1_024,
        ),
        model=model,
        cost=AffineStepCost(base_ns=2_000_000, per_decode_request_ns=1_000),
    )
    timers = AsyncioTimers(SystemClock(), asyncio.get_running_loop())
    driver = SimDriver(EngineId("sim-0"), engine, timers, kv_store=SimKvStore())

    async def direct(prompt: Sequence[int], num_tokens: int) -> list[int]:
        return list(model.stream(tuple(prompt), num_tokens))

    async def kill() -> None:
        driver.kill()

    yield await start_case(driver, direct, kill)


@asynccontextmanager
async def open_double(kind: str, num_dp_ranks: int) -> AsyncIterator[DriverCase]:
    """A driver over a stand-in server of its engine."""
    make_driver, make_double = KINDS[kind]
    reports = ReportReader(endpoint="tcp://127.0.0.1:0")
    reports.start()
    double = make_double(agent_endpoint=reports.endpoint, num_dp_ranks=num_dp_ranks)
    await double.start()
    driver = make_driver(engine_id=EngineId("double-0"), url=double.url, reports=reports)

    async def direct(prompt: Sequence[int], num_tokens: int) -> list[int]:
        return double.model.stream(prompt, num_tokens)

    try:
        yield await start_case(driver, direct, double.kill)
    finally:
        driver.close()
        reports.close()
        await double.stop()


@asynccontextmanager
async def open_real(engines: TinyEngines) -> AsyncIterator[DriverCase]:
    """A driver over a running server."""
    make_driver, _ = KINDS[engines.kind]
    engine = engines.engines[0]
    reports = ReportReader(endpoint=engines.agent_endpoint)
    reports.start()
    pool = HttpPool(engine.url)
    driver = make_driver(engine_id=engine.engine_id, url=engine.url, reports=reports)

    async def direct(prompt: Sequence[int], num_tokens: int) -> list[int]:
        return await engines.ask(pool, prompt, num_tokens)

    async def kill() -> None:
        engine.kill()

    try:
        yield await start_case(driver, direct, kill)
    finally:
        driver.close()
        pool.close()
        reports.close()


KINDS: Final[dict[str, tuple[type[VllmDriver] | type[SglangDriver], type[EngineDouble]]]] = {
    "vllm": (VllmDriver, VllmDouble),
    "sglang": (SglangDriver, SglangDouble),
}
OPENERS: Final[dict[str, Callable[[], AbstractAsyncContextManager[DriverCase]]]] = {
    "sim": open_sim,
    "double": lambda: open_double("vllm", 1),
    "sglang-double": lambda: open_double("sglang", 1),
    "sglang-double-dp2": lambda: open_double("sglang", 2),
}
