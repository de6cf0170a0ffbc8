"""Token ids for the prompts of a trace, which holds only lengths.

Requests that share prefix blocks in the trace share those tokens, and all others differ within
their first tokens, so every request has a stream of its own. The rest of a prompt is one long
run shared by all: a slice of it costs next to nothing, and traces have hundreds of millions of
prompt tokens.
"""

import numpy as np

from dsched.rng import stream
from dsched.sim.traces import PREFIX_BLOCK_TOKENS, Trace

RUN_TOKENS = 1 << 14
"""Length of the shared run; longer prompts repeat it."""
DIGITS = 8
"""Leading tokens that tell prompts (or blocks) apart."""


class PromptMaker:
    """Makes the prompts of one trace; the same trace, vocabulary and seed give the same ones."""

    def __init__(self, trace: Trace, *, vocab_size: int, seed: int) -> None:
        self._trace = trace
        self._base = max(2, min(vocab_size, 1 << 16))
        self._limit = vocab_size
        run = stream(seed, "prompts").integers(0, vocab_size, RUN_TOKENS)
        self._run = tuple(run.tolist())

    def prompt(self, index: int) -> tuple[int, ...]:
        """Return the token ids of request `index`."""
        num_tokens = int(self._trace.num_prompt_tokens[index])
        blocks = self._trace.prefix_blocks(index)
        if blocks is None or len(blocks) == 0:
            return self._segment(index, num_tokens)
        tokens: list[int] = []
        for block in blocks.tolist():
            tokens += self._segment(block, min(PREFIX_BLOCK_TOKENS, num_tokens - len(tokens)))
        if len(tokens) < num_tokens:
            tokens += self._segment(index, num_tokens - len(tokens))
        return tuple(tokens)

    def _segment(self, number: int, num_tokens: int) -> tuple[int, ...]:
        """`num_tokens` tokens that begin with the digits of `number`."""
        digits = []
        rest = number
        for _ in range(DIGITS):
            digits.append(rest % self._base % self._limit)
            rest //= self._base
        if num_tokens <= DIGITS:
            return tuple(digits[:num_tokens])
        body = num_tokens - DIGITS
        run = self._run if body <= RUN_TOKENS else self._run * -(-body // RUN_TOKENS)
        return (*digits, *run[:body])


def check_prompts(trace: Trace) -> None:
    """Raise `ValueError` for a trace that cannot be replayed because it has no requests."""
    if trace.num_requests == 0:
        raise ValueError(
            f"{trace.source}: nothing to replay ({trace.counts.num_read} rows read, "
            f"{trace.counts.num_dropped} dropped)"
        )
    if np.any(np.diff(trace.arrival_ns) < 0):
        raise ValueError(f"{trace.source}: arrivals are not sorted; place the conversations first")
