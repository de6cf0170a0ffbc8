"""Decide how a request that a client repeats after dsched itself died goes on.

In:  what the journal has under the same id, the repeated request, and how many tokens the client
     says it has (SSE `Last-Event-ID`).
Out: a `ResumePlan`: begin anew, go on from the journal's tokens, or refuse.

The journal's file is behind the client by at most the flush interval (20 ms by default): a killed
dsched may have sent tokens that the file does not have. Where the answer repeats itself (greedy or
seeded) they are computed again and come out the same. Where it does not, a client that names
more tokens than the file has is refused, because the rest would not fit what it has.

A client that names nothing reads from the first token again, so nothing can come twice: it gets the
recorded tokens and then the rest, or a new answer.

Pure. O(prompt).
"""

from dataclasses import dataclass
from enum import StrEnum

from dsched.drivers.base import FinishReason
from dsched.drivers.wire import SamplingParams
from dsched.faults.journal import RequestRecord
from dsched.faults.recovery import RecoveryMethod, is_greedy, plan_recovery


class ResumeKind(StrEnum):
    """How the repeated request is served."""

    NEW = "new"
    """From its first token, without the journal."""
    CONTINUE = "continue"
    """The recorded tokens first, then the rest."""
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePlan:
    """How the repeated request is served."""

    kind: ResumeKind
    output_token_ids: tuple[int, ...] = ()
    """What goes out first, with `CONTINUE`."""
    finish_reason: FinishReason | None = None
    """The recorded tokens are all there is, and this is how they ended."""
    reason: str = ""
    """Why it is refused, for the client."""


def plan_resume(
    record: RequestRecord | None,
    *,
    model: str,
    prompt_token_ids: tuple[int, ...],
    sampling: SamplingParams,
    num_client_tokens: int | None,
) -> ResumePlan:
    """Choose how to serve a request whose id the journal may know.

    Args:
        record: what the journal has under this id; open requests of this process excepted.
        model: of the request that came now.
        prompt_token_ids: of the request that came now.
        sampling: of the request that came now.
        num_client_tokens: tokens that the client has, by its `Last-Event-ID`; `None` without one.

    Raises:
        ValueError: `num_client_tokens` is negative.
    """
    if num_client_tokens is not None and num_client_tokens < 0:
        raise ValueError(f"num_client_tokens is {num_client_tokens}; it must not be negative")
    wanted = num_client_tokens or 0
    repeats_itself = is_greedy(sampling) or sampling.seed is not None
    if record is None or not _is_same(record, model, prompt_token_ids, sampling):
        if wanted and not repeats_itself:
            return _refuse(wanted, "the journal does not know this request")
        return ResumePlan(kind=ResumeKind.NEW)
    ended = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}.get(
        record.finish_reason or ""
    )
    if ended and num_client_tokens is None:
        return ResumePlan(kind=ResumeKind.NEW)  # the id was used again for another answer
    num_recorded = len(record.output_token_ids)
    if wanted > num_recorded and not repeats_itself:
        return _refuse(wanted, f"the journal has {num_recorded}")
    if sampling.logprobs is not None or num_recorded == 0:
        # Log-probabilities are not recorded; an answer that repeats itself gives them again.
        if wanted and not repeats_itself:
            return _refuse(wanted, "log-probabilities are not recorded")
        return ResumePlan(kind=ResumeKind.NEW)
    recovery = plan_recovery(sampling, num_output_tokens=num_recorded)
    if not ended and recovery.method is RecoveryMethod.REFUSE:
        return _refuse(wanted, recovery.reason) if wanted else ResumePlan(kind=ResumeKind.NEW)
    return ResumePlan(
        kind=ResumeKind.CONTINUE,
        output_token_ids=record.output_token_ids,
        finish_reason=ended,
    )


def _refuse(num_client_tokens: int, reason: str) -> ResumePlan:
    return ResumePlan(
        kind=ResumeKind.REFUSE,
        reason=f"the answer cannot be continued after {num_client_tokens} tokens: {reason}",
    )


def _is_same(
    record: RequestRecord, model: str, prompt_token_ids: tuple[int, ...], sampling: SamplingParams
) -> bool:
    return (
        record.model == model
        and record.prompt_token_ids == prompt_token_ids
        and record.sampling == sampling
    )
