"""Column- and row-parallel linear layers with their gradients, each one autograd function, so that what
travels between tensor ranks runs under products that do not need it (Megatron-LM, arXiv 1909.08053; sequence
parallelism, arXiv 2205.05198).

Shapes are `[seq, batch, features]`, `[seq/T, ..]` where the sequence is split over T ranks.
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
from megatron.mpu.symmetric_memory import gather_product, product_scatter


class _ColumnParallel(torch.autograd.Function):
    """y = x W^T + b, W cut along the output.

    For backward it keeps x as it came: under sequence parallelism this rank's part, which is gathered again
    under the input gradient's product. That gradient is summed under the weight gradient's product.
    pipelined: forward's gather and the sum run in pieces with their own products, by `symmetric_memory.py`.
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
        of_x = of_weight = None
        if needs_weight and ctx.sequence_parallel:
            gathered = start_all_gather_in_backward(x, grad, ctx.group)
        if needs_x and ctx.pipelined:
            of_x = product_scatter(grad, weight, ctx.group)
        elif needs_x:
            start = start_reduce_scatter if ctx.sequence_parallel else start_all_reduce
            summed = start(ctx.product.input_gradient(grad, weight), ctx.group)
        if needs_weight:
            of_weight = ctx.product.weight_gradient(grad, finish(gathered) if ctx.sequence_parallel else x)
        of_bias = bias_gradient(grad) if needs_bias else None
        if needs_x and not ctx.pipelined:
            of_x = finish(summed)
        return of_x, of_weight, of_bias, None, None, None, None


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' summands and the biases, which are whole on every rank.

    Under sequence parallelism backward gathers the gradient once, for both products of the layer below and
    for the biases. A function apart from the product: recomputation ends before the last product of a block.
    """

    @staticmethod
    def forward(
        ctx: Any,
        summand: Tensor,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
        in_place: bool,
        *biases: Tensor,
    ) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        start = start_reduce_scatter if sequence_parallel else start_all_reduce
        # Detached: what autograd knows as a view must not be written to.
        own = summand.detach() if in_place or sequence_parallel or torch.compiler.is_compiling() else summand.clone()
        total = finish(start(own, group, wait=True))
        for bias in biases:
            total = total + bias if torch.compiler.is_compiling() else total.add_(bias)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        whole = all_gather(grad, ctx.group) if ctx.sequence_parallel else grad
        of_bias = bias_gradient(whole) if any(ctx.needs_input_grad[4:]) else None
        return whole, None, None, None, *(of_bias if needed else None for needed in ctx.needs_input_grad[4:])


class _PipelinedRow(torch.autograd.Function):
    """y = x W^T + b, W cut along the input, y `[seq/T, ..]`: summed, and its gradient gathered, in pieces."""

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
        whole = of_x = of_weight = of_bias = None
        if needs_x:
            whole, of_x = gather_product(grad, weight, ctx.group, keep=needs_weight or needs_bias)
        else:
            whole = all_gather(grad, ctx.group)
        if needs_weight and whole is not None:
            of_weight = PlainProduct().weight_gradient(whole, x)
        if needs_bias and whole is not None:
            of_bias = bias_gradient(whole)
        return of_x, of_weight, of_bias, None


def column_parallel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: Product,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    pipelined: bool = False,
) -> Tensor:
    """y = x W^T + b for this rank's rows of W and b: `[seq, batch, in]` (`[seq/T, ..]` under sequence
    parallelism) to `[seq, batch, out/T]`. pipelined: by symmetric memory, which multiplies plainly."""
    return _ColumnParallel.apply(x, weight, bias, product, group, sequence_parallel, pipelined)


def sum_over_ranks(
    summand: Tensor,
    biases: Sequence[Tensor],
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    in_place: bool = True,
) -> Tensor:
    """What ends row-parallel layers: the sum over ranks of `summand` `[seq, batch, out]`, and of the biases;
    `[seq/T, ..]` under sequence parallelism. in_place: it may overwrite `summand`."""
    return _SumOverRanks.apply(summand, group, sequence_parallel, in_place, *biases)


def pipelined_row(x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """A row-parallel layer under sequence parallelism, `[seq, batch, in/T]` to `[seq/T, batch, out]`, by
    symmetric memory."""
    return _PipelinedRow.apply(x, weight, bias, group)
