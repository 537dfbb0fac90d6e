"""Weights cut over data ranks: rows that these do not divide, and compiled blocks within `fully_shard`."""

from functools import partial
from typing import Any

import pytest
import torch

from tests.pool import run_ranks
from tests.training.native.in_turn import TIMEOUT
from tests.training.runs import ADAMW, LLAMA, RPE, assert_alike, bit_equal, cells, config, curves, curves_of

STAGES = cells([3], product=[1, 2])


@pytest.mark.parametrize("stage", STAGES)
def test_five_ranks_are_as_one(stage: int) -> None:
    """Four of five ranks have two rows of a table of 8, and the fifth has none."""
    one_rank = config(RPE, ADAMW, train_batch_size=10, engine="native", train_micro_batch_size_per_gpu=10)
    five_ranks = {**one_rank, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    assert_alike(curves_of({"": five_ranks}, 3, ranks=5), curves_of({"": one_rank}, 3))


def compiled(rank: int, world_size: int, values: dict[str, Any]) -> tuple[Any, Any, dict[str, int]]:
    """For the pool: plain blocks, compiled ones, and what was compiled. Graphs run eagerly: the same bits."""
    from torch._dynamo.utils import counters

    torch.compile = partial(torch.compile, backend="eager")  # of blocks and of what is done to logits
    eager = curves(rank, world_size, [values], steps=2)[0]
    assert not counters["stats"]["unique_graphs"]
    compiled_part = curves(rank, world_size, [{**values, "compile": "block"}], steps=2)[0]
    breaks = sum(counters["graph_break"].values())
    return eager, compiled_part, {"graphs": counters["stats"]["unique_graphs"], "breaks": breaks}


@pytest.mark.parametrize("stage", STAGES)
def test_compiled_blocks_train_as_plain_ones(stage: int) -> None:
    layout = {"zero_optimization": {"stage": stage}, "precision": "bfloat16", "engine": "native"}
    values = config(LLAMA, layout, train_micro_batch_size_per_gpu=2)
    for eager, compiled_part, compile_counts in run_ranks(compiled, 2, values, timeout=TIMEOUT):
        assert compile_counts == {"graphs": 3, "breaks": 0}, "one of blocks, two of logits"
        assert compiled_part.losses == eager.losses and compiled_part.norms == eager.norms
        assert bit_equal(compiled_part.weights, eager.weights)
