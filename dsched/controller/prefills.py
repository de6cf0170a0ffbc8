"""The prefill half of a request in separate pools: which worker computes the prompt, and what if
it does not.

A request of a decode pool gets a pair: its decode rank is booked first, then a prefill worker is
chosen, and the prompt goes there for one token that nobody hears. When it is done the decode half
begins and takes the KV over. Nothing a prefill worker says reaches the client, so whatever goes
wrong there costs time, never an answer:

- a worker that is lost or full: another one, then the decode rank computes the prompt itself;
- a worker that refuses the prompt: the decode rank says why, or does it;
- KV that is older than `max_transfer_age_ns`: it is not asked for;
- KV that does not arrive (the decode engine says so before its first token): the decode rank
  computes the prompt itself.

Decode engines that cannot compute prompts (`can_prefill`) wait for another worker instead.

Engines that meet for every request (`EngineDescription.kv_meeting`, SGLang) get both halves at
once, with a room number drawn for the pair; there a lost prefill half takes its decode half with
it, and both are placed anew.

Cost: O(W) for W prefill workers.
"""

from dataclasses import dataclass
from hashlib import blake2b

import structlog
from sortedcontainers import SortedList

from dsched.controller.attempts import Dispatch, attempt_of, is_busy
from dsched.controller.pools import Pool
from dsched.controller.run import KvTransfer, Phase, PrefillHalf, RequestRun
from dsched.controller.state import ControllerState
from dsched.drivers.base import AttemptFinish, FinishReason
from dsched.drivers.wire import GenerateCommand, KvMeeting, SamplingParams
from dsched.errors import DriverError, EngineUnreachableError, InvariantError
from dsched.ids import AttemptId, EngineId, RankId
from dsched.routing import PrefillRouter
from dsched.routing.prefill import choose_worker
from dsched.states import RankState

log = structlog.get_logger(__name__)

MIN_MISSED_TOKENS = 256
"""Prompts shorter than this may fit a block or two, of which none need be found again."""
PATIENCE_FACTOR = 20
"""How much later than estimated a prompt may be done. Lower: prompts move for a wrong estimate.
Higher: a half that its engine forgot waits longer."""
MAX_ROOM = 1 << 62
"""Of the numbers that both halves of a pair are told; engines keep them as signed integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Booking:
    pool: Pool
    prefill: PrefillRouter


class Prefills:
    """Prefill halves in flight, and runs whose half was lost."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._bookings: dict[AttemptId, _Booking] = {}
        """Halves that a worker may still hold something for."""
        self._unplaced: list[RequestRun] = []
        """Runs with a decode rank whose prompt nobody computes; the next tick decides."""
        self._due: SortedList[tuple[int, AttemptId]] = SortedList()
        """When halves have to show something."""
        self._expected: dict[AttemptId, tuple[int, RequestRun]] = {}
        """The same by half, with the run that it is of."""

    # ---- decisions of a tick

    def take_unplaced(self) -> list[RequestRun]:
        """Runs whose prefill half was lost, or whose decode rank was, since the last tick."""
        unplaced, self._unplaced = self._unplaced, []
        return [run for run in unplaced if run.phase is Phase.PREFILLING and run.prefill is None]

    def is_wanted(self, run: RequestRun, now_ns: int) -> bool:
        """Whether another engine should compute the prompt of the booked attempt."""
        if self._has_transfer(run, now_ns) or run.pool not in self._state.prefill_pools:
            return False
        if not self._state.can_prefill(run.pool):
            return True
        if run.is_prefill_local:
            return False
        limit = self._state.settings.max_local_prefill_tokens
        if attempt_of(run).num_prompt_tokens > limit:
            return True
        self._state.counts.add_prefill("short")
        return False

    def _has_transfer(self, run: RequestRun, now_ns: int) -> bool:
        """Whether KV waits for the run; KV that is too old is forgotten."""
        transfer = run.transfer
        if transfer is None:
            return False
        if now_ns - transfer.time_ns <= self._state.settings.max_transfer_age_ns:
            return True
        self._state.counts.add_prefill("expired")
        log.warning(
            "transfer.expired",
            request_id=run.request.request_id,
            age_ms=(now_ns - transfer.time_ns) // 1_000_000,
        )
        run.forget_transfer()
        return False

    def place(self, run: RequestRun, now_ns: int) -> Dispatch | None:
        """Choose a worker for the prompt of the booked attempt; `None` when there is none."""
        state, attempt = self._state, attempt_of(run)
        pool = state.prefill_pools[run.pool]
        router = prefill_router(pool)
        if (plan := router.plan_groups(now_ns)) is not None:
            router.apply_groups(plan, now_ns)
        view = router.view(
            num_prompt_tokens=attempt.num_prompt_tokens,
            now_ns=now_ns,
            num_cached_tokens=pool.cached_tokens(attempt.prompt_token_ids),
            excluded_workers=run.excluded_workers,
        )
        decision = choose_worker(view)
        state.recorder.on_prefill_choice(
            run.request.request_id, router.worker_names, view, decision, now_ns
        )
        if decision.worker is None:
            state.counts.add_prefill("no_worker")
            return None
        rank_id = router.rank_id(decision.worker)
        attempt_id = state.attempt_ids.next_id()
        half = PrefillHalf(
            attempt_id=attempt_id,
            engine_id=rank_id.engine_id,
            worker=decision.worker,
            rank_id=rank_id,
            meeting=self._meeting(rank_id, attempt_id),
        )
        self._book(pool, router, half, attempt.num_prompt_tokens, now_ns)
        router.book(
            decision.worker,
            half.attempt_id,
            work_ns=decision.work_ns,
            bucket=decision.bucket,
            now_ns=now_ns,
        )
        run.prefill, run.prefilled_by = half, rank_id
        run.phase = Phase.PREFILLING
        state.runs.begin_attempt(run, half.attempt_id)
        state.recorder.on_prefill(
            run.request.request_id,
            attempt_id=half.attempt_id,
            rank_id=rank_id,
            bucket=decision.bucket,
            work_ns=decision.work_ns,
            finish_ns=decision.finish_ns,
            reason=decision.reason.value,
            now_ns=now_ns,
        )
        patience_ns = state.settings.max_transfer_age_ns + PATIENCE_FACTOR * decision.finish_ns
        self._expect(run, half.attempt_id, now_ns + patience_ns)
        if state.watch is not None:
            state.watch.begin(
                half.attempt_id,
                engine_id=half.engine_id,
                num_prompt_tokens=attempt.num_prompt_tokens,
                now_ns=now_ns,
            )
        return Dispatch(
            run=run,
            engine_id=half.engine_id,
            command=GenerateCommand(
                attempt_id=half.attempt_id,
                epoch=state.membership.epoch,
                dp_rank=rank_id.dp_rank,
                prompt_token_ids=attempt.prompt_token_ids,
                sampling=prefill_sampling(attempt.sampling),
                priority=run.request.priority,
                trace=run.request.trace,
                is_prefill=True,
                kv_meeting=half.meeting,
            ),
        )

    def _book(
        self, pool: Pool, router: PrefillRouter, half: PrefillHalf, num_tokens: int, now_ns: int
    ) -> None:
        rank = pool.router.index_of(half.rank_id)
        if rank is None:
            raise InvariantError(f"prefill worker {half.rank_id} has no place in its pool")
        pool.router.book(rank, half.attempt_id, num_prompt_tokens=num_tokens, now_ns=now_ns)
        self._bookings[half.attempt_id] = _Booking(pool=pool, prefill=router)
        self._state.counts.add_dispatch(half.rank_id)

    def _meeting(self, rank_id: RankId, attempt_id: AttemptId) -> KvMeeting | None:
        description = self._state.membership.engines[rank_id.engine_id].description
        if description is None or description.kv_meeting is None:
            return None
        host, port = description.kv_meeting
        # Attempt ids are unique across processes, so rooms are as good as.
        number = int.from_bytes(blake2b(attempt_id.encode(), digest_size=8).digest()) % MAX_ROOM
        # Decode engines find the prefill DP rank by the room's remainder.
        room = number - number % description.num_dp_ranks + rank_id.dp_rank
        return KvMeeting(host=host, port=port, room=room)

    # ---- halves that show nothing while their engines go on

    def expect_token(self, run: RequestRun, now_ns: int) -> None:
        """The decode half begins: without a token in time, its KV is not coming."""
        due_ns = now_ns + self._state.settings.max_transfer_age_ns
        self._expect(run, attempt_of(run).attempt_id, due_ns)

    def _expect(self, run: RequestRun, attempt_id: AttemptId, due_ns: int) -> None:
        self._due.add((due_ns, attempt_id))
        self._expected[attempt_id] = (due_ns, run)

    def _expect_no_longer(self, attempt_id: AttemptId) -> None:
        expected = self._expected.pop(attempt_id, None)
        if expected is not None:
            self._due.remove((expected[0], attempt_id))

    def next_due_ns(self) -> int | None:
        """When `take_overdue` has something to look at."""
        return self._due[0][0] if self._due else None

    def take_overdue(self, now_ns: int) -> list[tuple[RequestRun, AttemptId]]:
        """Halves that have shown nothing for too long."""
        overdue = []
        while self._due and self._due[0][0] <= now_ns:
            _, attempt_id = self._due.pop(0)
            _, run = self._expected.pop(attempt_id)
            if self._is_silent(run, attempt_id):
                overdue.append((run, attempt_id))
        return overdue

    def _is_silent(self, run: RequestRun, attempt_id: AttemptId) -> bool:
        if run.prefill is not None and run.prefill.attempt_id == attempt_id:
            return True
        is_current = run.attempt is not None and run.attempt.attempt_id == attempt_id
        return is_current and run.phase is Phase.RUNNING and not run.num_attempt_tokens

    # ---- what becomes of a half

    def on_finished(self, run: RequestRun, finish: AttemptFinish) -> bool:
        """The worker is done; whether the decode half can begin now."""
        if finish.reason is not FinishReason.ABORT:
            self._learn(run, finish)
        state, half = self._state, self._end(run)
        if finish.reason is FinishReason.ABORT:
            self._lost(run, half, "aborted by its engine")
            return False
        state.counts.add_prefill("remote")
        if half.meeting is not None:
            return False  # the decode half has begun long since
        run.transfer = KvTransfer(
            params=None if finish.kv_transfer is None else dict(finish.kv_transfer),
            time_ns=state.clock.now_ns(),
        )
        if self.is_rank_usable(run):
            return True
        self._decide_later(run)
        return False

    def _learn(self, run: RequestRun, finish: AttemptFinish) -> None:
        """A half that had its engine for itself shows what prompts cost there."""
        state, half = self._state, run.prefill
        if state.watch is None or half is None:
            return
        elapsed_ns = state.watch.note_prefilled(
            half.attempt_id,
            num_cached_tokens=finish.num_cached_tokens,
            now_ns=state.clock.now_ns(),
        )
        if elapsed_ns is not None:
            prefill_router(state.prefill_pools[run.pool]).observe(
                elapsed_ns,
                num_uncached_tokens=attempt_of(run).num_prompt_tokens - finish.num_cached_tokens,
                num_cached_tokens=finish.num_cached_tokens,
            )

    def is_rank_usable(self, run: RequestRun) -> bool:
        """Whether the decode rank that was booked may still get the request."""
        return run.router.load_of(attempt_of(run).rank).state == RankState.UP

    def on_failed(self, run: RequestRun, error: DriverError) -> None:
        """The worker could not, or was lost."""
        half = self._end(run)
        is_elsewhere_tried = is_busy(error) or isinstance(error, EngineUnreachableError)
        self._lost(run, half, str(error), refusal=None if is_elsewhere_tried else error)

    def lose(self, run: RequestRun, reason: str) -> None:
        """Take the prompt away from a worker that stands still, was lost or is drained."""
        half = run.prefill
        self.drop(run)
        if half is not None:
            self._lost(run, half, reason)

    def _lost(
        self, run: RequestRun, half: PrefillHalf, reason: str, *, refusal: DriverError | None = None
    ) -> None:
        """Try another worker, or none after a `refusal`: it says the same everywhere."""
        self._state.counts.add_prefill("failed")
        log.warning(
            "prefill.failed",
            request_id=run.request.request_id,
            engine_id=half.engine_id,
            reason=reason,
        )
        run.excluded_workers = tuple(sorted({*run.excluded_workers, half.worker}))
        if refusal is not None:
            run.is_prefill_local = True
            run.prefill_refusal = refusal
        run.forget_transfer()
        self._decide_later(run)

    def note_decoded(self, run: RequestRun, finish: AttemptFinish) -> None:
        """The answer is there: say whether the KV of its prompt had been taken over.

        Engines that meet cannot answer without it, and count none of it as cached.
        """
        attempt = attempt_of(run)
        if run.prefilled_by is None or self._meets(run.prefilled_by.engine_id):
            return
        is_long = attempt.num_prompt_tokens >= MIN_MISSED_TOKENS
        if is_long and finish.num_cached_tokens == 0:
            self._state.counts.add_prefill("missed")
            log.warning(
                "transfer.missed",
                request_id=run.request.request_id,
                engine_id=attempt.engine_id,
                prefill_engine_id=run.prefilled_by.engine_id,
            )

    def _meets(self, engine_id: EngineId) -> bool:
        description = self._state.membership.engines[engine_id].description
        return description is not None and description.kv_meeting is not None

    def _decide_later(self, run: RequestRun) -> None:
        self._unplaced.append(run)
        self._state.host.request_tick()

    def _end(self, run: RequestRun) -> PrefillHalf:
        """The half counts no more."""
        half = run.prefill
        if half is None:
            raise InvariantError(f"request {run.request.request_id} has no prefill half")
        run.prefill = None
        self._expect_no_longer(half.attempt_id)
        self._state.runs.end_attempt(half.attempt_id)
        if self._state.watch is not None:
            self._state.watch.end(half.attempt_id)
        return half

    def drop(self, run: RequestRun) -> None:
        """Stop the half, if one runs; nothing that it or the attempt still says counts."""
        if run.attempt is not None:
            self._expect_no_longer(run.attempt.attempt_id)
        if run.prefill is None:
            return
        half = self._end(run)
        if half.attempt_id in self._bookings:
            self._state.drivers[half.engine_id].abort(half.attempt_id)

    def release(self, attempt_id: AttemptId) -> None:
        """The worker holds nothing of this half any more. Other ids are ignored."""
        booking = self._bookings.pop(attempt_id, None)
        if booking is not None:
            booking.pool.router.release(attempt_id)
            booking.prefill.release(attempt_id, self._state.clock.now_ns())
            if self._state.tells_peers:
                self._state.host.request_tick()

    def validate(self) -> None:
        """Check that every run without a half is decided about soon, and that nothing is expected
        of what is over. O(runs)."""
        if len(self._due) != len(self._expected):
            raise InvariantError(f"{len(self._due)} due times for {len(self._expected)} halves")
        for attempt_id, (_, run) in self._expected.items():
            if run.phase is Phase.ENDED:
                raise InvariantError(f"half {attempt_id} is expected of a request that ended")
        unplaced = {run.request.request_id for run in self._unplaced}
        for run in self._state.runs:
            is_between = run.phase is Phase.PREFILLING and run.prefill is None
            if is_between and run.request.request_id not in unplaced:
                raise InvariantError(f"request {run.request.request_id}: nobody has its prompt")


def prefill_router(pool: Pool) -> PrefillRouter:
    """The router of a prefill pool."""
    if pool.prefill is None:
        raise InvariantError(f"pool {pool.name!r} is no prefill pool")
    return pool.prefill


def prefill_sampling(sampling: SamplingParams) -> SamplingParams:
    """How the one token is drawn that nobody hears: in the cheapest way.

    >>> prefill_sampling(SamplingParams(max_tokens=9, min_tokens=3, logprobs=5)).max_tokens
    1
    """
    return SamplingParams(max_tokens=1, ignore_eos=sampling.ignore_eos)
