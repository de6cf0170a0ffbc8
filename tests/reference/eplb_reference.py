"""Plain twins of `dsched.eplb`: exact fractions and exhaustive search, slow and obvious."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import lil_matrix

EMPTY = -1


def rank_loads_equal(slots: Sequence[int], load: Sequence[float], num_ranks: int) -> list[Fraction]:
    """Exact rank loads when every copy gets the same part."""
    width = len(slots) // num_ranks
    totals = []
    for rank in range(num_ranks):
        total = Fraction(0)
        for expert in slots[rank * width : (rank + 1) * width]:
            if expert != EMPTY:
                total += Fraction(load[expert]) / list(slots).count(expert)
        totals.append(total)
    return totals


def heaviest_equal(slots: Sequence[int], load: Sequence[float], num_ranks: int) -> Fraction:
    return max(rank_loads_equal(slots, load, num_ranks))


def lightest_split(slots: NDArray[np.int32], load: NDArray[Any], num_ranks: int) -> float:
    """Heaviest rank load of the optimal weighted split, by linear programming (HiGHS)."""
    num_slots, num_experts = len(slots), len(load)
    width = num_slots // num_ranks
    on_rank = lil_matrix((num_ranks, num_slots + 1))
    of_expert = lil_matrix((num_experts, num_slots + 1))
    for slot, expert in enumerate(slots):
        if expert != EMPTY:
            on_rank[slot // width, slot] = 1
            of_expert[expert, slot] = 1
    on_rank[:, num_slots] = -1
    cost = np.zeros(num_slots + 1)
    cost[-1] = 1
    result = linprog(
        cost,
        A_ub=on_rank.tocsr(),
        b_ub=np.zeros(num_ranks),
        A_eq=of_expert.tocsr(),
        b_eq=np.asarray(load, dtype=np.float64),
        method="highs",
    )
    return float(result.fun)


def moves_as_sets(old: NDArray[np.int32], new: NDArray[np.int32], num_ranks: int) -> list[int]:
    """Pairs of rank and expert that are new, per layer."""

    def pairs(row: NDArray[np.int32]) -> set[tuple[int, int]]:
        width = len(row) // num_ranks
        return {(slot // width, int(e)) for slot, e in enumerate(row) if e != EMPTY}

    return [len(pairs(after) - pairs(before)) for before, after in zip(old, new, strict=True)]


def greedy_counts(
    load: Sequence[int], *, num_slots: int, max_copies: int, rebate: int = 2
) -> list[int]:
    """Copies by the rule of `fresh.count_copies`: greatest load for copies less the rebate."""
    counts = [1] * len(load)

    def rate(expert: int) -> Fraction:
        return load[expert] / (counts[expert] - Fraction(rebate, 16))

    for _ in range(num_slots - len(load)):
        open_experts = [e for e in range(len(load)) if counts[e] < max_copies]
        if not open_experts:
            break
        best = min(open_experts, key=lambda e: (-rate(e), counts[e], e))
        counts[best] += 1
    return counts


def best_of_pairs(load: Sequence[int], *, num_slots: int, num_ranks: int) -> Fraction:
    """Least heaviest rank with two slots a rank: all counts, largest share with smallest.

    For fixed counts that pairing is optimal; distinct ranks are not asked for, so this is a bound.
    """
    assert num_slots == 2 * num_ranks
    best: Fraction | None = None
    num_experts = len(load)
    for extra in combinations_with_replacement(range(num_experts), num_slots - num_experts):
        counts = [1 + extra.count(e) for e in range(num_experts)]
        if max(counts) > num_ranks:
            continue
        shares = sorted(
            Fraction(load[e], counts[e]) for e in range(num_experts) for _ in range(counts[e])
        )
        heaviest = max(shares[i] + shares[-1 - i] for i in range(num_ranks))
        if best is None or heaviest < best:
            best = heaviest
    assert best is not None
    return best
