"""A guard that measures: how long each decision takes, and what is left to the default."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsched.clock import Clock
from dsched.plugins import PolicyGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the policy was asked and what came of it."""

    num_calls: int
    num_defaults: int
    """Answers of `None`, failures included."""
    num_failures: dict[str, int]
    p50_us: float | None
    p99_us: float | None
    max_us: float | None


class MeasuredGuard(PolicyGuard[Any]):
    """Keeps how long each call took, and counts what was left to the default."""

    def __init__(self, policy: object, *, budget_ns: int) -> None:
        super().__init__(policy, budget_ns=budget_ns)
        self.took_ns: list[int] = []
        self.num_defaults = 0

    def call(self, function: Callable[[], object], check: Callable[[object], Any]) -> Any:  # noqa: ANN401
        before, busy_ns = self.num_calls, self.busy_ns
        answer = super().call(function, check)
        if self.num_calls > before:
            self.took_ns.append(self.busy_ns - busy_ns)
        self.num_defaults += answer is None
        return answer

    def follow(self, clock: Clock) -> None:
        """Let the breaker count the time of `clock`: that of the simulation that asks now."""
        self._clock = clock
        self._closed_until_ns = None

    def decisions(self) -> Decisions:
        """What came of the calls so far."""
        times_us = np.array(self.took_ns) / 1e3
        p50 = p99 = largest = None
        if len(times_us):
            p50, p99 = (float(value) for value in np.percentile(times_us, (50, 99)))
            largest = float(times_us.max())
        return Decisions(
            num_calls=self.num_calls,
            num_defaults=self.num_defaults,
            num_failures={
                reason.value: count for reason, count in self.num_failures.items() if count
            },
            p50_us=p50,
            p99_us=p99,
            max_us=largest,
        )
