"""FP8 on tensor cores: casts bit for bit a CPU's, products to bf16, steps beside bf16's, compiled blocks."""

import re
import shutil
from functools import partial
from typing import Any

import pytest
import torch

from megatron.model import build_stage
from megatron.mpu.fp8 import DelayedScaling, Formats, GroupedScaledProduct, MXProduct, RowwiseProduct, TensorwiseProduct
from megatron.mpu.fp8.products import ScaledProduct
from megatron.mpu.groups import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from megatron.training.precision_policy import PrecisionChoice
from megatron.training.precision_trial import gpu_clock, settle_precision
from tests.gpu.runs import run
from tests.training.batches import batches_of
from tests.training.runs import ADAMW, LLAMA, config

pytestmark = pytest.mark.gpu
MIN_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (8, 9), "te": (8, 9), "mxfp8": (10, 0)}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "seq_length": 128, "max_position_embeddings": 128}


def build_product(recipe: str, device: torch.device) -> ScaledProduct:
    if recipe == "te":
        return DelayedScaling(ParallelGroups.single(device), Formats(), True, 1, "max", 0).add("a")
    product_types = {"tensorwise": partial(TensorwiseProduct, Formats()), "rowwise": RowwiseProduct, "mxfp8": MXProduct}
    return product_types[recipe]()


@pytest.fixture(params=list(MIN_CAPABILITY))
def recipe(request: pytest.FixtureRequest, device: torch.device) -> str:
    name = request.param
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY[name]:
        pytest.skip(f"{name} needs compute capability {MIN_CAPABILITY[name]}, this GPU has {capability}")
    return name


def test_casts_and_products_are_the_cpu_s(recipe: str, device: torch.device) -> None:
    make = torch.Generator().manual_seed(2)
    x = (torch.randn(160, 256, generator=make) * torch.logspace(-2, 2, 256)).bfloat16()
    weight = (torch.randn(384, 256, generator=make) * 0.02).bfloat16()
    grad = (torch.randn(160, 384, generator=make) * 1e-6).bfloat16()
    product, cpu_product = build_product(recipe, device), build_product(recipe, torch.device("cpu"))
    for matrix, operand in ((x, "input"), (weight, "weight"), (grad, "gradient")):
        for transposed in (False, True):
            actual = product.cast(matrix.to(device), operand, transposed)  # type: ignore[arg-type]
            expected = cpu_product.cast(matrix, operand, transposed)  # type: ignore[arg-type]
            assert actual.values.cpu().view(torch.uint8).equal(expected.values.view(torch.uint8))
            assert actual.scale.cpu().float().equal(expected.scale.float())
    on_gpu = [tensor.to(device) for tensor in (x, weight, grad)]
    for name, (a, b) in {"output": (0, 1), "input_gradient": (2, 1), "weight_gradient": (2, 0)}.items():
        actual = getattr(product, name)(on_gpu[a], on_gpu[b]).cpu().double()
        expected = getattr(cpu_product, name)((x, weight, grad)[a], (x, weight, grad)[b]).double()
        # Hopper sums an output in 14 bits (fast accumulation), all else is one rounding to bf16.
        bound = 2**-8 if name != "output" else 2**-6
        assert (actual - expected).norm() <= bound * expected.norm(), name


def test_products_of_experts_are_the_cpu_s(recipe: str, device: torch.device) -> None:
    if recipe not in ("rowwise", "mxfp8"):
        pytest.skip(f"{recipe}: experts are in bf16")
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (9, 10):
        pytest.skip("torch multiplies groups in FP8 on Hopper and B200 only")
    make = torch.Generator().manual_seed(2)
    x, grad = (torch.randn(300, n, generator=make).bfloat16() for n in (256, 384))
    weights = (torch.randn(4, 256, 384, generator=make) * 0.02).bfloat16()
    ends = torch.tensor([5, 5, 201, 290], dtype=torch.int32)
    product = GroupedScaledProduct(build_product(recipe, device))  # type: ignore[arg-type]
    for name, operands in {
        "output": (x, weights),
        "input_gradient": (grad, weights),
        "weight_gradient": (x, grad),
    }.items():
        expected = getattr(product, name)(*operands, ends).double()
        actual = getattr(product, name)(*(operand.to(device) for operand in operands), ends.to(device)).cpu().double()
        if name != "weight_gradient":
            expected, actual = expected[:290], actual[:290]
        bound = 2**-8 if name != "output" else 2**-6  # as above
        assert (actual - expected).norm() <= bound * expected.norm(), name


@pytest.mark.only_gpu("a CPU has no clock for it; tests/training/test_precision_trial.py has one that is told")
def test_auto_takes_what_is_faster(device: torch.device) -> None:
    """The choice is that of the times that are said, by the GPU's clock; a run trains by what it took."""
    compiled = "block" if any(map(shutil.which, ("gcc", "clang"))) else False
    wide = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_kv_heads": 16}
    values = config(
        LLAMA, {**SHAPE, "padded_vocab_size": 512}, precision="bfloat16", precision_fp8="auto", compile=compiled
    )
    for shape in ({}, {**wide, "seq_length": 2048, "max_position_embeddings": 2048}):
        args = NeoXArgs.from_dict({**values, **shape, "train_micro_batch_size_per_gpu": 8}).for_world(1)
        groups, lines, slices = ParallelGroups.single(device), list[str](), list[float]()

        def clock(work: Any, budget: float, slices: list[float] = slices) -> float:
            slices.append(budget)
            return gpu_clock(work, budget)

        choice = PrecisionChoice("tensorwise", "precision_fp8: auto chose tensorwise")
        settled = settle_precision(build_stage(args, groups), args, groups, choice, lines.append, clock)
        (line,) = lines
        fp8, bf16 = (float(time) for time in re.findall(r"(\d+\.\d+) ms", line))
        assert 0 < bf16 and 0 < fp8 and sum(slices) == pytest.approx(2.0), line
        if fp8 != bf16:  # as rounded for the line
            assert settled.precision_fp8 == ("tensorwise" if fp8 < bf16 else "off"), line
    with run({**values, **ADAMW, "train_micro_batch_size_per_gpu": 4}) as training:
        assert training.args.precision_fp8 in ("tensorwise", "off") and training.engine.args is training.args
        assert training.engine.train_step(next(batches_of(training)), 1e-3).loss.isfinite()


def losses(steps: int, **overrides: Any) -> list[float]:
    values = config(LLAMA, ADAMW, SHAPE, precision="bfloat16", train_micro_batch_size_per_gpu=4, **overrides)
    with run(values) as training:
        batches = batches_of(training)
        return [float(training.engine.train_step(next(batches), 1e-3).loss) for _ in range(steps)]


def test_losses_with_bf16(recipe: str, device: torch.device) -> None:
    bf16, fp8 = losses(10), losses(10, precision_fp8=recipe)
    assert bf16 != fp8
    assert max(abs(a - b) / b for a, b in zip(fp8, bf16, strict=True)) < 1e-2
    assert bf16[-1] < bf16[0] - 0.2


@pytest.mark.only_gpu("two kinds of blocks take long enough to compile on a CPU")
def test_compiled_blocks_equal_eager_ones(recipe: str, device: torch.device) -> None:
    if not any(map(shutil.which, ("gcc", "clang"))):
        pytest.skip("compiling needs gcc or clang")
    eager, compiled = losses(4, precision_fp8=recipe), losses(4, precision_fp8=recipe, compile="block")
    assert max(abs(a - b) / b for a, b in zip(compiled, eager, strict=True)) < 1e-2
