"""The two kinds of policy that run inside engine processes: chunk weights and rebalance triggers.

In an engine there is no controller; the planner's own loop asks. Both questions have a default for
where the policy says nothing or fails: weights stay as they are, placements are renewed.
"""

from functools import partial

from dsched.plugins.answers import check_truth, check_weights
from dsched.plugins.contract import BucketView, RebalanceView
from dsched.plugins.guard import AnyGuard


def ask_weights(guard: AnyGuard, view: BucketView) -> tuple[float, ...] | None:
    """The weights of the length buckets; `None` leaves them."""
    check = partial(check_weights, num_buckets=len(view.num_requests))
    return guard.call(partial(guard.policy.weights, view), check)


def ask_rebalance(guard: AnyGuard, view: RebalanceView) -> bool:
    """Whether placements should be renewed now; the default is yes."""
    answer = guard.call(partial(guard.policy.should_rebalance, view), check_truth)
    return answer is not False
