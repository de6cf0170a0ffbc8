"""Improve a placement step by step: exchange two slots, or overwrite one with another expert.

Two searches share these steps:

- `settle` is for a fresh placement, where moves cost nothing. It takes the heaviest rank that can
  be improved and makes the exchange that leaves the heavier of the two ranks lightest. Where
  exchanges end, one slot is overwritten, which changes the *number* of copies of two experts:
  greedy counts are not optimal (two hot experts of nearly equal share show it).
- `find_exchange` and `find_replace` are for a placement in use, where each move has a price. They
  find the step with the greatest fall of overload for its price; overload counts only above the
  limit at which the search may stop, so ranks that are good enough are left alone.

Each step makes the sorted list of rank loads smaller or the overload less, so both searches end.

Compiled. An exchange is searched in O(G K^2) for K slots a rank. An overwriting has two halves that
hardly touch: what the old expert's other copies take over and what the new expert's give up. Each
half is computed once, so a search is O(E + P c + K E + K P) for c copies instead of the product.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dsched.eplb.state import (
    LayerState,
    has_copy,
    is_on,
    keeps_spread,
    overload,
    replace_copy,
    swap_copies,
)
from dsched.jit import kernel

TILT = 0.01
"""Weight of the distance to the mean against overload. 0: ties are broken by number. Above .1:
moves are spent on ranks that are good enough."""

PATIENCE = 8
"""Rounds without a new best after which a search ends. Below: it stops on the way out of a local
optimum. Above: it goes round in circles."""

CYCLE_RANKS = 6
"""Heavy and light ranks that are tried for passing three experts round. Above: slower for little,
as the heaviest and the lightest ranks gain most."""

FAR_ABOVE = 1 << 62
"""More than any load."""


class Holding(NamedTuple):
    """Which experts were where before, and what a copy costs to bring. N nodes."""

    on_rank: NDArray[np.int8]
    """[E + 1, G] 1 if the rank held the expert; 1 for E, as emptying a slot is no move."""
    on_node: NDArray[np.int8]
    """[E + 1, N]"""
    near_price: int
    """Price of a copy from the same node."""
    far_price: int
    """Price of a copy from another node."""


class Step(NamedTuple):
    """A candidate: exchange `slot` with `other_slot`, then with `third_slot`; or overwrite it."""

    slot: int
    """-1: no step found."""
    other_slot: int
    """-1 for an overwriting."""
    third_slot: int
    """-1 unless three ranks pass an expert round."""
    expert: int
    """What overwrites the slot; -1 for exchanges."""
    gain: float
    """Change of the summed overload; negative is better."""
    score: float
    """Gain for the price; negative is better."""
    heaviest: int
    """Heaviest rank load afterwards, or a little more (see `find_replace`)."""
    num_moves: int
    """Change of the number of moves: -3 .. 3."""


@kernel
def no_step() -> Step:
    return Step(-1, -1, -1, -1, 0.0, 0.0, FAR_ABOVE, 0)


@kernel
def count_change(holding: Holding, came: int, left: int, rank: int) -> int:
    """Moves more (or fewer) when `came` replaces `left` on the rank."""
    return int(holding.on_rank[left, rank]) - int(holding.on_rank[came, rank])


@kernel
def price_of(holding: Holding, expert: int, rank: int, node: int) -> int:
    """Price of having the expert on the rank: 0 where it already was."""
    if holding.on_rank[expert, rank]:
        return 0
    return holding.near_price if holding.on_node[expert, node] else holding.far_price


@kernel
def price_change(state: LayerState, holding: Holding, came: int, left: int, rank: int) -> int:
    node = state.node_of[rank]
    return price_of(holding, came, rank, node) - price_of(holding, left, rank, node)


@kernel
def score_of(near_price: int, gain: float, price: int) -> float:
    """Gain for the price. A step that costs nothing counts as a quarter of the cheapest move."""
    return gain / max(float(price), 0.25 * float(near_price))


@kernel
def can_exchange(state: LayerState, slot: int, other_slot: int) -> bool:
    """Whether an exchange leaves no rank with two copies of one expert."""
    expert = state.slot[slot]
    other = state.slot[other_slot]
    rank = state.rank_of[slot]
    other_rank = state.rank_of[other_slot]
    if state.num_copies[expert] > 1 and has_copy(state, expert, other_rank):
        return False
    if state.num_copies[other] > 1 and has_copy(state, other, rank):
        return False
    if not state.spread:
        return True
    return keeps_spread(state, expert, slot, other_rank) and keeps_spread(
        state, other, other_slot, rank
    )


@kernel
def can_replace(state: LayerState, slot: int, expert: int) -> bool:
    """Whether `slot` may take a copy of `expert`: distinct, spread, and nothing gets lost."""
    old = state.slot[slot]
    if old != len(state.weight) - 1 and state.num_copies[old] < 2:
        return False
    if has_copy(state, expert, state.rank_of[slot]):
        return False
    if not state.spread:
        return True
    return keeps_spread(state, expert, -1, state.rank_of[slot]) and keeps_spread(
        state, old, slot, -1
    )


@kernel
def exchange_from(
    state: LayerState,
    width: int,
    position: int,
    goal: int,
    scanned: NDArray[np.int64],
    changed: NDArray[np.int64],
    now: int,
) -> bool:
    """Make the best exchange between the rank at `position` of the order and a lighter one.

    `scanned` and `changed` say when a rank was last searched in vain and last altered: pairs that
    were seen and stayed as they are need no second look.
    """
    order, rank_load = state.order, state.rank_load
    slot_expert, shares = state.slot, state.share
    rank = order[position]
    load = rank_load[rank]
    since = scanned[rank] if changed[rank] < scanned[rank] else -1
    best = load
    best_slot = -1
    best_other = -1
    for index in range(position):
        other_rank = order[index]
        other_load = rank_load[other_rank]
        if best <= goal or (load + other_load) // 2 >= best:
            break
        if changed[other_rank] < since:
            continue
        for slot in range(rank * width, (rank + 1) * width):
            share = shares[slot_expert[slot]]
            if share == 0:
                continue
            for other_slot in range(other_rank * width, (other_rank + 1) * width):
                difference = share - shares[slot_expert[other_slot]]
                if difference <= 0:
                    continue
                heavier = max(load - difference, other_load + difference)
                if heavier < best and can_exchange(state, slot, other_slot):
                    best = heavier
                    best_slot = slot
                    best_other = other_slot
    scanned[rank] = now
    if best_slot < 0:
        return False
    changed[rank] = now
    changed[state.rank_of[best_other]] = now
    swap_copies(state, best_slot, best_other)
    return True


@kernel
def weigh_harm(state: LayerState, limit: int, mean: int) -> None:
    """Write `harm` and `harm_top` of every slot."""
    next_copy, first_copy, num_copies = state.next_copy, state.first_copy, state.num_copies
    weight, share = state.weight, state.share
    rank_load, rank_of, is_up = state.rank_load, state.rank_of, state.is_up
    harm, harm_top, slot_expert = state.harm, state.harm_top, state.slot
    num_experts = len(weight) - 1
    for slot in range(len(slot_expert)):
        expert = slot_expert[slot]
        harm[slot] = 0.0
        harm_top[slot] = 0
        if expert == num_experts:
            if not is_up[rank_of[slot]]:
                harm_top[slot] = FAR_ABOVE
            continue
        if num_copies[expert] < 2:
            harm_top[slot] = FAR_ABOVE
            continue
        amount = weight[expert] // (num_copies[expert] - 1) - share[expert]
        copy = first_copy[expert]
        while copy >= 0:
            if copy != slot:
                load = rank_load[rank_of[copy]]
                harm[slot] += overload(load + amount, limit, mean, TILT)
                harm[slot] -= overload(load, limit, mean, TILT)
                harm_top[slot] = max(harm_top[slot], load + amount)
            copy = next_copy[copy]


@kernel
def weigh_relief(state: LayerState, rank: int, limit: int, mean: int) -> None:
    """Write `relief` and `relief_top` of every expert; `relief_top` leaves `rank` out."""
    next_copy, first_copy, num_copies = state.next_copy, state.first_copy, state.num_copies
    share, grown_share, order = state.share, state.grown_share, state.order
    rank_load, rank_of = state.rank_load, state.rank_of
    for expert in range(len(state.weight) - 1):
        amount = grown_share[expert] - share[expert] if num_copies[expert] > 0 else 0
        relief = 0.0
        copy = first_copy[expert]
        while copy >= 0:
            load = rank_load[rank_of[copy]]
            relief += overload(load + amount, limit, mean, TILT)
            relief -= overload(load, limit, mean, TILT)
            copy = next_copy[copy]
        state.relief[expert] = relief
        top = np.int64(0)
        for index in range(len(order) - 1, -1, -1):
            other = order[index]
            if other == rank:
                continue
            if not is_on(first_copy, next_copy, rank_of, expert, other):
                top = max(top, rank_load[other])
                break
            top = max(top, rank_load[other] + amount)
        state.relief_top[expert] = top


@kernel
def find_replace(
    state: LayerState, width: int, rank: int, limit: int, mean: int, holding: Holding
) -> tuple[Step, Step, Step]:
    """Search the overwritings that relieve `rank`: of its own slots, or by a copy elsewhere.

    Returns the one with the best score, the one that leaves the heaviest rank lightest, and of
    those that bring every rank that grows below the present load of `rank`, the one with most
    gain. Where the old and the new expert share ranks, what is found is a little better than
    computed: the halves are added as if they did not meet.
    """
    weigh_harm(state, limit, mean)
    weigh_relief(state, rank, limit, mean)
    best = no_step()
    lightest = no_step()
    strict = no_step()
    num_experts = len(state.weight) - 1
    max_copies = len(state.order)
    next_copy, first_copy, num_copies = state.next_copy, state.first_copy, state.num_copies
    share, grown_share = state.share, state.grown_share
    rank_load, rank_of = state.rank_load, state.rank_of
    harm, harm_top, relief, relief_top = state.harm, state.harm_top, state.relief, state.relief_top
    slot_expert = state.slot
    near_price = holding.near_price
    present = rank_load[rank]
    for slot in range(len(slot_expert)):
        if harm_top[slot] == FAR_ABOVE:
            continue
        # Any expert may come to a slot of this rank; only those of this rank to another's slot.
        receiver = rank_of[slot]
        is_own = receiver == rank
        receiver_load = rank_load[receiver]
        left_load = receiver_load - share[slot_expert[slot]]
        base = harm[slot] - overload(receiver_load, limit, mean, TILT)
        for index in range(num_experts if is_own else width):
            expert = index if is_own else slot_expert[rank * width + index]
            received = left_load + grown_share[expert]
            if received >= present or expert == num_experts:
                continue
            gain = base + relief[expert] + overload(received, limit, mean, TILT)
            grown = max(harm_top[slot], received)
            if not is_own:
                grown = max(grown, present + grown_share[expert] - share[expert])
            heaviest = max(grown, relief_top[expert])
            is_best = gain < 0 and score_of(near_price, gain, 0) < best.score
            is_strict = grown < present and (strict.slot < 0 or gain < strict.gain)
            if not (is_best or is_strict or heaviest <= lightest.heaviest):
                continue
            if num_copies[expert] >= max_copies or is_on(
                first_copy, next_copy, rank_of, expert, receiver
            ):
                continue
            if state.spread and not can_replace(state, slot, expert):
                continue
            step = price_replace(state, holding, slot, expert, gain, heaviest)
            if is_strict:
                strict = step
            if is_best and step.score < best.score:
                best = step
            if heaviest < lightest.heaviest or (
                heaviest == lightest.heaviest and step.num_moves < lightest.num_moves
            ):
                lightest = step
    return best, lightest, strict


@kernel
def price_replace(
    state: LayerState, holding: Holding, slot: int, expert: int, gain: float, heaviest: int
) -> Step:
    """Make the step that overwrites `slot` with `expert`."""
    old = state.slot[slot]
    rank = state.rank_of[slot]
    price = price_change(state, holding, expert, old, rank)
    num_moves = count_change(holding, expert, old, rank)
    score = score_of(holding.near_price, gain, price)
    return Step(slot, -1, -1, expert, gain, score, heaviest, num_moves)


@kernel
def find_exchange(
    state: LayerState, width: int, rank: int, limit: int, mean: int, holding: Holding
) -> tuple[Step, Step]:
    """Search all exchanges between `rank` and lighter ranks.

    Returns the one with the best score and the one that leaves the heaviest rank lightest.
    """
    best = no_step()
    lightest = no_step()
    order, rank_load = state.order, state.rank_load
    slot_expert, shares = state.slot, state.share
    near_price = holding.near_price
    load = rank_load[rank]
    before = overload(load, limit, mean, TILT)
    for index in range(len(order)):
        other_rank = order[index]
        other_load = rank_load[other_rank]
        if other_load >= load:
            break
        both_before = before + overload(other_load, limit, mean, TILT)
        third = third_load(state, rank, other_rank)
        for slot in range(rank * width, (rank + 1) * width):
            share = shares[slot_expert[slot]]
            # Two moves, unless the exchange sends an expert away that came in this search.
            least_price = 2 * near_price if holding.on_rank[slot_expert[slot], rank] else 0
            for other_slot in range(other_rank * width, (other_rank + 1) * width):
                difference = share - shares[slot_expert[other_slot]]
                if difference <= 0 or other_load + difference >= load:
                    continue
                if not holding.on_rank[slot_expert[other_slot], other_rank]:
                    least_price = 0
                gain = (
                    overload(load - difference, limit, mean, TILT)
                    + overload(other_load + difference, limit, mean, TILT)
                    - both_before
                )
                heaviest = max(load - difference, other_load + difference, third)
                is_best = gain < 0 and score_of(near_price, gain, least_price) < best.score
                if not (is_best or heaviest < lightest.heaviest):
                    continue
                if not can_exchange(state, slot, other_slot):
                    continue
                step = price_exchange(state, holding, slot, other_slot, gain, heaviest)
                if is_best and step.score < best.score:
                    best = step
                if heaviest < lightest.heaviest:
                    lightest = step
    return best, lightest


@kernel
def third_load(state: LayerState, one: int, other: int) -> int:
    """Heaviest load among the ranks other than these two."""
    for index in range(len(state.order) - 1, -1, -1):
        rank = state.order[index]
        if rank not in (one, other):
            return int(state.rank_load[rank])
    return 0


@kernel
def price_exchange(
    state: LayerState, holding: Holding, slot: int, other_slot: int, gain: float, heaviest: int
) -> Step:
    """Make the step that exchanges two slots."""
    expert = state.slot[slot]
    other = state.slot[other_slot]
    rank = state.rank_of[slot]
    other_rank = state.rank_of[other_slot]
    price = price_change(state, holding, other, expert, rank) + price_change(
        state, holding, expert, other, other_rank
    )
    num_moves = count_change(holding, other, expert, rank) + count_change(
        holding, expert, other, other_rank
    )
    score = score_of(holding.near_price, gain, price)
    return Step(slot, other_slot, -1, -1, gain, score, heaviest, num_moves)


@kernel
def find_cycle(
    state: LayerState, width: int, rank: int, limit: int, mean: int, holding: Holding
) -> Step:
    """Search the ways to pass three experts round: `rank` to a light rank to another heavy one.

    The heavy ranks each get a somewhat smaller expert than they give, and the light one takes up
    the difference: three moves for two ranks, where exchanges need four. Returns the step with the
    best score. O(C^2 (K^2 + K c)) for C ranks of each kind and c pairs that fit.
    """
    best = no_step()
    if state.spread:
        return best
    order, rank_load = state.order, state.rank_load
    slot_expert, shares = state.slot, state.share
    near_price = holding.near_price
    load = rank_load[rank]
    tried = 0
    for index in range(len(order) - 1, 0, -1):
        heavy = order[index]
        if tried == CYCLE_RANKS or rank_load[heavy] <= limit:
            break
        if heavy == rank:
            continue
        tried += 1
        heavy_load = rank_load[heavy]
        for light in order[: min(CYCLE_RANKS, index)]:
            light_load = rank_load[light]
            if light_load >= mean or light in (rank, heavy):
                continue
            before = (
                overload(load, limit, mean, TILT)
                + overload(heavy_load, limit, mean, TILT)
                + overload(light_load, limit, mean, TILT)
            )
            for slot in range(rank * width, (rank + 1) * width):
                share = shares[slot_expert[slot]]
                for heavy_slot in range(heavy * width, (heavy + 1) * width):
                    heavy_share = shares[slot_expert[heavy_slot]]
                    new_load = load - share + heavy_share
                    if new_load > limit or new_load < light_load:
                        continue
                    for light_slot in range(light * width, (light + 1) * width):
                        light_share = shares[slot_expert[light_slot]]
                        new_heavy = heavy_load - heavy_share + light_share
                        new_light = light_load - light_share + share
                        if new_heavy > limit or new_light > limit or new_heavy < light_load:
                            continue
                        gain = (
                            overload(new_load, limit, mean, TILT)
                            + overload(new_heavy, limit, mean, TILT)
                            + overload(new_light, limit, mean, TILT)
                            - before
                        )
                        if score_of(near_price, gain, 3 * near_price) >= best.score:
                            continue
                        step = price_cycle(state, holding, slot, light_slot, heavy_slot, gain)
                        if step.score < best.score and can_pass_round(
                            state, slot, light_slot, heavy_slot
                        ):
                            best = step
    return best


@kernel
def can_pass_round(state: LayerState, slot: int, light_slot: int, heavy_slot: int) -> bool:
    """Whether no rank gets an expert that it has: slot to light, light to heavy, heavy to slot."""
    return not (
        has_copy(state, state.slot[slot], state.rank_of[light_slot])
        or has_copy(state, state.slot[light_slot], state.rank_of[heavy_slot])
        or has_copy(state, state.slot[heavy_slot], state.rank_of[slot])
    )


@kernel
def price_cycle(
    state: LayerState, holding: Holding, slot: int, light_slot: int, heavy_slot: int, gain: float
) -> Step:
    """Make the step that passes three experts round."""
    price = 0
    num_moves = 0
    for source, target in ((slot, light_slot), (light_slot, heavy_slot), (heavy_slot, slot)):
        came, left = state.slot[source], state.slot[target]
        rank = state.rank_of[target]
        price += price_change(state, holding, came, left, rank)
        num_moves += count_change(holding, came, left, rank)
    score = score_of(holding.near_price, gain, price)
    return Step(slot, light_slot, heavy_slot, -1, gain, score, FAR_ABOVE, num_moves)


@kernel
def take_step(state: LayerState, step: Step) -> None:
    """Make the step. Taking `undo_of` the same step afterwards brings the state back."""
    if step.other_slot >= 0:
        swap_copies(state, step.slot, step.other_slot)
        if step.third_slot >= 0:
            swap_copies(state, step.slot, step.third_slot)
    elif step.slot >= 0:
        replace_copy(state, step.slot, step.expert)


@kernel
def undo_of(state: LayerState, step: Step) -> Step:
    """Return the step that undoes `step`. In: the state before it."""
    other_slot, third_slot, expert = step.other_slot, step.third_slot, -1
    if third_slot >= 0:
        other_slot, third_slot = third_slot, other_slot
    if other_slot < 0:
        expert = int(state.slot[step.slot])
    return Step(
        step.slot,
        other_slot,
        third_slot,
        expert,
        -step.gain,
        -step.score,
        FAR_ABOVE,
        -step.num_moves,
    )


@kernel
def exchange_ranks(
    state: LayerState,
    width: int,
    goal: int,
    depth: int,
    scanned: NDArray[np.int64],
    changed: NDArray[np.int64],
    now: int,
) -> int:
    """Exchange from the `depth` heaviest ranks while it helps. Returns the new `now`."""
    last = len(state.order) - 1
    has_moved = True
    while has_moved and state.rank_load[state.order[last]] > goal:
        has_moved = False
        position = last
        while position > last - depth and state.rank_load[state.order[position]] > goal:
            now += 1
            if exchange_from(state, width, position, goal, scanned, changed, now):
                has_moved = True
            else:
                position -= 1
    return now


@kernel
def settle(
    state: LayerState,
    width: int,
    goal: int,
    mean: int,
    max_rounds: int,
    holding: Holding,
    scanned: NDArray[np.int64],
    changed: NDArray[np.int64],
    best_slots: NDArray[np.int32],
) -> int:
    """Improve a placement, at any number of moves, until the heaviest rank is at `goal`.

    In each round the heaviest rank exchanges while it helps. Then one slot is overwritten so that
    the heaviest rank falls; failing that, all ranks above the goal exchange, as a rank that is
    stuck may come free when lighter ones have changed. Where that ends too, overwritings that lower
    the summed overload come first, although another rank may become the heaviest for a while. Ends
    when nothing helps, after `PATIENCE` rounds in vain, or after `max_rounds`.

    Writes the slots of the best state to `best_slots`; returns its heaviest rank load.
    """
    num_live = len(state.order)
    scanned[:] = -1
    changed[:] = 0
    now = 0
    best = FAR_ABOVE
    num_in_vain = 0
    is_escaping = False
    for index in range(max_rounds + 1):
        now = exchange_ranks(state, width, goal, 1, scanned, changed, now)
        rank = state.order[num_live - 1]
        heaviest = state.rank_load[rank]
        num_in_vain += 1
        if heaviest < best:
            best = heaviest
            best_slots[:] = state.slot
            num_in_vain = 0
        if heaviest <= goal or index == max_rounds or num_in_vain > PATIENCE:
            break
        gainful, _, strict = find_replace(state, width, rank, goal, mean, holding)
        step = gainful if is_escaping and gainful.slot >= 0 else strict
        if step.slot < 0:
            now = exchange_ranks(state, width, goal, num_live, scanned, changed, now)
            rank = state.order[num_live - 1]
            if state.rank_load[rank] < heaviest:
                continue
            # The slots may hold other experts now: what was found before is not for them.
            step, _, _ = find_replace(state, width, rank, goal, mean, holding)
            is_escaping = True
        if step.slot < 0:
            break
        take_step(state, step)
        now += 1
        changed[:] = now
    return int(best)
