"""`dsched.routing.time_factors` without memory, blocks or thresholds: one fit to all steps."""

from collections.abc import Sequence

import numpy as np

Step = tuple[int, float, int, int]
"""Engine, step time in ns, running requests, KV tokens."""


def engine_factors(steps: Sequence[Step], *, num_engines: int, prices: np.ndarray) -> np.ndarray:
    """[E] factors of the additive model log time = cell + engine, by least squares; median 1."""
    cells = [(running.bit_length(), kv.bit_length()) for _, _, running, kv in steps]
    numbers = {cell: number for number, cell in enumerate(sorted(set(cells)))}
    design = np.zeros((len(steps), num_engines + len(numbers)))
    target = np.zeros(len(steps))
    for row, (engine, step_ns, running, kv) in enumerate(steps):
        octave, kv_octave = cells[row]
        design[row, engine] = 1.0
        design[row, num_engines + numbers[cells[row]]] = 1.0
        centre = prices @ [1.0, 0.75 * 2**octave, 0.75 * 2**kv_octave]
        target[row] = np.log(step_ns * centre / (prices @ [1.0, running, kv]))
    fitted = np.linalg.lstsq(design, target, rcond=None)[0][:num_engines]
    return np.asarray(np.exp(fitted - np.median(fitted)))
