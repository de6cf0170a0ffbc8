"""Decide which of the requests that lost their engine may compute their prompts again now.

In:  the requests that wait to go on, what is being recomputed already, and the ranks that are up.
Out: a `RationPlan`: who goes now, in order.

When a large group dies, hundreds of long contexts want to be prefilled at once on the survivors,
and every new request waits behind them. So recomputing is rationed: on the ranks that are up, at
most `tokens_per_rank` prompt tokens of lost requests are under way for each rank. A new request
then waits for at most that much work of this kind. The ration feeds itself: what has been
prefilled makes room for the next, so no token of the ration stays unused and no clock is needed.

Order: who was lost first, then the shortest (most clients go on soonest), then the id. A request
that is larger than the whole ration goes when nothing else is under way, so nobody waits for ever.

A prefix that the target can load from a KV store is priced at `stored_token_price` of computing it.

Pure. O(n log n).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dsched.ids import RequestId

STORED_TOKEN_PRICE = 0.05
"""Cost of loading a KV token over computing it (assumed). Above: loads are held back for nothing.
Below: they compete with the step for memory bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRequest:
    """A request that waits to go on."""

    request_id: RequestId
    lost_ns: int
    num_tokens: int
    """Prompt and emitted tokens that the next attempt begins with."""
    num_stored_tokens: int = 0
    """Of these, what a shared KV store has."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_stored_tokens <= self.num_tokens:
            raise ValueError(
                f"request {self.request_id}: {self.num_stored_tokens} stored of "
                f"{self.num_tokens} tokens"
            )

    def price(self, stored_token_price: float) -> int:
        """Prompt tokens that it counts for."""
        computed = self.num_tokens - self.num_stored_tokens
        return computed + round(stored_token_price * self.num_stored_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class RationView:
    """What the plan is made from."""

    waiting: Sequence[LostRequest]
    num_tokens_under_way: int
    """Prices of the lost requests that were sent and have not had their first token."""
    num_ranks_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RationPlan:
    """Who goes on now."""

    released: tuple[RequestId, ...]
    num_tokens: int
    """What they add to what is under way."""


def plan_ration(
    view: RationView,
    *,
    tokens_per_rank: int | None,
    stored_token_price: float = STORED_TOKEN_PRICE,
) -> RationPlan:
    """Choose who goes on now. `tokens_per_rank=None`: everybody.

    Raises `ValueError` for a ration below 1 or a negative count.

    >>> lost = [LostRequest(request_id=RequestId(name), lost_ns=0, num_tokens=size)
    ...         for name, size in (("a", 600), ("b", 300), ("c", 200))]
    >>> view = RationView(waiting=lost, num_tokens_under_way=0, num_ranks_up=1)
    >>> plan_ration(view, tokens_per_rank=512).released
    ('c', 'b')
    """
    if tokens_per_rank is not None and tokens_per_rank < 1:
        raise ValueError(f"tokens_per_rank is {tokens_per_rank}; it must be at least 1")
    if view.num_tokens_under_way < 0 or view.num_ranks_up < 0:
        raise ValueError(
            f"{view.num_tokens_under_way} tokens under way on {view.num_ranks_up} ranks: neither "
            "may be negative"
        )
    ordered = sorted(
        view.waiting,
        key=lambda lost: (lost.lost_ns, lost.price(stored_token_price), lost.request_id),
    )
    limit = None if tokens_per_rank is None else tokens_per_rank * max(1, view.num_ranks_up)
    released: list[RequestId] = []
    under_way = view.num_tokens_under_way
    for lost in ordered:
        price = lost.price(stored_token_price)
        if limit is not None and under_way and under_way + price > limit:
            break  # in order: a short one behind must not overtake for ever
        released.append(lost.request_id)
        under_way += price
    return RationPlan(released=tuple(released), num_tokens=under_way - view.num_tokens_under_way)
