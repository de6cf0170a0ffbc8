"""A driver for each kind of engine: `driver_case`; and `mortal_case`, whose engine may die.

A registry of each kind: `registry_case`, and `registry` alone.
"""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from registry_cases import RegistryCase

from dsched.clock import SystemClock
from dsched.registry import Registry, open_registry
from dsched.registry.sqlite import SqliteRegistry
from dsched.testing.driver_cases import DriverCase, open_case
from dsched.testing.engines import TinyEngines
from dsched.testing.etcd_nodes import EtcdNodes
from dsched.testing.vllm_engines import NO_VLLM, is_vllm_there, running_engines

STATE_DIR = Path(__file__).parents[2] / ".dsched" / "tests"
DOUBLES = ["sim", "double", "sglang-double", "sglang-double-dp2"]
ENGINES = {
    "vllm": "vllm_engines",
    "vllm-group": "vllm_group",
    "sglang": "sglang_engines",
    "sglang-dp2": "sglang_dp2",
}
"""Fixture of the real engines of each kind."""


def real(*kinds: str) -> list[object]:
    """Parameters for real engines, with their marks."""
    return [
        pytest.param(kind, marks=[getattr(pytest.mark, kind.partition("-")[0]), pytest.mark.slow])
        for kind in kinds
    ]


@pytest.fixture(params=[*DOUBLES, *real(*ENGINES)])
def engine_source(request: pytest.FixtureRequest) -> tuple[str, TinyEngines | None]:
    """The kind of engine; real ones are started here, outside of the test's event loop."""
    fixture = ENGINES.get(request.param)
    return request.param, None if fixture is None else request.getfixturevalue(fixture)


@pytest.fixture(params=[*DOUBLES, *real("vllm", "sglang")])
def mortal_source(request: pytest.FixtureRequest) -> Iterator[tuple[str, TinyEngines | None]]:
    """The same with an engine that the test may kill."""
    if request.param == "sglang":
        yield request.param, request.getfixturevalue("sglang_engines")
    elif request.param != "vllm":
        yield request.param, None
    elif not is_vllm_there():
        pytest.skip(NO_VLLM)
    else:
        with running_engines(num_engines=1, state_dir=STATE_DIR, name="mortal") as engines:
            yield request.param, engines


@pytest.fixture
async def driver_case(
    engine_source: tuple[str, TinyEngines | None],
) -> AsyncIterator[DriverCase]:
    async with open_case(*engine_source) as case:
        yield case


@pytest.fixture
async def mortal_case(
    mortal_source: tuple[str, TinyEngines | None],
) -> AsyncIterator[DriverCase]:
    async with open_case(*mortal_source) as case:
        yield case


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def registry_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new and empty registry of each kind."""
    if request.param == "memory":
        return "memory://"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'registry.sqlite3'}"
    nodes: EtcdNodes = request.getfixturevalue("etcd")
    return nodes.url(f"test/{tmp_path.name}")


@pytest.fixture
async def registry_case(
    registry_url: str, request: pytest.FixtureRequest
) -> AsyncIterator[RegistryCase]:
    registry = open_registry(registry_url, clock=SystemClock())

    async def forget_history(revision: int) -> None:
        if isinstance(registry, SqliteRegistry):
            kept, registry._file._max_history = registry._file._max_history, 1
            await registry.put("history", b"")
            registry._file._max_history = kept
        else:
            nodes: EtcdNodes = request.getfixturevalue("etcd")
            nodes.nodes[0].ask("/v3/kv/compaction", {"revision": str(revision), "physical": True})

    yield RegistryCase(
        registry=registry,
        open_again=lambda: open_registry(registry_url, clock=SystemClock()),
        forget_history=forget_history,
        is_shared=registry_url != "memory://",
    )
    await registry.close()


@pytest.fixture
def registry(registry_case: RegistryCase) -> Registry:
    return registry_case.registry
