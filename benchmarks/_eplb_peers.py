"""Runs an engine's own EPLB policy over load windows; run by `eplb.py` with the engine's Python.

    python _eplb_peers.py vllm|sglang JOBS.npz OUT.npz

JOBS has for each job `windows_N` [W, L, E] and `group_N` (slots, ranks). OUT gets `slots_N`
[W, L, P], the placement after every window, and `ms_N`, the CPU milliseconds of each plan. All jobs
run in one process, as importing an engine takes longer than they do.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

Policy = Callable[[torch.Tensor, int, int, torch.Tensor | None], torch.Tensor]
"""(load [L, E], slots, ranks, placement in use) -> slots [L, P]."""


def vllm() -> Policy:
    """The default policy, which keeps experts where they are as far as it can."""
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    def plan(
        load: torch.Tensor, num_slots: int, num_ranks: int, old: torch.Tensor | None
    ) -> torch.Tensor:
        return DefaultEplbPolicy.rebalance_experts(load, num_slots, 1, 1, num_ranks, old)

    return plan


def sglang() -> Policy:
    """`deepseek_vec` is fast and balances worse; this is the default, `deepseek`, globally."""
    from sglang.srt.eplb.eplb_algorithms import deepseek

    def plan(
        load: torch.Tensor, num_slots: int, num_ranks: int, old: torch.Tensor | None
    ) -> torch.Tensor:
        del old  # it starts from nothing each time
        return deepseek.rebalance_experts(
            weight=load,
            num_replicas=num_slots,
            num_groups=1,
            num_nodes=1,
            num_gpus=num_ranks,
            enable_hierarchical=False,
        )[0]

    return plan


def main() -> None:
    torch.set_num_threads(1)
    policy = {"vllm": vllm, "sglang": sglang}[sys.argv[1]]()
    jobs = np.load(sys.argv[2])
    out: dict[str, np.ndarray] = {}
    for number in range(len(jobs.files) // 2):
        num_slots, num_ranks = jobs[f"group_{number}"].tolist()
        placements, times, old = [], [], None
        for load in jobs[f"windows_{number}"]:
            start = time.thread_time_ns()
            old = policy(torch.from_numpy(load), num_slots, num_ranks, old)
            times.append((time.thread_time_ns() - start) / 1e6)
            placements.append(old.numpy())
        out[f"slots_{number}"] = np.array(placements, np.int32)
        out[f"ms_{number}"] = np.array(times)
    np.savez(sys.argv[3], **out)


if __name__ == "__main__":
    main()
