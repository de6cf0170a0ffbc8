"""Decide how a request goes on after its attempt was lost.

In:  what the request asked for and what the journal has of its answer.
Out: a `RecoveryPlan`: one of four methods, and what the client may be told about it.

- **finish**: the last token was out and only the end was missing. Nothing is computed.
- **restart**: nothing was sent yet. The same request again, exact whatever it asks for.
- **continue**: prompt + emitted tokens become the prompt of the next attempt, and the limits shrink
  by what was emitted. Cheap (one prefill, or a KV load), and right when the next token depends on
  the tokens alone.
- **replay**: the same request again from its first token; what was sent already is compared with
  the journal and not sent twice. For what an engine keeps beside the tokens (penalty counts, the
  state of a grammar, a seeded generator), which a longer prompt would reset: a grammar started at
  its root gives two JSON documents in one answer (ai-dynamo/dynamo#7930).

What can neither be continued nor replayed honestly is refused, so the client gets an error instead
of a wrong answer. That is sampling without a seed together with such state.

Pure. O(1).
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from dsched.drivers.base import FinishReason
from dsched.drivers.wire import SamplingParams


class RecoveryMethod(StrEnum):
    """How the next attempt is made."""

    FINISH = "finish"
    RESTART = "restart"
    CONTINUE = "continue"
    REPLAY = "replay"
    REFUSE = "refuse"


class RecoveryGuarantee(StrEnum):
    """What the client can rely on; told to it."""

    EXACT = "exact"
    """The answer is the one that an undisturbed run gives, as far as the engine repeats itself."""
    CONTINUATION = "continuation"
    """Sampled: the tokens sent so far stand, and the rest is drawn anew from the same model."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPlan:
    """How a request goes on."""

    method: RecoveryMethod
    guarantee: RecoveryGuarantee
    sampling: SamplingParams | None = None
    """For the next attempt; `None` when there is none."""
    num_prompt_output_tokens: int = 0
    """Emitted tokens that follow the prompt in the next attempt's prompt."""
    num_replayed_tokens: int = 0
    """Tokens at the start of the next attempt's answer that the client has already."""
    finish_reason: FinishReason | None = None
    """Only with `FINISH`."""
    reason: str = ""
    """Why it is refused, for the client."""


def plan_recovery(sampling: SamplingParams, *, num_output_tokens: int) -> RecoveryPlan:
    """Choose the cheapest method that keeps the promise.

    Args:
        sampling: what the request asked for at first.
        num_output_tokens: tokens that the journal has, so the client has or will have.

    Raises:
        ValueError: more tokens were emitted than the request allows.

    >>> greedy = SamplingParams(max_tokens=8, temperature=0.0, min_tokens=6)
    >>> plan = plan_recovery(greedy, num_output_tokens=5)
    >>> plan.method.value, plan.sampling.max_tokens, plan.sampling.min_tokens
    ('continue', 3, 1)
    >>> plan_recovery(greedy, num_output_tokens=8).finish_reason.value
    'length'
    """
    if not 0 <= num_output_tokens <= sampling.max_tokens:
        raise ValueError(
            f"{num_output_tokens} tokens were emitted of at most {sampling.max_tokens}"
        )
    if num_output_tokens == 0:
        return RecoveryPlan(
            method=RecoveryMethod.RESTART, guarantee=RecoveryGuarantee.EXACT, sampling=sampling
        )
    is_repeatable = is_greedy(sampling) or sampling.seed is not None
    if num_output_tokens == sampling.max_tokens:
        return RecoveryPlan(
            method=RecoveryMethod.FINISH,
            guarantee=RecoveryGuarantee.EXACT,
            finish_reason=FinishReason.LENGTH,
        )
    state = hidden_state(sampling)
    if state is None:
        return _continue(sampling, num_output_tokens=num_output_tokens)
    if is_repeatable:
        return RecoveryPlan(
            method=RecoveryMethod.REPLAY,
            guarantee=RecoveryGuarantee.EXACT,
            sampling=sampling,
            num_replayed_tokens=num_output_tokens,
        )
    return RecoveryPlan(
        method=RecoveryMethod.REFUSE,
        guarantee=RecoveryGuarantee.REFUSED,
        reason=f"{state} cannot be carried to another engine for sampling without a seed",
    )


def is_greedy(sampling: SamplingParams) -> bool:
    """Whether the next token is the likeliest one. An absent temperature means 1."""
    return sampling.temperature == 0.0 or sampling.top_k == 1


def hidden_state(sampling: SamplingParams) -> str | None:
    """Name what an engine keeps of a request beside its tokens; `None` for nothing.

    Repetition penalty looks at prompt and output alike, so a longer prompt changes nothing.
    """
    if sampling.structured_output is not None:
        return "the state of a grammar"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "penalty counts"
    if sampling.seed is not None and not is_greedy(sampling):
        return "the state of a random generator"
    return None


def _continue(sampling: SamplingParams, *, num_output_tokens: int) -> RecoveryPlan:
    rest = msgspec.structs.replace(
        sampling,
        max_tokens=sampling.max_tokens - num_output_tokens,
        min_tokens=max(0, sampling.min_tokens - num_output_tokens),
    )
    is_exact = is_greedy(sampling)
    return RecoveryPlan(
        method=RecoveryMethod.CONTINUE,
        guarantee=RecoveryGuarantee.EXACT if is_exact else RecoveryGuarantee.CONTINUATION,
        sampling=rest,
        num_prompt_output_tokens=num_output_tokens,
    )
