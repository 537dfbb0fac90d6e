"""Functions that compute the norms of hidden states: torch's, NVIDIA apex's and Transformer-Engine's."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.neox_arguments.optional_packages import import_compiled

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class NormFunctions:
    """The norm functions of one library. Both return a tensor in the shape and dtype of x.

    layer_norm: takes (x, shape, weight or None, bias or None, eps), as `torch.nn.functional.layer_norm`.
    rms_norm: takes (x, shape, weight, eps, zero_centered), as `torch.nn.functional.rms_norm`. zero_centered:
        multiply by 1 + weight, in fp32.
    """

    layer_norm: Callable[[Tensor, Shape, Tensor | None, Tensor | None, float], Tensor]
    rms_norm: Callable[[Tensor, Shape, Tensor, float, bool], Tensor]


def _rms_norm(x: Tensor, shape: Shape, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    if zero_centered:
        return F.rms_norm(x.float(), shape, 1.0 + weight.float(), eps).to(x.dtype)
    return F.rms_norm(x, shape, weight, eps)


TORCH_NORMS = NormFunctions(F.layer_norm, _rms_norm)


def apex_norms() -> NormFunctions:
    """Returns the functions of NVIDIA apex's FusedLayerNorm and FusedRMSNorm.

    Raises PackageProblem if apex cannot be imported.
    """
    names = ("fused_layer_norm", "fused_layer_norm_affine", "fused_rms_norm_affine")
    apex = import_compiled("apex.normalization.fused_layer_norm", *names)

    def layer_norm(x: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        if weight is None:
            return apex.fused_layer_norm(x, shape, eps)
        bias = torch.zeros_like(weight) if bias is None else bias
        return apex.fused_layer_norm_affine(x, weight, bias, shape, eps)

    def rms_norm(x: Tensor, shape: Shape, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        if zero_centered:
            return apex.fused_rms_norm_affine(x.float(), 1.0 + weight.float(), shape, eps).to(x.dtype)
        return apex.fused_rms_norm_affine(x, weight, shape, eps)

    return NormFunctions(layer_norm, rms_norm)


def transformer_engine_norms() -> NormFunctions:
    """Returns the kernels that Transformer-Engine's LayerNorm and RMSNorm call.

    Raises PackageProblem if Transformer-Engine cannot be imported.
    """
    types = import_compiled("transformer_engine.pytorch.constants", "TE_DType").TE_DType
    kernels = import_module("transformer_engine_torch")  # the C++ extension, which importing the package loads

    def layer_norm(x: Tensor, shape: Shape, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        if weight is None:
            return F.layer_norm(x, shape, None, None, eps)
        return _EngineLayerNorm.apply(x, weight, bias, eps, kernels, types[x.dtype])

    def rms_norm(x: Tensor, shape: Shape, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        return _EngineRMSNorm.apply(x, weight, eps, zero_centered, kernels, types[x.dtype])

    return NormFunctions(layer_norm, rms_norm)


_ALL_SMS = 0  # number of GPU multiprocessors that the kernels leave unused


class _EngineLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kernels: Any, dtype: Any
    ) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        out, mean, rstd = kernels.layernorm_fwd(rows, weight, bias, eps, None, None, dtype, _ALL_SMS, False)
        ctx.save_for_backward(rows, mean, rstd, weight)
        ctx.kernels, ctx.has_bias = kernels, bias is not None
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, mean, rstd, weight = ctx.saved_tensors
        grad_out = grad.contiguous().view(rows.shape)
        grad_x, grad_weight, grad_bias = ctx.kernels.layernorm_bwd(grad_out, rows, mean, rstd, weight, _ALL_SMS, False)
        return grad_x.view(grad.shape), grad_weight, grad_bias if ctx.has_bias else None, None, None, None


class _EngineRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool, kernels: Any, dtype: Any
    ) -> Tensor:
        rows = x.contiguous().view(-1, x.shape[-1])
        out, _, rstd = kernels.rmsnorm_fwd(rows, weight, eps, None, None, dtype, _ALL_SMS, zero_centered)
        ctx.save_for_backward(rows, rstd, weight)
        ctx.kernels, ctx.zero_centered = kernels, zero_centered
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, rstd, weight = ctx.saved_tensors
        grad_out = grad.contiguous().view(rows.shape)
        grad_x, grad_weight = ctx.kernels.rmsnorm_bwd(grad_out, rows, rstd, weight, _ALL_SMS, ctx.zero_centered)
        return grad_x.view(grad.shape), grad_weight, None, None, None, None
