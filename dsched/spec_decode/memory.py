"""What a rank remembers between steps: confidences of two steps ago, and whether drafting pays.

Both are State: changed by `apply` only, read by the planner's caller, never by the planner.
"""

from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

LAG_STEPS: Final = 2
"""A budget may use confidences that are this many steps old. One is too fresh: where the engine
runs a step ahead, the tokens it speaks of are still being verified."""


class ConfidenceHistory:
    """Confidences of the last steps by request slot.

    A slot is a number below `max_slots` that a request keeps while it runs.
    """

    def __init__(self, max_slots: int, num_positions: int, *, max_steps: int = 16) -> None:
        """`max_steps`: steps that a budget may be averaged over; see `num_steps_for`."""
        if max_slots < 1 or num_positions < 1 or max_steps < 1:
            raise ValueError(
                f"{max_steps} steps of {max_slots} slots of {num_positions} positions hold nothing"
            )
        self.max_slots = max_slots
        self.max_steps = max_steps
        self._ring = np.full((LAG_STEPS + max_steps, max_slots, num_positions), np.nan)
        self._step_of = np.full(len(self._ring), -1)

    def apply(self, step: int, slots: ArrayLike, confidence: ArrayLike) -> None:
        """Remember `confidence` [R, K] of the requests in `slots` [R] at `step`."""
        place = step % len(self._ring)
        if self._step_of[place] != step:
            self._ring[place] = np.nan
            self._step_of[place] = step
        self._ring[place, np.asarray(slots, dtype=np.int64)] = confidence

    def release(self, slots: ArrayLike) -> None:
        """Forget the requests in `slots`; the next request there starts without a history."""
        self._ring[:, np.asarray(slots, dtype=np.int64)] = np.nan

    def before(self, step: int, slots: ArrayLike) -> NDArray[np.float64]:
        """Return [H, R, K] what is known of the requests in `slots` for planning `step`: their
        confidences `LAG_STEPS` ago and, for a small batch, before that. NaN where there are none.
        """
        chosen = np.asarray(slots, dtype=np.int64)
        steps = step - LAG_STEPS - np.arange(num_steps_for(len(chosen), self.max_steps))
        places = steps % len(self._ring)
        rows: NDArray[np.float64] = self._ring[places[:, None], chosen[None, :]]
        rows[self._step_of[places] != steps] = np.nan
        is_known = ~np.isnan(rows).all(axis=(1, 2))
        # Steps of which nothing is known would only dilute the others.
        return rows[is_known] if is_known.any() else rows[:1]


def num_steps_for(num_requests: int, max_steps: int = 16) -> int:
    """Return how many steps' confidences should make a budget: about 128 requests' worth. Fewer
    follow chance, more cost time and gain nothing.

    >>> num_steps_for(8), num_steps_for(64), num_steps_for(1024)
    (16, 2, 1)
    """
    return max(1, min(max_steps, 128 // max(num_requests, 1)))


class DraftGate:
    """Whether to draft for the next step.

    Drafting stops when it has been a loss, and is tried again when the batch has become smaller or
    after a while: without drafts there are no confidences that could say it would pay now. The
    other way round, a step now and then goes without: an engine that always drafts never measures
    what such a step costs, and a wrong guess would last. The more drafting gains the seldomer, so
    that the doubt costs less than `DOUBT_GAIN / doubt_every_steps` of the throughput.
    """

    DOUBT_GAIN: Final = 0.1
    """Gain up to which a step goes without a draft every `doubt_every_steps`; twice the gain, half
    as often."""
    FIRST_DOUBT_STEPS: Final = 32
    """Steps before the first doubt; the pause doubles up to `doubt_every_steps`."""

    def __init__(
        self,
        *,
        margin: float = 0.005,
        patience_steps: int = 8,
        probe_every_steps: int = 256,
        doubt_every_steps: int = 64,
    ) -> None:
        """`margin`: drafting starts again when it gains more than this, and stops when it loses
        anything on average. `patience_steps`: over how many steps the gain is averaged; fewer
        follow chance. `probe_every_steps`: pause between tries while it is off; each costs a draft.
        `doubt_every_steps`: pause between steps without a draft; each costs the gain."""
        counts = (patience_steps, probe_every_steps, doubt_every_steps)
        if margin < 0.0 or min(counts) < 1:
            raise ValueError(
                f"margin {margin} must not be negative, patience_steps {patience_steps}, "
                f"probe_every_steps {probe_every_steps} and doubt_every_steps {doubt_every_steps} "
                "must be positive"
            )
        self.is_drafting = True
        self._margin = margin
        self._weight = 1.0 / patience_steps
        self._probe_every_steps = probe_every_steps
        self._doubt_every_steps = doubt_every_steps
        self._doubt_after_steps = min(self.FIRST_DOUBT_STEPS, doubt_every_steps)
        self._mean_gain: float | None = None
        self._steps_off = 0
        self._steps_on = 0
        self._is_doubting = False
        self._requests_when_stopped = 0

    def apply(self, *, draft_gain: float | None, num_requests: int) -> None:
        """Note a step: the plan's `draft_gain`, or None if nothing was drafted for it."""
        if draft_gain is None:
            self._apply_without(num_requests)
            return
        if self._mean_gain is None:
            # The first step of a try decides alone whether the try goes on.
            self._mean_gain = draft_gain - (self._margin if self._steps_off else 0.0)
        else:
            self._mean_gain += self._weight * (draft_gain - self._mean_gain)
        self._steps_on += 1
        if self._mean_gain < 0.0:
            self.is_drafting = False
            self._mean_gain = None
            self._steps_off = self._steps_on = 0
            self._requests_when_stopped = num_requests
        elif self._steps_on >= self._doubt_after_steps * max(
            1.0, self._mean_gain / self.DOUBT_GAIN
        ):
            self.is_drafting = False
            self._is_doubting = True
            self._steps_on = 0
            self._doubt_after_steps = min(2 * self._doubt_after_steps, self._doubt_every_steps)

    def _apply_without(self, num_requests: int) -> None:
        if self._is_doubting:
            self._is_doubting = False
            self.is_drafting = True
            return
        self._steps_off += 1
        is_smaller = num_requests < 0.9 * self._requests_when_stopped
        self.is_drafting = is_smaller or self._steps_off >= self._probe_every_steps
