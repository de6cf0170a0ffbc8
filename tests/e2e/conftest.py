"""Fixtures: a dsched in this process, on uvloop as in production."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
from double_cluster import Cluster


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    await cluster.close()


@pytest.fixture
async def two_engines(cluster: Cluster) -> Cluster:
    for _ in range(2):
        await cluster.add_double()
    await cluster.start_service()
    await cluster.wait_until_up()
    return cluster
