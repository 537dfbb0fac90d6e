"""The router of a mixture of experts: scores of experts, the choice of experts, and sums for load
balancing."""

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

_SINKHORN_ROUNDS, _SINKHORN_TOLERANCE = 3, 1e-4  # as in GPT-NeoX


class RoutingSums(NamedTuple):
    """Sums over the tokens of each row of a micro-batch, which load balancing reads: fp32, over all tensor
    ranks.

    tokens: `[batch]`, number of tokens.
    chosen: `[batch, experts]`, number of tokens that chose each expert.
    scores: `[batch, experts]`, sums of all scores, normalised to sum to 1 for each token.
    z: `[batch]`, sums of the squared log-sum-exp of the logits.
    entropy: `[batch]`, sums of the entropy of the normalised scores.
    dropped: `[]`, number of choices that exceeded an expert's capacity.
    Only `scores` and `z` have gradients.
    """

    tokens: Tensor
    chosen: Tensor
    scores: Tensor
    z: Tensor
    entropy: Tensor
    dropped: Tensor


class Routing(NamedTuple):
    """The experts that each token chose, `[seq, batch, top_k]` int64, and their weights, fp32 in the same
    shape."""

    experts: Tensor
    weights: Tensor


class _Gate(nn.Module):
    """Computes the logits of experts in fp32, `[.., hidden]` to `[.., experts]`. It is replicated on all
    tensor ranks."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: RouterSpec, groups: ParallelGroups, sequence_parallel: bool) -> None:
        super().__init__()
        # Under sequence parallelism each rank has a part of the sequence, so gradients are summed over ranks.
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
    """Chooses `top_k` experts for each token. Everything is computed in fp32.

    expert_bias: `[experts]` fp32, added to the scores only to choose experts. `Balance` updates it without
        gradients (arXiv 2408.15664). None: no bias.
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
        """Returns the specs of the parameters that the constructor allocates."""
        return (*with_prefix("layer", _Gate.params(spec)), *cls._bias_params(spec))

    def forward(self, x: Tensor, token_mask: Tensor | None, seed: Tensor | None) -> tuple[Routing, RoutingSums | None]:
        """Returns the choice of experts for these tokens, and in training the sums for load balancing (else
        None).

        x: `[seq, batch, hidden]` (`[seq/T, ..]` under sequence parallelism).
        token_mask: `[seq, batch]` boolean over the full sequence, False for padding; None: no padding.
        seed: for the jitter, relative noise on the input in training; None: no jitter.
        """
        spec = self.spec
        if spec.jitter > 0.0 and self.training:
            assert seed is not None
            parts, part = (self.tensor_size, self.tensor_rank) if self.sequence_parallel else (1, 0)
            x = x * _noise(x.detach(), spec.jitter, seed, parts, part)
        logits = self.layer(x)
        scores = torch.sigmoid(logits) if spec.scores == "sigmoid" else torch.softmax(logits, -1)
        experts = self._choose(logits, scores, token_mask)
        weights = scores.gather(-1, experts)
        if spec.normalized:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + 1e-20 if spec.scores == "sigmoid" else total)
        if spec.factor != 1.0:
            weights = weights * spec.factor
        return Routing(experts, weights), self._sums(logits, scores, experts, token_mask) if self.training else None

    @torch.no_grad()
    def _choose(self, logits: Tensor, scores: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Returns the experts that each token chooses, `[seq, batch, top_k]`.

        token_mask: `[seq, batch]` boolean over the full sequence, False for padding; None: no padding.
        """
        spec = self.spec
        if spec.sinkhorn and self.training:
            return self._sinkhorn(logits, token_mask).topk(spec.top_k, dim=-1).indices
        if self.expert_bias is not None:
            scores = scores + self.expert_bias
        if spec.top_groups < spec.groups:
            grouped = scores.unflatten(-1, (spec.groups, -1))
            scores_per_group = min(2 if spec.group_score == "best_two" else 1, grouped.shape[-1])
            best = grouped.topk(scores_per_group, dim=-1).values.sum(-1).topk(spec.top_groups, -1).indices
            allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores.topk(spec.top_k, dim=-1).indices

    def _sinkhorn(self, logits: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """Returns exp(logits) `[seq, batch, experts]`, balanced over experts: tokens and experts are rescaled
        in turn (Sinkhorn).

        The experts' sums become nearly equal. As in GPT-NeoX, it covers all tokens of the micro-batch except
        padding. It starts like GPT-NeoX and does three rounds, or stops when the experts' factors change by
        less than GPT-NeoX's tolerance.
        """
        if self.sequence_parallel:
            logits = gather_from_sequence(logits, self.group)
        cost = logits.exp().flatten(0, 1)
        experts, tokens = cost.shape[1], cost.new_full((), len(cost))
        if token_mask is not None:
            cost, tokens = cost * token_mask.flatten().unsqueeze(1), token_mask.sum().clamp(min=1)
        token_factors, error = cost.new_ones(len(cost)), cost.new_full((), float("inf"))
        expert_factors = 1.0 / (experts * cost.sum(0).clamp(min=torch.finfo(cost.dtype).tiny))
        for _ in range(_SINKHORN_ROUNDS):
            done = error < _SINKHORN_TOLERANCE  # decided on the device
            token_factors = torch.where(done, token_factors, (1.0 / tokens) / ((expert_factors * cost).sum(1) + 1e-8))
            now = (1.0 / experts) / ((token_factors.unsqueeze(1) * cost).sum(0) + 1e-8)
            error = torch.where(done, error, (expert_factors - now).abs().mean())
            expert_factors = torch.where(done, expert_factors, now)
        balanced = (expert_factors * cost * token_factors.unsqueeze(1)).view(logits.shape)
        return balanced.chunk(self.tensor_size)[self.tensor_rank] if self.sequence_parallel else balanced

    def _sums(self, logits: Tensor, scores: Tensor, experts: Tensor, token_mask: Tensor | None) -> RoutingSums:
        spec = self.spec
        shares = scores / scores.sum(-1, keepdim=True) if spec.scores == "sigmoid" else scores
        normaliser = torch.logsumexp(logits, -1).square()
        with torch.no_grad():
            entropy = torch.special.entr(shares).sum(-1)
            chosen = torch.zeros_like(shares).scatter_(-1, experts, 1.0)
            if token_mask is None:
                weight = torch.ones_like(entropy)
            else:
                if self.sequence_parallel:
                    token_mask = token_mask.chunk(self.tensor_size)[self.tensor_rank]
                weight = token_mask.to(entropy.dtype)
        columns = [
            shares,
            normaliser.unsqueeze(-1),
            chosen,
            entropy.unsqueeze(-1),
            torch.ones_like(weight).unsqueeze(-1),
        ]
        sums = (torch.cat(columns, -1) * weight.unsqueeze(-1)).sum(0)
        if self.sequence_parallel:
            sums = reduce_from_tensor(sums, self.group)
        n, no_drops = spec.experts, torch.zeros((), device=sums.device)
        # Copies, because `fully_shard` warns if a block returns views.
        score_sums, z = sums[:, :n].clone(), sums[:, n].clone()
        with torch.no_grad():
            chosen_counts, entropy_sums, tokens = sums[:, n + 1 : -2].clone(), sums[:, -2].clone(), sums[:, -1].clone()
        return RoutingSums(tokens, chosen_counts, score_sums, z, entropy_sums, no_drops)


# A custom operator, for the same reasons as dropout in `mpu.random`: the compiler sees only its shapes.
@torch.library.custom_op("megatron::uniform_noise", mutates_args=())
def _noise(x: Tensor, jitter: float, seed: Tensor, parts: int, part: int) -> Tensor:
    """Returns uniform random factors in [1 - jitter, 1 + jitter], in the shape and dtype of `x`, drawn from
    `seed` alone.

    If the sequence is sharded, they are part number `part` of `parts` equal parts of the full sequence's
    factors.
    """
    full = x.new_empty((x.shape[0] * parts, *x.shape[1:]))
    with fork_seed(int(seed), x.device):
        full.uniform_(1.0 - jitter, 1.0 + jitter)
    return full.chunk(parts)[part].clone()


@_noise.register_fake
def _noise_shape(x: Tensor, jitter: float, seed: Tensor, parts: int, part: int) -> Tensor:
    return torch.empty_like(x)
