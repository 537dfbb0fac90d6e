"""LayerNorm and RMSNorm of NVIDIA's apex and of Transformer-Engine, which stand-ins with their signatures
replace, beside torch's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.model.norm_functions import TORCH_NORMS, NormFunctions, apex_norms, transformer_engine_norms
from tests.stand_ins import installed

PACKAGES = {"apex": apex_norms, "transformer_engine": transformer_engine_norms}


def results(norms: NormFunctions, dtype: torch.dtype) -> list[Tensor]:
    """Outputs of every kind of norm here, and the gradients of what it is given."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = (1 + torch.randn(8, generator=generator).to(dtype) for _ in range(2))
    x, found = torch.randn(2, 8, 5, generator=generator).to(dtype).transpose(1, 2), list[Tensor]()
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
        found += [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("package", PACKAGES)
def test_norms_of_packages_equal_torchs(package: str, dtype: torch.dtype) -> None:
    with installed(package):
        ours = results(PACKAGES[package](), dtype)
    bound = 1e-5 if dtype == torch.float32 else 3e-2  # bf16 sums of ten numbers are rounded at other places
    for mine, expected in zip(ours, results(TORCH_NORMS, dtype), strict=True):
        assert mine.dtype == expected.dtype == dtype and mine.shape == expected.shape
        torch.testing.assert_close(mine, expected, rtol=bound, atol=bound)
