"""What this router knows of the load of every DP rank: an exact ledger, corrected by reports.

Two numbers decide where a request goes: running requests and KV tokens of each rank. Both are the
sum of two parts:

- **own**: what this router sent and has not seen end. Booked when a request is dispatched, grown
  with every emitted token, released when its attempt ends. The driver contract ends every attempt
  exactly once, so this part is exact by construction, needs no report, and no timer may touch it:
  a staleness timer that dropped live bookings took a whole pool down elsewhere
  (llm-d/llm-d-router#2295), and an unknown rank treated as full turns a lost report channel into
  an outage (llm-d/llm-d-router#2408).
- **other**: other routers, and clients that talk to the engine directly: what reports show beyond
  own, and before a report can show it, what peers say they have there (`tell`).

A report and the token stream race, so `reported - own` is known only up to what the report may not
contain yet (booked or grown within `max_report_lag_ns` and at least one report) and what it may
still contain (released within the same time). The estimate of *other* is kept unless a report
proves it wrong: it is clipped into that interval. With one router the interval always holds 0, so
nothing drifts; when the rank is quiet the interval is a point, so the estimate is exact.

What a peer says moves the estimate by as much as its load there has changed since it last spoke,
and widens the interval like a change of own load. A report may be faster than the peer: by what
reports changed the estimate lately and nobody has said (`surprise`), it is not moved again. Where
no report ever comes, *other* is the sum of what the peers say.

Reports may be lost, late, repeated or reordered, and engines restart: a report counts only if its
`seq` is newer within its incarnation; an incarnation that was replaced is refused, unless it is
the only one still talking (then the newcomer was a late message of an even older one).

Prefix sharing makes an engine hold fewer KV tokens than its requests have. The step still reads
them for each request, so the cost uses the sum, but room uses what is really held: the difference
is credited for as long as reports confirm it.

State: mutable, owned by one router. Cost: booking and growth O(1), a report O(1).
"""

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from dsched.drivers.wire import RankReport
from dsched.errors import InvariantError
from dsched.ids import RankId
from dsched.routing import kernels as k
from dsched.routing.peer_loads import PeerLoads
from dsched.states import RankState as RankState

DEFAULT_MAX_REPORT_LAG_NS = 100_000_000
"""Shorter than the reports are late: ended requests look like load of others for a while. Longer:
a change of the others' load that is no larger than what this router changed meanwhile is noticed
that much later."""
MAX_RECENT_CHANGES = 256
MAX_KNOWN_INCARNATIONS = 8
"""Incarnations remembered for each rank. Fewer: a very late report may look like a restart.
More: memory for engines that crash in a loop."""
REPORTS_TO_RETURN = 3
"""Reports in a row from a replaced incarnation that make it the current one again. Fewer: a few
late reports of the old engine hide the new one. More: longer without reports."""


class ReportOutcome(StrEnum):
    """What became of a report; a label of the reports metric."""

    APPLIED = "applied"
    UNKNOWN_RANK = "unknown_rank"
    BAD_VALUE = "bad_value"
    OLD_SEQ = "old_seq"
    OLD_INCARNATION = "old_incarnation"


class Booking:
    """One request on one rank, as long as it is not released."""

    __slots__ = ("is_seen", "num_kv_tokens", "num_prompt_tokens", "rank")

    def __init__(self, rank: int, num_prompt_tokens: int) -> None:
        self.rank = rank
        self.num_prompt_tokens = num_prompt_tokens
        self.num_kv_tokens = num_prompt_tokens
        """Prompt and emitted tokens."""
        self.is_seen = False
        """The engine has shown that it has the request, by a token or an end."""


@dataclass(slots=True)
class _Changes:
    """What happened to the load that is known between two reports of a rank."""

    added_running: int = 0
    added_kv: int = 0
    removed_running: int = 0
    removed_kv: int = 0
    told_added_running: int = 0
    """The same as peers tell it."""
    told_added_kv: int = 0
    told_removed_running: int = 0
    told_removed_kv: int = 0
    surprise_running: int = 0
    """By how much the report at its end changed the estimate of *other*, less what peers have said
    since."""
    surprise_kv: int = 0
    until_ns: int = 0


@dataclass(slots=True)
class _ReportTrack:
    """What reports of one rank have said so far, and what happened since."""

    current: "_Changes" = field(default_factory=_Changes)
    """Since the last applied report."""
    recent: "deque[_Changes]" = field(default_factory=deque)
    """Before it, one for each report of the last `max_report_lag_ns`, oldest first."""
    incarnation: str | None = None
    last_seq: int = -1
    last_time_ns: int | None = None
    replaced: dict[str, int] | None = None
    """Newest seq of each replaced incarnation, oldest first."""
    returning: str | None = None
    num_returning: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """Load of one rank as the router sees it, for people and metrics."""

    rank_id: RankId
    state: RankState
    num_own_running: int
    num_other_running: int
    num_own_kv_tokens: int
    num_other_kv_tokens: int
    kv_capacity_tokens: int
    report_time_ns: int | None
    """When the last report was applied; `None` before the first."""


class LoadLedger:
    """Running requests and KV tokens of D ranks.

    Ranks are numbered 0..D-1 in the order they were added; a number is reused only after its rank
    was removed and its last booking released.
    """

    def __init__(
        self,
        *,
        kv_headroom_fraction: float = 0.0,
        max_report_lag_ns: int = DEFAULT_MAX_REPORT_LAG_NS,
    ) -> None:
        """Make an empty ledger.

        `kv_headroom_fraction` of each rank's KV is left for running requests to grow into.
        `max_report_lag_ns` is how much later than the token stream a report may come.
        """
        if max_report_lag_ns < 0:
            raise ValueError(f"max_report_lag_ns is {max_report_lag_ns}; it must not be negative")
        self._max_lag_ns = max_report_lag_ns
        if not 0.0 <= kv_headroom_fraction < 1.0:
            raise ValueError(
                f"kv_headroom_fraction is {kv_headroom_fraction}; it must be in [0, 1)"
            )
        self._headroom = kv_headroom_fraction
        self.num_ranks = 0
        self.ranks_version = 0
        """Raised whenever a rank number is given to a rank."""
        self.table: NDArray[np.int64] = np.zeros((k.NUM_ROWS, 0), np.int64)
        """[NUM_ROWS, >= D], rows as in `kernels`. Read it; change it only through this class."""
        self._rank_ids: list[RankId] = []
        self._index: dict[RankId, int] = {}
        self._tracks: list[_ReportTrack] = []
        self._bookings: dict[Hashable, Booking] = {}
        self.peers = PeerLoads()
        """What other routers say; changed by `tell` and `forget_peer`."""
        self._touched: set[int] = set()
        self._unseen_running: list[int] = []
        self._unseen_kv: list[int] = []
        self._free: list[int] = []
        self.num_reports: dict[ReportOutcome, int] = dict.fromkeys(ReportOutcome, 0)
        self._grow(16)

    # ---- ranks

    def add_rank(
        self, rank_id: RankId, *, kv_capacity_tokens: int, max_running_requests: int
    ) -> int:
        """Add a rank, or give a known one new limits; return its number. It starts up."""
        if kv_capacity_tokens <= 0:
            raise ValueError(f"{rank_id}: kv_capacity_tokens {kv_capacity_tokens} must be positive")
        if max_running_requests <= 0:
            raise ValueError(
                f"{rank_id}: max_running_requests {max_running_requests} must be positive"
            )
        rank = self._index.get(rank_id)
        if rank is None:
            rank = self._new_number(rank_id)
        self.table[k.KV_CAPACITY, rank] = kv_capacity_tokens
        self.table[k.KV_LIMIT, rank] = int(kv_capacity_tokens * (1.0 - self._headroom))
        self.table[k.MAX_RUNNING, rank] = max_running_requests
        self.table[k.DP_RANK, rank] = rank_id.dp_rank
        self.table[k.STATE, rank] = k.UP
        return rank

    def remove_rank(self, rank: int) -> None:
        """Forget a rank. Its bookings stay until each is released; nothing new goes there."""
        self._check_rank(rank)
        rank_id = self._rank_ids[rank]
        if self._index.get(rank_id) != rank:
            return
        del self._index[rank_id]
        self.table[k.STATE, rank] = k.REMOVED
        self._free_if_empty(rank)

    def set_rank_state(self, rank: int, state: RankState) -> None:
        self._check_rank(rank)
        if state is RankState.REMOVED:
            raise ValueError(f"rank {rank}: call remove_rank to remove it")
        if self.table[k.STATE, rank] == k.REMOVED:
            raise ValueError(f"rank {rank} was removed; add it again")
        self.table[k.STATE, rank] = int(state)

    def set_incarnation(self, rank: int, incarnation: str) -> None:
        """Say which start of the engine is the live one (from its hello), before it reports."""
        self._check_rank(rank)
        self._change_incarnation(rank, incarnation, last_seq=-1)

    def index_of(self, rank_id: RankId) -> int | None:
        return self._index.get(rank_id)

    def rank_id(self, rank: int) -> RankId:
        self._check_rank(rank)
        return self._rank_ids[rank]

    # ---- bookings

    def book(self, rank: int, request_key: Hashable, *, num_prompt_tokens: int) -> None:
        """Count a request that is being sent to `rank`. `request_key` must be new."""
        self._check_rank(rank)
        if num_prompt_tokens < 0:
            raise ValueError(f"num_prompt_tokens is {num_prompt_tokens}; it must not be negative")
        if self.table[k.STATE, rank] == k.REMOVED:
            raise ValueError(f"rank {rank} was removed; request {request_key!r} cannot go there")
        if request_key in self._bookings:
            raise ValueError(
                f"request {request_key!r} is already booked on rank "
                f"{self._bookings[request_key].rank}; release it first"
            )
        self._bookings[request_key] = Booking(rank, num_prompt_tokens)
        self._own_running[rank] += 1
        self._own_kv[rank] += num_prompt_tokens
        self._unseen_running[rank] += 1
        self._unseen_kv[rank] += num_prompt_tokens
        self._touched.add(rank)
        current = self._tracks[rank].current
        current.added_running += 1
        current.added_kv += num_prompt_tokens

    def add_tokens(self, request_key: Hashable, num_tokens: int) -> None:
        """Grow a request by emitted tokens. Unknown keys are ignored: late chunks of ended ones."""
        booking = self._bookings.get(request_key)
        if booking is None:
            return
        rank = booking.rank
        booking.num_kv_tokens += num_tokens
        self._own_kv[rank] += num_tokens
        self._tracks[rank].current.added_kv += num_tokens
        if not booking.is_seen:
            self._see(booking)

    def release(self, request_key: Hashable) -> bool:
        """End a booking; `False` if there is none (already released)."""
        booking = self._bookings.pop(request_key, None)
        if booking is None:
            return False
        rank = booking.rank
        if not booking.is_seen:
            self._see(booking)
        self._own_running[rank] -= 1
        self._own_kv[rank] -= booking.num_kv_tokens
        current = self._tracks[rank].current
        current.removed_running += 1
        current.removed_kv += booking.num_kv_tokens
        self._touched.add(rank)
        if self.table[k.STATE, rank] == k.REMOVED:
            self._free_if_empty(rank)
        return True

    def move(self, request_key: Hashable, to_rank: int) -> None:
        """Rebook a running request on another rank with all its tokens."""
        self._check_rank(to_rank)
        booking = self._bookings.get(request_key)
        if booking is None:
            raise ValueError(f"request {request_key!r} is not booked")
        num_tokens = booking.num_kv_tokens
        self.release(request_key)
        self.book(to_rank, request_key, num_prompt_tokens=num_tokens)

    def booking_of(self, request_key: Hashable) -> Booking | None:
        return self._bookings.get(request_key)

    def bookings(self) -> Iterator[tuple[Hashable, Booking]]:
        """All bookings in the order they were made."""
        return iter(self._bookings.items())

    @property
    def num_bookings(self) -> int:
        return len(self._bookings)

    # ---- peers

    def take_touched(self) -> list[int]:
        """Ranks on which something was booked or released since this was last asked, by number."""
        touched, self._touched = sorted(self._touched), set()
        return touched

    def own_load(self, rank: int) -> tuple[int, int]:
        """Requests and KV tokens that this router has on a rank."""
        self._check_rank(rank)
        return self._own_running[rank], self._own_kv[rank]

    def tell(self, peer: str, rank: int, *, num_running: int, num_kv_tokens: int) -> None:
        """Say what another router has on a rank now; replaces what it said before.

        Raises `ValueError` for a negative number.
        """
        self._check_rank(rank)
        running, kv = self.peers.put(peer, rank, num_running, num_kv_tokens)
        if not running and not kv:
            return
        current = self._tracks[rank].current
        current.told_added_running += max(0, running)
        current.told_removed_running += max(0, -running)
        current.told_added_kv += max(0, kv)
        current.told_removed_kv += max(0, -kv)
        for change in self._tracks[rank].recent:
            seen = _common(running, change.surprise_running)
            change.surprise_running -= seen
            running -= seen
            seen = _common(kv, change.surprise_kv)
            change.surprise_kv -= seen
            kv -= seen
        self._add_other(rank, running, kv)

    def forget_peer(self, peer: str) -> None:
        """Take back all that a peer said. Reports may show that its load is there still."""
        for rank in sorted(self.peers.ranks_of(peer)):
            self._add_other(rank, *self.peers.put(peer, rank, 0, 0))
        self.peers.forget(peer)

    def _add_other(self, rank: int, running: int, kv: int) -> None:
        for row, change in ((k.OTHER_RUNNING, running), (k.OTHER_KV, kv)):
            self.table[row, rank] = max(0, int(self.table[row, rank]) + change)

    # ---- reports

    def apply_report(self, rank: int | None, report: RankReport, now_ns: int) -> ReportOutcome:
        """Correct the load of `rank` by a report; `None` for a rank that is not known.

        Never raises for what a report says: a bad one is dropped and counted.
        """
        outcome = self._judge(rank, report)
        self.num_reports[outcome] += 1
        if outcome is ReportOutcome.APPLIED and rank is not None:
            self._correct(rank, report, now_ns)
        return outcome

    def report_time_ns(self, rank: int) -> int | None:
        """When the last report of `rank` was applied; `None` before the first."""
        self._check_rank(rank)
        return self._tracks[rank].last_time_ns

    def load_of(self, rank: int) -> RankLoad:
        self._check_rank(rank)
        column = [int(value) for value in self.table[:, rank]]
        return RankLoad(
            rank_id=self._rank_ids[rank],
            state=RankState(column[k.STATE]),
            num_own_running=column[k.OWN_RUNNING],
            num_other_running=column[k.OTHER_RUNNING],
            num_own_kv_tokens=column[k.OWN_KV],
            num_other_kv_tokens=column[k.OTHER_KV],
            kv_capacity_tokens=column[k.KV_CAPACITY],
            report_time_ns=self._tracks[rank].last_time_ns,
        )

    def validate(self) -> None:
        """Check the sums against the bookings. O(D + R)."""
        running = np.zeros(self.num_ranks, np.int64)
        tokens = np.zeros(self.num_ranks, np.int64)
        unseen = np.zeros(self.num_ranks, np.int64)
        for booking in self._bookings.values():
            running[booking.rank] += 1
            tokens[booking.rank] += booking.num_kv_tokens
            unseen[booking.rank] += not booking.is_seen
        live = self.table[:, : self.num_ranks]
        for row, expected in ((k.OWN_RUNNING, running), (k.OWN_KV, tokens)):
            wrong = np.flatnonzero(live[row] != expected)
            if wrong.size:
                rank = int(wrong[0])
                raise InvariantError(
                    f"rank {rank}: row {row} says {live[row, rank]}, its bookings {expected[rank]}"
                )
        if unseen.tolist() != self._unseen_running[: self.num_ranks]:
            raise InvariantError(
                f"unseen requests {self._unseen_running} do not match the bookings {unseen}"
            )
        self.peers.validate()
        for rank in range(self.num_ranks):
            other = int(live[k.OTHER_RUNNING, rank]), int(live[k.OTHER_KV, rank])
            if self._tracks[rank].last_time_ns is None and other != self.peers.sums(rank):
                raise InvariantError(
                    f"rank {rank}: others have {other}, and peers say {self.peers.sums(rank)}"
                )
        if self.num_ranks and live[: k.SHARED_KV + 1].min() < 0:
            raise InvariantError(f"a load is negative: {live[: k.SHARED_KV + 1].tolist()}")

    # ---- inside

    def _grow(self, size: int) -> None:
        """Make room for `size` ranks; the views into the table are made anew."""
        table = np.zeros((k.NUM_ROWS, size), np.int64)
        table[k.STATE] = k.REMOVED
        table[:, : self.num_ranks] = self.table[:, : self.num_ranks]
        self.table = table
        # A memoryview reads and writes one element several times faster than numpy indexing, and
        # growth is called for every token chunk.
        self._own_running = memoryview(table[k.OWN_RUNNING])
        self._own_kv = memoryview(table[k.OWN_KV])

    def _new_number(self, rank_id: RankId) -> int:
        self.ranks_version += 1
        if self._free:
            rank = self._free.pop()
            self._rank_ids[rank] = rank_id
            self._tracks[rank] = _ReportTrack()
        else:
            rank = self.num_ranks
            if rank == self.table.shape[1]:
                self._grow(2 * rank)
            self.num_ranks += 1
            self._rank_ids.append(rank_id)
            self._tracks.append(_ReportTrack())
            self._unseen_running.append(0)
            self._unseen_kv.append(0)
        self.table[:, rank] = 0
        self.peers.forget_rank(rank)
        self._index[rank_id] = rank
        return rank

    def _free_if_empty(self, rank: int) -> None:
        if self.table[k.OWN_RUNNING, rank] == 0:
            self._free.append(rank)
            self._free.sort(reverse=True)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank number {rank} is not one of the {self.num_ranks} ranks")

    def _see(self, booking: Booking) -> None:
        """The engine has shown that it has this request."""
        self._unseen_running[booking.rank] -= 1
        self._unseen_kv[booking.rank] -= booking.num_prompt_tokens
        booking.is_seen = True

    def _judge(self, rank: int | None, report: RankReport) -> ReportOutcome:
        if rank is None or not 0 <= rank < self.num_ranks:
            return ReportOutcome.UNKNOWN_RANK
        if self.table[k.STATE, rank] == k.REMOVED:
            return ReportOutcome.UNKNOWN_RANK
        if not _has_good_counts(report):
            return ReportOutcome.BAD_VALUE
        track = self._tracks[rank]
        if report.incarnation == track.incarnation:
            track.num_returning = 0
            if report.seq <= track.last_seq:
                return ReportOutcome.OLD_SEQ
            track.last_seq = report.seq
            return ReportOutcome.APPLIED
        replaced = track.replaced or {}
        if report.incarnation in replaced and not self._has_returned(track, report):
            return ReportOutcome.OLD_INCARNATION
        self._change_incarnation(rank, report.incarnation, last_seq=report.seq)
        return ReportOutcome.APPLIED

    def _has_returned(self, track: _ReportTrack, report: RankReport) -> bool:
        """Whether a replaced incarnation has talked alone for long enough to be the live one."""
        replaced = track.replaced or {}
        if report.seq <= replaced[report.incarnation]:
            return False
        replaced[report.incarnation] = report.seq
        is_same = track.returning == report.incarnation
        track.num_returning = track.num_returning + 1 if is_same else 1
        track.returning = report.incarnation
        return track.num_returning >= REPORTS_TO_RETURN

    def _change_incarnation(self, rank: int, incarnation: str, *, last_seq: int) -> None:
        """Start anew with another incarnation. Bookings stay: their attempts end one by one."""
        track = self._tracks[rank]
        if track.incarnation == incarnation:
            return
        replaced = dict(track.replaced or {})
        replaced.pop(incarnation, None)
        if track.incarnation is not None:
            replaced[track.incarnation] = track.last_seq
        while len(replaced) > MAX_KNOWN_INCARNATIONS:
            del replaced[next(iter(replaced))]
        track.replaced = replaced
        track.incarnation = incarnation
        track.last_seq = last_seq
        track.num_returning = 0
        for change in track.recent:
            change.surprise_running = change.surprise_kv = 0
        self.table[k.OTHER_RUNNING, rank], self.table[k.OTHER_KV, rank] = self.peers.sums(rank)
        self.table[k.SHARED_KV, rank] = 0

    def _correct(self, rank: int, report: RankReport, now_ns: int) -> None:
        """Clip the load of others into what this report allows."""
        track = self._tracks[rank]
        table = self.table
        num_requests = report.num_running + report.num_waiting
        num_tokens = report.num_kv_tokens + report.num_waiting_prefill_tokens
        own_running = int(table[k.OWN_RUNNING, rank])
        own_kv = int(table[k.OWN_KV, rank])
        other_running = int(table[k.OTHER_RUNNING, rank])
        other_kv = int(table[k.OTHER_KV, rank])

        changes = (*track.recent, track.current)
        table[k.OTHER_RUNNING, rank] = _clip(
            other_running,
            num_requests
            - own_running
            - sum(one.removed_running + one.told_removed_running for one in changes),
            num_requests
            - own_running
            + sum(one.added_running + one.told_added_running for one in changes),
        )
        added_kv = sum(one.added_kv for one in changes)
        table[k.OTHER_KV, rank] = 0
        if table[k.OTHER_RUNNING, rank] > 0:
            table[k.OTHER_KV, rank] = _clip(
                other_kv,
                num_tokens - own_kv - sum(one.removed_kv + one.told_removed_kv for one in changes),
                num_tokens - own_kv + added_kv + sum(one.told_added_kv for one in changes),
            )
        track.current.surprise_running = int(table[k.OTHER_RUNNING, rank]) - other_running
        track.current.surprise_kv = int(table[k.OTHER_KV, rank]) - other_kv
        confirmed_kv = own_kv - max(self._unseen_kv[rank], added_kv)
        table[k.SHARED_KV, rank] = max(0, confirmed_kv - num_tokens)
        if report.kv_capacity_tokens > 0:
            table[k.KV_CAPACITY, rank] = report.kv_capacity_tokens
            table[k.KV_LIMIT, rank] = int(report.kv_capacity_tokens * (1.0 - self._headroom))

        track.current.until_ns = now_ns
        track.recent.append(track.current)
        track.current = _Changes()
        # At least the changes before the last report: it may have been on its way already.
        while len(track.recent) > 1 and (
            now_ns - track.recent[0].until_ns > self._max_lag_ns
            or len(track.recent) > MAX_RECENT_CHANGES
        ):
            track.recent.popleft()
        track.last_time_ns = now_ns


def _clip(value: int, low: int, high: int) -> int:
    return max(0, low, min(value, high))


def _common(change: int, surprise: int) -> int:
    """How much of a change was seen already: the smaller one, where both go the same way.

    >>> _common(5, 3), _common(-2, -7), _common(5, -3)
    (3, -2, 0)
    """
    if change > 0:
        return max(0, min(change, surprise))
    return min(0, max(change, surprise))


def _has_good_counts(report: RankReport) -> bool:
    """Whether all counts are integers that are not negative (a decoder may not have checked)."""
    counts = (
        report.seq,
        report.num_running,
        report.num_waiting,
        report.num_kv_tokens,
        report.num_waiting_prefill_tokens,
        report.kv_capacity_tokens,
        report.step_ns,
    )
    return all(isinstance(count, int) and 0 <= count < 1 << 62 for count in counts)
