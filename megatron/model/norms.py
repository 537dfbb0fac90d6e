"""The norms of hidden states with NeoX's parameter names, and those of queries and keys."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.norm_functions import TORCH_NORMS, NormFunctions
from megatron.model.specs import AttentionSpec, HeadNormSpec, NormSpec
from megatron.mpu import (
    ParallelGroups,
    ParamSpec,
    allocate,
    copy_to_tensor,
    gather_from_sharers,
    reduce_from_tensor,
    share_out,
)


def _gain(spec: NormSpec | HeadNormSpec) -> str:
    """The initial value of RMSNorm's weights: "zeros" where they are added to 1, else "ones"."""
    return "zeros" if spec.zero_centered else "ones"


class Norm(nn.Module):
    """The base of norms of hidden states `[..., hidden]`. functions: compute LayerNorm and RMSNorm."""

    functions: NormFunctions = TORCH_NORMS

    def __init__(self, spec: NormSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.shape, self.eps, self.zero_centered = (spec.width,), spec.eps, spec.zero_centered
        # Under sequence parallelism a rank sees part of the sequence: gradients of these replicated weights
        # are summed.
        self.group = groups.group("tensor") if sequence_parallel else None
        allocate(self, self.params(spec), groups, "weight", "bias")

    @staticmethod
    def params(spec: NormSpec) -> tuple[ParamSpec, ...]:
        raise NotImplementedError

    def _summed_over_tensor(self, param: nn.Parameter | None) -> Tensor | None:
        return None if param is None else copy_to_tensor(param, self.group)


class LayerNorm(Norm):
    """LayerNorm; parameters `weight` and, where norms have biases, `bias`. non_parametric_layernorm has
    neither."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @staticmethod
    def params(spec: NormSpec) -> tuple[ParamSpec, ...]:
        if spec.kind == "non_parametric_layernorm":
            return ()
        bias = (ParamSpec("bias", (spec.width,)),) if spec.bias else ()
        return (ParamSpec("weight", (spec.width,), init="ones"), *bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._summed_over_tensor(self.weight), self._summed_over_tensor(self.bias)
        return self.functions.layer_norm(x, self.shape, weight, bias, self.eps)


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * scale; parameter `scale` (arXiv 1910.07467).

    zero_centered_gamma: times 1 + scale, all in fp32.
    """

    scale: nn.Parameter

    @staticmethod
    def params(spec: NormSpec) -> tuple[ParamSpec, ...]:
        return (ParamSpec("scale", (spec.width,), init=_gain(spec)),)

    def forward(self, x: Tensor) -> Tensor:
        scale = copy_to_tensor(self.scale, self.group)
        return self.functions.rms_norm(x, self.shape, scale, self.eps, self.zero_centered)


class ScaleNorm(Norm):
    """x / max(|x|, eps) * g; parameter `g`, a single number (arXiv 1910.05895)."""

    g: nn.Parameter

    @staticmethod
    def params(spec: NormSpec) -> tuple[ParamSpec, ...]:
        return (ParamSpec("g", (1,), init="ones"),)

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).clamp(min=self.eps)
        return (x.float() / length * copy_to_tensor(self.g, self.group)).to(x.dtype)


NORMS: Mapping[str, type[Norm]] = {
    "layernorm": LayerNorm,
    "non_parametric_layernorm": LayerNorm,
    "rmsnorm": RMSNorm,
    "scalenorm": ScaleNorm,
}


def set_norm_functions(module: nn.Module, functions: NormFunctions) -> None:
    """Make all norms of hidden states in `module` use these functions."""
    for norm in module.modules():
        if isinstance(norm, Norm):
            norm.functions = functions


def build_norm(spec: NormSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> Norm:
    return NORMS[spec.kind](spec, groups, sequence_parallel)


class _HeadNorm(nn.Module):
    """Base of norms of queries or keys `[seq, batch, heads, head_dim]`, over this rank's heads.

    Weights are sharded over tensor ranks like the heads. heads: number of heads on all ranks.
    """

    def __init__(self, spec: HeadNormSpec, heads: int, groups: ParallelGroups) -> None:
        super().__init__()
        self.eps, self.zero_centered = spec.eps, spec.zero_centered
        self.group, self.size = groups.group("tensor"), groups.size("tensor")
        number, self.sharers = share_out(heads, self.size)
        self.shape = (number, spec.head_dim)
        allocate(self, self.params(spec, heads), groups, "bias")

    @staticmethod
    def params(spec: HeadNormSpec, heads: int) -> tuple[ParamSpec, ...]:
        raise NotImplementedError

    def _gain(self, scale: Tensor) -> Tensor:
        return 1.0 + scale.float() if self.zero_centered else scale

    def _mean(self, x: Tensor) -> Tensor:
        """Returns the mean over all heads of all tensor-parallel ranks, `[..., 1, 1]`.

        Heads that several ranks share count equally often. Each rank uses the mean for its own heads, so its
        gradients are summed over ranks as well.
        """
        mean = x.mean((-2, -1), keepdim=True)
        return copy_to_tensor(reduce_from_tensor(mean, self.group), self.group) / self.size


class QKLayerNorm(_HeadNorm):
    """LayerNorm over all heads together, one for queries and keys; parameters `weight`, `bias`
    `[heads, head_dim]`.

    GPT-NeoX takes the heads of one tensor rank together, so its numbers depend on model_parallel_size; ours
    do not.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    @staticmethod
    def params(spec: HeadNormSpec, heads: int) -> tuple[ParamSpec, ...]:
        shape = (heads, spec.head_dim)
        bias = (ParamSpec("bias", shape, 0, (heads,)),) if spec.bias else ()
        return (ParamSpec("weight", shape, 0, (heads,), _gain(spec)), *bias)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        stacked = torch.stack([q, k]).float()
        centred = stacked - self._mean(stacked)
        normed = centred * (self._mean(centred.square()) + self.eps).rsqrt() * self.weight
        q, k = (normed if self.bias is None else normed + self.bias).to(q.dtype)
        return q, k


class QKRMSNorm(_HeadNorm):
    """RMSNorm of each head alone, one for queries and keys, as NeoX's; parameter `scale`
    `[heads, head_dim]`."""

    scale: nn.Parameter

    @staticmethod
    def params(spec: HeadNormSpec, heads: int) -> tuple[ParamSpec, ...]:
        return (ParamSpec("scale", (heads, spec.head_dim), 0, (heads,), _gain(spec)),)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = F.rms_norm(torch.stack([q, k]).float(), self.shape[-1:], None, self.eps)
        q, k = (normed * self._gain(self.scale)).to(q.dtype)
        return q, k


class WideRMSNorm(_HeadNorm):
    """RMSNorm over the whole width of queries or of keys, as OLMo's; parameter `scale`
    `[heads * head_dim]`."""

    scale: nn.Parameter

    @staticmethod
    def params(spec: HeadNormSpec, heads: int) -> tuple[ParamSpec, ...]:
        width = heads * spec.head_dim
        return (ParamSpec("scale", (width,), 0, (width,), _gain(spec)),)

    def forward(self, x: Tensor) -> Tensor:
        wide, scale = x.float(), gather_from_sharers(self.scale, self.group, self.sharers)
        root = (self._mean(wide.square()) + self.eps).rsqrt()
        return (wide * root * self._gain(scale).view(self.shape)).to(x.dtype)


class PerHeadRMSNorm(_HeadNorm):
    """RMSNorm of each head of queries or of keys alone, as Qwen 3's; parameter `scale` `[head_dim]`.

    All heads share it, so the gradients of the tensor ranks' heads are summed.
    """

    scale: nn.Parameter

    @staticmethod
    def params(spec: HeadNormSpec, heads: int) -> tuple[ParamSpec, ...]:
        return (ParamSpec("scale", (spec.head_dim,), init=_gain(spec)),)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), self.scale.shape, None, self.eps)
        return (normed * self._gain(copy_to_tensor(self.scale, self.group))).to(x.dtype)


_HEAD_NORMS: Mapping[str, type[_HeadNorm]] = {
    "layernorm": QKLayerNorm,
    "rmsnorm": QKRMSNorm,
    "wide": WideRMSNorm,
    "per_head": PerHeadRMSNorm,
}


def head_norms(attention: AttentionSpec) -> dict[str, tuple[type[_HeadNorm], HeadNormSpec, int]]:
    """The norms of queries and keys by their names in attention: class, spec and number of heads of each."""
    spec = attention.norms
    if spec is None:
        return {}
    heads = {"q_norm": attention.heads, "k_norm": attention.kv_heads}
    if spec.form in ("layernorm", "rmsnorm"):
        heads = {"qk_layernorm": attention.heads}
    return {name: (_HEAD_NORMS[spec.form], spec, count) for name, count in heads.items()}
