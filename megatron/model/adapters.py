"""Low-rank adapters of a stage (`lora`): with and without them, their first values, and weights that have
taken them in."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu import Linear
from megatron.mpu.lora import join_rows, row_norms, rows_of

_COPY, _WEIGHT, _SCORE = ".modules_to_save", ".weight", "rm_linear.weight"
_LEAST = torch.finfo(torch.float32).tiny ** 0.5  # norm of a row of zeros, as of `row_norms`


@contextmanager
def without_adapters(stage: nn.Module) -> Iterator[None]:
    """Within the context a stage computes what its weights alone do: adapters take no part, nor do copies
    that are trained in the place of weights."""
    on = [module for module in stage.modules() if getattr(module, "adapters_on", False)]
    _set(on, False)
    try:
        yield
    finally:
        _set(on, True)


def _set(modules: list[nn.Module], on: bool) -> None:
    for module in modules:
        module.adapters_on = on  # type: ignore[assignment]


def linears_with_adapters(layer: nn.Module) -> Iterator[tuple[str, Linear]]:
    """The linears of a layer that have adapters, by name."""
    for name, module in layer.named_modules():
        if isinstance(module, Linear) and module.adapters is not None:
            yield name, module


def begun_names(names: Iterable[str]) -> frozenset[str]:
    """Those of parameters that begin as the weights of their layer say: magnitudes and copies."""
    return frozenset(name for name in names if name.endswith((_COPY, ".lora_magnitude_vector")))


def begun_values(
    layer: nn.Module | None, weights: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> dict[str, Tensor]:
    """The first values of `begun_names`: magnitudes are the norms of rows.

    layer: the module, None for one without linears. weights: this rank's parts, by our names. group: of the
    tensor ranks, all of which call it together.
    """
    begun = {name: weights[name.replace(_COPY, _WEIGHT)] for name in weights if name.endswith(_COPY)}
    for name, linear in () if layer is None else linears_with_adapters(layer):
        assert linear.adapters is not None
        if not linear.adapters.lora.dora:
            continue
        across = group if linear.parallel == "row" else None
        weight = weights.get(f"{name}.weight")
        if weight is None:  # the layer holds it packed
            weight = linear.dense_weight()
        for of in linear.adapters.each:
            prefix = f"{name}.lora.{of.name}"
            a, b = (weights[f"{prefix}.{part}"] for part in ("lora_A", "lora_B"))
            rows = rows_of(weight, of.part, linear.pattern)
            begun[f"{prefix}.lora_magnitude_vector"] = row_norms(rows, a, b, linear.adapters.lora.scale, across)
    return begun


def merged_layer(
    weights: Mapping[str, Tensor], adapters: Sequence[tuple[nn.Module, Mapping[str, Tensor], float]]
) -> dict[str, Tensor]:
    """The weights of a layer that compute without adapters what they do with them: W + scale B A, with DoRA
    each row at its magnitude, and copies in their places; of several adapters the sum of what each changes.

    weights: whole tensors by our names, without adapters. adapters: of each the module of the layer, which
    may be on the meta device, of one tensor rank; its whole tensors; and the factor of what it changes. Sums
    are in fp32, results in the dtypes of the weights. The score head of a reward model takes its place whole.
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
    """What adapters and copies add to each weight of a layer, fp32."""
    for name, copy in values.items():
        if name.endswith(_COPY):
            place = name.replace(_COPY, _WEIGHT)
            yield place, copy.float() - weights[place].float()
    for name, linear in linears_with_adapters(layer):
        own = {key.removeprefix(f"{name}."): value for key, value in values.items()}
        yield f"{name}.weight", change_of(linear, weights[f"{name}.weight"], own)


def change_of(linear: Linear, weight: Tensor, values: Mapping[str, Tensor]) -> Tensor:
    """What adapters add to a whole weight `[out, in]`, fp32. values: of their parameters by name within the
    linear."""
    assert linear.adapters is not None
    changes: dict[int, Tensor] = {}
    for of in linear.adapters.each:
        lora, prefix = linear.adapters.lora, f"lora.{of.name}"
        a, b = (values[f"{prefix}.{part}"].float() for part in ("lora_A", "lora_B"))
        change = lora.scale * (b @ a)
        if lora.dora:
            rows = rows_of(weight, of.part, linear.adapters.pattern).float()
            magnitude = values[f"{prefix}.lora_magnitude_vector"].float()
            whole = rows + change
            change = whole * (magnitude / whole.norm(dim=1).clamp(min=_LEAST))[:, None] - rows
        changes[of.part] = change.t()
    return join_rows(changes, linear.adapters.pattern, missing=0.0).t()


def low_rank(linear: Linear, weight: Tensor, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """The adapters of a whole linear as one: A `[R, in]`, B `[R, out]` with their scale, DoRA's gains
    `[out]`, fp32. weight: `[out, in]`; values: as of `change_of`."""
    assert linear.adapters is not None
    lora, each, pattern = linear.adapters.lora, linear.adapters.each, linear.adapters.pattern
    columns, gains = dict[int, Tensor](), dict[int, Tensor]()
    a = torch.cat([values[f"lora.{of.name}.lora_A"].float() for of in each])
    for i, of in enumerate(each):
        b = values[f"lora.{of.name}.lora_B"].float()
        columns[of.part] = F.pad(lora.scale * b.t(), (0, 0, i * lora.r, (len(each) - 1 - i) * lora.r))
        if lora.dora:
            whole = rows_of(weight, of.part, pattern).float() + lora.scale * (
                b @ values[f"lora.{of.name}.lora_A"].float()
            )
            gains[of.part] = values[f"lora.{of.name}.lora_magnitude_vector"].float() / whole.norm(dim=1).clamp(
                min=_LEAST
            )
    return a, join_rows(columns, pattern, 0.0), join_rows(gains, pattern, 1.0) if gains else None
