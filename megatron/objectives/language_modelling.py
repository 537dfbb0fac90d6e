"""Next-token prediction: the objective of pretraining and of supervised fine-tuning."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import HeadInput, LossOfTokens, TokenLoss, token_loss_sum
from megatron.objectives.objective import LossSums, Objective

METRICS = ("entropy", "mean_token_accuracy")


def nll(logprobs: Tensor) -> Tensor:
    """The negative log-likelihood of each token, which is cross-entropy."""
    return -logprobs


def dft(logprobs: Tensor) -> Tensor:
    """Dynamic fine-tuning (arXiv 2508.05629): the negative log-likelihood times the token's own probability,
    which has no gradient."""
    return -logprobs * logprobs.detach().exp()


def token_count(batch: Batch) -> Tensor:
    """The number of tokens whose loss weight is 1, fp32 `[1]`."""
    return batch.loss_weights.sum().float().view(1)


def language_modelling(
    z_loss: float = 0.0, *, loss: TokenLoss = nll, statistics: bool = False, columns: int | None = None
) -> Objective:
    """Returns the objective of next-token prediction: `loss`, summed in fp32 over the trained tokens.

    z_loss: coefficient of logsumexp^2 of the same tokens (PaLM, arXiv 2204.02311, section 5). It changes only
        the gradient; the reported loss stays `loss`, so that runs remain comparable.
    statistics: also compute `METRICS`.
    columns: as in `token_loss_sum`.
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
