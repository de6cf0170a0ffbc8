"""States of ranks and engines, and what a loss was noticed by: words that planners share."""

from enum import IntEnum, StrEnum


class RankState(IntEnum):
    """Whether a rank, an engine or an EP group may get new requests. Compiled kernels compare the
    numbers."""

    UP = 0
    SUSPECT = 1
    """Shows no progress: gets nothing new while any rank is up."""
    DRAINING = 2
    """Finishes what it has and gets nothing new."""
    DOWN = 3
    REMOVED = 4


class PoolRole(StrEnum):
    """Which part of a request the engines of a pool compute."""

    COMBINED = "combined"
    PREFILL = "prefill"
    DECODE = "decode"


class Evidence(StrEnum):
    """What speaks for a loss."""

    SOCKET = "socket"
    """A connection broke or was refused, or the engine itself says so."""
    PROGRESS = "progress"
    """Work that should have gone on stands still."""
    LEASE = "lease"
    """It was not heard in time, and nothing else: it may be we who cannot hear."""


class LossLayer(StrEnum):
    """What noticed that a request lost its attempt, or took it away; for people and the trace."""

    SOCKET = "socket"
    """Its connection broke or was refused."""
    PROGRESS = "progress"
    """Its engine gave neither a token nor a step in time."""
    STREAM = "stream"
    """It got no token while its engine went on."""
    GROUP = "group"
    """Another engine of the EP group was lost."""
    RANK = "rank"
    """Its DP rank was lost while the engine answers."""
    BUSY = "busy"
    """The engine is alive and had no room."""
    DRAIN = "drain"
    """An operator took the engine out of service."""
    MOVE = "move"
    """It was moved to a rank with less to do."""
    TRANSFER = "transfer"
    """The KV of its prompt did not arrive from the prefill engine."""
    RESTART = "restart"
    """dsched itself was restarted, and the client asked again."""
