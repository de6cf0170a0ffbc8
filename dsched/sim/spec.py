"""A simulated drafter, and what verify-length policies gain with it.

Everything here is simulated. The confidence of draft position k is a logit around a mean that
depends on the position, with one part that belongs to the request (and drifts slowly) and one
that belongs to the token (and lasts over a few positions). The means are solved so that the
conditional acceptance equals Fig. 2 of the DSpark paper; the widths (.7 and 1.35) give its
ability to tell good tokens from bad. Whether a token is accepted is drawn with its confidence, so
confidences are perfectly calibrated unless a policy is shown distorted ones.

A policy's throughput is the expected number of emitted tokens over the time of the steps; all
policies see the same requests. The step cost curve is the truth, whatever a policy believes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dsched.costs import StepCostCurve
from dsched.rng import stream
from dsched.spec_decode import ContextCost, VerifyPlan, plan_verify_lengths
from dsched.spec_decode.group import plan_group, summarise
from dsched.spec_decode.memory import LAG_STEPS, ConfidenceHistory, DraftGate
from dsched.spec_decode.tracker import CurveTracker

ACCEPTANCE: Final = {
    "math": (0.906, 0.891, 0.888, 0.886, 0.888, 0.891, 0.883),
    "code": (0.887, 0.873, 0.861, 0.862, 0.859, 0.860, 0.852),
    "chat": (0.736, 0.739, 0.741, 0.745, 0.760, 0.767, 0.762),
}
"""Conditional acceptance of each draft position: DSpark paper, Fig. 2."""

REQUEST_WIDTH: Final = 0.7
TOKEN_WIDTH: Final = 1.35
REQUEST_MEMORY: Final = 0.98
"""Correlation of a request's part from one step to the next."""
TOKEN_MEMORY: Final = 0.5
"""Correlation of a token's part from one draft position to the next."""
CHURN: Final = 1.0 / 400.0
"""Share of the requests that end, and are replaced, in a step."""

PAPER_FITS: Final = {
    "v4flash-mixed": (15.24, 0.0285, 2.49, 0.0082),
    "v4flash-chat": (14.08, 0.0277, 0.0, 0.0023),
    "v4pro-mixed": (29.96, 0.0909, 9.44, 0.0),
    "v4pro-chat": (28.11, 0.0862, 1.57, 0.0),
}
"""Least-squares fits to the DSpark paper's Fig. 8: step ms, ms a token, draft ms, ms a request."""

MAX_TIER: Final = 8_192


def graph_tiers(max_tokens: int = MAX_TIER) -> list[int]:
    """Return graph shapes as engines capture them: every 8 tokens up to 256, 16 up to 512, 32 up
    to 1024, then 64.

    >>> graph_tiers(32)
    [8, 16, 24, 32]
    """
    steps = ((8, 0, 256), (16, 256, 512), (32, 512, 1024), (64, 1024, max_tokens))
    return [
        tokens
        for step, start, end in steps
        for tokens in range(start + step, min(end, max_tokens) + 1, step)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SpecCost:
    """What steps and drafts cost on one deployment."""

    name: str
    step_cost: StepCostCurve
    draft_base_seconds: float
    draft_request_seconds: float
    mixes: tuple[str, ...] = ("math", "code", "chat")
    """Kinds of request, in equal shares."""

    @classmethod
    def of_curve(cls, name: str, step_cost: StepCostCurve) -> "SpecCost":
        """Return a deployment whose draft cost is the curve's own part that costs per request."""
        last = int(step_cost.overhead_requests[-1]) if step_cost.overhead_requests.size else 1
        first_ns, last_ns = step_cost.overhead(1), step_cost.overhead(last)
        return cls(
            name=name,
            step_cost=step_cost,
            draft_base_seconds=first_ns / 1e9,
            draft_request_seconds=(last_ns - first_ns) / max(last - 1, 1) / 1e9,
        )

    def with_draft_seconds(self, seconds: float) -> "SpecCost":
        """Return the same deployment with another draft time, whatever the batch."""
        return replace(self, draft_base_seconds=seconds, draft_request_seconds=0.0)

    def draft_seconds(self, num_requests: int) -> float:
        """Return the time to draft for a batch."""
        return self.draft_base_seconds + self.draft_request_seconds * num_requests


def paper_cost(name: str) -> SpecCost:
    """Return one of `PAPER_FITS`, on graph tiers."""
    base_ms, token_ms, draft_ms, draft_request_ms = PAPER_FITS[name]
    tiers = graph_tiers()
    seconds = [(base_ms + token_ms * tokens) / 1e3 for tokens in tiers]
    return SpecCost(
        name=name,
        step_cost=StepCostCurve.from_samples(tiers, seconds, tiers=tiers),
        draft_base_seconds=draft_ms / 1e3,
        draft_request_seconds=draft_request_ms / 1e3,
        mixes=("chat",) if name.endswith("chat") else ("math", "code", "chat"),
    )


@lru_cache(maxsize=64)
def _mean_logits(mix: str, num_positions: int) -> tuple[float, ...]:
    """The means that give `ACCEPTANCE`, solved on a fixed sample of tokens."""
    rng = stream(0, f"spec-means-{mix}")
    num_samples = 40_000
    request = rng.normal(0.0, REQUEST_WIDTH, num_samples)
    token = rng.normal(0.0, TOKEN_WIDTH, num_samples)
    survival = np.ones(num_samples)
    means = []
    for k in range(num_positions):
        if k:
            token = _next_token(rng, token)
        low, high = -10.0, 10.0
        for _ in range(50):
            middle = (low + high) / 2
            confidence = _sigmoid(middle + request + token)
            too_low = (survival * confidence).sum() < ACCEPTANCE[mix][k] * survival.sum()
            low, high = (middle, high) if too_low else (low, middle)
        means.append(middle)
        survival = survival * _sigmoid(middle + request + token)
    return tuple(means)


class AcceptanceWorld:
    """Requests that draft, step by step."""

    def __init__(
        self,
        rng: np.random.Generator,
        *,
        num_requests: int,
        num_positions: int,
        mixes: Sequence[str],
    ) -> None:
        if not 1 <= num_positions <= 7:
            raise ValueError(f"num_positions is {num_positions}; acceptance is known for 1..7")
        self.num_requests = num_requests
        self.num_positions = num_positions
        self.mixes = tuple(mixes)
        self._rng = rng
        self._means = np.array([_mean_logits(mix, num_positions) for mix in mixes])
        self._mix = rng.integers(len(mixes), size=num_requests)
        self._request = rng.normal(0.0, REQUEST_WIDTH, num_requests)

    def draft(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the next step: confidences [R, K], draft tokens that would be accepted [R], and
        which requests are new [R]."""
        rng, count = self._rng, self.num_requests
        is_new = rng.random(count) < CHURN
        drift = rng.normal(0.0, REQUEST_WIDTH * np.sqrt(1.0 - REQUEST_MEMORY**2), count)
        fresh = rng.normal(0.0, REQUEST_WIDTH, count)
        self._request = np.where(is_new, fresh, REQUEST_MEMORY * self._request + drift)
        self._mix = np.where(is_new, rng.integers(len(self.mixes), size=count), self._mix)
        logits = np.empty((count, self.num_positions))
        token = rng.normal(0.0, TOKEN_WIDTH, count)
        for k in range(self.num_positions):
            if k:
                token = _next_token(rng, token)
            logits[:, k] = self._means[self._mix, k] + self._request + token
        confidence = _sigmoid(logits)
        is_kept = rng.random(confidence.shape) < confidence
        accepted = np.cumprod(is_kept, axis=1).sum(axis=1)
        return confidence, accepted, is_new


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftTrace:
    """Steps of one rank: what every policy of a comparison sees."""

    confidence: NDArray[np.float64]
    """[S, R, K]"""
    accepted: NDArray[np.int64]
    """[S, R] draft tokens that the target accepts if all are verified."""
    is_new: NDArray[np.bool_]
    """[S, R] the request is new in this step."""

    @property
    def history(self) -> NDArray[np.float64]:
        """[S, R, K] confidences `LAG_STEPS` ago; NaN for requests that were not there."""
        older = np.full_like(self.confidence, np.nan)
        older[LAG_STEPS:] = self.confidence[:-LAG_STEPS]
        for lag in range(LAG_STEPS):
            older[lag:][self.is_new[: len(older) - lag]] = np.nan
        return older


def draft_trace(
    seed: int,
    *,
    num_requests: int,
    num_steps: int,
    num_positions: int = 5,
    mixes: Sequence[str] = ("math", "code", "chat"),
    name: str = "spec",
) -> DraftTrace:
    """Return the steps of one rank; the same arguments give the same steps."""
    world = AcceptanceWorld(
        stream(seed, name), num_requests=num_requests, num_positions=num_positions, mixes=mixes
    )
    steps = [world.draft() for _ in range(num_steps)]
    confidence, accepted, is_new = (np.stack(part) for part in zip(*steps, strict=True))
    is_new[0] = True
    return DraftTrace(confidence=confidence, accepted=accepted, is_new=is_new)


class Policy(Protocol):
    """Chooses the verify lengths of one rank's steps."""

    @property
    def name(self) -> str: ...

    def run(self, trace: DraftTrace, cost: SpecCost) -> "Throughput": ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What a policy reached."""

    tokens_per_s: float
    """Expected emitted tokens a second, of one rank."""
    mean_verify_length: float
    """Draft tokens verified a request and step."""


class _Meter:
    """Adds up steps after the first ones, in which histories are still missing."""

    WARM_UP_STEPS: Final = 10

    def __init__(self, skip_steps: int = WARM_UP_STEPS) -> None:
        self._skip_steps = skip_steps
        self.emitted = self.seconds = 0.0
        self.verified = self.requests = 0
        self._step = 0

    def add(self, *, emitted: float, seconds: float, verified: int, num_requests: int) -> None:
        self._step += 1
        if self._step > self._skip_steps:
            self.emitted += emitted
            self.seconds += seconds
            self.verified += verified
            self.requests += num_requests

    def result(self) -> Throughput:
        return Throughput(
            tokens_per_s=self.emitted / self.seconds,
            mean_verify_length=self.verified / self.requests,
        )


@dataclass(frozen=True, slots=True)
class NoDraft:
    """One token a request and step."""

    name: str = "none"

    def run(self, trace: DraftTrace, cost: SpecCost) -> Throughput:
        num_requests = trace.confidence.shape[1]
        return Throughput(
            tokens_per_s=num_requests / cost.step_cost.seconds(num_requests),
            mean_verify_length=0.0,
        )


@dataclass(frozen=True, slots=True)
class Fixed:
    """The same verify length always."""

    length: int

    @property
    def name(self) -> str:
        return f"fixed {self.length}"

    def run(self, trace: DraftTrace, cost: SpecCost) -> Throughput:
        num_steps, num_requests, _ = trace.confidence.shape
        survival = np.cumprod(trace.confidence, axis=2)[_Meter.WARM_UP_STEPS :, :, : self.length]
        seconds = cost.step_cost.seconds(num_requests * (1 + self.length)) + cost.draft_seconds(
            num_requests
        )
        emitted = num_requests + survival.sum() / (num_steps - _Meter.WARM_UP_STEPS)
        return Throughput(tokens_per_s=emitted / seconds, mean_verify_length=float(self.length))


@dataclass(frozen=True, slots=True)
class Planned:
    """`plan_verify_lengths`, with the draft gate."""

    name: str = "asynchronous"
    mode: str = "asynchronous"
    uses_current: bool = False
    """Search the budget over this step's confidences: not lossless, an upper bound."""
    has_gate: bool = True
    believed: StepCostCurve | None = None
    """The curve that is planned with; default: the truth."""
    is_smoothed: bool = False
    """Smooth the believed curve."""
    is_tracked: bool = False
    """Smooth it, and move it by measured step times."""
    learning_steps: int = _Meter.WARM_UP_STEPS
    """Steps that are not counted."""

    def run(self, trace: DraftTrace, cost: SpecCost) -> Throughput:
        return self.run_shown(trace, cost, shown=trace.confidence)

    def run_shown(
        self, trace: DraftTrace, cost: SpecCost, *, shown: NDArray[np.float64]
    ) -> Throughput:
        """As `run`, where the policy is `shown` other confidences [S, R, K] than the true ones."""
        meter, gate = _Meter(self.learning_steps), DraftGate()
        survival = np.cumprod(trace.confidence, axis=2)
        num_requests, num_positions = trace.confidence.shape[1:]
        slots = np.arange(num_requests)
        memory = ConfidenceHistory(num_requests, num_positions)
        draft_seconds = cost.draft_seconds(num_requests)
        curve = self.believed or cost.step_cost
        tracker = CurveTracker(curve)
        if self.is_smoothed:
            curve = tracker.curve
        for step, confidence in enumerate(shown):
            memory.release(np.flatnonzero(trace.is_new[step]))
            if self.has_gate and not gate.is_drafting:
                gate.apply(draft_gain=None, num_requests=num_requests)
                seconds = cost.step_cost.seconds(num_requests)
                meter.add(
                    emitted=num_requests,
                    seconds=seconds + (draft_seconds if gate.is_drafting else 0.0),
                    verified=0,
                    num_requests=num_requests,
                )
                if self.is_tracked:
                    tracker.apply(num_tokens=num_requests, seconds=seconds)
                    curve = tracker.curve
                continue
            plan = plan_verify_lengths(
                confidence,
                step_cost=curve,
                history=confidence if self.uses_current else memory.before(step, slots),
                mode=self.mode,
                draft_seconds=draft_seconds,
            )
            memory.apply(step, slots, confidence)
            gate.apply(draft_gain=plan.draft_gain, num_requests=num_requests)
            seconds = cost.step_cost.seconds(num_requests + int(plan.lengths.sum()))
            is_drafting = gate.is_drafting or not self.has_gate
            meter.add(
                emitted=_emitted(survival[step], plan),
                seconds=seconds + (draft_seconds if is_drafting else 0.0),
                verified=int(plan.lengths.sum()),
                num_requests=num_requests,
            )
            if self.is_tracked:
                tokens = num_requests + int(plan.lengths.sum())
                tracker.apply(num_tokens=tokens, seconds=seconds)
                curve = tracker.curve
        return meter.result()


@dataclass(frozen=True, slots=True)
class Oracle:
    """Verifies only tokens that will be accepted, and as many as pay. Unreachable."""

    name: str = "oracle"

    def run(self, trace: DraftTrace, cost: SpecCost) -> Throughput:
        meter = _Meter()
        num_requests = trace.confidence.shape[1]
        positions = np.arange(trace.confidence.shape[2])
        draft_seconds = cost.draft_seconds(num_requests)
        for accepted in trace.accepted:
            known = (positions < accepted[:, None]).astype(np.float64)
            plan = plan_verify_lengths(
                known, step_cost=cost.step_cost, history=known, draft_seconds=draft_seconds
            )
            is_drafting = plan.draft_gain > 0.0
            num_verified = int(plan.lengths.sum()) if is_drafting else 0
            meter.add(
                emitted=num_requests
                + float(np.minimum(plan.lengths, accepted).sum()) * is_drafting,
                seconds=cost.step_cost.seconds(num_requests + num_verified)
                + draft_seconds * is_drafting,
                verified=num_verified,
                num_requests=num_requests,
            )
        return meter.result()


def run_group(traces: Sequence[DraftTrace], cost: SpecCost, *, is_common: bool) -> Throughput:
    """Return the throughput a rank of ranks that wait for each other, with one budget or each its
    own."""
    meter = _Meter()
    survivals = [np.cumprod(trace.confidence, axis=2) for trace in traces]
    histories = [trace.history for trace in traces]
    curve = cost.step_cost
    drafts = [cost.draft_seconds(trace.confidence.shape[1]) for trace in traces]
    for step in range(len(traces[0].confidence)):
        budgets: list[int | None] = [None] * len(traces)
        if is_common and step >= LAG_STEPS:
            rows = [
                summarise(
                    history[step],
                    step_cost=curve,
                    step=step,
                    epoch=0,
                    dp_rank=rank,
                    draft_seconds=draft,
                )
                for rank, (history, draft) in enumerate(zip(histories, drafts, strict=True))
            ]
            group = plan_group(rows, step_cost=curve)
            budgets = [group.budget(num_requests=len(trace.confidence[step])) for trace in traces]
        plans = [
            plan_verify_lengths(
                trace.confidence[step],
                step_cost=curve,
                history=history[step],
                budget=budget,
                draft_seconds=draft,
            )
            for trace, history, budget, draft in zip(
                traces, histories, budgets, drafts, strict=True
            )
        ]
        meter.add(
            emitted=sum(
                _emitted(survival[step], plan)
                for survival, plan in zip(survivals, plans, strict=True)
            ),
            seconds=max(
                curve.seconds(len(plan.lengths) + int(plan.lengths.sum())) + draft
                for plan, draft in zip(plans, drafts, strict=True)
            ),
            verified=sum(int(plan.lengths.sum()) for plan in plans),
            num_requests=sum(len(plan.lengths) for plan in plans),
        )
    total = meter.result()
    return Throughput(
        tokens_per_s=total.tokens_per_s / len(traces), mean_verify_length=total.mean_verify_length
    )


V32_STEP_MS: Final = {
    "v3.2-h200": {8: 20.7, 32: 31.0, 64: 42.1, 128: 74.5, 256: 142.8, 512: 294.1},
    "v3.2-gb200": {8: 14.8, 32: 17.1, 64: 21.5, 128: 28.9, 256: 43.9, 512: 85.8},
}
"""Decode step ms of DeepSeek V3.2 with 64-way EP by tokens in the batch, at contexts of 4K (derived
with NVIDIA AIConfigurator 0.12.0, Apache-2.0)."""
V32_KV_NS: Final = {"v3.2-h200": 6.2, "v3.2-gb200": 4.9}
"""What each KV token of its request costs a token in the batch: least squares over contexts of 1K
to 128K of the same source."""


def v32_cost(name: str) -> tuple[SpecCost, float]:
    """Return the part of a V3.2 cost that does not depend on the context, on graph tiers, and the
    seconds a KV token."""
    seconds_per_kv_token = V32_KV_NS[name] / 1e9
    seconds = [ms / 1e3 - seconds_per_kv_token * b * 4096 for b, ms in V32_STEP_MS[name].items()]
    cost = SpecCost(
        name=name,
        step_cost=StepCostCurve.from_samples(list(V32_STEP_MS[name]), seconds, tiers=graph_tiers()),
        draft_base_seconds=0.0015,
        draft_request_seconds=0.0,
    )
    return cost, seconds_per_kv_token


def context_lengths(
    seed: int, *, num_requests: int, median: int = 6_144, sigma: float = 1.3, most: int = 114_688
) -> NDArray[np.int64]:
    """Return log-normal context lengths [R], as long as users send them."""
    rng = stream(seed, "spec-contexts")
    lengths = median * np.exp(rng.normal(0.0, sigma, num_requests))
    contexts: NDArray[np.int64] = np.minimum(lengths, most).astype(np.int64)
    return contexts


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextThroughput:
    """What a policy reached where contexts differ."""

    tokens_per_s: float
    longest_decile_length: float
    """Mean verify length of the tenth of the requests with the longest contexts."""


def run_contexts(
    trace: DraftTrace,
    cost: SpecCost,
    kv_tokens: NDArray[np.int64],
    *,
    seconds_per_kv_token: float,
    fairness: float | None = None,
    table_context: float | None = None,
) -> ContextThroughput:
    """Plan by survival a second with a share `fairness` by survival, or (None) by survival alone,
    on a curve that holds the attention over `table_context` KV tokens (default: the mean)."""
    num_requests = trace.confidence.shape[1]
    draft_seconds = cost.draft_seconds(num_requests)
    survival = np.cumprod(trace.confidence, axis=2)
    history = trace.history
    context = None
    curve = cost.step_cost
    if fairness is None:
        tiers = graph_tiers()
        in_table = float(kv_tokens.mean()) if table_context is None else table_context
        extra_seconds = seconds_per_kv_token * in_table
        seconds = [cost.step_cost.seconds(b) + extra_seconds * b for b in tiers]
        curve = StepCostCurve.from_samples(tiers, seconds, tiers=tiers)
    else:
        context = ContextCost(
            kv_tokens=kv_tokens, seconds_per_kv_token=seconds_per_kv_token, fairness=fairness
        )
    is_longest = kv_tokens >= np.quantile(kv_tokens, 0.9)
    meter, longest = _Meter(), []
    for step, confidence in enumerate(trace.confidence):
        plan = plan_verify_lengths(
            confidence,
            step_cost=curve,
            history=history[step],
            context=context,
            draft_seconds=draft_seconds,
        )
        num_verified = int(plan.lengths.sum())
        attention = seconds_per_kv_token * float(kv_tokens @ (plan.lengths + 1))
        meter.add(
            emitted=_emitted(survival[step], plan),
            seconds=cost.step_cost.seconds(num_requests + num_verified) + attention + draft_seconds,
            verified=num_verified,
            num_requests=num_requests,
        )
        longest.append(float(plan.lengths[is_longest].mean()))
    return ContextThroughput(
        tokens_per_s=meter.result().tokens_per_s, longest_decile_length=float(np.mean(longest))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """A policy at one concurrency, mean over seeds."""

    policy: str
    num_requests: int
    tokens_per_s: float
    """Of one rank."""
    spread: float
    """Standard deviation over the seeds, same unit."""
    mean_verify_length: float


def compare_policies(
    cost: SpecCost,
    *,
    num_requests: int,
    num_positions: int = 5,
    num_ranks: int = 8,
    num_steps: int = 200,
    num_seeds: int = 3,
    mixes: Sequence[str] | None = None,
) -> list[PolicyResult]:
    """Run every policy over the same requests of `num_ranks` ranks, and average over the ranks:
    none, fixed 1, 3, 5 (up to the draft length), asynchronous and oracle for ranks that do not
    wait for each other; alone and group for ranks that do."""
    single: list[Policy] = [NoDraft(), Planned(), Oracle()]
    single[1:1] = [Fixed(length) for length in (1, 3, 5) if length <= num_positions]
    reached: dict[str, list[Throughput]] = {}
    for seed in range(num_seeds):
        traces = [
            draft_trace(
                seed,
                num_requests=num_requests,
                num_steps=num_steps,
                num_positions=num_positions,
                mixes=mixes or cost.mixes,
                name=f"spec-rank-{rank}",
            )
            for rank in range(num_ranks)
        ]
        for policy in single:
            reached.setdefault(policy.name, []).append(
                _mean([policy.run(trace, cost) for trace in traces])
            )
        for name, is_common in (("alone", False), ("group", True)):
            together = run_group(traces, cost, is_common=is_common)
            reached.setdefault(name, []).append(together)
    return [
        PolicyResult(
            policy=name,
            num_requests=num_requests,
            tokens_per_s=float(np.mean([each.tokens_per_s for each in found])),
            spread=float(np.std([each.tokens_per_s for each in found])),
            mean_verify_length=float(np.mean([each.mean_verify_length for each in found])),
        )
        for name, found in reached.items()
    ]


def _mean(results: Sequence[Throughput]) -> Throughput:
    """The same time for every rank: the mean of their rates."""
    return Throughput(
        tokens_per_s=float(np.mean([each.tokens_per_s for each in results])),
        mean_verify_length=float(np.mean([each.mean_verify_length for each in results])),
    )


def _emitted(survival: NDArray[np.float64], plan: VerifyPlan) -> float:
    """Expected emitted tokens of a step, by the true survivals [R, K]."""
    is_verified = np.arange(survival.shape[1]) < plan.lengths[:, None]
    return len(survival) + float(survival.sum(where=is_verified))


def _next_token(rng: np.random.Generator, token: NDArray[np.float64]) -> NDArray[np.float64]:
    width = TOKEN_WIDTH * np.sqrt(1.0 - TOKEN_MEMORY**2)
    return TOKEN_MEMORY * token + rng.normal(0.0, width, token.size)


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-logits))


APPENDIX_A_TARGET: Final = 0.7
"""The target's probability of token A (else B) in the example of DSpark's Appendix A."""
APPENDIX_A_DRAFT: Final = 0.5
"""The drafter's."""
APPENDIX_A_CONFIDENCE: Final = {"A": ((0.8, 0.9),), "B": ((0.8, 0.0),)}
"""[1, 2] confidences after drafting A or B first: the second position betrays the first token."""


def appendix_a_cost() -> StepCostCurve:
    """Return the example's cost: steps of 1, 2, 3 tokens run 1, .5, .45 times a second."""
    return StepCostCurve.from_samples([1, 2, 3], [1.0, 1 / 0.5, 1 / 0.45])


def share_of_a(length_of: Callable[[str, str], int], *, seed: int, num_draws: int) -> float:
    """Play the example: how often the first emitted token is A.

    `length_of` gives the verify length from the token drafted first now and two steps ago. A
    lossless one gives `APPENDIX_A_TARGET`.
    """
    rng = stream(seed, "spec-appendix-a")
    now, before = np.where(rng.random((2, num_draws)) < APPENDIX_A_DRAFT, 0, 1)
    lengths = np.array([[length_of(x, y) for y in "AB"] for x in "AB"])
    is_verified = lengths[now, before] > 0
    # Speculative sampling: keep a drafted token with min(1, p/q), else draw from what is left of
    # the target, which is A only. Without a draft token the target draws itself.
    keep_a = min(1.0, APPENDIX_A_TARGET / APPENDIX_A_DRAFT)
    keep_b = min(1.0, (1 - APPENDIX_A_TARGET) / (1 - APPENDIX_A_DRAFT))
    is_kept = rng.random(num_draws) < np.array([keep_a, keep_b])[now]
    is_a_if_verified = (now == 0) | ~is_kept
    is_a_if_drawn = rng.random(num_draws) < APPENDIX_A_TARGET
    return float(np.where(is_verified, is_a_if_verified, is_a_if_drawn).mean())
