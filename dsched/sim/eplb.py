"""Compare expert placement planners over windows of load, generated or recorded. Simulated.

Each planner renews the placement after every window, from the load of that window, and is scored on
the window it planned from and on the next one, which is what serving sees. The first plan is made
from nothing and not scored: it moves everything, whoever makes it.

Planners are callables, so that engines' own can take part without being imported here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dsched.clock import Clock
from dsched.eplb import (
    ExpertPlacement,
    PlacementOptions,
    Planner,
    balancedness,
    count_moves,
    plan_placement,
)
from dsched.rng import stream


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadShape:
    """Expert load that drifts from window to window.

    Popularity is a power law whose exponent differs by layer. From window to window the logarithm
    of each expert's popularity takes a random step and drifts back towards its mean, and some
    experts trade places.
    """

    num_layers: int = 58
    num_experts: int = 256
    exponent: float = 0.8
    """Of the power law; 0 is even."""
    exponent_spread: float = 0.25
    """Layers draw theirs from exponent * (1 - spread) .. exponent * (1 + spread)."""
    drift: float = 0.05
    """Standard deviation of a window's step of log popularity."""
    persistence: float = 0.9
    """Part of the log popularity's distance from its mean that is left after a window (first-order
    autoregression). 1 is a random walk, which never comes back."""
    num_trades: int | None = None
    """Experts a window that trade places in popularity with a neighbour. Default: E / 64."""
    trade_distance: int = 1
    """How many places apart the two are; 0 draws any two, which no planner can foresee."""
    dominating: tuple[float, float] | None = None
    """One expert of each layer takes a share of all tokens in this range, as top-1 routing does."""
    tokens_per_expert: int = 20_000
    """Mean tokens of an expert in a window."""

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_experts < 2:
            raise ValueError(
                f"{self.num_layers} layers of {self.num_experts} experts: "
                "a load has at least one layer and two experts"
            )
        if self.exponent < 0 or self.drift < 0 or not 0 <= self.exponent_spread <= 1:
            raise ValueError(f"{self}: exponent, spread and drift must not be negative")
        if not 0 <= self.persistence <= 1:
            raise ValueError(f"persistence {self.persistence} must be between 0 and 1")


def generate_expert_load(shape: LoadShape, *, num_windows: int, seed: int) -> NDArray[np.int64]:
    """Return tokens of each expert, [W, L, E]; the same seed gives the same load.

    >>> generate_expert_load(LoadShape(num_layers=1, num_experts=4), num_windows=2, seed=1).shape
    (2, 1, 4)
    """
    rng = stream(seed, "expert_load")
    popularity = _first_popularity(shape, rng)
    walk = np.zeros_like(popularity)
    hot, hot_share = _first_hot(shape, rng)
    windows = []
    for index in range(num_windows):
        if index > 0:
            walk *= shape.persistence
            walk += shape.drift * rng.standard_normal(walk.shape)
            _trade_places(shape, popularity, rng)
            hot_share = hot_share * np.exp(shape.drift * rng.standard_normal(len(hot_share)))
        share = popularity * np.exp(walk)
        share /= share.sum(axis=1, keepdims=True)
        if shape.dominating is not None:
            hot_share = np.clip(hot_share, *shape.dominating)
            _dominate(share, hot, hot_share)
        windows.append(np.rint(share * shape.tokens_per_expert * shape.num_experts))
    return np.array(windows, np.int64).reshape(num_windows, *popularity.shape)


def _first_popularity(shape: LoadShape, rng: np.random.Generator) -> NDArray[np.float64]:
    spread = rng.uniform(-shape.exponent_spread, shape.exponent_spread, shape.num_layers)
    exponents = shape.exponent * (1 + spread)
    ordered = np.arange(1, shape.num_experts + 1)[None, :] ** -exponents[:, None]
    shuffled: NDArray[np.float64] = rng.permuted(ordered, axis=1)
    return shuffled


def _first_hot(
    shape: LoadShape, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    low, high = shape.dominating or (0.0, 0.0)
    hot = rng.integers(shape.num_experts, size=shape.num_layers)
    return hot, rng.uniform(low, high, shape.num_layers)


def _dominate(
    share: NDArray[np.float64], hot: NDArray[np.int64], hot_share: NDArray[np.float64]
) -> None:
    layers = np.arange(len(share))
    share[layers, hot] = 0
    share *= ((1 - hot_share) / share.sum(axis=1))[:, None]
    share[layers, hot] = hot_share


def _trade_places(
    shape: LoadShape, popularity: NDArray[np.float64], rng: np.random.Generator
) -> None:
    num_trades = shape.num_experts // 64 if shape.num_trades is None else shape.num_trades
    for row in popularity:
        for _ in range(num_trades):
            if shape.trade_distance == 0:
                one, other = rng.choice(shape.num_experts, 2, replace=False)
            else:
                order = np.argsort(-row, kind="stable")
                place = int(rng.integers(shape.num_experts - shape.trade_distance))
                one, other = order[place], order[place + shape.trade_distance]
            row[one], row[other] = row[other], row[one]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerScore:
    """How one planner did over the scored windows. Balance is mean over heaviest rank load."""

    name: str
    balance_avg: float
    """Mean over layers and windows, on the window that was planned from."""
    balance_worst: float
    """The worst layer of any window."""
    next_balance_avg: float
    """On the window after it."""
    next_balance_worst: float
    next_weighted_avg: float
    """On the window after it, if traffic is split at best for that window's own counts."""
    moves_per_layer: float
    """Copies brought to a rank that did not hold them, per layer and plan."""
    cross_node_moves_per_layer: float
    """Of those, experts that no rank of the node held."""
    solve_ms: float
    """Median time of a plan for all layers."""
    balance_by_window: tuple[float, ...]
    next_by_window: tuple[float, ...]


def score_planner(
    name: str,
    planner: Planner,
    windows: NDArray[np.int64],
    *,
    clock: Clock,
    num_nodes: int = 1,
) -> PlannerScore:
    """Let one planner renew the placement over windows [W, L, E] and score it from the second on.

    Raises:
        ValueError: fewer than three windows: one starts, one is planned from, one comes next.
    """
    if len(windows) < 3:
        raise ValueError(f"{len(windows)} load windows are too few: at least 3")
    placement = planner(windows[0], None)
    fits, nexts, weighted, moves, far, times = [], [], [], [], [], []
    for load, next_load in pairwise(windows[1:]):
        start_ns = clock.now_ns()
        planned = planner(load, placement)
        times.append((clock.now_ns() - start_ns) / 1e6)
        all_moves, far_moves = count_moves(placement, planned, num_nodes=num_nodes)
        fits.append(balancedness(planned, load))
        nexts.append(balancedness(planned, next_load))
        weighted.append(balancedness(planned, next_load, split="weighted"))
        moves.append(float(all_moves.mean()))
        far.append(float(far_moves.mean()))
        placement = planned
    return PlannerScore(
        name=name,
        balance_avg=float(np.mean(fits)),
        balance_worst=float(np.min(fits)),
        next_balance_avg=float(np.mean(nexts)),
        next_balance_worst=float(np.min(nexts)),
        next_weighted_avg=float(np.mean(weighted)),
        moves_per_layer=float(np.mean(moves)),
        cross_node_moves_per_layer=float(np.mean(far)),
        solve_ms=float(np.median(times)),
        balance_by_window=tuple(float(fit.mean()) for fit in fits),
        next_by_window=tuple(float(after.mean()) for after in nexts),
    )


def compare_planners(
    planners: Mapping[str, Planner],
    windows: NDArray[np.int64],
    *,
    clock: Clock,
    num_nodes: int = 1,
) -> list[PlannerScore]:
    """Score each planner on the same windows, in the order given."""
    return [
        score_planner(name, planner, windows, clock=clock, num_nodes=num_nodes)
        for name, planner in planners.items()
    ]


def dsched_planner(
    *,
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    options: PlacementOptions,
    max_moves: int | None = None,
    from_current: bool = True,
) -> Planner:
    """Return dsched's planner as a callable; `from_current` False plans afresh each time."""

    def plan(load: NDArray[np.int64], current: ExpertPlacement | None) -> ExpertPlacement:
        return plan_placement(
            load,
            num_slots=num_slots,
            num_ranks=num_ranks,
            num_nodes=num_nodes,
            current=current if from_current else None,
            max_moves=max_moves if from_current else None,
            options=options,
        ).placement

    return plan


def greedy_planner(*, num_slots: int, num_ranks: int) -> Planner:
    """Return the published greedy (`plan_greedy`) as a callable."""

    def plan(load: NDArray[np.int64], _: ExpertPlacement | None) -> ExpertPlacement:
        slots = plan_greedy(load, num_slots=num_slots, num_ranks=num_ranks)
        return ExpertPlacement(slot_expert=slots, num_ranks=num_ranks, num_experts=load.shape[1])

    return plan


def plan_greedy(load: NDArray[np.int64], *, num_slots: int, num_ranks: int) -> NDArray[np.int32]:
    """Place experts as DeepSeek's published EPLB does in its global mode, [L, P]; written anew.

    Copies go one by one to the expert with the greatest load a copy, without a limit; then copies,
    heaviest first, to the rank with a free slot and least load. (deepseek-ai/EPLB, README.)
    """
    rows = [_greedy_row(row, num_slots, num_ranks) for row in np.asarray(load, np.float64)]
    return np.array(rows, np.int32).reshape(len(load), num_slots)


def _greedy_row(load: NDArray[np.float64], num_slots: int, num_ranks: int) -> Sequence[int]:
    copies = np.ones(len(load), np.int64)
    experts = list(range(len(load)))
    for _ in range(num_slots - len(load)):
        hottest = int(np.argmax(load / copies))
        copies[hottest] += 1
        experts.append(hottest)
    width = num_slots // num_ranks
    shares = (load / copies)[experts]
    rank_load = np.zeros(num_ranks)
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    for index in np.argsort(-shares, kind="stable"):
        rank = int(np.argmin(rank_load))
        slots[rank].append(experts[index])
        rank_load[rank] += shares[index]
        if len(slots[rank]) == width:
            rank_load[rank] = np.inf
    return [expert for rank in slots for expert in rank]
