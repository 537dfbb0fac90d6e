"""Base weights in 4 bits while adapters are trained (`lora.quantization`): the linear layers of a stage's
blocks."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.model.stage import Stage
from megatron.mpu import DTYPES, Linear
from megatron.mpu.quantized import BLOCK, QuantizedProduct
from megatron.neox_arguments import ModelArgs


def quantize_base(stage: Stage, args: ModelArgs, log: Callable[[str], None]) -> None:
    """Makes the linear layers of a stage's blocks hold 4-bit weights, if `lora.quantization` is set, and logs
    a line.

    The stage must still be on the meta device. Afterwards these weights are buffers, not parameters. Raises
    ConfigError if bitsandbytes is missing.
    """
    if args.lora is None or not args.quantized:
        return
    double, dtype, uneven, size = args.lora["double_quant"], DTYPES[args.params_dtype], set[str](), 0
    for spec in stage.blocks:
        for name, linear in stage.layers[str(spec.index)].named_modules():
            if not isinstance(linear, Linear):
                continue
            shape = linear.weight.shape
            try:
                linear.quantize(QuantizedProduct(shape, dtype, double))
            except ImportError as problem:
                text = f"nf4 needs bitsandbytes: pip install 'neox[bnb]' ({problem})"
                raise args.error("lora.quantization", text) from problem
            size += shape.numel()
            if shape[1] % BLOCK:
                uneven.add(f"{name} {list(shape)}")
    line = f"lora.quantization: nf4: {size:,} weights of this stage's blocks take 4 bits each, unpacked to {dtype}"
    if uneven:
        line += (
            f"; blocks of {BLOCK} weights with one scale cross rows, so other parallel layouts round differently, in "
            f"{', '.join(sorted(uneven))}"
        )
    if args.moe_num_experts > 1:
        line += f"; weights of experts are not quantised and stay in {dtype}"
    log(line)


def quantized_linears(stage: Stage) -> list[tuple[int, str, Linear, QuantizedProduct]]:
    """Returns each linear layer with a 4-bit weight: (NeoX layer index, name in the weight map, the layer,
    its product)."""
    return [
        (int(index), f"{name}.weight", module, module.product)
        for index, layer in stage.layers.items()
        for name, module in layer.named_modules()
        if isinstance(module, Linear) and isinstance(module.product, QuantizedProduct)
    ]


@torch.no_grad()
def take_quantized(stage: Stage, weights: Mapping[int, Mapping[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    """Quantises the weights that the stage holds in 4 bits, one at a time; returns all other weights.

    weights: this rank's shards by NeoX layer index and name, on any device.
    """
    unpacked = {layer: dict(values) for layer, values in weights.items()}
    for layer, name, linear, product in quantized_linears(stage):
        value = unpacked.get(layer, {}).pop(name, None)
        if value is not None:
            linear.set_quantized(value.to(stage.device_of_groups, product.dtype))
    return unpacked


def quantized_memory(stage: Stage) -> list[Tensor]:
    """Returns the tensors that hold a stage's 4-bit weights: packed bytes, and the scales of their blocks."""
    linears = quantized_linears(stage)
    return [tensor for _, _, linear, product in linears for tensor in (linear.weight, *product.scales())]
