"""Log-probabilities over a cut vocabulary against float64 cross-entropy of the whole one."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.mpu import build_groups, token_logprobs
from tests.pool import run_ranks

SEQ, BATCH, VOCAB = 6, 3, 32


def _case(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (with large offsets a row, which must cancel), labels of every part of the vocabulary, gradient."""
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
    # Differences of fp32 logits of size 150 lose about 150 * 2**-24; bf16 gradients are rounded once, to 2**-8.
    for logprobs, _ in ranks:
        torch.testing.assert_close(logprobs.double(), expected.detach(), rtol=1e-5, atol=2e-5)
    found = torch.cat([gradient for _, gradient in ranks], -1).double()
    rtol = 2**-8 if dtype == torch.bfloat16 else 5e-5
    torch.testing.assert_close(found, exact.grad, rtol=rtol, atol=1e-6)


def test_ranks_agree_bit_for_bit() -> None:
    first, second = run_ranks(sharded, 2, torch.float32)
    assert torch.equal(first[0], second[0])
