"""All policies of one dsched process, as the controller asks them.

Each question has a default for where no policy of its kind is configured, and for where one fails.
A set is made once, at the start or at a reload, and replaced as a whole between two ticks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from dsched.plugins.answers import check_admission, check_position, check_priority, check_truth
from dsched.plugins.contract import (
    AdmissionAnswer,
    AdmissionView,
    RankCandidate,
    RebalanceView,
    RequestView,
)
from dsched.plugins.guard import AnyGuard, FailureReason
from dsched.plugins.routing import RoutingPolicies


@dataclass(slots=True)
class PolicyCounts:
    """What one policy was asked, since the start."""

    num_calls: int = 0
    busy_ns: int = 0
    num_failures: dict[FailureReason, int] = field(
        default_factory=lambda: dict.fromkeys(FailureReason, 0)
    )

    def add(self, other: "PolicyCounts") -> None:
        self.num_calls += other.num_calls
        self.busy_ns += other.busy_ns
        for reason, count in other.num_failures.items():
            self.num_failures[reason] += count


class PolicySet:
    """The operator's policies; what is `None` asks nobody."""

    def __init__(
        self,
        *,
        routing: RoutingPolicies | None = None,
        admission: AnyGuard | None = None,
        priority: AnyGuard | None = None,
        handoff: AnyGuard | None = None,
        rebalance: AnyGuard | None = None,
    ) -> None:
        """One guard may stand in several places: its policy then remembers across them."""
        self.routing = routing
        self.admission = admission
        self.priority = priority
        self.handoff = handoff
        self.rebalance = rebalance
        self._before: dict[str, PolicyCounts] = {}
        """Counted by the sets that this one replaced."""

    def guards(self) -> Iterator[AnyGuard]:
        """Each guard once."""
        routing = [guard for guard, _ in self.routing.guards] if self.routing else []
        seen: list[AnyGuard] = []
        others = (self.admission, self.priority, self.handoff, self.rebalance)
        for guard in (*routing, *others):
            if guard is not None and not any(guard is each for each in seen):
                seen.append(guard)
                yield guard

    @property
    def names(self) -> tuple[str, ...]:
        """The policies' own names, each once, sorted."""
        return tuple(sorted({guard.name for guard in self.guards()}))

    def counts(self) -> dict[str, PolicyCounts]:
        """By policy name, sorted; sets that were replaced count on."""
        counts: dict[str, PolicyCounts] = {}
        own = [
            (guard.name, PolicyCounts(guard.num_calls, guard.busy_ns, guard.num_failures))
            for guard in self.guards()
        ]
        for name, each in (*self._before.items(), *own):
            counts.setdefault(name, PolicyCounts()).add(each)
        return dict(sorted(counts.items()))

    def replace(self, old: "PolicySet") -> None:
        """Count on where `old` is; call it once, when this set takes its place."""
        self._before = old.counts()

    def is_refused(self, request: RequestView, view: AdmissionView) -> bool:
        """Whether a request that arrives gets a 429. The default accepts."""
        guard = self.admission
        if guard is None:
            return False
        answer = guard.call(partial(guard.policy.admit, request, view), check_admission)
        return answer is AdmissionAnswer.REFUSE

    def priority_of(self, request: RequestView) -> int:
        """The priority of a request that arrives; larger goes first. The default is 0."""
        guard = self.priority
        if guard is None:
            return 0
        return guard.call(partial(guard.policy.priority, request), check_priority) or 0

    def choose(
        self,
        request: RequestView,
        candidates: Sequence[RankCandidate],
        *,
        is_handoff: bool = False,
        default: int | None = None,
    ) -> tuple[int, str] | None:
        """Return a position in `candidates` and who chose it; `None` for the router's own choice,
        which is `default`.

        After the loss of an engine the handoff policy is asked first, then routing's.
        """
        if is_handoff and self.handoff is not None and candidates:
            guard = self.handoff
            position = guard.call(
                partial(guard.policy.pick_handoff, request, candidates),
                partial(check_position, num_candidates=len(candidates)),
            )
            if position is not None:
                return position, guard.name
        if self.routing is None:
            return None
        return self.routing.choose(request, candidates, default=default)

    def should_rebalance(self, view: RebalanceView) -> bool:
        """Whether the experts of a group are placed anew now. The default is yes."""
        guard = self.rebalance
        if guard is None:
            return True
        answer = guard.call(partial(guard.policy.should_rebalance, view), check_truth)
        return answer is not False

    def close(self) -> None:
        """End the guards' threads."""
        for guard in self.guards():
            guard.close()
