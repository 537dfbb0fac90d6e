"""The output layer and its loss: what the last pipeline stage hands to an objective, and how
log-probabilities and losses are made from it a chunk of tokens at a time.

The logits of all tokens are never there at once. A loss that is a sum over tokens has its gradients made in
the forward pass, chunk by chunk as the logits are there (three products in all, as many as without chunks);
log-probabilities of which is not known what becomes of them make the logits again in the backward pass.
torch's own `linear_cross_entropy` (2.13) does the former for a whole vocabulary and cross-entropy alone: it
knows no tensor ranks, no z-loss, no statistics and no weights of tokens, and torch.compile breaks at it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.cross_entropy import Kernels, TokenLoss, TokenValues, VocabPart, sums_of_ranks, values_of
from megatron.mpu.mappings import gather_from_tensor, reduce_from_tensor
from megatron.mpu.products import PlainProduct, Product

CHUNK_BYTES = 340 * 2**20  # of the logits of a chunk
KEPT_BYTES = 2**29  # of logits that may be kept for the backward pass
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """The output projection inside the forward pass of its module, where its weight is there.

    weight: `[vocab/T, hidden]`. product: by which it is multiplied. kernels: for the logits of a chunk.
    softcap: c of products x whose logits are c tanh(x / c); None: they are the products.
    """

    weight: Tensor
    product: Product
    kernels: Kernels
    softcap: float | None = None

    def logits(self, x: Tensor) -> Tensor:
        """The logits `[rows, vocab/T]` of hidden states `[rows, hidden]`, outside autograd."""
        found = self.product.output(x, self.weight)
        if self.softcap is not None:
            found.div_(self.softcap).tanh_().mul_(self.softcap)
        return found

    def slope(self, logits: Tensor) -> Tensor | None:
        """The derivative of logits by the products that they are made of, fp32; None where it is 1."""
        return None if self.softcap is None else 1 - (logits.float() * (1 / self.softcap)).square_()


class HeadInput(NamedTuple):
    """The final hidden states and the output layer, so that a loss computes only the logits that it needs.

    hidden_states: after the final norm, `[seq, batch, hidden]`, whole on every tensor rank, under sequence
    parallelism too; or only the positions that a batch asks for.
    head: the module of the output layer: of hidden states `[..., hidden]` this rank's logits `[...,
    vocab/T]`, or of hidden states and a function what this makes of them and the `OutputLayer`. Where its
    weight is sharded over data ranks (ZeRO 3) all of them must call it equally often. It must be called
    before the forward pass of the stage returns."""

    hidden_states: Tensor
    head: Callable[..., Any]

    def logits(self) -> Tensor:
        """This rank's logits of all positions, `[..., vocab/T]`."""
        return self.head(self.hidden_states)

    def use(self, function: Callable[[Tensor, OutputLayer], Result]) -> Result:
        """What `function` makes of the hidden states and the output layer."""
        return self.head(self.hidden_states, function)


class TokenStatistics(NamedTuple):
    """Statistics of the predicted distribution at each position, `[seq, batch]` fp32, without gradients."""

    entropy: Tensor  # nats
    mean_logit: Tensor  # over the columns that take part in the softmax
    is_top: Tensor  # 1 where no token is likelier than the label


# -- chunks --------------------------------------------------------------------------------------------------


def chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """As few chunks of nearly equal numbers of rows as `CHUNK_BYTES` allows, of two sizes at most."""
    count = max(1, -(-rows * row_bytes // CHUNK_BYTES))
    step = max(1, min(-(-rows // count // 64) * 64, rows))  # of sizes that products are fast in
    return (slice(start, min(start + step, rows)) for start in range(0, max(1, rows), step))


class WeightGradient:
    """The gradient of the weight, summed over chunks in fp32."""

    def __init__(self, layer: OutputLayer) -> None:
        self._layer = layer
        self._sum: Tensor | None = None

    def add(self, grad: Tensor, x: Tensor) -> None:
        """grad `[rows, vocab/T]` of the logits of `x` `[rows, hidden]`."""
        product, found = self._layer.product, self._sum
        wide = grad.dtype != torch.float32 and grad.device.type == "cuda"
        if not isinstance(product, PlainProduct) or (grad.dtype != torch.float32 and not wide):
            part = product.weight_gradient(grad, x).float()
            self._sum = part if found is None else found.add_(part)
        elif found is None:
            self._sum = torch.mm(grad.t(), x, out_dtype=torch.float32) if wide else grad.t() @ x
        elif wide:  # the product itself adds, and reads and writes the sum once
            torch.addmm(found, grad.t(), x, out_dtype=torch.float32, out=found)
        else:
            found.addmm_(grad.t(), x)

    def scaled(self, scale: Tensor) -> Tensor:
        """The sum times a scalar, in the dtype of the weight. The sum is gone then."""
        found, self._sum = self._sum, None
        if found is None:
            return torch.zeros_like(self._layer.weight)
        if found.dtype == self._layer.weight.dtype:
            return found.mul_(scale)
        return torch.mul(found, scale, out=torch.empty_like(self._layer.weight))

    def whole(self) -> Tensor:
        """The sum, in the dtype of the weight."""
        weight = self._layer.weight
        return torch.zeros_like(weight) if self._sum is None else self._sum.to(weight.dtype)


# -- sums of losses ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossOfTokens:
    """A loss that is a sum over tokens: of each its `loss`, times its weight.

    z_loss: coefficient of logsumexp^2 of the same tokens, in the gradient alone. statistics: entropies, and
    whether the label is the likeliest token, are summed too.
    """

    loss: TokenLoss
    z_loss: float = 0.0
    statistics: bool = False


class _LossSum(torch.autograd.Function):
    """The sums of losses and statistics `[1 or 3]`; the first has gradients, made with it."""

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
    ) -> tuple[Tensor, Tensor]:
        of_hidden = torch.empty_like(hidden) if gradient and ctx.needs_input_grad[0] else None
        of_weight = WeightGradient(layer) if gradient and ctx.needs_input_grad[1] else None
        gradient = of_hidden is not None or of_weight is not None
        local, rows = part.local(labels), []
        for chunk in chunks(len(hidden), weight.shape[0] * hidden.element_size()):
            x = hidden[chunk]
            logits = layer.logits(x)
            slope = layer.slope(logits) if gradient else None
            rows.append(_loss_rows(logits, local[chunk], weights[chunk], part, layer.kernels, kind, gradient))
            if slope is not None:
                logits.mul_(slope)
            if of_hidden is not None:
                of_hidden[chunk] = layer.product.input_gradient(logits, weight)
            if of_weight is not None:
                of_weight.add(logits, x)
            del logits, slope  # before the next are made
        ctx.gradients = of_hidden, of_weight
        sums = torch.cat(rows, -1).sum(-1)
        loss, more = sums[0], sums[1:]
        ctx.mark_non_differentiable(more)
        return loss.clone(), more

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the gradients of a loss in chunks are there for one backward pass")
        (of_hidden, of_weight), ctx.gradients = ctx.gradients, None
        found = None if of_hidden is None else of_hidden.mul_(grad)
        return found, None if of_weight is None else of_weight.scaled(grad), *(None,) * 6


def _loss_rows(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    part: VocabPart,
    kernels: Kernels,
    kind: LossOfTokens,
    gradient: bool,
) -> Tensor:
    """`loss_rows` over all tensor ranks; the logits become their gradient where it is asked for."""
    sums = None if part.group is None else sums_of_ranks(logits, labels, part, kernels, kind.statistics)
    found = kernels.loss_rows(
        logits[:, : part.own], sums, labels, weights, kind.loss, kind.z_loss, kind.statistics,
        gradient and part.own > 0, part.rank, part.columns,
    )  # fmt: skip
    if gradient and part.own < logits.shape[1]:
        logits[:, part.own :] = 0
    return found


def token_loss_sum(
    head: HeadInput,
    labels: Tensor,
    weights: Tensor,
    kind: LossOfTokens,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of the losses of tokens, fp32 scalar, and with `LossOfTokens.statistics` those of their
    entropies and of whether their labels are the likeliest, `[2]`, without gradients (else `[0]`).

    labels: `[seq, batch]` int64 within the whole vocabulary; weights: `[seq, batch]`; columns: of the whole
    vocabulary, the first that take part in the softmax (None: all), the others pad it; places: `[n]` int64,
    row-major among `[seq, batch]`, the only ones that go through the head (None: all). The same on every
    tensor rank. Gradients are made only where autograd is on, and serve for one backward pass.
    """
    gradient = torch.is_grad_enabled()

    def use(hidden: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
        part = VocabPart.of(layer.weight.shape[0], group, columns)
        flat = hidden.flatten(0, -2), labels.reshape(-1), weights.reshape(-1).float()
        x, of_labels, of_weights = (chosen(values, places) for values in flat)
        return _LossSum.apply(x, layer.weight, layer, of_labels, of_weights, part, kind, gradient)

    return head.use(use)


def chosen(values: Tensor, places: Tensor | None) -> Tensor:
    return values if places is None else values.index_select(0, places)


# -- scores --------------------------------------------------------------------------------------------------


def scores_of(hidden: Tensor, weight: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The scores `[...]` of hidden states `[..., hidden]`, which are whole on every tensor rank, as are the
    scores; the product is in fp32. weight: `[1, hidden/T]`."""
    width = weight.shape[1]
    begin = 0 if group is None else width * dist.get_rank(group)
    own = hidden[..., begin : begin + width].float()
    return reduce_from_tensor(own @ weight.float().squeeze(0), group)


def token_scores(head: HeadInput, places: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The scores of tokens by a head of one output, fp32 `[n]`, the same on every tensor rank.

    places: `[n]` int64, row-major among `[seq, batch]`; no other place goes through the head.
    """

    def use(hidden: Tensor, layer: OutputLayer) -> Tensor:
        return scores_of(hidden.flatten(0, -2).index_select(0, places), layer.weight, group)

    return head.use(use)


# -- log-probabilities ---------------------------------------------------------------------------------------


class _Logprobs(torch.autograd.Function):
    """(log p(label), entropy, mean logit, top or not) of tokens, fp32 `[n]` each, the last three without
    gradients and where they are asked for. Kept for the backward pass: two numbers a token, and as many
    logits as `KEPT_BYTES` allows."""

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
        local, kept, found = part.local(labels), list[Tensor](), list[TokenValues]()
        left = KEPT_BYTES if gradient and any(ctx.needs_input_grad[:2]) else 0
        for chunk in chunks(len(hidden), weight.shape[0] * hidden.element_size()):
            logits = layer.logits(hidden[chunk])
            found.append(values_of(logits, local[chunk], part, layer.kernels, statistics, temperature))
            if len(kept) + 1 == len(found) and logits.nbytes <= left:
                kept.append(logits)
                left -= logits.nbytes
            del logits
        names = ("logprobs", "highest", "inverse", *(TokenStatistics._fields if statistics else ()))
        logprobs, highest, inverse, *more = (torch.cat([getattr(one, name) for one in found]) for name in names)
        ctx.save_for_backward(hidden, weight, local, highest, inverse)
        ctx.kept, ctx.layer, ctx.part, ctx.temperature = kept, layer, part, temperature
        ctx.mark_non_differentiable(*more)
        return logprobs, *more

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.kept is None:
            raise RuntimeError("log-probabilities made in chunks have one backward pass")
        hidden, weight, local, highest, inverse = ctx.saved_tensors
        layer, part, kept = ctx.layer, ctx.part, ctx.kept[::-1]
        ctx.kept = None
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = WeightGradient(layer) if ctx.needs_input_grad[1] else None
        for chunk in chunks(len(hidden), weight.shape[0] * hidden.element_size()):
            x = hidden[chunk]
            logits = kept.pop() if kept else layer.logits(x)
            slope = layer.slope(logits)
            if part.own:
                rows = (values[chunk] for values in (highest, inverse, local, grad))
                layer.kernels.put_logprob_gradient(logits[:, : part.own], *rows, ctx.temperature)
            logits[:, part.own :] = 0
            if slope is not None:
                logits.mul_(slope)
            if of_hidden is not None:
                of_hidden[chunk] = layer.product.input_gradient(logits, weight)
            if of_weight is not None:
                of_weight.add(logits, x)
            del logits, slope
        return of_hidden, None if of_weight is None else of_weight.whole(), *(None,) * 6


def _logprobs(
    head: HeadInput,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None,
    places: Tensor | None,
    statistics: bool,
    temperature: float,
) -> tuple[Tensor, ...]:
    gradient = torch.is_grad_enabled()

    def use(hidden: Tensor, layer: OutputLayer) -> tuple[Tensor, ...]:
        part = VocabPart.of(layer.weight.shape[0], group, columns)
        x, of_labels = (chosen(values, places) for values in (hidden.flatten(0, -2), labels.reshape(-1)))
        found = _Logprobs.apply(x, layer.weight, layer, of_labels, part, statistics, gradient, temperature)
        if places is not None:
            found = tuple(one.new_zeros(labels.numel()).index_copy(0, places, one) for one in found)
        return tuple(one.view(labels.shape) for one in found)

    return head.use(use)


def token_logprobs(
    head: HeadInput,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """log p(label) of every token, fp32 `[seq, batch]`, the same on every tensor rank; where there are
    `places`, 0 at all others. temperature: divides the logits, in fp32; the others: as of `token_loss_sum`.
    One backward pass is possible."""
    return _logprobs(head, labels, group, columns, places, False, temperature)[0]


def token_logprobs_and_statistics(
    head: HeadInput,
    labels: Tensor,
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    places: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, TokenStatistics]:
    """`token_logprobs`, and the `TokenStatistics` of each token in the same shape and dtype."""
    logprobs, *more = _logprobs(head, labels, group, columns, places, True, temperature)
    return logprobs, TokenStatistics(*more)


def choose_tokens(
    head: HeadInput,
    places: Tensor,
    choose: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup | None,
    columns: int | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The token that `choose` takes at some places, int64 `[n]`, and its log-probability, fp32 `[n]`; both
    have the bits that `token_logprobs` of all places would work with.

    places: `[n]` int64, row-major among `[seq, batch]`. choose: from logits `[n, vocab]`, whole on every
    tensor rank and divided by the temperature, to tokens. The other arguments: as of `token_logprobs`.
    """

    def use(hidden: Tensor, layer: OutputLayer) -> tuple[Tensor, Tensor]:
        part = VocabPart.of(layer.weight.shape[0], group, columns)
        rows, found = hidden.flatten(0, -2), []
        for chunk in chunks(len(rows), layer.weight.shape[0] * hidden.element_size()):
            inside = (places >= chunk.start) & (places < chunk.stop)
            found.append((inside, layer.logits(rows[chunk])[places[inside] - chunk.start]))
        logits = found[0][1].new_empty(len(places), layer.weight.shape[0])
        for inside, some in found:
            logits[inside] = some
        whole = gather_from_tensor(logits, group)[:, : part.columns]
        tokens = choose(whole if temperature == 1.0 else whole.float() / temperature)
        values = values_of(logits, part.local(tokens.clamp(min=0)), part, layer.kernels, False, temperature)
        return tokens, values.logprobs

    return head.use(use)
