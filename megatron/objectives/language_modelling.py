"""Next-token prediction: the objective of pretraining and of supervised fine-tuning."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, token_logprobs, token_logprobs_and_statistics, token_logprobs_and_sums
from megatron.mpu.cross_entropy import TokenStatistics
from megatron.objectives.objective import LossSums, Objective

TokenLoss = Callable[[Tensor], Tensor]  # from log p(label) of tokens to their losses, fp32
METRICS = ("entropy", "mean_token_accuracy")


def nll(logprobs: Tensor) -> Tensor:
    """The negative log-likelihood of each token, which is cross-entropy."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """Dynamic fine-tuning (arXiv 2508.05629): the negative log-likelihood times the token's own probability,
    which has no gradient."""
    return -logprobs * logprobs.detach().exp()


def _weight(batch: Batch) -> Tensor:
    """The number of tokens whose loss weight is 1, fp32 `[1]`."""
    return batch.loss_weights.sum().float().view(1)


def _metrics(found: TokenStatistics | None, weights: Tensor) -> dict[str, Tensor]:
    if found is None:
        return {}
    count = weights.sum().float()
    sums = (found.entropy * weights).sum(), (found.is_top * weights).sum()
    return {name: torch.stack([value, count]) for name, value in zip(METRICS, sums, strict=True)}


def language_modelling(
    z_loss: float = 0.0, *, loss: TokenLoss = nll, statistics: bool = False, columns: int | None = None
) -> Objective:
    """The objective of next-token prediction: `loss`, summed in fp32 over the tokens whose loss weight is 1.

    z_loss: coefficient of logsumexp^2 of the same tokens (PaLM, arXiv 2204.02311, section 5). It enters the
    gradient alone: the value stays that of `loss`, by which runs are compared.
    statistics: compute `METRICS` too.
    columns: as of `token_logprobs`.
    """

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        logits, weights, labels = head.logits(), batch.loss_weights.t(), batch.labels.t()
        if z_loss != 0.0:
            logprobs, sums = token_logprobs_and_sums(logits, labels, group, columns)
            stats = token_logprobs_and_statistics(logits.detach(), labels, group, columns)[1] if statistics else None
            extra = z_loss * (sums.square() * weights).sum()
            return ((loss(logprobs) * weights).sum() + (extra - extra.detach())).view(1), _metrics(stats, weights)
        if statistics:
            logprobs, stats = token_logprobs_and_statistics(logits, labels, group, columns)
        else:
            logprobs, stats = token_logprobs(logits, labels, group, columns), None
        return (loss(logprobs) * weights).sum().view(1), _metrics(stats, weights)

    return Objective(_weight, loss_sum, METRICS if statistics else ())


LANGUAGE_MODELLING = language_modelling()
