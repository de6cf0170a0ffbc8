"""One budget for an EP group: the same on every rank, right by hand, and safe when ranks fail."""

import itertools

import numpy as np
import pytest
import spec_reference as twin

from dsched.costs import StepCostCurve
from dsched.spec_decode import plan_verify_lengths
from dsched.spec_decode.group import (
    GROUP_ONE,
    NUM_BINS,
    ROW_LENGTH,
    GroupAgreement,
    GroupPlan,
    Verdict,
    curve_id,
    plan_group,
    summarise,
)

TIERS = list(range(8, 513, 8))
CURVE = StepCostCurve.from_samples(TIERS, [(15.24 + 0.0285 * b) / 1e3 for b in TIERS], tiers=TIERS)
TIMEOUT_NS = 1_000_000


def row_of(
    history: object, dp_rank: int, *, step: int = 5, epoch: int = 3, **more: object
) -> np.ndarray:
    return summarise(
        history,
        step_cost=more.pop("step_cost", CURVE),
        step=step,
        epoch=epoch,
        dp_rank=dp_rank,
        **more,
    )


def histories(num_ranks: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.beta(3, 1, (int(rng.integers(20, 60)), 5)) for _ in range(num_ranks)]


class TestPlanGroup:
    def test_eight_ranks_derive_one_plan_bit_for_bit(self) -> None:
        """From the same integers, in whatever order they arrived."""
        rows = [row_of(history, rank) for rank, history in enumerate(histories(8))]
        rng = np.random.default_rng(1)

        plans = [
            plan_group([rows[i] for i in rng.permutation(8)], step_cost=CURVE) for _ in range(8)
        ]

        assert len({(plan.max_batch_tokens, plan.draft_gain) for plan in plans}) == 1
        assert plans[0].max_batch_tokens in TIERS

    def test_every_rank_fills_the_batch_it_waits_for_anyway(self) -> None:
        """Three requests make the others wait for a tier; one request then verifies all it has."""
        curve = StepCostCurve.from_samples([4, 8, 16], [0.010, 0.012, 0.030])
        few, many = np.full((1, 3), 0.5), np.full((3, 3), 0.9)
        rows = [row_of(history, rank, step_cost=curve) for rank, history in enumerate([few, many])]

        plan = plan_group(rows, step_cost=curve)

        # 8 tokens: 4 + (.875) + (2.7 + .81 * 2) emit 9.2 in 12 ms; 12 tokens: at most 11.2 in 30.
        assert plan.max_batch_tokens == 8
        assert plan.budget(num_requests=1) == 7
        assert plan.budget(num_requests=3) == 5
        lengths = plan_verify_lengths(few, step_cost=curve, budget=7).lengths
        assert lengths.tolist() == [3]

    @pytest.mark.parametrize("seed", range(5))
    def test_equals_the_best_of_all_batches(self, seed: int) -> None:
        """Against trying every batch with exact survivals: the bins lose less than .1 %."""
        ranks = histories(4, seed)
        plan = plan_group([row_of(each, rank) for rank, each in enumerate(ranks)], step_cost=CURVE)

        best = [np.sort(twin.survival(each).ravel())[::-1] for each in ranks]
        rates = {}
        for batch in range(max(len(each) for each in ranks), 400):
            emitted = sum(
                len(each) + values[: batch - len(each)].sum()
                for each, values in zip(ranks, best, strict=True)
            )
            rates[batch] = emitted / CURVE.seconds(batch)

        assert rates[plan.max_batch_tokens] > max(rates.values()) * 0.999

    def test_draft_cost_is_the_slowest_ranks(self) -> None:
        rows = [
            row_of(np.full((4, 2), 0.5), 0, draft_seconds=0.001),
            row_of(np.full((4, 2), 0.5), 1, draft_seconds=0.5),
        ]

        assert plan_group(rows, step_cost=CURVE).draft_gain < -0.9
        assert plan_group(rows[:1], step_cost=CURVE).draft_gain > 0.3

    def test_idle_ranks_take_part(self) -> None:
        """A rank without requests, one with a prompt only, and a group with nothing at all."""
        idle = row_of(np.zeros((0, 5)), 1)
        prompt = row_of(np.zeros((0, 5)), 2, num_other_tokens=100)
        busy = row_of(np.full((10, 5), 0.9), 0)

        assert plan_group([busy, idle], step_cost=CURVE).max_batch_tokens > 10
        # The prompt's 104-token tier is waited for, so 94 draft tokens of 50 are free.
        plan = plan_group([busy, prompt], step_cost=CURVE)
        assert plan.budget(num_requests=10) >= 50
        assert plan.budget(num_requests=0, num_other_tokens=100) == plan.max_batch_tokens - 100
        assert plan_group([idle], step_cost=CURVE).max_batch_tokens == 0

    def test_flat_curve_verifies_all(self) -> None:
        flat = StepCostCurve.from_samples([1, 512], [0.01, 0.01])
        rows = [row_of(each, rank, step_cost=flat) for rank, each in enumerate(histories(2))]
        sizes = [each.shape[0] * 6 for each in histories(2)]

        assert plan_group(rows, step_cost=flat).max_batch_tokens == max(sizes)

    def test_row_is_what_it_says(self) -> None:
        row = row_of([[0.5, 0.5], [1.0, 0.0]], 2, num_other_tokens=7)

        assert row.shape == (ROW_LENGTH,)
        assert row.dtype == np.int64
        counts, sums = row[-2 * NUM_BINS : -NUM_BINS], row[-NUM_BINS:]
        assert counts.sum() == 4
        assert sums.sum() == (0.5 + 0.25 + 1.0) * GROUP_ONE

    def test_ranks_that_disagree_are_refused(self) -> None:
        history = np.full((2, 2), 0.5)
        other = StepCostCurve.from_samples([1, 2], [0.01, 0.02])
        cases = {
            "epochs": [row_of(history, 0, epoch=3), row_of(history, 1, epoch=4)],
            "steps": [row_of(history, 0, step=5), row_of(history, 1, step=6)],
            "cost curves": [row_of(history, 0), row_of(history, 1, step_cost=other)],
            "one rank": [row_of(history, 0), row_of(history, 0)],
        }
        for message, rows in cases.items():
            with pytest.raises(ValueError, match=message):
                plan_group(rows, step_cost=CURVE)
        with pytest.raises(ValueError, match="is not this one"):
            plan_group([row_of(history, 0, step_cost=other)], step_cost=CURVE)
        with pytest.raises(ValueError, match=r"rows have shape \(0,\)"):
            plan_group([], step_cost=CURVE)

    def test_curve_id_tells_curves_apart(self) -> None:
        same = StepCostCurve.from_json(CURVE.to_json())
        moved = CURVE.observe(64, 1.0)

        assert curve_id(CURVE) == curve_id(same) != curve_id(moved)


class TestGroupAgreement:
    def agreement(self, num_ranks: int = 3) -> GroupAgreement:
        return GroupAgreement(range(num_ranks), epoch=3, timeout_ns=TIMEOUT_NS)

    def rows(self, num_ranks: int = 3, **more: object) -> list[np.ndarray]:
        return [row_of(each, rank, **more) for rank, each in enumerate(histories(num_ranks))]

    def test_all_rows_make_an_agreement_in_any_order(self) -> None:
        plans = []
        for order in itertools.permutations(self.rows()):
            agreement = self.agreement()
            for row in order:
                assert agreement.verdict(5, now_ns=0) is Verdict.WAITING
                agreement.apply(row)
            assert agreement.verdict(5, now_ns=TIMEOUT_NS * 9) is Verdict.AGREED
            plans.append(agreement.plan(5, step_cost=CURVE))

        assert all(plan == plans[0] for plan in plans)

    def test_a_rank_that_never_answers_is_waited_for_once(self) -> None:
        agreement = self.agreement()
        for row in self.rows()[:2]:
            agreement.apply(row)

        assert agreement.verdict(5, now_ns=10) is Verdict.WAITING
        assert agreement.verdict(5, now_ns=9 + TIMEOUT_NS) is Verdict.WAITING
        assert agreement.verdict(5, now_ns=10 + TIMEOUT_NS) is Verdict.ALONE
        assert agreement.silent == {2}
        assert agreement.verdict(6, now_ns=11 + TIMEOUT_NS) is Verdict.ALONE
        assert agreement.num_timeouts == 1
        with pytest.raises(ValueError, match=r"no row of ranks \[2\]"):
            agreement.plan(5, step_cost=CURVE)

    def test_a_silent_rank_that_speaks_again_is_waited_for_again(self) -> None:
        agreement = self.agreement()
        agreement.verdict(5, now_ns=0)
        assert agreement.verdict(5, now_ns=TIMEOUT_NS) is Verdict.ALONE
        for row in self.rows(step=7):
            agreement.apply(row)

        assert agreement.silent == frozenset()
        assert agreement.verdict(7, now_ns=TIMEOUT_NS) is Verdict.AGREED
        assert agreement.verdict(8, now_ns=TIMEOUT_NS) is Verdict.WAITING

    def test_rows_of_another_epoch_do_not_count(self) -> None:
        agreement = self.agreement()
        for row in [*self.rows(epoch=2), *self.rows(epoch=4)]:
            agreement.apply(row)

        assert agreement.num_stale_rows == 6
        assert agreement.verdict(5, now_ns=0) is Verdict.WAITING

    def test_a_new_epoch_forgets_the_old_one(self) -> None:
        agreement = self.agreement()
        for row in self.rows():
            agreement.apply(row)

        agreement.apply_epoch(4, [0, 2])

        assert agreement.verdict(5, now_ns=0) is Verdict.WAITING
        for row in self.rows(epoch=4):
            agreement.apply(row)
        assert agreement.num_stale_rows == 1
        assert agreement.plan(5, step_cost=CURVE).epoch == 4
        with pytest.raises(ValueError, match="epoch 4 is not after 4"):
            agreement.apply_epoch(4, [0])

    def test_a_plan_of_another_rank_can_be_taken(self) -> None:
        agreement = self.agreement()
        plan = GroupPlan(max_batch_tokens=64, draft_gain=0.1, step=5, epoch=3)

        agreement.apply_plan(GroupPlan(max_batch_tokens=64, draft_gain=0.1, step=5, epoch=2))
        assert agreement.verdict(5, now_ns=0) is Verdict.WAITING
        agreement.apply_plan(plan)

        assert agreement.verdict(5, now_ns=0) is Verdict.AGREED
        assert agreement.plan(5, step_cost=CURVE) == plan

    def test_memory_is_bounded(self) -> None:
        agreement = self.agreement()
        for step in range(100):
            agreement.verdict(step, now_ns=0)
            agreement.apply(row_of(np.full((1, 1), 0.5), 0, step=step))
            agreement.apply_plan(GroupPlan(max_batch_tokens=8, draft_gain=0.0, step=step, epoch=3))

        assert all(
            len(memory) <= GroupAgreement.MAX_STEPS
            for memory in (agreement._rows, agreement._asked_ns, agreement._taken)
        )

    def test_wrong_input(self) -> None:
        with pytest.raises(ValueError, match="are not a group"):
            GroupAgreement([0, 0], epoch=0, timeout_ns=1)
        with pytest.raises(ValueError, match="timeout_ns is 0"):
            GroupAgreement([0], epoch=0, timeout_ns=0)
        with pytest.raises(ValueError, match="a row has shape"):
            self.agreement().apply(np.zeros(3, dtype=np.int64))
