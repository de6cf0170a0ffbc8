"""AcceptanceStatistics and the conventions of "accepted length"."""

import numpy as np
import pytest

from dsched.spec_decode.statistics import (
    DEFAULT_ACCEPTANCE,
    AcceptanceStatistics,
    LengthConvention,
    accepted_tokens,
    convert_lengths,
)

VERIFIED = [3, 3, 3, 0, 1]
ACCEPTED = [0, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("convention", "lengths"),
    [
        ("accepted", [0, 2, 3, 0, 1]),
        ("emitted", [1, 3, 4, 1, 2]),
        ("with_bonus", [0, 2, 4, 1, 2]),
    ],
)
def test_three_conventions_of_one_outcome(convention: str, lengths: list[int]) -> None:
    """vLLM's rejection sampler, the papers' τ, and the bonus token in vLLM's narrow sense."""
    assert convert_lengths(ACCEPTED, convention=convention, verified=VERIFIED).tolist() == lengths
    assert accepted_tokens(lengths, convention=convention, verified=VERIFIED).tolist() == ACCEPTED


@pytest.mark.parametrize("convention", list(LengthConvention))
def test_conversion_and_back_is_the_identity(convention: LengthConvention) -> None:
    verified = np.repeat(np.arange(6), 6)
    accepted = np.minimum(np.tile(np.arange(6), 6), verified)

    there = convert_lengths(accepted, convention=convention, verified=verified)
    back = accepted_tokens(there, convention=convention, verified=verified)

    assert back.tolist() == accepted.tolist()


@pytest.mark.parametrize(
    ("convention", "length"), [("accepted", 4), ("emitted", 0), ("emitted", 5), ("with_bonus", 3)]
)
def test_impossible_lengths_are_refused(convention: str, length: int) -> None:
    """With three verified: no five emitted, and three kept of three would have earned a bonus."""
    with pytest.raises(ValueError, match=str(length)):
        accepted_tokens([length], convention=convention, verified=[3])


def test_counts_of_one_step() -> None:
    statistics = AcceptanceStatistics(3)

    statistics.apply(verified=VERIFIED, accepted=ACCEPTED, drafted=[3, 3, 3, 3, 3])

    assert statistics.num_verifies == 5
    assert statistics.num_drafted == 15
    assert statistics.num_verified == 10
    assert statistics.num_accepted == 6
    assert statistics.num_emitted == 11
    assert statistics.num_wasted == 4
    assert statistics.mean_emitted_length == pytest.approx(11 / 5)
    assert statistics.mean_verify_length == pytest.approx(2.0)
    # Reached: position 1 by four, 2 by the two that kept 1 and verified 2, 3 by both of them.
    assert statistics.acceptance_by_position.tolist() == pytest.approx([3 / 4, 1.0, 1 / 2])


def test_nothing_verified_yet() -> None:
    statistics = AcceptanceStatistics(2)

    assert statistics.mean_emitted_length == 1.0
    assert statistics.mean_verify_length == 0.0
    assert np.isnan(statistics.acceptance_by_position).all()
    assert statistics.acceptance.tolist() == pytest.approx([DEFAULT_ACCEPTANCE] * 2)


def test_running_acceptance_follows_what_changes() -> None:
    """The average that new requests start from forgets; the count since the start does not."""
    statistics = AcceptanceStatistics(1, decay=0.9)
    for _ in range(100):
        statistics.apply(verified=[1] * 10, accepted=[1] * 10)
    for _ in range(100):
        statistics.apply(verified=[1] * 10, accepted=[0] * 10)

    assert statistics.acceptance[0] < 0.01
    assert statistics.acceptance_by_position[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("verified", "accepted", "message"),
    [
        ([1], [2], "2 accepted of 1"),
        ([1], [-1], "-1 accepted of 1"),
        ([1, 1], [1], r"accepted has shape \(1,\)"),
        ([4], [1], "4 verified of 3 positions"),
    ],
)
def test_impossible_outcomes_are_refused(
    verified: list[int], accepted: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AcceptanceStatistics(3).apply(verified=verified, accepted=accepted)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="num_positions is 0"):
        AcceptanceStatistics(0)
    with pytest.raises(ValueError, match=r"decay is 1\.5"):
        AcceptanceStatistics(3, decay=1.5)
