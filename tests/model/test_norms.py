"""Norms, of queries and keys too, beside torch's and transformers' own; in every tensor layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo3.modeling_olmo3 import Olmo3RMSNorm

from megatron.model.build_specs import head_norm_spec, norm_spec
from megatron.model.norm_functions import TORCH_NORMS, NormFunctions, apex_norms, transformer_engine_norms
from megatron.model.norms import QKLayerNorm, QKRMSNorm, WideRMSNorm, build_norm
from megatron.mpu import ParallelGroups
from tests.model.runs import assert_steps, sgd_steps
from tests.model.stages import small
from tests.pool import run_ranks
from tests.stand_ins import installed

ONE_PROCESS = ParallelGroups.single()
GENERATOR = torch.Generator().manual_seed(7)
X = torch.randn(3, 2, 32, generator=GENERATOR)
QK = 0.3 + torch.randn(2, 3, 2, 4, 8, generator=GENERATOR)
WEIGHT, BIAS = 1 + torch.rand(32, generator=GENERATOR), torch.rand(32, generator=GENERATOR)
# Stand-ins with their signatures replace NVIDIA's packages.
PACKAGES = {"apex": apex_norms, "transformer_engine": transformer_engine_norms}


def test_scalenorm() -> None:
    norm = build_norm(norm_spec(small(norm="scalenorm", scalenorm_epsilon=0.5)), ONE_PROCESS)
    norm.load_state_dict({"g": torch.tensor([3.0])})
    x = X.clone()
    x[0] *= 1e-3  # shorter than epsilon: divided by that instead
    expected = torch.cat([x[:1] / 0.5, nn.functional.normalize(x[1:], dim=-1)]) * 3
    torch.testing.assert_close(norm(x), expected)


# Our keys, the parameters, and the module of others that is the same.
EQUIVALENTS: list[tuple[dict[str, Any], tuple[str, ...], Callable[..., nn.Module]]] = [
    ({}, ("weight", "bias"), nn.LayerNorm),
    ({"norm": "rmsnorm"}, ("weight",), LlamaRMSNorm),
    ({"norm": "non_parametric_layernorm", "layernorm_epsilon": 1e-5}, (), lambda size, eps: OlmoLayerNorm(size)),
    ({"use_bias_in_norms": False}, ("weight",), partial(nn.LayerNorm, bias=False)),
    ({"use_bias_in_norms": False, "compat_norm_bias": True}, ("weight", "bias"), nn.LayerNorm),
]


@pytest.mark.parametrize("keys, parameters, reference", EQUIVALENTS)
def test_norms_are_those_of_torch_and_transformers(
    keys: dict[str, Any], parameters: tuple[str, ...], reference: Callable[..., nn.Module]
) -> None:
    args = small(**{"layernorm_epsilon": 1e-2, "rms_norm_epsilon": 1e-2, **keys})
    actual, expected = build_norm(norm_spec(args), ONE_PROCESS), reference(32, eps=1e-2)
    state = {name: {"weight": WEIGHT, "bias": BIAS}[name] for name in parameters}
    expected.load_state_dict(state)
    actual.load_state_dict({"scale" if args.norm == "rmsnorm" else name: value for name, value in state.items()})
    torch.testing.assert_close(actual(X), expected(X))


@pytest.mark.parametrize("name, fixed", [("layernorm", 1e-5), ("rmsnorm", 1e-8)])
def test_epsilon_of_transformer_engines_mlp(name: str, fixed: float) -> None:
    keys = {"layernorm_epsilon": 0.5, "rms_norm_epsilon": 0.5}
    for prefix in ("", "te_"):
        args = small(norm=prefix + name, **keys)
        for in_te_mlp, eps in ((False, 0.5), (True, fixed)):
            norm = build_norm(norm_spec(args, in_te_mlp=in_te_mlp), ONE_PROCESS)
            for param in norm.parameters():
                nn.init.ones_(param) if param is not getattr(norm, "bias", None) else nn.init.zeros_(param)
            reference = Gemma2RMSNorm(32, eps=eps) if name == "rmsnorm" else nn.LayerNorm(32, eps=eps)
            torch.testing.assert_close(norm(X), reference(X))


def head_norms(**changes: Any) -> Any:
    args = small(**changes, use_qk_layernorm=True, layernorm_epsilon=1e-2, rms_norm_epsilon=1e-2)
    return head_norm_spec(args, args.head_dim)


def test_one_layernorm_of_queries_and_keys() -> None:
    """GPT-NeoX makes it LayerNorm([heads, head_dim])."""
    norm, torch_norm = QKLayerNorm(head_norms(), 4, ONE_PROCESS), nn.LayerNorm([4, 8], eps=1e-2)
    for module in (norm, torch_norm):
        module.load_state_dict({"weight": WEIGHT.view(4, 8), "bias": BIAS.view(4, 8)})
    torch.testing.assert_close(norm(*QK), tuple(map(torch_norm, QK)))
    centred = QKLayerNorm(head_norms(zero_centered_gamma=True), 4, ONE_PROCESS)
    centred.load_state_dict({"weight": WEIGHT.view(4, 8) - 1.0, "bias": BIAS.view(4, 8)})
    torch.testing.assert_close(centred(*QK), tuple(map(torch_norm, QK)))


def test_one_rmsnorm_of_queries_and_keys() -> None:
    norm = QKRMSNorm(head_norms(norm="rmsnorm"), 4, ONE_PROCESS)
    norm.load_state_dict({"scale": WEIGHT.view(4, 8)})
    heads = [nn.RMSNorm(8, eps=1e-2) for _ in range(4)]
    for head, weight in zip(heads, WEIGHT.view(4, 8), strict=True):
        head.load_state_dict({"weight": weight})
    for actual, x in zip(norm(*QK), QK, strict=True):
        torch.testing.assert_close(actual, torch.stack([heads[i](x[:, :, i]) for i in range(4)], 2))


def test_wide_rmsnorm_equals_olmo3() -> None:
    norm = WideRMSNorm(head_norms(norm="rmsnorm", use_separate_qk_norms=True), 4, ONE_PROCESS)
    reference = Olmo3RMSNorm(32, eps=1e-2)
    norm.load_state_dict({"scale": WEIGHT})
    reference.load_state_dict({"weight": WEIGHT})
    expected: Tensor = reference(QK[0].flatten(2)).view_as(QK[0])
    torch.testing.assert_close(norm(QK[0]), expected)


WIDE: dict[str, Any] = {"norm": "rmsnorm", "use_qk_layernorm": True, "use_separate_qk_norms": True}
MODELS: dict[str, dict[str, Any]] = {
    "scalenorm": {"norm": "scalenorm"},
    "non_parametric": {"norm": "non_parametric_layernorm"},
    "no bias": {"use_bias_in_norms": False},
    "qk layernorm": {"use_qk_layernorm": True},
    "qk rmsnorm": {"use_qk_layernorm": True, "norm": "rmsnorm"},
    "wide qk norms": WIDE,
    "olmo3": {**WIDE, "norm_placement": "olmo3", "num_kv_heads": 2, "activation": "swiglu", "intermediate_size": 48},
    "tied": {"gpt_j_residual": True, "gpt_j_tied": True, "use_bias_in_mlp": False},
    "te": {"te_mha": True, "te_layernorm_mlp": True, "te_backend": "native", "norm": "te_layernorm"},
}
TP2: dict[str, Any] = {"model_parallel_size": 2}
LAYOUTS: list[dict[str, Any]] = [TP2, {**TP2, "sequence_parallel": True}]


def test_two_tensor_ranks_equal_one() -> None:
    """Losses, log-probabilities and gradients: whole weights see all tokens and all heads."""
    references = run_ranks(sgd_steps, 1, list(MODELS.values()))[0]
    cells = list(zip(MODELS.values(), references, strict=True))
    assert_steps([({**model, **layout}, step) for layout in LAYOUTS for model, step in cells], 2)


def results(norms: NormFunctions, dtype: torch.dtype) -> list[Tensor]:
    """Outputs of every kind of norm here, and the gradients of what it is given."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = (1 + torch.randn(8, generator=generator).to(dtype) for _ in range(2))
    x, values = torch.randn(2, 8, 5, generator=generator).to(dtype).transpose(1, 2), list[Tensor]()
    kinds: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
        lambda x, w, b: norms.layer_norm(x, (8,), w, b, 1e-2),
        lambda x, w, b: norms.layer_norm(x, (8,), w, None, 1e-2),
        lambda x, w, b: norms.layer_norm(x, (8,), None, None, 1e-2),
        lambda x, w, b: norms.rms_norm(x, (8,), w, 1e-2, False),
        lambda x, w, b: norms.rms_norm(x, (8,), w, 1e-2, True),
    ]
    for kind in kinds:
        leaves = [leaf.clone().requires_grad_() for leaf in (x, weight, bias)]
        out = kind(*leaves)
        out.float().sin().sum().backward()
        values += [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("package", PACKAGES)
def test_norms_of_packages_equal_torchs(package: str, dtype: torch.dtype) -> None:
    with installed(package):
        actual = results(PACKAGES[package](), dtype)
    bound = 1e-5 if dtype == torch.float32 else 3e-2  # bf16 sums of ten numbers are rounded at other places
    assert {tensor.dtype for tensor in actual} == {dtype}
    torch.testing.assert_close(actual, results(TORCH_NORMS, dtype), rtol=bound, atol=bound)
