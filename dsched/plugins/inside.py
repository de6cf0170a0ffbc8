"""The kind of policy that runs inside engine processes: chunk weights.

There is no controller there; the loop around the step planner asks. Where the policy says nothing
or fails the weights stay as they are.
"""

from functools import partial

from dsched.plugins.answers import check_weights
from dsched.plugins.contract import BucketView
from dsched.plugins.guard import AnyGuard


def ask_weights(guard: AnyGuard, view: BucketView) -> tuple[float, ...] | None:
    """The weights of the length buckets; `None` leaves them."""
    check = partial(check_weights, num_buckets=len(view.num_requests))
    return guard.call(partial(guard.policy.weights, view), check)
