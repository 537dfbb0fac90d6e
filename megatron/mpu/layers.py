"""The linear layer, sharded over tensor-parallel ranks, the sum that ends row-parallel layers, and the
vocab-parallel embedding.

`parallel_linear.py` overlaps computation with communication between tensor ranks; `mappings.py` holds the
collectives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.mpu.groups import ParallelGroups
from megatron.mpu.lora import Adapter, Adapters, AdapterStack, join_rows, row_norms, rows_of
from megatron.mpu.mappings import copy_to_tensor, gather_from_sequence
from megatron.mpu.parallel_linear import column_parallel, pipelined_row, sum_over_ranks
from megatron.mpu.parameters import ParamSpec, allocate, with_prefix
from megatron.mpu.products import PlainProduct, Product, linear
from megatron.mpu.quantized import QuantizedProduct
from megatron.mpu.random import dropout, mix_seed

Parallel = Literal["column", "row", "none"]


@dataclass(frozen=True)
class LinearSpec:
    """Describes a linear layer, and how its weight `[out, in]` is sharded over tensor-parallel ranks.

    parallel: "column" shards the output features, "row" the input features, "none" replicates the layer.
    blocks: sizes of fused projections along the output features, each sharded separately, such as [q, k, v];
        empty: a single block.
    bias_sum_over_tensor: each tensor rank's file holds one summand of the bias; the bias is their sum.
    projections: rows of each fused projection, if they repeat along the rows; empty: `blocks`.
    head_rows: rows of each matrix of an attention head, if they repeat along the rows; empty: not of heads.
    adapters: its low-rank adapters; None: none.
    """

    in_features: int
    out_features: int
    parallel: Parallel
    bias: bool
    blocks: tuple[int, ...] = ()
    bias_sum_over_tensor: bool = False
    projections: tuple[int, ...] = ()
    head_rows: tuple[int, ...] = ()
    adapters: Adapters | None = None

    def params(self) -> tuple[ParamSpec, ...]:
        """Returns the parameters that `Linear` allocates: weight, bias, and those of its adapters."""
        layer_params = self.own_params()
        return (
            *layer_params,
            *(spec for name, specs in self.adapter_params().items() for spec in with_prefix(name, specs)),
        )

    def adapter_params(self) -> dict[str, tuple[ParamSpec, ...]]:
        """Returns the parameters of each adapter, by the name of its module, such as `lora.q_proj`."""
        if self.adapters is None:
            return {}
        weight = self.own_params()[0]
        return {f"lora.{adapter.name}": self.adapters.params(adapter.name, weight) for adapter in self.adapters.specs}

    def own_params(self) -> tuple[ParamSpec, ...]:
        """Returns the parameters of the layer without its adapters: weight, and bias if it has one."""
        shape, column = (self.out_features, self.in_features), self.parallel == "column"
        parts = self.blocks or (self.out_features,)
        axis = {"column": 0, "row": 1, "none": None}[self.parallel]
        split_sizes = parts if column else (self.in_features,) if axis is not None else ()
        weight = ParamSpec(
            "weight", shape, axis, split_sizes, "output" if self.parallel == "row" else "input", weight_decay=True
        )
        weight = replace(weight, projections=self.projections or self.blocks, head_rows=self.head_rows)
        bias = ParamSpec("bias", shape[:1], 0, parts) if column else ParamSpec("bias", shape[:1])
        return (weight, replace(bias, sum_over_tensor=self.bias_sum_over_tensor)) if self.bias else (weight,)


class Linear(nn.Module):
    """Computes y = x W^T + b over `[seq, batch, features]`, with W sharded over tensor ranks.

    It does the work of Megatron-LM's ColumnParallelLinear and RowParallelLinear, by `LinearSpec.parallel`.
    column: W is sharded along the output features. The input is full (under sequence parallelism `[seq/T]`,
        which is gathered); the output has this rank's features.
    row: W is sharded along the input features. The output is summed over ranks (under sequence parallelism
        reduce-scattered to `[seq/T]`); the bias is added once.
    none: every rank holds and computes everything; under sequence parallelism for its part of the sequence.

    product: computes the matrix products, forward and backward; by default PlainProduct.
    weight: this rank's part `[out, in]`, a parameter; after `quantize` a buffer of packed bytes.
    sum_in_place: whether the sum over ranks may overwrite the product of a row-parallel layer; False if
        recomputation saves the product.
    async_tensor_parallel: whether, under sequence parallelism, a PlainProduct runs in pieces that overlap
        with communication (`parallel_linear.gather_product`).
    lora: adapters by the name of their projection; None without adapters.
    adapters_on: whether the adapters are used.
    stack: when serving, the adapters from which each row of a batch selects one.
    """

    stack: AdapterStack | None = None

    product: Product
    weight: Tensor
    bias: nn.Parameter | None

    def __init__(self, spec: LinearSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.parallel = spec.parallel
        self.group = groups.group("tensor") if spec.parallel != "none" else None
        # Replicated parameters of which each rank computes a part of the gradient, which is summed over ranks
        self.replica_group = groups.group("tensor") if spec.parallel == "none" and sequence_parallel else None
        self.sequence_parallel = sequence_parallel
        self.product = PlainProduct()
        self.sum_in_place = True
        self.async_tensor_parallel = False
        allocate(self, spec.own_params(), groups, "bias")
        self.adapters, self.adapters_on = spec.adapters, spec.adapters is not None
        self.lora: nn.ModuleDict | None = None
        if spec.adapters is not None:
            adapter_modules = {
                name.removeprefix("lora."): Adapter(specs, groups) for name, specs in spec.adapter_params().items()
            }
            self.lora = nn.ModuleDict(adapter_modules)
            # If tensor ranks have different parts of the input, their dropout masks differ.
            rank_offset = groups.rank("tensor") if sequence_parallel or spec.parallel == "row" else 0
            self.seed_offset = mix_seed(*adapter_modules) % 2**32 + rank_offset
            size = groups.size("tensor") if spec.parallel == "column" and spec.adapters.pattern_sharded else 1
            self.pattern = tuple(rows // size for rows in spec.adapters.pattern)

    def quantize(self, product: QuantizedProduct) -> None:
        """Replaces the weight by an empty buffer for the packed form of `product`. Then call `set_quantized`
        to fill it."""
        packed = torch.empty(product.packed_shape, dtype=torch.uint8, device=self.weight.device)
        del self.weight
        self.register_buffer("weight", packed, persistent=False)
        self.product = product

    def set_quantized(self, weight: Tensor) -> None:
        """Packs `weight` `[out, in]` and stores it as this layer's quantised weight, on the device of
        `weight`."""
        assert isinstance(self.product, QuantizedProduct)
        self.weight = self.product.pack(weight)

    def dense_weight(self) -> Tensor:
        """Returns the weight `[out, in]`; a quantised weight is unpacked."""
        return self.product.unpack(self.weight) if isinstance(self.product, QuantizedProduct) else self.weight

    def adapted_weight(self) -> Tensor:
        """Returns the weight `[out, in]` with its adapters, or `[batch, out, in]` if each row has its own.

        For a layer that is not row-parallel, in generation: without dropout of the adapters' input.
        """
        weight = self.dense_weight()
        if self.stack is not None:
            return self.stack.weights(weight)
        if not self.adapters_on:
            return weight
        assert self.adapters is not None
        changes = {
            place: spec.size.scale * (adapter.lora_B @ adapter.lora_A).t()
            for (place, adapter), spec in zip(self._part_adapters(), self.adapters.specs, strict=True)
        }
        weight, gains = weight + join_rows(changes, self.pattern, missing=0.0).t(), self._gains()
        return weight if gains is None else gains.unsqueeze(1) * weight

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Computes the layer's output: `[seq, batch, in]` to `[seq, batch, out]`, where sharded dimensions
        have this rank's size.

        seed: for dropout of the adapters' input; None: no dropout.
        """
        if self.parallel == "row" and self.group is not None:
            return row_parallel_sum((self,), (x,), seed)
        if self.stack is not None:
            out = self.stack(self._product(x, None), x)
            return out if self.bias is None else out + self.bias
        if not self.adapters_on:
            return self._product(x, self.bias)
        gains = self._gains()
        if gains is None:
            return self._add_low_rank(self._product(x, self.bias), x, seed)
        out = gains * self._add_low_rank(self._product(x, None), x, seed)
        return out if self.bias is None else out + self.bias

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the output of a column-parallel or unsharded layer, without its adapters."""
        if self.group is None:
            bias = None if bias is None else copy_to_tensor(bias, self.replica_group)
            return linear(x, copy_to_tensor(self.weight, self.replica_group), bias, self.product)
        return column_parallel(x, self.weight, bias, self.product, self.group, self.sequence_parallel, self.pipelined)

    def summand(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Returns this rank's part of a row-parallel layer's output, with adapters but without the bias. The
        output is the sum over ranks.

        seed: for dropout of the adapters' input; None: no dropout.
        """
        out = linear(x, self.weight, None, self.product)
        if self.stack is not None:
            return self.stack(out, x)
        if not self.adapters_on:
            return out
        gains, out = self._gains(), self._add_low_rank(out, x, seed)
        return out if gains is None else gains * out

    def _add_low_rank(self, out: Tensor, x: Tensor, seed: Tensor | None) -> Tensor:
        """Adds the output of the low-rank adapters for `x` to `out` `[seq, batch, out]`.

        One matrix product serves all adapters: the B of several projections are joined in one matrix, with
        zeros in the rows of other projections. Of A and B, the one that is replicated over tensor ranks gets
        its gradients summed over ranks.
        """
        assert self.adapters is not None
        lora, part_adapters = self.adapters.lora, self._part_adapters()
        if seed is not None:
            x = dropout(x, lora.dropout, seed + self.seed_offset, self.training)
        a = torch.cat([adapter.lora_A for _, adapter in part_adapters])
        if self.parallel == "row":
            hidden = F.linear(x, a)
        elif self.parallel == "none":
            hidden = F.linear(x, copy_to_tensor(a, self.replica_group))
        elif self.sequence_parallel:
            hidden = gather_from_sequence(F.linear(x, copy_to_tensor(a, self.group)), self.group)
        else:
            hidden = copy_to_tensor(F.linear(x, a), self.group)
        scales = [spec.size.scale for spec in self.adapters.specs]
        shared = scales[0] if len(set(scales)) == 1 else None
        columns = {}
        for (place, adapter), scale, (left, right) in zip(part_adapters, scales, self.adapters.offsets(), strict=True):
            column = self._row_parameter(adapter.lora_B).t()
            columns[place] = F.pad(column if shared is not None else scale * column, (0, 0, left, right))
        b = join_rows(columns, self.pattern, missing=0.0)
        alpha = 1.0 if shared is None else shared
        return torch.addmm(out.flatten(0, -2), hidden.flatten(0, -2), b, alpha=alpha).view(out.shape)

    def _part_adapters(self) -> list[tuple[int, Adapter]]:
        """Returns (index of the projection in the fused weight, adapter) for each projection that has an
        adapter."""
        assert self.adapters is not None and self.lora is not None
        return [(spec.part, cast(Adapter, self.lora[spec.name])) for spec in self.adapters.specs]

    def _row_parameter(self, param: Tensor) -> Tensor:
        """Returns a parameter over output features, such as B, for use in `forward`.

        In a row-parallel layer each rank computes only a summand from it, and in an unsharded one under
        sequence parallelism only a part of the sequence, so its gradients are summed over ranks.
        """
        return copy_to_tensor(param, self.group if self.parallel == "row" else self.replica_group)

    def _gains(self) -> Tensor | None:
        """Returns DoRA's factor for each output feature, `[out]`: magnitude / norm of the row of W + scale B
        A.

        It is 1 for rows without adapter. Returns None without DoRA. The norm is a constant for the gradient
        (arXiv 2402.09353, 4.3).
        """
        assert self.adapters is not None
        if not self.adapters.lora.dora:
            return None
        group = self.group if self.parallel == "row" else None
        gains = {}
        with torch.no_grad():
            weight = self.dense_weight()
        for (place, adapter), spec in zip(self._part_adapters(), self.adapters.specs, strict=True):
            assert adapter.lora_magnitude_vector is not None
            with torch.no_grad():
                rows = rows_of(weight, place, self.pattern)
                norms = row_norms(rows, adapter.lora_A, adapter.lora_B, spec.size.scale, group)
            # The norm is rounded like the magnitude, so that their quotient starts at exactly 1, also in 16
            # bits.
            norms = norms.to(weight.dtype).float()
            gains[place] = (self._row_parameter(adapter.lora_magnitude_vector).float() / norms).to(weight.dtype)
        return join_rows(gains, self.pattern, missing=1.0)

    @property
    def pipelined(self) -> bool:
        """Whether products run in pieces that overlap with communication. False if adapters must be added
        before the sum over ranks."""
        if self.parallel == "row" and self.adapters_on:
            return False
        return self.async_tensor_parallel and self.sequence_parallel and isinstance(self.product, PlainProduct)


class PartialSum(nn.Module):
    """Ends a row-parallel layer whose product was computed elsewhere, such as experts: sums its input over
    tensor ranks.

    sum_in_place: the sum may overwrite the input.
    """

    bias: Tensor | None = None
    pipelined = False

    def __init__(self, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel, self.sum_in_place = groups.group("tensor"), sequence_parallel, True

    def summand(self, x: Tensor, seed: Tensor | None) -> Tensor:
        """Returns `x`, which already is this rank's summand (the counterpart of `Linear.summand`)."""
        return x

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Tensor:
        """Sums `x` `[seq, batch, out]` over tensor ranks; returns `[seq, batch, out]`, or `[seq/T, ..]` under
        sequence parallelism."""
        return row_parallel_sum((self,), (x,), seed)


def row_parallel_sum(
    layers: Sequence[Linear | PartialSum], inputs: Sequence[Tensor], seed: Tensor | None = None
) -> Tensor:
    """Returns the sum of the outputs of several row-parallel layers, with a single collective for all of
    them.

    layers: they must have the same tensor group. inputs: one for each layer, `[seq, batch, in/T]`.
    seed: for dropout of adapters' inputs; None: no dropout.
    Returns `[seq, batch, out]`, or `[seq/T, ..]` under sequence parallelism.
    """
    group = layers[0].group
    linears = [layer for layer in layers if isinstance(layer, Linear) and layer.pipelined]
    if group is not None and len(linears) == len(layers):
        outs = [pipelined_row(x, layer.weight, layer.bias, group) for layer, x in zip(linears, inputs, strict=True)]
        return sum(outs[1:], outs[0])
    summands = [layer.summand(x, seed) for layer, x in zip(layers, inputs, strict=True)]
    summand = sum(summands[1:], summands[0])
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if group is None:
        return sum(biases, summand)
    return sum_over_ranks(
        summand, biases, group, layers[0].sequence_parallel, all(layer.sum_in_place for layer in layers)
    )


class VocabParallelEmbedding(nn.Module):
    """Token embedding whose vocabulary is sharded over tensor ranks.

    modules_to_save: a trained copy of the weight, which is used instead of the weight while `adapters_on`;
        None: no copy.
    """

    weight: nn.Parameter
    modules_to_save: nn.Parameter | None

    def __init__(self, specs: Sequence[ParamSpec], groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        """specs: the spec of the weight `[vocab, hidden]`, and after it that of `modules_to_save`, if there
        is one."""
        super().__init__()
        self.group = groups.group("tensor")
        self.sequence_parallel = sequence_parallel
        self.rows = specs[0].shape[0] // groups.size("tensor")
        self.first_row = self.rows * groups.rank("tensor")
        allocate(self, specs, groups, "modules_to_save")
        self.adapters_on = self.modules_to_save is not None

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns the embeddings `[seq, batch, hidden]` of `tokens` `[seq, batch]` int64; `[seq/T, ..]` under
        sequence parallelism."""
        weight = self.weight if self.modules_to_save is None or not self.adapters_on else self.modules_to_save
        if self.group is None:
            return F.embedding(tokens, weight)
        local = tokens - self.first_row
        foreign = (local < 0) | (local >= self.rows)
        out = F.embedding(local.masked_fill(foreign, 0), weight).masked_fill(foreign.unsqueeze(-1), 0.0)
        return sum_over_ranks(out, (), self.group, self.sequence_parallel)
