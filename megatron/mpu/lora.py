"""Low-rank adapters of linear layers (LoRA, arXiv 2106.09685; rsLoRA, 2312.03732; DoRA, 2402.09353), as peft
computes them.

An adapter belongs to one projection: a weight may hold several (queries, keys and values; up and gate), each
with an adapter of its own, or one for all of its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.groups import ParallelGroups
from megatron.mpu.mappings import reduce_from_tensor
from megatron.mpu.parameters import ParamSpec, allocate

WHOLE = -1


@dataclass(frozen=True)
class LoraSpec:
    """The adapters of a model: rank `r`, the factor `scale` of their output, the dropout of their input.

    targets: the projections that have one, by the names of HuggingFace's modules. dora: each has a magnitude
    for every row. init_a, init_b: initial values, of `ParamSpec`.
    """

    r: int
    scale: float
    dropout: float
    dora: bool
    init_a: Literal["kaiming_uniform", "gaussian_over_rank"]
    init_b: Literal["zeros", "kaiming_uniform"]
    targets: frozenset[str]


@dataclass(frozen=True)
class AdapterSpec:
    """The adapter of one projection. name: of the projection. part: which in the pattern of projections down
    the weight's rows; `WHOLE`: all of them. rows: its number of output features."""

    name: str
    part: int
    rows: int


@dataclass(frozen=True)
class Adapters:
    """The adapters of one linear layer. pattern: how many rows belong to each projection in turn, over all
    tensor ranks, again and again down the rows; cut: whether each number, else how often they repeat, is
    divided by the ranks of a column-parallel layer."""

    lora: LoraSpec
    each: tuple[AdapterSpec, ...]
    pattern: tuple[int, ...]
    cut: bool

    def params(self, name: str, weight: ParamSpec) -> tuple[ParamSpec, ...]:
        """The parameters of the adapter `name` of a layer with this weight `[out, in]`."""
        adapter = next(each for each in self.each if each.name == name)
        (r, rows), inputs, column = (self.lora.r, adapter.rows), weight.shape[1], weight.axis == 0
        blocks = (weight.blocks if adapter.part == WHOLE else (rows,)) if column else ()
        of_rows = 0 if column else None
        a = ParamSpec("lora_A", (r, inputs), init=self.lora.init_a, weight_decay=True)
        if weight.axis == 1:
            a = replace(a, axis=1, blocks=(inputs,))
        b = ParamSpec("lora_B", (rows, r), of_rows, blocks, self.lora.init_b, weight_decay=True)
        magnitude = ParamSpec("lora_magnitude_vector", (rows,), of_rows, blocks, "ones", weight_decay=True)
        return (a, b, magnitude) if self.lora.dora else (a, b)


def adapters_of(
    lora: LoraSpec | None,
    rows: int,
    whole: str | None,
    parts: Sequence[str] = (),
    pattern: Sequence[int] = (),
    cut: bool = False,
) -> Adapters | None:
    """The adapters that `lora` asks for in a layer of `rows` output features; None where there are none.

    whole: name of the layer as one projection. parts: of its projections, where it holds several. pattern,
    cut: as of `Adapters`.
    """
    if lora is None:
        return None
    if whole in lora.targets:
        return Adapters(lora, (AdapterSpec(whole, WHOLE, rows),), (rows,), True)
    share = rows // sum(pattern) if parts else 0
    each = [AdapterSpec(n, i, pattern[i] * share) for i, n in enumerate(parts) if n in lora.targets]
    return Adapters(lora, tuple(each), tuple(pattern), cut) if each else None


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
    """Values of single projections `[..., rows of it]` in the order of the weight's rows `[..., rows]`;
    `missing` stands for projections without. parts: by place in the pattern."""
    if WHOLE in parts:
        return parts[WHOLE]
    some = next(iter(parts))
    value = parts[some]
    repeats = value.shape[-1] // pattern[some]
    shape = (*value.shape[:-1], repeats)
    pieces = [
        parts[i].unflatten(-1, (repeats, rows)) if i in parts else value.new_full((*shape, rows), missing)
        for i, rows in enumerate(pattern)
    ]
    return torch.cat(pieces, -1).flatten(-2)


def rows_of(weight: Tensor, part: int, pattern: Sequence[int]) -> Tensor:
    """The rows of one projection of a weight `[rows, ...]`: what `join_rows` joins."""
    if part == WHOLE:
        return weight
    return weight.unflatten(0, (-1, sum(pattern))).split(tuple(pattern), 1)[part].flatten(0, 1)


def row_norms(
    weight: Tensor, a: Tensor, b: Tensor, scale: float, group: torch.distributed.ProcessGroup | None
) -> Tensor:
    """||W + scale B A|| of every row, fp32 `[rows]`, above 0 for rows of zeros too.

    W `[rows, in]`, A `[r, in]`, B `[rows, r]`; group: over whose ranks the inputs are cut. The sum
    W + scale B A, as large as W, is never made.
    """
    a32, b32 = a.float(), b.float()
    squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
    squares = squares + 2.0 * scale * (F.linear(weight, a).float() * b32).sum(1)
    squares = squares + scale * scale * ((b32 @ (a32 @ a32.t())) * b32).sum(1)
    return reduce_from_tensor(squares, group).clamp_(min=torch.finfo(torch.float32).tiny).sqrt_()


@dataclass
class AdapterRows:
    """Which adapter each row of the batch takes that runs now, by number. rows: `[batch]` int64; None: none
    of them."""

    rows: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AdapterStack:
    """Adapters of several trainings beside one linear, of which each row of a batch takes one; number 0 is
    none. Without gradients.

    a: `[number, r, in]`; b: `[number, r, out]`, scaled; those of smaller rank are filled up with zeros.
    gains: DoRA's `[number, out]`, or None.
    """

    a: Tensor
    b: Tensor
    gains: Tensor | None
    chosen: AdapterRows

    def __call__(self, out: Tensor, x: Tensor) -> Tensor:
        """`out` `[seq, batch, out]` of the product with `x` `[seq, batch, in]`, without bias, and what the
        adapters make of it: of a row-parallel layer this rank's summand."""
        rows = self.chosen.rows
        if rows is None:
            return out
        hidden = torch.bmm(x.transpose(0, 1), self.a[rows].transpose(1, 2))
        out = out + torch.bmm(hidden, self.b[rows]).transpose(0, 1)
        return out if self.gains is None else out * self.gains[rows]
