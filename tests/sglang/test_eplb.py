"""Expert placement in a real SGLang EP group on a CPU: two ranks, eight experts, ten slots."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from dsched.drivers.http import HttpPool
from dsched.drivers.wire import AgentHello, AgentMessage
from dsched.testing.engines import TinyEngines
from dsched.testing.hostile import hostile_dsched, receive
from dsched.testing.sglang_engines import (
    ENGINE_ARGS,
    NO_SGLANG,
    generate,
    is_sglang_there,
    running_sglang,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STATE_DIR = Path(__file__).parents[2] / ".dsched" / "tests"
STEPS_BETWEEN = 60
NUM_PLANS = 4
PLAN = re.compile(
    r"TP(\d)[^]]*\] eplb\.planned plan=\d+ moves=(-?\d+) placement=(\w+) last_has_run=(\w+)"
)
GROUP_ARGS = (
    *ENGINE_ARGS,
    *("--tp-size", "2", "--ep-size", "2", "--enable-eplb", "--ep-num-redundant-experts", "2"),
    *("--eplb-rebalance-num-iterations", str(STEPS_BETWEEN)),
    *("--expert-distribution-recorder-buffer-size", str(STEPS_BETWEEN)),
    *("--ep-dispatch-algorithm", "dynamic"),
)
VARIABLES = {
    "DSCHED_EPLB": "1",
    "DSCHED_STEP_BUDGET_MS": "50",
    # SGLang itself looks into every moved weight, and says which placement it runs.
    "SGLANG_EXPERT_LOCATION_UPDATER_CANARY": "1",
    "SGLANG_LOG_EXPERT_LOCATION_METADATA": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
}


@pytest.fixture(scope="module")
def group() -> Iterator[TinyEngines]:
    """One server of two ranks that share the experts."""
    if not is_sglang_there():
        pytest.skip(NO_SGLANG)
    with running_sglang(
        state_dir=STATE_DIR, name="sglang-eplb", args=GROUP_ARGS, variables=VARIABLES
    ) as engines:
        yield engines


@pytest.fixture
async def pool(group: TinyEngines) -> AsyncIterator[HttpPool]:
    pool = HttpPool(group.engines[0].url)
    yield pool
    pool.close()


def plans_of(group: TinyEngines) -> dict[int, list[tuple[int, str, bool]]]:
    """Moves, checksum and whether the plan before has run, of each plan that a rank has logged."""
    plans: dict[int, list[tuple[int, str, bool]]] = {0: [], 1: []}
    for rank, moves, placement, has_run in PLAN.findall(group.engines[0].log_path.read_text()):
        plans[int(rank)].append((int(moves), placement, has_run == "True"))
    return plans


async def test_answers_stay_the_same_while_experts_move(group: TinyEngines, pool: HttpPool) -> None:
    """Rebalanced several times under one-sided load; what runs is what dsched planned."""
    prompts = [tuple(range(20 + index, 60 + index)) for index in range(4)]

    async def answers() -> list[list[int]]:
        got = await asyncio.gather(*(generate(pool, prompt, max_tokens=40) for prompt in prompts))
        return [each["output_ids"] for each in got]

    rounds = []
    async with asyncio.timeout(200):
        while min(map(len, plans_of(group).values())) < NUM_PLANS:
            rounds.append(await answers())
    plans = plans_of(group)

    assert len(rounds) >= NUM_PLANS - 1
    assert rounds == [rounds[0]] * len(rounds)
    # Each rank plans for itself from summed counts, and nothing is sent between them.
    assert plans[0][:NUM_PLANS] == plans[1][:NUM_PLANS]
    moves = [each for each, _, _ in plans[0]]
    assert min(moves) >= 0
    assert sum(moves) > 0
    assert all(has_run for _, _, has_run in plans[0][1:])


async def test_one_rank_speaks_for_both_and_says_what_it_cannot(group: TinyEngines) -> None:
    """Chunks by measured time would have to be agreed on between tensor-parallel ranks."""
    with hostile_dsched(group.agent_endpoint) as router:
        heard = [(await receive(router))[-1] for _ in range(4)]
    hellos = [
        each
        for each in map(msgspec.msgpack.Decoder(AgentMessage).decode, heard)
        if isinstance(each, AgentHello)
    ]

    assert {(hello.dp_rank, hello.num_dp_ranks) for hello in hellos} == {(0, 1)}
    assert len({hello.incarnation for hello in hellos}) == 1
    assert hellos[0].missing == ("chunk_budget",)
    assert "eplb" in hellos[0].features
