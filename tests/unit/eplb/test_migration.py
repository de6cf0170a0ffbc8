"""plan_migration: valid after every batch, within its bytes, resumable."""

import numpy as np
import pytest

from dsched.eplb import ExpertPlacement, apply_batch, check_placement, plan_migration


def placement(rows: list[list[int]], num_ranks: int) -> ExpertPlacement:
    return ExpertPlacement(slot_expert=rows, num_ranks=num_ranks)


def random_placements(seed: int) -> tuple[ExpertPlacement, ExpertPlacement]:
    rng = np.random.default_rng(seed)

    def one() -> ExpertPlacement:
        rows = [
            rng.permutation(np.concatenate([np.arange(10), rng.integers(0, 10, 6)]))
            for _ in range(3)
        ]
        return ExpertPlacement(slot_expert=np.array(rows), num_ranks=4, num_experts=10)

    return one(), one()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_every_batch_leaves_a_valid_placement(seed: int, per_step: int) -> None:
    """Sources hold what they send, no expert is ever lost, and the target is reached."""
    current, target = random_placements(seed)
    plan = plan_migration(
        current, target, expert_bytes=10, max_step_bytes=10 * per_step, num_nodes=2
    )
    state = current
    for batch in plan.batches:
        for transfer in batch:
            assert state.slot_expert[transfer.layer, transfer.source_slot] == transfer.expert
            nodes = {transfer.source_slot // 8, transfer.target_slot // 8}
            assert transfer.is_cross_node == (len(nodes) == 2)
        state = apply_batch(state, batch)
        state.validate()

    assert state.slot_expert.tolist() == target.slot_expert.tolist()
    assert plan.num_transfers == int((current.slot_expert != target.slot_expert).sum())


def test_two_slots_trade_places_in_one_batch() -> None:
    """Neither expert has another copy, so one cannot go before the other."""
    plan = plan_migration(
        placement([[0, 1]], 2), placement([[1, 0]], 2), expert_bytes=1, max_step_bytes=1
    )

    assert [len(batch) for batch in plan.batches] == [2]


def test_bytes_a_step_are_kept_where_nothing_is_in_danger() -> None:
    """Copies over doubled experts go one by one."""
    current = placement([[0, 1, 0, 1, 2, 3]], 3)
    target = placement([[0, 1, 2, 3, 2, 3]], 3)
    plan = plan_migration(current, target, expert_bytes=5, max_step_bytes=9)

    assert [len(batch) for batch in plan.batches] == [1, 1]


def test_an_abandoned_migration_goes_on_from_where_it_is() -> None:
    """After half of the batches, a new plan makes only what is left."""
    current, target = random_placements(7)
    plan = plan_migration(current, target, expert_bytes=1, max_step_bytes=2)
    half = len(plan.batches) // 2
    state = current
    for batch in plan.batches[:half]:
        state = apply_batch(state, batch)
    rest = plan_migration(state, target, expert_bytes=1, max_step_bytes=2)
    for batch in rest.batches:
        state = apply_batch(state, batch)

    assert state.slot_expert.tolist() == target.slot_expert.tolist()
    assert rest.num_transfers < plan.num_transfers


def test_sources_are_near_and_take_turns() -> None:
    """Same rank before same node before other nodes; equal ones send in turn."""
    current = placement([[0, 1, 2, 3, 0, 4, 4, 5]], 4)
    target = placement([[0, 1, 2, 0, 0, 4, 3, 5]], 4)
    plan = plan_migration(current, target, expert_bytes=1, max_step_bytes=9, num_nodes=2)
    check_placement(target)

    by_target = {t.target_slot: t for batch in plan.batches for t in batch}
    assert by_target[3].source_slot == 0
    assert not by_target[3].is_cross_node
    assert by_target[6].source_slot == 3
    assert by_target[6].is_cross_node


def test_what_cannot_be_moved_is_named() -> None:
    """Another shape, too few bytes, and an expert that nobody holds."""
    one, two = placement([[0, 1]], 2), placement([[1, 0, 1, 0]], 2)
    with pytest.raises(ValueError, match=r"placements of \(1, 2\) and \(1, 4\) slots"):
        plan_migration(one, two, expert_bytes=1, max_step_bytes=1)
    with pytest.raises(ValueError, match="max_step_bytes 4 must hold at least one expert of 5"):
        plan_migration(one, one, expert_bytes=5, max_step_bytes=4)
    with pytest.raises(ValueError, match="no slot holds expert 2; it must be reloaded"):
        plan_migration(
            placement([[0, 1, 0]], 3), placement([[0, 1, 2]], 3), expert_bytes=1, max_step_bytes=9
        )
