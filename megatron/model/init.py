"""Weight initialisation: a function of (seed, parameter, shape) alone, so any layout starts from the same
model."""

import math

import torch
from torch import Tensor, nn

from megatron.model.stage import Stage
from megatron.model.weight_map import named_params
from megatron.mpu import ParallelGroups, ParamSpec, mix_seed, shard
from megatron.neox_arguments import NeoXArgs


def _fill(full: Tensor, method: str, args: NeoXArgs, generator: torch.Generator) -> None:
    # NeoX's methods; hidden_size stands for the fan-in in small_init and wang_init, whatever the layer.
    depth, hidden, std = args.num_layers, args.hidden_size, args.init_method_std
    stds = {
        "normal": std,
        "scaled_normal": std / math.sqrt(2.0 * depth),
        "single_residual_scaled_normal": std / math.sqrt(depth),
        "small_init": math.sqrt(2.0 / (5.0 * hidden)),
        "wang_init": 2.0 / depth / math.sqrt(hidden),
    }
    if method in stds:
        full.normal_(0.0, stds[method], generator=generator)
    elif method == "xavier_uniform":
        nn.init.xavier_uniform_(full, generator=generator)
    elif method == "xavier_normal":
        nn.init.xavier_normal_(full, generator=generator)
    else:
        gain = math.sqrt(2.0 / depth) if method == "scaled_orthogonal" else math.sqrt(2.0)
        nn.init.orthogonal_(full, gain, generator=generator)


def initial_value(spec: ParamSpec, layer: int, args: NeoXArgs, device: torch.device) -> Tensor:
    """The initial value of a whole parameter, fp32, before it is split over tensor-parallel ranks."""
    full = torch.empty(spec.shape, dtype=torch.float32, device=device)
    if spec.init == "ones":
        return full.fill_(1.0)
    if spec.init == "zeros":
        return full.zero_()
    generator = torch.Generator(device).manual_seed(mix_seed(args.seed, 2 if spec.shared else layer, spec.name))
    methods = {"output": args.output_layer_init_method, "xavier_normal": "xavier_normal"}
    _fill(full, methods.get(spec.init, args.init_method), args, generator)
    return full


@torch.no_grad()
def init_stage(stage: Stage, args: NeoXArgs, groups: ParallelGroups) -> None:
    """Fill every parameter of this rank's stage with its part of the initial value."""
    rank, size = groups.rank("tensor"), groups.size("tensor")
    for layer, _, param, spec in parameters_with_specs(stage, args):
        param.copy_(shard(initial_value(spec, layer, args, groups.device), spec, rank, size))


def stage_parameters(stage: Stage, copies: bool = False) -> list[tuple[int, str, nn.Parameter]]:
    """The parameters of a stage as (layer, name in the weight map, parameter).

    The last stage's copy of a tied embedding counts as layer 0's. copies: a parameter that blocks share is
    listed for each of these blocks, not for the first alone.
    """
    params: dict[tuple[int, str], nn.Parameter] = {}
    for full_name, param in stage.named_parameters(remove_duplicate=not copies):
        _, index, name = full_name.split(".", 2)
        tied = name == "word_embeddings.weight" and index != "0"
        params[0 if tied else int(index), name] = param
    return [(layer, name, param) for (layer, name), param in params.items()]


def parameters_with_specs(stage: Stage, args: NeoXArgs) -> list[tuple[int, str, nn.Parameter, ParamSpec]]:
    """`stage_parameters`, each with its `ParamSpec` of the weight map."""
    specs = named_params(args)
    return [(layer, name, param, specs[layer, name]) for layer, name, param in stage_parameters(stage)]
