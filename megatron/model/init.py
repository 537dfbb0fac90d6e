"""Allocates and initialises the weights of a new stage.

Initial values are a function of (seed, parameter, shape) alone, so every parallel layout starts from the same
model.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.model.quantized import quantized_linears
from megatron.model.stage import Stage
from megatron.model.weight_map import named_params
from megatron.mpu import ParallelGroups, ParamSpec, is_never_trained, is_precise, mark, mix_seed, shard_rows
from megatron.neox_arguments import ModelArgs, NeoXArgs

# Number of elements that are drawn at a time. Another value would give other random numbers on a GPU.
_PIECE = 2**23

Finish = Callable[[int, Sequence[tuple[str, nn.Parameter]]], None]
"""A function called with a layer's NeoX index, and the (name, parameter) pairs that were just allocated in
it."""


@torch.no_grad()
def materialize(
    stage: Stage,
    dtype: torch.dtype = torch.float32,
    finish: Finish | None = None,
    frozen_dtype: torch.dtype | None = None,
    precise: bool = True,
) -> Stage:
    """Allocates the parameters that `build_stage` left on the meta device; returns the same stage.

    Values are undefined until `finish` sets them. Shared parameters stay shared, and frozen ones frozen.
    Parameters that are not on the meta device keep their memory and values.

    dtype: of the parameters.
    finish: fills, or shards, the parameters of each layer before the next layer is allocated.
    frozen_dtype: of parameters that are not trained; None: `dtype`.
    precise: allocate parameters marked as precise in fp32, whatever `dtype` is.
    """
    allocated: dict[nn.Parameter, nn.Parameter] = {}
    stage.dtype = dtype
    for index, layer in stage.layers.items():
        first_seen: list[tuple[str, nn.Parameter]] = []
        for path, module in layer.named_modules():
            for name, param in module._parameters.items():
                if param is None or param.device.type != "meta":
                    continue  # already allocated: blocks may share a module
                if param not in allocated:
                    its_dtype = dtype if param.requires_grad else frozen_dtype or dtype
                    if is_never_trained(param) or (precise and is_precise(param)):
                        its_dtype = torch.float32
                    local = torch.empty_like(param, dtype=its_dtype, device=stage.device_of_groups)
                    allocated[param] = nn.Parameter(local, param.requires_grad)
                    mark(allocated[param], is_never_trained(param), is_precise(param))
                    first_seen.append((f"{path}.{name}" if path else name, allocated[param]))
                module._parameters[name] = allocated[param]
        if finish is not None:
            finish(int(index), first_seen)
    return stage


def _deviations(args: ModelArgs) -> dict[str, float]:
    # The standard deviations of NeoX's normal distributions. small_init and wang_init use hidden_size as the
    # fan-in of every layer.
    depth, hidden, std = args.num_layers, args.hidden_size, args.init_method_std
    return {
        "normal": std,
        "scaled_normal": std / math.sqrt(2.0 * depth),
        "single_residual_scaled_normal": std / math.sqrt(depth),
        "small_init": math.sqrt(2.0 / (5.0 * hidden)),
        "wang_init": 2.0 / depth / math.sqrt(hidden),
    }


def _draw(rows: Tensor, method: str | float, spec: ParamSpec, args: ModelArgs, generator: torch.Generator) -> None:
    """Fills `rows`, the next rows of a parameter, with initial values.

    generator: has drawn the rows before these. method: a name of an initialisation, or a constant.
    """
    if isinstance(method, float):
        rows.fill_(method)
    elif method == "ones":
        rows.fill_(1.0)
    elif method == "zeros":
        rows.zero_()
    elif method == "kaiming_uniform":  # as in torch's and peft's linear layers: a = sqrt(5)
        bound = 1.0 / math.sqrt(math.prod(spec.shape[1:]))
        rows.uniform_(-bound, bound, generator=generator)
    elif method == "gaussian_over_rank":
        rows.normal_(0.0, 1.0 / spec.shape[0], generator=generator)
    elif method == "log_of_column":
        rows.copy_(torch.arange(1, rows.shape[1] + 1, device=rows.device).log().expand_as(rows))
    elif method == "log_of_uniform":
        rows.uniform_(1.0, 16.0, generator=generator).log_()
    elif method == "time_step":
        steps = rows.uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
        rows.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus
    elif method.endswith("orthogonal"):
        gain = math.sqrt(2.0 / args.num_layers) if method == "scaled_orthogonal" else math.sqrt(2.0)
        nn.init.orthogonal_(rows, gain, generator=generator)
    elif method.startswith("xavier"):
        std = math.sqrt(2.0 / sum(spec.matrix_shape))
        if method == "xavier_uniform":
            rows.uniform_(-math.sqrt(3.0) * std, math.sqrt(3.0) * std, generator=generator)
        else:
            rows.normal_(0.0, std, generator=generator)
    else:
        rows.normal_(0.0, _deviations(args)[method], generator=generator)


def initial_rows(spec: ParamSpec, layer: int, args: NeoXArgs, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Yields the fp32 initial value of a full parameter (over all tensor ranks) in pieces: (first row, rows).

    The size of a piece is bounded, and depends only on the parameter's shape. An orthogonal weight has one
    piece per matrix, because its QR decomposition needs all rows.

    layer: NeoX's layer index.
    """
    configured = {"output": args.output_layer_init_method, "input": args.init_method, "embedding": args.init_method}
    method = spec.init if isinstance(spec.init, float) else configured.get(spec.init, spec.init)
    generator = torch.Generator(device).manual_seed(mix_seed(args.seed, 2 if spec.shared else layer, spec.name))
    rows, width = spec.shape[0], math.prod(spec.shape[1:])
    # Pieces have a multiple of 16 elements. torch's CPU generator draws normal numbers 16 at a time, so the
    # pieces get the same numbers as one call for all rows. The last piece also takes the remaining rows.
    if str(method).endswith("orthogonal"):
        step = spec.matrix_shape[0]
    else:
        step = max(16, _PIECE // width // 16 * 16)
    starts = list(range(0, max(1, rows - step + 1), step))
    for start, end in zip(starts, [*starts[1:], rows], strict=True):
        piece = torch.empty((end - start, *spec.shape[1:]), dtype=torch.float32, device=device)
        _draw(piece, method, spec, args, generator)
        yield start, piece


def initial_weight(spec: ParamSpec, layer: int, args: NeoXArgs) -> Tensor:
    """Returns the fp32 initial value of a full parameter as one tensor, drawn by the CPU's generator."""
    return torch.cat([rows for _, rows in initial_rows(spec, layer, args, torch.device("cpu"))]).reshape(spec.shape)


def initial_part(spec: ParamSpec, layer: int, args: NeoXArgs, groups: ParallelGroups) -> Iterator[tuple[int, Tensor]]:
    """Yields this rank's part (tensor shard, own experts) of a parameter's initial value, as (first row in
    the part, rows)."""
    start, count = spec.expert_rows(groups)
    for full_start, full_rows in initial_rows(spec, layer, args, groups.device):
        for row, rows in shard_rows(full_rows, full_start, spec, groups.rank("tensor"), groups.size("tensor")):
            low, high = max(row, start), min(row + len(rows), start + count)
            if low < high:
                yield low - start, rows[low - row : high - row]


def init_stage(
    stage: Stage,
    args: NeoXArgs,
    groups: ParallelGroups,
    dtype: torch.dtype = torch.float32,
    take_over: Callable[[int, list[nn.Parameter]], None] | None = None,
    frozen_dtype: torch.dtype | None = None,
    precise: bool = True,
) -> None:
    """Allocates a stage's parameters, and sets this rank's initial values, rounded from fp32.

    Weights that the stage holds quantised are quantised one at a time.

    take_over: called with each layer's index and parameters, before the next layer is allocated.
    frozen_dtype: of parameters that are not trained; None: `dtype`.
    precise: allocate parameters marked as precise in fp32, whatever `dtype` is.
    """
    specs, packed = named_params(args), quantized_linears(stage)

    def fill_one(value: Tensor, layer: int, name: str) -> None:
        for row, rows in initial_part(specs[layer, name], layer, args, groups):
            value[row : row + len(rows)].copy_(rows)

    def fill(layer: int, params: Sequence[tuple[str, nn.Parameter]]) -> None:
        for name, param in params:
            fill_one(param, *_key(layer, name))
        for _, name, linear, product in (item for item in packed if item[0] == layer):
            value = torch.empty(product.shape, dtype=product.dtype, device=groups.device)
            fill_one(value, layer, name)
            linear.set_quantized(value)
        if take_over is not None:
            take_over(layer, [param for _, param in params])

    materialize(stage, dtype, fill, frozen_dtype, precise)


def _key(layer: int, name: str) -> tuple[int, str]:
    """Returns the (layer, name) of a parameter in the weight map.

    The last stage's copy of a tied embedding belongs to layer 0.
    """
    return (0 if name.startswith("word_embeddings.") else layer, name)


def stage_parameters(stage: Stage, copies: bool = False) -> list[tuple[int, str, nn.Parameter]]:
    """Returns the parameters of a stage as (NeoX layer index, name in the weight map, parameter).

    The last stage's copy of a tied embedding counts as layer 0's.

    copies: True: a parameter that blocks share is listed once for each block; False: for the first block
        only.
    """
    params: dict[tuple[int, str], nn.Parameter] = {}
    for full_name, param in stage.named_parameters(remove_duplicate=not copies):
        _, index, name = full_name.split(".", 2)
        params[_key(int(index), name)] = param
    return [(layer, name, param) for (layer, name), param in params.items()]


def parameters_with_specs(stage: Stage, args: ModelArgs) -> list[tuple[int, str, nn.Parameter, ParamSpec]]:
    """Returns the parameters of a stage as (NeoX layer index, name in the weight map, parameter, its
    `ParamSpec`)."""
    specs = named_params(args)
    return [(layer, name, param, specs[layer, name]) for layer, name, param in stage_parameters(stage)]
