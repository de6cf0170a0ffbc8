"""One pool as the controller keeps it: its ranks' load, its lost requests, and what it may run."""

from dataclasses import dataclass

from dsched.controller.handoffs import Handoffs
from dsched.controller.settings import ControllerSettings
from dsched.controller.spare import SpareGate
from dsched.faults import PoolSpec
from dsched.routing import DecodeRouter
from dsched.trace import Recorder


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

    @property
    def name(self) -> str:
        return self.spec.name


def make_pool(spec: PoolSpec, settings: ControllerSettings, recorder: Recorder) -> Pool:
    """Make a pool without ranks; they come with their engines."""
    return Pool(
        spec=spec,
        router=DecodeRouter(
            router_index=settings.router_index,
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
        gate=SpareGate(spec.name, mode=settings.spare),
    )
