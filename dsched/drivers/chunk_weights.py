"""An operator's policy for how prompts of different lengths share prefill time, inside an engine.

In:  the prompts that a scheduler has to compute. Out: weights for the length buckets of its
planner, or `None` to leave them.

The policy is asked before one plan in `ASK_PLANS`, behind the same guard as in the control plane: a
bad one leaves the weights as they are, and the breaker takes it off the step's path. It is loaded
from the engine's own environment; one that cannot be loaded is logged, and the engine goes on
without. Imports nothing of an engine.
"""

import logging
from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from dsched.clock import Clock, SystemClock
from dsched.config import ChunkSettings
from dsched.errors import ConfigError

if TYPE_CHECKING:
    from dsched.plugins import FailureReason, PolicyGuard
    from dsched.scheduler import ChunkRule

ASK_PLANS: Final = 32
"""Plans with prompts between two questions. Below: a slow policy costs every step. Above: weights
follow a change of traffic late."""

log = logging.getLogger("dsched.chunk_weights")


class _EngineLog:
    """Writes failures to the engine's log."""

    def on_failure(self, policy: str, reason: "FailureReason", detail: str) -> None:
        log.warning("policy.failed policy=%s reason=%s detail=%s", policy, reason.value, detail)

    def on_suspended(self, policy: str, pause_s: float) -> None:
        log.warning("policy.suspended policy=%s pause_s=%s", policy, pause_s)


class ChunkWeights:
    """Asks one policy now and then. Belongs to the scheduler's thread."""

    def __init__(self, guard: "PolicyGuard[Any]", rule: "ChunkRule", clock: Clock) -> None:
        self.guard = guard
        self.num_changes = 0
        """Answers that were other weights than those in use."""
        self._bounds = rule.bucket_bounds
        self._weights = rule.bucket_weights
        self._clock = clock
        self._num_plans = 0
        self._seen_ns: dict[str, int] = {}
        """When each prompt that is left to compute was first heard of."""

    def note(self, request_id: str) -> None:
        """A request has arrived."""
        self._seen_ns.setdefault(request_id, self._clock.now_ns())

    def is_due(self) -> bool:
        """Whether to ask before the plan that is about to be made; counts it."""
        self._num_plans += 1
        return self._num_plans % ASK_PLANS == 1

    def ask(self, prompts: Iterable[tuple[str, int, int]]) -> tuple[float, ...] | None:
        """The weights to plan with from now on, where they change.

        `prompts`: (request id, tokens of the sequence, tokens left to compute) of each.
        """
        from dsched.plugins import BucketView, ask_weights

        now_ns = self._clock.now_ns()
        num_buckets = len(self._weights)
        requests, tokens, waits = [0] * num_buckets, [0] * num_buckets, [0] * num_buckets
        seen_ns: dict[str, int] = {}
        for request_id, length, remaining in prompts:
            bucket = bisect_right(self._bounds, length)
            since_ns = seen_ns[request_id] = self._seen_ns.get(request_id, now_ns)
            requests[bucket] += 1
            tokens[bucket] += remaining
            waits[bucket] = max(waits[bucket], now_ns - since_ns)
        self._seen_ns = seen_ns
        view = BucketView(
            num_requests=tuple(requests), num_tokens=tuple(tokens), oldest_wait_ns=tuple(waits)
        )
        weights = ask_weights(self.guard, view)
        if weights is None or weights == self._weights:
            return None
        self._weights = weights
        self.num_changes += 1
        return weights


def load_chunk_weights(settings: ChunkSettings, rule: "ChunkRule") -> ChunkWeights | None:
    """The policy that the environment names; `None` without one, and for one that cannot be used,
    which is logged."""
    if settings.weights_policy is None:
        return None
    # Only here: most engines have no policy, and need nothing of this.
    from dsched.plugins import ChunkWeightsPolicy, PolicyGuard, load_policy

    try:
        policy = load_policy(
            (ChunkWeightsPolicy,),
            settings.weights_policy,
            settings.weights_args,
            path="DSCHED_CHUNK_WEIGHTS",
            arguments_path="DSCHED_CHUNK_WEIGHTS_ARGS",
        )
    except ConfigError as error:
        log.warning("policy.skipped reason='%s'", error)
        return None
    guard: PolicyGuard[Any] = PolicyGuard(policy, log=_EngineLog())
    log.info("policy.loaded policy=%s", guard.name)
    return ChunkWeights(guard, rule, SystemClock())
