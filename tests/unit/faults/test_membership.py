"""Membership: who may get work, and why; each docstring is a sentence of its contract."""

import pytest

from dsched.controller.placement import plan_group_placement
from dsched.drivers.base import EngineCapabilities, EngineDescription
from dsched.faults.membership import EngineSpec, Membership, PoolSpec
from dsched.ids import DpRank, EngineId, RankId
from dsched.routing import kernels
from dsched.states import Evidence, RankState


def describe(engine_id: str, *, num_dp_ranks: int = 2, model: str = "m") -> EngineDescription:
    return EngineDescription(
        engine_id=EngineId(engine_id),
        kind="sim",
        model=model,
        max_model_len=100,
        vocab_size=None,
        num_dp_ranks=num_dp_ranks,
        kv_capacity_tokens=1_000,
        max_running_requests=4,
        capabilities=EngineCapabilities(),
    )


def members(*names: str, group: str | None = None, is_elastic: bool = False) -> Membership:
    specs = tuple(
        EngineSpec(engine_id=EngineId(n), model="m", ep_group=group, is_elastic=is_elastic)
        for n in names
    )
    membership = Membership([PoolSpec(name="p", model="m", engines=specs)])
    for name in names:
        membership.apply_up(describe(name))
    return membership


def states(membership: Membership) -> list[str]:
    membership.validate()
    return [member.state.name for member in membership.engines.values()]


def test_kernels_compare_the_same_numbers() -> None:
    """The compiled choice of a rank and the states agree."""
    for state in RankState:
        assert getattr(kernels, state.name) == state


def test_every_change_is_one_epoch_and_a_repeat_is_none() -> None:
    """Down twice is one change."""
    membership = members("a", "b")
    epoch = membership.epoch

    membership.apply_down(EngineId("a"), "gone")
    membership.apply_down(EngineId("a"), "still gone")
    membership.apply_draining(EngineId("b"), is_draining=True)
    membership.apply_draining(EngineId("b"), is_draining=True)

    assert membership.epoch == epoch + 2
    assert states(membership) == ["DOWN", "DRAINING"]


def test_one_engine_takes_its_group_down_and_the_group_waits_for_all() -> None:
    """Two servers of one EP group: neither serves without the other."""
    membership = members("a", "b", group="g")
    assert states(membership) == ["UP", "UP"]

    membership.apply_down(EngineId("a"), "killed")
    assert states(membership) == ["DOWN", "DOWN"]
    assert "engine a of its EP group is down: killed" in membership.engines[EngineId("b")].reason

    membership.apply_up(describe("a"))
    assert states(membership) == ["UP", "UP"]


def test_one_lost_rank_takes_its_group_down() -> None:
    """The group is the failure domain."""
    membership = members("a", "b")

    membership.apply_rank_lost(RankId(EngineId("a"), DpRank(1)), "device lost")

    assert states(membership) == ["DOWN", "UP"]
    assert membership.engines[EngineId("a")].reason == "rank a/1 was lost: device lost"
    assert not any(membership.view().group("a").rank_up)


def test_an_elastic_group_goes_on_without_the_rank() -> None:
    """Only that rank is down, until the engine comes up anew."""
    membership = members("a", is_elastic=True)

    membership.apply_rank_lost(RankId(EngineId("a"), DpRank(1)), "device lost")
    assert states(membership) == ["UP"]
    assert membership.view().group("a").rank_up == (True, False)

    membership.apply_rank_lost(RankId(EngineId("a"), DpRank(0)), "device lost")
    assert states(membership) == ["DOWN"]

    membership.apply_up(describe("a"))
    assert membership.view().group("a").rank_up == (True, True)


def test_a_rank_that_does_not_exist_cannot_be_lost() -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match="engine a has no DP rank 5"):
        members("a").apply_rank_lost(RankId(EngineId("a"), DpRank(5)), "?")


@pytest.mark.parametrize(("count", "num_down"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (8, 4)])
def test_silence_alone_takes_down_half_of_a_pool_at_most(count: int, num_down: int) -> None:
    """The others become suspect, which still serves when nothing better is up."""
    names = [f"e{index}" for index in range(count)]
    membership = members(*names)

    for name in names:
        membership.apply_down(EngineId(name), "lease expired", evidence=Evidence.LEASE)

    found = states(membership)
    assert found.count("DOWN") == num_down
    assert found.count("SUSPECT") == count - num_down
    assert membership.num_capped_losses == count - num_down


def test_broken_sockets_may_take_down_all() -> None:
    """Evidence counts, however many there are, also after silence was not believed."""
    membership = members("a", "b", "c")
    for name in "abc":
        membership.apply_down(EngineId(name), "lease expired", evidence=Evidence.LEASE)

    for name in "abc":
        membership.apply_down(EngineId(name), "refused", evidence=Evidence.SOCKET)

    assert states(membership) == ["DOWN"] * 3


def test_silence_after_a_standstill_is_believed() -> None:
    """A frozen engine that had work has shown more than silence."""
    membership = members("a")
    membership.apply_suspect(EngineId("a"), "no progress")

    membership.apply_down(EngineId("a"), "no answer", evidence=Evidence.LEASE)

    assert states(membership) == ["DOWN"]
    membership = members("a")
    for _ in range(2):
        membership.apply_down(EngineId("a"), "no answer", evidence=Evidence.LEASE)
    assert states(membership) == ["SUSPECT"]


def test_silence_adds_nothing_to_a_broken_socket() -> None:
    """An engine that is down stays down for its own reason and takes no share of the cap."""
    membership = members("a", "b", "c", "d")
    membership.apply_down(EngineId("a"), "refused")

    membership.apply_down(EngineId("a"), "lease expired", evidence=Evidence.LEASE)
    for name in "bc":
        membership.apply_down(EngineId(name), "lease expired", evidence=Evidence.LEASE)

    assert membership.engines[EngineId("a")].reason == "refused"
    assert states(membership) == ["DOWN", "DOWN", "DOWN", "UP"]


def test_a_drained_engine_stays_drained_over_its_restart() -> None:
    """The operator's word holds until it is taken back."""
    membership = members("a")
    membership.apply_draining(EngineId("a"), is_draining=True)

    membership.apply_down(EngineId("a"), "stopped")
    assert states(membership) == ["DOWN"]
    membership.apply_up(describe("a"))
    assert states(membership) == ["DRAINING"]
    membership.apply_draining(EngineId("a"), is_draining=False)
    assert states(membership) == ["UP"]


def test_a_suspect_engine_rejoins_under_a_new_epoch() -> None:
    """Progress is what brings it back."""
    membership = members("a")
    membership.apply_suspect(EngineId("a"), "no progress")
    epoch = membership.epoch

    membership.apply_trusted(EngineId("a"))

    assert (states(membership), membership.epoch) == (["UP"], epoch + 1)


def test_an_engine_of_another_model_stays_out() -> None:
    """It answers, and is named as wrong."""
    membership = members("a")

    membership.apply_up(describe("a", model="other"))

    assert states(membership) == ["DOWN"]
    assert membership.engines[EngineId("a")].reason == (
        "serves model 'other', but pool 'p' needs 'm'"
    )


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([("p", "m", ["a", "a"])], "two engines are called 'a'"),
        ([("p", "m", ["a"]), ("p", "n", ["b"])], "two pools are called 'p'"),
        ([("p", "m", ["a"]), ("q", "m", ["b"])], "pools 'p' and 'q' both serve model 'm'"),
    ],
)
def test_two_things_with_one_name_are_refused(
    pools: list[tuple[str, str, list[str]]], message: str
) -> None:
    """Two engines claiming one id are named before anything starts."""
    specs = [
        PoolSpec(
            name=name,
            model=model,
            engines=tuple(EngineSpec(engine_id=EngineId(e), model=model) for e in engines),
        )
        for name, model, engines in pools
    ]
    with pytest.raises(ValueError, match=message):
        Membership(specs)


def test_a_group_does_not_span_pools() -> None:
    """It could not fail as one."""
    with pytest.raises(ValueError, match="EP group 'g' has engines of the pools 'p' and 'q'"):
        Membership(
            [
                PoolSpec(
                    name=name,
                    model=name,
                    engines=(EngineSpec(engine_id=EngineId(name), model=name, ep_group="g"),),
                )
                for name in "pq"
            ]
        )


def test_a_lost_rank_reaches_the_placement() -> None:
    """No expert stays on it, each has a live copy, and the plan names the epoch."""
    membership = members("a", is_elastic=True)
    membership.apply_up(describe("a", num_dp_ranks=4))
    load = [[9, 5, 1, 1, 1, 1]]
    before = plan_group_placement(membership.view(), "a", load, num_slots=8)
    membership.apply_rank_lost(RankId(EngineId("a"), DpRank(2)), "gone")

    plan = plan_group_placement(membership.view(), "a", load, num_slots=8, current=before.placement)

    slots = plan.placement.slot_expert[0]
    assert slots[4:6].tolist() == [-1, -1]
    assert set(slots.tolist()) == {-1, 0, 1, 2, 3, 4, 5}
    assert plan.placement.epoch == membership.epoch


def test_a_placement_for_no_group_is_refused() -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match="no EP group is called 'z'"):
        plan_group_placement(members("a").view(), "z", [[1]], num_slots=1)
