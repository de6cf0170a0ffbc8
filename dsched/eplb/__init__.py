"""Expert load balancing: which expert sits in which slot, and how its tokens are divided."""

from dsched.eplb.layers import Outcome
from dsched.eplb.migration import MigrationPlan, Transfer, apply_batch, plan_migration
from dsched.eplb.placement import (
    EMPTY,
    ExpertPlacement,
    Planner,
    balancedness,
    check_placement,
    count_moves,
    rank_loads,
    split_evenly,
)
from dsched.eplb.planner import (
    MovePrices,
    Payback,
    PlacementOptions,
    PlacementPlan,
    plan_placement,
)
from dsched.eplb.record import LoadHeader, LoadRecorder, read_load_file
from dsched.eplb.split import split_by_weights, split_traffic, split_weights, split_whole_tokens
from dsched.eplb.window import LoadWindow, WindowLoad

__all__ = [
    "EMPTY",
    "ExpertPlacement",
    "LoadHeader",
    "LoadRecorder",
    "LoadWindow",
    "MigrationPlan",
    "MovePrices",
    "Outcome",
    "Payback",
    "PlacementOptions",
    "PlacementPlan",
    "Planner",
    "Transfer",
    "WindowLoad",
    "apply_batch",
    "balancedness",
    "check_placement",
    "count_moves",
    "plan_migration",
    "plan_placement",
    "rank_loads",
    "read_load_file",
    "split_by_weights",
    "split_evenly",
    "split_traffic",
    "split_weights",
    "split_whole_tokens",
    "warm_up",
]


def warm_up() -> None:
    """Compile the planners, or load them from numba's cache, before the first plan is needed.

    Takes about a minute of CPU the first time on a machine, half a second after that.
    """
    load = [[3, 1, 1, 1]]
    plan = plan_placement(load, num_slots=6, num_ranks=3)
    moved = plan_placement(
        [[1, 1, 1, 9]], num_slots=6, num_ranks=3, current=plan.placement, max_moves=1
    )
    balancedness(moved.placement, load)
    split_whole_tokens(moved.placement, load)
