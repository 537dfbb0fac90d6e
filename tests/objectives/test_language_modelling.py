"""Next-token loss: weighted sums in fp32, whatever the split."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.mpu import build_groups
from megatron.objectives import LANGUAGE_MODELLING, language_modelling
from tests.objectives.steps import as_head
from tests.pool import run_ranks

SEQ, BATCH, VOCAB = 8, 2, 16


def _case() -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(SEQ, BATCH, VOCAB, generator=generator)
    tokens, labels = torch.randint(0, VOCAB, (2, BATCH, SEQ), generator=generator)
    weights = torch.randint(0, 2, (BATCH, SEQ), generator=generator)
    return logits, Batch(tokens, labels, weights)


def test_equals_float64_sum_of_weighted_tokens() -> None:
    """Over a cut vocabulary: tests/mpu/test_head.py."""
    logits, batch = _case()
    exact, actual = logits.double().requires_grad_(), logits.clone().requires_grad_()
    token_losses = F.cross_entropy(exact.view(-1, VOCAB), batch.labels.t().reshape(-1), reduction="none")
    expected = (token_losses * batch.loss_weights.t().reshape(-1)).sum()
    expected.backward()
    loss = LANGUAGE_MODELLING.loss_sum(as_head(actual), batch, None)[0].sum()
    loss.backward()
    assert loss.dtype == torch.float32 and LANGUAGE_MODELLING.weight(batch) == batch.loss_weights.sum()
    torch.testing.assert_close(loss.detach().double(), expected.detach(), rtol=1e-6, atol=1e-6)
    assert actual.grad is not None
    torch.testing.assert_close(actual.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def _guessed() -> tuple[Tensor, Batch]:
    """Every third label is the likeliest token."""
    logits, batch = _case()
    is_third = torch.arange(SEQ) % 3 == 0
    return logits, replace(batch, labels=torch.where(is_third, logits.argmax(-1).t(), batch.labels))


def statistics(rank: int, world_size: int, z_loss: float) -> dict[str, float]:
    """For the pool."""
    group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    objective, (logits, batch) = language_modelling(z_loss, statistics=True), _guessed()
    local_logits = logits.chunk(world_size, -1)[rank].contiguous()
    sums = torch.stack([objective.loss_sum(as_head(local_logits), batch, group)[1][name] for name in objective.metrics])
    return {name: float(value) for name, value in objective.means(sums).items()}


def test_metrics_of_the_tokens_that_are_trained() -> None:
    """TRL's names; test_trl.py compares with TRL itself, whose cases have no right guess."""
    logits, batch = _guessed()
    trained = batch.loss_weights.t() > 0
    logprobs = logits.double().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)[trained].mean()
    right = (logits.argmax(-1) == batch.labels.t())[trained].double().mean()
    assert 0 < right < 1
    expected = {"entropy": float(entropy), "mean_token_accuracy": float(right)}
    for world_size, z_loss in ((1, 0.0), (1, 0.1), (2, 0.0)):
        for means in run_ranks(statistics, world_size, z_loss):
            assert means == pytest.approx(expected, rel=1e-5)


def test_a_batch_without_weight_is_zero_and_has_no_gradient() -> None:
    logits, batch = _case()
    logits.requires_grad_()
    empty = Batch(batch.tokens, batch.labels, torch.zeros_like(batch.labels))
    loss = LANGUAGE_MODELLING.loss_sum(as_head(logits), empty, None)[0]
    loss.backward()
    assert float(loss.detach()) == 0.0 == float(LANGUAGE_MODELLING.weight(empty))
    assert logits.grad is not None and not logits.grad.any()
