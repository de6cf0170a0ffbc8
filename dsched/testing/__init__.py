"""Doubles and recorders for tests: of dsched's own, and of drivers and policies by others.

A double passes the same conformance tests as what it stands for.
"""

from dsched.testing.policies import example_candidates, example_request, policy_check

__all__ = ["example_candidates", "example_request", "policy_check"]
