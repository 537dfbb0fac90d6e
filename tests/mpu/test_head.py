"""Loss and log-probabilities in chunks over a cut vocabulary, beside float64 formulas of all logits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import PlainProduct, Product, build_groups, plain_kernels, token_loss_sum
from megatron.mpu.cross_entropy import Kernels, compiled_kernels
from megatron.mpu.head import HeadInput, LossOfTokens, OutputLayer, token_logprobs, token_logprobs_and_statistics
from megatron.objectives.language_modelling import dft, nll
from tests.live_bytes import LiveBytes
from tests.mpu.test_products import CountingProduct
from tests.pool import run_ranks

SEQ, BATCH, HIDDEN, VOCAB = 50, 3, 16, 32
ROWS = SEQ * BATCH
ALL_AT_ONCE, THREE_CHUNKS = 2**30, 64 * VOCAB  # of 64, 64 and 22 tokens, whatever the dtype and the ranks
Options = dict[str, Any]


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    weights: Tensor
    grad: Tensor  # of log-probabilities


def case(dtype: torch.dtype = torch.float32) -> Case:
    """Logits of size 4 with large offsets a row, which must cancel; labels of the whole vocabulary."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(SEQ, BATCH, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator)
    weight[:, 0] = 6.0
    labels = torch.randint(0, VOCAB, (SEQ, BATCH), generator=generator)
    labels.view(-1)[:4] = torch.tensor([0, VOCAB - 1, VOCAB // 2, VOCAB // 2 - 1])
    weights = torch.randint(0, 2, (SEQ, BATCH), generator=generator)
    return Case(hidden.to(dtype), weight.to(dtype), labels, weights, torch.randn(SEQ, BATCH, generator=generator))


def head_of(
    hidden: Tensor, weight: Tensor, kernels: Kernels | None = None, product: Product | None = None,
    softcap: float | None = None,
) -> HeadInput:  # fmt: skip
    layer = OutputLayer(weight, product or PlainProduct(), kernels or plain_kernels(), softcap)
    return HeadInput(hidden, lambda x, use: use(x, layer))


@contextmanager
def sizes(chunk: int, kept_bytes: int) -> Iterator[None]:
    with mock.patch("megatron.mpu.head.CHUNK_BYTES", chunk), mock.patch("megatron.mpu.head.KEPT_BYTES", kept_bytes):
        yield


class HeadResult(NamedTuple):
    """values: log-probabilities and statistics, or a loss and sums; gradients of this rank's part."""

    values: list[Tensor]
    hidden: Tensor
    weight: Tensor


def on_rank(
    rank: int, world_size: int, dtype: torch.dtype, options: Options, kernels: Kernels | None = None
) -> HeadResult:
    """For the pool: log-probabilities, or with a `kind` the sum of a loss, backwards too."""
    group = None
    if world_size > 1:
        group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    inputs, kind, columns = case(dtype), options.get("kind"), options.get("columns")
    hidden = inputs.hidden.requires_grad_()
    weight = inputs.weight.chunk(world_size)[rank].contiguous().requires_grad_()
    places = places_of(inputs) if options.get("places") else None
    head = head_of(hidden, weight, kernels, softcap=options.get("softcap"))
    labels = inputs.labels % (columns or VOCAB)
    with sizes(options.get("chunk", THREE_CHUNKS * dtype.itemsize // world_size), options.get("kept", 0)):
        if kind is not None:
            loss, sums = token_loss_sum(head, labels, inputs.weights, kind, group, columns, places)
            values = [loss, *sums]
            loss.backward(torch.tensor(0.25))
        else:
            call = group, columns, places, options.get("temperature", 1.0)
            logprobs, statistics = token_logprobs_and_statistics(head, labels, *call)
            if kernels is None:
                with torch.no_grad():
                    assert torch.equal(token_logprobs(head, labels, *call), logprobs)
            values = [logprobs, *statistics]
            logprobs.backward(inputs.grad)
    assert all(value.dtype == torch.float32 for value in values)
    assert hidden.grad is not None and weight.grad is not None and hidden.grad.dtype == weight.grad.dtype == dtype
    return HeadResult([value.detach() for value in values], hidden.grad, weight.grad)


def places_of(inputs: Case) -> Tensor:
    """Every second place with a weight, so that the others would be seen, and at the end some without."""
    weights = inputs.weights.reshape(-1)
    return torch.cat([weights.nonzero()[::2, 0], (weights == 0).nonzero()[:5, 0]])


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def formula(inputs: Case, options: Options, dtype: torch.dtype = torch.float64) -> HeadResult:
    """The same by torch's functions of all logits. dtype: of products; what follows is in fp32 at least."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (inputs.hidden, inputs.weight))
    columns, kind = options.get("columns"), options.get("kind")
    logits = capped((hidden @ weight.t())[..., :columns], options.get("softcap"))
    logits = logits / options.get("temperature", 1.0)
    logits = logits if dtype == torch.float64 else logits.float()
    distribution, labels = logits.log_softmax(-1), inputs.labels % (columns or VOCAB)
    logprobs = distribution.gather(-1, labels[..., None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    is_top = (logits.argmax(-1) == labels).double()
    is_place = torch.ones_like(inputs.grad)
    if options.get("places"):
        is_place = is_place.view(-1).zero_().index_fill_(0, places_of(inputs), 1.0).view_as(is_place)
    weights = inputs.weights * is_place
    if kind is not None:
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        if kind.loss is dft:
            losses = losses * logprobs.detach().exp()
        loss = (losses * weights).sum()
        values = [loss, *((value * weights).sum() for value in (entropy, is_top) if kind.statistics)]
        z_loss = kind.z_loss * (logits.logsumexp(-1).square() * weights).sum()
        (0.25 * (loss + z_loss)).backward()
    else:
        values = [logprobs, entropy, logits.mean(-1), is_top]
        (logprobs * is_place).backward(inputs.grad.to(logprobs.dtype))
        values = [value * is_place for value in values]
    return HeadResult([value.detach() for value in values], hidden.grad, weight.grad)  # type: ignore[arg-type]


def errors(ranks: list[HeadResult], exact: HeadResult) -> list[float]:
    """Relative errors of each value and of both gradients, in norms."""
    hidden = torch.stack([result.hidden.double() for result in ranks]).sum(0)  # as `copy_to_tensor` sums it
    weight = torch.cat([result.weight for result in ranks]).double()
    pairs = zip([*ranks[0].values, hidden, weight], [*exact.values, exact.hidden, exact.weight], strict=True)
    return [float((actual.double() - expected).norm() / expected.norm().clamp(min=1e-12)) for actual, expected in pairs]


KINDS: dict[str, Options] = {
    "logprobs": {},
    "logprobs, kept": {"kept": ALL_AT_ONCE},
    "logprobs, one kept": {"kept": 2 * THREE_CHUNKS * 4},
    "logprobs, one chunk": {"chunk": ALL_AT_ONCE, "kept": ALL_AT_ONCE},
    "logprobs, places": {"places": True},
    "logprobs, padded": {"columns": 21},
    "nll": {"kind": LossOfTokens(nll)},
    "nll, one chunk": {"kind": LossOfTokens(nll), "chunk": ALL_AT_ONCE},
    "nll, places": {"kind": LossOfTokens(nll, 0.0, True), "places": True},
    "z-loss, statistics, padded": {"kind": LossOfTokens(nll, 0.1, True), "columns": 21},
    "logprobs, capped": {"softcap": 30.0, "columns": 21, "kept": 2 * THREE_CHUNKS * 4},
    "nll, capped": {"kind": LossOfTokens(nll, 0.1, True), "softcap": 30.0, "columns": 21},
    "dft": {"kind": LossOfTokens(dft, 0.0, True)},
    "temperature": {"temperature": 0.7},
    "temperature, capped": {"temperature": 0.7, "softcap": 30.0},
    "temperature, all": {"temperature": 2.5, "softcap": 30.0, "columns": 29, "places": True, "kept": ALL_AT_ONCE},
}


def assert_exact(ranks: list[HeadResult], dtype: torch.dtype, options: Options) -> None:
    """As near to the formula as torch's functions of all logits in this dtype, or nearer than 2e-6."""
    exact = formula(case(dtype), options)
    rank_errors, torch_errors = errors(ranks, exact), errors([formula(case(dtype), options, dtype)], exact)
    assert all(
        error <= max(2e-6, 1.2 * torch_error) for error, torch_error in zip(rank_errors, torch_errors, strict=True)
    ), (rank_errors, torch_errors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_equals_float64_formulas(name: str, dtype: torch.dtype) -> None:
    assert_exact([on_rank(0, 1, dtype, KINDS[name])], dtype, KINDS[name])


def all_kinds(rank: int, world_size: int) -> list[HeadResult]:
    """For the pool."""
    return [on_rank(rank, world_size, torch.float32, options) for options in KINDS.values()]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_cut_vocabulary(world_size: int) -> None:
    """With four ranks and 21 columns the last holds nothing but padding, and the one before it some."""
    ranks = run_ranks(all_kinds, world_size)
    for number, options in enumerate(KINDS.values()):
        results = [kinds[number] for kinds in ranks]
        assert_exact(results, torch.float32, options)
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result.values, results[0].values, strict=True)), "ranks differ"


def summed_loss(head: HeadInput, inputs: Case) -> Tensor:
    return token_loss_sum(head, inputs.labels, inputs.weights, LossOfTokens(nll), None)[0]


def summed_logprobs(head: HeadInput, inputs: Case) -> Tensor:
    return token_logprobs(head, inputs.labels, None).sum()


CALLS: dict[str, tuple[Callable[[HeadInput, Case], Tensor], int, list[str]]] = {
    "loss": (summed_loss, 0, ["output", "input_gradient", "weight_gradient"] * 3),
    "logprobs": (summed_logprobs, 0, ["output"] * 3 + ["output", "input_gradient", "weight_gradient"] * 3),
    "logprobs, kept": (summed_logprobs, ALL_AT_ONCE, ["output"] * 3 + ["input_gradient", "weight_gradient"] * 3),
}


@pytest.mark.parametrize("name", CALLS)
def test_products(name: str) -> None:
    """Three of each chunk, a fourth where logits are not kept; none of a gradient that nobody wants."""
    function, kept_bytes, expected = CALLS[name]
    for frozen in (None, "weight", "hidden", "both"):
        inputs, product = case(), CountingProduct()
        hidden = inputs.hidden.requires_grad_(frozen not in ("hidden", "both"))
        weight = inputs.weight.requires_grad_(frozen not in ("weight", "both"))
        with sizes(4 * THREE_CHUNKS, kept_bytes):
            value = function(head_of(hidden, weight, product=product), inputs)
            if frozen == "both":
                assert product.calls == ["output"] * 3
                continue
            value.backward()
        left_out = {"weight": "weight_gradient", "hidden": "input_gradient", None: None}[frozen]
        assert product.calls == [call for call in expected if call != left_out]
        with pytest.raises(RuntimeError, match="one backward|second time"):
            value.backward()
    with torch.no_grad(), sizes(4 * THREE_CHUNKS, kept_bytes):
        product = CountingProduct()
        function(head_of(inputs.hidden, case().weight.requires_grad_(), product=product), inputs)
        assert product.calls == ["output"] * 3


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.more)])
def test_compiled_kernels(backend: str) -> None:
    """The same numbers, and one graph of each function, of a loss two, for chunks of any number of rows."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, torch_compile = CompileCounterWithBackend(backend), torch.compile
    with mock.patch("torch.compile", partial(torch_compile, backend=counter)):
        kernels = compiled_kernels()
    for rows in (64, 192):  # chunks of 64, 64 and 22; of all
        for kind in (LossOfTokens(nll, 0.1, True), None):
            options: Options = {"kind": kind, "chunk": 4 * VOCAB * rows}
            eager, compiled = (on_rank(0, 1, torch.float32, options, rank_kernels) for rank_kernels in (None, kernels))
            torch.testing.assert_close(compiled, eager)
    assert counter.frame_count == len(kernels) + 1


def peaks(tokens: int, vocab: int, function: Callable[[HeadInput, Case], Tensor]) -> LiveBytes:
    """Memory of forward and backward in bf16, with chunks of 1 MiB, slices of 2^16 logits, nothing kept."""
    hidden = torch.randn(tokens, 1, HIDDEN).bfloat16().requires_grad_()
    weight = torch.randn(vocab, HIDDEN).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens, 1))
    inputs = Case(hidden, weight, labels, torch.ones_like(labels), torch.empty(0))
    with sizes(2**20, 0), mock.patch("megatron.mpu.cross_entropy.CPU_SLICE", 2**16), LiveBytes() as live:
        function(head_of(hidden, weight), inputs).backward()
    return live


@pytest.mark.parametrize("function", [summed_loss, summed_logprobs])
def test_memory_does_not_grow_with_tokens_times_vocabulary(function: Callable[[HeadInput, Case], Tensor]) -> None:
    """A chunk of logits, slices in fp32, the weight's gradient twice, numbers of tokens; not 8 MiB."""
    tokens, vocab = 1024, 4096
    live = peaks(tokens, vocab, function)
    assert live.peak < 2**20 + 3 * 4 * 2**16 + 3 * 4 * vocab * HIDDEN + tokens * (4 * HIDDEN + 64)
    assert live.largest == vocab * HIDDEN
    doubled = peaks(2 * tokens, vocab, function)
    assert doubled.peak - live.peak <= tokens * (4 * HIDDEN + 64)
