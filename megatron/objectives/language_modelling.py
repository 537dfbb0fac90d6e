"""The loss of next-token prediction, for pretraining and supervised fine-tuning."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.batch import RowSources
from megatron.data.future_tokens import future_tokens
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
    mtp_layers: int = 0,
    mtp_factor: float = 0.0,
) -> Objective:
    """Returns the objective of next-token prediction: the fp32 sum of `loss` over the trained tokens.

    z_loss: coefficient of logsumexp(logits)^2, summed over the same tokens (PaLM, arXiv 2204.02311, section
        5). It changes only the gradient: the reported loss excludes it, so runs remain comparable.
    statistics: also compute the metrics in `METRICS`.
    columns: number of leading vocabulary columns in the softmax; None: all.
    sources: names of the training data; each gets the metrics loss_by_source/NAME, the mean loss of its
        tokens, and share_by_source/NAME, its share of the trained tokens.
    row_sums: also return the sums of each row (`ROW_LOSSES`).
    mtp_layers: depth of multi-token prediction. Its losses are cross-entropies; each gets the metric
        mtp_loss/DEPTH, the mean over its tokens. They change only the gradient: as in the formula of
        DeepSeek-V3 (arXiv 2412.19437, eq. 24 and 25), which divides the sum of each depth by the number of
        all tokens, here of all trained tokens.
    mtp_factor: their mean is multiplied by this.
    """
    kind = LossOfTokens(loss, z_loss, statistics, bool(sources) or row_sums)
    names = METRICS if statistics else ()

    def loss_sum(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> LossSums:
        weights = batch.loss_weights.t()
        total, sums = token_loss_sum(head, batch.labels.t(), weights, kind, group, columns, batch.loss_places)
        metrics: dict[str, Tensor] = {}
        rows = sums[len(names) :]
        if mtp_layers:
            future, mtp_metrics = _mtp_loss(head, batch, group, columns, mtp_layers)
            metrics |= mtp_metrics
            further = mtp_factor / mtp_layers * future
            total = total + (further - further.detach())  # adds the gradient alone
        if statistics:
            count = weights.sum().float()
            metrics |= {name: torch.stack([value, count]) for name, value in zip(METRICS, sums, strict=False)}
        if sources:
            metrics |= _source_sums(batch, rows, sources)
        return total.view(1), {**metrics, ROW_LOSSES: rows} if row_sums else metrics

    all_metrics = (*names, *source_metrics(sources), *mtp_metrics_of(mtp_layers))
    return Objective(token_count, loss_sum, all_metrics, keeps_rows=row_sums)


def mtp_metrics_of(layers: int) -> list[str]:
    """Returns the names of the metrics of multi-token prediction: the loss of each depth."""
    return [f"mtp_loss/{depth}" for depth in range(1, layers + 1)]


def _mtp_loss(
    head: HeadInput, batch: Batch, group: dist.ProcessGroup | None, columns: int | None, layers: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the summed losses of multi-token prediction, and the metrics of its depths.

    Both are 0 if the head has no hidden states of it, as in evaluation.
    """
    total, metrics = torch.zeros((), device=batch.tokens.device), {}
    for depth, name in enumerate(mtp_metrics_of(layers), start=1):
        loss = count = torch.zeros((), device=batch.tokens.device)
        if head.further:
            future = future_tokens(batch, depth)
            hidden = head._replace(hidden_states=head.further[depth - 1])
            weights, places = future.loss_weights.t(), future.loss_places
            if head.context is not None:  # its places are those of the main loss
                places = None
            loss, _ = token_loss_sum(hidden, future.labels.t(), weights, LossOfTokens(nll), group, columns, places)
            total, count = total + loss, weights.sum().float()
        metrics[name] = torch.stack([loss.detach(), count])
    return total, metrics


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
