"""Quantisation-aware training: rounds the weights of a stage's linears and experts in every forward pass."""

from collections import Counter
from collections.abc import Callable

from megatron.model import Stage
from megatron.model.moe.experts import Experts
from megatron.mpu import Linear
from megatron.mpu.fake_quantized import BLOCKS, FakeQuantizedGroupedProduct, FakeQuantizedProduct
from megatron.neox_arguments import ModelArgs


def use_qat(stage: Stage, args: ModelArgs, log: Callable[[str], None]) -> None:
    """With `qat` set, make all linears and experts of this stage's blocks round their weights; log one line.

    Embedding, head, norms, routers and Mamba's `x_proj` stay as they are. Raises ConfigError if the input
    features of a linear or an expert, on a tensor rank, are not a multiple of the format's block.
    """
    if args.qat is None:
        return
    product, experts_product = FakeQuantizedProduct(args.qat), FakeQuantizedGroupedProduct(args.qat)
    unfit, number = Counter[str](), 0
    for name, module in stage.named_modules():
        if not any(name.startswith(f"layers.{spec.index}.") for spec in stage.blocks) or name.endswith("mixer.x_proj"):
            continue
        if isinstance(module, Linear):
            sizes = [module.weight.shape[1]]
            module.product = product
        elif isinstance(module, Experts):
            sizes = [module.hidden, module.w1.shape[0] // module.number]
            module.product = experts_product
        else:
            continue
        number += 1
        unfit.update(f"{name.split('.', 2)[2]} {size}" for size in sizes if size % BLOCKS[args.qat])
    if unfit:
        shapes = ", ".join(f"{count} x {name}" for name, count in unfit.items())
        raise args.error(
            "qat",
            f"{args.qat} needs input features, on each tensor rank, that are multiples of {BLOCKS[args.qat]}, but: "
            f"{shapes}; lower model_parallel_size or remove qat",
        )
    log(f"qat: {args.qat}: the weights of {number} linears and mixtures of experts are rounded in forward passes")
