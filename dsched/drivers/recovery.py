"""The engines' own recovery over HTTP: retry, scale out, scale in; one operation at a time.

Two small clients with one shape. They are asked by an operator (or by what the operator runs on
`ControllerObserver.on_membership_changed`); dsched never scales by itself.

- `VllmRecovery`: vLLM 0.32 with `--enable-fault-tolerance` (external load balancer and a fault
  tolerant all-to-all backend): `GET /fault_tolerance/status` names healthy, unhealthy and dead
  engines, `POST /fault_tolerance/apply {"instruction": "retry", "params": {}}` answers 202 and
  works in the background. Elastic EP: `POST /scale_elastic_ep {"new_data_parallel_size": N,
  "drain_timeout": S}`.
- `SglangRecovery`: SGLang 0.5.23 with elastic EP: `POST /scale_elastic_ep {"new_ep_size": N}`,
  `GET /is_scaling_elastic_ep`.

Neither engine's calls are idempotent, so each operation gets an id of ours that is sent along
(`X-Request-Id`, and named in every log line) and remembered: asked again with the same id, the
client waits for what runs or gives the same result, and never sends it twice. A second operation
beside a running one is refused. What does not end in time is given up; a scaling that failed half
way is rolled back by asking for the old size once.

Everything runs on one event loop; every answer of an engine is checked, an unknown shape is a
`DriverError`.
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

    async def status(self) -> dict[int, EngineHealth]:
        """Health of every engine (DP rank) of the server.

        Raises:
            DriverError: no answer, fault tolerance is off (404), or an answer of another shape.
        """
        document = await self._api.get("/fault_tolerance/status")
        return read_fault_status(document)

    async def retry(
        self, *, operation_id: str, timeout_s: float = RETRY_TIMEOUT_S
    ) -> OperationResult:
        """Let the server rebuild its DP group, and wait until every engine is healthy.

        Its requests were aborted when the fault happened; dsched has handed them over by then.
        Raises `EngineRefusedError` while another operation runs.
        """

        async def is_healthy() -> bool:
            return set((await self.status()).values()) == {EngineHealth.HEALTHY}

        async def work() -> OperationResult:
            await self._api.post(
                "/fault_tolerance/apply",
                {"instruction": "retry", "params": {}},
                operation_id=operation_id,
                timeout_s=CALL_TIMEOUT_S,
            )
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

    async def is_scaling(self) -> bool:
        """Raises `DriverError` for no answer or one of another shape."""
        document = await self._api.get("/is_scaling_elastic_ep")
        value = document.get("is_scaling") if isinstance(document, dict) else document
        if not isinstance(value, bool):
            raise DriverError(f"/is_scaling_elastic_ep answers {document!r}, not true or false")
        return value

    async def scale(
        self,
        ep_size: int,
        *,
        old_ep_size: int,
        operation_id: str,
        timeout_s: float = SCALE_TIMEOUT_S,
    ) -> OperationResult:
        """Change the number of EP ranks, and wait until the server says it is done.

        Raises:
            ValueError: a number below 1.
            EngineRefusedError: another operation runs, ours or the server's own.
        """
        _check_sizes(ep_size, old_ep_size)

        async def is_done() -> bool:
            return not await self.is_scaling()

        async def ask(size: int) -> None:
            await self._api.post(
                "/scale_elastic_ep",
                {"new_ep_size": size},
                operation_id=operation_id,
                timeout_s=CALL_TIMEOUT_S,
            )
            await self._api.wait_until(is_done, timeout_s=timeout_s, what=f"scaling to {size}")

        async def work() -> OperationResult:
            if await self.is_scaling():
                raise EngineRefusedError(409, f"{self._api.url} is scaling already")
            return await _scale_or_go_back(ask, ep_size, old_ep_size, operation_id)

        return await self._operations.run(operation_id, work)

    def close(self) -> None:
        self._api.close()


def read_fault_status(document: object) -> dict[int, EngineHealth]:
    """Read vLLM's answer, by rank. Raises `DriverError` for another shape.

    >>> read_fault_status({"engines": {"0": {"status": "healthy"}, "1": {"status": "dead"}}})
    {0: <EngineHealth.HEALTHY: 'healthy'>, 1: <EngineHealth.DEAD: 'dead'>}
    """
    engines = document.get("engines", document) if isinstance(document, dict) else None
    found: dict[int, EngineHealth] = {}
    try:
        for rank, value in (engines or {}).items():
            word = value["status"] if isinstance(value, dict) else value
            found[int(rank)] = EngineHealth(str(word).lower())
    except (KeyError, TypeError, ValueError):
        found.clear()
    if not found:
        raise DriverError(
            f"/fault_tolerance/status answers {str(document)[:200]}, not a health for each engine"
        )
    return dict(sorted(found.items()))


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
