"""What the agent adds to a step of a real engine with the tiny model: one JSON line a round.

Run by `agent.py` with the Python of vLLM's environment, `DSCHED_ENDPOINT` set:

    python benchmarks/_vllm_agent_engine.py MODEL_FOLDER R,R,... ROUNDS STEPS

One engine in this process decodes R requests with dsched's scheduler class. In every other step
its meter and agent are taken away, so what is compared are neighbouring steps of one engine. CPU
time of the thread that steps, which computes the model as well.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

PARTS = ("_dsched_meter", "_dsched_agent", "_dsched_prompts")
PROMPT_TOKENS = 24


class Engine:
    """A real engine whose agent can be taken away and put back."""

    def __init__(self, model: str, num_requests: int) -> None:
        from vllm import LLM

        llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1_024,
            max_num_seqs=num_requests,
            max_num_batched_tokens=4_096,
            block_size=32,
            seed=0,
            distributed_executor_backend="uni",
            scheduler_cls="dsched.drivers.vllm.DschedScheduler",
        )
        self.engine: Any = llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.parts = {name: getattr(self.scheduler, name) for name in PARTS}
        self.num_added = 0

    def add(self, count: int, max_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for _ in range(count):
            self.num_added += 1
            ids = [5 + (self.num_added * 31 + at * 7) % 500 for at in range(PROMPT_TOKENS)]
            self.engine.add_request(f"r{self.num_added}", {"prompt_token_ids": ids}, sampling)

    def step(self, *, has_agent: bool) -> float:
        """Return the microseconds of one step."""
        for name, part in self.parts.items():
            setattr(self.scheduler, name, part if has_agent else None)
        start = time.thread_time_ns()
        self.engine.step()
        return (time.thread_time_ns() - start) / 1e3

    def round(self, num_requests: int, num_steps: int) -> dict[str, float]:
        self.add(num_requests, num_steps + 40)
        for _ in range(20):  # prompts, and the first steps with new shapes
            self.step(has_agent=True)
        plain, ours = [], []
        for index in range(num_steps // 2):
            for has_agent in (True, False) if index % 2 else (False, True):
                (ours if has_agent else plain).append(self.step(has_agent=has_agent))
        while self.engine.has_unfinished_requests():
            self.step(has_agent=True)
        differences = [b - a for a, b in zip(plain, ours, strict=True)]
        return {
            "num_requests": num_requests,
            "plain_us": statistics.median(plain),
            "added_us": statistics.median(differences),
        }


def main() -> None:
    model, sizes, num_rounds, num_steps = sys.argv[1:5]
    numbers = [int(size) for size in sizes.split(",")]
    engine = Engine(model, max(numbers))
    for size in numbers:
        for _ in range(int(num_rounds)):
            sys.stdout.write(json.dumps(engine.round(size, int(num_steps))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
