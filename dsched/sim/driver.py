"""The driver of a simulated engine: the same contract as for vLLM and SGLang.

It puts a `SimEngine` on a time line (virtual or wall, see `loop`): a step begins when there is
work and ends as much later as the engine says. After a step it hands out tokens and ends, and
publishes the load of the ranks that changed; an idle engine reports once a second.

Faults, for tests and for `dsched sim`: `kill` and `restart`, `freeze` (no step ends, no report,
no word) and `thaw`, `slow`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsched.drivers.base import (
    AttemptFinish,
    AttemptSink,
    EngineCapabilities,
    EngineDescription,
    EngineListener,
    ExpertLoad,
    ExpertSlots,
    FinishReason,
)
from dsched.drivers.wire import GenerateCommand, PlaceExperts, RankReport
from dsched.errors import DriverError, EngineRefusedError, EngineUnreachableError
from dsched.ids import AttemptId, DpRank, EngineId, RankId
from dsched.sim.engine import SimAttempt, SimEngine
from dsched.sim.expert_load import SimExpertLoad
from dsched.sim.expert_slots import SimExpertSlots
from dsched.sim.kv_store import SimKvStore
from dsched.sim.loop import OutputBatch, Timer, Timers

IDLE_REPORT_NS = 1_000_000_000
"""Time between reports of an idle engine."""

MAX_KEPT_STEPS = 256
"""Steps whose output is kept back at most. Above: memory. Below: more deliveries."""

CAPABILITIES = EngineCapabilities(
    can_stream_logprobs=True,
    can_seed=True,
    can_structured_output=False,
    can_steer_dp_rank=True,
    can_migrate=False,
    has_load_reports=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFaults:
    """What happens to load reports on their way."""

    delay_ns: int = 0
    loss_share: float = 0.0

    def __post_init__(self) -> None:
        if self.delay_ns < 0:
            raise ValueError(f"delay_ns {self.delay_ns} must not be negative")
        if not 0 <= self.loss_share <= 1:
            raise ValueError(f"loss_share {self.loss_share} is not within 0..1")


class SimDriver:
    """Implements `Driver`; one thread (or simulation loop) owns it."""

    def __init__(
        self,
        engine_id: EngineId,
        engine: SimEngine,
        timers: Timers,
        *,
        model_name: str = "sim",
        batch: OutputBatch | None = None,
        report_faults: ReportFaults | None = None,
        rng: np.random.Generator | None = None,
        idle_report_ns: int | None = IDLE_REPORT_NS,
        expert_load: SimExpertLoad | None = None,
        expert_slots: SimExpertSlots | None = None,
        kv_store: SimKvStore | None = None,
    ) -> None:
        """`batch`: keep output back while nobody can see it (virtual time only); else every step
        hands out its tokens. `rng` decides which reports are lost. `kv_store`: what engines keep
        for each other; those that share one can be pairs."""
        self._engine_id = engine_id
        self.engine = engine
        self._kv_store = kv_store
        self._prefills: dict[str, tuple[int, ...]] = {}
        """Prompts that are computed for other engines, by attempt."""
        self._timers = timers
        self._model_name = model_name
        self._batch = batch
        self._faults = report_faults or ReportFaults()
        if self._faults.loss_share and rng is None:
            raise ValueError("lost reports need a random generator")
        self._rng = rng
        self._idle_report_ns = idle_report_ns
        self._listener: EngineListener | None = None
        self._sinks: dict[str, AttemptSink] = {}
        self._ending: dict[str, tuple[AttemptSink, AttemptFinish | DriverError]] = {}
        """Ends that were decided outside a step and are handed out by the next event."""
        self._step_timer: Timer | None = None
        self._step_end_ns: int | None = None
        self._frozen_rest_ns: int | None = None
        self._kick_timer: Timer | None = None
        self._idle_timer: Timer | None = None
        self._is_dead = False
        self._is_frozen = False
        self._is_closed = False
        self._slow_factor = 1.0
        self._step_ns = 0
        """Duration of the step that runs now."""
        self._last_step_ns = 0
        self._num_starts = 0
        self._seq = [0] * engine.config.num_dp_ranks
        self._loads: NDArray[np.int64] = np.zeros((len(self._seq), 4), dtype=np.int64)
        """[D, 4] load after the last step: what the next report says, whenever it leaves."""
        self._step_tokens: NDArray[np.int64] = np.zeros(len(self._seq), dtype=np.int64)
        self._num_steps = 0
        self._num_tokens = 0
        """Computed since the start."""
        self._expert_load = expert_load
        self._expert_slots = expert_slots
        self._kept_reports: list[list[RankReport]] = []
        """Of each step since output was last handed out."""
        self._reported = self._loads
        """[D, 4] load as last published; a new engine is known to be empty."""
        self._is_up = False
        self.on_step: Callable[[SimEngine, int], None] | None = None
        """Called with the engine and the step's duration after each step; must only read."""
        if batch is not None:
            batch.add(self._hand_out)

    # --- Driver ----------------------------------------------------------------------------

    @property
    def engine_id(self) -> EngineId:
        return self._engine_id

    def start(self, listener: EngineListener) -> None:
        """The listener hears that the engine is up with the next event."""
        self._listener = listener
        self._soon(self._say_up)

    def generate(self, command: GenerateCommand, sink: AttemptSink) -> None:
        attempt_id = command.attempt_id
        if self._is_closed or self._is_dead:
            reason = "the driver is closed" if self._is_closed else "the engine was killed"
            self._end_soon(attempt_id, sink, EngineUnreachableError(reason))
            return
        if attempt_id in self._sinks or attempt_id in self._ending:
            raise ValueError(f"attempt id {attempt_id!r} was used before")
        if command.kv_transfer is not None:
            self._fetch(command, command.kv_transfer, sink)
            return
        self._sinks[attempt_id] = sink
        self._submit(command, num_transferred_tokens=0)

    def _submit(self, command: GenerateCommand, *, num_transferred_tokens: int) -> None:
        attempt_id = command.attempt_id
        sink = self._sinks.get(attempt_id)
        if sink is None:
            return  # it ended while its KV was on the way
        try:
            self.engine.submit(command, num_transferred_tokens=num_transferred_tokens)
        except EngineRefusedError as error:
            del self._sinks[attempt_id]
            self._end_soon(attempt_id, sink, error)
            return
        if command.is_prefill:
            self._prefills[attempt_id] = command.prompt_token_ids
        self._kick_soon()

    def _fetch(self, command: GenerateCommand, told: Mapping[str, Any], sink: AttemptSink) -> None:
        """Let the KV of a prompt come from the engine that computed it, then begin."""
        fetch = None
        if self._kv_store is not None:
            fetch = self._kv_store.fetch(
                told,
                command.prompt_token_ids,
                to=self._engine_id,
                now_ns=self._timers.now_ns(),
            )
        if fetch is None:
            error = DriverError(f"the KV of attempt {command.attempt_id} is gone")
            self._end_soon(command.attempt_id, sink, error)
            return
        self._sinks[command.attempt_id] = sink
        submit = partial(self._submit, command, num_transferred_tokens=fetch.num_tokens)
        self._timers.call_at(fetch.ready_ns, submit)

    def _kept_kv(self, attempt_id: str) -> Mapping[str, Any] | None:
        """What a decode engine needs to know of a prompt that was computed for it."""
        prompt = self._prefills.pop(attempt_id, None)
        if prompt is None or self._kv_store is None:
            return None
        return self._kv_store.keep(self._engine_id, prompt)

    def abort(self, attempt_id: AttemptId) -> None:
        sink = self._sinks.pop(attempt_id, None)
        if sink is None:
            return
        self.engine.abort(attempt_id)
        self._prefills.pop(attempt_id, None)
        self._end_soon(attempt_id, sink, AttemptFinish(reason=FinishReason.ABORT))
        self._rest_if_idle()

    def move_out(self, attempt_id: AttemptId) -> None:
        """See `KvMover.move_out`."""
        self._hand_out()
        sink = self._sinks.get(attempt_id)
        num_tokens = self.engine.num_known_tokens(attempt_id)
        if sink is None or num_tokens is None or self._kv_store is None:
            return
        del self._sinks[attempt_id]
        self.engine.abort(attempt_id)
        told = self._kv_store.keep_moved(self._engine_id, num_tokens)
        finish = AttemptFinish(reason=FinishReason.MOVED, kv_transfer=told)
        self._end_soon(attempt_id, sink, finish)
        self._rest_if_idle()

    def close(self) -> None:
        """Every attempt ends now; nothing is called afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._step_timer, self._kick_timer, self._idle_timer):
            if timer is not None:
                timer.cancel()
        self.engine.clear()
        for attempt_id, sink in list(self._sinks.items()):
            self._ending[attempt_id] = (sink, AttemptFinish(reason=FinishReason.ABORT))
        self._sinks.clear()
        self._hand_out_ends()
        self._listener = None

    # --- faults ----------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Killed and not restarted."""
        return self._is_dead

    def kill(self) -> None:
        """Lose the engine with all it holds."""
        if self._is_dead or self._is_closed:
            return
        self._hand_out()
        self._is_dead = True
        self._is_up = False
        self._kept_reports.clear()
        self._prefills.clear()
        if self._kv_store is not None:
            self._kv_store.forget_engine(self._engine_id)
        self._cancel_step()
        self.engine.clear()
        lost, self._sinks = self._sinks, {}

        def tell() -> None:
            if self._listener is not None:
                self._listener.on_engine_down(self._engine_id, "the engine was killed")
            self._hand_out_ends()

        error = EngineUnreachableError(f"engine {self._engine_id} was killed")
        for attempt_id, sink in lost.items():
            self._ending[attempt_id] = (sink, error)
        self._soon(tell)

    def restart(self) -> None:
        """Bring a killed engine back, empty."""
        if not self._is_dead or self._is_closed:
            return
        self._is_dead = False
        self._is_frozen = False
        if self._expert_slots is not None:
            self._expert_slots.restart()
        self._soon(self._say_up)

    def freeze(self) -> None:
        """Stop the engine in the middle of what it does; nobody is told."""
        if self._is_frozen or self._is_dead:
            return
        self._is_frozen = True
        if self._step_end_ns is not None:
            self._frozen_rest_ns = max(0, self._step_end_ns - self._timers.now_ns())
            self._cancel_step()

    def thaw(self) -> None:
        """Let a frozen engine go on where it stopped."""
        if not self._is_frozen:
            return
        self._is_frozen = False
        rest_ns, self._frozen_rest_ns = self._frozen_rest_ns, None
        if rest_ns is None:
            self._kick_soon()
        elif self.engine.is_stepping:
            self._schedule_step_end(rest_ns)

    def lose_rank(self, dp_rank: DpRank, reason: str) -> None:
        """Tell that one rank is gone while the engine answers."""
        self._soon(lambda: self._tell_rank(dp_rank, reason))

    def restore_rank(self, dp_rank: DpRank) -> None:
        """Tell that it works again."""
        self._soon(lambda: self._tell_rank(dp_rank, None))

    def _tell_rank(self, dp_rank: DpRank, reason: str | None) -> None:
        if self._listener is None or self._is_dead:
            return
        rank_id = RankId(self._engine_id, dp_rank)
        if reason is None:
            self._listener.on_rank_back(rank_id)
        else:
            self._listener.on_rank_lost(rank_id, reason)

    def slow(self, factor: float) -> None:
        """Let each step from the next on take `factor` times as long; 1 is as before."""
        if not 0 < factor < np.inf:
            raise ValueError(f"factor {factor} must be positive and finite")
        self._slow_factor = factor

    # --- steps -----------------------------------------------------------------------------

    def _kick_soon(self) -> None:
        """Begin a step once everything that happens now has happened, so bursts go together."""
        if self._kick_timer is None and not self.engine.is_stepping:
            self._kick_timer = self._timers.call_at(
                self._timers.now_ns(), self._kick, is_hidden=True
            )

    def _kick(self) -> None:
        self._kick_timer = None
        if self._is_closed or self._is_dead or self._is_frozen or self.engine.is_stepping:
            return
        duration_ns = self.engine.begin_step()
        if duration_ns is None:
            self._rest_if_idle()
            return
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        self._step_ns = max(1, round(duration_ns * self._slow_factor))
        self._schedule_step_end(self._step_ns)

    def _schedule_step_end(self, duration_ns: int) -> None:
        self._step_end_ns = self._timers.now_ns() + duration_ns
        self._step_timer = self._timers.call_at(self._step_end_ns, self._end_step, is_hidden=True)

    def _cancel_step(self) -> None:
        if self._step_timer is not None:
            self._step_timer.cancel()
        self._step_timer = None
        self._step_end_ns = None

    def _end_step(self) -> None:
        self._step_timer = self._step_end_ns = None
        has_news = self.engine.complete_step()
        self._look_at_loads(step_ns=self._step_ns)
        if self.on_step is not None:
            self.on_step(self.engine, self._step_ns)
        self._queue_reports()
        if self._batch is None:
            self._hand_out()
        elif has_news or self._batch.is_watched() or len(self._kept_reports) >= MAX_KEPT_STEPS:
            self._batch.flush()
        # What was handed out may lead to requests at this very moment; they join the next step.
        self._kick_soon()

    # --- output ----------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Deliver all output there is, between the reports of earlier steps and of the last."""
        kept, self._kept_reports = self._kept_reports, []
        for reports in kept[:-1]:
            self._publish(reports)
        for attempt in self.engine.take_output():
            self._deliver(attempt)
        for reports in kept[-1:]:
            self._publish(reports)

    def _deliver(self, attempt: SimAttempt) -> None:
        attempt_id = AttemptId(attempt.attempt_id)
        sink = self._sinks.get(attempt_id)
        if sink is None:
            attempt.output = []
            return
        if attempt.output:
            logprobs = None
            if attempt.sampling.logprobs is not None:
                logprobs = self.engine.take_logprobs(attempt)
            tokens, attempt.output = attempt.output, []
            sink.on_tokens(attempt_id, tokens, logprobs)
        if attempt.finish is None or attempt_id not in self._sinks:
            return  # it goes on, or on_tokens aborted it
        del self._sinks[attempt_id]
        finish = AttemptFinish(
            reason=attempt.finish,
            stop_token_id=attempt.stop_token_id,
            num_cached_tokens=attempt.num_cached_tokens,
            kv_transfer=self._kept_kv(attempt.attempt_id),
        )
        sink.on_finish(attempt_id, finish)

    def _end_soon(
        self, attempt_id: str, sink: AttemptSink, end: AttemptFinish | DriverError
    ) -> None:
        if self._is_closed:
            if isinstance(end, DriverError):
                sink.on_failure(AttemptId(attempt_id), end)
            return
        self._ending[attempt_id] = (sink, end)
        self._soon(self._hand_out_ends)

    def _hand_out_ends(self) -> None:
        ending, self._ending = self._ending, {}
        for attempt_id, (sink, end) in ending.items():
            if isinstance(end, AttemptFinish):
                sink.on_finish(AttemptId(attempt_id), end)
            else:
                sink.on_failure(AttemptId(attempt_id), end)

    def _soon(self, callback: Callable[[], None]) -> None:
        self._timers.call_at(self._timers.now_ns(), callback)

    # --- reports ---------------------------------------------------------------------------

    def describe(self) -> EngineDescription:
        config = self.engine.config
        return EngineDescription(
            engine_id=self._engine_id,
            kind="sim",
            model=self._model_name,
            max_model_len=config.max_request_tokens,
            vocab_size=self.engine.model.vocab_size,
            num_dp_ranks=config.num_dp_ranks,
            kv_capacity_tokens=config.kv_capacity_tokens,
            max_running_requests=config.max_running_requests,
            capabilities=replace(CAPABILITIES, can_migrate=self._kv_store is not None),
        )

    def expert_load(self) -> ExpertLoad | None:
        """Implements `ExpertLoadSource`; `None` for an engine without layers of experts."""
        if self._expert_load is None or self._is_dead or self._is_frozen:
            return None
        load = self._expert_load.read(
            now_ns=self._timers.now_ns(), num_steps=self._num_steps, num_tokens=self._num_tokens
        )
        if load is None or self._expert_slots is None:
            return load
        return replace(load, balance=self._expert_slots.balance(load.counts))

    def expert_slots(self) -> ExpertSlots | None:
        """Implements `PlacementTarget`."""
        if self._expert_slots is None or self._is_dead or self._is_frozen:
            return None
        return self._expert_slots.now

    def place_experts(self, command: PlaceExperts) -> None:
        """Implements `PlacementTarget`."""
        if self._expert_slots is not None and not (self._is_dead or self._is_frozen):
            self._expert_slots.place(command)

    def _say_up(self) -> None:
        if self._is_closed or self._is_dead or self._listener is None:
            return
        self._num_starts += 1
        self._seq = [0] * len(self._seq)
        self._look_at_loads(step_ns=0)
        self._reported = self._loads
        self._is_up = True
        self._listener.on_engine_up(self.describe())
        self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        """Report from time to time while there is nothing to do."""
        is_resting = self._idle_timer is not None or self._idle_report_ns is None
        if is_resting or not self.engine.is_idle or self._is_closed or self._is_dead:
            return
        assert self._idle_report_ns is not None
        self._idle_timer = self._timers.call_at(
            self._timers.now_ns() + self._idle_report_ns, self._report_idle
        )

    def _report_idle(self) -> None:
        self._idle_timer = None
        if self._is_closed or self._is_dead:
            return
        if not self._is_frozen:
            self._look_at_loads(step_ns=0)
            self._queue_reports(is_complete=True)
            self._hand_out()
        self._rest_if_idle()

    def _look_at_loads(self, *, step_ns: int) -> None:
        loads = self.engine.loads()
        self._loads = np.stack(
            (
                loads.num_running,
                loads.num_waiting,
                loads.num_kv_tokens,
                loads.num_waiting_prefill_tokens,
            ),
            axis=1,
        )
        self._last_step_ns = step_ns
        self._num_steps = self.engine.num_steps
        computed = self.engine.last_step_tokens
        self._step_tokens = computed if step_ns else np.zeros_like(computed)
        self._num_tokens += int(self._step_tokens.sum())

    def _queue_reports(self, *, is_complete: bool = False) -> None:
        """Make the report of each rank whose load changed, or of every rank."""
        if not self._is_up or self._is_frozen:
            return
        has_changed = (self._loads != self._reported).any(axis=1)
        ranks = np.flatnonzero(has_changed | is_complete).tolist()
        self._reported = self._loads
        rows, step_tokens = self._loads.tolist(), self._step_tokens.tolist()
        reports = [self._make_report(rank, rows[rank], step_tokens[rank]) for rank in ranks]
        if self._faults.loss_share and self._rng is not None:
            kept = self._rng.random(len(reports)) >= self._faults.loss_share
            reports = [report for report, keep in zip(reports, kept, strict=True) if keep]
        if self._faults.delay_ns:
            due_ns = self._timers.now_ns() + self._faults.delay_ns
            self._timers.call_at(due_ns, partial(self._publish, reports))
            reports = []
        self._kept_reports.append(reports)

    def _make_report(self, rank: int, load: list[int], num_step_tokens: int) -> RankReport:
        self._seq[rank] += 1
        num_running, num_waiting, num_kv_tokens, num_waiting_prefill_tokens = load
        return RankReport(
            engine_id=self._engine_id,
            incarnation=f"start-{self._num_starts}",
            dp_rank=rank,
            seq=self._seq[rank],
            step=self._num_steps,
            num_running=num_running,
            num_waiting=num_waiting,
            num_kv_tokens=num_kv_tokens,
            num_waiting_prefill_tokens=num_waiting_prefill_tokens,
            kv_capacity_tokens=self.engine.config.kv_capacity_tokens,
            step_ns=self._last_step_ns,
            num_step_tokens=num_step_tokens,
        )

    def _publish(self, reports: list[RankReport]) -> None:
        if self._listener is None:
            return
        for report in reports:
            self._listener.on_report(report)
