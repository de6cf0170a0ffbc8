"""The control plane: drain events, apply them, plan once, check, hand out."""

from dsched.controller.controller import Controller
from dsched.controller.host import LoopTickHost, TickHost
from dsched.controller.observer import ControllerObserver, HandoffGap
from dsched.controller.settings import ControllerSettings
from dsched.controller.status import EngineStatus, RankStatus
from dsched.faults import EngineSpec, PoolSpec

__all__ = [
    "Controller",
    "ControllerObserver",
    "ControllerSettings",
    "EngineSpec",
    "EngineStatus",
    "HandoffGap",
    "LoopTickHost",
    "PoolSpec",
    "RankStatus",
    "TickHost",
]
