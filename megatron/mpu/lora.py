"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685; rsLoRA, 2312.03732; DoRA, 2402.09353), as peft
computes them.

An adapter belongs to one projection: a weight may hold several (queries, keys and values; up and gate), each
with an adapter of its own, or one for all of its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.groups import ParallelGroups
from megatron.mpu.mappings import reduce_from_tensor
from megatron.mpu.parameters import ParamSpec, allocate

ALL_ROWS = -1


@dataclass(frozen=True)
class LowRank:
    """The size of an adapter: its rank `r` and the factor `scale` of its output."""

    r: int
    scale: float


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of a block: the dropout of their input, and the projections that have one.

    targets: size of each adapter, by the names of HuggingFace's modules. dora: each has a magnitude for every
    row. init_a, init_b: initial values, of `ParamSpec`.
    """

    dropout: float
    dora: bool
    init_a: Literal["kaiming_uniform", "gaussian_over_rank"]
    init_b: Literal["zeros", "kaiming_uniform"]
    targets: Mapping[str, LowRank] = field(hash=False)


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter of one projection.

    name: of the projection.
    part: index of the projection in the pattern along the weight's rows; `ALL_ROWS`: the adapter covers all
        rows.
    rows: number of its output features.
    """

    name: str
    part: int
    rows: int
    size: LowRank


@dataclass(frozen=True)
class Adapters:
    """The adapters of one linear layer.

    pattern: numbers of rows of the fused projections, over all tensor ranks; the pattern repeats down the
        weight's rows.
    pattern_sharded: in a column-parallel layer, true if each tensor rank has a part of every projection,
        false if it has full repeats of the pattern.
    """

    lora: LoraSpec
    specs: tuple[AdapterSpec, ...]
    pattern: tuple[int, ...]
    pattern_sharded: bool

    def params(self, name: str, weight: ParamSpec) -> tuple[ParamSpec, ...]:
        """The parameters of the adapter `name` of a layer with this weight `[out, in]`."""
        adapter = next(spec for spec in self.specs if spec.name == name)
        (r, rows), inputs, column = (adapter.size.r, adapter.rows), weight.shape[1], weight.axis == 0
        blocks = (weight.blocks if adapter.part == ALL_ROWS else (rows,)) if column else ()
        row_axis = 0 if column else None
        a = ParamSpec("lora_A", (r, inputs), init=self.lora.init_a, weight_decay=True)
        if weight.axis == 1:
            a = replace(a, axis=1, blocks=(inputs,))
        b = ParamSpec("lora_B", (rows, r), row_axis, blocks, self.lora.init_b, weight_decay=True)
        magnitude = ParamSpec("lora_magnitude_vector", (rows,), row_axis, blocks, "ones", weight_decay=True)
        return (a, b, magnitude) if self.lora.dora else (a, b)

    def offsets(self) -> list[tuple[int, int]]:
        """Returns, for each adapter, the total LoRA rank of the adapters before it and after it, for
        concatenating all of them."""
        ranks = [spec.size.r for spec in self.specs]
        return [(sum(ranks[:i]), sum(ranks[i + 1 :])) for i in range(len(ranks))]


def adapters_of(
    lora: LoraSpec | None,
    rows: int,
    layer_name: str | None,
    parts: Sequence[str] = (),
    pattern: Sequence[int] = (),
    pattern_sharded: bool = False,
) -> Adapters | None:
    """Returns the adapters that `lora` requests for a layer of `rows` output features; None if there are
    none.

    layer_name: name of the layer as one projection.
    parts: names of its projections, if it holds several.
    pattern, pattern_sharded: as in `Adapters`.
    """
    if lora is None:
        return None
    if layer_name is not None and layer_name in lora.targets:
        return Adapters(lora, (AdapterSpec(layer_name, ALL_ROWS, rows, lora.targets[layer_name]),), (rows,), True)
    share = rows // sum(pattern) if parts else 0
    specs = [AdapterSpec(n, i, pattern[i] * share, lora.targets[n]) for i, n in enumerate(parts) if n in lora.targets]
    return Adapters(lora, tuple(specs), tuple(pattern), pattern_sharded) if specs else None


class Adapter(nn.Module):
    """The parameters of one adapter: `lora_A` `[r, in]`, `lora_B` `[rows, r]` and DoRA's
    `lora_magnitude_vector` `[rows]`, this tensor rank's parts."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter | None

    def __init__(self, specs: Sequence[ParamSpec], groups: ParallelGroups) -> None:
        super().__init__()
        allocate(self, specs, groups, "lora_magnitude_vector")


def join_rows(parts: Mapping[int, Tensor], pattern: Sequence[int], missing: float) -> Tensor:
    """Joins values of single projections `[..., rows of it]` in the order of the weight's rows `[..., rows]`.

    parts: by index in the pattern. missing: the value for projections that are not in `parts`.
    """
    if ALL_ROWS in parts:
        return parts[ALL_ROWS]
    any_part = next(iter(parts))
    value = parts[any_part]
    repeats = value.shape[-1] // pattern[any_part]
    shape = (*value.shape[:-1], repeats)
    pieces = [
        parts[i].unflatten(-1, (repeats, rows)) if i in parts else value.new_full((*shape, rows), missing)
        for i, rows in enumerate(pattern)
    ]
    return torch.cat(pieces, -1).flatten(-2)


def rows_of(weight: Tensor, part: int, pattern: Sequence[int]) -> Tensor:
    """The rows of one projection of a weight `[rows, ...]`: the inverse of `join_rows`."""
    if part == ALL_ROWS:
        return weight
    return weight.unflatten(0, (-1, sum(pattern))).split(tuple(pattern), 1)[part].flatten(0, 1)


def row_norms(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, group: torch.distributed.ProcessGroup | None
) -> Tensor:
    """Returns ||W + scale B A|| of every row, fp32 `[rows]`, above 0 even for rows of zeros.

    W is `[rows, in]`, A `[r, in]`, B `[rows, r]`. W + scale B A, a matrix as large as W, is never computed.
    group: the ranks over which the inputs are split.
    """
    a32, b32 = a.float(), b.float()
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    squares = squares + 2.0 * scale * (F.linear(weight, a).float() * b32).sum(1)
    squares = squares + scale * scale * ((b32 @ (a32 @ a32.t())) * b32).sum(1)
    return reduce_from_tensor(squares, group).clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()


@dataclass
class AdapterRows:
    """The number of the adapter that each row of the current batch uses. rows: `[batch]` int64; None: no row
    uses one."""

    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AdapterStack:
    """Several trained adapters of one linear layer, without gradients. Each row of a batch uses one; number 0
    means none.

    a: `[number, r, in]`, padded with zeros to the largest rank.
    b: `[number, r, out]`, scaled, padded likewise.
    gains: DoRA's `[number, out]`; None without DoRA.
    """

    a: Tensor
    b: Tensor
    gains: Tensor | None
    chosen: AdapterRows

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds the adapters' output to `out` `[seq, batch, out]`, the product with `x` `[seq, batch, in]`
        without bias. In a row-parallel layer it is this rank's summand."""
        rows = self.chosen.rows
        if rows is None:
            return out
        hidden = torch.bmm(x.transpose(0, 1), self.a[rows].transpose(1, 2))
        out = out + torch.bmm(hidden, self.b[rows]).transpose(0, 1)
        return out if self.gains is None else out * self.gains[rows]
