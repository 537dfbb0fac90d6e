"""Low-rank adapters of a stage (`lora`): switching them off, initial values, and merging them into
weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.inference import attributes_set
from megatron.mpu import Linear
from megatron.mpu.lora import join_rows, row_norms, rows_of

_COPY, _WEIGHT, _SCORE = ".modules_to_save", ".weight", "rm_linear.weight"
_MIN_NORM = torch.finfo(torch.float32).tiny ** 0.5  # used as the norm of a row of zeros, as in `row_norms`


@contextmanager
def without_adapters(stage: nn.Module) -> Iterator[None]:
    """Within the context, the stage runs with its base weights: without adapters, and without trained copies
    of weights."""
    on = [module for module in stage.modules() if getattr(module, "adapters_on", False)]
    with attributes_set(on, "adapters_on", False):
        yield


def linears_with_adapters(layer: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yields (name, linear layer) for each linear layer with adapters in `layer`."""
    for name, module in layer.named_modules():
        if isinstance(module, Linear) and module.adapters is not None:
            yield name, module


def begun_names(names: Iterable[str]) -> frozenset[str]:
    """Returns those names whose parameters start from the base weights: DoRA's magnitudes, and trained copies
    of weights."""
    return frozenset(name for name in names if name.endswith((_COPY, ".lora_magnitude_vector")))


def begun_values(
    layer: nn.Module | None, weights: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Returns the initial values that follow from base weights: row norms for DoRA's magnitudes, weights for
    trained copies.

    layer: the module; None for a layer without linear layers.
    weights: this rank's shards of the layer's parameters, by name; names are those of the weight map.
    group: the tensor ranks, all of which call it together.
    """
    initial = {name: weights[name.replace(_COPY, _WEIGHT)] for name in weights if name.endswith(_COPY)}
    for name, linear in () if layer is None else linears_with_adapters(layer):
        assert linear.adapters is not None
        if not linear.adapters.lora.dora:
            continue
        row_group = group if linear.parallel == "row" else None
        weight = weights.get(f"{name}.weight")
        if weight is None:  # quantised: the layer holds it packed
            weight = linear.dense_weight()
        for adapter in linear.adapters.specs:
            prefix = f"{name}.lora.{adapter.name}"
            a, b = (weights[f"{prefix}.{part}"] for part in ("lora_A", "lora_B"))
            rows = rows_of(weight, adapter.part, linear.pattern)
            initial[f"{prefix}.lora_magnitude_vector"] = row_norms(rows, a, b, adapter.size.scale, row_group)
    return initial


def merged_layer(
    weights: Mapping[str, Tensor], adapters: Sequence[tuple[nn.Module, Mapping[str, Tensor], float]]
) -> dict[str, Tensor]:
    """Returns the weights of a layer with adapters merged in: W + scale B A; with DoRA, each row has its
    magnitude as norm.

    Trained copies, and a reward model's score head, replace their weights. Changes of several adapters are
    summed in fp32; results have the dtypes of the weights.

    weights: full tensors by name in the weight map, without adapters.
    adapters: for each set of adapters (module of the layer, full tensors by name, factor of its change). The
        module is built for one tensor rank, and may be on the meta device.
    """
    sums: dict[str, Tensor] = {}
    merged = dict(weights)
    for layer, values, factor in adapters:
        for name, change in _changes(layer, weights, values):
            sums[name] = factor * change if name not in sums else sums[name] + factor * change
        merged |= {name: value for name, value in values.items() if name == _SCORE}
    return {
        **merged,
        **{name: (weights[name].float() + change).to(weights[name].dtype) for name, change in sums.items()},
    }


def _changes(
    layer: nn.Module, weights: Mapping[str, Tensor], values: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name of a weight, fp32 change to add to it) for each weight that adapters or a trained copy
    change.

    weights: the layer's base weights. values: the adapters' parameters and trained copies. All are full
        tensors by name.
    """
    for name, copy in values.items():
        if name.endswith(_COPY):
            place = name.replace(_COPY, _WEIGHT)
            yield place, copy.float() - weights[place].float()
    for name, linear in linears_with_adapters(layer):
        linear_values = {key.removeprefix(f"{name}."): value for key, value in values.items()}
        yield f"{name}.weight", change_of(linear, weights[f"{name}.weight"], linear_values)


def change_of(linear: Linear, weight: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Returns the fp32 change that a linear layer's adapters make to its full weight `[out, in]`.

    values: the adapters' full parameters, by name within the linear layer, such as `lora.q_proj.lora_A`.
    """
    assert linear.adapters is not None
    changes: dict[int, Tensor] = {}
    for adapter in linear.adapters.specs:
        lora, prefix = linear.adapters.lora, f"lora.{adapter.name}"
        a, b = (values[f"{prefix}.{part}"].float() for part in ("lora_A", "lora_B"))
        change = adapter.size.scale * (b @ a)
        if lora.dora:
            rows = rows_of(weight, adapter.part, linear.adapters.pattern).float()
            magnitude = values[f"{prefix}.lora_magnitude_vector"].float()
            full = rows + change
            change = full * (magnitude / full.norm(dim=1).clamp(min=_MIN_NORM))[:, None] - rows
        changes[adapter.part] = change.t()
    return join_rows(changes, linear.adapters.pattern, missing=0.0).t()


def low_rank(linear: Linear, weight: Tensor, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Joins the adapters of a full linear layer into a single one: returns (A, B, gains), fp32.

    A is `[R, in]`, with R the sum of the adapters' ranks. B is `[R, out]` and includes the scale. gains
    `[out]` are DoRA's factors of the output; None without DoRA.

    weight: `[out, in]`. values: the adapters' full parameters, by name within the linear layer, such as
        `lora.q_proj.lora_A`.
    """
    assert linear.adapters is not None
    lora, linear_adapters, pattern = linear.adapters.lora, linear.adapters.specs, linear.adapters.pattern
    columns, gains = dict[int, Tensor](), dict[int, Tensor]()
    a = torch.cat([values[f"lora.{adapter.name}.lora_A"].float() for adapter in linear_adapters])
    for adapter, (pad_before, pad_after) in zip(linear_adapters, linear.adapters.offsets(), strict=True):
        prefix, scale = f"lora.{adapter.name}", adapter.size.scale
        b = values[f"{prefix}.lora_B"].float()
        columns[adapter.part] = F.pad(scale * b.t(), (0, 0, pad_before, pad_after))
        if lora.dora:
            full = rows_of(weight, adapter.part, pattern).float() + scale * (b @ values[f"{prefix}.lora_A"].float())
            magnitude = values[f"{prefix}.lora_magnitude_vector"].float()
            gains[adapter.part] = magnitude / full.norm(dim=1).clamp(min=_MIN_NORM)
    return a, join_rows(columns, pattern, 0.0), join_rows(gains, pattern, 1.0) if gains else None
