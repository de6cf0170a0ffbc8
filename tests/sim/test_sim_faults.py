"""Every promise, while everything breaks: seeds of the fault simulation."""

import json
import os
import subprocess
import sys

import pytest

from dsched.cli.sim_faults import parse_seeds
from dsched.controller.controller import Controller
from dsched.controller.lifecycle import Lifecycle
from dsched.controller.run import RequestRun
from dsched.errors import ConfigError
from dsched.sim.faults import FaultPlan, FaultReport, SafetyError, run_faults


def run_all(seeds: range) -> list[FaultReport]:
    return [run_faults(seed) for seed in seeds]


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))]
)
def test_every_promise_is_kept_and_everything_finishes(seed: int) -> None:
    """No token lost, repeated or wrong; one end each; nothing waits for ever."""
    report = run_faults(seed)

    assert (report.num_tokens_lost, report.num_tokens_repeated) == (0, 0)
    ended = (report.num_finished, report.num_refused, report.num_unserved, report.num_cancelled)
    assert sum(ended) == report.num_requests


@pytest.mark.slow
def test_seeds_together_meet_every_fault_and_every_method() -> None:
    """The generator reaches what it is there for."""
    reports = run_all(range(100, 110))

    faults = {kind for report in reports for kind in report.faults}
    assert faults == {
        *("crash", "freeze", "slow", "rank_lost", "drain", "silence"),
        *("broken_connection", "zombie_tokens"),
    }
    methods = {method for report in reports for method in report.handoffs}
    assert {"continue", "replay", "restart", "refuse"} <= methods
    assert sum(report.num_fenced_tokens for report in reports) > 0
    assert sum(report.num_cancelled for report in reports) > 0


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fencing, tokens of an attempt that is over reach a client, and a seed shows it."""

    def on_tokens(self, attempt_id, token_ids, logprobs) -> None:  # noqa: ANN001
        self.stream.on_tokens(self.num_output_tokens, token_ids, logprobs)

    monkeypatch.setattr(RequestRun, "on_tokens", on_tokens)

    with pytest.raises(SafetyError, match=r"^seed \d+, at [\d.]+ s: request"):
        run_all(range(10))


def test_a_request_that_is_forgotten_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A controller that drops what it should continue is told so."""
    monkeypatch.setattr(Lifecycle, "apply_attempt_lost", lambda *_: None)
    monkeypatch.setattr(Controller, "validate", lambda _: None)

    with pytest.raises(SafetyError, match="no progress"):
        run_all(range(10))


def digest(hash_seed: int) -> object:
    command = [sys.executable, "-m", "dsched.cli.main", "sim", "faults", "--seed", "7"]
    done = subprocess.run(
        [*command, "--requests", "15", "--json", "-"],
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_one_seed_is_one_run_whatever_the_string_hashes() -> None:
    """The digest covers what each client heard and when."""
    one, other = digest(1), digest(2)

    assert one == other
    assert len(one["seeds"][0]["digest"]) == 64  # type: ignore[index]


@pytest.mark.parametrize("text", ["5", "5..3", "a..b", "1..2..3"])
def test_seeds_that_are_no_range_are_refused(text: str) -> None:
    """The form is named."""
    with pytest.raises(ConfigError, match=r"is not A\.\.B with A not above B"):
        parse_seeds(text)


def test_a_plan_without_engines_is_refused() -> None:
    """Value and rule."""
    with pytest.raises(ValueError, match="num_engines 0 must be at least 1"):
        FaultPlan(num_engines=0)
