"""Losslessness, by playing it: the first emitted token must follow the target's distribution.

The example is the DSpark paper's Appendix A (`dsched.sim.spec`): two tokens, of which the target
draws A with .7; what was drafted first shows in the confidence of the second position.
"""

from collections.abc import Callable

import pytest

from dsched.sim.spec import (
    APPENDIX_A_CONFIDENCE,
    APPENDIX_A_TARGET,
    appendix_a_cost,
    share_of_a,
)
from dsched.spec_decode import plan_verify_lengths

NUM_DRAWS = 400_000
SIGMA = (APPENDIX_A_TARGET * (1 - APPENDIX_A_TARGET) / NUM_DRAWS) ** 0.5

LengthOf = Callable[[str, str], int]


def planned(mode: str, **arguments: object) -> LengthOf:
    def length_of(now: str, before: str) -> int:
        plan = plan_verify_lengths(
            APPENDIX_A_CONFIDENCE[now],
            step_cost=appendix_a_cost(),
            history=APPENDIX_A_CONFIDENCE[before],
            mode=mode,
            **arguments,
        )
        return int(plan.lengths[0])

    return length_of


def retrospective(now: str, before: str) -> int:
    """The mistake: the budget is searched over the same survivals that it then admits."""
    return planned("asynchronous")(now, now)


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
    assert share_of_a(length_of, seed=seed, num_draws=NUM_DRAWS) == pytest.approx(
        APPENDIX_A_TARGET, abs=3 * SIGMA
    )


def test_a_retrospective_search_is_caught() -> None:
    """Verifying only after a good first token makes A appear with .5 + .5 * .7."""
    assert retrospective("A", "A") == 2
    assert retrospective("B", "A") == 0
    assert share_of_a(retrospective, seed=1, num_draws=NUM_DRAWS) == pytest.approx(
        0.85, abs=3 * SIGMA
    )


def test_modes_differ_in_the_lengths_they_choose() -> None:
    """The test above would prove little if every mode always verified."""
    assert [planned("asynchronous")("A", before) for before in "AB"] == [2, 0]
    assert [planned("synchronous")(now, "A") for now in "AB"] == [2, 1]
