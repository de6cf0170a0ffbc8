"""What has just happened, in lines that an operator can read.

Two sources: changes of engines, heard in the tick that made them, and differences between two
samples of counters. What happens a thousand times a second becomes one line with a number, so the
ring holds minutes, not moments, whatever goes wrong.

The log has the same facts one by one and for ever; this is the tail of it that fits on a screen.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from dsched.controller import HandoffGap
from dsched.faults import Membership
from dsched.frontdoor.live import LiveEvent
from dsched.states import RankState

MAX_EVENTS: Final = 64
"""Kept. More: every message grows. Fewer: the restart of a pool hides its cause."""
MAX_CHANGES_A_TICK: Final = 16
"""Engines named one by one when many change at once; the rest are counted."""
MAX_TEXT_CHARS: Final = 240
"""Of a reason, which may come from an engine."""
LEVEL_OF_STATE: Final = {
    RankState.UP: "info",
    RankState.SUSPECT: "warning",
    RankState.DRAINING: "info",
    RankState.DOWN: "error",
    RankState.REMOVED: "info",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """Counters and conditions of one sample; a line is written when one of them changes."""

    num_refused: int
    num_errors: int
    num_policy_errors: int
    num_fenced_tokens: int
    absorbs_loss: Mapping[str, bool]
    """By pool."""
    spare_reason: Mapping[str, str]
    is_journal_durable: bool
    is_registered: bool
    is_leader: bool


class EventRing:
    """The latest events. Hears the controller; is asked once a sample."""

    def __init__(self) -> None:
        self._events: deque[LiveEvent] = deque(maxlen=MAX_EVENTS)
        self._num_events = 0
        self._states: dict[str, RankState] = {}
        self._last: Watched | None = None
        self._num_gaps: dict[str, int] = {}
        self._longest_gap_ns = 0

    def events(self) -> tuple[LiveEvent, ...]:
        """Oldest first."""
        return tuple(self._events)

    def add(self, time_s: float, level: str, subject: str, text: str) -> None:
        """Write one line."""
        self._num_events += 1
        shown = text if len(text) <= MAX_TEXT_CHARS else text[: MAX_TEXT_CHARS - 1] + "…"
        self._events.append(
            LiveEvent(seq=self._num_events, time_s=time_s, level=level, subject=subject, text=shown)
        )

    def note_handoff(self, method: str, gap: HandoffGap) -> None:
        """A client got its next token after a loss; written with the next sample."""
        self._num_gaps[method] = self._num_gaps.get(method, 0) + 1
        self._longest_gap_ns = max(self._longest_gap_ns, gap.total_ns)

    def note_membership(self, membership: Membership, time_s: float) -> None:
        """Write which engines changed their state. O(engines), at changes only."""
        changes = [
            (str(engine_id), record)
            for engine_id, record in sorted(membership.engines.items())
            if record.state is not self._states.get(engine_id, RankState.DOWN)
        ]
        for engine_id, record in changes[:MAX_CHANGES_A_TICK]:
            name = record.state.name.lower()
            text = name if record.state is RankState.UP else f"{name}: {record.reason}"
            self.add(time_s, LEVEL_OF_STATE[record.state], engine_id, text)
        num_more = len(changes) - MAX_CHANGES_A_TICK
        if num_more > 0:
            self.add(time_s, "warning", "cluster", f"{num_more} more engines changed their state")
        for engine_id, record in changes:
            self._states[engine_id] = record.state

    def note_sample(self, now: Watched, time_s: float) -> None:
        """Write what has changed since the sample before."""
        self._write_handoffs(time_s)
        last, self._last = self._last, now
        if last is None:
            return
        counts = (
            ("front door", "warning", now.num_refused - last.num_refused, "request{} refused"),
            ("front door", "error", now.num_errors - last.num_errors, "request{} ended in error"),
            (
                "policy",
                "warning",
                now.num_policy_errors - last.num_policy_errors,
                "decision{} fell back to the default",
            ),
            (
                "fence",
                "warning",
                now.num_fenced_tokens - last.num_fenced_tokens,
                "late token{} dropped",
            ),
        )
        for subject, level, count, what in counts:
            if count > 0:
                text = what.format("" if count == 1 else "s")
                self.add(time_s, level, subject, f"{count} {text}")
        for pool, absorbs in now.absorbs_loss.items():
            if absorbs is not last.absorbs_loss.get(pool, absorbs):
                level = "info" if absorbs else "warning"
                self.add(time_s, level, f"pool {pool}", now.spare_reason[pool])
        self._write_conditions(last, now, time_s)

    def _write_handoffs(self, time_s: float) -> None:
        counts, self._num_gaps = self._num_gaps, {}
        longest_ns, self._longest_gap_ns = self._longest_gap_ns, 0
        for method, count in sorted(counts.items()):
            what = "request goes on" if count == 1 else "requests go on"
            text = f"{count} {what} elsewhere ({method}), longest pause {longest_ns / 1e9:.2f} s"
            self.add(time_s, "warning", "handoff", text)

    def _write_conditions(self, last: Watched, now: Watched, time_s: float) -> None:
        for subject, was, now_is, good, bad in (
            (
                "journal",
                last.is_journal_durable,
                now.is_journal_durable,
                "tokens reach the file again",
                "tokens do not reach the file; a restart would not find them",
            ),
            (
                "registry",
                last.is_registered,
                now.is_registered,
                "registered again",
                "this dsched is not registered; serving goes on",
            ),
            (
                "leader",
                last.is_leader,
                now.is_leader,
                "this dsched may rebalance now",
                "this dsched may not rebalance any more",
            ),
        ):
            if was is not now_is:
                self.add(time_s, "info" if now_is else "warning", subject, good if now_is else bad)
