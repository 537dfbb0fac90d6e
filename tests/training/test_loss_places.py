"""An objective may make its logits in chunks and of chosen places alone: the step is the same in every
layout."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

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
from tests.training.runs import TABLE


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


def first_labels(head: HeadInput, batch: Batch, group: dist.ProcessGroup | None) -> Tensor:
    return token_logprobs(HeadInput(head.hidden_states[:1], head.head), batch.labels.t()[:1], group)[0]


CHUNKED = Objective(LANGUAGE_MODELLING.weight, in_chunks)


class Taken(NamedTuple):
    """One rank's step. first: log p of the rows' first labels, before it; before, after: its weights."""

    loss: Tensor
    first: list[Tensor]
    before: Weights
    after: Weights


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
    """For the pool: a step of the whole loss, and one of the loss in chunks, which reads no other places
    before."""
    steps_taken = []
    for objective in (LANGUAGE_MODELLING, CHUNKED):
        args = small(**SGD, **values).for_world(world_size)
        groups = groups_of(args, world_size)
        stage = stage_with(args, random_weights(args), groups)
        engine = parallelize(stage, objective, args, groups, choose_engine(args, False).load())
        batches = batches_of(args, 3 + 10 * groups.rank("data"))
        if objective is CHUNKED:
            logprobs = engine.forward_only(
                batches, partial(first_labels, group=groups.group("tensor")), lambda batch: (len(batch.tokens),)
            )
        else:
            logprobs = [
                values[:, 0] for values in engine.token_logprobs([replace(b, loss_places=None) for b in batches])
            ]
        before = engine.weights()
        steps_taken.append(Taken(engine.train_step(batches, LR).loss.detach(), logprobs, before, engine.weights()))
        engine.close()
    return steps_taken


@pytest.mark.parametrize("model", [NEOX, LLAMA], ids=["tied", "untied"])
@pytest.mark.parametrize("name", ["plain", "tp2 sp", "pp2", "zero3"])
def test_chunks_and_chosen_places_are_the_same_step(name: str, model: dict[str, Any]) -> None:
    world_size, layout = TABLE[name]
    for whole, chunked in run_ranks(steps, world_size, {**model, **layout}):
        torch.testing.assert_close(chunked.loss, whole.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(chunked.first, whole.first, rtol=1e-6, atol=1e-6)
        for layer, tensors in whole.after.items():
            for key, expected in tensors.items():
                before, difference = whole.before[layer][key], (chunked.after[layer][key] - expected).norm()
                # A step rounds its weight to about 1e-7 of that.
                assert difference <= 1e-6 * (expected - before).norm() + 1e-7 * before.norm() + 1e-9, key
                assert not expected.equal(before), key
