"""What speculation achieved: acceptance by position, emitted tokens, waste.

In:  after each step, how many draft tokens of each request were verified and how many accepted.
Out: counts, and the acceptance that requests without a history of their own start from.

"Accepted length" is counted in three ways in the field; dsched stores the first only, and
`accepted_tokens` is the one place where the others are turned into it.
"""

from enum import StrEnum

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEFAULT_ACCEPTANCE = 0.7
"""Conditional acceptance assumed before anything was verified: between chat and code drafters."""

PRIOR_VERIFIES = 20.0
"""How many verified tokens the assumption counts for: few enough to be forgotten in a step or two
of a full batch, enough that one rejection does not stop speculation."""


class LengthConvention(StrEnum):
    """What an engine or a paper means by the length that was accepted."""

    ACCEPTED = "accepted"
    """Draft tokens kept: dsched, vLLM's `num_accepted_tokens`, SGLang's correct drafts."""
    EMITTED = "emitted"
    """The target token too: papers' τ, vLLM's mean acceptance length, SGLang's commit length."""
    WITH_BONUS = "with_bonus"
    """The target token only where all verified drafts were accepted (vLLM's bonus token)."""


def accepted_tokens(
    lengths: ArrayLike, *, convention: LengthConvention | str, verified: ArrayLike
) -> NDArray[np.int64]:
    """Return draft tokens kept, from `lengths` [R] in another convention.

    `verified` [R] are the verify lengths. Raises ValueError for a length that cannot be.

    >>> accepted_tokens([1, 3, 4], convention="emitted", verified=[3, 3, 3]).tolist()
    [0, 2, 3]
    >>> accepted_tokens([0, 2, 4], convention="with_bonus", verified=[3, 3, 3]).tolist()
    [0, 2, 3]
    """
    given = np.asarray(lengths, dtype=np.int64)
    most = np.asarray(verified, dtype=np.int64)
    convention = LengthConvention(convention)
    if convention is LengthConvention.EMITTED:
        accepted = given - 1
    elif convention is LengthConvention.WITH_BONUS:
        accepted = np.where(given > most, given - 1, given)
        if (given == most).any():
            raise ValueError(
                f"{most[given == most][0]} accepted of as many verified always earn a bonus token"
            )
    else:
        accepted = given
    wrong = (accepted < 0) | (accepted > most)
    if wrong.any():
        raise ValueError(
            f"length {given[wrong][0]} ({convention}) is impossible with {most[wrong][0]} verified"
        )
    return accepted


def convert_lengths(
    accepted: ArrayLike, *, convention: LengthConvention | str, verified: ArrayLike
) -> NDArray[np.int64]:
    """Return `accepted` [R] draft tokens in another convention; inverse of `accepted_tokens`."""
    kept = np.asarray(accepted, dtype=np.int64)
    most = np.asarray(verified, dtype=np.int64)
    check_outcomes(kept, most)
    convention = LengthConvention(convention)
    if convention is LengthConvention.EMITTED:
        return kept + 1
    if convention is LengthConvention.WITH_BONUS:
        return np.where(kept == most, kept + 1, kept)
    return kept


def check_outcomes(accepted: NDArray[np.int64], verified: NDArray[np.int64]) -> None:
    """Raise ValueError unless 0 <= accepted <= verified, [R] each."""
    if accepted.ndim != 1 or accepted.shape != verified.shape:
        raise ValueError(
            f"accepted has shape {accepted.shape} and verified {verified.shape}; "
            "both must be one number a request"
        )
    wrong = (accepted < 0) | (accepted > verified)
    if wrong.any():
        raise ValueError(f"{accepted[wrong][0]} accepted of {verified[wrong][0]} verified tokens")


class AcceptanceStatistics:
    """State: counts since the start, and a decayed acceptance of each position."""

    def __init__(self, num_positions: int, *, decay: float = 0.999) -> None:
        """`decay` (0..1) is what a step keeps of the average before it."""
        if num_positions < 1:
            raise ValueError(f"num_positions is {num_positions}; at least 1 is needed")
        if not 0.0 < decay <= 1.0:
            raise ValueError(f"decay is {decay}; it must be in (0, 1]")
        self.num_positions = num_positions
        self.num_verifies = 0
        self.num_drafted = 0
        self.num_verified = 0
        self.num_accepted = 0
        self._decay = decay
        self._reached = np.zeros(num_positions, dtype=np.int64)
        self._kept = np.zeros(num_positions, dtype=np.int64)
        self._recent_reached = np.full(num_positions, PRIOR_VERIFIES)
        self._recent_kept = np.full(num_positions, PRIOR_VERIFIES * DEFAULT_ACCEPTANCE)

    def apply(
        self, *, verified: ArrayLike, accepted: ArrayLike, drafted: ArrayLike | None = None
    ) -> None:
        """Count one step: draft tokens verified and accepted [R] (and drafted, default K each)."""
        most = np.asarray(verified, dtype=np.int64)
        kept = np.asarray(accepted, dtype=np.int64)
        check_outcomes(kept, most)
        if most.size and most.max() > self.num_positions:
            raise ValueError(f"{most.max()} verified of {self.num_positions} positions")
        # Position k is reached by requests that verified it and kept all before it.
        last_reached = np.minimum(kept + 1, most)
        reached = _count_at_least(last_reached, self.num_positions)
        kept_at = _count_at_least(kept, self.num_positions)
        self.num_verifies += most.size
        self.num_verified += int(most.sum())
        self.num_accepted += int(kept.sum())
        self.num_drafted += (
            most.size * self.num_positions
            if drafted is None
            else int(np.asarray(drafted, dtype=np.int64).sum())
        )
        self._reached += reached
        self._kept += kept_at
        self._recent_reached = self._recent_reached * self._decay + reached
        self._recent_kept = self._recent_kept * self._decay + kept_at

    @property
    def acceptance(self) -> NDArray[np.float64]:
        """[K] recent share of tokens at each position that were kept when all before them were:
        what `plan_verify_lengths` takes as `acceptance`."""
        acceptance: NDArray[np.float64] = self._recent_kept / self._recent_reached
        return acceptance

    @property
    def acceptance_by_position(self) -> NDArray[np.float64]:
        """[K] the same since the start; NaN at positions that were never reached."""
        with np.errstate(invalid="ignore"):
            return self._kept / self._reached

    @property
    def num_emitted(self) -> int:
        """Tokens that clients got: accepted ones and one target token a verify."""
        return self.num_accepted + self.num_verifies

    @property
    def num_wasted(self) -> int:
        """Draft tokens that were verified and rejected, or verified behind a rejected one."""
        return self.num_verified - self.num_accepted

    @property
    def mean_emitted_length(self) -> float:
        """Emitted tokens a verify (papers' τ); 1 before anything was verified."""
        return self.num_emitted / self.num_verifies if self.num_verifies else 1.0

    @property
    def mean_verify_length(self) -> float:
        """Budget a request: draft tokens verified a verify."""
        return self.num_verified / self.num_verifies if self.num_verifies else 0.0


def _count_at_least(values: NDArray[np.int64], num_positions: int) -> NDArray[np.int64]:
    """[K] how many of `values` are at least 1..K."""
    counts = np.bincount(values, minlength=num_positions + 1)
    at_least: NDArray[np.int64] = np.cumsum(counts[::-1])[::-1][1 : num_positions + 1]
    return at_least
