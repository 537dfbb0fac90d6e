"""Dropout: ranks that hold the same activations drop the same of them; each place has its own mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.attention import AttentionInputs
from megatron.model.attention.seeded_attention import seeded_attention
from tests.model.runs import LLAMA, NEOX, Step, assert_steps, sgd_steps
from tests.model.stages import groups_of, make_stage, random_batch, small
from tests.pool import run_ranks


def test_hidden_dropout_is_the_same_for_any_layout_of_full_activations() -> None:
    models = [{**model, "hidden_dropout": 0.2} for model in (NEOX, LLAMA)]
    references: list[Step] = run_ranks(sgd_steps, 1, models)[0]
    layouts = ({"model_parallel_size": 2}, {"pipe_parallel_size": 2})
    assert_steps([({**m, **layout}, step) for layout in layouts for m, step in zip(models, references, strict=True)], 2)


def masks(rank: int, world_size: int, sequence: bool) -> tuple[Tensor, Tensor, list[int]]:
    """Returns dropout masks of the embedding and of attention, and three seeds of a block.

    Attention weights are equal on all ranks. Seeds: of attention, and of both additions to hidden states."""
    dropout = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    args = small(model_parallel_size=2, sequence_parallel=sequence, num_layers=1, **dropout)
    groups, batch = groups_of(args, world_size), random_batch(args)
    stage = make_stage(args, groups=groups).train()
    positions = torch.arange(args.seq_length).expand_as(batch.tokens)
    with torch.no_grad():
        embedded = stage.layers["0"](batch.tokens, positions, 5) == 0
        seeds, attention = stage.layers["2"].seeds(7), stage.layers["2"].attention  # type: ignore[operator]
        attention.query_key_value.weight.fill_(0.1)  # type: ignore[union-attr,operator]
        attention.query_key_value.bias.fill_(1.0)  # type: ignore[union-attr,operator]
        x = torch.ones(args.seq_length // (2 if sequence else 1), 2, args.hidden_size)
        attention_mask = attention.core(x, AttentionInputs(), seeds.attention)  # type: ignore[union-attr,operator]
        return embedded, attention_mask, list(map(int, seeds[:3]))


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_differ_between_tensor_ranks_only_where_their_values_do(sequence: bool) -> None:
    (hidden0, attention0, seeds0), (hidden1, attention1, seeds1) = run_ranks(masks, 2, sequence)
    assert [seed0 == seed1 for seed0, seed1 in zip(seeds0, seeds1, strict=True)] == [False, not sequence, not sequence]
    assert 0.4 < hidden0.float().mean() < 0.6
    assert torch.equal(hidden0, hidden1) != sequence, "whole activations share a mask, parts of the sequence do not"
    assert not torch.equal(attention0, attention1), "every rank's heads have their own mask"


def test_layers_micro_batches_and_places_have_their_own_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def record(x: Tensor, p: float, seed: Tensor, training: bool) -> Tensor:
        seeds.append(int(seed))
        return x

    def record_attention(*inputs: Any) -> Tensor:
        seeds.append(int(inputs[4]))
        return seeded_attention(*inputs)

    args = small(num_layers=3, hidden_dropout=0.1, attention_dropout=0.1)
    stage = make_stage(args).train()
    for module in ("block", "embedding"):
        monkeypatch.setattr(f"megatron.model.{module}.dropout", record)
    monkeypatch.setattr("megatron.model.attention.backends.seeded_attention", record_attention)
    for seed in (0, 1):
        stage(None, random_batch(args, seed=seed))
    assert len(seeds) == len(set(seeds)) == 2 * (1 + 3 * 3)
