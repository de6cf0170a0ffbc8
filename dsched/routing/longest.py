"""The longest running request of a ledger, kept up to date for O(log R) a booking.

With several routers over the same ranks it is the longest of all: each tells the others its own.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush

from dsched.routing.ledger import Booking, LoadLedger

MIN_COMPACT_SIZE = 64


class LongestBooking:
    """A heap over bookings by prompt length; ended ones are dropped when they come to the top.

    Growth by output is read from the booking, not reordered: prompts decide who is longest.
    """

    def __init__(self, ledger: LoadLedger) -> None:
        self._ledger = ledger
        self._heap: list[tuple[int, int, Hashable, Booking]] = []
        self._count = 0
        self._told: dict[str, int] = {}

    def add(self, request_key: Hashable) -> None:
        """Take in a request that was just booked."""
        booking = self._ledger.booking_of(request_key)
        if booking is None:
            raise ValueError(f"request {request_key!r} is not booked")
        heappush(self._heap, (-booking.num_kv_tokens, self._count, request_key, booking))
        self._count += 1
        if len(self._heap) > MIN_COMPACT_SIZE + 2 * self._ledger.num_bookings:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapify(self._heap)

    def tell(self, peer: str, num_tokens: int) -> None:
        """Say how long the longest request of another router is; 0 for none."""
        if num_tokens > 0:
            self._told[peer] = num_tokens
        else:
            self._told.pop(peer, None)

    def num_tokens(self) -> int:
        """KV tokens of the longest one, here or at a peer; 0 when nothing runs."""
        own = self.num_own_tokens()
        return max(own, *self._told.values()) if self._told else own

    def num_own_tokens(self) -> int:
        """KV tokens of the longest one of this ledger; 0 when nothing runs."""
        while self._heap:
            if self._is_live(self._heap[0]):
                return self._heap[0][3].num_kv_tokens
            heappop(self._heap)
        return 0

    def _is_live(self, entry: tuple[int, int, Hashable, Booking]) -> bool:
        return self._ledger.booking_of(entry[2]) is entry[3]
