"""GPT-NeoX's optimizer state by parameter: golden files without ZeRO, and DeepSpeed's of them under ZeRO."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import CheckpointError, NeoXOptimizer, load_tensors, read_manifest, save_tensors, zero_file
from megatron.checkpointing.layout import model_file
from megatron.model.weight_map import layer_params
from megatron.mpu import unshard
from tests.checkpointing.golden import checkpoint, fails, golden_args
from tests.marks import with_more
from tests.pool import run_ranks
from tests.training.runs import begin
from tests.training.test_golden_runs import golden_config
from tools.ckpts import merge

# The layers of each pipeline stage, as GPT-NeoX cut them.
STAGES = {run: [range(9)] for run in ("neox_pp1_mp1", "neox_pp0_mp1", "llama_pp1_mp1")}
STAGES["neox_pp2_mp2"] = [range(4), range(4, 9)]


@pytest.mark.parametrize("run", STAGES)
def test_golden_state_is_found_by_parameter(run: str) -> None:
    args = golden_args(run)
    optimizer, specs = NeoXOptimizer(checkpoint(run), args), layer_params(args)
    assert optimizer.names(specs) == {(layer, spec.name) for layer in specs for spec in specs[layer]}
    size = optimizer.tensor_size
    for stage, layers in enumerate(STAGES[run]):
        files = [checkpoint(run) / model_file(stage * size + rank) for rank in range(size)]
        saved = [load_tensors(file)["optimizer"]["state"] for file in files]
        stage_params = [(layer, spec) for layer in layers for spec in specs.get(layer, ())]
        ordered = [one for decay in (True, False) for one in stage_params if one[1].weight_decay is decay]
        assert len(ordered) == len(saved[0])
        for number, (layer, spec) in enumerate(ordered):
            state = optimizer.read(layer, spec, 0, 1)
            assert state.keys() == {"step", "exp_avg", "exp_avg_sq"} and float(state["step"]) == 3
            for key in ("exp_avg", "exp_avg_sq"):
                pieces = [saved[rank][number][key] for rank in range(size)]
                assert torch.equal(state[key], unshard(pieces, spec))
                assert torch.equal(optimizer.read(layer, spec, size - 1, size)[key], pieces[-1])
    assert optimizer.scaler() == {}
    first = NeoXOptimizer(checkpoint(run, 0), args)
    assert all(first.read(2, spec, 0, 1) == {} for spec in specs[2])


def zero_states(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """For the pool: what DeepSpeed saves of its ZeRO optimizer after a run has taken a checkpoint up."""
    training = begin(values)
    return training.engine.layout_state()


@pytest.mark.parametrize("stage", with_more([1, 2], 1))
def test_zero_files_of_deepspeed_hold_the_same(stage: int, tmp_path: Path) -> None:
    """Parameters stand across the cuts between data ranks, and padding at the end."""
    run, ranks = "neox_pp1_mp1", 3
    values = golden_config(
        "ckpt_neox", run, cache=str(tmp_path), load=str(checkpoint(run).parent), iteration=3, train_iters=5,
        train_batch_size=None, train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=1,
        zero_optimization={"stage": stage}, engine="deepspeed",
    )  # fmt: skip
    args = golden_args(run)
    path = copied(run, tmp_path, lambda rank, state: state.update(optimizer=None))
    for rank, saved in enumerate(run_ranks(zero_states, ranks, values)):
        save_tensors(saved, path / zero_file(rank, 0, False))
    zero, plain = NeoXOptimizer(path, args), NeoXOptimizer(checkpoint(run), args)
    for layer, specs in layer_params(args).items():
        for spec in specs:
            torch.testing.assert_close(zero.read(layer, spec, 0, 1), plain.read(layer, spec, 0, 1), rtol=0, atol=0)
    (path / zero_file(1, 0, False)).unlink()
    fails("incomplete, .*mp_rank_00", NeoXOptimizer, path, args)


def copied(run: str, to: Path, change: Callable[[int, dict[str, Any]], None]) -> Path:
    """A golden checkpoint with other mp_rank files."""
    path = to / "global_step3"
    shutil.copytree(checkpoint(run), path)
    for rank, file in enumerate(sorted(path.glob("mp_rank_*"))):
        state = {**load_tensors(file)}
        change(rank, state)
        file.unlink()
        save_tensors(state, file)
    return path


def without_moment(rank: int, state: dict[str, Any]) -> None:
    state["optimizer"] = {**state["optimizer"], "state": {**state["optimizer"]["state"]}}
    state["optimizer"]["state"][0] = {"exp_avg": torch.zeros(1)}


@pytest.mark.parametrize(("change", "keys", "facts"), [
    (lambda rank, state: state.update(optimizer=None), {}, "plain torch form"),
    (lambda rank, state: state.update(optimizer={"fp32_groups_flat": []}), {}, "plain torch form"),
    (without_moment, {}, "exp_avg_sq"),
    (lambda rank, state: None, {"norm": "rmsnorm"}, "other parameters"),
], ids=["none", "fp16 without ZeRO", "no Adam", "another model"])  # fmt: skip
def test_what_is_no_state_of_this_model_is_refused_with_the_way_out(
    change: Callable[[int, dict[str, Any]], None], keys: dict[str, Any], facts: str, tmp_path: Path
) -> None:
    path, args = copied("neox_pp1_mp1", tmp_path, change), golden_args("neox_pp1_mp1", **keys)
    with pytest.raises(CheckpointError, match=f"{facts}.*no_load_optim: true"):
        NeoXOptimizer(path, args).read(0, layer_params(args)[0][0], 0, 1)


def test_merged_with_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = "neox_pp2_mp2"
    merge.main(["--input_dir", str(checkpoint(run)), "--output_dir", str(tmp_path)])
    path = tmp_path / "global_step3"
    manifest = read_manifest(path)
    assert manifest is not None and manifest.optimizer
    assert (manifest.iteration, manifest.consumed_samples) == (3, 12)
    assert "from which a run starts at iteration 0" not in capsys.readouterr().out
    args = golden_args(run)
    unmerged = NeoXOptimizer(checkpoint(run), args)
    for layer, specs in layer_params(args).items():
        if specs:
            file = load_tensors(path / f"optim_layer_{layer:02d}-model_00.pt")
            for spec in specs:
                expected = unmerged.read(layer, spec, 0, 1)
                assert all(torch.equal(file[spec.name][key], value) for key, value in expected.items())
