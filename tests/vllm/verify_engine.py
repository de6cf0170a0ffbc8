"""Runs the real engine on the tiny model three times, in vLLM's Python:

    python verify_engine.py MODEL_FOLDER FOLDER none|fixed|planned|ngram|draft

`none` writes the greedy answers to FOLDER; the others speculate. Prints one JSON object.
"""

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["ORACLE_ANSWERS"] = sys.argv[2] + "/answers.json"
os.environ["DSCHED_VERIFY_LENGTHS"] = "off" if sys.argv[3] in ("none", "fixed") else "on"
os.environ["DSCHED_STEP_COST"] = sys.argv[2] + "/curve.json"

import numpy as np
import verify_proposer
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler

from dsched.drivers.vllm.mixin import SchedulerMixin
from dsched.drivers.vllm.verify import VerifyLengthMixin

MODEL, FOLDER, KIND = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
NUM_REQUESTS = 8
NUM_TOKENS = 48
NUM_POSITIONS = 5


class Recorder(VerifyLengthMixin, SchedulerMixin, Scheduler):
    """Notes what was planned and what was executed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.planned: dict[str, int] = {}
        self.num_differed = self.num_verified = self.num_accepted = self.num_steps = 0
        self.num_short = 0

    def update_draft_token_ids(self, draft_token_ids: object) -> None:
        super().update_draft_token_ids(draft_token_ids)
        control = self._dsched_verify
        if control is not None:
            self.planned = {
                name: len(request.spec_token_ids)
                for name in draft_token_ids.req_ids
                if (request := self.requests.get(name)) is not None and not request.is_finished()
            }

    def update_from_output(self, scheduler_output: object, model_runner_output: object) -> object:
        executed = scheduler_output.scheduled_spec_decode_tokens
        self.num_steps += 1
        for name, drafts in executed.items():
            index = model_runner_output.req_id_to_index[name]
            self.num_verified += len(drafts)
            self.num_accepted += len(model_runner_output.sampled_token_ids[index]) - 1
            self.num_short += len(drafts) < NUM_POSITIONS
            if self._dsched_verify is not None:
                self.num_differed += len(drafts) != self.planned.get(name, 0)
        for name, length in self.planned.items():
            in_step = name in scheduler_output.num_scheduled_tokens
            self.num_differed += in_step and length > 0 and name not in executed
        return super().update_from_output(scheduler_output, model_runner_output)


def speculation() -> dict[str, object] | None:
    if KIND == "none":
        return None
    if KIND == "ngram":
        return {
            "method": "ngram",
            "num_speculative_tokens": NUM_POSITIONS,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    if KIND == "draft":
        return {"method": "draft_model", "model": MODEL, "num_speculative_tokens": NUM_POSITIONS}
    return {
        "method": "custom_class",
        "model": "verify_proposer.OracleProposer",
        "num_speculative_tokens": NUM_POSITIONS,
    }


def main() -> None:
    llm = LLM(
        model=MODEL,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=NUM_REQUESTS,
        max_num_batched_tokens=256,
        block_size=32,
        distributed_executor_backend="uni",
        scheduler_cls=Recorder,
        speculative_config=speculation(),
        seed=0,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    control = scheduler._dsched_verify
    if KIND == "planned":
        proposer = verify_proposer.INSTANCES[0]
        # Confidences are in the order of the drafts, which is that of the requests asked for.
        control.confidence_source = lambda names: (
            proposer.confidence if len(proposer.confidence) == len(names) else None
        )
        # The times of a shared machine must not decide this test.
        control.times.apply = lambda **_: None
    rng = np.random.default_rng(3)
    prompts = [rng.integers(10, 500, 12 + index).tolist() for index in range(NUM_REQUESTS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], sampling)
    answers = [
        {"prompt": prompt, "output": list(each.outputs[0].token_ids)}
        for prompt, each in zip(prompts, outputs, strict=True)
    ]
    if KIND == "none":
        (FOLDER / "answers.json").write_text(json.dumps(answers))
    answer = {
        "outputs": [each["output"] for each in answers],
        "num_plans": 0 if control is None else control.num_plans,
        "num_steps": scheduler.num_steps,
        "num_differed": scheduler.num_differed,
        "num_verified": scheduler.num_verified,
        "num_accepted": scheduler.num_accepted,
        "num_short": scheduler.num_short,
        "num_errors": scheduler._dsched_num_errors,
    }
    if control is not None:
        statistics = control.acceptance.statistics
        answer["counted_verified"] = statistics.num_verified
        answer["counted_accepted"] = statistics.num_accepted
        answer["num_requests_left"] = len(control._slot_of) + len(control.acceptance._reached)
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
