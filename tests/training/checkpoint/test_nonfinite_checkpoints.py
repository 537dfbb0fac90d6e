"""A checkpoint that holds NaN, as other programs and earlier versions may have stored it, is named when it is
read."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import read_manifest, replace_file, save_tensors
from tests.pool import run_ranks
from tests.training.runs import NEOX, config, run_to_end

SMALL = config(NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, checkpoint_factor=2, num_layers=2)


def _spoil(checkpoint: Path, name: str, key: tuple[str, ...]) -> None:
    """Put a NaN into one tensor, with the checksums of what is there then."""
    state = torch.load(checkpoint / name, weights_only=True)
    tensor: Any = state
    for part in key:
        tensor = tensor[part]
    tensor.view(-1)[-1] = math.nan
    record, manifest = save_tensors(state, checkpoint / name), read_manifest(checkpoint)
    assert manifest is not None
    text = replace(manifest, files={**manifest.files, name: record}).to_json()
    replace_file(checkpoint / "manifest.json", text.encode())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("layer_03-model_00-model_states.pt", ("mlp.linear1.weight",)),
        ("optim_layer_02-model_00.pt", ("input_layernorm.weight", "exp_avg")),
    ],
)
def test_nan_is_named_and_stepped_over_when_told(name: str, key: tuple[str, ...], tmp_path: Path) -> None:
    save = tmp_path / "run"
    values = {**SMALL, "save": str(save)}
    run_ranks(run_to_end, 1, values)
    _spoil(save / "global_step4", name, key)
    advice = ", or set no_load_optim: true" if name.startswith("optim") else ""
    error_pattern = rf"global_step4: {name} \({'/'.join(key)} is not finite\); load another `iteration`{advice}\n"
    with pytest.raises(AssertionError, match=error_pattern):
        run_ranks(run_to_end, 1, {**values, "train_iters": 5})
    other = {**values, "load": str(save), "save": str(tmp_path / "other"), "train_iters": 5, "no_load_optim": True}
    if advice:
        run_ranks(run_to_end, 1, other)
    else:
        with pytest.raises(AssertionError, match=error_pattern):
            run_ranks(run_to_end, 1, other)
    run_ranks(run_to_end, 1, {**values, "train_iters": 5, "load_fallback": True})
    rows = [json.loads(line) for line in (save / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5] and (save / "latest").read_text() == "global_step5"


def test_nan_of_gpt_neox_is_named(tmp_path: Path) -> None:
    """Its checkpoints have no manifest."""
    save = tmp_path / "run"
    run_ranks(run_to_end, 1, {**SMALL, "save": str(save)})
    _spoil(save / "global_step4", "layer_02-model_00-model_states.pt", ("attention.dense.bias",))
    (save / "global_step4" / "manifest.json").unlink()
    with pytest.raises(AssertionError, match=r"global_step4: layer_02-\S+ \(attention.dense.bias is not finite\)"):
        run_ranks(run_to_end, 1, {**SMALL, "load": str(save), "finetune": True})
