"""Low-rank adapters of a stage (`lora`): switching off, initial values, and merging into weights."""

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
_MIN_NORM = torch.finfo(torch.float32).tiny ** 0.5  # norm of a row of zeros, as of `row_norms`


@contextmanager
def without_adapters(stage: nn.Module) -> Iterator[None]:
    """Switches off adapters, and the copies trained instead of weights, within the context."""
    on = [module for module in stage.modules() if getattr(module, "adapters_on", False)]
    with attributes_set(on, "adapters_on", False):
        yield


def linears_with_adapters(layer: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The linears of a layer that have adapters, by name."""
    for name, module in layer.named_modules():
        if isinstance(module, Linear) and module.adapters is not None:
            yield name, module


def begun_names(names: Iterable[str]) -> frozenset[str]:
    """Returns the names of parameters that are initialised from weights: DoRA's magnitudes, and copies."""
    return frozenset(name for name in names if name.endswith((_COPY, ".lora_magnitude_vector")))


def begun_values(
    layer: nn.Module | None, weights: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """Returns the initial values of `begun_names`: norms of rows for DoRA's magnitudes, weights for copies.

    layer: the module; None for one without linears.
    weights: this rank's shards, by our names.
    group: the tensor ranks, all of which call it together.
    """
    initial = {name: weights[name.replace(_COPY, _WEIGHT)] for name in weights if name.endswith(_COPY)}
    for name, linear in () if layer is None else linears_with_adapters(layer):
        assert linear.adapters is not None
        if not linear.adapters.lora.dora:
            continue
        row_group = group if linear.parallel == "row" else None
        weight = weights.get(f"{name}.weight")
        if weight is None:  # the layer holds it packed
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
    """Merges adapters into the weights of a layer: W + scale B A, with DoRA each row at its magnitude.

    Trained copies, and a reward model's score head, replace their weights. Changes of several adapters are
    summed in fp32; results have the dtypes of the weights.

    weights: full tensors by our names, without adapters.
    adapters: for each set of adapters (module of the layer, full tensors, factor of its change). The module
        is built for one tensor rank, and may be on the meta device.
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
    """Yields (weight's name, the fp32 change to add to it) for each weight that adapters or trained copies
    change."""
    for name, copy in values.items():
        if name.endswith(_COPY):
            place = name.replace(_COPY, _WEIGHT)
            yield place, copy.float() - weights[place].float()
    for name, linear in linears_with_adapters(layer):
        linear_values = {key.removeprefix(f"{name}."): value for key, value in values.items()}
        yield f"{name}.weight", change_of(linear, weights[f"{name}.weight"], linear_values)


def change_of(linear: Linear, weight: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """Returns the change that adapters make to a full weight `[out, in]`, fp32.

    values: the adapters' full parameters, by name within the linear.
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
    """Combines the adapters of a full linear into one: returns (A, B, gains), fp32.

    A is `[R, in]`. B is `[R, out]` and includes the scale. gains `[out]` are DoRA's; None without DoRA.
    weight: `[out, in]`. values: as of `change_of`.
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
