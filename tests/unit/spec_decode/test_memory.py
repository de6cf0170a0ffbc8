"""What is remembered between steps: confidences by slot, and whether drafting pays."""

import numpy as np
import pytest

from dsched.spec_decode.memory import LAG_STEPS, ConfidenceHistory, DraftGate, num_steps_for


class TestConfidenceHistory:
    def test_confidences_come_back_two_steps_later(self) -> None:
        memory = ConfidenceHistory(4, 2)
        memory.apply(0, [0, 2], [[0.1, 0.2], [0.3, 0.4]])

        assert LAG_STEPS == 2
        assert np.isnan(memory.before(1, [0, 2])).all()
        assert memory.before(2, [2, 0])[0].tolist() == [[0.3, 0.4], [0.1, 0.2]]

    def test_small_batches_look_further_back(self) -> None:
        memory = ConfidenceHistory(2, 1)
        for step in range(5):
            memory.apply(step, [0, 1], [[step / 10], [step / 10]])

        assert memory.before(5, [0, 1])[:, 0, 0].tolist() == [0.3, 0.2, 0.1, 0.0]
        assert len(memory.before(5, list(range(2)) * 64)) == 1

    def test_a_request_that_left_leaves_nothing(self) -> None:
        memory = ConfidenceHistory(2, 1)
        memory.apply(0, [0, 1], [[0.5], [0.6]])
        memory.release([0])

        rows = memory.before(2, [0, 1])[0]
        assert np.isnan(rows[0]).all()
        assert rows[1].tolist() == [0.6]

    def test_steps_that_were_left_out_are_unknown(self) -> None:
        """The ring must not give a step's place for another step."""
        memory = ConfidenceHistory(1, 1, max_steps=1)
        memory.apply(0, [0], [[0.5]])
        memory.apply(7, [0], [[0.7]])

        assert memory.before(9, [0]).tolist() == [[[0.7]]]
        assert np.isnan(memory.before(8, [0])).all()

    def test_wrong_sizes(self) -> None:
        with pytest.raises(ValueError, match="hold nothing"):
            ConfidenceHistory(0, 5)


@pytest.mark.parametrize(
    ("num_requests", "num_steps"), [(0, 16), (1, 16), (8, 16), (64, 2), (500, 1)]
)
def test_steps_averaged_over(num_requests: int, num_steps: int) -> None:
    assert num_steps_for(num_requests) == num_steps


class TestDraftGate:
    def test_drafts_while_it_pays(self) -> None:
        gate = DraftGate()
        skipped = 0
        for _ in range(1_000):
            gate.apply(draft_gain=0.1 if gate.is_drafting else None, num_requests=10)
            skipped += not gate.is_drafting

        assert 0 < skipped < 20

    def test_one_bad_step_among_good_ones_does_not_stop_it(self) -> None:
        gate = DraftGate(patience_steps=8)
        for gain in [0.2] * 20 + [-0.3]:
            assert gate.is_drafting
            gate.apply(draft_gain=gain, num_requests=10)

        assert gate.is_drafting

    def test_lasting_loss_stops_it(self) -> None:
        gate = DraftGate(patience_steps=8)
        for gain in [0.1] * 20 + [-0.1] * 20:
            if gate.is_drafting:
                gate.apply(draft_gain=gain, num_requests=10)

        assert not gate.is_drafting

    def test_it_tries_again_after_a_while_and_gives_up_at_once(self) -> None:
        gate = DraftGate(probe_every_steps=10)
        gate.apply(draft_gain=-0.1, num_requests=10)
        tries = 0
        for _ in range(100):
            gate.apply(draft_gain=-0.1 if gate.is_drafting else None, num_requests=10)
            tries += gate.is_drafting

        assert tries == 9

    def test_it_tries_again_at_once_in_a_smaller_batch(self) -> None:
        gate = DraftGate(probe_every_steps=1_000)
        gate.apply(draft_gain=-0.1, num_requests=100)
        gate.apply(draft_gain=None, num_requests=95)
        assert not gate.is_drafting
        gate.apply(draft_gain=None, num_requests=80)
        assert gate.is_drafting
        gate.apply(draft_gain=0.2, num_requests=80)
        assert gate.is_drafting

    def test_a_gain_within_the_margin_does_not_start_it_again(self) -> None:
        gate = DraftGate(margin=0.05, probe_every_steps=1)
        gate.apply(draft_gain=-0.1, num_requests=10)
        gate.apply(draft_gain=None, num_requests=10)
        gate.apply(draft_gain=0.04, num_requests=10)

        assert not gate.is_drafting

    @pytest.mark.parametrize(("gain", "skipped"), [(0.05, [32, 97, 162]), (0.2, [64, 193])])
    def test_it_is_doubted_now_and_then(self, gain: float, skipped: list[int]) -> None:
        """After 32 steps, then every 64; half as often with twice the gain."""
        gate = DraftGate()
        drafts = []
        for _ in range(200):
            drafts.append(gate.is_drafting)
            gate.apply(draft_gain=gain if gate.is_drafting else None, num_requests=10)

        assert [step for step, is_drafting in enumerate(drafts) if not is_drafting] == skipped

    def test_wrong_settings(self) -> None:
        with pytest.raises(ValueError, match="patience_steps 0"):
            DraftGate(patience_steps=0)
