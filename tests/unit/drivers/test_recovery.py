"""The engines' own recovery: contract with servers of the documented shapes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from dsched.clock import SystemClock
from dsched.drivers.recovery import (
    EngineHealth,
    OperationOutcome,
    RankHealth,
    SglangRecovery,
    VllmRecovery,
    read_fault_status,
)
from dsched.errors import ConfigError, DriverError, EngineRefusedError
from dsched.testing.ports import refusing_port


class FakeServer:
    """Recovery endpoints of both engines, as documented for vLLM 0.32 and SGLang 0.5.23."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, str | None]] = []
        self.cores: list[dict[str, Any]] = [
            {"id": 0, "status": "healthy"},
            {"id": 1, "status": "unhealthy", "fault_info": "RuntimeError"},
        ]
        self.heals = True
        self.ep_size = 4
        self.can_grow = True
        self.num_repairs = 0
        self.scale_status: dict[int, int] = {}
        """Answer to a wanted size; 200 where it is not here."""
        self.num_polls_scaling = 2
        self.models_status = 200
        self.num_scaling_polls = 0
        self.is_stuck_at: int | None = None
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes(
            [
                web.get("/fault_tolerance/status", self._status),
                web.post("/fault_tolerance/apply", self._apply),
                web.post("/scale_elastic_ep", self._scale),
                web.get("/is_scaling_elastic_ep", self._is_scaling),
                web.get("/v1/models", self._models),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _status(self, _: web.Request) -> web.Response:
        document = {"schema_version": 1, "total_engines": len(self.cores), "engines": self.cores}
        return web.json_response(document)

    async def _note(self, request: web.Request) -> Any:
        body = await request.json()
        self.calls.append((request.path, body, request.headers.get("x-request-id")))
        return body

    async def _apply(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        if body["instruction"] != "retry":
            return web.json_response({"error": "only retry"}, status=400)
        self.num_repairs += 1
        request_id = f"ft-{self.num_repairs}"
        if self.heals:
            asyncio.get_running_loop().call_later(0.05, self.heal)
        return web.json_response({"message": "accepted", "request_id": request_id}, status=202)

    def heal(self) -> None:
        self.cores = [{"id": core["id"], "status": "healthy"} for core in self.cores]

    async def _scale(self, request: web.Request) -> web.Response:
        body = await self._note(request)
        size = body.get("new_data_parallel_size") or body["new_ep_size"]
        self.num_scaling_polls = 10_000 if size == self.is_stuck_at else self.num_polls_scaling
        if self.can_grow and "new_ep_size" in body:
            self.ep_size = size
        return web.json_response({}, status=self.scale_status.get(size, 200))

    async def _is_scaling(self, _: web.Request) -> web.Response:
        self.num_scaling_polls -= 1
        is_scaling = self.num_scaling_polls > 0
        return web.json_response(
            {
                "is_scaling_elastic_ep": is_scaling,
                "effective_ep_size": self.ep_size,
                "pending_ep_size": 8 if is_scaling else None,
                "scale_phase": "joining" if is_scaling else "failed",
                "last_error": None if self.can_grow else "rank 7 did not join",
            }
        )

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": []}, status=self.models_status)

    @property
    def sizes(self) -> list[int]:
        return [
            body.get("new_data_parallel_size") or body["new_ep_size"]
            for path, body, _ in self.calls
            if path == "/scale_elastic_ep"
        ]


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def vllm(server: FakeServer) -> AsyncIterator[VllmRecovery]:
    recovery = VllmRecovery(server.url, poll_interval_s=0.01)
    yield recovery
    recovery.close()


@pytest.fixture
async def sglang(server: FakeServer) -> AsyncIterator[SglangRecovery]:
    recovery = SglangRecovery(server.url, poll_interval_s=0.01)
    yield recovery
    recovery.close()


async def test_status_names_every_rank(vllm: VllmRecovery) -> None:
    """By rank, in vLLM's words."""
    assert await vllm.status() == {
        0: RankHealth(health=EngineHealth.HEALTHY),
        1: RankHealth(health=EngineHealth.UNHEALTHY, reason="RuntimeError"),
    }


@pytest.mark.parametrize(
    "document",
    [
        *(None, [], {}, {"a": "healthy"}, {"engines": []}, {"engines": {"0": "healthy"}}),
        {"engines": [{"id": 0, "status": "well"}]},
        {"engines": [{"status": "healthy"}]},
    ],
)
def test_a_status_of_another_shape_is_an_error(document: object) -> None:
    """Never a guess."""
    with pytest.raises(DriverError, match="not a health for each engine"):
        read_fault_status(document)


async def test_retry_is_sent_once_and_waits_until_all_are_healthy(
    server: FakeServer, vllm: VllmRecovery
) -> None:
    """With the documented body and our operation id; asked twice it is one operation."""
    first, again = await asyncio.gather(
        vllm.retry(operation_id="op-1"), vllm.retry(operation_id="op-1")
    )
    later = await vllm.retry(operation_id="op-1")

    assert first == again == later
    assert first.outcome is OperationOutcome.DONE
    assert server.calls == [
        ("/fault_tolerance/apply", {"instruction": "retry", "params": {}}, "op-1")
    ]


async def test_a_retry_that_heals_nothing_fails_in_time(
    server: FakeServer, vllm: VllmRecovery
) -> None:
    """The reason names the time; another operation may follow."""
    server.heals = False

    result = await vllm.retry(operation_id="op-1", timeout_s=0.05)

    assert result.outcome is OperationOutcome.FAILED
    assert result.reason == "the retry has not ended after 0.05 s: not yet"
    server.heals = True
    assert (await vllm.retry(operation_id="op-2")).outcome is OperationOutcome.DONE


async def test_a_retry_that_the_core_refuses_ends_at_once(
    server: FakeServer, vllm: VllmRecovery
) -> None:
    """vLLM writes the refusal of a request into the status, under the id that it gave it."""
    server.heals = False
    server.cores[1] |= {"last_ft_request_id": "ft-1", "ft_error": "status is HEALTHY"}

    result = await vllm.retry(operation_id="op-1", timeout_s=60)

    assert result.outcome is OperationOutcome.FAILED
    assert result.reason == "core 1 refuses: status is HEALTHY"


async def test_a_dead_core_is_not_waited_for(server: FakeServer, vllm: VllmRecovery) -> None:
    """Nothing but a restart brings it back."""
    server.heals = False
    server.cores[1] = {"id": 1, "status": "dead"}

    result = await vllm.retry(operation_id="op-1", timeout_s=60)

    assert result.outcome is OperationOutcome.FAILED
    assert result.reason == "core 1 is dead: only a restart helps"


async def test_a_second_operation_beside_a_running_one_is_refused(vllm: VllmRecovery) -> None:
    """By the name of the one that runs."""
    running = asyncio.create_task(vllm.retry(operation_id="op-1"))
    await asyncio.sleep(0.01)

    with pytest.raises(EngineRefusedError, match="operation 'op-1' still runs"):
        await vllm.retry(operation_id="op-2")
    await running


async def test_vllm_scales_with_the_documented_body(server: FakeServer, vllm: VllmRecovery) -> None:
    """Size, drain time, id."""
    result = await vllm.scale(3, old_num_dp_ranks=2, operation_id="op-1", drain_timeout_s=7)

    assert result.outcome is OperationOutcome.DONE
    body = {"new_data_parallel_size": 3, "drain_timeout": 7}
    assert server.calls == [("/scale_elastic_ep", body, "op-1")]


async def test_a_scaling_that_breaks_is_rolled_back(server: FakeServer, vllm: VllmRecovery) -> None:
    """The old size is asked for once, and the result says what happened."""
    server.scale_status[3] = 500

    result = await vllm.scale(3, old_num_dp_ranks=2, operation_id="op-1")

    assert result.outcome is OperationOutcome.ROLLED_BACK
    assert "answers 500" in result.reason
    assert server.sizes == [3, 2]


async def test_a_scaling_that_is_refused_touches_nothing(
    server: FakeServer, vllm: VllmRecovery
) -> None:
    """A 400 needs no way back."""
    server.scale_status[3] = 400

    result = await vllm.scale(3, old_num_dp_ranks=2, operation_id="op-1")

    assert result.outcome is OperationOutcome.ROLLED_BACK
    assert server.sizes == [3]


class FastClock:
    """A thousand times as fast as the machine's."""

    def now_ns(self) -> int:
        return 1_000 * SystemClock().now_ns()


async def test_a_server_that_stays_unavailable_is_a_failure(server: FakeServer) -> None:
    """A commit that failed left a permanent 503: neither size answers, and that is said."""
    server.models_status = 503
    vllm = VllmRecovery(server.url, clock=FastClock(), poll_interval_s=0.01)

    # The calls themselves may take a minute, whatever the clock says.
    result = await vllm.scale(3, old_num_dp_ranks=2, operation_id="op-1", timeout_s=60)
    vllm.close()

    assert result.outcome is OperationOutcome.FAILED
    assert "going back to 2" in result.reason
    assert server.sizes == [3, 2]


async def test_sglang_scales_and_waits(server: FakeServer, sglang: SglangRecovery) -> None:
    """Until the server says that it is not scaling any more."""
    result = await sglang.scale(8, old_ep_size=4, operation_id="op-1")

    assert result.outcome is OperationOutcome.DONE
    assert server.calls == [("/scale_elastic_ep", {"new_ep_size": 8}, "op-1")]
    assert server.num_scaling_polls <= 0


async def test_sglang_scaling_that_fails_serves_at_its_old_size(
    server: FakeServer, sglang: SglangRecovery
) -> None:
    """The server went back by itself; nothing is asked for a second time."""
    server.can_grow = False

    result = await sglang.scale(8, old_ep_size=4, operation_id="op-1")

    assert result.outcome is OperationOutcome.ROLLED_BACK
    assert result.reason == "scaling to 8 ended at 4 (failed): rank 7 did not join"
    assert server.sizes == [8]


async def test_sglang_scaling_that_hangs_is_a_failure(
    server: FakeServer, sglang: SglangRecovery
) -> None:
    """After the time it may take; SGLang has no way back to ask for."""
    server.is_stuck_at = 8

    result = await sglang.scale(8, old_ep_size=4, operation_id="op-1", timeout_s=0.08)

    assert result.outcome is OperationOutcome.FAILED
    assert "scaling to 8 has not ended" in result.reason
    assert server.sizes == [8]


async def test_sglang_that_scales_already_is_left_alone(
    server: FakeServer, sglang: SglangRecovery
) -> None:
    """Its own scaling has no id that we could join."""
    server.num_scaling_polls = 100

    result = await sglang.scale(8, old_ep_size=4, operation_id="op-1")

    assert result.outcome is OperationOutcome.FAILED
    assert "is scaling already" in result.reason
    assert server.calls == []


async def test_wrong_input_is_named(vllm: VllmRecovery, sglang: SglangRecovery) -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match="the new size is 0"):
        await vllm.scale(0, old_num_dp_ranks=2, operation_id="x")
    with pytest.raises(ValueError, match="the old size is -1"):
        await sglang.scale(1, old_ep_size=-1, operation_id="x")
    with pytest.raises(ValueError, match="the new size is 4; SGLang only grows, from 8"):
        await sglang.scale(4, old_ep_size=8, operation_id="x")
    with pytest.raises(ValueError, match="operation_id is ''"):
        await vllm.retry(operation_id="")
    with pytest.raises(ConfigError):
        VllmRecovery("nowhere")


async def test_a_server_without_fault_tolerance_says_so() -> None:
    """Nobody there: unreachable, not healthy."""
    with refusing_port() as port:
        recovery = VllmRecovery(f"http://127.0.0.1:{port}")
        with pytest.raises(DriverError):
            await recovery.status()
        recovery.close()
