"""The simulated model: which token comes next is a pure function of the tokens before it.

A 64-bit chain runs over prompt and output alike: `h' = h * M + (token + 1)`. The next token is a
mix of `h`, so

- token k of a request is a function of (prompt, k) alone: any reader can tell whether a stream is
  right, and
- an attempt whose prompt is "prompt + tokens emitted before the handoff" continues the same
  stream, because the chain does not know where the prompt ended.

Sampling with a temperature mixes the seed in (no seed counts as seed 0, so even then a stream
repeats); greedy ignores the seed. Everything is vectorised over requests: some ten numpy calls a
step.

The tokens of a model with a tokenizer are chosen among readable ones (`ordinary_tokens`); a token
that begins a character of several bytes forces its continuation (`forced_next`), so that text is
valid UTF-8 and characters do get split over tokens, as with real models.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.drivers.wire import SamplingParams, TokenLogprob

_M = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_EOS_SALT = np.uint64(0xD6E8FEB86659FD93)
_SEED_SALT = 0xA0761D6478BD642F
_MASK = (1 << 64) - 1
_SHIFT = np.uint64(32)

ChainArray = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimModel:
    """What the simulated engine says.

    >>> model = SimModel(vocab_size=100)
    >>> prompt = (1, 2, 3)
    >>> tokens = model.stream(prompt, 5)
    >>> model.stream(prompt + tokens[:2], 3) == tokens[2:]
    True
    """

    vocab_size: int = 1_024
    ordinary_tokens: NDArray[np.int32] | None = None
    """Token ids to choose from; `None`: all but those that begin and end an answer."""
    forced_next: NDArray[np.int32] | None = None
    """[vocab_size] the one token that may follow, or -1 for a free choice; `None`: all free."""
    eos_token_id: int | None = None
    mean_output_tokens: float = 256.0
    """With `eos_token_id`: tokens until the end, on average (geometric)."""
    turn_token_id: int | None = None
    """Token that begins an answer. When given, only answers that began so end by themselves."""
    min_output_tokens: int = 0
    """With `turn_token_id`: tokens after it before which the model never ends."""

    def __post_init__(self) -> None:
        if not 1 <= self.vocab_size <= 1 << 24:
            raise ValueError(f"vocab_size {self.vocab_size} is not within 1..{1 << 24}")
        if self.eos_token_id is not None and not 0 <= self.eos_token_id < self.vocab_size:
            raise ValueError(f"eos_token_id {self.eos_token_id} is not below {self.vocab_size}")
        if not self.mean_output_tokens >= 1:
            raise ValueError(f"mean_output_tokens {self.mean_output_tokens} must be at least 1")
        ordinary = self.ordinary_tokens
        if ordinary is None:
            ordinary = np.arange(self.vocab_size, dtype=np.int32)
            marks = [mark for mark in (self.eos_token_id, self.turn_token_id) if mark is not None]
            ordinary = ordinary[~np.isin(ordinary, marks)]
        if len(ordinary) == 0 or ordinary.min() < 0 or ordinary.max() >= self.vocab_size:
            raise ValueError(f"ordinary_tokens must be ids below {self.vocab_size}, at least one")
        object.__setattr__(self, "ordinary_tokens", ordinary)
        if self.forced_next is not None and len(self.forced_next) != self.vocab_size:
            raise ValueError(f"{len(self.forced_next)} forced tokens for {self.vocab_size} tokens")

    # --- chain -----------------------------------------------------------------------------

    def prompt_chain(self, prompt: Sequence[int]) -> int:
        """Return the chain after `prompt`.

        Raises:
            ValueError: a token id is outside the vocabulary.
        """
        if not prompt:
            return 0
        try:
            tokens = np.frombuffer(array("q", prompt), dtype=np.int64)
        except OverflowError as error:
            raise ValueError(f"a prompt token id is not below {self.vocab_size}") from error
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"prompt token id {bad} is not within 0..{self.vocab_size - 1}")
        powers = np.full(len(tokens), _M)
        powers[0] = 1
        powers = np.cumprod(powers)[::-1]
        return int(np.dot((tokens + 1).astype(np.uint64), powers))

    def first_end(self, prompt: Sequence[int]) -> int | None:
        """Return the output tokens before which the model does not end; `None`: it never does.

        Counted from the token that began the answer, so a continuation ends where it would have.
        """
        if self.eos_token_id is None:
            return None
        if self.turn_token_id is None:
            return 0
        for distance, token in enumerate(reversed(prompt)):
            if token == self.turn_token_id:
                return max(0, self.min_output_tokens - distance)
        return None

    def salt(self, sampling: SamplingParams) -> int:
        """Return what sampling mixes into every choice; 0 when greedy."""
        if not sampling.temperature:
            return 0
        return ((sampling.seed or 0) * 2 + 1) * _SEED_SALT & _MASK

    def next_tokens(
        self, chain: ChainArray, salt: ChainArray, last_token: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Return the token [R] that follows each chain [R], end-of-sequence not considered."""
        assert self.ordinary_tokens is not None
        mixed = _mix(chain ^ salt)
        tokens: NDArray[np.int32]
        tokens = self.ordinary_tokens[(mixed >> _SHIFT) % np.uint64(len(self.ordinary_tokens))]
        if self.forced_next is not None:
            forced = self.forced_next[last_token]
            tokens = np.where(forced >= 0, forced, tokens)
        return tokens

    def ends(
        self, chain: ChainArray, salt: ChainArray, last_token: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return where [R] the model would end instead; never inside a character."""
        if self.eos_token_id is None:
            return np.zeros(len(chain), dtype=np.bool_)
        threshold = np.uint64(int(2.0**63 / self.mean_output_tokens))
        is_end = (_mix(chain ^ salt ^ _EOS_SALT) >> np.uint64(1)) < threshold
        if self.forced_next is not None:
            is_end &= self.forced_next[last_token] < 0
        return is_end

    def absorb(self, chain: ChainArray, tokens: NDArray[np.int32]) -> ChainArray:
        """Return the chain [R] after one more token each."""
        return chain * _M + (tokens + 1).astype(np.uint64)

    # --- one request -----------------------------------------------------------------------

    def stream(
        self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams | None = None
    ) -> tuple[int, ...]:
        """Return the first `num_tokens` output tokens, fewer if the model ends before.

        The reference for tests and readers: end-of-sequence and stop tokens end the stream and
        are not part of it. Context limits are the engine's, not the model's.
        """
        params = sampling or SamplingParams(max_tokens=max(1, num_tokens))
        chain = np.array([self.prompt_chain(prompt)], dtype=np.uint64)
        salt = np.array([self.salt(params)], dtype=np.uint64)
        last = np.array([prompt[-1] if prompt else 0], dtype=np.int32)
        first_end = None if params.ignore_eos else self.first_end(prompt)
        out: list[int] = []
        while len(out) < num_tokens:
            token = self.next_tokens(chain, salt, last)
            may_end = len(out) >= params.min_tokens
            is_long = first_end is not None and len(out) >= first_end
            if may_end and is_long and self.ends(chain, salt, last)[0]:
                break
            if may_end and int(token[0]) in params.stop_token_ids:
                break
            chain, last = self.absorb(chain, token), token
            out.append(int(token[0]))
        return tuple(out)

    def logprob(self, chain: int, token: int, num_top: int) -> tuple[int, TokenLogprob]:
        """Return the chain after `token`, and a made-up but repeatable log-probability of it."""
        assert self.ordinary_tokens is not None
        value = int(_mix(np.array([chain ^ _SEED_SALT], dtype=np.uint64))[0])
        logprob = -2.0 * (value >> 11) / (1 << 53)
        size = len(self.ordinary_tokens)
        top = [(token, logprob)]
        for step in range(size):
            if len(top) >= num_top:
                break
            other = int(self.ordinary_tokens[(value + step) % size])
            if other != token:
                top.append((other, logprob - 0.5 * len(top)))
        after = (chain * int(_M) + token + 1) & _MASK
        return after, TokenLogprob(token_id=token, logprob=logprob, top=tuple(top[:num_top]))


def sim_token(prompt: Sequence[int], index: int, vocab_size: int) -> int:
    """Return token `index` of the greedy answer to `prompt` by a model without ends.

    >>> sim_token((1, 2, 3), 0, 100) == SimModel(vocab_size=100).stream((1, 2, 3), 1)[0]
    True
    """
    return SimModel(vocab_size=vocab_size).stream(prompt, index + 1)[index]


def _mix(value: ChainArray) -> ChainArray:
    """Spread every bit of `value` over the whole word (the finaliser of splitmix64)."""
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
