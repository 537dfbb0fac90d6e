"""Recomputation in every form: the numbers of none of it, on every engine, and what is run again."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.training.recompute import products_run_again
from tests.model.stages import random_batch, random_weights, small, stage_with
from tests.pool import run_ranks
from tests.training.runs import LLAMA, TABLE, Part, bit_equal, cells, config, curves

ON = {"checkpoint_activations": True}
SELECTIVE = {**ON, "recompute_granularity": "selective"}
FORMS: dict[str, dict[str, Any]] = {
    "full": ON,
    "every other block": {**ON, "recompute_every": 2},
    "pairs": {**ON, "checkpoint_num_layers": 2},
    "every other pair": {**ON, "checkpoint_num_layers": 2, "recompute_every": 2},
    "selective": SELECTIVE,
    "selective in every other block": {**SELECTIVE, "recompute_every": 2},
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
STEPS = 3


def trained(rank: int, world_size: int, configs: list[dict[str, Any]]) -> list[Part]:
    """For the pool. Graphs are run operator by operator, so that bits can be compared."""
    torch.compile = partial(torch.compile, backend="aot_eager")  # of blocks and of what is done to logits
    return curves(rank, world_size, configs, STEPS)


COMPILED = {"compile": "block"}


@pytest.mark.parametrize(
    ("layout", "keys"),
    cells(
        [("plain", DROPOUT)],
        [("zero3", COMPILED), ("pp2", {})],
        [("zero3", {"precision": "bfloat16"}), ("tp2 sp", COMPILED | DROPOUT), ("zero3, deepspeed", DROPOUT)],
    ),
)
def test_training_is_bit_equal(layout: str, keys: dict[str, Any]) -> None:
    world, more = TABLE[layout]
    forms = [{}, *(FORMS[name] for name in ("full", "every other block", "selective"))]  # they differ in what runs when
    configs = [config(LLAMA, more, keys, form, train_micro_batch_size_per_gpu=2) for form in forms]
    for plain, *others in run_ranks(trained, world, configs):
        for ours in others:
            assert ours.losses == plain.losses and ours.norms == plain.norms
            assert bit_equal(ours.weights, plain.weights)


def products(**values: Any) -> int:
    """FLOPs of a step's products by weights, as torch counts them."""
    args = small(num_layers=5, activation="relu", **values)
    stage, batch = stage_with(args, random_weights(args)).train(), random_batch(args)
    with FlopCounterMode(display=False) as counter:
        stage(None, batch).sum().backward()
    counts = {str(operator): flops for operator, flops in counter.get_flop_counts()["Global"].items()}
    return sum(counts.get(operator, 0) for operator in ("aten.mm", "aten.addmm"))


@pytest.mark.parametrize("form", FORMS)
def test_the_share_of_products_that_run_again(form: str) -> None:
    args = small(num_layers=5, **FORMS[form])
    tokens, hidden = 2 * args.seq_length, args.hidden_size
    block, last = 2 * tokens * 12 * hidden**2, 2 * tokens * 4 * hidden**2
    again = products(**FORMS[form]) - products()
    # A group that is run again ends before its last product, which no gradient needs.
    groups = len(range(0, -(-5 // args.checkpoint_num_layers), args.recompute_every)) if again else 0
    assert again + groups * last == products_run_again(args) * 5 * block
