"""`dsched run` starts an EP group of vLLM with a server for each DP rank (external load balancing).

For dsched these are two engines of one group. Compared are sure answers
(`dsched.testing.live_run`); the last test kills one rank.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from dsched.testing.live_run import (
    LiveRun,
    ask_all,
    core_pid,
    dispatched,
    make_prompts,
    running_dsched,
    sure_answers,
)
from dsched.testing.vllm_engines import ENGINE_ARGS, NO_VLLM, is_vllm_there

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PLUGIN = Path(__file__).parent / "plugin"
NUM_STREAMS = 32
NUM_TOKENS = 40
ENGINES = ["vllm-0-dp0", "vllm-0-dp1"]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    if not is_vllm_there():
        pytest.skip(NO_VLLM)
    args = (
        *("--engine", "vllm", "--model", "tiny", "--replicas", "1"),
        *("--data-parallel-size", "2", "--enable-expert-parallel"),
        *("--launch-load-balancer", "external", "--launch-args", json.dumps(ENGINE_ARGS)),
        *("--faults-handoff-deadline-s", "1"),
    )
    with running_dsched(
        args,
        state_dir=tmp_path_factory.mktemp("external"),
        num_engines=2,
        variables={"PYTHONPATH": str(PLUGIN)},
    ) as run:
        yield run


async def test_streams_are_the_groups_own_and_both_servers_serve(group: LiveRun) -> None:
    """32 concurrent greedy streams; no rank gets more than 60 %."""
    url = group.engines[ENGINES[0]].url
    expected = await sure_answers(url, make_prompts(), NUM_STREAMS, max_tokens=NUM_TOKENS)

    streams = await ask_all(group, expected, max_tokens=NUM_TOKENS)
    counts = await dispatched(group)

    assert [text for text, _ in streams] == list(expected.values())
    assert sorted(counts) == [(name, "0") for name in ENGINES]
    assert sum(counts.values()) == NUM_STREAMS
    assert max(counts.values()) <= 0.6 * NUM_STREAMS, counts


async def test_one_dead_rank_takes_down_both_engines_for_a_while(group: LiveRun) -> None:
    """And nothing hangs: with nowhere to go, live streams end with a clear error. Then dsched
    starts both again, and they answer as before."""
    killed = core_pid(group.engines[ENGINES[1]].pid, dp_rank=1)
    assert killed is not None
    body = {"model": "tiny", "prompt": "the router", "max_tokens": 900, "ignore_eos": True}

    async def ask(session: aiohttp.ClientSession) -> str:
        url = f"{group.url}/v1/completions"
        async with session.post(url, json=body | {"stream": True}) as answer:
            return (await answer.read()).decode()

    num_before = await num_tokens(group)
    async with aiohttp.ClientSession() as session:
        asked = [asyncio.create_task(ask(session)) for _ in range(6)]
        async with asyncio.timeout(60):
            while await num_busy(group) < 2 or await num_tokens(group) < num_before + 60:
                await asyncio.sleep(0.02)
        os.kill(killed, signal.SIGKILL)
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*asked)
    states = await group.samples("dsched_worker_state")

    down = {dict(each)["engine"] for each in states if states[each] and ("state", "down") in each}
    assert down == set(ENGINES)
    assert all("handoff_overdue" in answer and "[DONE]" not in answer for answer in answers)

    # One alone would wait for cores that are gone: they come back together.
    await group.wait_until_up(len(ENGINES))
    restarts = await group.samples("dsched_engine_restarts_total")
    expected = await sure_answers(
        group.engines[ENGINES[0]].url, make_prompts(), NUM_STREAMS, max_tokens=NUM_TOKENS
    )
    streams = await ask_all(group, expected, max_tokens=NUM_TOKENS)

    assert {dict(each)["engine"] for each in restarts} == set(ENGINES)
    assert len(set(restarts.values())) == 1
    assert min(restarts.values()) >= 1
    assert [text for text, _ in streams] == list(expected.values())


async def num_tokens(run: LiveRun) -> float:
    """Tokens that clients got so far."""
    return sum((await run.samples("dsched_journal_recorded_tokens_total")).values())


async def num_busy(run: LiveRun) -> int:
    """Engines that compute something."""
    running = await run.samples("dsched_rank_running_requests")
    return sum(value > 0 for value in running.values())
