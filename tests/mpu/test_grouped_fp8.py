"""FP8 products of experts: each group by the definition of its casts, in fp64; operands of GPU kernels."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.mpu.fp8 import GroupedScaledProduct, MXProduct, RowwiseProduct
from megatron.mpu.fp8.casting import E4M3, swizzled
from megatron.mpu.fp8.grouped import grouped_tiles, pad_groups
from tests.mpu.test_fp8 import block_scales, in_fp8, row_scales

SIZES, LEFT_OVER, IN_DIM, OUT_DIM = [3, 0, 40, 17], 4, 64, 32
RECIPES: dict[str, tuple[type[RowwiseProduct | MXProduct], Callable[..., Tensor]]] = {
    "rowwise": (RowwiseProduct, row_scales),
    "mxfp8": (MXProduct, block_scales),
}


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, matrices and gradients in bf16 of very different sizes, and the ends of groups."""
    make, rows = torch.Generator().manual_seed(1), sum(SIZES) + LEFT_OVER
    x = torch.randn(rows, IN_DIM, generator=make) * torch.logspace(-3, 2, rows).unsqueeze(1)
    weights = torch.randn(4, IN_DIM, OUT_DIM, generator=make) * torch.logspace(-3, 0, 4).view(4, 1, 1)
    grad = torch.randn(rows, OUT_DIM, generator=make) * torch.logspace(-9, -5, rows).unsqueeze(1)
    return x.bfloat16(), weights.bfloat16(), grad.bfloat16(), torch.tensor(SIZES).cumsum(0).int()


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_group_has_the_casts_of_a_linear(recipe: str) -> None:
    product_type, scale_of = RECIPES[recipe]
    product, (x, weights, grad, ends) = GroupedScaledProduct(product_type()), operands()
    out, x_grad = product.output(x, weights, ends), product.input_gradient(grad, weights, ends)
    weight_grad = product.weight_gradient(x, grad, ends)
    assert (out.dtype, x_grad.dtype, weight_grad.dtype) == (torch.bfloat16,) * 3
    assert (out.shape, x_grad.shape, weight_grad.shape) == (grad.shape, x.shape, weights.shape)

    def assert_near(actual: Tensor, expected: Tensor) -> None:
        # Sums in fp32, then one rounding to bf16.
        assert (actual.double() - expected).norm() <= 2**-8 * expected.norm()

    def columns(rows: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % 32))
        return in_fp8(padded, E4M3, scale_of, 0)

    start = 0
    for group, end in enumerate(ends.tolist()):
        if end == start:
            assert not weight_grad[group].any()
            continue
        rows, dy, weight = x[start:end], grad[start:end], weights[group]
        assert_near(out[start:end], in_fp8(rows, E4M3, scale_of, 1) @ in_fp8(weight, E4M3, scale_of, 0))
        assert_near(x_grad[start:end], in_fp8(dy, E4M3, scale_of, 1) @ in_fp8(weight, E4M3, scale_of, 1).t())
        assert_near(weight_grad[group], columns(rows).t() @ columns(dy))
        start = end
    in_bf16 = GroupedScaledProduct(product_type(fp8_weight_gradient=False)).weight_gradient(x, grad, ends)
    torch.testing.assert_close(in_bf16[0], x[:3].t() @ grad[:3])
    assert not in_bf16[0].equal(weight_grad[0])


def test_padded_groups_begin_at_multiples() -> None:
    ends = torch.tensor(SIZES).cumsum(0).int()
    rows = sum(SIZES) + LEFT_OVER
    groups = pad_groups(rows, ends, 16)
    assert groups.ends.tolist() == [16, 16, 64, 96] and groups.ends.dtype == torch.int32 and groups.number % 16 == 0
    assert groups.places.tolist() == [*range(3), *range(16, 56), *range(64, 81), *[groups.number] * LEFT_OVER]
    x = torch.arange(1.0, rows + 1).unsqueeze(1)
    padded = groups.padded(x)
    assert padded.sum() == x[: sum(SIZES)].sum() and groups.unpadded(padded)[: sum(SIZES)].equal(x[: sum(SIZES)])
    full = pad_groups(rows, torch.tensor([1, 2, 3, rows], dtype=torch.int32), 16)
    assert full.ends[-1] <= full.number, "the worst sizes of groups have room"


def test_tiles_of_a_group_follow_each_other() -> None:
    """Each group's scales as if its matrix were alone, one group after another."""
    scale = torch.randint(0, 256, (160, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([128, 128, 512], dtype=torch.int32)
    parts = [swizzled(scale[:, start:end].contiguous()) for start, end in ((0, 4), (4, 16), (16, 20))]
    actual = grouped_tiles(scale, ends)
    assert actual.shape == (256, 20)
    assert actual.view(torch.uint8).flatten().equal(torch.cat([part.view(torch.uint8) for part in parts]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gpu_s_kernel_takes_shapes_strides_and_scales(recipe: str) -> None:
    """torch checks them on meta tensors, as its kernel does."""
    product = GroupedScaledProduct(RECIPES[recipe][0]())
    x = torch.empty(100, IN_DIM, dtype=torch.bfloat16, device="meta")
    stacked = torch.empty(4, OUT_DIM, IN_DIM, dtype=torch.bfloat16, device="meta")
    grad, ends = x.new_empty(100, OUT_DIM), torch.empty(4, dtype=torch.int32, device="meta")
    for weights in (stacked.transpose(1, 2), stacked.new_empty(4, IN_DIM, OUT_DIM)):
        assert product.output(x, weights, ends).shape == (100, OUT_DIM)
        assert product.input_gradient(grad, weights, ends).shape == x.shape
    assert product.weight_gradient(x, grad, ends).shape == (4, IN_DIM, OUT_DIM)
