"""A checkpoint carries logits of a fixed batch, and is refused where it gives others."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpointing import load_tensors, read_manifest, save_tensors
from megatron.checkpointing.layout import LOGITS
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import LAYOUTS, LLAMA, NEOX, begin, config, run_to_end

CHECK = {"checkpoint_validation_with_forward_pass": True}
SP = {"model_parallel_size": 2, "sequence_parallel": True}
CASES = {**LAYOUTS, "tp2 +sp": (2, SP), "tp2 x pp2": (4, {"model_parallel_size": 2, "pipe_parallel_size": 2})}


def values(save: Path, *parts: dict[str, Any], model: dict[str, Any] = NEOX, **more: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 2, "train_micro_batch_size_per_gpu": 4, "checkpoint_factor": 2}
    return config(model, CHECK, small, *parts, {"save": str(save), **more})


def log_of(rank: int, world_size: int, given: dict[str, Any]) -> list[str]:
    """For the pool: the log of building a run."""
    from megatron.launch import process_info
    from megatron.neox_arguments import NeoXArgs
    from megatron.training import start

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        start(NeoXArgs.from_dict(given), process_info())
    return printed.getvalue().splitlines()


def stored(step: Path) -> list[Tensor]:
    states = [load_tensors(file) for file in sorted(step.glob("mp_rank_*"))]
    return [state[LOGITS] for state in states if state[LOGITS] is not None]


@pytest.mark.parametrize("name", with_more(["plain", "zero1", "zero3", "pp2", "tp2 +sp", "tp2 x pp2"], "zero1", "pp2"))
def test_kept_and_found_again(name: str, tmp_path: Path) -> None:
    ranks, layout = CASES[name]
    precision = "bfloat16" if name in ("plain", "zero3", "tp2 x pp2") else "fp32"
    given = values(tmp_path, layout, precision=precision, model=LLAMA if "tp2" in name else NEOX)
    run_ranks(run_to_end, ranks, given)
    parts = stored(tmp_path / "global_step2")
    assert len(parts) == layout.get("model_parallel_size", 1) and torch.cat(parts, -1).shape == (32, 384)
    lines = run_ranks(log_of, ranks, given)[0]
    assert any("gives the logits it was saved with (largest difference 0)" in line for line in lines)


def logits_of(rank: int, world_size: int, given: dict[str, Any]) -> Tensor:
    """For the pool: the model's logits of the tokens 0, 1, 2, ..., by a plain call."""
    from megatron.data import Batch

    training = begin(given)
    tokens = torch.arange(32)[None]
    with torch.no_grad():
        return training.engine.stage.eval()(None, Batch(tokens, tokens, tokens))[:, 0]  # type: ignore[index]


def test_they_are_the_models_logits(tmp_path: Path) -> None:
    run_ranks(run_to_end, 2, values(tmp_path, CASES["pp2"][1]))
    elsewhere = values(tmp_path / "x", load=str(tmp_path), no_load_optim=True)
    assert torch.equal(stored(tmp_path / "global_step2")[0], run_ranks(logits_of, 1, elsewhere)[0])


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [("tp2", "plain", "no_load_optim"), ("plain", "tp2 x pp2", "finetune"), ("pp2", "zero3", "no_load_optim")],
)
def test_other_layouts_compare_too(before: str, after: str, how: str, tmp_path: Path) -> None:
    ranks, layout = CASES[before]
    run_ranks(run_to_end, ranks, values(tmp_path / "a", layout))
    ranks, layout = CASES[after]
    given = values(tmp_path / "b", layout, load=str(tmp_path / "a"))
    lines = run_ranks(log_of, ranks, {**given, how: True})[0]
    assert any("gives the logits it was saved with" in line for line in lines)


def damage(step: Path, key: str) -> None:
    """Change one tensor of the second block, checksums and all."""
    file = step / "layer_03-model_00-model_states.pt"
    state = {name: tensor.clone() for name, tensor in load_tensors(file).items()}
    state[key] *= 1.2
    record = save_tensors(state, file)
    manifest = read_manifest(step)
    assert manifest is not None
    changed = replace(manifest, files={**manifest.files, file.name: record})
    (step / "manifest.json").write_text(changed.to_json())


@pytest.mark.parametrize(("name", "how"), [("plain", "finetune"), ("pp2", "no_load_optim"), ("tp2", "no_load_optim")])
def test_a_wrong_weight_stops_the_run(name: str, how: str, tmp_path: Path) -> None:
    ranks, layout = CASES[name]
    run_ranks(run_to_end, ranks, values(tmp_path, layout))
    damage(tmp_path / "global_step2", "attention.query_key_value.weight")
    other = values(tmp_path / "x", layout, load=str(tmp_path))
    with pytest.raises(AssertionError, match=r"logits of the fixed batch differ by up to \d.* \(allowed: \d"):
        run_ranks(run_to_end, ranks, {**other, how: True})
    assert not list((tmp_path / "x").glob("global_step*"))


def test_without_stored_logits_it_says_so(tmp_path: Path) -> None:
    given = values(tmp_path)
    run_ranks(run_to_end, 1, {**given, "checkpoint_validation_with_forward_pass": False})
    lines = run_ranks(log_of, 1, given)[0]
    assert any(f"holds no {LOGITS}: it is not checked" in line for line in lines)
