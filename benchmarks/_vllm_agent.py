"""What dsched's mixin and agent add to a step of vLLM's scheduler: one JSON line a batch size.

Run by `agent.py` with the Python of vLLM's environment, `DSCHED_ENDPOINT` set:

    python benchmarks/_vllm_agent.py MODEL_FOLDER R,R,... ROUNDS STEPS

Two schedulers decode the same R requests, vLLM's own and dsched's, a step of one after a step of
the other. Between `schedule` and `update_from_output` the thread sleeps, as it does while a device
computes. CPU time of the step thread; that of the agent's thread is told apart. Each round makes
new schedulers: where their objects lie in memory moves a step's time by a few percent.
"""

import json
import statistics
import sys
import time

from _vllm_scheduler import add_requests, fake_output, make_scheduler
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler

DEVICE_S = 0.01
"""What the device computes in a step: at the low end of wide-EP decoding."""


class Timed:
    """One scheduler and the CPU time of its steps."""

    def __init__(self, name: str, model: str, num_requests: int, num_steps: int) -> None:
        self.scheduler = make_scheduler(name, model, num_requests)
        add_requests(self.scheduler, num_requests, num_steps + 50)
        self.times_us: list[float] = []

    def step(self) -> None:
        start = time.thread_time_ns()
        output = self.scheduler.schedule()
        planned = time.thread_time_ns()
        answer = fake_output(self.scheduler, output)
        time.sleep(DEVICE_S)
        resumed = time.thread_time_ns()
        self.scheduler.update_from_output(output, answer)
        self.times_us.append((planned - start + time.thread_time_ns() - resumed) / 1e3)


def measure(
    model: str, num_requests: int, num_steps: int, *, is_ours_first: bool
) -> dict[str, object]:
    names = ("dsched", "vllm") if is_ours_first else ("vllm", "dsched")
    made = {name: Timed(name, model, num_requests, num_steps) for name in names}
    plain, ours = made["vllm"], made["dsched"]
    while is_prefilling(plain.scheduler) or is_prefilling(ours.scheduler):
        plain.step()
        ours.step()
    plain.times_us.clear()
    ours.times_us.clear()
    others_ns = time.process_time_ns() - time.thread_time_ns()
    for index in range(num_steps):
        # Swapped every time: whoever runs second finds warmer caches.
        for side in (plain, ours) if index % 2 else (ours, plain):
            side.step()
    others_ns = time.process_time_ns() - time.thread_time_ns() - others_ns
    differences = [b - a for a, b in zip(plain.times_us, ours.times_us, strict=True)]
    answer = {
        "num_requests": num_requests,
        "device_us": DEVICE_S * 1e6,
        "plain_us": statistics.median(plain.times_us),
        "added_us": statistics.median(differences),
        "agent_thread_us": others_ns / 1e3 / num_steps,
    }
    ours.scheduler.shutdown()
    return answer


def is_prefilling(scheduler: Scheduler) -> bool:
    return bool(scheduler.waiting) or any(
        each.num_computed_tokens < each.num_prompt_tokens for each in scheduler.running
    )


def main() -> None:
    model, sizes, num_rounds, num_steps = sys.argv[1:5]
    init_none_hash(sha256)
    for size in sizes.split(","):
        for number in range(int(num_rounds)):
            answer = measure(model, int(size), int(num_steps), is_ours_first=number % 2 == 1)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
