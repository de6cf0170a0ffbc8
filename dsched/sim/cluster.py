"""A whole cluster in one thread on virtual time: the real controller over simulated engines.

Only three things are replaced: drivers (simulated engines), clock and host (`SimLoop`). Routing,
late binding, journal and retries are the ones that production runs, so what a replay shows about
them is true of the program; what it shows in seconds is true of the cost model.

`policy` chooses where requests go:

- `two_term`: the controller's own rule, priced by the cost model in use;
- `least_requests`, `least_kv`: the same rule with one of the two prices at zero;
- `round_robin`: each request is pinned to the next DP rank number, whatever its size.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from dsched.controller import (
    Controller,
    ControllerObserver,
    ControllerSettings,
    EngineSpec,
    PoolSpec,
)
from dsched.controller.request import InferenceRequest, RequestError, RequestFinish, RequestStream
from dsched.costs.affine import AffineStepCost
from dsched.costs.prefill import PrefillCostModel
from dsched.drivers.wire import SamplingParams, TokenLogprob
from dsched.errors import InvariantError
from dsched.faults import MemoryJournal
from dsched.ids import AttemptId, AttemptIds, DpRank, EngineId, RankId, RequestId
from dsched.logs import stay_quiet_unless_configured
from dsched.rng import stream
from dsched.sim.driver import ReportFaults, SimDriver
from dsched.sim.engine import SimEngine, SimEngineConfig, StepCost
from dsched.sim.kv_store import SimKvStore
from dsched.sim.loop import SimLoop
from dsched.sim.model import SimModel
from dsched.sim.prompts import PromptMaker, check_prompts
from dsched.sim.report import ReplayReport, RequestTimes, StepMeter
from dsched.sim.traces import Trace
from dsched.states import PoolRole
from dsched.trace import Recorder

MODEL_NAME = "sim"
PATIENCE_NS = 365 * 24 * 3600 * 1_000_000_000
"""Replayed requests wait a simulated year before they give up: an overloaded replay shows its
queue in TTFT instead of in errors."""


class SimPolicy(StrEnum):
    """How requests are placed; see the module's docstring."""

    TWO_TERM = "two_term"
    LEAST_REQUESTS = "least_requests"
    LEAST_KV = "least_kv"
    ROUND_ROBIN = "round_robin"


class SimHost:
    """Calls the controller's tick from the simulation loop, once a moment."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._is_asked = False
        self.tick: Callable[[], None] = lambda: None

    def request_tick(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._loop.call_at(self._loop.now_ns(), self._run)

    def request_tick_at(self, time_ns: int) -> None:
        self._loop.call_at(time_ns, self.request_tick)

    def _run(self) -> None:
        self._is_asked = False
        self.tick()


class _RankJournal(MemoryJournal):
    """A journal that also remembers where each request went last."""

    def __init__(self) -> None:
        super().__init__()
        self.rank_of: dict[RequestId, RankId] = {}

    def begin_attempt(
        self,
        request_id: RequestId,
        *,
        attempt_id: AttemptId,
        epoch: int,
        target: RankId,
        prefill: RankId | None = None,
    ) -> int:
        self.rank_of[request_id] = target
        return super().begin_attempt(
            request_id, attempt_id=attempt_id, epoch=epoch, target=target, prefill=prefill
        )


class _Listener:
    """Hears one request of a replay."""

    __slots__ = ("_replay", "index")

    def __init__(self, replay: "_Replay", index: int) -> None:
        self._replay = replay
        self.index = index

    def on_tokens(
        self,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,  # noqa: ARG002
    ) -> None:
        replay = self._replay
        if first_index == 0:
            replay.first_token_ns[self.index] = replay.now_ns()
        if replay.on_tokens is not None:
            replay.on_tokens(self.index, first_index, token_ids)

    def on_finish(self, finish: RequestFinish) -> None:
        self._replay.end(self.index, finish.num_output_tokens, None)

    def on_error(self, error: RequestError) -> None:
        self._replay.end(self.index, 0, error.code)


TokenWatcher = Callable[[int, int, Sequence[int]], None]
"""Called with request index, index of the first token, token ids."""


class SimCluster:
    """Engines, drivers and the controller over them.

    >>> from dsched.sim import generate_workload
    >>> cluster = SimCluster(engine=SimEngineConfig(num_dp_ranks=2))
    >>> report = cluster.replay(generate_workload(num_requests=5, seed=1))
    >>> int(report.times.is_finished.sum())
    5
    """

    def __init__(
        self,
        *,
        num_engines: int = 1,
        num_prefill_engines: int = 0,
        engine: SimEngineConfig | None = None,
        model: SimModel | None = None,
        cost: StepCost | None = None,
        policy: SimPolicy = SimPolicy.TWO_TERM,
        settings: ControllerSettings | None = None,
        report_faults: ReportFaults | None = None,
        observer: ControllerObserver | None = None,
        recorder: Recorder | None = None,
        seed: int = 0,
        is_batching: bool = True,
    ) -> None:
        """`settings` are the controller's; without them it waits for room as long as it takes and
        is priced by the cost model. `is_batching=False` delivers every token at its own time.
        `num_prefill_engines` engines of the same size compute the prompts of the others, in a pool
        of their own; steps and balance are those of the others."""
        if num_engines < 1:
            raise ValueError(f"num_engines {num_engines} must be at least 1")
        if num_prefill_engines < 0:
            raise ValueError(f"num_prefill_engines {num_prefill_engines} must not be negative")
        stay_quiet_unless_configured()
        if seed < 0:
            raise ValueError(f"seed {seed} must not be negative")
        self.seed = seed
        self.policy = policy
        self.config = engine or SimEngineConfig()
        self.model = model or SimModel()
        self.cost: StepCost = cost or AffineStepCost()
        self.loop = SimLoop()
        self.meter = StepMeter(idle_rank_ns=_idle_rank_ns(self.cost))
        self.drivers: dict[EngineId, SimDriver] = {}
        names = [EngineId(f"sim-{number:03d}") for number in range(num_engines)]
        prefill_names = [EngineId(f"prefill-{number:03d}") for number in range(num_prefill_engines)]
        self.num_engines = num_engines
        kv_store = SimKvStore()
        for engine_id in (*names, *prefill_names):
            driver = SimDriver(
                engine_id,
                SimEngine(self.config, self.model, self.cost),
                self.loop,
                model_name=MODEL_NAME,
                batch=self.loop.batch if is_batching else None,
                report_faults=report_faults,
                rng=stream(seed, f"reports.{engine_id}"),
                kv_store=kv_store,
            )
            if engine_id in names:
                driver.on_step = self._measure_step
            self.drivers[engine_id] = driver
        self.journal = _RankJournal()
        host = SimHost(self.loop)
        self.controller = Controller(
            pools=_make_pools(names, prefill_names),
            drivers=self.drivers,
            journal=self.journal,
            clock=self.loop.clock,
            host=host,
            attempt_ids=AttemptIds(process_tag=seed % (1 << 64)),
            settings=settings or patient_settings(self.cost, policy),
            observer=observer,
            recorder=recorder,
        )
        host.tick = self.controller.tick
        # Held requests are released by reports.
        self.loop.batch.is_watched = lambda: self.controller.num_waiting_requests > 0
        self._is_started = False
        self._num_submitted = 0

    @property
    def num_ranks(self) -> int:
        """DP ranks of all engines that decode."""
        return self.num_engines * self.config.num_dp_ranks

    def start(self) -> None:
        """Let the controller meet its engines."""
        if not self._is_started:
            self._is_started = True
            with no_greetings():
                self.controller.start()
                self.loop.run_until(self.loop.now_ns())

    def submit(
        self,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        request_stream: RequestStream,
        *,
        tenant: str = "",
        session: str = "",
    ) -> RequestId:
        """Send one request at the present simulated time."""
        request_id = RequestId(f"r{self._num_submitted:09d}")
        pinned = None
        if self.policy is SimPolicy.ROUND_ROBIN:
            pinned = DpRank(self._num_submitted % self.config.num_dp_ranks)
        self._num_submitted += 1
        request = InferenceRequest(
            request_id=request_id,
            model=MODEL_NAME,
            prompt_token_ids=prompt_token_ids,
            sampling=sampling,
            pinned_dp_rank=pinned,
            tenant=tenant,
            session=session,
        )
        self.controller.submit(request, request_stream)
        return request_id

    def replay(
        self,
        trace: Trace,
        *,
        on_progress: Callable[[int], None] | None = None,
        on_tokens: TokenWatcher | None = None,
        options: dict[str, Any] | None = None,
        tenants: Sequence[str] = (),
    ) -> ReplayReport:
        """Send every request of `trace` at its time and run until all have ended.

        `options` is copied into the report. `tenants` has one name a request, or none at all; a
        conversation of the trace is a session. Only policies look at either.

        Raises:
            ValueError: the trace is empty, or its arrivals are not sorted.
        """
        check_prompts(trace)
        self.start()
        replay = _Replay(self, trace, tenants=tenants, on_progress=on_progress, on_tokens=on_tokens)
        replay.run()
        return ReplayReport(
            source=trace.source,
            seed=self.seed,
            policy=self.policy.value,
            num_engines=self.num_engines,
            num_dp_ranks=self.config.num_dp_ranks,
            rows=trace.counts,
            num_replayed=trace.num_requests,
            times=replay.times(),
            steps=self.meter,
            num_preemptions=sum(each.engine.num_preemptions for each in self.drivers.values()),
            num_errors=replay.num_errors,
            num_prompt_tokens=int(trace.num_prompt_tokens.sum(dtype=np.int64)),
            options=options or {},
        )

    def rank_number(self, rank_id: RankId) -> int:
        """Position of a rank among all ranks, engine after engine."""
        engine_number = list(self.drivers).index(rank_id.engine_id)
        return engine_number * self.config.num_dp_ranks + rank_id.dp_rank

    def close(self) -> None:
        self.controller.close()

    def validate(self) -> None:
        """Check every engine and the controller."""
        for driver in self.drivers.values():
            driver.engine.validate()
        self.controller.validate()

    def _measure_step(self, engine: SimEngine, duration_ns: int) -> None:
        self.meter.add(
            engine.last_rank_ns,
            engine.last_decode_ns,
            duration_ns=duration_ns,
            num_tokens=int(engine.last_step_tokens.sum()),
        )


def _make_pools(names: Sequence[EngineId], prefill_names: Sequence[EngineId]) -> list[PoolSpec]:
    def make(name: str, role: PoolRole, engine_ids: Sequence[EngineId]) -> PoolSpec:
        specs = (EngineSpec(engine_id=engine_id, model=MODEL_NAME) for engine_id in engine_ids)
        return PoolSpec(name=name, role=role, model=MODEL_NAME, engines=tuple(specs))

    if not prefill_names:
        return [make(MODEL_NAME, PoolRole.COMBINED, names)]
    return [
        make(MODEL_NAME, PoolRole.DECODE, names),
        make(f"{MODEL_NAME}-prefill", PoolRole.PREFILL, prefill_names),
    ]


class _Replay:
    """State of one replay."""

    def __init__(
        self,
        cluster: SimCluster,
        trace: Trace,
        *,
        tenants: Sequence[str],
        on_progress: Callable[[int], None] | None,
        on_tokens: TokenWatcher | None,
    ) -> None:
        if tenants and len(tenants) != trace.num_requests:
            raise ValueError(f"{len(tenants)} tenants for {trace.num_requests} requests")
        self._cluster = cluster
        self._trace = trace
        self._tenants = tenants
        self._prompts = PromptMaker(trace, vocab_size=cluster.model.vocab_size, seed=cluster.seed)
        self._on_progress = on_progress
        self.on_tokens = on_tokens
        self.now_ns = cluster.loop.now_ns
        count = trace.num_requests
        self._start_ns = self.now_ns() - int(trace.arrival_ns[0])
        self._next = 0
        self._num_ended = 0
        self._request_ids: list[RequestId] = []
        self.arrival_ns: NDArray[np.int64] = np.full(count, -1, dtype=np.int64)
        self.first_token_ns: NDArray[np.int64] = np.full(count, -1, dtype=np.int64)
        self.end_ns: NDArray[np.int64] = np.full(count, -1, dtype=np.int64)
        self.num_tokens: NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self.is_finished: NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self.num_errors: dict[str, int] = {}

    def run(self) -> None:
        limit = self._trace.max_concurrency
        if limit is None:
            self._schedule_next()
        else:
            for _ in range(min(limit, self._trace.num_requests)):
                self._cluster.loop.call_at(self.now_ns(), self._send_next)
        self._cluster.loop.run_while(lambda: self._num_ended < self._trace.num_requests)
        if self._num_ended < self._trace.num_requests:
            raise InvariantError(
                f"{self._trace.num_requests - self._num_ended} requests never ended"
            )

    def _schedule_next(self) -> None:
        if self._next < self._trace.num_requests:
            due_ns = self._start_ns + int(self._trace.arrival_ns[self._next])
            self._cluster.loop.call_at(due_ns, self._arrive)

    def _arrive(self) -> None:
        self._send_next()
        self._schedule_next()

    def _send_next(self) -> None:
        index = self._next
        if index == self._trace.num_requests:
            return
        self._next += 1
        self.arrival_ns[index] = self.now_ns()
        sampling = SamplingParams(
            max_tokens=int(self._trace.num_output_tokens[index]), temperature=0.0, ignore_eos=True
        )
        conversations = self._trace.conversation_id
        request_id = self._cluster.submit(
            self._prompts.prompt(index),
            sampling,
            _Listener(self, index),
            tenant=self._tenants[index] if self._tenants else "",
            session="" if conversations is None else f"c{conversations[index]}",
        )
        self._request_ids.append(request_id)

    def end(self, index: int, num_tokens: int, error_code: str | None) -> None:
        self.end_ns[index] = self.now_ns()
        self.num_tokens[index] = num_tokens
        self.is_finished[index] = error_code is None
        if error_code is not None:
            self.num_errors[error_code] = self.num_errors.get(error_code, 0) + 1
        self._num_ended += 1
        if self._on_progress is not None:
            self._on_progress(self._num_ended)
        if self._trace.max_concurrency is not None:
            self._cluster.loop.call_at(self.now_ns(), self._send_next)

    def times(self) -> RequestTimes:
        rank_of = self._cluster.journal.rank_of
        number = {
            RankId(engine_id, DpRank(dp_rank)): engine * self._cluster.config.num_dp_ranks + dp_rank
            for engine, engine_id in enumerate(self._cluster.drivers)
            for dp_rank in range(self._cluster.config.num_dp_ranks)
        }
        ranks = [
            number[rank_of[request_id]] if request_id in rank_of else -1
            for request_id in self._request_ids
        ]
        return RequestTimes(
            arrival_ns=self.arrival_ns,
            first_token_ns=self.first_token_ns,
            end_ns=self.end_ns,
            num_output_tokens=self.num_tokens,
            rank=np.array(ranks, dtype=np.int64),
            is_finished=self.is_finished,
        )


@contextmanager
def no_greetings(level: int = logging.WARNING) -> Iterator[None]:
    """Keep "engine came up" out of the log: simulated engines always do."""
    before = structlog.get_config() if structlog.is_configured() else None
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
    try:
        yield
    finally:
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


def _idle_rank_ns(cost: StepCost) -> float:
    nothing = np.zeros(1, dtype=np.int64)
    return float(cost.step_ns(nothing, nothing, nothing, nothing)[0])


def patient_settings(cost: StepCost, policy: SimPolicy) -> ControllerSettings:
    """The controller's defaults, priced by `cost`, that wait instead of refusing."""
    one, nothing = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    idle_ns = _idle_rank_ns(cost)
    request_ns = float(cost.step_ns(nothing, nothing, one, nothing)[0]) - idle_ns
    many = one * 1_000_000
    kv_token_ns = (float(cost.step_ns(nothing, nothing, one, many)[0]) - idle_ns - request_ns) / 1e6
    if request_ns <= 0 and kv_token_ns <= 0:
        request_ns = 1.0
    settings = ControllerSettings(
        max_held_requests=1 << 30,
        queue_timeout_ns=PATIENCE_NS,
        request_cost_ns=max(0.0, request_ns),
        kv_token_cost_ns=max(0.0, kv_token_ns),
        prefill_costs=(
            PrefillCostModel.from_affine(cost) if isinstance(cost, AffineStepCost) else None
        ),
    )
    if policy is SimPolicy.LEAST_REQUESTS:
        return replace(settings, request_cost_ns=1.0, kv_token_cost_ns=0.0)
    if policy is SimPolicy.LEAST_KV:
        return replace(settings, request_cost_ns=0.0, kv_token_cost_ns=1.0)
    return settings
