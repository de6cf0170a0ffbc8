"""A real EP group of vLLM (two DP ranks, each with half of the experts) under dsched.

One server for all tests, shared with those of `test_engine.py` and the conformance tests; the last
test here kills one rank of it. Compared are sure answers (`dsched.testing.live_run`).
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsched.drivers.reports import ReportReader
from dsched.drivers.vllm import VllmDriver
from dsched.drivers.wire import GenerateCommand, SamplingParams
from dsched.errors import EngineRefusedError
from dsched.ids import AttemptIds
from dsched.testing.engines import TinyEngines
from dsched.testing.live_run import (
    LiveRun,
    ask_all,
    cluster_file,
    core_pid,
    dispatched,
    make_prompts,
    running_dsched,
    sure_answers,
)
from dsched.testing.recorders import RecordingListener, RecordingSink

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXAMPLE = Path(__file__).parents[2] / "examples" / "clusters" / "tiny-wide-ep-vllm.yaml"
NUM_STREAMS = 40
NUM_TOKENS = 48
NUM_LIVE_STREAMS = 24
NUM_LIVE_TOKENS = 600
"""Long enough that all streams are live when a rank is killed."""


@pytest.fixture
def group_run(vllm_group: TinyEngines, tmp_path: Path) -> Iterator[LiveRun]:
    """dsched over the group alone."""
    with running_dsched(
        ("-c", str(cluster_file(tmp_path, EXAMPLE, vllm_group))),
        state_dir=tmp_path,
        num_engines=1,
        agent_endpoint=vllm_group.agent_endpoint,
    ) as run:
        yield run


@pytest.fixture
def mixed_run(
    vllm_group: TinyEngines, vllm_engines: TinyEngines, tmp_path: Path
) -> Iterator[LiveRun]:
    """dsched over the group and a server of one rank, which reports to nobody."""
    with running_dsched(
        ("-c", str(cluster_file(tmp_path, EXAMPLE, vllm_group, vllm_engines))),
        state_dir=tmp_path,
        num_engines=2,
        agent_endpoint=vllm_group.agent_endpoint,
    ) as run:
        yield run


async def test_streams_are_the_groups_own_and_both_ranks_serve(
    vllm_group: TinyEngines, group_run: LiveRun
) -> None:
    """40 concurrent greedy streams through dsched; no rank gets more than 60 %."""
    url = vllm_group.engines[0].url
    expected = await sure_answers(url, make_prompts(), NUM_STREAMS, max_tokens=NUM_TOKENS)

    streams = await ask_all(group_run, list(expected), max_tokens=NUM_TOKENS)
    counts = await dispatched(group_run)
    reported = await group_run.samples("dsched_rank_report_age_seconds")
    missing = await group_run.samples("dsched_agent_features_missing")

    assert [text for text, _ in streams] == list(expected.values())
    assert len(set(expected.values())) == NUM_STREAMS
    assert [ends for _, ends in streams] == [["length", "[DONE]"]] * NUM_STREAMS
    assert sorted(counts) == [("group-0", "0"), ("group-0", "1")]
    assert sum(counts.values()) == NUM_STREAMS
    assert max(counts.values()) <= 0.6 * NUM_STREAMS, counts
    assert sorted(dict(labels)["dp_rank"] for labels in reported) == ["0", "1"]
    assert sum(missing.values()) == 0


async def test_requests_run_on_the_rank_that_dsched_names(vllm_group: TinyEngines) -> None:
    """Each rank's own agent reports what was sent to it, and nothing else."""
    server = vllm_group.engines[0]
    reports = ReportReader(endpoint=vllm_group.agent_endpoint)
    reports.start()
    driver = VllmDriver(engine_id=server.engine_id, url=server.url, reports=reports)
    listener = RecordingListener()
    driver.start(listener)
    description = await listener.up()
    ids = AttemptIds(process_tag=id(driver))

    def generate(dp_rank: int) -> RecordingSink:
        sink = RecordingSink(ids.next_id())
        command = GenerateCommand(
            attempt_id=sink.attempt_id,
            epoch=1,
            dp_rank=dp_rank,
            prompt_token_ids=tuple(range(30 + dp_rank, 60)),
            sampling=SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True),
        )
        driver.generate(command, sink)
        return sink

    num_before = len(listener.reports)
    sinks = [generate(dp_rank) for dp_rank in (0, 1, 1, 1, 0, 1, 1, 1)]
    nowhere = generate(7)
    await asyncio.gather(*(sink.ended(60) for sink in (*sinks, nowhere)))
    most: Counter[int] = Counter()
    incarnations: dict[int, set[str]] = {0: set(), 1: set()}
    for report in listener.reports[num_before:]:
        most[report.dp_rank] = max(most[report.dp_rank], report.num_running)
        incarnations[report.dp_rank].add(report.incarnation)
    driver.close()
    reports.close()

    assert description.num_dp_ranks == 2
    assert description.capabilities.has_load_reports
    assert most == {0: 2, 1: 6}
    assert all(len(each) == 1 for each in incarnations.values())
    assert incarnations[0] != incarnations[1]
    assert [len(sink.token_ids) for sink in sinks] == [100] * 8
    assert isinstance(nowhere.error, EngineRefusedError)
    assert nowhere.error.status == 400


async def test_one_dead_rank_takes_down_its_group(
    vllm_group: TinyEngines, vllm_engines: TinyEngines, mixed_run: LiveRun
) -> None:
    """SIGKILL of one rank's core: every stream of both ranks goes on at another engine."""
    server, other = vllm_group.engines[0], vllm_engines.engines[0]
    expected = await sure_answers(
        other.url, make_prompts(), NUM_LIVE_STREAMS, max_tokens=NUM_LIVE_TOKENS
    )

    asked = asyncio.create_task(ask_all(mixed_run, list(expected), max_tokens=NUM_LIVE_TOKENS))
    async with asyncio.timeout(60):
        while await num_on_both_ranks(mixed_run) < 4:
            await asyncio.sleep(0.02)
    killed, sibling = (core_pid(server.pid, dp_rank=rank) for rank in (1, 0))
    assert killed is not None
    assert sibling is not None
    os.kill(killed, signal.SIGKILL)
    streams = await asked
    counts = await dispatched(mixed_run)
    states = await mixed_run.samples("dsched_worker_state")
    handoffs = await mixed_run.samples("dsched_handoff_total")
    downs = mixed_run.events("engine.went_down")
    async with asyncio.timeout(30):
        while core_pid(server.pid, dp_rank=0) is not None:
            await asyncio.sleep(0.1)

    assert [text for text, _ in streams] == list(expected.values())
    assert [ends for _, ends in streams] == [["length", "[DONE]"]] * NUM_LIVE_STREAMS
    down = {dict(each)["engine"] for each in states if states[each] and ("state", "down") in each}
    assert down == {str(server.engine_id)}
    assert [each["engine_id"] for each in downs] == [server.engine_id]
    num_on_group = sum(count for (engine, _), count in counts.items() if engine == server.engine_id)
    num_moved = sum(int(value) for value in handoffs.values())
    assert 4 <= num_moved <= num_on_group


async def num_on_both_ranks(run: LiveRun) -> int:
    """Requests on the rank of the group that runs fewer, once both decode."""
    samples = await run.samples("dsched_rank_running_requests")
    running = [value for labels, value in samples.items() if ("engine", "group-0") in labels]
    kv_tokens = await run.samples("dsched_rank_kv_tokens")
    held = [value for labels, value in kv_tokens.items() if ("engine", "group-0") in labels]
    return int(min(running)) if len(running) == 2 and min(held) > 100 else 0
