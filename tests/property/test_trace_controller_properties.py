"""Whole controllers, recorded: while everything breaks, every decision comes out again.

The runs are those of the fault simulation (engines crash, freeze, lose ranks and are drained,
reports are late, requests are held, rationed and refused), and plain loads with held requests.
"""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsched.sim.cluster import SimCluster
from dsched.sim.engine import SimEngineConfig
from dsched.sim.faults import FaultPlan, run_faults
from dsched.sim.workload import PoissonArrivals, generate_workload
from dsched.trace import AnyRecord, Changes, RingRecorder, as_document, as_text, replay, tell
from dsched.trace.records import (
    Ended,
    HandedOff,
    Lost,
    Picked,
    PrefillChosen,
    Recovered,
    Released,
)


def recorded_faults(seed: int, plan: FaultPlan | None = None) -> list[AnyRecord]:
    recorder = RingRecorder(max_records=1 << 20)
    run_faults(seed, plan, recorder=recorder)
    return recorder.records()  # type: ignore[return-value]


def recorded_load(seed: int, *, rate_per_s: float, num_requests: int) -> list[AnyRecord]:
    """A cluster with little room, so that requests are held."""
    recorder = RingRecorder(max_records=1 << 20)
    cluster = SimCluster(
        num_engines=2,
        engine=SimEngineConfig(
            num_dp_ranks=2, kv_capacity_tokens=16_000, max_running_requests=4, max_model_len=16_000
        ),
        seed=seed,
        recorder=recorder,
    )
    workload = generate_workload(
        num_requests=num_requests, seed=seed, arrivals=PoissonArrivals(rate_per_s=rate_per_s)
    )
    cluster.replay(workload)
    return recorder.records()  # type: ignore[return-value]


def through_the_wire(records: list[AnyRecord]) -> list[AnyRecord]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(records), type=list[AnyRecord])


@pytest.mark.slow
@settings(max_examples=12)
@given(
    seed=st.integers(0, 1 << 20),
    num_ranks=st.integers(1, 3),
    num_prefill=st.sampled_from([0, 0, 2]),
)
def test_runs_under_faults_replay_without_a_difference(
    seed: int, num_ranks: int, num_prefill: int
) -> None:
    """Also after the records were encoded and decoded, and with a prefill pool."""
    plan = FaultPlan(num_requests=25, num_ranks=num_ranks, num_prefill_engines=num_prefill)
    records = recorded_faults(seed, plan)

    result = replay(through_the_wire(records))

    assert result.first is None
    assert result.num_passed == 0
    kinds = (Picked, Released, Recovered, PrefillChosen)
    assert sum(result.num_decisions.values()) >= sum(isinstance(r, kinds) for r in records)


@pytest.mark.parametrize("seed", range(6))
def test_seeds_meet_every_kind_of_decision(seed: int) -> None:
    """Each seed replays; together they decide everything that there is to decide (see below)."""
    assert replay(recorded_faults(seed)).first is None


@pytest.mark.slow
def test_the_generator_reaches_every_kind_of_decision() -> None:
    """Every kind, and each way of noticing but a busy engine's."""
    runs = [recorded_faults(seed) for seed in range(6)]
    runs.append(recorded_faults(3, FaultPlan(num_prefill_engines=2)))
    counts: dict[str, int] = {}
    for records in runs:
        for kind, count in replay(records).num_decisions.items():
            counts[kind] = counts.get(kind, 0) + count
    layers = {record.layer for records in runs for record in records if isinstance(record, Lost)}

    assert all(count > 0 for count in counts.values()), counts
    assert {"socket", "progress", "rank", "drain"} <= layers


@pytest.mark.slow
@settings(max_examples=10)
@given(seed=st.integers(0, 1 << 20), rate=st.sampled_from([3.0, 20.0]))
def test_loads_with_held_requests_replay_without_a_difference(seed: int, rate: float) -> None:
    """Prices are learned from reports meanwhile."""
    records = recorded_load(seed, rate_per_s=rate, num_requests=60)

    assert replay(through_the_wire(records)).first is None


@pytest.mark.slow
def test_another_price_is_found() -> None:
    """The first decision that another price changes is named, with the costs behind it."""
    records = recorded_load(1, rate_per_s=20.0, num_requests=200)

    result = replay(records, Changes(request_ns=0.0, kv_token_ns=1.0))

    assert result.first is not None
    record = records[result.first.record]
    assert isinstance(record, Picked | Released)
    assert result.first.request_id == record.request_id
    assert result.first.name == "rank"
    assert replay(records, Changes()).first is None


@pytest.mark.parametrize("num_prefill_engines", [0, 2])
def test_every_request_has_its_story(num_prefill_engines: int) -> None:
    """Each can be told: it begins, it ends, and no line is wider than a terminal."""
    records = recorded_faults(3, FaultPlan(num_prefill_engines=num_prefill_engines))
    ids = {record.request_id for record in records if isinstance(record, Ended)}

    for request_id in ids:
        story = tell(records, request_id)
        assert story is not None
        assert (story.has_start, story.has_end) == (True, True)
        text = as_text(story)
        assert all(len(line) <= 80 for line in text.splitlines()), text
        is_handed_off = any(isinstance(moment.record, HandedOff) for moment in story.moments)
        assert ("handed off: the client saw a gap" in text) == is_handed_off
        has_choice = any(isinstance(moment.record, PrefillChosen) for moment in story.moments)
        assert (" prefill: " in text) == has_choice
        assert msgspec.json.encode(as_document(story))


def test_a_controller_without_a_recorder_decides_the_same() -> None:
    """Recording changes nothing that a client hears."""
    plain = run_faults(11)
    recorded = run_faults(11, recorder=RingRecorder())

    assert plain.digest == recorded.digest
