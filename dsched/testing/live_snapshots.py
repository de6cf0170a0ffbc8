"""Live pictures for tests of their readers: any number of engines and ranks, the same each time."""

import asyncio
from base64 import b64encode
from dataclasses import dataclass, field

import msgspec
import numpy as np

from dsched.frontdoor.live import (
    LiveBudgets,
    LiveCount,
    LiveEngines,
    LiveEvent,
    LiveExpertLoad,
    LiveFaults,
    LiveFeature,
    LiveHistory,
    LiveLatency,
    LivePool,
    LiveRanks,
    LiveSnapshot,
    LiveTraffic,
)

START_S = 1_790_000_000.0
KV_CAPACITY_TOKENS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a made-up cluster looks like."""

    num_engines: int = 4
    ranks_per_engine: int = 4
    states: dict[int, int] = field(default_factory=dict)
    """Engine number to state; others are up."""
    reason: str = "no progress for 3.0 s"
    num_layers: int = 4
    num_experts: int = 16


def make_snapshot(shape: Shape | None = None, *, seq: int = 1) -> LiveSnapshot:
    """A snapshot whose loads move with `seq`."""
    shape = shape or Shape()
    num_ranks = shape.num_engines * shape.ranks_per_engine
    rank = np.arange(num_ranks)
    running = (7 * rank + 3 * seq) % 40
    kv_tokens = running * 2_000 + rank % 97
    engine = rank // shape.ranks_per_engine
    state = [shape.states.get(int(each), 0) for each in engine]
    num_up = sum(shape.states.get(each, 0) == 0 for each in range(shape.num_engines))
    return LiveSnapshot(
        seq=seq,
        time_s=START_S + seq,
        uptime_s=100.0 + seq,
        period_s=1.0,
        dsched_version="9.9",
        instance_id="feedfacecafe0123",
        is_simulated=True,
        epoch=5,
        num_held=2,
        pools=(
            LivePool(
                name="main",
                model="some-model",
                role="combined",
                num_engines=shape.num_engines,
                num_engines_up=num_up,
                num_ranks=num_ranks,
                num_ranks_up=state.count(0),
                num_running=int(running.sum()),
                num_waiting=num_ranks,
                num_kv_tokens=int(kv_tokens.sum()),
                kv_capacity_tokens=num_ranks * KV_CAPACITY_TOKENS,
                balance=0.87,
                max_running_requests=None,
                absorbs_loss=True,
                spare_reason="room is kept for the loss of engine-0",
            ),
        ),
        engines=LiveEngines(
            engine_id=[f"engine-{each}" for each in range(shape.num_engines)],
            pool=[0] * shape.num_engines,
            kind=["sim"] * shape.num_engines,
            state=[shape.states.get(each, 0) for each in range(shape.num_engines)],
            reason=[
                shape.reason if shape.states.get(each, 0) else ""
                for each in range(shape.num_engines)
            ],
        ),
        ranks=LiveRanks(
            engine=engine.tolist(),
            dp_rank=(rank % shape.ranks_per_engine).tolist(),
            state=state,
            running=running.tolist(),
            waiting=(rank % 2).tolist(),
            kv_tokens=kv_tokens.tolist(),
            kv_capacity=[KV_CAPACITY_TOKENS] * num_ranks,
            step_us=(20_000 + 100 * running).tolist(),
            report_age_ms=[None if each == 0 else 40 for each in range(num_ranks)],
            dispatched=(rank + seq).tolist(),
        ),
        traffic=(
            LiveTraffic(
                model="some-model",
                num_open=31,
                requests_per_s=12.5,
                errors_per_s=0.0,
                output_tokens_per_s=4_321.0,
                ttft=LiveLatency(p50_ms=120.0, p90_ms=300.0, p99_ms=900.0),
                tpot=LiveLatency(p50_ms=22.0, p90_ms=30.0, p99_ms=55.0),
            ),
        ),
        budgets=LiveBudgets(
            step_budget_ms=25.0,
            reprefill_tokens_per_rank=8_192,
            num_agents=3,
            num_agents_heard=2,
            features=(LiveFeature(name="verify_length", num_with=2, num_missing=1),),
        ),
        faults=LiveFaults(
            handoffs=(LiveCount(name="continue, engine_lost", count=7),),
            gap=LiveLatency(p50_ms=80.0, p90_ms=150.0, p99_ms=400.0),
            num_waiting_handoffs=0,
            num_fenced_tokens=3,
            num_refused=1,
            num_policy_errors=0,
            held_up_ms=0,
            is_journal_durable=True,
            is_registered=True,
            is_leader=True,
        ),
        events=(
            LiveEvent(seq=1, time_s=START_S, level="info", subject="engine-0", text="up"),
            LiveEvent(
                seq=2, time_s=START_S + 1, level="error", subject="engine-1", text=shape.reason
            ),
        ),
        expert_load=_expert_load(shape),
    )


def _expert_load(shape: Shape) -> tuple[LiveExpertLoad, ...]:
    if shape.num_layers == 0:
        return ()
    cells = np.arange(shape.num_layers * shape.num_experts, dtype=np.int64) * 37 % 256
    return (
        LiveExpertLoad(
            engine_id="engine-0",
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            num_steps=50,
            age_s=1.0,
            is_simulated=True,
            hottest=[2.0 + layer for layer in range(shape.num_layers)],
            balance=None,
            cells=b64encode(cells.astype(np.uint8).tobytes()).decode(),
        ),
    )


class MadeUpSource:
    """A `LiveSource` that says what a test tells it to."""

    def __init__(self, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.data: bytes | None = None
        self._news = asyncio.Event()
        self._is_over = False
        self.seq = 0

    def push(self, data: bytes | None = None) -> None:
        """Send a snapshot, the next one by default."""
        self.seq += 1
        if data is None:
            data = msgspec.json.encode(make_snapshot(self.shape, seq=self.seq))
        self.data = data
        self._tell()

    def end(self) -> None:
        """Let all streams end."""
        self._is_over = True
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def encoded(self) -> bytes | None:
        return self.data

    async def next_encoded(self) -> bytes | None:
        if not self._is_over:
            await self._news.wait()
        return None if self._is_over else self.data

    def history(self) -> LiveHistory:
        return LiveHistory(
            first_seq=1,
            num_samples=0,
            num_ranks=0,
            period_s=1.0,
            rank_keys=[],
            state="",
            kv_share="",
            running="",
            step_us="",
        )
