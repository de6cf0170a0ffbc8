"""Places requests: asks the routers, checks what they say, books, and only then speaks to engines.

In:  runs that wait. Out: `Dispatch`es, each booked before the next run is looked at, so that a
burst does not herd. What is held goes first, then what is new, then lost requests as their ration
allows.

Cost: O(dispatches * D).
"""

from dsched.controller import refusals
from dsched.controller.asking import asks_for, preferred
from dsched.controller.attempts import Dispatch, begin_attempt, is_wanted
from dsched.controller.lifecycle import Lifecycle
from dsched.controller.prefills import Prefills
from dsched.controller.run import Attempt, Phase, RequestRun
from dsched.controller.state import ControllerState
from dsched.drivers.wire import SamplingParams
from dsched.errors import InvariantError
from dsched.ids import AttemptId
from dsched.routing import RoutingDecision, RoutingReason, RoutingRequest
from dsched.routing import kernels as k


class Dispatcher:
    """Finds a rank for what waits, and a prefill worker where the pools are separate."""

    def __init__(self, state: ControllerState, lifecycle: Lifecycle, prefills: Prefills) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._prefills = prefills

    def plan(self, now_ns: int) -> list[Dispatch]:
        """Place what is held, then what is new; book each answer before asking for the next."""
        state = self._state
        dispatches = self._plan_prefills(now_ns)
        dispatches += self._plan_held(now_ns)
        unplanned = self._lifecycle.take_unplanned()
        lost = [
            run
            for name, pool in state.pools.items()
            if pool.handoffs.num_waiting
            for run in pool.handoffs.take(state.num_ranks_up(name), now_ns)
        ]
        for run in (*unplanned, *lost):
            if run.phase is Phase.WAITING:
                dispatches += self._plan_new(run, now_ns)
        return dispatches

    def _plan_prefills(self, now_ns: int) -> list[Dispatch]:
        """Go on with runs that have a decode rank and lost their prefill worker."""
        dispatches: list[Dispatch] = []
        for run in self._prefills.take_unplaced():
            if self._prefills.is_rank_usable(run):
                dispatches += self._begin(run, now_ns)
            else:
                self._lifecycle.place_again(run)
        return dispatches

    def hand_out(self, dispatch: Dispatch) -> None:
        """Give a command to its engine, unless the run ended since it was planned."""
        if is_wanted(dispatch):
            self._state.drivers[dispatch.engine_id].generate(dispatch.command, dispatch.run)
        else:
            self._lifecycle.on_attempt_released(AttemptId(dispatch.command.attempt_id))

    def next_hold_expiry_ns(self, now_ns: int) -> list[int]:
        """When held requests have waited for room for long enough."""
        return [
            expiry_ns
            for pool in self._state.pools.values()
            # What has expired and is still held waits for an engine or for spare room.
            if (expiry_ns := pool.router.next_hold_expiry_ns()) is not None and expiry_ns > now_ns
        ]

    def _has_spare(self, run: RequestRun) -> bool:
        """Whether a run may start; one that lost its engine uses what was kept for it."""
        if run.recovery is not None:
            return True
        gate = self._state.pools[run.pool].gate
        return gate.has_room(run.router, num_new_tokens=run.num_known_tokens)

    def _plan_held(self, now_ns: int) -> list[Dispatch]:
        state = self._state
        dispatches: list[Dispatch] = []
        for pool in state.pools.values():
            router = pool.router
            while (held := router.next_held(now_ns)) is not None:
                run = state.runs.waiting(held.request_key)  # type: ignore[arg-type]
                if held.decision.rank is not None and not self._has_spare(run):
                    break  # what is free is kept for the loss of a group
                is_served = held.decision.rank is not None
                state.recorder.on_release(run.pool, held, now_ns)
                router.drop_held(held.request_key, is_served=is_served)
                state.recorder.on_drop(
                    run.pool, run.request.request_id, is_served=is_served, now_ns=now_ns
                )
                if held.decision.rank is None:
                    self._end_unroutable(run, held.decision)
                else:
                    dispatches += self._book(run, held.decision, now_ns)
        return dispatches

    def _plan_new(self, run: RequestRun, now_ns: int) -> list[Dispatch]:
        """Dispatch a run, hold it, or end it when no rank could ever take it."""
        decision = self._planned_move(run) or self._pick(run, now_ns)
        if decision.reason is RoutingReason.NO_RANK_UP and run.excluded_ranks:
            # Every rank that is up has failed it once: better one of them again than none.
            run.excluded_ranks = ()
            decision = self._pick(run, now_ns)
        if decision.reason in (RoutingReason.TOO_LARGE, RoutingReason.NO_SUCH_RANK):
            self._end_unroutable(run, decision)
            return []
        # Continuations overtake what is held: their clients wait in the middle of an answer.
        may_go = not run.router.num_held or run.recovery is not None
        if decision.rank is not None and may_go and self._has_spare(run):
            return self._book(run, decision, now_ns)
        if not self._hold(run, now_ns):
            self._lifecycle.end_with_error(run, refusals.full(run.router.num_held))
        return []

    def _planned_move(self, run: RequestRun) -> RoutingDecision | None:
        """The rank that a plan moves the run to, if it still has room."""
        to, run.move_to = run.move_to, None
        rank = None if to is None else run.router.index_of(to)
        if rank is None:
            return None
        table = run.router.ledger.table
        is_up = table[k.STATE, rank] == k.UP
        if not (is_up and k.has_room(table, rank, run.num_known_tokens)):
            return None
        return RoutingDecision(rank=rank, reason=RoutingReason.LEAST_COST)

    def _pick(self, run: RequestRun, now_ns: int) -> RoutingDecision:
        request = _routing_request(run)
        decision = run.router.pick(request, now_ns)
        self._state.recorder.on_pick(run.pool, run.request.request_id, request, decision, now_ns)
        return decision

    def _hold(self, run: RequestRun, now_ns: int) -> bool:
        request, request_id = _routing_request(run), run.request.request_id
        is_accepted = run.router.hold(request, request_id, now_ns)
        self._state.recorder.on_hold(
            run.pool, request_id, request, is_accepted=is_accepted, now_ns=now_ns
        )
        return is_accepted

    def _end_unroutable(self, run: RequestRun, decision: RoutingDecision) -> None:
        self._lifecycle.end_with_error(run, refusals.unroutable(run, decision.reason))

    def _book(self, run: RequestRun, decision: RoutingDecision, now_ns: int) -> list[Dispatch]:
        """Take the rank for the run's next attempt, and begin it or its prefill half."""
        if asks_for(self._state, run):
            decision = preferred(self._state, run, _routing_request(run), decision, now_ns)
        if decision.rank is None:
            raise InvariantError(f"request {run.request.request_id}: a dispatch needs a rank")
        state, request = self._state, run.request
        prompt_token_ids, sampling = self._attempt_input(run)
        rank_id = run.router.rank_id(decision.rank)
        attempt_id = state.attempt_ids.next_id()
        run.begin_attempt(
            Attempt(
                attempt_id=attempt_id,
                epoch=run.num_attempts + 1,
                engine_id=rank_id.engine_id,
                rank=decision.rank,
                prompt_token_ids=prompt_token_ids,
                sampling=sampling,
            ),
            now_ns,
        )
        state.runs.stop_waiting(run)
        # Booked by attempt, not by request: a cancelled attempt may still run while its client
        # repeats the request.
        run.router.book(
            decision.rank, attempt_id, num_prompt_tokens=len(prompt_token_ids), now_ns=now_ns
        )
        state.recorder.on_booking(
            request.request_id,
            attempt_id=attempt_id,
            number=run.num_attempts,
            rank_id=rank_id,
            num_prompt_tokens=len(prompt_token_ids),
            epoch=state.membership.epoch,
            now_ns=now_ns,
        )
        state.router_of_attempt[attempt_id] = run.router
        if run.recovery is not None:
            state.pools[run.pool].handoffs.begin(attempt_id, len(prompt_token_ids))
        return self._begin(run, now_ns)

    def _begin(self, run: RequestRun, now_ns: int) -> list[Dispatch]:
        """Let another engine compute the prompt, or begin the booked attempt at once."""
        if not self._prefills.is_wanted(run, now_ns):
            if run.transfer is not None:
                self._prefills.expect_token(run, now_ns)
            return [begin_attempt(self._state, run, now_ns)]
        half = self._prefills.place(run, now_ns)
        if half is None:
            if not self._state.can_prefill(run.pool):
                self._lifecycle.end_with_error(run, refusals.no_prefill(run))
                return []
            run.forget_transfer()
            return [begin_attempt(self._state, run, now_ns)]
        if half.command.kv_meeting is None:
            return [half]
        self._prefills.expect_token(run, now_ns)
        return [half, begin_attempt(self._state, run, now_ns)]

    def _attempt_input(self, run: RequestRun) -> tuple[tuple[int, ...], SamplingParams]:
        """Prompt and sampling of the next attempt."""
        request, plan = run.request, run.recovery
        if plan is None or plan.sampling is None:
            return request.prompt_token_ids, request.sampling
        prompt_token_ids = request.prompt_token_ids
        if plan.num_prompt_output_tokens:
            prompt_token_ids += self._state.journal.output_token_ids(request.request_id)
        return prompt_token_ids, plan.sampling


def _routing_request(run: RequestRun) -> RoutingRequest:
    request = run.request
    plan = run.recovery
    num_output_tokens = run.num_output_tokens
    if plan is not None and plan.sampling is not None and not plan.num_prompt_output_tokens:
        num_output_tokens = 0  # it is drawn again, so the rank holds the prompt alone at first
    return RoutingRequest(
        num_prompt_tokens=len(request.prompt_token_ids) + num_output_tokens,
        pinned_dp_rank=request.pinned_dp_rank,
        tenant=request.tenant,
        excluded_ranks=run.excluded_ranks,
        priority=run.priority,
    )
