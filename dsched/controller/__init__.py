"""The control plane: drain events, apply them, plan once, check, hand out."""

from dsched.controller.cluster import EngineSpec, PoolSpec
from dsched.controller.controller import (
    Controller,
    ControllerSettings,
    EngineStatus,
    RankStatus,
    TickHost,
)
from dsched.controller.host import LoopTickHost

__all__ = [
    "Controller",
    "ControllerSettings",
    "EngineSpec",
    "EngineStatus",
    "LoopTickHost",
    "PoolSpec",
    "RankStatus",
    "TickHost",
]
