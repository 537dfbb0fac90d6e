"""z-loss: in the gradient, not in the reported loss, in any layout."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.model import build_stage, init_stage
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups, build_groups
from megatron.objectives import LANGUAGE_MODELLING, language_modelling
from megatron.training.setup import build_engine
from tests.model.runs import LR, SGD, Step, whole_weights
from tests.model.stages import groups_of, random_batch, small
from tests.objectives.steps import as_head
from tests.pool import run_ranks

SEQ, BATCH, VOCAB, Z = 6, 3, 32, 0.1
ENGINE: dict[str, Any] = {**SGD, "z_loss": Z, "init_method_std": 0.5, "no_weight_tying": True}


def _case() -> tuple[Tensor, Batch]:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(SEQ, BATCH, VOCAB, generator=generator)
    logits += 10 * torch.randn(SEQ, BATCH, 1, generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    weights = torch.randint(0, 2, (BATCH, SEQ), generator=generator)
    return logits, Batch(labels, labels, weights)


def dense(logits: Tensor, batch: Batch, z_loss: float) -> tuple[Tensor, Tensor]:
    """Sum of losses, and of losses and z-losses."""
    vocab, weights = logits.shape[-1], batch.loss_weights.t()
    loss = F.cross_entropy(logits.reshape(-1, vocab), batch.labels.t().reshape(-1), reduction="none").view_as(weights)
    loss_sum = (loss * weights).sum()
    return loss_sum, loss_sum + z_loss * (logits.logsumexp(-1).square() * weights).sum()


def sharded(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    group = None
    if world_size > 1:
        group = build_groups(pipe=1, data=1, tensor=world_size, device=torch.device("cpu")).group("tensor")
    whole, batch = _case()
    local_logits = whole.chunk(world_size, -1)[rank].contiguous().requires_grad_()
    loss = language_modelling(Z).loss_sum(as_head(local_logits), batch, group)[0].sum()
    loss.backward()
    assert local_logits.grad is not None
    return loss.detach(), local_logits.grad


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_equals_the_dense_formula(world_size: int) -> None:
    logits, batch = _case()
    exact = logits.double().requires_grad_()
    loss, with_z = dense(exact, batch, Z)
    with_z.backward()
    ranks = [sharded(0, 1)] if world_size == 1 else run_ranks(sharded, world_size)
    for value, _ in ranks:
        torch.testing.assert_close(value.double(), loss.detach(), rtol=1e-6, atol=1e-6)
    whole_gradient = torch.cat([gradient for _, gradient in ranks], -1).double()
    torch.testing.assert_close(whole_gradient, exact.grad, rtol=5e-5, atol=1e-5)


def test_without_weight_the_numbers_are_those_of_the_plain_loss() -> None:
    logits, batch = _case()
    assert torch.equal(
        language_modelling(0.0).loss_sum(as_head(logits), batch, None)[0],
        LANGUAGE_MODELLING.loss_sum(as_head(logits), batch, None)[0],
    )


def one_step(rank: int, world_size: int, values: dict[str, Any]) -> Step:
    """For the pool: an SGD step over two micro-batches, as a run takes it."""
    args = small(**ENGINE, **values).for_world(world_size)
    engine = build_engine(args, groups_of(args, world_size))
    batches = [random_batch(args, seed=seed) for seed in (1, 2)]
    loss = engine.train_step(batches, LR).loss
    step = Step(loss.detach(), [], engine.groups.rank("tensor"), engine.weights())
    engine.close()
    return step


def test_a_run_adds_it_to_the_mean_over_tokens() -> None:
    args = small(**ENGINE).for_world(1)
    stage = build_stage(args, ParallelGroups.single())
    init_stage(stage, args, ParallelGroups.single())
    batches = [random_batch(args, seed=seed) for seed in (1, 2)]
    pairs = [dense(stage(None, batch), batch, Z) for batch in batches]
    tokens = torch.stack([batch.loss_weights.sum() for batch in batches]).sum()
    loss, with_z = (torch.stack(values).sum() / tokens for values in zip(*pairs, strict=True))
    gradient = torch.autograd.grad(with_z, list(stage.parameters()), retain_graph=True)
    plain = torch.autograd.grad(loss, list(stage.parameters()))
    assert all((a - b).norm() > 0.1 * a.norm() for a, b in zip(gradient, plain, strict=True)), "z-loss does nothing"
    expected = {
        (layer, name): (param - LR * grad).detach()
        for (layer, name, param), grad in zip(stage_parameters(stage), gradient, strict=True)
    }
    for world_size, layout in [(1, {}), (2, {"model_parallel_size": 2}), (2, {"pipe_parallel_size": 2})]:
        ranks = run_ranks(one_step, world_size, layout)
        for rank in ranks:
            torch.testing.assert_close(rank.loss, loss.detach(), rtol=1e-5, atol=0)
        for key, weight in whole_weights(args, ranks).items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-5)
