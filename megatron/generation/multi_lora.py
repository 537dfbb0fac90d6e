"""Adds several LoRA adapters to one model, so that each row of a batch can use another adapter."""

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.checkpointing import CheckpointError
from megatron.checkpointing.adapters import AdapterSource, BaseWeights, check_base, open_adapter, open_base
from megatron.distributed import run_on_each_rank
from megatron.model import Model
from megatron.model.lora import low_rank
from megatron.model.weight_map import named_params
from megatron.mpu import Linear, ParamSpec, shard
from megatron.mpu.lora import AdapterRows, AdapterStack
from megatron.neox_arguments.values.lora_settings import copied_modules

_Parts = list[tuple[Tensor, Tensor, Tensor | None] | None]


def with_adapters(model: Model, adapter_paths: Mapping[str, str], logger: logging.Logger) -> Model:
    """Returns the model with several LoRA adapters. `Request.adapter` chooses one of them for each row of a
    batch.

    All ranks call this function together. Raises CheckpointError for an adapter that was trained on other
    base weights, or that has full trained copies of embedding or head (modules_to_save), which rows of one
    batch cannot have.

    adapter_paths: {name: path} of each adapter, which is a checkpoint of ours or a folder in peft's format.
        The first one is adapter number 1.
    """
    chosen = AdapterRows()

    def open_all() -> tuple[BaseWeights, list[AdapterSource]]:
        return open_base(model.source, model.args), [open_adapter(path, model.args) for path in adapter_paths.values()]

    base, sources = run_on_each_rank(model.groups, open_all)
    base.verify(model.groups)
    for source in sources:
        source.verify(model.groups)

    def attach() -> None:
        for name, source in zip(adapter_paths, sources, strict=True):
            check_base(source, base)
            if copies := copied_modules(source.args):
                raise CheckpointError(
                    f"{source.path}: adapter {name} has full copies of {', '.join(sorted(copies))} (modules_to_save), "
                    "so it cannot be served beside other adapters; serve it alone, without a name: --adapter PATH"
                )
        modules, specs = [source.modules() for source in sources], named_params(model.args)
        for index in (spec.index for spec in model.stage.blocks):
            layer = model.stage.layers[str(index)]
            linears = {name: module for name, module in layer.named_modules() if isinstance(module, Linear)}
            weights, values = base.read(index), [source.read(index) for source in sources]
            for name, linear in linears.items():
                parts: _Parts = []
                for adapter_modules, read in zip(modules, values, strict=True):
                    full_linear = adapter_modules[index].get_submodule(name)
                    assert isinstance(full_linear, Linear)
                    adapter_weights = {key.removeprefix(f"{name}."): value for key, value in read.items()}
                    parts.append(
                        low_rank(full_linear, weights[f"{name}.weight"], adapter_weights)
                        if full_linear.adapters
                        else None
                    )
                if any(part is not None for part in parts):
                    linear.stack = _stack(model, linear, specs[index, f"{name}.weight"], parts, chosen)

    run_on_each_rank(model.groups, attach)
    logger.info(
        f"adapters that clients can name: {', '.join(f'{name} (from {path})' for name, path in adapter_paths.items())}"
    )
    return replace(model, adapter_rows=chosen)


def _stack(model: Model, linear: Linear, spec: ParamSpec, parts: _Parts, chosen: AdapterRows) -> AdapterStack:
    """Returns this rank's shards of all adapters of one linear layer, stacked by adapter number.

    Adapter number 0, for rows without an adapter, is zero and changes nothing.

    parts: (A, B, gain or None) of each adapter; None for an adapter without weights for this layer.
    chosen: holds the adapter number of each row.
    """
    (rows, columns), groups = spec.shape, model.groups
    rank, size = groups.rank("tensor"), groups.size("tensor")
    max_rank = max(len(part[0]) for part in parts if part is not None)

    def sharded(value: Tensor, axis: int, shape: tuple[int, int]) -> Tensor:
        return shard(value, replace(spec, shape=shape), rank, size) if spec.axis == axis else value

    stacked_a, stacked_b, gains = list[Tensor](), list[Tensor](), list[Tensor]()
    for part in (None, *parts):
        a, b, gain = part if part is not None else (torch.zeros(0, columns), torch.zeros(0, rows), None)
        missing = (0, 0, 0, max_rank - len(a))
        stacked_a.append(sharded(F.pad(a, missing), 1, (max_rank, columns)))
        stacked_b.append(sharded(F.pad(b, missing).t(), 0, (rows, max_rank)).t())
        full_gain = torch.ones(rows) if gain is None else gain
        gains.append(sharded(full_gain[:, None], 0, (rows, max_rank))[:, 0])
    with_gains = any(part is not None and part[2] is not None for part in parts)
    a, b, gain = (torch.stack(values).to(groups.device, model.dtype) for values in (stacked_a, stacked_b, gains))
    return AdapterStack(a, b, gain if with_gains else None, chosen)
