"""Tell the engines of a pool apart by how long their steps take at the same load.

In:  steps without prompts, each with its engine, its load, and the pool's prices.
Out: a factor for each engine: its step time over that of the pool's middle engine at equal load.

Engines of a pool are taken for equal machines until they have shown otherwise, and most of what
looks like a difference is none: an engine that ran single requests cannot be compared with one that
ran eight at a time, however well a model fits both, because a model of the step is wrong by more
than machines differ. So **engines are compared only where both have been**. Loads are sorted into
cells, an octave of running requests by an octave of KV tokens, and

    log step time = cell + engine + noise

is fitted as steps come: the cell is a long mean over all engines, each corrected by what is known
of it, and the engine a short mean over blocks of steps. Within a cell the pool's prices take out
what its loads differ by. A step is evidence on its engine only if

- others have shown the cell too, or the cell could not be told from the engine that fills it; an
  engine that has been compared goes on against what it showed in the cell itself;
- another engine worked lately, for a machine that is slow for all is no difference.

Steps of one engine are not independent of each other: one that is not scheduled for a while is slow
for many in a row. So the error of the short mean is taken from how whole blocks scatter. A factor
is used once it is beyond `BAND` by `NUM_ERRORS` of these, then follows the mean in steps of
`GRAIN`, and is given up when it is back within the band. A pause counts as `MAX_DEVIATION` at
most.

What an engine has shown is forgotten when the others have done `FADE_STEPS` steps without it: one
that gets no requests because it was slow must be able to show that it no longer is.

State: mutable, owned by one router; no clock. O(1) a step on average.
"""

from dataclasses import dataclass, field
from math import exp, isfinite, log, sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dsched.ids import EngineId

BLOCK_STEPS = 32
"""Steps whose mean is one observation; about a second. Fewer: what holds an engine up for a moment
passes for several independent observations. More: slow to notice."""
MIN_BLOCKS = 16
"""Blocks before an engine is compared; also the memory of its mean, in blocks. Fewer: noise is
believed (8: of two equal vLLM engines on two busy cores, one was priced a quarter faster for three
seconds). More: an engine that recovers is believed later."""
KNOWN_BLOCKS = 8
"""Blocks before an engine counts for the pool's middle, and goes on against what it showed itself.
More: the faster of two is known first, and the load that the other then loses keeps it from being
compared."""
BAND = 0.1
"""Difference from the pool's middle, in logs, that is not worth acting on. Lower: engines that are
equal are priced apart by what runs beside them. Higher: a loss of about as many percent."""
NUM_ERRORS = 4.0
"""Standard errors beyond the band before a factor is used. Lower: noise is believed. Higher:
differences are noticed late, or never, on noisy machines."""
START_DEVIATION = 0.1
"""How far blocks of one engine scatter, before any has been seen."""
MIN_DEVIATION = 0.02
"""How far they scatter at least."""
MAX_DEVIATION = 0.7
"""Most that one step may say, in logs: twice or half of what was expected."""
GRAIN = 0.04
"""Steps in logs in which a factor is used: it changes seldom."""
MAX_FACTOR = 8.0
"""Largest factor, and the inverse of the smallest."""
MIN_SHARED_STEPS = 32
"""Steps that other engines must have shown in a cell."""
MAX_ALONE_STEPS = 64
"""Steps in a row of one engine after which it is taken to work alone."""
CELL_STEPS = 4_096
"""Memory of a cell in steps of each engine. Shorter: a cell that one engine fills follows it, and
its factor stays when its speed changes."""
FADE_STEPS = 4_096
"""Steps that the engines of the pool do on average while one that shows nothing keeps its factor;
some minutes. Shorter: an engine that is rightly avoided is tried again more often."""


@dataclass(slots=True)
class _Engine:
    """What one engine has shown."""

    cell_steps: dict[int, int] = field(default_factory=dict)
    """Steps that have moved each cell, ever."""
    block: float = 0.0
    """Sum of the deviations in the block that is being filled."""
    num_block_steps: int = 0
    level: float = 0.0
    """Mean of the blocks, in logs against the cells."""
    variance: float = START_DEVIATION**2
    """Of single blocks about the mean."""
    num_blocks: int = 0
    block_at: int = 0
    """Steps of the pool at the end of the last block."""
    relative: float = 0.0
    """The level against the pool's middle."""
    log_factor: float = 0.0
    """What is used."""

    def forget(self) -> None:
        """Keep only what others are compared with."""
        self.level = self.relative = self.log_factor = self.block = 0.0
        self.variance = START_DEVIATION**2
        self.num_blocks = self.num_block_steps = 0

    @property
    def error(self) -> float:
        """Standard error of `level`, a mean that forgets, from the scatter of blocks."""
        weight = 1.0 / MIN_BLOCKS
        return sqrt(max(self.variance, MIN_DEVIATION**2) * weight / (2.0 - weight))


class TimeFactors:
    """Which engines of a pool take longer or shorter than the others, and by what factor."""

    def __init__(self) -> None:
        self._engines: dict[EngineId, _Engine] = {}
        self._cells: dict[int, list[float]] = {}
        """Of each cell: the mean log time of a step at its centre, and how many steps."""
        self.num_changes = 0
        """How often a factor has changed."""
        self._num_steps = 0
        self._compared_at = 0
        self._latest: EngineId | None = None
        self._num_in_a_row = 0

    def factor(self, engine_id: EngineId) -> float:
        """Step time of an engine over the pool's middle; 1 while no difference is sure."""
        engine = self._engines.get(engine_id)
        return exp(engine.log_factor) if engine is not None and engine.log_factor else 1.0

    def forget(self, engine_id: EngineId) -> None:
        """Start anew with an engine: it was started again, perhaps on another machine."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            self.num_changes += engine.log_factor != 0.0
            engine.forget()

    def observe(
        self,
        engine_id: EngineId,
        *,
        step_ns: float,
        num_running: int,
        num_kv_tokens: int,
        prices: NDArray[np.float64],
    ) -> bool:
        """Learn from a step of `engine_id`; return whether a factor changed.

        The load is that of the rank which sets the step, `prices` [3] are a, b, c of the pool. A
        time that cannot be is left out, as is a step of nothing.
        """
        if not (isfinite(step_ns) and step_ns > 0.0) or num_running <= 0 or num_kv_tokens < 0:
            return False
        base, request, kv_token = prices.tolist()
        here = base + request * num_running + kv_token * num_kv_tokens
        if here <= 0.0:
            return False
        engine = self._engines.get(engine_id)
        if engine is None:
            engine = self._engines[engine_id] = _Engine()
        self._num_steps += 1
        if engine_id != self._latest:
            self._latest, self._num_in_a_row = engine_id, 0
        self._num_in_a_row += 1

        octave, kv_octave = num_running.bit_length(), num_kv_tokens.bit_length()
        number = octave << 8 | kv_octave
        centre = base + 0.75 * (request * (1 << octave) + kv_token * (1 << kv_octave))
        time = log(step_ns * centre / here)

        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = [time - engine.level, 0.0]
        own_steps = engine.cell_steps.get(number, 0)
        is_shared = cell[1] - own_steps >= MIN_SHARED_STEPS
        is_known = engine.num_blocks >= KNOWN_BLOCKS
        deviation = time - cell[0] - engine.level
        deviation = min(MAX_DEVIATION, max(-MAX_DEVIATION, deviation))
        if is_shared or not is_known or own_steps < MIN_SHARED_STEPS:
            engine.cell_steps[number] = own_steps + 1
            cell[1] += 1.0
            cell[0] += deviation / min(cell[1], CELL_STEPS * len(self._engines))
        if not (is_shared or is_known) or self._num_in_a_row > MAX_ALONE_STEPS:
            return False
        engine.block += deviation
        engine.num_block_steps += 1
        if engine.num_block_steps < BLOCK_STEPS:
            return False
        self._end_block(engine)
        if self._num_steps - self._compared_at < len(self._engines):
            return False  # another engine's block ended just now
        return self._compare()

    def _end_block(self, engine: _Engine) -> None:
        off = engine.block / engine.num_block_steps
        engine.block, engine.num_block_steps = 0.0, 0
        engine.num_blocks += 1
        engine.block_at = self._num_steps
        engine.level += off / min(engine.num_blocks, MIN_BLOCKS)
        if engine.num_blocks > 1:  # the first has nothing to differ from
            engine.variance += (off * off - engine.variance) / MIN_BLOCKS

    def _compare(self) -> bool:
        """Set every factor by the engines that have shown enough lately. O(engines log engines), at
        most once in as many steps."""
        self._compared_at = self._num_steps
        oldest = self._num_steps - FADE_STEPS * len(self._engines)
        before = self.num_changes
        levels: list[float] = []
        for engine_id, engine in self._engines.items():
            if engine.num_blocks and engine.block_at < oldest:
                self.forget(engine_id)
            elif engine.num_blocks >= KNOWN_BLOCKS:
                levels.append(engine.level)
        middle = median(levels) if levels else 0.0
        for engine in self._engines.values():
            if engine.num_blocks < MIN_BLOCKS:
                continue
            engine.relative = engine.level - middle
            wanted = _log_factor(engine)
            self.num_changes += wanted != engine.log_factor
            engine.log_factor = wanted
        return self.num_changes != before


def _log_factor(engine: _Engine) -> float:
    """What to use for an engine from now on."""
    size = abs(engine.relative)
    if engine.log_factor == 0.0:
        if size <= BAND + NUM_ERRORS * engine.error:
            return 0.0
    elif size < BAND:
        return 0.0
    if abs(engine.relative - engine.log_factor) < 0.75 * GRAIN:
        return engine.log_factor
    wanted = GRAIN * round(engine.relative / GRAIN)
    return max(-log(MAX_FACTOR), min(log(MAX_FACTOR), wanted))
