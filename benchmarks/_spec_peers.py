"""Times vLLM's and SGLang's own budget functions; run by `spec_decode.py` with an engine's Python.

Prints one JSON object: case -> median microseconds, or a reason why there is none.
"""

import json
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

SIZES = (64, 256, 1024, 4096)
NUM_POSITIONS = 5


def median_us(call: Callable[[], object], repeats: int) -> float:
    for _ in range(10):
        call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times)) / 1e3


def vllm(repeats: int) -> dict[str, float]:
    """`AdaptiveVerificationManager.get_num_tokens`: the whole host part of vLLM's decision."""
    from vllm import LLM  # noqa: F401 (resolves a circular import)
    from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
        AdaptiveVerificationManager,
        build_cost_tables_from_curves,
    )

    results = {}
    for num_requests in SIZES:
        rng = np.random.default_rng(num_requests)
        manager = object.__new__(AdaptiveVerificationManager)
        names = [f"r{index}" for index in range(num_requests)]
        limit = num_requests * (NUM_POSITIONS + 1)
        manager.num_speculative_steps = NUM_POSITIONS
        manager.num_bonus_tokens = 1
        manager._max_total_logits = limit
        manager._stale_idx = 0
        confidence = rng.beta(4, 1, (num_requests, NUM_POSITIONS)).astype(np.float32)
        manager._stale_confidences = [SimpleNamespace(np=confidence)]
        manager.req_states = SimpleNamespace(
            req_id_to_index={name: index for index, name in enumerate(names)},
            num_computed_tokens_np=np.full(num_requests, 1000),
            prefill_len=SimpleNamespace(np=np.full(num_requests, 100)),
        )
        sizes = list(range(8, limit + 9, 8))
        manager.cost_tables = build_cost_tables_from_curves(
            [(1, 2.5), (num_requests, 3.0)],
            [(size, 15.24 + 0.0285 * size) for size in sizes],
            num_requests,
            limit + 8,
        )
        tokens = dict.fromkeys(names, NUM_POSITIONS + 1)
        drafts = {name: [0] * NUM_POSITIONS for name in names}
        results[f"R={num_requests}"] = median_us(
            lambda m=manager, t=tokens, d=drafts: m.get_num_tokens(t, d), repeats
        )
    return results


def sglang(repeats: int) -> dict[str, float]:
    """`HostConfidenceBudgetPlanner.compute_budget`: the whole host part of SGLang's decision."""
    import torch
    from sglang.srt.speculative.dspark_components import dspark_planner, dspark_sps

    torch.set_num_threads(1)
    results = {}
    for num_requests in SIZES:
        generator = torch.Generator().manual_seed(num_requests)
        confidence = torch.rand(num_requests, NUM_POSITIONS, generator=generator) * 0.5 + 0.5
        limit = num_requests * (NUM_POSITIONS + 1) + 64
        probes = [(b, 1e3 / (15.24 + 0.0285 * b)) for b in range(8, limit, 8)]
        planner = dspark_planner.HostConfidenceBudgetPlanner(
            sps_table=dspark_sps.profile_sps_table(probes=probes, max_batch_tokens=limit),
            cfg=dspark_planner.DSparkScheduleConfig(gamma=NUM_POSITIONS),
            model_runner=SimpleNamespace(
                req_to_token_pool=SimpleNamespace(
                    req_to_token=torch.zeros(num_requests, 1, dtype=torch.int32)
                )
            ),
            relay_lag_steps=2,
        )
        generation = torch.ones(num_requests, dtype=torch.int64)
        index = torch.arange(num_requests)
        results[f"R={num_requests}"] = median_us(
            lambda p=planner, c=confidence, g=generation, i=index: p.compute_budget(
                confidence=c, generation=g, current_generation=g, req_pool_indices_cpu=i
            ),
            repeats,
        )
    return results


def main() -> None:
    name, repeats = sys.argv[1], int(sys.argv[2])
    sys.stdout.write("\n" + json.dumps({"vllm": vllm, "sglang": sglang}[name](repeats)) + "\n")


if __name__ == "__main__":
    main()
