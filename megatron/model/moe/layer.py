"""The mixture of experts as the feed-forward of a block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.mlp import MLP
from megatron.model.moe.dispatch import combine, limit, run_local, run_on_ranks
from megatron.model.moe.experts import Experts
from megatron.model.moe.router import Router, Routing, RoutingSums
from megatron.model.specs import MoESpec, moe_spec
from megatron.mpu import (
    ParallelGroups,
    ParamSpec,
    PartialSum,
    all_gather,
    allocate,
    copy_to_tensor,
    gather_from_sequence,
    with_prefix,
)


class Dispatcher(nn.Module):
    """Brings tokens to their experts, and adds up the outputs of each token's. `mlp` are the experts, so that
    checkpoints have GPT-NeoX's names for them.

    Tensor ranks that have whole experts leave out the tokens of others; their outputs are summands, as those
    of slices are.
    """

    def __init__(self, spec: MoESpec, groups: ParallelGroups) -> None:
        super().__init__()
        self.mlp = Experts(spec, groups)
        self.total, self.capacity_factor = spec.router.experts, spec.capacity_factor
        self.expert_group = groups.group("expert")
        self.number = self.mlp.number * groups.size("expert")  # of this tensor rank's experts, on all its replicas
        self.first = 0 if spec.cut else groups.rank("tensor") * self.number

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
        """`[tokens, hidden]`, with the choice of each token `[tokens, top_k]`, to this tensor rank's summand
        of the output, and the number of choices that were dropped. counted: `[tokens]` boolean, tokens that
        go to experts, the others are padding; None: all."""
        dropped = torch.zeros((), device=x.device)
        if counted is not None:
            experts = torch.where(counted.unsqueeze(1), experts, self.total)
        if self.capacity_factor is not None:
            kept = limit(experts, weights, self.total, self.capacity_factor)
            dropped, experts = (kept != experts).sum().float(), kept
        all_here = self.number == self.total and self.capacity_factor is None and counted is None
        if not all_here:
            own = (experts >= self.first) & (experts < self.first + self.number)
            experts = torch.where(own, experts - self.first, self.number)
        if self.expert_group is None:
            rows, plan = run_local(x, experts, self.number, self.mlp, all_here)
        else:
            rows, plan = run_on_ranks(x, experts, self.number, self.mlp, self.expert_group)
        return combine(rows, weights, plan), dropped


class _SharedGate(nn.Module):
    """The sigmoid of one number a token, `[.., hidden]` to `[.., 1]`; the same on every tensor rank."""

    weight: nn.Parameter

    def __init__(self, hidden: int, groups: ParallelGroups, sequence_parallel: bool) -> None:
        super().__init__()
        self.group = groups.group("tensor") if sequence_parallel else None
        allocate(self, self.params(hidden), groups)

    @staticmethod
    def params(hidden: int) -> tuple[ParamSpec, ...]:
        return (ParamSpec("weight", (1, hidden), init="input", weight_decay=True),)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.linear(x, copy_to_tensor(self.weight, self.group)))


class _Projection(nn.Module):
    """A linear without bias before or behind the experts, `[.., in]` to `[.., out]`; the same on every tensor
    rank. cut: what a rank gives it is a part of the sequence, or a summand, so that gradients are summed."""

    weight: nn.Parameter

    def __init__(self, params: tuple[ParamSpec, ...], groups: ParallelGroups, cut: bool) -> None:
        super().__init__()
        self.group = groups.group("tensor") if cut else None
        allocate(self, params, groups)

    @staticmethod
    def params(rows: int, columns: int, init: str) -> tuple[ParamSpec, ...]:
        return (ParamSpec("weight", (rows, columns), init=init, weight_decay=True),)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, copy_to_tensor(self.weight, self.group))


class MoE(nn.Module):
    """sum over a token's experts of score * expert(x), and the shared expert's output; `[seq, batch,
    hidden]`. With a latent: up(sum over experts of score * expert(down x)), and that of the shared one."""

    Spec = MoESpec
    spec = staticmethod(moe_spec)

    def __init__(self, spec: MoESpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = groups.group("tensor"), sequence_parallel
        self.router = Router(spec.router, groups, sequence_parallel)
        self.experts = Dispatcher(spec, groups)
        self.shared_expert = MLP(spec.shared, groups, sequence_parallel) if spec.shared is not None else None
        hidden = spec.router.hidden
        self.shared_expert_gate = _SharedGate(hidden, groups, sequence_parallel) if spec.shared_gate else None
        self.latent_down = self.latent_up = None
        if spec.latent:
            down, up = self._latent(spec)
            self.latent_down = _Projection(down, groups, sequence_parallel)
            self.latent_up = _Projection(up, groups, True)
        self.output = PartialSum(groups, sequence_parallel)

    @staticmethod
    def _latent(spec: MoESpec) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
        hidden, latent = spec.router.hidden, spec.expert.hidden
        return _Projection.params(latent, hidden, "input"), _Projection.params(hidden, latent, "output")

    @classmethod
    def params(cls, spec: MoESpec) -> tuple[ParamSpec, ...]:
        """The parameters that the constructor allocates."""
        shared = MLP.params(spec.shared) if spec.shared is not None else ()
        gate = _SharedGate.params(spec.router.hidden) if spec.shared_gate else ()
        down, up = cls._latent(spec) if spec.latent else ((), ())
        return (
            *with_prefix("router", Router.params(spec.router)),
            *with_prefix("latent_down", down),
            *with_prefix("latent_up", up),
            *with_prefix("experts.mlp", Experts.params(spec)),
            *with_prefix("shared_expert", shared),
            *with_prefix("shared_expert_gate", gate),
        )

    def core(
        self, x: Tensor, seed: Tensor | None = None, counted: Tensor | None = None
    ) -> tuple[Tensor, RoutingSums | None]:
        """`[seq, batch, hidden]` (`[seq/T, ..]` under sequence parallelism) to this tensor rank's summand of
        the output, of all tokens, and in training what balancing needs. seed: of the router's jitter.
        counted: as of `Router`."""
        routing, sums = self.router(x, counted, seed)
        inner = x if self.latent_down is None else self.latent_down(x)
        whole, experts, weights = self._of_all(inner, routing)
        tokens = None if counted is None else counted.flatten()
        out, dropped = self.experts(whole.flatten(0, 1), experts.flatten(0, 1), weights.flatten(0, 1), tokens)
        out = out.view(whole.shape)
        if self.latent_up is not None:  # of a summand: the sum of these is that of the sum
            out = self.latent_up(out)
        if self.shared_expert is not None:
            inner, _ = self.shared_expert.core(x)
            shared = self.shared_expert.output.summand(inner, None)
            out = out + (
                shared if self.shared_expert_gate is None else shared * self._whole(self.shared_expert_gate(x))
            )
        if sums is None:
            return out, None
        # Not `_replace`, which torch 2.11 does not compile.
        return out, RoutingSums(sums.tokens, sums.chosen, sums.scores, sums.z, sums.entropy, dropped)

    def _of_all(self, x: Tensor, routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, experts and weights of the whole sequence."""
        experts = routing.experts
        if self.sequence_parallel and self.group is not None:
            experts = all_gather(experts, self.group)
        return self._whole(x), experts, self._whole(routing.weights)

    def _whole(self, x: Tensor) -> Tensor:
        """Of the whole sequence, where each tensor rank goes on to a summand: gradients are summed."""
        return gather_from_sequence(x, self.group) if self.sequence_parallel else copy_to_tensor(x, self.group)
