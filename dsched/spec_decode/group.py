"""One budget for a whole EP group.

The ranks of a group step together: the slowest rank's time is everybody's. A rank that plans alone
trims tokens although the others keep it waiting anyway, or makes the others wait for tokens that
pay only at home. So the ranks choose one number together, the tokens of the largest verify batch,
which maximises the tokens that *all* emit a second; every rank then fills its batch up to it.

Each rank shares a row of integers (`summarise`): how many tokens it has and how much survival they
hold, in bins. `plan_group` is a pure function of all rows, in integers, so every rank that holds
the same rows derives the same plan bit for bit, whatever the order they arrived in; or one rank
plans and the others take its plan.

`GroupAgreement` waits for the rows. A rank that does not answer in time is not waited for: this
rank plans alone until the silent one speaks again. Rows of another membership epoch are dropped.
Verify lengths may differ between ranks that disagree; no collective operation depends on them.

The rows must come from confidences of two steps ago, as the history of `plan_verify_lengths`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from zlib import crc32

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.costs import StepCostCurve
from dsched.jit import kernel
from dsched.spec_decode.kernels import ONE, TIE_GAIN
from dsched.spec_decode.lengths import CostTable, cost_table, survival_units

NUM_BINS: Final = 16
"""Bins of survival in a row. More describe a rank better and make the message longer."""

_SUM_SHIFT: Final = 14
"""Survival sums are shared in units of 2**-16: 65 536 tokens then fit in 32 bits."""
GROUP_ONE: Final = ONE >> _SUM_SHIFT

_EPOCH, _STEP, _RANK, _CURVE, _REQUESTS, _OTHER, _DRAFT_NS, _HEAD = range(8)
ROW_LENGTH: Final = _HEAD + 2 * NUM_BINS
"""Integers that a rank shares each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The largest verify batch of the next step, the same for all ranks of an EP group."""

    max_batch_tokens: int
    """Tokens a rank may compute in the step, prefill and verify together."""
    draft_gain: float
    """Expected emitted tokens a second of the group with drafting, relative to without, minus 1."""
    step: int
    epoch: int
    """Membership epoch this plan was made for."""

    def budget(self, *, num_requests: int, num_other_tokens: int = 0) -> int:
        """Return what a rank may verify: the `budget` of its `plan_verify_lengths`."""
        return max(self.max_batch_tokens - num_requests - num_other_tokens, 0)


def summarise(
    history: ArrayLike,
    *,
    step_cost: StepCostCurve,
    step: int,
    epoch: int,
    dp_rank: int,
    num_other_tokens: int = 0,
    acceptance: ArrayLike | None = None,
    draft_seconds: float | None = None,
) -> NDArray[np.int64]:
    """Return what a rank shares, [ROW_LENGTH]; arguments as of `plan_verify_lengths`.

    A rank that has nothing to verify gives a history of no rows.
    """
    units = survival_units(history, acceptance=acceptance)
    num_requests = units.shape[1]
    draft_ns = step_cost.overhead(num_requests) if draft_seconds is None else draft_seconds * 1e9
    row = np.zeros(ROW_LENGTH, dtype=np.int64)
    row[_EPOCH], row[_STEP], row[_RANK], row[_CURVE] = epoch, step, dp_rank, curve_id(step_cost)
    row[_REQUESTS], row[_OTHER] = num_requests, num_other_tokens
    row[_DRAFT_NS] = round(draft_ns)
    survival = units.ravel().astype(np.int64)
    bins = np.minimum((ONE - survival) * NUM_BINS // ONE, NUM_BINS - 1)
    sums = row[_HEAD + NUM_BINS :]
    row[_HEAD : _HEAD + NUM_BINS] = np.bincount(bins, minlength=NUM_BINS)
    np.add.at(sums, bins, survival)
    sums >>= _SUM_SHIFT
    return row


def curve_id(step_cost: StepCostCurve) -> int:
    """Return a number that tells curves apart: ranks with different costs cannot agree."""
    parts = (step_cost.tier_tokens, step_cost.tier_ns, np.float64(step_cost.slope_ns))
    return crc32(b"".join(np.ascontiguousarray(part).tobytes() for part in parts))


def plan_group(rows: ArrayLike, *, step_cost: StepCostCurve) -> GroupPlan:
    """Choose the batch that emits the most tokens a second, from the rows [D, ROW_LENGTH] of all
    ranks, in any order.

    Raises ValueError for rows of different steps, epochs or cost curves, or two of one rank.
    """
    table = np.ascontiguousarray(rows, dtype=np.int64)
    if table.ndim != 2 or table.shape[1] != ROW_LENGTH or not len(table):
        raise ValueError(f"rows have shape {table.shape}; they must be [ranks, {ROW_LENGTH}]")
    for column, name in ((_EPOCH, "epochs"), (_STEP, "steps"), (_CURVE, "cost curves")):
        values = np.unique(table[:, column])
        if len(values) > 1:
            raise ValueError(f"ranks plan for {name} {values.tolist()}; they must agree")
    if table[0, _CURVE] != curve_id(step_cost):
        raise ValueError(f"the ranks' cost curve {table[0, _CURVE]} is not this one")
    if len(np.unique(table[:, _RANK])) < len(table):
        raise ValueError(f"two rows are of one rank: {sorted(table[:, _RANK].tolist())}")
    counts = table[:, _HEAD : _HEAD + NUM_BINS]
    base = table[:, _REQUESTS] + table[:, _OTHER]
    most = int((base + counts.sum(axis=1)).max())
    cost = cost_table(step_cost, most)
    num_requests = int(table[:, _REQUESTS].sum())
    batch, gain = most, 0.0
    if num_requests > 0 and not step_cost.is_flat:
        batch, gain = _best_batch(table, counts, base, cost)
    return GroupPlan(
        max_batch_tokens=batch,
        draft_gain=gain,
        step=int(table[0, _STEP]),
        epoch=int(table[0, _EPOCH]),
    )


def _best_batch(
    table: NDArray[np.int64], counts: NDArray[np.int64], base: NDArray[np.int64], cost: CostTable
) -> tuple[int, float]:
    """The best batch and what drafting gains."""
    requests_units = int(table[:, _REQUESTS].sum()) * GROUP_ONE
    draft_ns = int(table[:, _DRAFT_NS].max())
    arguments = (
        np.ascontiguousarray(counts),
        np.ascontiguousarray(table[:, _HEAD + NUM_BINS :]),
        base,
        requests_units,
        cost.cost_ns,
        cost.tier_end,
    )
    batch, rate = best_batch(*arguments, draft_ns)
    gain = rate * float(cost.cost_ns[base.max()]) / requests_units - 1.0
    if gain <= 0.0 and draft_ns > 0:
        # These tokens are drafted already; only the cost of the next draft can still be saved.
        batch, _ = best_batch(*arguments, 0)
    return batch, gain


@kernel
def best_batch(
    counts: NDArray[np.int64],
    sums: NDArray[np.int64],
    base: NDArray[np.int64],
    requests_units: int,
    cost_ns: NDArray[np.float64],
    tier_end: NDArray[np.int64],
    draft_ns: int,
) -> tuple[int, float]:
    """The largest batch B that maximises the group's rate, and that rate in units a nanosecond.

    `counts`, `sums` [D, N] tokens and survival of each bin, best first; `base` [D] tokens without
    drafts. Rank d verifies its best B - base[d] tokens; inside a bin all count alike. Only the end
    of each tier is tried; of equal batches the smallest wins. O(tiers * D).
    """
    num_ranks, num_bins = counts.shape
    least = base.max()
    most = (base + counts.sum(axis=1)).max()
    # Where each rank stands while the batch grows.
    bin_of = np.zeros(num_ranks, dtype=np.int64)
    tokens_before = base.copy()
    units_before = np.zeros(num_ranks, dtype=np.int64)
    best, best_batch_tokens = 0.0, least
    batch = min(tier_end[least], most)
    while True:
        total = requests_units
        for d in range(num_ranks):
            while bin_of[d] < num_bins and tokens_before[d] + counts[d, bin_of[d]] <= batch:
                tokens_before[d] += counts[d, bin_of[d]]
                units_before[d] += sums[d, bin_of[d]]
                bin_of[d] += 1
            total += units_before[d]
            if bin_of[d] < num_bins:
                b = bin_of[d]
                total += sums[d, b] * (batch - tokens_before[d]) // counts[d, b]
        rate = total / (cost_ns[batch] + draft_ns)
        if rate > best * TIE_GAIN:
            best, best_batch_tokens = rate, batch
        if batch >= most:
            return best_batch_tokens, best
        batch = min(tier_end[batch + 1], most)


class Verdict(StrEnum):
    """What a rank does in the step it asked for."""

    WAITING = "waiting"
    """Not all have answered and there is still time."""
    AGREED = "agreed"
    """Everybody's rows are here, or a plan was taken: use `GroupAgreement.plan`."""
    ALONE = "alone"
    """Somebody did not answer, or means another epoch: plan without the group."""


class GroupAgreement:
    """State: the rows of the steps that are being agreed on, and who is silent.

    Time comes in as `now_ns`. Bounded: keeps `MAX_STEPS` steps.
    """

    MAX_STEPS: Final = 4
    """Steps kept; rows of older ones are dropped. Two are in use with a lag of two steps."""

    def __init__(self, dp_ranks: Sequence[int], *, epoch: int, timeout_ns: int) -> None:
        """`timeout_ns`: how long a rank waits for the others from its own row on."""
        if not dp_ranks or len(set(dp_ranks)) < len(dp_ranks):
            raise ValueError(f"ranks {list(dp_ranks)} are not a group")
        if timeout_ns <= 0:
            raise ValueError(f"timeout_ns is {timeout_ns}; it must be positive")
        self.dp_ranks = tuple(sorted(dp_ranks))
        self.epoch = epoch
        self.silent: frozenset[int] = frozenset()
        """Ranks that did not answer in time and have not spoken since."""
        self.num_timeouts = 0
        self.num_stale_rows = 0
        self._timeout_ns = timeout_ns
        self._rows: dict[int, dict[int, NDArray[np.int64]]] = {}
        self._asked_ns: dict[int, int] = {}
        self._taken: dict[int, GroupPlan] = {}

    def apply(self, row: NDArray[np.int64]) -> None:
        """Note a rank's row. One of another epoch, or of a rank outside the group, is dropped."""
        if row.shape != (ROW_LENGTH,):
            raise ValueError(f"a row has shape {row.shape}; it must be ({ROW_LENGTH},)")
        dp_rank, step = int(row[_RANK]), int(row[_STEP])
        if int(row[_EPOCH]) != self.epoch or dp_rank not in self.dp_ranks:
            self.num_stale_rows += 1
            return
        self.silent -= {dp_rank}
        self._rows.setdefault(step, {})[dp_rank] = row
        for old in sorted(self._rows)[: -self.MAX_STEPS]:
            del self._rows[old]

    def apply_plan(self, plan: GroupPlan) -> None:
        """Take the plan that another rank made; dropped if it is of another epoch."""
        if plan.epoch != self.epoch:
            self.num_stale_rows += 1
            return
        self._taken[plan.step] = plan
        for old in sorted(self._taken)[: -self.MAX_STEPS]:
            del self._taken[old]

    def apply_epoch(self, epoch: int, dp_ranks: Sequence[int]) -> None:
        """The membership changed: forget everything that was meant for the old one."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} is not after {self.epoch}")
        self.epoch = epoch
        self.dp_ranks = tuple(sorted(dp_ranks))
        self.silent = frozenset()
        for memory in (self._rows, self._asked_ns, self._taken):
            memory.clear()

    def verdict(self, step: int, *, now_ns: int) -> Verdict:
        """Whether `step` is agreed on. The wait starts when a step is first asked for."""
        if step in self._taken or len(self._rows.get(step, ())) == len(self.dp_ranks):
            return Verdict.AGREED
        if self.silent:
            return Verdict.ALONE
        asked_ns = self._asked_ns.setdefault(step, now_ns)
        for old in sorted(self._asked_ns)[: -self.MAX_STEPS]:
            del self._asked_ns[old]
        if now_ns - asked_ns < self._timeout_ns:
            return Verdict.WAITING
        self.silent = frozenset(self.dp_ranks) - frozenset(self._rows.get(step, ()))
        self.num_timeouts += 1
        return Verdict.ALONE

    def plan(self, step: int, *, step_cost: StepCostCurve) -> GroupPlan:
        """The plan of a step that is agreed on. Raises ValueError for any other step."""
        if step in self._taken:
            return self._taken[step]
        rows = self._rows.get(step, {})
        missing = [dp_rank for dp_rank in self.dp_ranks if dp_rank not in rows]
        if missing:
            raise ValueError(f"step {step} is not agreed on: no row of ranks {missing}")
        return plan_group([rows[dp_rank] for dp_rank in self.dp_ranks], step_cost=step_cost)
