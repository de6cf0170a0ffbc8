"""Which prefill worker and which decode rank a request goes to."""

from dsched.routing.decode import DecodeRouter, RoutingDecision, RoutingReason, RoutingRequest
from dsched.routing.ledger import RankState, ReportOutcome

__all__ = [
    "DecodeRouter",
    "RankState",
    "ReportOutcome",
    "RoutingDecision",
    "RoutingReason",
    "RoutingRequest",
]
