"""Every promise with separate pools, while everything breaks: seeds of the fault simulation."""

import pytest

from dsched.controller.prefills import Prefills
from dsched.controller.settings import MigrationMode
from dsched.sim.faults import FaultPlan, FaultReport, SafetyError, run_faults


def run(seed: int) -> FaultReport:
    plan = FaultPlan(
        num_engines=2 + seed % 2,
        num_prefill_engines=1 + seed % 3,
        num_requests=30,
        duration_s=12.0,
        faults_per_s=1.5,
    )
    return run_faults(seed, plan)


def run_all(seeds: range) -> list[FaultReport]:
    return [run(seed) for seed in seeds]


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 16))]
)
def test_every_promise_is_kept_with_pairs(seed: int) -> None:
    """No token lost, repeated or wrong; one end each; nothing waits for ever."""
    report = run(seed)

    assert (report.num_tokens_lost, report.num_tokens_repeated) == (0, 0)
    ended = (report.num_finished, report.num_refused, report.num_unserved, report.num_cancelled)
    assert sum(ended) == report.num_requests


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["kv", "recompute"])
def test_requests_that_move_keep_every_promise(mode: MigrationMode) -> None:
    """In combined and in separate pools; a move is never the reason for a lost or wrong token."""
    for seed in range(6):
        plan = FaultPlan(
            num_prefill_engines=seed % 2,
            num_requests=30,
            duration_s=12.0,
            migration=mode,
        )
        report = run_faults(seed, plan)
        assert (report.num_tokens_lost, report.num_tokens_repeated) == (0, 0)


@pytest.mark.slow
def test_seeds_together_meet_every_way_of_a_prompt() -> None:
    """The generator reaches what it is there for; one seed is one run."""
    reports = run_all(range(100, 108))

    outcomes = {outcome for report in reports for outcome in report.prefills}
    assert {"remote", "failed", "no_worker", "transfer_failed"} <= outcomes
    assert {"kv_lost", "crash", "freeze", "drain"} <= {
        kind for report in reports for kind in report.faults
    }
    assert run(100).digest == reports[0].digest


def test_a_prompt_that_nobody_places_again_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that forgets a lost prefill half is told so."""
    monkeypatch.setattr(Prefills, "_decide_later", lambda *_: None)
    monkeypatch.setattr(Prefills, "validate", lambda _: None)

    with pytest.raises(SafetyError, match="no progress"):
        run_all(range(10))
