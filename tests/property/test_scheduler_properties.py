"""plan_chunks and StepPlanner: equal to the plain twin, and what holds for every input."""

import numpy as np
import scheduler_reference as twin
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.costs import DecodeCostModel, PrefillCostModel, StepCostCurve
from dsched.ids import RequestId
from dsched.rng import stream
from dsched.scheduler import ChunkRule, StepPlanner, kernels, plan_chunks

untimed = settings(deadline=None)  # the first call loads the compiled kernel

DECODE_COST = DecodeCostModel.from_curve(
    StepCostCurve.from_samples([1, 64, 256], [0.010, 0.020, 0.040]), kv_token_s=1e-9
)
MODELS = [
    PrefillCostModel.from_coefficients(fixed_s=0.0166, token_s=83.6e-6, attention_s=1.67e-10),
    PrefillCostModel.from_coefficients(fixed_s=0.037, token_s=141e-6, attention_s=3.4e-9),
    # Whole microseconds: many requests cost exactly the same.
    PrefillCostModel.from_coefficients(fixed_s=0.0, token_s=1e-6, attention_s=0.0),
    PrefillCostModel.from_coefficients(
        fixed_s=0.03, token_s=6e-4, attention_s=1e-9, topk_s=3e-8, topk_tokens=2048
    ),
]
RULES = [
    ChunkRule(),
    ChunkRule(bucket_bounds=(100, 1_000, 50_000), max_step_tokens=700),
    ChunkRule(bucket_bounds=(1_000,), bucket_weights=(1.0, 1.0), alignment=16),
    ChunkRule(bucket_bounds=(), bucket_weights=(2.5,), alignment=128, max_step_tokens=64),
]

# Lengths at and around the bounds and the alignment; repeats make ties.
lengths = st.sampled_from([1, 2, 63, 64, 65, 999, 1_000, 16_383, 16_384, 70_000, 300_000])
contexts = st.sampled_from([0, 0, 64, 1_000, 131_072])
requests = st.lists(st.tuples(contexts, lengths), max_size=20)
budgets = st.sampled_from([1e-7, 0.001, 0.02, 0.05, 0.2, 3.0])
savings = st.sampled_from([0.0, 5e6, -5e6, 1e9])


@untimed
@given(
    requests, budgets, st.sampled_from(MODELS), st.sampled_from(RULES), st.lists(savings), st.data()
)
def test_chunks_equal_the_plain_twins(
    pairs: list[tuple[int, int]],
    budget: float,
    model: PrefillCostModel,
    rule: ChunkRule,
    saved: list[float],
    data: st.DataObject,
) -> None:
    num_buckets = len(rule.bucket_weights)
    saved_ns = np.resize(np.array([*saved, 0.0]), num_buckets)
    prefills = [(p, r) for p, r in pairs if r > 1 or p == 0]
    past, remaining = [p for p, _ in prefills], [r for _, r in prefills]

    plan = plan_chunks(
        past,
        remaining,
        budget_seconds=budget,
        prefill_cost=model,
        decode_cost=DECODE_COST,
        rule=rule,
        saved_ns=saved_ns,
    )

    available = budget * 1e9 - float(model.arrays.knot_ns[0])
    expected = twin.grant(
        past,
        remaining,
        cost=model,
        rule=rule,
        saved_ns=saved_ns.tolist(),
        step_tokens=0,
        budget_ns=available,
        quantum_ns=max(available, kernels.MIN_QUANTUM_SHARE * budget * 1e9),
    )
    assert plan.num_tokens.tolist() == expected.chunks
    assert plan.num_forced == expected.num_forced
    np.testing.assert_allclose(
        plan.saved_ns, expected.saved_ns if prefills else 0.0, rtol=1e-9, atol=1e-3
    )


@untimed
@given(requests, budgets, st.sampled_from(MODELS), st.sampled_from(RULES))
def test_plan_keeps_its_contract(
    pairs: list[tuple[int, int]], budget: float, model: PrefillCostModel, rule: ChunkRule
) -> None:
    past, remaining = np.array(pairs, dtype=np.int64).reshape(-1, 2).T

    plan = plan_chunks(
        past,
        remaining,
        budget_seconds=budget,
        prefill_cost=model,
        decode_cost=DECODE_COST,
        rule=rule,
    )

    tokens = plan.num_tokens
    is_decode = (remaining == 1) & (past > 0)
    # Positive space: nobody gets more than it lacks; chunks are whole tiles or the last.
    assert ((tokens >= 0) & (tokens <= remaining)).all()
    assert tokens.sum() <= rule.max_step_tokens
    is_partial = ~is_decode & (tokens < remaining)
    if not plan.num_forced:
        assert (tokens[is_partial] % rule.alignment == 0).all()
    # Decodes go first.
    assert tokens[is_decode].sum() == min(is_decode.sum(), rule.max_step_tokens)
    # The budget holds in the model's own estimate, unless a chunk was forced or decodes fill it.
    if tokens.any():
        estimate = plan.decode_seconds + plan.prefill_seconds
        if not is_decode.any():
            chunks = tokens > 0
            predicted = model.predict(tokens[chunks].tolist(), past[chunks].tolist())
            np.testing.assert_allclose(plan.prefill_seconds, predicted, rtol=1e-9)
        if not plan.num_forced and plan.decode_seconds <= budget:
            assert estimate <= budget * (1 + 1e-9)
            np.testing.assert_allclose(estimate + plan.unused_seconds, budget, rtol=1e-9)
    # Negative space: work is left undone only if something is done.
    if len(pairs):
        assert tokens.any()


@st.composite
def planners(draw: st.DrawFn) -> StepPlanner:
    return StepPlanner(
        prefill_cost=draw(st.sampled_from(MODELS)),
        decode_cost=DECODE_COST,
        budget_seconds=draw(st.sampled_from([0.005, 0.05, 0.3])),
        max_running_requests=draw(st.sampled_from([1, 3, 50])),
        max_requests=64,
        rule=draw(st.sampled_from(RULES)),
        kv_capacity_tokens=draw(st.sampled_from([None, 6_400, 16_384])),
        kv_block_tokens=draw(st.sampled_from([16, 64])),
    )


@settings(deadline=None, max_examples=40)
@given(planners(), st.integers(0, 2**32 - 1))
def test_every_request_ends_and_gets_each_token_once(planner: StepPlanner, seed: int) -> None:
    """No starvation, no token lost or computed twice, KV blocks and places are kept."""
    rng = stream(seed, "requests")
    wanted: dict[int, tuple[int, int]] = {}
    for index in range(int(rng.integers(1, 24))):
        prompt = int(rng.choice([1, 2, 64, 500, 1_100, 2_000]))
        output = int(rng.integers(1, 30))
        cached = int(rng.integers(0, prompt)) if rng.random() < 0.3 else 0
        slot = planner.add(
            RequestId(f"r{index}"),
            num_prompt_tokens=prompt,
            max_output_tokens=output,
            num_cached_tokens=cached,
        )
        wanted[slot] = (prompt, output)
    computed = {slot: int(planner.num_computed_tokens(slot)) for slot in wanted}
    emitted = dict.fromkeys(wanted, 0)

    for _ in range(20_000):
        if not len(planner):
            break
        plan = planner.plan()
        planner.validate()
        for slot in plan.preempted.tolist():
            computed[slot] = 0
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert plan.slots.size, "nobody runs although somebody waits"
        for slot, count in zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True):
            prompt, output = wanted[slot]
            assert count >= 1
            computed[slot] += count
            length = prompt + emitted[slot]
            assert computed[slot] <= length
            if computed[slot] == length:
                emitted[slot] += 1
                if emitted[slot] == output:
                    planner.finish(planner.request_id(slot))
    assert len(planner) == 0, "somebody starved"
    assert all(emitted[slot] == output for slot, (_, output) in wanted.items())


@settings(deadline=None, max_examples=40)
@given(planners(), st.integers(0, 2**32 - 1))
def test_late_facts_are_repaired(planner: StepPlanner, seed: int) -> None:
    """Facts of step N arrive after the plan of N+1: ended requests leave it, the rest goes on."""
    rng = stream(seed, "facts")
    for index in range(20):
        planner.add(
            RequestId(f"r{index}"),
            num_prompt_tokens=int(rng.integers(1, 600)),
            max_output_tokens=int(rng.integers(1, 40)),
        )
    planner.set_verify_lengths(np.arange(64), rng.integers(0, 4, size=64))
    current = planner.plan()
    for _ in range(3_000):
        following = planner.plan()
        # Now the facts of `current`.
        decodes = current.slots[: current.num_decodes]
        accepted = rng.integers(0, current.num_tokens[: current.num_decodes] + 1)
        alive = current.num_tokens[: current.num_decodes] > 0
        planner.apply_emitted(decodes[alive], np.maximum(accepted[alive], 1))
        ended = [slot for slot in decodes[alive].tolist() if rng.random() < 0.1]
        for slot in ended:
            planner.finish(planner.request_id(slot))
        planner.repair(following)
        planner.validate()
        assert not set(ended) & set(following.slots[following.num_tokens > 0].tolist())
        for slot in current.slots.tolist():
            if planner.is_at_limit(slot) and planner.holds(slot) and slot not in following.slots:
                planner.finish(planner.request_id(slot))
        current = following
        if not len(planner):
            break
    assert len(planner) == 0
