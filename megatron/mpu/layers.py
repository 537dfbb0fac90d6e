"""The linear layer, split over tensor-parallel ranks by column or row or not at all, and the vocab-parallel
embedding.

This is where tensor parallelism is applied to a linear layer; the collectives are in `mappings.py`.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.groups import ParallelGroups
from megatron.mpu.mappings import (
    copy_to_tensor,
    gather_from_sequence,
    reduce_from_tensor,
    reduce_scatter_to_sequence,
)
from megatron.mpu.parameters import ParamSpec, allocate

Parallel = Literal["column", "row", "none"]


@dataclass(frozen=True)
class LinearSpec:
    """A linear layer and how its weight is split over tensor-parallel ranks.

    parallel: "column" splits the output features, "row" the input features, "none" replicates the layer.
    blocks: as of `ParamSpec`, of the output features. bias_sum_over_tensor: on disk each tensor rank holds a
    part of the bias, and the parts sum to it. projections: as of `ParamSpec`; else `blocks`.
    """

    in_features: int
    out_features: int
    parallel: Parallel
    bias: bool
    blocks: tuple[int, ...] = ()
    bias_sum_over_tensor: bool = False
    projections: tuple[int, ...] = ()

    def params(self) -> tuple[ParamSpec, ...]:
        shape, column = (self.out_features, self.in_features), self.parallel == "column"
        parts = self.blocks or (self.out_features,)
        axis = {"column": 0, "row": 1, "none": None}[self.parallel]
        cut = parts if column else (self.in_features,) if axis is not None else ()
        weight = ParamSpec("weight", shape, axis, cut, "input" if column else "output", weight_decay=True)
        weight = replace(weight, projections=self.projections or self.blocks)
        bias = ParamSpec("bias", shape[:1], 0, parts) if column else ParamSpec("bias", shape[:1])
        return (weight, replace(bias, sum_over_tensor=self.bias_sum_over_tensor)) if self.bias else (weight,)


class Linear(nn.Module):
    """y = x W^T + b over `[seq, batch, features]`, with its weight cut over tensor ranks:
    Megatron-LM's ColumnParallelLinear and RowParallelLinear in one.

    column: W is cut along the output; the input is whole (or `[seq/T]` under sequence parallelism), the
    output is this rank's features. row: W is cut along the input; the output is summed over ranks (or
    reduce-scattered to `[seq/T]`) and the bias, one replicated copy, is added once. none: every rank holds
    and computes everything.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: LinearSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.parallel = spec.parallel
        self.group = groups.group("tensor") if spec.parallel != "none" else None
        self.sequence_parallel = sequence_parallel
        allocate(self, spec.params(), groups, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """`[seq, batch, in]` to `[seq, batch, out]` (local sizes as the class says)."""
        if self.parallel == "column":
            gather = gather_from_sequence if self.sequence_parallel else copy_to_tensor
            return F.linear(gather(x, self.group), self.weight, self.bias)
        if self.parallel == "row":
            return self.reduce(self.partial(x))
        return F.linear(x, self.weight, self.bias)

    def partial(self, x: Tensor) -> Tensor:
        """A row-parallel layer's own summand, without bias and without communication."""
        return F.linear(x, self.weight)

    def reduce(self, partial: Tensor) -> Tensor:
        """Finish a row-parallel layer: sum over ranks, add the bias."""
        return self.add_bias(self.sum_over_ranks(partial))

    def sum_over_ranks(self, partial: Tensor) -> Tensor:
        """Sum over tensor ranks, to `[seq/T]` under sequence parallelism."""
        return (reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_tensor)(partial, self.group)

    def add_bias(self, x: Tensor) -> Tensor:
        """Add a row-parallel layer's bias to its summed output."""
        if self.bias is None:
            return x
        return x + (copy_to_tensor(self.bias, self.group) if self.sequence_parallel else self.bias)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with the vocabulary cut over tensor ranks."""

    weight: nn.Parameter

    def __init__(self, spec: ParamSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        """spec: of the weight `[vocab, hidden]`."""
        super().__init__()
        self.group = groups.group("tensor")
        self.sequence_parallel = sequence_parallel
        self.rows = spec.shape[0] // groups.size("tensor")
        self.first_row = self.rows * groups.rank("tensor")
        allocate(self, [spec], groups)

    def forward(self, tokens: Tensor) -> Tensor:
        """`[seq, batch]` int64 to `[seq, batch, hidden]` (`[seq/T]` under sequence parallelism)."""
        if self.group is None:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first_row
        foreign = (local < 0) | (local >= self.rows)
        out = F.embedding(local.masked_fill(foreign, 0), self.weight).masked_fill(foreign.unsqueeze(-1), 0.0)
        return (reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_tensor)(out, self.group)
