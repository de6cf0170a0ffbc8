"""A whole dsched over SGLang doubles, alone, beside vLLM doubles, and in separate pools."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from double_cluster import MODEL, PROMPT, Cluster

from dsched.testing.sglang_double import KvRooms, SglangDouble

NUM_STREAMS = 12


def streams(
    cluster: Cluster, *, max_tokens: int
) -> tuple[list[asyncio.Task[tuple[list[int], object]]], list[list[int]]]:
    """Streams under way, and what each must be."""
    prompts = [[*PROMPT, 60 + index] for index in range(NUM_STREAMS)]
    tasks = [
        asyncio.create_task(cluster.complete(prompt, max_tokens=max_tokens)) for prompt in prompts
    ]
    return tasks, [cluster.model.stream(prompt, max_tokens) for prompt in prompts]


async def tokens(tasks: list[asyncio.Task[tuple[list[int], object]]]) -> list[list[int]]:
    return [token_ids for token_ids, _ in await asyncio.gather(*tasks)]


async def test_both_ranks_of_a_server_get_what_dsched_chose(cluster: Cluster) -> None:
    """The rank is in every request, and the load is even."""
    double = await cluster.add(SglangDouble, num_dp_ranks=2)
    await cluster.start_service()
    await cluster.wait_until_up()

    tasks, expected = streams(cluster, max_tokens=40)

    assert await tokens(tasks) == expected
    ranks = [body["routed_dp_rank"] for body in double.bodies]
    assert sorted(ranks) == [0] * 6 + [1] * 6


@pytest.mark.slow
async def test_one_pool_holds_both_kinds_and_survives_the_death_of_one(cluster: Cluster) -> None:
    """Streams of the lost SGLang server go on at vLLM, each token once."""
    await cluster.add_double(step_s=0.005)
    sglang = await cluster.add(SglangDouble, num_dp_ranks=2, step_s=0.005)
    await cluster.start_service(faults={"spare": "none"})
    await cluster.wait_until_up()
    tasks, expected = streams(cluster, max_tokens=200)
    await cluster.wait_until(lambda: sglang.num_running >= 4)
    await asyncio.sleep(0.1)

    await sglang.kill()

    assert await tokens(tasks) == expected
    kinds = {status.engine_id: status.state.name for status in statuses(cluster)}
    assert kinds == {"p-0": "UP", "p-1": "DOWN"}


@pytest.mark.slow
async def test_workers_name_version_and_missing_features(cluster: Cluster) -> None:
    """A hook that is gone turns off just its feature, for all to see."""
    double = await cluster.add(SglangDouble)
    await cluster.start_service()
    await cluster.wait_until_up()
    agent = double.ranks[0].agent
    assert agent is not None

    agent.drop_feature("waiting_prefill_tokens")

    def row() -> object:
        return cluster.service.workers().engines[0]

    await cluster.wait_until(lambda: row().missing)
    assert row().missing == ("waiting_prefill_tokens",)
    assert row().version == "0.5.23"
    assert row().kind == "sglang"
    token_ids, _ = await cluster.complete(PROMPT, max_tokens=5)
    assert token_ids == cluster.model.stream(PROMPT, 5)


async def test_server_of_another_model_gets_nothing_and_is_named(cluster: Cluster) -> None:
    """`/generate` names no model: a wrong server would answer, so it must not be asked."""
    await cluster.add_double()
    wrong = await cluster.add(SglangDouble, served_model_name="other")
    await cluster.start_service(faults={"spare": "none"})
    await cluster.wait_until_up(1)
    await cluster.wait_until(lambda: "serves model" in statuses(cluster)[1].reason)

    tasks, expected = streams(cluster, max_tokens=20)

    assert await tokens(tasks) == expected
    assert wrong.bodies == []
    assert "serves model 'other'" in statuses(cluster)[1].reason


# -- separate pools


class Split:
    """Two prefill servers with two DP ranks each and a decode server, in pools of their own."""

    def __init__(self, cluster: Cluster, *, timeout_s: float) -> None:
        self.cluster = cluster
        self.rooms = KvRooms(timeout_s=timeout_s)
        self.prefills: list[SglangDouble] = []

    async def start(self) -> None:
        for index in range(2):
            self.prefills.append(await self._add("prefill", f"x-{index}", num_dp_ranks=2))
        self.decode = await self._add("decode", "y-0", num_dp_ranks=1)
        pools = {
            name: {
                "role": name,
                "model": {"name": MODEL, "tokenizer": str(self.cluster.folder)},
                "engines": [
                    {"id": double.engine_id, "url": double.url, "kind": "sglang"}
                    for double in doubles
                ],
            }
            for name, doubles in (("prefill", self.prefills), ("decode", [self.decode]))
        }
        await self.cluster.start_service(pools=pools)
        await self.cluster.wait_until_up()

    async def _add(self, mode: str, engine_id: str, *, num_dp_ranks: int) -> SglangDouble:
        return await self.cluster.add(
            SglangDouble,
            engine_id=engine_id,
            num_dp_ranks=num_dp_ranks,
            disaggregation_mode=mode,
            rooms=self.rooms,
        )


@pytest.fixture
async def start_split(cluster: Cluster) -> AsyncIterator[Callable]:
    async def start(*, timeout_s: float = 5.0) -> Split:
        split = Split(cluster, timeout_s=timeout_s)
        await split.start()
        return split

    return start


async def test_pairs_meet_in_their_rooms(cluster: Cluster, start_split: Callable) -> None:
    """Both halves name one room, whose remainder is the prefill rank; answers are exact."""
    split = await start_split()

    tasks, expected = streams(cluster, max_tokens=30)

    assert await tokens(tasks) == expected
    prefills = [body for double in split.prefills for body in double.bodies]
    rooms = {body["bootstrap_room"]: body for body in prefills}
    assert len(rooms) == NUM_STREAMS
    assert {body["bootstrap_room"] for body in split.decode.bodies} == set(rooms)
    for body in prefills:
        assert body["routed_dp_rank"] == body["bootstrap_room"] % 2
        assert body["sampling_params"]["max_new_tokens"] == 1
    assert all(double.bodies for double in split.prefills)


async def test_pair_that_met_has_missed_nothing(cluster: Cluster, start_split: Callable) -> None:
    """SGLang counts KV that it was handed as not cached; the answer proves that it came."""
    await start_split()
    prompt = [5 + index % 500 for index in range(400)]

    token_ids, _ = await cluster.complete(prompt, max_tokens=5)

    assert token_ids == cluster.model.stream(prompt, 5)
    assert cluster.service.controller.num_prefills == {"remote": 1}


async def test_lost_prefill_server_costs_time_and_no_answer(
    cluster: Cluster, start_split: Callable
) -> None:
    """Pairs whose prompt was being computed are placed anew at the other server."""
    split = await start_split(timeout_s=1.0)
    for double in split.prefills:
        double.step_s = 0.3
    tasks, expected = streams(cluster, max_tokens=30)
    await cluster.wait_until(lambda: split.prefills[0].num_running >= 1)

    await split.prefills[0].kill()
    split.prefills[1].step_s = 0.002

    assert await tokens(tasks) == expected


def statuses(cluster: Cluster) -> list:
    return sorted(cluster.service.controller.engine_statuses(), key=lambda each: each.engine_id)
