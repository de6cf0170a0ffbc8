"""Samples the cluster once a second for the live picture, without getting in the way of tokens.

In: the controller, the front door's counters, and a few functions for what lies beyond them. Out:
the latest `LiveSnapshot`, already encoded, and a `LiveHistory` of the ranks.

The token path shares the event loop, so a sample is taken in slices of `RANKS_A_SLICE` ranks with
a turn of the loop after each, and the next one comes no sooner than `REST_FACTOR` times what the
last one cost: sampling never takes more than two percent of the loop, however many ranks there
are. A snapshot is encoded once, when the first reader asks for it.

Cost of a sample: O(ranks); memory: `MAX_HISTORY_CELLS` cells of 8 bytes.
"""

import asyncio
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from dsched.clock import Clock, thread_time_ns, wall_time_s
from dsched.controller import Controller, EngineStatus, HandoffGap
from dsched.controller.spare import UNKNOWN_CAPACITY
from dsched.drivers.base import ExpertLoad
from dsched.errors import task_fault
from dsched.faults import MembershipView
from dsched.frontdoor.live import (
    LiveBudgets,
    LiveCount,
    LiveEngines,
    LiveExpertLoad,
    LiveFaults,
    LiveHistory,
    LiveLatency,
    LivePool,
    LiveRanks,
    LiveSnapshot,
    LiveTraffic,
)
from dsched.frontdoor.live_events import EventRing, Watched
from dsched.frontdoor.stats import FrontDoorStats, LatencyHistogram, ModelStats, Outcome
from dsched.states import RankState

log = structlog.get_logger(__name__)

S: Final = 1_000_000_000
PERIOD_S: Final = 1.0
"""Between two samples. Shorter: more work beside the tokens. Longer: operators look at the past."""
REST_FACTOR: Final = 50
"""A sample is followed by at least so many times its own cost without one."""
RANKS_A_SLICE: Final = 64
"""Ranks looked at before other work of the event loop gets its turn; under a millisecond."""
MAX_RANKS: Final = 16_384
"""Ranks in a snapshot; further ones are counted. More: a message takes a browser too long."""
MAX_HISTORY_SAMPLES: Final = 300
"""Five minutes at a sample a second."""
MAX_HISTORY_CELLS: Final = 400_000
"""Samples times ranks of the history: 3 MB. More ranks have a shorter past."""
RATE_WINDOW_SAMPLES: Final = 10
LATENCY_WINDOW_SAMPLES: Final = 60
NO_RANK: Final = 255
"""In the history: there was no such rank."""
MAX_EXPERT_CELLS: Final = 65_536
"""Layers times experts of one engine's heat map; further layers are left out."""
MAX_EXPERT_LOADS: Final = 4
"""Engines whose expert load is shown: the maps are large, and those of a pool are alike."""
GAP_BOUNDS_NS: Final = tuple(ms * 1_000_000 for ms in (10, 50, 100, 200, 500, 1_000, 2_000, 4_000,
                                                       8_000, 16_000, 60_000))  # fmt: skip


class LiveEnvironment(Protocol):
    """What only the whole process knows. Methods are cheap and do not raise."""

    dsched_version: str
    instance_id: str
    is_simulated: bool

    def stats(self) -> FrontDoorStats: ...

    def budgets(self) -> LiveBudgets: ...

    def conditions(self) -> tuple[bool, bool, bool]:
        """Whether the journal is durable, this process registered, and leader."""
        ...

    def prices(self) -> tuple[float, float]:
        """Step time of one more request and of one more KV token, in any unit."""
        ...

    def expert_loads(self) -> Iterable[tuple[str, ExpertLoad]]:
        """(engine id, its last load window) of the engines that report one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counters:
    """Cumulated counts of one model at one moment."""

    time_ns: int
    num_requests: int
    num_errors: int
    num_tokens: int
    ttft: tuple[int, ...]
    itl: tuple[int, ...]


class LiveSampler:
    """Takes samples on one event loop; implements `ControllerObserver`."""

    def __init__(
        self, *, clock: Clock, environment: LiveEnvironment, period_s: float = PERIOD_S
    ) -> None:
        self._clock = clock
        self._environment = environment
        self._period_s = period_s
        self._controller: Controller | None = None
        self._start_ns = clock.now_ns()
        self._start_s = float(wall_time_s())
        self._gaps = LatencyHistogram(GAP_BOUNDS_NS)
        self._history = RankHistory()
        self._past: dict[str, deque[_Counters]] = {}
        self._task: asyncio.Task[None] | None = None
        self._news: asyncio.Event = asyncio.Event()
        self._encoded: bytes | None = None
        self.events = EventRing()
        self.snapshot: LiveSnapshot | None = None
        """The latest; `None` before the first."""
        self.cost_ns = 0
        """Processor time that the last sample took on the event loop's thread."""
        self.is_closed = False

    # ---- ControllerObserver

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        self._gaps.observe(gap.total_ns)
        self.events.note_handoff(method, gap)

    def on_membership_changed(self, view: MembershipView) -> None:  # noqa: ARG002
        if self._controller is not None:
            self.events.note_membership(self._controller.membership, self._now_s())

    # ---- life

    def start(self, controller: Controller) -> None:
        """Sample from now on, on the running event loop."""
        self._controller = controller
        self.events.note_membership(controller.membership, self._now_s())
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_say_if_it_failed)

    async def close(self) -> None:
        """Stop sampling and let every reader go. Idempotent."""
        self.is_closed = True
        self._wake_readers()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.sample()
            rest_s = max(self._period_s, REST_FACTOR * self.cost_ns / S)
            await asyncio.sleep(rest_s)

    # ---- readers

    def encoded(self) -> bytes | None:
        """The latest snapshot as JSON; `None` before the first."""
        if self._encoded is None and self.snapshot is not None:
            self._encoded = msgspec.json.encode(self.snapshot)
        return self._encoded

    async def next_encoded(self) -> bytes | None:
        """Wait for the next sample; `None` when there will be none."""
        await self._news.wait()
        return None if self.is_closed else self.encoded()

    def history(self) -> LiveHistory:
        """The past of the ranks there are now."""
        last = self.snapshot
        return self._history.read(last_seq=0 if last is None else last.seq, period_s=self._period_s)

    def _wake_readers(self) -> None:
        news, self._news = self._news, asyncio.Event()
        if self.is_closed:
            self._news.set()
        news.set()

    # ---- a sample

    async def sample(self) -> None:
        """Take one."""
        controller = self._controller
        assert controller is not None
        turns = _Turns()
        columns = RankColumns()
        size = 0
        for status in controller.each_engine_status():
            columns.add(status)
            size += len(status.ranks)
            if size >= RANKS_A_SLICE:
                size = 0
                await turns.give_way()
        pools = []
        for name in sorted(controller.membership.pools):
            pools.append(self._pool(controller, name, columns))
            await turns.give_way()
        tables = columns.tables([pool.name for pool in pools])
        await turns.give_way()
        self._history.add(columns)
        await turns.give_way()
        snapshot = self._make(controller, tuple(pools), *tables)
        self.cost_ns = turns.end()
        self.snapshot, self._encoded = snapshot, None
        self._wake_readers()

    def _pool(self, controller: Controller, name: str, columns: "RankColumns") -> LivePool:
        spec = controller.membership.pools[name]
        _, plan = controller.capacities()[name]
        limit = plan.max_running_requests
        return columns.pool(
            name,
            model=spec.model,
            role=spec.role.value,
            prices=self._environment.prices(),
            max_running_requests=limit if limit < UNKNOWN_CAPACITY else None,
            absorbs_loss=plan.absorbs_loss,
            spare_reason=plan.reason,
        )

    def _make(
        self,
        controller: Controller,
        pools: tuple[LivePool, ...],
        engines: LiveEngines,
        ranks: LiveRanks,
    ) -> LiveSnapshot:
        environment = self._environment
        now_ns, now_s = self._clock.now_ns(), self._now_s()
        stats = environment.stats()
        faults = self._faults(controller, stats)
        self.events.note_sample(
            Watched(
                num_refused=faults.num_refused,
                num_errors=sum(_num_errors(each) for each in stats.per_model.values()),
                num_policy_errors=faults.num_policy_errors,
                num_fenced_tokens=faults.num_fenced_tokens,
                absorbs_loss={pool.name: pool.absorbs_loss for pool in pools},
                spare_reason={pool.name: pool.spare_reason for pool in pools},
                is_journal_durable=faults.is_journal_durable,
                is_registered=faults.is_registered,
                is_leader=faults.is_leader,
            ),
            now_s,
        )
        return LiveSnapshot(
            seq=1 if self.snapshot is None else self.snapshot.seq + 1,
            time_s=now_s,
            uptime_s=(now_ns - self._start_ns) / S,
            period_s=max(self._period_s, REST_FACTOR * self.cost_ns / S),
            dsched_version=environment.dsched_version,
            instance_id=environment.instance_id,
            is_simulated=environment.is_simulated,
            epoch=controller.membership.epoch,
            num_held=controller.num_waiting_requests,
            pools=pools,
            engines=engines,
            ranks=ranks,
            traffic=tuple(
                self._traffic(model, each, now_ns)
                for model, each in sorted(stats.per_model.items())
            ),
            budgets=environment.budgets(),
            faults=faults,
            events=self.events.events(),
            expert_load=self._expert_load(now_ns),
        )

    def _now_s(self) -> float:
        return self._start_s + (self._clock.now_ns() - self._start_ns) / S

    def _faults(self, controller: Controller, stats: FrontDoorStats) -> LiveFaults:
        is_durable, is_registered, is_leader = self._environment.conditions()
        num_policy_errors = sum(
            sum(counts.num_failures.values()) for counts in controller.policies.counts().values()
        )
        return LiveFaults(
            handoffs=tuple(
                LiveCount(name=f"{method}, {cause}", count=count)
                for (method, cause), count in sorted(controller.num_handoffs.items())
            ),
            gap=latency(self._gaps.bounds_ns, self._gaps.counts),
            num_waiting_handoffs=controller.num_waiting_handoffs,
            num_fenced_tokens=controller.num_fenced_tokens,
            num_refused=sum(stats.num_refused.values()),
            num_policy_errors=num_policy_errors,
            held_up_ms=controller.held_up_ns // 1_000_000,
            is_journal_durable=is_durable,
            is_registered=is_registered,
            is_leader=is_leader,
        )

    def _traffic(self, model: str, stats: ModelStats, now_ns: int) -> LiveTraffic:
        now = _Counters(
            time_ns=now_ns,
            num_requests=sum(stats.num_requests.values()),
            num_errors=_num_errors(stats),
            num_tokens=sum(stats.itl.counts) + sum(stats.ttft.counts),
            ttft=tuple(stats.ttft.counts),
            itl=tuple(stats.itl.counts),
        )
        past = self._past.setdefault(model, deque(maxlen=LATENCY_WINDOW_SAMPLES))
        first = past[0] if past else now
        recent = past[-min(len(past), RATE_WINDOW_SAMPLES)] if past else now
        past.append(now)
        elapsed_s = (now_ns - recent.time_ns) / S
        return LiveTraffic(
            model=model,
            num_open=stats.num_open,
            requests_per_s=_rate(now.num_requests - recent.num_requests, elapsed_s),
            errors_per_s=_rate(now.num_errors - recent.num_errors, elapsed_s),
            output_tokens_per_s=_rate(now.num_tokens - recent.num_tokens, elapsed_s),
            ttft=latency(stats.ttft.bounds_ns, _minus(now.ttft, first.ttft)),
            tpot=latency(stats.itl.bounds_ns, _minus(now.itl, first.itl)),
        )

    def _expert_load(self, now_ns: int) -> tuple[LiveExpertLoad, ...]:
        found: list[LiveExpertLoad] = []
        for engine_id, load in self._environment.expert_loads():
            if len(found) == MAX_EXPERT_LOADS:
                break
            found.append(expert_load_map(engine_id, load, now_ns=now_ns))
        return tuple(found)


def _say_if_it_failed(task: "asyncio.Task[None]") -> None:
    """A fault of ours ends the live picture and nothing else; it must not do so unheard."""
    if (error := task_fault(task)) is not None:
        log.error("live.task_failed", reason=repr(error))


class _Turns:
    """Measures the processor time of a task that lets others run in between."""

    def __init__(self) -> None:
        self._cost_ns = 0
        self._started_ns = thread_time_ns()

    async def give_way(self) -> None:
        """Let the event loop do what waits."""
        self.end()
        await asyncio.sleep(0)
        self._started_ns = thread_time_ns()

    def end(self) -> int:
        """Return what the task has cost so far."""
        self._cost_ns += thread_time_ns() - self._started_ns
        return self._cost_ns


class RankColumns:
    """Columns of one sample while it is taken."""

    def __init__(self) -> None:
        self.engines: list[EngineStatus] = []
        self.rows: list[tuple[int, int, int, int, int, int, int | None, int, int | None, int]] = []
        """As the columns of `LiveRanks`."""
        self.num_left_out = 0

    def add(self, status: EngineStatus) -> None:
        """Take one engine with its ranks."""
        index = len(self.engines)
        self.engines.append(status)
        for rank in status.ranks:
            if len(self.rows) == MAX_RANKS:
                self.num_left_out += 1
                continue
            age_ns = rank.report_age_ns
            self.rows.append(
                (
                    index,
                    int(rank.dp_rank),
                    int(rank.state),
                    rank.num_running,
                    rank.num_waiting,
                    rank.num_kv_tokens,
                    rank.kv_capacity_tokens,
                    rank.step_ns // 1_000,
                    None if age_ns is None else age_ns // 1_000_000,
                    rank.num_dispatched,
                )
            )

    def keys(self) -> list[str]:
        """`engine/dp_rank` of each row."""
        return [f"{self.engines[row[0]].engine_id}/{row[1]}" for row in self.rows]

    def pool(
        self,
        name: str,
        *,
        model: str,
        role: str,
        prices: tuple[float, float],
        max_running_requests: int | None,
        absorbs_loss: bool,
        spare_reason: str,
    ) -> LivePool:
        """Sum up one pool. O(ranks)."""
        engines = [engine for engine in self.engines if engine.pool == name]
        ranks = [rank for engine in engines for rank in engine.ranks]
        up = [rank for rank in ranks if rank.state is RankState.UP]
        capacities = [rank.kv_capacity_tokens for rank in up]
        known = [capacity for capacity in capacities if capacity is not None]
        request_price, kv_price = prices
        loads = [request_price * r.num_running + kv_price * r.num_kv_tokens for r in up]
        largest = max(loads, default=0.0)
        return LivePool(
            name=name,
            model=model,
            role=role,
            num_engines=len(engines),
            num_engines_up=sum(engine.state is RankState.UP for engine in engines),
            num_ranks=len(ranks),
            num_ranks_up=len(up),
            num_running=sum(rank.num_running for rank in ranks),
            num_waiting=sum(rank.num_waiting for rank in ranks),
            num_kv_tokens=sum(rank.num_kv_tokens for rank in ranks),
            kv_capacity_tokens=sum(known) if len(known) == len(capacities) else None,
            balance=sum(loads) / len(loads) / largest if largest > 0 else None,
            max_running_requests=max_running_requests,
            absorbs_loss=absorbs_loss,
            spare_reason=spare_reason,
        )

    def tables(self, pools: Sequence[str]) -> tuple[LiveEngines, LiveRanks]:
        """Return the columns; `pools` in the snapshot's order."""
        number = {name: index for index, name in enumerate(pools)}
        engines = LiveEngines(
            engine_id=[str(engine.engine_id) for engine in self.engines],
            pool=[number[engine.pool] for engine in self.engines],
            kind=[engine.kind for engine in self.engines],
            state=[int(engine.state) for engine in self.engines],
            reason=[
                "" if engine.state is RankState.UP else engine.reason for engine in self.engines
            ],
        )
        columns: list[list[int]] = [list(column) for column in zip(*self.rows, strict=True)]
        names = [name for name in LiveRanks.__struct_fields__ if name != "num_left_out"]
        filled = columns or [[] for _ in names]
        ranks = LiveRanks(**dict(zip(names, filled, strict=True)), num_left_out=self.num_left_out)  # type: ignore[arg-type]
        return engines, ranks


class RankHistory:
    """The last minutes of every rank, in four rings [T, D]. Ranks that leave are forgotten."""

    def __init__(self) -> None:
        self._keys: list[str] = []
        self._num_samples = 0
        self._allocate([])

    def _allocate(self, keys: list[str]) -> None:
        self._keys = keys
        size = max(1, min(MAX_HISTORY_SAMPLES, MAX_HISTORY_CELLS // max(1, len(keys))))
        shape = (size, len(keys))
        self._state: NDArray[np.uint8] = np.full(shape, NO_RANK, np.uint8)
        self._kv_share: NDArray[np.uint8] = np.zeros(shape, np.uint8)
        self._running: NDArray[np.uint16] = np.zeros(shape, np.uint16)
        self._step_us: NDArray[np.uint32] = np.zeros(shape, np.uint32)

    def add(self, columns: RankColumns) -> None:
        """Append one sample."""
        keys = columns.keys()
        if keys != self._keys:
            self._change_ranks(keys)
        if not keys:
            return
        place = self._num_samples % len(self._state)
        rows = columns.rows
        capacity = np.array([row[6] or 0 for row in rows], np.float64)
        tokens = np.array([row[5] for row in rows], np.float64)
        share = np.divide(tokens, capacity, out=np.zeros(len(rows)), where=capacity > 0)
        self._state[place] = [row[2] for row in rows]
        self._kv_share[place] = np.rint(255 * np.clip(share, 0, 1))
        self._running[place] = np.minimum([row[3] for row in rows], 65_535)
        self._step_us[place] = np.minimum([row[7] for row in rows], 0xFFFF_FFFF)
        self._num_samples += 1

    def _change_ranks(self, keys: list[str]) -> None:
        """Keep what is known of the ranks that stay."""
        rings = [self._ordered(ring) for ring in self._rings()]
        old = {key: index for index, key in enumerate(self._keys)}
        self._allocate(keys)
        new_index = [index for index, key in enumerate(keys) if key in old]
        old_index = [old[keys[index]] for index in new_index]
        num_kept = min(len(rings[0]), len(self._state))
        for ring, before in zip(self._rings(), rings, strict=True):
            ring[:num_kept, new_index] = before[len(before) - num_kept :][:, old_index]
        self._num_samples = num_kept

    def _rings(self) -> tuple[NDArray[Any], ...]:
        return (self._state, self._kv_share, self._running, self._step_us)

    def _ordered(self, ring: NDArray[Any]) -> NDArray[Any]:
        """[T, D] what was written, oldest first."""
        size = len(ring)
        if self._num_samples <= size:
            return ring[: self._num_samples]
        return np.roll(ring, -(self._num_samples % size), axis=0)

    def read(self, *, last_seq: int, period_s: float) -> LiveHistory:
        """Return everything, oldest first."""
        texts = [
            b64encode(np.ascontiguousarray(self._ordered(ring)).tobytes()).decode()
            for ring in self._rings()
        ]
        num_samples = min(self._num_samples, len(self._state))
        return LiveHistory(
            first_seq=last_seq - num_samples + 1,
            num_samples=num_samples,
            num_ranks=len(self._keys),
            period_s=period_s,
            rank_keys=self._keys,
            state=texts[0],
            kv_share=texts[1],
            running=texts[2],
            step_us=texts[3],
        )


def expert_load_map(engine_id: str, load: ExpertLoad, *, now_ns: int) -> LiveExpertLoad:
    """Turn one load window into what is drawn. O(L * E)."""
    num_layers, num_experts = load.counts.shape
    num_layers = min(num_layers, max(1, MAX_EXPERT_CELLS // max(1, num_experts)))
    counts = load.counts[:num_layers].astype(np.float64)
    largest = counts.max(axis=1, initial=0.0, keepdims=True)
    mean = counts.mean(axis=1) if num_experts else np.zeros(num_layers)
    cells = np.rint(255 * np.divide(counts, largest, out=np.zeros_like(counts), where=largest > 0))
    hottest = np.divide(largest[:, 0], mean, out=np.zeros(num_layers), where=mean > 0)
    balance = None if load.balance is None else load.balance[:num_layers]
    return LiveExpertLoad(
        engine_id=engine_id,
        num_layers=num_layers,
        num_experts=num_experts,
        num_steps=load.num_steps,
        age_s=max(0.0, (now_ns - load.time_ns) / S),
        is_simulated=load.is_simulated,
        hottest=[round(float(value), 3) for value in hottest],
        balance=None if balance is None else [round(float(value), 4) for value in balance],
        cells=b64encode(cells.astype(np.uint8).tobytes()).decode(),
    )


def latency(bounds_ns: Sequence[int], counts: Sequence[int]) -> LiveLatency:
    """Percentiles of a histogram, interpolated inside a bucket; above the last bound, that bound.

    >>> latency((1_000_000, 2_000_000), (0, 100, 0))
    LiveLatency(p50_ms=1.5, p90_ms=1.9, p99_ms=1.99)
    """
    total = sum(counts)
    if total == 0:
        return LiveLatency()
    shares = (0.50, 0.90, 0.99)
    p50, p90, p99 = (_quantile_ms(bounds_ns, counts, share * total) for share in shares)
    return LiveLatency(p50_ms=p50, p90_ms=p90, p99_ms=p99)


def _quantile_ms(bounds_ns: Sequence[int], counts: Sequence[int], rank: float) -> float:
    below, low_ns = 0, 0
    for bound_ns, count in zip(bounds_ns, counts, strict=False):
        if count and below + count >= rank:
            return round((low_ns + (bound_ns - low_ns) * (rank - below) / count) / 1e6, 3)
        below += count
        low_ns = bound_ns
    return low_ns / 1e6


def _minus(now: Sequence[int], then: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(now, then, strict=True)]


def _rate(count: int, elapsed_s: float) -> float:
    return round(count / elapsed_s, 3) if elapsed_s > 0 else 0.0


def _num_errors(stats: ModelStats) -> int:
    return sum(n for (_, outcome), n in stats.num_requests.items() if outcome is Outcome.ERROR)
