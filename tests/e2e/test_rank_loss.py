"""A DP rank is lost while its server answers: what a whole dsched does with vLLM's fault API.

Two servers form one EP group with fault tolerance, a third one stands alone. The doubles answer
with the shapes of vLLM 0.32's own source.
"""

import asyncio
from typing import Any

import pytest
from double_cluster import MODEL, Cluster

from dsched.states import RankState
from dsched.testing.vllm_double import VllmDouble

NUM_STREAMS = 12
NUM_TOKENS = 300


async def start_cluster(cluster: Cluster, mode: str) -> tuple[VllmDouble, VllmDouble]:
    """Start dsched over the group and the third engine; return the group's servers."""
    for _ in range(3):
        await cluster.add_double(step_s=0.01)
    group = cluster.doubles[:2]
    for double in group:
        assert isinstance(double, VllmDouble)
        double.core_status = {"id": 0, "status": "healthy"}
    engines: list[dict[str, Any]] = [{"url": each.url, "ep_group": "g"} for each in group]
    engines.append({"url": cluster.doubles[2].url})
    pool = {"model": {"name": MODEL, "tokenizer": str(cluster.folder)}, "engines": engines}
    faults = {"engine_recovery": mode, "spare": "none", "prefill_timeout_s": 60.0}
    await cluster.start_service(pools={"p": pool}, faults=faults)
    await cluster.wait_until_up(3)
    return group[0], group[1]


def states(cluster: Cluster) -> list[RankState]:
    return [status.state for status in cluster.service.controller.engine_statuses()]


async def ask_many(cluster: Cluster) -> list[asyncio.Task[tuple[list[int], Any]]]:
    """Streams that run on every engine."""
    prompts = [list(range(40 + index, 60 + index)) for index in range(NUM_STREAMS)]
    tasks = [
        asyncio.create_task(cluster.complete(prompt, max_tokens=NUM_TOKENS)) for prompt in prompts
    ]
    await cluster.wait_until(lambda: all(double.num_running for double in cluster.doubles))
    await asyncio.sleep(0.1)
    return tasks


@pytest.mark.slow
async def test_a_group_that_aborts_its_requests_is_left_and_taken_again(cluster: Cluster) -> None:
    """Clients see a pause; the whole group is out while one rank is in fault."""
    first, second = await start_cluster(cluster, "watch")
    tasks = await ask_many(cluster)

    first.break_group()
    second.break_group()
    answers = await asyncio.gather(*tasks)
    await cluster.wait_until(lambda: states(cluster)[:2] == [RankState.DOWN] * 2)
    reasons = [status.reason for status in cluster.service.controller.engine_statuses()]
    epoch = cluster.service.controller.membership.epoch
    num_bodies = len(cluster.doubles[2].bodies)
    await cluster.complete([50, 51], max_tokens=3)
    first.core_status = second.core_status = {"id": 0, "status": "healthy"}
    await cluster.wait_until(lambda: states(cluster) == [RankState.UP] * 3)

    for index, (token_ids, _) in enumerate(answers):
        prompt = list(range(40 + index, 60 + index))
        assert token_ids == cluster.model.stream(prompt, NUM_TOKENS)
    assert "its engine core says unhealthy: RuntimeError" in reasons[0]
    assert len(cluster.doubles[2].bodies) == num_bodies + 1
    assert cluster.service.controller.membership.epoch == epoch + 2
    assert [first.num_repairs, second.num_repairs] == [0, 0]


@pytest.mark.slow
async def test_the_leader_lets_the_group_repair_itself(cluster: Cluster) -> None:
    """`faults.engine_recovery: repair`: one retry a server, then the group serves again."""
    first, second = await start_cluster(cluster, "repair")
    tasks = await ask_many(cluster)

    first.break_group()
    second.break_group()
    answers = await asyncio.gather(*tasks)
    await cluster.wait_until(lambda: first.num_repairs == second.num_repairs == 1)
    await cluster.wait_until(lambda: states(cluster) == [RankState.UP] * 3)
    again = await ask_many(cluster)
    later = await asyncio.gather(*again)

    for index, (token_ids, _) in enumerate(answers):
        prompt = list(range(40 + index, 60 + index))
        assert token_ids == cluster.model.stream(prompt, NUM_TOKENS)
    assert [token_ids for token_ids, _ in later] == [token_ids for token_ids, _ in answers]
