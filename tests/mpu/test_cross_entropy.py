"""Log-probabilities over a cut vocabulary against float64 cross-entropy of the whole one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import build_groups, token_logprobs, token_logprobs_and_statistics
from tests.live_bytes import LiveBytes
from tests.pool import run_ranks

SEQ, BATCH, VOCAB = 6, 3, 32


def _case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (with large offsets a row, which must cancel), labels of every part of the vocabulary,
    gradient."""
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(SEQ, BATCH, VOCAB, generator=generator)
    logits += 60 * torch.randn(SEQ, BATCH, 1, generator=generator)
    labels = torch.randint(0, VOCAB, (SEQ, BATCH), generator=generator)
    labels.view(-1)[:4] = torch.tensor([0, VOCAB - 1, VOCAB // 2, VOCAB // 2 - 1])
    return logits.to(dtype), labels, torch.randn(SEQ, BATCH, generator=generator)


def sharded(rank: int, world_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    group = None
    if world_size > 1:
        group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    whole, labels, grad = _case(dtype)
    logits = whole.chunk(world_size, -1)[rank].contiguous().requires_grad_()
    before = logits.detach().clone()
    logprobs = token_logprobs(logits, labels, group)
    assert logprobs.dtype == torch.float32
    logprobs.backward(grad)
    assert torch.equal(logits.detach(), before), "the logits were overwritten"
    assert logits.grad is not None and logits.grad.dtype == dtype
    return logprobs.detach(), logits.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_float64_cross_entropy(world_size: int, dtype: torch.dtype) -> None:
    logits, labels, grad = _case(dtype)
    exact = logits.double().requires_grad_()
    expected = -F.cross_entropy(exact.view(-1, VOCAB), labels.view(-1), reduction="none").view(SEQ, BATCH)
    expected.backward(grad.double())
    ranks = [sharded(0, 1, dtype)] if world_size == 1 else run_ranks(sharded, world_size, dtype)
    # Differences of fp32 logits of size 150 lose about 150 * 2**-24; bf16 gradients are rounded once, to
    # 2**-8.
    for logprobs, _ in ranks:
        torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-5, atol=2e-5)
    whole_gradient = torch.cat([gradient for _, gradient in ranks], -1).double()
    rtol = 2**-8 if dtype == torch.bfloat16 else 5e-5
    torch.testing.assert_close(whole_gradient, exact.grad, rtol=rtol, atol=1e-6)


def test_ranks_agree_bit_for_bit() -> None:
    first, second = run_ranks(sharded, 2, torch.float32)
    assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("statistics", [False, True])
def test_no_fp32_copy_of_the_logits(statistics: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the peak: the bf16 logits, their bf16 gradient, and slices. torch's cross_entropy of fp32 logits
    holds the whole of them, of their log-softmax and of two gradients besides."""
    tokens, vocab = 512, 4096
    monkeypatch.setattr("megatron.mpu.cross_entropy.CHUNK", 16 * vocab)
    logits = torch.randn(tokens, 1, vocab, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    labels = torch.randint(0, vocab, (tokens, 1), generator=torch.Generator().manual_seed(3))
    with LiveBytes() as live:
        if statistics:
            token_logprobs_and_statistics(logits, labels, None)[0].sum().backward()
        else:
            token_logprobs(logits, labels, None).sum().backward()
    assert live.largest <= 16 * vocab
    whole = tokens * vocab * 2
    assert 2 * whole <= live.peak < 2.3 * whole, live.peak / whole


def statistics_on(rank: int, world_size: int) -> tuple[Tensor, ...]:
    group = None
    if world_size > 1:
        group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    whole, labels, _ = _case(torch.float32)
    return tuple(token_logprobs_and_statistics(whole.chunk(world_size, -1)[rank], labels, group)[1])


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("chunk", [2 * VOCAB, 2**24])
def test_statistics(world_size: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.mpu.cross_entropy.CHUNK", chunk)
    logits, labels, _ = _case(torch.float32)
    ranks = [statistics_on(0, 1)] if world_size == 1 else run_ranks(statistics_on, world_size)
    logprobs = logits.double().log_softmax(-1)
    for entropy, mean, top in ranks:
        torch.testing.assert_close(entropy.double(), -(logprobs.exp() * logprobs).sum(-1), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(mean, logits.mean(-1), rtol=1e-5, atol=1e-5)
        assert torch.equal(top.bool(), logits.argmax(-1) == labels)


def padded(rank: int, world_size: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities, mean logits, entropies and the gradient of this rank's columns; the padding's are
    high."""
    group = None
    if world_size > 1:
        group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    whole, labels, grad = _case(torch.float32)
    whole[..., columns:] = 200.0
    logits = whole.chunk(world_size, -1)[rank].contiguous().requires_grad_()
    logprobs, statistics = token_logprobs_and_statistics(logits, labels % columns, group, columns)
    torch.testing.assert_close(token_logprobs(logits, labels % columns, group, columns), logprobs)
    logprobs.backward(grad)
    assert logits.grad is not None
    return logprobs.detach(), statistics.mean_logit, statistics.entropy, logits.grad


@pytest.mark.parametrize("columns", [21, 24])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_columns_that_pad_the_vocabulary_take_no_part(world_size: int, columns: int) -> None:
    """With four ranks the last holds nothing else, and with 21 the one before it some."""
    logits, labels, grad = _case(torch.float32)
    exact = logits[..., :columns].double().requires_grad_()
    distribution = exact.log_softmax(-1)
    expected = distribution.gather(-1, (labels % columns)[..., None]).squeeze(-1)
    expected.backward(grad.double())
    ranks = [padded(0, 1, columns)] if world_size == 1 else run_ranks(padded, world_size, columns)
    entropy = -(distribution.exp() * distribution).sum(-1)
    for logprobs, mean_logit, entropies, _ in ranks:
        torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(mean_logit.double(), exact.detach().mean(-1), rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(entropies.double(), entropy.detach(), rtol=1e-4, atol=1e-4)
    whole_gradient = torch.cat([gradient for *_, gradient in ranks], -1)
    torch.testing.assert_close(whole_gradient[..., :columns].double(), exact.grad, rtol=5e-5, atol=1e-6)
    assert not whole_gradient[..., columns:].any()
