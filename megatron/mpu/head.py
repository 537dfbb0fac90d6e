"""The output layer and its losses: computes log-probabilities and losses from hidden states, in chunks of
tokens.

The logits of all tokens are never in memory at once. A loss that is a sum over tokens computes its gradients
in the forward pass, chunk by chunk, with three matrix products, as many as without chunks. Log-probabilities,
whose use is not known yet, compute the logits again in the backward pass.
torch 2.13's `linear_cross_entropy` is similar, but it only computes cross-entropy over an unsharded
vocabulary. It supports no z-loss, statistics or token weights, and breaks the graph of torch.compile.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.context import ContextRank
from megatron.mpu.cross_entropy import (
    Kernels,
    LossOfTokens,
    TokenValues,
    VocabPart,
    chosen,
    sums_of_ranks,
    sums_of_rows,
    values_of,
)  # fmt: skip
from megatron.mpu.mappings import gather_from_tensor, reduce_from_tensor
from megatron.mpu.products import PlainProduct, Product

CHUNK_BYTES = 340 * 2**20  # the most bytes that the logits of one chunk take
KEPT_BYTES = 2**29  # the most bytes of logits that are saved for the backward pass
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The output projection of hidden states to logits.

    Use it only within the forward pass of its module: with ZeRO 3 its weight is gathered only there.

    weight: `[vocab/T, hidden]`.
    product: multiplies hidden states by the weight.
    kernels: functions of a chunk of logits (row sums, losses, gradients), plain or compiled.
    softcap: c; logits are c tanh(x / c) of the products x. None: logits are the products.
    """

    weight: Tensor
    product: Product
    kernels: Kernels
    softcap: float | None = None

    def logits(self, x: Tensor) -> Tensor:
        """Returns the logits `[rows, vocab/T]` of hidden states x `[rows, hidden]`, without autograd."""
        outputs = self.product.output(x, self.weight)
        if self.softcap is not None:
            outputs.div_(self.softcap).tanh_().mul_(self.softcap)
        return outputs

    def slope(self, logits: Tensor) -> Tensor | None:
        """Returns the derivative of the logits with respect to the products before the softcap, fp32 `[rows,
        vocab/T]`.

        Returns None without softcap.
        """
        return None if self.softcap is None else 1 - (logits.float() * (1 / self.softcap)).square_()


class HeadInput(NamedTuple):
    """The final hidden states and the output layer, from which a loss computes only the logits it needs.

    hidden_states: after the final norm, `[seq, batch, hidden]`, full on every tensor rank, also under
        sequence parallelism; or only the positions that a batch asks for.
    head: the module of the output layer. head(hidden_states) returns this rank's logits `[..., vocab/T]`.
        head(hidden_states, function) returns function(hidden_states, `OutputLayer`).
    context: the columns of rows to which the hidden states belong; None: all. The functions of this file and
        of divergence.py take and return full rows nevertheless.
    further: hidden states of multi-token prediction, by depth from 1, of the shape of `hidden_states`; () if
        it does not run.

    Call `head` before the forward pass of the stage returns. If its weight is sharded over data ranks (ZeRO
    3), all data ranks must call it equally often.
    """

    hidden_states: Tensor
    head: Callable[..., Any]
    context: ContextRank | None = None
    further: tuple[Tensor, ...] = ()

    def logits(self) -> Tensor:
        """Returns this rank's logits of all positions in `hidden_states`, with context parallelism of full
        rows, `[..., vocab/T]`."""
        logits = self.head(self.hidden_states)
        return logits if self.context is None else self.context.full(logits)

    def use(self, function: Callable[[Tensor, OutputLayer], Result]) -> Result:
        """Returns `function(hidden states, output layer)`, called while the layer's weight is available."""
        return self.head(self.hidden_states, function)


class TokenStatistics(NamedTuple):
    """Statistics of the model's predicted distribution at each position, `[seq, batch]` fp32, without
    gradients."""

    entropy: Tensor  # in nats
    mean_logit: Tensor  # mean over the vocabulary columns in the softmax
    is_top: Tensor  # 1 if no token is likelier than the label, else 0


# -- chunks --------------------------------------------------------------------------------------------------


def chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Splits `rows` rows of `row_bytes` bytes into as few slices as `CHUNK_BYTES` allows.

    The slices have equal sizes, except for a shorter last one. Sizes are multiples of 64 where possible.
    """
    count = max(1, -(-rows * row_bytes // CHUNK_BYTES))
    step = max(1, min(-(-rows // count // 64) * 64, rows))  # matrix products are fast at multiples of 64
    return (slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step))


class HeadGradients:
    """Accumulates the gradients of the hidden states and of the output weight over chunks; the weight's in
    fp32.

    input_needs_grad: whether the hidden states, and the weight, need a gradient. The result of one that does
        not is None.
    """

    def __init__(self, layer: OutputLayer, hidden: Tensor, input_needs_grad: Sequence[bool]) -> None:
        self.is_needed = any(input_needs_grad)
        self._layer, self._needs_weight = layer, input_needs_grad[1]
        self._hidden = torch.empty_like(hidden) if input_needs_grad[0] else None
        self._sum: Tensor | None = None

    def add(self, chunk: slice, grad: Tensor, slope: Tensor | None, x: Tensor, weight: Tensor) -> None:
        """Adds the gradients that come from one chunk of tokens.

        grad: gradient of the chunk's logits, `[rows, vocab/T]`; it is overwritten.
        slope: from `OutputLayer.slope`; None without softcap.
        x: the chunk's hidden states, `[rows, hidden]`.
        """
        if slope is not None:
            grad.mul_(slope)
        if self._hidden is not None:
            self._hidden[chunk] = self._layer.product.input_gradient(grad, weight)
        if self._needs_weight:
            self._add_to_weight(grad, x)

    def _add_to_weight(self, grad: Tensor, x: Tensor) -> None:
        product, total = self._layer.product, self._sum
        wide = grad.dtype != torch.float32 and grad.device.type == "cuda"
        if not isinstance(product, PlainProduct) or (grad.dtype != torch.float32 and not wide):
            part = product.weight_gradient(grad, x).float()
            self._sum = part if total is None else total.add_(part)
        elif total is None:
            self._sum = torch.mm(grad.t(), x, out_dtype=torch.float32) if wide else grad.t() @ x
        elif wide:  # the product accumulates into the sum, in one pass over it
            torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(grad.t(), x)

    def scaled(self, scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of hidden states and weight times `scale`, the weight's in the dtype of the
        weight.

        It may overwrite the accumulated gradients.
        """
        hidden, total = None if self._hidden is None else self._hidden.mul_(scale), self._sum
        if total is None:
            return hidden, torch.zeros_like(self._layer.weight) if self._needs_weight else None
        if total.dtype == self._layer.weight.dtype:
            return hidden, total.mul_(scale)
        return hidden, torch.mul(total, scale, out=torch.empty_like(self._layer.weight))

    def total(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns the gradients of hidden states and weight, the weight's in the dtype of the weight."""
        weight = self._layer.weight
        if self._sum is None:
            return self._hidden, torch.zeros_like(weight) if self._needs_weight else None
        return self._hidden, self._sum.to(weight.dtype)


# -- sums of losses ------------------------------------------------------------------------------------------


class _LossSum(torch.autograd.Function):
    """Computes the sum of the tokens' losses, the sums of their statistics `[0 or 2]`, and the losses.

    The sum of losses has gradients, which are computed in the forward pass.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        labels: Tensor,
        weights: Tensor,
        part: VocabPart,
        kind: LossOfTokens,
        gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        gradients = HeadGradients(layer, hidden, [gradient and is_needed for is_needed in ctx.needs_input_grad[:2]])
        local, rows = part.local(labels), []
        for chunk in chunks(len(hidden), weight.shape[0] * hidden.element_size()):
            x = hidden[chunk]
            logits = layer.logits(x)
            slope = layer.slope(logits) if gradients.is_needed else None
            rows.append(
                _loss_rows(logits, local[chunk], weights[chunk], part, layer.kernels, kind, gradients.is_needed)
            )
            gradients.add(chunk, logits, slope, x, weight)
            del logits, slope  # frees their memory for the next chunk
        ctx.gradients = gradients
        tokens = torch.cat(rows, -1)
        sums, losses = tokens.sum(-1), tokens[0] if kind.row_sums else tokens[0, :0]
        loss, statistics = sums[0], sums[1:]
        ctx.mark_non_differentiable(statistics, losses)
        return loss.clone(), statistics, losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of the loss were freed by its one backward pass; run forward again")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.scaled(grad), *(None,) * 6


def _loss_rows(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    part: VocabPart,
    kernels: Kernels,
    kind: LossOfTokens,
    gradient: bool,
) -> Tensor:
    """Returns the weighted losses, and statistics, of a chunk of tokens over all tensor ranks, `[1 or 3,
    rows]`.

    gradient: overwrite the logits with their gradient. labels: columns of this rank, -1 for labels of other
        ranks.
    """
    sums = None if part.group is None else sums_of_ranks(logits, labels, part, kernels, kind.statistics)
    rows = kernels.loss_rows(
        logits[:, : part.local_columns], sums, labels, weights, kind.loss, kind.z_loss, kind.statistics,
        gradient and part.local_columns > 0, part.rank, part.columns,
    )  # fmt: skip
    if gradient and part.local_columns < logits.shape[1]:
        logits[:, part.local_columns :] = 0
    return rows


def token_loss_sum(
    head: HeadInput,
    labels: Tensor,
    weights: Tensor,
    kind: LossOfTokens,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the sum of the tokens' weighted losses, an fp32 scalar, and the sums of their statistics.

    Both are the same on every tensor rank. The statistics are entropy and top-1 flag, `[2]`, without
    gradients; `[0]` unless `kind.statistics`. With `kind.row_sums` the loss of each row follows, `[batch]`.
    If autograd is on, gradients are computed in the forward pass, so only one backward pass is possible.

    labels: `[seq, batch]` int64 within the full vocabulary.
    weights: `[seq, batch]`.
    columns: number of leading vocabulary columns in the softmax, the rest is padding; None: all.
    places: `[n]` int64, row-major positions in `[seq, batch]`; only these are computed; None: all.
    """
    gradient, context = torch.is_grad_enabled(), head.context
    if context is not None:
        labels, weights = context.local(labels), context.local_weights(weights)
        places = None if places is None else context.loss_places

    def use(hidden: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor, Tensor]:
        part = VocabPart.for_rank(layer.weight.shape[0], group, columns)
        flat = hidden.flatten(0, -2), labels.reshape(-1), weights.reshape(-1).float()
        x, chosen_labels, chosen_weights = (chosen(values, places) for values in flat)
        return _LossSum.apply(x, layer.weight, layer, chosen_labels, chosen_weights, part, kind, gradient)

    loss, statistics, losses = head.use(use)
    rows = sums_of_rows(losses, places, labels.shape) if kind.row_sums else None
    if context is not None:
        sums = context.total(torch.cat([loss.view(1), statistics]))
        loss, statistics = sums[0], sums[1:].detach()
        rows = rows if rows is None else context.total(rows)  # apart, so that the sum above keeps its bits
    return loss, statistics if rows is None else torch.cat([statistics, rows])


def _local_places(head: HeadInput, places: Tensor) -> tuple[Tensor, Tensor]:
    if head.context is None:
        return places, places
    return head.context.local_places(places, head.hidden_states.shape[1])


# -- scores --------------------------------------------------------------------------------------------------


def scores_of(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the scores `[...]` of hidden states `[..., hidden]` by an output layer with one output.

    Hidden states and scores are full on every tensor rank. The product is in fp32.

    weight: this rank's `[1, hidden/T]`.
    """
    width = weight.shape[1]
    begin = 0 if group is None else width * dist.get_rank(group)
    local_hidden = hidden[..., begin : begin + width].float()
    return reduce_from_tensor(local_hidden @ weight.float().squeeze(0), group)


def token_scores(head: HeadInput, places: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the scores of tokens by an output layer with one output (reward model), fp32 `[n]`, equal on
    all tensor ranks.

    places: `[n]` int64, row-major positions in `[seq, batch]` of the tokens; no other position is computed.
    """

    context, (local, is_own) = head.context, _local_places(head, places)

    def use(hidden: Tensor, layer: OutputLayer) -> Tensor:
        return scores_of(hidden.flatten(0, -2).index_select(0, local), layer.weight, group)

    scores = head.use(use)
    return scores if context is None else context.total(scores * is_own)


# -- log-probabilities ---------------------------------------------------------------------------------------


class _Logprobs(torch.autograd.Function):
    """Computes log p(label), entropy, mean logit and top-1 flag of tokens, fp32 `[n]` each.

    Only log p has gradients. The last three are computed only with `statistics`. Forward saves two numbers
    per token, and as many logits as `KEPT_BYTES` allows; backward computes the other logits again.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        layer: OutputLayer,
        labels: Tensor,
        part: VocabPart,
        statistics: bool,
        gradient: bool,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        local, kept_logits, values = part.local(labels), list[Tensor](), list[TokenValues]()
        left = KEPT_BYTES if gradient and any(ctx.needs_input_grad[:2]) else 0
        for chunk in chunks(len(hidden), weight.shape[0] * hidden.element_size()):
            logits = layer.logits(hidden[chunk])
            values.append(values_of(logits, local[chunk], part, layer.kernels, statistics, temperature))
            if len(kept_logits) + 1 == len(values) and logits.nbytes <= left:
                kept_logits.append(logits)
                left -= logits.nbytes
            del logits
        names = ("logprobs", "highest", "inverse", *(TokenStatistics._fields if statistics else ()))
        logprobs, highest, inverse, *extra = (
            torch.cat([getattr(chunk_values, name) for chunk_values in values]) for name in names
        )
        ctx.save_for_backward(hidden, weight, local, highest, inverse)
        ctx.kept_logits, ctx.layer, ctx.part, ctx.temperature = kept_logits, layer, part, temperature
        ctx.mark_non_differentiable(*extra)
        return logprobs, *extra

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.kept_logits is None:
            raise RuntimeError(
                "the saved tensors of the log-probabilities were freed by their one backward pass; run forward again"
            )
        hidden, weight, local, highest, inverse = ctx.saved_tensors
        layer, part, kept_logits = ctx.layer, ctx.part, ctx.kept_logits[::-1]
        ctx.kept_logits = None
        gradients = HeadGradients(layer, hidden, ctx.needs_input_grad[:2])
        for chunk in chunks(len(hidden), weight.shape[0] * hidden.element_size()):
            x = hidden[chunk]
            logits = kept_logits.pop() if kept_logits else layer.logits(x)
            slope = layer.slope(logits)
            if part.local_columns:
                rows = (values[chunk] for values in (highest, inverse, local, grad))
                layer.kernels.put_logprob_gradient(logits[:, : part.local_columns], *rows, ctx.temperature)
            logits[:, part.local_columns :] = 0
            gradients.add(chunk, logits, slope, x, weight)
            del logits, slope
        return *gradients.total(), *(None,) * 6


def _logprobs(
    head: HeadInput,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None,
    places: Tensor | None,
    statistics: bool,
    temperature: float,
) -> tuple[Tensor, ...]:
    gradient, context = torch.is_grad_enabled(), head.context
    if context is not None:
        labels, places = context.local(labels), None if places is None else context.loss_places

    def use(hidden: Tensor, layer: OutputLayer) -> tuple[Tensor, ...]:
        part = VocabPart.for_rank(layer.weight.shape[0], group, columns)
        x, chosen_labels = (chosen(values, places) for values in (hidden.flatten(0, -2), labels.reshape(-1)))
        results = _Logprobs.apply(x, layer.weight, layer, chosen_labels, part, statistics, gradient, temperature)
        if places is not None:
            results = tuple(result.new_zeros(labels.numel()).index_copy(0, places, result) for result in results)
        return tuple(result.view(labels.shape) for result in results)

    results = head.use(use)
    if context is None:
        return results
    logprobs, *extra = context.full(torch.stack(results, -1)).unbind(-1)
    return logprobs, *(values.detach() for values in extra)


def token_logprobs(
    head: HeadInput,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Returns log p(label) of every token, fp32 `[seq, batch]`, the same on every tensor rank.

    labels: `[seq, batch]` int64 within the full vocabulary.
    columns: number of leading vocabulary columns in the softmax, the rest is padding; None: all.
    places: `[n]` int64, row-major positions in `[seq, batch]` to compute; all others are 0. None: all.
    temperature: divides the logits, in fp32.

    Only one backward pass is possible.
    """
    return _logprobs(head, labels, group, columns, places, False, temperature)[0]


def token_logprobs_and_statistics(
    head: HeadInput,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, TokenStatistics]:
    """Returns the result of `token_logprobs`, and the `TokenStatistics` of each token in the same shape and
    dtype."""
    logprobs, *statistics = _logprobs(head, labels, group, columns, places, True, temperature)
    return logprobs, TokenStatistics(*statistics)


def choose_tokens(
    head: HeadInput,
    places: Tensor,
    choose: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns the token that `choose` picks at each of some positions, int64 `[n]`, and its log-probability,
    fp32 `[n]`.

    The log-probabilities are bit-identical to those of `token_logprobs` without `places`.

    places: `[n]` int64, row-major positions in `[seq, batch]`.
    choose: maps logits `[n, vocab]` to tokens. The logits are full on every tensor rank, and divided by the
        temperature.
    columns: number of leading vocabulary columns in the softmax, the rest is padding; None: all.
    temperature: divides the logits, in fp32.
    """

    context, (local, is_own) = head.context, _local_places(head, places)

    def use(hidden: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
        part = VocabPart.for_rank(layer.weight.shape[0], group, columns)
        rows, parts = hidden.flatten(0, -2), []
        for chunk in chunks(len(rows), layer.weight.shape[0] * hidden.element_size()):
            in_chunk = (local >= chunk.start) & (local < chunk.stop)
            parts.append((in_chunk, layer.logits(rows[chunk])[local[in_chunk] - chunk.start]))
        logits = parts[0][1].new_empty(len(places), layer.weight.shape[0])
        for in_chunk, chunk_logits in parts:
            logits[in_chunk] = chunk_logits
        if context is not None:
            logits = context.total(logits * is_own.unsqueeze(1))
        full_logits = gather_from_tensor(logits, group)[:, : part.columns]
        tokens = choose(full_logits if temperature == 1.0 else full_logits.float() / temperature)
        values = values_of(logits, part.local(tokens.clamp(min=0)), part, layer.kernels, False, temperature)
        return tokens, values.logprobs

    return head.use(use)
