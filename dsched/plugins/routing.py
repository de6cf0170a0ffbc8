"""What the router asks: filters first, then one pick or the sum of weighted scores."""

from collections.abc import Sequence
from functools import partial

from dsched.plugins.answers import check_flags, check_position, check_scores
from dsched.plugins.contract import RankCandidate, RequestView
from dsched.plugins.guard import AnyGuard


class RoutingPolicies:
    """The operator's routing policies, in the order of asking."""

    def __init__(
        self,
        guards: Sequence[tuple[AnyGuard, float]],
    ) -> None:
        """`guards` are policies with the weight of their scores, in the order of asking."""
        self.guards = tuple(guards)

    def choose(
        self,
        request: RequestView,
        candidates: Sequence[RankCandidate],
        *,
        default: int | None = None,
    ) -> tuple[int, str] | None:
        """Return a position in `candidates` and the name of who chose; `None` for the default.

        `default` is the position that the router has chosen: it stands where filters keep it and
        nobody picks or scores. Where they leave it out, the cheapest that they keep is chosen.
        """
        if not candidates:
            return None
        kept, filters = self._kept(request, candidates)
        offered = tuple(candidates[index] for index in kept)
        check = partial(check_position, num_candidates=len(offered))
        for guard, _ in self._with("pick"):
            position = guard.call(partial(guard.policy.pick, request, offered), check)
            if position is not None:
                return kept[position], guard.name
        best = self._best_score(request, offered)
        if best is not None:
            return kept[best[0]], best[1]
        if len(kept) < len(candidates) and default not in kept:
            cheapest = min(kept, key=lambda index: (candidates[index].cost_ns, index))
            return cheapest, "+".join(filters)
        return None

    def close(self) -> None:
        """End the guards' threads."""
        for guard, _ in self.guards:
            guard.close()

    def _with(self, method: str) -> list[tuple[AnyGuard, float]]:
        return [each for each in self.guards if each[0].has(method)]

    def _kept(
        self, request: RequestView, candidates: Sequence[RankCandidate]
    ) -> tuple[list[int], list[str]]:
        """The positions that filters keep, and the names of those that left some out."""
        kept = list(range(len(candidates)))
        names: list[str] = []
        for guard, _ in self._with("keep"):
            offered = tuple(candidates[index] for index in kept)
            flags = guard.call(
                partial(guard.policy.keep, request, offered),
                partial(check_flags, num_candidates=len(offered)),
            )
            if flags is not None and any(flags) and not all(flags):
                kept = [index for index, flag in zip(kept, flags, strict=True) if flag]
                names.append(guard.name)
        return kept, names

    def _best_score(
        self, request: RequestView, offered: Sequence[RankCandidate]
    ) -> tuple[int, str] | None:
        totals = [0.0] * len(offered)
        names = []
        for guard, weight in self._with("score"):
            scores = guard.call(
                partial(guard.policy.score, request, offered),
                partial(check_scores, num_candidates=len(offered)),
            )
            if scores is not None:
                names.append(guard.name)
                pairs = zip(totals, scores, strict=True)
                totals = [total + weight * score for total, score in pairs]
        if not names:
            return None
        return min(range(len(offered)), key=lambda index: (totals[index], index)), "+".join(names)
