"""What the front door counts, in plain integers: the token path has no time for more.

`FrontDoorStats` is read by whoever renders metrics, at the moment of a scrape. `FrontDoorMetrics`
is told of each request once, at its end, and may be anything.
"""

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from dsched.ids import RequestId

MS = 1_000_000

TTFT_BOUNDS_NS = tuple(
    ms * MS
    for ms in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000)
)
ITL_BOUNDS_NS = tuple(ms * MS for ms in (1, 2, 5, 10, 20, 30, 50, 75, 100, 200, 500, 1_000, 5_000))
DURATION_BOUNDS_NS = tuple(
    ms * MS for ms in (5, 20, 100, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000)
)


class Api(StrEnum):
    """The API a request came through; a label."""

    COMPLETIONS = "completions"
    CHAT = "chat_completions"


class Outcome(StrEnum):
    """How a request ended for its client; a label."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"
    REFUSED = "refused"
    DISCONNECTED = "disconnected"
    SLOW_READER = "slow_reader"


class LatencyHistogram:
    """Counts per bucket; a value lies in the first bucket whose bound is not below it.

    >>> histogram = LatencyHistogram((10, 20))
    >>> histogram.observe(10); histogram.observe(21, 3)
    >>> histogram.counts, histogram.sum_ns
    ([1, 0, 3], 73)
    """

    __slots__ = ("bounds_ns", "counts", "sum_ns")

    def __init__(self, bounds_ns: Sequence[int]) -> None:
        self.bounds_ns = tuple(bounds_ns)
        self.counts = [0] * (len(bounds_ns) + 1)
        self.sum_ns = 0

    def observe(self, value_ns: int, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds_ns, value_ns)] += count
        self.sum_ns += value_ns * count


class ModelStats:
    """Counters of one model."""

    __slots__ = (
        "duration",
        "itl",
        "num_cached_tokens",
        "num_open",
        "num_output_tokens",
        "num_prompt_tokens",
        "num_requests",
        "ttft",
    )

    def __init__(self) -> None:
        self.num_open = 0
        """Requests in work."""
        self.num_requests: dict[tuple[Api, Outcome], int] = {}
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.ttft = LatencyHistogram(TTFT_BOUNDS_NS)
        """Arrival to the first token; counted when it is there, once a request."""
        self.itl = LatencyHistogram(ITL_BOUNDS_NS)
        """Time per later token, as the client sees it."""
        self.duration = LatencyHistogram(DURATION_BOUNDS_NS)
        """Arrival to the end."""


class FrontDoorStats:
    """Counters of the whole front door. `per_model` has configured models only."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self.per_model = {model: ModelStats() for model in models}
        self.num_refused: dict[int, int] = {}
        """Requests refused before they reached a model, by HTTP status."""

    def of(self, model: str) -> ModelStats:
        """Return the counters of a model that the controller knows."""
        stats = self.per_model.get(model)
        if stats is None:
            stats = self.per_model[model] = ModelStats()
        return stats

    @property
    def num_open(self) -> int:
        return sum(each.num_open for each in self.per_model.values())


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request, when it has ended."""

    request_id: RequestId
    model: str
    api: Api
    outcome: Outcome
    is_stream: bool
    num_prompt_tokens: int
    num_output_tokens: int
    duration_ns: int
    ttft_ns: int | None


class FrontDoorMetrics(Protocol):
    """Hears of every request that reached a model. Must not raise and must not block."""

    def on_request_end(self, record: RequestRecord) -> None: ...


class NoMetrics:
    """Hears and forgets."""

    def on_request_end(self, record: RequestRecord) -> None:
        del record
