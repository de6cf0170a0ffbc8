"""What else SGLang's expert parallelism needs on a CPU: two stand-ins for code that GPUs have.

- `moe_forward_native` counts tokens of every expert with a scatter that refuses the id -1, with
  which SGLang marks the experts of other ranks. The stand-in computes the same sum and skips them.
- `ExpertLocationUpdater` empties the device's cache, which `torch.cpu` has not.

Without EPLB nothing here runs: the first is installed only beside `--enable-eplb` or `--ep-size`.
"""

import gc
from typing import Any


def activate() -> None:
    """Entry point `sglang.srt.plugins`: install both."""
    import torch
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not hasattr(torch.cpu, "empty_cache"):
        torch.cpu.empty_cache = lambda: gc.collect() and None
    HookRegistry.register(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        moe_forward,
        HookType.REPLACE,
    )


def moe_forward(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
    """Sum the experts of this rank: [tokens, hidden]. Only SiLU, as the tiny models have it."""
    import torch
    from torch.nn import functional

    if config.activation != "silu" or config.apply_router_weight_on_input:
        raise NotImplementedError(f"activation {config.activation!r} of a test-only stand-in")
    weights, ids, _ = topk_output
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(layer.w13_weight.shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if not token.numel():
            continue
        gate, up = functional.linear(x[token], layer.w13_weight[expert]).chunk(2, dim=-1)
        out = functional.linear(functional.silu(gate) * up, layer.w2_weight[expert])
        total.index_add_(0, token, out.float() * weights[token, choice].float()[:, None])
    return total.to(x.dtype)
