"""Packages that people compile, where installed: attention, FP8 products, norms and Adam beside ours."""

from typing import Any

import pytest
import torch

from megatron.model.attention import AttentionInputs, document_mask, window_mask
from megatron.model.norm_functions import TORCH_NORMS, apex_norms, transformer_engine_norms
from megatron.mpu.fp8 import Formats, TensorwiseProduct
from megatron.mpu.fp8.transformer_engine import EngineProduct, TransformerEngine, engine_problem
from megatron.neox_arguments import ConfigError
from megatron.training.apex import apex_problem
from megatron.training.native.apex_adam import ApexAdam
from tests.gpu.test_attention_gpu import BOUND, assert_near, outcome, qkv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", ["plain", "documents", "windows"])
@pytest.mark.parametrize("package", ["flash_attn", "transformer_engine"])
def test_attention_equals_math(package: str, rows: str, device: torch.device) -> None:
    leaves, seq, run = qkv(device, 4, 2), 128, dict[str, Any](num_kv_heads=2)
    masked, inputs = AttentionInputs(), AttentionInputs()
    if rows != "plain":
        starts = torch.tensor([0, 17, 64, seq, 2 * seq], dtype=torch.int32)
        mask, window = document_mask(starts, 2, seq).to(device), -1
        if rows == "windows":
            run, window = {**run, "sliding_window_width": 20}, 20
            mask = mask & window_mask(seq, window, device)
        masked = AttentionInputs(mask=mask)
        inputs = AttentionInputs(cu_seqlens=starts.to(device), longest=torch.empty(seq, 0), window=window)
    try:
        actual = outcome(package, inputs, leaves, torch.bfloat16, **run)
    except ConfigError as problem:
        pytest.skip(str(problem))
    expected = outcome("math", masked, leaves, torch.float32, **run)
    assert_near(actual, expected)


def test_products_of_transformer_engine_are_ours(device: torch.device) -> None:
    problem = engine_problem(device, "tensorwise")
    if problem is not None:
        pytest.skip(f"it needs {problem}")
    generator = torch.Generator().manual_seed(0)
    shapes = ((120, 256), (128, 256), (120, 128))
    x, weight, grad = (torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes)
    native, engine = TensorwiseProduct(Formats()), EngineProduct(TransformerEngine(), Formats(), True, False)
    for name, operands in (("output", (x, weight)), ("input_gradient", (grad, weight)), ("weight_gradient", (grad, x))):
        expected, actual = getattr(native, name)(*operands).float(), getattr(engine, name)(*operands).float()
        # A scale that is rounded in another way turns some values of 8 bits to their neighbours.
        assert (actual - expected).norm() <= 2e-2 * expected.norm(), name


@pytest.mark.parametrize("package", ["apex", "transformer_engine"])
def test_norms_equal_torchs(package: str, device: torch.device) -> None:
    problem = apex_problem(device) if package == "apex" else engine_problem(device, "tensorwise")
    if problem is not None:
        pytest.skip(f"it needs {problem}")
    norms = apex_norms() if package == "apex" else transformer_engine_norms()
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=generator) for shape in ((7, 3, 256), 256, 256))
    x, weight, bias = (value.bfloat16().to(device).requires_grad_() for value in values)
    for name, options in (
        ("layer_norm", ((256,), weight, bias, 1e-5)), ("layer_norm", ((256,), weight, None, 1e-5)),
        ("rms_norm", ((256,), weight, 1e-6, False)), ("rms_norm", ((256,), weight, 1e-6, True)),
    ):  # fmt: skip
        results = []
        for functions in (norms, TORCH_NORMS):
            out = getattr(functions, name)(x, *options)
            results.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), (x, weight))])
        for actual, expected in zip(*results, strict=True):
            assert (actual.float() - expected.float()).norm() <= BOUND * expected.float().norm(), name


def test_adam_of_apex_equals_torchs(device: torch.device) -> None:
    """The second of five steps is left out, and the first of them is clipped."""
    problem = apex_problem(device)
    if problem is not None:
        pytest.skip(f"it needs {problem}")
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in ((300, 7), (5,))]
    gradients = [[torch.randn(value.shape, generator=generator).to(device) for value in values] for _ in range(5)]
    results = []
    for make, options in ((ApexAdam, {}), (torch.optim.AdamW, {"fused": True})):
        params = [torch.nn.Parameter(value.to(device)) for value in values]
        groups = [{"params": [param], "weight_decay": decay} for param, decay in zip(params, (0.1, 0.0), strict=True)]
        optimizer: Any = make(groups, lr=0.1, betas=(0.9, 0.95), eps=1e-8, **options)
        for i, step in enumerate(gradients):
            for param, gradient in zip(params, step, strict=True):
                param.grad = gradient.clone()
            optimizer.grad_scale = torch.tensor(3.0 if i == 0 else 1.0, device=device)
            optimizer.found_inf = torch.tensor(float(i == 1), device=device)
            optimizer.step()
        states = [optimizer.state[param] for param in params]
        moments = [state[key].float() for state in states for key in ("step", "exp_avg", "exp_avg_sq")]
        results.append([*params, *moments])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
