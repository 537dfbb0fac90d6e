"""Delayed scaling: FP8 scales come from the largest magnitudes of earlier steps, as in Transformer-Engine's
`DelayedScaling` (transformer_engine/common/recipe)."""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.fp8.casting import OPERANDS, Formats, Operand, Scaled, encode_scale, rounded
from megatron.mpu.fp8.products import TensorwiseProduct
from megatron.mpu.groups import ParallelGroups

State = dict[str, Tensor]
"""The state of one linear layer's products: `scale` `[3]` and `history` `[3, length]`, newest step first. The
3 rows are those of `OPERANDS`."""


class DelayedProduct(TensorwiseProduct):
    """The FP8 products of a linear layer, which scale an operand by its largest magnitudes of earlier steps.

    amax: for each operand, its largest magnitude in this step so far, `[]` fp32; recorded in the backward
        pass.
    scale: factor of each operand. While it is 0, at the start, the current magnitude is used, as in
        `TensorwiseProduct`.
    margin: scales are divided by 2^margin.
    """

    def __init__(self, formats: Formats, fp8_weight_gradient: bool, margin: int, device: torch.device) -> None:
        super().__init__(formats, fp8_weight_gradient)
        self.margin = margin
        self.amax = {operand: torch.zeros((), device=device) for operand in OPERANDS}
        self.scale = {operand: torch.zeros((), device=device) for operand in OPERANDS}

    def cast(self, matrix: Tensor, operand: Operand, transposed: bool = False) -> Scaled:
        dtype, amax, known_scale = self.formats.dtype_of(operand), matrix.abs().amax().float(), self.scale[operand]
        scale = torch.where(known_scale > 0, known_scale, encode_scale(amax, dtype) / 2**self.margin)
        # Without this an infinity would saturate to a finite value unnoticed.
        decode = torch.where(amax.isfinite(), scale.reciprocal(), torch.nan)
        return Scaled(rounded(matrix.t() if transposed else matrix, scale, dtype), decode)

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        self._note(weight, "weight")
        self._note(grad, "gradient")
        return super().input_gradient(grad, weight)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        self._note(x, "input")
        self._note(grad, "gradient")
        return super().weight_gradient(grad, x)

    def _note(self, tensor: Tensor, operand: Operand) -> None:
        self.amax[operand].copy_(torch.maximum(self.amax[operand], tensor.abs().amax().float()))


class DelayedScaling:
    """All FP8 products of a run with delayed scaling, by name, and the history of their largest magnitudes.

    length: number of steps in the history.
    algorithm: "max": a scale follows from the largest magnitude of the history; "most_recent": from the
        newest one.
    margin: scales are divided by 2^margin.
    make: creates the product of one linear layer.
    """

    def __init__(
        self,
        groups: ParallelGroups,
        formats: Formats,
        fp8_weight_gradient: bool,
        length: int,
        algorithm: Literal["max", "most_recent"],
        margin: int,
        make: Callable[[Formats, bool, int, torch.device], DelayedProduct] = DelayedProduct,
    ) -> None:
        self.make = make
        self.groups, self.formats, self.fp8_weight_gradient = groups, formats, fp8_weight_gradient
        self.length, self.algorithm, self.margin = length, algorithm, margin
        self.products: dict[str, DelayedProduct] = {}
        self.history = torch.zeros(0, length, device=groups.device)  # three rows per product

    def add(self, name: str) -> DelayedProduct:
        """Creates and returns the product of a linear layer with this name."""
        product = self.make(self.formats, self.fp8_weight_gradient, self.margin, self.groups.device)
        self.products[name] = product
        self.history = torch.cat([self.history, self.history.new_zeros(len(OPERANDS), self.length)])
        return product

    @torch.no_grad()
    def end_step(self, left_out: Tensor) -> None:
        """Ends an optimizer step: takes the largest magnitudes over all ranks that share layers, and computes
        the next scales.

        A magnitude that is missing or not finite counts as 0. A scale stays unchanged if all magnitudes that
        it would follow from are 0.

        left_out: boolean `[]`, whether the step is skipped; then scales and history stay as they are.
        """
        noted = [p.amax[operand] for p in self.products.values() for operand in OPERANDS]
        scales = [p.scale[operand] for p in self.products.values() for operand in OPERANDS]
        if not noted:
            return
        newest = torch.stack(noted)
        newest = torch.where(newest.isfinite(), newest, 0.0)
        for axis in ("data", "context", "tensor"):
            if self.groups.group(axis) is not None:
                dist.all_reduce(newest, dist.ReduceOp.MAX, group=self.groups.group(axis))
        history = torch.cat([newest.unsqueeze(1), self.history[:, :-1]], dim=1)
        self.history = torch.where(left_out, self.history, history)
        amax = history.amax(dim=1) if self.algorithm == "max" else newest
        computed = torch.stack(
            [encode_scale(amax[i::3], self.formats.dtype_of(o)) for i, o in enumerate(OPERANDS)], dim=1
        )
        new = torch.where((amax > 0) & ~left_out, computed.flatten() / 2**self.margin, torch.stack(scales))
        torch._foreach_copy_(scales, list(new.unbind()))
        torch._foreach_zero_(noted)

    def state(self) -> dict[str, State]:
        """Returns the scales and history for a checkpoint, on the CPU, by product name; equal on all data and
        tensor ranks."""
        history = self.history.cpu().unflatten(0, (-1, len(OPERANDS))).unbind() if self.products else ()
        scales = [torch.stack([p.scale[o] for o in OPERANDS]).cpu() for p in self.products.values()]
        return {
            name: {"scale": scale, "history": rows.clone()}
            for name, scale, rows in zip(self.products, scales, history, strict=True)
        }

    @torch.no_grad()
    def load(self, state: Mapping[str, State]) -> None:
        """Restores scales and history from a `state` that was saved. Products that it does not name stay
        unchanged.

        A saved history that is longer than `length` is cut to its newest steps.
        """
        for i, (name, product) in enumerate(self.products.items()):
            if name not in state:
                continue
            rows = state[name]["history"][:, : self.length]
            self.history[3 * i : 3 * i + 3, : rows.shape[1]].copy_(rows)
            for operand, scale in zip(OPERANDS, state[name]["scale"], strict=True):
                product.scale[operand].copy_(scale)
