"""Column- and row-parallel linear layers with their gradients.

A column-parallel layer is one autograd function. A row-parallel layer is a product, then a function that sums
over ranks; with async tensor parallelism the two are one function. So communication between tensor ranks
overlaps with products that do not need it (Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv
2205.05198). Shapes are `[seq, batch, features]`, `[seq/T, ..]` where the sequence is split over T ranks.
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
from megatron.mpu.products import PlainProduct, Product, bias_gradient, biased_output

# -- products in pieces that overlap with communication between tensor ranks of one machine ------------------
# They use torch's symmetric memory (`torch.ops.symm_mem`, CUDA alone): each rank reads the others' memory
# over NVLink. The sequence is the first dimension, full or sharded.


def gather_product(shard: Tensor, matrix: Tensor, group: dist.ProcessGroup, keep: bool) -> tuple[Tensor | None, Tensor]:
    """Gathers `shard` `[seq/T, batch, in]` and multiplies it by `matrix` `[in, out]`, in overlapping pieces.

    Returns the gathered tensor, or None unless `keep`, and the product.
    """
    fused = torch.ops.symm_mem.fused_all_gather_matmul
    gathered, products = fused(shard.contiguous(), [matrix], 0, group.group_name, return_A=keep)
    return gathered, products[0]


def product_scatter(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x `[seq, batch, in]` times `matrix` `[in, out]`, summed over ranks, this rank's `[seq/T, batch, out]`.
    Pieces are sent while others are computed."""
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, group.group_name)


# -- layers --------------------------------------------------------------------------------------------------


class _ColumnParallel(torch.autograd.Function):
    """y = x W^T + b, W split along the output.

    It saves its input x. Under sequence parallelism that is this rank's part, which backward gathers again
    while it computes the input gradient. The input gradient is summed over ranks during the product of the
    weight gradient.

    pipelined: gather and sum run in pieces, overlapped with their products.
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
            weight_grad = ctx.product.weight_gradient(grad, finish(gathered) if ctx.sequence_parallel else x)
        bias_grad = bias_gradient(grad) if needs_bias else None
        if needs_x and not ctx.pipelined:
            x_grad = finish(summed)
        return x_grad, weight_grad, bias_grad, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' summands and the biases, which are full on every rank.

    Under sequence parallelism backward gathers the gradient once, for both products of the layer below and
    for the biases. It is a function separate from the product, because recomputation ends before the last
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
    """y = x W^T + b, W split along the input, y `[seq/T, ..]`: summed, and its gradient gathered, in
    pieces."""

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
    """y = x W^T + b for this rank's rows of W and b: `[seq, batch, in]` to `[seq, batch, out/T]`.

    Under sequence parallelism the input is `[seq/T, ..]`. pipelined: by symmetric memory, which supports only
    PlainProduct.
    """
    return _ColumnParallel.apply(x, weight, bias, product, group, sequence_parallel, pipelined)


def sum_over_ranks(
    summand: Tensor, biases: Sequence[Tensor], group: dist.ProcessGroup, sequence_parallel: bool, in_place: bool = True
) -> Tensor:
    """The sum over ranks of `summand` `[seq, batch, out]`, plus the biases; `[seq/T, ..]` under sequence
    parallelism. It ends row-parallel layers.

    in_place: it may overwrite `summand`.
    """
    return _SumOverRanks.apply(summand, group, sequence_parallel, in_place, *biases)


def pipelined_row(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """A row-parallel layer under sequence parallelism, `[seq, batch, in/T]` to `[seq/T, batch, out]`, by
    symmetric memory."""
    return _PipelinedRow.apply(x, weight, bias, group)
