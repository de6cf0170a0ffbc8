"""The simplest step cost: a sum of terms, each linear in one kind of work.

It is what the simulator runs on when nobody has measured anything. The defaults are assumptions
in the range of a large MoE with compressed KV on current accelerators, not measurements:

- 15 ms for a step without work (weights, all-to-all),
- 0.2 ms for each request that decodes,
- 26 ns for each KV token that decodes read (70 KB a token at 2.7 TB/s),
- 0.08 ms for each prefill token (12,000 tokens a second),
- 3.4 ns for each pair of a chunk token and a token before it (attention costs as much as the
  rest of the layer at a context of 24,000 tokens).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineStepCost:
    """Step time of each DP rank, if it stepped alone. All terms in nanoseconds.

    >>> cost = AffineStepCost()
    >>> one = lambda count: np.array([count])
    >>> int(cost.step_ns(one(0), one(0), one(1), one(1_000))[0])
    15226000
    """

    base_ns: float = 15_000_000
    per_decode_request_ns: float = 200_000
    per_kv_token_ns: float = 26
    per_prefill_token_ns: float = 80_000
    per_prefill_context_ns: float = 3.4

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < np.inf:
                raise ValueError(f"{name} {value} must not be negative, and must be finite")
        if self.base_ns < 1:
            raise ValueError(f"base_ns {self.base_ns} must be at least 1: a step takes time")

    def step_ns(
        self,
        num_prefill_tokens: NDArray[np.int64],
        prefill_context_tokens: NDArray[np.int64],
        num_decode_requests: NDArray[np.int64],
        num_kv_tokens: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return the step time [D] for the work [D] of each rank.

        `prefill_context_tokens` is the sum over chunks of (chunk tokens x mean context of the
        chunk); `num_kv_tokens` counts the context of the decodes only.
        """
        total = self.per_decode_request_ns * num_decode_requests + self.base_ns
        total = total + self.per_kv_token_ns * num_kv_tokens
        total = total + self.per_prefill_token_ns * num_prefill_tokens
        total = total + self.per_prefill_context_ns * prefill_context_tokens
        rounded: NDArray[np.int64] = np.rint(total).astype(np.int64)
        return rounded
