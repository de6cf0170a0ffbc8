"""Decide how much load a pool may take so that it can lose its largest EP group.

In:  capacity, state and name of every EP group of a pool.
Out: a `SparePlan`: requests and KV tokens that may run at once.

With `n-1` the pool runs no more than what is left of its *configured* groups without the largest
one. While all are up, that keeps the largest group's worth of room free; when one is lost, its
requests find that room, and the survivors may be full. With `none`, everything that is up may be
used, and after a loss requests wait or end.

A pool with a single group cannot absorb its loss whatever is kept free; nothing is kept then, and
`reason` says so.

Pure. O(groups).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SpareMode = Literal["none", "n-1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCapacity:
    """One EP group: what all its ranks hold together."""

    name: str
    is_up: bool
    max_running_requests: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SparePlan:
    """What may run at once."""

    max_running_requests: int
    kv_capacity_tokens: int
    absorbs_loss: bool
    """The largest group that is up can be lost without one running request too many."""
    reserved_for: str | None
    """The group whose loss could be absorbed; `None` where nothing is kept."""
    reason: str

    def has_room(self, *, num_running: int, num_kv_tokens: int, num_new_tokens: int) -> bool:
        """Whether one more request fits. A pool without any takes one of any size."""
        if num_running == 0:
            return True
        return (
            num_running < self.max_running_requests
            and num_kv_tokens + num_new_tokens <= self.kv_capacity_tokens
        )


def plan_spare(groups: Sequence[GroupCapacity], *, mode: SpareMode) -> SparePlan:
    """Say how much may run.

    Raises `ValueError` for an unknown mode or a capacity below 1.

    >>> groups = [GroupCapacity(name=n, is_up=True, max_running_requests=r, kv_capacity_tokens=k)
    ...           for n, r, k in (("a", 8, 100), ("b", 8, 300), ("c", 8, 100))]
    >>> plan = plan_spare(groups, mode="n-1")
    >>> plan.max_running_requests, plan.kv_capacity_tokens, plan.reserved_for
    (16, 200, 'b')
    """
    if mode not in ("none", "n-1"):
        raise ValueError(f"spare mode {mode!r} is neither 'none' nor 'n-1'")
    for group in groups:
        if group.max_running_requests < 1 or group.kv_capacity_tokens < 1:
            raise ValueError(f"group {group.name!r} has no capacity: {group}")
    up = [group for group in groups if group.is_up]
    up_running = sum(group.max_running_requests for group in up)
    up_tokens = sum(group.kv_capacity_tokens for group in up)
    if mode == "none" or len(groups) < 2:
        reason = "nothing is kept free"
        if mode != "none":
            reason = f"{len(groups)} EP group: nothing can absorb its loss"
        return SparePlan(
            max_running_requests=up_running,
            kv_capacity_tokens=up_tokens,
            absorbs_loss=False,
            reserved_for=None,
            reason=reason,
        )
    largest_running = max(group.max_running_requests for group in groups)
    largest_tokens = max(group.kv_capacity_tokens for group in groups)
    running = min(up_running, sum(g.max_running_requests for g in groups) - largest_running)
    tokens = min(up_tokens, sum(g.kv_capacity_tokens for g in groups) - largest_tokens)
    is_whole = running <= up_running - max((g.max_running_requests for g in up), default=0)
    is_whole = is_whole and tokens <= up_tokens - max((g.kv_capacity_tokens for g in up), default=0)
    reserved_for = min(
        (g for g in groups), key=lambda g: (-g.kv_capacity_tokens, -g.max_running_requests, g.name)
    ).name
    reason = f"room is kept for the loss of {reserved_for}"
    if not is_whole:
        reason = f"{len(up)} of {len(groups)} EP groups are up: another loss cannot be absorbed"
    return SparePlan(
        max_running_requests=running,
        kv_capacity_tokens=tokens,
        absorbs_loss=is_whole,
        reserved_for=reserved_for if is_whole else None,
        reason=reason,
    )
