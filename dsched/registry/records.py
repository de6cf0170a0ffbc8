"""What dsched processes write into the registry: themselves, and the engines as they see them.

`instances/ID` is one dsched process; `election/rebalancing` names the one that leads.
`engines/ENGINE/ID` is one engine as the process `ID` sees it, with its DP ranks and their load;
several processes over the same engines each write their own view. Values are JSON, so that
`sqlite3` or `etcdctl` shows them to a human.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dsched.registry.base import Listing

INSTANCES = "instances/"
ENGINES = "engines/"
ELECTION_KEY = "election/rebalancing"
"""Held by the process that may rebalance; its creation is the leader epoch."""

Count = Annotated[int, Meta(ge=0)]
RankStateName = Literal["up", "suspect", "down", "draining"]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all values."""


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
    """Registry keys of another version."""
    leader: LeaderRow | None = None
    conflicts: tuple[str, ...] = ()
    """Engine ids that processes use for different engines, with what differs."""


def instance_key(instance_id: str) -> str:
    """Return the key of a dsched process."""
    return f"{INSTANCES}{instance_id}"


def engine_key(engine_id: str, instance_id: str) -> str:
    """Return the key of an engine as a dsched process sees it."""
    return f"{ENGINES}{engine_id}/{instance_id}"


def read_workers(listing: Listing) -> WorkersView:
    """Read a listing of all keys. Of several views of one engine, the one written last counts.

    A value that cannot be read (of an older or newer dsched) is named in `unreadable`.
    """
    instances: list[InstanceRow] = []
    views: dict[str, list[tuple[int, EngineRow]]] = {}
    unreadable: list[str] = []
    leader: LeaderRow | None = None
    for entry in listing.entries:
        try:
            if entry.key.startswith(INSTANCES):
                instances.append(msgspec.json.decode(entry.value, type=InstanceRow))
            elif entry.key.startswith(ENGINES):
                row = msgspec.json.decode(entry.value, type=EngineRow)
                views.setdefault(row.engine_id, []).append((entry.mod_revision, row))
            elif entry.key == ELECTION_KEY:
                leader = msgspec.json.decode(entry.value, type=LeaderRow)
                leader = msgspec.structs.replace(leader, epoch=entry.create_revision)
        except msgspec.MsgspecError:
            unreadable.append(entry.key)
    newest = {name: max(rows, key=lambda each: each[0])[1] for name, rows in sorted(views.items())}
    conflicts = {name: _conflict([row for _, row in rows]) for name, rows in sorted(views.items())}
    return WorkersView(
        instances=tuple(instances),
        engines=tuple(newest.values()),
        unreadable=tuple(unreadable),
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
