"""Logits of whole weights on ranks of the pool (no transformers here: ranks import this file)."""

from typing import Any

import torch
from torch import Tensor

from megatron.mpu import ParallelGroups
from megatron.neox_arguments import NeoXArgs
from tests.model.stages import Weights, full_logits, groups_of, make_stage
from tests.pool import run_ranks

SEQ = 16
TOKENS = torch.randint(0, 90, (2, SEQ), generator=torch.Generator().manual_seed(1))
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]  # tensor, pipe
Model = tuple[dict[str, Any], Weights]


def logits_of(keys: dict[str, Any], weights: Weights, groups: ParallelGroups | None = None) -> Tensor:
    args = NeoXArgs.from_dict({**keys, "seq_length": SEQ})
    groups = groups or groups_of(args, args.tp * args.pp)
    return full_logits(make_stage(args, weights, groups), args, groups, TOKENS)


def _on_ranks(rank: int, world_size: int, models: list[Model], layouts: list[tuple[int, int]]) -> list[list[Tensor]]:
    layout_logits = []
    for tensor, pipe in layouts:
        sizes = {"model_parallel_size": tensor, "pipe_parallel_size": pipe}
        layout_logits.append([logits_of({**keys, **sizes}, weights) for keys, weights in models])
    return layout_logits


def logits_by_layout(models: list[Model], layouts: list[tuple[int, int]]) -> dict[tuple[int, int], list[Tensor]]:
    """Returns the logits of every model, in one process and in these layouts; all ranks must agree."""
    layout_logits = {(1, 1): [logits_of(keys, weights, ParallelGroups.single()) for keys, weights in models]}
    for size in sorted({tensor * pipe for tensor, pipe in layouts} - {1}):
        size_layouts = [layout for layout in layouts if layout[0] * layout[1] == size]
        first_rank, *other_ranks = run_ranks(_on_ranks, size, models, size_layouts)
        for rank_logits in other_ranks:
            torch.testing.assert_close(rank_logits, first_rank, rtol=0, atol=0)
        layout_logits |= dict(zip(size_layouts, first_rank, strict=True))
    return layout_logits
