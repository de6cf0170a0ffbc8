"""Policies that operators write: what they see, how they are found, and what guards us from them.

A policy is a Python class in a package of the operator's own (`contract` has the protocols). It is
named in the configuration as `module:Class`, or by the name of an entry point in the group
`dsched.policies`, and made once at the start with keyword arguments from the configuration
(`loading`). At run time every call has a budget, and an exception, a wrong answer or a late one
makes the default decide (`guard`). The guide for authors is docs/policies.md.
"""

from dsched.plugins.answers import (
    check_admission,
    check_flags,
    check_position,
    check_priority,
    check_scores,
    check_truth,
    check_weights,
)
from dsched.plugins.contract import (
    API_VERSION,
    METHODS,
    ROUTING_KINDS,
    AdmissionAnswer,
    AdmissionPolicy,
    AdmissionView,
    BucketView,
    ChunkWeightsPolicy,
    HandoffPolicy,
    PriorityPolicy,
    RankCandidate,
    RebalanceTrigger,
    RebalanceView,
    RequestView,
    RoutingFilter,
    RoutingPolicy,
    RoutingScorer,
)
from dsched.plugins.guard import (
    BREAKER_FAILURES,
    BREAKER_PAUSE_NS,
    DEFAULT_BUDGET_NS,
    FailureReason,
    PolicyGuard,
    PolicyLog,
)
from dsched.plugins.inside import ask_weights
from dsched.plugins.loading import (
    ENTRY_POINT_GROUP,
    check_policy,
    find_class,
    fresh_modules,
    kinds_of,
    load_policy,
)
from dsched.plugins.policy_set import PolicySet
from dsched.plugins.routing import RoutingPolicies

__all__ = [
    "API_VERSION",
    "BREAKER_FAILURES",
    "BREAKER_PAUSE_NS",
    "DEFAULT_BUDGET_NS",
    "ENTRY_POINT_GROUP",
    "METHODS",
    "ROUTING_KINDS",
    "AdmissionAnswer",
    "AdmissionPolicy",
    "AdmissionView",
    "BucketView",
    "ChunkWeightsPolicy",
    "FailureReason",
    "HandoffPolicy",
    "PolicyGuard",
    "PolicyLog",
    "PolicySet",
    "PriorityPolicy",
    "RankCandidate",
    "RebalanceTrigger",
    "RebalanceView",
    "RequestView",
    "RoutingFilter",
    "RoutingPolicies",
    "RoutingPolicy",
    "RoutingScorer",
    "ask_weights",
    "check_admission",
    "check_flags",
    "check_policy",
    "check_position",
    "check_priority",
    "check_scores",
    "check_truth",
    "check_weights",
    "find_class",
    "fresh_modules",
    "kinds_of",
    "load_policy",
]
