"""An out-of-tree platform of SGLang over plain CPU torch.

SGLang's own CPU engine (`SGLANG_USE_CPU_ENGINE=1`) needs `sgl_kernel`, which no index holds for
CPUs. An out-of-tree platform takes the plain torch path of every layer instead. It must stay the
only one: with `SGLANG_USE_CPU_ENGINE` set, SGLang would take its own.

Also mends the import of torchvision, which SGLang imports for models that nobody serves here: the
index's wheel is built for CUDA, so its operators do not load beside CPU torch, and the import fails
because their schemas are not declared.
"""

import importlib
import sys
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[Any] = []
"""Schemas live as long as the object that declared them."""


def activate() -> str:
    """Entry point `sglang.srt.platforms`: name the platform's class."""
    mend_torchvision()
    return f"{__name__}.CpuPlatform"


def mend_torchvision() -> None:
    """Declare the schemas of torchvision's operators if its own library does not load."""
    import torch

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in [each for each in sys.modules if each.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)


def __getattr__(name: str) -> Any:
    # SGLang's classes can be imported only once SGLang asks for ours.
    if name != "CpuPlatform":
        raise AttributeError(name)
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """A device called `cpu` that can do nothing special."""

        _enum = PlatformEnum.OOT
        device_name = "cpu"
        device_type = "cpu"

        def get_default_attention_backend(self) -> str:
            return "torch_native"

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

        def apply_server_args_defaults(self, server_args: Any) -> None:
            """SGLang's defaults stand."""

    globals()[name] = CpuPlatform
    return CpuPlatform
