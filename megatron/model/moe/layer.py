"""The mixture of experts as the feed-forward of a transformer block."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.build_specs import moe_spec
from megatron.model.mlp import MLP
from megatron.model.moe.dispatch import combine, limit, run_local, run_on_ranks
from megatron.model.moe.experts import Experts
from megatron.model.moe.router import Router, RoutingSums
from megatron.model.specs import MoESpec
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
    """Sends tokens to their experts, and sums the outputs of each token's experts.

    mlp: the experts; the name is GPT-NeoX's in checkpoints.

    The output is a summand over tensor ranks: a rank holds some experts in full and skips the tokens of other
    experts, or it holds a slice of every expert.
    """

    def __init__(self, spec: MoESpec, groups: ParallelGroups) -> None:
        super().__init__()
        self.mlp = Experts(spec, groups)
        self.total, self.capacity_factor = spec.router.experts, spec.capacity_factor
        self.expert_group = groups.group("expert")
        # The experts of this tensor rank, counted over all ranks of expert parallelism.
        self.number = self.mlp.number * groups.size("expert")
        self.first_expert = 0 if spec.sharded else groups.rank("tensor") * self.number

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor, token_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns this tensor rank's summand of the output, `[tokens, hidden]`, and the number of dropped
        choices.

        x: `[tokens, hidden]`.
        experts, weights: the experts that each token chose, and their weights, `[tokens, top_k]`.
        token_mask: `[tokens]` boolean, False for padding, which goes to no expert; None: no padding.
        """
        dropped = torch.zeros((), device=x.device)
        if token_mask is not None:
            experts = torch.where(token_mask.unsqueeze(1), experts, self.total)
        if self.capacity_factor is not None:
            retained = limit(experts, weights, self.total, self.capacity_factor)
            dropped, experts = (retained != experts).sum().float(), retained
        all_local = self.number == self.total and self.capacity_factor is None and token_mask is None
        if not all_local:
            is_local = (experts >= self.first_expert) & (experts < self.first_expert + self.number)
            experts = torch.where(is_local, experts - self.first_expert, self.number)
        if self.expert_group is None:
            rows, plan = run_local(x, experts, self.number, self.mlp, all_local)
        else:
            rows, plan = run_on_ranks(x, experts, self.number, self.mlp, self.expert_group)
        return combine(rows, weights, plan), dropped


class _Projection(nn.Module):
    """A linear layer without bias next to the experts, replicated on all tensor ranks: `[.., in]` to `[..,
    out]`.

    sums_gradients: sum the weight's gradients over tensor ranks. It is needed if each rank's input is a part
        of the sequence, or a summand.
    """

    weight: nn.Parameter

    def __init__(self, params: tuple[ParamSpec, ...], groups: ParallelGroups, sums_gradients: bool) -> None:
        super().__init__()
        self.group = groups.group("tensor") if sums_gradients else None
        allocate(self, params, groups)

    @staticmethod
    def params(rows: int, columns: int, init: str) -> tuple[ParamSpec, ...]:
        return (ParamSpec("weight", (rows, columns), init=init, weight_decay=True),)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, copy_to_tensor(self.weight, self.group))


class MoE(nn.Module):
    """Sums score * expert(x) over a token's experts, and adds the shared expert's output, if there is one.

    Input and output are `[seq, batch, hidden]`. With a latent, experts read down(x), and their weighted sum
    goes through up.
    """

    Spec = MoESpec
    spec = staticmethod(moe_spec)

    def __init__(self, spec: MoESpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.group, self.sequence_parallel = groups.group("tensor"), sequence_parallel
        self.router = Router(spec.router, groups, sequence_parallel)
        self.experts = Dispatcher(spec, groups)
        self.shared_expert = MLP(spec.shared, groups, sequence_parallel) if spec.shared is not None else None
        self.shared_expert_gate = self.latent_down = self.latent_up = None
        if spec.shared_gate:
            self.shared_expert_gate = _Projection(self._gate(spec), groups, sequence_parallel)
        if spec.latent:
            down, up = self._latent(spec)
            self.latent_down = _Projection(down, groups, sequence_parallel)
            self.latent_up = _Projection(up, groups, True)
        self.output = PartialSum(groups, sequence_parallel)

    @staticmethod
    def _gate(spec: MoESpec) -> tuple[ParamSpec, ...]:
        return _Projection.params(1, spec.router.hidden, "input")

    @staticmethod
    def _latent(spec: MoESpec) -> tuple[tuple[ParamSpec, ...], tuple[ParamSpec, ...]]:
        hidden, latent = spec.router.hidden, spec.expert.hidden
        return _Projection.params(latent, hidden, "input"), _Projection.params(hidden, latent, "output")

    @classmethod
    def params(cls, spec: MoESpec) -> tuple[ParamSpec, ...]:
        """Returns the specs of the parameters that the constructor allocates."""
        shared = MLP.params(spec.shared) if spec.shared is not None else ()
        gate = cls._gate(spec) if spec.shared_gate else ()
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
        self, x: Tensor, seed: Tensor | None = None, token_mask: Tensor | None = None
    ) -> tuple[Tensor, RoutingSums | None]:
        """Returns this tensor rank's summand of the output of all tokens, and in training the sums for load
        balancing.

        x: `[seq, batch, hidden]` (`[seq/T, ..]` under sequence parallelism).
        seed: for the router's jitter and the adapters' dropout.
        token_mask: `[seq, batch]` boolean, False for padding; None: no padding.
        """
        routing, sums = self.router(x, token_mask, seed)
        inner = x if self.latent_down is None else self.latent_down(x)
        experts = routing.experts
        if self.sequence_parallel and self.group is not None:
            experts = all_gather(experts, self.group)
        gathered, weights = self._gather(inner), self._gather(routing.weights)
        tokens = None if token_mask is None else token_mask.flatten()
        out, dropped = self.experts(gathered.flatten(0, 1), experts.flatten(0, 1), weights.flatten(0, 1), tokens)
        out = out.view(gathered.shape)
        if self.latent_up is not None:  # linear, so it may run on this rank's summand
            out = self.latent_up(out)
        if self.shared_expert is not None:
            inner, _ = self.shared_expert.core(x, seed)
            shared = self.shared_expert.output.summand(inner, seed)
            if self.shared_expert_gate is not None:
                shared = shared * self._gather(torch.sigmoid(self.shared_expert_gate(x)))
            out = out + shared
        if sums is None:
            return out, None
        # torch 2.11 cannot compile `_replace`.
        return out, RoutingSums(sums.tokens, sums.chosen, sums.scores, sums.z, sums.entropy, dropped)

    def _gather(self, x: Tensor) -> Tensor:
        """Gathers the full sequence `[seq, ..]` from the tensor ranks, if it is sharded.

        Each tensor rank computes only a summand from it, so its gradients are summed over ranks.
        """
        return gather_from_sequence(x, self.group) if self.sequence_parallel else copy_to_tensor(x, self.group)
