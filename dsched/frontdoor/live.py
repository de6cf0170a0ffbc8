"""The live picture: what `dsched top` and the web page show, as one message a second.

A snapshot is what an operator looks at first: pools, engines, DP ranks, traffic, budgets, faults,
what has just happened. Engines and ranks are columns, not objects: 4 096 ranks are ten lists, which
a browser reads without a pause. Enumerations are positions in `STATES`. `None` is "not known",
never a number that stands for it.

`decode_snapshot` is the reader's door: what does not have this form is a `LiveError` that says so
in one line.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from dsched.errors import DschedError

LIVE_VERSION: Final = 1
"""Raised when a field changes meaning; a reader of another version says so and stops."""
STATES: Final = ("up", "suspect", "draining", "down", "removed")
"""Names of `RankState`, by its numbers."""


class LiveError(DschedError):
    """What a dsched answered is no live picture, or there was no answer.

    Raised by whoever reads one; the operator looks at the address.
    """


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the parts. Unknown fields are ignored: a newer dsched may say more."""


class LivePool(Live, frozen=True, kw_only=True):
    """One pool."""

    name: str
    model: str
    role: str
    """`combined`, `prefill` or `decode`."""
    num_engines: int
    num_engines_up: int
    num_ranks: int
    num_ranks_up: int
    num_running: int
    num_waiting: int
    """Requests that wait inside engines, as they report."""
    num_kv_tokens: int
    kv_capacity_tokens: int | None
    """Of the ranks that are up; `None` when one of them does not say."""
    balance: float | None
    """Mean load of the ranks that are up over the largest, load as routing prices it; 1 is even.
    `None` while nothing runs."""
    max_running_requests: int | None
    """What the pool may run, with room kept as `faults.spare` says."""
    absorbs_loss: bool
    spare_reason: str


class LiveEngines(Live, frozen=True, kw_only=True):
    """All engines as columns [N]; `pool` are positions in `LiveSnapshot.pools`."""

    engine_id: list[str]
    pool: list[int]
    kind: list[str]
    state: list[int]
    reason: list[str]
    """Why it is not up; empty when it is."""


class LiveRanks(Live, frozen=True, kw_only=True):
    """All DP ranks as columns [D]; `engine` are positions in `LiveSnapshot.engines`, rising."""

    engine: list[int]
    dp_rank: list[int]
    state: list[int]
    running: list[int]
    waiting: list[int]
    kv_tokens: list[int]
    kv_capacity: list[int | None]
    step_us: list[int]
    """Duration of the last step; 0 when idle."""
    report_age_ms: list[int | None]
    dispatched: list[int]
    num_left_out: int = 0
    """Ranks above the limit of a snapshot."""


class LiveLatency(Live, frozen=True, kw_only=True):
    """Percentiles in milliseconds, interpolated inside the buckets of a histogram."""

    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None


class LiveTraffic(Live, frozen=True, kw_only=True):
    """What clients of one model see. Rates over the last ten seconds, percentiles over a minute."""

    model: str
    num_open: int
    requests_per_s: float
    errors_per_s: float
    output_tokens_per_s: float
    ttft: LiveLatency
    """Arrival to first token."""
    tpot: LiveLatency
    """Time per later token, every token counted."""


class LiveFeature(Live, frozen=True, kw_only=True):
    """One hook inside engines, by how many of their agents have it."""

    name: str
    num_with: int
    num_missing: int


class LiveBudgets(Live, frozen=True, kw_only=True):
    """Limits that plans are made to."""

    step_budget_ms: float | None
    """Time of a step that chunks are cut to; `None`: the engines' own rule."""
    reprefill_tokens_per_rank: int | None
    """Prompt tokens of lost requests computed again at once; `None`: no limit."""
    num_agents: int
    num_agents_heard: int
    features: tuple[LiveFeature, ...] = ()


class LiveCount(Live, frozen=True, kw_only=True):
    """How often something happened since the start."""

    name: str
    count: int


class LiveFaults(Live, frozen=True, kw_only=True):
    """Lost engines and what was done about them, since the start."""

    handoffs: tuple[LiveCount, ...]
    """By `method, cause`."""
    gap: LiveLatency
    """Pause of the clients concerned."""
    num_waiting_handoffs: int
    num_fenced_tokens: int
    num_refused: int
    """Requests refused before they reached a model."""
    num_policy_errors: int
    held_up_ms: int
    """Time in which dsched itself stood still."""
    is_journal_durable: bool
    is_registered: bool
    is_leader: bool


class LiveEvent(Live, frozen=True, kw_only=True):
    """Something that an operator would like to have noticed."""

    seq: int
    time_s: float
    """Seconds since 1970."""
    level: str
    """`info`, `warning` or `error`."""
    subject: str
    """Engine, pool or part of dsched."""
    text: str


class LiveExpertLoad(Live, frozen=True, kw_only=True):
    """Expert load of one engine's last load window."""

    engine_id: str
    num_layers: int
    num_experts: int
    num_steps: int
    age_s: float
    is_simulated: bool
    hottest: list[float]
    """[L] load of the hottest expert over the mean of its layer."""
    balance: list[float] | None
    """[L] mean EP-rank load over the largest, for the placement in use; `None`: not known."""
    cells: str
    """[L, E] uint8 in base64: load over the largest of the layer, times 255."""


class LiveSnapshot(Live, frozen=True, kw_only=True):
    """One dsched process as it sees its cluster at one moment."""

    version: int = LIVE_VERSION
    seq: int
    """Rises by one every sample."""
    time_s: float
    uptime_s: float
    period_s: float
    """Time between samples; above a second when there are so many ranks that one costs too much."""
    dsched_version: str
    instance_id: str
    is_simulated: bool
    """Every engine is simulated inside this process."""
    epoch: int
    num_held: int
    """Requests that wait at the router for a rank."""
    pools: tuple[LivePool, ...]
    engines: LiveEngines
    ranks: LiveRanks
    traffic: tuple[LiveTraffic, ...]
    budgets: LiveBudgets
    faults: LiveFaults
    events: tuple[LiveEvent, ...]
    """The latest, oldest first."""
    expert_load: tuple[LiveExpertLoad, ...] = ()


class LiveHistory(Live, frozen=True, kw_only=True):
    """The past of the ranks of the latest snapshot, oldest sample first, for the heat map."""

    version: int = LIVE_VERSION
    first_seq: int
    num_samples: int
    num_ranks: int
    period_s: float
    rank_keys: list[str]
    """[D] `engine/dp_rank`."""
    state: str
    """[T, D] uint8 in base64; 255: there was no such rank."""
    kv_share: str
    """[T, D] uint8 in base64: KV tokens in use over capacity, times 255."""
    running: str
    """[T, D] little-endian uint16 in base64."""
    step_us: str
    """[T, D] little-endian uint32 in base64."""


class _Version(msgspec.Struct):
    version: int


_DECODER: Final = msgspec.json.Decoder(LiveSnapshot)


def decode_snapshot(data: bytes, *, source: str) -> LiveSnapshot:
    """Read a snapshot; `source` is named in messages.

    Raises:
        LiveError: it is none, is of another version, or its columns do not fit each other.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise LiveError(f"{source} answered something that is no live picture") from None
    if version != LIVE_VERSION:
        raise LiveError(
            f"{source} sends live pictures of version {version}, and this dsched reads version "
            f"{LIVE_VERSION}; install the same dsched on both sides"
        )
    try:
        snapshot = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LiveError(f"{source} answered a live picture that cannot be read: {error}") from None
    fault = column_fault(snapshot)
    if fault is not None:
        raise LiveError(f"{source} answered a live picture that does not add up: {fault}")
    return snapshot


def column_fault(snapshot: LiveSnapshot) -> str | None:
    """Say what is wrong with the columns of a snapshot that somebody else made; `None`: nothing."""
    engines, ranks = snapshot.engines, snapshot.ranks
    num_engines, num_ranks = len(engines.engine_id), len(ranks.engine)
    for part, size in ((engines, num_engines), (ranks, num_ranks)):
        for name in part.__struct_fields__:
            column = getattr(part, name)
            if isinstance(column, list) and len(column) != size:
                return f"column {name} has {len(column)} entries, the first one {size}"
    limits: tuple[tuple[str, Sequence[int], int], ...] = (
        ("engines.pool", engines.pool, len(snapshot.pools)),
        ("engines.state", engines.state, len(STATES)),
        ("ranks.engine", ranks.engine, num_engines),
        ("ranks.state", ranks.state, len(STATES)),
    )
    for name, column, limit in limits:
        if column and not (min(column) >= 0 and max(column) < limit):
            return f"{name} points outside 0..{limit - 1}"
    return None
