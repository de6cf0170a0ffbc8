"""The live picture's parts: percentiles, columns, history, events, expert load, routes."""

import asyncio
from base64 import b64decode
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from dsched.controller import EngineStatus, HandoffGap, RankStatus
from dsched.drivers.base import EngineCapabilities, EngineDescription, ExpertLoad
from dsched.faults import EngineSpec, Membership, PoolSpec
from dsched.frontdoor.admin import make_admin_app
from dsched.frontdoor.live import STATES, LiveHistory, LiveSnapshot, column_fault, decode_snapshot
from dsched.frontdoor.live_events import MAX_EVENTS, EventRing, Watched
from dsched.frontdoor.live_routes import MAX_READERS, live_routes, read_page, security_headers
from dsched.frontdoor.live_sampler import (
    MAX_HISTORY_SAMPLES,
    MAX_RANKS,
    NO_RANK,
    RankColumns,
    RankHistory,
    expert_load_map,
    latency,
)
from dsched.frontdoor.stats import LatencyHistogram
from dsched.ids import DpRank, EngineId
from dsched.sim.expert_load import WINDOW_NS, SimExpertLoad
from dsched.states import RankState
from dsched.testing.live_snapshots import MadeUpSource, Shape, make_snapshot

MS = 1_000_000


def rank(number: int, *, running: int = 0, kv: int = 0, capacity: int | None = 100) -> RankStatus:
    return RankStatus(
        dp_rank=DpRank(number),
        state=RankState.UP,
        num_running=running,
        num_waiting=0,
        num_kv_tokens=kv,
        kv_capacity_tokens=capacity,
        step_ns=5_000_000,
        report_age_ns=None,
        num_dispatched=0,
    )


def engine(name: str, *ranks: RankStatus, state: RankState = RankState.UP) -> EngineStatus:
    return EngineStatus(
        engine_id=EngineId(name),
        pool="p",
        model="m",
        kind="sim",
        state=state,
        reason="" if state is RankState.UP else "why",
        ranks=tuple(ranks),
    )


def columns_of(*engines: EngineStatus) -> RankColumns:
    columns = RankColumns()
    for each in engines:
        columns.add(each)
    return columns


def test_states_have_the_names_of_the_code() -> None:
    """Positions on the wire are `RankState`'s numbers."""
    assert list(STATES) == [state.name.lower() for state in RankState]


# ---- percentiles


@given(st.lists(st.integers(1, 9_000_000_000), min_size=1, max_size=200))
def test_percentiles_lie_in_the_bucket_of_the_real_ones(values: Sequence[int]) -> None:
    """Between the bounds around numpy's percentile of the same values."""
    histogram = LatencyHistogram([ms * MS for ms in (1, 10, 100, 1_000, 10_000)])
    for value in values:
        histogram.observe(value)
    found = latency(histogram.bounds_ns, histogram.counts)

    bounds = [0, *(bound / MS for bound in histogram.bounds_ns)]
    for share, shown in ((50, found.p50_ms), (90, found.p90_ms), (99, found.p99_ms)):
        real = np.percentile(values, share, method="inverted_cdf") / MS
        place = int(np.searchsorted(bounds, real, side="left"))
        assert shown is not None
        assert bounds[place - 1] <= shown <= bounds[place]


def test_no_value_has_no_percentile() -> None:
    """Not zero."""
    assert latency((MS,), (0, 0)).p50_ms is None


def test_above_the_last_bound_is_that_bound() -> None:
    """The histogram knows no more."""
    assert latency((MS, 2 * MS), (0, 0, 5)).p99_ms == 2.0


# ---- columns


def pool_of(columns: RankColumns, prices: tuple[float, float] = (1.0, 0.0)) -> object:
    return columns.pool(
        "p",
        model="m",
        role="combined",
        prices=prices,
        max_running_requests=None,
        absorbs_loss=False,
        spare_reason="",
    )


def test_balance_is_mean_over_largest() -> None:
    """Of the ranks that are up, in the prices that routing uses; not known while nothing runs."""
    columns = columns_of(
        engine("a", rank(0, running=4), rank(1, running=2)),
        engine("b", rank(0, running=0, kv=60)),
    )
    idle = pool_of(columns_of(engine("a", rank(0))))

    assert pool_of(columns).balance == pytest.approx(0.5)  # type: ignore[attr-defined]
    assert pool_of(columns, (0.0, 1.0)).balance == pytest.approx(1 / 3)  # type: ignore[attr-defined]
    assert idle.balance is None  # type: ignore[attr-defined]


def test_unknown_capacity_is_not_a_number() -> None:
    """One rank that does not say makes the sum unknown."""
    pool = pool_of(columns_of(engine("a", rank(0), rank(1, capacity=None))))

    assert pool.kv_capacity_tokens is None  # type: ignore[attr-defined]
    engines, ranks = columns_of(engine("a", rank(0, capacity=None))).tables(["p"])
    assert ranks.kv_capacity == [None]
    assert engines.engine_id == ["a"]


def test_too_many_ranks_are_counted() -> None:
    """The message stays bounded."""
    columns = columns_of(engine("a", *(rank(i) for i in range(MAX_RANKS + 3))))
    _, ranks = columns.tables(["p"])

    assert len(ranks.engine) == MAX_RANKS
    assert ranks.num_left_out == 3


def test_no_rank_has_empty_columns() -> None:
    """A cluster before its first engine."""
    engines, ranks = columns_of(engine("a", state=RankState.DOWN)).tables(["p"])

    assert ranks.running == []
    assert engines.reason == ["why"]
    assert column_fault(make_snapshot(Shape(num_engines=0))) is None


# ---- history


def read(history: RankHistory, num_samples: int) -> LiveHistory:
    return history.read(last_seq=num_samples, period_s=1.0)


def cells(text: str, dtype: str, shape: tuple[int, int]) -> list[list[int]]:
    rows: list[list[int]] = np.frombuffer(b64decode(text), dtype).reshape(shape).tolist()
    return rows


def test_history_keeps_the_latest_in_order() -> None:
    """A ring: after its size the oldest goes."""
    history = RankHistory()
    num_samples = MAX_HISTORY_SAMPLES + 7
    for step in range(num_samples):
        history.add(columns_of(engine("a", rank(0, running=step))))
    found = read(history, num_samples)

    running = cells(found.running, "<u2", (found.num_samples, 1))
    assert found.num_samples == MAX_HISTORY_SAMPLES
    assert [row[0] for row in running] == list(range(7, num_samples))
    assert found.first_seq == 8


def test_history_follows_ranks_that_come_and_go() -> None:
    """Who stays keeps its past; who comes had none; who leaves is forgotten."""
    history = RankHistory()
    history.add(columns_of(engine("a", rank(0, kv=100)), engine("b", rank(0, kv=50))))
    history.add(columns_of(engine("b", rank(0, kv=0)), engine("c", rank(0, kv=20))))
    found = read(history, 2)

    assert found.rank_keys == ["b/0", "c/0"]
    assert cells(found.kv_share, "u1", (2, 2)) == [[128, 0], [0, 51]]
    assert cells(found.state, "u1", (2, 2)) == [[0, NO_RANK], [0, 0]]


def test_history_of_many_ranks_is_shorter() -> None:
    """Bounded in cells, not only in samples."""
    history = RankHistory()
    many = columns_of(engine("a", *(rank(i) for i in range(8_000))))
    for _ in range(60):
        history.add(many)

    assert read(history, 60).num_samples == 50


# ---- events


def watched(**changes: object) -> Watched:
    values: dict[str, object] = {
        "num_refused": 0,
        "num_errors": 0,
        "num_policy_errors": 0,
        "num_fenced_tokens": 0,
        "absorbs_loss": {"p": True},
        "spare_reason": {"p": "another loss cannot be absorbed"},
        "is_journal_durable": True,
        "is_registered": True,
        "is_leader": True,
    }
    return Watched(**(values | changes))  # type: ignore[arg-type]


def texts(ring: EventRing) -> list[tuple[str, str, str]]:
    return [(event.level, event.subject, event.text) for event in ring.events()]


def test_counters_become_lines_when_they_move() -> None:
    """The first sample says nothing: what was before is not news."""
    ring = EventRing()
    ring.note_sample(watched(num_refused=5), 1.0)
    assert texts(ring) == []
    ring.note_sample(watched(num_refused=9, num_errors=1), 2.0)
    ring.note_sample(watched(num_refused=9, num_errors=1), 3.0)

    assert texts(ring) == [
        ("warning", "front door", "4 requests refused"),
        ("error", "front door", "1 request ended in error"),
    ]


def test_conditions_become_lines_when_they_turn() -> None:
    """Each way once."""
    ring = EventRing()
    for is_good in (True, False, False, True):
        ring.note_sample(watched(is_journal_durable=is_good, absorbs_loss={"p": is_good}), 1.0)

    assert [(level, subject) for level, subject, _ in texts(ring)] == [
        ("warning", "pool p"),
        ("warning", "journal"),
        ("info", "pool p"),
        ("info", "journal"),
    ]
    assert texts(ring)[0][2] == "another loss cannot be absorbed"


def test_a_thousand_handoffs_are_one_line() -> None:
    """With the longest pause."""
    ring = EventRing()
    for index in range(1_000):
        ring.note_handoff("continue", HandoffGap(detect_ns=index * MS, dispatch_ns=0, prefill_ns=0))
    ring.note_sample(watched(), 1.0)

    assert texts(ring) == [
        ("warning", "handoff", "1000 requests go on elsewhere (continue), longest pause 1.00 s")
    ]


def test_changes_of_engines_are_named() -> None:
    """By state and reason, up to a screenful; the ring is bounded whatever happens."""
    names = [f"e{index:03}" for index in range(100)]
    specs = tuple(EngineSpec(engine_id=EngineId(name), model="m") for name in names)
    membership = Membership([PoolSpec(name="p", model="m", engines=specs)])
    ring = EventRing()
    for name in names:
        membership.apply_up(
            EngineDescription(
                engine_id=EngineId(name),
                kind="sim",
                model="m",
                max_model_len=1,
                vocab_size=1,
                num_dp_ranks=1,
                kv_capacity_tokens=1,
                max_running_requests=1,
                capabilities=EngineCapabilities(),
            )
        )
    ring.note_membership(membership, 1.0)
    membership.apply_down(EngineId("e007"), "killed\n" * 100)
    ring.note_membership(membership, 2.0)

    assert len(texts(ring)) == 18
    assert texts(ring)[16] == ("warning", "cluster", "84 more engines changed their state")
    level, subject, text = texts(ring)[17]
    assert (level, subject) == ("error", "e007")
    assert text.startswith("down: killed")
    assert len(text) <= 240
    for index in range(200):
        ring.add(3.0, "info", "x", str(index))
    assert len(ring.events()) == MAX_EVENTS
    assert ring.events()[-1].seq == 218


# ---- expert load


def test_expert_load_is_scaled_by_layer() -> None:
    """Cells over the largest of the layer, hottest over the mean; an idle layer is zero."""
    load = ExpertLoad(
        counts=np.array([[10, 30, 20, 0], [0, 0, 0, 0]]),
        num_steps=7,
        time_ns=1_000_000_000,
        balance=np.array([0.25, 1.0]),
    )
    shown = expert_load_map("e", load, now_ns=3_000_000_000)

    assert cells(shown.cells, "u1", (2, 4)) == [[85, 255, 170, 0], [0, 0, 0, 0]]
    assert shown.hottest == [2.0, 0.0]
    assert shown.balance == [0.25, 1.0]
    assert shown.age_s == 2.0


def test_simulated_expert_load_adds_up() -> None:
    """Each token goes to `top_k` experts of each layer; the window ends by the clock; same seed,
    same load."""
    first, second = (
        SimExpertLoad(num_layers=3, num_experts=16, top_k=4, seed=seed) for seed in (5, 5)
    )
    for each in (first, second):
        assert each.read(now_ns=0, num_steps=0, num_tokens=0) is None
        assert each.read(now_ns=WINDOW_NS - 1, num_steps=1, num_tokens=10) is None
    load = first.read(now_ns=WINDOW_NS, num_steps=9, num_tokens=1_001)
    twin = second.read(now_ns=WINDOW_NS, num_steps=9, num_tokens=1_001)

    assert load is not None
    assert twin is not None
    assert load.counts.sum(axis=1).tolist() == [4_004] * 3
    assert load.is_simulated
    assert load.num_steps == 9
    assert (load.counts == twin.counts).all()
    assert first.read(now_ns=3 * WINDOW_NS, num_steps=9, num_tokens=1_001) is load


# ---- routes


def client_of(source: MadeUpSource) -> TestClient:
    return TestClient(make_admin_app(workers=list, config=dict, live=source))


def test_nothing_yet_is_said() -> None:
    """503 before the first sample; then the snapshot as it is."""
    source = MadeUpSource()
    client = client_of(source)

    answer = client.get("/admin/v1/live")
    assert answer.status_code == 503
    assert "no sample" in answer.json()["error"]
    source.push()
    answer = client.get("/admin/v1/live")
    snapshot = decode_snapshot(answer.content, source="x")
    assert snapshot == make_snapshot(source.shape, seq=1)
    assert answer.headers["cache-control"] == "no-store"


def test_history_is_served() -> None:
    """In its own form."""
    answer = client_of(MadeUpSource()).get("/admin/v1/live/history")

    assert msgspec.json.decode(answer.content, type=LiveHistory).num_samples == 0


def test_page_may_run_its_own_script_only() -> None:
    """The policy names the hashes of the one script and the one style; no outside address."""
    answer = client_of(MadeUpSource()).get("/")
    policy = answer.headers["content-security-policy"]

    assert answer.content == read_page()
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert security_headers(read_page())["content-security-policy"] == policy
    page = answer.text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in page
    assert "https://" not in page


async def test_a_stream_gives_each_snapshot_and_ends() -> None:
    """The latest first; a slow reader skips, and is let go when the source ends."""
    source = MadeUpSource()
    source.push()
    stream_route = live_routes(source)[3]
    scope = {"type": "http", "method": "GET", "headers": [], "path": stream_route.path}
    sent: list[bytes] = []
    news = asyncio.Event()

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def send(message: dict[str, object]) -> None:
        body = message.get("body")
        if isinstance(body, bytes) and body:
            sent.append(body)
            news.set()

    task = asyncio.create_task(stream_route.handle(scope, receive, send))  # type: ignore[arg-type]
    await news.wait()
    news.clear()
    source.push()
    source.push()
    await news.wait()
    source.end()
    await task

    seqs = [
        msgspec.json.decode(event.removeprefix(b"data: "), type=LiveSnapshot).seq for event in sent
    ]
    assert seqs[0] == 1
    assert seqs[-1] == 3


async def test_too_many_readers_are_refused() -> None:
    """A limit, not a slow death; a reader that leaves makes room."""
    source = MadeUpSource()
    stream_route = live_routes(source)[3]
    scope = {"type": "http", "method": "GET", "headers": [], "path": stream_route.path}
    statuses: list[object] = []

    async def receive() -> dict[str, object]:
        await asyncio.Event().wait()
        return {}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    tasks = [
        asyncio.create_task(stream_route.handle(scope, receive, send))  # type: ignore[arg-type]
        for _ in range(MAX_READERS + 1)
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    assert statuses.count(200) == MAX_READERS
    assert statuses.count(503) == 1
    source.end()
    await asyncio.gather(*tasks)
