"""What `dsched run` makes of the configuration: drivers by kind, and engines that it starts."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from dsched.cli.engines import Fleet, FleetBuilder
from dsched.cli.metric_sources import local_engine_samples
from dsched.clock import SystemClock
from dsched.config import Config
from dsched.config_checks import check_config
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.driver import SglangDriver
from dsched.drivers.vllm import VllmDriver
from dsched.errors import ConfigError
from dsched.sim.loop import AsyncioTimers
from dsched.sim.tokenizer import build_sim_tokenizer
from dsched.testing.processes import make_model_folder, make_python, wait_for_text


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Callable]:
    """Builds fleets that end with the test."""
    fleets: list[Fleet] = []

    async def build(**sections: object) -> Fleet:
        document = {"state_dir": str(tmp_path / "state")} | sections
        builder = FleetBuilder(
            msgspec.convert(document, Config),
            timers=AsyncioTimers(SystemClock(), asyncio.get_running_loop()),
            reports=ReportReader(endpoint="tcp://127.0.0.1:9"),
        )
        fleets.append(builder.fleet)
        return await builder.build()

    yield build
    for fleet in fleets:
        await fleet.stop()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder with a tokenizer."""
    folder = make_model_folder(tmp_path)
    build_sim_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


async def test_engines_of_a_pool_get_the_driver_of_their_kind(build: Callable, model: Path) -> None:
    """One pool may hold several kinds; each is asked in its own words."""
    pool = {
        "model": {"name": "m", "tokenizer": str(model)},
        "engines": [
            {"id": "a", "kind": "vllm", "url": "http://127.0.0.1:9/v1/"},
            {"id": "b", "kind": "sglang", "url": "http://127.0.0.1:10"},
        ],
    }

    fleet = await build(pools={"p": pool})

    assert type(fleet.drivers["a"]) is VllmDriver
    assert type(fleet.drivers["b"]) is SglangDriver
    assert fleet.urls == {"a": "http://127.0.0.1:9", "b": "http://127.0.0.1:10"}
    assert [each.engine_id for each in fleet.pools[0].engines] == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "marker", "size_flag"),
    [
        ("sglang", "sglang.launch_server", "--dp-size"),
        ("vllm", "serve", "--data-parallel-size"),
    ],
)
async def test_run_starts_replicas_of_the_named_engine(
    build: Callable, model: Path, tmp_path: Path, kind: str, marker: str, size_flag: str
) -> None:
    """`dsched run --engine KIND --model FOLDER --replicas 2 --data-parallel-size 2`."""
    python = make_python(tmp_path, 'echo "$@ end"; while :; do sleep 0.05; done')

    fleet = await build(
        launch={
            "engine": kind,
            "model": str(model),
            "replicas": 2,
            "data_parallel_size": 2,
            "python": str(python),
            "args": ["--one-more"],
        }
    )

    assert sorted(fleet.drivers) == [f"{kind}-0", f"{kind}-1"]
    engines = [engine for keeper in fleet.keepers for engine in keeper.servers.values()]
    assert len(engines) == 2
    for engine in engines:
        words = (await wait_for_text(engine.log_path, "end")).split()
        assert marker in words
        assert words[words.index(size_flag) + 1] == "2"
        assert words[-2:] == ["--one-more", "end"]
        assert fleet.urls[engine.engine_id] == engine.url
        assert engine.is_alive
    assert fleet.pools[0].model == "model"
    await fleet.stop()
    assert all(engine.is_gone for engine in engines)


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"engine": "sglang"}, "needs a model folder"),
        ({"engine": "sglang", "model": "x", "load_balancer": "external"}, "one server"),
        ({"tool_call_format": "hermes"}, r"launch.tool_call_format: simulated engines"),
        (
            {
                "engine": "vllm",
                "model": "x",
                "chat_format": "deepseek-v4",
                "reasoning_format": "think",
            },
            r"launch.reasoning_format: has no meaning with chat_format deepseek-v4",
        ),
    ],
)
def test_launch_that_cannot_be_is_named(launch: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(msgspec.convert({"launch": launch}, Config))


async def test_engine_python_that_is_not_there_is_named(build: Callable, model: Path) -> None:
    with pytest.raises(ConfigError, match="engine Python '/nowhere' does not exist"):
        await build(launch={"engine": "sglang", "model": str(model), "python": "/nowhere"})


async def test_engine_that_moved_is_found_where_it_is(build: Callable, model: Path) -> None:
    """By its driver, by what is registered, and by whoever else asked to be told."""
    python = make_python(model.parent, "while :; do sleep 0.05; done")
    launch = {"engine": "vllm", "model": str(model), "replicas": 1, "python": str(python)}
    fleet = await build(launch=launch)
    told: list[tuple[str, str]] = []
    fleet.on_moved.append(lambda engine_id, url: told.append((engine_id, url)))

    fleet.move("vllm-0", "http://127.0.0.1:9")
    samples = list(local_engine_samples(fleet.keepers))

    assert fleet.drivers["vllm-0"].url == "http://127.0.0.1:9"
    assert fleet.urls == {"vllm-0": "http://127.0.0.1:9"}
    assert told == [("vllm-0", "http://127.0.0.1:9")]
    assert [(each.labels, each.value) for each in samples] == [(("vllm-0",), 0)]
