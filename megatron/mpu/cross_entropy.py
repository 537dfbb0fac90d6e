"""Vocab-parallel cross-entropy: log-probabilities of labels over a vocabulary that may be split over tensor
ranks.

Tokens are worked on in slices, which bounds the memory for fp32 copies of logits.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Logits worked on at a time: 64 MiB in fp32, of which a handful live at once; on a CPU what its caches hold.
CHUNK, CPU_CHUNK = 2**24, 2**20


class TokenStatistics(NamedTuple):
    """Statistics of the predicted distribution at each position, `[seq, batch]` fp32, without gradients."""

    entropy: Tensor  # nats
    mean_logit: Tensor  # over the columns that take part in the softmax
    is_top: Tensor  # 1 where no token is likelier than the label


def _slices(logits: Tensor) -> Iterator[slice]:
    rows, vocab = logits.shape
    step = max(1, (CHUNK if logits.device.type == "cuda" else min(CHUNK, CPU_CHUNK)) // vocab)
    return (slice(start, start + step) for start in range(0, rows, step))


class _Logprobs(torch.autograd.Function):
    """(log p(label), logsumexp, entropy, mean logit, top or not) `[tokens]` fp32 from this rank's logits
    `[tokens, vocab/T]`, by two all-reduces over the tensor ranks (arXiv 1909.08053, section 3). Kept for the
    backward pass: the logits as they came, and two numbers a token."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: dist.ProcessGroup | None,
        columns: int | None,
        statistics: bool,
    ) -> tuple[Tensor, ...]:
        rows, vocab = logits.shape
        first = 0 if group is None else dist.get_rank(group) * vocab
        whole = vocab if group is None else vocab * dist.get_world_size(group)
        own_columns = vocab if columns is None else min(max(columns - first, 0), vocab)
        local = labels - first
        foreign = (local < 0) | (local >= own_columns)
        local = local.masked_fill(foreign, 0)
        # A rank that holds nothing but padding has no highest: it stays below all others, and finite.
        highest = logits.new_full((rows,), -1e30, dtype=torch.float32)
        sums = highest.new_zeros(4 if statistics else 2, rows)  # label's logit, sum of exp; exp * logit, logit
        for part in _slices(logits) if own_columns else ():
            chunk = logits[part, :own_columns].float()
            highest[part] = chunk.amax(-1)
            shifted = chunk - highest[part, None]
            sums[0, part] = chunk.gather(-1, local[part, None]).squeeze(-1)
            if statistics:
                sums[3, part] = chunk.sum(-1)
                exp = shifted.exp()
                sums[2, part] = shifted.mul_(exp).sum(-1)
            else:
                exp = shifted.exp_()
            sums[1, part] = exp.sum(-1)
        if group is not None:
            local_highest = highest.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            below = local_highest - highest
            if statistics:
                sums[2] = below.exp() * (sums[2] + below * sums[1])
            sums[1] *= below.exp()
            sums[0].masked_fill_(foreign, 0.0)
            dist.all_reduce(sums, group=group)
        label_logit, total = sums[0], sums[1]
        ctx.save_for_backward(logits, local, foreign, highest, total)
        ctx.own_columns = own_columns
        log_total = total.log()
        results = (label_logit - highest) - log_total, highest + log_total
        if not statistics:
            return results
        more = log_total - sums[2] / total, sums[3] / (columns or whole), (label_logit >= highest).float()
        ctx.mark_non_differentiable(*more)
        return results + more

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, foreign, highest, total = ctx.saved_tensors
        own_columns = ctx.own_columns
        grad, grad_of_sum = grads[:2]
        scale = ((grad_of_sum - grad) / total).unsqueeze(-1)
        label_grad = grad.masked_fill(foreign, 0.0)
        result = torch.empty_like(logits)
        result[:, own_columns:] = 0
        for part in _slices(logits) if own_columns else ():
            softmax = (logits[part, :own_columns].float() - highest[part, None]).exp_().mul_(scale[part])
            softmax[torch.arange(len(softmax), device=logits.device), local[part]] += label_grad[part]
            result[part, :own_columns] = softmax
        return result, None, None, None, None


def _apply(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, columns: int | None, statistics: bool
) -> tuple[Tensor, ...]:
    outputs = _Logprobs.apply(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), group, columns, statistics)
    return tuple(values.view(labels.shape) for values in outputs)


def token_logprobs(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, columns: int | None = None
) -> Tensor:
    """log p(label) for every token, in fp32.

    logits: `[seq, batch, vocab/T]`, any float type; labels: `[seq, batch]` int64 within the whole vocabulary;
    columns: of the whole vocabulary, the first that take part in the softmax (None: all), the others pad it.
    Returns `[seq, batch]` fp32, the same on every tensor rank.
    """
    return _apply(logits, labels, group, columns, False)[0]


def token_logprobs_and_sums(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, columns: int | None = None
) -> tuple[Tensor, Tensor]:
    """`token_logprobs`, and the logsumexp of the logits of each token in the same shape and dtype."""
    logprobs, sums = _apply(logits, labels, group, columns, False)
    return logprobs, sums


def token_logprobs_and_statistics(
    logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, columns: int | None = None
) -> tuple[Tensor, TokenStatistics]:
    """`token_logprobs`, and the `TokenStatistics` of each token in the same shape and dtype."""
    logprobs, _, *more = _apply(logits, labels, group, columns, True)
    return logprobs, TokenStatistics(*more)
