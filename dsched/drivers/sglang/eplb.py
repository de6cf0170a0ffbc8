"""Expert placement inside SGLang: dsched decides what fills each slot, SGLang moves weights.

Two hooks of SGLang 0.5.23, installed by `attach_eplb` if `DSCHED_EPLB=1`:

- around `sglang.srt.eplb.eplb_algorithms.rebalance_experts`, the one function through which all
  its algorithms are called: `ExpertRebalance` plans instead;
- around `EPLBManager._compute_expert_location_metadata`, which tells `ExpertRebalance` the
  placement in use. SGLang plans from nothing and does not pass it on; without it every plan would
  move nearly all experts.

SGLang keeps counting, the exchange of weights and its own schedule. With the `elasticity_aware`
algorithm its mask of active ranks is respected; slots of lost ranks are filled with expert 0, as it
does itself. If a plan fails, SGLang's own algorithm plans that time. SGLang is imported only when
the hooks are attached.
"""

import logging
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from dsched.config import (
    EplbSettings,
    agent_settings_from_environment,
    eplb_settings_from_environment,
)
from dsched.drivers.eplb import plan_slots, report_plan
from dsched.drivers.expert_report import ExpertReporter

if TYPE_CHECKING:
    from dsched.eplb import ExpertPlacement, Planner

REBALANCE: Final = "sglang.srt.eplb.eplb_algorithms.rebalance_experts"
METADATA: Final = "sglang.srt.eplb.eplb_manager.EPLBManager._compute_expert_location_metadata"

log = logging.getLogger("sglang.dsched")


@dataclass(slots=True)
class ExpertRebalance:
    """State: the placement in use while SGLang asks for the next one."""

    settings: EplbSettings
    reporter: ExpertReporter | None = None
    """Told the load of each plan, by the first rank of the EP group."""
    num_plans: int = 0
    num_moves: int = 0
    """Expert copies that plans have put on ranks that did not hold their expert."""
    num_errors: int = 0
    _current: NDArray[np.int64] | None = None
    _planned: NDArray[np.int64] | None = None

    def around_metadata(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Note the placement in use, then let SGLang compute the next."""
        try:
            from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

            metadata = get_global_expert_location_metadata()
            self._current = metadata.physical_to_logical_map_cpu.numpy().copy()
        except Exception as error:  # the door: plan from nothing, as SGLang does
            self._current = None
            log.warning("eplb.current_unknown reason=%r", error)
        try:
            return original(*args, **kwargs)
        finally:
            self._current = None

    def around_rebalance(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return SGLang's three maps from dsched's plan."""
        try:
            slots = self._plan(*args, **kwargs)
        except Exception as error:  # the door: SGLang's own algorithm plans instead
            self.num_errors += 1
            log.warning("eplb.failed reason=%r; SGLang's algorithm is used", error)
            return original(*args, **kwargs)
        self._note(slots, int(_argument(args, kwargs, 2, "num_local_physical_experts")))
        import torch

        tokens = _argument(args, kwargs, 0, "tokens_per_expert")
        width = int(_argument(args, kwargs, 2, "num_local_physical_experts"))
        report_plan(
            self.reporter,
            tokens.detach().cpu().sum(dim=0).numpy(),
            slots,
            num_ranks=slots.shape[1] // width,
            num_steps=len(tokens),
            log=log,
        )
        maps = maps_of(slots, num_experts=tokens.shape[-1])
        return tuple(torch.from_numpy(array) for array in maps)

    def _note(self, slots: NDArray[np.int64], width: int) -> None:
        """Count the plan and its moves, -1 if the placement in use is not known; log them with a
        checksum, the same on every rank, and whether the last plan is what has run since."""
        self.num_plans += 1
        current, last = self._current, self._planned
        moves, has_run = -1, False
        if current is not None and current.shape == slots.shape:
            moves = count_moves(current, slots, width=width)
            self.num_moves += moves
            has_run = last is not None and np.array_equal(last, current)
        log.info(
            "eplb.planned plan=%d moves=%d placement=%08x last_has_run=%s",
            self.num_plans,
            moves,
            zlib.crc32(slots.tobytes()),
            has_run,
        )
        self._planned = slots

    def _plan(self, *args: Any, **kwargs: Any) -> NDArray[np.int64]:
        tokens = _argument(args, kwargs, 0, "tokens_per_expert")
        num_slots = int(_argument(args, kwargs, 1, "num_physical_experts"))
        width = int(_argument(args, kwargs, 2, "num_local_physical_experts"))
        rank_up = active_ranks(_argument(args, kwargs, 5, "algorithm"))
        slots = plan_slots(
            tokens.detach().cpu().sum(dim=0).numpy(),
            num_slots=num_slots,
            num_ranks=num_slots // width,
            num_nodes=int(_argument(args, kwargs, 4, "num_nodes")),
            num_groups=_argument(args, kwargs, 3, "num_groups"),
            current=self._current,
            settings=self.settings,
            rank_up=rank_up,
        )
        return np.maximum(slots, 0)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return kwargs[name] if name in kwargs else args[position]


def count_moves(current: NDArray[np.int64], planned: NDArray[np.int64], *, width: int) -> int:
    """Count the slots of `planned` [L, P] whose expert their rank (`width` slots) does not hold in
    `current` [L, P].

    >>> count_moves(np.array([[0, 1, 2, 3]]), np.array([[1, 0, 0, 3]]), width=2)
    1
    """
    shape = (len(current), -1, width)
    held = planned.reshape(shape)[..., :, None] == current.reshape(shape)[..., None, :]
    return int(np.count_nonzero(~held.any(axis=-1)))


def active_ranks(algorithm: Any) -> NDArray[np.bool_] | None:
    """Return SGLang's mask of live ranks where its algorithm would use it."""
    if not str(getattr(algorithm, "name", "")).startswith("elasticity_aware"):
        return None
    from sglang.srt.elastic_ep.elastic_ep import get_elastic_ep_state

    mask: NDArray[np.bool_] = get_elastic_ep_state().active_ranks.cpu().numpy().astype(np.bool_)
    return mask


def maps_of(
    slots: NDArray[np.int64], *, num_experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return slot to expert [L, P], expert to slots [L, E, X] padded by -1, copies [L, E]."""
    num_layers = len(slots)
    counts = np.zeros((num_layers, num_experts), np.int64)
    layer = np.arange(num_layers)[:, None]
    np.add.at(counts, (layer, slots), 1)
    order = np.argsort(slots, axis=1, kind="stable")
    of_expert = np.take_along_axis(slots, order, axis=1)
    first = np.cumsum(counts, axis=1) - counts
    place = np.arange(slots.shape[1])[None, :] - np.take_along_axis(first, of_expert, axis=1)
    expert_slots = np.full((num_layers, num_experts, int(counts.max(initial=1))), -1, np.int64)
    expert_slots[layer, of_expert, place] = order
    return slots, expert_slots, counts


def attach_eplb() -> ExpertRebalance | None:
    """Install both hooks if `DSCHED_EPLB=1`; called once in every SGLang process."""
    settings = eplb_settings_from_environment()
    if not settings.is_on:
        return None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    warm_up(settings)
    reporter = ExpertReporter(agent_settings_from_environment())
    rebalance = ExpertRebalance(settings=settings, reporter=reporter)
    HookRegistry.register(REBALANCE, rebalance.around_rebalance, HookType.AROUND)
    HookRegistry.register(METADATA, rebalance.around_metadata, HookType.AROUND)
    log.info("eplb.activated trigger=%s stop=%s", settings.trigger, settings.stop)
    return rebalance


def warm_up(settings: EplbSettings) -> None:
    """Compile (or load) the planner now: SGLang asks for plans between two steps."""
    load = np.array([[4.0, 1.0, 1.0, 1.0]])
    current = np.array([[0, 1, 2, 3, 0, 1]])
    for slots in (None, current):
        plan_slots(
            load,
            num_slots=6,
            num_ranks=2,
            num_nodes=1,
            num_groups=None,
            current=slots,
            settings=settings,
        )


def sglang_planner(*, num_slots: int, num_ranks: int) -> "Planner | None":
    """Return SGLang's own planner in its global mode for comparisons; None without SGLang."""
    try:
        import torch
        from sglang.srt.eplb.eplb_algorithms import deepseek
    except ImportError:
        return None
    from dsched.eplb import ExpertPlacement

    def plan(load: NDArray[Any], _: "ExpertPlacement | None") -> "ExpertPlacement":
        slots, _, _ = deepseek.rebalance_experts(
            weight=torch.from_numpy(load),
            num_replicas=num_slots,
            num_groups=1,
            num_nodes=1,
            num_gpus=num_ranks,
            enable_hierarchical=False,
        )
        return ExpertPlacement(
            slot_expert=slots.numpy(), num_ranks=num_ranks, num_experts=load.shape[1]
        )

    return plan
