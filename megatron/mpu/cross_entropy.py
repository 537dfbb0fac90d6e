"""Vocab-parallel cross-entropy of the logits of some tokens, over a vocabulary that may be split over tensor
ranks (arXiv 1909.08053, section 3): log-probabilities of labels, statistics, and the gradient of the logits.

Everything is fp32, whatever the dtype of the logits. A function here is elementwise but for sums over a row
of logits, so that torch.compile makes one kernel or two of each; run as it is, it works on slices of a few
rows, which bounds the memory for fp32 copies.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.mappings import gather_from_tensor

# Logits in a slice: 128 MiB in fp32, of which one or two live at once; on a CPU what its caches hold.
SLICE, CPU_SLICE = 2**25, 2**20

# From log p(label) of tokens to their losses, each of its own token alone, fp32 `[n]`.
TokenLoss = Callable[[Tensor], Tensor]


class VocabPart(NamedTuple):
    """This rank's part of the vocabulary.

    group, rank: the tensor ranks it is cut over, None for one, and the number of this one. first: of its
    columns in the whole. own: how many of them take part in the softmax, the others pad the vocabulary.
    columns: how many take part on all ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    first: int
    own: int
    columns: int

    @classmethod
    def of(cls, size: int, group: dist.ProcessGroup | None, columns: int | None) -> "VocabPart":
        """The part of a rank that has `size` columns; columns: of the whole vocabulary, the first that take
        part (None: all)."""
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        total, first = size * ranks if columns is None else columns, rank * size
        return cls(group, rank, first, min(max(total - first, 0), size), total)

    def local(self, labels: Tensor) -> Tensor:
        """Labels as numbers of this rank's columns; -1 where another rank has them."""
        local = labels - self.first
        return local.masked_fill_((local < 0) | (local >= self.own), -1)


class TokenValues(NamedTuple):
    """What is known of each token once all ranks have been asked, fp32 `[n]` each.

    logprobs: log p(label). logsumexp: of the logits. highest: of this rank's logits; inverse: p of one of
    its columns is exp(logit - highest) * inverse. entropy (nats), mean_logit (over the columns that take
    part), is_top (1 where no token is likelier than the label): None where they were not asked for.
    """

    logprobs: Tensor
    logsumexp: Tensor
    highest: Tensor
    inverse: Tensor
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None


def _at(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits at local labels in fp32, 0 where another rank has them, `[rows]`."""
    if torch.compiler.is_compiling():  # what is read in the same order as all else is read by the same kernel
        numbers = torch.arange(logits.shape[1], device=logits.device)
        return torch.where(numbers == labels[:, None], logits, 0.0).sum(-1, dtype=torch.float32)
    return logits.gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1).float().masked_fill_(labels < 0, 0.0)


def _below(logits: Tensor, highest: Tensor, temperature: float) -> Tensor:
    """logit / temperature - highest, fp32 in memory of its own; `[rows, own]`."""
    if temperature == 1.0:
        return logits - highest[:, None]
    divided = logits / temperature if logits.dtype == torch.float32 else logits.float().div_(temperature)
    return divided.sub_(highest[:, None])


def _row_sums(logits: Tensor, labels: Tensor, statistics: bool, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """exp(logit - highest) `[rows, own]`; and of each row the highest logit, the sum of these, the label's
    logit, with `statistics` the sums of (logit - highest) * exp and of the logits: `[3 or 5, rows]`. All are
    of logits divided by the temperature, in fp32."""
    highest = logits.amax(-1).float() / temperature
    shifted = _below(logits, highest, temperature)
    found = [highest, highest, _at(logits, labels) / temperature]
    if statistics:
        exp = shifted.exp()
        found += [shifted.mul_(exp).sum(-1), logits.sum(-1, dtype=torch.float32) / temperature]
    else:
        exp = shifted.exp_()
    found[1] = exp.sum(-1)
    return exp, torch.stack(found)


def _combined(sums: Tensor, rank: int, columns: int) -> TokenValues:
    """The values of tokens from the sums of all ranks, `[3 or 5, ranks, n]`."""
    if sums.shape[1] == 1:
        (highest, total, label, *more), inverse = sums[:, 0].unbind(), sums[1, 0].reciprocal()
    else:
        highest = sums[0].amax(0)
        below = sums[0] - highest
        share = below.exp()
        total, label = (share * sums[1]).sum(0), sums[2].sum(0)
        inverse = share[rank] / total
        more = [] if len(sums) == 3 else [(share * (sums[3] + below * sums[1])).sum(0), sums[4].sum(0)]
    log_total = total.log()
    found = TokenValues(label - highest - log_total, highest + log_total, sums[0, rank], inverse)
    if not more:
        return found
    entropy, mean_logit = log_total - more[0] / total, more[1] / columns
    return found._replace(entropy=entropy, mean_logit=mean_logit, is_top=(label >= highest).float())


def _with_slopes(loss: TokenLoss, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of tokens, and their derivatives."""
    if torch.compiler.is_compiling():  # which does not know the other way

        def summed(x: Tensor) -> tuple[Tensor, Tensor]:
            losses = loss(x)
            return losses.sum(), losses

        slopes, (_, losses) = torch.func.grad_and_value(summed, has_aux=True)(logprobs)
        return losses, slopes
    with torch.enable_grad():
        leaf = logprobs.detach().requires_grad_()
        losses = loss(leaf)
        return losses.detach(), torch.autograd.grad(losses.sum(), leaf)[0]


def _put_gradient(logits: Tensor, exp: Tensor, scale: Tensor, labels: Tensor, of_label: Tensor) -> None:
    """Make the logits their gradient: exp * scale, and at the labels `of_label` more; `[rows]` each."""
    if torch.compiler.is_compiling():
        numbers = torch.arange(logits.shape[1], device=logits.device)
        logits.copy_(exp * scale[:, None] + torch.where(numbers == labels[:, None], of_label[:, None], 0.0))
        return
    place = labels.clamp(min=0)[:, None]
    at_label = exp.gather(-1, place).squeeze(-1) * scale + of_label.masked_fill(labels < 0, 0.0)
    torch.mul(exp, scale[:, None], out=logits)
    logits.scatter_(-1, place, at_label[:, None].to(logits.dtype))


# -- what is done to the logits of a chunk: `[rows, own]`, labels local `[rows]` -----------------------------


def row_sums(logits: Tensor, labels: Tensor, statistics: bool, temperature: float) -> Tensor:
    """The sums of each row `[3 or 5, rows]` from which `_combined` makes values, of logits divided by the
    temperature."""
    return _row_sums(logits, labels, statistics, temperature)[1]


class Slopes(NamedTuple):
    """What makes a row's logits their gradient, fp32 `[rows]` each: exp(logit - highest) * scale, and
    `of_label` more at the label."""

    highest: Tensor
    scale: Tensor
    of_label: Tensor


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
    """The loss of each row times its weight, with `statistics` its entropy and whether its label is the
    likeliest, times its weight too: `[1 or 3, rows]`.

    sums: `[3 or 5, ranks, rows]` of all ranks; None: there is one. gradient: the logits become their
    gradient, z_loss * logsumexp^2 included, which the value leaves out."""
    exp, sums = (None, sums) if sums is not None else _own_sums(logits, labels, statistics)
    found, slopes = _losses(sums, weights, loss, z_loss, statistics, gradient, rank, columns)
    if slopes is not None:
        exp = (logits - slopes.highest[:, None]).exp_() if exp is None else exp
        _put_gradient(logits, exp, slopes.scale, labels, slopes.of_label)
    return found


def _loss_slopes(
    logits: Tensor, sums: Tensor | None, labels: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor, Slopes | None]:
    """The first half of `loss_rows`, which leaves the logits as they are."""
    sums = _own_sums(logits, labels, rest[2])[1] if sums is None else sums
    return _losses(sums, weights, *rest)


def _own_sums(logits: Tensor, labels: Tensor, statistics: bool) -> tuple[Tensor, Tensor]:
    """What `_row_sums` returns, with the sums in the shape of all ranks', of which there is one."""
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
        losses, of_losses = _with_slopes(loss, values.logprobs)
        of_label = of_losses * weights
        of_sum = 2 * z_loss * values.logsumexp * weights - of_label if z_loss else -of_label
        slopes = Slopes(values.highest, of_sum * values.inverse, of_label)
    else:
        losses = loss(values.logprobs)
    found = [losses, *((values.entropy, values.is_top) if statistics else ())]
    return torch.stack(found) * weights, slopes


def _put_loss_gradient(logits: Tensor, highest: Tensor, scale: Tensor, of_label: Tensor, labels: Tensor) -> Tensor:
    """The second half of `loss_rows`."""
    _put_gradient(logits, (logits - highest[:, None]).exp_(), scale, labels, of_label)
    return scale


def put_logprob_gradient(
    logits: Tensor, highest: Tensor, inverse: Tensor, labels: Tensor, grad: Tensor, temperature: float
) -> Tensor:
    """Make the logits their gradient where that of log p(label) is `grad`, fp32 `[rows]`, and p is of logits
    divided by the temperature; highest, inverse: as of `TokenValues`. Returns `grad`."""
    exp, of_label = _below(logits, highest, temperature).exp_(), grad / temperature
    _put_gradient(logits, exp, -of_label * inverse, labels, of_label)
    return grad


class Kernels(NamedTuple):
    """The functions above, as they are or compiled."""

    row_sums: Callable[..., Tensor]
    loss_rows: Callable[..., Tensor]
    put_logprob_gradient: Callable[..., Tensor]


def _in_slices(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function of logits and rows, on a few rows at a time."""

    def sliced(logits: Tensor, *given: object) -> Tensor:
        rows, size = logits.shape
        step = max(1, (SLICE if logits.device.type == "cuda" else min(SLICE, CPU_SLICE)) // max(1, size))
        if rows <= step:
            return function(logits, *given)
        parts = []
        for start in range(0, rows, step):
            cut = [x[..., start : start + step] if isinstance(x, Tensor) else x for x in given]
            parts.append(function(logits[start : start + step], *cut))
        return torch.cat(parts, -1)

    return sliced


def plain_kernels() -> Kernels:
    """The functions as they are, on slices."""
    return Kernels(_in_slices(row_sums), _in_slices(loss_rows), _in_slices(put_logprob_gradient))


def compiled_kernels() -> Kernels:
    """The functions, compiled for any number of rows. What is computed of a row is kept apart from what is
    done to each of its logits: in one graph the compiler would compute it for each of them again."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        fast = torch.compile(function, fullgraph=True)

        def run(logits: Tensor, *given: object) -> Any:
            for x in (logits, *given):
                if isinstance(x, Tensor):
                    torch._dynamo.maybe_mark_dynamic(x, 0 if x is logits else x.dim() - 1)
            return fast(logits, *given)

        return run

    slopes_of, put = compiled(_loss_slopes), compiled(_put_loss_gradient)

    def loss_of(logits: Tensor, sums: Tensor | None, labels: Tensor, *given: object) -> Tensor:
        found, slopes = slopes_of(logits, sums, labels, *given)
        if slopes is not None:
            put(logits, *slopes, labels)
        return found

    return Kernels(compiled(row_sums), loss_of, compiled(put_logprob_gradient))


# -- over all ranks ------------------------------------------------------------------------------------------


def sums_of_ranks(
    logits: Tensor, labels: Tensor, part: VocabPart, kernels: Kernels, statistics: bool, temperature: float = 1.0
) -> Tensor:
    """`row_sums` of every rank, `[3 or 5, ranks, rows]`, by one all-gather. labels: local `[rows]`."""
    if part.own:
        sums = kernels.row_sums(logits[:, : part.own], labels, statistics, temperature)
    else:  # nothing but padding: below all others, and finite
        sums = torch.zeros(5 if statistics else 3, len(logits), device=logits.device)
        sums[0] = -1e30
    ranks = 1 if part.group is None else dist.get_world_size(part.group)
    return gather_from_tensor(sums, part.group).view(len(sums), ranks, -1)


def values_of(
    logits: Tensor, labels: Tensor, part: VocabPart, kernels: Kernels, statistics: bool, temperature: float
) -> TokenValues:
    """The values of tokens from this rank's logits `[rows, vocab/T]`, which the temperature divides in fp32,
    the same on every tensor rank but for `highest` and `inverse`. labels: local `[rows]`."""
    return _combined(sums_of_ranks(logits, labels, part, kernels, statistics, temperature), part.rank, part.columns)
