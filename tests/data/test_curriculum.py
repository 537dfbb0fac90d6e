"""Lengths of a curriculum: against DeepSpeed's scheduler, and in the batches."""

from typing import Any

import pytest
import torch
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

from megatron.data import check_curriculum, step_length
from megatron.data.curriculum import difficulty
from megatron.data.packed_dataset import PackedDataset
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.data.test_loader import one_rank_loader

LINEAR = {"total_curriculum_step": 100, "difficulty_step": 8}


def section(kind: str = "fixed_linear", min_length: int = 8, max_length: int = 64, **schedule: Any) -> dict[str, Any]:
    return {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": min_length, "max_difficulty": max_length,
            "schedule_type": kind, "schedule_config": schedule}  # fmt: skip


@pytest.mark.parametrize("curriculum", [
    section(**LINEAR),
    section(min_length=10, max_length=1023, total_curriculum_step=37, difficulty_step=16),
    section(min_length=8, max_length=256, total_curriculum_step=50, difficulty_step=64),
    section("fixed_root", **LINEAR, root_degree=2),
    section("fixed_root", min_length=1, max_length=2048, total_curriculum_step=90, difficulty_step=1, root_degree=3),
    section("fixed_discrete", difficulty=[8, 24, 64], max_step=[5, 17]),
])  # fmt: skip
def test_lengths_equal_deepspeed(curriculum: dict[str, Any]):
    scheduler = CurriculumScheduler(curriculum)
    lengths = [difficulty(curriculum, step) for step in range(1, 200)]
    assert lengths == [scheduler.update_difficulty(step) for step in range(1, 200)]
    assert lengths[0] < lengths[-1] == curriculum["max_difficulty"]


def configured(curriculum: dict[str, Any] | None, **changes: Any) -> NeoXArgs:
    values = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 64}
    return NeoXArgs.from_dict({**values, "max_position_embeddings": 64, "curriculum_learning": curriculum, **changes})


def test_length_without_a_curriculum_is_seq_length():
    args = configured(section(**LINEAR))
    assert [step_length(args, step) for step in (1, 20, 90, 100, 1000)] == [8, 16, 56, 64, 64]
    off = configured({**section(**LINEAR), "enabled": False})
    assert step_length(off, 1) == step_length(configured(None), 1) == 64


@pytest.mark.parametrize(("curriculum", "message"), [
    (section("fixed_discrete", difficulty=[0, 64], max_step=[3]), "difficulty: .*at least one"),
    (section(total_curriculum_step=9, difficulty_step=3), "difficulty_step: .* 2 ranks.* 3"),
    (section("fixed_discrete", difficulty=[8, 9, 64], max_step=[3, 5]), "difficulty: .* 9"),
])  # fmt: skip
def test_lengths_that_cannot_be_are_refused(curriculum: dict[str, Any], message: str):
    parallel = {"model_parallel_size": 2, "sequence_parallel": True}
    check_curriculum(configured(section(**LINEAR), **parallel))
    with pytest.raises(ConfigError, match=f"curriculum_learning.schedule_config.{message}"):
        check_curriculum(configured(curriculum, **parallel))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_beginnings_of_the_full_ones(dataset: PackedDataset, workers: int):
    lengths = {"length": lambda n: (2, 3, 8)[min(n, 2)]}
    full, truncated = (
        list(one_rank_loader(dataset, workers, {"eod_mask_loss": True}, eod=50, **overrides))
        for overrides in ({}, lengths)
    )
    assert [[batch.tokens.shape[1] for batch in step] for step in truncated[:3]] == [[2] * 4, [3] * 4, [8] * 4]
    for short_batch, full_batch in zip(sum(truncated, []), sum(full, []), strict=True):
        length = short_batch.tokens.shape[1]
        for name in ("tokens", "labels", "loss_weights"):
            assert torch.equal(getattr(short_batch, name), getattr(full_batch, name)[:, :length])
        assert short_batch.tokens.is_contiguous() and short_batch.seed == full_batch.seed
