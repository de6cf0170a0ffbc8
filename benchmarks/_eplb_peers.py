"""Runs vLLM's own EPLB policy over load windows; run by `eplb.py` with vLLM's Python.

    python _eplb_peers.py JOBS.npz OUT.npz

JOBS has for each job `windows_N` [W, L, E] and `group_N` (slots, ranks). OUT gets `slots_N`
[W, L, P], the placement after every window, and `ms_N`, the CPU milliseconds of each plan. All jobs
run in one process, as importing vLLM takes longer than they do.
"""

import sys
import time

import numpy as np
import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy


def main() -> None:
    torch.set_num_threads(1)
    jobs = np.load(sys.argv[1])
    out: dict[str, np.ndarray] = {}
    for number in range(len(jobs.files) // 2):
        num_slots, num_ranks = jobs[f"group_{number}"].tolist()
        placements, times, old = [], [], None
        for load in jobs[f"windows_{number}"]:
            start = time.thread_time_ns()
            old = DefaultEplbPolicy.rebalance_experts(
                torch.from_numpy(load), num_slots, 1, 1, num_ranks, old
            )
            times.append((time.thread_time_ns() - start) / 1e6)
            placements.append(old.numpy())
        out[f"slots_{number}"] = np.array(placements, np.int32)
        out[f"ms_{number}"] = np.array(times)
    np.savez(sys.argv[2], **out)


if __name__ == "__main__":
    main()
