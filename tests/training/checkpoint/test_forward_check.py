"""A checkpoint carries logits of a fixed batch, and is refused where it gives others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import load_tensors
from megatron.checkpointing.layout import LOGITS
from megatron.data import Batch
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import as_stopped_at, change_file
from tests.training.runs import LLAMA, NEOX, TABLE, begin, config, output_of_run, run_to_end


def values(save: Path, *parts: dict[str, Any], model: dict[str, Any] = NEOX, **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 2, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 2}
    checked = {"checkpoint_validation_with_forward_pass": True, "save": str(save)}
    return config(model, small, *parts, {**checked, **overrides})


def stored(step: Path) -> list[Tensor]:
    states = [load_tensors(file) for file in sorted(step.glob("mp_rank_*"))]
    return [state[LOGITS] for state in states if state[LOGITS] is not None]


@pytest.mark.parametrize(("name", "other_layout", "load_key"), [
    ("tp2 sp", "plain", "no_load_optim"), ("zero3", "tp2 pp2 sp", "finetune"), ("pp2", "zero1", "no_load_optim"),
])  # fmt: skip
def test_kept_and_found_again_but_not_with_a_wrong_weight(
    name: str, other_layout: str, load_key: str, tmp_path: Path
) -> None:
    """By the layout that saves, and by another that takes the checkpoint so."""
    ranks, layout = TABLE[name]
    model, saved, damaged = LLAMA if "tp2" in name else NEOX, tmp_path / "saved", tmp_path / "damaged"
    precision = "bfloat16" if name == "zero3" else "fp32"
    saved_values = values(saved, layout, precision=precision, model=model)
    run_ranks(run_to_end, ranks, saved_values)
    parts = stored(saved / "global_step2")
    assert len(parts) == layout.get("model_parallel_size", 1) and torch.cat(parts, -1).shape == (32, 384)
    assert "logits it was saved with (largest difference 0)" in run_ranks(output_of_run, ranks, saved_values)[0]
    load_keys = {load_key: True, "precision": precision, "model": model}
    loaded_values = values(tmp_path / "there", TABLE[other_layout][1], load=str(saved), **load_keys)
    assert "logits it was saved with" in run_ranks(output_of_run, TABLE[other_layout][0], loaded_values)[0]
    as_stopped_at(2, saved, damaged)
    weight = "attention.query_key_value.weight"
    change_file(damaged / "global_step2", "layer_03-model_00-model_states.pt", lambda state: state[weight].mul_(4.0))
    with pytest.raises(AssertionError, match=r"CheckpointError.*logits.* differ by up to \d.* \(allowed: \d"):
        run_ranks(run_to_end, ranks, values(tmp_path / "no", layout, load=str(damaged), **load_keys))
    assert not list((tmp_path / "no").glob("global_step*"))


def logits_of(rank: int, world_size: int, values: dict[str, Any]) -> Tensor:
    """For the pool: the model's logits of the tokens 0, 1, 2, ..., by a plain call."""
    training, tokens = begin(values), torch.arange(32)[None]
    with torch.no_grad():
        return training.engine.stage.eval()(None, Batch(tokens, tokens, tokens))[:, 0]  # type: ignore[index]


def test_they_are_the_models_logits(tmp_path: Path) -> None:
    run_ranks(run_to_end, 2, values(tmp_path, TABLE["pp2"][1], train_iters=1))
    loaded_values = values(tmp_path / "x", load=str(tmp_path), no_load_optim=True)
    assert torch.equal(stored(tmp_path / "global_step1")[0], run_ranks(logits_of, 1, loaded_values)[0])


def test_without_stored_logits_it_says_so(tmp_path: Path) -> None:
    unchecked = values(tmp_path, train_iters=1)
    run_ranks(run_to_end, 1, {**unchecked, "checkpoint_validation_with_forward_pass": False})
    assert any(
        LOGITS in line and "not checked" in line for line in run_ranks(output_of_run, 1, unchecked)[0].splitlines()
    )
