"""Chunk sizes by time inside SGLang: dsched says how many prompt tokens a step computes.

SGLang computes prompts and decodes in separate steps (together with `--enable-mixed-chunk`), at
most `chunked_prefill_size` prompt tokens a step, in the order of its queue; it cuts one prompt at a
time, and lets nobody decode as long as prompts wait. `ChunkControl` changes three numbers:

- the tokens of a step with prompts, in the place of `chunked_prefill_size`, planned before each by
  the rule of `StepPlanner` (`plan_chunks`: time, not tokens; four length buckets with savings);
- the share of the prompt that is being cut, if others behind it can be computed as a whole. So
  short prompts pass a long one, although SGLang cannot cut two. This needs a subclass of SGLang's
  `PrefillAdder`, for which SGLang has a method;
- `prefill_decode_interval`, 1 instead of 0: after each step with prompts one decode of everybody.
  The two together are one step in dsched's sense, and the time budget is for both: what the
  decodes are expected to take is taken out before prompts are cut. Smaller chunks alone would make
  the gaps of running streams longer.

SGLang's own size stays the upper limit, for its buffers are made for it.

What a step computed is compared with the plan, and its time teaches the cost model. An exception
switches chunk control off and leaves SGLang's own size.

Off where ranks that share a request would have to agree on a number that depends on measured time
(attention TP, CP or pipeline stages above 1), and where SGLang counts prompts in another way
(sliding-window, Mamba or diffusion models); the log says so, and `chunk_budget` is missing.

Hooks of SGLang 0.5.23: `Scheduler.get_new_batch_prefill`, `.get_prefill_adder_class`,
`.process_batch_result`, `.chunked_prefill_size`, `.chunked_req`, `.waiting_queue`,
`.prefill_decode_interval`, `.is_mixed_chunk`;
`PrefillAdder.add_chunked_req`, `.add_one_req`, `.chunked_req_limit`. This module imports nothing of
SGLang. Cost: one numpy plan over at most `MAX_PLANNED` prompts, only in steps with prompts.
"""

import itertools
import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from dsched.clock import Clock, SystemClock
from dsched.config import ChunkSettings
from dsched.costs import DecodeCostModel, PrefillCostModel
from dsched.costs.presets import load_cost_models
from dsched.drivers.chunk_weights import ChunkWeights, load_chunk_weights
from dsched.drivers.plan_watch import PAUSE_STEPS, PlanWatch
from dsched.scheduler import ChunkRule, plan_chunks

HOOKS: Final = (
    "get_new_batch_prefill",
    "get_prefill_adder_class",
    "process_batch_result",
    "chunked_prefill_size",
    "chunked_req",
    "waiting_queue",
    "prefill_decode_interval",
    "is_mixed_chunk",
)
ADDER_HOOKS: Final = ("add_chunked_req", "add_one_req")
MAX_PLANNED: Final = 64
"""Waiting prompts that are planned for: more do not fit a step that is worth planning."""
MAX_STEPS_IN_FLIGHT: Final = 64
LEARN_ALL_STEPS: Final = 64
"""Decode steps that are all learned from at the start."""
LEARN_DECODES: Final = 16
"""Afterwards one in so many is. Below: more microseconds. Above: drift is seen late."""
LEAST_BUDGET_S: Final = 1e-6
"""What is left for prompts where decodes alone take the budget: they get one aligned chunk."""
SLOW_PLAN_NS: Final = 5_000_000
"""A plan that takes longer counts as late."""

log = logging.getLogger("sglang.dsched")


class Flight(NamedTuple):
    """A planned step between its scheduling and its result."""

    num_tokens: int
    chunks: tuple[int, ...]
    pasts: tuple[int, ...]
    num_decodes: int


class ChunkControl:
    """What one scheduler needs to be planned for."""

    def __init__(
        self,
        *,
        prefill_cost: PrefillCostModel,
        decode_cost: DecodeCostModel,
        budget_seconds: float,
        rule: ChunkRule,
        page_tokens: int,
        clock: Clock,
    ) -> None:
        self.prefill_cost = prefill_cost
        self.decode_cost = decode_cost
        self.budget_seconds = budget_seconds
        self.rule = rule
        self.page_tokens = page_tokens
        self.weights: ChunkWeights | None = None
        """An operator's policy for the shares of the length buckets; `None` leaves them."""
        self.is_on = True
        """Cleared by a command that returns chunks to the engine."""
        self.num_plans = 0
        """Steps planned."""
        self.num_fallbacks = 0
        """Steps with prompts that were left to SGLang."""
        self.num_differed = 0
        """Steps that computed more than planned, or less although there was more to compute."""
        self.num_learned = 0
        """Steps that the cost model learned from."""
        self.planned_tokens: int | None = None
        """Prompt tokens of the step that is being scheduled; `None` if SGLang decides."""
        self.cut_tokens: int | None = None
        """Of them, those of the prompt that is being cut."""
        self._clock = clock
        self._saved_ns: Any = None
        self._budget_s = budget_seconds
        self._num_decode_steps = 0
        self._flights: deque[Flight] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._watch = PlanWatch()

    def before_prefill(self, scheduler: Any, running: Sequence[Any]) -> None:
        """Plan the step that SGLang is about to fill with prompts. `running` are those that decode
        beside or after it."""
        self.planned_tokens = self.cut_tokens = None
        cut, queue = scheduler.chunked_req, scheduler.waiting_queue
        if not self.is_on or (cut is None and not queue):
            return
        if self._watch.pause_steps:
            self._watch.pause_steps -= 1
            self.num_fallbacks += 1
            return
        start_ns = self._clock.now_ns()
        self._plan(cut, queue[:MAX_PLANNED], running, is_mixed=scheduler.is_mixed_chunk)
        self.num_plans += 1
        self._watch_time(self._clock.now_ns() - start_ns)

    def _plan(
        self, cut: Any, waiting: Sequence[Any], running: Sequence[Any], *, is_mixed: bool
    ) -> None:
        decodes = [(max(1, int(req.seqlen) - 1), 1) for req in running]
        self._budget_s = self.budget_seconds
        if decodes and not is_mixed:
            num_kv_tokens = sum(past + 1 for past, _ in decodes)
            decode_s = self.decode_cost.predict(len(decodes), num_kv_tokens)
            self._budget_s = max(self.budget_seconds - decode_s, LEAST_BUDGET_S)
            decodes = []
        # Of a resumed prompt the prefix is computed; of a waiting one it is not known yet.
        lengths = [int(req.seqlen) for req in waiting]
        if self.weights is not None and self.weights.is_due():
            self._ask_weights(self.weights, cut, waiting)
        if cut is None:
            chunks = self._chunks(decodes, [(0, length) for length in lengths])
            self.planned_tokens = sum(map(self._in_pages, chunks))
            return
        begun = (int(cut.prefix_len), max(1, int(cut.seqlen) - int(cut.prefix_len)))
        # SGLang cannot cut a second prompt, and nobody passes one that has to wait for that.
        largest = self.prefill_cost.max_chunk(self._budget_s, 0, alignment=1)
        whole = [(0, each) for each in itertools.takewhile(lambda each: each <= largest, lengths)]
        saved_ns = self._saved_ns
        chunks = self._chunks(decodes, [begun, *whole])
        num_whole = 0
        while num_whole < len(whole) and chunks[num_whole + 1] == whole[num_whole][1]:
            num_whole += 1
        if any(chunks[num_whole + 1 :]):
            self._saved_ns = saved_ns
            chunks = self._chunks(decodes, [begun, *whole[:num_whole]])
        # It cannot stand aside for a step either.
        share = max(self._in_pages(chunks[0]), self.rule.alignment)
        others = sum(map(self._in_pages, chunks[1:]))
        self.planned_tokens = share + others
        self.cut_tokens = share if others else None

    def _ask_weights(self, weights: ChunkWeights, cut: Any, waiting: Sequence[Any]) -> None:
        prompts = [(str(req.rid), int(req.seqlen), int(req.seqlen)) for req in waiting]
        if cut is not None:
            left = int(cut.seqlen) - int(cut.prefix_len)
            prompts.append((str(cut.rid), int(cut.seqlen), left))
        answer = weights.ask(prompts)
        if answer is not None:
            self.rule = replace(self.rule, bucket_weights=answer)

    def _chunks(self, decodes: list[tuple[int, int]], prompts: list[tuple[int, int]]) -> list[int]:
        """Plan for (past, remaining) of each; return the prompts' chunks."""
        past, remaining = zip(*decodes, *prompts, strict=True)
        plan = plan_chunks(
            past,
            remaining,
            budget_seconds=self._budget_s,
            prefill_cost=self.prefill_cost,
            decode_cost=self.decode_cost,
            rule=self.rule,
            saved_ns=self._saved_ns,
        )
        self._saved_ns = plan.saved_ns
        chunks: list[int] = plan.num_tokens[len(decodes) :].tolist()
        return chunks

    def _in_pages(self, num_tokens: int) -> int:
        """Tokens as SGLang counts them against the size of a step."""
        return -(-num_tokens // self.page_tokens) * self.page_tokens

    def after_prefill(self, batch: Any, *, has_more: bool) -> None:
        """Compare what SGLang put into the step with the plan. `has_more`: a prompt was cut."""
        planned, self.planned_tokens, self.cut_tokens = self.planned_tokens, None, None
        if planned is None or batch is None:
            return
        decoding = set(map(id, batch.decoding_reqs or ()))
        prompts = [req for req in batch.reqs if id(req) not in decoding and req.extend_len > 0]
        chunks = tuple(int(req.extend_len) for req in prompts)
        pasts = tuple(int(req.prefix_len) for req in prompts)
        total = sum(chunks)
        if total > planned or (has_more and total < planned - self.rule.alignment):
            self.num_differed += 1
        self._flights.append(Flight(total, chunks, pasts, len(decoding)))

    def after_step(self, batch: Any, step_ns: int) -> None:
        """Learn from a step that has ended."""
        if not batch.forward_mode.is_extend():
            self._learn_decode(batch, step_ns)
            return
        if not self._flights:
            return
        flight = self._flights.popleft()
        if flight.num_tokens + flight.num_decodes != batch.extend_num_tokens:
            # Steps were dropped or not planned in between.
            self._flights.clear()
            return
        if step_ns > 0 and flight.chunks and not flight.num_decodes:
            self.prefill_cost.observe(step_ns / 1e9, flight.chunks, flight.pasts)
            self.num_learned += 1

    def _learn_decode(self, batch: Any, step_ns: int) -> None:
        if step_ns <= 0 or not batch.forward_mode.is_decode() or not batch.reqs:
            return
        self._num_decode_steps += 1
        is_sampled = self._num_decode_steps % LEARN_DECODES == 0
        if is_sampled or self._num_decode_steps <= LEARN_ALL_STEPS:
            num_kv_tokens = sum(int(req.seqlen) for req in batch.reqs)
            self.decode_cost.observe(step_ns / 1e9, len(batch.reqs), num_kv_tokens)

    @property
    def num_late(self) -> int:
        """Plans that took longer than SLOW_PLAN_NS."""
        return self._watch.num_late

    def _watch_time(self, plan_ns: int) -> None:
        if self._watch.note(plan_ns, slow_ns=SLOW_PLAN_NS):
            log.warning("chunks.paused reason='late plans' steps=%d", PAUSE_STEPS)

    def warm_up(self) -> None:
        """Compile (or load) the kernels now: no step must wait for it."""
        plan_chunks(
            [1, 0],
            [1, 1],
            budget_seconds=self.budget_seconds,
            prefill_cost=self.prefill_cost,
            decode_cost=self.decode_cost,
            rule=self.rule,
        )


def make_adder_class(base: type[Any], control: ChunkControl) -> type[Any]:
    """Return a subclass of SGLang's `PrefillAdder` that keeps to the planned share of the prompt
    that is being cut and never begins to cut a second one."""

    class PlannedAdder(base):  # type: ignore[misc]
        """SGLang's own, within the plan."""

        chunked_req_limit: int | None

        def add_chunked_req(self, req: Any) -> Any:
            """SGLang's own, with the planned share as the limit."""
            share = control.cut_tokens
            if share is not None:
                own = self.chunked_req_limit
                self.chunked_req_limit = share if own is None else min(own, share)
            return super().add_chunked_req(req)

        def add_one_req(self, req: Any, has_chunked_req: bool, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001
            """SGLang's own, for a request that does not have to be cut or may be."""
            if has_chunked_req and control.cut_tokens is not None and not self._fits(req):
                return type(self.budget_state()).OTHER
            return super().add_one_req(req, has_chunked_req, *args, **kwargs)

        def _fits(self, req: Any) -> bool:
            length = len(req.full_untruncated_fill_ids) - req.prefix_len - req.host_hit_length
            rest = self.rem_chunk_tokens
            return rest is None or self.ceil_paged_tokens(length) <= rest

    return PlannedAdder


def why_not(scheduler: Any, *, ranks_of_request: int) -> str | None:
    """Return why chunks must stay SGLang's in this scheduler, `None` if they need not."""
    missing = [name for name in HOOKS if not hasattr(scheduler, name)]
    if not missing:
        adder = scheduler.get_prefill_adder_class()
        missing = [name for name in ADDER_HOOKS if not hasattr(adder, name)]
    if missing:
        return f"this SGLang lacks {', '.join(missing)}"
    if not scheduler.chunked_prefill_size:
        return "SGLang runs with chunked prefill off"
    if ranks_of_request > 1:
        return f"{ranks_of_request} ranks share a request and would have to agree"
    kinds = {
        "is_hybrid_swa": "sliding-window",
        "is_hybrid_ssm": "Mamba",
        "dllm_config": "diffusion",
    }
    for name, kind in kinds.items():
        if getattr(scheduler, name, None):
            return f"{kind} models count prompts in another way"
    return None


def make_chunk_control(scheduler: Any, settings: ChunkSettings) -> ChunkControl:
    """Return the control of a scheduler for which `why_not` has no reason.

    Raises ConfigError for costs that cannot be loaded.
    """
    prefill, decode = load_cost_models(settings.costs)
    page = int(scheduler.page_size)
    largest = int(scheduler.chunked_prefill_size)
    budget_ms = settings.step_budget_ms
    control = ChunkControl(
        prefill_cost=prefill,
        decode_cost=decode,
        budget_seconds=1.0 if budget_ms is None else budget_ms / 1e3,
        rule=ChunkRule(
            max_step_tokens=largest,
            alignment=min(math.lcm(page, settings.chunk_alignment), largest),
        ),
        page_tokens=page,
        clock=SystemClock(),
    )
    control.warm_up()
    control.weights = load_chunk_weights(settings, control.rule)
    log.info("chunks.planned budget_ms=%s costs=%s", budget_ms, settings.costs)
    return control


def attach_chunks(scheduler: Any, control: ChunkControl, on_error: Any) -> None:
    """Put `control` around one scheduler's methods. `on_error(error)` ends it."""
    own_prefill, own_class = scheduler.get_new_batch_prefill, scheduler.get_prefill_adder_class
    own_interval = scheduler.prefill_decode_interval
    # In a mixed step everybody decodes anyway.
    interval = own_interval if scheduler.is_mixed_chunk else max(1, own_interval)
    classes: dict[type[Any], type[Any]] = {}
    is_off = False

    def switch_off(error: Exception) -> None:
        nonlocal is_off
        is_off = True
        control.planned_tokens = control.cut_tokens = None
        scheduler.prefill_decode_interval = own_interval
        on_error(error)

    def adder_class() -> type[Any]:
        base: type[Any] = own_class()
        if is_off or control.cut_tokens is None:
            return base
        if base not in classes:
            classes[base] = make_adder_class(base, control)
        return classes[base]

    def get_new_batch_prefill(running_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if is_off:
            return own_prefill(running_batch, *args, **kwargs)
        own_size = scheduler.chunked_prefill_size
        scheduler.prefill_decode_interval = interval if control.is_on else own_interval
        try:
            control.before_prefill(scheduler, running_batch.reqs)
            planned = control.planned_tokens
            if planned is not None and own_size is not None:
                if scheduler.is_mixed_chunk:
                    # SGLang takes the decodes out of the size first.
                    planned += len(running_batch.reqs)
                scheduler.chunked_prefill_size = min(planned, own_size)
        except Exception as error:  # the door: a step must not fail through us
            switch_off(error)
        try:
            plan = own_prefill(running_batch, *args, **kwargs)
        finally:
            scheduler.chunked_prefill_size = own_size
        if not is_off:
            try:
                control.after_prefill(plan.batch_to_run, has_more=scheduler.chunked_req is not None)
            except Exception as error:  # the door
                switch_off(error)
        return plan

    scheduler.get_new_batch_prefill = get_new_batch_prefill
    scheduler.get_prefill_adder_class = adder_class
