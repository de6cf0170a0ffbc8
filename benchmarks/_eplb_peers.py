"""Runs vLLM's own EPLB policy over load windows; run by `eplb.py` with vLLM's Python.

    python _eplb_peers.py WINDOWS.npy NUM_SLOTS NUM_RANKS OUT.npz

Writes the placement after every window, [W, L, P], and the CPU milliseconds of each plan.
"""

import sys
import time

import numpy as np
import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy


def main() -> None:
    path, num_slots, num_ranks, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    placements, times = [], []
    old = None
    for load in np.load(path):
        start = time.thread_time_ns()
        old = DefaultEplbPolicy.rebalance_experts(
            torch.from_numpy(load), num_slots, 1, 1, num_ranks, old
        )
        times.append((time.thread_time_ns() - start) / 1e6)
        placements.append(old.numpy())
    np.savez(out, slots=np.array(placements, np.int32), ms=np.array(times))


if __name__ == "__main__":
    main()
