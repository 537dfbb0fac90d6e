"""Gated activations equal transformers'."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from megatron.model.gated_activations import clamped_swiglu


@pytest.mark.parametrize("limits", [{}, {"alpha": 0.9, "limit": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clamped_swiglu_is_that_of_gpt_oss(dtype: torch.dtype, limits: dict[str, float]) -> None:
    """To the last bit, with its gradients, on both sides of both clamps."""
    theirs = SimpleNamespace(**{"alpha": 1.702, "limit": 7.0, **limits})
    drawn = 6 * torch.randn(2, 500, generator=torch.Generator().manual_seed(0))
    gate, up = drawn.to(dtype).requires_grad_()
    out = clamped_swiglu(gate, up, **limits)
    expected = GptOssExperts._apply_gate(theirs, torch.stack([gate, up], -1).flatten(-2))  # type: ignore[arg-type]
    assert out.dtype == dtype and torch.equal(out, expected)
    ours, wanted = (torch.autograd.grad(one.float().sum(), (gate, up)) for one in (out, expected))
    for mine, other in zip(ours, wanted, strict=True):
        assert torch.equal(mine, other)
    assert all(values.max() > theirs.limit and values.min() < -theirs.limit for values in (gate, up))
