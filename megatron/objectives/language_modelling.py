"""The loss of next-token prediction, for pretraining and supervised fine-tuning."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.batch import RowSources
from megatron.mpu import HeadInput, LossOfTokens, TokenLoss, token_loss_sum
from megatron.objectives.objective import ROW_LOSSES, LossSums, Objective

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
    z_loss: float = 0.0,
    *,
    loss: TokenLoss = nll,
    statistics: bool = False,
    columns: int | None = None,
    sources: Sequence[str] = (),
    row_sums: bool = False,
) -> Objective:
    """Returns the objective of next-token prediction: the fp32 sum of `loss` over the trained tokens.

    z_loss: coefficient of logsumexp(logits)^2, summed over the same tokens (PaLM, arXiv 2204.02311, section
        5). It changes only the gradient: the reported loss excludes it, so runs remain comparable.
    statistics: also compute the metrics in `METRICS`.
    columns: number of leading vocabulary columns in the softmax; None: all.
    sources: names of the training data; each gets the metrics loss_by_source/NAME, the mean loss of its
        tokens, and share_by_source/NAME, its share of the trained tokens.
    row_sums: also return the sums of each row (`ROW_LOSSES`).
    """
    kind = LossOfTokens(loss, z_loss, statistics, bool(sources) or row_sums)
    names = METRICS if statistics else ()

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        weights = batch.loss_weights.t()
        total, sums = token_loss_sum(head, batch.labels.t(), weights, kind, group, columns, batch.loss_places)
        metrics, rows = {}, sums[len(names) :]
        if statistics:
            count = weights.sum().float()
            metrics = {name: torch.stack([value, count]) for name, value in zip(METRICS, sums, strict=False)}
        if sources:
            metrics |= _source_sums(batch, rows, sources)
        return total.view(1), {**metrics, ROW_LOSSES: rows} if row_sums else metrics

    return Objective(token_count, loss_sum, (*names, *source_metrics(sources)), keeps_rows=row_sums)


def source_metrics(sources: Sequence[str]) -> list[str]:
    """Returns the names of the metrics of these sources: their losses, then their shares of the tokens."""
    return [f"{kind}_by_source/{name}" for kind in ("loss", "share") for name in sources]


def _source_sums(batch: Batch, losses: Tensor, sources: Sequence[str]) -> dict[str, Tensor]:
    """Returns the metrics of each source: its loss with its tokens, and its tokens with those of all sources.

    losses: sum of each row, `[batch]`. Rows of unknown source count for none.
    """
    counts = batch.loss_weights.sum(1).float()
    metrics = torch.zeros(2, len(sources), 2, device=losses.device)
    metrics[1, :, 1] = counts.sum()
    if isinstance(batch.method, RowSources):
        is_of = batch.method.rows == torch.arange(len(sources), device=losses.device)[:, None]  # [sources, batch]
        metrics[0, :, 0], tokens = (losses * is_of).sum(1), (counts * is_of).sum(1)
        metrics[0, :, 1] = metrics[1, :, 0] = tokens
    return dict(zip(source_metrics(sources), metrics.flatten(0, 1).unbind(), strict=True))


LANGUAGE_MODELLING = language_modelling()
