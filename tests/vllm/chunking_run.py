"""Runs one real vLLM engine in this process and prints what it did as one JSON object.

Run by `test_chunking.py` with the Python of the vLLM environment:

    python chunking_run.py MODEL_FOLDER vllm|dsched REPEATS

A stream runs; then a prompt of 120 and one of 900 tokens arrive together. `vllm` is an unmodified
engine. `dsched` has our scheduler, its cost model fitted to a few steps of this very engine; for
the comparison of gaps it serves the same arrivals with chunk control taken out, in turn.
"""

import json
import os
import sys
import time
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

STREAM_TOKENS = 60
ARRIVAL_STEP = 12
SHORT, LONG = 120, 900
BUDGET_TOKENS = 160
"""The budget is the time of a chunk of so many tokens."""
SWEEP = ((32, 0), (64, 0), (128, 0), (256, 0), (512, 0), (896, 0))


def prompt(length: int, salt: int) -> list[int]:
    """Tokens that are the same in every process; `salt` keeps the prefix cache out of it."""
    return [5 + (salt * 7919 + index * 31 + index * index) % 500 for index in range(length)]


class Engine:
    """An engine in this process, driven step by step."""

    def __init__(self, model: str, *, is_ours: bool) -> None:
        from vllm import LLM

        if is_ours:
            os.environ["DSCHED_STEP_BUDGET_MS"] = "1000"
            os.environ["DSCHED_CHUNK_ALIGNMENT"] = "32"
        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=1_536,
            max_num_seqs=16,
            max_num_batched_tokens=1_536,
            block_size=32,
            seed=0,
            distributed_executor_backend="uni",
            **({"scheduler_cls": "dsched.drivers.vllm.DschedScheduler"} if is_ours else {}),
        )
        self.engine: Any = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.steps: list[dict[str, dict[str, int]]] = []
        self._record()

    def _record(self) -> None:
        """Note of each step what was planned and what vLLM scheduled."""
        schedule = self.scheduler.schedule

        def recorded(*args: object, **kwargs: object) -> object:
            output = schedule(*args, **kwargs)
            chunks = getattr(self.scheduler, "_dsched_chunks", None)
            planned = {} if chunks is None else dict(chunks.chunks)
            self.steps.append({"planned": planned, "scheduled": dict(output.num_scheduled_tokens)})
            return output

        self.scheduler.schedule = recorded

    def add(self, request_id: str, tokens: list[int], max_tokens: int) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(request_id, {"prompt_token_ids": tokens}, sampling)

    def serve(self, name: str) -> dict[str, Any]:
        """One stream and two late prompts; the tokens of all and the longest gap of the stream."""
        salt = 0  # the same prompts each time; the prefix cache is emptied instead
        self.scheduler.reset_prefix_cache()
        self.steps.clear()
        self.add(f"{name}-stream", prompt(20, salt), STREAM_TOKENS)
        tokens: dict[str, list[int]] = {}
        last = gap = 0.0
        seen = 0
        for step in range(10_000):
            if step == ARRIVAL_STEP:
                self.add(f"{name}-long", prompt(LONG, salt + 1), 8)
                self.add(f"{name}-short", prompt(SHORT, salt + 2), 8)
            if not self.engine.has_unfinished_requests():
                break
            outputs = self.engine.step()
            now = time.perf_counter()
            for output in outputs:
                key = output.request_id.split("-", 1)[1].split("-")[0]
                tokens[key] = list(output.outputs[0].token_ids)
            if len(tokens.get("stream", ())) > seen:
                seen = len(tokens["stream"])
                if step > ARRIVAL_STEP - 5:
                    gap = max(gap, now - last)
                last = now
        return {"tokens": tokens, "gap_s": gap, "steps": list(self.steps)}

    def fit_costs(self) -> float:
        """Fit the planner's model to this engine; return the budget in seconds."""
        from dsched.costs import PrefillCostModel

        samples = []
        for repeat in range(3):
            for index, (chunk, past) in enumerate(SWEEP):
                self.scheduler.reset_prefix_cache()
                self.add(f"sweep-{repeat}-{index}", prompt(chunk, 50 + index), 1)
                start = time.perf_counter()
                while self.engine.has_unfinished_requests():
                    self.engine.step()
                samples.append((chunk, past, time.perf_counter() - start))
        best = {
            chunk: min(seconds for size, _, seconds in samples if size == chunk)
            for chunk, _ in SWEEP
        }
        model = PrefillCostModel.fit(list(best), [0] * len(best), list(best.values()))
        planner = self.scheduler._dsched_chunks.planner
        planner.prefill_cost = model
        budget = model.predict(BUDGET_TOKENS, 0)
        planner.budget_seconds = budget
        return budget


def main() -> None:
    model, mode, repeats = sys.argv[1:4]
    engine = Engine(model, is_ours=mode == "dsched")
    result: dict[str, Any] = {"mode": mode, "ours": [], "fixed": []}
    if mode == "vllm":
        result["fixed"] = [engine.serve(f"v{index}") for index in range(int(repeats))]
    else:
        result["budget_s"] = engine.fit_costs()
        scheduler, control = engine.scheduler, engine.scheduler._dsched_chunks
        engine.serve("warm")
        for index in range(int(repeats)):
            scheduler._dsched_chunks = None
            result["fixed"].append(engine.serve(f"f{index}"))
            scheduler._dsched_chunks = control
            result["ours"].append(engine.serve(f"o{index}"))
        for name in ("num_plans", "num_fallbacks", "num_differed", "num_late"):
            result[name] = getattr(control, name)
        result["num_observed"] = control.planner.prefill_cost.online.num_steps
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
