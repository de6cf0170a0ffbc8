"""Verify lengths inside vLLM, over doubles of its objects; the real engine is in tests/vllm."""

from types import SimpleNamespace

import numpy as np
import pytest

from dsched.clock import ManualClock
from dsched.config import VerifySettings, verify_settings_from_environment
from dsched.costs import StepCostCurve
from dsched.drivers.vllm.verify import VerifyLengthMixin, make_verify_control, trim_drafts
from dsched.drivers.vllm.verify_control import LEARNING_STEPS, AcceptanceByRequest, VerifyControl
from dsched.errors import ConfigError

CURVE = StepCostCurve.from_samples(range(1, 257), (4.0 + 0.4 * np.arange(1, 257)) / 1e3)


def control_of(step_cost: StepCostCurve | None = CURVE, **more: object) -> VerifyControl:
    values = {"num_positions": 5, "max_requests": 16, "clock": ManualClock(1), **more}
    return VerifyControl(step_cost=step_cost, **values)


class FakeRequest:
    """vLLM's `Request`, as far as it is read."""

    def __init__(self, name: str, *, num_drafts: int = 5, is_prefill_chunk: bool = False) -> None:
        self.request_id = name
        self.spec_token_ids = list(range(num_drafts))
        self.is_prefill_chunk = is_prefill_chunk
        self.has_ended = False

    def is_finished(self) -> bool:
        return self.has_ended


class FakeScheduler:
    """vLLM's schedulers: drafts come after a step, or as placeholders that all requests share."""

    num_spec_tokens = 5
    max_num_running_reqs = 8

    def __init__(self) -> None:
        self.requests = {name: FakeRequest(name) for name in ("a", "b")}
        self.errors: list[tuple[str, str]] = []
        self.shared = [-1] * 5

    def schedule(self) -> str:
        return "scheduled"

    def update_draft_token_ids(self, draft_token_ids: object) -> None:
        for request in self.requests.values():
            request.spec_token_ids = list(range(5))

    def _update_after_schedule(self, scheduler_output: object) -> None:
        for request in self.requests.values():
            request.spec_token_ids = self.shared

    def update_from_output(self, scheduler_output: object, model_runner_output: object) -> str:
        return "updated"

    def _free_request(self, request: FakeRequest) -> str:
        return "freed"

    def _dsched_switch_off(self, feature: str, error: Exception) -> None:
        self.errors.append((feature, str(error)))


class Scheduler(VerifyLengthMixin, FakeScheduler):
    pass


class AsyncScheduler(VerifyLengthMixin, FakeScheduler):
    _dsched_is_async = True


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """Plan verify lengths, on the curve above."""
    path = tmp_path / "curve.json"
    path.write_text(CURVE.to_json())
    monkeypatch.setenv("DSCHED_VERIFY_LENGTHS", "on")
    monkeypatch.setenv("DSCHED_STEP_COST", str(path))


def outcome(verified: dict[str, int], emitted: dict[str, int]) -> tuple[object, object]:
    """vLLM's outputs of a step."""
    names = list(emitted)
    scheduler_output = SimpleNamespace(
        scheduled_spec_decode_tokens={
            name: [0] * count for name, count in verified.items() if count
        },
        total_num_scheduled_tokens=len(names) + sum(verified.values()),
        num_scheduled_tokens={name: 1 + verified[name] for name in names},
    )
    model_runner_output = SimpleNamespace(
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[7] * emitted[name] for name in names],
    )
    return scheduler_output, model_runner_output


class TestMixin:
    def test_rejected_drafts_become_shorter(self, settings: None) -> None:
        """Request b's drafts are never accepted: after a few steps it drafts less than a."""
        scheduler = Scheduler()
        drafts = SimpleNamespace(req_ids=["a", "b"])
        for _ in range(20):
            scheduler.update_draft_token_ids(drafts)
            lengths = {name: len(each.spec_token_ids) for name, each in scheduler.requests.items()}
            assert scheduler.schedule() == "scheduled"
            emitted = {"a": lengths["a"] + 1, "b": 1}
            assert scheduler.update_from_output(*outcome(lengths, emitted)) == "updated"

        assert lengths["a"] == 5
        assert lengths["b"] == 0
        assert scheduler.errors == []

    def test_asynchronous_placeholders_are_cut_and_the_shared_list_is_not(
        self, settings: None
    ) -> None:
        scheduler = AsyncScheduler()
        scheduler.update_from_output(*outcome({"a": 5, "b": 5}, {"a": 6, "b": 1}))
        for _ in range(20):
            scheduler.update_from_output(*outcome({"a": 5, "b": 1}, {"a": 6, "b": 1}))

        scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"a": 6, "b": 2}))

        assert scheduler.requests["a"].spec_token_ids == [-1] * 5
        assert scheduler.requests["b"].spec_token_ids == []
        assert scheduler.shared == [-1] * 5

    def test_synchronous_scheduler_leaves_placeholders_alone(self, settings: None) -> None:
        scheduler = Scheduler()
        scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"a": 6}))

        assert scheduler.requests["a"].spec_token_ids is scheduler.shared

    def test_off_without_the_variable(self) -> None:
        scheduler = Scheduler()
        scheduler.update_draft_token_ids(SimpleNamespace(req_ids=["a", "b"]))

        assert scheduler._dsched_verify is None
        assert len(scheduler.requests["a"].spec_token_ids) == 5

    def test_a_failure_switches_it_off_and_the_step_goes_on(self, settings: None) -> None:
        scheduler = Scheduler()
        scheduler._dsched_verify.confidence_source = lambda _: np.full((1, 5), 2.0)

        scheduler.update_draft_token_ids(SimpleNamespace(req_ids=["a", "b"]))

        assert scheduler._dsched_verify is None
        assert [feature for feature, _ in scheduler.errors] == ["verify_lengths"]
        assert len(scheduler.requests["a"].spec_token_ids) == 5
        assert scheduler.schedule() == "scheduled"

    def test_an_unreadable_curve_does_not_stop_the_engine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DSCHED_VERIFY_LENGTHS", "on")
        monkeypatch.setenv("DSCHED_STEP_COST", "missing.json")

        scheduler = Scheduler()

        assert scheduler._dsched_verify is None
        assert "missing.json" in scheduler.errors[0][1]

    def test_requests_that_ended_are_forgotten(self, settings: None) -> None:
        scheduler = Scheduler()
        control = scheduler._dsched_verify
        scheduler.update_from_output(*outcome({"a": 5}, {"a": 3}))

        assert scheduler._free_request(scheduler.requests["a"]) == "freed"

        assert control.acceptance._reached == {}


def test_prompts_in_progress_and_finished_requests_are_not_planned() -> None:
    scheduler = FakeScheduler()
    scheduler.requests["c"] = FakeRequest("c", num_drafts=0, is_prefill_chunk=True)
    scheduler.requests["b"].has_ended = True
    control = control_of()

    trim_drafts(control, scheduler, ["a", "b", "c", "gone"])

    assert control.num_plans == 1
    assert len(scheduler.requests["b"].spec_token_ids) == 5


class TestControl:
    def test_without_a_curve_all_is_verified_until_one_is_learned(self) -> None:
        """A step of B tokens takes 4 + .4 B ms; the clock shows it."""
        clock = ManualClock(1)
        control = control_of(None, clock=clock)
        assert control.plan({"a": 5, "b": 3}) == {"a": 5, "b": 3}
        for step in range(LEARNING_STEPS):
            num_tokens = 2 + step % 11
            control.start_step()
            clock.advance_to(clock.now_ns() + 4_000_000 + 400_000 * num_tokens)
            control.end_step(
                num_tokens=num_tokens, verified={"a": 5, "b": 5}, accepted={"a": 0, "b": 0}
            )

        assert control.times.curve.seconds(8) == pytest.approx(7.2e-3, rel=0.01)
        assert sum(control.plan({"a": 5, "b": 3}).values()) < 4

    def test_one_batch_size_teaches_no_curve(self) -> None:
        control = control_of(None)
        for _ in range(2 * LEARNING_STEPS):
            control.times.apply(num_tokens=6, seconds=0.01)

        assert control.times.curve is None

    def test_prefill_tokens_of_the_last_step_count(self) -> None:
        """They will be in the next step too: the batch starts higher on the curve."""
        tiers = [8, 256]
        stairs = StepCostCurve.from_samples(tiers, [0.004, 0.1], tiers=tiers)
        control = control_of(stairs)
        assert control.plan({"a": 5}) == {"a": 5}
        control.start_step()
        control.end_step(num_tokens=3 + 1 + 5, verified={"a": 5}, accepted={"a": 5})

        assert control.plan({"a": 5}) == {"a": 4}

    def test_confidences_of_the_drafter_are_used_two_steps_later(self) -> None:
        """The total follows the older ones, the choice the newest."""
        control = control_of()
        shown = {"now": np.array([[0.95] * 5, [0.05] * 5])}
        control.confidence_source = lambda _: shown["now"]
        for _ in range(4):
            first = control.plan({"a": 5, "b": 5})
        shown["now"] = shown["now"][::-1].copy()

        second = control.plan({"a": 5, "b": 5})

        assert first == {"a": 5, "b": 0}
        assert second == {"a": 0, "b": 5}

    def test_slots_are_given_back(self) -> None:
        control = control_of(max_requests=2)
        control.confidence_source = lambda names: np.full((len(names), 5), 0.5)
        for index in range(10):
            control.plan({f"r{index}": 5})
            control.remove(f"r{index}")
            control.remove(f"r{index}")

        assert len(control._free_slots) == 2


def test_acceptance_of_a_request_moves_from_the_usual_to_its_own() -> None:
    acceptance = AcceptanceByRequest(2)
    usual = acceptance.confidence(["new"])[0]
    for _ in range(30):
        acceptance.apply({"good": 2, "bad": 2}, {"good": 2, "bad": 0})

    good, bad, new = acceptance.confidence(["good", "bad", "new"])

    assert bad[0] < 0.3 < new[0] < good[0]
    assert usual.tolist() == pytest.approx([0.7, 0.7])


class TestSettings:
    def test_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert not verify_settings_from_environment().is_on
        monkeypatch.setenv("DSCHED_VERIFY_LENGTHS", "on")
        assert verify_settings_from_environment() == VerifySettings(is_on=True, step_cost=None)
        monkeypatch.setenv("DSCHED_VERIFY_LENGTHS", "maybe")
        with pytest.raises(ConfigError, match="DSCHED_VERIFY_LENGTHS: 'maybe'"):
            verify_settings_from_environment()

    def test_nothing_is_planned_for_an_engine_that_does_not_draft(self) -> None:
        scheduler = SimpleNamespace(num_spec_tokens=0, max_num_running_reqs=4)

        assert make_verify_control(scheduler, VerifySettings(is_on=True, step_cost=None)) is None
