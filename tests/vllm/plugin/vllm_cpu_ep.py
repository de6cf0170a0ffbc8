"""Test-only plug-in of vLLM: what its CPU build lacks for data parallel with expert parallel.

vLLM 0.32 on CPUs refuses such a group twice, and this fills both gaps so that the tests can run a
real one; nothing of dsched depends on it, and no wheel has it. It is loaded by its folder being on
`PYTHONPATH` (the `.dist-info` beside it names the entry point), in every process of an engine.

1. `CpuCommunicator` has no `all_gatherv` and no `reduce_scatterv`, through which ranks give each
   other tokens and take back sums. Here: gloo's `all_gather` of padded blocks, and an `all_reduce`
   of which each rank keeps its own part.
2. `CPUUnquantizedExperts.apply` gives its kernel global expert ids, though a rank has only its own
   experts' weights, and reads beyond them. Here: ids are made local, and a token's share of a
   remote expert is given weight 0 (the rank that has the expert adds it).
"""

from typing import Any

import torch

MARK = "_has_cpu_ep"


def register() -> None:
    """Entry point `vllm.general_plugins`. Safe to repeat."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if hasattr(CpuCommunicator, MARK):
        return
    setattr(CpuCommunicator, MARK, True)
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    CPUUnquantizedExperts.apply = with_local_experts(CPUUnquantizedExperts.apply)


def all_gatherv(
    self: Any,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Return the rows of all ranks in order of rank; `sizes` are their numbers of rows."""
    if dim != 0:
        raise ValueError(f"rows are gathered, not dimension {dim}")
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
    padded[: input_.shape[0]] = input_
    blocks = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(blocks, padded, group=self.device_group)
    return torch.cat([block[:size] for block, size in zip(blocks, sizes, strict=True)])


def reduce_scatterv(
    self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Return this rank's rows of the sum over ranks."""
    if dim != 0:
        raise ValueError(f"rows are scattered, not dimension {dim}")
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.float().contiguous()
    torch.distributed.all_reduce(total, group=self.device_group)
    first = sum(sizes[: self.rank_in_group])
    own = total[first : first + sizes[self.rank_in_group]]
    return own.to(input_.dtype).contiguous()


def with_local_experts(apply: Any) -> Any:
    """Wrap `apply` so that its kernel sees only experts that this rank has."""

    def apply_local(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if expert_map is not None:
            local_ids = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local_ids < 0, 0.0)
            topk_ids = local_ids.clamp_min(0).to(topk_ids.dtype)
        apply(
            self,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            expert_map,
            *args,
            **kwargs,
        )

    return apply_local
