"""From a change of membership to expert placements: the planner of `dsched.eplb` asked in time.

In:  a `MembershipView`, and what a group's experts carry. Out: a `PlacementPlan` for the ranks that
are left, made for the view's epoch. Called from `ControllerObserver.on_membership_changed`, so in
the tick in which the rank was lost and routing stopped using it.

Pure, as the planner is.
"""

from numpy.typing import ArrayLike

from dsched.eplb import ExpertPlacement, PlacementPlan, plan_placement
from dsched.faults import MembershipView


def plan_group_placement(
    view: MembershipView,
    ep_group: str,
    load: ArrayLike,
    *,
    num_slots: int,
    current: ExpertPlacement | None = None,
    ep_ranks_per_dp_rank: int = 1,
    num_nodes: int = 1,
    max_moves: int | None = None,
) -> PlacementPlan:
    """Place the experts of one EP group on the ranks that are up.

    Args:
        view: membership now.
        ep_group: name of the group.
        load: [L, E] tokens of each expert.
        num_slots: slots of all ranks together, those of lost ranks included.
        current: the placement in use.
        ep_ranks_per_dp_rank: EP ranks of one DP rank (its tensor parallel size).
        num_nodes: nodes of the group.
        max_moves: copies that may move in each layer.

    Raises:
        ValueError: there is no such group, it has said nothing of its ranks, or its live slots do
            not hold all experts.

    >>> from dsched.faults.membership import *
    >>> from dsched.drivers.base import EngineCapabilities, EngineDescription
    >>> from dsched.ids import DpRank, EngineId, RankId
    >>> spec = EngineSpec(engine_id=EngineId("e"), model="m", is_elastic=True)
    >>> membership = Membership([PoolSpec(name="p", model="m", engines=(spec,))])
    >>> _ = membership.apply_up(EngineDescription(
    ...     engine_id=EngineId("e"), kind="sim", model="m", max_model_len=9, vocab_size=None,
    ...     num_dp_ranks=4, kv_capacity_tokens=9, max_running_requests=1,
    ...     capabilities=EngineCapabilities()))
    >>> _ = membership.apply_rank_lost(RankId(EngineId("e"), DpRank(1)), "gone")
    >>> plan = plan_group_placement(membership.view(), "e", [[9, 1, 1, 1]], num_slots=8)
    >>> plan.placement.slot_expert[0, 2:4].tolist(), plan.placement.epoch == membership.epoch
    ([-1, -1], True)
    """
    if ep_ranks_per_dp_rank < 1:
        raise ValueError(f"ep_ranks_per_dp_rank is {ep_ranks_per_dp_rank}; it must be at least 1")
    group = view.group(ep_group)
    if not group.ranks:
        raise ValueError(f"EP group {ep_group!r} has not said what ranks it has")
    rank_up = [is_up for is_up in group.rank_up for _ in range(ep_ranks_per_dp_rank)]
    return plan_placement(
        load,
        num_slots=num_slots,
        num_ranks=len(rank_up),
        num_nodes=num_nodes,
        current=current,
        max_moves=max_moves,
        rank_up=rank_up,
        epoch=view.epoch,
    )
