"""Low-rank adapters of linear layers, as peft computes them (LoRA, arXiv 2106.09685; rsLoRA, 2312.03732;
DoRA, 2402.09353).

An adapter belongs to one projection, such as `q_proj`. A fused weight may have an adapter for each of its
projections (q, k and v; up and gate), or one adapter for all of its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
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
    """The size of an adapter: its rank `r`, and the factor `scale` by which its output is multiplied."""

    r: int
    scale: float


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of one transformer block.

    dropout: of the adapters' inputs.
    dora: each adapter also has a magnitude for every row.
    init_a, init_b: initialisation of A and B, as in `ParamSpec.init`.
    targets: size of each adapter, by HuggingFace's name of its projection, such as `q_proj`.
    """

    dropout: float
    dora: bool
    init_a: Literal["kaiming_uniform", "gaussian_over_rank"]
    init_b: Literal["zeros", "kaiming_uniform"]
    targets: Mapping[str, LowRank] = field(hash=False)


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter of one projection.

    name: HuggingFace's name of the projection.
    part: index of the projection in the pattern along the weight's rows; `ALL_ROWS`: the adapter covers all
        rows.
    rows: number of output features of the projection.
    size: its rank and scale.
    """

    name: str
    part: int
    rows: int
    size: LowRank


@dataclass(frozen=True)
class Adapters:
    """The adapters of one linear layer.

    lora: settings of the block's adapters. specs: the adapters.
    pattern: numbers of rows of the fused projections, over all tensor ranks; the pattern repeats down the
        weight's rows.
    pattern_sharded: only for a column-parallel layer: True if each tensor rank has a part of every
        projection, False if it has full repeats of the pattern.
    """

    lora: LoraSpec
    specs: tuple[AdapterSpec, ...]
    pattern: tuple[int, ...]
    pattern_sharded: bool

    def params(self, name: str, weight: ParamSpec) -> tuple[ParamSpec, ...]:
        """Returns the parameters of the adapter `name`: `lora_A`, `lora_B` and, with DoRA,
        `lora_magnitude_vector`.

        weight: the spec of the layer's weight `[out, in]`.
        """
        adapter = next(spec for spec in self.specs if spec.name == name)
        (r, rows), inputs, column = (adapter.size.r, adapter.rows), weight.shape[1], weight.axis == 0
        blocks = self._blocks(adapter, weight) if column else ()
        row_axis = 0 if column else None
        a = ParamSpec("lora_A", (r, inputs), init=self.lora.init_a, weight_decay=True)
        if weight.axis == 1:
            a = replace(a, axis=1, blocks=(inputs,))
        b = ParamSpec("lora_B", (rows, r), row_axis, blocks, self.lora.init_b, weight_decay=True)
        magnitude = ParamSpec("lora_magnitude_vector", (rows,), row_axis, blocks, "ones", weight_decay=True)
        return (a, b, magnitude) if self.lora.dora else (a, b)

    def _blocks(self, adapter: AdapterSpec, weight: ParamSpec) -> tuple[int, ...]:
        """Returns the sizes of the projection's rows that are each sharded over tensor ranks separately."""
        if adapter.part == ALL_ROWS:
            return weight.blocks
        if not self.pattern_sharded:
            return (adapter.rows,)
        start, ends = sum(self.pattern[: adapter.part]), accumulate(weight.blocks)
        return tuple(size for size, end in zip(weight.blocks, ends, strict=True) if start < end <= start + adapter.rows)

    def offsets(self) -> list[tuple[int, int]]:
        """Returns, for each adapter, the sums of the LoRA ranks of the adapters before it and after it.

        They are the columns of zeros to pad its B with, when all adapters are concatenated.
        """
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
    """Returns the adapters that `lora` configures for a linear layer; None if there are none.

    rows: number of output features of the layer.
    layer_name: name of the whole layer in `lora.targets`; None: only its parts have names.
    parts: names of the fused projections, such as ("q_proj", "k_proj", "v_proj").
    pattern, pattern_sharded: row numbers of these projections, and how they are sharded, as in `Adapters`.
    """
    if lora is None:
        return None
    if layer_name is not None and layer_name in lora.targets:
        return Adapters(lora, (AdapterSpec(layer_name, ALL_ROWS, rows, lora.targets[layer_name]),), (rows,), True)
    share = rows // sum(pattern) if parts else 0
    specs = [AdapterSpec(n, i, pattern[i] * share, lora.targets[n]) for i, n in enumerate(parts) if n in lora.targets]
    return Adapters(lora, tuple(specs), tuple(pattern), pattern_sharded) if specs else None


class Adapter(nn.Module):
    """This tensor rank's parameters of one adapter.

    Shapes: `lora_A` `[r, in]`, `lora_B` `[rows, r]`, DoRA's `lora_magnitude_vector` `[rows]` (None without
        DoRA).
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_magnitude_vector: nn.Parameter | None

    def __init__(self, specs: Sequence[ParamSpec], groups: ParallelGroups) -> None:
        super().__init__()
        allocate(self, specs, groups, "lora_magnitude_vector")


def join_rows(parts: Mapping[int, Tensor], pattern: Sequence[int], missing: float) -> Tensor:
    """Joins per-projection values `[..., rows of the projection]` into `[..., rows]`, in the order of a fused
    weight's rows.

    parts: values by index of the projection in `pattern`.
    pattern: number of rows of each projection; the pattern repeats along the rows.
    missing: the value for projections that are not in `parts`.
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
    """Returns the rows of one projection of a fused weight `[rows, ...]`; the inverse of `join_rows`.

    part: index of the projection in `pattern`, or `ALL_ROWS`. pattern: number of rows of each projection; the
        pattern repeats along the rows.
    """
    if part == ALL_ROWS:
        return weight
    return weight.unflatten(0, (-1, sum(pattern))).split(tuple(pattern), 1)[part].flatten(0, 1)


def row_norms(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, group: torch.distributed.ProcessGroup | None
) -> Tensor:
    """Returns the norm of every row of W + scale B A, fp32 `[rows]`; always above 0.

    weight: W `[rows, in]`. a: A `[r, in]`. b: B `[rows, r]`. The sum, a matrix as large as W, is never
        computed.
    group: the ranks over which the input features are sharded; None: one rank.
    """
    a32, b32 = a.float(), b.float()
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    squares = squares + 2.0 * scale * (F.linear(weight, a).float() * b32).sum(1)
    squares = squares + scale * scale * ((b32 @ (a32 @ a32.t())) * b32).sum(1)
    return reduce_from_tensor(squares, group).clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()


@dataclass
class AdapterRows:
    """Holds which adapter each row of the current batch uses. rows: `[batch]` int64, indices in
    `AdapterStack`; None: no row uses one."""

    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AdapterStack:
    """Several trained adapters of one linear layer, for serving. Each row of a batch uses one; number 0 means
    none.

    a: `[number, r, in]`, padded with zeros to the largest rank.
    b: `[number, r, out]`, multiplied by the scales, and padded likewise.
    gains: DoRA's factors of the output, `[number, out]`; None without DoRA.
    chosen: the adapter of each row of the current batch.
    """

    a: Tensor
    b: Tensor
    gains: Tensor | None
    chosen: AdapterRows

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """Returns the layer's output with each row's adapter added.

        out: the product W x without bias, `[seq, batch, out]`; in a row-parallel layer this rank's summand of
            it.
        x: the layer's input, `[seq, batch, in]`.
        """
        rows = self.chosen.rows
        if rows is None:
            return out
        hidden = torch.bmm(x.transpose(0, 1), self.a[rows].transpose(1, 2))
        out = out + torch.bmm(hidden, self.b[rows]).transpose(0, 1)
        return out if self.gains is None else out * self.gains[rows]

    def weights(self, weight: Tensor) -> Tensor:
        """Returns the layer's weight `[out, in]` with each row's adapter, `[batch, out, in]`; without a batch
        dimension if no row uses one."""
        rows = self.chosen.rows
        if rows is None:
            return weight
        weights = weight + torch.bmm(self.b[rows].transpose(1, 2), self.a[rows])
        return weights if self.gains is None else weights * self.gains[rows].unsqueeze(2)
