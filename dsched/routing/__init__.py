"""Which prefill worker and which decode rank a request goes to."""

from dsched.routing.decode import DecodeRouter, RoutingDecision, RoutingReason, RoutingRequest
from dsched.routing.ledger import RankState, ReportOutcome
from dsched.routing.migration import (
    MigrationConfig,
    MigrationPlan,
    MigrationView,
    Move,
    plan_migrations,
)
from dsched.routing.prefill import PrefillConfig, PrefillDecision, PrefillRouter
from dsched.routing.prefix_index import PrefixIndex

__all__ = [
    "DecodeRouter",
    "MigrationConfig",
    "MigrationPlan",
    "MigrationView",
    "Move",
    "PrefillConfig",
    "PrefillDecision",
    "PrefillRouter",
    "PrefixIndex",
    "RankState",
    "ReportOutcome",
    "RoutingDecision",
    "RoutingReason",
    "RoutingRequest",
    "plan_migrations",
]
