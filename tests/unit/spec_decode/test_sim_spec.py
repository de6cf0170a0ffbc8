"""The simulated drafter: its acceptance is the published one, its policies rank as they must."""

import json
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from dsched.cli.sim_spec import spec
from dsched.costs import StepCostCurve
from dsched.sim.spec import (
    ACCEPTANCE,
    PAPER_FITS,
    Fixed,
    NoDraft,
    Oracle,
    Planned,
    SpecCost,
    compare_policies,
    context_lengths,
    draft_trace,
    graph_tiers,
    paper_cost,
    run_contexts,
    run_group,
    v32_cost,
)


def test_graph_tiers() -> None:
    tiers = graph_tiers(1152)

    assert tiers[:3] == [8, 16, 24]
    assert [tiers[tiers.index(edge) + 1] for edge in (256, 512, 1024)] == [272, 544, 1088]


@pytest.mark.parametrize("mix", list(ACCEPTANCE))
def test_acceptance_is_the_papers(mix: str) -> None:
    """Conditional acceptance of seven positions; the mean emitted length follows."""
    trace = draft_trace(1, num_requests=400, num_steps=150, num_positions=7, mixes=(mix,))

    reached = np.array([(trace.accepted >= k).sum() for k in range(8)])

    assert reached[1:] / reached[:-1] == pytest.approx(ACCEPTANCE[mix], abs=0.015)
    emitted = 1 + np.cumprod(ACCEPTANCE[mix]).sum()
    assert 1 + trace.accepted.mean() == pytest.approx(emitted, rel=0.02)


def test_same_seed_same_steps() -> None:
    one, two = (draft_trace(5, num_requests=7, num_steps=5) for _ in range(2))
    other = draft_trace(6, num_requests=7, num_steps=5)

    assert (one.confidence == two.confidence).all()
    assert (one.confidence != other.confidence).any()


def test_history_is_two_steps_old_and_not_another_requests() -> None:
    trace = draft_trace(1, num_requests=300, num_steps=8)
    history = trace.history

    is_known = ~np.isnan(history[4]).any(axis=1)
    assert (history[4][is_known] == trace.confidence[2][is_known]).all()
    came_since = trace.is_new[3] | trace.is_new[4]
    assert (is_known == ~came_since).all()
    assert np.isnan(history[:2]).all()


@pytest.mark.parametrize("name", list(PAPER_FITS))
def test_policies_rank_as_they_must(name: str) -> None:
    """What knows more is better, within noise; nothing beats the oracle."""
    cost = paper_cost(name)
    trace = draft_trace(2, num_requests=64, num_steps=80, mixes=cost.mixes)

    def rate(policy: object) -> float:
        return policy.run(trace, cost).tokens_per_s

    bound = rate(Planned(uses_current=True))
    assert rate(Oracle()) > bound
    assert rate(Planned()) > 0.995 * bound
    assert rate(Planned(mode="synchronous")) > 0.95 * bound
    assert rate(Planned()) > 1.01 * max(rate(Fixed(5)), rate(Fixed(1)), rate(NoDraft()))


def test_where_drafting_loses_it_is_left() -> None:
    """A machine that is full with one token a request: the gate keeps what no drafting reaches."""
    tiers = graph_tiers()
    curve = StepCostCurve.from_samples(tiers, [0.001 + 1e-3 * b for b in tiers], tiers=tiers)
    cost = SpecCost(
        name="full", step_cost=curve, draft_base_seconds=0.02, draft_request_seconds=0.0
    )
    trace = draft_trace(3, num_requests=64, num_steps=200, mixes=("chat",))

    none = NoDraft().run(trace, cost).tokens_per_s

    assert Fixed(5).run(trace, cost).tokens_per_s < 0.7 * none
    assert Planned(has_gate=False).run(trace, cost).tokens_per_s < 0.9 * none
    assert Planned().run(trace, cost).tokens_per_s > 0.995 * none


def test_one_budget_beats_each_its_own() -> None:
    cost = paper_cost("v4flash-mixed")
    traces = [
        draft_trace(4, num_requests=64, num_steps=40, name=f"rank-{rank}") for rank in range(8)
    ]

    alone = run_group(traces, cost, is_common=False).tokens_per_s
    group = run_group(traces, cost, is_common=True).tokens_per_s

    assert 1.005 < group / alone < 1.03


def test_density_beats_survival_and_long_contexts_still_speculate() -> None:
    cost, seconds_per_kv_token = v32_cost("v3.2-gb200")
    trace = draft_trace(5, num_requests=64, num_steps=60)
    kv_tokens = context_lengths(5, num_requests=64)

    plain, dense = (
        run_contexts(
            trace,
            cost,
            kv_tokens,
            seconds_per_kv_token=seconds_per_kv_token,
            fairness=fairness,
        )
        for fairness in (None, 0.1)
    )

    assert dense.tokens_per_s > 1.03 * plain.tokens_per_s
    assert 0.0 < dense.longest_decile_length < plain.longest_decile_length


def test_wrong_tables_are_survived() -> None:
    """10 % noise on every tier, and a slope off by half, once smoothed and tracked."""
    cost = paper_cost("v4flash-mixed")
    trace = draft_trace(6, num_requests=128, num_steps=240)
    tiers = np.array(graph_tiers())
    truth = cost.step_cost.seconds(tiers)
    noise = np.random.default_rng(6).normal(0.0, 0.1, len(tiers))
    noisy = StepCostCurve.from_samples(tiers, truth * (1.0 + noise), tiers=tiers)
    half = StepCostCurve.from_samples(tiers, (truth + truth[0]) / 2, tiers=tiers)

    exact = Planned(learning_steps=120).run(trace, cost).tokens_per_s
    smoothed = Planned(believed=noisy, is_smoothed=True, learning_steps=120)
    tracked = Planned(believed=half, is_tracked=True, learning_steps=120)

    assert smoothed.run(trace, cost).tokens_per_s > (1 - 0.036) * exact
    assert tracked.run(trace, cost).tokens_per_s > (1 - 0.015) * exact


def test_comparison_has_every_policy() -> None:
    results = compare_policies(
        paper_cost("v4pro-chat"),
        num_requests=16,
        num_positions=3,
        num_ranks=2,
        num_steps=30,
        num_seeds=2,
    )

    names = ["none", "fixed 1", "fixed 3", "asynchronous", "oracle", "alone", "group"]
    assert [result.policy for result in results] == names
    assert all(result.tokens_per_s > 0 and result.spread >= 0 for result in results)
    with pytest.raises(ValueError, match="num_positions is 8"):
        draft_trace(0, num_requests=1, num_steps=1, num_positions=8)


class TestCommand:
    ARGUMENTS = ("--requests", "8", "--steps", "30", "--seeds", "1", "--ranks", "2")

    def run(self, *more: str) -> object:
        app = typer.Typer()
        app.command()(spec)
        return CliRunner().invoke(app, [*self.ARGUMENTS, *more])

    def test_table_json_and_plot(self, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib")
        files = tmp_path / "r.json", tmp_path / "r.png"

        result = self.run("--json", str(files[0]), "--plot", str(files[1]))

        assert result.exit_code == 0, result.output
        assert "Simulated tokens/s" in result.output
        document = json.loads(files[0].read_text())
        assert document["curve"] == "v4flash-mixed"
        assert {each["policy"] for each in document["results"]} >= {"none", "group", "oracle"}
        assert files[1].read_bytes().startswith(b"\x89PNG")

    def test_a_curve_of_ones_own(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        path.write_text(StepCostCurve.from_samples([8, 64], [0.01, 0.02]).to_json())

        result = self.run("--curve", str(path), "--draft-ms", "1", "--json", "-")

        assert result.exit_code == 0, result.output
        assert '"curve": "mine"' in result.output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--curve", "nope"), "'nope' is no file"),
            (("--mix", "poems"), "'poems' is none of"),
        ],
    )
    def test_wrong_values(self, arguments: tuple[str, str], message: str) -> None:
        result = self.run(*arguments)

        assert result.exit_code != 0
        assert message in str(result.exception)
