"""Facts from outside that wait for the next tick. Frozen, past tense."""

from dataclasses import dataclass

import msgspec

from dsched.controller.request import InferenceRequest, RequestStream
from dsched.drivers.base import EngineDescription
from dsched.ids import EngineId, RankId, RequestId
from dsched.states import Evidence


class RequestArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request was accepted by the front door."""

    request: InferenceRequest
    stream: RequestStream
    time_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLost:
    """An attempt ended before its request did, and may be tried on another rank."""

    request_id: RequestId
    engine_id: EngineId
    reason: str
    is_engine_lost: bool
    """The engine broke; `False` when it is alive and had no room."""
    is_moved: bool = False
    """Nothing broke: a drain took the request away."""
    is_transfer_failed: bool = False
    """The KV of its prompt did not arrive."""
    is_rank_fine: bool = False
    """The rank is not to be blamed, and may be chosen again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCameUp:
    """An engine answers and says what it is."""

    description: EngineDescription


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWentDown:
    """An engine cannot serve."""

    engine_id: EngineId
    reason: str
    evidence: Evidence = Evidence.SOCKET


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLost:
    """One DP rank is gone while its engine answers."""

    rank_id: RankId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCameBack:
    """A lost DP rank works again."""

    rank_id: RankId


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProgressed:
    """A suspect engine has reported a new step."""

    engine_id: EngineId


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked:
    """An operator takes an engine out of service, or puts it back."""

    engine_id: EngineId
    is_draining: bool
    deadline_ns: int | None = None
    """When what still runs there is handed over; `None` lets it finish."""


Event = (
    RequestArrived
    | AttemptLost
    | EngineCameUp
    | EngineWentDown
    | EngineProgressed
    | RankLost
    | RankCameBack
    | DrainAsked
)
