"""An objective may make its logits in chunks and of chosen places alone: the step is the same in every
layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.data import Batch
from megatron.data.batch import places_of_loss
from megatron.mpu import HeadInput, token_logprobs
from megatron.neox_arguments import NeoXArgs
from megatron.objectives import LANGUAGE_MODELLING, Objective
from megatron.training.engine_choice import choose_engine
from megatron.training.parallelize import parallelize
from tests.model.runs import LLAMA, LR, NEOX, SGD
from tests.model.stages import Weights, document_batch, groups_of, random_weights, small, stage_with
from tests.pool import run_ranks
from tests.training.runs import TABLE, cells


def in_chunks(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The negative log-likelihood, from logits of the places that count, a half of the sequence at a time."""
    assert head.hidden_states.shape[:2] == batch.labels.t().shape
    total, made = torch.zeros(1, device=batch.labels.device), 0
    halves = zip(*(x.chunk(2) for x in (head.hidden_states, batch.labels.t(), batch.loss_weights.t())), strict=True)
    for hidden_states, labels, weights in halves:
        chosen = HeadInput(hidden_states[weights > 0], head.head)
        total = total - token_logprobs(chosen, labels[weights > 0], group).sum()
        made += len(chosen.hidden_states)
    assert made == int(batch.loss_weights.sum()) < batch.labels.numel()
    return total, {}


CHUNKED = Objective(LANGUAGE_MODELLING.weight, in_chunks)
Taken = tuple[Tensor, Weights, Weights]  # the loss of a step, and weights before and after it


def batches_of(args: NeoXArgs, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    batches = [document_batch(args, seed=seed + i) for i in range(2)]
    weights = [torch.randint(0, 4, b.tokens.shape, generator=generator) // 3 for b in batches]
    named = [
        replace(b, loss_weights=w, loss_places=places_of_loss(w.numpy())) for b, w in zip(batches, weights, strict=True)
    ]
    assert all(batch.loss_places is not None for batch in named)
    return named


def steps(rank: int, world_size: int, values: dict[str, Any]) -> list[Taken]:
    """For the pool: a step of the whole loss, and one of the loss in chunks."""
    taken = []
    for objective in (LANGUAGE_MODELLING, CHUNKED):
        args = small(**SGD, **values).for_world(world_size)
        groups = groups_of(args, world_size)
        stage = stage_with(args, random_weights(args), groups)
        engine = parallelize(stage, objective, args, groups, choose_engine(args, False).load())
        before = engine.weights()
        loss = engine.train_step(batches_of(args, 3 + 10 * groups.rank("data")), LR).loss.detach()
        taken.append((loss, before, engine.weights()))
        engine.close()
    return taken


@pytest.mark.parametrize(
    ("name", "model"),
    cells(
        [("plain", NEOX), ("tp2 sp", LLAMA), ("pp2", NEOX), ("zero3", LLAMA)],
        product=[("plain", LLAMA), ("tp2 sp", NEOX), ("pp2", LLAMA), ("zero3", NEOX)],
    ),
)
def test_chunks_and_chosen_places_are_the_same_step(name: str, model: dict[str, Any]) -> None:
    world_size, layout = TABLE[name]
    for (loss, before, after), (chunked, _, chunked_after) in run_ranks(steps, world_size, {**model, **layout}):
        torch.testing.assert_close(chunked, loss, rtol=1e-6, atol=0)
        for layer, tensors in after.items():
            for key, expected in tensors.items():
                start, difference = before[layer][key], (chunked_after[layer][key] - expected).norm()
                # A step rounds its weight to about 1e-7 of that.
                assert difference <= 1e-6 * (expected - start).norm() + 1e-7 * start.norm() + 1e-9, key
                assert not expected.equal(start), key
