"""The elected dsched places the experts of engines that take it (simulated ones), by their load."""

import asyncio

import openai
import pytest
from double_cluster import Cluster

from dsched.cli.service import Service
from dsched.ids import DpRank, EngineId
from dsched.sim.driver import SimDriver

NUM_EXPERTS = 12


async def start(cluster: Cluster) -> tuple[Service, SimDriver]:
    """One elastic engine of four ranks, 12 experts in 16 slots, and a dsched that rebalances."""
    engine = {"id": "e", "kind": "sim", "num_dp_ranks": 4, "elastic_ep": True}
    service = await cluster.start_service(
        pools={"p": {"model": {"name": "m"}, "engines": [engine]}},
        sim={
            "moe_layers": 3,
            "num_experts": NUM_EXPERTS,
            "redundant_experts": 4,
            "step_base_us": 1_000,
        },
        placement={"interval_s": 0.1},
    )
    driver = service.fleet.drivers[EngineId("e")]
    assert isinstance(driver, SimDriver)
    await cluster.wait_until_up(1)
    return service, driver


async def serve_until(cluster: Cluster, tasks: "asyncio.Event") -> None:
    """Keep the engine busy: it counts tokens only while it computes."""
    client = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    try:
        while not tasks.is_set():
            await client.completions.create(model="m", prompt=[5] * 40, max_tokens=60)
    finally:
        await client.close()


@pytest.mark.slow
async def test_loads_and_lost_ranks_reach_the_engines_as_placements(cluster: Cluster) -> None:
    """By load after a window; a lost rank in the tick that lost it; all slots when it is back."""
    service, driver = await start(cluster)
    is_over = asyncio.Event()
    serving = asyncio.create_task(serve_until(cluster, is_over))

    def slots() -> list[list[int]]:
        found = driver.expert_slots()
        assert found is not None
        rows: list[list[int]] = found.slot_expert.tolist()
        return rows

    first = slots()
    await cluster.wait_until(lambda: slots() != first, timeout_s=120)
    epoch = service.controller.membership.epoch
    driver.lose_rank(DpRank(2), "device lost")
    await cluster.wait_until(lambda: service.controller.membership.epoch > epoch)
    without = slots()
    driver.restore_rank(DpRank(2))
    await cluster.wait_until(lambda: service.controller.membership.epoch > epoch + 1)
    again = slots()
    status, body = await cluster.get("/metrics")
    is_over.set()
    await serving

    assert all(row[8:12] == [-1] * 4 for row in without)
    assert all(set(row) == {-1, *range(NUM_EXPERTS)} for row in without)
    assert all(set(row) == set(range(NUM_EXPERTS)) for row in again)
    assert status == 200
    assert b'dsched_placements_total{cause="ranks"} 2' in body
    assert b'dsched_placements_total{cause="load"}' in body
