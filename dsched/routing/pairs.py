"""Choose a prefill worker and a decode rank for one request.

With separate pools a request needs one of each; with a combined pool the decode rank prefills too.
The decode rank is chosen first: if no rank has room the request is held before any prefill is
spent on it, and a KV cache that nobody can take would fill the prefill worker.

Pure: reads both routers, changes neither.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from dsched.routing.decode import DecodeRouter, RoutingDecision, RoutingRequest
from dsched.routing.prefill import PrefillDecision, PrefillRouter


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDecision:
    """A worker of each pool, or why not; both halves go to the journal."""

    decode: RoutingDecision
    prefill: PrefillDecision | None
    """`None` when the decode rank prefills, or has not been found."""

    @property
    def is_placed(self) -> bool:
        """Both halves have a place."""
        has_prefill = self.prefill is None or self.prefill.worker is not None
        return self.decode.rank is not None and has_prefill


def pick_pair(
    request: RoutingRequest,
    *,
    decode: DecodeRouter,
    prefill: PrefillRouter | None,
    now_ns: int,
    num_cached_tokens: int | Sequence[int] = 0,
) -> PairDecision:
    """Choose for a request that has just arrived. `num_cached_tokens` as in `PrefillRouter.pick`.

    A pin names a decode rank; prefill workers are free.
    """
    rank = decode.pick(request, now_ns)
    if rank.rank is None or prefill is None:
        return PairDecision(decode=rank, prefill=None)
    worker = prefill.pick(
        num_prompt_tokens=request.num_prompt_tokens,
        now_ns=now_ns,
        num_cached_tokens=num_cached_tokens,
    )
    return PairDecision(decode=rank, prefill=worker)


def book_pair(
    pair: PairDecision,
    request_key: Hashable,
    *,
    num_prompt_tokens: int,
    decode: DecodeRouter,
    prefill: PrefillRouter | None,
    now_ns: int,
) -> None:
    """Count a placed pair in both routers.

    Raises:
        ValueError: the pair is not placed.
    """
    if not pair.is_placed or pair.decode.rank is None:
        raise ValueError(f"request {request_key!r} has no place: {pair.decode.reason}")
    decode.book(pair.decode.rank, request_key, num_prompt_tokens=num_prompt_tokens, now_ns=now_ns)
    if prefill is not None and pair.prefill is not None and pair.prefill.worker is not None:
        prefill.book(
            pair.prefill.worker,
            request_key,
            work_ns=pair.prefill.work_ns,
            bucket=pair.prefill.bucket,
            now_ns=now_ns,
        )
