"""Make workloads: lengths from a distribution, arrivals from a process, all from one seed.

In:  distributions, a number of requests, a seed. Out: the same `Trace` that a file gives, so that
nothing depends on a file being there.

Lengths and arrivals draw from streams of their own: another arrival rate leaves the lengths as
they were, and the comparison of two rates compares the same requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.rng import stream
from dsched.sim.traces import NS_PER_S, RowCounts, Trace


def _check_rate(rate_per_s: float) -> None:
    if not 0 < rate_per_s < np.inf:
        raise ValueError(f"rate_per_s {rate_per_s} must be positive")


def _check_tokens(name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{name} {count} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLength:
    """Every length is `num_tokens`."""

    num_tokens: int

    def __post_init__(self) -> None:
        _check_tokens("num_tokens", self.num_tokens)

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:  # noqa: ARG002
        return np.full(count, self.num_tokens, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormalLength:
    """Log-normal lengths, cut to `min_tokens..max_tokens`."""

    median_tokens: float
    sigma: float
    """Standard deviation of the logarithm; 1 is typical of chat, 1.2 of mixed traffic."""
    min_tokens: int = 1
    max_tokens: int = 131_072

    def __post_init__(self) -> None:
        _check_tokens("min_tokens", self.min_tokens)
        if self.max_tokens < self.min_tokens:
            raise ValueError(f"max_tokens {self.max_tokens} is below min_tokens {self.min_tokens}")
        if not (0 < self.median_tokens < np.inf and 0 <= self.sigma < np.inf):
            raise ValueError(
                f"median_tokens {self.median_tokens} must be positive and sigma {self.sigma} "
                "must not be negative"
            )

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        values = rng.lognormal(np.log(self.median_tokens), self.sigma, count)
        return np.clip(np.rint(values), self.min_tokens, self.max_tokens).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmpiricalLength:
    """Lengths drawn, each equally likely, from those that were seen."""

    seen_tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.seen_tokens:
            raise ValueError("seen_tokens is empty; an empirical distribution needs a length")
        for count in self.seen_tokens:
            _check_tokens("seen_tokens", count)

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        seen = np.array(self.seen_tokens, dtype=np.int32)
        drawn: NDArray[np.int32] = seen[rng.integers(len(seen), size=count)]
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureLength:
    """Each length comes from one of `parts`, chosen by weight."""

    parts: tuple["LengthDistribution", ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.parts) != len(self.weights) or not self.parts:
            raise ValueError(f"{len(self.parts)} parts need as many weights, not {self.weights}")
        if not all(0 <= weight < np.inf for weight in self.weights) or sum(self.weights) <= 0:
            raise ValueError(f"weights {self.weights} must not be negative, and not all zero")

    def sample(self, rng: np.random.Generator, count: int) -> NDArray[np.int32]:
        share = np.array(self.weights) / sum(self.weights)
        part = rng.choice(len(self.parts), size=count, p=share)
        # Each part draws for every request, so that the weights move no other draw.
        drawn: NDArray[np.int32] = np.stack([one.sample(rng, count) for one in self.parts])
        return drawn[part, np.arange(count)]


LengthDistribution = FixedLength | LogNormalLength | EmpiricalLength | MixtureLength


@dataclass(frozen=True, slots=True, kw_only=True)
class PoissonArrivals:
    """Independent arrivals, `rate_per_s` on average."""

    rate_per_s: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)

    def arrival_ns(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        return _cumulate(rng.exponential(1 / self.rate_per_s, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class GammaArrivals:
    """Bursty arrivals: gamma gaps whose coefficient of variation is `cv` (1 is Poisson)."""

    rate_per_s: float
    cv: float

    def __post_init__(self) -> None:
        _check_rate(self.rate_per_s)
        if not 0 < self.cv < np.inf:
            raise ValueError(f"cv {self.cv} must be positive")

    def arrival_ns(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:
        shape = 1 / self.cv**2
        return _cumulate(rng.gamma(shape, 1 / (self.rate_per_s * shape), count))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`max_concurrency` clients, each sending the next request when its last one ends."""

    max_concurrency: int

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ValueError(f"max_concurrency {self.max_concurrency} must be at least 1")

    def arrival_ns(self, rng: np.random.Generator, count: int) -> NDArray[np.int64]:  # noqa: ARG002
        return np.zeros(count, dtype=np.int64)


Arrivals = PoissonArrivals | GammaArrivals | ClosedLoop

CHAT_PROMPT = LogNormalLength(median_tokens=1_000, sigma=1.2, max_tokens=32_768)
CHAT_OUTPUT = LogNormalLength(median_tokens=200, sigma=1.0, max_tokens=4_096)


def generate_workload(
    *,
    num_requests: int = 1_000,
    seed: int = 0,
    prompt: LengthDistribution = CHAT_PROMPT,
    output: LengthDistribution = CHAT_OUTPUT,
    arrivals: Arrivals = PoissonArrivals(rate_per_s=10.0),
) -> Trace:
    """Draw `num_requests` requests; the same arguments give the same trace anywhere.

    >>> trace = generate_workload(num_requests=3, prompt=FixedLength(num_tokens=5))
    >>> trace.num_prompt_tokens.tolist()
    [5, 5, 5]
    """
    if num_requests < 0:
        raise ValueError(f"num_requests {num_requests} must not be negative")
    if seed < 0:
        raise ValueError(f"seed {seed} must not be negative")
    return Trace(
        source=f"generated, seed {seed}",
        shape="generated",
        arrival_ns=arrivals.arrival_ns(stream(seed, "workload.arrivals"), num_requests),
        num_prompt_tokens=prompt.sample(stream(seed, "workload.prompt"), num_requests),
        num_output_tokens=output.sample(stream(seed, "workload.output"), num_requests),
        counts=RowCounts(
            num_read=num_requests,
            num_dropped=0,
            num_zero_output=0,
            num_zero_input=0,
            num_zero_both=0,
        ),
        max_concurrency=arrivals.max_concurrency if isinstance(arrivals, ClosedLoop) else None,
    )


def _cumulate(gaps_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rounding each gap keeps the arrivals exact integers however long the trace is."""
    gaps_ns = np.rint(gaps_s * NS_PER_S).astype(np.int64)
    if len(gaps_ns):
        gaps_ns[0] = 0
    return np.cumsum(gaps_ns)


def empirical(lengths: Sequence[int] | NDArray[np.int32]) -> EmpiricalLength:
    """Make an `EmpiricalLength` of a column of a trace."""
    return EmpiricalLength(seen_tokens=tuple(int(count) for count in lengths))
