"""Which DP rank of an SGLang server gets a request that SGLang's controller has to place.

dsched names the rank of each request itself (`routed_dp_rank`), and that is what happens, unless
the rank is dead. The controller of SGLang 0.5.23 would raise then, which ends the whole server; and
its own methods `total_requests` and `total_tokens` place requests on dead ranks, because they do
not look. `RankChoice` stands before the controller's method: it keeps a live named rank, and gives
everything else to the live rank with the fewest tokens, then requests, by SGLang's own snapshots.

SGLang keeps the way of sending, its health checks, and `follow_bootstrap_room`, with which the
prefill and the decode side of a split have to agree. An exception leaves SGLang's own choice.

This module imports nothing of SGLang. O(D) for D ranks a request.
"""

import logging
from collections.abc import Sequence
from typing import Any, Final

MAX_ERRORS: Final = 16
"""Failed choices after which SGLang chooses for good."""
FIXED_METHOD: Final = "FOLLOW_BOOTSTRAP_ROOM"
HOOKS: Final = ("dispatching", "workers", "status", "_active_workers", "dp_budget")
"""Attributes of SGLang's `DataParallelController` that are read or set."""

log = logging.getLogger("sglang.dsched")


class RankChoice:
    """Called by the controller for each request; ends by calling SGLang's own method."""

    def __init__(self, controller: Any) -> None:
        self.num_redirected = 0
        """Requests whose named rank was dead."""
        self.num_chosen = 0
        """Requests that named no rank."""
        self.num_errors = 0
        self._controller = controller
        self._own = controller.dispatching

    def __call__(self, request: Any) -> Any:
        """Place one request."""
        if self.num_errors < MAX_ERRORS:
            try:
                self._choose(request)
            except Exception as error:  # the door: SGLang's own choice
                self.num_errors += 1
                log.warning("rank.failed reason=%r; SGLang chooses", error)
        return self._own(request)

    def _choose(self, request: Any) -> None:
        controller, stated = self._controller, request.routed_dp_rank
        live = live_ranks(controller)
        if stated in live or not live:
            return
        if stated is None:
            self.num_chosen += 1
        else:
            self.num_redirected += 1
            log.warning("rank.redirected dp_rank=%s live=%s reason='it is dead'", stated, live)
        budget = controller.dp_budget
        rank = lightest(live, budget.total_tokens, budget.total_requests)
        # Until the next snapshot, so that a burst spreads.
        budget.total_tokens[rank] += len(request.input_ids or ())
        budget.total_requests[rank] += 1
        request.routed_dp_rank = rank


def lost_dp_ranks(state: Any, *, replica_size: int) -> list[int]:
    """Return the DP ranks that SGLang's elastic EP has stopped using, ascending.

    `state` is its `ElasticEPState` (`srt/elastic_ep/elastic_ep.py`), `None` before there is one;
    `replica_size` EP ranks make up one DP rank, and one of them lost is the whole lost. Slots
    beyond `effective_ep_size` are kept for ranks that have not joined yet, and nobody lost them.

    >>> from types import SimpleNamespace
    >>> import numpy as np
    >>> lost_dp_ranks(SimpleNamespace(active_ranks_cpu=np.array([1, 1, 1, 0, 1, 1, 0, 0]),
    ...     effective_ep_size=6), replica_size=2)
    [1]
    """
    active = None if state is None else state.active_ranks_cpu
    if active is None:
        return []
    flags = [bool(flag) for flag in active.tolist()]
    flags = flags[: state.effective_ep_size or len(flags)]
    starts = range(0, len(flags), replica_size)
    return [
        start // replica_size for start in starts if not all(flags[start : start + replica_size])
    ]


def live_ranks(controller: Any) -> list[int]:
    """Return the ranks that may get requests, ascending."""
    workers, status = controller.workers, controller.status
    live = [
        rank for rank in controller._active_workers if status[rank] and workers[rank] is not None
    ]
    processes = getattr(controller, "scheduler_procs", ())
    if len(processes) == len(workers):
        # One process a rank; with attention DP the lists do not match by index.
        live = [rank for rank in live if is_alive(processes[rank])]
    return sorted(live)


def is_alive(process: Any) -> bool:
    """Whether a scheduler's process runs, or is none of this node's."""
    return process is None or bool(process.is_alive())


def lightest(live: Sequence[int], tokens: Sequence[int], requests: Sequence[int]) -> int:
    """Return the rank with the fewest tokens, then requests, then the lowest number.

    >>> lightest([0, 2], [7, 0, 7], [3, 0, 2])
    2
    """
    return min(live, key=lambda rank: (tokens[rank], requests[rank], rank))


def attach_ranks(controller: Any) -> RankChoice | None:
    """Put a `RankChoice` before the controller's method; `None` where SGLang's own must stand."""
    missing = [name for name in HOOKS if not hasattr(controller, name)]
    if missing:
        log.error("rank.skipped reason='this SGLang lacks %s'", ", ".join(missing))
        return None
    if getattr(controller.load_balance_method, "name", "") == FIXED_METHOD:
        log.info("rank.skipped reason='both sides of a split follow the bootstrap room'")
        return None
    choice = RankChoice(controller)
    controller.dispatching = choice
    # Without it the snapshots are not read with SGLang's other methods.
    controller.refresh_load_budget_on_dispatch = True
    log.info("rank.attached num_dp_ranks=%d", len(controller.workers))
    return choice
