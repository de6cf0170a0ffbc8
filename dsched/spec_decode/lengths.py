"""Decide how many draft tokens of each request the target model verifies in this step.

In:  the confidences of the draft tokens [R, K], those of two steps ago, and what a step costs.
Out: a `VerifyPlan`: one verify length a request.

Verifying a token costs step time and pays with the probability that it and all before it are
accepted: its survival. The best total, the **budget**, maximises expected emitted tokens a second,

    (R + sum of the n best survivals) / (seconds(other tokens + R + n) + draft seconds),

and goes to the n best survivals; equal ones by position, then request. A request's survivals
never rise with the position, so each request gets a prefix of its draft.

**Lossless.** Sampling keeps the target's distribution only if no token's admission depends on the
token itself (or on what was drafted after it); a confidence at position k is computed from the
tokens before k, and betrays those at and behind it. So the budget must not be searched over this
step's survivals and then applied to the same tokens. Three ways around it:

- `asynchronous` (default): the budget comes from confidences of two steps ago, the choice among
  this step's tokens then keeps it. A token's rank depends on what precedes it only. (DSpark, §5.2.)
- `synchronous`: take this step's tokens in order and stop at the first that lowers the rate
  (DSpark, Algorithm 1). On a staircase that rule ends on the first step of the stairs, so it runs
  on the convex minorant of the cost and fills the tier it ends in.
- `fixed`: a constant length, for comparison.

A step that nothing older is known of is planned synchronously, whatever was asked.

**Cost.** Times are looked up at the next graph tier. Where attention makes long contexts dearer
(`ContextCost`), tokens are ranked by survival a nanosecond, and a share of the budget is still
given by survival alone, so that long contexts go on speculating. Drafting has a cost too: the
plan says what it gains (`draft_gain`), and below zero the next step is better not drafted.

Pure: no clock, no randomness, no logging. O(R * K), with context cost O(R * K * log(R * K)).
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.costs import StepCostCurve
from dsched.spec_decode import kernels
from dsched.spec_decode.kernels import MAX_TOKENS, OK, ONE

NS_PER_SECOND = 1e9


class VerifyMode(StrEnum):
    """Where the budget comes from."""

    ASYNCHRONOUS = "asynchronous"
    """Unconstrained search over confidences of two steps ago."""
    SYNCHRONOUS = "synchronous"
    """Early stop over the confidences of this step."""
    FIXED = "fixed"
    """The same length for every request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ContextCost:
    """What attention over long contexts adds to the step cost curve.

    A step costs `seconds(B)` plus `seconds_per_kv_token` for every KV token of every token
    verified: the curve holds the part that does not depend on the context.
    """

    kv_tokens: ArrayLike
    """[R] KV tokens of each request."""
    seconds_per_kv_token: float
    """Attention time of one verified token for each KV token of its request."""
    fairness: float = 0.1
    """Share of the budget, 0..1, that is given by survival alone, without regard to the context.
    At 0 the longest requests may stop speculating; at 1 they cost the others throughput."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyPlan:
    """How many draft tokens of each request to verify in one step of one DP rank."""

    lengths: NDArray[np.int32]
    """[R] verify lengths, 0..K."""
    budget: int
    """Draft tokens that were to be verified; `lengths` sum to it unless fewer were drafted."""
    expected_emitted: float
    """Tokens that the step is expected to emit: accepted ones and a target token a request."""
    expected_seconds: float
    """Time the step is expected to take, drafting included."""
    draft_gain: float
    """Expected emitted tokens a second with drafting, relative to without, minus 1. Below zero,
    do not draft for the next step."""
    is_cost_flat: bool
    """The cost curve does not rise, so it cannot say what a token costs; nothing was trimmed."""
    mode: VerifyMode
    """How the budget was found."""
    epoch: int
    """Membership epoch this plan was made for."""


class _ContextArrays(NamedTuple):
    token_ns: NDArray[np.float64]
    """[R] time that one more token of the request costs."""
    kv_ns: NDArray[np.float64]
    """[R] the part of it that attention over the context costs."""
    fairness: float


class CostTable(NamedTuple):
    """A step cost curve as the kernels read it."""

    cost_ns: NDArray[np.float64]
    """[B + 1] step time of 0..B tokens; 0 for none."""
    tier_end: NDArray[np.int64]
    """[B + 1] the last token count, up to B, that costs the same."""


class _Survival(NamedTuple):
    units: NDArray[np.int32]
    """[K, R] survivals in units of 2**-30."""
    histogram: NDArray[np.int64]


class _Cost(NamedTuple):
    """What this step costs, as the kernels need to know it."""

    base_tokens: int
    """Tokens of the step without drafts."""
    cost_ns: NDArray[np.float64]
    """[B + 1] step time of 0..B tokens."""
    tier_end: NDArray[np.int64]
    """[B + 1] the last token count, up to B, that costs the same."""
    draft_ns: float
    context: _ContextArrays | None


class _Decision(NamedTuple):
    budget: int
    draft_gain: float
    lengths: NDArray[np.int32]
    num_tokens: int
    """Sum of `lengths`."""
    units: int
    """Sum of the survivals of the chosen tokens."""


# Empty arrays hold nothing to change. Marked read-only they would be another type for numba, and
# every kernel would be compiled twice.
_NO_COUNTS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
_NO_ACCEPTANCE: NDArray[np.float64] = np.zeros(0, dtype=np.float64)


def plan_verify_lengths(
    confidence: ArrayLike,
    *,
    step_cost: StepCostCurve,
    num_other_tokens: int = 0,
    history: ArrayLike | None = None,
    mode: VerifyMode | str = VerifyMode.ASYNCHRONOUS,
    acceptance: ArrayLike | None = None,
    num_drafts: ArrayLike | None = None,
    context: ContextCost | None = None,
    draft_seconds: float | None = None,
    budget: int | None = None,
    fixed_length: int | None = None,
    epoch: int = 0,
) -> VerifyPlan:
    """Choose the verify lengths that emit the most tokens a second.

    `confidence` [R, K] in [0, 1]: probability that draft token k of request r is accepted given
    that those before it were. `num_other_tokens` are computed in the same step for requests that
    are not verified (prefill chunks).
    `history` [R, K]: the confidences of the same requests two steps ago, NaN where there are none;
    those start from `acceptance` (a number or [K]; default: the mean of the history). Several
    steps, [H, R, K], make the budget of small batches steadier.
    `num_drafts` [R]: draft tokens that exist, where a request has fewer than K.
    `draft_seconds`: time to draft for these R requests (default: the curve's part that costs per
    request). `budget` sets the number of draft tokens instead of searching it, e.g. what an EP
    group agreed on. `fixed_length` is the length of the mode `fixed` (default K).

    At most 65 535 draft tokens. Raises ValueError, with the value and the rule.

    >>> curve = StepCostCurve.from_samples(range(1, 65), [(10 + b / 2) / 1e3 for b in range(1, 65)])
    >>> confidence = [[0.9, 0.8, 0.5], [0.6, 0.5, 0.9], [0.95, 0.9, 0.9]]
    >>> plan = plan_verify_lengths(confidence, step_cost=curve, history=confidence)
    >>> plan.budget, plan.lengths.tolist()
    (8, [3, 2, 3])
    """
    matrix = _as_matrix(confidence, "confidence")
    num_requests, num_positions = matrix.shape
    if type(mode) is not VerifyMode:
        mode = VerifyMode(mode)
    if matrix.size > MAX_TOKENS:
        raise ValueError(
            f"{num_requests} requests of {num_positions} draft tokens are more than the "
            f"{MAX_TOKENS} tokens that one plan can hold"
        )
    counts = _as_counts(num_drafts, num_requests, num_positions)
    cost = _make_cost(step_cost, num_requests, num_positions, num_other_tokens, draft_seconds)
    if context is not None and matrix.size:
        cost = cost._replace(context=_context_arrays(context, num_requests, num_positions, cost))
    older = _older(history, acceptance, matrix)

    made = None
    if budget is None and mode is VerifyMode.FIXED:
        made = _plan_fixed(matrix, counts, fixed_length, cost)
    elif budget is not None or step_cost.is_flat or not matrix.size:
        made = _plan_given(matrix, counts, budget, cost)
    elif mode is VerifyMode.ASYNCHRONOUS and older is not None:
        made = _plan_asynchronous(matrix, *older, counts, cost)
    if made is None:
        mode = VerifyMode.SYNCHRONOUS
        made = _plan_synchronous(matrix, counts, cost)
    made.lengths.flags.writeable = False
    return VerifyPlan(
        lengths=made.lengths,
        budget=made.budget,
        expected_emitted=num_requests + made.units / ONE,
        expected_seconds=(_step_ns(made, cost) + cost.draft_ns) / NS_PER_SECOND,
        draft_gain=made.draft_gain,
        is_cost_flat=step_cost.is_flat,
        mode=mode,
        epoch=epoch,
    )


def _plan_asynchronous(
    confidence: NDArray[Any],
    history: NDArray[Any],
    acceptance: NDArray[np.float64],
    counts: NDArray[np.int64],
    cost: _Cost,
) -> _Decision | None:
    """None if nothing is known of any request."""
    if cost.context is not None:
        return _plan_by_density(confidence, history, acceptance, counts, cost)
    lengths = np.empty(len(confidence), dtype=np.int32)
    budget, wrong, gain, num_tokens, units = kernels.plan_asynchronous(
        confidence,
        history,
        acceptance,
        counts,
        cost.base_tokens,
        cost.cost_ns,
        cost.tier_end,
        cost.draft_ns,
        lengths,
    )
    if budget == kernels.WRONG_CONFIDENCE:
        raise _wrong_confidence("confidence", confidence, wrong, len(confidence))
    if budget != kernels.WRONG_HISTORY:
        return _Decision(budget, gain, lengths, num_tokens, units)
    if acceptance.size or not np.isnan(history.flat[wrong]):
        raise _wrong_confidence("history", history, wrong, len(confidence))
    # A gap: looking for one beforehand would cost every plan.
    mean = _mean_confidence(history)
    return mean if mean is None else _plan_asynchronous(confidence, history, mean, counts, cost)


def _plan_by_density(
    confidence: NDArray[Any],
    history: NDArray[Any],
    acceptance: NDArray[np.float64],
    counts: NDArray[np.int64],
    cost: _Cost,
) -> _Decision | None:
    """The asynchronous plan where contexts make tokens of different requests differently dear."""
    start = acceptance if acceptance.size else _mean_confidence(history)
    if start is None:
        return None
    older, _ = _survival("history", history, counts, start)
    survival = _survival("confidence", confidence, counts)
    budget, rate = _search_by_density(older, cost, cost.draft_ns)
    gain = rate / _rate_without(len(confidence), cost) - 1.0
    if gain <= 0.0 and cost.draft_ns > 0.0:
        budget, _ = _search_by_density(older, cost, 0.0)
    return _Decision(budget, gain, *_spend(survival, budget, cost))


def _search_by_density(units: NDArray[np.int32], cost: _Cost, draft_ns: float) -> tuple[int, float]:
    assert cost.context is not None
    return kernels.budget_by_density(
        units,
        cost.context.token_ns,
        cost.context.kv_ns,
        cost.base_tokens,
        cost.cost_ns,
        draft_ns,
    )


def _plan_synchronous(
    confidence: NDArray[Any], counts: NDArray[np.int64], cost: _Cost
) -> _Decision:
    survival = _survival("confidence", confidence, counts)
    budget = kernels.early_stop(
        survival.units, cost.base_tokens, cost.cost_ns, cost.tier_end, cost.draft_ns
    )
    return _with_gain(_Decision(budget, 0.0, *_spend(survival, budget, cost)), cost)


def _plan_given(
    confidence: NDArray[Any], counts: NDArray[np.int64], budget: int | None, cost: _Cost
) -> _Decision:
    """Spend `budget`, or verify all that was drafted."""
    survival = _survival("confidence", confidence, counts)
    if budget is None:
        budget = int((survival.units >= 0).sum())
    if budget < 0:
        raise ValueError(f"budget is {budget}; a count is not negative")
    return _with_gain(_Decision(budget, 0.0, *_spend(survival, budget, cost)), cost)


def _plan_fixed(
    confidence: NDArray[Any],
    counts: NDArray[np.int64],
    fixed_length: int | None,
    cost: _Cost,
) -> _Decision:
    units, _ = _survival("confidence", confidence, counts)
    num_positions = units.shape[0]
    length = num_positions if fixed_length is None else fixed_length
    if not 0 <= length <= num_positions:
        raise ValueError(f"fixed_length {length} is not in 0..{num_positions}")
    is_chosen = units[:length] >= 0
    lengths = is_chosen.sum(axis=0, dtype=np.int32)
    budget = int(lengths.sum())
    total = int(units[:length].sum(where=is_chosen, dtype=np.int64))
    return _with_gain(_Decision(budget, 0.0, lengths, budget, total), cost)


def _spend(survival: _Survival, budget: int, cost: _Cost) -> tuple[NDArray[np.int32], int, int]:
    """Give `budget` to the best tokens: lengths, tokens given, survivals they sum to."""
    lengths = np.empty(survival.units.shape[1], dtype=np.int32)
    if cost.context is None:
        return lengths, *kernels.select_best(*survival, budget, lengths)
    num_by_survival = int(cost.context.fairness * budget)
    return lengths, *kernels.select_by_density(
        *survival, cost.context.token_ns, budget, num_by_survival, lengths
    )


def _with_gain(made: _Decision, cost: _Cost) -> _Decision:
    """`made` with what drafting gains if every step were like this one."""
    num_requests = made.lengths.size
    if made.num_tokens == 0 and cost.draft_ns == 0.0:
        return made
    rate = (num_requests * ONE + made.units) / (_step_ns(made, cost) + cost.draft_ns)
    return made._replace(draft_gain=rate / _rate_without(num_requests, cost) - 1.0)


def _step_ns(made: _Decision, cost: _Cost) -> float:
    """Time of the step without drafting."""
    ns = float(cost.cost_ns[cost.base_tokens + made.num_tokens])
    if cost.context is not None:
        ns += float(cost.context.kv_ns @ (made.lengths + 1))
    return ns


def _rate_without(num_requests: int, cost: _Cost) -> float:
    """Units a nanosecond of a step that neither verifies nor drafts."""
    attention_ns = 0.0 if cost.context is None else float(cost.context.kv_ns.sum())
    return num_requests * ONE / (float(cost.cost_ns[cost.base_tokens]) + attention_ns)


def _make_cost(
    step_cost: StepCostCurve,
    num_requests: int,
    num_positions: int,
    num_other_tokens: int,
    draft_seconds: float | None,
) -> _Cost:
    if num_other_tokens < 0:
        raise ValueError(f"num_other_tokens is {num_other_tokens}; a count is not negative")
    if draft_seconds is None:
        draft_ns = float(step_cost.overhead(num_requests))
    elif draft_seconds >= 0.0:
        draft_ns = draft_seconds * NS_PER_SECOND
    else:
        raise ValueError(f"draft_seconds is {draft_seconds}; a time is not negative")
    base_tokens = num_other_tokens + num_requests
    table = cost_table(step_cost, base_tokens + num_requests * num_positions)
    return _Cost(base_tokens, table.cost_ns, table.tier_end, draft_ns, None)


def _as_matrix(values: ArrayLike, name: str) -> NDArray[Any]:
    """`values` as the kernels take them: C-ordered float32 or float64 [R, K]."""
    matrix = np.asarray(values, order="C")
    if matrix.dtype.char not in "fd":
        matrix = matrix.astype(np.float64)
    if matrix.ndim != 2:
        raise ValueError(f"{name} has shape {matrix.shape}; it must be [requests, positions]")
    return matrix


def _as_steps(history: ArrayLike, confidence: NDArray[Any]) -> NDArray[Any]:
    """`history` [R, K] or [H, R, K] as [H * R, K]."""
    steps = np.asarray(history)
    if steps.shape == confidence.shape:
        return _as_matrix(steps, "history")
    if steps.ndim != 3 or steps.shape[1:] != confidence.shape or not len(steps):
        raise ValueError(f"history has shape {steps.shape} and confidence {confidence.shape}")
    if steps.size > MAX_TOKENS:
        raise ValueError(f"history holds {steps.size} tokens; {MAX_TOKENS} are the most")
    return _as_matrix(steps.reshape(len(steps) * len(confidence), confidence.shape[1]), "history")


def _as_counts(
    num_drafts: ArrayLike | None, num_requests: int, num_positions: int
) -> NDArray[np.int64]:
    if num_drafts is None:
        return _NO_COUNTS
    counts = np.ascontiguousarray(num_drafts, dtype=np.int64)
    if counts.shape != (num_requests,):
        raise ValueError(f"num_drafts has shape {counts.shape} for {num_requests} requests")
    for count in (counts.min(initial=0), counts.max(initial=0)):
        if not 0 <= count <= num_positions:
            raise ValueError(f"num_drafts holds {count}; 0..{num_positions} tokens are drafted")
    return counts


def _older(
    history: ArrayLike | None, acceptance: ArrayLike | None, confidence: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.float64]] | None:
    """What is known since earlier steps: history [H * R, K], and acceptance [K] for its gaps (empty
    where none was given). None if nothing was given."""
    if history is None and acceptance is None:
        return None
    if history is None:
        matrix: NDArray[Any] = np.full_like(confidence, np.nan)
    else:
        matrix = _as_steps(history, confidence)
    if acceptance is None:
        return matrix, _NO_ACCEPTANCE
    return matrix, _as_acceptance(acceptance, confidence)


def _as_acceptance(acceptance: ArrayLike, confidence: NDArray[Any]) -> NDArray[np.float64]:
    """[K] floats of a number or one number a position."""
    start = np.asarray(acceptance, dtype=np.float64)
    if start.shape not in ((), confidence.shape[1:]):
        raise ValueError(
            f"acceptance has shape {start.shape}; it must be a number or one for each of "
            f"{confidence.shape[1]} positions"
        )
    if not ((start >= 0.0) & (start <= 1.0)).all():
        raise ValueError(f"acceptance is {acceptance!r}; it must be in [0, 1]")
    return np.array(np.broadcast_to(start, confidence.shape[1:]))


def _mean_confidence(history: NDArray[Any]) -> NDArray[np.float64] | None:
    """[K] mean of each position over the requests that have a history; None if none has."""
    is_known = ~np.isnan(history)
    if not is_known.any():
        return None
    values = np.where(is_known, history, 0.0).astype(np.float64)
    num_known = is_known.sum(axis=0)
    overall = values.sum() / is_known.sum()
    mean: NDArray[np.float64] = np.where(
        num_known > 0, values.sum(axis=0) / np.maximum(num_known, 1), overall
    )
    return np.clip(mean, 0.0, 1.0)


def _survival(
    name: str,
    confidence: NDArray[Any],
    counts: NDArray[np.int64],
    acceptance: NDArray[np.float64] = _NO_ACCEPTANCE,
) -> _Survival:
    units = np.empty(confidence.shape[::-1], dtype=np.int32)
    histogram = np.zeros(kernels.num_bins(units.size), dtype=np.int64)
    wrong = kernels.fill_survival(confidence, acceptance, counts, units, histogram)
    if wrong != OK:
        raise _wrong_confidence(name, confidence, wrong, len(confidence))
    return _Survival(units, histogram)


def _wrong_confidence(name: str, values: NDArray[Any], index: int, num_requests: int) -> ValueError:
    row, position = divmod(index, values.shape[1])
    return ValueError(
        f"{name} of request {row % num_requests} at position {position} is "
        f"{values[row, position]}; it must be in [0, 1]"
    )


def _context_arrays(
    context: ContextCost, num_requests: int, num_positions: int, cost: _Cost
) -> _ContextArrays:
    kv_tokens = np.asarray(context.kv_tokens, dtype=np.float64)
    if kv_tokens.shape != (num_requests,):
        raise ValueError(f"kv_tokens has shape {kv_tokens.shape} for {num_requests} requests")
    if not (np.isfinite(kv_tokens) & (kv_tokens >= 0)).all():
        raise ValueError(f"kv_tokens holds {kv_tokens.min()}; counts are finite and not negative")
    seconds = context.seconds_per_kv_token
    if not (np.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds_per_kv_token is {seconds}; a time is not negative")
    if not 0.0 <= context.fairness <= 1.0:
        raise ValueError(f"fairness is {context.fairness}; it is a share, 0..1")
    kv_ns = kv_tokens * (seconds * NS_PER_SECOND)
    max_drafts = num_requests * num_positions
    rise_ns = cost.cost_ns[cost.base_tokens + max_drafts] - cost.cost_ns[cost.base_tokens]
    # Where neither part rises, all tokens cost the same: any positive number.
    return _ContextArrays(np.maximum(rise_ns / max_drafts + kv_ns, 1.0), kv_ns, context.fairness)


def cost_table(step_cost: StepCostCurve, max_tokens: int) -> CostTable:
    """What steps of up to `max_tokens` (and possibly more) tokens cost.

    Remembered for the curve, which is immutable: a table costs more than a plan.
    """
    return _cost_table(step_cost, 1 << max(max_tokens, 255).bit_length())


@lru_cache(maxsize=16)
def _cost_table(step_cost: StepCostCurve, max_tokens: int) -> CostTable:
    ns = step_cost.table_ns(max_tokens)
    last_of_tier = np.flatnonzero(np.append(np.diff(ns) != 0, True))
    tier_end = last_of_tier[np.searchsorted(last_of_tier, np.arange(max_tokens + 1))]
    cost_ns = ns.astype(np.float64)
    for array in (cost_ns, tier_end):
        array.flags.writeable = False
    return CostTable(cost_ns, tier_end)


def survival_units(history: ArrayLike, *, acceptance: ArrayLike | None = None) -> NDArray[np.int32]:
    """Return the survivals [K, R] of confidences [R, K], in units of 2**-30 (rounded down).

    NaN is replaced by `acceptance`, by default the mean of the others. Raises ValueError where
    nothing is known, or for what is not in [0, 1].
    """
    matrix = _as_matrix(history, "history")
    if not matrix.size:
        return np.zeros(matrix.shape[::-1], dtype=np.int32)
    start = _mean_confidence(matrix) if acceptance is None else _as_acceptance(acceptance, matrix)
    if start is None:
        raise ValueError("history holds only NaN and no acceptance was given")
    return _survival("history", matrix, _NO_COUNTS, start).units
