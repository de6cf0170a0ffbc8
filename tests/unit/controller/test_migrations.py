"""Migrations in the controller: what moves, how, and what its client sees of it."""

from dataclasses import replace

import pytest

from dsched.controller.request import RequestFinish
from dsched.controller.settings import ControllerSettings, MigrationMode, MigrationSettings
from dsched.costs.affine import AffineStepCost
from dsched.drivers.wire import SamplingParams
from dsched.sim.cluster import SimCluster, SimPolicy, patient_settings
from dsched.sim.engine import SimEngineConfig
from dsched.testing.recorders import RecordingStream

MS = 1_000_000
GREEDY = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


class Skewed:
    """Two ranks, one of which has all the long requests once the short ones have ended."""

    def __init__(self, mode: MigrationMode, sampling: SamplingParams = GREEDY) -> None:
        settings: ControllerSettings = replace(
            patient_settings(AffineStepCost(), SimPolicy.TWO_TERM),
            is_validating=True,
            migration=MigrationSettings(mode=mode, interval_ns=200 * MS),
        )
        self.cluster = SimCluster(
            engine=SimEngineConfig(num_dp_ranks=2), settings=settings, is_batching=False
        )
        self.cluster.start()
        self.heard: list[RecordingStream] = []
        for index in range(8):
            is_long = index % 2 == 0  # ranks take turns, so all of these go to one
            lasting = replace_tokens(sampling, 400 if is_long else 5)
            heard = RecordingStream()
            self.heard.append(heard)
            self.cluster.submit(tuple(range(index, index + 50)), lasting, heard)  # type: ignore[arg-type]
        self.cluster.loop.run_while(lambda: not all(each.ends for each in self.heard))
        self.cluster.validate()

    @property
    def handoffs(self) -> dict[tuple[str, str], int]:
        return dict(self.cluster.controller.num_handoffs)

    def expected(self, sampling: SamplingParams = GREEDY) -> list[list[int]]:
        return [
            list(
                self.cluster.model.stream(
                    tuple(range(index, index + 50)),
                    400 if index % 2 == 0 else 5,
                    replace_tokens(sampling, 400),
                )
            )
            for index in range(8)
        ]


def replace_tokens(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        presence_penalty=sampling.presence_penalty,
        ignore_eos=True,
    )


def test_nothing_moves_by_default() -> None:
    assert ControllerSettings().migration.mode == "off"
    assert Skewed("off").handoffs == {}


@pytest.mark.parametrize("mode", ["kv", "recompute"])
def test_long_requests_spread_over_ranks_that_became_free(mode: MigrationMode) -> None:
    """Some of four go to the other rank, and every answer is what it would have been."""
    skewed = Skewed(mode)

    ((key, num_moves),) = skewed.handoffs.items()
    assert key == ("continue", "moved")
    assert 2 <= num_moves <= 4
    assert [each.token_ids for each in skewed.heard] == skewed.expected()
    ends = [each.ends[0] for each in skewed.heard]
    assert all(isinstance(end, RequestFinish) for end in ends)
    moved = [end for end in ends if isinstance(end, RequestFinish) and end.num_handoffs]
    assert sum(end.num_handoffs for end in moved) == num_moves
    assert {end.guarantee for end in moved} == {"exact"}


def test_only_kv_moves_cost_no_second_prefill() -> None:
    """With KV at most one token a move is computed again; without, prompt and answer are."""
    runs = {mode: Skewed(mode) for mode in ("off", "kv", "recompute")}
    num_computed = {mode: run.cluster.meter.num_step_tokens for mode, run in runs.items()}

    num_moves = runs["kv"].handoffs[("continue", "moved")]
    assert 0 < num_computed["kv"] - num_computed["off"] <= num_moves
    assert num_computed["recompute"] - num_computed["off"] > 2 * 50


def test_what_cannot_be_continued_from_its_tokens_stays() -> None:
    """Penalties live beside the tokens: such requests are left where they are."""
    penalised = SamplingParams(max_tokens=400, temperature=0.0, presence_penalty=0.5)

    assert Skewed("recompute", penalised).handoffs == {}
