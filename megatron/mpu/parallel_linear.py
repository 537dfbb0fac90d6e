"""Column- and row-parallel linear layers, with gradients.

Communication between tensor ranks overlaps with matrix products that do not need its result (Megatron-LM,
arXiv 1909.08053; sequence parallelism, arXiv 2205.05198). A column-parallel layer is one autograd function. A
row-parallel layer is a product followed by a function that sums over ranks, or one function with async tensor
parallelism. Shapes are `[seq, batch, features]`, or `[seq/T, ..]` where the sequence is sharded over T tensor
ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.mappings import (
    all_gather,
    finish,
    start_all_gather_in_backward,
    start_all_reduce,
    start_reduce_scatter,
)
from megatron.mpu.products import PlainProduct, Product, bias_gradient, biased_output, weight_gradient

# -- products in pieces that overlap with communication between tensor ranks of one machine ------------------
# They use torch's symmetric memory (`torch.ops.symm_mem`, only on CUDA): each rank reads the other ranks'
# memory over NVLink. The sequence is the first dimension, full or sharded.


def gather_product(shard: Tensor, matrix: Tensor, group: dist.ProcessGroup, keep: bool) -> tuple[Tensor | None, Tensor]:
    """Gathers `shard` `[seq/T, batch, in]` along the sequence and multiplies it by `matrix` `[in, out]`.

    Both run in pieces, so that communication and products overlap. Returns the gathered tensor (None unless
    `keep`) and the product `[seq, batch, out]`.
    """
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    gathered, products = fused(shard.contiguous(), [matrix], 0, group.group_name, return_A=keep)
    return gathered, products[0]


def product_scatter(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Multiplies x `[seq, batch, in]` by `matrix` `[in, out]`, sums over ranks, and returns this rank's
    `[seq/T, batch, out]`.

    Both run in pieces: some are sent while others are computed.
    """
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, group.group_name)


# -- layers --------------------------------------------------------------------------------------------------


class _ColumnParallel(torch.autograd.Function):
    """Computes y = x W^T + b with W sharded along the output features.

    Backward sums the input gradient over ranks while it computes the weight gradient. Under sequence
    parallelism only this rank's part of x is saved; backward gathers it again while it computes the input
    gradient.

    pipelined: gathering x, and summing its gradient, run in pieces that overlap with their products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        pipelined: bool,
    ) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.product, ctx.group, ctx.sequence_parallel, ctx.pipelined = product, group, sequence_parallel, pipelined
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        if pipelined:
            out = gather_product(x, weight.t(), group, keep=False)[1]
            return out if bias is None else out + bias
        return biased_output(all_gather(x, group) if sequence_parallel else x, weight, bias, product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x_grad = weight_grad = None
        if needs_weight and ctx.sequence_parallel:
            gathered = start_all_gather_in_backward(x, grad, ctx.group)
        if needs_x and ctx.pipelined:
            x_grad = product_scatter(grad, weight, ctx.group)
        elif needs_x:
            start = start_reduce_scatter if ctx.sequence_parallel else start_all_reduce
            summed = start(ctx.product.input_gradient(grad, weight), ctx.group)
        if needs_weight:
            weight_grad = weight_gradient(ctx.product, grad, finish(gathered) if ctx.sequence_parallel else x)
        bias_grad = bias_gradient(grad) if needs_bias else None
        if needs_x and not ctx.pipelined:
            x_grad = finish(summed)
        return x_grad, weight_grad, bias_grad, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """Sums `summand` over the tensor ranks and adds the biases, which every rank holds in full.

    Under sequence parallelism, backward gathers the gradient once; the biases and both gradients of the
    preceding product use it. This is a function of its own, because recomputation ends before the last
    product of a block.
    """

    @staticmethod
    def forward(
        ctx: Any, summand: Tensor, group: dist.ProcessGroup, sequence_parallel: bool, in_place: bool, *biases: Tensor
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        start = start_reduce_scatter if sequence_parallel else start_all_reduce
        # Detached: autograd forbids writing to a view it tracks.
        buffer = summand.detach() if in_place or sequence_parallel or torch.compiler.is_compiling() else summand.clone()
        total = finish(start(buffer, group, wait=True))
        for bias in biases:
            total = total + bias if torch.compiler.is_compiling() else total.add_(bias)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        full_grad = all_gather(grad, ctx.group) if ctx.sequence_parallel else grad
        bias_grad = bias_gradient(full_grad) if any(ctx.needs_input_grad[4:]) else None
        return (
            full_grad,
            None,
            None,
            None,
            *(bias_grad if needs_grad else None for needs_grad in ctx.needs_input_grad[4:]),
        )


class _PipelinedRow(torch.autograd.Function):
    """Computes y = x W^T + b with W sharded along the input features; y is this rank's `[seq/T, ..]`.

    The sum over ranks, and the gather of its gradient, run in pieces that overlap with the products.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.group = group
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        out = product_scatter(x, weight.t(), group)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        full_grad = x_grad = weight_grad = bias_grad = None
        if needs_x:
            full_grad, x_grad = gather_product(grad, weight, ctx.group, keep=needs_weight or needs_bias)
        else:
            full_grad = all_gather(grad, ctx.group)
        if needs_weight and full_grad is not None:
            weight_grad = PlainProduct().weight_gradient(full_grad, x)
        if needs_bias and full_grad is not None:
            bias_grad = bias_gradient(full_grad)
        return x_grad, weight_grad, bias_grad, None


def column_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: Product,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    pipelined: bool = False,
) -> Tensor:
    """Computes x W^T + b for this rank's rows of W and b: `[seq, batch, in]` to `[seq, batch, out/T]`.

    product: computes the matrix products.
    sequence_parallel: x is this rank's part of the sequence, `[seq/T, ..]`, and is gathered.
    pipelined: communication overlaps with the products, by symmetric memory; `product` must be a
        PlainProduct.
    """
    return _ColumnParallel.apply(x, weight, bias, product, group, sequence_parallel, pipelined)


def sum_over_ranks(
    summand: Tensor, biases: Sequence[Tensor], group: dist.ProcessGroup, sequence_parallel: bool, in_place: bool = True
) -> Tensor:
    """Sums `summand` `[seq, batch, out]` over the ranks of the group and adds the biases. It ends a
    row-parallel layer.

    Returns `[seq, batch, out]`, or this rank's `[seq/T, ..]` under sequence parallelism.

    in_place: the sum may overwrite `summand`.
    """
    return _SumOverRanks.apply(summand, group, sequence_parallel, in_place, *biases)


def pipelined_row(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Runs a row-parallel layer under sequence parallelism: `[seq, batch, in/T]` to `[seq/T, batch, out]`.

    Its sum over ranks overlaps with the product, by torch's symmetric memory.
    """
    return _PipelinedRow.apply(x, weight, bias, group)
