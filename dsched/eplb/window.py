"""Count expert load: what planners plan from.

`LoadWindow` is state: it is told of steps, and closed at the end of each window. Warm-up and dummy
batches (a rank without requests still takes part in each step) are left out: their tokens go where
random weights or padding send them, and a plan made from them is made for nobody.

Counts are int64 and exact. Ranks count for themselves; `merge` adds windows up, in any order, so
that every rank plans from the same numbers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SMOOTHING_PARTS = 256
"""Smoothing is a fraction of this, so that it is computed in integers and equal everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WindowLoad:
    """Tokens of one closed window."""

    counts: NDArray[np.int64]
    """[L, E] tokens routed to each logical expert."""
    num_steps: int
    """Steps that were counted; 0: the window saw no real batch."""


class LoadWindow:
    """Expert load of the window that is open, and the smoothed load of those before it.

    >>> window = LoadWindow(num_layers=1, num_experts=2)
    >>> window.apply_step(np.array([[3, 1]]))
    >>> window.apply_step(np.array([[9, 9]]), is_dummy=True)
    >>> window.close().counts
    array([[3, 1]])
    """

    def __init__(
        self, *, num_layers: int, num_experts: int, warm_up_steps: int = 0, keep_parts: int = 0
    ) -> None:
        """Start empty.

        `warm_up_steps` real steps are not counted. `keep_parts` of 256 of the smoothed load stay at
        each close: 0 plans from the last window alone, 128 halves the influence of each older one.
        """
        if num_layers < 0 or num_experts < 1:
            raise ValueError(f"a window of {num_layers} layers x {num_experts} experts is empty")
        if warm_up_steps < 0:
            raise ValueError(f"warm_up_steps is {warm_up_steps}; it must not be negative")
        if not 0 <= keep_parts < SMOOTHING_PARTS:
            raise ValueError(f"keep_parts is {keep_parts}; it must be 0..{SMOOTHING_PARTS - 1}")
        self._counts = np.zeros((num_layers, num_experts), np.int64)
        self._smoothed = np.zeros((num_layers, num_experts), np.int64)
        self._num_steps = 0
        self._num_closed = 0
        self._warm_up_left = warm_up_steps
        self._keep_parts = keep_parts

    def apply_step(self, counts: NDArray[np.int64], *, is_dummy: bool = False) -> None:
        """Count the tokens of one step, [L, E]. Dummy batches and warm-up are ignored."""
        if counts.shape != self._counts.shape:
            raise ValueError(f"counts have shape {counts.shape}; expected {self._counts.shape}")
        if counts.size and int(counts.min()) < 0:
            raise ValueError(f"counts hold {int(counts.min())}; tokens cannot be negative")
        if is_dummy:
            return
        if self._warm_up_left > 0:
            self._warm_up_left -= 1
            return
        self._counts += counts.astype(np.int64, copy=False)
        self._num_steps += 1

    def merge(self, other: "LoadWindow") -> None:
        """Add what another rank counted in the same window."""
        if other._counts.shape != self._counts.shape:
            raise ValueError(
                f"windows of {other._counts.shape} and {self._counts.shape} cannot be merged"
            )
        self._counts += other._counts
        self._num_steps = max(self._num_steps, other._num_steps)

    def close(self) -> WindowLoad:
        """End the window: return its smoothed load and start the next.

        A window without steps leaves the smoothed load as it was.
        """
        num_steps = self._num_steps
        if num_steps > 0:
            keep = self._keep_parts if self._num_closed > 0 else 0
            self._smoothed = (
                self._smoothed * keep + self._counts * (SMOOTHING_PARTS - keep)
            ) // SMOOTHING_PARTS
            self._num_closed += 1
        self._counts = np.zeros_like(self._counts)
        self._num_steps = 0
        counts = self._smoothed.copy()
        counts.flags.writeable = False
        return WindowLoad(counts=counts, num_steps=num_steps)

    def validate(self) -> None:
        """Check the invariants of the state."""
        if self._counts.size and int(self._counts.min()) < 0:
            raise ValueError("a count is negative: more than 2**63 tokens in one window")
