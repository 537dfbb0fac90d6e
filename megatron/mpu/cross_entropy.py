"""Vocab-parallel cross-entropy of a chunk of logits: log-probabilities of labels, statistics, and the logits'
gradient.

The vocabulary may be sharded over tensor ranks (arXiv 1909.08053, section 3). Everything is computed in fp32,
whatever the dtype of the logits. Functions here are elementwise except for sums over a row of logits, so
torch.compile makes one or two kernels of each. Without compilation they run on slices of a few rows, which
bounds the memory for fp32 copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.mappings import gather_from_tensor

# Number of logits in a slice. On a GPU they take 128 MiB in fp32, and one or two copies are alive at once. On
# a CPU a slice fits the caches.
SLICE, CPU_SLICE = 2**25, 2**20

# A function from log p(label) of tokens, fp32 `[n]`, to the losses of the tokens, elementwise.
TokenLoss = Callable[[Tensor], Tensor]


class VocabPart(NamedTuple):
    """The part of the vocabulary that this tensor rank holds.

    group: the tensor ranks over which the vocabulary is sharded; None for one rank.
    rank: this rank's index in the group.
    first_column: index of this part's first column in the full vocabulary.
    local_columns: number of columns of this part in the softmax; the columns after them are padding.
    columns: number of columns in the softmax, over all ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    first_column: int
    local_columns: int
    columns: int

    @classmethod
    def for_rank(cls, size: int, group: dist.ProcessGroup | None, columns: int | None) -> "VocabPart":
        """Returns the part of the calling rank, which holds `size` columns including padding.

        columns: number of leading columns of the full vocabulary in the softmax, the rest is padding; None:
            all.
        """
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        total, first_column = size * ranks if columns is None else columns, rank * size
        return cls(group, rank, first_column, min(max(total - first_column, 0), size), total)

    def local(self, labels: Tensor) -> Tensor:
        """Converts labels of the full vocabulary to columns of this rank; -1 for labels that other ranks
        hold."""
        local = labels - self.first_column
        return local.masked_fill_((local < 0) | (local >= self.local_columns), -1)


class TokenValues(NamedTuple):
    """The values of each token, reduced over all tensor ranks unless noted, fp32 `[n]` each.

    logprobs: log p(label).
    logsumexp: log of the sum of exp(logit) over the vocabulary.
    highest: the largest logit on this rank alone.
    inverse: factor for this rank: p of one of its columns is exp(logit - highest) * inverse.
    entropy: in nats; None if not requested.
    mean_logit: mean over the columns in the softmax; None if not requested.
    is_top: 1 if no token is likelier than the label, else 0; None if not requested.
    """

    logprobs: Tensor
    logsumexp: Tensor
    highest: Tensor
    inverse: Tensor
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None


def _label_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the logits at the labels, fp32 `[rows]`.

    labels: columns of this rank; -1 for labels of other ranks, whose result is 0.
    """
    if torch.compiler.is_compiling():  # a full pass over the logits, which the compiler fuses with the other passes
        numbers = torch.arange(logits.shape[1], device=logits.device)
        return torch.where(numbers == labels[:, None], logits, 0.0).sum(-1, dtype=torch.float32)
    return logits.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1).float().masked_fill_(labels < 0, 0.0)


def _shifted_logits(logits: Tensor, highest: Tensor, temperature: float) -> Tensor:
    """Returns logit / temperature - highest, as a new fp32 tensor `[rows, local_columns]`."""
    if temperature == 1.0:
        return logits - highest[:, None]
    divided = logits / temperature if logits.dtype == torch.float32 else logits.float().div_(temperature)
    return divided.sub_(highest[:, None])


def _row_sums(logits: Tensor, labels: Tensor, statistics: bool, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns exp(logit - highest) `[rows, local_columns]`, and five sums of each row, `[5, rows]`; three
    without `statistics`.

    The sums are: the highest logit, the sum of exp(logit - highest), the label's logit, the sum of (logit -
    highest) * exp(logit - highest), and the sum of the logits. All logits are divided by the temperature, in
    fp32.
    """
    highest = logits.amax(-1).float() / temperature
    shifted = _shifted_logits(logits, highest, temperature)
    sums = [highest, highest, _label_logits(logits, labels) / temperature]
    if statistics:
        exp = shifted.exp()
        sums += [shifted.mul_(exp).sum(-1), logits.sum(-1, dtype=torch.float32) / temperature]
    else:
        exp = shifted.exp_()
    sums[1] = exp.sum(-1)
    return exp, torch.stack(sums)


def _combined(sums: Tensor, rank: int, columns: int) -> TokenValues:
    """Computes the `TokenValues` of tokens from the row sums of all tensor ranks, `[3 or 5, ranks, n]` (see
    `_row_sums`).

    rank: this rank's index. columns: number of columns in the softmax over all ranks.
    """
    if sums.shape[1] == 1:
        (highest, total, label, *extra), inverse = sums[:, 0].unbind(), sums[1, 0].reciprocal()
    else:
        highest = sums[0].amax(0)
        shift = sums[0] - highest
        share = shift.exp()
        total, label = (share * sums[1]).sum(0), sums[2].sum(0)
        inverse = share[rank] / total
        extra = [] if len(sums) == 3 else [(share * (sums[3] + shift * sums[1])).sum(0), sums[4].sum(0)]
    log_total = total.log()
    values = TokenValues(label - highest - log_total, highest + log_total, sums[0, rank], inverse)
    if not extra:
        return values
    entropy, mean_logit = log_total - extra[0] / total, extra[1] / columns
    return values._replace(entropy=entropy, mean_logit=mean_logit, is_top=(label >= highest).float())


def _with_slopes(loss: TokenLoss, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `loss(logprobs)`, the losses of tokens, and their derivatives with respect to `logprobs`."""
    if torch.compiler.is_compiling():  # the compiler does not support the autograd.grad used below

        def summed(x: Tensor) -> tuple[Tensor, Tensor]:
            losses = loss(x)
            return losses.sum(), losses

        slopes, (_, losses) = torch.func.grad_and_value(summed, has_aux=True)(logprobs)
        return losses, slopes
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        losses = loss(leaf)
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def _put_gradient(logits: Tensor, exp: Tensor, scale: Tensor, labels: Tensor, label_slope: Tensor) -> None:
    """Overwrites the logits of each row with their gradient: exp * scale, plus `label_slope` at the row's
    label.

    exp: exp(logit - highest), shaped as the logits. scale, labels, label_slope: `[rows]` each.
    """
    if torch.compiler.is_compiling():
        numbers = torch.arange(logits.shape[1], device=logits.device)
        logits.copy_(exp * scale[:, None] + torch.where(numbers == labels[:, None], label_slope[:, None], 0.0))
        return
    place = labels.clamp(min=0)[:, None]
    at_label = exp.gather(-1, place).squeeze(-1) * scale + label_slope.masked_fill(labels < 0, 0.0)
    torch.mul(exp, scale[:, None], out=logits)
    logits.scatter_(-1, place, at_label[:, None].to(logits.dtype))


# -- functions of the logits of a chunk, `[rows, local_columns]`, and local labels `[rows]` ------------------


def row_sums(logits: Tensor, labels: Tensor, statistics: bool, temperature: float) -> Tensor:
    """Returns the sums of each row that the loss needs, `[3 or 5, rows]`; see `_row_sums`. Logits are divided
    by the temperature."""
    return _row_sums(logits, labels, statistics, temperature)[1]


class Slopes(NamedTuple):
    """The factors of the gradient of a row's logits, fp32 `[rows]` each.

    The gradient is exp(logit - highest) * scale, plus `label_slope` at the label.
    """

    highest: Tensor
    scale: Tensor
    label_slope: Tensor


def loss_rows(
    logits: Tensor,
    sums: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    loss: TokenLoss,
    z_loss: float,
    statistics: bool,
    gradient: bool,
    rank: int,
    columns: int,
) -> Tensor:
    """Returns the weighted loss of each row, `[1, rows]`; with `statistics` also weighted entropy and top-1
    flag, `[3, rows]`.

    The top-1 flag is 1 if the label is the likeliest token.

    labels: columns of this rank, -1 for labels of other ranks.
    sums: results of `row_sums` on all tensor ranks, `[3 or 5, ranks, rows]`; None for a single rank.
    z_loss: coefficient of logsumexp^2. It changes the gradient, but not the returned loss.
    gradient: overwrite the logits with their gradient.
    rank, columns: index of this rank, and number of columns in the softmax over all ranks.
    """
    exp, sums = (None, sums) if sums is not None else _own_sums(logits, labels, statistics)
    losses, slopes = _losses(sums, weights, loss, z_loss, statistics, gradient, rank, columns)
    if slopes is not None:
        exp = (logits - slopes.highest[:, None]).exp_() if exp is None else exp
        _put_gradient(logits, exp, slopes.scale, labels, slopes.label_slope)
    return losses


def _loss_slopes(
    logits: Tensor, sums: Tensor | None, labels: Tensor, weights: Tensor, *options: Any
) -> tuple[Tensor, Slopes | None]:
    """Returns the result of `loss_rows`, and the `Slopes` that give the logits' gradient. It does not change
    the logits."""
    sums = _own_sums(logits, labels, options[2])[1] if sums is None else sums
    return _losses(sums, weights, *options)


def _own_sums(logits: Tensor, labels: Tensor, statistics: bool) -> tuple[Tensor, Tensor]:
    """Returns the results of `_row_sums` for a single rank; the sums get a dimension of ranks, `[3 or 5, 1,
    rows]`."""
    exp, sums = _row_sums(logits, labels, statistics)
    return exp, sums.unsqueeze(1)


def _losses(
    sums: Tensor,
    weights: Tensor,
    loss: TokenLoss,
    z_loss: float,
    statistics: bool,
    gradient: bool,
    rank: int,
    columns: int,
) -> tuple[Tensor, Slopes | None]:
    values = _combined(sums, rank, columns)
    slopes = None
    if gradient:
        losses, loss_slopes = _with_slopes(loss, values.logprobs)
        label_slope = loss_slopes * weights
        sum_slope = 2 * z_loss * values.logsumexp * weights - label_slope if z_loss else -label_slope
        slopes = Slopes(values.highest, sum_slope * values.inverse, label_slope)
    else:
        losses = loss(values.logprobs)
    rows = [losses, *((values.entropy, values.is_top) if statistics else ())]
    return torch.stack(rows) * weights, slopes


def _put_loss_gradient(logits: Tensor, highest: Tensor, scale: Tensor, label_slope: Tensor, labels: Tensor) -> Tensor:
    """Overwrites the logits with their gradient, given the three `Slopes` that `_loss_slopes` returned.
    Returns `scale`."""
    _put_gradient(logits, (logits - highest[:, None]).exp_(), scale, labels, label_slope)
    return scale


def put_logprob_gradient(
    logits: Tensor, highest: Tensor, inverse: Tensor, labels: Tensor, grad: Tensor, temperature: float
) -> Tensor:
    """Overwrites the logits with their gradient, given `grad` `[rows]` fp32, the gradient of log p(label).
    Returns `grad`.

    p is the softmax of the logits divided by the temperature.

    highest, inverse: as in `TokenValues`. labels: columns of this rank, -1 for labels of other ranks.
    """
    exp, label_slope = _shifted_logits(logits, highest, temperature).exp_(), grad / temperature
    _put_gradient(logits, exp, -label_slope * inverse, labels, label_slope)
    return grad


class Kernels(NamedTuple):
    """The functions `row_sums`, `loss_rows` and `put_logprob_gradient`, either plain or compiled."""

    row_sums: Callable[..., Tensor]
    loss_rows: Callable[..., Tensor]
    put_logprob_gradient: Callable[..., Tensor]


def _in_slices(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wraps a function of logits and per-row tensors, so that it runs on a few rows at a time. This bounds
    its memory."""

    def sliced(logits: Tensor, *inputs: object) -> Tensor:
        rows, size = logits.shape
        step = max(1, (SLICE if logits.device.type == "cuda" else min(SLICE, CPU_SLICE)) // max(1, size))
        if rows <= step:
            return function(logits, *inputs)
        parts = []
        for start in range(0, rows, step):
            sliced_inputs = [x[..., start : start + step] if isinstance(x, Tensor) else x for x in inputs]
            parts.append(function(logits[start : start + step], *sliced_inputs))
        return torch.cat(parts, -1)

    return sliced


def plain_kernels() -> Kernels:
    """Returns the uncompiled functions, which run on slices of a few rows."""
    return Kernels(_in_slices(row_sums), _in_slices(loss_rows), _in_slices(put_logprob_gradient))


def compiled_kernels() -> Kernels:
    """Returns the functions compiled by torch.compile, for any number of rows.

    Loss and gradient are two graphs, one for values per row and one for values per logit. In a single graph
    the compiler would recompute the values per row for each logit.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        fast = torch.compile(function, fullgraph=True)

        def run(logits: Tensor, *inputs: object) -> Any:
            for x in (logits, *inputs):
                if isinstance(x, Tensor):
                    torch._dynamo.maybe_mark_dynamic(x, 0 if x is logits else x.dim() - 1)
            return fast(logits, *inputs)

        return run

    slopes_of, put = compiled(_loss_slopes), compiled(_put_loss_gradient)

    def loss_of(logits: Tensor, sums: Tensor | None, labels: Tensor, *inputs: object) -> Tensor:
        losses, slopes = slopes_of(logits, sums, labels, *inputs)
        if slopes is not None:
            put(logits, *slopes, labels)
        return losses

    return Kernels(compiled(row_sums), loss_of, compiled(put_logprob_gradient))


# -- over all ranks ------------------------------------------------------------------------------------------


def sums_of_ranks(
    logits: Tensor, labels: Tensor, part: VocabPart, kernels: Kernels, statistics: bool, temperature: float = 1.0
) -> Tensor:
    """Gathers the result of `row_sums` from every tensor rank, `[3 or 5, ranks, rows]`, in one all-gather.

    labels: columns of this rank, -1 for labels of other ranks; `[rows]`.
    """
    if part.local_columns:
        sums = kernels.row_sums(logits[:, : part.local_columns], labels, statistics, temperature)
    else:  # this rank has only padding: its highest logit is below all others, and finite
        sums = torch.zeros(5 if statistics else 3, len(logits), device=logits.device)
        sums[0] = -1e30
    ranks = 1 if part.group is None else dist.get_world_size(part.group)
    return gather_from_tensor(sums, part.group).view(len(sums), ranks, -1)


def values_of(
    logits: Tensor, labels: Tensor, part: VocabPart, kernels: Kernels, statistics: bool, temperature: float
) -> TokenValues:
    """Returns the `TokenValues` of tokens from this rank's logits `[rows, vocab/T]`, divided by the
    temperature in fp32.

    All values except `highest` and `inverse` are the same on every tensor rank.

    labels: columns of this rank, -1 for labels of other ranks; `[rows]`.
    """
    return _combined(sums_of_ranks(logits, labels, part, kernels, statistics, temperature), part.rank, part.columns)


def chosen(values: Tensor, places: Tensor | None) -> Tensor:
    """Returns the rows of `values` at `places`; None: all of them."""
    return values if places is None else values.index_select(0, places)


def sums_of_rows(losses: Tensor, places: Tensor | None, shape: torch.Size) -> Tensor:
    """Returns the sum of each row's losses, `[batch]`.

    losses: `[n]`, of the tokens at `places` in `shape`, `[seq, batch]`; None: of all tokens.
    """
    if places is not None:
        losses = losses.new_zeros(shape.numel()).index_copy_(0, places, losses)
    return losses.view(shape).sum(0)


@dataclass(frozen=True)
class LossOfTokens:
    """A loss that is a sum over tokens of `loss` times the token's weight.

    loss: computes a token's loss from log p(label).
    z_loss: coefficient of logsumexp(logits)^2 of the same tokens; it changes the gradient, but not the loss
        value.
    statistics: also sum entropies and top-1 flags (whether the label is the likeliest token).
    row_sums: also sum the losses of each row of the batch.
    """

    loss: TokenLoss
    z_loss: float = 0.0
    statistics: bool = False
    row_sums: bool = False
