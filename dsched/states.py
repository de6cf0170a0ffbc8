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


class Evidence(StrEnum):
    """What speaks for a loss."""

    SOCKET = "socket"
    """A connection broke or was refused, or the engine itself says so."""
    PROGRESS = "progress"
    """Work that should have gone on stands still."""
    LEASE = "lease"
    """It was not heard in time, and nothing else: it may be we who cannot hear."""
