"""Plan the next step of one DP rank while the device computes the current one.

In:  requests as they come (`add`), what the engine reports of a step (`apply_emitted`, `finish`),
     and how long it took (`observe`).
Out: a `StepPlan`: slots and tokens of the next step.

A plan is made from the *predicted* state: every planned token counts as computed, and every request
that reached the end of its tokens has emitted one. So step N+1 can be planned before anything of
step N is known, and the device never waits for the CPU. What turns out otherwise is put right when
the facts come in: more accepted draft tokens move a request on, a finished or aborted request
is taken out of a plan that was already made (`repair`) and frees its slot with the next one.
A request that reaches its token limit is foreseen and not planned again.

State is a struct of arrays, one column a request slot; the rules of `plan_chunks` run over it in
numba. Arrays are allocated once; `plan` only fills them. O(R) a step, tens of nanoseconds each.

KV is counted in blocks: a request takes blocks for its whole sequence with its first chunk, a
decode takes one more when it crosses a block, and where none is left the latest request loses its
own (`preempted`) to the oldest. An engine that does this itself is planned for with
`kv_capacity_tokens=None`.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dsched.costs import DecodeCostModel, PrefillCostModel
from dsched.costs.kernels import curve_ns, step_parts
from dsched.costs.online import OnlineFactors
from dsched.errors import InvariantError
from dsched.ids import RequestId
from dsched.scheduler import kernels
from dsched.scheduler.chunking import NS, ChunkRule, check_budget

UNLIMITED_BLOCKS = 1 << 50
"""Free KV blocks where the engine counts them itself."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """One step. Its arrays are lent: they hold until the planner has planned two more steps."""

    step: int
    """Number of the plan, from 1."""
    slots: NDArray[np.int64]
    """[n] slots that run, decodes first, both groups oldest first."""
    num_tokens: NDArray[np.int64]
    """[n] tokens of each; a decode has 1 and its draft tokens, a repaired entry 0."""
    num_decodes: int
    decode_ns: int
    """Estimated time of the decodes."""
    prefill_ns: int
    """Estimated time of the chunks; with no decode in the step, its fixed time too."""
    num_forced: int
    """Chunks granted beyond the budget, see `plan_chunks`."""
    preempted: NDArray[np.int64]
    """Slots that lost their KV to older requests."""

    @property
    def estimated_ns(self) -> int:
        """Estimated time of the whole step."""
        return self.decode_ns + self.prefill_ns


class StepPlanner:
    """State and planner of one DP rank. Not thread-safe; owned by whoever drives the rank."""

    def __init__(
        self,
        *,
        prefill_cost: PrefillCostModel,
        decode_cost: DecodeCostModel,
        budget_seconds: float,
        max_running_requests: int,
        max_requests: int = 4_096,
        rule: ChunkRule | None = None,
        kv_capacity_tokens: int | None = None,
        kv_block_tokens: int = 64,
    ) -> None:
        """`max_requests` bounds running and waiting requests together."""
        rule = ChunkRule() if rule is None else rule
        check_budget(budget_seconds)
        for name, value in (
            ("max_running_requests", max_running_requests),
            ("max_requests", max_requests),
            ("kv_block_tokens", kv_block_tokens),
        ):
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        self.prefill_cost = prefill_cost
        self.decode_cost = decode_cost
        self.num_forced = 0
        """Chunks that were granted beyond the budget, ever."""
        self.num_repaired = 0
        """Planned entries that were taken out because the request had ended, ever."""
        self._budget_ns = budget_seconds * NS
        self._step = 0
        self._kv_blocks = UNLIMITED_BLOCKS
        if kv_capacity_tokens is not None:
            self._kv_blocks = kv_capacity_tokens // kv_block_tokens
        self._limits = np.array(
            [rule.max_step_tokens, max_running_requests, rule.alignment, kv_block_tokens]
        )
        self._rule = rule
        self._bounds = np.array(rule.bucket_bounds, dtype=np.int64)
        self._weights = np.array(rule.bucket_weights, dtype=np.float64)
        num_buckets = len(self._weights)
        self._deficits = np.zeros(num_buckets)
        self._state = np.zeros((kernels.NUM_FIELDS, max_requests), dtype=np.int64)
        self._order = np.zeros(max_requests, dtype=np.int64)
        self._counters = np.array([0, self._kv_blocks], dtype=np.int64)
        num_candidates = kernels.MAX_CANDIDATES * num_buckets
        self._candidates = np.zeros((5, num_candidates), dtype=np.int64)
        self._costs = np.zeros(num_candidates)
        self._bucket_facts = np.zeros((kernels.NUM_BUCKET_FACTS, num_buckets), dtype=np.int64)
        self._freed = np.zeros(max_requests, dtype=np.int64)
        self._facts = np.zeros(kernels.NUM_FACTS)
        self._buffers = [_PlanBuffer(max_requests) for _ in range(2)]
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._slot_of: dict[RequestId, int] = {}
        self._id_of: list[RequestId | None] = [None] * max_requests
        self._prefill_parts = np.zeros(4)
        self._warm_up()

    def __len__(self) -> int:
        """Requests held, waiting and running."""
        return len(self._slot_of)

    @property
    def budget_seconds(self) -> float:
        """Time budget of a step. May be changed between plans."""
        return self._budget_ns / NS

    @budget_seconds.setter
    def budget_seconds(self, value: float) -> None:
        check_budget(value)
        self._budget_ns = value * NS

    @property
    def bucket_weights(self) -> tuple[float, ...]:
        """Shares of the prefill time, one a length bucket. May be changed between plans."""
        return tuple(self._weights.tolist())

    @bucket_weights.setter
    def bucket_weights(self, value: tuple[float, ...]) -> None:
        # Of the same number, positive and finite, as a rule's must be.
        self._weights[:] = replace(self._rule, bucket_weights=value).bucket_weights

    def backlog(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Slots [n] with more than one token left to compute, tokens of their sequences, and tokens
        that are left."""
        active = self._order[: self._counters[0]]
        state = self._state[:, active]
        left = state[kernels.TOKENS] - state[kernels.COMPUTED]
        is_prompt = (left > 1) & (state[kernels.IS_GONE] == 0)
        return active[is_prompt], state[kernels.TOKENS][is_prompt], left[is_prompt]

    def add(
        self,
        request_id: RequestId,
        *,
        num_prompt_tokens: int,
        max_output_tokens: int,
        num_cached_tokens: int = 0,
    ) -> int:
        """Take a request; return its slot. It waits until a plan gives it a chunk.

        Raises ValueError for an id that is held, for a prompt that cannot be, for a sequence that
        the KV cache cannot hold, and when all slots are taken.
        """
        if request_id in self._slot_of:
            raise ValueError(f"request {request_id!r} is held already")
        if num_prompt_tokens < 1 or max_output_tokens < 1:
            raise ValueError(
                f"{request_id}: a prompt of {num_prompt_tokens} tokens with at most "
                f"{max_output_tokens} output tokens cannot be served; both must be at least 1"
            )
        if not 0 <= num_cached_tokens < num_prompt_tokens:
            raise ValueError(
                f"{request_id}: {num_cached_tokens} of {num_prompt_tokens} prompt tokens are "
                "cached; at least one is always computed"
            )
        limit = num_prompt_tokens + max_output_tokens
        block_tokens = int(self._limits[kernels.BLOCK_TOKENS])
        if -(-limit // block_tokens) > self._kv_blocks:
            raise ValueError(
                f"{request_id}: {limit} tokens do not fit the KV cache of "
                f"{self._kv_blocks * block_tokens} tokens"
            )
        if not self._free_slots:
            raise ValueError(f"all {len(self._id_of)} slots are taken")
        slot = self._free_slots.pop()
        self._slot_of[request_id] = slot
        self._id_of[slot] = request_id
        column = self._state[:, slot]
        column[:] = 0
        column[kernels.COMPUTED] = num_cached_tokens
        column[kernels.TOKENS] = num_prompt_tokens
        column[kernels.LIMIT] = limit
        self._order[self._counters[0]] = slot
        self._counters[0] += 1
        return slot

    def request_id(self, slot: int) -> RequestId:
        """Return the request that holds `slot`. Raises KeyError for a free one."""
        request_id = self._id_of[slot]
        if request_id is None:
            raise KeyError(f"slot {slot} is free")
        return request_id

    def holds(self, slot: int) -> bool:
        """Tell whether a request that has not ended holds `slot`."""
        return self._id_of[slot] is not None and not self._state[kernels.IS_GONE, slot]

    def num_computed_tokens(self, slot: int) -> int:
        """Return the leading tokens whose KV exists once all planned steps have run."""
        return int(self._state[kernels.COMPUTED, slot])

    def is_at_limit(self, slot: int) -> bool:
        """Tell whether the planned steps bring the request to its token limit."""
        return bool(self.at_limit(np.array([slot]))[0])

    def at_limit(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tell of each slot whether the planned steps bring its request to its token limit."""
        is_full: NDArray[np.bool_] = (
            self._state[kernels.TOKENS, slots] >= self._state[kernels.LIMIT, slots]
        )
        return is_full

    def past_tokens(self, plan: StepPlan) -> NDArray[np.int64]:
        """Return [n] the tokens computed before each entry of the latest plan or the one before."""
        return self._buffers[(plan.step - 1) & 1].past[: plan.slots.size]

    def emits(self, plan: StepPlan) -> NDArray[np.bool_]:
        """Tell of each entry of the latest plan whether it brings a token."""
        state = self._state
        pending = state[kernels.TOKENS, plan.slots] - state[kernels.COMPUTED, plan.slots]
        does_emit: NDArray[np.bool_] = (pending == 1) & (plan.num_tokens > 0)
        return does_emit

    def sync(
        self,
        slots: NDArray[np.int64],
        num_computed_tokens: NDArray[np.int64],
        num_tokens: NDArray[np.int64],
    ) -> None:
        """Take the state from an engine that keeps its own: exactly `slots` run, with so many
        tokens computed of so many; all others wait with nothing computed. O(R)."""
        state, active = self._state, self._order[: self._counters[0]]
        state[kernels.IS_RUNNING, active] = 0
        state[kernels.COMPUTED, active] = 0
        state[kernels.IS_RUNNING, slots] = 1
        state[kernels.COMPUTED, slots] = num_computed_tokens
        state[kernels.TOKENS, slots] = num_tokens
        held = state[kernels.BLOCKS, active] * (1 - state[kernels.IS_RUNNING, active])
        self._counters[1] += held.sum()
        state[kernels.BLOCKS, active] -= held

    def set_verify_lengths(self, slots: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Set the draft tokens that each request's next decode verifies, >= 0."""
        if lengths.size and lengths.min() < 0:
            raise ValueError(f"a verify length is {lengths.min()}; it must not be negative")
        self._state[kernels.VERIFY, slots] = lengths

    def plan(self) -> StepPlan:
        """Plan the next step from the predicted state. O(R)."""
        buffer = self._buffers[self._step & 1]
        self._step += 1
        self._run(buffer)
        facts = self._facts
        self._release(int(facts[kernels.NUM_FREED]))
        num_decodes = int(facts[kernels.NUM_DECODES])
        count = num_decodes + int(facts[kernels.NUM_CHUNKS])
        num_forced = int(facts[kernels.NUM_FORCED])
        self.num_forced += num_forced
        return StepPlan(
            step=self._step,
            slots=buffer.slots[:count],
            num_tokens=buffer.num_tokens[:count],
            num_decodes=num_decodes,
            decode_ns=int(facts[kernels.DECODE_NS]),
            prefill_ns=int(facts[kernels.PREFILL_NS]) if count > num_decodes else 0,
            num_forced=num_forced,
            preempted=buffer.preempted[: int(facts[kernels.NUM_PREEMPTED])],
        )

    def apply_emitted(self, slots: NDArray[np.int64], num_emitted: NDArray[np.int64]) -> None:
        """The facts of a decode step: tokens that each request emitted, >= 1; one was predicted."""
        if num_emitted.size and num_emitted.min() < 1:
            raise ValueError(f"a request emitted {num_emitted.min()} tokens; at least 1 is certain")
        state = self._state
        room = state[kernels.LIMIT, slots] - state[kernels.TOKENS, slots]
        extra = np.minimum(num_emitted - 1, room)
        state[kernels.TOKENS, slots] += extra
        # Who lost its KV meanwhile has computed nothing.
        state[kernels.COMPUTED, slots] += extra * state[kernels.IS_RUNNING, slots]

    def finish(self, request_id: RequestId) -> None:
        """The request ended: finished, or aborted. Unknown ids are ignored."""
        slot = self._slot_of.pop(request_id, None)
        if slot is not None:
            self._state[kernels.IS_GONE, slot] = 1

    def repair(self, plan: StepPlan) -> int:
        """Take requests that ended out of a plan that was already made; return how many."""
        gone = self._state[kernels.IS_GONE, plan.slots] & (plan.num_tokens > 0)
        num_gone = int(np.count_nonzero(gone))
        if num_gone:
            plan.num_tokens[gone.astype(np.bool_)] = 0
            self.num_repaired += num_gone
        return num_gone

    def can_observe(self, plan: StepPlan) -> bool:
        """Tell whether what `observe` needs of `plan` is still held."""
        return self._step - plan.step < len(self._buffers)

    def observe(self, plan: StepPlan, step_ns: int) -> None:
        """Learn from how long a planned step took, while `can_observe`."""
        if not plan.slots.size or step_ns <= 0:
            return
        buffer = self._buffers[(plan.step - 1) & 1]
        if plan.num_decodes == plan.slots.size:
            self.decode_cost.observe(step_ns / NS, int(buffer.decode_tokens), int(buffer.decode_kv))
            return
        base = self.prefill_cost.base
        step_parts(
            base.knot_tokens,
            base.knot_ns,
            base.coefficients,
            plan.num_tokens[plan.num_decodes :],
            buffer.past[plan.num_decodes : plan.slots.size],
            int(buffer.decode_tokens),
            self._prefill_parts,
        )
        self.prefill_cost.learn(self._prefill_parts, step_ns - plan.decode_ns)

    def validate(self) -> None:
        """Check the state against itself. O(R). Raises InvariantError."""
        active = self._order[: self._counters[0]]
        state = self._state[:, active]
        held = int(state[kernels.BLOCKS].sum())
        if held + int(self._counters[1]) != self._kv_blocks:
            raise InvariantError(
                f"{held} held and {self._counters[1]} free KV blocks are not {self._kv_blocks}"
            )
        if self._counters[1] < 0:
            raise InvariantError(f"{self._counters[1]} KV blocks are free")
        alive = state[:, state[kernels.IS_GONE] == 0]
        if (alive[kernels.COMPUTED] >= alive[kernels.TOKENS]).any():
            raise InvariantError("a request has computed all its tokens and emitted none")
        if (alive[kernels.TOKENS] > alive[kernels.LIMIT]).any():
            raise InvariantError("a request is longer than its limit")
        if alive.shape[1] != len(self._slot_of):
            raise InvariantError(f"{alive.shape[1]} slots hold {len(self._slot_of)} requests")

    def _run(self, buffer: "_PlanBuffer") -> None:
        prefill = self.prefill_cost.arrays
        curve = self.decode_cost.curve
        kernels.plan_step(
            self._state,
            self._order,
            self._counters,
            self._limits,
            self._bounds,
            self._weights,
            self._deficits,
            prefill.knot_tokens,
            prefill.knot_ns,
            prefill.coefficients,
            curve.tier_tokens,
            curve.tier_ns,
            curve.slope_ns,
            self.decode_cost.coefficients,
            self._candidates,
            self._costs,
            self._bucket_facts,
            buffer.slots,
            buffer.num_tokens,
            buffer.past,
            self._freed,
            buffer.preempted,
            self._facts,
            self._budget_ns,
        )
        buffer.decode_tokens = self._facts[kernels.DECODE_TOKENS]
        buffer.decode_kv = self._facts[kernels.DECODE_KV]

    def _release(self, num_freed: int) -> None:
        for slot in self._freed[:num_freed].tolist():
            self._id_of[slot] = None
            self._state[kernels.IS_GONE, slot] = 0
            self._free_slots.append(slot)

    def _warm_up(self) -> None:
        """Compile (or load) every kernel now: no step must wait for it."""
        self._run(self._buffers[0])
        base, buffer = self.prefill_cost.base, self._buffers[0]
        step_parts(
            base.knot_tokens,
            base.knot_ns,
            base.coefficients,
            buffer.num_tokens[:0],
            buffer.past[:0],
            0,
            self._prefill_parts,
        )
        curve_ns(*self.decode_cost.curve.arrays(), 1)
        OnlineFactors(2).observe(np.ones(2), 2.0)


class _PlanBuffer:
    """Arrays of one plan, and what `observe` needs to know of it."""

    __slots__ = ("decode_kv", "decode_tokens", "num_tokens", "past", "preempted", "slots")

    def __init__(self, max_requests: int) -> None:
        self.slots = np.zeros(max_requests, dtype=np.int64)
        self.num_tokens = np.zeros(max_requests, dtype=np.int64)
        self.past = np.zeros(max_requests, dtype=np.int64)
        self.preempted = np.zeros(max_requests, dtype=np.int64)
        self.decode_tokens = 0.0
        self.decode_kv = 0.0
