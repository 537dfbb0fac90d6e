"""Activations, alibi and MLP widths against formulas and transformers' own."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megatron.model.build_specs import activation_name, dense_spec
from megatron.model.mlp import ACTIVATIONS, MLP, clamped_swiglu
from megatron.model.positions import alibi_bias, alibi_slopes
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from tests.model.stages import random_weights, small

X = torch.linspace(-6, 6, 241, dtype=torch.float64)
ONE_PROCESS = ParallelGroups.single()
WRITTEN = {"activation": "swiglu", "mlp_multiple_of": 16}


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu, "relu": lambda x: x.clamp(min=0), "softsign": lambda x: x / (1 + x.abs()), "swish": silu,
    "silu": silu, "mish": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
}  # fmt: skip
GATES: dict[str, Callable[[Tensor], Tensor]] = {"geglu": gelu, "reglu": lambda x: x.clamp(min=0), "swiglu": silu,
                                                "bilinear": lambda x: x,
                                                "glu": lambda x: 1 / (1 + torch.exp(-x))}  # fmt: skip


def test_gelu_of_transformer_engine_and_fused_gelu_are_the_tanh_approximation() -> None:
    te = {"te_layernorm_mlp": True, "te_backend": "native"}
    for keys, expected in (
        ({"activation": "gelu"}, gelu), ({"activation": "geglu"}, gelu), ({"bias_gelu_fusion": True}, gelu_tanh),
        ({"activation": "gelu", **te}, gelu_tanh), ({"activation": "geglu", **te}, gelu_tanh),
    ):  # fmt: skip
        function = ACTIVATIONS[activation_name(small(**keys))]
        torch.testing.assert_close(function(X), expected(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [*REFERENCES, *GATES])
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(name: str, bias: bool) -> None:
    args = small(activation=name, intermediate_size=24, use_bias_in_mlp=bias)
    weights = {k.removeprefix("mlp."): v for k, v in random_weights(args)[2].items() if k.startswith("mlp.")}
    mlp = MLP(dense_spec(args, 0), ONE_PROCESS)
    mlp.load_state_dict(weights)
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(2))
    inner = F.linear(x, weights["linear1.weight"], weights.get("linear1.bias"))
    if name in GATES:
        up, gate = inner[..., :24], inner[..., 24:]
        inner = GATES[name](gate) * up
    else:
        inner = REFERENCES[name](inner)
    expected = F.linear(inner, weights["linear2.weight"], weights.get("linear2.bias"))
    torch.testing.assert_close(mlp.linear2(mlp.core(x)[0]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_alibi_equals_transformers(heads: int) -> None:
    seq = 9
    # BLOOM adds slope * key; softmax does not see the difference, a constant of each query's row.
    reference = build_alibi_tensor(torch.ones(1, seq), heads, torch.float32).view(heads, 1, seq)
    slopes = torch.tensor(alibi_slopes(heads))
    actual = alibi_bias(seq, slopes)[0]
    torch.testing.assert_close(slopes, reference[:, 0, 1])
    causal = torch.ones(seq, seq, dtype=torch.bool).tril()
    assert torch.equal(actual.isneginf(), (~causal).expand(heads, -1, -1))
    shifted = reference - torch.arange(seq).view(1, seq, 1) * reference[:, :, 1:2]
    torch.testing.assert_close(actual[:, causal], shifted[:, causal])


def test_alibi_of_some_heads_is_theirs() -> None:
    slopes = torch.tensor(alibi_slopes(6))
    full = alibi_bias(5, slopes)
    parts = [alibi_bias(5, rank_slopes) for rank_slopes in slopes.chunk(2)]
    assert torch.equal(torch.cat(parts, 1), full)


@pytest.mark.parametrize("changes, width", [
    ({}, 4 * 32),
    ({"expansion_factor": 2.5}, 80),
    ({"mlp_multiple_of": 48}, 144),
    ({"intermediate_size": 40}, 40),
    ({"activation": "swiglu"}, 85),  # int(128 * 2 / 3), as LLaMA
    ({"activation": "swiglu", "mlp_multiple_of": 32}, 96),
    ({"activation": "geglu", "intermediate_size": 40}, 40),
    ({**WRITTEN, "intermediate_size": 240, "compat_ffn_width": "upstream"}, 80),
    ({**WRITTEN, "intermediate_size": 40, "compat_ffn_width": "fork"}, 40),
])  # fmt: skip
def test_ffn_width_of_the_layers(changes: dict[str, object], width: int) -> None:
    args: NeoXArgs = small(**changes)
    mlp = MLP(dense_spec(args, 0), ONE_PROCESS)
    assert tuple(mlp.linear1.weight.shape) == (width * (2 if args.is_gated else 1), 32)
    assert tuple(mlp.linear2.weight.shape) == (32, width)


@pytest.mark.parametrize("limits", [{}, {"alpha": 0.9, "limit": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu_is_that_of_gpt_oss(dtype: torch.dtype, limits: dict[str, float]) -> None:
    """To the last bit, with its gradients, on both sides of both clamps."""
    module = SimpleNamespace(**{"alpha": 1.702, "limit": 7.0, **limits})
    inputs = 6 * torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    gate, up = inputs.to(dtype).requires_grad_()
    out = clamped_swiglu(gate, up, **limits)
    expected = GptOssExperts._apply_gate(module, torch.stack([gate, up], -1).flatten(-2))  # type: ignore[arg-type]
    assert out.dtype == dtype and torch.equal(out, expected)
    grads, expected_grads = (torch.autograd.grad(output.float().sum(), (gate, up)) for output in (out, expected))
    for actual_grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert torch.equal(actual_grad, expected_grad)
    assert all(values.max() > module.limit and values.min() < -module.limit for values in (gate, up))
