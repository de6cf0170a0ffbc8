"""Fill the cheap engines first, and spill over to the dear ones before anybody waits.

Engines of one pool may cost differently: reserved and on demand, own and rented, old and new. Names
decide: `cheap: "spot-*"` takes every engine whose id fits. While a cheap rank is below both limits
only cheap ranks are kept, and dsched's own rule balances among them; else all ranks count.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from dsched.plugins import RankCandidate, RequestView


class CheapFirst:
    """A routing filter: it leaves the choice among equals to dsched."""

    name = "cheap-first"
    api_version = 1

    def __init__(
        self, *, cheap: str | list[str], max_running: int = 64, max_kv_share: float = 0.8
    ) -> None:
        """`cheap`: names of engines, `*` and `?` allowed. A rank that runs `max_running` requests,
        or uses `max_kv_share` of its KV tokens, is full: above that its steps get long."""
        self.cheap = [cheap] if isinstance(cheap, str) else list(cheap)
        if not self.cheap:
            raise ValueError("cheap names no engine")
        self.max_running = max_running
        self.max_kv_share = max_kv_share

    def keep(self, request: RequestView, candidates: Sequence[RankCandidate]) -> list[bool] | None:
        """The cheap ranks that are not full; `None` (all) when there are none."""
        kept = [
            self._is_cheap(candidate) and not self._is_full(candidate, request)
            for candidate in candidates
        ]
        return kept if any(kept) else None

    def _is_cheap(self, candidate: RankCandidate) -> bool:
        return any(fnmatchcase(candidate.engine_id, pattern) for pattern in self.cheap)

    def _is_full(self, candidate: RankCandidate, request: RequestView) -> bool:
        if candidate.num_running >= self.max_running:
            return True
        if candidate.kv_capacity_tokens is None:
            return False
        wanted = candidate.num_kv_tokens + request.num_prompt_tokens
        return wanted > self.max_kv_share * candidate.kv_capacity_tokens
