"""Chunk sizes by time inside vLLM: `StepPlanner` decides, vLLM keeps all its books.

Before each `schedule()` the planner plans the step from its own prediction, or, where a step ran
otherwise than planned, takes over anew which requests run and how far they are. vLLM then asks
`_reserve_prefill_lookahead` how many prompt tokens it may give to each request, and gets the
planned chunk; requests whose turn it is not get none. Waiting requests that have a chunk are moved
to the head of the queue, because vLLM stops at the first that gets nothing. Decodes are not
touched, and steps without prompts are not planned at all, but for a few. After the step its time
teaches the cost models.

With asynchronous scheduling `schedule()` runs while the device computes the step before, so the
plan costs the device nothing; without, it adds the planner's microseconds to a step.

Nothing here can hold a request back for ever or break a step: whatever vLLM does differently (a
prefix hit, no KV, a paused queue) is counted in `num_differed` and taken over in the next plan. A
step in which nothing ran although something was planned hands the next one to vLLM; so does a
planner that is slow again and again (`num_fallbacks`). An exception switches chunk control off and
leaves vLLM's own rule.

Hooks of vLLM 0.32 (`vllm/v1/core/sched/scheduler.py`): `schedule`, `_reserve_prefill_lookahead`,
`update_from_output`, `add_request`, `_free_request`, `_preempt_request`, `running`, `waiting`.
Only for the first-come policy: with priorities the order of the queue is vLLM's.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from dsched.clock import Clock, SystemClock
from dsched.config import ChunkSettings, chunk_settings_from_environment
from dsched.drivers.agent import CHUNK_BUDGET
from dsched.drivers.chunk_weights import ChunkWeights, load_chunk_weights
from dsched.drivers.plan_watch import PAUSE_STEPS, PlanWatch
from dsched.drivers.vllm.mixin import SchedulerMixin, log
from dsched.drivers.wire import AgentCommand, SetStepBudget
from dsched.ids import RequestId

if TYPE_CHECKING:
    from dsched.scheduler import StepPlan, StepPlanner

HOOKS: Final = ("_reserve_prefill_lookahead", "_free_request", "running", "waiting", "requests")
"""Methods and attributes of vLLM's scheduler that chunk control needs."""
MAX_WAITING: Final = 8_192
"""Waiting requests that are planned for; beyond them vLLM decides."""
SLOW_PLAN_NS: Final = 2_000_000
"""A plan that takes longer counts as late: a hundred times what it should."""
SYNC_STEPS: Final = 64
"""Plans after which vLLM's state is read anew although every step ran as planned. Below: half a
microsecond a request in more steps. Above: an oversight of ours lives longer."""
LEARN_ALL_STEPS: Final = 64
"""Decode steps that are all learned from at the start."""
LEARN_DECODES: Final = 16
"""Afterwards one in so many is. Below: more microseconds. Above: drift is seen late."""
MAX_STEPS_IN_FLIGHT: Final = 64
NS_PER_MS: Final = 1e6


class _Flight(NamedTuple):
    """A planned step between `schedule` and `update_from_output`."""

    plan: "StepPlan | None"
    """`None` if vLLM did otherwise, so the plan's time means nothing."""
    start_ns: int


class ChunkControl:
    """What one scheduler needs to be planned for. Reads vLLM's objects, changes only the order of
    its waiting queue."""

    def __init__(
        self, planner: "StepPlanner", clock: Clock, weights: ChunkWeights | None = None
    ) -> None:
        self.planner = planner
        self.weights = weights
        """An operator's policy for the shares of the length buckets; `None` leaves them."""
        self.is_on = True
        """Cleared by a budget of nothing, which returns chunks to the engine."""
        self.num_plans = 0
        """Steps planned."""
        self.num_fallbacks = 0
        """Steps that were left to vLLM."""
        self.num_differed = 0
        """Chunks that vLLM gave otherwise than planned."""
        self._clock = clock
        self._slot_of: dict[str, int] = {}
        self._chunk_of: dict[str, int] = {}
        self._plan: StepPlan | None = None
        self._is_ours = False
        self._had_chunks = False
        self._num_schedules = 0
        self._is_in_step = False
        """The planner's predicted state is vLLM's, so it need not be read again."""
        self._flights: deque[_Flight] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._last_end_ns = 0
        self._watch = PlanWatch()

    @property
    def is_deciding(self) -> bool:
        """Whether the step that is being scheduled has planned chunks."""
        return self._is_ours and bool(self._chunk_of)

    @property
    def chunks(self) -> Mapping[str, int]:
        """The planned chunks of the step that is being scheduled, by request id."""
        return self._chunk_of

    def set_budget(self, step_budget_ns: int | None) -> None:
        """Plan steps of this time from the next on; `None` or 0 leaves them to vLLM."""
        if step_budget_ns:
            self.planner.budget_seconds = step_budget_ns / 1e9
        self.is_on = bool(step_budget_ns)
        log.info("chunks.budget_set ns=%s", step_budget_ns)

    def add(self, request: Any) -> None:
        """Plan for a request from now on. One that cannot be planned for is vLLM's."""
        if self.weights is not None:
            self.weights.note(request.request_id)
        try:
            self._slot_of[request.request_id] = self.planner.add(
                RequestId(request.request_id),
                num_prompt_tokens=max(1, request.num_tokens),
                max_output_tokens=max(1, request.max_tokens),
            )
        except ValueError as error:
            log.debug("request.unplanned reason=%s", error)

    def remove(self, request: Any) -> None:
        """Forget a request that ended. Unknown ones are ignored."""
        if self._slot_of.pop(request.request_id, None) is not None:
            self.planner.finish(RequestId(request.request_id))

    def lose_step(self) -> None:
        """vLLM changed a request between steps; its state is read anew."""
        self._is_in_step = False
        self._had_chunks = True

    def before_schedule(self, scheduler: Any) -> None:
        """Plan the step that vLLM is about to schedule. O(R)."""
        self._chunk_of.clear()
        self._plan = None
        self._is_ours = self.is_on and self._watch.pause_steps == 0
        if not self._is_ours:
            if self.is_on:
                self._watch.pause_steps -= 1
                self.num_fallbacks += 1
            return
        self._num_schedules += 1
        if not self._has_prompts(scheduler) and not self._is_learning_step():
            # Nothing to divide: decodes are vLLM's, and the next plan reads its state anew.
            self._is_in_step = False
            return
        start_ns = self._clock.now_ns()
        if not self._is_in_step or self.num_plans % SYNC_STEPS == 0:
            self._sync(scheduler.running)
        planner = self.planner
        if self.weights is not None and self.weights.is_due():
            self._ask_weights(self.weights)
        self._plan = plan = planner.plan()
        self._had_chunks = plan.slots.size > plan.num_decodes
        if self._had_chunks:
            self._take_chunks(scheduler, plan)
        self.num_plans += 1
        self._watch_time(self._clock.now_ns() - start_ns)

    def _ask_weights(self, weights: ChunkWeights) -> None:
        planner = self.planner
        slots, lengths, left = (array.tolist() for array in planner.backlog())
        names = [planner.request_id(slot) for slot in slots]
        answer = weights.ask(zip(names, lengths, left, strict=True))
        if answer is not None:
            planner.bucket_weights = answer

    def _take_chunks(self, scheduler: Any, plan: "StepPlan") -> None:
        first = plan.num_decodes
        slots, chunks = plan.slots[first:].tolist(), plan.num_tokens[first:].tolist()
        names = [self.planner.request_id(slot) for slot in slots]
        self._chunk_of.update(zip(names, chunks, strict=True))
        # Who has computed nothing waits, as far as the planner knows.
        pasts = self.planner.past_tokens(plan)[first:].tolist()
        waiting = [name for name, past in zip(names, pasts, strict=True) if past == 0]
        if waiting:
            move_to_front(scheduler.waiting, [scheduler.requests[name] for name in waiting])

    def chunk(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """Return the tokens that a request may get of the `num_new_tokens` that vLLM would give."""
        if not self._is_ours:
            return num_new_tokens
        planned = self._chunk_of.get(request.request_id)
        if planned is not None:
            return min(planned, num_new_tokens)
        length = request.num_tokens + request.num_output_placeholders
        is_decode = length - num_computed_tokens <= 1
        if is_decode or request.request_id not in self._slot_of:
            return num_new_tokens
        return 0

    def after_schedule(self, output: Any) -> None:
        """Compare what vLLM scheduled with the plan."""
        scheduled, plan = output.num_scheduled_tokens, self._plan
        drafts = output.scheduled_spec_decode_tokens
        is_exact = False
        if plan is not None:
            total = plan.num_decodes
            differed = 0
            if self._chunk_of:
                total += sum(self._chunk_of.values())
                differed = sum(
                    scheduled.get(name, 0) != chunk for name, chunk in self._chunk_of.items()
                )
                self.num_differed += differed
            if drafts:
                total += sum(map(len, drafts.values()))
            is_exact = not differed and output.total_num_scheduled_tokens == total
            if total and not scheduled:
                # Nothing ran: let vLLM try before anything is planned again.
                self._watch.pause_steps = 1
        # Draft tokens may be accepted or not, so with them the state is read anew.
        self._is_in_step = is_exact and not drafts
        self._flights.append(
            _Flight(plan=plan if is_exact else None, start_ns=self._clock.now_ns())
        )

    def after_step(self) -> None:
        """Learn from a step that has ended."""
        if not self._flights:
            return
        end_ns = self._clock.now_ns()
        flight = self._flights.popleft()
        step_ns = end_ns - max(flight.start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        if flight.plan is not None and self.planner.can_observe(flight.plan):
            self.planner.observe(flight.plan, step_ns)

    def _has_prompts(self, scheduler: Any) -> bool:
        """Whether any prompt is left to compute: some request does not run yet, or the last plan
        had chunks, which always has as long as a running request lacks some of its prompt."""
        return self._had_chunks or len(self._slot_of) > len(scheduler.running)

    def _is_learning_step(self) -> bool:
        """Of decode steps, which are most steps and alike, one in LEARN_DECODES is learned from
        once enough are known."""
        return (
            self._num_schedules % LEARN_DECODES == 0
            or self.planner.decode_cost.online.num_steps < LEARN_ALL_STEPS
        )

    def _sync(self, running: Any) -> None:
        slot_of = self._slot_of
        requests = running
        if any(request.request_id not in slot_of for request in running):
            requests = [request for request in running if request.request_id in slot_of]
        # Flat lists: numpy takes them several times faster than rows.
        slots = np.array([slot_of[request.request_id] for request in requests], dtype=np.int64)
        self.planner.sync(
            slots,
            np.array([request.num_computed_tokens for request in requests], dtype=np.int64),
            np.array(
                [request.num_tokens + request.num_output_placeholders for request in requests],
                dtype=np.int64,
            ),
        )
        drafts = [len(request.spec_token_ids) for request in requests]
        self.planner.set_verify_lengths(slots, np.array(drafts, dtype=np.int64))

    @property
    def num_late(self) -> int:
        """Plans that took longer than SLOW_PLAN_NS."""
        return self._watch.num_late

    def _watch_time(self, plan_ns: int) -> None:
        if self._watch.note(plan_ns, slow_ns=SLOW_PLAN_NS):
            log.warning("chunks.paused reason='late plans' steps=%d", PAUSE_STEPS)


def move_to_front(queue: Any, requests: Sequence[Any]) -> None:
    """Let `requests` be the first of vLLM's waiting queue, in their order; others keep theirs."""
    if all(request is other for request, other in zip(requests, queue, strict=False)):
        return
    for request in reversed(requests):
        if request in queue:
            queue.remove_request(request)
            queue.prepend_request(request)


class ChunkingMixin(SchedulerMixin):
    """`SchedulerMixin` with chunk control, on if `DSCHED_STEP_BUDGET_MS` is set."""

    _dsched_chunks: ChunkControl | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The agent begins to hear commands before there are chunks to control.
        self._dsched_budgets: deque[SetStepBudget] = deque(maxlen=1)
        super().__init__(*args, **kwargs)
        try:
            self._dsched_chunks = make_chunk_control(self, chunk_settings_from_environment())
        except Exception as error:  # the door: vLLM must start without us
            self._dsched_switch_off(CHUNK_BUDGET, error)
        own = getattr(super(), "_reserve_prefill_lookahead", None)
        if self._dsched_chunks is None and own is not None:
            # vLLM asks it for each request of each step; without a plan nothing is in between.
            self.__dict__["_reserve_prefill_lookahead"] = own

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, over planned chunks."""
        if self._dsched_chunks is None:
            return super().schedule(*args, **kwargs)
        try:
            if self._dsched_budgets:
                self._dsched_chunks.set_budget(self._dsched_budgets.pop().step_budget_ns)
            self._dsched_chunks.before_schedule(self)
        except Exception as error:  # the door: a step must not fail through us
            self._dsched_switch_off(CHUNK_BUDGET, error)
        self._dsched_place_hook()
        output = super().schedule(*args, **kwargs)
        if self._dsched_chunks is not None:
            try:
                self._dsched_chunks.after_schedule(output)
            except Exception as error:  # the door
                self._dsched_switch_off(CHUNK_BUDGET, error)
        return output

    def _dsched_place_hook(self) -> None:
        """Let vLLM call its own method in steps without chunks: most steps, and the call is made
        for every running request."""
        if self._dsched_chunks is not None and self._dsched_chunks.is_deciding:
            vars(self).pop("_reserve_prefill_lookahead", None)
        elif "_reserve_prefill_lookahead" not in vars(self):
            own: Any = super()
            vars(self)["_reserve_prefill_lookahead"] = own._reserve_prefill_lookahead

    def _reserve_prefill_lookahead(
        self, request: Any, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """vLLM's own, on the planned chunk."""
        if num_new_tokens > 1 and self._dsched_chunks is not None:
            try:
                num_new_tokens = self._dsched_chunks.chunk(
                    request, num_computed_tokens, num_new_tokens
                )
            except Exception as error:  # the door
                self._dsched_switch_off(CHUNK_BUDGET, error)
        result: int = super()._reserve_prefill_lookahead(  # type: ignore[misc]
            request, num_computed_tokens, num_new_tokens
        )
        return result

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; the step's time is learned from first."""
        if self._dsched_chunks is not None:
            try:
                self._dsched_chunks.after_step()
            except Exception as error:  # the door
                self._dsched_switch_off(CHUNK_BUDGET, error)
        return super().update_from_output(scheduler_output, *args, **kwargs)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; the request is planned for."""
        result = super().add_request(request, *args, **kwargs)
        if self._dsched_chunks is not None:
            try:
                self._dsched_chunks.add(request)
            except Exception as error:  # the door
                self._dsched_switch_off(CHUNK_BUDGET, error)
        return result

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; the request is planned for no longer."""
        if self._dsched_chunks is not None:
            try:
                self._dsched_chunks.remove(request)
            except Exception as error:  # the door
                self._dsched_switch_off(CHUNK_BUDGET, error)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own; the next plan starts from what is left."""
        if self._dsched_chunks is not None:
            self._dsched_chunks.lose_step()
        return super()._preempt_request(*args, **kwargs)  # type: ignore[misc]

    def _dsched_switch_off(self, feature: str, error: Exception) -> None:
        if feature == CHUNK_BUDGET:
            self._dsched_chunks = None
        super()._dsched_switch_off(feature, error)

    def _dsched_on_command(self, command: AgentCommand) -> None:
        """Runs on the agent's thread; the next step takes the last budget that came."""
        if isinstance(command, SetStepBudget):
            self._dsched_budgets.append(command)


def make_chunk_control(scheduler: Any, settings: ChunkSettings) -> ChunkControl | None:
    """Return the control of `scheduler`; `None` where none was asked for or vLLM's settings leave
    no room for it, which is logged."""
    if settings.step_budget_ms is None:
        return None
    config = scheduler.scheduler_config
    missing = [name for name in HOOKS if not has_hook(scheduler, name)]
    if missing:
        log.warning("chunks.skipped reason='this vLLM lacks %s'", ", ".join(missing))
        return None
    if not config.enable_chunked_prefill or config.policy != "fcfs":
        log.warning(
            "chunks.skipped reason='needs policy fcfs and chunked prefill' policy=%s", config.policy
        )
        return None
    # Only now: with numba loaded, vLLM's CPU worker cannot be made in the same process (`verify`).
    from dsched.costs.presets import load_cost_models
    from dsched.scheduler import ChunkRule, StepPlanner

    prefill, decode = load_cost_models(settings.costs)
    rule = ChunkRule(
        max_step_tokens=scheduler.max_num_scheduled_tokens,
        alignment=min(settings.chunk_alignment, scheduler.max_num_scheduled_tokens),
    )
    planner = StepPlanner(
        prefill_cost=prefill,
        decode_cost=decode,
        budget_seconds=settings.step_budget_ms / 1e3,
        max_running_requests=scheduler.max_num_running_reqs,
        max_requests=scheduler.max_num_running_reqs + MAX_WAITING,
        rule=rule,
    )
    log.info("chunks.planned budget_ms=%s costs=%s", settings.step_budget_ms, settings.costs)
    return ChunkControl(planner, SystemClock(), load_chunk_weights(settings, rule))


def has_hook(scheduler: Any, name: str) -> bool:
    """Tell whether vLLM's own class or object has `name`; ours do not count."""
    bases = [each for each in type(scheduler).__mro__ if not issubclass(each, SchedulerMixin)]
    return name in vars(scheduler) or any(name in vars(each) for each in bases)
