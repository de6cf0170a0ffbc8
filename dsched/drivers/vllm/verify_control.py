"""What verify lengths inside an engine need to know: outcomes, confidences, step times.

Engine objects stay outside: request ids and counts come in, lengths go out. Used by
`dsched.drivers.vllm.verify`, which imports it late: see there.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsched.clock import Clock
from dsched.costs import StepCostCurve
from dsched.spec_decode import plan_verify_lengths
from dsched.spec_decode.memory import ConfidenceHistory
from dsched.spec_decode.statistics import AcceptanceStatistics
from dsched.spec_decode.tracker import CurveTracker

REQUEST_MEMORY: Final = 0.95
"""What a request's own acceptance keeps at each verified token. Lower follows a change of text
faster and is noisier."""
PRIOR_TOKENS: Final = 8.0
"""Verified tokens of its own that weigh as much as what is usual at the position."""
LEARNING_STEPS: Final = 256
"""Steps that are measured before they make a curve, where none was given. All drafts are verified
meanwhile."""
MAX_STEPS_IN_FLIGHT: Final = 64

ConfidenceSource = Callable[[Sequence[str]], "NDArray[np.float64] | None"]
"""Gives the confidences [R, K] of these requests' newest drafts, or None if it has none."""


class AcceptanceByRequest:
    """State: how likely each request's drafts are accepted, from what was accepted before."""

    def __init__(self, num_positions: int) -> None:
        self.statistics = AcceptanceStatistics(num_positions)
        self._reached: dict[str, float] = {}
        self._kept: dict[str, float] = {}

    def apply(self, verified: Mapping[str, int], accepted: Mapping[str, int]) -> None:
        """Note one step; both by request id, requests without drafts left out."""
        if not verified:
            return
        self.statistics.apply(
            verified=list(verified.values()), accepted=[accepted[name] for name in verified]
        )
        for name, num_verified in verified.items():
            num_kept = accepted[name]
            num_reached = min(num_kept + 1, num_verified)
            keep = REQUEST_MEMORY**num_reached
            self._reached[name] = keep * self._reached.get(name, 0.0) + num_reached
            self._kept[name] = keep * self._kept.get(name, 0.0) + num_kept

    def remove(self, name: str) -> None:
        """Forget a request. Unknown ones are ignored."""
        self._reached.pop(name, None)
        self._kept.pop(name, None)

    def confidence(self, names: Sequence[str]) -> NDArray[np.float64]:
        """Return [R, K] the estimate for the next draft of each request."""
        usual = self.statistics.acceptance
        reached = np.array([self._reached.get(name, 0.0) for name in names])
        kept = np.array([self._kept.get(name, 0.0) for name in names])
        weight = reached + PRIOR_TOKENS
        estimate: NDArray[np.float64] = (kept[:, None] + PRIOR_TOKENS * usual) / weight[:, None]
        return np.clip(estimate, 0.0, 1.0)


class StepTimes:
    """State: the cost curve of this engine, given and then followed, or learned from the start."""

    def __init__(self, step_cost: StepCostCurve | None) -> None:
        self._tracker = None if step_cost is None else CurveTracker(step_cost)
        self._samples: list[tuple[int, float]] = []

    @property
    def curve(self) -> StepCostCurve | None:
        """The curve to plan with; None while nothing is known."""
        return None if self._tracker is None else self._tracker.curve

    def apply(self, *, num_tokens: int, seconds: float) -> None:
        """Note a step that computed `num_tokens` (>= 1)."""
        if self._tracker is not None:
            self._tracker.apply(num_tokens=num_tokens, seconds=seconds)
            return
        self._samples.append((num_tokens, seconds))
        if len(self._samples) < LEARNING_STEPS:
            return
        tokens, times = zip(*self._samples, strict=True)
        # Half of the samples stay: an engine that only ran one batch size has not shown its cost.
        self._samples = self._samples[LEARNING_STEPS // 2 :]
        if len(set(tokens)) > 1:
            curve = StepCostCurve.from_samples(tokens, times)
            self._tracker = None if curve.is_flat else CurveTracker(curve)


class VerifyControl:
    """What one scheduler needs to have its verify lengths planned."""

    def __init__(
        self,
        *,
        num_positions: int,
        max_requests: int,
        step_cost: StepCostCurve | None,
        clock: Clock,
    ) -> None:
        self.num_positions = num_positions
        self.confidence_source: ConfidenceSource | None = None
        """Confidences of a drafter in this process; None: estimated from outcomes."""
        self.acceptance = AcceptanceByRequest(num_positions)
        self.times = StepTimes(step_cost)
        self.num_plans = 0
        self._clock = clock
        self._history = ConfidenceHistory(max_requests, num_positions)
        self._slot_of: dict[str, int] = {}
        self._free_slots = list(range(max_requests - 1, -1, -1))
        self._starts_ns: deque[int] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._last_end_ns = 0
        self._num_other_tokens = 0

    def plan(self, num_drafts: Mapping[str, int]) -> dict[str, int]:
        """Return the verify length of each request, from its draft tokens. O(R * K)."""
        curve = self.times.curve
        names = list(num_drafts)
        counts = np.minimum(list(num_drafts.values()), self.num_positions)
        if curve is None or not names or not counts.any():
            return dict(num_drafts)
        confidence = None
        if self.confidence_source is not None:
            confidence = self.confidence_source(names)
        if confidence is None:
            # Known before the drafts were made, so the budget may be searched over it directly.
            confidence = history = self.acceptance.confidence(names)
        else:
            history = self._older(names, confidence)
        plan = plan_verify_lengths(
            confidence,
            step_cost=curve,
            history=history,
            acceptance=self.acceptance.statistics.acceptance,
            num_drafts=counts,
            num_other_tokens=self._num_other_tokens,
        )
        self.num_plans += 1
        return dict(zip(names, plan.lengths.tolist(), strict=True))

    def warm_up(self) -> None:
        """Compile what `plan` calls, so that no step waits for the compiler."""
        curve = StepCostCurve.from_samples([1, 2], [0.001, 0.002])
        history = np.full((1, self.num_positions), 0.5)
        counts = np.ones(1, dtype=np.int64)
        for mode in ("asynchronous", "synchronous"):
            plan_verify_lengths(
                history,
                step_cost=curve,
                history=history,
                acceptance=self.acceptance.statistics.acceptance,
                num_drafts=counts,
                mode=mode,
            )

    def start_step(self) -> None:
        """A schedule call begins."""
        self._starts_ns.append(self._clock.now_ns())

    def end_step(
        self, *, num_tokens: int, verified: Mapping[str, int], accepted: Mapping[str, int]
    ) -> None:
        """A step ended that computed `num_tokens`; draft tokens by request id."""
        end_ns = self._clock.now_ns()
        start_ns = self._starts_ns.popleft() if self._starts_ns else end_ns
        step_ns = end_ns - max(start_ns, self._last_end_ns)
        self._last_end_ns = end_ns
        self.acceptance.apply(verified, accepted)
        self._num_other_tokens = max(num_tokens - len(verified) - sum(verified.values()), 0)
        if num_tokens and step_ns > 0:
            self.times.apply(num_tokens=num_tokens, seconds=step_ns / 1e9)

    def remove(self, name: str) -> None:
        """Forget a request that ended. Unknown ones are ignored."""
        self.acceptance.remove(name)
        slot = self._slot_of.pop(name, None)
        if slot is not None:
            self._history.release([slot])
            self._free_slots.append(slot)

    def _older(self, names: Sequence[str], confidence: NDArray[np.float64]) -> NDArray[np.float64]:
        """Confidences of two steps ago; those of now are remembered."""
        for name in names:
            if name not in self._slot_of:
                self._slot_of[name] = self._free_slots.pop()
        slots = [self._slot_of[name] for name in names]
        older = self._history.before(self.num_plans, slots)
        self._history.apply(self.num_plans, slots, confidence)
        return older
