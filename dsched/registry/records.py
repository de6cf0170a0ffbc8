"""What dsched processes write into the registry: themselves, and the engines as they see them.

`instances/ID` is one dsched process; `election/rebalancing` names the one that leads.
`engines/ENGINE/ID` is one engine as the process `ID` sees it, with its DP ranks and their load;
several processes over the same engines each write their own view. Values are JSON, so that
`sqlite3` or `etcdctl` shows them to a human.

Processes of neighbouring versions read each other's rows (docs/adr/0007): fields that are not known
are ignored, and every field that is added has a default. A field that changes meaning raises
`ROW_FORMAT`.
"""

import contextlib
from collections.abc import Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from dsched.drivers.wire import UNREADABLE
from dsched.registry.base import Listing

INSTANCES = "instances/"
ENGINES = "engines/"
ELECTION_KEY = "election/rebalancing"
"""Held by the process that may rebalance; its creation is the leader epoch."""
ROW_FORMAT: Final = 1
"""Raised when a field of a row changes meaning. Rows of a later format have it as their field
`format`, those of the first have none; a reader leaves out rows of a higher one than this."""

Count = Annotated[int, Meta(ge=0)]
RankStateName = Literal["up", "suspect", "down", "draining"]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all values. Unknown fields are ignored: a newer dsched may write more."""


class RankRow(Record, frozen=True, kw_only=True):
    """One DP rank: its state and the load it reported last."""

    dp_rank: Count
    state: RankStateName
    num_running: Count
    num_waiting: Count
    num_kv_tokens: Count
    kv_capacity_tokens: Count | None
    """`None` while the engine has not said."""
    step_ns: Count
    """Duration of the last step; 0 when idle."""
    report_age_ns: Count | None
    """Since the report arrived; `None` without one, and then the counts are dsched's bookings."""


class EngineRow(Record, frozen=True, kw_only=True):
    """One engine, as one dsched process sees it."""

    engine_id: str
    pool: str
    kind: str
    """`sim`, `vllm` or `sglang`."""
    model: str
    state: RankStateName
    url: str | None = None
    reason: str | None = None
    """Why it is not up."""
    version: str | None = None
    """The engine's own, as far as it says."""
    missing: tuple[str, ...] = ()
    """Features that its agents could not attach, or had to switch off; sorted."""
    ranks: tuple[RankRow, ...] = ()


class InstanceRow(Record, frozen=True, kw_only=True):
    """One dsched process."""

    instance_id: str
    version: str
    front_door_url: str
    admin_url: str
    started_s: Count
    """Seconds since 1970."""
    peer_endpoint: str | None = None
    """Where it tells others what it has booked; `None` if it does not."""


class LeaderRow(Record, frozen=True, kw_only=True):
    """The process that leads."""

    instance_id: str
    epoch: Count | None = None
    """Filled in when it is read: the revision that created the key."""


class WorkersView(Record, frozen=True, kw_only=True):
    """All that `dsched workers` shows; also the answer of `GET /admin/v1/workers`."""

    instances: tuple[InstanceRow, ...] = ()
    engines: tuple[EngineRow, ...] = ()
    """Sorted by engine id."""
    unreadable: tuple[str, ...] = ()
    """Registry keys whose rows cannot be read, most likely of another version."""
    why_unreadable: dict[str, str] = {}
    """What is wrong with each of them."""
    leader: LeaderRow | None = None
    conflicts: tuple[str, ...] = ()
    """Engine ids that processes use for different engines, with what differs."""


def instance_key(instance_id: str) -> str:
    """Return the key of a dsched process."""
    return f"{INSTANCES}{instance_id}"


def engine_key(engine_id: str, instance_id: str) -> str:
    """Return the key of an engine as a dsched process sees it."""
    return f"{ENGINES}{engine_id}/{instance_id}"


class UnreadableRow(Record, frozen=True, kw_only=True):
    """A row that is left out."""

    reason: str


class _Head(Record, frozen=True, kw_only=True):
    """What a row of any format has."""

    format: Annotated[int, Meta(ge=1)] = 1


class _Writer(Record, frozen=True, kw_only=True):
    """What the row of a process of any format has."""

    version: str


Row = TypeVar("Row", bound=Record)


def read_row(value: bytes, kind: type[Row]) -> Row | UnreadableRow:
    """Read one value of the registry, whoever wrote it.

    >>> read_row(b'{"instance_id": "a", "since": "later"}', LeaderRow)
    LeaderRow(instance_id='a', epoch=None)
    >>> read_row(b'{"instance_id": "a", "format": 2}', LeaderRow)
    UnreadableRow(reason='format 2, and this dsched reads up to 1')
    """
    try:
        number = msgspec.json.decode(value, type=_Head).format
        if number > ROW_FORMAT:
            rule = f"this dsched reads up to {ROW_FORMAT}"
            return UnreadableRow(reason=f"format {number}, and {rule}")
        return msgspec.json.decode(value, type=kind)
    except UNREADABLE as error:
        return UnreadableRow(reason=str(error))


def read_workers(listing: Listing) -> WorkersView:
    """Read a listing of all keys. Of several views of one engine, the one written last counts.

    A row that cannot be read is named in `unreadable`, with the dsched that wrote it if that is
    known.
    """
    instances: list[InstanceRow] = []
    views: dict[str, list[tuple[int, EngineRow]]] = {}
    faults: dict[str, str] = {}
    leader: LeaderRow | None = None
    values = {entry.key: entry.value for entry in listing.entries}
    for entry in listing.entries:
        kind = _kind_of(entry.key)
        row = None if kind is None else read_row(entry.value, kind)
        match row:
            case InstanceRow():
                instances.append(row)
            case EngineRow():
                views.setdefault(row.engine_id, []).append((entry.mod_revision, row))
            case LeaderRow():
                leader = msgspec.structs.replace(row, epoch=entry.create_revision)
            case UnreadableRow(reason=reason):
                faults[entry.key] = f"{_written_by(entry.key, values)}{reason}"
    newest = {name: max(rows, key=lambda each: each[0])[1] for name, rows in sorted(views.items())}
    conflicts = {name: _conflict([row for _, row in rows]) for name, rows in sorted(views.items())}
    return WorkersView(
        instances=tuple(instances),
        engines=tuple(newest.values()),
        unreadable=tuple(faults),
        why_unreadable=faults,
        leader=leader,
        conflicts=tuple(text for text in conflicts.values() if text is not None),
    )


def merge_workers(registered: WorkersView, own: WorkersView) -> WorkersView:
    """Put what a process knows of itself at this moment over what the registry has."""
    instances = {row.instance_id: row for row in (*registered.instances, *own.instances)}
    engines = {row.engine_id: row for row in (*registered.engines, *own.engines)}
    return msgspec.structs.replace(
        registered,
        instances=tuple(row for _, row in sorted(instances.items())),
        engines=tuple(row for _, row in sorted(engines.items())),
    )


def _conflict(views: list[EngineRow]) -> str | None:
    """Say what differs in the views of one engine that must not."""
    for field in ("url", "pool", "model"):
        stated = sorted({str(value) for row in views if (value := getattr(row, field))})
        if len(stated) > 1:
            return f"engine id {views[0].engine_id} has more than one {field}: {', '.join(stated)}"
    return None


def _kind_of(key: str) -> type[InstanceRow] | type[EngineRow] | type[LeaderRow] | None:
    if key == ELECTION_KEY:
        return LeaderRow
    if key.startswith(INSTANCES):
        return InstanceRow
    return EngineRow if key.startswith(ENGINES) else None


def _written_by(key: str, values: Mapping[str, bytes]) -> str:
    """Say which dsched wrote a row that cannot be read, from its key; nothing if that is unknown.

    The version of a process is where every format has it.
    """
    if not key.startswith((INSTANCES, ENGINES)):
        return ""
    instance_id = key.rpartition("/")[2]
    with contextlib.suppress(*UNREADABLE):
        value = values.get(instance_key(instance_id), b"")
        version = msgspec.json.decode(value, type=_Writer).version
        return f"written by dsched {version}, instance {instance_id}: "
    return f"written by instance {instance_id}: "
