"""The control plane: drain events, apply them, plan once, check, hand out."""

from dsched.controller.controller import (
    Controller,
    ControllerObserver,
    ControllerSettings,
    EngineStatus,
    HandoffGap,
    RankStatus,
    TickHost,
)
from dsched.controller.host import LoopTickHost
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
