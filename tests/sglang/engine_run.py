"""Runs one real SGLang scheduler in this process and prints what it did as one JSON object.

Run by `test_engine.py` with the Python of the SGLang environment:

    python engine_run.py MODEL_FOLDER [mixed]

with `DSCHED_ENDPOINT` and `DSCHED_STEP_BUDGET_MS` set, so that SGLang loads dsched's plug-in by
itself. First a stream runs, and prompts of 900 and 120 tokens arrive together, with and without
chunk control in turn; then many requests at random, with more KV than there is; then parts of
dsched are broken, and the engine has to serve on. `mixed` runs the first of it only, with prompts
and decodes in one step.
"""

import json
import sys
from typing import Any

from scheduler_rig import SchedulerRig

from dsched.rng import stream

STREAM_TOKENS = 60
ARRIVAL_STEP = 12
SHORT, LONG = 120, 900
BUDGET_TOKENS = 160
ALIGNMENT = 32
KV_TOKENS = 2_500
NUM_RANDOM = 40


def prompt(length: int, salt: int) -> list[int]:
    """Tokens that are the same in every process."""
    return [5 + (salt * 7919 + index * 31 + index * index) % 500 for index in range(length)]


class Engine(SchedulerRig):
    """The rig, with notes of what was planned and reported."""

    def __init__(self, model: str, *, is_mixed: bool) -> None:
        mixed = {"enable_mixed_chunk": True} if is_mixed else {}
        super().__init__(model, max_total_tokens=KV_TOKENS, **mixed)
        self.dsched: Any = self.scheduler.dsched
        self.control: Any = self.dsched.chunks
        self.records: list[Any] = []
        self._own_record = self.dsched.agent.record_step
        self.dsched.agent.record_step = self._record
        self._own_after = self.control.after_prefill
        self.control.after_prefill = self._after_prefill
        self._planned: dict[str, int | None] = {}

    def _record(self, record: Any) -> None:
        self.records.append(record)
        self._own_record(record)

    def _after_prefill(self, batch: Any, **kwargs: Any) -> None:
        self._planned = {
            "planned": self.control.planned_tokens,
            "share": self.control.cut_tokens,
        }
        self._own_after(batch, **kwargs)

    def _note_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        answer = super()._note_step(batch, *args, **kwargs)
        self.steps[-1] |= self._planned
        self._planned = {}
        return answer

    def compare(self, *, is_planned: bool) -> dict[str, Any]:
        """One stream and two late prompts; the tokens of all and what each step ran."""
        self.forget_prefixes()
        self.control.is_on = is_planned
        self.feed("stream", prompt(20, 0), STREAM_TOKENS)
        self.feed("long", prompt(LONG, 1), 8, at_step=ARRIVAL_STEP)
        self.feed("short", prompt(SHORT, 2), 8, at_step=ARRIVAL_STEP)
        tokens = self.serve()
        return {"tokens": tokens, "steps": list(self.steps)}

    def set_costs(self) -> None:
        """Let a prompt token cost 0.1 ms, and a step have the time of `BUDGET_TOKENS` and one
        decode. What steps really take is not learned: it is the machine's mood."""
        from dsched.costs import PrefillCostModel
        from dsched.scheduler import ChunkRule

        control = self.control
        model = PrefillCostModel.from_coefficients(fixed_s=1e-3, token_s=1e-4, attention_s=0.0)
        control.prefill_cost = model
        decode_s = control.decode_cost.predict(1, 100)
        control.budget_seconds = model.predict(BUDGET_TOKENS, 0) + decode_s
        control.rule = ChunkRule(
            bucket_bounds=(256, 512, 768), alignment=ALIGNMENT, max_step_tokens=1_024
        )
        self._own_learn, control.after_step = control.after_step, lambda *_: None

    def learn_again(self) -> None:
        """Let measured steps teach the cost models."""
        self.control.after_step = self._own_learn

    def serve_random(self, *, is_planned: bool) -> dict[str, Any]:
        """Many requests at random steps, some with a prefix that others had; too much for the KV
        cache, so that SGLang takes requests back."""
        self.forget_prefixes()
        self.control.is_on = is_planned
        random = stream(7, "engine-run")
        at_step = 0
        for index in range(NUM_RANDOM):
            length = int(random.choice([8, 40, 130, 500, 900]))
            salt = int(random.integers(0, 6))
            at_step += int(random.integers(0, 4))
            words = prompt(length, salt)
            self.feed(f"r{index}", words, int(random.integers(4, 60)), at_step=at_step)
        self.records.clear()
        tokens = self.serve()
        return {
            "tokens": tokens,
            "steps": list(self.steps),
            "num_retracted": sum(req.retraction_count for req in self.requests.values()),
            "records": [record._asdict() for record in self.records],
        }

    def break_parts(self) -> dict[str, Any]:
        """Break one part of dsched after the other; tell what is served and what is missing."""
        dsched, answers = self.dsched, {}

        def serve(name: str) -> None:
            self.records.clear()
            self.feed(name, prompt(60, 9), 12)
            answers[name] = {
                "tokens": list(self.serve().values()),
                "missing": dsched.agent.hello.missing,
                "num_records": len(self.records),
            }

        self.control.is_on = True
        serve("whole")
        self.control.prefill_cost = None
        serve("planner")
        dsched._scheduler = Without(self.scheduler, "load_inquirer")
        serve("waiting")
        dsched._scheduler = Without(self.scheduler, "running_batch")
        serve("reports")
        return answers


class Without:
    """SGLang's scheduler as dsched would see it in a version that lacks an attribute."""

    def __init__(self, scheduler: Any, name: str) -> None:
        self._scheduler, self._name = scheduler, name

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._scheduler, name)


def main() -> None:
    is_mixed = "mixed" in sys.argv[2:]
    engine = Engine(sys.argv[1], is_mixed=is_mixed)
    hello = engine.dsched.agent.hello
    result: dict[str, Any] = {
        "features": hello.features,
        "missing": hello.missing,
        "engine": hello.engine,
        "version": hello.engine_version,
        "kv_capacity_tokens": hello.kv_capacity_tokens,
    }
    engine.set_costs()
    result["fixed"] = engine.compare(is_planned=False)
    result["ours"] = engine.compare(is_planned=True)
    result["num_differed"] = engine.control.num_differed
    if not is_mixed:
        engine.learn_again()
        serve_more(engine, result)
    result["is_overlapped"] = engine.scheduler.enable_overlap
    sys.stdout.write("RESULT " + json.dumps(result) + "\n")


def serve_more(engine: Engine, result: dict[str, Any]) -> None:
    """Random arrivals with and without chunk control, then broken parts."""
    result["random_fixed"] = engine.serve_random(is_planned=False)
    result["random_ours"] = engine.serve_random(is_planned=True)
    for name in ("num_plans", "num_fallbacks", "num_learned"):
        result[name] = getattr(engine.control, name)
    result["broken"] = engine.break_parts()


if __name__ == "__main__":
    main()
