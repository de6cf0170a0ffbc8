"""What a decision trace consists of: facts that planners saw, and what they decided.

One record is one fact or one decision, in the order in which they happened. Between two decisions a
router's view changes in few places, so a record of a decision carries only the cells that changed
since the one before (`cells`), and from time to time a `Keyframe` has all of it: from a keyframe
on, every later view can be built again, exactly.

On the wire a record is a MessagePack array whose first element is its number; fields are only ever
added by raising `FORMAT_VERSION`. The structs are not tracked by the garbage collector (`gc=False`;
they hold nothing that could refer back), so a full ring costs it nothing.

**No text and no token id of any prompt or answer is in a record**, only counts. What a client or
an engine chose itself and what is kept: request ids, tenant names, engine names, and the reason why
an engine was lost, cut at `MAX_REASON_CHARS`.
"""

from typing import Any, ClassVar

import msgspec

FORMAT_VERSION = 2
"""Raised when a record changes; a file of a newer version is refused by name. 2: `hears_peers`."""

MAX_REASON_CHARS = 120
"""Of the reason of a loss. Shorter: the errno at the end of a message is lost. Longer: an engine's
words, which may quote what it was sent, get in."""


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all records."""

    time_ns: int
    """Of the controller's clock."""


class Keyframe(Record, frozen=True, array_like=True, gc=False, tag=1):
    """The whole view of one pool's router."""

    pool: str
    settings: tuple[int, int, bool, int, int, int]
    """Fields of `dsched.routing.snapshot.RouterSettings`, in order."""
    rank_ids: tuple[tuple[str, int], ...]
    """[D] engine and DP rank of each rank number."""
    table: bytes
    """int64 [NUM_ROWS, D]."""
    prices: bytes
    """float64 [3, D]."""
    tie_offset: int
    held: tuple[tuple[str, int, int, str, int | None, tuple[int, ...], int, int, int], ...]
    """Fields of each `dsched.routing.holding.HeldRequest`, in order of arrival."""
    served_tokens: dict[str, int]
    """Prompt tokens that each waiting tenant got from the queue."""
    next_number: int
    """Of the next request that is held."""
    hears_peers: bool = False
    """All other dsched processes over the pool tell this one what they send."""


class Ranks(Record, frozen=True, array_like=True, gc=False, tag=2):
    """Which rank has which number, after ranks were added or removed."""

    pool: str
    rank_ids: tuple[tuple[str, int], ...]


class Arrived(Record, frozen=True, array_like=True, gc=False, tag=3):
    """A request was taken."""

    request_id: str
    pool: str
    arrival_ns: int
    """When the front door had it; `time_ns` is the tick."""
    num_prompt_tokens: int
    max_tokens: int
    tenant: str
    priority: int


class Refused(Record, frozen=True, array_like=True, gc=False, tag=4):
    """A request could not even wait."""

    request_id: str
    model: str
    code: str


class Picked(Record, frozen=True, array_like=True, gc=False, tag=5):
    """The router was asked for a rank."""

    pool: str
    request_id: str
    num_tokens: int
    """Prompt, and after a handoff what was emitted."""
    pinned_dp_rank: int | None
    excluded_ranks: tuple[int, ...]
    num_reserved_tokens: int
    cells: bytes
    """int64 [n, 2]: number and increase of each cell of the view that changed."""
    tie_offset: int
    longest_tokens: int
    """Of the longest running request; only a synchronised router looks at it."""
    rank: int | None
    reason: str
    cost_ns: float | None
    num_eligible: int


class Released(Record, frozen=True, array_like=True, gc=False, tag=6):
    """The router said that a held request can go (or must be refused)."""

    pool: str
    request_id: str
    held_ns: int
    cells: bytes
    tie_offset: int
    longest_tokens: int
    rank: int | None
    reason: str
    cost_ns: float | None
    num_eligible: int


class Preferred(Record, frozen=True, array_like=True, gc=False, tag=7):
    """An operator's policy was asked, and this is where the request goes."""

    request_id: str
    policy: str | None
    """`None`: the router's own decision stands."""
    rank: int | None
    cost_ns: float | None


class Booked(Record, frozen=True, array_like=True, gc=False, tag=8):
    """An attempt goes to a rank."""

    request_id: str
    attempt_id: str
    number: int
    """Counts the request's attempts from 1."""
    engine_id: str
    dp_rank: int
    num_prompt_tokens: int
    epoch: int
    """Of the membership."""


class Held(Record, frozen=True, array_like=True, gc=False, tag=9):
    """A request waits at the router."""

    pool: str
    request_id: str
    num_tokens: int
    num_wanted_tokens: int
    tenant: str
    pinned_dp_rank: int | None
    excluded_ranks: tuple[int, ...]
    priority: int
    is_accepted: bool
    """`False`: too many wait already, and the request was refused."""


class Dropped(Record, frozen=True, array_like=True, gc=False, tag=10):
    """A request waits no longer."""

    pool: str
    request_id: str
    is_served: bool


class FirstToken(Record, frozen=True, array_like=True, gc=False, tag=11):
    """The first token of the answer came."""

    request_id: str


class Stepped(Record, frozen=True, array_like=True, gc=False, tag=12):
    """A rank that computes a prompt reported a step."""

    engine_id: str
    dp_rank: int
    step: int
    step_ns: int
    num_step_tokens: int
    """Prompt and answer tokens together."""
    num_running: int
    num_left_tokens: int
    """Prompt tokens that are still to be computed there."""


class Lost(Record, frozen=True, array_like=True, gc=False, tag=13):
    """A request lost its attempt."""

    request_id: str
    engine_id: str
    layer: str
    """What noticed it: a `dsched.states.LossLayer`."""
    reason: str
    num_output_tokens: int


class Recovered(Record, frozen=True, array_like=True, gc=False, tag=14):
    """How it goes on, and everything that this was decided by."""

    request_id: str
    num_output_tokens: int
    max_tokens: int
    min_tokens: int
    temperature: float | None
    top_k: int | None
    has_seed: bool
    has_penalty: bool
    has_grammar: bool
    method: str
    guarantee: str


class Rationed(Record, frozen=True, array_like=True, gc=False, tag=15):
    """Which of the lost requests may compute their prompts again now."""

    pool: str
    waiting: tuple[tuple[str, int, int], ...]
    """Request id, when it was lost, tokens."""
    num_tokens_under_way: int
    num_ranks_up: int
    tokens_per_rank: int | None
    released: tuple[str, ...]


class HandedOff(Record, frozen=True, array_like=True, gc=False, tag=16):
    """A continued request got its next token; the parts of the pause that its client saw."""

    request_id: str
    method: str
    detect_ns: int
    dispatch_ns: int
    prefill_ns: int


class Ended(Record, frozen=True, array_like=True, gc=False, tag=17):
    """A request ended."""

    request_id: str
    outcome: str
    code: str | None
    """Of the error."""
    num_output_tokens: int
    num_handoffs: int
    guarantee: str | None


class Changed(Record, frozen=True, array_like=True, gc=False, tag=18):
    """Membership after a change: every EP group that is not whole, and the epoch."""

    epoch: int
    groups: tuple[tuple[str, str, str, str], ...]
    """Name, pool, state, reason."""


class Prefilled(Record, frozen=True, array_like=True, gc=False, tag=19):
    """Another engine computes the prompt of the attempt that was just booked."""

    request_id: str
    attempt_id: str
    """Of the prefill half."""
    engine_id: str
    dp_rank: int
    bucket: int
    """Length bucket of the prompt."""
    work_ns: int
    finish_ns: int
    """Estimated time until it is done, what waits there included."""
    reason: str


class PrefillChosen(Record, frozen=True, array_like=True, gc=False, tag=20):
    """The router of a prefill pool was asked for a worker."""

    request_id: str
    workers: tuple[str, ...]
    """[W] name of each worker."""
    arrays: bytes
    """int64 [4, W]: states, worker_bucket, backlog_ns, work_ns of a `PrefillView`."""
    bucket: int
    tie_offset: int
    spill_ratio: float
    spill_ns: int
    worker: int | None
    reason: str
    finish_ns: int


AnyRecord = (
    Keyframe
    | Ranks
    | Arrived
    | Refused
    | Picked
    | Released
    | Preferred
    | Booked
    | Prefilled
    | PrefillChosen
    | Held
    | Dropped
    | FirstToken
    | Stepped
    | Lost
    | Recovered
    | Rationed
    | HandedOff
    | Ended
    | Changed
)


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First frame of a trace file."""

    NAME: ClassVar[str] = "decisions"

    format: int = FORMAT_VERSION
    dsched_version: str
    config_hash: str
    """SHA-256 of the effective configuration; two traces with one hash had the same."""
    source: str
    """`run`, or the simulation that made it: simulated decisions say so."""
    seed: int
    wall_s: int
    """Seconds since 1970 at `clock_ns` of the records' clock; 0 where time is virtual."""
    clock_ns: int
    options: dict[str, Any] = {}
    """What it was started with, for people."""
