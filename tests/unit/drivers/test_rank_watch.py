"""The watch over an EP group's ranks, over servers of the documented shape."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from dsched.drivers.rank_watch import GroupWatch
from dsched.drivers.recovery import OperationOutcome, VllmRecovery
from dsched.ids import DpRank, EngineId, RankId
from dsched.testing.recorders import RecordingListener
from dsched.testing.vllm_double import VllmDouble

POLL_S = 0.01
NAMES = (EngineId("g-dp0"), EngineId("g-dp1"))
RANKS = [RankId(name, DpRank(0)) for name in NAMES]


class Group:
    """Two servers of one group, and a watch over them."""

    def __init__(self) -> None:
        self.doubles = [VllmDouble(), VllmDouble()]
        self.listener = RecordingListener()
        self.is_leader = True
        self.watch: GroupWatch | None = None

    async def start(self, *, has_fault_tolerance: bool = True) -> GroupWatch:
        clients = {}
        for name, double in zip(NAMES, self.doubles, strict=True):
            if has_fault_tolerance:
                double.core_status = {"id": 0, "status": "healthy"}
            await double.start()
            clients[name] = VllmRecovery(double.url, poll_interval_s=POLL_S)
        self.watch = GroupWatch(
            "g",
            clients,
            self.listener,
            can_repair=lambda: self.is_leader,
            poll_interval_s=POLL_S,
        )
        return self.watch


@pytest.fixture
async def group() -> AsyncIterator[Group]:
    group = Group()
    yield group
    if group.watch is not None:
        task = asyncio.create_task(group.watch.run())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for double in group.doubles:
        await double.stop()


async def test_healthy_ranks_are_no_news(group: Group) -> None:
    watch = await group.start()

    await watch.look()

    assert group.listener.lost_ranks == group.listener.ranks_back == []


async def test_a_rank_in_fault_is_told_as_long_as_it_lasts(group: Group) -> None:
    """With vLLM's reason; each look says it again, as a restarted listener needs."""
    group.is_leader = False
    watch = await group.start()
    group.doubles[1].break_group(fault="ConnectionError")

    await watch.look()
    await watch.look()

    news = (RANKS[1], "its engine core says unhealthy: ConnectionError")
    assert group.listener.lost_ranks == [news, news]
    assert group.doubles[1].num_repairs == 0


async def test_nothing_is_repaired_before_all_are_in_fault(group: Group) -> None:
    """vLLM's repair is collective: a rank that still waits for the others refuses it."""
    watch = await group.start()
    group.doubles[1].break_group()

    await watch.look()

    assert [double.num_repairs for double in group.doubles] == [0, 0]


async def test_the_leader_repairs_the_whole_group_once(group: Group) -> None:
    """One operation for both servers; then both ranks are back."""
    watch = await group.start()
    for double in group.doubles:
        double.break_group()

    await watch.look()
    await watch.look()
    await watch.look()

    assert [double.num_repairs for double in group.doubles] == [1, 1]
    assert [(each.operation_id, each.outcome) for each in watch.results] == [
        ("g-repair-1", OperationOutcome.DONE)
    ] * 2
    assert group.listener.ranks_back == RANKS


async def test_a_second_fault_is_a_second_operation(group: Group) -> None:
    watch = await group.start()
    for number in (1, 2):
        for double in group.doubles:
            double.break_group()
        await watch.look()
        await watch.look()
        assert {each.operation_id for each in watch.results} == {f"g-repair-{number}"}

    assert group.listener.ranks_back == RANKS * 2


async def test_a_dead_core_is_left_to_the_operator(group: Group) -> None:
    """vLLM cannot repair it; the group stays out."""
    watch = await group.start()
    group.doubles[0].break_group()
    group.doubles[1].break_group("dead")

    for _ in range(3):
        await watch.look()

    assert [double.num_repairs for double in group.doubles] == [0, 0]
    assert group.listener.ranks_back == []


async def test_a_repair_that_fails_is_not_tried_again(group: Group) -> None:
    """Once a fault: what the engines refuse, they would refuse again."""
    watch = await group.start()
    for double in group.doubles:
        double.can_heal = False
        double.break_group()

    for _ in range(3):
        await watch.look()

    assert [double.num_repairs for double in group.doubles] == [1, 1]
    assert {each.outcome for each in watch.results} == {OperationOutcome.FAILED}
    assert group.listener.ranks_back == []


async def test_a_server_without_the_endpoint_is_asked_rarely(group: Group) -> None:
    """404 is no fault: most servers run without fault tolerance."""
    watch = await group.start(has_fault_tolerance=False)
    await watch.look()
    for double in group.doubles:  # it is there now, but not asked for a while
        double.break_group()

    await watch.look()

    assert group.listener.lost_ranks == []


async def test_a_server_that_moved_is_asked_at_its_new_place(group: Group) -> None:
    """At once, whatever the old one said."""
    watch = await group.start(has_fault_tolerance=False)
    await watch.look()
    moved = VllmDouble()
    moved.core_status = {"id": 0, "status": "healthy"}
    moved.break_group()
    await moved.start()
    group.doubles.append(moved)

    watch.move(NAMES[0], VllmRecovery(moved.url, poll_interval_s=POLL_S))
    await watch.look()

    assert [rank for rank, _ in group.listener.lost_ranks] == RANKS[:1]


async def test_a_server_that_is_gone_is_not_the_watchs_business(group: Group) -> None:
    """Its death is the engine watch's to notice; its ranks are neither lost nor back here."""
    group.is_leader = False
    watch = await group.start()
    group.doubles[0].break_group()
    await watch.look()
    await group.doubles[0].kill()

    await watch.look()

    assert group.listener.lost_ranks == [(RANKS[0], "its engine core says unhealthy: RuntimeError")]
    assert group.listener.ranks_back == []
