"""Next-token loss: weighted sums in fp32, whatever the split."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import build_groups
from megatron.objectives import LANGUAGE_MODELLING
from tests.pool import run_ranks

SEQ, BATCH, VOCAB = 8, 2, 16


def _case() -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(SEQ, BATCH, VOCAB, generator=generator)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ), generator=generator)
    weights = torch.randint(0, 2, (BATCH, SEQ), generator=generator)
    return logits, Batch(tokens, labels, weights)


def sharded(rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    logits, batch = _case()
    own = logits.chunk(world_size, -1)[rank].contiguous().requires_grad_()
    loss = LANGUAGE_MODELLING.loss_sum(own, batch, group)[0].sum()
    loss.backward()
    assert own.grad is not None
    return loss.detach(), LANGUAGE_MODELLING.weight(batch), own.grad


def test_equals_float64_sum_of_weighted_tokens() -> None:
    logits, batch = _case()
    exact = logits.double().requires_grad_()
    every = F.cross_entropy(exact.view(-1, VOCAB), batch.labels.t().reshape(-1), reduction="none")
    expected = (every * batch.loss_weights.t().reshape(-1)).sum()
    expected.backward()
    own = logits.clone().requires_grad_()
    loss = LANGUAGE_MODELLING.loss_sum(own, batch, None)[0].sum()
    loss.backward()
    assert loss.dtype == torch.float32
    assert own.grad is not None
    found = [(loss.detach(), LANGUAGE_MODELLING.weight(batch), own.grad)]
    ranks = run_ranks(sharded, 2)
    found += [(loss, weight, torch.cat([grad for _, _, grad in ranks], -1)) for loss, weight, _ in ranks]
    for loss_sum, weight_sum, grad in found:
        torch.testing.assert_close(loss_sum.double(), expected.detach(), rtol=1e-6, atol=1e-6)
        assert weight_sum == batch.loss_weights.sum()
        torch.testing.assert_close(grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_a_batch_without_weight_is_zero_and_has_no_gradient() -> None:
    logits, batch = _case()
    logits.requires_grad_()
    empty = Batch(batch.tokens, batch.labels, torch.zeros_like(batch.labels))
    loss = LANGUAGE_MODELLING.loss_sum(logits, empty, None)[0]
    loss.backward()
    assert float(loss.detach()) == 0.0 == float(LANGUAGE_MODELLING.weight(empty))
    assert logits.grad is not None and not logits.grad.any()
