"""A burst over two real vLLM engines while the router hears no report at all.

vllm#22910: until the first load report everything went to one rank. The router's own ledger must
spread the burst; the engines' reports are read by the test alone, to see what they really hold.
"""

import asyncio
from collections.abc import Iterator

import pytest

from dsched.drivers.http import HttpPool
from dsched.drivers.reports import ReportReader
from dsched.drivers.wire import AgentGoodbye, AgentHello, RankReport
from dsched.ids import DpRank, RankId
from dsched.rng import stream
from dsched.routing import DecodeRouter, RoutingRequest
from dsched.testing.vllm_engines import (
    ENGINE_ARGS,
    TinyEngines,
    complete,
    is_vllm_there,
    running_engines,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_REQUESTS = 32
NUM_OUTPUT_TOKENS = 48
LONGEST_PROMPT = 400


class Recorder:
    """Keeps every report of one engine."""

    def __init__(self) -> None:
        self.reports: list[RankReport] = []

    def on_hello(self, hello: AgentHello) -> None:
        pass

    def on_report(self, report: RankReport) -> None:
        self.reports.append(report)

    def on_goodbye(self, goodbye: AgentGoodbye) -> None:
        pass


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyEngines]:
    if not is_vllm_there():
        pytest.skip("no vLLM environment; run `make .venv-vllm/.ready`")
    state_dir = tmp_path_factory.mktemp("burst")
    with running_engines(
        num_engines=2, state_dir=state_dir, name="burst", args=ENGINE_ARGS
    ) as running:
        yield running


def test_a_burst_without_reports_leaves_both_engines_level(engines: TinyEngines) -> None:
    rng = stream(11, "burst")
    lengths = [LONGEST_PROMPT] * 4 + rng.integers(8, 120, NUM_REQUESTS - 4).tolist()
    lengths = [lengths[index] for index in rng.permutation(NUM_REQUESTS)]
    router = DecodeRouter(kv_token_ns=2_000.0)
    for engine in engines.engines:
        router.add_rank(
            RankId(engine.engine_id, DpRank(0)), kv_capacity_tokens=10**6, max_running_requests=64
        )
    sent: list[list[int]] = [[], []]
    for index, length in enumerate(lengths):
        decision = router.pick(RoutingRequest(num_prompt_tokens=length), 0)
        assert decision.rank is not None
        router.book(decision.rank, index, num_prompt_tokens=length, now_ns=0)
        sent[decision.rank].append(length)

    recorders = asyncio.run(serve(engines, sent))

    one_long = LONGEST_PROMPT + NUM_OUTPUT_TOKENS
    peaks = [max(report.num_kv_tokens for report in one.reports) for one in recorders]
    loads = [sum(group) + NUM_OUTPUT_TOKENS * len(group) for group in sent]
    assert abs(loads[0] - loads[1]) <= one_long
    assert min(peaks) > sum(lengths) / 4, "the burst ran together, so the peaks say something"
    assert abs(peaks[0] - peaks[1]) <= one_long
    router.validate()


async def serve(engines: TinyEngines, sent: list[list[int]]) -> list[Recorder]:
    """Send all at once, each to the engine that the router chose."""
    reader = ReportReader(endpoint=engines.agent_endpoint)
    recorders = [Recorder(), Recorder()]
    for engine, recorder in zip(engines.engines, recorders, strict=True):
        reader.subscribe(engine.engine_id, recorder)
    reader.start()
    pools = [HttpPool(engine.url) for engine in engines.engines]
    try:
        async with asyncio.timeout(60):
            while not all(recorder.reports for recorder in recorders):
                await asyncio.sleep(0.2)
        await asyncio.gather(
            *(
                complete(
                    pool,
                    [10 + (7 * at + length) % 200 for at in range(length)],
                    max_tokens=NUM_OUTPUT_TOKENS,
                    ignore_eos=True,
                )
                for pool, lengths in zip(pools, sent, strict=True)
                for length in lengths
            )
        )
        await asyncio.sleep(1.0)
    finally:
        for pool in pools:
            pool.close()
        reader.close()
    return recorders
