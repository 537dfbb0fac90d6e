"""LayerNorm and RMSNorm with NeoX's parameter names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu import ParallelGroups, copy_to_tensor
from megatron.neox_arguments import NeoXArgs


class _Norm(nn.Module):
    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__()
        self.shape = (args.hidden_size,)
        # Under sequence parallelism a rank sees part of the sequence: gradients of these replicated weights are summed.
        self.group = groups.group("tensor") if args.sequence_parallel else None

    def _parameter(self, groups: ParallelGroups) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.shape, device=groups.device, dtype=torch.float32))


class LayerNorm(_Norm):
    """LayerNorm over hidden, `[..., hidden]`; parameters `weight`, `bias`."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__(args, groups)
        self.eps = args.layernorm_epsilon
        self.weight, self.bias = self._parameter(groups), self._parameter(groups)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = copy_to_tensor(self.weight, self.group), copy_to_tensor(self.bias, self.group)
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * scale over hidden, `[..., hidden]`; parameter `scale` (arXiv 1910.07467)."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__(args, groups)
        self.eps = args.rms_norm_epsilon
        self.scale = self._parameter(groups)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, copy_to_tensor(self.scale, self.group), self.eps)


def build_norm(args: NeoXArgs, groups: ParallelGroups) -> nn.Module:
    """The norm that `norm` names."""
    return {"layernorm": LayerNorm, "rmsnorm": RMSNorm}[args.norm](args, groups)
