"""The linear layer, split over tensor-parallel ranks by column or row or not at all, and the vocab-parallel
embedding.

What tensor ranks compute and send each other is in `parallel_linear.py`, the collectives in `mappings.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.groups import ParallelGroups
from megatron.mpu.parallel_linear import column_parallel, pipelined_row, sum_over_ranks
from megatron.mpu.parameters import ParamSpec, allocate
from megatron.mpu.products import PlainProduct, Product, linear

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

    product: what it multiplies with, forwards and backwards; the plain one unless another is set.
    sum_in_place: whether the sum over ranks may overwrite a row-parallel product; not where recomputation
    keeps it.
    async_tensor_parallel: under sequence parallelism, whether the plain product runs in pieces with what
    travels (`symmetric_memory.py`).
    """

    product: Product
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: LinearSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.parallel = spec.parallel
        self.group = groups.group("tensor") if spec.parallel != "none" else None
        self.sequence_parallel = sequence_parallel
        self.product = PlainProduct()
        self.sum_in_place = True
        self.async_tensor_parallel = False
        allocate(self, spec.params(), groups, "bias")

    def forward(self, x: Tensor) -> Tensor:
        """`[seq, batch, in]` to `[seq, batch, out]` (local sizes as the class says)."""
        if self.group is None:
            return linear(x, self.weight, self.bias, self.product)
        if self.parallel == "column":
            return column_parallel(
                x, self.weight, self.bias, self.product, self.group, self.sequence_parallel, self.pipelined
            )
        return row_parallel_sum((self,), (x,))

    @property
    def pipelined(self) -> bool:
        """Whether its product runs in pieces."""
        return self.async_tensor_parallel and self.sequence_parallel and isinstance(self.product, PlainProduct)


def row_parallel_sum(layers: Sequence[Linear], inputs: Sequence[Tensor]) -> Tensor:
    """The sum of the outputs of row-parallel layers of one group, in one collective.

    inputs: of each layer, `[seq, batch, in/T]`. Returns `[seq, batch, out]` (`[seq/T, ..]` under sequence
    parallelism).
    """
    group = layers[0].group
    if group is not None and all(of.pipelined for of in layers):
        outs = [pipelined_row(x, of.weight, of.bias, group) for of, x in zip(layers, inputs, strict=True)]
        return sum(outs[1:], outs[0])
    summands = [linear(x, of.weight, None, of.product) for of, x in zip(layers, inputs, strict=True)]
    summand = sum(summands[1:], summands[0])
    biases = [of.bias for of in layers if of.bias is not None]
    if group is None:
        return sum(biases, summand)
    return sum_over_ranks(summand, biases, group, layers[0].sequence_parallel, all(of.sum_in_place for of in layers))


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
        return sum_over_ranks(out, (), self.group, self.sequence_parallel)
