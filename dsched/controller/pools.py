"""One pool as the controller keeps it: its ranks' load, its lost requests, and what it may run."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dsched.controller.handoffs import Handoffs
from dsched.controller.settings import ControllerSettings
from dsched.controller.spare import SpareGate
from dsched.costs.prefill import PrefillCostModel
from dsched.costs.presets import load_cost_models
from dsched.drivers.wire import RankReport
from dsched.faults import PoolSpec
from dsched.ids import EngineId, RankId
from dsched.routing import DecodeRouter, PrefillRouter, ReportOutcome
from dsched.states import PoolRole, RankState
from dsched.trace import Recorder


class PrefixSource(Protocol):
    """Knows which prompts engines have cached; `dsched.drivers.kv_follower`."""

    def cached_tokens(self, prompt_token_ids: Sequence[int]) -> Mapping[RankId, int]:
        """Leading tokens of the prompt that each rank has; ranks that are not named have none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """State of one pool; every part changes by its own methods."""

    spec: PoolSpec
    router: DecodeRouter
    """Load of every rank, and requests that wait for room."""
    handoffs: Handoffs
    """Requests that lost their engine."""
    gate: SpareGate
    """Room that is kept for the loss of a group."""
    prefill: PrefillRouter | None = None
    """Of a prefill pool: which worker computes a prompt. Its `router` only counts."""
    prefixes: PrefixSource | None = None
    """What each rank has cached; `None` where nobody says, or all share a store."""

    @property
    def name(self) -> str:
        return self.spec.name

    def add_rank(
        self, rank_id: RankId, *, kv_capacity_tokens: int, max_running_requests: int
    ) -> None:
        """A rank came up, or says new limits."""
        self.router.add_rank(
            rank_id,
            kv_capacity_tokens=kv_capacity_tokens,
            max_running_requests=max_running_requests,
        )
        if self.prefill is not None:
            self.prefill.add_worker(rank_id)

    def remove_rank(self, rank_id: RankId) -> None:
        """The engine came back without it."""
        rank = self.router.index_of(rank_id)
        if rank is not None:
            self.router.remove_rank(rank)
        self._set_worker_state(rank_id, RankState.REMOVED)

    def set_rank_state(self, rank_id: RankId, state: RankState) -> None:
        """Mark a rank; one that was never up is left out."""
        rank = self.router.index_of(rank_id)
        if rank is not None:
            self.router.set_rank_state(rank, state)
            self._set_worker_state(rank_id, state)

    def _set_worker_state(self, rank_id: RankId, state: RankState) -> None:
        if self.prefill is not None:
            worker = self.prefill.index_of(rank_id)
            if worker is not None:
                self.prefill.set_worker_state(worker, state)

    def apply_report(self, rank_id: RankId, report: RankReport, now_ns: int) -> ReportOutcome:
        """Correct the load of a rank."""
        outcome = self.router.apply_report(self.router.index_of(rank_id), report, now_ns)
        if self.prefill is not None and outcome is ReportOutcome.APPLIED:
            worker = self.prefill.index_of(rank_id)
            if worker is not None:
                self.prefill.apply_report(worker, report, now_ns)
        return outcome

    def cached_tokens(self, prompt_token_ids: Sequence[int]) -> int | Sequence[int]:
        """Leading tokens of a prompt that each prefill worker has; one number if all have them."""
        if self.prefixes is None or self.prefill is None:
            return 0
        found = self.prefixes.cached_tokens(prompt_token_ids)
        workers = range(self.prefill.num_workers)
        return [found.get(self.prefill.rank_id(worker), 0) for worker in workers]

    def validate(self) -> None:
        self.router.validate()
        if self.prefill is not None:
            self.prefill.validate()


def make_pool(
    spec: PoolSpec,
    settings: ControllerSettings,
    recorder: Recorder,
    prefixes: PrefixSource | None = None,
) -> Pool:
    """Make a pool without ranks; they come with their engines."""
    is_prefill = spec.role is PoolRole.PREFILL
    return Pool(
        spec=spec,
        router=DecodeRouter(
            router_index=settings.router_index,
            num_routers=settings.num_routers,
            is_synchronised=is_one_group(spec),
            engines_in_groups=_engines_in_groups(spec),
            request_ns=settings.request_cost_ns,
            kv_token_ns=settings.kv_token_cost_ns,
            max_held_requests=settings.max_held_requests,
            max_hold_ns=settings.max_hold_ns,
        ),
        handoffs=Handoffs(
            spec.name,
            tokens_per_rank=settings.reprefill_tokens_per_rank,
            recorder=recorder,
        ),
        # A prompt that a lost worker leaves goes to another worker or to its decode rank.
        gate=SpareGate(spec.name, mode="none" if is_prefill else settings.spare),
        prefill=_make_prefill_router(settings) if is_prefill else None,
        prefixes=prefixes,
    )


def is_one_group(spec: PoolSpec) -> bool:
    """Whether the ranks of the pool step together: they are one EP group that decodes."""
    groups = {engine.group for engine in spec.engines}
    return len(groups) == 1 and spec.role is not PoolRole.PREFILL


def _engines_in_groups(spec: PoolSpec) -> list[EngineId]:
    """Engines that share their EP group, and so their steps, with another engine."""
    sizes = Counter(engine.group for engine in spec.engines)
    return [engine.engine_id for engine in spec.engines if sizes[engine.group] > 1]


def _make_prefill_router(settings: ControllerSettings) -> PrefillRouter:
    costs = settings.prefill_costs or load_cost_models(None)[0]
    # Its own: it learns, and another pool's workers are other devices.
    own = PrefillCostModel.from_json(costs.to_json())
    return PrefillRouter(own, router_index=settings.router_index)
