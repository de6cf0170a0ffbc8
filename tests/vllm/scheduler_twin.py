"""Runs vLLM's schedulers without a model, with and without dsched's mixin, on the same requests.

Run by `test_scheduler_twin.py` with the Python of the vLLM environment:

    python scheduler_twin.py MODEL_FOLDER sync|async SEED

Both schedulers see the same arrivals and aborts; the "model" is a pure function of a request's
length. Prints one JSON object: whether every step of both was equal, and how often the counts that
went to the agent differed from counts made by walking over everything.
"""

import json
import os
import sys
import time
from collections import deque

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["DSCHED_ENDPOINT"] = "tcp://127.0.0.1:9"
os.environ["DSCHED_ENGINE_ID"] = "twin"

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from dsched.drivers.agent import Agent, StepRecord
from dsched.drivers.vllm import DschedAsyncScheduler, DschedScheduler

BLOCK_TOKENS = 16
NUM_BLOCKS = 60
"""So few that requests are preempted."""
NUM_STEPS = 400
RECORDS: list[StepRecord] = []


def make_config(model: str, *, is_async: bool) -> VllmConfig:
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    cache.num_gpu_blocks = NUM_BLOCKS
    config = VllmConfig(
        model_config=ModelConfig(model=model, dtype="float32", max_model_len=512, seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            max_model_len=512,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
            is_encoder_decoder=False,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
    )
    # The CPU platform sets both for engines; here nothing runs on a device.
    config.cache_config.block_size = BLOCK_TOKENS
    config.scheduler_config.async_scheduling = is_async
    return config


def make_scheduler(cls: type, config: VllmConfig) -> Scheduler:
    spec = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=32, dtype=torch.float32
    )
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


class Side:
    """One scheduler, its steps in flight, and a digest of each step."""

    def __init__(self, scheduler: Scheduler, *, depth: int) -> None:
        self.scheduler = scheduler
        self.depth = depth
        self.in_flight: deque = deque()
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(ignore_eos=True, max_tokens=max_tokens)
        sampling.update_from_generation_config({}, None)
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> list:
        """Schedule a step; update the oldest one once `depth` are in flight. Return what was
        decided and put out."""
        digest: list = []
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.in_flight.append((output, self.compute(output)))
            digest.append(sorted(output.num_scheduled_tokens.items()))
            digest.append(sorted(output.finished_req_ids))
        if self.in_flight and (len(self.in_flight) >= self.depth or not digest):
            output, model_output = self.in_flight.popleft()
            answer = self.scheduler.update_from_output(output, model_output)
            for _, outputs in sorted(answer.items()):
                digest += [[each.request_id, list(each.new_token_ids)] for each in outputs.outputs]
        return digest

    def compute(self, output: object) -> ModelRunnerOutput:
        """What a model would sample: a token for each request that is past its prompt."""
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for request_id in ids:
            request = self.scheduler.requests[request_id]
            is_prefill = request.is_prefill_chunk
            sampled.append([] if is_prefill else [request.num_computed_tokens % 400 + 5])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )


def counts_by_walking(scheduler: Scheduler) -> tuple[int, int, int, int]:
    """The four counts, made from every request there is."""
    held = [each for each in scheduler.requests.values() if not each.is_finished()]
    running = set(map(id, scheduler.running))
    num_kv = sum(each.num_computed_tokens for each in held if id(each) in running)
    num_left = sum(
        max(0, each.num_prompt_tokens - each.num_computed_tokens)
        if id(each) in running
        else each.num_prompt_tokens
        for each in held
    )
    return len(running), len(held) - len(running), num_kv, num_left


def run(model: str, mode: str, seed: int) -> dict[str, object]:
    init_none_hash(sha256)
    is_async = mode == "async"
    depth = 2 if is_async else 1
    config = make_config(model, is_async=is_async)
    plain = Side(make_scheduler(AsyncScheduler if is_async else Scheduler, config), depth=depth)
    ours_class = DschedAsyncScheduler if is_async else DschedScheduler
    ours = Side(make_scheduler(ours_class, make_config(model, is_async=is_async)), depth=depth)
    rng = np.random.default_rng(seed)
    num_unequal = num_wrong = num_added = num_preempted = 0
    for index in range(NUM_STEPS):
        if index < NUM_STEPS - 150:
            for _ in range(int(rng.poisson(0.25))):
                prompt = rng.integers(5, 500, int(rng.integers(1, 150))).tolist()
                max_tokens = int(rng.integers(1, 60))
                for side in (plain, ours):
                    side.add(f"r{num_added}", prompt, max_tokens)
                num_added += 1
            if num_added and rng.random() < 0.05:
                request_id = f"r{rng.integers(num_added)}"
                for side in (plain, ours):
                    side.abort(request_id)
        num_records = len(RECORDS)
        num_unequal += plain.step() != ours.step()
        if len(RECORDS) > num_records:
            num_wrong += tuple(RECORDS[-1][1:5]) != counts_by_walking(ours.scheduler)
        num_preempted += sum(each.num_preemptions > 0 for each in ours.scheduler.running)
    state = ours.scheduler
    hello = state._dsched_agent.hello
    state.shutdown()
    return {
        "num_unequal": num_unequal,
        "num_wrong": num_wrong,
        "num_records": len(RECORDS),
        "num_added": num_added,
        "num_preempted": num_preempted,
        "num_left": len(state.requests),
        "last": list(RECORDS[-1]),
        "num_errors": state._dsched_num_errors,
        "features": hello.features,
        "missing": hello.missing,
        "kv_capacity_tokens": hello.kv_capacity_tokens,
        "classes": [each.__name__ for each in type(state).__mro__],
    }


def keep(_: Agent, record: StepRecord) -> None:
    RECORDS.append(record)


if __name__ == "__main__":
    Agent.record_step = keep
    answer = run(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
