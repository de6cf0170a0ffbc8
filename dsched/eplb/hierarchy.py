"""Keep each expert group on one node, for models that route a token to few groups.

Prefill with group-limited routing sends a token over the network once for each node that holds one
of its experts; if a group's experts share a node, that is once for each of its groups. So groups
are placed on nodes first, evenly by load, and then each node plans its own experts and copies on
its own ranks. The price is balance: a node cannot be lighter than its groups.

With a placement in use, groups stay where they are until the *nodes* are over the trigger, since a
group that moves takes all its experts across the network.

Pure; runs the planner once for the groups and once for each node.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dsched.eplb.layers import (
    GroupShape,
    LayerResults,
    Outcome,
    SearchLimits,
    plan_first,
    plan_next,
    survey_layers,
)
from dsched.eplb.relabel import finish_layers
from dsched.eplb.warm import UNLIMITED


def check_groups(shape: GroupShape, num_groups: int) -> None:
    """Refuse groups that experts or nodes do not fit, and nodes too small for their experts."""
    if num_groups < 1 or shape.num_experts % num_groups:
        raise ValueError(f"{shape.num_experts} experts cannot be split into {num_groups} groups")
    if num_groups % shape.num_nodes:
        raise ValueError(f"{num_groups} groups cannot be split over {shape.num_nodes} nodes")
    per_node = shape.num_experts // shape.num_nodes
    for node in range(shape.num_nodes):
        num_live = int(shape.rank_up[shape.node_of == node].sum()) * shape.width
        if num_live < per_node:
            raise ValueError(
                f"{num_live} live slots of node {node} cannot hold its {per_node} experts; "
                "expert groups stay on one node"
            )


def plan_grouped(
    weight: NDArray[np.int64],
    current: NDArray[np.int32] | None,
    shape: GroupShape,
    limits: SearchLimits,
    num_groups: int,
    max_moves: NDArray[np.int64],
) -> LayerResults:
    """Plan every layer with each group on one node. `current` [L, P] has E in empty slots.

    `max_moves` [L] holds for each layer; nodes share it in order.
    """
    check_groups(shape, num_groups)
    node_groups = place_groups(weight, current, shape, limits, num_groups)
    experts = experts_of_nodes(node_groups, shape.num_experts // num_groups)
    results = LayerResults.of(
        np.full((len(weight), shape.num_slots), shape.num_experts, np.int32), 0
    )
    left = max_moves.copy()
    for node in range(shape.num_nodes):
        plan_node(weight, current, shape, limits, experts[:, node], node, left, results)
    finish(weight, current, shape, results)
    return results


def place_groups(
    weight: NDArray[np.int64],
    current: NDArray[np.int32] | None,
    shape: GroupShape,
    limits: SearchLimits,
    num_groups: int,
) -> NDArray[np.int64]:
    """Return the groups of each node, [L, N, num_groups / N], evenly loaded, in rising order."""
    num_layers = len(weight)
    group_weight = weight.reshape(num_layers, num_groups, -1).sum(axis=2)
    groups = GroupShape(
        num_experts=num_groups,
        num_slots=num_groups,
        rank_up=np.ones(shape.num_nodes, np.bool_),
        node_of=np.arange(shape.num_nodes),
    )
    alone = replace(limits, spread=0)
    in_use = None if current is None else groups_in_use(current, shape, num_groups)
    if in_use is None:
        placed = plan_first(group_weight, groups, alone).slots
    else:
        no_limit = np.full(num_layers, UNLIMITED, np.int64)
        placed = plan_next(group_weight, in_use, groups, alone, no_limit, 0).slots
    by_node = placed.astype(np.int64).reshape(num_layers, shape.num_nodes, -1)
    return np.sort(by_node, axis=2)


def groups_in_use(
    current: NDArray[np.int32], shape: GroupShape, num_groups: int
) -> NDArray[np.int32] | None:
    """Return the groups of each node now, [L, num_groups], or None if a group is on several."""
    num_layers, num_nodes = len(current), shape.num_nodes
    group_size = shape.num_experts // num_groups
    held = np.zeros((num_layers, num_nodes, num_groups), np.bool_)
    layer, slot = np.nonzero(current != shape.num_experts)
    held[layer, shape.node_of[slot // shape.width], current[layer, slot] // group_size] = True
    is_clean = (held.sum(axis=1) == 1).all() and (held.sum(axis=2) == num_groups // num_nodes).all()
    if not is_clean:
        return None
    return np.nonzero(held)[2].astype(np.int32).reshape(num_layers, num_groups)


def experts_of_nodes(node_groups: NDArray[np.int64], group_size: int) -> NDArray[np.int64]:
    """Return the experts of each node, [L, N, E / N], in rising order."""
    experts = node_groups[..., None] * group_size + np.arange(group_size)
    return experts.reshape(*node_groups.shape[:2], -1)


def plan_node(
    weight: NDArray[np.int64],
    current: NDArray[np.int32] | None,
    shape: GroupShape,
    limits: SearchLimits,
    experts: NDArray[np.int64],
    node: int,
    left: NDArray[np.int64],
    results: LayerResults,
) -> None:
    """Plan one node's experts [L, E / N] on its ranks, as a small EP group of its own."""
    ranks = np.flatnonzero(shape.node_of == node)
    start, end = int(ranks[0]) * shape.width, (int(ranks[-1]) + 1) * shape.width
    local = GroupShape(
        num_experts=experts.shape[1],
        num_slots=end - start,
        rank_up=shape.rank_up[ranks],
        node_of=np.zeros(len(ranks), np.int64),
    )
    local_weight = np.take_along_axis(weight, experts, axis=1)
    alone = replace(limits, spread=0)
    if current is None:
        planned = plan_first(local_weight, local, alone)
    else:
        to_local = np.full((len(weight), shape.num_experts + 1), experts.shape[1], np.int32)
        np.put_along_axis(
            to_local, experts, np.arange(experts.shape[1], dtype=np.int32)[None, :], axis=1
        )
        local_current = np.take_along_axis(to_local, current[:, start:end].astype(np.int64), axis=1)
        planned = plan_next(local_weight, local_current, local, alone, left, 0)
        left -= np.minimum(planned.num_moves, left)
    to_global = np.append(experts, np.full((len(weight), 1), shape.num_experts, np.int64), axis=1)
    results.slots[:, start:end] = np.take_along_axis(
        to_global, planned.slots.astype(np.int64), axis=1
    )
    results.num_covered[:] += planned.num_covered
    results.outcome[:] = np.maximum(results.outcome, planned.outcome)


def finish(
    weight: NDArray[np.int64],
    current: NDArray[np.int32] | None,
    shape: GroupShape,
    results: LayerResults,
) -> None:
    """Count moves and loads over the whole EP group."""
    missing = np.empty(len(weight), np.bool_)
    survey_layers(weight, results.slots, shape.num_ranks, results.heaviest, missing)
    if current is None:
        return
    survey_layers(weight, current, shape.num_ranks, results.heaviest_before, missing)
    finish_layers(
        results.slots,
        current,
        np.arange(len(weight)),
        shape.num_experts,
        shape.width,
        shape.node_of,
        results.num_moves,
        results.num_far_moves,
    )
    # What a node planned afresh, because a group came to it, covers nothing that was lost.
    held = np.zeros((len(weight), shape.num_experts + 1), np.bool_)
    np.put_along_axis(held, current.astype(np.int64), values=True, axis=1)
    results.num_covered[:] = (~held[:, :-1]).sum(axis=1)
    results.outcome[results.num_moves == 0] = Outcome.KEPT
