"""Blocks compiled within `fully_shard` train as plain ones do, from one graph for all blocks and steps."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LLAMA, bit_equal, config, curves

STEPS = 3


def compiled(rank: int, world_size: int, values: dict[str, Any]) -> tuple[Any, Any, dict[str, int]]:
    """For the pool: a run with plain blocks and one with compiled ones, and what was compiled. Graphs run
    eagerly, so the same bits are to be expected."""
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend="eager")  # of blocks and of what is done to logits
    plain = curves(rank, world_size, [values], STEPS)[0]
    assert not counters["stats"]["unique_graphs"]
    ours = curves(rank, world_size, [{**values, "compile": "block"}], STEPS)[0]
    breaks = sum(counters["graph_break"].values())
    return plain, ours, {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


@pytest.mark.parametrize("stage", with_more([1, 2, 3], 2, product=[1]))
def test_compiled_blocks(stage: int) -> None:
    layout = {"zero_optimization": {"stage": stage}, "precision": "bfloat16", "engine": "native"}
    values = config(LLAMA, layout, train_micro_batch_size_per_gpu=2)
    for plain, ours, made in run_ranks(compiled, 2, values, timeout=120):
        assert made == {"graphs": 2, "breaks": 0}, "one of blocks, one of logits"
        assert ours.losses == plain.losses and ours.norms == plain.norms
        assert bit_equal(ours.weights, plain.weights)
