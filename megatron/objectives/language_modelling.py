"""The loss of next-token prediction, for pretraining and supervised fine-tuning."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, LossOfTokens, TokenLoss, token_loss_sum
from megatron.objectives.objective import LossSums, Objective

METRICS = ("entropy", "mean_token_accuracy")


def nll(logprobs: Tensor) -> Tensor:
    """Returns the negative log-likelihood of each token (cross-entropy). logprobs: log p(label) of each
    token."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """Returns dynamic fine-tuning's loss of each token (arXiv 2508.05629): -p log p, with no gradient through
    the factor p.

    logprobs: log p(label) of each token.
    """
    return -logprobs * logprobs.detach().exp()


def token_count(batch: Batch) -> Tensor:
    """Returns the number of trained tokens of a batch (loss weight 1), fp32 `[1]`."""
    return batch.loss_weights.sum().float().view(1)


def language_modelling(
    z_loss: float = 0.0, *, loss: TokenLoss = nll, statistics: bool = False, columns: int | None = None
) -> Objective:
    """Returns the objective of next-token prediction: the fp32 sum of `loss` over the trained tokens.

    z_loss: coefficient of logsumexp(logits)^2, summed over the same tokens (PaLM, arXiv 2204.02311, section
        5). It changes only the gradient: the reported loss excludes it, so runs remain comparable.
    statistics: also compute the metrics in `METRICS`.
    columns: number of leading vocabulary columns in the softmax; None: all.
    """
    kind = LossOfTokens(loss, z_loss, statistics)

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        weights = batch.loss_weights.t()
        total, sums = token_loss_sum(head, batch.labels.t(), weights, kind, group, columns, batch.loss_places)
        metrics = {}
        if statistics:
            count = weights.sum().float()
            metrics = {name: torch.stack([value, count]) for name, value in zip(METRICS, sums, strict=True)}
        return total.view(1), metrics

    return Objective(token_count, loss_sum, METRICS if statistics else ())


LANGUAGE_MODELLING = language_modelling()
