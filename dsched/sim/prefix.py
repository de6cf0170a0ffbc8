"""Prefix reuse of one simulated rank: which leading prompt tokens need no computing.

Prompts are remembered in blocks, each known by a hash over the prompt up to its end, in least
recently used order. The memory is beside the rank's KV tokens: a running request holds its whole
context whether or not others share it. Real engines share blocks, so this model is pessimistic
about room and right about prefill work. Hashes of whole numbers do not depend on PYTHONHASHSEED.
"""

from collections import OrderedDict
from collections.abc import Iterator

from dsched.sim.traces import PREFIX_BLOCK_TOKENS


class PrefixCache:
    """Remembers up to `capacity_tokens` of prompts; 0 remembers nothing."""

    def __init__(self, capacity_tokens: int) -> None:
        self._max_blocks = capacity_tokens // PREFIX_BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def num_cached_tokens(self, prompt: tuple[int, ...]) -> int:
        """Count the leading tokens of `prompt` that are remembered, in whole blocks."""
        num_blocks = 0
        if self._blocks:
            for block in self._hashes(prompt):
                if block not in self._blocks:
                    break
                num_blocks += 1
        return num_blocks * PREFIX_BLOCK_TOKENS

    def remember(self, prompt: tuple[int, ...]) -> None:
        """Remember the whole blocks of `prompt`, the first ones as the most recent."""
        if not self._max_blocks:
            return
        for block in reversed(list(self._hashes(prompt))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

    @staticmethod
    def _hashes(prompt: tuple[int, ...]) -> Iterator[int]:
        chain = 0
        for start in range(0, len(prompt) - PREFIX_BLOCK_TOKENS + 1, PREFIX_BLOCK_TOKENS):
            chain = hash((chain, prompt[start : start + PREFIX_BLOCK_TOKENS]))
            yield chain
