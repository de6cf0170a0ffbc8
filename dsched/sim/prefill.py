"""Compare prefill routing and chunk rules on ranks that step together.

In:  a trace, a policy, a chunk rule, a seed. Out: a `PrefillResult`.

A chunk of x tokens after P computed ones takes `x / speed * (1 + (P + x/2) / context)`: attention
costs as much as everything else at a context of `context` tokens. A step lasts as long as its
slowest rank's chunk, so ranks with short chunks wait; **step balance** is mean chunk time over
longest chunk time, idle ranks counting as 0. Ranks compute their requests in order of arrival and
fill a step with as many as the rule allows.

The chunk rule is a number of tokens, or a time: then each rank takes the tokens that fit the time,
which keeps steps level whatever the context is. Policies that group ranks by length step each group
apart. Simulated, with assumed constants (docs/routing.md).
"""

from collections import deque
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from dsched.costs.prefill import PrefillCostModel
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing.prefill import PrefillConfig, PrefillRouter
from dsched.sim.traces import Trace, select

NS_PER_S = 1_000_000_000
CHUNK_ALIGNMENT_TOKENS = 64
LENGTH_CLASSES = (16_384, 65_536, 262_144)
"""Prompt lengths at which TTFT is told apart."""
WARM_SHARE = 0.1
"""Share of the arrivals that fill the queues and are not measured."""

PREFILL_POLICIES = {
    "round_robin": "next rank in turn; one group",
    "least_requests": "fewest queued requests; one group",
    "least_tokens": "fewest queued uncached tokens; one group (SGLang, Dynamo, llm-d token-load)",
    "least_cost": "dsched PrefillRouter without buckets: least estimated finish; one group",
    "buckets": "dsched PrefillRouter: groups by length bucket in proportion to work, spill-over",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillGroup:
    """The ranks and what their steps cost."""

    num_ranks: int = 32
    tokens_per_s: float = 12_000.0
    context_tokens: float = 24_000.0
    """Context at which attention costs as much as the rest."""

    def __post_init__(self) -> None:
        if self.num_ranks < 1:
            raise ValueError(f"num_ranks is {self.num_ranks}; it must be at least 1")
        for name in ("tokens_per_s", "context_tokens"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value > 0.0):
                raise ValueError(f"{name} is {value}; it must be finite and positive")

    def cost_model(self) -> PrefillCostModel:
        """The same cost as the router gets it."""
        token_s = 1.0 / self.tokens_per_s
        return PrefillCostModel.from_coefficients(
            fixed_s=0.0, token_s=token_s, attention_s=token_s / self.context_tokens
        )

    def seconds(self, num_tokens: float, num_past: float) -> float:
        """Time of one chunk."""
        context = num_past + num_tokens / 2.0
        return num_tokens / self.tokens_per_s * (1.0 + context / self.context_tokens)

    def chunk(self, budget_s: float, num_past: int, num_left: int) -> int:
        """Tokens that fit the budget, in whole blocks unless they end the prompt."""
        factor = 1.0 + num_past / self.context_tokens
        root = np.sqrt(factor**2 + 2.0 * self.tokens_per_s * budget_s / self.context_tokens)
        fitting = int(self.context_tokens * (root - factor) + 1e-6)
        if fitting >= num_left:
            return num_left
        return fitting // CHUNK_ALIGNMENT_TOKENS * CHUNK_ALIGNMENT_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRule:
    """Exactly one of the two."""

    chunk_tokens: int | None = None
    step_s: float | None = None

    def __post_init__(self) -> None:
        if (self.chunk_tokens is None) == (self.step_s is None):
            raise ValueError("give chunk_tokens or step_s, not both and not neither")
        value = self.chunk_tokens if self.step_s is None else self.step_s
        if value is None or not value > 0:
            raise ValueError(f"a chunk rule of {value} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillResult:
    """What one policy reached."""

    policy: str
    step_balance_pct: tuple[float, ...]
    """Mean over the steps of each group, shortest bucket first; nan for a group without steps."""
    busy_pct: float
    """Work done over what the ranks could have done in the measured time."""
    ttft_p50_s: tuple[float, ...]
    """By prompt length: below each of `LENGTH_CLASSES`, then the rest; nan without requests."""
    ttft_p99_s: tuple[float, ...]
    num_finished: int
    num_spilled: int


class _Job:
    __slots__ = ("arrival_ns", "index", "left", "past", "prompt")

    def __init__(self, index: int, arrival_ns: int, prompt: int, cached: int) -> None:
        self.index = index
        self.arrival_ns = arrival_ns
        self.prompt = prompt
        self.past = cached
        self.left = prompt - cached


def shuffle_arrivals(trace: Trace, *, seed: int) -> Trace:
    """Return the requests in random order with Poisson stamps (1 a second on average).

    For traces whose stamps count inside conversations: their own order would need the start of
    each conversation, which nobody published. What each has cached is kept.
    """
    rng = stream(seed, "sim.prefill.shuffle")
    mixed = select(trace, rng.permutation(trace.num_requests))
    gaps = rng.exponential(NS_PER_S, trace.num_requests)
    return replace(mixed, arrival_ns=np.cumsum(gaps).astype(np.int64))


def scale_to_load(trace: Trace, group: PrefillGroup, *, load: float) -> Trace:
    """Return the trace with its stamps stretched so that its work is `load` of the ranks' time.

    Raises:
        ValueError: the load is not positive, or the trace has no duration.
    """
    if not 0.0 < load < np.inf:
        raise ValueError(f"load is {load}; it must be positive")
    if trace.num_requests < 2 or trace.arrival_ns[-1] <= 0:
        raise ValueError(f"{trace.source} has no duration to stretch")
    work_s = float(_work_s(trace, group).sum())
    duration_ns = work_s / group.num_ranks / load * NS_PER_S
    factor = duration_ns / float(trace.arrival_ns[-1])
    return replace(trace, arrival_ns=(trace.arrival_ns * factor).astype(np.int64))


def simulate_prefill(
    trace: Trace,
    policy: str,
    rule: ChunkRule,
    *,
    group: PrefillGroup | None = None,
    config: PrefillConfig | None = None,
) -> PrefillResult:
    """Run `policy` (a key of `PREFILL_POLICIES`) over the trace's own stamps.

    Raises:
        ValueError: an unknown policy, an empty trace, or stamps that go back.
    """
    group = group or PrefillGroup()
    if policy not in PREFILL_POLICIES:
        raise ValueError(f"policy {policy!r} is not one of {', '.join(PREFILL_POLICIES)}")
    if trace.num_requests == 0:
        raise ValueError(f"{trace.source} has no requests")
    if np.any(np.diff(trace.arrival_ns) < 0):
        raise ValueError(
            f"{trace.source}: stamps go back; put its conversations on one time line first"
        )
    loop = _Loop(trace, policy, rule, group, config or PrefillConfig())
    loop.run()
    return loop.result()


def backlog_balance_pct(
    trace: Trace, rule: ChunkRule, *, group: PrefillGroup | None = None, seed: int = 0,
    num_steps: int = 400,
) -> float:  # fmt: skip
    """Step balance while every rank always has work: random requests of the trace, one after
    another on each rank. It is also the share of the ranks' capacity that is used."""
    group = group or PrefillGroup()
    rng = stream(seed, "sim.prefill.backlog")
    cached = _cached(trace)
    queues: list[deque[_Job]] = [deque() for _ in range(group.num_ranks)]
    done = longest = 0.0
    for _ in range(num_steps):
        times = []
        for queue in queues:
            while sum(job.left for job in queue) < 2 * _most_tokens(rule, group):
                index = int(rng.integers(trace.num_requests))
                queue.append(_Job(index, 0, int(trace.num_prompt_tokens[index]), cached[index]))
            times.append(_run_chunk(queue, rule, group)[0])
        done += float(np.mean(times))
        longest += max(times)
    return 100.0 * done / longest


def _most_tokens(rule: ChunkRule, group: PrefillGroup) -> int:
    if rule.chunk_tokens is not None:
        return rule.chunk_tokens
    assert rule.step_s is not None
    return int(rule.step_s * group.tokens_per_s) + 1


def _cached(trace: Trace) -> list[int]:
    """Tokens of each prompt that come from the cache; at least one token is computed."""
    if trace.cached_prefix_tokens is None:
        return [0] * trace.num_requests
    most = trace.num_prompt_tokens - 1
    return [int(count) for count in np.minimum(trace.cached_prefix_tokens, most)]


def _work_s(trace: Trace, group: PrefillGroup) -> NDArray[np.float64]:
    past = np.array(_cached(trace), np.float64)
    tokens = trace.num_prompt_tokens - past
    work: NDArray[np.float64] = (
        tokens / group.tokens_per_s * (1.0 + (past + tokens / 2.0) / group.context_tokens)
    )
    return work


def _run_chunk(
    queue: deque[_Job], rule: ChunkRule, group: PrefillGroup
) -> tuple[float, int, list[_Job]]:
    """Compute one step's chunk of a rank; return its time, tokens, and the completed jobs."""
    spent = 0.0
    tokens = 0
    tokens_left = rule.chunk_tokens
    ended: list[_Job] = []
    while queue:
        job = queue[0]
        if tokens_left is not None:
            chunk = min(tokens_left, job.left)
            tokens_left -= chunk
        else:
            assert rule.step_s is not None
            chunk = group.chunk(rule.step_s - spent, job.past, job.left)
            if chunk == 0 and spent == 0.0:
                # Progress whatever the context: one block even where it takes longer.
                chunk = min(CHUNK_ALIGNMENT_TOKENS, job.left)
        if chunk == 0:
            break
        spent += group.seconds(chunk, job.past)
        job.past += chunk
        job.left -= chunk
        tokens += chunk
        if job.left:
            break
        ended.append(queue.popleft())
        if tokens_left == 0:
            break
    return spent, tokens, ended


class _Loop:
    """Arrivals, groups that step apart, and the router."""

    def __init__(
        self, trace: Trace, policy: str, rule: ChunkRule, group: PrefillGroup,
        config: PrefillConfig,
    ) -> None:  # fmt: skip
        self._trace = trace
        self._policy = policy
        self._rule = rule
        self._group = group
        self._cached = _cached(trace)
        self._queues: list[deque[_Job]] = [deque() for _ in range(group.num_ranks)]
        self._tokens = np.zeros(group.num_ranks, np.int64)
        self._busy_until = [0] * group.num_ranks
        self._next = 0
        self._cursor = 0
        bounds = config.bucket_bounds if policy == "buckets" else ()
        self._router = PrefillRouter(
            group.cost_model(),
            config=PrefillConfig(
                bucket_bounds=bounds,
                hysteresis_workers=config.hysteresis_workers,
                min_regroup_ns=config.min_regroup_ns,
                work_memory_ns=config.work_memory_ns,
                spill_ratio=config.spill_ratio,
                spill_ns=config.spill_ns,
            ),
        )
        for index in range(group.num_ranks):
            self._router.add_worker(RankId(EngineId("prefill"), DpRank(index)))
        self._uses_router = policy in ("least_cost", "buckets")
        self._num_groups = len(bounds) + 1
        self._balance: list[list[float]] = [[] for _ in range(self._num_groups)]
        self._worked_s = 0.0
        self._ttft_s = np.full(trace.num_requests, np.nan)
        self._num_spilled = 0
        end = int(trace.arrival_ns[-1])
        self._measured = (int(WARM_SHARE * end), end)

    def run(self) -> None:
        """Step the groups in order of time until all is done."""
        events = [(0, group) for group in range(self._num_groups)]
        while events:
            now_ns, group = heappop(events)
            self._arrive(now_ns)
            members = [
                rank
                for rank, bucket in enumerate(self._router.worker_buckets)
                if bucket == group and self._busy_until[rank] <= now_ns
            ]
            step_s = self._step(members, group, now_ns)
            if step_s > 0.0:
                heappush(events, (now_ns + max(1, int(step_s * NS_PER_S)), group))
                continue
            wake_ns = self._wake_ns(now_ns, events)
            if wake_ns is not None:
                heappush(events, (wake_ns, group))

    def result(self) -> PrefillResult:
        prompts = self._trace.num_prompt_tokens
        classes = np.searchsorted(LENGTH_CLASSES, prompts, side="right")
        measured = self._trace.arrival_ns >= self._measured[0]
        p50, p99 = [], []
        for kind in range(len(LENGTH_CLASSES) + 1):
            values = self._ttft_s[(classes == kind) & measured]
            p50.append(float(np.quantile(values, 0.5)) if len(values) else np.nan)
            p99.append(float(np.quantile(values, 0.99)) if len(values) else np.nan)
        seconds = (self._measured[1] - self._measured[0]) / NS_PER_S
        return PrefillResult(
            policy=self._policy,
            step_balance_pct=tuple(
                100.0 * float(np.mean(values)) if values else np.nan for values in self._balance
            ),
            busy_pct=100.0 * self._worked_s / max(1e-9, seconds * self._group.num_ranks),
            ttft_p50_s=tuple(p50),
            ttft_p99_s=tuple(p99),
            num_finished=int(np.isfinite(self._ttft_s).sum()),
            num_spilled=self._num_spilled,
        )

    def _wake_ns(self, now_ns: int, events: list[tuple[int, int]]) -> int | None:
        """When an idle group should look again: at the next arrival or the next step's end."""
        times = [time_ns for time_ns, _ in events if time_ns > now_ns]
        if self._next < self._trace.num_requests:
            times.append(max(now_ns + 1, int(self._trace.arrival_ns[self._next])))
        has_work = any(self._queues)
        if not times and has_work:
            return now_ns + 1
        return min(times) if times and (has_work or self._next < self._trace.num_requests) else None

    def _step(self, members: list[int], group: int, now_ns: int) -> float:
        times = []
        ended: list[tuple[int, _Job]] = []
        for rank in members:
            spent, tokens, jobs = _run_chunk(self._queues[rank], self._rule, self._group)
            times.append(spent)
            ended.extend((rank, job) for job in jobs)
            self._tokens[rank] -= tokens
        step_s = max(times, default=0.0)
        if step_s == 0.0:
            return 0.0
        end_ns = now_ns + max(1, int(step_s * NS_PER_S))
        for rank in members:
            self._busy_until[rank] = end_ns
        for _, job in ended:
            self._ttft_s[job.index] = (end_ns - job.arrival_ns) / NS_PER_S
            if self._uses_router:
                self._router.release(job.index, end_ns)
        if self._measured[0] <= now_ns < self._measured[1]:
            self._balance[group].append(float(np.mean(times)) / step_s)
            self._worked_s += sum(times)
        return step_s

    def _arrive(self, now_ns: int) -> None:
        trace = self._trace
        while self._next < trace.num_requests and trace.arrival_ns[self._next] <= now_ns:
            index = self._next
            self._next += 1
            arrival_ns = int(trace.arrival_ns[index])
            job = _Job(index, arrival_ns, int(trace.num_prompt_tokens[index]), self._cached[index])
            rank = self._pick(job, arrival_ns)
            self._queues[rank].append(job)
            self._tokens[rank] += job.left
        if self._uses_router:
            plan = self._router.plan_groups(now_ns)
            if plan is not None:
                self._router.apply_groups(plan, now_ns)

    def _pick(self, job: _Job, now_ns: int) -> int:
        if self._policy == "round_robin":
            self._cursor += 1
            return (self._cursor - 1) % self._group.num_ranks
        if self._policy == "least_requests":
            return int(np.argmin([len(queue) for queue in self._queues]))
        if self._policy == "least_tokens":
            return int(np.argmin(self._tokens))
        decision = self._router.pick(
            num_prompt_tokens=job.prompt, num_cached_tokens=job.past, now_ns=now_ns
        )
        if decision.worker is None:
            raise ValueError("no prefill rank is up")
        self._router.book(
            decision.worker, job.index, work_ns=decision.work_ns, bucket=decision.bucket,
            now_ns=now_ns,
        )  # fmt: skip
        self._num_spilled += decision.reason == "spilled"
        return decision.worker
