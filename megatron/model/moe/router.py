"""The router of a mixture of experts: scores, the choice of each token's experts, and what balancing needs of
them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.specs import RouterSpec
from megatron.mpu import (
    ParallelGroups,
    ParamSpec,
    allocate,
    copy_to_tensor,
    fork_seed,
    gather_from_sequence,
    reduce_from_tensor,
    with_prefix,
)

_SINKHORN_ROUNDS, _SINKHORN_TOLERANCE = 3, 1e-4  # GPT-NeoX's


class RoutingSums(NamedTuple):
    """Sums over the tokens of each row of a micro-batch, fp32, over all tensor ranks.

    tokens: `[batch]`. chosen: `[batch, experts]`, how many have chosen each expert. scores: `[batch,
    experts]`, of all experts' scores, which add up to 1 for a token. z: `[batch]`, of the square of the
    logarithm of the softmax's normaliser. entropy: `[batch]`, of the scores'. dropped: `[]`, choices that no
    expert had room for. Only `scores` and `z` have gradients.
    """

    tokens: Tensor
    chosen: Tensor
    scores: Tensor
    z: Tensor
    entropy: Tensor
    dropped: Tensor


class Routing(NamedTuple):
    """Where tokens go: numbers of experts `[seq, batch, top_k]` int64, and their weights, fp32."""

    experts: Tensor
    weights: Tensor


class _Gate(nn.Module):
    """Logits of experts, `[.., hidden]` to `[.., experts]`, in fp32; the same on every tensor rank."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: RouterSpec, groups: ParallelGroups, sequence_parallel: bool) -> None:
        super().__init__()
        # Of the sequence each rank has a part, so that gradients are summed.
        self.group = groups.group("tensor") if sequence_parallel else None
        allocate(self, self.params(spec), groups, "bias")

    @staticmethod
    def params(spec: RouterSpec) -> tuple[ParamSpec, ...]:
        weight = ParamSpec("weight", (spec.experts, spec.hidden), init="input", weight_decay=True)
        return (weight, ParamSpec("bias", (spec.experts,))) if spec.bias else (weight,)

    def forward(self, x: Tensor) -> Tensor:
        weight = copy_to_tensor(self.weight, self.group).float()
        bias = None if self.bias is None else copy_to_tensor(self.bias, self.group).float()
        return F.linear(x.float(), weight, bias)


class Router(nn.Module):
    """Chooses `top_k` experts of each token. Everything is computed in fp32.

    expert_bias: `[experts]` fp32, added to the scores where experts are chosen, and not trained: `Balance`
    changes it (arXiv 2408.15664); None without.
    """

    expert_bias: nn.Parameter | None

    def __init__(self, spec: RouterSpec, groups: ParallelGroups, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.group = groups.group("tensor")
        self.sequence_parallel = sequence_parallel and self.group is not None
        self.tensor_rank, self.tensor_size = groups.rank("tensor"), groups.size("tensor")
        self.layer = _Gate(spec, groups, sequence_parallel)
        allocate(self, self._bias_params(spec), groups, "expert_bias")

    @staticmethod
    def _bias_params(spec: RouterSpec) -> tuple[ParamSpec, ...]:
        return () if spec.bias_update_rate is None else (ParamSpec("expert_bias", (spec.experts,), trained=False),)

    @classmethod
    def params(cls, spec: RouterSpec) -> tuple[ParamSpec, ...]:
        """The parameters that the constructor allocates."""
        return (*with_prefix("layer", _Gate.params(spec)), *cls._bias_params(spec))

    def forward(self, x: Tensor, counted: Tensor | None, seed: Tensor | None) -> tuple[Routing, RoutingSums | None]:
        """`[seq, batch, hidden]` (`[seq/T, ..]` under sequence parallelism) to the choice for these tokens,
        in training with the sums that balancing needs.

        counted: `[seq, batch]` boolean, over the whole sequence, tokens that the sums are of; None: all.
        seed: of the jitter.
        """
        spec = self.spec
        if spec.jitter > 0.0 and self.training:
            assert seed is not None
            parts, part = (self.tensor_size, self.tensor_rank) if self.sequence_parallel else (1, 0)
            x = x * _noise(x.detach(), spec.jitter, seed, parts, part)
        logits = self.layer(x)
        scores = torch.sigmoid(logits) if spec.scores == "sigmoid" else torch.softmax(logits, -1)
        experts = self._choose(logits, scores, counted)
        weights = scores.gather(-1, experts)
        if spec.normalized:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-20 if spec.scores == "sigmoid" else total)
        if spec.factor != 1.0:
            weights = weights * spec.factor
        return Routing(experts, weights), self._sums(logits, scores, experts, counted) if self.training else None

    @torch.no_grad()
    def _choose(self, logits: Tensor, scores: Tensor, counted: Tensor | None = None) -> Tensor:
        """The experts of each token `[seq, batch, top_k]`. counted: as of `forward`."""
        spec = self.spec
        if spec.sinkhorn and self.training:
            return self._sinkhorn(logits, counted).topk(spec.top_k, dim=-1).indices
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if spec.top_groups < spec.groups:
            grouped = scores.unflatten(-1, (spec.groups, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1).topk(spec.top_groups, -1).indices
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(spec.top_k, dim=-1).indices

    def _sinkhorn(self, logits: Tensor, counted: Tensor | None = None) -> Tensor:
        """exp(logits) `[seq, batch, experts]`, rows and columns scaled in turn: experts draw near one sum.

        As GPT-NeoX over all tokens of the micro-batch, but for padding: from its start, three rounds, fewer
        where experts' factors move less than its tolerance.
        """
        if self.sequence_parallel:
            logits = gather_from_sequence(logits, self.group)
        cost = logits.exp().flatten(0, 1)
        experts, tokens = cost.shape[1], cost.new_full((), len(cost))
        if counted is not None:
            cost, tokens = cost * counted.flatten().unsqueeze(1), counted.sum().clamp(min=1)
        of_tokens, error = cost.new_ones(len(cost)), cost.new_full((), float("inf"))
        of_experts = 1.0 / (experts * cost.sum(0).clamp(min=torch.finfo(cost.dtype).tiny))
        for _ in range(_SINKHORN_ROUNDS):
            done = error < _SINKHORN_TOLERANCE  # decided on the device
            of_tokens = torch.where(done, of_tokens, (1.0 / tokens) / ((of_experts * cost).sum(1) + 1e-8))
            now = (1.0 / experts) / ((of_tokens.unsqueeze(1) * cost).sum(0) + 1e-8)
            error = torch.where(done, error, (of_experts - now).abs().mean())
            of_experts = torch.where(done, of_experts, now)
        balanced = (of_experts * cost * of_tokens.unsqueeze(1)).view(logits.shape)
        return balanced.chunk(self.tensor_size)[self.tensor_rank] if self.sequence_parallel else balanced

    def _sums(self, logits: Tensor, scores: Tensor, experts: Tensor, counted: Tensor | None) -> RoutingSums:
        spec = self.spec
        shares = scores / scores.sum(-1, keepdim=True) if spec.scores == "sigmoid" else scores
        normaliser = torch.logsumexp(logits, -1).square()
        with torch.no_grad():
            entropy = torch.special.entr(shares).sum(-1)
            chosen = torch.zeros_like(shares).scatter_(-1, experts, 1.0)
            if counted is None:
                weight = torch.ones_like(entropy)
            else:
                if self.sequence_parallel:
                    counted = counted.chunk(self.tensor_size)[self.tensor_rank]
                weight = counted.to(entropy.dtype)
        each = [shares, normaliser.unsqueeze(-1), chosen, entropy.unsqueeze(-1), torch.ones_like(weight).unsqueeze(-1)]
        sums = (torch.cat(each, -1) * weight.unsqueeze(-1)).sum(0)
        if self.sequence_parallel:
            sums = reduce_from_tensor(sums, self.group)
        n, none = spec.experts, torch.zeros((), device=sums.device)
        # Copies: `fully_shard` warns of views among what a block returns.
        of_scores, z = sums[:, :n].clone(), sums[:, n].clone()
        with torch.no_grad():
            of_chosen, of_entropy, tokens = sums[:, n + 1 : -2].clone(), sums[:, -2].clone(), sums[:, -1].clone()
        return RoutingSums(tokens, of_chosen, of_scores, z, of_entropy, none)


# An operator, as that of dropout in `mpu.random`.
@torch.library.custom_op("megatron::uniform_noise", mutates_args=())
def _noise(x: Tensor, jitter: float, seed: Tensor, parts: int, part: int) -> Tensor:
    """Numbers within 1 +- `jitter` of the shape and type of `x`, a function of `seed` alone: those of this
    part of the sequence, of which there are `parts`."""
    whole = x.new_empty((x.shape[0] * parts, *x.shape[1:]))
    with fork_seed(int(seed), x.device):
        whole.uniform_(1.0 - jitter, 1.0 + jitter)
    return whole.chunk(parts)[part].clone()


@_noise.register_fake
def _noise_shape(x: Tensor, jitter: float, seed: Tensor, parts: int, part: int) -> Tensor:
    return torch.empty_like(x)
