"""Where the copies of each expert live, and how even that makes the load.

`ExpertPlacement` is the value that planners return and engines apply. `check_placement` is the
rule book for it, and `balancedness` the figure to judge it by: one number for each layer, so that
a bad layer cannot hide in a sum over layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.errors import InvariantError
from dsched.jit import kernel

EMPTY = -1
"""Content of a slot that holds no expert: its rank is down, or already holds every expert."""

Split = Literal["equal", "weighted"]
"""How an expert's tokens are divided over its copies: evenly, or as `split_traffic` says."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, init=False)
class ExpertPlacement:
    """Which logical expert fills each physical slot, for every MoE layer.

    Shapes: L MoE layers, P physical slots of the whole EP group, E logical experts. Slots are
    ordered by EP rank: rank r owns slots [r P / num_ranks, (r + 1) P / num_ranks). The array is
    read-only; to change a placement, make another.

    >>> ExpertPlacement(slot_expert=[[0, 1, 0, 2]], num_ranks=2).num_experts
    3
    """

    slot_expert: NDArray[np.int32]
    """[L, P] logical expert in each slot, `EMPTY` (-1) where there is none."""
    num_experts: int
    """E. Default: one more than the greatest expert in `slot_expert`."""
    num_ranks: int
    """EP ranks; divides P."""
    epoch: int
    """Membership epoch this placement was planned for."""

    def __init__(
        self,
        *,
        slot_expert: ArrayLike,
        num_ranks: int,
        num_experts: int | None = None,
        epoch: int = 0,
    ) -> None:
        """Copy `slot_expert`, unless it is a read-only int32 array already.

        Raises:
            ValueError: not [L, P], ranks that do not divide P, or an expert out of range.
        """
        array = _slot_array(slot_expert)
        if num_ranks < 1:
            raise ValueError(f"num_ranks is {num_ranks}; there is at least one rank")
        if array.shape[1] % num_ranks:
            raise ValueError(f"{array.shape[1]} slots cannot be split over {num_ranks} EP ranks")
        greatest = int(array.max(initial=EMPTY))
        if num_experts is None:
            num_experts = greatest + 1
        if greatest >= num_experts or int(array.min(initial=EMPTY)) < EMPTY:
            wrong = array[(array >= num_experts) | (array < EMPTY)][0]
            raise ValueError(f"a slot holds expert {wrong}; experts are 0..{num_experts - 1}")
        object.__setattr__(self, "slot_expert", array)
        object.__setattr__(self, "num_experts", num_experts)
        object.__setattr__(self, "num_ranks", num_ranks)
        object.__setattr__(self, "epoch", epoch)

    @property
    def num_layers(self) -> int:
        return int(self.slot_expert.shape[0])

    @property
    def num_slots(self) -> int:
        return int(self.slot_expert.shape[1])

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    def count_copies(self) -> NDArray[np.int64]:
        """Return the number of copies of each expert, [L, E]."""
        counts = np.zeros((self.num_layers, self.num_experts), np.int64)
        _count_copies(self.slot_expert, counts)
        return counts

    def live_ranks(self) -> NDArray[np.bool_]:
        """Return for each rank whether it holds any expert in any layer, [G]."""
        by_rank = self.slot_expert.reshape(self.num_layers, self.num_ranks, -1)
        live: NDArray[np.bool_] = (by_rank != EMPTY).any(axis=(0, 2))
        return live

    def validate(self) -> None:
        """Check that every expert of every layer has a slot. O(L (P + E)).

        >>> ExpertPlacement(slot_expert=[[0, 1, 2, 0]], num_experts=4, num_ranks=2).validate()
        Traceback (most recent call last):
            ...
        dsched.errors.InvariantError: layer 0: no slot holds expert 3
        """
        missing = np.argwhere(self.count_copies() == 0)
        if missing.size:
            layer, expert = missing[0]
            raise InvariantError(f"layer {layer}: no slot holds expert {expert}")


@kernel
def _count_copies(slot_expert: NDArray[np.int32], out: NDArray[np.int64]) -> None:
    for layer in range(slot_expert.shape[0]):
        for expert in slot_expert[layer]:
            if expert >= 0:
                out[layer, expert] += 1


def _slot_array(slot_expert: ArrayLike) -> NDArray[np.int32]:
    array = np.asarray(slot_expert)
    if array.ndim != 2:
        raise ValueError(f"slot_expert has shape {array.shape}; it must be [layers, slots]")
    if array.dtype.kind not in "iu":
        raise ValueError(f"slot_expert has dtype {array.dtype}; slots hold whole expert numbers")
    if array.dtype == np.int32 and array.flags.c_contiguous and not array.flags.writeable:
        return array
    copy = array.astype(np.int32, order="C", copy=True)
    copy.flags.writeable = False
    return copy


def check_placement(
    placement: ExpertPlacement, *, rank_up: ArrayLike | None = None, num_nodes: int = 1
) -> None:
    """Check all rules of a placement; `num_nodes` above 1 also checks that copies are spread.

    Raises:
        InvariantError: an expert without a copy, a rank with two copies of one expert, a slot of a
            rank that is down in use, or (asked for) all of several copies on one node.
    """
    placement.validate()
    slots = placement.slot_expert.reshape(placement.num_layers, placement.num_ranks, -1)
    ordered = np.sort(slots, axis=2)
    doubled = np.argwhere((ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != EMPTY))
    if doubled.size:
        layer, rank, index = doubled[0]
        expert = ordered[layer, rank, index]
        raise InvariantError(f"layer {layer}: EP rank {rank} holds expert {expert} twice")
    if rank_up is not None:
        down = ~np.asarray(rank_up, dtype=np.bool_)
        used = np.argwhere((slots != EMPTY) & down[None, :, None])
        if used.size:
            layer, rank, index = used[0]
            expert = slots[layer, rank, index]
            raise InvariantError(f"layer {layer}: EP rank {rank} is down but holds expert {expert}")
    if num_nodes > 1:
        _check_spread(placement, num_nodes)


def _check_spread(placement: ExpertPlacement, num_nodes: int) -> None:
    shape = (placement.num_layers, placement.num_experts)
    nodes_used = np.zeros(shape, np.int64)
    for slots in np.split(placement.slot_expert, num_nodes, axis=1):
        on_node = np.zeros(shape, np.bool_)
        layers, positions = np.nonzero(slots != EMPTY)
        on_node[layers, slots[layers, positions]] = True
        nodes_used += on_node
    wrong = np.argwhere((placement.count_copies() > 1) & (nodes_used < 2))
    if wrong.size:
        layer, expert = wrong[0]
        raise InvariantError(f"layer {layer}: all copies of expert {expert} are on one node")


def rank_loads(placement: ExpertPlacement, slot_tokens: NDArray[Any]) -> NDArray[np.float64]:
    """Sum the tokens of each rank's slots, [L, G]. In: tokens per slot, [L, P]."""
    by_rank = slot_tokens.reshape(placement.num_layers, placement.num_ranks, -1)
    loads: NDArray[np.float64] = by_rank.sum(axis=2, dtype=np.float64)
    return loads


def split_evenly(placement: ExpertPlacement, load: ArrayLike) -> NDArray[np.float64]:
    """Return the tokens of each slot if every copy gets the same part, [L, P]."""
    tokens = read_tokens(placement, load)
    refuse_tokens(placement, tokens)
    slot_tokens = np.zeros(placement.slot_expert.shape, np.float64)
    _split_evenly(placement.slot_expert, tokens, slot_tokens)
    return slot_tokens


@kernel
def _split_evenly(
    slot_expert: NDArray[np.int32], load: NDArray[np.float64], out: NDArray[np.float64]
) -> None:
    num_layers, num_experts = load.shape
    num_copies = np.empty(num_experts, np.int64)
    for layer in range(num_layers):
        num_copies[:] = 0
        for expert in slot_expert[layer]:
            if expert >= 0:
                num_copies[expert] += 1
        for slot in range(slot_expert.shape[1]):
            expert = slot_expert[layer, slot]
            if expert >= 0:
                out[layer, slot] = load[layer, expert] / num_copies[expert]


def read_tokens(placement: ExpertPlacement, load: ArrayLike) -> NDArray[np.float64]:
    """Return `load` as float64, [L, E]. Its values are not looked at: see `refuse_tokens`.

    Raises:
        ValueError: another shape than the placement's, or not numbers.
    """
    array = np.asarray(load)
    expected = (placement.num_layers, placement.num_experts)
    if array.shape != expected:
        raise ValueError(f"load has shape {array.shape}; the placement is for {expected}")
    if array.dtype.kind not in "iufb":
        raise ValueError(f"load has dtype {array.dtype}; it must be an integer or a float type")
    return np.ascontiguousarray(array, dtype=np.float64)


def refuse_tokens(placement: ExpertPlacement, load: ArrayLike) -> None:
    """Raise `ValueError` for a load that is no count, or on an expert without a copy."""
    tokens = np.asarray(load, dtype=np.float64)
    wrong = np.argwhere(~(np.isfinite(tokens) & (tokens >= 0)))
    if wrong.size:
        layer, expert = wrong[0]
        raise ValueError(
            f"load of layer {layer}, expert {expert} is {tokens[layer, expert]}; "
            "a load must be finite and not negative"
        )
    lost = np.argwhere((tokens > 0) & (placement.count_copies() == 0))
    if lost.size:
        layer, expert = lost[0]
        raise ValueError(f"layer {layer}: expert {expert} has load but no slot holds it")


def balancedness(
    placement: ExpertPlacement, load: ArrayLike, *, split: Split = "equal"
) -> NDArray[np.float64]:
    """Return mean rank load over heaviest rank load of each layer, [L], in (0, 1].

    Ranks that hold nothing in any layer are down and do not count. A layer without load is even: 1.
    Report the mean *and* the least over layers; sums over layers first hide a bad layer.

    >>> placement = ExpertPlacement(slot_expert=[[0, 1, 0, 2]], num_ranks=2)
    >>> balancedness(placement, [[10, 6, 2]])
    array([0.81818182])
    >>> balancedness(placement, [[10, 6, 2]], split="weighted")
    array([1.])
    """
    if split == "weighted":
        from dsched.eplb.split import split_traffic

        slot_tokens = split_traffic(placement, load)
    elif split == "equal":
        slot_tokens = split_evenly(placement, load)
    else:
        raise ValueError(f"split is {split!r}; it must be 'equal' or 'weighted'")
    return balance_of(rank_loads(placement, slot_tokens)[:, placement.live_ranks()])


def balance_of(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return mean over maximum of each row; 1 for a row of zeros. Never above 1."""
    if loads.shape[1] == 0:
        return np.ones(loads.shape[0])
    heaviest = loads.max(axis=1)
    mean = loads.mean(axis=1)
    balance = np.divide(mean, heaviest, out=np.ones(len(loads)), where=heaviest > 0)
    balance = np.minimum(balance, 1.0)  # rounding may lift an even layer above 1
    return np.asarray(balance, np.float64)


def count_moves(
    old: ExpertPlacement, new: ExpertPlacement, *, num_nodes: int = 1
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the copies that must be brought to a rank that did not hold the expert, per layer.

    Moves are counted as sets: reordering slots inside a rank is free. Returns all moves and those
    whose expert was on no rank of the node either, both [L].

    >>> old = ExpertPlacement(slot_expert=[[0, 1, 2, 3]], num_ranks=2)
    >>> new = ExpertPlacement(slot_expert=[[1, 0, 3, 2]], num_ranks=2)
    >>> count_moves(old, new)[0]
    array([0])
    """
    if old.slot_expert.shape != new.slot_expert.shape or old.num_ranks != new.num_ranks:
        raise ValueError(
            f"placements of {old.slot_expert.shape} slots on {old.num_ranks} ranks and of "
            f"{new.slot_expert.shape} on {new.num_ranks} cannot be compared"
        )
    return _count_new(old, new, old.num_ranks), _count_new(old, new, num_nodes)


def _count_new(old: ExpertPlacement, new: ExpertPlacement, num_groups: int) -> NDArray[np.int64]:
    """Count (group of ranks, expert) pairs of `new`, slot by slot, that `old` does not have."""
    num_layers, num_slots = new.slot_expert.shape
    num_experts = max(old.num_experts, new.num_experts)
    had = np.zeros((num_layers, num_groups, num_experts + 1), np.bool_)
    layer = np.arange(num_layers)[:, None]
    group = (np.arange(num_slots) // (num_slots // num_groups))[None, :]
    had[layer, group, old.slot_expert] = True
    had[:, :, EMPTY] = True
    is_new = ~had[layer, group, new.slot_expert]
    if num_groups == new.num_ranks:
        return _distinct(new, is_new)
    return _distinct(new, is_new & ~_on_rank(old, new))


def _on_rank(old: ExpertPlacement, new: ExpertPlacement) -> NDArray[np.bool_]:
    """Whether each slot's expert was on the same rank before, [L, P]."""
    shape = (new.num_layers, new.num_ranks, new.slots_per_rank)
    before = old.slot_expert.reshape(shape)
    after = new.slot_expert.reshape(shape)
    found: NDArray[np.bool_] = (after[:, :, :, None] == before[:, :, None, :]).any(axis=3)
    return found.reshape(new.slot_expert.shape)


def _distinct(placement: ExpertPlacement, is_new: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Count marked slots, but an expert doubled on a rank only once, [L]."""
    num_layers, num_slots = placement.slot_expert.shape
    seen = np.zeros((num_layers, placement.num_ranks, placement.num_experts + 1), np.bool_)
    layers, slots = np.nonzero(is_new)
    ranks = slots // (num_slots // placement.num_ranks)
    seen[layers, ranks, placement.slot_expert[layers, slots]] = True
    counts: NDArray[np.int64] = seen[:, :, :-1].sum(axis=(1, 2), dtype=np.int64)
    return counts


Planner = Callable[[NDArray[np.int64], ExpertPlacement | None], ExpertPlacement]
"""Load [L, E] and the placement in use (`None` at first) to the next placement."""
