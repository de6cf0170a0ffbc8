"""One pool over two kinds of engine: a real vLLM and a real SGLang serve the same weights.

Both compute in float32, and rounding differs: the kernels and the order of sums are not the same.
Compared are sure answers (`dsched.testing.live_run`), whose best token leads at every position by
far more than that. Unsure ones may part where two tokens are almost equally likely.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from dsched.drivers.http import HttpPool
from dsched.testing.engines import TinyEngines
from dsched.testing.live_run import (
    MIN_LEAD,
    LiveRun,
    ask_all,
    ask_engine,
    cluster_file,
    dispatched,
    fresh_connections,
    make_prompts,
    running_dsched,
    smallest_lead,
    sure_answers,
)

pytestmark = [pytest.mark.vllm, pytest.mark.sglang, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "tiny-mixed.yaml"
NUM_STREAMS = 24
NUM_TOKENS = 400
"""Long enough that all streams are live when SGLang dies."""
NUM_AGREEING = 32
NUM_AGREED_TOKENS = 64


@pytest.fixture
def mixed_run(
    vllm_engines: TinyEngines, sglang_dp2: TinyEngines, tmp_path: Path
) -> Iterator[LiveRun]:
    """dsched over both. The agents of the vLLM engine report elsewhere."""
    with running_dsched(
        ("-c", str(cluster_file(tmp_path, EXAMPLE, vllm_engines, sglang_dp2))),
        state_dir=tmp_path,
        num_engines=2,
        agent_endpoint=sglang_dp2.agent_endpoint,
    ) as run:
        yield run


async def test_engines_agree(vllm_engines: TinyEngines, sglang_dp2: TinyEngines) -> None:
    """Sure answers are the same tokens on both engines."""
    vllm, sglang = vllm_engines.engines[0], sglang_dp2.engines[0]
    prompts = [list(range(10 + index, 40 + index)) for index in range(NUM_AGREEING)]
    pool = HttpPool(sglang.url)
    try:
        theirs = await asyncio.gather(
            *(sglang_dp2.ask(pool, each, NUM_AGREED_TOKENS) for each in prompts)
        )
    finally:
        pool.close()
    async with aiohttp.ClientSession(connector=fresh_connections()) as session:
        choices = await asyncio.gather(
            *(
                ask_engine(
                    session,
                    vllm.url,
                    each,
                    max_tokens=NUM_AGREED_TOKENS,
                    return_token_ids=True,
                )
                for each in prompts
            )
        )

    sure = [index for index, choice in enumerate(choices) if smallest_lead(choice) >= MIN_LEAD]
    assert len(sure) > NUM_AGREEING // 2
    assert [choices[index]["token_ids"] for index in sure] == [theirs[index] for index in sure]


async def test_death_of_sglang_hands_its_streams_to_vllm(
    mixed_run: LiveRun, vllm_engines: TinyEngines, sglang_dp2: TinyEngines
) -> None:
    """SIGKILL of the whole server while both engines answer: every text is whole and exact."""
    vllm, sglang = vllm_engines.engines[0], sglang_dp2.engines[0]
    expected = await sure_answers(vllm.url, make_prompts(), NUM_STREAMS, max_tokens=NUM_TOKENS)

    asked = asyncio.create_task(ask_all(mixed_run, expected, max_tokens=NUM_TOKENS))
    async with asyncio.timeout(60):
        while await num_live(mixed_run, str(sglang.engine_id)) < 4:
            await asyncio.sleep(0.02)
    sglang.kill()
    streams = await asked
    counts = await dispatched(mixed_run)
    states = await mixed_run.samples("dsched_worker_state")
    handoffs = await mixed_run.samples("dsched_handoff_total")

    assert [text for text, _ in streams] == list(expected.values())
    assert [ends for _, ends in streams] == [["length", "[DONE]"]] * NUM_STREAMS
    down = {dict(each)["engine"] for each in states if states[each] and ("state", "down") in each}
    assert down == {str(sglang.engine_id)}
    num_on_sglang = sum(count for (name, _), count in counts.items() if name == sglang.engine_id)
    num_on_vllm = sum(count for (name, _), count in counts.items() if name == vllm.engine_id)
    num_moved = sum(int(value) for value in handoffs.values())
    assert 4 <= num_moved <= num_on_sglang
    assert num_on_vllm == NUM_STREAMS - num_on_sglang + num_moved
    assert num_on_vllm > num_moved, "both served before"


async def num_live(run: LiveRun, engine_id: str) -> int:
    """Requests on an engine that have tokens beyond their prompts."""
    running = await run.samples("dsched_rank_running_requests")
    kv_tokens = await run.samples("dsched_rank_kv_tokens")
    count = sum(value for labels, value in running.items() if ("engine", engine_id) in labels)
    held = sum(value for labels, value in kv_tokens.items() if ("engine", engine_id) in labels)
    return int(count) if held > 40 * count else 0
