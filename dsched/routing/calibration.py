"""Learn a, b and c of the decode step from the step times that ranks report.

    step = a + b * running + c * KV tokens        of the slowest rank of a group

Wrong prices cost throughput: c off by a factor of four loses 1 to 7 points, depending on traffic.
So the prices that routing starts with only have to be roughly right. A factor for each of the three
is fitted to the latest steps by least squares of the relative error, old steps weighing less and
less, and held to 1 where the load does not vary enough to tell the parts apart.

In a synchronised group every rank reports the time of the slowest one. The sample is therefore
attributed to the rank that is costliest by the prices learned so far. Alternating between "who is
slowest" and "what explains it" is the usual way to fit a maximum of lines; the first answers are
forgotten faster, since they were attributed by prices that were wrong.

Steps that say nothing are left out and counted: not finite or not positive, more than
`MAX_RELATIVE_ERROR` off once calibrated (a pause, not a price) unless several in a row agree.
Factors stay within [1/50, 50]: no part of the cost ever becomes free.

State: mutable, owned by one router. O(D) a step.
"""

import numpy as np
from numpy.typing import NDArray

from dsched.drivers.wire import RankReport
from dsched.ids import EngineId
from dsched.jit import kernel
from dsched.routing.kernels import KV_TOKEN_NS, REQUEST_NS
from dsched.routing.time_factors import TimeFactors

FORGETTING = 0.9999
"""Weight of a step against the next: a memory of some 10 000 steps, minutes. Lower: follows noise
where the load hardly varies. Higher: slow to follow a change."""
RELATIVE_NOISE = 0.02
"""Expected scatter of a step's time."""
PRIOR_DEVIATIONS = (0.05, 0.05, 2.0)
"""How far a, b and c may be from the start without evidence. In a level group a and b cannot be
told apart (every rank runs about as many requests), so they hold to what they were unless much
speaks against it; c differs most between models and is the one that is worth learning. With 0.3
for a and b, one seed in five lost 1 to 3 points on chat traffic to noise in b; with a free, c
follows the noise in a, and one seed in three lost 9 points on reasoning traffic."""
MIN_FACTOR = 0.02
MAX_FACTOR = 50.0
MAX_RELATIVE_ERROR = 0.5
OUTLIERS_IN_A_ROW = 5
MAX_DECODE_TOKENS = 8
"""Tokens that a running request takes in a step without prompts, drafts included. A step with more
has computed a prompt, also one that was whole when the step ended and waits no more. Lower: steps
of speculative decoding teach nothing. Higher: short prompts are taken for KV tokens that cost
much."""
NO_ENGINE = EngineId("")
MAX_STEP_NS = 3_600_000_000_000
"""No step takes an hour."""
MIN_STEPS = 50
"""Steps before the learned prices are used and outliers are judged."""
SOLVE_EVERY = 25
"""Steps between two fits."""
NUM_EARLY_FITS = 8
EARLY_KEPT = 0.8
"""Share of what was seen that is kept after each of the early fits."""


@kernel
def learn_step(
    sums: NDArray[np.float64],
    targets: NDArray[np.float64],
    parts: NDArray[np.float64],
    measured: float,
) -> None:
    """Add a step to the normal equations `sums` [3, 3], `targets` [3], in place. O(1).

    `parts` [3] are a, b * running and c * KV tokens at factor 1.
    """
    for row in range(3):
        targets[row] = FORGETTING * targets[row] + parts[row] / measured
        for column in range(3):
            sums[row, column] = (
                FORGETTING * sums[row, column] + parts[row] * parts[column] / measured / measured
            )


@kernel
def _solve(system: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve a symmetric positive definite system, in place: no pivoting is needed.

    By hand because numba takes seconds to compile `numpy.linalg.solve`.
    """
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = system[row, pivot] / system[pivot, pivot]
            for column in range(pivot, size):
                system[row, column] -= factor * system[pivot, column]
            right[row] -= factor * right[pivot]
    for pivot in range(size - 1, -1, -1):
        for column in range(pivot + 1, size):
            right[pivot] -= system[pivot, column] * right[column]
        right[pivot] /= system[pivot, pivot]
    return right


@kernel
def fit_factors(
    sums: NDArray[np.float64], targets: NDArray[np.float64], factors: NDArray[np.float64]
) -> None:
    """Solve for `factors` [3] within their limits, in place: one that would leave them is fixed
    at the limit and the others are solved again. O(1)."""
    is_fixed = np.zeros(3, np.bool_)
    for _ in range(4):
        system = np.zeros((3, 3))
        right = np.zeros(3)
        for row in range(3):
            if is_fixed[row]:
                system[row, row] = 1.0
                right[row] = factors[row]
                continue
            hold = (RELATIVE_NOISE / PRIOR_DEVIATIONS[row]) ** 2
            right[row] = targets[row] + hold
            for column in range(3):
                if is_fixed[column]:
                    right[row] -= sums[row, column] * factors[column]
                else:
                    system[row, column] = sums[row, column]
            system[row, row] += hold
        solved = _solve(system, right)
        worst = -1
        worst_excess = 0.0
        for row in range(3):
            if not is_fixed[row]:
                excess = max(MIN_FACTOR - solved[row], solved[row] / MAX_FACTOR - 1.0)
                if excess > worst_excess:
                    worst = row
                    worst_excess = excess
        if worst < 0:
            for row in range(3):
                factors[row] = solved[row]
            return
        factors[worst] = MIN_FACTOR if solved[worst] < MIN_FACTOR else MAX_FACTOR
        is_fixed[worst] = True


@kernel
def fit_if_due(
    sums: NDArray[np.float64],
    targets: NDArray[np.float64],
    factors: NDArray[np.float64],
    num_steps: int,
) -> None:
    """Fit every `SOLVE_EVERY` steps; after early fits forget some."""
    if num_steps % SOLVE_EVERY:
        return
    fit_factors(sums, targets, factors)
    if num_steps <= NUM_EARLY_FITS * SOLVE_EVERY:
        for row in range(3):
            targets[row] *= EARLY_KEPT
            for column in range(3):
                sums[row, column] *= EARLY_KEPT


class StepPrices:
    """Prices a, b, c of one kind of rank, corrected while in use by the steps of all of them."""

    def __init__(self, *, base_ns: float, request_ns: float, kv_token_ns: float) -> None:
        start = np.array([base_ns, request_ns, kv_token_ns], np.float64)
        if not np.isfinite(start).all() or start.min() < 0.0 or start[1:].max() <= 0.0:
            raise ValueError(
                f"prices {start.tolist()} must be finite and not negative, and b or c positive"
            )
        self._start = start
        self._factors = np.ones(3)
        self._sums = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._outliers: dict[EngineId, int] = {}
        """Outliers of each engine in a row."""
        self.num_steps = 0
        """Steps learned from."""
        self.num_skipped = 0
        """Steps left out: impossible times and outliers."""

    @property
    def prices(self) -> NDArray[np.float64]:
        """[3] a, b, c in ns: as started until `MIN_STEPS` steps were seen."""
        if self.num_steps < MIN_STEPS:
            return self._start.copy()
        return self._start * self._factors

    def observe(
        self,
        *,
        step_ns: float,
        num_running: NDArray[np.int64],
        num_kv_tokens: NDArray[np.int64],
        engine_id: EngineId = NO_ENGINE,
        factor: float = 1.0,
    ) -> bool:
        """Learn from a step of a group of D ranks with `num_running` [D], `num_kv_tokens` [D].

        `factor` is how much longer steps of this engine take than the prices say; outliers count
        in a row of one engine. Returns whether the step was used. Never raises for a time that
        cannot be.
        """
        if not is_step_time(step_ns) or len(num_running) == 0:
            self.num_skipped += 1
            return False
        step_ns /= factor
        slowest = self.slowest(num_running, num_kv_tokens)
        parts = self._start.copy()
        parts[REQUEST_NS] *= num_running[slowest]
        parts[KV_TOKEN_NS] *= num_kv_tokens[slowest]
        if self._is_outlier(engine_id, step_ns, float((parts * self._factors).sum())):
            self.num_skipped += 1
            return False
        learn_step(self._sums, self._targets, parts, step_ns)
        self.num_steps += 1
        fit_if_due(self._sums, self._targets, self._factors, self.num_steps)
        return True

    def slowest(self, num_running: NDArray[np.int64], num_kv_tokens: NDArray[np.int64]) -> int:
        """Say which rank of a group sets its step, by the prices learned so far."""
        now = self._start * self._factors
        return int(np.argmax(now[REQUEST_NS] * num_running + now[KV_TOKEN_NS] * num_kv_tokens))

    def _is_outlier(self, engine_id: EngineId, step_ns: float, predicted_ns: float) -> bool:
        if self.num_steps < MIN_STEPS:
            return False
        if abs(step_ns - predicted_ns) <= MAX_RELATIVE_ERROR * predicted_ns:
            self._outliers[engine_id] = 0
            return False
        self._outliers[engine_id] = self._outliers.get(engine_id, 0) + 1
        return self._outliers[engine_id] < OUTLIERS_IN_A_ROW


def is_step_time(step_ns: float) -> bool:
    """Whether a step can have taken so long."""
    return 0.0 < step_ns <= MAX_STEP_NS


class EngineSteps:
    """Turns the reports of one engine's ranks into observed steps of the group.

    A step is learned from once, by the first report that shows it, with the latest load of each
    rank. Steps with prompt tokens in them are left out, by what still waits and by what the step
    computed: they cost what prefill costs, and engines that are alike would learn prices apart.
    """

    def __init__(
        self,
        prices: StepPrices,
        *,
        engine_id: EngineId = NO_ENGINE,
        factors: TimeFactors | None = None,
    ) -> None:
        """`prices` and `factors` are those of the pool; `None`: no engine is told from another."""
        self._prices = prices
        self._engine_id = engine_id
        self._factors = factors
        self._position: dict[int, int] = {}
        self._running = np.zeros(0, np.int64)
        self._kv = np.zeros(0, np.int64)
        self._has_prefill = np.zeros(0, np.bool_)
        self._incarnation = ""
        self._last_step = -1

    @property
    def ranks(self) -> list[int]:
        """Rank numbers that have reported, in order of their first report."""
        return list(self._position)

    def apply_report(self, rank: int, report: RankReport) -> bool:
        """Learn from a report; return whether prices or factors may be others now."""
        position = self._position.get(rank)
        if position is None:
            position = self._position[rank] = len(self._position)
            self._running = np.append(self._running, 0)
            self._kv = np.append(self._kv, 0)
            self._has_prefill = np.append(self._has_prefill, False)
        self._running[position] = report.num_running
        self._kv[position] = report.num_kv_tokens
        self._has_prefill[position] = (
            report.num_waiting_prefill_tokens > 0
            or report.num_step_tokens > MAX_DECODE_TOKENS * report.num_running
        )
        if report.incarnation != self._incarnation:
            self._incarnation = report.incarnation
            self._last_step = -1
            if self._factors is not None:
                self._factors.forget(self._engine_id)
        if report.step <= self._last_step or report.step_ns == 0 or report.num_running == 0:
            return False
        self._last_step = report.step
        if self._has_prefill.any():
            return False
        if not is_step_time(report.step_ns):
            self._prices.num_skipped += 1
            return False
        step_ns = float(report.step_ns)
        has_changed = False
        factor = 1.0
        if self._factors is not None:
            slowest = self._prices.slowest(self._running, self._kv)
            has_changed = self._factors.observe(
                self._engine_id,
                step_ns=step_ns,
                num_running=int(self._running[slowest]),
                num_kv_tokens=int(self._kv[slowest]),
                prices=self._prices.prices,
            )
            factor = self._factors.factor(self._engine_id)
        has_learned = self._prices.observe(
            step_ns=step_ns,
            num_running=self._running,
            num_kv_tokens=self._kv,
            engine_id=self._engine_id,
            factor=factor,
        )
        return has_changed or (has_learned and self._prices.num_steps % SOLVE_EVERY == 0)
