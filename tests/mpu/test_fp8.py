"""FP8 products beside their definition: every value enumerated, scales and products in fp64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.mpu import Linear, LinearSpec, ParallelGroups, Product, build_groups, linear
from megatron.mpu.fp8 import DelayedProduct, DelayedScaling, Formats, MXProduct, RowwiseProduct, TensorwiseProduct
from megatron.mpu.fp8.casting import E4M3, E5M2, OPERANDS, rounded, swizzled
from tests.pool import run_ranks

# (mantissa bits, exponent bias, largest finite) of arXiv 2209.05433, table 1.
DEFINED = {E4M3: (3, 7, 448.0), E5M2: (2, 15, 57344.0)}
SEQ, BATCH, IN_DIM, OUT_DIM = 6, 4, 64, 32


def magnitudes(dtype: torch.dtype) -> Tensor:
    """All finite numbers of the format that are not negative, in order of their codes, fp64."""
    bits, bias, largest = DEFINED[dtype]
    values = []
    for exponent, mantissa in (divmod(code, 1 << bits) for code in range(128)):
        normal = 2.0 ** (exponent - bias) * (1 + mantissa / 2**bits)
        values.append(normal if exponent else 2.0 ** (1 - bias) * mantissa / 2**bits)
    return torch.tensor([value for value in values if value <= largest], dtype=torch.float64)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` fp64 as its nearest number of the format, of two as near the one with the even code; saturated."""
    table, size = magnitudes(dtype), x.abs()
    high = torch.searchsorted(table, size).clamp(max=len(table) - 1)
    low = (high - 1).clamp(min=0)
    to_low, to_high = size - table[low], table[high] - size
    code = torch.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)
    return table[code] * x.sign()


def tensor_scale(x: Tensor, largest: float, dim: int) -> Tensor:
    """The scale of a whole matrix, as fp32 has it."""
    return (largest / x.abs().max()).float().double()


def row_scales(x: Tensor, largest: float, dim: int) -> Tensor:
    """Powers of two, one for each line along `dim`."""
    lines = x.abs().amax(dim, keepdim=True)
    return lines.apply_(lambda amax: 2.0 ** math.floor(math.log2(largest / amax)))


def block_scales(x: Tensor, largest: float, dim: int) -> Tensor:
    """Powers of two, one for 32 neighbours along `dim`."""
    blocks = x.abs().movedim(dim, -1).unflatten(-1, (-1, 32)).amax(-1)
    scales = blocks.apply_(lambda amax: 2.0 ** -math.ceil(math.log2(amax / largest)))
    return scales.repeat_interleave(32, dim=-1).movedim(-1, dim)


def in_fp8(x: Tensor, dtype: torch.dtype, scale_of: Callable[..., Tensor], dim: int) -> Tensor:
    """`x` `[rows, columns]` as FP8 has it, fp64; dim: along which it is summed."""
    scale = scale_of(x.double(), DEFINED[dtype][2], dim)
    return nearest((x.float() * scale.float()).double(), dtype) / scale


def delayed(**overrides: Any) -> DelayedScaling:
    options: dict[str, Any] = {"length": 1, "algorithm": "most_recent", "margin": 0} | overrides
    return DelayedScaling(ParallelGroups.single(), Formats(), True, **options)


HYBRID, E4M3_ONLY = Formats(), Formats(gradient=E4M3)
PRODUCTS: dict[str, tuple[Callable[[], Product], Callable[..., Tensor], torch.dtype]] = {
    "tensorwise": (lambda: TensorwiseProduct(HYBRID), tensor_scale, E5M2),
    "tensorwise, e4m3": (lambda: TensorwiseProduct(E4M3_ONLY), tensor_scale, E4M3),
    "rowwise": (RowwiseProduct, row_scales, E4M3),
    "mxfp8": (MXProduct, block_scales, E4M3),
    "te, first step": (lambda: delayed().add("a"), tensor_scale, E5M2),
}


@pytest.fixture
def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient of a linear in bf16, with rows of very different sizes."""
    make = torch.Generator().manual_seed(1)
    x = torch.randn(SEQ, BATCH, IN_DIM, generator=make) * torch.logspace(-3, 2, IN_DIM)
    weight = torch.randn(OUT_DIM, IN_DIM, generator=make) * 0.02 * torch.logspace(-2, 1, OUT_DIM).unsqueeze(1)
    grad = torch.randn(SEQ, BATCH, OUT_DIM, generator=make) * torch.logspace(-9, -5, SEQ).view(SEQ, 1, 1)
    return x.bfloat16(), weight.bfloat16(), grad.bfloat16()


@pytest.mark.parametrize("dtype", DEFINED)
def test_rounding_is_the_definition(dtype: torch.dtype) -> None:
    table = magnitudes(dtype)
    assert len(table) == {E4M3: 127, E5M2: 124}[dtype] and table[-1] == DEFINED[dtype][2]
    ties = (table[1:] + table[:-1]) / 2
    normal = torch.randn(4000, generator=torch.Generator().manual_seed(0)).double()
    spread = (normal * torch.logspace(-12, 8, 4000, dtype=torch.float64)).float().double()
    x = torch.cat([table, ties, spread, torch.tensor([1e9, DEFINED[dtype][2] * 1.03])])
    x = torch.cat([x, -x])
    actual = rounded(x.float().unsqueeze(0), torch.ones(()), dtype)[0]
    assert actual.double().equal(nearest(x, dtype))
    assert rounded(torch.tensor([[math.nan, math.inf]]), torch.tensor(math.nan), dtype).float().isnan().all()


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_are_those_of_what_the_casts_keep(name: str, operands: tuple[Tensor, Tensor, Tensor]) -> None:
    make, scale_of, gradient_dtype = PRODUCTS[name]
    product, (x, weight, grad) = make(), operands
    flat_x, flat_grad = x.flatten(0, 1), grad.flatten(0, 1)
    # 24 tokens are no multiple of 16 or 32: they are summed with zeros beside them.
    pad = torch.nn.functional.pad
    tall_x, tall_grad = pad(flat_x, (0, 0, 0, 8)), pad(flat_grad, (0, 0, 0, 8))

    def cast(tensor: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
        return in_fp8(tensor, dtype, scale_of, dim)

    outputs = (product.output(x, weight), product.input_gradient(grad, weight), product.weight_gradient(grad, x))
    expected = (cast(flat_x, E4M3, 1) @ cast(weight, E4M3, 1).t(),
                cast(flat_grad, gradient_dtype, 1) @ cast(weight, E4M3, 0),
                cast(tall_grad, gradient_dtype, 0).t() @ cast(tall_x, E4M3, 0))  # fmt: skip
    exact = (flat_x.double() @ weight.double().t(), flat_grad.double() @ weight.double(),
             flat_grad.double().t() @ flat_x.double())  # fmt: skip
    for actual, reference, unrounded, shape in zip(
        outputs, expected, exact, (x[..., :OUT_DIM], x, weight), strict=True
    ):
        assert actual.dtype == torch.bfloat16 and actual.shape == shape.shape
        actual = actual.double().view_as(reference)
        # Sums in fp32, then one rounding to bf16: half a unit of 8 bits of mantissa.
        assert (actual - reference).norm() <= 2**-8 * reference.norm()
        assert 0.002 < (reference - unrounded).norm() / unrounded.norm() < 0.09


def scales_of_rows() -> bool:
    """Whether `torch._scaled_mm` takes scales of rows on a CPU, as torch 2.13 does and 2.11 does not."""
    a, b = torch.zeros(16, 16).to(E4M3), torch.zeros(16, 16).to(E4M3)
    try:
        torch._scaled_mm(a, b.t(), torch.ones(16, 1), torch.ones(1, 16), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_torch_s_scaled_product_gets_these_scales(
    name: str, fast: bool, operands: tuple[Tensor, Tensor, Tensor]
) -> None:
    """`torch._scaled_mm` as a GPU has it, which torch 2.13 emulates on CPUs for these scales."""
    product = PRODUCTS[name][0]()
    assert isinstance(product, TensorwiseProduct | RowwiseProduct)
    a, b = product.cast(operands[2].flatten(0, 1), "gradient"), product.cast(operands[1], "weight", transposed=True)
    if fast and name == "rowwise" and not scales_of_rows():
        pytest.skip("left out: torch._scaled_mm of this torch takes one scale a tensor on a CPU")
    actual, expected = product.scaled_mm(a, b, torch.bfloat16, fast), product.multiply(a, b, torch.bfloat16, fast)
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-9)


def test_weight_gradients_may_stay_in_bf16(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, grad = operands
    product = TensorwiseProduct(HYBRID, fp8_weight_gradient=False)
    assert product.weight_gradient(grad, x).equal(grad.flatten(0, 1).t() @ x.flatten(0, 1))
    assert product.input_gradient(grad, weight).equal(TensorwiseProduct(HYBRID).input_gradient(grad, weight))


@pytest.mark.parametrize("name", PRODUCTS)
def test_zeros_stay_zero_and_what_is_not_finite_is_seen(name: str, operands: tuple[Tensor, Tensor, Tensor]) -> None:
    make, (x, weight, grad) = PRODUCTS[name][0], operands

    def products_of(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
        product = make()
        if isinstance(product, DelayedProduct):  # known scales, with which an infinity would saturate
            for operand in OPERANDS:
                product.scale[operand].fill_(1.0)
        return [product.output(x, weight), product.input_gradient(grad, weight), product.weight_gradient(grad, x)]

    assert all(not out.any() for out in products_of(x * 0, weight * 0, grad * 0))
    for spoiled in (0, 1, 2):
        for bad in (math.inf, -math.inf, math.nan):
            inputs = [x.clone(), weight.clone(), grad.clone()]
            inputs[spoiled].view(-1)[7] = bad
            out = products_of(*inputs)
            reads = [i for i, pair in enumerate([(0, 1), (2, 1), (2, 0)]) if spoiled in pair]
            assert all(not out[i].isfinite().all() for i in reads), (spoiled, bad)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length, margin", [(1, 0), (3, 0), (3, 2)])
def test_scales_of_delayed_scaling_are_transformer_engine_s(algorithm: Any, length: int, margin: int) -> None:
    """By its `amax_and_scale_update` (delayed_scaling.cu)."""
    scaling = delayed(length=length, algorithm=algorithm, margin=margin)
    product = scaling.add("a")
    amaxes = [3.0, 0.5, 0.25, 8.0, 0.0, 0.125, 0.0625]
    histories = {operand: [0.0] * length for operand in OPERANDS}
    scales = dict.fromkeys(OPERANDS, 0.0)
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    for step, amax in enumerate(amaxes):
        matrices = {"input": x + amax, "weight": x - amax / 2, "gradient": x + amax / 1024}
        for part in (0.5, 1.0):  # two micro-batches
            product.input_gradient(matrices["gradient"] * part, matrices["weight"])
            product.weight_gradient(matrices["gradient"] * part, matrices["input"] * part)
        scaling.end_step(torch.tensor(False))
        for i, operand in enumerate(OPERANDS):
            histories[operand][0] = float(matrices[operand].abs().max())
            amax = histories[operand][0] if algorithm == "most_recent" else max(histories[operand])
            if amax > 0:
                scales[operand] = (57344.0 if operand == "gradient" else 448.0) * 2.0**-margin / amax
            histories[operand] = [0.0, *histories[operand][:-1]]
            assert float(product.scale[operand]) == pytest.approx(scales[operand], rel=1e-7), (step, operand)
            assert float(scaling.state()["a"]["history"][i, 0]) == float(matrices[operand].abs().max())


def test_scales_are_those_of_earlier_steps(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    """A grown matrix saturates; passes without gradients, and what is not finite, change no scale."""
    x, weight, grad = operands
    scaling = delayed()
    product = scaling.add("a")
    layer = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    linear(layer[0], layer[1], None, product).backward(grad)
    scaling.end_step(torch.tensor(False))
    scales = scaling.state()["a"]["scale"]
    assert scales.tolist() == [
        pytest.approx(largest / float(tensor.abs().max()))
        for largest, tensor in zip((448, 448, 57344), operands, strict=True)
    ]
    grown = in_fp8(x * 4, E4M3, lambda *_: scales[0].double(), 1)
    assert float(grown.abs().max()) == pytest.approx(float(x.abs().max()))
    expected = grown.flatten(0, 1) @ in_fp8(weight, E4M3, tensor_scale, 1).t()
    with torch.no_grad():
        actual = linear(x * 4, weight, None, product).double().flatten(0, 1)
    assert (actual - expected).norm() <= 2**-8 * expected.norm()
    assert not any(product.amax[operand] for operand in OPERANDS)
    product.weight_gradient(grad * math.inf, x)
    scaling.end_step(torch.tensor(False))
    assert scaling.state()["a"]["scale"].equal(scales)
    product.weight_gradient(grad * 100, x * 100)
    scaling.end_step(torch.tensor(True))  # the step was left out
    product.weight_gradient(grad, x)
    scaling.end_step(torch.tensor(False))
    assert scaling.state()["a"]["scale"].equal(scales), "a step that was left out is remembered"


def test_a_state_goes_on_bit_for_bit(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, grad = operands
    uninterrupted, resumed = delayed(length=3), delayed(length=3)
    for scaling in (uninterrupted, resumed):
        scaling.add("a"), scaling.add("b")
    for factor in (1.0, 3.0):
        uninterrupted.products["b"].input_gradient(grad * factor, weight)
        uninterrupted.end_step(torch.tensor(False))
    resumed.load(uninterrupted.state())
    shorter = delayed(length=2)
    shorter.add("b")
    shorter.load(uninterrupted.state())
    for scaling in (uninterrupted, resumed, shorter):
        scaling.products["b"].input_gradient(grad, weight)
        scaling.end_step(torch.tensor(False))
    full_state, resumed_state = uninterrupted.state(), resumed.state()
    assert all(full_state[name][key].equal(resumed_state[name][key]) for name in "ab" for key in ("scale", "history"))
    assert shorter.state()["b"]["history"].equal(full_state["b"]["history"][:, :2])


def test_scales_of_blocks_lie_as_cublas_reads_them() -> None:
    """cuBLAS, "1D block scaling factors layout": tiles of 128 x 4 scales, one after another in a row."""
    rows, blocks = 200, 6
    scale = torch.arange(rows * blocks).remainder(250).to(torch.uint8).view(rows, blocks)
    flat = swizzled(scale).view(torch.uint8)
    assert len(flat) == 256 * 8
    for row in range(0, rows, 7):
        for block in range(blocks):
            tile = (row // 128) * 2 + block // 4
            place = 512 * tile + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
            assert flat[place] == scale[row, block]


def sharded_linears(rank: int, world_size: int, operands: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    """For the pool: output and gradients of a column- and of a row-parallel linear over both ranks."""
    x, weight, grad = operands
    groups = build_groups(pipe=1, data=1, tensor=2, device=torch.device("cpu"))
    results = []
    for parallel, dim in (("column", 0), ("row", 1)):
        layer = Linear(LinearSpec(IN_DIM, OUT_DIM, parallel, bias=False), groups)  # type: ignore[arg-type]
        layer.weight = torch.nn.Parameter(weight.chunk(2, dim)[rank].contiguous())
        layer.product = TensorwiseProduct(HYBRID)
        local_x = (x if dim == 0 else x.chunk(2, 2)[rank]).clone().requires_grad_()
        out = layer(local_x)
        out.backward((grad.chunk(2, 2)[rank] if dim == 0 else grad).contiguous())
        results += [out.detach(), local_x.grad, layer.weight.grad]
    return results


def test_tensor_ranks_scale_their_own_parts(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    """Without communication: what a rank multiplies has its part's scale; sums are of the parts."""
    x, weight, grad = operands
    rank_results = run_ranks(sharded_linears, 2, operands)
    product = TensorwiseProduct(HYBRID)
    for rank in range(2):
        w, g = weight.chunk(2, 0)[rank], grad.chunk(2, 2)[rank]
        input_grads = [product.input_gradient(grad.chunk(2, 2)[i], weight.chunk(2, 0)[i]) for i in range(2)]
        column = (product.output(x, w), input_grads[0] + input_grads[1], product.weight_gradient(g, x))
        parts = [product.output(x.chunk(2, 2)[i], weight.chunk(2, 1)[i]) for i in range(2)]
        w, local_x = weight.chunk(2, 1)[rank], x.chunk(2, 2)[rank]
        row = (parts[0] + parts[1], product.input_gradient(grad, w), product.weight_gradient(grad, local_x))
        for actual, expected in zip(rank_results[rank], (*column, *row), strict=True):
            assert actual.equal(expected)
