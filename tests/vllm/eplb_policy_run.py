"""Run in vLLM's Python with `DSCHED_EPLB=1`: vLLM loads its plug-ins and asks its policy for plans.

Prints one JSON object for `test_eplb_policy.py`.
"""

import json
from types import SimpleNamespace

import numpy as np
import torch
from vllm.config import ParallelConfig
from vllm.distributed.eplb import async_worker, eplb_state, policy
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
from vllm.plugins import load_general_plugins

from dsched.eplb import ExpertPlacement, balancedness, check_placement, count_moves

NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, NUM_RANKS = 6, 64, 80, 8


def rebalance(
    state: eplb_state.EplbState, load: torch.Tensor, current: torch.Tensor
) -> torch.Tensor:
    """What vLLM's asynchronous worker does for each model: its own function, its own arguments."""
    stats = SimpleNamespace(
        global_expert_load_window=load,
        num_replicas=NUM_SLOTS,
        num_groups=8,
        num_nodes=1,
        num_gpus=NUM_RANKS,
    )
    return async_worker.run_rebalance_experts(
        SimpleNamespace(eplb_stats=stats), state, current, stream=None
    )


def placement(slots: torch.Tensor) -> ExpertPlacement:
    return ExpertPlacement(slot_expert=slots.numpy(), num_ranks=NUM_RANKS, num_experts=NUM_EXPERTS)


def main() -> None:
    load_general_plugins()
    load_general_plugins()  # workers may load them more than once
    state = eplb_state.EplbState(ParallelConfig(), torch.device("cpu"))
    async_worker.device_stream = lambda _: torch.autograd.profiler.record_function("cpu")
    rng = np.random.default_rng(1)
    start = torch.arange(NUM_SLOTS).repeat(NUM_LAYERS, 1) % NUM_EXPERTS
    load = torch.from_numpy(rng.zipf(1.6, (NUM_LAYERS, NUM_EXPERTS)).clip(max=1000) * 100)
    later = load + torch.from_numpy(rng.integers(0, 30, load.shape))

    idle = rebalance(state, torch.zeros_like(load), start)
    first = rebalance(state, load, start)
    second = rebalance(state, later.int(), first)
    of_vllm = DefaultEplbPolicy.rebalance_experts(later, NUM_SLOTS, 1, 1, NUM_RANKS, first)
    shrunk = state.policy.rebalance_experts(later, 72, 8, 1, 9, first)
    failed = state.policy.rebalance_experts(-load, NUM_SLOTS, 1, 1, NUM_RANKS, None)
    for slots in (first, second):
        check_placement(placement(slots))
    print(  # noqa: T201 (the answer)
        json.dumps(
            {
                "policy": state.policy.__name__,
                "in_table": policy.EPLB_POLICIES["default"] is state.policy,
                "dtype": str(second.dtype),
                "device": second.device.type,
                "shape": list(second.shape),
                "idle_is_kept": torch.equal(idle, start),
                "balance": float(balancedness(placement(second), later.numpy()).min()),
                "vllm_balance": float(balancedness(placement(of_vllm), later.numpy()).min()),
                "moves": int(count_moves(placement(first), placement(second))[0].sum()),
                "vllm_moves": int(count_moves(placement(first), placement(of_vllm))[0].sum()),
                "shrunk_shape": list(shrunk.shape),
                "failed_is_vllms": torch.equal(
                    failed, DefaultEplbPolicy.rebalance_experts(-load, NUM_SLOTS, 1, 1, NUM_RANKS)
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
