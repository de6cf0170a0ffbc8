"""What dsched's plug-in adds to a step of SGLang's scheduler: JSON lines, one a batch size.

Run by `agent.py` with the Python of SGLang's environment, `DSCHED_ENDPOINT` set:

    python benchmarks/_sglang_agent.py MODEL_FOLDER R,R,... ROUNDS STEPS

A real scheduler with the tiny model decodes R requests, in SGLang's own loop. In every other step
dsched's part is taken out, so both kinds of step see the same machine. CPU time of the step thread;
`plain_us` is the whole step without dsched: scheduling, the model, and what becomes of its results.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sglang"))

from scheduler_rig import SchedulerRig

PROMPT_TOKENS = 8


class Timed(SchedulerRig):
    """The rig, with the CPU time of what SGLang and dsched do in each decode step."""

    def __init__(self, model: str, most: int) -> None:
        super().__init__(
            model,
            max_running_requests=most,
            max_total_tokens=most * 256,
            disable_radix_cache=True,
        )
        self.own_us: list[float] = []
        self.model_us: list[float] = []
        self.added_us: list[float] = []
        scheduler, dsched = self.scheduler, self.scheduler.dsched
        self._after_step = dsched._after_step
        dsched._after_step = self._timed_after_step
        self._spent_us = self._added = 0.0
        for name in ("get_next_batch_to_run", "process_batch_result"):
            setattr(scheduler, name, self._timed(getattr(scheduler, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time_ns()
            answer = method(*args, **kwargs)
            self._spent_us += (time.thread_time_ns() - start) / 1e3
            return answer

        return timed

    def _timed_after_step(self, batch: Any) -> None:
        start = time.thread_time_ns()
        if len(self.own_us) % 2:
            self._after_step(batch)
        took = (time.thread_time_ns() - start) / 1e3
        self._spent_us -= took
        if batch.forward_mode.is_decode():
            if len(self.own_us) % 2:
                self.added_us.append(took)
            self.own_us.append(self._spent_us)
        self._spent_us = 0.0

    def _note_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.thread_time_ns()
        answer = super()._note_step(batch, *args, **kwargs)
        if batch.forward_mode.is_decode():
            self.model_us.append((time.thread_time_ns() - start) / 1e3)
        return answer

    def measure(self, num_requests: int, num_steps: int) -> dict[str, float]:
        for times in (self.own_us, self.model_us, self.added_us):
            times.clear()
        for index in range(num_requests):
            prompt = [5 + (index * 31 + place) % 500 for place in range(PROMPT_TOKENS)]
            self.feed(f"r{index}", prompt, num_steps + 1)
        self.serve()
        return {
            "num_requests": num_requests,
            "plain_us": statistics.median(self.own_us) + statistics.median(self.model_us),
            "added_us": statistics.median(self.added_us),
        }


def main() -> None:
    model, sizes, num_rounds, num_steps = sys.argv[1:5]
    numbers = [int(size) for size in sizes.split(",")]
    rig = Timed(model, max(numbers))
    for size in numbers:
        rig.measure(size, 4)
        for _ in range(int(num_rounds)):
            sys.stdout.write(json.dumps(rig.measure(size, int(num_steps))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
