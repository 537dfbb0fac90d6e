"""Names the weights that several ranks may hold copies of."""

import math

from torch import Tensor

from megatron.model import Stage
from megatron.model.quantized import quantized_linears
from megatron.model.weight_map import named_params
from megatron.mpu import ParallelGroups, ParamSpec
from megatron.neox_arguments import ModelArgs


def copy_name(layer: int, spec: ParamSpec, groups: ParallelGroups, start: int, size: int) -> str:
    """Returns a name for some elements of a parameter, the same on all ranks that hold them.

    layer: the parameter's layer in the weight map. start, size: the range of the elements in the flattened
        tensor-parallel part.
    """
    part = f", part {groups.rank('tensor')}" if spec.axis is not None and groups.size("tensor") > 1 else ""
    elements = (
        f", elements {start} to {start + size - 1}" if size < math.prod(spec.local_shape(groups.size("tensor"))) else ""
    )
    return f"{2 if spec.shared else layer}.{spec.name}{part}{elements}"  # 2: NeoX's index of the first block


def quantized_copies(stage: Stage, args: ModelArgs, groups: ParallelGroups) -> dict[str, Tensor]:
    """Returns the tensors that hold the stage's 4-bit weights, named as in `Engine.weight_copies`."""
    copies, specs = {}, named_params(args)
    for layer, name, linear, product in quantized_linears(stage):
        spec = specs[layer, name]
        full_name = copy_name(layer, spec, groups, 0, math.prod(spec.local_shape(groups.size("tensor"))))
        for i, tensor in enumerate((linear.weight, *product.scales())):
            copies[f"{full_name}, {f'scales {i}' if i else '4-bit values'}"] = tensor
    return copies
