"""The engines' own recovery over HTTP: status, retry, scale out; one operation at a time.

Two small clients. `dsched.drivers.rank_watch` asks the first for lost ranks, and lets it repair
them if the operator allows that; scaling is an operator's word, dsched never scales by itself.

- `VllmRecovery`: vLLM 0.32 with `--enable-fault-tolerance` (external load balancer and a fault
  tolerant all-to-all backend): `GET /fault_tolerance/status` lists healthy, unhealthy and dead
  engine cores, `POST /fault_tolerance/apply {"instruction": "retry", "params": {}}` answers 202 and
  works in the background. Every server of the group has to be asked: the repair is collective.
  Elastic EP: `POST /scale_elastic_ep {"new_data_parallel_size": N, "drain_timeout": S}`.
- `SglangRecovery`: SGLang 0.5.23 with `--elastic-ep-backend`, which can only grow:
  `POST /scale_elastic_ep {"new_ep_size": N}`, `GET /is_scaling_elastic_ep`.

Neither engine's calls are idempotent, so each operation gets an id of ours that is sent along
(`X-Request-Id`, and named in every log line) and remembered: asked again with the same id, the
client waits for what runs or gives the same result, and never sends it twice. A second operation
beside a running one is refused. What does not end in time is given up; a vLLM scaling that failed
half way is rolled back by asking for the old size once.

Everything runs on one event loop; every answer of an engine is checked, an unknown shape is a
`DriverError`. Shapes are those of the engines' sources (`entrypoints/serve/fault_tolerance`,
`v1/engine/core_client.py`; `srt/entrypoints/elastic_ep.py`, `srt/managers/tokenizer_manager.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec
import structlog

from dsched.clock import Clock, SystemClock
from dsched.drivers.http import HttpPool
from dsched.drivers.url import normalize_engine_url
from dsched.errors import DriverError, EngineRefusedError

CALL_TIMEOUT_S: Final = 10.0
"""For one HTTP call. Below: a busy server looks dead. Above: a dead one holds the operation."""
POLL_INTERVAL_S: Final = 0.5
RETRY_TIMEOUT_S: Final = 130.0
"""For a retry; vLLM itself gives up after `engine_recovery_timeout_sec`, 120 s by default."""
SCALE_TIMEOUT_S: Final = 300.0
"""For a scaling; vLLM's from 2 to 3 ranks took 33 s on H200 (vllm-project/vllm#53947)."""
MAX_KEPT_RESULTS: Final = 64

log = structlog.get_logger(__name__)


class EngineHealth(StrEnum):
    """vLLM's words for one of its engines."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """What a server says of one of its engine cores."""

    health: EngineHealth
    reason: str = ""
    """The fault, or why the last repair failed."""
    failed_request_id: str | None = None
    """The server's own id of the repair that failed last."""


class OperationOutcome(StrEnum):
    """How an operation ended."""

    DONE = "done"
    ROLLED_BACK = "rolled_back"
    """It failed, and the engine is back at its old size."""
    FAILED = "failed"
    """It failed, and so did going back: look at the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationResult:
    """The end of one operation."""

    operation_id: str
    outcome: OperationOutcome
    reason: str = ""


class ElasticState(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's answer of `/is_scaling_elastic_ep`, under its own names."""

    is_scaling_elastic_ep: bool
    effective_ep_size: int
    pending_ep_size: int | None = None
    scale_phase: str | None = None
    last_error: str | None = None


class _HopelessError(DriverError):
    """Waiting longer changes nothing."""


class _Operations:
    """Runs one operation at a time, each id once."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._running: tuple[str, asyncio.Task[OperationResult]] | None = None
        self._results: dict[str, OperationResult] = {}

    async def run(
        self, operation_id: str, work: Callable[[], Awaitable[OperationResult]]
    ) -> OperationResult:
        """Run `work`, or join the operation that has this id already.

        Raises:
            ValueError: the id is empty.
            EngineRefusedError: another operation runs.
        """
        if not operation_id:
            raise ValueError("operation_id is ''; it must name the operation")
        if operation_id in self._results:
            return self._results[operation_id]
        if self._running is not None:
            running_id, task = self._running
            if running_id != operation_id:
                raise EngineRefusedError(
                    409, f"operation {running_id!r} still runs on {self._engine}"
                )
            return await asyncio.shield(task)
        task = asyncio.ensure_future(self._guard(operation_id, work))
        self._running = (operation_id, task)
        return await asyncio.shield(task)

    async def _guard(
        self, operation_id: str, work: Callable[[], Awaitable[OperationResult]]
    ) -> OperationResult:
        log.info("recovery.started", engine=self._engine, operation_id=operation_id)
        try:
            result = await work()
        except DriverError as error:
            result = OperationResult(
                operation_id=operation_id, outcome=OperationOutcome.FAILED, reason=str(error)
            )
        finally:
            self._running = None
        self._results[operation_id] = result
        while len(self._results) > MAX_KEPT_RESULTS:
            del self._results[next(iter(self._results))]
        log.info(
            "recovery.ended",
            engine=self._engine,
            operation_id=operation_id,
            outcome=result.outcome.value,
            reason=result.reason,
        )
        return result


class _Api:
    """JSON calls to one server."""

    def __init__(self, url: str, *, clock: Clock, poll_interval_s: float) -> None:
        self.url = normalize_engine_url(url)
        self._pool = HttpPool(self.url, max_connections=2)
        self._clock = clock
        self._poll_interval_s = poll_interval_s

    async def get(self, path: str) -> Any:  # noqa: ANN401
        """Raises `DriverError`."""
        status, _, body = await self._pool.fetch("GET", path, timeout_s=CALL_TIMEOUT_S)
        return _read(path, status, body, accepted=(200,))

    async def post(
        self, path: str, document: dict[str, Any], *, operation_id: str, timeout_s: float
    ) -> Any:  # noqa: ANN401
        """Raises `DriverError`."""
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", operation_id.encode()),
        ]
        status, _, body = await self._pool.fetch(
            "POST", path, headers=headers, body=msgspec.json.encode(document), timeout_s=timeout_s
        )
        return _read(path, status, body, accepted=(200, 202))

    async def wait_until(
        self, is_so: Callable[[], Awaitable[bool]], *, timeout_s: float, what: str
    ) -> None:
        """Poll. A call that fails meanwhile is asked again: servers answer 503 as they change.

        Raises:
            DriverError: not so in time; the message has the last answer.
        """
        end_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        last = "no answer"
        while self._clock.now_ns() < end_ns:
            try:
                if await is_so():
                    return
                last = "not yet"
            except _HopelessError:
                raise
            except DriverError as error:
                last = str(error)
            await asyncio.sleep(self._poll_interval_s)
        raise DriverError(f"{what} has not ended after {timeout_s:g} s: {last}")

    def close(self) -> None:
        self._pool.close()


def _read(path: str, status: int, body: bytes, *, accepted: tuple[int, ...]) -> Any:  # noqa: ANN401
    if status not in accepted:
        raise EngineRefusedError(status, f"{path} answers {status}: {body[:200]!r}")
    try:
        return msgspec.json.decode(body) if body.strip() else None
    except msgspec.DecodeError as error:
        raise DriverError(f"{path} answers what is not JSON: {error}") from error


class VllmRecovery:
    """Fault tolerance and elastic EP of one vLLM server."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Connect to nothing yet. Raises `ConfigError` for what is no address."""
        self._api = _Api(url, clock=clock or SystemClock(), poll_interval_s=poll_interval_s)
        self._operations = _Operations(self._api.url)

    async def status(self) -> dict[int, RankHealth]:
        """Health of every engine core (DP rank) of the server, by vLLM's index.

        Raises:
            DriverError: no answer, fault tolerance is off (404), or an answer of another shape.
        """
        document = await self._api.get("/fault_tolerance/status")
        return read_fault_status(document)

    async def retry(
        self, *, operation_id: str, timeout_s: float = RETRY_TIMEOUT_S
    ) -> OperationResult:
        """Let the server rebuild its DP group, and wait until every core is healthy.

        vLLM refuses it while a core is healthy (the group is not yet in fault) or dead (only a
        restart helps); both end the operation at once. Its requests were aborted when the fault
        happened, and dsched has handed them over by then. Raises `EngineRefusedError` while another
        operation runs.
        """

        async def work() -> OperationResult:
            answer = await self._api.post(
                "/fault_tolerance/apply",
                {"instruction": "retry", "params": {}},
                operation_id=operation_id,
                timeout_s=CALL_TIMEOUT_S,
            )
            request_id = answer.get("request_id") if isinstance(answer, dict) else None

            async def is_healthy() -> bool:
                return _is_repaired(await self.status(), request_id)

            await self._api.wait_until(is_healthy, timeout_s=timeout_s, what="the retry")
            return OperationResult(operation_id=operation_id, outcome=OperationOutcome.DONE)

        return await self._operations.run(operation_id, work)

    async def scale(
        self,
        num_dp_ranks: int,
        *,
        old_num_dp_ranks: int,
        operation_id: str,
        drain_timeout_s: int = 120,
        timeout_s: float = SCALE_TIMEOUT_S,
    ) -> OperationResult:
        """Change the number of DP ranks. The call itself lasts as long as the scaling.

        Raises:
            ValueError: a number below 1.
            EngineRefusedError: another operation runs.
        """
        _check_sizes(num_dp_ranks, old_num_dp_ranks)

        async def ask(size: int) -> None:
            body = {"new_data_parallel_size": size, "drain_timeout": drain_timeout_s}
            await self._api.post(
                "/scale_elastic_ep", body, operation_id=operation_id, timeout_s=timeout_s
            )
            await self._api.wait_until(
                self._answers, timeout_s=timeout_s, what=f"scaling to {size} ranks"
            )

        return await self._operations.run(
            operation_id,
            lambda: _scale_or_go_back(ask, num_dp_ranks, old_num_dp_ranks, operation_id),
        )

    async def _answers(self) -> bool:
        # A commit that failed can leave a server that answers 503 for ever (vllm#50778).
        await self._api.get("/v1/models")
        return True

    def close(self) -> None:
        self._api.close()


class SglangRecovery:
    """Elastic EP of one SGLang server."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        """Connect to nothing yet. Raises `ConfigError` for what is no address."""
        self._api = _Api(url, clock=clock or SystemClock(), poll_interval_s=poll_interval_s)
        self._operations = _Operations(self._api.url)

    async def state(self) -> ElasticState:
        """Raises `DriverError` for no answer, elastic EP that is off (404), or another shape."""
        document = await self._api.get("/is_scaling_elastic_ep")
        try:
            return msgspec.convert(document, ElasticState)
        except msgspec.ValidationError as error:
            raise DriverError(
                f"/is_scaling_elastic_ep answers {str(document)[:200]}: {error}"
            ) from error

    async def scale(
        self,
        ep_size: int,
        *,
        old_ep_size: int,
        operation_id: str,
        timeout_s: float = SCALE_TIMEOUT_S,
    ) -> OperationResult:
        """Add EP ranks, and wait until the server serves with them.

        There is no way back to ask for: a scaling that failed is rolled back if the server says
        that it serves at its old size.

        Raises:
            ValueError: not more ranks than before.
            EngineRefusedError: another operation of ours runs.
        """
        _check_sizes(ep_size, old_ep_size)
        if ep_size <= old_ep_size:
            raise ValueError(f"the new size is {ep_size}; SGLang only grows, from {old_ep_size}")

        async def is_done() -> bool:
            return not (await self.state()).is_scaling_elastic_ep

        async def ask() -> None:
            if not await is_done():
                raise EngineRefusedError(409, f"{self._api.url} is scaling already")
            await self._api.post(
                "/scale_elastic_ep",
                {"new_ep_size": ep_size},
                operation_id=operation_id,
                timeout_s=CALL_TIMEOUT_S,
            )
            await self._api.wait_until(is_done, timeout_s=timeout_s, what=f"scaling to {ep_size}")
            state = await self.state()
            if state.effective_ep_size != ep_size:
                raise DriverError(
                    f"scaling to {ep_size} ended at {state.effective_ep_size} "
                    f"({state.scale_phase}): {state.last_error}"
                )

        async def work() -> OperationResult:
            try:
                await ask()
            except DriverError as error:
                reason = str(error)
            else:
                return OperationResult(operation_id=operation_id, outcome=OperationOutcome.DONE)
            state = await self.state()
            is_back = not state.is_scaling_elastic_ep and state.effective_ep_size == old_ep_size
            return OperationResult(
                operation_id=operation_id,
                outcome=OperationOutcome.ROLLED_BACK if is_back else OperationOutcome.FAILED,
                reason=reason,
            )

        return await self._operations.run(operation_id, work)

    def close(self) -> None:
        self._api.close()


class _CoreStatus(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    status: EngineHealth
    fault_info: str | None = None
    ft_error: str | None = None
    last_ft_request_id: str | None = None


class _FaultStatus(msgspec.Struct, frozen=True, kw_only=True):
    engines: list[_CoreStatus]


def read_fault_status(document: object) -> dict[int, RankHealth]:
    """Read vLLM's answer, by its index of the core. Raises `DriverError` for another shape.

    >>> found = read_fault_status({"schema_version": 1, "total_engines": 1, "engines": [
    ...     {"id": 3, "status": "unhealthy", "fault_info": "RuntimeError"}]})
    >>> found[3].health.value, found[3].reason
    ('unhealthy', 'RuntimeError')
    """
    try:
        cores = msgspec.convert(document, _FaultStatus).engines
    except msgspec.ValidationError:
        cores = []
    if not cores:
        raise DriverError(
            f"/fault_tolerance/status answers {str(document)[:200]}, not a health for each engine"
        )
    return {
        core.id: RankHealth(
            health=core.status,
            reason=core.ft_error or core.fault_info or "",
            failed_request_id=core.last_ft_request_id,
        )
        for core in sorted(cores, key=lambda core: core.id)
    }


def _is_repaired(ranks: dict[int, RankHealth], request_id: object) -> bool:
    """Raises `_HopelessError` when this repair failed, or cannot help."""
    for index, rank in ranks.items():
        if rank.health is EngineHealth.DEAD:
            raise _HopelessError(f"core {index} is dead: {rank.reason or 'only a restart helps'}")
        if request_id is not None and rank.failed_request_id == request_id:
            raise _HopelessError(f"core {index} refuses: {rank.reason}")
    return all(rank.health is EngineHealth.HEALTHY for rank in ranks.values())


def _check_sizes(new_size: int, old_size: int) -> None:
    for name, value in (("new", new_size), ("old", old_size)):
        if value < 1:
            raise ValueError(f"the {name} size is {value}; it must be at least 1")


async def _scale_or_go_back(
    ask: Callable[[int], Awaitable[None]], new_size: int, old_size: int, operation_id: str
) -> OperationResult:
    try:
        await ask(new_size)
    except DriverError as error:
        reason = str(error)
        # Refused before anything was done: there is nothing to go back from.
        is_untouched = isinstance(error, EngineRefusedError) and error.status < 500
    else:
        return OperationResult(operation_id=operation_id, outcome=OperationOutcome.DONE)
    if is_untouched:
        return OperationResult(
            operation_id=operation_id, outcome=OperationOutcome.ROLLED_BACK, reason=reason
        )
    try:
        await ask(old_size)
    except DriverError as error:
        return OperationResult(
            operation_id=operation_id,
            outcome=OperationOutcome.FAILED,
            reason=f"{reason}; going back to {old_size}: {error}",
        )
    return OperationResult(
        operation_id=operation_id, outcome=OperationOutcome.ROLLED_BACK, reason=reason
    )
