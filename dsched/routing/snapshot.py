"""The view of a decode router as values: taken from a live one, and a router made of it again.

A decision is a function of the load table, the prices, the held requests and two counters. A
snapshot has all of them; `restore_router` gives a router that decides what the live one would have
decided. It decides and holds only: it has no bookings and takes no reports, its table is changed
by `add_cells`. Used by `dsched.trace` to decide again what was decided.

`take_changes` is the cheap half: it finds the cells that changed since it was last asked, so that a
recorder copies a few numbers a decision instead of D columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from dsched.ids import RankId
from dsched.jit import kernel
from dsched.routing import kernels as k
from dsched.routing.decode import DecodeRouter
from dsched.routing.holding import HeldRequest
from dsched.routing.ledger import _ReportTrack

NUM_PRICES = 3
NUM_VIEW_ROWS = k.NUM_ROWS + NUM_PRICES
"""Rows of a view: the load table, and below it the prices as the bits of their floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """What a router was made with, as far as decisions depend on it."""

    router_index: int
    num_routers: int
    is_synchronised: bool
    gather_ns: int
    max_held_requests: int
    max_hold_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterSnapshot:
    """Everything that the next decision of a router depends on."""

    settings: RouterSettings
    rank_ids: tuple[RankId, ...]
    """[D] by rank number; a removed rank keeps its name until its number is used again."""
    table: NDArray[np.int64]
    """[NUM_ROWS, D], rows as in `kernels`."""
    prices: NDArray[np.float64]
    """[3, D] a, b, c in ns."""
    tie_offset: int
    held: tuple[HeldRequest, ...]
    """In order of arrival."""
    served_tokens: dict[str, int]
    next_number: int
    hears_peers: bool = False
    """All other routers tell this one what they send."""


class FixedLongest:
    """Stands for `LongestBooking` in a router without bookings."""

    def __init__(self) -> None:
        self.tokens = 0

    def num_tokens(self) -> int:
        return self.tokens

    def add(self, request_key: object) -> None:
        """Nothing is booked on a restored router."""


def take_snapshot(router: DecodeRouter) -> RouterSnapshot:
    """Copy what the next decision depends on. O(D + held)."""
    held = router._held
    return RouterSnapshot(
        settings=RouterSettings(
            router_index=router._router_index,
            num_routers=router._num_routers,
            is_synchronised=router._is_synchronised,
            gather_ns=router._gather_ns,
            max_held_requests=held._max_held,
            max_hold_ns=held._max_hold_ns,
        ),
        rank_ids=rank_ids(router),
        table=router.ledger.table[:, : router.num_ranks].copy(),
        prices=router._prices[:, : router.num_ranks].copy(),
        tie_offset=router._tie_offset,
        held=tuple(held._held.values()),
        served_tokens=dict(held._served_tokens),
        next_number=held._next_number,
        hears_peers=router._hears_peers,
    )


def rank_ids(router: DecodeRouter) -> tuple[RankId, ...]:
    """[D] the rank behind each number."""
    return tuple(router.ledger._rank_ids[: router.num_ranks])


def restore_router(snapshot: RouterSnapshot) -> DecodeRouter:
    """Make a router that decides like the one the snapshot is of.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    num_ranks = len(snapshot.rank_ids)
    for name, array, rows in (
        ("table", snapshot.table, k.NUM_ROWS),
        ("prices", snapshot.prices, NUM_PRICES),
    ):
        if array.shape != (rows, num_ranks):
            raise ValueError(f"{name} has shape {array.shape}; it must be {(rows, num_ranks)}")
    settings = snapshot.settings
    router = DecodeRouter(
        router_index=settings.router_index,
        num_routers=settings.num_routers,
        is_synchronised=settings.is_synchronised,
        gather_ns=settings.gather_ns,
        max_held_requests=settings.max_held_requests,
        max_hold_ns=settings.max_hold_ns,
        calibrates=False,
    )
    router._hears_peers = snapshot.hears_peers
    router.longest = FixedLongest()  # type: ignore[assignment]
    set_ranks(router, snapshot.rank_ids)
    router.ledger.table[:, :num_ranks] = snapshot.table
    router._prices[:, :num_ranks] = snapshot.prices
    router._tie_offset = snapshot.tie_offset
    for held in snapshot.held:
        router._held._next_number = held.number
        router._held.add(
            held.request_key,
            num_prompt_tokens=held.num_prompt_tokens,
            num_wanted_tokens=held.num_wanted_tokens,
            tenant=held.tenant,
            pinned_dp_rank=held.pinned_dp_rank,
            excluded_ranks=held.excluded_ranks,
            now_ns=held.held_ns,
            priority=held.priority,
        )
    router._held._next_number = snapshot.next_number
    router._held._served_tokens = dict(snapshot.served_tokens)
    return router


def set_ranks(router: DecodeRouter, ids: tuple[RankId, ...]) -> None:
    """Name the ranks of a restored router; columns beyond the known ones begin at 0."""
    ledger = router.ledger
    old, count = ledger.num_ranks, len(ids)
    if count > router._prices.shape[1]:
        prices = np.zeros((NUM_PRICES, count))
        prices[:, :old] = router._prices[:, :old]
        router._prices = prices
    ledger.num_ranks = min(old, count)  # what is beyond is not kept
    if count > ledger.table.shape[1]:
        ledger._grow(count)
    ledger.table[:, ledger.num_ranks :] = 0
    router._prices[:, ledger.num_ranks :] = 0.0
    ledger.num_ranks = count
    ledger._rank_ids = list(ids)
    ledger._tracks = [_ReportTrack() for _ in ids]
    ledger._index = {rank_id: rank for rank, rank_id in enumerate(ids)}
    router._is_away = None


def add_cells(
    router: DecodeRouter, cells: NDArray[np.int64], *, tie_offset: int, longest_tokens: int
) -> None:
    """Change the view of a restored router by what `take_changes` found, [n, 2].

    Raises:
        ValueError: a cell that the router does not have.
    """
    rank, row = np.divmod(cells[:, 0], NUM_VIEW_ROWS)
    if len(cells) and (rank.min() < 0 or rank.max() >= router.num_ranks):
        raise ValueError(f"a change of rank {rank.max()}; there are {router.num_ranks} ranks")
    is_load = row < k.NUM_ROWS
    router.ledger.table[row[is_load], rank[is_load]] += cells[is_load, 1]
    is_price = ~is_load
    bits = router._prices.view(np.int64)
    bits[row[is_price] - k.NUM_ROWS, rank[is_price]] += cells[is_price, 1]
    router._tie_offset = tie_offset
    if isinstance(router.longest, FixedLongest):
        router.longest.tokens = longest_tokens


def set_prices_of_all(
    router: DecodeRouter, *, request_ns: float | None, kv_token_ns: float | None
) -> None:
    """Price every rank anew, whatever was learned; `None` leaves a price as it is."""
    if request_ns is not None:
        router._prices[k.REQUEST_NS] = request_ns
    if kv_token_ns is not None:
        router._prices[k.KV_TOKEN_NS] = kv_token_ns


class ViewWatch:
    """Remembers a router's view as it was last told. State; O(D) memory."""

    def __init__(self, router: DecodeRouter) -> None:
        self.router = router
        self._seen = np.zeros((NUM_VIEW_ROWS, 0), np.int64)
        self._out = np.zeros(0, np.int64)
        self._prices = router._prices
        self._price_bits = router._prices.view(np.int64)
        self.ranks_version = -1
        """Of the rank numbers that were last told."""

    def snapshot(self) -> RouterSnapshot:
        """Tell everything."""
        snapshot = take_snapshot(self.router)
        self.ranks_version = self.router.ledger.ranks_version
        self.changes()
        return snapshot

    def has_new_ranks(self) -> bool:
        """Whether numbers have got other ranks since they were last told."""
        return self.ranks_version != self.router.ledger.ranks_version

    def tell_ranks(self) -> tuple[RankId, ...]:
        self.ranks_version = self.router.ledger.ranks_version
        return rank_ids(self.router)

    def changes(self) -> bytes:
        """int64 [n, 2] in bytes: each cell that changed since it was last told, and by how much."""
        router = self.router
        if router._prices is not self._prices:
            self._prices = router._prices
            self._price_bits = router._prices.view(np.int64)
        num_ranks = router.ledger.num_ranks
        if num_ranks > self._seen.shape[1]:
            seen = np.zeros((NUM_VIEW_ROWS, num_ranks), np.int64)
            seen[:, : self._seen.shape[1]] = self._seen
            self._seen = seen
            self._out = np.zeros(2 * seen.size, np.int64)
        count = take_changes(
            router.ledger.table, self._price_bits, num_ranks, self._seen, self._out
        )
        return self._out[:count].tobytes()

    @property
    def longest_tokens(self) -> int:
        """What a synchronised router's next decision looks at; 0 for others."""
        router = self.router
        return router.longest.num_tokens() if router._is_synchronised else 0

    @property
    def tie_offset(self) -> int:
        return self.router._tie_offset


@kernel
def take_changes(
    table: NDArray[np.int64],
    price_bits: NDArray[np.int64],
    num_ranks: int,
    seen: NDArray[np.int64],
    out: NDArray[np.int64],
) -> int:
    """Write (cell, increase) of each changed cell to `out`, and make `seen` equal. O(D).

    A cell's number is `rank * NUM_VIEW_ROWS + row`. Returns how many numbers were written.
    """
    count = 0
    num_load_rows = table.shape[0]
    for row in range(seen.shape[0]):
        is_load = row < num_load_rows
        now = table[row] if is_load else price_bits[row - num_load_rows]
        before = seen[row]
        # Most rows are as they were, and this loop is one of vector instructions.
        difference = np.int64(0)
        for rank in range(num_ranks):
            difference |= now[rank] ^ before[rank]
        if difference == 0:
            continue
        for rank in range(num_ranks):
            if now[rank] != before[rank]:
                out[count] = rank * seen.shape[0] + row
                out[count + 1] = now[rank] - before[rank]
                count += 2
                before[rank] = now[rank]
    return count


def settings_fields(settings: RouterSettings) -> tuple[int, int, bool, int, int, int]:
    """The fields in order, for a record."""
    return astuple(settings)


@contextmanager
def keep_prices(router: DecodeRouter) -> Iterator[None]:
    """Put the prices and the longest wait back as they were."""
    prices, max_hold_ns = router._prices.copy(), router._held._max_hold_ns
    try:
        yield
    finally:
        router._prices[:] = prices
        router._held._max_hold_ns = max_hold_ns


def set_max_hold_ns(router: DecodeRouter, max_hold_ns: int) -> None:
    """Let held requests of a restored router wait for another time."""
    router._held._max_hold_ns = max_hold_ns
