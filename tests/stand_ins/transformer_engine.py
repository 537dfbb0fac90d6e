"""A stand-in for Transformer-Engine, by its docstrings and the definitions of the norms."""

from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from tests.stand_ins.flash_attn import attend, each_text
from tests.stand_ins.signatures import bind

PACKAGE = "transformer_engine"


class DotProductAttention(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.options = bind(PACKAGE, "DotProductAttention", args, kwargs)
        for name in ("softcap", "tp_size", "attention_type", "cp_group"):
            assert self.options[name] in (0.0, 1, "self", None), name

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """`[seq, batch, heads * head_dim]` for sbhd, `[tokens, heads * head_dim]` for thd."""
        call = bind(PACKAGE, "DotProductAttention.forward", args, kwargs)
        q, k, v = (call[f"{name}_layer"] for name in ("query", "key", "value"))
        assert q.shape[-2:] == (self.options["num_attention_heads"], self.options["kv_channels"])
        assert k.shape[-2] == v.shape[-2] == self.options["num_gqa_groups"] and call["attention_mask"] is None
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        left = None
        if call["window_size"] is not None:
            left, right = call["window_size"]
            left = None if left < 0 else left
            assert right == 0, "causal"
        scale, p = self.options["softmax_scale"], self.options["attention_dropout"] if self.training else 0.0
        if call["qkv_format"] == "sbhd":
            assert call["attn_mask_type"] == "causal" and call["cu_seqlens_q"] is None
            outs = [attend(q[:, b], k[:, b], v[:, b], scale, left, 0, p) for b in range(q.shape[1])]
            return torch.stack(outs, dim=1).flatten(2).to(q.dtype)
        assert call["qkv_format"] == "thd" and call["attn_mask_type"] == "padding_causal"
        texts = each_text(call["cu_seqlens_q"], call["max_seqlen_q"])
        assert texts == each_text(call["cu_seqlens_kv"], call["max_seqlen_kv"])
        outs = [attend(q[a:b], k[a:b], v[a:b], scale, left, 0, p) for a, b in texts if b > a]
        return torch.cat(outs).flatten(1).to(q.dtype)


class DType(IntEnum):
    """The numbers of transformer_engine/common's DType."""

    kByte, kInt32, kFloat32, kFloat16, kBFloat16, kFloat8E4M3, kFloat8E5M2 = 0, 2, 4, 5, 6, 7, 8


_FORMATS = {DType.kFloat8E4M3: torch.float8_e4m3fn, DType.kFloat8E5M2: torch.float8_e5m2}


class Quantized:
    """A matrix in FP8: `values` times `_scale_inv`. rows, columns: along which it can be multiplied."""

    def __init__(self, values: Tensor, scale_inv: Tensor, rows: bool, columns: bool) -> None:
        self.values, self._scale_inv, self.rows, self.columns = values, scale_inv, rows, columns

    def dequantized(self, along_rows: bool) -> Tensor:
        """fp32 `[rows, columns]`."""
        assert self.rows if along_rows else self.columns, "not made for this product"
        return self.values.float() * self._scale_inv


class Quantizer:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.options = bind(PACKAGE, type(self).__name__, args, kwargs)
        names = ("fp8_dtype", "rowwise", "columnwise")
        self.dtype, self.rowwise_usage, self.columnwise_usage = (self.options[name] for name in names)

    def __call__(self, *args: Any, **kwargs: Any) -> Quantized:
        tensor = bind(PACKAGE, "Quantizer.__call__", args, kwargs)["tensor"]
        assert tensor.dim() == 2 and tensor.shape[0] % 8 == 0 and tensor.shape[1] % 16 == 0 and tensor.is_contiguous()
        assert self.rowwise_usage or self.columnwise_usage
        return self.quantized(tensor.detach().float())

    def quantized(self, x: Tensor) -> Quantized:
        raise NotImplementedError

    def _quantized(self, values: Tensor, scale_inv: Tensor) -> Quantized:
        return Quantized(values, scale_inv, self.rowwise_usage, self.columnwise_usage)


def _cast(x: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    limit = torch.finfo(_FORMATS[dtype]).max
    return (x * scale).clamp(-limit, limit).to(_FORMATS[dtype])


class Float8Quantizer(Quantizer):
    """Delayed scaling: the scale is given, the largest magnitude noted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale, self.amax = self.options["scale"], self.options["amax"]
        assert self.scale.shape == self.amax.shape == (1,) and self.scale.dtype == self.amax.dtype == torch.float32

    def quantized(self, x: Tensor) -> Quantized:
        self.amax.copy_(torch.maximum(self.amax, x.abs().max()))
        return self._quantized(_cast(x, self.scale, self.dtype), 1.0 / self.scale)


class Float8CurrentScalingQuantizer(Quantizer):
    """One scale a matrix, its own."""

    def quantized(self, x: Tensor) -> Quantized:
        assert not self.options["with_amax_reduction"] and not self.options["force_pow_2_scales"]
        scale = torch.finfo(_FORMATS[self.dtype]).max / x.abs().max()
        return self._quantized(_cast(x, scale, self.dtype), 1.0 / scale)


class MXFP8Quantizer(Quantizer):
    """A power of two for every 32 neighbours, of rows and of columns apart."""

    def quantized(self, x: Tensor) -> Quantized:
        assert x.shape[0] % 32 == 0 and x.shape[1] % 32 == 0
        assert self.rowwise_usage != self.columnwise_usage, "both are two casts"
        lines = x if self.rowwise_usage else x.t()
        largest = lines.unflatten(1, (-1, 32)).abs().amax(2, keepdim=True)
        exponents = torch.ceil(torch.log2(largest / torch.finfo(_FORMATS[self.dtype]).max)).clamp(min=-127)
        scale_inv = torch.exp2(exponents).expand(-1, -1, 32).flatten(1)
        scale_inv = scale_inv if self.rowwise_usage else scale_inv.t()
        return self._quantized(_cast(x, 1.0 / scale_inv, self.dtype), scale_inv)


def general_gemm(*args: Any, **kwargs: Any) -> tuple[Tensor, None, None, None]:
    """TN: b a^T, forward; NN: b a and NT: b^T a, gradients."""
    call = bind(PACKAGE, "general_gemm", args, kwargs)
    a, b, layout = call["A"], call["B"], call["layout"]
    assert call["grad"] == call["use_split_accumulator"] == (layout != "TN"), "as BasicLinear calls it"
    for name in ("quantization_params", "out", "bias", "beta", "extra_output", "ub", "gelu_in"):
        assert call[name] is None, name
    left, right = b.dequantized(along_rows=layout[1] == "N"), a.dequantized(along_rows=layout[0] == "T")
    left, right = left if layout[1] == "N" else left.t(), right.t() if layout[0] == "T" else right
    return (left.double() @ right.double()).to(call["out_dtype"]), None, None, None


KERNELS = "transformer_engine_torch"
TE_DType = {torch.float32: DType.kFloat32, torch.float16: DType.kFloat16, torch.bfloat16: DType.kBFloat16}


def layernorm_fwd(*args: Any, **kwargs: Any) -> list[Tensor]:
    call = bind(KERNELS, "layernorm_fwd", args, kwargs)
    x, weight, bias = (None if call[name] is None else call[name].double() for name in ("input", "weight", "bias"))
    _refuse_quantized(call)
    mean, rstd = x.mean(-1), (x.var(-1, correction=0) + call["eps"]).rsqrt()
    out = (x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1) * weight + (0.0 if bias is None else bias)
    return [out.to(call["input"].dtype), mean.float(), rstd.float()]


def layernorm_bwd(*args: Any, **kwargs: Any) -> list[Tensor]:
    call = bind(KERNELS, "layernorm_bwd", args, kwargs)
    grad_out, x, mean, rstd, weight = (call[name].double() for name in ("dz", "x", "mu", "rsigma", "gamma"))
    assert not call["zero_centered_gamma"] and call["sm_margin"] == 0
    normed, g = (x - mean.unsqueeze(-1)) * rstd.unsqueeze(-1), grad_out * weight
    grad_x = (g - g.mean(-1, keepdim=True) - normed * (g * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return [gradient.to(call["x"].dtype) for gradient in (grad_x, (grad_out * normed).sum(0), grad_out.sum(0))]


def rmsnorm_fwd(*args: Any, **kwargs: Any) -> list[Tensor | None]:
    call = bind(KERNELS, "rmsnorm_fwd", args, kwargs)
    x, weight = call["input"].double(), call["weight"].double() + float(call["zero_centered_gamma"])
    _refuse_quantized(call)
    rstd = (x.square().mean(-1) + call["eps"]).rsqrt()
    return [(x * rstd.unsqueeze(-1) * weight).to(call["input"].dtype), None, rstd.float()]


def rmsnorm_bwd(*args: Any, **kwargs: Any) -> list[Tensor]:
    call = bind(KERNELS, "rmsnorm_bwd", args, kwargs)
    grad_out, x, rstd = (call[name].double() for name in ("dz", "x", "rsigma"))
    normed, g = x * rstd.unsqueeze(-1), grad_out * (call["gamma"].double() + float(call["zero_centered_gamma"]))
    grad_x = (g - normed * (g * normed).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return [gradient.to(call["x"].dtype) for gradient in (grad_x, (grad_out * normed).sum(0))]


def _refuse_quantized(call: dict[str, Any]) -> None:
    assert call["ln_out"] is None and call["quantizer"] is None and call["otype"] == TE_DType[call["input"].dtype]
    assert call["input"].dim() == 2 and call["input"].is_contiguous() and call["sm_margin"] == 0


def modules() -> dict[str, dict[str, Any]]:
    """The modules that an installed Transformer-Engine has, as far as we ask for them."""
    classes = (DotProductAttention, DType, Float8Quantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer)
    return {
        "transformer_engine": {},
        "transformer_engine.pytorch": {class_.__name__: class_ for class_ in classes},
        "transformer_engine.pytorch.constants": {"TE_DType": TE_DType},
        "transformer_engine.pytorch.cpp_extensions": {"general_gemm": general_gemm},
        KERNELS: {kernel.__name__: kernel for kernel in (layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd)},
    }
