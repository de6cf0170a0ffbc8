"""StepPlanner: each docstring is a sentence of its contract."""

import tracemalloc

import numpy as np
import pytest

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.ids import RequestId
from dsched.rng import stream
from dsched.scheduler import ChunkRule, StepPlan, StepPlanner, plan_chunks

DECODE = StepCostCurve.from_samples([1, 64, 256], [0.010, 0.020, 0.040])


def prefill_cost() -> PrefillCostModel:
    return PrefillCostModel.from_coefficients(
        fixed_s=16.6e-3, token_s=83.6e-6, attention_s=1.67e-10
    )


def make_planner(**changes: object) -> StepPlanner:
    settings: dict[str, object] = {
        "prefill_cost": prefill_cost(),
        "decode_cost": DecodeCostModel.from_curve(DECODE, kv_token_s=1e-9),
        "budget_seconds": 0.2,
        "max_running_requests": 16,
        "max_requests": 64,
    }
    return StepPlanner(**(settings | changes))


def add(planner: StepPlanner, name: str, prompt: int, output: int = 100, cached: int = 0) -> int:
    return planner.add(
        RequestId(name),
        num_prompt_tokens=prompt,
        max_output_tokens=output,
        num_cached_tokens=cached,
    )


def tokens_of(plan: StepPlan) -> dict[int, int]:
    return dict(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))


def test_request_is_prefilled_then_decoded() -> None:
    """A prompt takes chunks until it is computed; its first token comes with the last chunk."""
    planner = make_planner(budget_seconds=0.06)
    slot = add(planner, "a", 1_000, output=3)

    chunks = [tokens_of(planner.plan())[slot] for _ in range(4)]

    # (60 - 16.6) ms buy 519 tokens, 512 in whole tiles.
    assert chunks == [512, 488, 1, 1]


def test_request_at_its_limit_is_not_planned_again() -> None:
    """With three output tokens two decodes follow the prompt; the end is foreseen."""
    planner = make_planner()
    slot = add(planner, "a", 100, output=3)

    plans = [tokens_of(planner.plan()) for _ in range(5)]

    assert plans == [{slot: 100}, {slot: 1}, {slot: 1}, {}, {}]
    assert planner.is_at_limit(slot)
    planner.finish(RequestId("a"))
    planner.plan()
    assert len(planner) == 0
    planner.validate()


def test_cached_tokens_are_not_computed_but_sort_and_cost_as_context() -> None:
    """A prompt with 300 000 cached tokens computes the rest, in the bucket of its full length."""
    planner = make_planner()
    slot = add(planner, "a", 301_000, cached=300_000)

    plan = planner.plan()

    assert tokens_of(plan) == {slot: 1_000}
    expected = prefill_cost().predict(1_000, 300_000)
    assert plan.prefill_ns == pytest.approx(expected * 1e9, abs=1)


def test_planner_gives_the_chunks_of_plan_chunks() -> None:
    """The state of arrays and the pure function are one rule."""
    planner = make_planner(budget_seconds=0.35)
    lengths = [300, 16_384, 9_000, 65_536, 262_144, 500]
    slots = [add(planner, f"r{n}", length) for n, length in enumerate(lengths)]
    past = dict.fromkeys(slots, 0)
    saved = None
    for _ in range(40):
        plan = planner.plan()
        chunks = tokens_of(plan)
        prefills = [s for s in slots if past[s] < lengths[slots.index(s)]]
        decodes = [s for s in slots if s not in prefills]
        expected = plan_chunks(
            [past[s] for s in [*decodes, *prefills]],
            [1] * len(decodes) + [lengths[slots.index(s)] - past[s] for s in prefills],
            budget_seconds=0.35,
            prefill_cost=planner.prefill_cost,
            decode_cost=planner.decode_cost,
            saved_ns=saved,
        )
        saved = expected.saved_ns
        assert [chunks.get(s, 0) for s in [*decodes, *prefills]] == expected.num_tokens.tolist()
        assert plan.decode_ns == pytest.approx(expected.decode_seconds * 1e9, abs=2)
        for slot in slots:
            past[slot] += chunks.get(slot, 0)


def test_verify_lengths_widen_a_decode_up_to_the_limit() -> None:
    """A decode verifies its draft tokens, but none beyond what the request may still emit."""
    planner = make_planner()
    slot = add(planner, "a", 10, output=4)
    planner.plan()
    planner.set_verify_lengths(np.array([slot]), np.array([5]))

    assert tokens_of(planner.plan()) == {slot: 3}
    planner.apply_emitted(np.array([slot]), np.array([3]))
    assert planner.is_at_limit(slot)
    planner.validate()


def test_more_emitted_tokens_move_a_request_on() -> None:
    """Accepted draft tokens count once the facts are in."""
    planner = make_planner()
    slot = add(planner, "a", 10)
    planner.plan()
    planner.set_verify_lengths(np.array([slot]), np.array([3]))
    planner.plan()
    assert planner.num_computed_tokens(slot) == 11

    planner.apply_emitted(np.array([slot]), np.array([4]))

    assert planner.num_computed_tokens(slot) == 14


def test_finished_request_leaves_the_plan_that_was_already_made() -> None:
    """Facts of step N come after the plan of N+1: the entry becomes 0 and is counted."""
    planner = make_planner()
    first, second = add(planner, "a", 10), add(planner, "b", 10)
    planner.plan()
    plan = planner.plan()
    planner.finish(RequestId("a"))

    assert planner.repair(plan) == 1

    assert tokens_of(plan) == {first: 0, second: 1}
    assert planner.repair(plan) == 0
    assert planner.num_repaired == 1
    assert tokens_of(planner.plan()) == {second: 1}


def test_slot_is_used_again_only_after_the_plan_that_frees_it() -> None:
    """A plan in flight never names a slot that means somebody else by now."""
    planner = make_planner(max_requests=1)
    slot = add(planner, "a", 10)
    planner.plan()
    planner.finish(RequestId("a"))
    with pytest.raises(ValueError, match="all 1 slots are taken"):
        add(planner, "b", 10)

    planner.plan()

    assert add(planner, "b", 10) == slot
    assert planner.request_id(slot) == "b"


def test_free_slot_has_no_request() -> None:
    """Asking for it is a mistake."""
    with pytest.raises(KeyError, match="slot 3 is free"):
        make_planner().request_id(3)


def test_running_limit_holds_back_the_waiting() -> None:
    """At most so many hold KV; the oldest start first."""
    planner = make_planner(max_running_requests=2)
    slots = [add(planner, f"r{n}", 50) for n in range(4)]

    assert tokens_of(planner.plan()) == {slots[0]: 50, slots[1]: 50}
    planner.finish(RequestId("r0"))
    assert tokens_of(planner.plan()) == {slots[1]: 1, slots[2]: 50}


def test_kv_is_taken_for_the_whole_prompt_and_given_back() -> None:
    """A request starts only if its prompt fits what is free."""
    planner = make_planner(kv_capacity_tokens=1_000, kv_block_tokens=100)
    first = add(planner, "a", 600, output=50)
    second = add(planner, "b", 500, output=50)

    assert tokens_of(planner.plan()) == {first: 600}
    planner.validate()
    planner.finish(RequestId("a"))
    assert tokens_of(planner.plan()) == {second: 500}
    planner.validate()


def test_decode_without_kv_takes_it_from_the_latest() -> None:
    """The latest request loses its KV to the oldest and computes its tokens again later."""
    planner = make_planner(kv_capacity_tokens=40, kv_block_tokens=10)
    first, second = add(planner, "a", 18, output=20), add(planner, "b", 18, output=20)
    assert tokens_of(planner.plan()) == {first: 18, second: 18}
    planner.plan()
    planner.plan()

    # Both stand at the end of a block, none is free.
    plan = planner.plan()

    assert plan.preempted.tolist() == [second]
    assert tokens_of(plan) == {first: 1}
    assert planner.num_computed_tokens(second) == 0
    planner.validate()


def test_request_without_room_is_overtaken_for_a_while_only() -> None:
    """Short requests pass a long one that finds no KV; after many plans they wait for it."""
    planner = make_planner(kv_capacity_tokens=40_000, kv_block_tokens=100, max_requests=2_000)
    add(planner, "holder", 2_000, output=9_000)
    planner.plan()
    long = add(planner, "long", 39_500, output=10)
    for n in range(1_000):
        add(planner, f"s{n}", 100, output=2)
        plan = planner.plan()
        if plan.slots.size == 1:
            break
        for slot in plan.slots.tolist():
            if planner.is_at_limit(slot):
                planner.finish(planner.request_id(slot))
    assert 200 < n < 400, "the door closes, and not at once"

    planner.finish(RequestId("holder"))
    assert any(long in planner.plan().slots for _ in range(3))


def test_forced_chunks_are_counted() -> None:
    """A budget below the smallest chunk still computes one tile a step."""
    planner = make_planner(budget_seconds=0.001)
    slot = add(planner, "a", 200)

    chunks = [tokens_of(planner.plan())[slot] for _ in range(4)]

    assert chunks == [64, 64, 64, 8]
    assert planner.num_forced == 4


def test_budget_may_change_between_plans() -> None:
    """The control plane sets it while requests run."""
    planner = make_planner(budget_seconds=0.06)
    slot = add(planner, "a", 10_000)
    assert tokens_of(planner.plan()) == {slot: 512}

    planner.budget_seconds = 0.2

    assert planner.budget_seconds == 0.2
    assert tokens_of(planner.plan()) == {slot: 2_176}
    with pytest.raises(ValueError, match="budget_seconds is 0"):
        planner.budget_seconds = 0


def test_observed_steps_teach_the_models() -> None:
    """A device that is 20 % slower than the model is planned for with smaller chunks."""
    planner = make_planner()
    for n in range(60):
        add(planner, f"r{n}", 16_000, output=1)
    for _ in range(80):
        plan = planner.plan()
        planner.observe(plan, round(plan.estimated_ns * 1.2) if _ == 0 else slow_ns(plan, planner))

    plan = planner.plan()
    assert plan.estimated_ns == pytest.approx(slow_ns(plan, planner), rel=0.02)
    assert plan.num_tokens.sum() < 2_176


def slow_ns(plan: StepPlan, planner: StepPlanner) -> int:
    """What the plan's chunks take on a device that is 20 % slower than the first model."""
    truth = prefill_cost()
    past = [
        planner.num_computed_tokens(slot) - count
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True)
    ]
    return round(1.2e9 * truth.predict(plan.num_tokens.tolist(), past))


def test_decode_steps_teach_the_decode_model() -> None:
    """Steps without chunks are the decode model's."""
    planner = make_planner()
    for n in range(8):
        add(planner, f"r{n}", 20)
    planner.plan()
    for _ in range(60):
        plan = planner.plan()
        planner.observe(plan, 30_000_000)

    assert planner.plan().decode_ns == pytest.approx(30_000_000, rel=0.01)
    assert planner.prefill_cost.online.num_steps == 0


@pytest.mark.parametrize(
    ("prompt", "output", "cached", "message"),
    [
        (0, 5, 0, "prompt of 0 tokens"),
        (5, 0, 0, "at most 0 output tokens"),
        (5, 5, 5, "5 of 5 prompt tokens are cached"),
        (5, 5, -1, "-1 of 5"),
        (1_000, 25, 0, "1025 tokens do not fit the KV cache of 1024 tokens"),
    ],
)
def test_requests_that_cannot_be_are_refused(
    prompt: int, output: int, cached: int, message: str
) -> None:
    """Wrong input is a ValueError that names the value; longer than the KV cache is one."""
    planner = make_planner(kv_capacity_tokens=1_024)

    with pytest.raises(ValueError, match=message):
        add(planner, "a", prompt, output, cached)
    assert len(planner) == 0


def test_request_is_added_once() -> None:
    """Two requests of one id cannot be told apart."""
    planner = make_planner()
    add(planner, "a", 5)

    with pytest.raises(ValueError, match="'a' is held"):
        add(planner, "a", 5)
    planner.finish(RequestId("unknown"))
    assert len(planner) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_seconds": 0.0}, "budget_seconds is 0"),
        ({"budget_seconds": float("nan")}, "budget_seconds is nan"),
        ({"max_requests": 0}, "max_requests is 0"),
        ({"max_running_requests": 0}, "max_running_requests is 0"),
        ({"kv_block_tokens": 0}, "kv_block_tokens is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    """A planner is checked when it is made."""
    with pytest.raises(ValueError, match=message):
        make_planner(**changes)


def test_facts_that_cannot_be_are_refused() -> None:
    """Less than one token from a decode, or fewer than no draft tokens, is a caller's mistake."""
    planner = make_planner()
    slot = np.array([add(planner, "a", 5)])

    with pytest.raises(ValueError, match="emitted 0 tokens"):
        planner.apply_emitted(slot, np.array([0]))
    with pytest.raises(ValueError, match="verify length is -1"):
        planner.set_verify_lengths(slot, np.array([-1]))


def test_steady_state_allocates_no_arrays() -> None:
    """A thousand plans over 256 requests leave the memory where it was."""
    planner = make_planner(max_running_requests=256, max_requests=3_000, rule=ChunkRule())
    for n in range(256):
        add(planner, f"r{n}", 20 if n % 8 else 200_000, output=100_000)
    for _ in range(50):
        planner.plan()
    tracemalloc.start()
    planner.plan()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()

    for _ in range(1_000):
        planner.plan()

    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # A view, a few numbers and the plan object come and go, and the process's other threads make
    # some of their own; one array of 3 000 slots is 24 000 bytes.
    assert after - before < 8_000
    assert peak - before < 20_000


def test_same_requests_give_the_same_plans() -> None:
    """Two planners with equal history agree in every step."""

    def history() -> list[dict[int, int]]:
        rng = stream(5, "history")
        planner = make_planner(kv_capacity_tokens=50_000)
        plans = []
        for n in range(60):
            if rng.random() < 0.5:
                add(planner, f"r{n}", int(rng.integers(1, 20_000)), output=int(rng.integers(1, 9)))
            plan = planner.plan()
            plans.append(tokens_of(plan))
            for slot in plan.slots.tolist():
                if planner.is_at_limit(slot):
                    planner.finish(planner.request_id(slot))
        return plans

    assert history() == history()
