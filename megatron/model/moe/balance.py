"""Load balancing of a stage's experts: auxiliary losses, an untrained bias of the router, and metrics."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.model.moe.router import Router, RoutingSums
from megatron.mpu import ContextRank, ParallelGroups
from megatron.neox_arguments import ModelArgs


class RoutingCounts(NamedTuple):
    """The numbers of tokens that experts received in a step, over all ranks.

    load: `[blocks with experts, experts]` fp32, number of tokens of each expert, divided by the block's mean.
    metrics: means over the step, by metric name.
    """

    load: Tensor
    metrics: Mapping[str, Tensor]


def balancing_loss(chosen: Tensor, scores: Tensor, tokens: Tensor, top_k: int) -> Tensor:
    """Returns E / k * sum over experts of (share of tokens that chose the expert) * (its mean score); 1 if
    balanced.

    It is the loss of Switch Transformer (arXiv 2101.03961, eq. 4 to 6) for k choices of E experts, as in
    Megatron-LM.

    chosen, scores: `[.., experts]`, number of tokens that chose each expert, and sums of scores over tokens.
    tokens: `[..]`, number of tokens. Returns `[..]`.
    """
    share, mean = chosen / tokens.unsqueeze(-1), scores / tokens.unsqueeze(-1)
    return chosen.shape[-1] / top_k * (share * mean).sum(-1)


def joint_balancing_loss(sums: Sequence[RoutingSums]) -> Tensor:
    """Returns E * sum over experts of (share of tokens that chose the expert) * (its mean score), over all
    layers together.

    E is the number of experts. It is `load_balancing_loss_func` of transformers, which does not divide by k
    either.

    sums: of each layer.
    """
    chosen, scores = (
        sum(layer_sums.chosen.sum(0) for layer_sums in sums),
        sum(layer_sums.scores.sum(0) for layer_sums in sums),
    )
    tokens = sum(layer_sums.tokens.sum() for layer_sums in sums)
    assert isinstance(chosen, Tensor) and isinstance(scores, Tensor) and isinstance(tokens, Tensor)
    return len(chosen) * (chosen * scores).sum() / tokens.square().clamp(min=1.0)


class Balance:
    """Balances the load of the experts of one stage, step by step.

    Call `begin`; for each micro-batch `attach`, which adds the losses to its hidden states; then `end`. If
    `needs_counts`, first run all micro-batches of the step within `count`.

    layers: NeoX indices of all blocks with experts, including other stages' blocks.
    """

    def __init__(self, args: ModelArgs, routers: Mapping[int, Router], device: torch.device) -> None:
        """routers: the routers of this stage's blocks, by NeoX layer index."""
        self._routers, self._scope, self._top_k = routers, args.moe_aux_loss_scope, args.moe_top_k
        self._aux, self._z = args.moe_aux_loss_coeff, args.moe_z_loss_coeff
        self._rate, self._experts = args.moe_router_bias_update_rate, args.moe_num_experts
        self.layers = [i + 2 for i in range(args.num_layers) if args.has_experts(i)]
        if args.has_experts(args.num_layers - 1):  # so have the blocks of multi-token prediction
            self.layers += [args.num_layers + 5 + i for i in range(args.mtp_num_layers or 0)]
        # For each block with experts: number of tokens of each expert, number of tokens, sum of entropies.
        self._sums = torch.zeros(len(self.layers), self._experts + 2, device=device)
        self._losses = torch.zeros(3, device=device)  # load-balancing loss, z-loss, and dropped choices
        self._scale, self._micro_batches = torch.ones((), device=device), 1
        self._step_counts: tuple[Tensor, Tensor] | None = None
        self._counting = False

    def begin(self, scale: float | Tensor, micro_batches: int) -> None:
        """Begins a step: resets the step's sums.

        scale: the gradient that each micro-batch's losses get. It averages them over the step's
            micro-batches, and includes the engine's loss scale.
        micro_batches: number of micro-batches of the step on all data ranks.
        """
        self._micro_batches, self._step_counts = micro_batches, None
        if isinstance(scale, Tensor):
            self._scale.copy_(scale)
        else:
            self._scale.fill_(scale)
        self._sums.zero_()
        self._losses.zero_()

    @property
    def needs_counts(self) -> bool:
        """Whether all choices of experts of a step must be counted (`count`) before its first backward
        pass."""
        return self._scope == "step" and (self._aux > 0.0 or self._z > 0.0)

    @contextmanager
    def count(self, groups: ParallelGroups) -> Iterator[None]:
        """Within the context, micro-batches only count their choices of experts; no losses are attached.

        Run all micro-batches of this rank's step in it. At its end, the counts are summed over data ranks.
        """
        self._counting = True
        try:
            yield
        finally:
            self._counting = False
        tokens_by_expert = groups.sum(self._sums.clone(), "data")
        self._step_counts = tokens_by_expert[:, : self._experts], tokens_by_expert[:, self._experts].clamp(min=1.0)
        self._sums.zero_()

    def attach(
        self, x: Tensor, sums: Sequence[RoutingSums], layers: Sequence[int], context: ContextRank | None = None
    ) -> Tensor:
        """Returns hidden states `x`. Their backward pass also runs the backward pass of the load-balancing
        losses.

        sums: the `RoutingSums` of each router in blocks that have just run, for one micro-batch. layers: NeoX
            indices of these blocks. context: the part of the rows that this rank has routed; None: all.
        """
        if not sums or not (torch.is_grad_enabled() or self._counting):
            return x
        sums = sums if context is None else _over_context(sums, context)
        first_row = next(self.layers.index(layer) for layer in layers if layer in self._routers)
        rows = slice(first_row, first_row + len(sums))  # the blocks that have run are consecutive
        self._count(sums, rows)
        if self._counting:
            return x
        stacked = RoutingSums(*(torch.stack(parts) for parts in zip(*sums, strict=True)))
        aux = joint_balancing_loss(sums) if self._scope == "transformers" else self._aux_loss(stacked, rows)
        z = self._z_loss(stacked, rows)
        with torch.no_grad():
            self._losses += torch.stack([aux, z, stacked.dropped.sum()])
        loss = self._aux * aux + self._z * z
        return _Attach.apply(x, loss, self._scale) if loss.requires_grad and x.requires_grad else x

    def _aux_loss(self, sums: RoutingSums, rows: slice) -> Tensor:
        """Returns a micro-batch's load-balancing loss. The step's loss is the mean over its micro-batches.

        sums: of several routers, stacked along a new first dimension. rows: of these routers in `_sums`.
        """
        chosen, scores, tokens = sums.chosen, sums.scores, sums.tokens
        if self._scope == "sequence":
            return balancing_loss(chosen, scores, tokens.clamp(min=1.0), self._top_k).mean(1).sum()
        if self._step_counts is not None:
            all_chosen, all_tokens = (counts[rows] for counts in self._step_counts)
            return self._micro_batches * balancing_loss(all_chosen, scores.sum(1), all_tokens, self._top_k).sum()
        return balancing_loss(chosen.sum(1), scores.sum(1), tokens.sum(1).clamp(min=1.0), self._top_k).sum()

    def _z_loss(self, sums: RoutingSums, rows: slice) -> Tensor:
        """Returns a micro-batch's z-loss, averaged over the same tokens as the load-balancing loss."""
        z, tokens = sums.z, sums.tokens
        if self._scope == "sequence":
            return (z / tokens.clamp(min=1.0)).mean(1).sum()
        if self._step_counts is not None:
            return self._micro_batches * (z.sum(1) / self._step_counts[1][rows]).sum()
        return (z.sum(1) / tokens.sum(1).clamp(min=1.0)).sum()

    @torch.no_grad()
    def _count(self, sums: Sequence[RoutingSums], rows: slice) -> None:
        counts = [
            torch.cat([layer_sums.chosen.sum(0), torch.stack([layer_sums.tokens.sum(), layer_sums.entropy.sum()])])
            for layer_sums in sums
        ]
        self._sums[rows] += torch.stack(counts)

    @torch.no_grad()
    def end(self, groups: ParallelGroups, left_out: Tensor) -> RoutingCounts:
        """Ends a step: updates the routers' biases, and returns how many tokens each expert received. All
        ranks call it together.

        left_out: boolean `[]`, whether the step is skipped; the biases then stay as they are.
        """
        totals = groups.sum(torch.cat([self._sums.flatten(), self._losses]), "data")
        if self._rate:
            step = torch.where(left_out, 0.0, self._rate)
            tokens_by_expert = totals[: self._sums.numel()].view_as(self._sums)[:, : self._experts]
            for layer, router in self._routers.items():
                tokens = tokens_by_expert[self.layers.index(layer)]
                assert router.expert_bias is not None
                if router.layer.weight.requires_grad:  # a frozen router keeps its bias
                    router.expert_bias.add_(step * (tokens.mean() - tokens).sign())
        totals = groups.sum(totals, "pipe")
        chosen, tokens, entropy = totals[: self._sums.numel()].view_as(self._sums).split([self._experts, 1, 1], 1)
        aux, z, dropped = totals[self._sums.numel() :]
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


def _over_context(sums: Sequence[RoutingSums], context: ContextRank) -> list[RoutingSums]:
    """Returns the sums over full rows, of which each context rank has routed a part."""
    values = [value for layer_sums in sums for value in layer_sums]
    parts = context.total(torch.cat([value.flatten() for value in values])).split([value.numel() for value in values])
    full = iter(part.view_as(value) for part, value in zip(parts, values, strict=True))
    return [RoutingSums(*(next(full) for _ in layer_sums)) for layer_sums in sums]


class _Attach(torch.autograd.Function):
    """Returns `x`; in the backward pass, `loss` gets the gradient `scale`.

    It works like Megatron-LM's MoEAuxLossAutoScaler.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return grad, scale.clone(), None
