"""Cross-entropy over a vocabulary that is cut over tensor ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class _VocabParallelLoss(torch.autograd.Function):
    """(-log p(label), logsumexp) from this rank's logits; three all-reduces of `[seq, batch]` over the tensor ranks
    (arXiv 1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        vocab = logits.shape[-1]
        local = labels if group is None else labels - dist.get_rank(group) * vocab
        foreign = (local < 0) | (local >= vocab)
        local = local.masked_fill(foreign, 0)
        highest = logits.amax(-1)
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(-1)
        label_logit = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(foreign, 0.0)
        exp = shifted.exp_()
        both = torch.stack([label_logit, exp.sum(-1)])
        if group is not None:
            dist.all_reduce(both, group=group)
        label_logit, total = both[0], both[1]
        ctx.save_for_backward(exp.div_(total.unsqueeze(-1)), local, foreign)
        return total.log() - label_logit, total.log() + highest

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_of_sum: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        softmax, local, foreign = ctx.saved_tensors
        grad_logits = softmax * (grad + grad_of_sum).unsqueeze(-1)
        own = grad.masked_fill(foreign, 0.0).unsqueeze(-1)
        return grad_logits.scatter_add_(-1, local.unsqueeze(-1), -own), None, None


def token_logprobs(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """log p(label) for every token, in fp32.

    logits: `[seq, batch, vocab/T]`, any float type; labels: `[seq, batch]` int64 within the whole vocabulary.
    Returns `[seq, batch]` fp32, the same on every tensor rank.
    """
    if group is not None:
        return token_logprobs_and_sums(logits, labels, group)[0]
    seq, batch, vocab = logits.shape
    every = F.cross_entropy(logits.float().view(-1, vocab), labels.reshape(-1), reduction="none")
    return -every.view(seq, batch)


def token_logprobs_and_sums(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and beside them the logsumexp of each token's logits, likewise."""
    losses, sums = _VocabParallelLoss.apply(logits.float(), labels, group)
    return -losses, sums
