"""The live picture of a real dsched: what an operator would see of a lost engine."""

import asyncio

import aiohttp
import numpy as np
import pytest
from double_cluster import PROMPT, Cluster

from dsched.cli.live_client import LiveClient, open_session
from dsched.config import AgentSettings
from dsched.drivers.base import ExpertLoadSource
from dsched.drivers.expert_report import ExpertReporter
from dsched.frontdoor.live import STATES, LiveSnapshot, column_fault
from dsched.ids import EngineId


async def picture(cluster: Cluster) -> LiveSnapshot:
    """A sample of this moment, over the admin port."""
    await cluster.service.live.sample()
    async with open_session() as session:
        return await LiveClient(session, [cluster.service.admin_url]).read()


async def test_a_killed_engine_is_in_the_picture(two_engines: Cluster) -> None:
    """Running requests and KV tokens before; state, reason, handoffs and events after."""
    tasks = [
        asyncio.create_task(two_engines.complete([5 + index, *PROMPT], max_tokens=24))
        for index in range(8)
    ]
    victim = two_engines.doubles[0]
    journal = two_engines.service.journal
    await two_engines.wait_until(
        lambda: victim.num_running and journal.status().num_recorded_tokens >= 16
    )
    before = await picture(two_engines)
    await victim.kill()
    await asyncio.gather(*tasks)
    after = await picture(two_engines)

    assert column_fault(before) is None
    (pool,) = before.pools
    assert pool.num_running == 8
    assert pool.num_kv_tokens > 8 * len(PROMPT)
    assert pool.num_ranks_up == 2
    assert before.traffic[0].num_open == 8
    assert sum(before.ranks.running) == 8
    assert before.budgets.num_agents == 2

    index = after.engines.engine_id.index("p-0")
    assert STATES[after.engines.state[index]] == "down"
    assert after.engines.reason[index]
    assert after.pools[0].num_ranks_up == 1
    assert sum(each.count for each in after.faults.handoffs) >= 1
    assert after.faults.gap.p99_ms is not None
    assert after.traffic[0].tpot.p50_ms is not None
    shown = [(event.subject, event.level) for event in after.events]
    assert ("p-0", "error") in shown
    assert ("handoff", "warning") in shown
    assert after.epoch > before.epoch
    assert after.seq > before.seq


async def test_streams_end_with_the_process(two_engines: Cluster) -> None:
    """A reader of the stream is let go when dsched stops; nothing hangs for its sake."""
    url = f"{two_engines.service.admin_url}/admin/v1/live/stream"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        first = await response.content.readuntil(b"\n\n")
        assert first.startswith(b"data: {")
        stopping = asyncio.create_task(two_engines.service.live.close())
        rest = await asyncio.wait_for(response.content.read(), 5)
        await stopping
    assert rest.startswith(b"data: ") or rest == b""


@pytest.mark.slow
async def test_expert_load_of_an_engine_is_shown(cluster: Cluster) -> None:
    """A worker of the engine sends it; after the engine's death it is not shown any more."""
    double = await cluster.add_double()
    await cluster.start_service()
    await cluster.wait_until_up()
    reporter = ExpertReporter(AgentSettings(endpoint=cluster.agent_endpoint, engine_id="p-0"))
    reporter.send(np.array([[10, 30, 20, 0]]), num_steps=5, balance=np.array([0.9]))
    driver = cluster.service.fleet.drivers[EngineId("p-0")]
    assert isinstance(driver, ExpertLoadSource)
    await cluster.wait_until(driver.expert_load)
    (load,) = (await picture(cluster)).expert_load
    reporter.close()
    await double.kill()
    await cluster.wait_until_up(0)

    assert (load.engine_id, load.num_layers, load.num_experts) == ("p-0", 1, 4)
    assert (load.hottest, load.balance, load.num_steps) == ([2.0], [0.9], 5)
    assert not load.is_simulated
    assert (await picture(cluster)).expert_load == ()
