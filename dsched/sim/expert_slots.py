"""Expert slots of a simulated engine: they take placements, and nothing is computed with them.

What a real engine moves are weights; here a placement is in use at once. The rules of a command are
those of an agent: a leader after its successor's is refused, and so is a placement of another shape
or one in which an expert has no slot.
"""

import numpy as np
from numpy.typing import NDArray

from dsched.drivers.base import ExpertSlots, LeaderFence
from dsched.drivers.wire import PlaceExperts
from dsched.eplb import ExpertPlacement, balancedness


class SimExpertSlots:
    """The slots of one engine.

    >>> slots = SimExpertSlots(num_layers=1, num_experts=4, num_slots=6, num_ranks=3)
    >>> slots.now.slot_expert.tolist()
    [[0, 1, 2, 3, 0, 1]]
    >>> slots.place(PlaceExperts(epoch=1, leader_epoch=2, slot_expert=((3, 2, 1, 0, 0, 0),)))
    True
    >>> slots.place(PlaceExperts(epoch=1, leader_epoch=1, slot_expert=((0, 1, 2, 3, 0, 1),)))
    False
    """

    def __init__(
        self, *, num_layers: int, num_experts: int, num_slots: int, num_ranks: int
    ) -> None:
        """Experts fill the slots in turn.

        Raises:
            ValueError: fewer slots than experts, or slots that ranks do not divide.
        """
        if num_slots < num_experts:
            raise ValueError(f"{num_slots} slots cannot hold {num_experts} experts")
        if num_slots % num_ranks:
            raise ValueError(f"{num_slots} slots cannot be split over {num_ranks} EP ranks")
        self.num_experts = num_experts
        first = np.arange(num_slots, dtype=np.int32) % num_experts
        self._start = ExpertSlots(
            slot_expert=np.broadcast_to(first, (num_layers, num_slots)).copy(), num_ranks=num_ranks
        )
        self.num_placements = 0
        self.num_refused = 0
        self.restart()

    def restart(self) -> None:
        """Begin anew, as an engine that was started again does."""
        self.now = self._start
        """The placement in use."""
        self._fence = LeaderFence()

    def balance(self, load: NDArray[np.int64]) -> NDArray[np.float64]:
        """[L] balancedness of the placement in use under a load [L, E]."""
        placement = ExpertPlacement(
            slot_expert=self.now.slot_expert,
            num_ranks=self.now.num_ranks,
            num_experts=self.num_experts,
        )
        return balancedness(placement, load)

    def place(self, command: PlaceExperts) -> bool:
        """Use another placement; whether it was taken."""
        slots = np.array(command.slot_expert, dtype=np.int32)
        is_taken = self._fence.admits(command.leader_epoch) and self._fits(slots)
        if is_taken:
            self.now = ExpertSlots(slot_expert=slots, num_ranks=self.now.num_ranks)
            self.num_placements += 1
        else:
            self.num_refused += 1
        return is_taken

    def _fits(self, slots: NDArray[np.int32]) -> bool:
        if slots.shape != self.now.slot_expert.shape or slots.max() >= self.num_experts:
            return False
        return all(len(np.unique(row[row >= 0])) == self.num_experts for row in slots)
