"""Divide one step's time between decodes and the prefill chunks of four length buckets.

In:  requests in arrival order (computed and missing tokens), a time budget, cost models, and what
     each bucket has saved.
Out: a `ChunkPlan`: tokens for each request, and the savings after it.

Decodes go first: a delayed decode is a gap in a stream that somebody reads. The rest of the
*time* goes to prefills. A fixed number of tokens would be wrong twice: after a long context the
same chunk takes three to ten times longer, so streams stutter; and a limit small enough for it
starves everybody else.

Prefills are sorted into buckets by the length of their sequence and share the time by deficit
round robin (Shreedhar and Varghese 1995), charged in estimated nanoseconds: a 600K-token prompt
pays for its context and short prompts do not queue behind it. Within a bucket the oldest goes
first. What a bucket cannot use goes round again. A budget below the smallest chunk still buys one
aligned chunk (`num_forced`), and turns are kept even then, so every request ends.

Pure: no clock, no randomness, no logging. O(R + J·C) for R requests, C of them with a chunk, and J
buckets.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.costs import DecodeCostModel, PrefillCostModel
from dsched.costs.samples import whole_numbers
from dsched.scheduler import kernels

NS = 1e9
MAX_BUCKETS = 16
"""More buckets than this share a step so thinly that none gets an aligned chunk."""
NO_TOKEN_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """How a step is divided. The defaults are DeepSeek's four buckets."""

    bucket_bounds: tuple[int, ...] = (16_384, 65_536, 262_144)
    """Sequence lengths in tokens at which the next bucket begins; increasing."""
    bucket_weights: tuple[float, ...] = (4.0, 3.0, 2.0, 1.0)
    """Shares of the prefill time, one a bucket, positive."""
    alignment: int = 64
    """Chunks are multiples of this many tokens, except a request's last. Below: kernels run partly
    empty tiles. Above: the budget is used coarsely."""
    max_step_tokens: int = NO_TOKEN_LIMIT
    """Tokens of a step that the engine has buffers for."""

    def __post_init__(self) -> None:
        bounds, weights = self.bucket_bounds, self.bucket_weights
        if len(weights) != len(bounds) + 1 or len(weights) > MAX_BUCKETS:
            raise ValueError(
                f"{len(bounds)} bounds make {len(bounds) + 1} buckets (at most {MAX_BUCKETS}), "
                f"but {len(weights)} weights are given"
            )
        if any(left >= right for left, right in zip((0, *bounds), bounds, strict=False)):
            raise ValueError(f"bucket_bounds {bounds} must be increasing and positive")
        if not all(np.isfinite(weight) and weight > 0 for weight in weights):
            raise ValueError(f"bucket_weights {weights} must be positive: no bucket may starve")
        if self.alignment < 1:
            raise ValueError(f"alignment is {self.alignment}; it must be at least 1 token")
        if self.max_step_tokens < 1:
            raise ValueError(f"max_step_tokens is {self.max_step_tokens}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkPlan:
    """Tokens to compute in one step."""

    num_tokens: NDArray[np.int64]
    """[R] for each request as given; 0: it does not run in this step."""
    decode_seconds: float
    """Estimated time of the decodes."""
    prefill_seconds: float
    """Estimated time of the chunks; with no decode in the step, its fixed time too."""
    unused_seconds: float
    """Budget that nobody could use; 0 when the step is over it."""
    num_forced: int
    """Chunks granted beyond the budget because the smallest chunk costs more than it leaves."""
    saved_ns: NDArray[np.float64]
    """[J] what each bucket has saved; to be given to the next plan."""


def plan_chunks(
    num_past_tokens: ArrayLike,
    num_remaining_tokens: ArrayLike,
    *,
    budget_seconds: float,
    prefill_cost: PrefillCostModel,
    decode_cost: DecodeCostModel,
    rule: ChunkRule | None = None,
    saved_ns: NDArray[np.float64] | None = None,
) -> ChunkPlan:
    """Give every decode its token, then the rest of the budget to prefills by bucket.

    `num_past_tokens` [R] computed tokens >= 0 and `num_remaining_tokens` [R] >= 1, in arrival
    order; a request with one token left and computed ones is a decode. Raises ValueError for
    anything else.

    >>> prefill = PrefillCostModel.from_coefficients(
    ...     fixed_s=16.6e-3, token_s=83.6e-6, attention_s=1.67e-10
    ... )
    >>> from dsched.costs import StepCostCurve
    >>> decode = DecodeCostModel.from_curve(StepCostCurve.from_samples([1, 256], [0.015, 0.03]))
    >>> plan = plan_chunks(
    ...     [131_072], [500_000], budget_seconds=0.2, prefill_cost=prefill, decode_cost=decode
    ... )
    >>> plan.num_tokens.tolist()
    [1728]
    """
    past = whole_numbers(num_past_tokens, "num_past_tokens", minimum=0)
    remaining = whole_numbers(num_remaining_tokens, "num_remaining_tokens", minimum=1)
    if len(past) != len(remaining):
        raise ValueError(f"{len(past)} contexts have {len(remaining)} missing tokens")
    check_budget(budget_seconds)
    rule = ChunkRule() if rule is None else rule
    deficits = check_saved(saved_ns, num_buckets=len(rule.bucket_weights))

    num_tokens = np.zeros(len(past), dtype=np.int64)
    decodes = np.flatnonzero((remaining == 1) & (past > 0))[: rule.max_step_tokens]
    num_tokens[decodes] = 1
    decode_ns = 0.0
    if len(decodes):
        num_kv_tokens = int((past[decodes] + 1).sum())
        decode_ns = decode_cost.predict(len(decodes), num_kv_tokens) * NS
    prefills = np.flatnonzero((remaining > 1) | (past == 0))
    prefill_ns, num_forced = _grant(
        num_tokens,
        prefills,
        past[prefills],
        remaining[prefills],
        cost=prefill_cost,
        rule=rule,
        deficits=deficits,
        decode_ns=decode_ns,
        budget_ns=budget_seconds * NS,
        num_decode_tokens=len(decodes),
    )
    return ChunkPlan(
        num_tokens=num_tokens,
        decode_seconds=decode_ns / NS,
        prefill_seconds=prefill_ns / NS,
        unused_seconds=max(0.0, budget_seconds - (decode_ns + prefill_ns) / NS),
        num_forced=num_forced,
        saved_ns=deficits,
    )


def _grant(
    num_tokens: NDArray[np.int64],
    prefills: NDArray[np.int64],
    past: NDArray[np.int64],
    remaining: NDArray[np.int64],
    *,
    cost: PrefillCostModel,
    rule: ChunkRule,
    deficits: NDArray[np.float64],
    decode_ns: float,
    budget_ns: float,
    num_decode_tokens: int,
) -> tuple[float, int]:
    """Write the prefills' chunks into `num_tokens`, charge `deficits`; return time and forced."""
    if not len(prefills):
        deficits[:] = 0.0
        return 0.0, 0
    arrays = cost.arrays
    bounds = np.array(rule.bucket_bounds, dtype=np.int64)
    weights = np.array(rule.bucket_weights, dtype=np.float64)
    buckets = np.searchsorted(bounds, past + remaining, side="right").astype(np.int64)
    chunks = np.zeros(len(prefills), dtype=np.int64)
    fixed_ns = 0.0 if num_decode_tokens else float(arrays.knot_ns[0])
    available = budget_ns - decode_ns - fixed_ns
    quantum = max(available, kernels.MIN_QUANTUM_SHARE * budget_ns)
    kernels.credit(deficits, weights, buckets, len(prefills), quantum)
    spent, num_forced = kernels.grant_chunks(
        arrays.knot_tokens,
        arrays.knot_ns,
        arrays.coefficients,
        weights,
        deficits,
        past,
        remaining,
        buckets,
        chunks,
        np.zeros(len(prefills)),
        np.zeros(len(weights), dtype=np.int64),
        len(prefills),
        num_decode_tokens,
        rule.max_step_tokens,
        rule.alignment,
        available,
        kernels.MAX_SAVED_BUDGETS * quantum,
    )
    num_tokens[prefills] = chunks
    return (spent + fixed_ns if chunks.any() else 0.0), int(num_forced)


def check_budget(budget_seconds: float) -> None:
    """Raise ValueError unless a step may take this long."""
    if not (np.isfinite(budget_seconds) and budget_seconds > 0):
        raise ValueError(f"budget_seconds is {budget_seconds}; it must be positive and finite")


def check_saved(saved_ns: NDArray[np.float64] | None, *, num_buckets: int) -> NDArray[np.float64]:
    """Return a copy of the buckets' savings, zeros for none. Raises ValueError if wrong."""
    if saved_ns is None:
        return np.zeros(num_buckets)
    if saved_ns.shape != (num_buckets,) or not np.isfinite(saved_ns).all():
        raise ValueError(f"saved_ns {saved_ns} must be {num_buckets} finite numbers")
    return saved_ns.astype(np.float64)
