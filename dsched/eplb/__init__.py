"""Expert load balancing: which expert sits in which slot, and how its tokens are divided."""

from dsched.eplb.placement import ExpertPlacement, balancedness, check_placement, count_moves
from dsched.eplb.planner import MovePrices, PlacementOptions, PlacementPlan, plan_placement
from dsched.eplb.split import split_by_weights, split_traffic, split_weights, split_whole_tokens

__all__ = [
    "ExpertPlacement",
    "MovePrices",
    "PlacementOptions",
    "PlacementPlan",
    "balancedness",
    "check_placement",
    "count_moves",
    "plan_placement",
    "split_by_weights",
    "split_traffic",
    "split_weights",
    "split_whole_tokens",
]
