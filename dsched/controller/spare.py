"""What a pool may run so that it can lose its largest EP group, kept up to date with membership.

`dsched.faults.spare` decides; this reads capacity from membership and load from the router.
"""

from dataclasses import dataclass

import structlog

from dsched.faults.membership import Membership
from dsched.faults.spare import GroupCapacity, SpareMode, SparePlan, plan_spare
from dsched.routing import DecodeRouter
from dsched.routing import kernels as k
from dsched.states import RankState

log = structlog.get_logger(__name__)

UNKNOWN_CAPACITY = 1 << 40
"""Room of a rank whose engine does not say: never the reason to hold a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLoad:
    """What runs in a pool now."""

    num_running: int
    num_kv_tokens: int


class SpareGate:
    """The limit of one pool."""

    def __init__(self, pool: str, *, mode: SpareMode) -> None:
        self._pool = pool
        self._mode: SpareMode = mode
        self.plan: SparePlan = plan_spare((), mode=mode)

    def update(self, membership: Membership) -> None:
        """Plan again after a change of membership; say so in the log when the limit moved."""
        plan = plan_spare(self._groups(membership), mode=self._mode)
        if plan == self.plan:
            return
        self.plan = plan
        log.info(
            "capacity.changed",
            pool=self._pool,
            max_running_requests=_known(plan.max_running_requests),
            kv_capacity_tokens=_known(plan.kv_capacity_tokens),
            absorbs_loss=plan.absorbs_loss,
            reason=plan.reason,
        )

    def _groups(self, membership: Membership) -> list[GroupCapacity]:
        """Groups that were ever up: nobody knows what the others hold."""
        running: dict[str, int] = {}
        tokens: dict[str, int] = {}
        is_up: dict[str, bool] = {}
        for _, member in sorted(membership.engines.items()):
            description = member.description
            if member.pool != self._pool or description is None:
                continue
            group = member.spec.group
            ranks = description.num_dp_ranks
            capacity = description.kv_capacity_tokens or UNKNOWN_CAPACITY
            most = description.max_running_requests or UNKNOWN_CAPACITY
            running[group] = running.get(group, 0) + ranks * most
            tokens[group] = tokens.get(group, 0) + ranks * capacity
            is_up[group] = is_up.get(group, True) and member.state < RankState.DRAINING
        return [
            GroupCapacity(
                name=group,
                is_up=is_up[group],
                max_running_requests=running[group],
                kv_capacity_tokens=tokens[group],
            )
            for group in sorted(running)
        ]

    def has_room(self, router: DecodeRouter, *, num_new_tokens: int) -> bool:
        """Whether one more request may run. O(ranks), and only where something is kept free."""
        if self.plan.reserved_for is None:
            return True
        load = pool_load(router)
        return self.plan.has_room(
            num_running=load.num_running,
            num_kv_tokens=load.num_kv_tokens,
            num_new_tokens=num_new_tokens,
        )


def pool_load(router: DecodeRouter) -> PoolLoad:
    """Requests and KV tokens on the ranks that are not gone, ours and others'."""
    table = router.ledger.table[:, : router.num_ranks]
    # One product instead of a sum a row: this is asked for every request.
    totals = (table @ (table[k.STATE] < k.DOWN)).tolist()
    return PoolLoad(
        num_running=totals[k.OWN_RUNNING] + totals[k.OTHER_RUNNING],
        num_kv_tokens=totals[k.OWN_KV] + totals[k.OTHER_KV],
    )


def _known(value: int) -> int | None:
    return value if value < UNKNOWN_CAPACITY else None
