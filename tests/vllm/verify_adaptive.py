"""Compares vLLM's adaptive verification with ours over the same state; run in vLLM's Python.

    python verify_adaptive.py

Prints one JSON object. No GPU is needed: only the host half of vLLM's manager runs.
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import numpy as np
from vllm import LLM  # noqa: F401 (resolves a circular import)
from vllm.v1.worker.gpu.spec_decode import adaptive_verification as theirs

from dsched.drivers.vllm.adaptive import adaptive_verification_class, replace_adaptive_verification

NUM_POSITIONS = 5


def manager_of(cls: type, confidence: np.ndarray, *, prefills: int, room: int) -> object:
    num_requests = len(confidence)
    manager = object.__new__(cls)
    manager.num_speculative_steps = NUM_POSITIONS
    manager.num_bonus_tokens = 1
    manager._max_total_logits = room
    manager._stale_idx = 0
    manager._stale_confidences = [SimpleNamespace(np=confidence)]
    computed = np.full(num_requests, 1000)
    computed[:prefills] = 10
    manager.req_states = SimpleNamespace(
        req_id_to_index={f"r{index}": index for index in range(num_requests)},
        num_computed_tokens_np=computed,
        prefill_len=SimpleNamespace(np=np.full(num_requests, 500)),
    )
    sizes = list(range(8, 1025, 8))
    manager.cost_tables = theirs.build_cost_tables_from_curves(
        [(1, 2.5), (256, 3.0)], [(size, 15.0 + 0.06 * size) for size in sizes], 256, 1024
    )
    return manager


def inputs(num_requests: int, prefills: int) -> tuple[dict[str, int], dict[str, list[int]]]:
    names = [f"r{index}" for index in range(num_requests)]
    tokens = {
        name: 64 if index < prefills else 1 + NUM_POSITIONS for index, name in enumerate(names)
    }
    drafts = {name: [7] * NUM_POSITIONS for name in names[prefills:]}
    return tokens, drafts


def main() -> None:
    cls = adaptive_verification_class(theirs.AdaptiveVerificationManager)
    num_equal = num_cases = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        num_requests = int(rng.integers(1, 120))
        prefills = int(rng.integers(0, 3)) if num_requests > 3 else 0
        confidence = rng.beta(3, 1, (num_requests, NUM_POSITIONS)).astype(np.float32)
        tokens, drafts = inputs(num_requests, prefills)
        both = [
            manager_of(each, confidence, prefills=prefills, room=10_000)
            for each in (theirs.AdaptiveVerificationManager, cls)
        ]
        found = [each.get_num_tokens(tokens, drafts) for each in both]
        num_cases += 1
        num_equal += found[0] == found[1] and both[0]._batch_budget == both[1]._batch_budget
    # Half of the requests are new: vLLM counts them as certain.
    confidence = np.full((64, NUM_POSITIONS), 0.5, dtype=np.float32)
    confidence[32:] = 1.0
    tokens, drafts = inputs(64, 0)
    optimistic, usual = (
        manager_of(each, confidence, prefills=0, room=10_000).get_num_tokens(tokens, drafts)
        for each in (theirs.AdaptiveVerificationManager, cls)
    )
    narrow = manager_of(cls, confidence, prefills=0, room=70).get_num_tokens(tokens, drafts)
    broken = manager_of(cls, confidence, prefills=0, room=10_000)
    broken._stale_confidences[0].np = np.full((64, NUM_POSITIONS), 3.0, dtype=np.float32)
    own = theirs.AdaptiveVerificationManager
    replace_adaptive_verification()
    answer = {
        "num_cases": num_cases,
        "num_equal": num_equal,
        "vllm_with_new_requests": optimistic,
        "ours_with_new_requests": usual,
        "ours_in_a_narrow_sampler": narrow,
        "ours_when_broken": broken.get_num_tokens(tokens, drafts),
        "is_replaced": issubclass(theirs.AdaptiveVerificationManager, own)
        and theirs.AdaptiveVerificationManager is not own,
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
