"""Moves running requests between ranks: asks `plan_migrations` now and then, and starts its moves.

In:  what runs where, and the routers' loads and prices. Out: requests that leave their engine, each
with the rank that it is to go on at.

With KV (`kv`) the engine hands over what it has computed (`dsched.drivers.base.KvMover`), the next
attempt fetches it, and the client waits for one transfer. Without (`recompute`, abort-and-continue)
the next engine computes prompt and emitted tokens again, and the plan prices that. Off by default.

Only requests that can be continued from their tokens move. To the client a move is a handoff: its
stream pauses, and a sampled answer is told to be a continuation.

A look costs O(running requests * log) and happens once in `interval_ns`.
"""

import numpy as np
import structlog

from dsched.controller.attempts import attempt_of
from dsched.controller.lifecycle import Lifecycle
from dsched.controller.pools import Pool
from dsched.controller.run import Phase, RequestRun
from dsched.controller.settings import MigrationSettings
from dsched.controller.state import ControllerState
from dsched.drivers.base import KvMover
from dsched.faults import RecoveryMethod, plan_recovery
from dsched.routing import MigrationConfig, MigrationView, plan_migrations
from dsched.routing import kernels as k

NS_PER_S = 1_000_000_000
RECOMPUTE_SAMPLE_TOKENS = 2_048
"""Prompt whose price a token gives the price of computing one again."""

log = structlog.get_logger(__name__)


class Migrations:
    """When to look, and what to move."""

    def __init__(self, state: ControllerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._next_ns: int | None = None
        self._recompute_ns: float | None = None

    @property
    def _settings(self) -> MigrationSettings:
        return self._state.settings.migration

    def next_due_ns(self) -> int | None:
        """When to look again; `None` while nothing could move."""
        if self._settings.mode == "off" or len(self._state.runs) < 2:
            self._next_ns = None
            return None
        if self._next_ns is None:
            self._next_ns = self._state.clock.now_ns() + self._settings.interval_ns
        return self._next_ns

    def plan(self, now_ns: int) -> None:
        """Start the moves that pay, if it is time to look."""
        due_ns = self.next_due_ns()
        if due_ns is None or now_ns < due_ns:
            return
        self._next_ns = now_ns + self._settings.interval_ns
        for pool in self._state.pools.values():
            if pool.prefill is None and pool.router.num_ranks > 1:
                self._plan_pool(pool)

    def _plan_pool(self, pool: Pool) -> None:
        runs = [
            run
            for run in self._state.runs
            if run.pool == pool.name and run.phase is Phase.RUNNING and run.num_attempt_tokens
        ]
        if not runs:
            return
        settings = self._settings
        is_recomputed = settings.mode == "recompute"
        stall_ns = self._price_of_recompute() if is_recomputed else settings.transfer_ns_per_token
        config = MigrationConfig(max_moves=settings.max_moves, stall_ns_per_token=stall_ns)
        plan = plan_migrations(self._view(pool, runs), config)
        for move in plan.moves:
            run, to = runs[move.sequence], pool.router.rank_id(move.to_rank)
            log.info(
                "request.moved",
                request_id=run.request.request_id,
                from_rank=str(pool.router.rank_id(move.from_rank)),
                to_rank=str(to),
                num_kv_tokens=move.num_kv_tokens,
                with_kv=not is_recomputed,
            )
            self._lifecycle.move_to_rank(run, to, with_kv=not is_recomputed)

    def _view(self, pool: Pool, runs: list[RequestRun]) -> MigrationView:
        router, settings = pool.router, self._settings
        table = router.ledger.table[:, : router.num_ranks]
        num_running = table[k.OWN_RUNNING] + table[k.OTHER_RUNNING]
        num_kv = table[k.OWN_KV] + table[k.OTHER_KV]
        is_up = table[k.STATE] == k.UP
        has_place = is_up & (num_running < table[k.MAX_RUNNING])
        link = int(settings.link_bytes_per_s / settings.kv_token_bytes)
        link = link * settings.interval_ns // NS_PER_S
        return MigrationView(
            sequence_rank=np.array([attempt_of(run).rank for run in runs], np.int64),
            sequence_kv_tokens=np.array([run.num_known_tokens for run in runs], np.int64),
            is_movable=np.array([self._is_movable(run) for run in runs], np.bool_),
            num_running=num_running,
            num_kv_tokens=num_kv,
            prices=router.price_table(),
            room_tokens=np.where(has_place, np.maximum(table[k.KV_LIMIT] - num_kv, 0), 0),
            link_tokens=np.tile(np.where(is_up, link, 0), (2, 1)).astype(np.int64),
        )

    def _is_movable(self, run: RequestRun) -> bool:
        if run.move_to is not None or run.request.pinned_dp_rank is not None:
            return False
        if run.expected_token_ids:
            return False
        plan = plan_recovery(run.request.sampling, num_output_tokens=run.num_output_tokens)
        if plan.method is not RecoveryMethod.CONTINUE:
            return False
        if self._settings.mode == "recompute":
            return True
        engine_id = attempt_of(run).engine_id
        description = self._state.membership.engines[engine_id].description
        can_migrate = description is not None and description.capabilities.can_migrate
        return can_migrate and isinstance(self._state.drivers[engine_id], KvMover)

    def _price_of_recompute(self) -> float:
        if self._recompute_ns is None:
            costs = self._state.prefill_costs()
            seconds = costs.predict(RECOMPUTE_SAMPLE_TOKENS, 0)
            self._recompute_ns = float(seconds) / RECOMPUTE_SAMPLE_TOKENS * NS_PER_S
        return self._recompute_ns
