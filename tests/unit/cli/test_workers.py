"""dsched workers: what is shown live, what from the registry, and when it says which."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from dsched.cli.workers import FoundWorkers, find_workers, print_workers
from dsched.clock import SystemClock
from dsched.config import AdminConfig, Config, RegistryConfig
from dsched.frontdoor.admin import AdminServer, make_admin_app
from dsched.registry import (
    EngineRow,
    InstanceRow,
    RankRow,
    WorkersView,
    engine_key,
    instance_key,
    open_registry,
)


def engine(engine_id: str, *, num_running: int, state: str = "up") -> EngineRow:
    return msgspec.convert(
        {
            "engine_id": engine_id,
            "pool": "decode",
            "kind": "sim",
            "model": "m",
            "state": state,
            "reason": None if state == "up" else "refused",
            "ranks": []
            if state == "down"
            else [
                {
                    "dp_rank": 3,
                    "state": state,
                    "num_running": num_running,
                    "num_waiting": 0,
                    "num_kv_tokens": 12_345,
                    "kv_capacity_tokens": None,
                    "step_ns": 2_500_000,
                    "report_age_ns": None,
                }
            ],
        },
        EngineRow,
    )


def instance(admin_url: str) -> InstanceRow:
    return InstanceRow(
        instance_id="i",
        version="9",
        front_door_url="http://127.0.0.1:8000",
        admin_url=admin_url,
        started_s=1,
    )


async def register(url: str, admin_url: str) -> None:
    registry = open_registry(url, clock=SystemClock())
    await registry.put(instance_key("i"), msgspec.json.encode(instance(admin_url)))
    for row in (engine("a", num_running=1), engine("gone", num_running=0, state="down")):
        await registry.put(engine_key(row.engine_id, "i"), msgspec.json.encode(row))
    await registry.close()


@pytest.fixture
async def admin_url() -> AsyncIterator[str]:
    view = WorkersView(engines=(engine("a", num_running=7),))
    server = AdminServer(
        make_admin_app(workers=lambda: msgspec.to_builtins(view), config=dict),
        AdminConfig(port=0),
    )
    await server.start()
    yield f"http://127.0.0.1:{server.bound_port}"
    await server.stop()


async def test_live_load_replaces_that_of_the_registry(admin_url: str, tmp_path: Path) -> None:
    """A dsched that answers knows better; what only the registry knows stays in the list."""
    url = f"sqlite:///{tmp_path / 'r.sqlite3'}"
    await register(url, admin_url)

    found = await find_workers(Config(registry=RegistryConfig(url=url)))

    assert found.source == "live"
    assert [row.engine_id for row in found.view.engines] == ["a", "gone"]
    assert found.view.engines[0].ranks[0].num_running == 7


@pytest.mark.parametrize("admin", ["http://127.0.0.1:1", "http://127.0.0.1:1/not a url"])
async def test_dead_dsched_leaves_the_registry(admin: str, tmp_path: Path) -> None:
    """Nobody listens there: the last loads are shown, as such."""
    url = f"sqlite:///{tmp_path / 'r.sqlite3'}"
    await register(url, admin)

    found = await find_workers(Config(registry=RegistryConfig(url=url)))

    assert found.source == "registry"
    assert found.view.engines[0].ranks[0].num_running == 1


def printed(found: FoundWorkers) -> str:
    console = Console(width=80, no_color=True, force_terminal=False)
    with console.capture() as capture:
        print_workers(found, console)
    return capture.get()


def test_table_shows_ranks_and_why_an_engine_is_down() -> None:
    """Each DP rank is a row, an engine without ranks too, in 80 columns."""
    view = WorkersView(
        instances=(instance("http://127.0.0.1:8001"),),
        engines=(engine("a", num_running=5), engine("b", num_running=0, state="down")),
        unreadable=("engines/x/y", "engines/x/z"),
        why_unreadable={"engines/x/z": "written by instance [z]: format 2"},
    )

    lines = printed(FoundWorkers(view=view, source="registry")).splitlines()

    assert lines[0] == "pool decode: m"
    assert lines[2].split() == ["a", "3", "up", "5", "0", "12,345", "?", "2.5", "none"]
    assert lines[3].split() == ["b", "-", "down"]
    assert lines[4] == "b is down: refused"
    assert "No dsched answered; loads are those last written to the registry." in lines
    assert "Registry key engines/x/y is left out: of another dsched version" in lines
    assert "Registry key engines/x/z is left out: written by instance [z]: format 2" in lines
    assert all(len(line) <= 80 for line in lines)


def test_nothing_registered_says_what_to_do() -> None:
    """An empty registry is no empty table."""
    text = printed(FoundWorkers(view=WorkersView(), source="registry"))

    assert text == "No dsched is registered. Start one with: dsched run\n"


def test_rank_row_refuses_what_is_no_count() -> None:
    """The registry's values are checked when they are read."""
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        msgspec.json.decode(msgspec.json.encode(engine("a", num_running=-1).ranks[0]), type=RankRow)


def test_engine_that_lacks_features_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """What is off is a sentence; an engine that has everything gets none."""
    whole = engine("e1", num_running=1)
    poor = msgspec.structs.replace(
        engine("e2", num_running=1), kind="sglang", version="0.9.1", missing=("chunks", "eplb")
    )
    view = WorkersView(engines=(whole, poor))

    print_workers(FoundWorkers(view=view, source="live"), Console(width=100))
    out = capsys.readouterr().out

    assert "e2 (sglang 0.9.1) runs without chunks, eplb" in out
    assert "e1 runs" not in out
