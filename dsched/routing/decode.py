"""Choose the DP rank that decodes a request.

In:  the request's prompt length, and the load of every rank.
Out: a `RoutingDecision`: a rank, or the reason why there is none.

In wide expert parallelism every step waits for the slowest rank, and a rank's step grows with its
running requests (b each) and with its KV tokens (c each). So a request goes to the rank whose cost
after taking it is least:

    cost = b * (running + 1) + c * (KV tokens + prompt tokens)

plus what its base a is longer than the least, where an engine of the pool is known to be slower.

Policies that watch one of the two signals break on some workload: counting requests ignores one
huge prompt (vllm-project/vllm#40795), counting tokens ignores many short ones and did worse than
round robin on reasoning traffic. b and c start as given and are corrected by reported step times
(`calibration`).

Where the ranks step together (`is_synchronised`, one EP group) a rank that stays below what the
longest running request costs by itself slows nobody. So of the ranks that stay below that level
the *fullest* takes the request, and the emptier ones are kept for what is hard to place. On agentic
traffic (five requests a rank, single ones of 0.9M tokens) this lifts placement from 78 to 86 % of
the fluid bound; where requests are many and alike it changes nothing.

Only ranks with room are eligible. When none has room the request is held here and takes the first
room anywhere (`holding`). When nothing at all is up, suspect ranks are used: a lost report channel
must not become an outage (llm-d/llm-d-router#2408).

Ties go to the rank that comes first when counting from an offset, which moves on with every
booking and starts at this router's own number: several routers with the same view of idle ranks
choose different ones (ai-dynamo/dynamo#589).

`pick` and `next_held` only read; `book`, `hold`, `release`, ... change the State. Time is an
argument. A decision costs O(D) compiled operations, the same for any prompt length.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from dsched.drivers.wire import RankReport
from dsched.errors import InvariantError
from dsched.ids import EngineId, RankId
from dsched.routing import kernels as k
from dsched.routing.calibration import MIN_STEPS, EngineSteps, StepPrices
from dsched.routing.holding import HeldRequest, HoldQueue
from dsched.routing.ledger import (
    DEFAULT_MAX_REPORT_LAG_NS,
    LoadLedger,
    RankLoad,
    RankState,
    ReportOutcome,
)
from dsched.routing.longest import LongestBooking
from dsched.routing.time_factors import TimeFactors

DEFAULT_REQUEST_NS = 200_000.0
"""b before calibration: 0.2 ms for each running request (assumed, see docs/routing.md)."""
DEFAULT_KV_TOKEN_NS = 26.0
"""c before calibration: 70 KB of KV a token read at 2.7 TB/s (assumed)."""
DEFAULT_MAX_HELD_REQUESTS = 10_000
"""Held requests at most. Fewer: a burst is refused with 429. More: memory, and waits that end in
the client's own timeout."""
DEFAULT_MAX_HOLD_NS = 10_000_000_000
"""Longest wait at the router. Shorter: requests are bound to full ranks again. Longer: a long
prompt can be overtaken by short ones for longer."""

DEFAULT_BASE_NS = 15_000_000.0
"""a before calibration: 15 ms. It changes a choice only between engines of unequal speed."""

_NOTHING_EXCLUDED: NDArray[np.int64] = np.empty(0, np.int64)
_NOTHING_EXCLUDED.flags.writeable = False
_NOTHING_AWAY: NDArray[np.int8] = np.empty(0, np.int8)
_NOTHING_AWAY.flags.writeable = False


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What routing needs to know of a request."""

    num_prompt_tokens: int
    """Tokens that the rank will hold from the start: prompt, and after a handoff also what was
    emitted before it."""
    pinned_dp_rank: int | None = None
    """Only ranks with this number inside their engine."""
    tenant: str = ""
    excluded_ranks: tuple[int, ...] = ()
    """Rank numbers that must not be chosen, e.g. the one that just failed it."""
    num_reserved_tokens: int = 0
    """KV tokens of room wanted beyond the prompt. It decides room, never cost."""
    priority: int = 0
    """Of those that are held, larger goes first."""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 0:
            raise ValueError(
                f"num_prompt_tokens is {self.num_prompt_tokens}; it must not be negative"
            )
        if self.num_reserved_tokens < 0:
            raise ValueError(
                f"num_reserved_tokens is {self.num_reserved_tokens}; it must not be negative"
            )
        if self.pinned_dp_rank is not None and self.pinned_dp_rank < 0:
            raise ValueError(f"pinned_dp_rank is {self.pinned_dp_rank}; it must not be negative")


class RoutingReason(StrEnum):
    """Why a decision is what it is; a label of the decisions metric."""

    LEAST_COST = "least_cost"
    """An up rank with room and the least cost."""
    HOLD_EXPIRED = "hold_expired"
    """Held for too long; the least cost of all up ranks, room or not."""
    SUSPECT_ONLY = "suspect_only"
    """No rank is up; the least cost of the suspect ones."""
    QUEUED = "queued"
    """No rank has room now: hold the request."""
    TOO_LARGE = "too_large"
    """The prompt does not fit the whole KV of any rank: refuse it."""
    NO_RANK_UP = "no_rank_up"
    """No rank may be used: none is up, or none has the pinned number."""
    NO_SUCH_RANK = "no_such_rank"
    """No rank of any state has the pinned number: refuse it."""


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes, or why nowhere."""

    rank: int | None
    """Rank number of the router; `None` unless the reason is one of the first three."""
    reason: RoutingReason
    cost_ns: float | None = None
    """Modelled step time of the rank after taking the request, without the least base of all."""
    num_eligible: int = 0
    """Ranks that had room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDecision:
    """A held request that can go now."""

    request_key: Hashable
    decision: RoutingDecision
    held_ns: int
    """Since when it was held."""


class DecodeRouter:
    """The State of decode routing: load of every rank, prices, and held requests."""

    def __init__(
        self,
        *,
        router_index: int = 0,
        num_routers: int = 1,
        is_synchronised: bool = False,
        engines_in_groups: Collection[EngineId] = (),
        calibrates: bool = True,
        base_ns: float = DEFAULT_BASE_NS,
        request_ns: float = DEFAULT_REQUEST_NS,
        kv_token_ns: float = DEFAULT_KV_TOKEN_NS,
        kv_headroom_fraction: float = 0.0,
        max_report_lag_ns: int = DEFAULT_MAX_REPORT_LAG_NS,
        max_held_requests: int = DEFAULT_MAX_HELD_REQUESTS,
        max_hold_ns: int = DEFAULT_MAX_HOLD_NS,
        gather_ns: int = 0,
    ) -> None:
        """Make a router without ranks.

        `router_index` is this router's number among `num_routers` over the same engines.
        `is_synchronised`: all ranks belong to one EP group. `engines_in_groups`: engines that step
        together with others, so that their step times say nothing on themselves. `calibrates`:
        learn the prices from reports. `gather_ns`: how long a request that would by itself stretch
        every step of a synchronised group is held to run together with others like it; 0 turns it
        off. Worth 2 points on agentic traffic with migration, paid by those requests' first token.
        """
        if router_index < 0:
            raise ValueError(f"router_index is {router_index}; it must not be negative")
        self.ledger = LoadLedger(
            kv_headroom_fraction=kv_headroom_fraction, max_report_lag_ns=max_report_lag_ns
        )
        if num_routers < 1:
            raise ValueError(f"num_routers is {num_routers}; it must be at least 1")
        self._router_index = router_index
        self._hears_peers = False
        self._is_away: NDArray[np.int8] | None = None
        """See `_ranks_away`; `None` when ranks or routers have changed."""
        self._num_routers = num_routers
        if gather_ns < 0:
            raise ValueError(f"gather_ns is {gather_ns}; it must not be negative")
        self._held = HoldQueue(max_held_requests=max_held_requests, max_hold_ns=max_hold_ns)
        self._is_synchronised = is_synchronised
        self._gather_ns = gather_ns
        self.longest = LongestBooking(self.ledger)
        """The longest running request, of all routers that tell of theirs."""
        self._tie_offset = router_index
        self._base_ns = base_ns
        self._request_ns = request_ns
        self._kv_token_ns = kv_token_ns
        self._calibrates = calibrates
        self._calibration: dict[EngineId, EngineSteps] = {}
        self._learned = StepPrices(base_ns=base_ns, request_ns=request_ns, kv_token_ns=kv_token_ns)
        """Prices of the pool, from the steps of all its engines."""
        self._factors = TimeFactors()
        self._engines_in_groups = frozenset(engines_in_groups)
        self._rank_factors: NDArray[np.float64] | None = None
        """[D] factor of the engine of each rank; `None` when ranks have changed."""
        self._num_factor_changes = 0
        self._prices: NDArray[np.float64] = np.zeros((3, 0))
        self.set_prices(request_ns=request_ns, kv_token_ns=kv_token_ns)
        self.num_decisions: dict[RoutingReason, int] = dict.fromkeys(RoutingReason, 0)

    # ---- ranks

    def add_rank(
        self, rank_id: RankId, *, kv_capacity_tokens: int, max_running_requests: int
    ) -> int:
        """Add a rank, or give a known one new limits; return its number. It starts up."""
        rank = self.ledger.add_rank(
            rank_id,
            kv_capacity_tokens=kv_capacity_tokens,
            max_running_requests=max_running_requests,
        )
        self._is_away = self._rank_factors = None
        if self._prices.shape[1] < self.ledger.num_ranks:
            old = self._prices
            self._prices = np.empty((3, self.ledger.table.shape[1]))
            self._prices[k.BASE_NS] = self._base_ns
            self._prices[k.REQUEST_NS] = self._request_ns
            self._prices[k.KV_TOKEN_NS] = self._kv_token_ns
            self._prices[:, : old.shape[1]] = old
        self._use_learned_prices()
        return rank

    def remove_rank(self, rank: int) -> None:
        """Forget a rank. Its bookings stay until each is released; nothing new goes there."""
        self.ledger.remove_rank(rank)

    def set_rank_state(self, rank: int, state: RankState) -> None:
        """Mark a rank up, suspect, draining or down."""
        self.ledger.set_rank_state(rank, state)

    def set_incarnation(self, rank: int, incarnation: str) -> None:
        """Say which start of the engine is the live one (from its hello), before it reports."""
        self.ledger.set_incarnation(rank, incarnation)

    def index_of(self, rank_id: RankId) -> int | None:
        """The number of a rank; `None` if it was never added or is removed."""
        return self.ledger.index_of(rank_id)

    def rank_id(self, rank: int) -> RankId:
        return self.ledger.rank_id(rank)

    @property
    def num_ranks(self) -> int:
        """Rank numbers in use, removed ones with bookings included."""
        return self.ledger.num_ranks

    def load_of(self, rank: int) -> RankLoad:
        """Load of one rank, for people and metrics."""
        return self.ledger.load_of(rank)

    def report_age_ns(self, rank: int, now_ns: int) -> int | None:
        """Time since the last report of `rank` was applied; `None` before the first."""
        time_ns = self.ledger.report_time_ns(rank)
        return None if time_ns is None else now_ns - time_ns

    def prices_of(self, rank: int) -> tuple[float, float]:
        """b and c of one rank now, in ns: what one more request and one more KV token cost."""
        self.ledger.rank_id(rank)
        return float(self._prices[k.REQUEST_NS, rank]), float(self._prices[k.KV_TOKEN_NS, rank])

    def more_base_ns(self, rank: int) -> float:
        """By how much the base of a rank's step is longer than the least of all, in ns."""
        self.ledger.rank_id(rank)
        least = k.least_base(self._prices, self.num_ranks)
        return float(self._prices[k.BASE_NS, rank] - least)

    def time_factor(self, rank: int) -> float:
        """How much longer steps of this rank's engine take than of the pool's middle engine at
        equal load, as far as routing prices it; 1 while no difference is sure."""
        return self._factors.factor(self.ledger.rank_id(rank).engine_id)

    def price_table(self) -> NDArray[np.float64]:
        """[3, D] a, b and c of every rank in ns; a copy."""
        return self._prices[:, : self.num_ranks].copy()

    @property
    def tie_offset(self) -> int:
        """Where the next decision begins to count among equal ranks, modulo their number."""
        return self._tie_offset

    def is_home_elsewhere(self, rank: int) -> bool:
        """Whether another router over the same ranks is asked first to fill this one."""
        is_away = self._ranks_away()
        return bool(len(is_away) and is_away[rank])

    def home_margin_ns(self, rank: int, num_prompt_tokens: int) -> float:
        """By how much a rank must be cheaper than others because another router is asked first to
        fill it, in ns."""
        is_away = self._ranks_away()
        if not len(is_away):
            return 0.0
        return float(k.home_margin(self._prices, rank, num_prompt_tokens, is_away[rank]))

    def set_peers(self, *, router_index: int, num_routers: int, hears_peers: bool = False) -> bool:
        """Say which of how many routers over the same engines this one is now, and whether it hears
        from all others what they send (`peers`); `True` if that is news.

        Raises `ValueError` for a number that is not one of them.
        """
        if not 0 <= router_index < num_routers:
            raise ValueError(f"router_index {router_index} is not one of {num_routers} routers")
        known = self._router_index, self._num_routers, self._hears_peers
        if (router_index, num_routers, hears_peers) == known:
            return False
        self._router_index, self._num_routers = router_index, num_routers
        self._hears_peers = hears_peers
        self._is_away = None
        return True

    def _ranks_away(self) -> NDArray[np.int8]:
        """[D] where ranks are at home, as in `kernels`; empty where all are here.

        Homes follow the order of rank ids, which is the same in every process; the order in which
        engines came up is not.
        """
        if self._is_away is None:
            num_ranks = self.ledger.num_ranks
            if not 1 < self._num_routers <= num_ranks:
                self._is_away = _NOTHING_AWAY
            else:
                order = sorted(range(num_ranks), key=self.ledger.rank_id)
                home = np.empty(num_ranks, np.int64)
                home[order] = np.arange(num_ranks) % self._num_routers
                away = k.AWAY_HEARD if self._hears_peers else k.AWAY
                is_here = home == self._router_index % self._num_routers
                self._is_away = np.where(is_here, k.HERE, away).astype(np.int8)
        return self._is_away

    def set_prices(self, *, request_ns: float, kv_token_ns: float, rank: int | None = None) -> None:
        """Set b and c in ns, of one rank or of all (then also of ranks added later).

        Raises `ValueError` if one is negative or not finite, or both are 0.
        """
        for name, value in (("request_ns", request_ns), ("kv_token_ns", kv_token_ns)):
            if not (np.isfinite(value) and value >= 0.0):
                raise ValueError(f"{name} is {value}; it must be finite and not negative")
        if request_ns == 0.0 and kv_token_ns == 0.0:
            raise ValueError("request_ns and kv_token_ns are both 0; one must be positive")
        if rank is None:
            self._request_ns = request_ns
            self._kv_token_ns = kv_token_ns
            self._prices[k.REQUEST_NS] = request_ns
            self._prices[k.KV_TOKEN_NS] = kv_token_ns
        else:
            self.ledger.rank_id(rank)
            self._prices[k.REQUEST_NS, rank] = request_ns
            self._prices[k.KV_TOKEN_NS, rank] = kv_token_ns

    # ---- decisions: these only read

    def pick(self, request: RoutingRequest, now_ns: int) -> RoutingDecision:  # noqa: ARG002
        """Choose a rank for a request that has just arrived."""
        if request.num_prompt_tokens > self._gather_limit_tokens():
            return self._hold_if_possible(request)
        return self._pick(
            num_prompt_tokens=request.num_prompt_tokens,
            num_wanted_tokens=request.num_prompt_tokens + request.num_reserved_tokens,
            pinned_dp_rank=request.pinned_dp_rank,
            excluded_ranks=request.excluded_ranks,
            ignore_room=False,
        )

    def next_held(self, now_ns: int) -> HeldDecision | None:
        """The held request that should go now, if any. Book it, then ask again."""
        if not self._held:
            return None
        expired = self._held.expired(now_ns)
        if expired is not None:
            decision = self._pick_held(expired, ignore_room=True)
            if decision.reason is not RoutingReason.NO_RANK_UP:
                return _held_decision(expired, decision)
        limit = self._gather_limit_tokens()
        gathered = self._held.longer_than(limit, held_before_ns=now_ns - self._gather_ns)
        room = {pin: min(self._largest_room(pin), limit) for pin in self._held.pins()}
        for held in chain(gathered, self._held.candidates(room)):
            decision = self._pick_held(held, ignore_room=False)
            if decision.rank is not None:
                return _held_decision(held, decision)
        return None

    def next_hold_expiry_ns(self) -> int | None:
        """When `next_held` should be asked at the latest; `None` when nothing is held."""
        return self._held.next_expiry_ns()

    @property
    def num_held(self) -> int:
        return len(self._held)

    # ---- changes

    def book(
        self,
        rank: int,
        request_key: Hashable,
        *,
        num_prompt_tokens: int,
        now_ns: int,  # noqa: ARG002
    ) -> None:
        """Count a request that is being sent to `rank`; takes it out of the held ones."""
        self.ledger.book(rank, request_key, num_prompt_tokens=num_prompt_tokens)
        self._held.remove(request_key, is_served=True)
        if self._is_synchronised:
            self.longest.add(request_key)
        self._tie_offset += 1

    def hold(self, request: RoutingRequest, request_key: Hashable, now_ns: int) -> bool:
        """Hold a request until a rank has room; `False` when too many are held already."""
        return self._held.add(
            request_key,
            num_prompt_tokens=request.num_prompt_tokens,
            num_wanted_tokens=request.num_prompt_tokens + request.num_reserved_tokens,
            tenant=request.tenant,
            pinned_dp_rank=request.pinned_dp_rank,
            excluded_ranks=request.excluded_ranks,
            now_ns=now_ns,
            priority=request.priority,
        )

    def drop_held(self, request_key: Hashable, *, is_served: bool = False) -> bool:
        """Forget a held request (its client left); `False` if it is not held.

        `is_served` when it goes to a rank under another key: its tenant is charged for it. `book`
        with the key under which it was held does the same.
        """
        return self._held.remove(request_key, is_served=is_served)

    def add_tokens(self, request_key: Hashable, num_tokens: int) -> None:
        """Grow a booked request by emitted tokens; unknown keys are ignored."""
        self.ledger.add_tokens(request_key, num_tokens)

    def release(self, request_key: Hashable) -> bool:
        """End a booking; `False` if there is none (already released)."""
        return self.ledger.release(request_key)

    def move(self, request_key: Hashable, to_rank: int) -> None:
        """Rebook a running request on another rank with all its tokens."""
        self.ledger.move(request_key, to_rank)

    def apply_report(self, rank: int | None, report: RankReport, now_ns: int) -> ReportOutcome:
        """Correct the load of `rank` by a report; `None` for a rank that is not known.

        Never raises for what a report says: a bad one is dropped and counted in
        `ledger.num_reports`.
        """
        outcome = self.ledger.apply_report(rank, report, now_ns)
        if self._calibrates and rank is not None and outcome is ReportOutcome.APPLIED:
            self._calibrate(rank, report)
        return outcome

    def validate(self) -> None:
        """Check every sum against what it sums. O(D + R + Q)."""
        self.ledger.validate()
        self._held.validate()
        if self._prices.shape[1] < self.ledger.num_ranks:
            raise InvariantError(
                f"{self._prices.shape[1]} prices for {self.ledger.num_ranks} ranks"
            )

    # ---- inside

    def _calibrate(self, rank: int, report: RankReport) -> None:
        """Learn from a step of an engine, once a step, and use what was learned for its ranks."""
        engine_id = self.ledger.rank_id(rank).engine_id
        steps = self._calibration.get(engine_id)
        if steps is None:
            steps_alone = not self._is_synchronised and engine_id not in self._engines_in_groups
            steps = self._calibration[engine_id] = EngineSteps(
                self._learned,
                engine_id=engine_id,
                factors=self._factors if steps_alone else None,
            )
        if steps.apply_report(rank, report):
            self._use_learned_prices()

    def _use_learned_prices(self) -> None:
        """Price all ranks alike, by the steps of all engines, times what sets an engine apart.

        Engines of a pool serve one model, mostly on equal machines, and each shows a different mix
        of steps: one that ran single requests cannot tell its base from what a token costs. Priced
        by itself it looked dear, and two real engines that are the same got 51 and 13 of 64
        streams. So the prices are the pool's, and an engine is told apart only by steps at a load
        that others have shown too (`time_factors`).
        """
        if self._learned.num_steps < MIN_STEPS:
            return
        num_ranks = self.ledger.num_ranks
        if self._rank_factors is None or self._num_factor_changes != self._factors.num_changes:
            self._num_factor_changes = self._factors.num_changes
            engines = [self.ledger.rank_id(rank).engine_id for rank in range(num_ranks)]
            self._rank_factors = np.array([self._factors.factor(each) for each in engines])
        self._prices[:, :num_ranks] = np.outer(self._learned.prices, self._rank_factors)

    def _pick_held(self, held: HeldRequest, *, ignore_room: bool) -> RoutingDecision:
        return self._pick(
            num_prompt_tokens=held.num_prompt_tokens,
            num_wanted_tokens=held.num_wanted_tokens,
            pinned_dp_rank=held.pinned_dp_rank,
            excluded_ranks=held.excluded_ranks,
            ignore_room=ignore_room,
        )

    def _pick(
        self,
        *,
        num_prompt_tokens: int,
        num_wanted_tokens: int,
        pinned_dp_rank: int | None,
        excluded_ranks: tuple[int, ...],
        ignore_room: bool,
    ) -> RoutingDecision:
        num_ranks = self.ledger.num_ranks
        if num_ranks == 0:
            return RoutingDecision(rank=None, reason=RoutingReason.NO_RANK_UP)
        dp_rank = k.ANY_DP_RANK if pinned_dp_rank is None else pinned_dp_rank
        excluded = np.array(excluded_ranks, np.int64) if excluded_ranks else _NOTHING_EXCLUDED
        level_tokens = self.longest.num_tokens() if self._is_synchronised else 0
        for max_state in (k.UP, k.SUSPECT):
            rank, cost_ns, num_usable, num_large_enough, num_with_room = k.pick_rank(
                self.ledger.table,
                self._prices,
                num_ranks,
                num_prompt_tokens,
                num_wanted_tokens,
                dp_rank,
                excluded,
                self._tie_offset % num_ranks,
                max_state,
                level_tokens,
                self._ranks_away(),
                ignore_room,
            )
            if num_usable:
                break
        if rank != k.NO_RANK:
            reason = RoutingReason.HOLD_EXPIRED if ignore_room else RoutingReason.LEAST_COST
            if max_state == k.SUSPECT:
                reason = RoutingReason.SUSPECT_ONLY
            return RoutingDecision(
                rank=rank, reason=reason, cost_ns=cost_ns, num_eligible=num_with_room
            )
        if num_usable == 0:
            return RoutingDecision(rank=None, reason=self._why_no_rank(pinned_dp_rank))
        if num_large_enough == 0:
            return RoutingDecision(rank=None, reason=RoutingReason.TOO_LARGE)
        return RoutingDecision(rank=None, reason=RoutingReason.QUEUED)

    def _hold_if_possible(self, request: RoutingRequest) -> RoutingDecision:
        """`QUEUED` for a request to gather, unless it could not be placed anyway."""
        decision = self._pick(
            num_prompt_tokens=request.num_prompt_tokens,
            num_wanted_tokens=0,
            pinned_dp_rank=request.pinned_dp_rank,
            excluded_ranks=request.excluded_ranks,
            ignore_room=True,
        )
        if decision.rank is None:
            return decision
        return RoutingDecision(rank=None, reason=RoutingReason.QUEUED)

    def _gather_limit_tokens(self) -> int:
        """Prompts longer than this would stretch every step of the group by themselves."""
        if not self._gather_ns or not self._is_synchronised:
            return k.NO_LIMIT_TOKENS
        return int(
            k.level_tokens(
                self.ledger.table, self._prices, self.ledger.num_ranks, self.longest.num_tokens()
            )
        )

    def _why_no_rank(self, pinned_dp_rank: int | None) -> RoutingReason:
        if pinned_dp_rank is None:
            return RoutingReason.NO_RANK_UP
        table = self.ledger.table[:, : self.ledger.num_ranks]
        is_there = (table[k.DP_RANK] == pinned_dp_rank) & (table[k.STATE] != k.REMOVED)
        return RoutingReason.NO_RANK_UP if is_there.any() else RoutingReason.NO_SUCH_RANK

    def _largest_room(self, pinned_dp_rank: int | None) -> int:
        dp_rank = k.ANY_DP_RANK if pinned_dp_rank is None else pinned_dp_rank
        for max_state in (k.UP, k.SUSPECT):
            room = k.largest_room(self.ledger.table, self.ledger.num_ranks, dp_rank, max_state)
            if room >= 0:
                return int(room)
        return -1


def _held_decision(held: HeldRequest, decision: RoutingDecision) -> HeldDecision:
    return HeldDecision(request_key=held.request_key, decision=decision, held_ns=held.held_ns)
