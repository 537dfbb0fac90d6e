"""The norms of hidden states with NeoX's parameter names, and those of queries and keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.weight_map import has_norm_bias, norm_kind
from megatron.mpu import ParallelGroups, copy_to_tensor, reduce_from_tensor
from megatron.neox_arguments import NeoXArgs

# Transformer-Engine's LayerNormMLP has these in GPT-NeoX, whatever the epsilon keys say (transformer_engine.py).
_TE_EPSILON = {"layernorm": 1e-5, "rmsnorm": 1e-8}


def _parameter(shape: Sequence[int], groups: ParallelGroups, *, sharded: bool = False) -> nn.Parameter:
    param = nn.Parameter(torch.empty(tuple(shape), device=groups.device, dtype=torch.float32))
    param.tensor_model_parallel = sharded and groups.size("tensor") > 1  # type: ignore[attr-defined] # gradient norms read it
    return param


class _Norm(nn.Module):
    def __init__(self, args: NeoXArgs, groups: ParallelGroups, eps: float) -> None:
        super().__init__()
        self.shape = (args.hidden_size,)
        self.eps = eps
        # Under sequence parallelism a rank sees part of the sequence: gradients of these replicated weights are summed.
        self.group = groups.group("tensor") if args.sequence_parallel else None

    def _whole(self, param: nn.Parameter | None) -> Tensor | None:
        return None if param is None else copy_to_tensor(param, self.group)


class LayerNorm(_Norm):
    """LayerNorm over hidden, `[..., hidden]`; parameters `weight` and, where norms have biases, `bias`.

    non_parametric_layernorm has neither.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, eps: float) -> None:
        super().__init__(args, groups, eps)
        plain = norm_kind(args) == "non_parametric_layernorm"
        self.weight = None if plain else _parameter(self.shape, groups)
        self.bias = _parameter(self.shape, groups) if has_norm_bias(args) else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self._whole(self.weight), self._whole(self.bias), self.eps)


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * scale over hidden, `[..., hidden]`; parameter `scale` (arXiv 1910.07467).

    zero_centered_gamma: times 1 + scale, all in fp32.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, eps: float) -> None:
        super().__init__(args, groups, eps)
        self.scale = _parameter(self.shape, groups)
        self.zero_centered = args.zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        scale = copy_to_tensor(self.scale, self.group)
        if self.zero_centered:
            return F.rms_norm(x.float(), self.shape, 1.0 + scale.float(), self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, scale, self.eps)


class ScaleNorm(_Norm):
    """x / max(|x|, eps) * g over hidden, `[..., hidden]`; parameter `g`, a single number (arXiv 1910.05895)."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, eps: float) -> None:
        super().__init__(args, groups, eps)
        self.g = _parameter((1,), groups)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).clamp(min=self.eps)
        return (x.float() / length * copy_to_tensor(self.g, self.group)).to(x.dtype)


def build_norm(args: NeoXArgs, groups: ParallelGroups, *, in_te_mlp: bool = False) -> nn.Module:
    """The norm that `norm` names. in_te_mlp: with the epsilon of the one inside Transformer-Engine's MLP."""
    kind = norm_kind(args)
    if kind == "rmsnorm":
        return RMSNorm(args, groups, _TE_EPSILON[kind] if in_te_mlp else args.rms_norm_epsilon)
    if kind == "scalenorm":
        return ScaleNorm(args, groups, args.scalenorm_epsilon)
    return LayerNorm(args, groups, _TE_EPSILON[kind] if in_te_mlp else args.layernorm_epsilon)


class _HeadNorm(nn.Module):
    """Over this rank's heads `[seq, batch, heads, head_dim]`; weights are cut over tensor ranks like the heads."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.group, self.size = groups.group("tensor"), groups.size("tensor")
        self.shape = (args.num_attention_heads // self.size, args.head_dim)
        self.zero_centered = args.zero_centered_gamma

    def _gain(self, scale: Tensor) -> Tensor:
        return 1.0 + scale.float() if self.zero_centered else scale

    def _mean(self, x: Tensor) -> Tensor:
        """Of all heads of all tensor ranks, `[..., 1, 1]`. Each rank uses the whole sum for its own heads, so
        gradients are summed as well."""
        mean = x.mean((-2, -1), keepdim=True)
        return copy_to_tensor(reduce_from_tensor(mean, self.group), self.group) / self.size


class QKLayerNorm(_HeadNorm):
    """LayerNorm over all heads together, one for queries and keys; parameters `weight`, `bias` `[heads, head_dim]`.

    GPT-NeoX takes the heads of one tensor rank together, so its numbers depend on model_parallel_size; ours do not.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__(args, groups, args.layernorm_epsilon)
        self.weight = _parameter(self.shape, groups, sharded=True)
        self.bias = _parameter(self.shape, groups, sharded=True) if has_norm_bias(args) else None

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.stack([q, k]).float()
        centred = both - self._mean(both)
        normed = centred * (self._mean(centred.square()) + self.eps).rsqrt() * self.weight
        q, k = (normed if self.bias is None else normed + self.bias).to(q.dtype)
        return q, k


class QKRMSNorm(_HeadNorm):
    """RMSNorm of each head alone, one for queries and keys, as NeoX's; parameter `scale` `[heads, head_dim]`."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__(args, groups, args.rms_norm_epsilon)
        self.scale = _parameter(self.shape, groups, sharded=True)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = F.rms_norm(torch.stack([q, k]).float(), self.shape[-1:], None, self.eps)
        q, k = (normed * self._gain(self.scale)).to(q.dtype)
        return q, k


class WideRMSNorm(_HeadNorm):
    """RMSNorm over the whole width of queries or of keys, as OLMo's; parameter `scale` `[heads * head_dim]`."""

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, heads: int) -> None:
        super().__init__(args, groups, args.rms_norm_epsilon)
        self.shape = (heads // self.size, args.head_dim)
        self.scale = _parameter((self.shape[0] * self.shape[1],), groups, sharded=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        root = (self._mean(wide.square()) + self.eps).rsqrt()
        return (wide * root * self._gain(self.scale).view(self.shape)).to(x.dtype)


class PerHeadRMSNorm(_HeadNorm):
    """RMSNorm of each head of queries or of keys alone, as Qwen 3's; parameter `scale` `[head_dim]`.

    All heads share it, so the gradients of the tensor ranks' heads are summed.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups) -> None:
        super().__init__(args, groups, args.rms_norm_epsilon)
        self.scale = _parameter((args.head_dim,), groups)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.scale.shape, None, self.eps)
        return (normed * self._gain(copy_to_tensor(self.scale, self.group))).to(x.dtype)
