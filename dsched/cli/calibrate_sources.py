"""Where `dsched calibrate` gets steps from: a live engine, or NVIDIA's AIConfigurator.

A live engine is swept through its driver, as the controller would use it. A chunk's time is the
time to the first token of a prompt whose beginning is in the prefix cache already, and includes
the way to the engine; a decode step's time is the difference of a long and a short answer, a token.
"""

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dsched.clock import Clock, SystemClock
from dsched.drivers.base import AttemptFinish, Driver, EngineDescription
from dsched.drivers.vllm.driver import VllmDriver
from dsched.drivers.wire import GenerateCommand, RankReport, SamplingParams, TokenLogprob
from dsched.errors import ConfigError, DriverError
from dsched.ids import AttemptId, AttemptIds, EngineId, RankId

READY_TIMEOUT_S = 30.0
"""Time an engine may take to answer before the sweep gives up."""
CHUNKS = (64, 128, 256, 512, 1_024, 2_048)
"""Chunk sizes to sweep; above the engine's own chunk a prompt would take several steps."""
PASTS = (0, 1_024, 4_096, 16_384)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (128, 1_024)
SMALLEST_VOCAB = 256
"""Tokens that any model has; used where the engine does not say how many."""
FIRST_TOKEN = 5
"""Below are special tokens."""
REPEATS = 3
AIC_CHUNKS = (128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
AIC_PASTS = (0, 2_048, 8_192, 32_768, 131_072, 524_288)
AIC_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
AIC_CONTEXTS = (1_024, 8_192, 32_768)
MAX_AIC_EP = 8
"""GPUs of one node."""
SHORT_ANSWER, LONG_ANSWER = 8, 56
"""Tokens of the two runs whose difference is the time of decode steps."""


def _ints() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepSamples:
    """Measured steps [N] of one kind."""

    tokens: NDArray[np.int64] = field(default_factory=_ints)
    context: NDArray[np.int64] = field(default_factory=_ints)
    seconds: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, float]]) -> "StepSamples":
        """Make them of (tokens, context, seconds)."""
        return cls(
            tokens=np.array([row[0] for row in rows], dtype=np.int64),
            context=np.array([row[1] for row in rows], dtype=np.int64),
            seconds=np.array([row[2] for row in rows], dtype=np.float64),
        )

    @property
    def size(self) -> int:
        return len(self.seconds)


class _Answer:
    """Receives one attempt: when its tokens came, and how it ended."""

    def __init__(self, clock: Clock) -> None:
        self.token_ns: list[int] = []
        self.num_cached_tokens = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._clock = clock

    def on_tokens(
        self,
        attempt_id: AttemptId,  # noqa: ARG002
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,  # noqa: ARG002
    ) -> None:
        self.token_ns += [self._clock.now_ns()] * len(token_ids)

    def on_finish(self, attempt_id: AttemptId, finish: AttemptFinish) -> None:  # noqa: ARG002
        self.num_cached_tokens = finish.num_cached_tokens
        if not self.done.done():
            self.done.set_result(None)

    def on_failure(self, attempt_id: AttemptId, error: DriverError) -> None:  # noqa: ARG002
        if not self.done.done():
            self.done.set_exception(error)


class _Listener:
    """Waits for the engine to be up."""

    def __init__(self) -> None:
        self.up: asyncio.Future[EngineDescription] = asyncio.get_running_loop().create_future()

    def on_engine_up(self, description: EngineDescription) -> None:
        if not self.up.done():
            self.up.set_result(description)

    def on_engine_down(self, engine_id: EngineId, reason: str, evidence: object = None) -> None:
        pass

    def on_rank_lost(self, rank_id: RankId, reason: str) -> None:
        pass

    def on_rank_back(self, rank_id: RankId) -> None:
        pass

    def on_report(self, report: RankReport) -> None:
        pass


class EngineSweep:
    """Measures one engine through its driver."""

    def __init__(self, driver: Driver, description: EngineDescription, clock: Clock) -> None:
        self._driver = driver
        self._description = description
        self._clock = clock
        self._ids = AttemptIds(process_tag=clock.now_ns() & ((1 << 64) - 1))
        self._num_prompts = 0

    async def prefill(
        self, chunks: Sequence[int], pasts: Sequence[int], *, repeats: int
    ) -> StepSamples:
        """Time chunks after cached contexts; what the engine did not cache counts as chunk."""
        times: dict[tuple[int, int], list[float]] = {}
        for past in pasts:
            for chunk in chunks:
                if past + chunk + 1 > self._description.max_model_len:
                    continue
                for _ in range(repeats):
                    prompt = self._new_prompt(past + chunk)
                    if past:
                        await self._run([prompt[:past]], max_tokens=1)
                    start_ns = self._clock.now_ns()
                    (answer,) = await self._run([prompt], max_tokens=1)
                    cached = answer.num_cached_tokens
                    seconds = (answer.token_ns[0] - start_ns) / 1e9
                    times.setdefault((past + chunk - cached, cached), []).append(seconds)
        return StepSamples.of(
            [(chunk, past, statistics.median(values)) for (chunk, past), values in times.items()]
        )

    async def decode(
        self, batches: Sequence[int], contexts: Sequence[int], *, repeats: int
    ) -> StepSamples:
        """Time batches of equal requests: a long answer less a short one, a token a step.

        Tokens may arrive in bursts, so gaps tell little; the best of the repeats of each length
        leaves out what a busy machine added. A shape that noise makes free is left out.
        """
        rows = []
        for context in contexts:
            for batch in batches:
                if batch > self._description.max_running_requests:
                    continue
                if context + LONG_ANSWER > self._description.max_model_len:
                    continue
                short_ns = [
                    await self._batch_ns(batch, context, SHORT_ANSWER) for _ in range(repeats)
                ]
                long_ns = [
                    await self._batch_ns(batch, context, LONG_ANSWER) for _ in range(repeats)
                ]
                step_ns = (min(long_ns) - min(short_ns)) / (LONG_ANSWER - SHORT_ANSWER)
                if step_ns > 0:
                    kv = batch * (context + (SHORT_ANSWER + LONG_ANSWER) // 2)
                    rows.append((batch, kv, step_ns / 1e9))
        return StepSamples.of(rows)

    async def _batch_ns(self, batch: int, context: int, num_tokens: int) -> int:
        prompts = [self._new_prompt(context) for _ in range(batch)]
        start_ns = self._clock.now_ns()
        answers = await self._run(prompts, max_tokens=num_tokens)
        return max(answer.token_ns[-1] for answer in answers) - start_ns

    async def _run(self, prompts: Sequence[tuple[int, ...]], *, max_tokens: int) -> list[_Answer]:
        answers = []
        for prompt in prompts:
            answer = _Answer(self._clock)
            answers.append(answer)
            command = GenerateCommand(
                attempt_id=self._ids.next_id(),
                epoch=0,
                dp_rank=0,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            )
            self._driver.generate(command, answer)
        await asyncio.gather(*(answer.done for answer in answers))
        return answers

    def _new_prompt(self, length: int) -> tuple[int, ...]:
        """Tokens that no earlier prompt began with: only what is cached on purpose is cached."""
        self._num_prompts += 1
        vocab = self._description.vocab_size or SMALLEST_VOCAB
        span = max(vocab - FIRST_TOKEN, 1)
        return tuple(
            (50 + self._num_prompts * 7_919 + index * (31 + self._num_prompts % 17)) % span
            + FIRST_TOKEN
            for index in range(length)
        )


async def sweep(
    driver: Driver,
    *,
    chunks: Sequence[int] = CHUNKS,
    pasts: Sequence[int] = PASTS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    repeats: int = REPEATS,
    clock: Clock | None = None,
) -> tuple[StepSamples, StepSamples]:
    """Measure prefill and decode steps of the engine behind `driver`, which is closed after.

    Raises ConfigError if the engine does not answer, or refuses a prompt.
    """
    listener = _Listener()
    driver.start(listener)
    try:
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                description = await listener.up
        except TimeoutError as error:
            raise ConfigError(
                f"engine {driver.engine_id} did not answer within {READY_TIMEOUT_S:.0f} s"
            ) from error
        run = EngineSweep(driver, description, clock or SystemClock())
        try:
            # The first step of an engine compiles and allocates.
            await run.prefill(chunks[:1], pasts[:1], repeats=2)
            prefill = await run.prefill(chunks, pasts, repeats=repeats)
            return prefill, await run.decode(batches, contexts, repeats=repeats)
        except DriverError as error:
            raise ConfigError(f"engine {driver.engine_id}: {error}") from error
    finally:
        driver.close()


async def sweep_engine(url: str) -> tuple[StepSamples, StepSamples]:
    """Measure the vLLM engine at `url`."""
    return await sweep(VllmDriver(engine_id=EngineId("calibrate"), url=url))


def aiconfigurator_samples(
    model: str, system: str, ep: int, *, backend: str
) -> tuple[StepSamples, StepSamples]:
    """Return the steps that AIConfigurator 0.12 derives for a model on a GPU.

    They are sums of measured operators, one after another, without overlap: a start, not a
    measurement. Raises ConfigError if it is not installed, does not know them, or `ep` spans nodes:
    the core package has no cross-node all-to-all.
    """
    try:
        from aiconfigurator_core.sdk.engine import EngineHandle
    except ImportError as error:
        raise ConfigError(
            "--aic-model needs aiconfigurator-core: pip install 'dsched[costs]'"
        ) from error
    if ep > MAX_AIC_EP:
        raise ConfigError(
            f"--aic-ep {ep}: aiconfigurator-core models expert parallelism within one node "
            f"(at most {MAX_AIC_EP}); start from a preset or measure the engine"
        )
    try:
        handle = EngineHandle.compile(
            model, system, backend, attention_dp_size=ep, moe_tp_size=1, moe_ep_size=ep
        )
        prefill = [
            (chunk, past, handle.predict_prefill_latency(1, chunk + past, past) / 1e3)
            for chunk in AIC_CHUNKS
            for past in AIC_PASTS
        ]
        decode = [
            (batch, batch * kv, handle.predict_decode_latency(batch, kv, 2) / 1e3)
            for batch in AIC_BATCHES
            for kv in AIC_CONTEXTS
        ]
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise ConfigError(f"aiconfigurator-core, {model} on {system}: {error}") from error
    return StepSamples.of(prefill), StepSamples.of(decode)
