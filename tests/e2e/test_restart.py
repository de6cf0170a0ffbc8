"""A dsched that is killed and started again: what it knows of engines, loads and other processes.

dsched runs as a process, so that it can be killed; the engines are doubles in the test's process
and outlive it, with the load that others gave them.
"""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from double_cluster import MODEL, PROMPT, Cluster
from test_run_process import RunningDsched, start, stop, wait

from dsched.clock import SystemClock
from dsched.registry import InstanceRow, open_registry
from dsched.sim.tokenizer import CHAT_TEMPLATE, build_sim_tokenizer

pytestmark = pytest.mark.slow

LEASE_S = 3
KNOWS_AGAIN_S = 5.0
"""From its first line of output until the ledger has the engines' loads again."""
NUM_DIRECT = 6
NUM_STREAMS = 4


def write_config(cluster: Cluster, registry_url: str) -> Path:
    build_sim_tokenizer().save(str(cluster.folder / "tokenizer.json"))
    (cluster.folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    path = cluster.folder / "cluster.json"
    document = {
        "agent": {"endpoint": cluster.agent_endpoint},
        "registry": {"url": registry_url, "lease_s": LEASE_S},
        "pools": {
            "p": {
                "model": {"name": MODEL, "tokenizer": str(cluster.folder)},
                "engines": [{"url": double.url} for double in cluster.doubles],
            }
        },
    }
    path.write_text(json.dumps(document))
    return path


Start = Callable[[Path], Awaitable[RunningDsched]]


@pytest.fixture
async def start_dsched() -> AsyncIterator[Start]:
    """Starts a dsched process; ends those that a test left running."""
    started: list[RunningDsched] = []

    async def start_one(config: Path) -> RunningDsched:
        started.append(await asyncio.to_thread(start, config.parent, "-c", str(config)))
        return started[-1]

    yield start_one
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            await asyncio.to_thread(wait, running)


async def running_by_engine(running: RunningDsched) -> dict[str, tuple[str, int]]:
    """State and running requests of each engine, as this dsched has them."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{running.admin_url}/admin/v1/workers") as answer,
    ):
        document: dict[str, Any] = await answer.json()
    return {
        engine["engine_id"]: (engine["state"], sum(r["num_running"] for r in engine["ranks"]))
        for engine in document["workers"]["engines"]
    }


async def read_all(url: str, *, max_tokens: int, **fields: str) -> bytes:
    """Stream one completion to its end; raises when it breaks."""
    body = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status == 200
        return await answer.read()


@pytest.mark.parametrize("kind", ["sqlite", "etcd"])
async def test_a_killed_dsched_knows_everything_again_within_seconds(
    cluster: Cluster, kind: str, start_dsched: Start, request: pytest.FixtureRequest
) -> None:
    """Its streams break and their load is gone; loads that others gave are in the ledger before
    the first decision that needs them; the registry has the new process, and soon only that."""
    url = f"sqlite:///{cluster.folder / 'registry.sqlite3'}"
    if kind == "etcd":
        url = request.getfixturevalue("etcd").url(f"restart/{cluster.folder.name}")
    for _ in range(2):
        await cluster.add_double(step_s=0.05)
    config = write_config(cluster, url)
    others = [
        asyncio.create_task(
            read_all(cluster.doubles[0].url, max_tokens=900, request_id=f"direct-{number}")
        )
        for number in range(NUM_DIRECT)
    ]
    first = await start_dsched(config)
    await cluster.wait_until(lambda: cluster.doubles[0].num_running == NUM_DIRECT)
    async with asyncio.timeout(10):
        while await running_by_engine(first) != {"p-0": ("up", NUM_DIRECT), "p-1": ("up", 0)}:
            await asyncio.sleep(0.05)
    streams = [asyncio.create_task(read_all(first.url, max_tokens=900)) for _ in range(NUM_STREAMS)]
    await cluster.wait_until(lambda: cluster.doubles[1].num_running == NUM_STREAMS)

    os.kill(first.process.pid, signal.SIGKILL)
    await asyncio.to_thread(wait, first)
    broken = await asyncio.gather(*streams, return_exceptions=True)
    second = await start_dsched(config)
    async with asyncio.timeout(KNOWS_AGAIN_S):
        while await running_by_engine(second) != {"p-0": ("up", NUM_DIRECT), "p-1": ("up", 0)}:
            await asyncio.sleep(0.05)
    num_before = len(cluster.doubles[1].bodies)
    for _ in range(3):
        await read_all(second.url, max_tokens=2)
    registry = open_registry(url, clock=SystemClock())
    async with asyncio.timeout(LEASE_S + 4):
        while len((await registry.list_entries("instances/")).entries) != 1:
            await asyncio.sleep(0.1)
    (entry,) = (await registry.list_entries("instances/")).entries
    await registry.close()
    status = await asyncio.to_thread(stop, second)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

    assert all(isinstance(each, aiohttp.ClientError) for each in broken)
    assert len(cluster.doubles[1].bodies) == num_before + 3
    row = msgspec.json.decode(entry.value, type=InstanceRow)
    assert row.admin_url == second.admin_url
    assert status == 0
