"""A stage for inference alone, with weights that a function reads layer by layer."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.distributed import run_on_each_rank
from megatron.model.init import materialize, stage_parameters
from megatron.model.stage import Stage, build_stage
from megatron.mpu import DTYPES, ParallelGroups
from megatron.neox_arguments import NeoXArgs

LoadLayers = Callable[..., Mapping[int, Mapping[str, Tensor]]]
"""From `layers`, `tensor_rank` and `tensor_size` to weights by layer and name, as `load_weights`."""


def build_filled_stage(
    args: NeoXArgs, groups: ParallelGroups, load: LoadLayers, log: Callable[[str], None], *, at_once: bool
) -> Stage:
    """Returns this rank's stage with the weights that `load` returns for a list of layers.

    at_once: read all layers together, so that an error names the problems of all layers; false: one layer
    after another, which needs less memory.
    """
    stage = build_stage(args, groups, log=log)
    materialize(stage, DTYPES[args.params_dtype]).eval()
    layers = sorted({layer for layer, _, _ in stage_parameters(stage)})

    @torch.no_grad()
    def fill() -> None:
        for part in [layers] if at_once else [[layer] for layer in layers]:
            weights = load(layers=part, tensor_rank=groups.rank("tensor"), tensor_size=groups.size("tensor"))
            for layer, name, param in stage_parameters(stage):
                if layer in weights:
                    param.copy_(weights[layer][name])

    run_on_each_rank(groups, fill)
    return stage
