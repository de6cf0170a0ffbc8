"""Limits of the controller; units in the names."""

from dataclasses import dataclass
from typing import Literal

from dsched.costs.prefill import PrefillCostModel
from dsched.faults.progress import ProgressLimits
from dsched.faults.spare import SpareMode

NS_PER_S = 1_000_000_000

MigrationMode = Literal["off", "kv", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationSettings:
    """Whether and how running requests move."""

    mode: MigrationMode = "off"
    interval_ns: int = NS_PER_S
    """Between two plans. Below: a move is planned before the last one shows. Above: ranks stay
    apart for longer."""
    max_moves: int = 4
    """Of one plan, in each pool."""
    kv_token_bytes: int = 70_000
    """Assumed, as in docs/routing.md."""
    link_bytes_per_s: float = 50e9
    """Of each rank, in and out."""

    @property
    def transfer_ns_per_token(self) -> float:
        return self.kv_token_bytes / self.link_bytes_per_s * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """What an operator can set, in nanoseconds, tokens and requests."""

    max_attempts: int = 3
    """Ranks that a request is tried on. Fewer: a second failure ends it. More: a request that
    kills engines kills more of them."""
    max_held_requests: int = 4_096
    """Requests that wait for a rank; more are refused with 429."""
    max_hold_ns: int = 10_000_000_000
    """Wait for room, after which a request goes to the least loaded rank, room or not."""
    queue_timeout_ns: int = 120_000_000_000
    """Wait for any rank at all, after which a request ends with 503."""
    handoff_deadline_ns: int = 60_000_000_000
    """The same for a request that lost its engine in the middle of its answer."""
    request_cost_ns: float = 200_000.0
    kv_token_cost_ns: float = 26.0
    router_index: int = 0
    """Number of this process among the dsched processes over the same engines."""
    num_routers: int = 1
    """How many those are; each rank is then at home with one of them."""
    prefill_costs: PrefillCostModel | None = None
    """Prices prompts for prefill pools; `None`: a preset, which is right in proportion."""
    max_local_prefill_tokens: int = 0
    """Prompts of up to so many tokens are computed by their decode rank. Below: short prompts pay
    for two engines. Above: decode steps get long."""
    max_transfer_age_ns: int = 60_000_000_000
    """How long KV may wait on a prefill engine for its decode rank. Above: engines that give it up
    are asked for what is gone. Below: prompts are computed again."""
    migration: MigrationSettings = MigrationSettings()
    """Whether running requests move between ranks. See `dsched.controller.migrations`."""
    progress: ProgressLimits | None = None
    """How long what may stand still before it counts as frozen; `None` does not look."""
    reprefill_tokens_per_rank: int | None = None
    """Prompt tokens of lost requests computed again at once, for each rank that is up; `None`: no
    ration. See `dsched.faults.ration`."""
    spare: SpareMode = "none"
    """`n-1` keeps room for the loss of a pool's largest EP group. See `dsched.faults.spare`."""
    is_validating: bool = False
    """Check every invariant after each tick."""
