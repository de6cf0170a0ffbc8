"""Applies what engines say and what operators ask of them: membership first, then routing.

In:  facts about engines, and load reports. Out: membership, the routers' copies of it, and the
requests that have to leave (`withdrawal`).
"""

import structlog

from dsched.controller.events import (
    DrainAsked,
    EngineProgressed,
    EngineWentDown,
    RankCameBack,
    RankLost,
)
from dsched.controller.spare import UNKNOWN_CAPACITY
from dsched.controller.state import ControllerState
from dsched.controller.withdrawal import Withdrawal
from dsched.drivers.base import EngineDescription
from dsched.drivers.wire import RankReport
from dsched.faults.membership import EngineMember
from dsched.ids import DpRank, EngineId, RankId
from dsched.routing import ReportOutcome
from dsched.states import LossLayer, RankState

log = structlog.get_logger(__name__)


class Engines:
    """What becomes of facts about engines."""

    def __init__(self, state: ControllerState, withdrawal: Withdrawal) -> None:
        self._state = state
        self._withdrawal = withdrawal
        self._told_epoch = state.membership.epoch

    # ---- reports: they decide nothing, so they do not wait for a tick

    def apply_report(self, report: RankReport) -> None:
        """Correct the ledger at once."""
        state = self._state
        record = state.membership.engines.get(EngineId(report.engine_id))
        if record is None:
            state.counts.unknown_reports += 1
            return
        pool = state.pools[record.pool]
        rank_id = RankId(record.spec.engine_id, DpRank(report.dp_rank))
        now_ns = state.clock.now_ns()
        outcome = pool.apply_report(rank_id, report, now_ns)
        if outcome is ReportOutcome.APPLIED:
            state.recorder.on_report(report, now_ns)
            last = state.last_reports.get(rank_id)
            state.last_reports[rank_id] = report
            if last is None or last.step != report.step:
                self._note_step(record)
            elif report.num_running == report.num_waiting == 0:
                # It has nothing to step for, and has let go of what was taken from it: it lives.
                self._trust(record)
            if pool.router.num_held:
                state.host.request_tick()

    def _note_step(self, record: EngineMember) -> None:
        if self._state.watch is not None:
            self._state.watch.note_step(record.spec.engine_id, self._state.clock.now_ns())
        self._trust(record)

    def _trust(self, record: EngineMember) -> None:
        if record.own_state is RankState.SUSPECT:
            self._state.push(EngineProgressed(engine_id=record.spec.engine_id))

    # ---- facts

    def apply_up(self, description: EngineDescription) -> None:
        """The engine answers: give its ranks to the router."""
        state = self._state
        record = state.membership.engines[description.engine_id]
        old_rank_ids = list(record.rank_ids())
        state.membership.apply_up(description)
        if record.reason and record.state is RankState.DOWN:
            log.error("engine.refused", engine_id=description.engine_id, reason=record.reason)
        else:
            log.info(
                "engine.came_up",
                engine_id=description.engine_id,
                kind=description.kind,
                model=description.model,
                num_dp_ranks=description.num_dp_ranks,
                epoch=state.membership.epoch,
            )
        pool = state.pools[record.pool]
        for rank_id in old_rank_ids[description.num_dp_ranks :]:
            pool.remove_rank(rank_id)
        for rank_id in record.rank_ids():
            pool.add_rank(
                rank_id,
                kv_capacity_tokens=description.kv_capacity_tokens or UNKNOWN_CAPACITY,
                max_running_requests=description.max_running_requests or UNKNOWN_CAPACITY,
            )
        state.sync_group(description.engine_id)

    def apply_down(self, event: EngineWentDown) -> None:
        """The engine cannot serve, or is not heard."""
        state, membership = self._state, self._state.membership
        epoch = membership.epoch
        record = membership.apply_down(event.engine_id, event.reason, evidence=event.evidence)
        state.sync_group(event.engine_id)
        if membership.epoch == epoch:
            return
        log.warning(
            "engine.went_down",
            engine_id=event.engine_id,
            state=record.state.name.lower(),
            reason=record.reason,
            evidence=event.evidence.value,
            epoch=membership.epoch,
        )
        if record.own_state is RankState.DOWN:
            # Its own attempts fail by themselves; its group's others may not have noticed yet.
            for mate in membership.group_of(event.engine_id):
                if mate is not record and mate.state is RankState.DOWN:
                    self._withdrawal.lose_engine(mate.spec.engine_id, mate.reason)

    def apply_progressed(self, event: EngineProgressed) -> None:
        """A suspect engine works again."""
        state = self._state
        state.membership.apply_trusted(event.engine_id)
        state.sync_group(event.engine_id)
        log.info("engine.trusted", engine_id=event.engine_id, epoch=state.membership.epoch)

    def apply_rank_lost(self, event: RankLost) -> None:
        """One DP rank is gone while its engine answers. Said again, it changes nothing."""
        state, engine_id = self._state, event.rank_id.engine_id
        known = state.membership.engines.get(engine_id)
        if known is None or event.rank_id not in list(known.rank_ids()):
            log.warning("rank.unknown", engine_id=engine_id, dp_rank=event.rank_id.dp_rank)
            return
        if event.rank_id.dp_rank in known.lost_ranks:
            return
        record = state.membership.apply_rank_lost(event.rank_id, event.reason)
        log.warning(
            "rank.lost",
            engine_id=engine_id,
            dp_rank=event.rank_id.dp_rank,
            reason=event.reason,
            epoch=state.membership.epoch,
        )
        state.sync_group(engine_id)
        rank = None
        if record.state is not RankState.DOWN:
            rank = state.pools[record.pool].router.index_of(event.rank_id)
        reason = f"rank {event.rank_id}: {event.reason}"
        self._withdrawal.lose_group(engine_id, reason, layer=LossLayer.RANK, rank=rank)

    def apply_rank_back(self, event: RankCameBack) -> None:
        """A lost rank works again."""
        state, engine_id = self._state, event.rank_id.engine_id
        known = state.membership.engines.get(engine_id)
        if known is None or event.rank_id.dp_rank not in known.lost_ranks:
            return
        state.membership.apply_rank_back(event.rank_id)
        state.sync_group(engine_id)
        log.info(
            "rank.came_back",
            engine_id=engine_id,
            dp_rank=event.rank_id.dp_rank,
            epoch=state.membership.epoch,
        )

    def apply_drain(self, event: DrainAsked) -> None:
        """An operator takes an engine out of service, or puts it back."""
        state, engine_id = self._state, event.engine_id
        state.membership.apply_draining(engine_id, is_draining=event.is_draining)
        state.sync_group(engine_id)
        deadline_ns = event.deadline_ns if event.is_draining else None
        self._withdrawal.set_drain_deadline(engine_id, deadline_ns)
        epoch = state.membership.epoch
        if event.is_draining:
            num_requests = len(state.runs.on_engine(engine_id))
            log.info("engine.draining", engine_id=engine_id, num_requests=num_requests, epoch=epoch)
        else:
            log.info("engine.undrained", engine_id=engine_id, epoch=epoch)

    def tell_membership(self) -> None:
        """Let gates and the observer know of a change in the tick that made it."""
        state = self._state
        if state.membership.epoch == self._told_epoch:
            return
        self._told_epoch = state.membership.epoch
        for pool in state.pools.values():
            pool.gate.update(state.membership)
        view = state.membership.view()
        state.recorder.on_membership(view, state.clock.now_ns())
        state.observer.on_membership_changed(view)
