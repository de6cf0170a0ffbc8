"""Takes requests away from engines: those that stopped, those that died, and drained ones.

What becomes of a request is `lifecycle`'s; this finds the requests, and remembers which drained
engines are to be emptied and which suspect ones are to be tried again.
"""

import structlog

from dsched.controller.lifecycle import Lifecycle
from dsched.controller.run import RequestRun
from dsched.controller.state import ControllerState
from dsched.faults import RecoveryMethod, plan_recovery
from dsched.faults.progress import StalledEngine
from dsched.ids import AttemptId, EngineId
from dsched.states import LossLayer, RankState

log = structlog.get_logger(__name__)

PROBATION_NS = 10_000_000_000
"""After which a suspect engine that reports no load is tried again. Below: a frozen one costs its
next requests a pause again and again. Above: one that works again idles."""


class Withdrawal:
    """What has to leave an engine, and when."""

    def __init__(self, state: ControllerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._drain_deadlines: dict[EngineId, int] = {}
        """When what still runs on a drained engine is handed over."""
        self._suspect_since: dict[EngineId, int] = {}
        """Since when engines that report no load are suspect."""

    def set_drain_deadline(self, engine_id: EngineId, deadline_ns: int | None) -> None:
        """Empty a drained engine at that time; `None`: it may take as long as it takes."""
        self._drain_deadlines.pop(engine_id, None)
        if deadline_ns is not None:
            self._drain_deadlines[engine_id] = deadline_ns

    def due_times_ns(self, now_ns: int) -> list[int]:
        """When this has something to do again."""
        times = [since_ns + PROBATION_NS for since_ns in self._suspect_since.values()]
        times += [due_ns for due_ns in self._drain_deadlines.values() if due_ns > now_ns]
        watch = self._state.watch
        if watch is not None and (due := watch.next_sweep_ns(now_ns)) is not None:
            times.append(due)
        return times

    def sweep(self, now_ns: int) -> None:
        """Look for engines that have stopped without saying so, and take their requests away."""
        watch, runs = self._state.watch, self._state.runs
        if watch is None:
            return
        due_ns = watch.next_sweep_ns(now_ns)
        if due_ns is None or now_ns < due_ns:
            return
        plan = watch.sweep(now_ns, self._progress_of)
        for stalled in plan.engines:
            self._suspect(stalled, now_ns)
        for key in plan.attempts:
            limit_s = watch.limits.stream_timeout_ns / 1e9
            run = runs.running(AttemptId(str(key)))
            if run is not None:
                reason = f"no token for {limit_s:.0f} s"
                self._lose_attempt(run, AttemptId(str(key)), reason)

    def _lose_attempt(self, run: RequestRun, attempt_id: AttemptId, reason: str) -> None:
        if run.prefill is not None and run.prefill.attempt_id == attempt_id:
            self._lifecycle.lose_prefill(run, reason=reason)
        else:
            self._lifecycle.lose_attempt(run, reason=reason, layer=LossLayer.STREAM)

    def _progress_of(self, attempt_key: object) -> int:
        run = self._state.runs.running(AttemptId(str(attempt_key)))
        return run.num_attempt_tokens if run is not None else 0

    def _suspect(self, stalled: StalledEngine, now_ns: int) -> None:
        state, engine_id = self._state, stalled.engine_id
        reason = f"no progress for {stalled.silent_ns / 1e9:.1f} s"
        record = state.membership.apply_suspect(engine_id, reason)
        if record.description and not record.description.capabilities.has_load_reports:
            self._suspect_since.setdefault(engine_id, now_ns)
        state.sync_group(engine_id)
        log.warning(
            "engine.suspected",
            engine_id=engine_id,
            silent_ms=stalled.silent_ns // 1_000_000,
            limit_ms=stalled.limit_ns // 1_000_000,
            epoch=state.membership.epoch,
        )
        self.lose_group(engine_id, f"engine {engine_id}: {reason}", layer=LossLayer.PROGRESS)

    def end_probation(self, now_ns: int) -> None:
        """Try engines again that cannot show progress, because they report no load."""
        membership = self._state.membership
        for engine_id, since_ns in list(self._suspect_since.items()):
            record = membership.engines[engine_id]
            if record.own_state is not RankState.SUSPECT:
                del self._suspect_since[engine_id]
            elif now_ns - since_ns >= PROBATION_NS:
                membership.apply_trusted(engine_id)
                self._state.sync_group(engine_id)
                log.info("engine.tried_again", engine_id=engine_id, epoch=membership.epoch)

    def lose_group(
        self, engine_id: EngineId, reason: str, *, layer: LossLayer, rank: int | None = None
    ) -> None:
        """Take away what runs on an engine and its group's others, or on one rank of it."""
        for member in self._state.membership.group_of(engine_id):
            mate = member.spec.engine_id
            own_layer = layer if mate == engine_id else LossLayer.GROUP
            for run in self._state.runs.on_engine(mate):
                if rank is None or run.worker_on(mate) == rank:
                    self._lifecycle.lose_on_engine(run, mate, reason=reason, layer=own_layer)

    def lose_engine(self, engine_id: EngineId, reason: str) -> None:
        """Take away what runs on one engine, because its group was lost."""
        for run in self._state.runs.on_engine(engine_id):
            self._lifecycle.lose_on_engine(run, engine_id, reason=reason, layer=LossLayer.GROUP)

    def hand_over_drained(self, now_ns: int) -> None:
        """Move what still runs on drained engines whose deadline has passed."""
        membership = self._state.membership
        for engine_id, due_ns in sorted(self._drain_deadlines.items()):
            if due_ns > now_ns:
                continue
            record = membership.engines[engine_id]
            runs = self._state.runs.on_engine(engine_id)
            if not runs:
                if record.state is RankState.DOWN:
                    del self._drain_deadlines[engine_id]
                continue
            if not membership.up_engines(record.pool):
                continue  # nowhere to go: finishing here is better than an error
            for run in runs:
                plan = plan_recovery(run.request.sampling, num_output_tokens=run.num_output_tokens)
                if plan.method not in (RecoveryMethod.REFUSE, RecoveryMethod.FINISH):
                    self._lifecycle.move_attempt(run)
