"""Who hears what the controller does, for metrics and for expert placement."""

from dataclasses import dataclass
from typing import Protocol

from dsched.faults import MembershipView


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffGap:
    """What a client saw of a lost engine: the pause between two of its tokens, by part."""

    detect_ns: int
    """From its last token until the loss was noticed."""
    dispatch_ns: int
    """Until the next attempt was handed to an engine."""
    prefill_ns: int
    """Until that engine's first new token."""

    @property
    def total_ns(self) -> int:
        return self.detect_ns + self.dispatch_ns + self.prefill_ns


class ControllerObserver(Protocol):
    """Hears what is worth measuring. Methods must not raise and must not block."""

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        """A request that had lost its engine got its next token."""
        ...

    def on_membership_changed(self, view: MembershipView) -> None:
        """Engines or ranks came, went or changed their state; called in the tick that did it,
        after routing knows. `dsched.controller.placement` turns it into expert placements."""
        ...


class NullObserver:
    """Hears nothing."""

    def on_handoff(self, method: str, gap: HandoffGap) -> None:
        pass

    def on_membership_changed(self, view: MembershipView) -> None:
        pass
