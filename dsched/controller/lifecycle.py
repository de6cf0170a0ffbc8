"""A request from its arrival to its one end, across as many attempts as it takes.

In:  what clients, runs and the tick say of a request. Out: calls to its stream, and its place in
the run table: waiting for the dispatcher, on an engine, or closed. What a lost attempt turns into
is decided by `dsched.faults`; this does it.
"""

import structlog

from dsched.controller import refusals
from dsched.controller.asking import is_refused, priority_of
from dsched.controller.attempts import attempt_of, begin_attempt, is_busy
from dsched.controller.events import AttemptLost, RequestArrived
from dsched.controller.observer import HandoffGap
from dsched.controller.prefills import Prefills
from dsched.controller.request import InferenceRequest, RequestError, RequestFinish
from dsched.controller.run import KvTransfer, Phase, RequestRun
from dsched.controller.state import ControllerState, Outcome
from dsched.drivers.base import AttemptFinish, FinishReason, KvMover
from dsched.errors import DriverError, EngineUnreachableError, InvariantError
from dsched.faults import (
    RecoveryGuarantee,
    RecoveryMethod,
    ResumeKind,
    ResumePlan,
    plan_recovery,
    plan_resume,
)
from dsched.ids import AttemptId, DpRank, EngineId, RankId, RequestId
from dsched.states import LossLayer

log = structlog.get_logger(__name__)

MOVED = "another rank has less to do"


class Lifecycle:
    """Sees each request to its one end. Implements `RunOwner` for the runs."""

    def __init__(self, state: ControllerState, prefills: Prefills) -> None:
        self._state = state
        self._prefills = prefills
        self._unplanned: list[RequestRun] = []
        """Runs that this tick has to place first."""
        self.num_fenced_tokens = 0

    def take_unplanned(self) -> list[RequestRun]:
        """The runs that nobody has tried to place yet."""
        unplanned, self._unplanned = self._unplanned, []
        return unplanned

    # ---- arrival

    def apply_arrival(self, event: RequestArrived) -> None:
        """Take a request in, or refuse it."""
        state, request = self._state, event.request
        error = self._refusal(request)
        if error is not None:
            self._refuse(event, error)
            return
        resume = self._resume_plan(request)
        if resume.kind is ResumeKind.REFUSE:
            self._refuse(event, refusals.cannot_resume(resume.reason))
            return
        pool = state.pool_of_model[request.model]
        if resume.kind is ResumeKind.NEW and is_refused(state, request, pool=pool):
            self._refuse(event, refusals.not_admitted())
            return
        state.recorder.on_arrival(
            request.request_id,
            pool=pool,
            arrival_ns=event.time_ns,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            tenant=request.tenant,
            priority=request.priority,
            now_ns=state.clock.now_ns(),
        )
        run = RequestRun(
            request=request,
            stream=event.stream,
            pool=pool,
            router=state.pools[pool].router,
            journal=state.journal,
            owner=self,
            clock=state.clock,
            time_ns=event.time_ns,
            priority=priority_of(state, request),
        )
        state.journal.open_request(
            request.request_id,
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
        )
        state.runs.open(run)
        if resume.kind is ResumeKind.CONTINUE:
            self._resume(run, resume)
        else:
            self._wait(run)

    def _refuse(self, event: RequestArrived, error: RequestError) -> None:
        state, request = self._state, event.request
        state.counts.add_request(request.model, Outcome.ERROR)
        state.recorder.on_refusal(
            request.request_id,
            model=request.model,
            code=error.code,
            now_ns=state.clock.now_ns(),
        )
        event.stream.on_error(error)

    def _refusal(self, request: InferenceRequest) -> RequestError | None:
        """Why a request cannot even wait, or `None`."""
        state = self._state
        if state.is_closed:
            return refusals.stopping()
        pool = state.pool_of_model.get(request.model)
        if pool is None:
            return refusals.unknown_model(request.model)
        if request.request_id in state.runs:
            return refusals.id_in_use(request.request_id)
        if not state.can_serve(pool):
            return refusals.no_engine(request.model)
        return None

    def _resume_plan(self, request: InferenceRequest) -> ResumePlan:
        """What the journal has of a request that its client repeats."""
        if not request.may_resume:
            return ResumePlan(kind=ResumeKind.NEW)
        return plan_resume(
            self._state.journal.read_request(
                request.request_id, is_known_only=request.num_client_tokens is None
            ),
            model=request.model,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            num_client_tokens=request.num_client_tokens,
        )

    def _resume(self, run: RequestRun, resume: ResumePlan) -> None:
        """Give the client what the journal has, and go on from there."""
        journal = self._state.journal
        request_id = run.request.request_id
        run.num_attempts = run.num_moves = 1  # the attempt that died with dsched
        journal.begin_attempt(
            request_id,
            attempt_id=self._state.attempt_ids.next_id(),
            epoch=1,
            target=RankId(EngineId("journal"), DpRank(0)),
        )
        journal.record(request_id, epoch=1, first_index=0, token_ids=resume.output_token_ids)
        run.num_output_tokens = len(resume.output_token_ids)
        log.info(
            "request.resumed",
            request_id=request_id,
            num_output_tokens=run.num_output_tokens,
            is_ended=resume.finish_reason is not None,
        )
        run.stream.on_tokens(0, resume.output_token_ids, None)
        if run.phase is Phase.ENDED:
            return  # a stop string was among them
        if resume.finish_reason is not None:
            self._finish(run, reason=resume.finish_reason, num_cached_tokens=0)
        else:
            engine_id, reason = EngineId("journal"), "repeated by its client"
            self._record_loss(run, engine_id, reason=reason, layer=LossLayer.RESTART)
            self._go_on(run, engine_id=engine_id, reason=reason, cause="repeated")

    def _wait(self, run: RequestRun) -> None:
        """Let a run wait for this tick's plan, and longer if no rank has room."""
        state = self._state
        now_ns = state.clock.now_ns()
        limit_ns = state.settings.queue_timeout_ns
        if run.num_handoffs:
            limit_ns = state.settings.handoff_deadline_ns
        state.runs.wait(run, now_ns + limit_ns)
        if run.recovery is None or run.transfer is not None:
            self._unplanned.append(run)  # nothing is computed again that a ration could spare
        else:
            state.pools[run.pool].handoffs.add(run, now_ns)

    # ---- lost attempts

    def on_attempt_failed(self, run: RequestRun, error: DriverError) -> None:
        """The attempt ended badly: refuse, or let the tick find another rank."""
        is_lost = isinstance(error, EngineUnreachableError)
        if not (is_lost or is_busy(error)):
            if run.has_foreign_kv and not run.num_attempt_tokens:
                self._lose_transfer(run, reason=str(error))
            else:
                self.end_with_error(run, refusals.from_engine(error))
            return
        layer = LossLayer.SOCKET if is_lost else LossLayer.BUSY
        self.fail_attempt(run, reason=str(error), layer=layer)

    def _lose_transfer(self, run: RequestRun, *, reason: str) -> None:
        """Without the KV of its prompt the decode half cannot go on: compute the prompt again."""
        self._state.counts.add_prefill("transfer_failed")
        log.warning("transfer.failed", request_id=run.request.request_id, reason=reason)
        run.is_prefill_local = True  # ignored where the decode engine computes no prompts
        self.fail_attempt(run, reason=reason, layer=LossLayer.TRANSFER)

    # ---- prefill halves

    def on_prefill_finished(self, run: RequestRun, finish: AttemptFinish) -> None:
        """The prompt is computed: the decode half begins, without waiting for a tick."""
        if self._prefills.on_finished(run, finish):
            now_ns = self._state.clock.now_ns()
            dispatch = begin_attempt(self._state, run, now_ns)
            self._prefills.expect_token(run, now_ns)
            self._state.drivers[dispatch.engine_id].generate(dispatch.command, run)

    def on_prefill_failed(self, run: RequestRun, error: DriverError) -> None:
        """Its prompt was not computed: the next tick finds another way."""
        self._prefills.on_failed(run, error)
        self._lose_pair(run, reason=str(error))

    def lose_prefill(self, run: RequestRun, *, reason: str) -> None:
        """Take the prompt away from a worker that does not answer, or is drained."""
        self._prefills.lose(run, reason)
        self._lose_pair(run, reason=reason)

    def _lose_pair(self, run: RequestRun, *, reason: str) -> None:
        """A decode half that runs already waits for KV that will not come."""
        if run.phase is Phase.RUNNING:
            self.lose_attempt(run, reason=reason, layer=LossLayer.TRANSFER)

    def place_again(self, run: RequestRun) -> None:
        """The decode rank went away before its half began: find another one for the same KV."""
        transfer, prefilled_by = run.transfer, run.prefilled_by
        self._stop_watching(run)
        run.transfer, run.prefilled_by = transfer, prefilled_by
        run.num_moves += 1
        self._wait(run)

    def lose_overdue_halves(self, now_ns: int) -> None:
        """Give up what separate pools have waited for too long, while both engines go on."""
        for run, attempt_id in self._prefills.take_overdue(now_ns):
            if run.prefill is not None and run.prefill.attempt_id == attempt_id:
                self.lose_prefill(run, reason="its prompt was not computed in time")
            else:
                self._abort_attempt(run)
                self._lose_transfer(run, reason="no token came in time")

    # ---- lost engines

    def lose_on_engine(
        self, run: RequestRun, engine_id: EngineId, *, reason: str, layer: LossLayer
    ) -> None:
        """Take away what the run has on an engine that does not answer."""
        if run.prefill is not None and run.prefill.engine_id == engine_id:
            self.lose_prefill(run, reason=reason)
        else:
            self.lose_attempt(run, reason=reason, layer=layer)

    def lose_attempt(self, run: RequestRun, *, reason: str, layer: LossLayer) -> None:
        """Take a request away from an engine that does not answer: fence, abort, go on."""
        self._abort_attempt(run)
        self.fail_attempt(run, reason=reason, layer=layer)

    def fail_attempt(self, run: RequestRun, *, reason: str, layer: LossLayer) -> None:
        """Let the next tick find another rank."""
        self._state.push(self._part(run, reason=reason, layer=layer))

    def move_attempt(self, run: RequestRun) -> None:
        """Take a request away from an engine that works, to go on elsewhere in this tick."""
        if run.phase is Phase.PREFILLING:
            self.lose_prefill(run, reason="its engine is drained")
            return
        if run.attempt is None:
            raise InvariantError(f"request {run.request.request_id} moves without an attempt")
        self._abort_attempt(run)
        event = self._part(run, reason="its engine is drained", layer=LossLayer.DRAIN)
        self.apply_attempt_lost(event)

    def move_to_rank(self, run: RequestRun, to: RankId, *, with_kv: bool) -> None:
        """Let a request go on at another rank, with its KV or by computing it again."""
        attempt = attempt_of(run)
        run.move_to = to
        driver = self._state.drivers[attempt.engine_id]
        if with_kv and isinstance(driver, KvMover):
            driver.move_out(attempt.attempt_id)
        else:
            self._abort_attempt(run)
            self.apply_attempt_lost(self._part(run, reason=MOVED, layer=LossLayer.MOVE))

    def _take_moved(self, run: RequestRun, finish: AttemptFinish) -> None:
        """The engine has let go of it and kept its KV."""
        event = self._part(run, reason=MOVED, layer=LossLayer.MOVE)
        told = finish.kv_transfer
        run.transfer = KvTransfer(
            params=None if told is None else dict(told), time_ns=self._state.clock.now_ns()
        )
        self._state.push(event)

    def _part(self, run: RequestRun, *, reason: str, layer: LossLayer) -> AttemptLost:
        """The attempt is over, the request is not: nothing it still says counts."""
        if run.attempt is None:
            raise InvariantError(f"request {run.request.request_id} failed without an attempt")
        self._stop_watching(run)
        run.phase = Phase.WAITING
        if run.lost_ns is None:
            run.lost_ns = self._state.clock.now_ns()
        self._state.journal.fence_attempt(run.request.request_id)
        self._record_loss(run, run.attempt.engine_id, reason=reason, layer=layer)
        return AttemptLost(
            request_id=run.request.request_id,
            engine_id=run.attempt.engine_id,
            reason=reason,
            is_engine_lost=layer not in (LossLayer.BUSY, LossLayer.DRAIN, LossLayer.MOVE),
            is_moved=layer in (LossLayer.DRAIN, LossLayer.MOVE),
            is_transfer_failed=layer is LossLayer.TRANSFER,
            is_rank_fine=layer in (LossLayer.TRANSFER, LossLayer.MOVE),
        )

    def _record_loss(
        self, run: RequestRun, engine_id: EngineId, *, reason: str, layer: LossLayer
    ) -> None:
        self._state.recorder.on_loss(
            run.request.request_id,
            engine_id=engine_id,
            layer=layer.value,
            # What an engine answers to a refused request may quote the request.
            reason="it had no room" if layer is LossLayer.BUSY else reason,
            num_output_tokens=run.num_output_tokens,
            now_ns=self._state.clock.now_ns(),
        )

    def apply_attempt_lost(self, event: AttemptLost) -> None:
        """Give up, or go on with another rank."""
        run = self._state.runs.get(event.request_id)
        if run is None or run.phase is not Phase.WAITING or run.attempt is None:
            return
        lost_ranks = set() if event.is_rank_fine else {run.attempt.rank}
        if event.is_engine_lost and not event.is_rank_fine:
            lost_ranks |= self._group_ranks(run, event.engine_id)
        run.num_moves += event.is_moved
        if run.num_attempts - run.num_moves >= self._state.settings.max_attempts:
            self.end_with_error(run, refusals.gave_up(run, event))
            return
        run.excluded_ranks = tuple(sorted(lost_ranks.union(run.excluded_ranks)))
        self._go_on(run, engine_id=event.engine_id, reason=event.reason, cause=_cause_of(event))

    def _group_ranks(self, run: RequestRun, engine_id: EngineId) -> set[int]:
        """Ranks that fail together with an engine: trying each in turn would use up attempts."""
        members = self._state.membership.group_of(engine_id)
        if any(member.spec.is_elastic for member in members):
            return set()
        ranks = (
            run.router.index_of(rank_id) for member in members for rank_id in member.rank_ids()
        )
        return {rank for rank in ranks if rank is not None}

    def _go_on(self, run: RequestRun, *, engine_id: EngineId, reason: str, cause: str) -> None:
        """Go on with a request whose attempt was lost, as `plan_recovery` says."""
        counts = self._state.counts
        plan = plan_recovery(run.request.sampling, num_output_tokens=run.num_output_tokens)
        run.recovery = plan
        self._state.recorder.on_recovery(
            run.request.request_id,
            run.request.sampling,
            plan,
            num_output_tokens=run.num_output_tokens,
            now_ns=self._state.clock.now_ns(),
        )
        counts.recoveries[plan.method] = counts.recoveries.get(plan.method, 0) + 1
        counts.add_handoff(plan.method.value, cause)
        if run.num_output_tokens:
            run.num_handoffs += 1
            if run.guarantee is not RecoveryGuarantee.CONTINUATION:
                run.guarantee = plan.guarantee  # once drawn anew, an answer is never exact again
        log.info(
            "request.recovered",
            request_id=run.request.request_id,
            method=plan.method.value,
            guarantee=plan.guarantee.value,
            engine_id=engine_id,
            reason=reason,
            num_output_tokens=run.num_output_tokens,
        )
        if plan.method is RecoveryMethod.REFUSE:
            self.end_with_error(run, refusals.cannot_go_on(run, plan, engine_id))
        elif plan.finish_reason is not None:
            self._finish(run, reason=plan.finish_reason, num_cached_tokens=0)
        else:
            run.expected_token_ids = list(
                self._state.journal.output_token_ids(run.request.request_id)[
                    : plan.num_replayed_tokens
                ]
            )
            self._wait(run)

    def on_handed_off(self, run: RequestRun, now_ns: int) -> None:
        """The first token after a loss: measure what the client saw."""
        if run.lost_ns is not None and run.recovery is not None and run.num_handoffs:
            gap = HandoffGap(
                detect_ns=run.lost_ns - run.token_ns,
                dispatch_ns=run.dispatch_ns - run.lost_ns,
                prefill_ns=now_ns - run.dispatch_ns,
            )
            method = run.recovery.method.value
            self._state.observer.on_handoff(method, gap)
            self._state.recorder.on_handoff(
                run.request.request_id,
                method=method,
                detect_ns=gap.detect_ns,
                dispatch_ns=gap.dispatch_ns,
                prefill_ns=gap.prefill_ns,
                now_ns=now_ns,
            )
        run.lost_ns = None
        if run.attempt is not None:
            self._end_ration(run, run.attempt.attempt_id)

    def on_first_token(self, run: RequestRun, now_ns: int) -> None:
        """The answer has begun."""
        self._state.recorder.on_first_token(run.request.request_id, now_ns)

    def _end_ration(self, run: RequestRun, attempt_id: AttemptId) -> None:
        """The attempt computes nothing again any more: one that waits may have its turn."""
        if self._state.pools[run.pool].handoffs.end(attempt_id):
            self._state.host.request_tick()

    # ---- ends

    def on_run_finished(self, run: RequestRun, finish: AttemptFinish) -> None:
        """The engine ended the request well: tell the client at once."""
        if self._state.watch is not None and run.attempt is not None:
            self._state.watch.note_cached(run.attempt.attempt_id, finish.num_cached_tokens)
        if finish.reason is FinishReason.ABORT:
            self.end_with_error(run, refusals.engine_aborted())
            return
        if finish.reason is FinishReason.MOVED:
            self._take_moved(run, finish)
            return
        if run.expected_token_ids:
            self.on_replay_differs(run)
            return
        self._prefills.note_decoded(run, finish)
        self._finish(run, reason=finish.reason, num_cached_tokens=finish.num_cached_tokens)

    def on_replay_differs(self, run: RequestRun) -> None:
        """A replay gave other tokens than the client has: an honest end is all that is left."""
        self.end_with_error(run, refusals.replay_differs(run))

    def _finish(self, run: RequestRun, *, reason: FinishReason, num_cached_tokens: int) -> None:
        """End a request well; counts are those of the request, however many attempts it took."""
        outcome = Outcome.STOP if reason is FinishReason.STOP else Outcome.LENGTH
        self._close(run, outcome=outcome)
        run.stream.on_finish(_finish_of(run, reason=reason, num_cached_tokens=num_cached_tokens))

    def cancel(self, request_id: RequestId) -> RequestFinish | None:
        """The client went away: its engine is told at once; the booking ends with the attempt."""
        run = self._state.runs.get(request_id)
        if run is None:
            return None
        self._close(run, outcome=Outcome.CANCELLED)
        self._abort_attempt(run)
        return _finish_of(run, reason=FinishReason.STOP, num_cached_tokens=0)

    def end_overdue(self, now_ns: int) -> None:
        """End what has waited too long for any rank."""
        while (run := self._state.runs.next_overdue(now_ns)) is not None:
            if run.num_handoffs:
                self._state.counts.add_handoff("overdue", "no_room")
            is_pool_up = self._state.can_serve(run.pool)
            self.end_with_error(run, refusals.overdue(run, is_pool_up=is_pool_up))

    def end_with_error(self, run: RequestRun, error: RequestError) -> None:
        """End a request badly."""
        self._close(run, outcome=Outcome.ERROR, code=error.code)
        self._abort_attempt(run)
        log.warning(
            "request.failed",
            request_id=run.request.request_id,
            code=error.code,
            reason=error.message,
            num_attempts=run.num_attempts,
            num_output_tokens=run.num_output_tokens,
        )
        run.stream.on_error(error)

    def _close(self, run: RequestRun, *, outcome: Outcome, code: str | None = None) -> None:
        """Forget a request. Its booking stays until the engine has let go of it."""
        state, request_id = self._state, run.request.request_id
        self._stop_watching(run)
        state.runs.close(run)
        if state.runs.stop_waiting(run):
            if run.router.drop_held(request_id):
                state.recorder.on_drop(
                    run.pool, request_id, is_served=False, now_ns=state.clock.now_ns()
                )
            state.pools[run.pool].handoffs.drop(request_id)
        state.journal.finish(request_id, reason=outcome.value)
        state.recorder.on_end(
            request_id,
            outcome=outcome.value,
            code=code,
            num_output_tokens=run.num_output_tokens,
            num_handoffs=run.num_handoffs,
            guarantee=run.guarantee.value if run.guarantee else None,
            now_ns=state.clock.now_ns(),
        )
        state.counts.add_request(run.request.model, outcome)

    # ---- attempts

    def _stop_watching(self, run: RequestRun) -> None:
        """The run's attempt counts no more, nor does its prefill half."""
        self._prefills.drop(run)
        run.forget_transfer()
        if run.attempt is not None:
            attempt_id = run.attempt.attempt_id
            self._state.runs.end_attempt(attempt_id)
            self._end_ration(run, attempt_id)
            if self._state.watch is not None:
                self._state.watch.end(attempt_id)
            if not run.is_handed_out:
                self.on_attempt_released(attempt_id)  # only its rank was booked

    def _abort_attempt(self, run: RequestRun) -> None:
        attempt = run.attempt
        if attempt is not None and attempt.attempt_id in self._state.router_of_attempt:
            self._state.drivers[attempt.engine_id].abort(attempt.attempt_id)

    def on_attempt_released(self, attempt_id: AttemptId) -> None:
        """The engine holds nothing of this attempt, or prefill half, any more."""
        self._prefills.release(attempt_id)
        router = self._state.router_of_attempt.pop(attempt_id, None)
        if router is not None:
            router.release(attempt_id)
            if router.num_held or self._state.tells_peers:
                self._state.host.request_tick()


def _cause_of(event: AttemptLost) -> str:
    """Why a request goes on elsewhere; label of a metric."""
    if event.is_moved:
        return "moved" if event.is_rank_fine else "drained"
    if event.is_transfer_failed:
        return "transfer_failed"
    return "engine_lost" if event.is_engine_lost else "engine_busy"


def _finish_of(run: RequestRun, *, reason: FinishReason, num_cached_tokens: int) -> RequestFinish:
    num_prompt_tokens = len(run.request.prompt_token_ids)
    return RequestFinish(
        reason=reason,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=run.num_output_tokens,
        num_cached_tokens=min(num_cached_tokens, num_prompt_tokens),
        num_handoffs=run.num_handoffs,
        guarantee=run.guarantee.value if run.guarantee else None,
    )
