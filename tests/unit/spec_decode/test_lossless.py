"""Losslessness, by playing it: the first emitted token must follow the target's distribution.

The example is the DSpark paper's Appendix A. Two tokens A and B; the target draws A with .7, the
draft with .5; a step of 1, 2, 3 tokens runs 1, .5, .45 times a second. The confidence of the first
position is .8 (the overlap of both); that of the second tells what was drafted first: .9 after A,
0 after B.
"""

from collections.abc import Callable

import numpy as np
import pytest

from dsched.costs import StepCostCurve
from dsched.spec_decode import plan_verify_lengths

NUM_DRAWS = 400_000
TARGET_A, DRAFT_A = 0.7, 0.5
CONFIDENCE = {"A": [[0.8, 0.9]], "B": [[0.8, 0.0]]}
STEP_COST = StepCostCurve.from_samples([1, 2, 3], [1.0, 1 / 0.5, 1 / 0.45])

LengthOf = Callable[[str, str], int]
"""(token drafted first now, token drafted first two steps ago) -> verify length."""


def share_of_a(length_of: LengthOf, seed: int) -> float:
    """How often the first emitted token is A."""
    rng = np.random.default_rng(seed)
    now, before = np.where(rng.random((2, NUM_DRAWS)) < DRAFT_A, 0, 1)
    lengths = np.array([[length_of(x, y) for y in "AB"] for x in "AB"])
    is_verified = lengths[now, before] > 0
    # Speculative sampling: keep a drafted token with min(1, p/q), else draw from the rest, where
    # only A is left. Without a draft token the target draws itself.
    keep = np.array([min(1.0, TARGET_A / DRAFT_A), (1 - TARGET_A) / (1 - DRAFT_A)])
    is_kept = rng.random(NUM_DRAWS) < keep[now]
    verified_a = (now == 0) | ~is_kept
    drawn_a = rng.random(NUM_DRAWS) < TARGET_A
    return float(np.where(is_verified, verified_a, drawn_a).mean())


def planned(mode: str, **arguments: object) -> LengthOf:
    def length_of(now: str, before: str) -> int:
        plan = plan_verify_lengths(
            CONFIDENCE[now],
            step_cost=STEP_COST,
            history=CONFIDENCE[before],
            mode=mode,
            **arguments,
        )
        return int(plan.lengths[0])

    return length_of


def retrospective(now: str, before: str) -> int:
    """The mistake: the budget is searched over the same survivals that it then admits."""
    return planned("asynchronous")(now, now)


SIGMA = (TARGET_A * (1 - TARGET_A) / NUM_DRAWS) ** 0.5


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "length_of",
    [
        planned("asynchronous"),
        planned("synchronous"),
        planned("fixed", fixed_length=0),
        planned("fixed", fixed_length=2),
        planned("asynchronous", budget=1),
        planned("asynchronous", draft_seconds=0.5),
    ],
    ids=["asynchronous", "synchronous", "fixed 0", "fixed 2", "given", "with draft cost"],
)
def test_every_mode_keeps_the_distribution(length_of: LengthOf, seed: int) -> None:
    assert share_of_a(length_of, seed) == pytest.approx(TARGET_A, abs=3 * SIGMA)


def test_a_retrospective_search_is_caught() -> None:
    """Verifying only after a good first token makes A appear with .5 + .5 * .7."""
    assert retrospective("A", "A") == 2
    assert retrospective("B", "A") == 0
    assert share_of_a(retrospective, seed=1) == pytest.approx(0.85, abs=3 * SIGMA)


def test_modes_differ_in_the_lengths_they_choose() -> None:
    """The test above would prove little if every mode always verified."""
    assert [planned("asynchronous")("A", before) for before in "AB"] == [2, 0]
    assert [planned("synchronous")(now, "A") for now in "AB"] == [2, 1]
