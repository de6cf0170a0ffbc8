"""Expert load of a simulated engine, for the live picture. Simulated, and nothing is planned on it.

A simulated engine has no experts: it is given layers whose popularity is a power law that drifts
(`dsched.sim.eplb.LoadShape`), and each window has as many tokens as the engine computed in it. The
last window stays while the engine is idle, as with an engine that counts.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dsched.drivers.base import ExpertLoad
from dsched.sim.eplb import LoadShape, generate_expert_load

WINDOW_NS: Final = 2_000_000_000
"""Of simulated expert load. Engines take a thousand steps; nobody would watch that change."""
NUM_SHAPES: Final = 16
"""Windows of popularity that are gone through forwards and backwards in turn."""


class SimExpertLoad:
    """Counts one engine's tokens by expert.

    >>> load = SimExpertLoad(num_layers=2, num_experts=8, top_k=2, seed=1)
    >>> load.read(now_ns=0, num_steps=0, num_tokens=0) is None
    True
    >>> int(load.read(now_ns=WINDOW_NS, num_steps=3, num_tokens=100).counts[0].sum())
    200
    """

    def __init__(self, *, num_layers: int, num_experts: int, top_k: int, seed: int) -> None:
        self._shape = LoadShape(
            num_layers=num_layers, num_experts=num_experts, drift=0.12, num_trades=1
        )
        self._top_k = top_k
        self._seed = seed
        self._popularity: NDArray[np.float64] | None = None
        self._last: ExpertLoad | None = None
        self._start_ns: int | None = None
        self._start = (0, 0)
        """Steps and tokens at the start of the window."""
        self._num_windows = 0

    def read(self, *, now_ns: int, num_steps: int, num_tokens: int) -> ExpertLoad | None:
        """The last full window; counts are the engine's since its start."""
        if self._start_ns is None:
            self._start_ns = now_ns
        tokens = num_tokens - self._start[1]
        if now_ns - self._start_ns < WINDOW_NS or tokens <= 0:
            return self._last
        counts = _apportion(self._next_share(), tokens * self._top_k)
        self._last = ExpertLoad(
            counts=counts,
            num_steps=num_steps - self._start[0],
            time_ns=now_ns,
            is_simulated=True,
        )
        self._start_ns, self._start = now_ns, (num_steps, num_tokens)
        return self._last

    def _next_share(self) -> NDArray[np.float64]:
        """[L, E] share of each expert in its layer."""
        if self._popularity is None:
            load = generate_expert_load(self._shape, num_windows=NUM_SHAPES, seed=self._seed)
            self._popularity = load / load.sum(axis=2, keepdims=True)
        turn = self._num_windows % (2 * NUM_SHAPES - 2)
        self._num_windows += 1
        share: NDArray[np.float64] = self._popularity[min(turn, 2 * NUM_SHAPES - 2 - turn)]
        return share


def _apportion(share: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """[L, E] whole tokens that add up to `total` in each layer; ties go to the lower number."""
    exact = share * total
    counts = np.floor(exact).astype(np.int64)
    order = np.argsort(-(exact - counts), axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    missing = total - counts.sum(axis=1, keepdims=True)
    counts += place < missing
    return counts
