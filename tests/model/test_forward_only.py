"""One forward-only call gives the same values on every rank of any layout."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.data import Batch
from megatron.model import forward_only
from megatron.mpu import HeadInput, ParallelGroups, gather_from_tensor
from megatron.objectives import label_logprobs
from tests.model.stages import document_batch, groups_of, make_stage, random_batch, small
from tests.pool import run_ranks

Values = tuple[list[Tensor], list[Tensor]]


def _read_all(values: dict[str, Any], world_size: int) -> Values:
    """Log-probabilities and whole logits of a position, of eight micro-batches of three shapes."""
    args = small(num_layers=4, **values)
    groups = groups_of(args, world_size) if world_size > 1 else ParallelGroups.single()
    stage = make_stage(args, groups=groups)
    batches = [random_batch(args, rows=1 + i % 3, seed=i, seq=16 if i % 2 else 8) for i in range(7)]
    batches.append(document_batch(args))
    tensor, vocab = groups.group("tensor"), args.padded_vocab_size
    logprobs = forward_only(stage, batches, args, groups, partial(label_logprobs, group=tensor), dtype=torch.float32,
                            shape=lambda batch: tuple(batch.tokens.shape))  # fmt: skip

    def read(head: HeadInput, batch: Batch) -> Tensor:
        rows = torch.arange(len(batch.tokens))
        return gather_from_tensor(head.head(head.hidden_states[rows + 3, rows]), tensor)

    logits = forward_only(stage, iter(batches), args, groups, read, dtype=torch.float32,
                          shape=lambda batch: (batch.tokens.shape[0], vocab))  # fmt: skip
    assert not any(value.requires_grad for value in (*logprobs, *logits))
    return logprobs, logits


def read_all(rank: int, world_size: int, layouts: list[dict[str, Any]]) -> list[Values]:
    return [_read_all(layout, world_size) for layout in layouts]


@pytest.mark.parametrize(
    "world_size, layouts", [(2, [(2, 1, False), (0, 2, True)]), (4, [(4, 1, False), (2, 2, False), (2, 1, False)])]
)
def test_same_on_every_rank_of_any_layout(world_size: int, layouts: list[tuple[int, int, bool]]) -> None:
    keys = [
        {"pipe_parallel_size": pipe, "model_parallel_size": tensor, "sequence_parallel": sequence}
        for pipe, tensor, sequence in layouts
    ]
    expected = _read_all({}, 1)
    assert len(expected[0]) == 8
    for rank_reads in run_ranks(read_all, world_size, keys):
        for actual in rank_reads:
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def test_no_batches_no_values() -> None:
    args = small()
    stage, groups = make_stage(args), ParallelGroups.single()
    values = forward_only(
        stage, [], args, groups, lambda head, _: head.logits(), dtype=torch.float32, shape=lambda _: ()
    )
    assert values == []
