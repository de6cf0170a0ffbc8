"""When experts are placed anew, and by which dsched: the elected one, for engines that take it.

In:  expert loads and slots of the engines, membership, and the leader epoch. Out: `PlaceExperts`
commands to every engine of a group. Two occasions:

- **Now and then** the loads since the last plan are weighed against the placement in use
  (`prepare` and `apply`; the planning between them may run on another thread).
- **A rank was lost, or came back**: the group is planned at once, in the tick in which routing
  stopped using it (`on_membership_changed`).

Only the elected leader commands, and every command carries its epoch, so that one that lost its
lease while it planned is refused. A plan is dropped when membership has changed meanwhile. The
placement in use is what the engines say, never what was sent: a new leader goes on from there.

State: what was last planned for. One thread owns it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from dsched.controller.observer import HandoffGap
from dsched.controller.placement import plan_group_placement
from dsched.drivers.base import Driver, ExpertLoadSource, ExpertSlots, PlacementTarget
from dsched.drivers.wire import PlaceExperts
from dsched.eplb import ExpertPlacement, PlacementPlan, balancedness
from dsched.faults.membership import GroupView, MembershipView
from dsched.ids import EngineId
from dsched.plugins import RebalanceView

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupTask:
    """What is needed to plan one EP group; holds copies only."""

    view: MembershipView
    ep_group: str
    load: NDArray[np.int64]
    """[L, E]"""
    slots: ExpertSlots
    max_moves: int | None

    def plan(self) -> PlacementPlan:
        """Plan the placement; pure. Raises `ValueError` where no placement is possible."""
        group = self.view.group(self.ep_group)
        current = self.slots
        return plan_group_placement(
            self.view,
            self.ep_group,
            self.load,
            num_slots=current.slot_expert.shape[1],
            current=self.placement(),
            ep_ranks_per_dp_rank=current.num_ranks // len(group.ranks),
            num_nodes=current.num_nodes,
            max_moves=self.max_moves,
        )

    def placement(self) -> ExpertPlacement:
        """The placement in use."""
        return ExpertPlacement(
            slot_expert=self.slots.slot_expert,
            num_ranks=self.slots.num_ranks,
            num_experts=self.load.shape[1],
        )


class Rebalancer:
    """Implements `ControllerObserver`."""

    def __init__(
        self,
        drivers: Mapping[EngineId, Driver],
        *,
        leader_epoch: Callable[[], int | None],
        max_moves: int | None = None,
        is_due: Callable[[RebalanceView], bool] = lambda view: True,  # noqa: ARG005
    ) -> None:
        """`is_due` is asked of each group now and then, before it is planned by load."""
        self._drivers = drivers
        self._is_due = is_due
        self._times_asked: dict[str, int] = {}
        self._leader_epoch = leader_epoch
        self._max_moves = max_moves
        self.is_ready = False
        """The planner is compiled: before, a tick would wait for it, so nothing is planned."""
        self._view: MembershipView | None = None
        self._rank_up: dict[str, tuple[bool, ...]] = {}
        """Of each group, as last planned for or found whole."""
        self.num_placements: dict[str, int] = {}
        """Commands sent, by what they were sent for; labels of a metric."""

    # ---- ControllerObserver

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        """Nothing to do."""

    def on_membership_changed(self, view: MembershipView) -> None:
        """Plan the groups that lost ranks, or got some back, before this tick ends."""
        self._view = view
        for group in view.groups:
            old = self._rank_up.get(group.name)
            self._rank_up[group.name] = group.rank_up
            is_new = old is None or len(old) != len(group.rank_up)
            if is_new or old == group.rank_up or not any(group.rank_up):
                continue
            task = self._task_of(group)
            if task is not None:
                self._place(task, cause="ranks")

    # ---- now and then

    def prepare(self) -> Iterator[GroupTask]:
        """What there is to plan now; nothing for a process that does not lead."""
        if self._leader_epoch() is None or self._view is None:
            return
        for group in self._view.groups:
            if any(group.rank_up):
                task = self._task_of(group)
                if task is not None and self._is_due(self._rebalance_view(task)):
                    yield task

    def _rebalance_view(self, task: GroupTask) -> RebalanceView:
        times_asked = self._times_asked.get(task.ep_group, 0)
        self._times_asked[task.ep_group] = times_asked + 1
        balance = balancedness(task.placement(), task.load)
        return RebalanceView(
            num_times_asked=times_asked,
            worst_balancedness=float(balance.min()),
            mean_balancedness=float(balance.mean()),
        )

    def apply(self, task: GroupTask, plan: PlacementPlan) -> bool:
        """Command a plan, unless it moves nothing or came too late; whether it was sent."""
        current = self._view
        if current is None or current.epoch != plan.placement.epoch:
            log.info("placement.dropped", ep_group=task.ep_group, epoch=plan.placement.epoch)
            return False
        if plan.is_unchanged:
            return False
        return self._send(task, plan, cause="load")

    def _place(self, task: GroupTask, *, cause: str) -> None:
        try:
            plan = task.plan()
        except ValueError as error:
            log.warning("placement.impossible", ep_group=task.ep_group, reason=str(error))
            return
        self._send(task, plan, cause=cause)

    def _task_of(self, group: GroupView) -> GroupTask | None:
        """`None` for a group whose engines place experts themselves, or have counted nothing."""
        if not self.is_ready or self._leader_epoch() is None or self._view is None:
            return None
        slots: ExpertSlots | None = None
        load: NDArray[np.int64] | None = None
        for engine_id in sorted({rank.rank_id.engine_id for rank in group.ranks}):
            driver = self._drivers[engine_id]
            if not isinstance(driver, PlacementTarget) or not isinstance(driver, ExpertLoadSource):
                return None
            found, counted = driver.expert_slots(), driver.expert_load()
            if found is None:
                return None
            slots = slots or found
            if counted is not None and load is not None and counted.counts.shape != load.shape:
                return None
            if counted is not None:
                load = counted.counts if load is None else load + counted.counts
        if slots is None or load is None:
            return None
        return GroupTask(
            view=self._view,
            ep_group=group.name,
            load=load,
            slots=slots,
            max_moves=self._max_moves,
        )

    def _send(self, task: GroupTask, plan: PlacementPlan, *, cause: str) -> bool:
        leader_epoch = self._leader_epoch()
        if leader_epoch is None:
            return False
        command = PlaceExperts(
            epoch=plan.placement.epoch,
            leader_epoch=leader_epoch,
            slot_expert=tuple(tuple(row) for row in plan.placement.slot_expert.tolist()),
        )
        group = task.view.group(task.ep_group)
        for engine_id in sorted({rank.rank_id.engine_id for rank in group.ranks}):
            driver = self._drivers[engine_id]
            if isinstance(driver, PlacementTarget):
                driver.place_experts(command)
        self._times_asked[task.ep_group] = 0
        self.num_placements[cause] = self.num_placements.get(cause, 0) + 1
        log.info(
            "placement.commanded",
            ep_group=task.ep_group,
            cause=cause,
            num_moves=int(plan.num_moves.sum()),
            balance=round(float(plan.balance.min()), 4),
            epoch=command.epoch,
            leader_epoch=leader_epoch,
        )
        return True
