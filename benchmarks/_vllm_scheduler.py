"""What vLLM's own scheduler costs a step, without a model: one JSON line for each batch size.

Run by the other benchmarks with the Python of vLLM's environment:

    python benchmarks/_vllm_scheduler.py MODEL_FOLDER R,R,... STEPS

vLLM's `Scheduler` and `DschedScheduler` (chunk control on) step in turn, so that both see the same
machine. R requests decode, each one token a step; CPU time of this thread for `schedule` and
`update_from_output`.
"""

import json
import statistics
import sys
import time
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
MAX_MODEL_LEN = 4_096
WARM_STEPS = 70
"""Steps before measuring: dsched learns from each step at first, then from one in sixteen."""


def make_scheduler(name: str, model: str, num_requests: int) -> Scheduler:
    """The scheduler as the engine core makes it, with room for every request."""
    scheduler_config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(8_192, num_requests),
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        async_scheduling=False,
        is_encoder_decoder=False,
    )
    num_blocks = num_requests * 70 + 1_000
    cache_config = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=scheduler_config,
        model_config=ModelConfig(model=model, max_model_len=MAX_MODEL_LEN, seed=0),
        cache_config=cache_config,
        device_config=DeviceConfig("cpu"),
    )
    cache_config.block_size = BLOCK_TOKENS
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
    )
    kv_config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)]
    )
    scheduler_class = Scheduler
    if name == "dsched":
        from dsched.drivers.vllm.scheduler import DschedScheduler

        scheduler_class = DschedScheduler
    return scheduler_class(
        vllm_config=config,
        kv_cache_config=kv_config,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
    )


def add_requests(scheduler: Scheduler, num_requests: int, num_steps: int) -> None:
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    for index in range(num_requests):
        sampling = SamplingParams(ignore_eos=True, max_tokens=num_steps + WARM_STEPS + 100)
        sampling.update_from_generation_config({}, None)
        scheduler.add_request(
            Request(
                request_id=f"r{index}",
                prompt_token_ids=[4 + (index * 31 + k) % 500 for k in range(PROMPT_TOKENS)],
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=float(index),
                block_hasher=hasher,
            )
        )


def fake_output(scheduler: Scheduler, plan: SchedulerOutput) -> ModelRunnerOutput:
    """One token from every request that is not in the middle of its prompt."""
    ids = list(plan.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
        sampled_token_ids=[
            [] if scheduler.requests[request_id].is_prefill_chunk else [7] for request_id in ids
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


def timed_step(scheduler: Scheduler, num_requests: int) -> float:
    """Microseconds of one step."""
    start = time.thread_time()
    plan = scheduler.schedule()
    scheduled = time.thread_time()
    output = fake_output(scheduler, plan)
    updating = time.thread_time()
    scheduler.update_from_output(plan, output)
    end = time.thread_time()
    if len(plan.num_scheduled_tokens) != num_requests:
        raise RuntimeError(f"{len(plan.num_scheduled_tokens)} of {num_requests} ran")
    return (scheduled - start + end - updating) * 1e6


def measure(model: str, num_requests: int, num_steps: int) -> dict[str, Any]:
    """Both schedulers with `num_requests` decodes."""
    schedulers = []
    for name in ("vllm", "dsched"):
        scheduler = make_scheduler(name, model, num_requests)
        add_requests(scheduler, num_requests, num_steps)
        while scheduler.waiting or any(
            request.num_computed_tokens < request.num_prompt_tokens for request in scheduler.running
        ):
            plan = scheduler.schedule()
            scheduler.update_from_output(plan, fake_output(scheduler, plan))
        schedulers.append(scheduler)
    if getattr(schedulers[1], "_dsched_chunks", None) is None:
        raise RuntimeError("chunk control is off")
    for _ in range(WARM_STEPS):
        for scheduler in schedulers:
            timed_step(scheduler, num_requests)
    pairs = [
        [timed_step(scheduler, num_requests) for scheduler in schedulers] for _ in range(num_steps)
    ]
    return {
        "requests": num_requests,
        "vllm_p50_us": statistics.median(vllm for vllm, _ in pairs),
        "dsched_p50_us": statistics.median(dsched for _, dsched in pairs),
        "added_p50_us": statistics.median(dsched - vllm for vllm, dsched in pairs),
        "added_us": sorted(dsched - vllm for vllm, dsched in pairs),
    }


def main() -> None:
    model, sizes, num_steps = sys.argv[1:4]
    init_none_hash(sha256)
    for size in sizes.split(","):
        print(json.dumps(measure(model, int(size), int(num_steps))), flush=True)


if __name__ == "__main__":
    main()
