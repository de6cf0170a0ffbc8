"""Choose the worker that prefills a request.

In:  the prompt, how much of it each worker has cached, and what each worker still has to compute.
Out: a `PrefillDecision`: a worker, or the reason why there is none.

Work is counted in nanoseconds of the cost model, not in tokens or requests: a token of a long
prompt attends to a long context and costs several times a token of a short one.

Workers are split into groups, one for each **length bucket**, so that a short prompt does not wait
behind a long one and ranks that step together have steps of equal length. The bucket is chosen by
*effective* tokens, the work divided by what a token without context costs: uncached tokens and the
context they attend to both count, cached tokens alone do not. (Of agentic requests 96 % have less
than 16K uncached tokens, but they are a third of the work.)

- Groups get workers in proportion to the work that their bucket brought lately, at least one each;
  the split changes only when it is off by more than `hysteresis_workers`, and not more often than
  every `min_regroup_ns`.
- **Spill-over**: where the own group would finish the request later than `spill_ratio` times a
  neighbouring group, plus `spill_ns`, the neighbour takes it.
- Inside a group the least estimated finish time wins; ties go to the worker that comes first when
  counting from an offset that moves with every booking.

Booked work is exact: added at dispatch, removed when the prefill is done or the request ends. So is
what peers say that they have booked (`tell`); what reports show beyond both is others' work. A
worker computes one prompt at a time, whoever sent it: what it has done of that one is estimated by
the clock, from the moment that the last one ended, here or at a peer. `pick` and `plan_groups` only
read. A decision costs O(workers).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from dsched.costs.prefill import PrefillCostModel
from dsched.drivers.wire import RankReport
from dsched.errors import InvariantError
from dsched.ids import RankId
from dsched.routing.ledger import RankState
from dsched.routing.peer_loads import PeerWork

DEFAULT_BUCKET_BOUNDS = (24_576, 98_304, 393_216)
"""Effective tokens at which the next bucket begins: four buckets. A prompt of 16K tokens has some
22K effective ones, of 64K some 150K, where attention doubles the cost at a context of 24K."""
SMALLEST_SHARE = 1e-6
"""Share of all work from which a bucket gets a worker of its own, if there are enough. Larger: a
rare kind of prompt waits behind all others. Smaller: workers stand by for what comes no more."""
NS_PER_S = 1_000_000_000
_ARRAYS = (
    "_states", "_backlog_ns", "_other_ns", "_head_ns", "_since_ns", "_told_ns", "_told_head_ns"
)  # fmt: skip
"""Of `PrefillRouter`, [W] each, 0 for a new worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Rules of prefill routing."""

    bucket_bounds: tuple[int, ...] = DEFAULT_BUCKET_BOUNDS
    """Rising; empty for one group."""
    hysteresis_workers: float = 0.75
    """Workers by which a group may be off its share. Lower: workers change groups for noise."""
    min_regroup_ns: int = 5 * NS_PER_S
    work_memory_ns: int = 60 * NS_PER_S
    """Time after which the work of a bucket counts a third as much."""
    spill_ratio: float = 1.5
    """Lower: requests spill although their own group is fine. Higher: a burst waits."""
    spill_ns: int = 0

    def __post_init__(self) -> None:
        bounds = self.bucket_bounds
        if any(bound < 1 for bound in bounds) or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bucket_bounds {bounds} must be positive and rising")
        if not (np.isfinite(self.spill_ratio) and self.spill_ratio >= 1.0):
            raise ValueError(f"spill_ratio is {self.spill_ratio}; it must be at least 1")
        for name in ("hysteresis_workers", "min_regroup_ns", "work_memory_ns", "spill_ns"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")

    @property
    def num_buckets(self) -> int:
        return len(self.bucket_bounds) + 1


class PrefillReason(StrEnum):
    """Why a prefill decision is what it is."""

    LEAST_FINISH = "least_finish"
    SPILLED = "spilled"
    """The own group would have been much later."""
    NO_WORKER_UP = "no_worker_up"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDecision:
    """Where a prompt is computed, or why nowhere."""

    worker: int | None
    reason: PrefillReason
    bucket: int
    work_ns: int = 0
    """Estimated work on that worker; book it."""
    finish_ns: int = 0
    """Estimated time from now to the end of the prefill."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillView:
    """What one choice of W workers is made from."""

    states: NDArray[np.int64]
    """[W] as `RankState`; a worker that must not be chosen is `REMOVED`."""
    worker_bucket: NDArray[np.int64]
    """[W] the bucket that each worker serves."""
    backlog_ns: NDArray[np.int64]
    """[W] estimated time until each has done what it has."""
    work_ns: NDArray[np.int64]
    """[W] what the prompt is for each of them."""
    bucket: int
    """Of the prompt."""
    tie_offset: int
    spill_ratio: float
    spill_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Which bucket each worker serves."""

    worker_bucket: tuple[int, ...]


@dataclass(slots=True)
class _Queued:
    worker: int
    work_ns: int


class PrefillRouter:
    """The State of prefill routing: booked work and groups of W workers."""

    def __init__(
        self,
        cost_model: PrefillCostModel,
        *,
        config: PrefillConfig | None = None,
        router_index: int = 0,
    ) -> None:
        """`cost_model` is where `observe` starts to learn; it changes it."""
        self._model = cost_model
        self._config = config or PrefillConfig()
        self._tie_offset = router_index
        self._rank_ids: list[RankId] = []
        self.worker_names: tuple[str, ...] = ()
        """[W] the rank of each worker, for people."""
        self._index: dict[RankId, int] = {}
        self._queues: list[dict[Hashable, _Queued]] = []
        self._worker_of: dict[Hashable, int] = {}
        self._states: NDArray[np.int64] = np.zeros(0, np.int64)
        self._backlog_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        self._other_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        self._head_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        """Work of the oldest booking of each worker."""
        self._since_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        """Since when each worker is at its present prompt, of this router or of a peer."""
        self.peers = PeerWork()
        """What other routers say; changed by `tell` and `forget_peer`."""
        self._told_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        """Work of peers on each worker, and the largest of their oldest prompts there."""
        self._told_head_ns: NDArray[np.int64] = np.zeros(0, np.int64)
        self._touched: set[int] = set()
        self._bucket: NDArray[np.int64] = np.zeros(0, np.int64)
        self._bucket_work = np.zeros(self._config.num_buckets)
        self._work_time_ns = 0
        self._regroup_ns: int | None = None

    # ---- workers

    def add_worker(self, rank_id: RankId) -> int:
        """Add a worker, or bring a known one back up; return its number."""
        worker = self._index.get(rank_id)
        if worker is None:
            worker = self._index[rank_id] = len(self._rank_ids)
            self._rank_ids.append(rank_id)
            self.worker_names = tuple(str(each) for each in self._rank_ids)
            self._queues.append({})
            for name in _ARRAYS:
                setattr(self, name, np.append(getattr(self, name), 0))
            self._bucket = np.append(self._bucket, 0)
            self._apply_split(self._ideal_workers())
        self._states[worker] = RankState.UP
        return worker

    def set_worker_state(self, worker: int, state: RankState) -> None:
        """Mark a worker up, suspect, draining, down or removed."""
        self._check_worker(worker)
        self._states[worker] = int(state)

    def index_of(self, rank_id: RankId) -> int | None:
        return self._index.get(rank_id)

    def rank_id(self, worker: int) -> RankId:
        self._check_worker(worker)
        return self._rank_ids[worker]

    @property
    def num_workers(self) -> int:
        return len(self._rank_ids)

    @property
    def worker_buckets(self) -> tuple[int, ...]:
        """The bucket of each worker."""
        return tuple(int(bucket) for bucket in self._bucket)

    def backlog_ns(self, now_ns: int) -> NDArray[np.int64]:
        """[W] estimated time until each worker has done what it has."""
        head_ns = np.maximum(self._head_ns, self._told_head_ns)
        # A prompt that is overdue is not over: an idle worker must not tie with it.
        done = np.clip(now_ns - self._since_ns, 0, np.maximum(head_ns - 1, 0))
        result: NDArray[np.int64] = self._backlog_ns + self._told_ns - done + self._other_ns
        return result

    # ---- decisions: these only read

    def estimate_work_ns(self, *, num_uncached_tokens: int, num_cached_tokens: int) -> int:
        """Work of computing `num_uncached_tokens` after `num_cached_tokens`, without the fixed
        time of a step."""
        if num_uncached_tokens <= 0:
            return 0
        fixed = float(self._model.arrays.knot_ns[0])
        seconds = self._model.predict(num_uncached_tokens, num_cached_tokens)
        return max(1, int(seconds * NS_PER_S - fixed))

    def bucket_of(self, work_ns: int) -> int:
        """The bucket of a request by its effective tokens."""
        token_ns = self.estimate_work_ns(num_uncached_tokens=1024, num_cached_tokens=0) / 1024
        effective = work_ns / max(token_ns, 1e-9)
        return int(np.searchsorted(self._config.bucket_bounds, effective, side="right"))

    def pick(
        self,
        *,
        num_prompt_tokens: int,
        now_ns: int,
        num_cached_tokens: int | Sequence[int] = 0,
        excluded_workers: Sequence[int] = (),
    ) -> PrefillDecision:
        """Choose a worker.

        `num_cached_tokens` is one number where any worker can use the same cache (a shared KV
        store, or none), else one a worker.

        Raises:
            ValueError: negative tokens, or a list that is not one number a worker.
        """
        return choose_worker(
            self.view(
                num_prompt_tokens=num_prompt_tokens,
                now_ns=now_ns,
                num_cached_tokens=num_cached_tokens,
                excluded_workers=excluded_workers,
            )
        )

    def view(
        self,
        *,
        num_prompt_tokens: int,
        now_ns: int,
        num_cached_tokens: int | Sequence[int] = 0,
        excluded_workers: Sequence[int] = (),
    ) -> PrefillView:
        """What `pick` chooses from; arguments and errors are those of `pick`."""
        if num_prompt_tokens < 0:
            raise ValueError(f"num_prompt_tokens is {num_prompt_tokens}; it must not be negative")
        work = self._work(num_prompt_tokens, num_cached_tokens)
        states = self._states.copy()
        for worker in excluded_workers:
            self._check_worker(worker)
            states[worker] = RankState.REMOVED
        return PrefillView(
            states=states,
            worker_bucket=self._bucket,
            backlog_ns=self.backlog_ns(now_ns),
            work_ns=work,
            bucket=self.bucket_of(int(work.min()) if len(work) else 0),
            tie_offset=self._tie_offset,
            spill_ratio=self._config.spill_ratio,
            spill_ns=self._config.spill_ns,
        )

    def plan_groups(self, now_ns: int) -> GroupPlan | None:
        """Split the workers by recent work; `None` while the present split is good enough."""
        recent = self._regroup_ns
        if recent is not None and now_ns - recent < self._config.min_regroup_ns:
            return None
        ideal = self._ideal_workers()
        present = np.bincount(self._bucket, minlength=self._config.num_buckets)
        if np.abs(present - ideal).max(initial=0.0) <= self._config.hysteresis_workers:
            return None
        return GroupPlan(worker_bucket=tuple(_split(ideal, self.num_workers)))

    # ---- changes

    def apply_groups(self, plan: GroupPlan, now_ns: int) -> None:
        """Use a plan; what is queued stays where it is."""
        if len(plan.worker_bucket) != self.num_workers:
            raise ValueError(
                f"the plan is for {len(plan.worker_bucket)} workers; there are {self.num_workers}"
            )
        self._bucket = np.array(plan.worker_bucket, np.int64)
        self._regroup_ns = now_ns

    def book(
        self, worker: int, request_key: Hashable, *, work_ns: int, bucket: int, now_ns: int
    ) -> None:
        """Count the work of a request that is being sent to `worker`."""
        self._check_worker(worker)
        if work_ns < 0:
            raise ValueError(f"work_ns is {work_ns}; it must not be negative")
        if not 0 <= bucket < self._config.num_buckets:
            raise ValueError(
                f"bucket {bucket} is not one of the {self._config.num_buckets} buckets"
            )
        if request_key in self._worker_of:
            raise ValueError(f"request {request_key!r} is already booked; release it first")
        queue = self._queues[worker]
        if not queue:
            self._head_ns[worker] = work_ns
            if not self._told_ns[worker]:
                self._since_ns[worker] = now_ns
        queue[request_key] = _Queued(worker, work_ns)
        self._worker_of[request_key] = worker
        self._backlog_ns[worker] += work_ns
        self._touched.add(worker)
        self._decay_work(now_ns)
        self._bucket_work[bucket] += work_ns
        self._tie_offset += 1

    def release(self, request_key: Hashable, now_ns: int) -> bool:
        """The prefill is done, or the request ended; `False` if it is not booked."""
        worker = self._worker_of.pop(request_key, None)
        if worker is None:
            return False
        queue = self._queues[worker]
        is_head = next(iter(queue)) == request_key
        self._backlog_ns[worker] -= queue.pop(request_key).work_ns
        self._touched.add(worker)
        if is_head:
            head = next(iter(queue.values()), None)
            self._head_ns[worker] = head.work_ns if head else 0
            self._since_ns[worker] = now_ns
        return True

    def observe(self, elapsed_ns: int, *, num_uncached_tokens: int, num_cached_tokens: int) -> None:
        """Learn from a prompt that its worker computed in this time, with nothing else to do.

        What is booked keeps its old estimate. Other numbers than those of a prompt teach nothing.
        """
        if elapsed_ns > 0 and num_uncached_tokens > 0 and num_cached_tokens >= 0:
            self._model.observe(elapsed_ns / NS_PER_S, num_uncached_tokens, num_cached_tokens)

    def apply_report(self, worker: int, report: RankReport, now_ns: int) -> None:
        """Count work that others sent: what the report shows beyond what is booked here or told.

        A report does not say what context its step's tokens attended to, so the model cannot learn
        from it.
        """
        self._check_worker(worker)
        tokens = report.num_waiting_prefill_tokens
        if not isinstance(tokens, int) or tokens < 0:
            return
        reported = self.estimate_work_ns(num_uncached_tokens=tokens, num_cached_tokens=0)
        self._other_ns[worker] = 0
        self._other_ns[worker] = max(0, reported - int(self.backlog_ns(now_ns)[worker]))

    # ---- peers

    def take_touched(self) -> list[int]:
        """Workers on which something was booked or released since this was last asked."""
        touched, self._touched = sorted(self._touched), set()
        return touched

    def own_work(self, worker: int, now_ns: int) -> tuple[int, int, int]:
        """What is booked here on a worker, the oldest booking of it, and how long the worker has
        been at its present prompt, all in ns."""
        self._check_worker(worker)
        work_ns, head_ns = int(self._backlog_ns[worker]), int(self._head_ns[worker])
        return work_ns, head_ns, max(0, now_ns - int(self._since_ns[worker]))

    def tell(
        self, peer: str, worker: int, *, work_ns: int, head_ns: int, age_ns: int, now_ns: int
    ) -> None:
        """Say what another router has on a worker now; the numbers are those of its `own_work`.

        A report may have been faster than the peer: what it is found to have sent is taken off the
        work of others.

        Raises:
            ValueError: an unknown worker, or numbers that are negative or do not fit each other.
        """
        self._check_worker(worker)
        if age_ns < 0:
            raise ValueError(f"age_ns is {age_ns}; it must not be negative")
        self.peers.put(peer, worker, work_ns, head_ns)
        grown_ns = self._sum_peers(worker)
        self._other_ns[worker] -= min(max(0, grown_ns), int(self._other_ns[worker]))
        self._since_ns[worker] = max(int(self._since_ns[worker]), now_ns - age_ns)

    def forget_peer(self, peer: str) -> None:
        """Take back all that a peer said. Reports may show that its work is there still."""
        workers = sorted(self.peers.workers_of(peer))
        self.peers.forget(peer)
        for worker in workers:
            self._sum_peers(worker)

    def _sum_peers(self, worker: int) -> int:
        """Add up what peers have on a worker; return by how much that grew."""
        work_ns, self._told_head_ns[worker] = self.peers.of(worker)
        grown_ns = work_ns - int(self._told_ns[worker])
        self._told_ns[worker] = work_ns
        return grown_ns

    def validate(self) -> None:
        """Check every sum against what it sums. O(W * peers + R)."""
        for worker, told_ns in enumerate(self._told_ns.tolist()):
            if (told_ns, self._told_head_ns[worker]) != self.peers.of(worker):
                raise InvariantError(
                    f"worker {worker}: {told_ns} ns of peers, who say {self.peers.of(worker)}"
                )
        for worker, queue in enumerate(self._queues):
            total = sum(queued.work_ns for queued in queue.values())
            if total != self._backlog_ns[worker]:
                raise InvariantError(
                    f"worker {worker}: backlog {self._backlog_ns[worker]} ns, bookings {total} ns"
                )
        if sum(len(queue) for queue in self._queues) != len(self._worker_of):
            raise InvariantError("bookings and their index differ")

    # ---- inside

    def _check_worker(self, worker: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise ValueError(f"worker {worker} is not one of the {self.num_workers} workers")

    def _work(
        self, num_prompt_tokens: int, num_cached_tokens: int | Sequence[int]
    ) -> NDArray[np.int64]:
        if isinstance(num_cached_tokens, int):
            cached = [num_cached_tokens] * (1 if self.num_workers else 0)
        else:
            cached = [int(count) for count in num_cached_tokens]
            if len(cached) != self.num_workers:
                raise ValueError(
                    f"{len(cached)} counts of cached tokens for {self.num_workers} workers"
                )
        known: dict[int, int] = {}
        for count in cached:
            if not 0 <= count <= num_prompt_tokens:
                raise ValueError(
                    f"num_cached_tokens {count} is not within the prompt's {num_prompt_tokens}"
                )
            if count not in known:
                known[count] = self.estimate_work_ns(
                    num_uncached_tokens=num_prompt_tokens - count, num_cached_tokens=count
                )
        work = np.array([known[count] for count in cached], np.int64)
        return np.broadcast_to(work, self.num_workers) if len(work) else work

    def _decay_work(self, now_ns: int) -> None:
        elapsed = now_ns - self._work_time_ns
        if elapsed > 0 and self._config.work_memory_ns:
            self._bucket_work *= np.exp(-elapsed / self._config.work_memory_ns)
        self._work_time_ns = max(self._work_time_ns, now_ns)

    def _ideal_workers(self) -> NDArray[np.float64]:
        """[buckets] workers in proportion to work; at least one for each bucket with work."""
        num_buckets = self._config.num_buckets
        total = self._bucket_work.sum()
        if total <= 0.0:
            ideal: NDArray[np.float64] = np.zeros(num_buckets)
            ideal[0] = self.num_workers
            return ideal
        ideal = self._bucket_work / total * self.num_workers
        has_work = self._bucket_work > SMALLEST_SHARE * total
        if has_work.sum() > self.num_workers:
            return ideal
        small = has_work & (ideal < 1.0)
        while small.any():
            rest = has_work & ~small
            left = self.num_workers - small.sum()
            ideal[small] = 1.0
            ideal[rest] = self._bucket_work[rest] / self._bucket_work[rest].sum() * left
            more = rest & (ideal < 1.0)
            if not more.any():
                break
            small |= more
        ideal[~has_work] = 0.0
        return ideal

    def _apply_split(self, ideal: NDArray[np.float64]) -> None:
        self._bucket = np.array(_split(ideal, self.num_workers), np.int64)


def choose_worker(view: PrefillView) -> PrefillDecision:
    """Choose by the least finish time, in the prompt's own group unless that is much later.

    Pure. O(W).
    """
    usable = _usable(view.states)
    if not usable.any():
        return PrefillDecision(worker=None, reason=PrefillReason.NO_WORKER_UP, bucket=view.bucket)
    finish = view.backlog_ns + view.work_ns
    own = _group_best(view, usable, finish)
    best, reason = own, PrefillReason.LEAST_FINISH
    for neighbour in (view.bucket - 1, view.bucket + 1):
        other = _best_of((view.worker_bucket == neighbour) & usable, finish, view.tie_offset)
        if other is None or finish[other] >= finish[best]:
            continue
        if finish[own] > view.spill_ratio * finish[other] + view.spill_ns:
            best, reason = other, PrefillReason.SPILLED
    return PrefillDecision(
        worker=best,
        reason=reason,
        bucket=view.bucket,
        work_ns=int(view.work_ns[best]),
        finish_ns=int(finish[best]),
    )


def _usable(states: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Workers that are up, or the suspect ones where none is."""
    up: NDArray[np.bool_] = states == RankState.UP
    if up.any():
        return up
    suspect: NDArray[np.bool_] = states == RankState.SUSPECT
    return suspect


def _group_best(view: PrefillView, usable: NDArray[np.bool_], finish: NDArray[np.int64]) -> int:
    """The best of the bucket's group, or of the nearest group that has a usable worker."""
    distance = np.abs(view.worker_bucket - view.bucket)
    nearest = distance[usable].min()
    best = _best_of(usable & (distance == nearest), finish, view.tie_offset)
    if best is None:
        raise InvariantError(f"no worker for bucket {view.bucket} among {usable.sum()} usable ones")
    return best


def _best_of(mask: NDArray[np.bool_], finish: NDArray[np.int64], tie_offset: int) -> int | None:
    workers = np.flatnonzero(mask)
    if not len(workers):
        return None
    # Rotated so that argmin's "first" is the first from the offset on.
    start = np.searchsorted(workers, tie_offset % len(mask))
    order = np.concatenate((workers[start:], workers[:start]))
    return int(order[np.argmin(finish[order])])


def _split(ideal: NDArray[np.float64], num_workers: int) -> list[int]:
    """Bucket of each worker: whole counts by largest remainder, in one run a bucket."""
    counts = np.floor(ideal + 1e-9).astype(np.int64)
    order = np.argsort(-(ideal - counts), kind="stable")
    for bucket in order[: max(0, num_workers - int(counts.sum()))]:
        counts[bucket] += 1
    return np.repeat(np.arange(len(counts)), counts).tolist()[:num_workers]
