"""The admin API's words about engines, translated for the controller."""

from typing import Any

from dsched.controller import Controller
from dsched.controller.spare import UNKNOWN_CAPACITY
from dsched.ids import EngineId

S = 1_000_000_000


class EngineAdmin:
    """Implements `EngineControl` over a controller, on its event loop."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def drain(self, engine_id: str, *, deadline_s: float | None) -> dict[str, Any]:
        """Take an engine out of service. Raises `ValueError` for an unknown engine."""
        deadline_ns = None if deadline_s is None else int(deadline_s * S)
        self._controller.drain(EngineId(engine_id), deadline_ns=deadline_ns)
        return self.engine(engine_id)

    def undrain(self, engine_id: str) -> dict[str, Any]:
        """Put it back. Raises `ValueError` for an unknown engine."""
        self._controller.drain(EngineId(engine_id), is_draining=False)
        return self.engine(engine_id)

    def engine(self, engine_id: str) -> dict[str, Any]:
        """State, reason and number of requests. Raises `ValueError` for an unknown engine."""
        member = self._controller.membership.engines.get(EngineId(engine_id))
        if member is None:
            raise ValueError(f"no engine is called {engine_id!r}")
        return {
            "engine_id": engine_id,
            "pool": member.pool,
            "ep_group": member.spec.group,
            "state": member.state.name.lower(),
            "reason": member.reason or None,
            "is_drained": member.is_drained,
            "num_requests": self._controller.num_requests_on(EngineId(engine_id)),
            "epoch": self._controller.membership.epoch,
        }

    def capacity(self) -> dict[str, Any]:
        """What each pool runs and may run."""
        pools = {}
        for pool, (load, plan) in self._controller.capacities().items():
            pools[pool] = {
                "num_running": load.num_running,
                "num_kv_tokens": load.num_kv_tokens,
                "max_running_requests": _known(plan.max_running_requests),
                "kv_capacity_tokens": _known(plan.kv_capacity_tokens),
                "absorbs_loss": plan.absorbs_loss,
                "reason": plan.reason,
            }
        return {"pools": pools}


def _known(value: int) -> int | None:
    return value if value < UNKNOWN_CAPACITY else None
