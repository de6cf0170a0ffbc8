"""Lets an engine decide for a while when plans come too late again and again.

A plan is made while the engine waits for it, or while its device computes the step before. A
machine that has no time for plans is better off without them; after a pause they are tried again.
"""

from typing import Final

MAX_LATE_IN_A_ROW: Final = 16
"""Late plans before the engine decides for a while: this machine has no time for us."""
PAUSE_STEPS: Final = 1_000
"""Steps for which the engine decides after late plans."""


class PlanWatch:
    """Counts late plans of one scheduler."""

    __slots__ = ("_late_in_a_row", "num_late", "pause_steps")

    def __init__(self) -> None:
        self.num_late = 0
        """Plans that took longer than they may."""
        self.pause_steps = 0
        """Steps that are still the engine's; whoever leaves it one takes one off."""
        self._late_in_a_row = 0

    def note(self, plan_ns: int, *, slow_ns: int) -> bool:
        """Note how long a plan took; whether a pause begins. Longer than `slow_ns` is late.

        >>> watch = PlanWatch()
        >>> [watch.note(9, slow_ns=5) for _ in range(MAX_LATE_IN_A_ROW)][-2:]
        [False, True]
        >>> watch.num_late, watch.pause_steps
        (16, 1000)
        """
        if plan_ns <= slow_ns:
            self._late_in_a_row = 0
            return False
        self.num_late += 1
        self._late_in_a_row += 1
        if self._late_in_a_row < MAX_LATE_IN_A_ROW:
            return False
        self._late_in_a_row = 0
        self.pause_steps = PAUSE_STEPS
        return True
