"""`dsched explain` and `dsched replay` over files: what they print, and what bad input gets."""

import json
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_line import run_dsched as dsched

from dsched.cli.replay import parse_changes
from dsched.controller import ControllerSettings
from dsched.errors import ConfigError
from dsched.rng import stream
from dsched.sim import SimCluster, generate_workload
from dsched.sim.engine import SimEngineConfig
from dsched.sim.faults import FaultPlan, run_faults
from dsched.sim.recording import recording
from dsched.sim.workload import ClosedLoop
from dsched.trace import RingRecorder, Story, TraceReader, as_text, newest_request_ids, tell
from dsched.trace.files import _FRAME_HEAD, MAGIC
from dsched.trace.records import HandedOff, Held, Picked


def newer_file() -> bytes:
    """A trace of a later dsched, with a field that this one does not know."""
    header = msgspec.msgpack.encode({"format": 99, "dsched_version": "9.9", "new": 1})
    return MAGIC + _FRAME_HEAD.pack(len(header), zlib.crc32(header)) + header


NEWER = newer_file()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under faults: requests are held, lost, rationed and handed off."""
    path = tmp_path_factory.mktemp("trace") / "faults.dtrace"
    with recording(path, source="sim faults", seed=3, options={}) as recorder:
        run_faults(3, FaultPlan(), recorder=recorder)
    return path


def ids_with(path: Path, kind: type) -> list[str]:
    return list(dict.fromkeys(r.request_id for r in TraceReader(path) if isinstance(r, kind)))


def test_explain_tells_of_a_handoff(trace: Path) -> None:
    """The dead engine, the layer, the gap's parts, why the new rank, and the end."""
    request_id = ids_with(trace, HandedOff)[0]

    done = dsched("explain", request_id, "--trace", trace)

    assert done.returncode == 0, done.stderr
    text = done.stdout
    unwrapped = " ".join(text.split())
    assert f"request {request_id}\n" in text
    assert "LOST e" in unwrapped
    assert "Detection layer " in unwrapped
    assert "handed off: the client saw a gap of " in unwrapped
    for part in ("= detect ", " + dispatch ", " + prefill "):
        assert part in unwrapped
    after_loss = unwrapped[unwrapped.index("LOST") :]
    assert "router: e" in after_loss
    assert "out, down: e" in after_loss or "out, lost this request before: " in after_loss
    assert "ended: " in after_loss
    assert all(len(line) <= 80 for line in text.splitlines())


def test_explain_as_json_has_the_same_numbers(trace: Path) -> None:
    """Costs of every candidate, the margin, and the parts of the gap."""
    request_id = ids_with(trace, HandedOff)[0]

    document = json.loads(dsched("explain", request_id, "--trace", trace, "--json").stdout)

    assert document["request_id"] == request_id
    (handoff, *_) = [m for m in document["moments"] if m["kind"] == "handed_off"]
    assert min(handoff["detect_ns"], handoff["dispatch_ns"], handoff["prefill_ns"]) >= 0
    decided = [m for m in document["moments"] if m["kind"] == "decided"]
    assert len(decided) >= 2
    for moment in decided:
        decision = moment["decision"]
        eligible = [c for c in decision["candidates"] if not c["verdict"]]
        assert len(eligible) == moment["num_eligible"]
        if decision["margin_ns"] is not None:
            chosen, second = eligible[:2]
            assert chosen["name"] == decision["chosen"]
            assert decision["margin_ns"] == second["cost_ns"] - chosen["cost_ns"] >= 0
            assert chosen["cost_ns"] == pytest.approx(moment["cost_ns"])
    assert "cells" not in decided[0]


def test_the_first_candidate_is_the_routers_choice(trace: Path) -> None:
    """What people are shown and what compiled code chose agree, ties and room included."""
    records = list(TraceReader(trace))
    num_checked = 0
    for request_id in ids_with(trace, Picked):
        story = tell(records, request_id)
        assert story is not None
        for moment in story.moments:
            record, decision = moment.record, moment.decision
            if not isinstance(record, Picked) or record.rank is None:
                continue
            assert decision is not None
            assert decision.candidates[0].rank == record.rank
            assert decision.candidates[0].cost.total_ns == record.cost_ns
            assert len(decision.eligible) == record.num_eligible
            num_checked += 1
    assert num_checked > 50


def test_held_requests_are_told_how_long_they_waited(trace: Path) -> None:
    """And why: no rank had room."""
    records = list(TraceReader(trace))
    story = tell(records, ids_with(trace, Held)[0])
    assert story is not None

    text = " ".join(as_text(story).split())

    assert "waits at the router" in text
    assert " at the router; now e" in text


def test_a_request_that_still_runs_is_told_so_far(trace: Path) -> None:
    """With a line that says so; one whose beginning is gone says that."""
    records = list(TraceReader(trace))
    request_id = ids_with(trace, HandedOff)[0]
    places = [n for n, each in enumerate(records) if getattr(each, "request_id", "") == request_id]

    running = tell(records[: places[-1]], request_id)
    late = tell(records[places[1] :], request_id)

    assert running is not None
    assert late is not None
    assert as_text(running).endswith("It has not ended yet.\n")
    assert "The trace no longer has its beginning." in as_text(late)


def test_no_text_and_no_token_id_is_in_a_trace(trace: Path) -> None:
    """Records have names and counts; whatever is a list of numbers is ranks or cells."""
    for record in TraceReader(trace):
        for name in record.__struct_fields__:
            assert "token_ids" not in name
            assert "prompt" not in name or name.startswith("num_")


def test_replay_finds_nothing(trace: Path) -> None:
    """Status 0 and the number of decisions."""
    done = dsched("replay", trace)

    assert done.returncode == 0, done.stderr
    assert "differences: 0\n" in done.stdout
    assert "sim faults, seed 3" in done.stdout


def test_replay_with_another_weight_names_the_first_decision(trace: Path) -> None:
    """Status 1, which request, which number, and the costs behind it; as JSON too."""
    changes = ("--set", "routing.kv_token_cost_ns=50000")
    done = dsched("replay", trace, *changes)
    document = json.loads(dsched("replay", trace, *changes, "--json", "-").stdout)

    assert done.returncode == 1
    first = document["first"]
    assert first["name"] in ("rank", "request")
    assert f"first: {first['kind']} of request {first['request_id']}, record" in done.stdout
    assert f"{first['name']}: recorded {first['recorded']}, now {first['replayed']}" in done.stdout
    assert 0 < sum(document["num_different"].values()) < sum(document["num_decisions"].values())


@pytest.mark.slow
def test_a_cut_file_is_used_as_far_as_it_goes(trace: Path, tmp_path: Path) -> None:
    """A warning names the cut; the rest replays."""
    cut = tmp_path / "cut.dtrace"
    long = tmp_path / "long.dtrace"
    with recording(long, source="sim faults", seed=5, options={}) as recorder:
        for seed in range(12):
            run_faults(seed, FaultPlan(num_requests=60), recorder=recorder)
    cut.write_bytes(long.read_bytes()[:-100])

    done = dsched("replay", cut)

    assert done.returncode == 0, done.stderr
    assert "cut off in the middle of a frame; used the " in done.stderr
    assert "differences: 0" in done.stdout


@pytest.mark.parametrize("command", [("replay",), ("explain", "r", "--trace")])
@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"a,b\n1,2\n", "is not a decision trace"),
        (b"DSCHEDT\n\x05", "cut off before its header"),
        (NEWER, "was written by dsched 9.9 in format 99; this dsched reads formats up to 2"),
    ],
)
def test_what_is_no_trace_is_one_line(
    command: tuple[str, ...], data: bytes, found: str, tmp_path: Path
) -> None:
    """Status 2, no traceback."""
    path = tmp_path / "x"
    path.write_bytes(data)

    done = dsched(*command, path)

    assert (done.returncode, done.stdout) == (2, "")
    assert found in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_an_unknown_request_gets_a_hint(trace: Path) -> None:
    """Status 1, one line with ids that are there."""
    done = dsched("explain", "nobody", "--trace", trace)

    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("dsched: request 'nobody' is not in ")
    assert newest_request_ids(list(TraceReader(trace)), 1)[0] in line


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("routing.kv_token_cost_ns=x", "'x' is not a number from 0 up"),
        ("routing.kv_token_cost_ns=-1", "'-1' is not a number from 0 up"),
        ("routing.kv_token_cost_ns", "'' is not a number from 0 up"),
        ("routing.speed=1", "replay can change routing.request_cost_us, "),
        ("routing.policy=mine:Policy", "replay knows least_requests, least_kv"),
    ],
)
def test_changes_that_are_none_are_refused(text: str, found: str) -> None:
    """With what can be changed."""
    with pytest.raises(ConfigError, match=found):
        parse_changes([text])


def test_a_folder_that_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    """Not after minutes of simulation."""
    done = dsched("sim", "faults", "--record", tmp_path / "none" / "x.dtrace")

    assert done.returncode == 2
    assert "cannot be written" in done.stderr


@pytest.mark.slow
def test_an_hour_of_traffic_replays_without_a_difference(tmp_path: Path) -> None:
    """An hour of virtual time through `dsched sim serve --record`; and another weight is found.

    Bursts of six short answers every ten seconds: what takes long to simulate is long answers.
    """
    path, requests = tmp_path / "hour.dtrace", tmp_path / "hour.csv"
    rng = stream(5, "hour")
    rows = [
        f"{burst * 10.0 + place * 0.001:.3f},{rng.integers(50, 6_000)},{rng.integers(4, 30)}"
        for burst in range(360)
        for place in range(6)
    ]
    requests.write_text("t_s,input_tokens,output_tokens\n" + "\n".join(rows) + "\n")

    recorded = dsched("sim", "serve", "--trace", requests, "--ranks", 4, "--record", path)
    same = dsched("replay", path, "--json", "-")
    other = dsched("replay", path, "--set", "routing.kv_token_cost_ns=2000")

    assert recorded.returncode == 0, recorded.stderr
    result = json.loads(same.stdout)
    assert (same.returncode, result["first"], result["num_passed"]) == (0, None, 0)
    assert result["span_s"] > 3_590
    assert sum(result["num_decisions"].values()) >= 2_160
    assert other.returncode == 1
    assert "first: route of request r" in other.stdout
    assert "  rank: recorded sim-000/" in other.stdout
    assert " ns now, sim-000/" in other.stdout


def test_held_for_spare_and_held_behind_others_are_told_apart() -> None:
    """Two engines of one rank with two places: half is kept, and who comes later waits in line."""
    ring = RingRecorder()
    cluster = SimCluster(
        num_engines=2,
        engine=SimEngineConfig(num_dp_ranks=1, max_running_requests=2),
        settings=ControllerSettings(spare="n-1"),
        recorder=ring,
    )
    workload = generate_workload(num_requests=5, seed=1, arrivals=ClosedLoop(max_concurrency=5))
    cluster.replay(workload)
    records = ring.records()

    texts = [" ".join(as_text(story_of(records, f"r{n:09d}")).split()) for n in range(5)]

    kept = "waits at the router: what is free is kept for the loss of an EP group"
    behind = "waits at the router: others wait already and go first"
    assert [kept in text for text in texts] == [False, False, True, False, False]
    assert [behind in text for text in texts] == [False, False, False, True, True]


def story_of(records: list[Any], request_id: str) -> Story:
    story = tell(records, request_id)
    assert story is not None
    return story
