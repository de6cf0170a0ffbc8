"""Two dsched processes over the same engines, whose agents report to neither of them."""

import asyncio

import msgspec
import pytest
from double_cluster import MODEL, PROMPT, Cluster

from dsched.cli.service import Service
from dsched.drivers.http import HttpPool
from dsched.ids import EngineId

pytestmark = pytest.mark.slow

JSON = ((b"content-type", b"application/json"),)
NUM_BEFORE = 8
NUM_BURST = 8
PREFILL_STEP_S = 0.3
"""A step computes one token, so that a prompt takes seconds."""


async def start_two(
    cluster: Cluster, *, talks: bool, is_split: bool = False
) -> tuple[Service, Service]:
    """Two doubles without agents, or three in split pools, and two services that share a
    registry."""
    kept_kv: dict[str, list[int]] = {}
    for _ in range(3 if is_split else 2):
        double = await cluster.add_double(has_agent=False, step_s=0.01)
        double.kept_kv = kept_kv
    changes: dict[str, object] = {
        "registry": {"url": f"sqlite:///{cluster.folder / 'shared.sqlite3'}"},
        "routing": {"talks_to_peers": talks},
        "faults": {"spare": "none"},
        "agent": {"endpoint": "tcp://127.0.0.1:*"},
    }
    if is_split:
        for double in cluster.doubles[:2]:
            double.max_step_tokens, double.step_s = 1, PREFILL_STEP_S
        changes["pools"] = {
            role: {
                "role": role,
                "model": {"name": MODEL, "tokenizer": str(cluster.folder)},
                "engines": [{"url": each.url, "id": each.engine_id} for each in doubles],
            }
            for role, doubles in (("prefill", cluster.doubles[:2]), ("decode", cluster.doubles[2:]))
        }
    first = await cluster.start_service(**changes)
    second = await cluster.start_service(**changes)
    for service in (first, second):
        await cluster.wait_until_up(service=service)
        await cluster.wait_until(lambda: len(service.workers().instances) == 2)  # noqa: B023
    return first, second


def home_of(service: Service, other: Service) -> str:
    """The engine that a dsched fills first as long as it hears nothing of the other one."""
    index = sorted([service.instance_id, other.instance_id]).index(service.instance_id)
    return f"p-{index}"


async def begin(cluster: Cluster, service: Service, count: int) -> list[asyncio.Task[object]]:
    """Send requests that run for as long as the test does."""

    async def stream(index: int) -> None:
        pool = HttpPool(service.front_door_url)
        body = {
            "model": MODEL, "prompt": [5 + index, *PROMPT], "max_tokens": 5_000, "stream": True,
            "temperature": 0,
        }  # fmt: skip
        try:
            payload = msgspec.json.encode(body)
            await pool.fetch("POST", "/v1/completions", headers=JSON, body=payload, timeout_s=120.0)
        finally:
            pool.close()

    return [asyncio.create_task(stream(index)) for index in range(count)]


def num_on_each(cluster: Cluster) -> dict[str, int]:
    return {double.engine_id: double.num_running + double.num_waiting for double in cluster.doubles}


async def burst_at_both(cluster: Cluster, first: Service, second: Service) -> dict[str, int]:
    """Fill the second one's home through the first one, then send a burst to both at once."""
    home = home_of(second, first)
    other = EngineId("p-1" if home == "p-0" else "p-0")
    first.controller.drain(other)
    tasks = await begin(cluster, first, NUM_BEFORE)
    await cluster.wait_until(lambda: num_on_each(cluster)[home] == NUM_BEFORE)
    first.controller.drain(other, is_draining=False)

    tasks += await begin(cluster, first, NUM_BURST // 2)
    tasks += await begin(cluster, second, NUM_BURST)
    num_all = NUM_BEFORE + NUM_BURST + NUM_BURST // 2
    await cluster.wait_until(lambda: sum(num_on_each(cluster).values()) == num_all)
    counts = num_on_each(cluster)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"busy": counts[home], "idle": counts[other]}


async def test_a_burst_at_two_dscheds_that_talk_ends_level(cluster: Cluster) -> None:
    first, second = await start_two(cluster, talks=True)
    for service, peer in ((first, second), (second, first)):
        await cluster.wait_until(
            lambda: service.peers is not None and service.peers.peers == (peer.instance_id,)  # noqa: B023
        )
        router = service.controller._state.pools["p"].router
        await cluster.wait_until(lambda: router._hears_peers)  # noqa: B023

    counts = await burst_at_both(cluster, first, second)

    assert abs(counts["busy"] - counts["idle"]) <= 4, counts
    # What the clients left ends at the peer, too, without any report.
    for service in (first, second):
        router = service.controller._state.pools["p"].router
        await cluster.wait_until(lambda: not router.ledger.table[:4, :2].any())  # noqa: B023


async def test_two_dscheds_that_do_not_talk_fill_the_busy_engine(cluster: Cluster) -> None:
    """What the channel is for: without it, and without reports, nobody knows of the other."""
    first, second = await start_two(cluster, talks=False)
    assert first.peers is None
    router = second.controller._state.pools["p"].router
    await cluster.wait_until(lambda: router.is_home_elsewhere(0) or router.is_home_elsewhere(1))

    counts = await burst_at_both(cluster, first, second)

    assert counts["busy"] - counts["idle"] >= 6, counts


@pytest.mark.parametrize("talks", [True, False])
async def test_a_prompt_goes_to_the_prefill_engine_that_a_peer_has_left_idle(
    cluster: Cluster, *, talks: bool
) -> None:
    """Both are idle as far as a dsched knows that hears nothing."""
    first, second = await start_two(cluster, talks=talks, is_split=True)
    router = second.controller._state.pools["prefill"].prefill
    assert router is not None
    if talks:
        await cluster.wait_until(lambda: second.peers is not None and second.peers.peers)
    preferred = router.pick(num_prompt_tokens=len(PROMPT), now_ns=0).worker
    assert preferred is not None
    busy = router.rank_id(preferred).engine_id
    idle = EngineId("p-1" if busy == "p-0" else "p-0")

    first.controller.drain(idle)
    tasks = await begin(cluster, first, 1)
    await cluster.wait_until(lambda: num_on_each(cluster)[busy] == 1)
    if talks:
        await cluster.wait_until(lambda: router.peers.of(preferred)[0] > 0)
    tasks += await begin(cluster, second, 1)
    await cluster.wait_until(lambda: sum(num_on_each(cluster).values()) == 2)
    counts = num_on_each(cluster)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert (counts[busy], counts[idle]) == ((1, 1) if talks else (2, 0))
    # What clients left is over at the peer, too.
    await cluster.wait_until(lambda: not router.peers.of(preferred)[0])


async def test_a_dsched_that_stops_is_forgotten(cluster: Cluster) -> None:
    first, second = await start_two(cluster, talks=True)
    await cluster.wait_until(lambda: second.peers is not None and second.peers.peers)
    tasks = await begin(cluster, first, 2)
    router = second.controller._state.pools["p"].router
    await cluster.wait_until(lambda: router.ledger.table[2, :2].sum() == 2)

    await first.stop()
    cluster.services.remove(first)

    await cluster.wait_until(lambda: second.peers is not None and not second.peers.peers)
    assert not router.ledger.table[2:4, :2].any()
    await asyncio.gather(*tasks, return_exceptions=True)
