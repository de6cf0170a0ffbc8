"""Expert placements by the elected dsched: who commands, when, and what engines refuse."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dsched.controller.rebalance import Rebalancer
from dsched.drivers.base import (
    EngineCapabilities,
    EngineDescription,
    ExpertLoad,
    ExpertSlots,
)
from dsched.drivers.wire import PlaceExperts
from dsched.eplb import ExpertPlacement, balancedness
from dsched.faults.membership import EngineSpec, Membership, PoolSpec
from dsched.ids import DpRank, EngineId, RankId
from dsched.plugins import FailureReason, PolicyGuard, PolicySet, RebalanceView
from dsched.sim.expert_slots import SimExpertSlots

NUM_EXPERTS = 12
NUM_SLOTS = 16
NUM_RANKS = 4
LOST = RankId(EngineId("a"), DpRank(1))


@dataclass
class FakeDriver:
    """As much of a driver as placements need."""

    counts: NDArray[np.int64] | None
    slots: SimExpertSlots = field(
        default_factory=lambda: SimExpertSlots(
            num_layers=2, num_experts=NUM_EXPERTS, num_slots=NUM_SLOTS, num_ranks=NUM_RANKS
        )
    )
    commands: list[PlaceExperts] = field(default_factory=list)

    def expert_load(self) -> ExpertLoad | None:
        if self.counts is None:
            return None
        return ExpertLoad(counts=self.counts, num_steps=100, time_ns=0)

    def expert_slots(self) -> ExpertSlots:
        return self.slots.now

    def place_experts(self, command: PlaceExperts) -> None:
        self.commands.append(command)
        self.slots.place(command)


class Bench:
    """One elastic group of four ranks, and a leader."""

    def __init__(
        self, counts: NDArray[np.int64] | None, *, policies: PolicySet | None = None
    ) -> None:
        self.driver = FakeDriver(counts)
        self.leader_epoch: int | None = 7
        self.rebalancer = Rebalancer(
            {EngineId("a"): self.driver},  # type: ignore[dict-item]
            leader_epoch=lambda: self.leader_epoch,
            is_due=(policies or PolicySet()).should_rebalance,
        )
        self.rebalancer.is_ready = True
        spec = EngineSpec(engine_id=EngineId("a"), model="m", is_elastic=True)
        self.membership = Membership([PoolSpec(name="p", model="m", engines=(spec,))])
        self.membership.apply_up(
            EngineDescription(
                engine_id=EngineId("a"),
                kind="sim",
                model="m",
                max_model_len=9,
                vocab_size=None,
                num_dp_ranks=NUM_RANKS,
                kv_capacity_tokens=9,
                max_running_requests=1,
                capabilities=EngineCapabilities(),
            )
        )
        self.tell()

    def tell(self) -> None:
        self.rebalancer.on_membership_changed(self.membership.view())

    def rebalance(self) -> list[bool]:
        return [
            self.rebalancer.apply(task, task.plan()) for task in list(self.rebalancer.prepare())
        ]

    def balance(self) -> float:
        now = self.driver.slots.now
        placement = ExpertPlacement(
            slot_expert=now.slot_expert, num_ranks=now.num_ranks, num_experts=NUM_EXPERTS
        )
        assert self.driver.counts is not None
        return float(balancedness(placement, self.driver.counts).min())


def skewed() -> NDArray[np.int64]:
    """Two layers in which the first experts are hot."""
    return np.array([[400, 300, 200, 100, *[20] * 8], [20] * 8 + [100, 200, 300, 400]])


def test_the_leader_evens_out_the_load() -> None:
    """One command with both epochs; a second look finds nothing to do."""
    bench = Bench(skewed())
    before = bench.balance()

    assert bench.rebalance() == [True]
    assert bench.rebalance() == [False]

    assert bench.balance() > max(0.9, before)
    (command,) = bench.driver.commands
    assert (command.epoch, command.leader_epoch) == (bench.membership.epoch, 7)
    assert bench.rebalancer.num_placements == {"load": 1}


class Trigger:
    """A policy that answers what it is told to, and keeps what it saw."""

    name = "trigger"
    api_version = 1

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.seen: list[RebalanceView] = []

    def should_rebalance(self, view: RebalanceView) -> Any:  # noqa: ANN401
        self.seen.append(view)
        return self.answer() if callable(self.answer) else self.answer


def endless_sleep() -> None:
    time.sleep(0.2)


def ask_trigger(answer: object) -> tuple[Bench, Trigger, PolicySet]:
    trigger = Trigger(answer)
    budget_ns = 20_000_000 if answer is endless_sleep else 5_000_000_000
    policies = PolicySet(rebalance=PolicyGuard(trigger, budget_ns=budget_ns))
    return Bench(skewed(), policies=policies), trigger, policies


def test_a_trigger_decides_when_but_not_about_lost_ranks() -> None:
    """It sees the balance of the placement in use, and how often it was asked since the last one;
    a lost rank is planned for without it."""
    bench, trigger, policies = ask_trigger(answer=False)
    before = bench.balance()

    assert bench.rebalance() == bench.rebalance() == []
    trigger.answer = True
    assert bench.rebalance() == [True]
    trigger.answer = False
    assert bench.rebalance() == []
    bench.membership.apply_rank_lost(LOST, "gone")
    bench.tell()
    policies.close()

    assert [view.num_times_asked for view in trigger.seen] == [0, 1, 2, 0]
    assert trigger.seen[0].worst_balancedness == pytest.approx(before)
    assert trigger.seen[3].worst_balancedness > before
    assert bench.rebalancer.num_placements == {"load": 1, "ranks": 1}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: 1 / 0, FailureReason.RAISED),
        (endless_sleep, FailureReason.TIMEOUT),
        (float("nan"), FailureReason.WRONG_ANSWER),
        (0, FailureReason.WRONG_ANSWER),
        (np.array([True, False]), FailureReason.WRONG_ANSWER),
    ],
)
def test_a_bad_trigger_means_the_default_which_is_now(
    answer: object, reason: FailureReason
) -> None:
    bench, _, policies = ask_trigger(answer)

    assert bench.rebalance() == [True]
    policies.close()

    assert policies.counts()["trigger"].num_failures[reason] == 1


def test_who_does_not_lead_commands_nothing() -> None:
    """Neither by load nor for a lost rank."""
    bench = Bench(skewed())
    bench.leader_epoch = None

    assert bench.rebalance() == []
    bench.membership.apply_rank_lost(LOST, "gone")
    bench.tell()

    assert bench.driver.commands == []


def test_a_plan_that_loses_its_leader_or_its_epoch_is_dropped() -> None:
    """Between planning on a thread and sending, the world may change."""
    bench = Bench(skewed())
    (task,) = bench.rebalancer.prepare()
    plan = task.plan()
    bench.leader_epoch = None
    assert not bench.rebalancer.apply(task, plan)
    bench.leader_epoch = 8
    bench.membership.apply_draining(EngineId("a"), is_draining=True)
    bench.tell()

    assert not bench.rebalancer.apply(task, plan)
    assert bench.driver.commands == []


def test_a_lost_rank_is_planned_for_at_once_and_again_when_it_is_back() -> None:
    """Its slots are empty, every expert has one on the others; then all slots are used again."""
    bench = Bench(skewed())
    bench.membership.apply_rank_lost(LOST, "gone")
    bench.tell()
    without = bench.driver.slots.now.slot_expert.copy()
    bench.membership.apply_rank_back(LOST)
    bench.tell()

    assert (without[:, 4:8] == -1).all()
    assert all(set(row[row >= 0]) == set(range(NUM_EXPERTS)) for row in without)
    assert (bench.driver.slots.now.slot_expert >= 0).all()
    assert bench.rebalancer.num_placements == {"ranks": 2}


def test_slots_that_cannot_hold_all_experts_are_said_so() -> None:
    """Two of four ranks are gone: 8 live slots, 12 experts. The engine keeps what it has."""
    bench = Bench(skewed())
    bench.membership.apply_rank_lost(LOST, "gone")
    bench.tell()
    bench.membership.apply_rank_lost(RankId(EngineId("a"), DpRank(2)), "gone")
    bench.tell()

    assert len(bench.driver.commands) == 1


def test_nothing_is_planned_before_the_planner_is_compiled() -> None:
    """A tick does not wait a minute for it."""
    bench = Bench(skewed())
    bench.rebalancer.is_ready = False

    assert bench.rebalance() == []


def test_an_engine_that_has_counted_nothing_is_left_alone() -> None:
    bench = Bench(None)

    assert bench.rebalance() == []


@pytest.mark.parametrize(
    ("leader_epoch", "slots"),
    [
        (6, tuple((*range(12), 0, 1, 2, 3) for _ in range(2))),
        (9, tuple((*range(12), 0, 1, 2) for _ in range(2))),
        (9, tuple((*range(11), 0, 0, 1, 2, 3) for _ in range(2))),
        (9, tuple((*range(12), 0, 1, 2, 12) for _ in range(2))),
    ],
    ids=["old leader", "too few slots", "an expert without a slot", "no such expert"],
)
def test_an_engine_refuses_what_is_not_for_it(
    leader_epoch: int, slots: tuple[tuple[int, ...], ...]
) -> None:
    """And goes on with the placement that it has."""
    bench = Bench(skewed())
    bench.rebalance()
    before = bench.driver.slots.now.slot_expert

    taken = bench.driver.slots.place(
        PlaceExperts(epoch=1, leader_epoch=leader_epoch, slot_expert=slots)
    )

    assert not taken
    assert bench.driver.slots.num_refused == 1
    assert (bench.driver.slots.now.slot_expert == before).all()


def test_a_restarted_engine_begins_with_its_own_placement() -> None:
    """And takes commands of whichever leader comes first."""
    bench = Bench(skewed())
    bench.rebalance()
    bench.driver.slots.restart()
    bench.leader_epoch = 3

    assert bench.rebalance() == [True]
