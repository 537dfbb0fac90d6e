"""Dropout: ranks that hold the same activations drop the same of them; each place has its own mask."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.model.attention import AttentionInputs
from megatron.model.attention.seeded_attention import seeded_attention
from tests.model.runs import LLAMA, NEOX, Step, assert_steps, sgd_steps
from tests.model.stages import groups_of, random_batch, small, stage_with
from tests.pool import run_ranks


def test_hidden_dropout_is_the_same_for_any_layout_of_whole_activations() -> None:
    models = [{**model, "hidden_dropout": 0.2} for model in (NEOX, LLAMA)]
    references: list[Step] = run_ranks(sgd_steps, 1, models)[0]
    layouts = ({"model_parallel_size": 2}, {"pipe_parallel_size": 2})
    assert_steps([({**m, **layout}, step) for layout in layouts for m, step in zip(models, references, strict=True)], 2)


def masks(rank: int, world_size: int, sequence: bool) -> tuple[Tensor, Tensor, list[int]]:
    """What is dropped after the embedding, attention whose weights are alike on every rank, and the seeds of
    a block: of attention, and of what is added to the hidden states."""
    dropout = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    args = small(model_parallel_size=2, sequence_parallel=sequence, num_layers=1, **dropout)
    groups, batch = groups_of(args, world_size), random_batch(args)
    stage = stage_with(args, groups=groups).train()
    positions = torch.arange(args.seq_length).expand_as(batch.tokens)
    with torch.no_grad():
        embedded = stage.layers["0"](batch.tokens, positions, 5) == 0
        seeds, attention = stage.layers["2"].seeds(7), stage.layers["2"].attention  # type: ignore[operator]
        attention.query_key_value.weight.fill_(0.1)  # type: ignore[union-attr,operator]
        attention.query_key_value.bias.fill_(1.0)  # type: ignore[union-attr,operator]
        x = torch.ones(args.seq_length // (2 if sequence else 1), 2, args.hidden_size)
        kept = attention.core(x, AttentionInputs(), seeds.attention)  # type: ignore[union-attr,operator]
        return embedded, kept, list(map(int, seeds[:3]))


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_differ_between_tensor_ranks_only_where_their_values_do(sequence: bool) -> None:
    (first, attention, seeds), (second, other, others) = run_ranks(masks, 2, sequence)
    assert [one == another for one, another in zip(seeds, others, strict=True)] == [False, not sequence, not sequence]
    assert 0.4 < first.float().mean() < 0.6
    assert torch.equal(first, second) != sequence, "whole activations share a mask, parts of the sequence do not"
    assert not torch.equal(attention, other), "every rank's heads have their own mask"


def test_layers_micro_batches_and_places_have_their_own_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def record(x: Tensor, p: float, seed: Tensor, training: bool) -> Tensor:
        seeds.append(int(seed))
        return x

    def record_attention(*given: Any) -> Tensor:
        seeds.append(int(given[4]))
        return seeded_attention(*given)

    args = small(num_layers=3, hidden_dropout=0.1, attention_dropout=0.1)
    stage = stage_with(args).train()
    for module in ("block", "embedding"):
        monkeypatch.setattr(f"megatron.model.{module}.dropout", record)
    monkeypatch.setattr("megatron.model.attention.backends.seeded_attention", record_attention)
    for seed in (0, 1):
        stage(None, random_batch(args, seed=seed))
    assert len(seeds) == len(set(seeds)) == 2 * (1 + 3 * 3)
