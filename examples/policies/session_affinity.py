"""Keep a conversation on one rank, where its prefix is cached, but never at any price.

Every rank gets a number from the session's name and its own (rendezvous hashing), and the session
goes to the rank with the largest. When a rank comes or goes only its own sessions move; with
`position = hash % count` nearly all would. A rank that has more than `cap` times the mean number of
requests is passed over for the session's next choice: a popular session must not slow everybody
that shares a step with it.
"""

import zlib
from collections.abc import Sequence

from dsched.plugins import RankCandidate, RequestView


class SessionAffinity:
    """Routing by session, with a cap on how full the session's rank may be."""

    name = "session-affinity"
    api_version = 1

    def __init__(self, *, cap: float = 1.25, slack_requests: int = 2) -> None:
        """`cap`: how many times the mean a rank may carry. `slack_requests`: so many more always,
        as on a nearly idle cluster one request is many times the mean."""
        if cap < 1:
            raise ValueError(f"cap is {cap}; below 1 no rank would do")
        self.cap = cap
        self.slack_requests = slack_requests

    def pick(self, request: RequestView, candidates: Sequence[RankCandidate]) -> int | None:
        """The session's first choice that is not too full; `None` without a session."""
        if not request.session:
            return None
        mean = sum(candidate.num_running for candidate in candidates) / len(candidates)
        limit = self.cap * mean + self.slack_requests
        allowed = [at for at, each in enumerate(candidates) if each.num_running < limit]
        if not allowed:
            return None
        return max(allowed, key=lambda at: (_wish(request.session, candidates[at]), -at))


def _wish(session: str, candidate: RankCandidate) -> int:
    """How much a session wants a rank; the same in every process, unlike `hash()`."""
    return zlib.crc32(f"{session}|{candidate.engine_id}|{candidate.dp_rank}".encode())
