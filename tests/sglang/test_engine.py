"""dsched inside real SGLang processes: obeyed, invisible in the answers, and never in the way.

The first half runs one real scheduler in a process of its own (`engine_run.py`), whose every step
can be looked at; the second asks a server of two DP ranks.
"""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dsched.drivers.http import HttpPool
from dsched.drivers.local import make_tiny_model
from dsched.drivers.reports import ReportReader
from dsched.drivers.sglang.launcher import find_sglang_python
from dsched.drivers.wire import AgentGoodbye, AgentHello, RankReport
from dsched.testing.engines import TinyEngines, run_engine_python
from dsched.testing.hostile import hostile_dsched, receive
from dsched.testing.sglang_engines import NO_SGLANG, generate, is_sglang_there

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

STATE_DIR = Path(__file__).parents[2] / ".dsched" / "tests"
SCRIPT = Path(__file__).parent / "engine_run.py"
LONG, SHORT, BUDGET_TOKENS, ALIGNMENT = 900, 120, 160, 32
"""As in `engine_run.py`."""
NUM_LOADED = 24
FEW = 10
"""Tokens that SGLang computes for itself, to see whether it is healthy."""


def run_scheduler(*arguments: str) -> dict[str, Any]:
    """What one scheduler did, see `engine_run.py`. Nobody listens at its endpoint."""
    if not is_sglang_there():
        pytest.skip(NO_SGLANG)
    python = find_sglang_python()
    model = asyncio.run(make_tiny_model(STATE_DIR / "models" / "tiny-moe", python=python))
    output = run_engine_python(
        python,
        str(SCRIPT),
        str(model),
        *arguments,
        variables={
            "DSCHED_ENDPOINT": "tcp://127.0.0.1:9",
            "DSCHED_STEP_BUDGET_MS": "1000",
            "DSCHED_CHUNK_ALIGNMENT": str(ALIGNMENT),
        },
    )
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """SGLang as it comes: prompts and decodes in separate steps."""
    return run_scheduler()


@pytest.fixture(scope="module")
def mixed() -> dict[str, Any]:
    """With `--enable-mixed-chunk`: prompts and decodes in one step."""
    return run_scheduler("mixed")


def prefills(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step for step in steps if step["kind"] == "prefill"]


def test_plugin_attaches_by_itself_and_tells_what_it_has(run: dict[str, Any]) -> None:
    """SGLang finds the entry point; the hello describes this engine and lacks nothing."""
    assert run["features"] == ["load_reports", "waiting_prefill_tokens", "chunk_budget"]
    assert run["missing"] == []
    assert (run["engine"], run["version"]) == ("sglang", "0.5.23")
    assert run["kv_capacity_tokens"] == 2_500
    assert run["is_overlapped"]


def test_each_step_computes_the_planned_prompt_tokens(run: dict[str, Any]) -> None:
    """In every step; no chunk above the budget's; prompts are computed as a whole."""
    steps = prefills(run["ours"]["steps"])

    assert [sum(step["chunks"].values()) for step in steps] == [step["planned"] for step in steps]
    assert max(step["planned"] for step in steps) <= BUDGET_TOKENS
    for name, length in (("long", LONG), ("short", SHORT)):
        assert sum(step["chunks"].get(name, 0) for step in steps) == length
    assert run["num_differed"] == 0


def test_short_prompt_passes_the_long_one_that_is_being_cut(run: dict[str, Any]) -> None:
    """It gets the share of its length bucket; SGLang alone would finish the long one first."""
    (both,) = [step for step in prefills(run["ours"]["steps"]) if len(step["chunks"]) == 2]

    assert both["chunks"] == {"long": both["share"], "short": SHORT}
    assert both["share"] == ALIGNMENT


def test_running_stream_decodes_after_each_step_with_prompts(run: dict[str, Any]) -> None:
    """SGLang's own rule computes all waiting prompts first."""
    steps = run["ours"]["steps"][1:]
    after = [later for step, later in itertools.pairwise(steps) if step["kind"] == "prefill"]
    alone = prefills(run["fixed"]["steps"])

    assert len(after) > 5
    assert all(step["kind"] == "decode" and "stream" in step["chunks"] for step in after)
    assert alone[-1]["chunks"] == {"long": LONG, "short": SHORT}


def test_mixed_steps_compute_the_planned_prompts_beside_every_decode(mixed: dict[str, Any]) -> None:
    """The decodes come on top of the planned tokens, and nobody waits for a step."""
    steps = prefills(mixed["ours"]["steps"])[1:]
    prompts = [
        {name: count for name, count in step["chunks"].items() if count > 1} for step in steps
    ]

    assert [sum(each.values()) for each in prompts] == [step["planned"] for step in steps]
    assert {"long": ALIGNMENT, "short": SHORT} in prompts
    assert all(step["chunks"]["stream"] == 1 for step in steps)
    assert mixed["num_differed"] == 0
    assert mixed["ours"]["tokens"] == mixed["fixed"]["tokens"]


def test_answers_are_those_of_sglang_alone(run: dict[str, Any]) -> None:
    """Token by token, with short of KV, prefix hits and cut prompts too."""
    assert run["ours"]["tokens"] == run["fixed"]["tokens"]
    assert {name: len(each) for name, each in run["ours"]["tokens"].items()} == {
        "stream": 60,
        "long": 8,
        "short": 8,
    }
    assert run["random_ours"]["tokens"] == run["random_fixed"]["tokens"]
    assert len(run["random_ours"]["tokens"]) == 40


def test_random_arrivals_keep_to_the_plan_and_are_learned_from(run: dict[str, Any]) -> None:
    """No step is larger than planned, and each that ran teaches the cost model."""
    steps = prefills(run["random_ours"]["steps"])

    assert all(sum(step["chunks"].values()) <= step["planned"] for step in steps)
    assert run["num_fallbacks"] == 0
    assert run["num_learned"] >= len(steps) - 1


@pytest.mark.parametrize("name", ["random_ours", "random_fixed"])
def test_reports_add_up(run: dict[str, Any], name: str) -> None:
    """One a step, with the tokens it computed; the load rises and ends at nothing."""
    steps, records = run[name]["steps"], run[name]["records"]
    computed = [record["num_step_tokens"] for record in records]
    most = {key: max(record[key] for record in records) for key in records[0]}

    assert computed == [sum(step["chunks"].values()) for step in steps]
    assert all(record["step_ns"] > 0 for record in records)
    assert [record["step"] for record in records] == list(
        range(records[0]["step"], records[0]["step"] + len(records))
    )
    assert 4 < most["num_running"] <= 40
    assert most["num_waiting"] > 4
    assert 1_000 < most["num_kv_tokens"] <= run["kv_capacity_tokens"]
    assert most["num_waiting_prefill_tokens"] > 1_000
    idle = ("num_running", "num_waiting", "num_kv_tokens", "num_waiting_prefill_tokens")
    assert [records[-1][key] for key in idle] == [0, 0, 0, 0]


def test_a_part_that_breaks_is_reported_and_the_engine_goes_on(run: dict[str, Any]) -> None:
    """One after the other: the planner, what waits, the reports. The answer is always the same."""
    broken = run["broken"]
    chunks, waiting, reports = "chunk_budget", "waiting_prefill_tokens", "load_reports"

    assert [broken[name]["missing"] for name in ("whole", "planner", "waiting", "reports")] == [
        [],
        [chunks],
        [chunks, waiting],
        [chunks, waiting, reports],
    ]
    assert broken["waiting"]["num_records"] == 12
    assert broken["reports"]["num_records"] == 0
    assert all(each["tokens"] == broken["whole"]["tokens"] for each in broken.values())


class Listener:
    """Keeps what the agents of the server say."""

    def __init__(self) -> None:
        self.hellos: dict[int, AgentHello] = {}
        self.reports: list[RankReport] = []

    def on_hello(self, hello: AgentHello) -> None:
        self.hellos[hello.dp_rank] = hello

    def on_report(self, report: RankReport) -> None:
        self.reports.append(report)

    def on_goodbye(self, _: AgentGoodbye) -> None: ...

    async def wait(self, is_there: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_there():
                await asyncio.sleep(0.01)


def is_idle(report: RankReport) -> bool:
    return not report.num_running and not report.num_step_tokens


@pytest.fixture
async def pool(sglang_dp2: TinyEngines) -> AsyncIterator[HttpPool]:
    """A way to ask the server without dsched."""
    pool = HttpPool(sglang_dp2.engines[0].url, max_connections=NUM_LOADED)
    yield pool
    pool.close()


async def answers(pool: HttpPool, **fields: object) -> list[dict[str, Any]]:
    """Answers to different prompts at once."""
    prompts = [tuple(range(10 + index, 50 + index)) for index in range(NUM_LOADED)]
    return await asyncio.gather(
        *(generate(pool, prompt, max_tokens=8, **fields) for prompt in prompts)
    )


async def test_each_rank_reports_its_own_load(sglang_dp2: TinyEngines, pool: HttpPool) -> None:
    """Two agents under one engine id; requests for one rank move only that rank's counts."""
    reader, listener = ReportReader(endpoint=sglang_dp2.agent_endpoint), Listener()
    reader.start()
    reader.subscribe(sglang_dp2.engines[0].engine_id, listener)
    # A heartbeat of each: what was computed before has been told.
    await listener.wait(
        lambda: {each.dp_rank for each in listener.reports if is_idle(each)} == {0, 1}
    )
    listener.reports.clear()
    got = await answers(pool, routed_dp_rank=1)
    await listener.wait(lambda: any(each.dp_rank and is_idle(each) for each in listener.reports))
    tokens: Counter[int] = Counter()
    for report in listener.reports:
        tokens[report.dp_rank] += report.num_step_tokens
    reader.close()

    assert {each["meta_info"]["dp_rank"] for each in got} == {1}
    assert {hello.num_dp_ranks for hello in listener.hellos.values()} == {2}
    assert all("dp_routing" in hello.features for hello in listener.hellos.values())
    assert all(hello.missing == () for hello in listener.hellos.values())
    # 24 prompts of 40 tokens, of which the cache may spare some, and 7 decodes of each; one more is
    # launched before SGLang knows that an answer has ended.
    assert NUM_LOADED * 8 <= tokens[1] < NUM_LOADED * (40 + 8) + FEW
    assert tokens[0] < FEW
    assert sum(reader.drops.values()) == 0


async def test_unplaced_requests_spread_over_both_ranks(pool: HttpPool) -> None:
    """A burst that names no rank is placed by what each rank has to do."""
    got = await answers(pool)
    ranks = Counter(each["meta_info"]["dp_rank"] for each in got)

    assert ranks[0] + ranks[1] == NUM_LOADED
    assert min(ranks[0], ranks[1]) >= NUM_LOADED // 3


async def stuck(endpoint: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """It accepts and never reads: the agents' queues fill."""
    with hostile_dsched(endpoint, rcvhwm=1, rcvbuf=2_048):
        await asyncio.sleep(2.5)
        return await work()


async def dying(endpoint: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """It ends amid reports."""
    with hostile_dsched(endpoint) as router:
        await receive(router)
        running = asyncio.ensure_future(work())
        await receive(router)
    return await running


async def babbling(endpoint: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """It answers everything with bytes that are no command."""
    with hostile_dsched(endpoint) as router:
        for index in range(200):
            identity, *_ = await receive(router)
            router.send_multipart([identity, bytes([index % 256]) * (index + 1)])
            if index == 2:
                running = asyncio.ensure_future(work())
            if index > 2 and running.done():
                break
        return await running


@pytest.mark.parametrize("enemy", [stuck, dying, babbling])
async def test_engine_serves_on_whatever_dsched_becomes(
    sglang_dp2: TinyEngines, pool: HttpPool, enemy: Callable[..., Awaitable[Any]]
) -> None:
    """The answers are those it gave when nobody listened."""
    prompt = tuple(range(20, 60))

    async def work() -> list[list[int]]:
        got = await asyncio.gather(
            *(generate(pool, prompt, max_tokens=40, routed_dp_rank=rank) for rank in (0, 1, 0, 1))
        )
        return [each["output_ids"] for each in got]

    alone = await work()
    among = await enemy(sglang_dp2.agent_endpoint, work)

    assert among == alone
    assert all(len(each) > 0 for each in alone)
