"""Chunk sizes inside SGLang, over stand-ins of its scheduler and its prefill adder."""

from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

from dsched.clock import ManualClock
from dsched.config import ChunkSettings
from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.drivers.plan_watch import MAX_LATE_IN_A_ROW, PAUSE_STEPS
from dsched.drivers.sglang.chunking import (
    SLOW_PLAN_NS,
    ChunkControl,
    attach_chunks,
    make_chunk_control,
    why_not,
)
from dsched.scheduler import ChunkRule

ALIGNMENT = 32


def prompt(length: int, past: int = 0) -> Any:
    return SimpleNamespace(seqlen=length, prefix_len=past)


def running(num_requests: int) -> list[Any]:
    return [SimpleNamespace(seqlen=100) for _ in range(num_requests)]


def make_control(budget_tokens: int = 160, *, page_tokens: int = 1, **fields: Any) -> ChunkControl:
    """A prompt token costs 0.1 ms, a step 1 ms, a decode step 2 ms; no context costs anything."""
    prefill = PrefillCostModel.from_coefficients(fixed_s=1e-3, token_s=1e-4, attention_s=0.0)
    return ChunkControl(
        prefill_cost=prefill,
        decode_cost=DecodeCostModel.from_curve(StepCostCurve.from_samples([1, 64], [2e-3, 2e-3])),
        budget_seconds=prefill.predict(budget_tokens, 0),
        rule=ChunkRule(bucket_bounds=(256, 512, 768), alignment=ALIGNMENT, max_step_tokens=1_024),
        page_tokens=page_tokens,
        clock=fields.pop("clock", ManualClock()),
    )


def scheduler(cut: Any = None, *waiting: Any, **fields: Any) -> Any:
    return SimpleNamespace(
        chunked_req=cut, waiting_queue=list(waiting), is_mixed_chunk=False, **fields
    )


def test_waiting_prompts_get_the_budget() -> None:
    """160 tokens of one long prompt; SGLang fills the step in its own order."""
    control = make_control()
    control.before_prefill(scheduler(None, prompt(900)), [])

    assert (control.planned_tokens, control.cut_tokens) == (160, None)


def test_what_fits_is_planned_whole_and_in_pages() -> None:
    """40 and 50 tokens; in pages of 32 SGLang counts 64 for each."""
    for page_tokens, planned in ((1, 90), (32, 128)):
        control = make_control(page_tokens=page_tokens)
        control.before_prefill(scheduler(None, prompt(40), prompt(50)), [])
        assert control.planned_tokens == planned


def test_decodes_are_taken_out_of_the_budget() -> None:
    """They run in a step of their own after the prompts: 2 ms are 20 tokens, aligned 128 stay."""
    control = make_control(170)
    control.before_prefill(scheduler(None, prompt(900)), running(3))

    assert control.planned_tokens == 128


def test_decodes_that_take_it_all_leave_one_aligned_chunk() -> None:
    control = make_control(5)
    control.before_prefill(scheduler(None, prompt(900)), running(3))

    assert control.planned_tokens == ALIGNMENT


def test_short_prompt_passes_the_one_that_is_cut() -> None:
    """The short one's bucket has weight 4 of 5: it fits whole, and the rest is the share."""
    control = make_control()
    control.before_prefill(scheduler(prompt(900, past=160), prompt(120)), [])

    assert (control.planned_tokens, control.cut_tokens) == (152, 32)


def test_second_long_prompt_is_not_begun() -> None:
    """SGLang can cut one prompt only: the cut one gets all that whole ones leave."""
    control = make_control()
    control.before_prefill(scheduler(prompt(900, past=160), prompt(600)), [])

    assert (control.planned_tokens, control.cut_tokens) == (160, None)


def test_nothing_to_compute_is_not_planned() -> None:
    control = make_control()
    control.before_prefill(scheduler(), running(4))

    assert control.planned_tokens is None
    assert control.num_plans == 0


def test_returned_to_the_engine_by_command() -> None:
    control = make_control()
    control.is_on = False
    control.before_prefill(scheduler(None, prompt(900)), [])

    assert control.planned_tokens is None


class SlowClock(ManualClock):
    """Every look takes longer than a plan may."""

    def now_ns(self) -> int:
        self.advance_to(super().now_ns() + SLOW_PLAN_NS + 1)
        return super().now_ns()


def test_late_plans_leave_sglang_alone_for_a_while() -> None:
    control = make_control(clock=SlowClock())
    for _ in range(MAX_LATE_IN_A_ROW + 1):
        control.before_prefill(scheduler(None, prompt(900)), [])

    assert control.planned_tokens is None
    assert (control.num_late, control.num_fallbacks) == (MAX_LATE_IN_A_ROW, 1)
    for _ in range(PAUSE_STEPS):
        control.before_prefill(scheduler(None, prompt(900)), [])
    assert control.planned_tokens == 160


def batch_of(*chunks: tuple[int, int], is_extend: bool = True) -> Any:
    """(chunk, past) of each request."""
    reqs = [
        SimpleNamespace(extend_len=chunk, prefix_len=past, seqlen=past + chunk)
        for chunk, past in chunks
    ]
    mode = SimpleNamespace(is_extend=lambda: is_extend, is_decode=lambda: not is_extend)
    return SimpleNamespace(
        reqs=reqs,
        forward_mode=mode,
        decoding_reqs=None,
        extend_num_tokens=sum(chunk for chunk, _ in chunks),
    )


def test_steps_that_ran_as_planned_teach_the_model() -> None:
    """Twice as slow as predicted, again and again: the prediction follows."""
    control, costs = make_control(), make_control().prefill_cost
    for _ in range(200):
        control.before_prefill(scheduler(None, prompt(900)), [])
        num_tokens = control.planned_tokens or 0
        batch = batch_of((num_tokens, 0))
        control.after_prefill(batch, has_more=True)
        control.after_step(batch, round(2e9 * costs.predict(num_tokens, 0)))

    assert control.num_learned == 200
    assert control.num_differed == 0
    assert control.prefill_cost.predict(160, 0) == pytest.approx(2 * costs.predict(160, 0), rel=0.1)


def test_decode_steps_teach_the_decode_model() -> None:
    control = make_control()
    for _ in range(64):
        control.after_step(batch_of((1, 99), (1, 99), is_extend=False), 8_000_000)

    assert control.decode_cost.predict(2, 200) == pytest.approx(8e-3, rel=0.1)


@pytest.mark.parametrize("chunks", [[(192, 0)], [(64, 0)]])
def test_other_steps_than_planned_are_counted(chunks: list[tuple[int, int]]) -> None:
    """More than the plan, or less although a prompt was cut."""
    control = make_control()
    control.before_prefill(scheduler(None, prompt(900)), [])
    control.after_prefill(batch_of(*chunks), has_more=True)

    assert control.num_differed == 1


def test_result_of_a_step_that_was_not_planned_teaches_nothing() -> None:
    control = make_control()
    control.before_prefill(scheduler(None, prompt(900)), [])
    control.after_prefill(batch_of((160, 0)), has_more=True)
    control.after_step(batch_of((512, 0)), 1_000_000)
    control.after_step(batch_of((160, 0)), 1_000_000)

    assert control.num_learned == 0


class Verdict(Enum):
    CONTINUE = auto()
    OTHER = auto()


class Adder:
    """SGLang's `PrefillAdder` as far as it is extended: one prompt in a row of limits."""

    chunked_req_limit: int | None = None

    def __init__(self, size: int) -> None:
        self.rem_chunk_tokens = size
        self.added: dict[str, int] = {}

    def ceil_paged_tokens(self, num_tokens: int) -> int:
        return num_tokens

    def budget_state(self) -> Verdict:
        return Verdict.CONTINUE

    def add_chunked_req(self, req: Any) -> None:
        self._take("cut", min(self.rem_chunk_tokens, self.chunked_req_limit or 10_000))

    def add_one_req(
        self,
        req: Any,
        has_chunked_req: bool,  # noqa: FBT001
        truncation_align_size: int | None = None,
    ) -> Verdict:
        length = len(req.full_untruncated_fill_ids) - req.prefix_len
        self._take(req.name, min(length, self.rem_chunk_tokens))
        return Verdict.CONTINUE

    def _take(self, name: str, num_tokens: int) -> None:
        self.added[name] = num_tokens
        self.rem_chunk_tokens -= num_tokens


class Scheduler(SimpleNamespace):
    """SGLang's scheduler as far as it is wrapped."""

    def __init__(self, cut: Any = None, *waiting: Any) -> None:
        super().__init__(
            chunked_req=cut,
            waiting_queue=list(waiting),
            chunked_prefill_size=1_024,
            prefill_decode_interval=0,
            is_mixed_chunk=False,
            page_size=1,
            process_batch_result=None,
            get_prefill_adder_class=lambda: Adder,
            get_new_batch_prefill=self.own_prefill,
            seen=[],
        )

    def own_prefill(self, running_batch: Any) -> Any:
        self.seen.append((self.chunked_prefill_size, self.prefill_decode_interval))
        adder = self.get_prefill_adder_class()(self.chunked_prefill_size)
        if self.chunked_req is not None:
            adder.add_chunked_req(self.chunked_req)
        verdicts = [
            adder.add_one_req(req, self.chunked_req is not None) for req in self.waiting_queue
        ]
        self.result = adder.added, verdicts
        return SimpleNamespace(batch_to_run=batch_of(*((n, 0) for n in adder.added.values())))


def named(name: str, length: int) -> Any:
    return SimpleNamespace(
        name=name,
        seqlen=length,
        prefix_len=0,
        host_hit_length=0,
        full_untruncated_fill_ids=range(length),
    )


EMPTY = SimpleNamespace(reqs=[])


def test_scheduler_gets_the_plan_and_its_own_size_back() -> None:
    """And a decode of everybody after each step with prompts, as long as chunks are planned."""
    errors: list[Exception] = []
    engine, control = Scheduler(None, named("a", 900)), make_control()
    attach_chunks(engine, control, errors.append)
    engine.get_new_batch_prefill(EMPTY)
    control.is_on = False
    engine.get_new_batch_prefill(EMPTY)

    assert engine.seen == [(160, 1), (1_024, 0)]
    assert engine.chunked_prefill_size == 1_024
    assert errors == []


def test_cut_prompt_keeps_to_its_share_and_no_second_is_cut() -> None:
    """The short one is computed whole behind it; one that does not fit has to wait."""
    engine = Scheduler(prompt(900, past=160), named("short", 120), named("long", 600))
    attach_chunks(engine, make_control(), lambda _: None)
    engine.get_new_batch_prefill(EMPTY)
    added, verdicts = engine.result

    assert added == {"cut": 32, "short": 120}
    assert verdicts == [Verdict.CONTINUE, Verdict.OTHER]


def test_engine_goes_on_without_a_planner_that_raises() -> None:
    errors: list[Exception] = []
    engine, control = Scheduler(None, named("a", 900)), make_control()
    attach_chunks(engine, control, errors.append)
    control.prefill_cost = None  # type: ignore[assignment]
    for _ in range(2):
        engine.get_new_batch_prefill(EMPTY)

    assert engine.seen[1] == (1_024, 0)
    assert len(errors) == 1


def test_mixed_step_has_room_for_the_decodes_beside_the_plan() -> None:
    """SGLang takes them out of the size; the interval stays, because everybody decodes anyway."""
    engine, control = Scheduler(None, named("a", 900)), make_control(180)
    engine.is_mixed_chunk = True
    attach_chunks(engine, control, lambda _: None)
    engine.get_new_batch_prefill(SimpleNamespace(reqs=running(3)))

    assert engine.seen == [(160 + 3, 0)]


def test_decodes_of_a_mixed_step_are_no_chunks() -> None:
    control = make_control()
    control.before_prefill(scheduler(None, prompt(900)), [])
    batch = batch_of((160, 0), (1, 99))
    batch.decoding_reqs = batch.reqs[1:]
    control.after_prefill(batch, has_more=True)
    control.after_step(batch, 1_000_000)

    assert control.num_differed == 0
    assert control.num_learned == 0


def test_own_size_is_the_upper_limit() -> None:
    engine, control = Scheduler(None, named("a", 5_000)), make_control(3_000)
    attach_chunks(engine, control, lambda _: None)
    engine.get_new_batch_prefill(EMPTY)

    assert engine.seen == [(1_024, 1)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"chunked_prefill_size": None}, "chunked prefill off"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"get_prefill_adder_class": lambda: object}, "lacks add_chunked_req, add_one_req"),
    ],
)
def test_reasons_to_leave_chunks_to_sglang(change: dict[str, Any], reason: str | None) -> None:
    engine = Scheduler()
    vars(engine).update(change)
    found = why_not(engine, ranks_of_request=1)

    assert found is reason is None or reason in (found or "")


def test_ranks_that_share_a_request_cannot_be_planned_for() -> None:
    engine = Scheduler()
    assert "2 ranks share a request" in (why_not(engine, ranks_of_request=2) or "")
    del engine.chunked_req
    assert "lacks chunked_req" in (why_not(engine, ranks_of_request=1) or "")


def test_alignment_holds_for_pages_and_stays_below_the_size() -> None:
    engine = Scheduler()
    engine.page_size, engine.chunked_prefill_size = 48, 96
    settings = ChunkSettings(step_budget_ms=20, costs=None, chunk_alignment=32)
    control = make_chunk_control(engine, settings)

    assert control.rule.alignment == 96
    assert control.rule.max_step_tokens == 96
    assert control.budget_seconds == 0.02
