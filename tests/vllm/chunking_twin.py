"""Runs vLLM's real schedulers without a model, chunks planned by dsched, on random arrivals.

Run by `test_chunking.py` with the Python of the vLLM environment:

    python chunking_twin.py MODEL_FOLDER sync|async SEED

So few KV blocks that requests are preempted, prompts longer than a step, prefix hits and aborts.
Prints one JSON object: whether every request ended with the tokens it should have, and what was
planned, obeyed and counted.
"""

import json
import os
import sys

os.environ["DSCHED_STEP_BUDGET_MS"] = "20"
os.environ["DSCHED_CHUNK_ALIGNMENT"] = "8"
os.environ["DSCHED_CHUNK_WEIGHTS"] = "chunking_twin:ByBacklog"

import numpy as np
from scheduler_twin import BLOCK_TOKENS, Side, make_config, make_scheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.drivers.vllm import DschedAsyncScheduler, DschedScheduler
from dsched.plugins import BucketView

NUM_STEPS = 600
LAST_ARRIVAL = 300
SHARED_PREFIX = list(range(5, 5 + 2 * BLOCK_TOKENS))
"""Some prompts begin alike, so that vLLM finds what the plan did not know of."""


class ByBacklog:
    """An operator's policy for the weights of the length buckets."""

    name = "by-backlog"
    api_version = 1

    def weights(self, view: BucketView) -> list[float]:
        return [1.0 + count for count in view.num_requests]


def run(model: str, mode: str, seed: int) -> dict[str, object]:
    init_none_hash(sha256)
    is_async = mode == "async"
    scheduler = make_scheduler(
        DschedAsyncScheduler if is_async else DschedScheduler, make_config(model, is_async=is_async)
    )
    control = scheduler._dsched_chunks
    # Steps take no time here; nothing is to be learned from that.
    control.after_step = lambda: None
    # 20 ms are some 36 tokens beside a few decodes.
    control.planner.prefill_cost = PrefillCostModel.from_coefficients(
        fixed_s=0.0, token_s=5e-4, attention_s=0.0
    )
    curve = StepCostCurve.from_samples([1, 64], [0.001, 0.002])
    control.planner.decode_cost = DecodeCostModel.from_curve(curve)
    side = Side(scheduler, depth=2 if is_async else 1)
    rng = np.random.default_rng(seed)
    wanted: dict[str, int] = {}
    emitted: dict[str, int] = {}
    aborted: set[str] = set()
    num_over = num_preempted = num_chunks = 0
    for index in range(NUM_STEPS):
        if index < LAST_ARRIVAL:
            for _ in range(int(rng.poisson(0.2))):
                name = f"r{len(wanted)}"
                prompt = rng.integers(5, 500, int(rng.integers(1, 150))).tolist()
                if rng.random() < 0.3:
                    prompt = SHARED_PREFIX + prompt
                wanted[name] = int(rng.integers(1, 40))
                side.add(name, prompt, wanted[name])
            if wanted and rng.random() < 0.04:
                name = f"r{rng.integers(len(wanted))}"
                aborted.add(name)
                side.abort(name)
        digest = side.step()
        # The first entry is what was scheduled, if anything was to be scheduled at all.
        scheduled = dict(digest[0]) if digest and scheduler.has_requests() else {}
        for name, chunk in control.chunks.items():
            count = scheduled.get(name, 0)
            num_over += count > chunk
            num_chunks += count > 0
        for entry in digest:
            if len(entry) == 2 and isinstance(entry[1], list):
                emitted[entry[0]] = emitted.get(entry[0], 0) + len(entry[1])
        num_preempted += sum(each.num_preemptions > 0 for each in scheduler.running)
    control.planner.validate()
    answer = {
        "num_requests": len(wanted),
        "num_left": len(scheduler.requests),
        "num_planner_left": len(control.planner),
        "num_wrong": sum(
            emitted.get(name, 0) != count for name, count in wanted.items() if name not in aborted
        ),
        "num_over": num_over,
        "num_chunks": num_chunks,
        "num_preempted": num_preempted,
        "num_plans": control.num_plans,
        "num_differed": control.num_differed,
        "num_fallbacks": control.num_fallbacks,
        "num_weight_changes": control.weights.num_changes,
        "class": type(scheduler).__mro__[0].__name__,
        "is_on": scheduler._dsched_chunks is not None,
        "num_errors": scheduler._dsched_num_errors,
    }
    scheduler.shutdown()
    return answer


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(run(sys.argv[1], sys.argv[2], int(sys.argv[3]))) + "\n")
    sys.stdout.flush()
