"""Place copies for engines that split traffic by weight: the heaviest rank of the *optimal* split.

With parts chosen freely, a rank is only as loaded as the experts force it to be. What is left over
the mean after the optimal split is a tight set: ranks at the top whose experts have no copy on a
lighter rank. One edge out of the set, a copy of one of its experts elsewhere, lets load flow out.
So few copies are enough: ranks connected through shared experts share their load.

`plan_placement` uses this with `split="weighted"`, for layers whose optimal split is over the
trigger, and tries the most promising edges by solving the split for each. Kept apart from the
searches for equal shares, where adding a copy changes the load of many ranks.

Pure. One try is one `split_traffic` of a layer, some 10 us; at most `MAX_TRIES` a step.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dsched.eplb.layers import (
    GroupShape,
    LayerResults,
    Outcome,
    SearchLimits,
    count_and_order,
    plan_first,
    plan_next,
    survey_layers,
)
from dsched.eplb.split import solve_layers

MAX_TRIES = 48
"""Candidates solved for one step. Below: the edge that helps may be missed. Above: a layer takes
milliseconds for each step."""
MAX_STEPS = 64
"""Steps for one layer; each lowers the heaviest rank."""
MAX_GIVERS = 4
"""Experts of the tight set that are offered a copy, those with most tokens there."""
MAX_LIGHT = 8
"""Light ranks that exchanges are looked for with."""
MAX_EXCHANGES = 6
"""Exchanges tried with each of them."""
TIGHT = 1e-4
"""Ranks within this of the heaviest load, relatively, are in the tight set."""

Change = tuple[tuple[int, int], ...]
"""Slots to overwrite, each with its new expert."""


def plan_weighted(
    weight: NDArray[np.int64],
    current: NDArray[np.int32] | None,
    shape: GroupShape,
    limits: SearchLimits,
    max_moves: NDArray[np.int64],
) -> LayerResults:
    """Plan every layer for the optimal split. `current` [L, P] has E in empty slots.

    Without a placement in use, equal shares give the start. With one, lost experts are placed as
    for equal shares, with no other move, and the rest of the moves serves the split.
    """
    if current is None:
        results = plan_first(weight, shape, limits)
        in_use = results.slots.copy()
        stop = limits.fresh_stop
    else:
        no_moves = np.zeros(len(weight), np.int64)
        results = plan_next(weight, current, shape, limits, no_moves, 0)
        in_use = current
        stop = limits.stop
    trigger = stop if current is None else limits.trigger
    for layer in range(len(weight)):
        load = weight[layer].astype(np.float64)
        slots = emptied(results.slots[layer], shape.num_experts)
        _, rank_load = solve_row(slots, load, shape.num_ranks)
        if rank_load.max() <= load.sum() / shape.num_live * (1 + trigger):
            continue
        improved = improve_row(
            slots,
            emptied(in_use[layer], shape.num_experts),
            load,
            shape,
            stop=stop,
            max_moves=int(max_moves[layer]),
        )
        improved[improved < 0] = shape.num_experts
        results.slots[layer] = improved
        if current is not None:
            results.outcome[layer] = Outcome.IMPROVED
    recount(weight, current, shape, results)
    return results


def emptied(slots: NDArray[np.int32], num_experts: int) -> NDArray[np.int32]:
    """Return the slots with -1 instead of E where they are empty."""
    return np.where(slots == num_experts, np.int32(-1), slots)


def recount(
    weight: NDArray[np.int64],
    current: NDArray[np.int32] | None,
    shape: GroupShape,
    results: LayerResults,
) -> None:
    """Count moves, and the heaviest rank with equal shares, of what has been planned."""
    missing = np.empty(len(weight), np.bool_)
    survey_layers(weight, results.slots, shape.num_ranks, results.heaviest, missing)
    if current is None:
        return
    layers = np.flatnonzero((results.slots != current).any(axis=1))
    count_and_order(current, layers, shape, results)
    results.outcome[results.num_moves == 0] = Outcome.KEPT


def solve_row(
    slots: NDArray[np.int32], load: NDArray[np.float64], num_ranks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the optimal tokens of each slot [P] and of each rank [G]. In: -1 in empty slots."""
    tokens = np.empty((1, len(slots)), np.float64)
    solve_layers(slots[None, :], load[None, :], num_ranks, tokens)
    return tokens[0], tokens[0].reshape(num_ranks, -1).sum(axis=1)


def improve_row(
    slots: NDArray[np.int32],
    current: NDArray[np.int32],
    load: NDArray[np.float64],
    shape: GroupShape,
    *,
    stop: float,
    max_moves: int,
) -> NDArray[np.int32]:
    """Return better slots for one layer, within `max_moves` new pairs against `current`."""
    limit = load.sum() / shape.num_live * (1 + stop)
    best = slots.copy()
    tokens, rank_load = solve_row(best, load, shape.num_ranks)
    for _ in range(MAX_STEPS):
        if rank_load.max() <= limit:
            break
        found = None
        for change in propose(best, tokens, rank_load, load, shape):
            tried = best.copy()
            for slot, expert in change:
                tried[slot] = expert
            if count_new(tried, current, shape.width) > max_moves:
                continue
            tried_tokens, tried_load = solve_row(tried, load, shape.num_ranks)
            key = (float(tried_load.max()), float((tried_load**2).sum()))
            if found is None or key < found[0]:
                found = (key, tried, tried_tokens, tried_load)
        if found is None or not is_progress(found[0], rank_load):
            break
        _, best, tokens, rank_load = found
    return best


def is_progress(key: tuple[float, float], rank_load: NDArray[np.float64]) -> bool:
    """Whether the heaviest rank, or else the sum of squares, has fallen noticeably."""
    heaviest = float(rank_load.max())
    if key[0] < heaviest * (1 - 1e-9):
        return True
    return key[0] <= heaviest and key[1] < float((rank_load**2).sum()) * (1 - 1e-7)


def count_new(slots: NDArray[np.int32], current: NDArray[np.int32], width: int) -> int:
    """Count pairs of rank and expert that `current` does not have."""
    new = slots.reshape(-1, width)
    old = current.reshape(-1, width)
    held = (new[:, :, None] == old[:, None, :]).any(axis=2)
    return int(((new >= 0) & ~held).sum())


def propose(
    slots: NDArray[np.int32],
    tokens: NDArray[np.float64],
    rank_load: NDArray[np.float64],
    load: NDArray[np.float64],
    shape: GroupShape,
) -> Iterator[Change]:
    """Yield changes that let load flow out of the tight set, most promising first.

    First copies of its experts on the lightest ranks, over a slot that the split hardly uses; then
    exchanges of single experts between tight and light ranks.
    """
    heaviest = rank_load.max()
    order = np.argsort(rank_load, kind="stable")
    is_tight = rank_load >= heaviest * (1 - TIGHT)
    light = [int(rank) for rank in order if shape.rank_up[rank] and not is_tight[rank]]
    copies = np.bincount(slots[slots >= 0], minlength=shape.num_experts)
    tight = [int(rank) for rank in np.flatnonzero(is_tight)]
    givers = experts_of(slots, tokens, tight, shape.width)[:MAX_GIVERS]
    num_tries = 0
    for rank in light:
        start = rank * shape.width
        spare = spare_slot(slots, tokens, copies, start, shape.width)
        for expert in givers:
            if spare is None or expert in slots[start : start + shape.width]:
                continue
            yield ((spare, expert),)
            num_tries += 1
            if num_tries >= MAX_TRIES:
                break
        if num_tries >= MAX_TRIES:
            break
    yield from exchanges(slots, rank_load, load, copies, is_tight, light, shape)


def exchanges(
    slots: NDArray[np.int32],
    rank_load: NDArray[np.float64],
    load: NDArray[np.float64],
    copies: NDArray[np.int64],
    is_tight: NDArray[np.bool_],
    light: list[int],
    shape: GroupShape,
) -> list[Change]:
    """Return exchanges of single experts that move about as much load as the tight set has over.

    What is over is what lies above the mean; more than the light ranks lack would only swap roles.
    """
    mean = load.sum() / shape.num_live
    over = float((rank_load[is_tight] - mean).sum())
    rank_of = np.arange(len(slots)) // shape.width
    is_single = (slots >= 0) & (copies[np.maximum(slots, 0)] == 1)
    own = np.flatnonzero(is_single & is_tight[rank_of])
    found: list[tuple[float, int, int]] = []
    for rank in light[:MAX_LIGHT]:
        wanted = min(over, float(mean - rank_load[rank]) * max(1, len(light) // 2))
        theirs = np.flatnonzero(is_single & (rank_of == rank))
        moved = load[slots[own]][:, None] - load[slots[theirs]][None, :]
        distance = np.where(moved > 0, np.abs(moved - wanted), np.inf)
        for index in np.argsort(distance, axis=None, kind="stable")[:MAX_EXCHANGES]:
            one, other = divmod(int(index), len(theirs))
            if np.isfinite(distance[one, other]):
                found.append((float(distance[one, other]), int(own[one]), int(theirs[other])))
    found.sort()
    return [
        ((slot, int(slots[other])), (other, int(slots[slot])))
        for _, slot, other in found[:MAX_TRIES]
    ]


def experts_of(
    slots: NDArray[np.int32], tokens: NDArray[np.float64], ranks: list[int], width: int
) -> list[int]:
    """Return the experts of these ranks, those that bring most tokens first."""
    total: dict[int, float] = {}
    for rank in ranks:
        for slot in range(rank * width, (rank + 1) * width):
            if slots[slot] >= 0 and tokens[slot] > 0:
                expert = int(slots[slot])
                total[expert] = total.get(expert, 0.0) + float(tokens[slot])
    return sorted(total, key=lambda expert: (-total[expert], expert))


def spare_slot(
    slots: NDArray[np.int32],
    tokens: NDArray[np.float64],
    copies: NDArray[np.int64],
    start: int,
    width: int,
) -> int | None:
    """Return the slot of a rank that is empty, or else has another copy elsewhere and least use."""
    spare = [
        slot for slot in range(start, start + width) if slots[slot] < 0 or copies[slots[slot]] > 1
    ]
    if not spare:
        return None
    return min(spare, key=lambda slot: (slots[slot] >= 0, float(tokens[slot]), slot))
