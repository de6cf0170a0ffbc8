"""Order the transfers that lead from one placement to another.

In:  the placement in use, the one to reach, and how many bytes a step may carry. Out: a
`MigrationPlan`: batches of transfers, each between two steps. All transfers of a batch read before
any of them writes (engines stage incoming weights), so two slots can trade places in one batch.

After each batch every expert still has a copy, so a migration can be abandoned anywhere: what the
slots hold then is a valid placement, and `plan_migration` from there goes on. A transfer that would
overwrite an expert's last copy waits until another copy has been made, or travels in one batch with
the transfer that saves it; only then may a batch be larger than allowed.

Pure. O(M^2) for M transfers of a layer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.eplb.placement import EMPTY, ExpertPlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One expert copied into one slot."""

    layer: int
    expert: int
    source_slot: int
    """A slot that holds the expert before the batch."""
    target_slot: int
    is_cross_node: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationPlan:
    """What to copy, in order."""

    batches: tuple[tuple[Transfer, ...], ...]
    """Transfers that run between the same two steps."""
    expert_bytes: int
    epoch: int
    """Membership epoch of the placement that is reached."""

    @property
    def num_transfers(self) -> int:
        return sum(len(batch) for batch in self.batches)


def plan_migration(
    current: ExpertPlacement,
    target: ExpertPlacement,
    *,
    expert_bytes: int,
    max_step_bytes: int,
    num_nodes: int = 1,
) -> MigrationPlan:
    """Order the transfers from `current` to `target`, at most `max_step_bytes` in a batch.

    Sources are on the same rank if possible, then on the same node, then on the rank that has sent
    least. Slots that become empty are not written.

    Raises:
        ValueError: placements of different shape, or an expert to be moved that nobody holds.
    """
    if current.slot_expert.shape != target.slot_expert.shape:
        raise ValueError(
            f"placements of {current.slot_expert.shape} and {target.slot_expert.shape} slots "
            "do not match"
        )
    if expert_bytes < 1 or max_step_bytes < expert_bytes:
        raise ValueError(
            f"max_step_bytes {max_step_bytes} must hold at least one expert of {expert_bytes}"
        )
    per_batch = max_step_bytes // expert_bytes
    chooser = SourceChooser(current, num_nodes)
    batches: list[tuple[Transfer, ...]] = []
    open_batch: list[Transfer] = []
    for layer in range(current.num_layers):
        landed = current.slot_expert[layer]
        for group in order_layer(landed, target.slot_expert[layer]):
            if open_batch and len(open_batch) + len(group.slots) > per_batch:
                batches.append(tuple(open_batch))
                open_batch = []
                landed = group.before
            for slot in group.slots:
                expert = int(target.slot_expert[layer, slot])
                open_batch.append(chooser.pick(layer, slot, expert, landed))
    if open_batch:
        batches.append(tuple(open_batch))
    return MigrationPlan(batches=tuple(batches), expert_bytes=expert_bytes, epoch=target.epoch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotGroup:
    """Slots of one layer that are written together."""

    slots: tuple[int, ...]
    before: NDArray[np.int32]
    """[P] what the layer holds when all earlier groups have landed."""


def order_layer(current: NDArray[np.int32], target: NDArray[np.int32]) -> list[SlotGroup]:
    """Return the groups of slots to write, in an order in which no expert is ever lost."""
    held = current.copy()
    pending = [int(slot) for slot in np.flatnonzero((current != target) & (target != EMPTY))]
    groups: list[SlotGroup] = []
    while pending:
        copies = count_of(held)
        safe = [slot for slot in pending if is_safe(held, copies, slot)]
        chosen = (safe[0],) if safe else smallest_cycle(held, target, pending)
        groups.append(SlotGroup(slots=chosen, before=held.copy()))
        for slot in chosen:
            held[slot] = target[slot]
            pending.remove(slot)
    return groups


def count_of(held: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.bincount(held[held != EMPTY])


def is_safe(held: NDArray[np.int32], copies: NDArray[np.int64], slot: int) -> bool:
    """Whether overwriting the slot leaves its expert another copy."""
    return bool(held[slot] == EMPTY or copies[held[slot]] > 1)


def smallest_cycle(
    held: NDArray[np.int32], target: NDArray[np.int32], pending: list[int]
) -> tuple[int, ...]:
    """Return slots that save each other's experts: each holds what the next one waits for.

    Every pending slot holds an expert's last copy, so that expert must be wanted elsewhere. The
    first pending slot leads into a cycle.
    """
    taker_of = {int(target[slot]): slot for slot in reversed(pending)}
    path: list[int] = []
    slot = pending[0]
    while slot not in path:
        path.append(slot)
        slot = taker_of[int(held[slot])]
    return tuple(path[path.index(slot) :])


class SourceChooser:
    """Picks where each copy comes from, and evens out what ranks send."""

    def __init__(self, placement: ExpertPlacement, num_nodes: int) -> None:
        self._width = placement.slots_per_rank
        self._ranks_per_node = placement.num_ranks // num_nodes
        self._num_sent = [0] * placement.num_ranks

    def pick(self, layer: int, target_slot: int, expert: int, held: NDArray[np.int32]) -> Transfer:
        """Choose the source of one copy among the slots that hold it before the batch."""
        sources = [int(slot) for slot in np.flatnonzero(held == expert)]
        if not sources:
            raise ValueError(f"layer {layer}: no slot holds expert {expert}; it must be reloaded")
        rank = target_slot // self._width
        node = rank // self._ranks_per_node

        def cost(slot: int) -> tuple[bool, bool, int, int]:
            source = slot // self._width
            is_far = source // self._ranks_per_node != node
            return source != rank, is_far, self._num_sent[source], slot

        source_slot = min(sources, key=cost)
        source = source_slot // self._width
        self._num_sent[source] += source != rank
        return Transfer(
            layer=layer,
            expert=expert,
            source_slot=source_slot,
            target_slot=target_slot,
            is_cross_node=source // self._ranks_per_node != node,
        )


def apply_batch(placement: ExpertPlacement, batch: tuple[Transfer, ...]) -> ExpertPlacement:
    """Return the placement after a batch has landed."""
    slots = placement.slot_expert.copy()
    for transfer in batch:
        slots[transfer.layer, transfer.target_slot] = transfer.expert
    return ExpertPlacement(
        slot_expert=slots,
        num_experts=placement.num_experts,
        num_ranks=placement.num_ranks,
        epoch=placement.epoch,
    )
