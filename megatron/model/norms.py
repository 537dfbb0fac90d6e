"""The norms of hidden states, with NeoX's parameter names, and the norms of queries and keys."""

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
    """Returns the initialisation of a norm's weights: "zeros" if 1 is added to them, else "ones"."""
    return "zeros" if spec.zero_centered else "ones"


class Norm(nn.Module):
    """The base of norms of hidden states `[..., hidden]`.

    functions: the kernels that compute LayerNorm and RMSNorm.
    """

    functions: NormFunctions = TORCH_NORMS

    def __init__(self, spec: NormSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.shape, self.eps, self.zero_centered = (spec.width,), spec.eps, spec.zero_centered
        # The weights are replicated on tensor ranks. Under sequence parallelism each rank sees a part of the
        # sequence, so their gradients are summed over ranks.
        self.group = groups.group("tensor") if sequence_parallel else None
        allocate(self, self.params(spec), groups, "weight", "bias")

    @staticmethod
    def params(spec: NormSpec) -> tuple[ParamSpec, ...]:
        raise NotImplementedError

    def _summed_over_tensor(self, param: nn.Parameter | None) -> Tensor | None:
        return None if param is None else copy_to_tensor(param, self.group)


class LayerNorm(Norm):
    """LayerNorm, with parameter `weight`, and `bias` if norms have biases. With zero_centered_gamma it
    multiplies by 1 + weight.

    non_parametric_layernorm has no parameters.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    @staticmethod
    def params(spec: NormSpec) -> tuple[ParamSpec, ...]:
        if spec.kind == "non_parametric_layernorm":
            return ()
        bias = (ParamSpec("bias", (spec.width,)),) if spec.bias else ()
        return (ParamSpec("weight", (spec.width,), init=_gain(spec)), *bias)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self._summed_over_tensor(self.weight), self._summed_over_tensor(self.bias)
        if self.zero_centered and weight is not None:
            weight = 1.0 + weight
        return self.functions.layer_norm(x, self.shape, weight, bias, self.eps)


class RMSNorm(Norm):
    """Computes x / sqrt(mean(x^2) + eps) * scale, with parameter `scale` (arXiv 1910.07467).

    With zero_centered_gamma it multiplies by 1 + scale, all in fp32.
    """

    scale: nn.Parameter

    @staticmethod
    def params(spec: NormSpec) -> tuple[ParamSpec, ...]:
        return (ParamSpec("scale", (spec.width,), init=_gain(spec)),)

    def forward(self, x: Tensor) -> Tensor:
        scale = copy_to_tensor(self.scale, self.group)
        return self.functions.rms_norm(x, self.shape, scale, self.eps, self.zero_centered)


class ScaleNorm(Norm):
    """Computes x / max(|x|, eps) * g, where |x| is the L2 norm and the parameter `g` a single number (arXiv
    1910.05895)."""

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
    """Makes all norms of hidden states in `module` compute with these functions."""
    for norm in module.modules():
        if isinstance(norm, Norm):
            norm.functions = functions


def build_norm(spec: NormSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> Norm:
    return NORMS[spec.kind](spec, groups, sequence_parallel)


class _HeadNorm(nn.Module):
    """The base of norms of queries or keys `[seq, batch, heads, head_dim]`, over this rank's heads.

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
        """Returns the mean of x over all heads of all tensor ranks, `[..., 1, 1]`.

        Heads that several ranks share count equally often. Each rank uses the mean for its own heads, so its
        gradients are summed over ranks as well.
        """
        mean = x.mean((-2, -1), keepdim=True)
        return copy_to_tensor(reduce_from_tensor(mean, self.group), self.group) / self.size


class QKLayerNorm(_HeadNorm):
    """LayerNorm over all heads together. Queries and keys share its parameters `weight` and `bias`, `[heads,
    head_dim]`.

    GPT-NeoX normalises over the heads of one tensor rank, so its results depend on model_parallel_size; ours
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
        normed = centred * (self._mean(centred.square()) + self.eps).rsqrt() * self._gain(self.weight)
        q, k = (normed if self.bias is None else normed + self.bias).to(q.dtype)
        return q, k


class QKRMSNorm(_HeadNorm):
    """RMSNorm of each head by itself, as in NeoX. Queries and keys share its parameter `scale`, `[heads,
    head_dim]`."""

    scale: nn.Parameter

    @staticmethod
    def params(spec: HeadNormSpec, heads: int) -> tuple[ParamSpec, ...]:
        return (ParamSpec("scale", (heads, spec.head_dim), 0, (heads,), _gain(spec)),)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        normed = F.rms_norm(torch.stack([q, k]).float(), self.shape[-1:], None, self.eps)
        q, k = (normed * self._gain(self.scale)).to(q.dtype)
        return q, k


class WideRMSNorm(_HeadNorm):
    """RMSNorm over all heads of queries, or of keys, together, as in OLMo; parameter `scale` `[heads *
    head_dim]`."""

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
    """RMSNorm of each head by itself, for queries or for keys, as in Qwen 3; parameter `scale` `[head_dim]`.

    All heads share `scale`, so its gradients are summed over tensor ranks.
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
    """Returns the norms of queries and keys by attribute name (such as q_norm), each as (class, spec, number
    of heads)."""
    spec = attention.norms
    if spec is None:
        return {}
    heads = {"q_norm": attention.heads, "k_norm": attention.kv_heads}
    if spec.form in ("layernorm", "rmsnorm"):
        heads = {"qk_layernorm": attention.heads}
    return {name: (_HEAD_NORMS[spec.form], spec, count) for name, count in heads.items()}
