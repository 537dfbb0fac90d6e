"""z-loss: in the gradient, not in the reported loss, in any layout. Its formula: tests/mpu/test_head.py."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data import Batch
from megatron.model import build_stage, init_stage
from megatron.model.init import stage_parameters
from megatron.mpu import ParallelGroups
from megatron.training.setup import build_engine
from tests.model.runs import LR, SGD, Step, full_weights
from tests.model.stages import groups_of, random_batch, small
from tests.pool import run_ranks

Z = 0.1
ENGINE: dict[str, Any] = {**SGD, "z_loss": Z, "init_method_std": 0.5, "no_weight_tying": True}


def dense(logits: Tensor, batch: Batch, z_loss: float) -> tuple[Tensor, Tensor]:
    """Sum of losses, and of losses and z-losses."""
    vocab, weights = logits.shape[-1], batch.loss_weights.t()
    loss = F.cross_entropy(logits.reshape(-1, vocab), batch.labels.t().reshape(-1), reduction="none").view_as(weights)
    loss_sum = (loss * weights).sum()
    return loss_sum, loss_sum + z_loss * (logits.logsumexp(-1).square() * weights).sum()


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
    loss_gradient = torch.autograd.grad(loss, list(stage.parameters()))
    assert all((a - b).norm() > 0.1 * a.norm() for a, b in zip(gradient, loss_gradient, strict=True)), (
        "z-loss does nothing"
    )
    expected = {(layer, name): (param - LR * grad).detach()
                for (layer, name, param), grad in zip(stage_parameters(stage), gradient, strict=True)}  # fmt: skip
    for world_size, layout in [(1, {}), (2, {"model_parallel_size": 2}), (2, {"pipe_parallel_size": 2})]:
        ranks = run_ranks(one_step, world_size, layout)
        for rank in ranks:
            torch.testing.assert_close(rank.loss, loss.detach(), rtol=1e-5, atol=0)
        for layer, tensors in full_weights(args, ranks).items():
            for name, weight in tensors.items():
                torch.testing.assert_close(weight, expected[layer, name], rtol=1e-5, atol=1e-5)
