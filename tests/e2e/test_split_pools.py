"""Separate pools through the whole of dsched, over vLLM's stand-ins that hand KV to each other."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from double_cluster import MODEL, Cluster

from dsched.faults.journal_file import read_request
from dsched.ids import EngineId, RequestId
from dsched.testing.vllm_double import VllmDouble

PROMPTS = [list(range(40 + start, 400 + start)) for start in range(8)]


async def start(cluster: Cluster, *, num_prefill: int = 2, num_decode: int = 2) -> None:
    """dsched over doubles `p-0`, `p-1`, ... of which the first compute prompts."""
    kept_kv: dict[str, list[int]] = {}
    for _ in range(num_prefill + num_decode):
        double = await cluster.add_double(step_s=0.002, max_step_tokens=512)
        double.kept_kv = kept_kv

    def pool(role: str, doubles: dict[str, VllmDouble]) -> dict[str, Any]:
        return {
            "role": role,
            "model": {"name": MODEL, "tokenizer": str(cluster.folder)},
            "engines": [{"url": each.url, "id": engine_id} for engine_id, each in doubles.items()],
        }

    named = [(f"p-{index}", double) for index, double in enumerate(cluster.doubles)]
    pools = {
        "prefill": pool("prefill", dict(named[:num_prefill])),
        "decode": pool("decode", dict(named[num_prefill:])),
    }
    await cluster.start_service(pools=pools)
    await cluster.wait_until_up()


async def ask_all(cluster: Cluster, num_tokens: int = 40) -> list[list[int]]:
    answers = await asyncio.gather(
        *(cluster.complete(prompt, max_tokens=num_tokens) for prompt in PROMPTS)
    )
    return [token_ids for token_ids, _ in answers]


def expected(cluster: Cluster, num_tokens: int = 40) -> list[list[int]]:
    return [cluster.model.stream(prompt, num_tokens) for prompt in PROMPTS]


async def test_kv_params_of_the_prefill_answer_reach_the_decode_engine(cluster: Cluster) -> None:
    """All prompts are computed by the prefill engines, and both pools share their work."""
    await start(cluster)

    answers = await ask_all(cluster)

    assert answers == expected(cluster)
    prefill, decode = cluster.doubles[:2], cluster.doubles[2:]
    assert [each.num_prompt_tokens_loaded for each in prefill] == [0, 0]
    loaded = [each.num_prompt_tokens_loaded for each in decode]
    assert sum(loaded) == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert min(loaded) > 0
    controller = cluster.service.controller
    assert dict(controller.num_prefills) == {"remote": len(PROMPTS)}
    _, metrics = await cluster.get("/metrics")
    assert b'dsched_prefills_total{outcome="remote"} 8' in metrics
    await cluster.wait_until(lambda: controller.num_open_requests == 0)
    assert all(load.num_running == 0 for load, _ in controller.capacities().values())


async def test_the_journal_file_has_both_halves(cluster: Cluster) -> None:
    """A restarted dsched can say who computed what."""
    await start(cluster, num_prefill=1, num_decode=1)
    await ask_all(cluster)

    path = cluster.service.config.journal_path()
    records = [read_request(path, request_id) for request_id in await journaled_ids(path)]

    assert len(records) == len(PROMPTS)
    for record in records:
        assert record is not None
        (attempt,) = record.attempts
        assert attempt.prefill is not None
        halves = (attempt.prefill.engine_id, attempt.target.engine_id)
        assert halves == (EngineId("p-0"), EngineId("p-1"))


async def journaled_ids(path: Path) -> list[RequestId]:
    """Ids of the requests that the file has, once it has all."""
    rows: list[tuple[str]] = []
    async with asyncio.timeout(10):
        while len(rows) < len(PROMPTS):
            await asyncio.sleep(0.05)
            with closing(sqlite3.connect(path)) as connection:
                rows = connection.execute("SELECT request_id FROM requests").fetchall()
    return [RequestId(request_id) for (request_id,) in rows]


async def test_a_prefill_engine_that_dies_costs_no_answer(cluster: Cluster) -> None:
    """In the middle of a burst: the other one, or the decode engines, compute its prompts."""
    await start(cluster)
    cluster.doubles[0].step_s = 1.0  # it is in the middle of a prompt for as long as the test needs
    burst = asyncio.create_task(ask_all(cluster))
    await cluster.wait_until(lambda: cluster.doubles[0].ranks[0].running)

    await cluster.doubles[0].kill()

    assert await burst == expected(cluster)
    assert cluster.service.controller.num_handoffs == {}
    assert cluster.service.controller.num_prefills["failed"] >= 1


@pytest.mark.slow
async def test_a_decode_engine_that_dies_hands_its_answers_over(cluster: Cluster) -> None:
    await start(cluster)
    cluster.doubles[2].step_s = 0.02
    burst = asyncio.create_task(ask_all(cluster, 200))
    await cluster.wait_until(
        lambda: any(run.num_output > 3 for run in cluster.doubles[2].ranks[0].running)
    )

    await cluster.doubles[2].kill()

    assert await burst == expected(cluster, 200)
    assert cluster.service.controller.num_handoffs[("continue", "engine_lost")] >= 1


async def test_lost_kv_is_computed_again(cluster: Cluster) -> None:
    """The decode engine answers with an error; the client sees nothing of it."""
    await start(cluster, num_prefill=1, num_decode=1)
    for double in cluster.doubles:
        double.kept_kv = Forgetful()

    answers = await ask_all(cluster)

    assert answers == expected(cluster)
    assert cluster.service.controller.num_prefills["transfer_failed"] == len(PROMPTS)
    assert cluster.doubles[1].num_prompt_tokens_loaded == 0


class Forgetful(dict[str, list[int]]):
    """A store whose entries are gone at once."""

    def __setitem__(self, key: str, value: list[int]) -> None:
        pass
