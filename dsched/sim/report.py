"""What a replay measured, in simulated time.

Every figure is of simulated time and of a cost model, never of hardware; the word stands in every
output. A figure that has no sample (the time per later token of answers of one token) is absent,
never NaN.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsched import __version__
from dsched.sim.traces import NS_PER_MS, NS_PER_S, RowCounts

PERCENTILES = (50, 90, 99)
MAX_LISTED_REQUESTS = 1_000
"""Replays up to this size list every request in their JSON. Above: the file is for machines only
and the digest says whether two replays are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Mean and percentiles of one measure, in milliseconds."""

    num_samples: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None

    @classmethod
    def from_ns(cls, values_ns: NDArray[np.int64] | NDArray[np.float64]) -> "Quantiles":
        """Summarise; all `None` without samples."""
        if len(values_ns) == 0:
            return cls(num_samples=0, mean_ms=None, p50_ms=None, p90_ms=None, p99_ms=None)
        values_ms = np.asarray(values_ns, dtype=np.float64) / NS_PER_MS
        p50, p90, p99 = (float(each) for each in np.percentile(values_ms, PERCENTILES))
        return cls(
            num_samples=len(values_ms),
            mean_ms=float(values_ms.mean()),
            p50_ms=p50,
            p90_ms=p90,
            p99_ms=p99,
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "mean_ms": self.mean_ms,
            "p50_ms": self.p50_ms,
            "p90_ms": self.p90_ms,
            "p99_ms": self.p99_ms,
        }


@dataclass(slots=True)
class StepMeter:
    """Sums over the steps of all engines."""

    idle_rank_ns: float
    """What a step costs a rank without work."""
    num_steps: int = 0
    busy_ns: int = 0
    """Sum of the steps' durations."""
    mean_work_ns: float = 0.0
    """Sum over steps of the mean over ranks of the time beyond an idle rank's."""
    max_work_ns: float = 0.0
    mean_decode_ns: float = 0.0
    """The same two sums for the decodes alone."""
    max_decode_ns: float = 0.0
    num_step_tokens: int = 0

    def add(
        self,
        rank_ns: NDArray[np.int64],
        decode_ns: NDArray[np.int64],
        *,
        duration_ns: int,
        num_tokens: int,
    ) -> None:
        self.num_steps += 1
        self.mean_decode_ns += float(decode_ns.mean()) - self.idle_rank_ns
        self.max_decode_ns += float(decode_ns.max()) - self.idle_rank_ns
        self.busy_ns += duration_ns
        self.mean_work_ns += float(rank_ns.mean()) - self.idle_rank_ns
        self.max_work_ns += float(rank_ns.max()) - self.idle_rank_ns
        self.num_step_tokens += num_tokens

    @property
    def balance(self) -> float | None:
        """Mean over ranks / maximum over ranks of the work, summed over all steps."""
        return self.mean_work_ns / self.max_work_ns if self.max_work_ns > 0 else None

    @property
    def decode_balance(self) -> float | None:
        """The same of the decodes alone: what placing requests can change."""
        return self.mean_decode_ns / self.max_decode_ns if self.max_decode_ns > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestTimes:
    """What happened to each request [N]; -1 where it did not happen."""

    arrival_ns: NDArray[np.int64]
    first_token_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    num_output_tokens: NDArray[np.int64]
    rank: NDArray[np.int64]
    """Rank that served it, engine after engine."""
    is_finished: NDArray[np.bool_]

    @property
    def ttft_ns(self) -> NDArray[np.int64]:
        """Time to first token of the finished requests."""
        return (self.first_token_ns - self.arrival_ns)[self.is_finished]

    @property
    def tpot_ns(self) -> NDArray[np.float64]:
        """Mean time per later token of the finished requests with at least two tokens."""
        has_later = self.is_finished & (self.num_output_tokens > 1)
        span = (self.end_ns - self.first_token_ns)[has_later]
        tpot: NDArray[np.float64] = span / (self.num_output_tokens[has_later] - 1)
        return tpot

    @property
    def makespan_ns(self) -> int:
        """First arrival to last end."""
        if len(self.arrival_ns) == 0:
            return 0
        return int(self.end_ns.max() - self.arrival_ns.min())

    def share_below(self, num_requests: int) -> float | None:
        """Share of the makespan with fewer than `num_requests` requests in the system.

        In that time there are idle ranks whatever the policy does: all policies tie.
        """
        if self.makespan_ns == 0:
            return None
        times = np.concatenate((self.arrival_ns, self.end_ns))
        change = np.repeat([1, -1], len(self.arrival_ns))
        order = np.argsort(times, kind="stable")
        present = np.cumsum(change[order])[:-1]
        below = np.diff(times[order])[present < num_requests]
        return float(below.sum() / self.makespan_ns)

    def as_columns(self) -> dict[str, list[int | None]]:
        """Each request's times (after the first arrival) and rank; `None` where it has none."""
        start_ns = int(self.arrival_ns.min()) if len(self.arrival_ns) else 0

        def since_start(times_ns: NDArray[np.int64]) -> list[int | None]:
            return [time_ns - start_ns if time_ns >= 0 else None for time_ns in times_ns.tolist()]

        return {
            "arrival_ns": since_start(self.arrival_ns),
            "end_ns": since_start(self.end_ns),
            "first_token_ns": since_start(self.first_token_ns),
            "num_output_tokens": self.num_output_tokens.tolist(),
            "rank": [rank if rank >= 0 else None for rank in self.rank.tolist()],
        }

    def digest(self) -> str:
        """Fingerprint of every decision and every time."""
        sha = hashlib.sha256()
        for array in (self.rank, self.first_token_ns, self.end_ns, self.num_output_tokens):
            sha.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return sha.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayReport:
    """The result of one replay."""

    source: str
    seed: int
    policy: str
    num_engines: int
    num_dp_ranks: int
    """Of each engine."""
    rows: RowCounts
    num_replayed: int
    times: RequestTimes
    steps: StepMeter
    num_preemptions: int
    num_errors: Mapping[str, int]
    """Requests that did not finish, by error code."""
    num_prompt_tokens: int
    """Of all replayed requests."""
    options: Mapping[str, Any]

    @property
    def num_ranks(self) -> int:
        return self.num_engines * self.num_dp_ranks

    @property
    def num_output_tokens(self) -> int:
        return int(self.times.num_output_tokens.sum())

    def as_json(self) -> dict[str, Any]:
        """Plain values only, none of them from the wall clock, none of them NaN."""
        times = self.times
        seconds = times.makespan_ns / NS_PER_S
        per_rank = np.bincount(times.rank[times.rank >= 0], minlength=self.num_ranks)
        return {
            "balance": {
                "decode_mean_over_max_rank_work": self.steps.decode_balance,
                "mean_over_max_rank_work": self.steps.balance,
                "requests_per_rank": per_rank.tolist(),
                "share_of_time_with_fewer_requests_than_ranks": times.share_below(self.num_ranks),
            },
            "cluster": {
                "num_dp_ranks": self.num_dp_ranks,
                "num_engines": self.num_engines,
                "num_ranks": self.num_ranks,
            },
            "digest": times.digest(),
            "dsched_version": __version__,
            "latency": {
                "tpot": Quantiles.from_ns(times.tpot_ns).as_json(),
                "ttft": Quantiles.from_ns(times.ttft_ns).as_json(),
            },
            "options": dict(sorted(self.options.items())),
            "per_request": (
                times.as_columns() if self.num_replayed <= MAX_LISTED_REQUESTS else None
            ),
            "policy": self.policy,
            "requests": {
                "num_errors": dict(sorted(self.num_errors.items())),
                "num_finished": int(times.is_finished.sum()),
                "num_preemptions": self.num_preemptions,
                "num_replayed": self.num_replayed,
            },
            "rows": {
                "num_dropped": self.rows.num_dropped,
                "num_read": self.rows.num_read,
                "num_replayed": self.num_replayed,
                "num_zero_input": self.rows.num_zero_input,
                "num_zero_input_and_output": self.rows.num_zero_both,
                "num_zero_output": self.rows.num_zero_output,
            },
            "seed": self.seed,
            "simulated": True,
            "steps": {
                "busy_s": self.steps.busy_ns / NS_PER_S,
                "num_steps": self.steps.num_steps,
                "num_tokens_computed": self.steps.num_step_tokens,
            },
            "throughput": {
                "makespan_s": seconds,
                "output_tokens_per_s": self.num_output_tokens / seconds if seconds else None,
                "requests_per_s": int(times.is_finished.sum()) / seconds if seconds else None,
            },
            "tokens": {
                "num_output": self.num_output_tokens,
                "num_prompt": self.num_prompt_tokens,
            },
            "trace": self.source,
        }
