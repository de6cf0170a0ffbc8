"""Requests that wait at the router until a rank has room (late binding).

A request bound to a full rank waits there even when another rank gets room first. Held here it
takes the first room anywhere, which is worth 0.3 to 1.2 points of throughput and, on engines that
preempt, much more than that in wasted prefill.

Order of release:

1. requests that have waited longer than `max_hold_ns`, oldest first: the wait is bounded, then the
   engine's own queue decides;
2. else the greatest priority that something waits with and fits; at most `MAX_SCAN` priorities are
   looked at, which bounds the cost and lets what fits nowhere now be overtaken;
3. of equal priority the tenant that got the fewest prompt tokens from this queue so far, so that
   one tenant's burst does not hold up the others; a tenant that comes back after a pause starts at
   the level of the least served one that waits, so it cannot save up credit;
4. inside a tenant the longest prompt that fits now: long ones are the hardest to place, short ones
   fill what is left.

Ties end in the order of arrival. State: mutable, bounded by `max_held_requests`. A choice costs
O(tenants * log Q) for each priority looked at, usually one.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from sortedcontainers import SortedDict, SortedKeyList

from dsched.errors import InvariantError

MAX_SCAN = 64
"""Oldest requests looked at for those that were gathered for long enough, and priorities looked at
for one that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRequest:
    """One waiting request."""

    request_key: Hashable
    num_prompt_tokens: int
    num_wanted_tokens: int
    """KV tokens of room that a rank must have."""
    tenant: str
    pinned_dp_rank: int | None
    excluded_ranks: tuple[int, ...]
    held_ns: int
    number: int
    """Order of arrival."""
    priority: int
    """Larger goes first."""


@dataclass(slots=True)
class _Lane:
    """What one tenant waits for with one pin, shortest first; ties: later arrivals first."""

    requests: SortedKeyList = field(
        default_factory=lambda: SortedKeyList(
            key=lambda held: (held.num_wanted_tokens, -held.number)
        )
    )


class HoldQueue:
    """A bounded queue with room-aware, tenant-fair order."""

    def __init__(self, *, max_held_requests: int, max_hold_ns: int) -> None:
        if max_held_requests < 0:
            raise ValueError(f"max_held_requests is {max_held_requests}; it must not be negative")
        if max_hold_ns < 0:
            raise ValueError(f"max_hold_ns is {max_hold_ns}; it must not be negative")
        self._max_held = max_held_requests
        self._max_hold_ns = max_hold_ns
        self._held: dict[Hashable, HeldRequest] = {}
        self._levels: SortedDict[int, dict[tuple[str, int | None], _Lane]] = SortedDict()
        """Lanes by tenant and pin, for each priority times -1: the greatest comes first."""
        self._num_held_with_pin: dict[int | None, int] = {}
        self._served_tokens: dict[str, int] = {}
        self._num_held_of: dict[str, int] = {}
        self._next_number = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_key: Hashable) -> bool:
        return request_key in self._held

    def add(
        self,
        request_key: Hashable,
        *,
        num_prompt_tokens: int,
        num_wanted_tokens: int,
        tenant: str,
        pinned_dp_rank: int | None,
        excluded_ranks: tuple[int, ...],
        now_ns: int,
        priority: int = 0,
    ) -> bool:
        """Hold a request; `False` when the queue is full."""
        if request_key in self._held:
            raise ValueError(f"request {request_key!r} is already held")
        if len(self._held) >= self._max_held:
            return False
        held = HeldRequest(
            request_key=request_key,
            num_prompt_tokens=num_prompt_tokens,
            num_wanted_tokens=num_wanted_tokens,
            tenant=tenant,
            pinned_dp_rank=pinned_dp_rank,
            excluded_ranks=excluded_ranks,
            held_ns=now_ns,
            number=self._next_number,
            priority=priority,
        )
        self._next_number += 1
        if tenant not in self._served_tokens:
            self._served_tokens[tenant] = min(self._served_tokens.values(), default=0)
        self._held[request_key] = held
        self._num_held_of[tenant] = self._num_held_of.get(tenant, 0) + 1
        count = self._num_held_with_pin.get(pinned_dp_rank, 0)
        self._num_held_with_pin[pinned_dp_rank] = count + 1
        lanes = self._levels.setdefault(-priority, {})
        lanes.setdefault((tenant, pinned_dp_rank), _Lane()).requests.add(held)
        return True

    def remove(self, request_key: Hashable, *, is_served: bool = False) -> bool:
        """Take a request out; `is_served` charges its tenant. `False` if it is not held."""
        held = self._held.pop(request_key, None)
        if held is None:
            return False
        self._leave_lane(held)
        if is_served:
            self._served_tokens[held.tenant] += held.num_prompt_tokens
        self._num_held_of[held.tenant] -= 1
        if not self._num_held_of[held.tenant]:
            # Nothing is remembered of a tenant that does not wait: bounded memory, no old credit.
            del self._num_held_of[held.tenant]
            del self._served_tokens[held.tenant]
        return True

    def _leave_lane(self, held: HeldRequest) -> None:
        lanes = self._levels[-held.priority]
        lane_key = (held.tenant, held.pinned_dp_rank)
        lanes[lane_key].requests.remove(held)
        if not lanes[lane_key].requests:
            del lanes[lane_key]
        if not lanes:
            del self._levels[-held.priority]
        self._num_held_with_pin[held.pinned_dp_rank] -= 1
        if not self._num_held_with_pin[held.pinned_dp_rank]:
            del self._num_held_with_pin[held.pinned_dp_rank]

    def expired(self, now_ns: int) -> HeldRequest | None:
        """The oldest request, if it has waited longer than allowed."""
        if not self._held:
            return None
        oldest = next(iter(self._held.values()))
        return oldest if now_ns - oldest.held_ns >= self._max_hold_ns else None

    def next_expiry_ns(self) -> int | None:
        """When the oldest request will have waited too long; `None` when nothing waits."""
        if not self._held:
            return None
        return next(iter(self._held.values())).held_ns + self._max_hold_ns

    def longer_than(self, num_tokens: int, *, held_before_ns: int) -> list[HeldRequest]:
        """Requests with longer prompts that were held by then, oldest first, at most `MAX_SCAN`."""
        found = []
        for held in islice(self._held.values(), MAX_SCAN):
            if held.held_ns > held_before_ns:
                break
            if held.num_prompt_tokens > num_tokens:
                found.append(held)
        return found

    def pins(self) -> list[int | None]:
        """The distinct pins that are waited for, no pin first."""
        return sorted(self._num_held_with_pin, key=lambda pin: -1 if pin is None else pin)

    def candidates(self, room_tokens: dict[int | None, int]) -> Iterator[HeldRequest]:
        """For each priority and tenant the longest request that fits, in the order in which to try
        them.

        `room_tokens[pin]` is the largest room of any rank with that pin, negative when full.
        """
        for lanes in islice(self._levels.values(), MAX_SCAN):
            yield from self._candidates_of(lanes, room_tokens)

    def _candidates_of(
        self, lanes: dict[tuple[str, int | None], _Lane], room_tokens: dict[int | None, int]
    ) -> list[HeldRequest]:
        best: dict[str, HeldRequest] = {}
        for (tenant, pin), lane in lanes.items():
            index = lane.requests.bisect_key_right((room_tokens[pin], 1))
            if index == 0:
                continue
            held = lane.requests[index - 1]
            if tenant not in best or _size(held) > _size(best[tenant]):
                best[tenant] = held
        return sorted(
            best.values(), key=lambda held: (self._served_tokens[held.tenant], held.number)
        )

    def validate(self) -> None:
        """Check that lanes and index agree. O(Q)."""
        in_lanes = sum(
            len(lane.requests) for lanes in self._levels.values() for lane in lanes.values()
        )
        if in_lanes != len(self._held) or sum(self._num_held_of.values()) != len(self._held):
            raise InvariantError(
                f"{len(self._held)} requests are held, lanes have {in_lanes}, "
                f"tenants {sum(self._num_held_of.values())}"
            )
        if sum(self._num_held_with_pin.values()) != len(self._held):
            raise InvariantError(f"pins {self._num_held_with_pin} are not {len(self._held)} held")
        if len(self._held) > self._max_held:
            raise InvariantError(f"{len(self._held)} requests are held, at most {self._max_held}")


def _size(held: HeldRequest) -> tuple[int, int]:
    return held.num_wanted_tokens, -held.number
