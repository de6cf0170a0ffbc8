"""plan_recovery: which method for which request, and what it promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsched.drivers.base import FinishReason
from dsched.drivers.wire import SamplingParams
from dsched.faults import RecoveryGuarantee, RecoveryMethod, plan_recovery

JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("sampling", "method", "guarantee"),
    [
        (SamplingParams(max_tokens=9, temperature=0.0), "continue", "exact"),
        (SamplingParams(max_tokens=9, top_k=1), "continue", "exact"),
        (SamplingParams(max_tokens=9), "continue", "continuation"),
        (SamplingParams(max_tokens=9, temperature=0.7), "continue", "continuation"),
        (SamplingParams(max_tokens=9, temperature=0.7, seed=1), "replay", "exact"),
        (SamplingParams(max_tokens=9, temperature=0.0, seed=1), "continue", "exact"),
        (SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1.0), "replay", "exact"),
        (SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=1.0), "replay", "exact"),
        (
            SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=1.2),
            "continue",
            "exact",
        ),
        (SamplingParams(max_tokens=9, temperature=0.0, structured_output=JSON), "replay", "exact"),
        (SamplingParams(max_tokens=9, structured_output=JSON), "refuse", "refused"),
        (SamplingParams(max_tokens=9, frequency_penalty=0.1), "refuse", "refused"),
        (SamplingParams(max_tokens=9, frequency_penalty=0.1, seed=3), "replay", "exact"),
    ],
)
def test_method_follows_what_the_engine_keeps(
    sampling: SamplingParams, method: str, guarantee: str
) -> None:
    """Tokens alone are continued; hidden state is replayed; what cannot be repeated is refused."""
    plan = plan_recovery(sampling, num_output_tokens=4)

    assert (plan.method.value, plan.guarantee.value) == (method, guarantee)
    assert bool(plan.reason) == (method == "refuse")


@given(
    max_tokens=st.integers(1, 1_000),
    min_tokens=st.integers(0, 1_000),
    share=st.floats(0, 1),
    temperature=st.sampled_from([None, 0.0, 0.7]),
    seed=st.sampled_from([None, 5]),
    penalty=st.sampled_from([None, 0.0, 0.5]),
    grammar=st.sampled_from([None, JSON]),
)
def test_limits_add_up_whatever_was_asked(
    max_tokens: int,
    min_tokens: int,
    share: float,
    temperature: float | None,
    seed: int | None,
    penalty: float | None,
    grammar: dict[str, str] | None,
) -> None:
    """Sent tokens and the next attempt's limit are the request's limit together."""
    num_output_tokens = int(share * max_tokens)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        seed=seed,
        presence_penalty=penalty,
        structured_output=grammar,
    )

    plan = plan_recovery(sampling, num_output_tokens=num_output_tokens)

    if plan.sampling is not None:
        carried = plan.num_prompt_output_tokens
        assert carried + plan.sampling.max_tokens == max_tokens
        assert plan.sampling.min_tokens == max(0, min_tokens - carried)
        # Every sent token is either in the prompt or expected again, never both, never neither.
        assert carried + plan.num_replayed_tokens == num_output_tokens
    if num_output_tokens == 0:
        assert plan.method is RecoveryMethod.RESTART
    elif num_output_tokens == max_tokens:
        assert plan.finish_reason is FinishReason.LENGTH
    if plan.method is not RecoveryMethod.REFUSE:
        assert plan.guarantee is not RecoveryGuarantee.REFUSED


@pytest.mark.parametrize("num_output_tokens", [-1, 10])
def test_a_count_that_cannot_be_is_refused(num_output_tokens: int) -> None:
    """The message names both numbers."""
    with pytest.raises(ValueError, match=rf"{num_output_tokens} tokens were emitted of at most 9"):
        plan_recovery(SamplingParams(max_tokens=9), num_output_tokens=num_output_tokens)
