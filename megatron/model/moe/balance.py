"""What keeps the experts of a stage equally busy: losses that join the backward pass, a bias without one, and
the numbers that are logged."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.model.moe.router import Router, RoutingSums
from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs


class RoutingCounts(NamedTuple):
    """What became of a step's tokens, over all ranks. load: `[blocks with experts, experts]` fp32, how many
    tokens each expert got, in units of the mean; metrics: means over the step, by name."""

    load: Tensor
    metrics: Mapping[str, Tensor]


def balancing_loss(chosen: Tensor, scores: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """E / k * sum over experts of (share of tokens that chose it) * (mean score), 1 where all are alike.

    Switch Transformer (arXiv 2101.03961, eq. 4 to 6) for k choices, as Megatron-LM's. chosen, scores:
    `[.., experts]`, sums over tokens; tokens: `[..]`. Returns `[..]`.
    """
    share, mean = chosen / tokens.unsqueeze(-1), scores / tokens.unsqueeze(-1)
    return chosen.shape[-1] / top_k * (share * mean).sum(-1)


def joint_balancing_loss(sums: Sequence[RoutingSums]) -> Tensor:
    """E * sum over experts of (share) * (mean score), both over the tokens of all layers together:
    `load_balancing_loss_func` of transformers, which no more divides by k."""
    chosen, scores = sum(each.chosen.sum(0) for each in sums), sum(each.scores.sum(0) for each in sums)
    tokens = sum(each.tokens.sum() for each in sums)
    assert isinstance(chosen, Tensor) and isinstance(scores, Tensor) and isinstance(tokens, Tensor)
    return len(chosen) * (chosen * scores).sum() / tokens.square().clamp(min=1.0)


class Balance:
    """Balances the experts of one stage, a step at a time.

    `begin` a step; `attach` the losses of each micro-batch to its hidden states; `end` the step. Where the
    loss is of all tokens of a step, these are counted before, by `count` and as many calls of `attach`.
    layers: NeoX's indices of all blocks with experts, those of other stages too.
    """

    def __init__(self, args: NeoXArgs, routers: Mapping[int, Router], device: torch.device) -> None:
        """routers: of this stage's blocks, by NeoX's index of the layer."""
        self._routers, self._scope, self._top_k = routers, args.moe_aux_loss_scope, args.moe_top_k
        self._aux, self._z = args.moe_aux_loss_coeff, args.moe_z_loss_coeff
        self._rate, self._experts = args.moe_router_bias_update_rate, args.moe_num_experts
        self.layers = [i + 2 for i in range(args.num_layers) if args.has_experts(i)]
        first = self.layers.index(next(iter(routers))) if routers else 0
        self._rows = slice(first, first + len(routers))  # a stage's blocks are neighbours
        # Of each block with experts: tokens by expert, tokens, entropy.
        self._sums = torch.zeros(len(self.layers), self._experts + 2, device=device)
        self._losses = torch.zeros(3, device=device)  # load-balancing loss, z-loss, and dropped choices
        self._scale, self._micro_batches = torch.ones((), device=device), 1
        self._of_step: tuple[Tensor, Tensor] | None = None
        self._counting = False

    def begin(self, scale: float | Tensor, micro_batches: int) -> None:
        """Begin a step. scale: by which the losses of a micro-batch enter its backward pass, such that the
        step's are means over its micro-batches, with the scale of the engine's own loss. micro_batches: of
        all data ranks."""
        self._micro_batches, self._of_step = micro_batches, None
        if isinstance(scale, Tensor):
            self._scale.copy_(scale)
        else:
            self._scale.fill_(scale)
        self._sums.zero_()
        self._losses.zero_()

    @property
    def needs_counts(self) -> bool:
        """Whether the step's choices must be known before its first backward pass."""
        return self._scope == "step" and (self._aux > 0.0 or self._z > 0.0)

    @contextmanager
    def count(self, groups: ParallelGroups) -> Iterator[None]:
        """Micro-batches that run in the context are counted alone: those of a whole step, of this rank."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        own = groups.sum(self._sums[self._rows].clone(), "data")
        self._of_step = own[:, : self._experts], own[:, self._experts].clamp(min=1.0)
        self._sums.zero_()

    def attach(self, x: Tensor, sums: Sequence[RoutingSums]) -> Tensor:
        """`x`, whose backward pass begins that of the losses too. sums: of each router of the stage, in one
        micro-batch."""
        if not sums or not (torch.is_grad_enabled() or self._counting):
            return x
        self._count(sums)
        if self._counting:
            return x
        aux, z = self._aux_loss(sums), self._z_loss(sums)
        with torch.no_grad():
            self._losses += torch.stack([aux, z, torch.stack([each.dropped for each in sums]).sum()])
        loss = self._aux * aux + self._z * z
        return _Attach.apply(x, loss, self._scale) if loss.requires_grad and x.requires_grad else x

    def _aux_loss(self, sums: Sequence[RoutingSums]) -> Tensor:
        """The load-balancing loss of a micro-batch, such that the step's is the mean over its
        micro-batches."""
        if self._scope == "transformers":
            return joint_balancing_loss(sums)
        chosen, scores = torch.stack([each.chosen for each in sums]), torch.stack([each.scores for each in sums])
        tokens = torch.stack([each.tokens for each in sums])
        if self._scope == "sequence":
            return balancing_loss(chosen, scores, tokens.clamp(min=1.0), self._top_k).mean(1).sum()
        if self._of_step is not None:
            of_all, all_tokens = self._of_step
            return self._micro_batches * balancing_loss(of_all, scores.sum(1), all_tokens, self._top_k).sum()
        return balancing_loss(chosen.sum(1), scores.sum(1), tokens.sum(1).clamp(min=1.0), self._top_k).sum()

    def _z_loss(self, sums: Sequence[RoutingSums]) -> Tensor:
        """The z-loss, over the same tokens."""
        z, tokens = torch.stack([each.z for each in sums]), torch.stack([each.tokens for each in sums])
        if self._scope == "sequence":
            return (z / tokens.clamp(min=1.0)).mean(1).sum()
        if self._of_step is not None:
            return self._micro_batches * (z.sum(1) / self._of_step[1]).sum()
        return (z.sum(1) / tokens.sum(1).clamp(min=1.0)).sum()

    @torch.no_grad()
    def _count(self, sums: Sequence[RoutingSums]) -> None:
        of_layers = [
            torch.cat([each.chosen.sum(0), torch.stack([each.tokens.sum(), each.entropy.sum()])]) for each in sums
        ]
        self._sums[self._rows] += torch.stack(of_layers)

    @torch.no_grad()
    def end(self, groups: ParallelGroups, left_out: Tensor) -> RoutingCounts:
        """End a step: what became of its tokens, and new biases. left_out: boolean `[]`, whether the step
        changes no weights. All ranks call it together."""
        together = groups.sum(torch.cat([self._sums.flatten(), self._losses]), "data")
        if self._rate:
            step = torch.where(left_out, 0.0, self._rate)
            own = together[: self._sums.numel()].view_as(self._sums)[self._rows, : self._experts]
            for router, tokens in zip(self._routers.values(), own, strict=True):
                assert router.expert_bias is not None
                if router.layer.weight.requires_grad:  # what is not trained stays as it is
                    router.expert_bias.add_(step * (tokens.mean() - tokens).sign())
        together = groups.sum(together, "pipe")
        chosen, tokens, entropy = together[: self._sums.numel()].view_as(self._sums).split([self._experts, 1, 1], 1)
        aux, z, dropped = together[self._sums.numel() :]
        load = chosen / chosen.mean(1, keepdim=True).clamp(min=1e-9)
        metrics = {
            "moe_aux_loss": aux / self._micro_batches,
            "moe_z_loss": z / self._micro_batches,
            "moe_entropy": (entropy / tokens.clamp(min=1.0)).mean(),
            "moe_dropped": dropped / chosen.sum().clamp(min=1.0),
            "moe_max_load": load.max(),
            "moe_idle_experts": (chosen == 0).sum().float(),
        }
        return RoutingCounts(load, metrics)


class _Attach(torch.autograd.Function):
    """`x`; backwards, the gradient of `loss` is `scale` (Megatron-LM's MoEAuxLossAutoScaler)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return grad, scale.clone(), None
