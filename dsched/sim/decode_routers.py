"""The decode group of `dsched.sim.decode`, driven through real `DecodeRouter` objects.

Slower than the compiled loop, and true to what runs in production: every dispatch is booked, every
token chunk and end goes to the router that sent the request, and every rank publishes a report
after every step that each router hears some steps later. Several routers know each other through
those reports, and where `peer_delay_ns` is given also through what they tell each other, as late
as that. Then requests arrive at random times within a step; without, all of a step's at its start.

With one router and fresh reports the choices are those of the compiled loop, which a test checks.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsched.drivers.wire import RankReport
from dsched.ids import DpRank, EngineId, RankId
from dsched.rng import stream
from dsched.routing.decode import DecodeRouter, RoutingRequest
from dsched.routing.peers import PeerMessage, apply_peer_message, own_loads
from dsched.sim.decode import DecodeGroup, DecodeRun, draw_requests
from dsched.sim.decode_kernels import Requests
from dsched.sim.traces import Trace

ENGINE_ID = EngineId("group")
INCARNATION = "sim"
LONGEST_STEP_NS = 100_000_000
"""What the routers are told that a step of delay may last."""
STEPS_A_FULL_MESSAGE = 8
"""Routers tell each other of all ranks once in so many steps, as dsched does every quarter of a
second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutersResult:
    """What several routers reached together."""

    share_pct: float
    """Throughput in percent of the fluid reference."""
    request_rank: tuple[int, ...]
    """Rank of each request in order of arrival; -1 if it was never bound."""
    max_decisions_per_step: int


class _Request:
    """One request on its way."""

    __slots__ = ("index", "left", "rank", "router", "tokens")

    def __init__(self, index: int, tokens: int, left: int, router: int) -> None:
        self.index = index
        self.tokens = tokens
        self.left = left
        self.router = router
        self.rank = -1


class _Rank:
    """One rank's engine."""

    __slots__ = ("kv", "running", "seq", "waiting", "waiting_tokens")

    def __init__(self) -> None:
        self.running: list[_Request] = []
        self.waiting: deque[_Request] = deque()
        self.kv = 0
        self.waiting_tokens = 0
        self.seq = 0

    def admit(self, group: DecodeGroup) -> None:
        """Start bound requests in order while there is room."""
        while self.waiting and len(self.running) < group.max_running_requests:
            request = self.waiting[0]
            if self.kv and self.kv + request.tokens > group.kv_capacity_tokens:
                return
            self.waiting.popleft()
            self.waiting_tokens -= request.tokens
            self.kv += request.tokens
            self.running.append(request)

    def report(self, dp_rank: int, step: int, step_ns: int, group: DecodeGroup) -> RankReport:
        """Say what the rank holds."""
        self.seq += 1
        return RankReport(
            engine_id=ENGINE_ID,
            incarnation=INCARNATION,
            dp_rank=dp_rank,
            seq=self.seq,
            step=step,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_kv_tokens=self.kv,
            num_waiting_prefill_tokens=self.waiting_tokens,
            kv_capacity_tokens=group.kv_capacity_tokens,
            step_ns=step_ns,
        )


def simulate_routers(
    trace: Trace,
    *,
    num_routers: int,
    report_delay_steps: int,
    peer_delay_ns: int | None = None,
    group: DecodeGroup | None = None,
    run: DecodeRun | None = None,
    is_late: bool = True,
    is_synchronised: bool = True,
) -> RoutersResult:
    """Run a closed loop (`run.requests_per_rank`) over `num_routers` routers, requests in turn.

    `peer_delay_ns`: how late routers hear what another one has booked or released; `None`: never.

    Raises:
        ValueError: no router, a negative delay, or an open loop.
    """
    group = group or DecodeGroup()
    run = run or DecodeRun(requests_per_rank=16.0)
    if num_routers < 1:
        raise ValueError(f"num_routers is {num_routers}; it must be at least 1")
    if report_delay_steps < 0:
        raise ValueError(f"report_delay_steps is {report_delay_steps}; it must not be negative")
    if peer_delay_ns is not None and peer_delay_ns < 0:
        raise ValueError(f"peer_delay_ns is {peer_delay_ns}; it must not be negative")
    if run.requests_per_rank is None:
        raise ValueError("simulate_routers needs requests_per_rank: it runs a closed loop")
    requests, concurrency = draw_requests(trace, group, run)
    routers = [
        make_router(group, router_index=index,
                    num_routers=num_routers, run=run,
                    is_synchronised=is_synchronised,
                    max_report_lag_ns=report_delay_steps * LONGEST_STEP_NS)
        for index in range(num_routers)
    ]  # fmt: skip
    talk = None
    if peer_delay_ns is not None:
        talk = _Talk(routers, delay_ns=peer_delay_ns)
        for index, router in enumerate(routers):
            router.set_peers(router_index=index, num_routers=num_routers, hears_peers=True)
    loop = _Loop(group, routers, requests, concurrency, is_late=is_late, talk=talk, seed=run.seed)
    loop.run(run.num_steps, warm_steps=run.warm_steps, delay_steps=report_delay_steps)
    for router in routers:
        router.validate()
    return loop.result()


def make_router(
    group: DecodeGroup, *, router_index: int, num_routers: int, run: DecodeRun,
    is_synchronised: bool, max_report_lag_ns: int,
) -> DecodeRouter:  # fmt: skip
    """Return a router over all ranks of the group."""
    router = DecodeRouter(
        router_index=router_index,
        num_routers=num_routers,
        is_synchronised=is_synchronised,
        calibrates=run.calibrates,
        base_ns=group.base_ns,
        request_ns=group.request_ns,
        kv_token_ns=group.kv_token_ns * run.price_error,
        max_hold_ns=run.max_hold_ns,
        max_held_requests=1 << 30,
        max_report_lag_ns=max_report_lag_ns,
    )
    for index in range(group.num_ranks):
        router.add_rank(
            RankId(ENGINE_ID, DpRank(index)),
            kv_capacity_tokens=group.kv_capacity_tokens,
            max_running_requests=group.max_running_requests,
        )
    return router


class _Talk:
    """What routers tell each other, and what of it is on its way."""

    def __init__(self, routers: Sequence[DecodeRouter], *, delay_ns: int) -> None:
        self._routers = routers
        self._delay_ns = delay_ns
        self._mail: deque[tuple[int, int, PeerMessage]] = deque()
        """(when it is heard, who says it, what), in order."""
        self._seq = 0

    def tell(self, sender: int, now_ns: int, *, is_full: bool = False) -> None:
        """Let a router say what it has where something was booked or released, or everywhere."""
        router = self._routers[sender]
        ranks: Sequence[int] = router.ledger.take_touched()
        if is_full:
            ranks = range(router.num_ranks)
        elif not ranks:
            return
        self._seq += 1
        message = PeerMessage(
            peer=f"router-{sender}",
            seq=self._seq,
            is_full=is_full,
            ranks=own_loads(router, ranks),
            longest_tokens=router.longest.num_own_tokens(),
        )
        self._mail.append((now_ns + self._delay_ns, sender, message))

    def deliver(self, now_ns: int) -> None:
        """Let everybody hear what is due."""
        while self._mail and self._mail[0][0] <= now_ns:
            _, sender, message = self._mail.popleft()
            for index, router in enumerate(self._routers):
                if index != sender:
                    apply_peer_message(router, message)


class _Loop:
    """The closed loop."""

    def __init__(
        self,
        group: DecodeGroup,
        routers: Sequence[DecodeRouter],
        requests: Requests,
        concurrency: int,
        *,
        is_late: bool,
        talk: _Talk | None,
        seed: int,
    ) -> None:
        self._group = group
        self._talk = talk
        self._rng = stream(seed, "sim.decode.arrivals")
        self._last_step_ns = group.base_ns
        self._routers = routers
        self._requests = requests
        self._concurrency = concurrency
        self._is_late = is_late
        self._ranks = [_Rank() for _ in range(group.num_ranks)]
        self._held: dict[int, _Request] = {}
        self._reports: deque[list[RankReport]] = deque()
        self._next = 0
        self._now_ns = 0
        self._num_in_system = 0
        self._request_rank = [-1] * len(requests.num_prompt_tokens)
        self._ns = self._fluid_ns = self._tokens = self._in_system = 0.0
        self._max_decisions = 0

    def run(self, num_steps: int, *, warm_steps: int, delay_steps: int) -> None:
        for step in range(num_steps):
            if self._talk is None:
                self._route(self._arrive())
            else:
                self._route_in_turn(self._arrive(), self._talk)
            for rank in self._ranks:
                rank.admit(self._group)
            step_ns = self._step_ns()
            if step >= warm_steps:
                self._measure(step_ns)
            self._now_ns += int(step_ns)
            self._last_step_ns = step_ns
            self._emit()
            if self._talk is not None:
                for index in range(len(self._routers)):
                    is_full = step % STEPS_A_FULL_MESSAGE == 0
                    self._talk.tell(index, self._now_ns, is_full=is_full)
            self._reports.append(
                [
                    rank.report(index, step + 1, int(step_ns), self._group)
                    for index, rank in enumerate(self._ranks)
                ]
            )
            if len(self._reports) > delay_steps:
                self._deliver(self._reports.popleft())

    def result(self) -> RoutersResult:
        reached = self._tokens / self._ns
        fluid = self._in_system / self._fluid_ns
        return RoutersResult(
            share_pct=100.0 * reached / fluid,
            request_rank=tuple(self._request_rank),
            max_decisions_per_step=self._max_decisions,
        )

    def _arrive(self) -> list[_Request]:
        new = []
        while self._num_in_system < self._concurrency:
            index = self._next
            done = 0
            if index < len(self._requests.num_done_tokens):
                done = int(self._requests.num_done_tokens[index])
            new.append(
                _Request(
                    index,
                    int(self._requests.num_prompt_tokens[index]) + done,
                    int(self._requests.num_output_tokens[index]) - done,
                    index % len(self._routers),
                )
            )
            self._next += 1
            self._num_in_system += 1
        self._max_decisions = max(self._max_decisions, len(new))
        return new

    def _route(self, new: list[_Request]) -> None:
        for request in new:
            router = self._routers[request.router]
            wanted = RoutingRequest(num_prompt_tokens=request.tokens)
            rank = None if self._is_late else router.pick(wanted, self._now_ns).rank
            if rank is None:
                self._held[request.index] = request
                router.hold(wanted, request.index, self._now_ns)
            else:
                self._bind(router, request, rank)
        for router in self._routers:
            while (held := router.next_held(self._now_ns)) is not None:
                if held.decision.rank is None or not isinstance(held.request_key, int):
                    break
                self._bind(router, self._held.pop(held.request_key), held.decision.rank)

    def _route_in_turn(self, new: list[_Request], talk: _Talk) -> None:
        """Requests arrive at any time within a step, taken to be as long as the one before."""
        times = np.sort(self._rng.random(len(new))) * self._last_step_ns
        for request, time_ns in zip(new, times.astype(np.int64).tolist(), strict=True):
            talk.deliver(self._now_ns + time_ns)
            self._route([request])
            for index in range(len(self._routers)):
                talk.tell(index, self._now_ns + time_ns)

    def _bind(self, router: DecodeRouter, request: _Request, rank: int) -> None:
        router.book(rank, request.index, num_prompt_tokens=request.tokens, now_ns=self._now_ns)
        request.rank = rank
        self._request_rank[request.index] = rank
        self._ranks[rank].waiting.append(request)
        self._ranks[rank].waiting_tokens += request.tokens

    def _step_ns(self) -> float:
        group = self._group
        return max(
            group.base_ns + group.request_ns * len(rank.running) + group.kv_token_ns * rank.kv
            for rank in self._ranks
        )

    def _measure(self, step_ns: float) -> None:
        tokens = sum(rank.kv + rank.waiting_tokens for rank in self._ranks)
        tokens += sum(request.tokens for request in self._held.values())
        group = self._group
        self._ns += step_ns
        self._fluid_ns += (
            group.base_ns
            + (group.request_ns * self._num_in_system + group.kv_token_ns * tokens)
            / group.num_ranks
        )
        self._tokens += sum(len(rank.running) for rank in self._ranks)
        self._in_system += self._num_in_system

    def _emit(self) -> None:
        for rank in self._ranks:
            still = []
            for request in rank.running:
                request.tokens += 1
                request.left -= 1
                rank.kv += 1
                router = self._routers[request.router]
                router.add_tokens(request.index, 1)
                if request.left > 0:
                    still.append(request)
                    continue
                rank.kv -= request.tokens
                router.release(request.index)
                self._num_in_system -= 1
            rank.running = still

    def _deliver(self, reports: Sequence[RankReport]) -> None:
        for router in self._routers:
            for index, report in enumerate(reports):
                router.apply_report(index, report, self._now_ns)
