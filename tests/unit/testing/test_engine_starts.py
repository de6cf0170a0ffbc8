"""Servers of the tests are started once more when one does not come up, and not for ever."""

from pathlib import Path
from typing import cast

import pytest

from dsched.drivers.local import LocalEngine
from dsched.errors import DriverError
from dsched.ids import EngineId
from dsched.testing.engines import running_together


class Server:
    """What the starter needs of a `LocalEngine`."""

    pid = 1
    url = "http://127.0.0.1:9"

    def __init__(self, engine_id: EngineId, *, is_alive: bool) -> None:
        self.engine_id = engine_id
        self.is_alive = is_alive
        self.is_stopped = False

    def log_tail(self) -> str:
        return "address already in use"

    async def stop(self) -> None:
        self.is_stopped = True


def start(num_failures: int) -> tuple[list[Server], list[str]]:
    """Start two servers, of which the second dies at the first starts; who was stopped when."""
    servers: list[Server] = []

    async def make_model() -> Path:
        return Path("model")

    async def launch(engine_id: EngineId, endpoint: str, model_path: Path) -> LocalEngine:
        del endpoint, model_path
        is_bad = engine_id == "b" and len(servers) < 2 * num_failures
        servers.append(Server(engine_id, is_alive=not is_bad))
        return cast(LocalEngine, servers[-1])

    async def ask(*_: object) -> list[int]:
        return [1]

    with running_together(
        kind="vllm",
        engine_ids=[EngineId("a"), EngineId("b")],
        make_model=make_model,
        launch=launch,
        ask=ask,
    ) as engines:
        running = [engine.engine_id for engine in engines.engines if not _of(engine).is_stopped]
    assert all(server.is_stopped for server in servers)
    return servers, running


def _of(engine: object) -> Server:
    return cast(Server, engine)


def test_one_that_dies_is_started_again_with_its_neighbours() -> None:
    servers, running = start(num_failures=1)

    assert [server.engine_id for server in servers] == ["a", "b", "a", "b"]
    assert running == ["a", "b"]


def test_the_second_failure_is_told_with_the_end_of_the_log() -> None:
    with pytest.raises(DriverError, match=r"engine b is not ready: address already in use"):
        start(num_failures=2)
