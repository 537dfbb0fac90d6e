"""Implements the Muon optimizer, which updates the matrices of blocks by orthogonalized momentum."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu import ParallelGroups, ParamSpec, shard, unshard
from megatron.training.native.shards import Shard, Weights
from megatron.training.optimizers import scaled_gradients, update_factor

_COEFFICIENTS, _EPSILON = (3.4445, -4.7750, 2.0315), 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Returns approximately U V^T for a matrix with the SVD U S V^T, by Newton-Schulz iterations in bf16.

    This is Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon). The operations, and so the
    resulting bits, are those of torch.optim.Muon. matrix: `[rows, columns]`, or several matrices `[number,
    rows, columns]`. steps: number of iterations.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16().mT if tall else matrix.bfloat16()
    is_single = matrix.dim() == 2
    product, norm = (torch.addmm, x.norm()) if is_single else (torch.baddbmm, x.norm(dim=(1, 2), keepdim=True))
    x = x / norm.clamp(min=_EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def rate_factor(shape: Sequence[int], adjust_lr_fn: str) -> float:
    """Returns the factor by which Muon multiplies the learning rate of a matrix of this shape.

    adjust_lr_fn: "original" gives sqrt(max(1, rows / columns)). "match_rms_adamw" gives
    0.2 sqrt(max(rows, columns)), which makes updates as large as AdamW's (arXiv 2502.16982).
    """
    rows, columns = shape
    if adjust_lr_fn == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def orthogonal_update(
    momentum: Tensor, spec: ParamSpec, steps: int, adjust_lr_fn: str, per_head: bool = False
) -> Tensor:
    """Returns Muon's fp32 update of a full weight `[rows, columns]`, multiplied by `rate_factor`.

    Each projection that the weight holds, such as query, key and value, is orthogonalized separately.
    per_head: so is each head's part of it.
    """
    columns = momentum.shape[1]
    is_split = per_head and bool(spec.head_rows)
    pattern = spec.head_rows if is_split else spec.projections or (momentum.shape[0],)
    update = torch.empty_like(momentum)
    grouped = momentum.view(-1, sum(pattern), columns).split(pattern, 1)
    for source, target in zip(grouped, update.view(-1, sum(pattern), columns).split(pattern, 1), strict=True):
        matrix = source if is_split else source.reshape(-1, columns)
        shape = matrix.shape[-2:]
        factor = rate_factor(shape[::-1] if spec.transposed else shape, adjust_lr_fn)
        target.copy_((orthogonalize(matrix, steps).float() * factor).view(target.shape))
    return update


def is_block_matrix(piece: Shard, blocks: frozenset[int]) -> bool:
    """Returns whether Muon updates this weight: whether it is a matrix of a single block, and not a router.

    AdamW updates all other weights: embeddings, heads, norms, biases, routers, and tables that blocks share.
    """
    spec = piece.spec
    matrix = len(spec.shape) == 2 and spec.weight_decay and not spec.shared
    return piece.layer in blocks and matrix and not spec.name.startswith(("mlp.router.", "mlp.shared_expert_gate."))


class Muon(torch.optim.Optimizer):
    """An optimizer that applies Muon to `matrices`, and fused AdamW to the parameter groups `adamw_groups`.

    In each step the data ranks divide the matrices among themselves. A data rank gathers and orthogonalizes
    one full matrix at a time, and each of its tensor ranks does the same work. As in torch's fused
    optimizers, `grad_scale` divides gradients, and `found_inf` leaves weights and state unchanged.
    params: the key `optimizer.params`.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        weights: Weights,
        matrices: Sequence[Shard],
        adamw_groups: list[dict[str, Any]],
        groups: ParallelGroups,
        params: dict[str, Any],
        weight_decay: float,
    ) -> None:
        self._weights, self._matrices, self._groups, self._params = weights, matrices, groups, params
        muon_group = {"name": "muon", "params": [m.local for m in matrices], "weight_decay": weight_decay}
        super().__init__([muon_group, *adamw_groups], {"lr": params["lr"]})
        self._adamw: torch.optim.Optimizer | None = None
        if adamw_groups:
            self._adamw = torch.optim.AdamW(
                self.param_groups[1:], lr=params["lr"], betas=params["betas"], eps=params["eps"], fused=True
            )
        if params["adamw_lr"] is not None:
            for group in self.param_groups[1:]:
                group["lr_ratio"] = params["adamw_lr"] / params["lr"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if self._adamw is not None:
            self._adamw.state = self.state
            for name in ("grad_scale", "found_inf"):
                setattr(self._adamw, name, getattr(self, name, None))
            self._adamw.step()
        moving = [matrix for matrix in self._matrices if matrix.local.grad is not None]
        size = self._weights.workers[1]
        for start in range(0, len(moving), size):  # one matrix per worker, so that no rank holds two full ones
            self._update_matrices(moving[start : start + size])

    def _update_matrices(self, matrices: Sequence[Shard]) -> None:
        """Update these matrices, at most as many as there are workers: each worker orthogonalizes one of
        them."""
        rank, keep, group = self._weights.workers[0], update_factor(self), self.param_groups[0]
        wholes = [self._weights.gather(m, self._momentum(m), worker) for worker, m in enumerate(matrices)]
        updates = [self._update(m, wholes[i]) if i == rank else None for i, m in enumerate(matrices)]
        for worker, (matrix, update) in enumerate(zip(matrices, updates, strict=True)):
            part = self._weights.scatter(matrix, update, worker)
            matrix.local.mul_(1.0 - keep * (group["lr"] * group["weight_decay"]))
            matrix.local.sub_(part * (keep * group["lr"]))

    def _momentum(self, matrix: Shard) -> Tensor:
        """Update the momentum of a matrix, and return this rank's elements of it, which are to be
        orthogonalized."""
        grad, decay = matrix.local.grad, self._params["momentum"]
        assert grad is not None
        state = self.state[matrix.local]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix.local)
        buffer = state["momentum_buffer"]
        (grad,) = scaled_gradients(self, [grad], [buffer])
        buffer.lerp_(grad, 1.0 - decay)
        return grad.lerp(buffer, decay) if self._params["nesterov"] else buffer

    def _update(self, matrix: Shard, part: Tensor | None) -> Tensor:
        """Returns this tensor rank's part of a matrix's update. part: this tensor rank's part of its
        momentum."""
        assert part is not None
        group, size = self._groups.group("tensor"), self._groups.size("tensor")
        parts = [part.contiguous()]
        if group is not None and matrix.spec.axis is not None:
            parts = [torch.empty_like(parts[0]) for _ in range(size)]
            dist.all_gather(parts, part.contiguous(), group=group)
        full = unshard(parts, matrix.spec)
        keys = ("ns_steps", "adjust_lr_fn", "per_head")
        update = orthogonal_update(full, matrix.spec, *(self._params[key] for key in keys))
        return shard(update, matrix.spec, self._groups.rank("tensor"), size)
