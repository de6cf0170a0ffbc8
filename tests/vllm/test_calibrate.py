"""The sweep of `dsched calibrate` over a real vLLM server."""

import asyncio

import pytest

from dsched.cli.calibrate_sources import StepSamples, sweep
from dsched.drivers.vllm.driver import VllmDriver
from dsched.ids import EngineId
from dsched.testing.vllm_engines import TinyEngines

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_sweep_measures_chunks_contexts_and_batches(vllm_engines: TinyEngines) -> None:
    """Every shape that fits the engine is measured; what the prefix cache held is told apart."""

    async def measure() -> tuple[StepSamples, StepSamples]:
        driver = VllmDriver(engine_id=EngineId("sweep"), url=vllm_engines.engines[0].url)
        return await sweep(
            driver, chunks=(32, 256), pasts=(0, 512, 99_999), batches=(1, 4, 999),
            contexts=(32,), repeats=2,
        )  # fmt: skip

    prefill, decode = asyncio.run(measure())

    shapes = set(zip(prefill.tokens.tolist(), prefill.context.tolist(), strict=True))
    assert {(32, 0), (256, 0)} <= shapes
    assert all(past in (0, 512) for _, past in shapes)
    assert (prefill.seconds > 0).all()
    # A batch above the engine's limit is not tried; one that noise made free is left out.
    assert set(decode.tokens.tolist()) <= {1, 4}
    assert decode.size
    assert (decode.seconds > 0).all()
