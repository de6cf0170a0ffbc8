"""A driver for each kind of engine: `driver_case`; and `mortal_case`, whose engine may die."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsched.testing.driver_cases import DriverCase, open_case
from dsched.testing.vllm_engines import TinyEngines, is_vllm_there, running_engines

STATE_DIR = Path(__file__).parents[2] / ".dsched" / "tests"
KINDS = ["sim", "double", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=KINDS)
def engine_source(request: pytest.FixtureRequest) -> tuple[str, TinyEngines | None]:
    """The kind of engine; real ones are started here, outside of the test's event loop."""
    engines = request.getfixturevalue("vllm_engines") if request.param == "vllm" else None
    return request.param, engines


@pytest.fixture(params=KINDS)
def mortal_source(request: pytest.FixtureRequest) -> Iterator[tuple[str, TinyEngines | None]]:
    """The same with an engine that the test may kill."""
    if request.param != "vllm":
        yield request.param, None
    elif not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
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
