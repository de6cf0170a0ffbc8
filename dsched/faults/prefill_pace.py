"""How long one engine takes for prompts: a prefill cost model that learns from its first tokens.

In: the time from dispatch to the first token of requests that an engine had for itself, with the
prompt tokens it computed for them. Out: an estimate for the prompts it has now, once
`MIN_SAMPLES` have taught it; before, `None`, and whoever asks uses what is configured.

Only requests that met an idle engine count: others waited for prompts and steps that are not
theirs. The first token is seen by a sweep, so a sample is too long by a sweep at most, and never
too short; who compares a silence with the estimate errs to the patient side.

State: mutable, owned by `ProgressWatch`. A sample is a few microseconds, one for each such request.
"""

from collections.abc import Sequence
from typing import Final

from dsched.costs.prefill import PrefillCostModel

MIN_SAMPLES: Final = 8
"""Below: the first, slow prompts of a new engine decide. Above: freezes are noticed late."""
NS_PER_S: Final = 1e9


class PrefillPace:
    """What one engine has shown.

    >>> model = PrefillCostModel.from_coefficients(fixed_s=0.01, token_s=1e-4, attention_s=0.0)
    >>> pace = PrefillPace(model)
    >>> for _ in range(MIN_SAMPLES):
    ...     pace.observe(2_010_000_000, num_computed_tokens=10_000, num_cached_tokens=0)
    >>> round(pace.estimate_ns([20_000]) / 1e9, 1)
    4.0
    """

    def __init__(self, model: PrefillCostModel) -> None:
        """`model` is where learning starts; this changes it."""
        self._model = model
        self._num_samples = 0

    def observe(self, elapsed_ns: int, *, num_computed_tokens: int, num_cached_tokens: int) -> None:
        """An idle engine took this long for a prompt."""
        if elapsed_ns <= 0 or num_computed_tokens < 1:
            return
        self._num_samples += 1
        self._model.observe(elapsed_ns / NS_PER_S, num_computed_tokens, num_cached_tokens)

    def estimate_ns(self, prompt_tokens: Sequence[int]) -> int | None:
        """Estimate the time for all these prompts, none of them cached; `None`: not known yet."""
        if self._num_samples < MIN_SAMPLES:
            return None
        tokens = [max(1, each) for each in prompt_tokens]
        return int(self._model.predict(tokens, [0] * len(tokens)) * NS_PER_S)
