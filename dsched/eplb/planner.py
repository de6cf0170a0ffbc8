"""Decide which expert fills each slot, so that ranks carry equal load and few weights move.

In:  the expert load of a window, the shape of the EP group, and the placement in use if there is
one. Out: a `PlacementPlan`: the placement, and what reaching it costs.

A renewal that starts from nothing balances best on the window it saw, and moves nearly every
expert; measured in production the moves cost more than the balance wins. The next window differs
anyway, so the last percent of balance is not worth a move. Hence: with `current`, a layer is left
alone until it is over a trigger, and then improved by the cheapest steps until it is under a lower
stop. Without `current`, copies are counted and packed greedily and improved by search.

Pure and deterministic: equal counts in any number type, layout or whole multiple give the same
bytes on every rank and machine. Milliseconds for 58 layers of 256 experts; `fresh.py`, `search.py`
and `warm.py` state the costs of their parts. Sources of the greedy start: DeepSeek-V3 report
(arXiv 2412.19437, section 3.4), deepseek-ai/EPLB.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dsched.eplb.budget import share_moves
from dsched.eplb.hierarchy import plan_grouped
from dsched.eplb.layers import (
    GroupShape,
    LayerResults,
    Outcome,
    SearchLimits,
    plan_first,
    plan_next,
)
from dsched.eplb.loads import read_load
from dsched.eplb.placement import EMPTY, ExpertPlacement, Split
from dsched.eplb.warm import UNLIMITED
from dsched.eplb.weighted import plan_weighted

TRAIL_STEPS = 64
"""Steps of a layer's search that a shared budget can choose between; later ones count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MovePrices:
    """What bringing one expert copy to a rank costs, by the link it takes.

    Only the ratio decides which steps are taken. Defaults: the middle of what EPIC (SIGCOMM 2026)
    measured for experts of 42 MB over NVLink (.09-.21 ms) and RDMA (.8-1.7 ms).
    """

    same_node_ns: int = 150_000
    cross_node_ns: int = 1_200_000

    def __post_init__(self) -> None:
        if not 1 <= self.same_node_ns <= self.cross_node_ns:
            raise ValueError(
                f"prices of {self.same_node_ns} ns in a node and {self.cross_node_ns} ns across: "
                "both are at least 1 ns, and crossing nodes is not cheaper"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Payback:
    """What a better balance is worth: time saved a step, for the steps until the next plan."""

    ns_per_token: float
    """Time that one more token on the heaviest rank adds to a layer's step."""
    window_steps: int
    """Steps over which the load was counted."""
    steps_to_next: int
    """Steps until the next plan."""

    def __post_init__(self) -> None:
        if not self.ns_per_token >= 0 or self.window_steps < 1 or self.steps_to_next < 0:
            raise ValueError(f"{self}: times and steps must not be negative, and windows not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions:
    """How hard to search, and when to leave a layer alone."""

    trigger: float = 0.03
    """Heaviest over mean rank load, less one, above which a layer is changed. Lower: moves for
    differences that the next window undoes. Higher: slow steps."""
    stop: float = 0.02
    """The same, at which a changed layer is good enough; below `trigger`."""
    fresh_stop: float = 0.0005
    """The same for a placement planned from nothing."""
    max_rounds: int = 64
    """Overwritings and full passes of the search in a fresh plan. 0: exchanges from the heaviest
    rank only. More: seconds of search for layers with few slots a rank."""
    search: bool = True
    """False packs greedily and stops: the fastest plan, about .2 % less balanced."""
    prices: MovePrices = MovePrices()
    expert_bytes: int = 44_040_192
    """Weights of one expert; default: DeepSeek-V3 in FP8 (3 matrices of 7168 x 2048)."""
    max_bytes: int | None = None
    """Bytes that all layers together may move; the layers that gain most for a byte come first.
    Copies of lost experts are made in any case."""
    payback: "Payback | None" = None
    """Move only what pays for itself before the next plan; default: trust the trigger."""
    split: Split = "equal"
    """How the engine divides an expert's tokens over its copies. `weighted` for engines that use
    `split_traffic`: a layer is then judged by its optimal split, and fewer moves are enough."""
    num_groups: int | None = None
    """Expert groups of the model's router (8 for DeepSeek-V3). With it, each group stays on one
    node: for prefill, where a token's experts are limited to a few nodes. Divides the experts;
    nodes divide it."""
    spread_nodes: bool = False
    """Put the copies of an expert that has several on at least two nodes, as far as slots allow,
    so that it survives the loss of a node."""

    def __post_init__(self) -> None:
        if not 0 <= self.stop <= self.trigger:
            raise ValueError(f"stop {self.stop} must be between 0 and trigger {self.trigger}")
        if self.fresh_stop < 0:
            raise ValueError(f"fresh_stop {self.fresh_stop} must not be negative")
        if self.split not in ("equal", "weighted"):
            raise ValueError(f"split is {self.split!r}; it must be 'equal' or 'weighted'")
        if self.split == "weighted" and (self.num_groups or self.max_bytes is not None):
            raise ValueError("split 'weighted' cannot be combined with num_groups or max_bytes")
        if self.expert_bytes < 1 or (self.max_bytes is not None and self.max_bytes < 0):
            raise ValueError(
                f"max_bytes {self.max_bytes} and expert_bytes {self.expert_bytes}: "
                "neither may be negative, and an expert has at least one byte"
            )
        if self.max_rounds < 0:
            raise ValueError(f"max_rounds {self.max_rounds} must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementPlan:
    """A placement and the price of reaching it. L layers."""

    placement: ExpertPlacement
    num_moves: NDArray[np.int64]
    """[L] copies to bring to a rank that does not hold them now; 0 without a current placement,
    as then nothing is in use that could move."""
    num_cross_node_moves: NDArray[np.int64]
    """[L] of those, experts that no rank of the node holds now."""
    num_covered: NDArray[np.int64]
    """[L] of the moves, those that bring an expert back that had no live copy. They are made even
    if `max_moves` is less."""
    outcome: NDArray[np.int64]
    """[L] an `Outcome` for each layer."""
    balance_before: NDArray[np.float64]
    """[L] mean over heaviest rank load of the placement in use, equal split; NaN without one."""
    balance: NDArray[np.float64]
    """[L] the same of this placement."""

    @property
    def is_unchanged(self) -> bool:
        """Nothing moves."""
        return bool((self.outcome == Outcome.KEPT).all())


def plan_placement(
    load: ArrayLike,
    *,
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    current: ExpertPlacement | ArrayLike | None = None,
    max_moves: int | None = None,
    rank_up: ArrayLike | None = None,
    epoch: int = 0,
    options: PlacementOptions = PlacementOptions(),
) -> PlacementPlan:
    """Plan the placement for an expert load [L, E].

    `current` is the placement in use, [L, P]; slots of ranks that are down count as lost. With it,
    at most `max_moves` copies move in each layer, more only where an expert has no live copy left.
    `rank_up` [G] says which ranks are up (default: all); the others get no expert.

    Raises:
        ValueError: a load that is negative, not finite or not [L, E]; slots that ranks do not
            divide, ranks that nodes do not divide, fewer live slots than experts; a mask, current
            placement or limit that does not fit.
        InvariantError: the planner itself has lost an expert, which is a defect of dsched.

    >>> plan = plan_placement([[90, 10, 10, 10]], num_slots=8, num_ranks=4)
    >>> plan.placement.slot_expert.reshape(4, 2).tolist()
    [[0, 2], [0, 3], [0, 1], [0, 1]]
    """
    weight = read_load(load)
    shape = check_shape(
        num_experts=weight.shape[1],
        num_slots=num_slots,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        rank_up=rank_up,
    )
    if max_moves is not None and max_moves < 0:
        raise ValueError(f"max_moves is {max_moves}; it must not be negative")
    slots = None if current is None else read_current(current, weight, shape)
    moves = np.full(len(weight), UNLIMITED if max_moves is None else max_moves, np.int64)
    if options.split == "weighted":
        results = plan_weighted(weight, slots, shape, limits_of(options), moves)
    else:
        results = plan_layers(weight, slots, shape, options, moves)
    if slots is None:
        before = np.full(len(weight), np.nan)
    else:
        tokens = np.asarray(load, dtype=np.float64).sum(axis=1)
        if options.max_bytes is not None:
            results = fit_budget(weight, slots, shape, options, tokens, results)
        if options.payback is not None:
            drop_unprofitable(weight, slots, options, tokens, results)
        before = balance(weight, results.heaviest_before, shape)
    plan = make_plan(weight, shape, results, before, epoch)
    # A lost expert would be wrong answers: no plan is handed out without this look.
    plan.placement.validate()
    return plan


def plan_layers(
    weight: NDArray[np.int64],
    current: NDArray[np.int32] | None,
    shape: GroupShape,
    options: PlacementOptions,
    max_moves: NDArray[np.int64],
) -> LayerResults:
    """Choose between the ways to plan."""
    limits = limits_of(options)
    if options.num_groups is not None:
        return plan_grouped(weight, current, shape, limits, options.num_groups, max_moves)
    if current is None:
        return plan_first(weight, shape, limits)
    trail_steps = 0 if options.max_bytes is None else TRAIL_STEPS
    return plan_next(weight, current, shape, limits, max_moves, trail_steps)


def fit_budget(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    shape: GroupShape,
    options: PlacementOptions,
    tokens: NDArray[np.float64],
    results: LayerResults,
) -> LayerResults:
    """Plan again with fewer moves a layer if all together are over the budget of bytes."""
    assert options.max_bytes is not None
    max_total = options.max_bytes // options.expert_bytes
    if results.num_moves.sum() <= max_total:
        return results
    scale = tokens_per_unit(weight, tokens)
    trails = [trail_of(results, layer, float(scale[layer])) for layer in range(len(weight))]
    granted = share_moves(trails, max_total_moves=max_total)
    return plan_layers(weight, current, shape, options, granted)


def trail_of(results: LayerResults, layer: int, scale: float) -> list[tuple[int, float]]:
    """Return what each number of moves brings in one layer, starting with the lost experts."""
    points = [(int(results.num_covered[layer]), float(results.heaviest_before[layer]) * scale)]
    for moves, heaviest in results.trail[layer]:
        if heaviest > 0:
            points.append((int(moves), float(heaviest) * scale))
    points.append((int(results.num_moves[layer]), float(results.heaviest[layer]) * scale))
    if results.num_covered[layer] > 0:
        # Before, lost experts loaded nobody: compare with the heaviest load seen since.
        points[0] = (points[0][0], max(point[1] for point in points))
    return points


def tokens_per_unit(weight: NDArray[np.int64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the tokens that one unit of `weight` stands for in each layer, [L]."""
    totals = weight.sum(axis=1)
    scale: NDArray[np.float64] = np.zeros(len(weight))
    np.divide(tokens, totals, out=scale, where=totals > 0)
    return scale


def drop_unprofitable(
    weight: NDArray[np.int64],
    current: NDArray[np.int32],
    options: PlacementOptions,
    tokens: NDArray[np.float64],
    results: LayerResults,
) -> None:
    """Leave layers as they are whose moves cost more time than they save until the next plan."""
    payback = options.payback
    assert payback is not None
    saved_tokens = (results.heaviest_before - results.heaviest) * tokens_per_unit(weight, tokens)
    saved_ns = saved_tokens / payback.window_steps * payback.ns_per_token * payback.steps_to_next
    price_ns = (
        results.num_moves - results.num_far_moves
    ) * options.prices.same_node_ns + results.num_far_moves * options.prices.cross_node_ns
    is_dropped = (saved_ns <= price_ns) & (results.num_covered == 0)
    results.slots[is_dropped] = current[is_dropped]
    results.heaviest[is_dropped] = results.heaviest_before[is_dropped]
    results.num_moves[is_dropped] = 0
    results.num_far_moves[is_dropped] = 0
    results.outcome[is_dropped] = Outcome.KEPT


def check_shape(
    *, num_experts: int, num_slots: int, num_ranks: int, num_nodes: int, rank_up: ArrayLike | None
) -> GroupShape:
    """Return the shape of the EP group if it is possible; say what would be if not."""
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; there is at least one rank")
    if num_slots < 1 or num_slots % num_ranks:
        raise ValueError(
            f"{num_slots} slots cannot be split over {num_ranks} EP ranks; "
            f"{fitting_slots(num_experts, num_slots, num_ranks)} would do"
        )
    if num_nodes < 1 or num_ranks % num_nodes:
        raise ValueError(f"{num_ranks} EP ranks cannot be split over {num_nodes} nodes")
    up = read_rank_up(rank_up, num_ranks)
    check_room(num_experts, num_slots, num_ranks, int(up.sum()))
    return GroupShape(
        num_experts=num_experts,
        num_slots=num_slots,
        rank_up=up,
        node_of=np.arange(num_ranks) // (num_ranks // num_nodes),
    )


def fitting_slots(num_experts: int, num_slots: int, num_ranks: int) -> str:
    """Name the nearest numbers of slots that ranks divide and that hold all experts."""
    least = -(-num_experts // num_ranks) * num_ranks
    below = num_slots // num_ranks * num_ranks
    return " or ".join(str(n) for n in sorted({max(below, least), max(below + num_ranks, least)}))


def read_rank_up(rank_up: ArrayLike | None, num_ranks: int) -> NDArray[np.bool_]:
    if rank_up is None:
        return np.ones(num_ranks, np.bool_)
    up = np.array(rank_up)
    if up.shape != (num_ranks,):
        raise ValueError(f"rank_up has shape {up.shape}; it must be ({num_ranks},), one per rank")
    if up.dtype.kind not in "biu" or not np.isin(up, (0, 1)).all():
        raise ValueError(f"rank_up holds {up.tolist()}; it must hold booleans")
    if not up.any():
        raise ValueError(f"rank_up says that all {num_ranks} ranks are down")
    return up.astype(np.bool_)


def check_room(num_experts: int, num_slots: int, num_ranks: int, num_live: int) -> None:
    """Refuse fewer live slots than experts, and say how many ranks must return."""
    width = num_slots // num_ranks
    num_live_slots = width * num_live
    if num_live_slots >= num_experts:
        return
    if num_live == num_ranks:
        raise ValueError(
            f"{num_slots} slots cannot hold {num_experts} experts; "
            f"{fitting_slots(num_experts, num_slots, num_ranks)} would do"
        )
    num_missing = -(-num_experts // width) - num_live
    remedy = f"{num_missing} of {num_ranks - num_live} lost ranks must return"
    if num_missing > num_ranks - num_live:
        remedy = f"all {num_ranks} ranks have only {num_slots}"
    raise ValueError(f"{num_live_slots} live slots cannot hold {num_experts} experts; {remedy}")


def read_current(
    current: ExpertPlacement | ArrayLike, weight: NDArray[np.int64], shape: GroupShape
) -> NDArray[np.int32]:
    """Return the slots in use as the kernels want them: E where empty or on a rank that is down."""
    placement = current
    if not isinstance(placement, ExpertPlacement):
        placement = ExpertPlacement(
            slot_expert=placement, num_ranks=shape.num_ranks, num_experts=shape.num_experts
        )
    expected = (len(weight), shape.num_slots)
    if placement.slot_expert.shape != expected or placement.num_ranks != shape.num_ranks:
        raise ValueError(
            f"current has {placement.slot_expert.shape} slots on {placement.num_ranks} ranks; "
            f"the plan is for {expected} on {shape.num_ranks}"
        )
    if placement.num_experts > shape.num_experts:
        raise ValueError(
            f"current has {placement.num_experts} experts; the load has {shape.num_experts}"
        )
    is_used = placement.slot_expert != EMPTY
    if not shape.rank_up.all():
        is_used &= np.repeat(shape.rank_up, shape.width)[None, :]
    return np.where(is_used, placement.slot_expert, np.int32(shape.num_experts))


def limits_of(options: PlacementOptions) -> SearchLimits:
    return SearchLimits(
        trigger=float(options.trigger),
        stop=float(options.stop),
        fresh_stop=float(options.fresh_stop),
        max_rounds=options.max_rounds if options.search else -1,
        near_price=options.prices.same_node_ns,
        far_price=options.prices.cross_node_ns,
        spread=int(options.spread_nodes),
    )


def balance(
    weight: NDArray[np.int64], heaviest: NDArray[np.int64], shape: GroupShape
) -> NDArray[np.float64]:
    """Mean over heaviest rank load, [L]; 1 for a layer without load."""
    mean = weight.sum(axis=1) / shape.num_live
    values: NDArray[np.float64] = np.ones(len(weight))
    np.divide(mean, heaviest, out=values, where=heaviest > 0)
    return np.minimum(values, 1.0)


def make_plan(
    weight: NDArray[np.int64],
    shape: GroupShape,
    results: LayerResults,
    before: NDArray[np.float64],
    epoch: int,
) -> PlacementPlan:
    slots = results.slots
    slots[slots == shape.num_experts] = EMPTY
    slots.flags.writeable = False
    return PlacementPlan(
        placement=ExpertPlacement(
            slot_expert=slots,
            num_experts=shape.num_experts,
            num_ranks=shape.num_ranks,
            epoch=epoch,
        ),
        num_moves=results.num_moves,
        num_cross_node_moves=results.num_far_moves,
        num_covered=results.num_covered,
        outcome=results.outcome,
        balance_before=before,
        balance=balance(weight, results.heaviest, shape),
    )
