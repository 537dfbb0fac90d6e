"""A dry run lists the files of a conversion and their sizes from shapes alone, for a model of any size."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing.families.convert import hf_shapes
from megatron.checkpointing.huggingface import HFFolder, export_hf, export_plan, import_plan
from megatron.checkpointing.huggingface.weight_writer import _index, _plan, planned_sizes, write_weights
from megatron.checkpointing.layout import layer_file
from tests.checkpointing.published_models import sizes
from tests.checkpointing.test_families import args_of
from tests.checkpointing.test_huggingface import imported, model_folder
from tools.ckpts import convert_hf_to_neox, convert_neox_to_hf

LLAMA3_70B = sizes("llama", 128256, 8192, 80, 64, 8, 28672, 8192, rope_theta=500000.0, torch_dtype="bfloat16")
PARAMETERS = 70_553_706_496  # https://huggingface.co/meta-llama/Meta-Llama-3-70B


def test_a_folder_of_70b_is_planned_without_its_weights() -> None:
    large = hf_shapes(args_of(LLAMA3_70B))
    plan, sizes = _plan(large, torch.bfloat16, 5 * 10**9), planned_sizes(large, torch.bfloat16)
    assert list(sizes) == [*(f"model-{i:05d}-of-00030.safetensors" for i in range(1, 31)),
                           "model.safetensors.index.json"]  # fmt: skip
    assert all(4e9 < file.size - len(file.header) <= 5e9 for file in plan[:-1])
    assert sum(file.size - len(file.header) for file in plan) == 2 * PARAMETERS
    assert [name for file in plan for name in file.begins] == list(large)
    index = json.loads(_index(plan))
    assert index["metadata"]["total_size"] == 2 * PARAMETERS and len(index["weight_map"]) == 723
    assert index["weight_map"]["model.embed_tokens.weight"] == "model-00001-of-00030.safetensors"


def test_the_plan_is_what_is_written(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((3, i + 1), float(i)) for i in range(6)}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for limit in (100, 10**9):
        (tmp_path / str(limit)).mkdir()
        write_weights(tmp_path / str(limit), shapes, torch.float32, tensors.items(), limit)
        written = {file.name: file.stat().st_size for file in (tmp_path / str(limit)).iterdir()}
        assert planned_sizes(shapes, torch.float32, limit) == written and (len(written) > 1) == (limit == 100)


@pytest.mark.more
def test_a_dry_run_tells_what_an_import_of_70b_would_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder's files are sparse: they have headers and no data."""
    plan = _plan(hf_shapes(args_of(LLAMA3_70B)), torch.bfloat16, 5 * 10**9)
    for file in plan:
        (tmp_path / file.name).write_bytes(file.header)
        os.truncate(tmp_path / file.name, file.size)
    (tmp_path / "model.safetensors.index.json").write_bytes(_index(plan))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_70B))

    def read(self: HFFolder, name: str) -> Any:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(HFFolder, "get", read)
    arguments = ["--hf-model", str(tmp_path), "--output-dir", str(tmp_path / "out"), "--tp", "8", "--dry-run"]
    convert_hf_to_neox.main(arguments)
    lines = capsys.readouterr().out.splitlines()
    line_of_file = {line.split()[-1].removeprefix(f"{tmp_path}/out/global_step0/"): line for line in lines[1:-1]}
    layers = (0, *range(2, 82), 83, 84)
    assert {layer_file(layer, rank) for layer in layers for rank in range(8)} < line_of_file.keys()
    assert len(line_of_file) == 83 * 8 + 8 + 1 and line_of_file["layer_02-model_07-model_states.pt"].split()[:2] == [
        "213.95",
        "MB",
    ]
    assert lines[-1].split()[0] == "141.13" and "GB" in lines[-1] and not (tmp_path / "out").exists()


@pytest.mark.parametrize("kwargs", [{"tensor": 2, "pipe": 2, "naming": "te"}, {"pipe": 0, "iteration": 3}])
def test_dry_runs_of_both_ways_tell_the_files_and_their_sizes(
    kwargs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = HFFolder(model_folder(tmp_path / "hf", "llama 3"))
    planned = import_plan(folder, **kwargs)
    path, args = imported(folder, tmp_path / "neox", **kwargs)
    files = {str(file.relative_to(path.parent)): file for file in path.rglob("*") if file.is_file()}
    assert files.keys() - planned.keys() == {f"{path.name}/manifest.json", f"{path.name}/configs/hf_model.yml"}
    for name, size in planned.items():
        assert abs(files[name].stat().st_size - size) < 6000, name
    convert_neox_to_hf.main(["--input_dir", str(path), "--output_dir", str(tmp_path / "back"), "--dry-run"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "back").exists()
    sizes = export_plan(path, args)
    export_hf(path, args, tmp_path / "back", check=False)
    assert sizes == {file.name: file.stat().st_size for file in (tmp_path / "back").iterdir()}
    assert last.split()[2:] == [f"{len(sizes)}", "files"]
