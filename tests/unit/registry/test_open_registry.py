"""open_registry and SqliteRegistry: the same contract, from an event loop."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from dsched.clock import SystemClock
from dsched.errors import ConfigError
from dsched.registry import (
    ChangeKind,
    EngineRow,
    InstanceRow,
    RankRow,
    Registry,
    engine_key,
    instance_key,
    open_registry,
    read_workers,
)

INSTANCE = InstanceRow(
    instance_id="i",
    version="1",
    front_door_url="http://127.0.0.1:8000",
    admin_url="http://127.0.0.1:8001",
    started_s=5,
)


def engine(engine_id: str, *, num_running: int = 0) -> EngineRow:
    rank = RankRow(
        dp_rank=0,
        state="up",
        num_running=num_running,
        num_waiting=0,
        num_kv_tokens=0,
        kv_capacity_tokens=None,
        step_ns=0,
        report_age_ns=None,
    )
    return EngineRow(
        engine_id=engine_id, pool="p", kind="sim", model="m", state="up", ranks=(rank,)
    )


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_watch_misses_nothing_after_a_listing(kind: str, tmp_path: Path) -> None:
    """List, then watch from the next revision: changes made in between are seen, in order."""
    url = "memory://" if kind == "memory" else f"sqlite:///{tmp_path / 'r.sqlite3'}"
    registry: Registry = open_registry(url, clock=SystemClock())
    await registry.put("a", b"1")
    listing = await registry.list_entries("")
    await registry.put("a", b"2")
    await registry.delete("a")

    seen = []
    async for change in registry.watch("", from_revision=listing.revision + 1):
        seen.append((change.kind, change.value))
        if len(seen) == 2:
            break
    await registry.close()

    assert [entry.value for entry in listing.entries] == [b"1"]
    assert seen == [(ChangeKind.PUT, b"2"), (ChangeKind.DELETED, None)]


async def test_calls_from_many_tasks_are_one_after_the_other() -> None:
    """Of many tasks that want one key, exactly one gets it."""
    registry = open_registry("memory://", clock=SystemClock())
    won = await asyncio.gather(
        *(
            registry.compare_and_set("leader", bytes([number]), expected_revision=None)
            for number in range(20)
        )
    )
    entry = await registry.get("leader")
    await registry.close()

    (winner,) = [number for number, revision in enumerate(won) if revision is not None]
    assert entry is not None
    assert entry.value == bytes([winner])


@pytest.mark.parametrize(
    "url", ["etcd://", "etcd://h:x", "sqlite://x", "sqlite:///", "", "file://x"]
)
def test_unknown_url_is_refused(url: str) -> None:
    """The URL is shown."""
    with pytest.raises(ConfigError, match=r"^\$\.registry\.url: "):
        open_registry(url, clock=SystemClock())


async def test_workers_are_read_back() -> None:
    """Processes and engines, sorted; of two views of one engine the later one; and what cannot be
    read is named, not dropped silently."""
    registry = open_registry("memory://", clock=SystemClock())
    await registry.put(instance_key("i"), msgspec.json.encode(INSTANCE))
    for engine_id, instance, num_running in (("b", "i", 1), ("a", "j", 2), ("a", "i", 3)):
        row = engine(engine_id, num_running=num_running)
        await registry.put(engine_key(engine_id, instance), msgspec.json.encode(row))
    await registry.put(engine_key("c", "i"), b'{"engine_id": "c", "colour": "red"}')
    await registry.put("leader", b"somebody")

    view = read_workers(await registry.list_entries(""))
    await registry.close()

    assert view.instances == (INSTANCE,)
    assert [(row.engine_id, row.ranks[0].num_running) for row in view.engines] == [
        ("a", 3),
        ("b", 1),
    ]
    assert view.unreadable == ("engines/c/i",)
