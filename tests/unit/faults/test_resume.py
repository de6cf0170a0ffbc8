"""plan_resume: a request that its client repeats after dsched was restarted."""

import pytest

from dsched.drivers.base import FinishReason
from dsched.drivers.wire import SamplingParams
from dsched.faults import RequestRecord, ResumeKind, ResumePlan, plan_resume
from dsched.ids import RequestId

GREEDY = SamplingParams(max_tokens=50, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=50, temperature=0.8)
SEEDED = SamplingParams(max_tokens=50, temperature=0.8, seed=3)
PROMPT = (1, 2, 3)


def resume(
    sampling: SamplingParams,
    *,
    recorded: int | None = 5,
    has: int | None = None,
    reason: str | None = None,
    prompt: tuple[int, ...] = PROMPT,
) -> ResumePlan:
    record = None
    if recorded is not None:
        record = RequestRecord(
            request_id=RequestId("r"),
            model="m",
            prompt_token_ids=PROMPT,
            num_prompt_tokens=len(PROMPT),
            sampling=sampling,
            attempts=(),
            output_token_ids=tuple(range(recorded)),
            finish_reason=reason,
        )
    return plan_resume(
        record, model="m", prompt_token_ids=prompt, sampling=sampling, num_client_tokens=has
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SEEDED])
@pytest.mark.parametrize("has", [None, 0, 3, 5])
def test_recorded_tokens_go_out_first(sampling: SamplingParams, has: int | None) -> None:
    """Whatever the client has of them."""
    plan = resume(sampling, has=has)

    assert (plan.kind, plan.output_token_ids) == (ResumeKind.CONTINUE, (0, 1, 2, 3, 4))
    assert plan.finish_reason is None


def test_a_client_ahead_of_the_file_goes_on_where_answers_repeat_themselves() -> None:
    """The flush interval costs nothing there, and an honest error where it would."""
    assert resume(GREEDY, has=7).kind is ResumeKind.CONTINUE
    assert resume(SEEDED, has=7).kind is ResumeKind.CONTINUE
    refused = resume(SAMPLED, has=7)
    assert refused.kind is ResumeKind.REFUSE
    assert refused.reason == ("the answer cannot be continued after 7 tokens: the journal has 5")


def test_an_unknown_request_begins_anew_unless_the_client_counts_on_it() -> None:
    """Greedy repeats itself; sampled tokens that the client has would not come again."""
    assert resume(GREEDY, recorded=None, has=9).kind is ResumeKind.NEW
    assert resume(SAMPLED, recorded=None).kind is ResumeKind.NEW
    assert resume(SAMPLED, recorded=None, has=0).kind is ResumeKind.NEW
    assert resume(SAMPLED, recorded=None, has=9).kind is ResumeKind.REFUSE


def test_another_request_under_the_same_id_is_another_request() -> None:
    """An id alone is not enough."""
    assert resume(GREEDY, prompt=(9,)).kind is ResumeKind.NEW
    assert resume(SAMPLED, prompt=(9,), has=2).kind is ResumeKind.REFUSE


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_whole_answer_is_given_again_only_to_who_counts(reason: str) -> None:
    """A client that uses one id for many requests gets a new answer."""
    assert resume(SAMPLED, reason=reason).kind is ResumeKind.NEW
    again = resume(SAMPLED, reason=reason, has=2)
    assert again.kind is ResumeKind.CONTINUE
    assert again.finish_reason is FinishReason(reason)


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_a_broken_answer_goes_on(reason: str) -> None:
    """A client that was cut off, or told that its engine was lost, asks again."""
    assert resume(GREEDY, reason=reason).kind is ResumeKind.CONTINUE


def test_what_cannot_be_continued_begins_anew_or_is_refused() -> None:
    """Penalty counts without a seed; log-probabilities, which nobody recorded."""
    penalty = SamplingParams(max_tokens=50, temperature=0.8, presence_penalty=0.5)
    assert resume(penalty).kind is ResumeKind.NEW
    assert resume(penalty, has=2).kind is ResumeKind.REFUSE
    logprobs = SamplingParams(max_tokens=50, temperature=0.8, logprobs=2)
    assert resume(logprobs).kind is ResumeKind.NEW
    assert resume(logprobs, has=2).kind is ResumeKind.REFUSE


def test_a_negative_count_is_refused() -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match="num_client_tokens is -1"):
        resume(GREEDY, has=-1)
