"""How a run starts, goes on, falls back and refuses; what it leaves on disk."""

import fcntl
import json
import math
import os
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.checkpointing import CheckpointError, Manifest, load_tensors, read_manifest, verify
from megatron.checkpointing.remote_staging import _locked
from megatron.neox_arguments import NeoXArgs
from megatron.training import setup, train
from megatron.training.builtin_callbacks.saving import SaveCallback
from megatron.training.checkpoint.pieces import lock_folder
from megatron.training.checkpoint.source import choose_source
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import change_file, losses, metrics, refused, stop_after, warnings_of
from tests.training.runs import ADAMW, GOLDEN, LAYOUTS, NEOX, begin, bit_equal, cells, config, output_of_run, run_to_end

SMALL = config(NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, checkpoint_factor=2, num_layers=2)
LAYERS = [f"layer_{i:02d}-model_00-model_states.pt" for i in (0, 2, 3, 5)]
STATES = [f"optim_layer_{i:02d}-model_00.pt" for i in (0, 2, 3, 5)]


def values(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    return {**SMALL, "save": str(tmp_path / "run"), **overrides}


def run(values: dict[str, Any], ranks: int = 1) -> Any:
    return run_ranks(run_to_end, ranks, values)[0][1]


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("global_step*"))


def iterations(save: Path) -> list[int]:
    return [row["iteration"] for row in metrics(save)]


def weights(step: Path) -> dict[Any, dict[str, Any]]:
    return {path.name: load_tensors(path) for path in step.glob("layer_*")}


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four_steps")
    run(values(folder))
    return folder / "run"


@pytest.fixture
def trained(four_steps: Path, tmp_path: Path) -> Path:
    """A finished run of four steps, saved at 2 and 4."""
    return shutil.copytree(four_steps, tmp_path / "run")


def test_files_are_neox_and_whole(trained: Path) -> None:
    assert (trained / "latest").read_text() == "global_step4" and steps(trained) == ["global_step2", "global_step4"]
    names = sorted(p.name for p in (trained / "global_step4").iterdir())
    assert names == sorted([*LAYERS, *STATES, "mp_rank_00_model_states.pt", "configs", "tokenizer", "manifest.json"])
    state = load_tensors(trained / "global_step4" / "mp_rank_00_model_states.pt")
    assert state["module"] is None and state["optimizer"] is None and state["iteration"] == 4
    assert state["lr_scheduler"]["start_lr"] == 1e-3 and state["args"]["hidden_size"] == 32
    manifest = read_manifest(trained / "global_step4")
    assert manifest is not None and manifest.consumed_samples == 32 and manifest.layout.tensor == 1


def test_a_run_that_ended_before_its_first_latest_goes_on(trained: Path, tmp_path: Path) -> None:
    full_weights, first_manifest = (
        weights(trained / "global_step4"),
        (trained / "global_step2" / "manifest.json").read_bytes(),
    )
    shutil.rmtree(trained / "global_step4")
    (trained / "latest").unlink()
    run(values(tmp_path))
    assert (trained / "latest").read_text() == "global_step4" and steps(trained) == ["global_step2", "global_step4"]
    assert (trained / "global_step2" / "manifest.json").read_bytes() == first_manifest, "it did not start afresh"
    assert bit_equal(full_weights, weights(trained / "global_step4"))


def test_optimizer_files_do_not_tell_of_zero(tmp_path: Path) -> None:
    run(values(tmp_path, zero_optimization={"stage": 1}, precision="bfloat16", checkpoint_factor=1, train_iters=1), 2)
    files = sorted((tmp_path / "run" / "global_step1").glob("*optim*"))
    assert [path.name for path in files] == STATES
    state = load_tensors(files[1])["mlp.linear1.weight"]
    types = {key: value.dtype for key, value in state.items()}
    assert types == dict.fromkeys(("master", "exp_avg", "exp_avg_sq", "step"), torch.float32)
    assert state["master"].shape == state["exp_avg"].shape == (128, 32)


def test_same_files_for_every_pipe_size(tmp_path: Path) -> None:
    for pipe, ranks in ((0, 1), (1, 1), (2, 2)):
        run(values(tmp_path / str(pipe), pipe_parallel_size=pipe, extra_save_iters=[0], train_iters=1), ranks)
    files = [weights(tmp_path / f"{pipe}/run/global_step0") for pipe in (0, 1, 2)]
    assert bit_equal(files[0], files[1]) and bit_equal(files[0], files[2])


def test_row_bias_parts_sum_on_disk(tmp_path: Path) -> None:
    full_bias = run(values(tmp_path, model_parallel_size=2, train_iters=2), 2)[2]["mlp.linear2.bias"]
    files = [f"run/global_step2/layer_02-model_0{rank}-model_states.pt" for rank in range(2)]
    parts = [load_tensors(tmp_path / file)["mlp.linear2.bias"] for file in files]
    assert torch.equal(parts[0] + parts[1], full_bias) and full_bias.abs().max() > 0


def test_goes_on_from_save_though_load_names_another(trained: Path, tmp_path: Path) -> None:
    """A requeued fine-tuning job does not begin again from its base model."""
    tuned = values(tmp_path / "tuned", load=str(trained), finetune=True, extra_save_iters=[0])
    save = tmp_path / "tuned" / "run"
    run_ranks(stop_after, 1, tuned, 2)
    assert bit_equal(weights(trained / "global_step4"), weights(save / "global_step0")), "it takes the weights"
    states = [state for file in (save / "global_step0").glob("optim_*") for state in load_tensors(file).values()]
    assert states and not any("exp_avg" in state for state in states), "and those alone"
    rows = metrics(save)
    assert iterations(save) == [1, 2], "fine-tuning starts at iteration 0"
    tuned_weights = run(tuned)
    assert metrics(save)[:2] == rows and iterations(save) == [1, 2, 3, 4], "it went on"
    assert not bit_equal(tuned_weights, run({**tuned, "restart": True, "seed": 5})), "restart: true begins again"


def test_iteration_chooses(trained: Path, tmp_path: Path) -> None:
    run(values(tmp_path / "other", load=str(trained), iteration=2))
    assert steps(tmp_path / "other" / "run") == ["global_step4"]
    assert bit_equal(*(weights(folder / "global_step4") for folder in (trained, tmp_path / "other" / "run")))


def test_another_precision_takes_weights_without_optimizer(trained: Path, tmp_path: Path) -> None:
    run_values = values(tmp_path / "bf16", load=str(trained), precision="bfloat16", train_iters=5)
    (message,) = refused(run_values)
    assert re.search(r"precision: bf16 \(program\), .* fp32.*no_load_optim: true", message)
    run({**run_values, "no_load_optim": True})
    assert steps(tmp_path / "bf16" / "run") == ["global_step5"]


def test_missing_load_is_refused(tmp_path: Path) -> None:
    nowhere, first_start = refused(
        values(tmp_path, load=str(tmp_path / "no")), values(tmp_path, load=str(tmp_path / "run"))
    )
    assert f"{tmp_path / 'no'}: " in nowhere and "directory" in nowhere
    assert not first_start, "load == save and still empty: a first start"


def test_another_run_is_refused(trained: Path, tmp_path: Path) -> None:
    other_data = {"data_path": str(GOLDEN / "dataset" / "corpusB_text_document"), "train_iters": 6}
    seed, size, data = refused(
        values(tmp_path, seed=7), values(tmp_path, hidden_size=64), values(tmp_path, **other_data)
    )
    assert re.search(r"seed: 7 \(program\), .* 1234; .*restart: true", seed)
    assert re.search(r"hidden_size: 64 \(program\), .* 32", size)
    assert re.search(r"data_path: idx_sha256 \w+ \(program\), .*allow_changed_data: true", data)
    assert steps(trained) == ["global_step2", "global_step4"]
    run(values(tmp_path, **other_data, allow_changed_data=True))
    assert steps(trained)[-1] == "global_step6"


def damage(file: Path, part: str) -> None:
    content = bytearray(file.read_bytes())
    if part == "the file":
        file.unlink()
    elif part == "the end":
        file.write_bytes(content[:-3])
    elif file.name == "manifest.json":  # still JSON, and nothing else would find it
        assert b'"consumed_samples": 32' in content
        file.write_bytes(content.replace(b'"consumed_samples": 32', b'"consumed_samples": 36'))
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def test_every_damage_is_refused_by_name_and_falls_back_only_when_told(four_steps: Path, tmp_path: Path) -> None:
    files = (LAYERS[2], STATES[1], "mp_rank_00_model_states.pt", "manifest.json")
    cells = [(name, part) for name in files for part in ("a byte", "the end", "the file")]
    for i, cell in enumerate(cells):
        damage(shutil.copytree(four_steps, tmp_path / str(i) / "run") / "global_step4" / cell[0], cell[1])
    messages = refused(*(values(tmp_path / str(i), train_iters=5) for i in range(len(cells))))
    for (name, part), message in zip(cells, messages, strict=True):
        assert re.search(rf"global_step4[^\n]*{re.escape(name)}", message), (name, part, message)
    assert "checksum" in messages[0]
    for i in (0, len(cells) - 1):
        run(values(tmp_path / str(i), load_fallback=True))
        assert iterations(tmp_path / str(i) / "run") == [1, 2, 3, 4], "steps 3 and 4 stand once"


def spoil(checkpoint: Path, name: str, *key: str) -> None:
    """Make the last number of one tensor NaN, as other programs and earlier versions may have stored it."""

    def change(state: Any) -> None:
        for part in key[:-1]:
            state = state[part]
        state[key[-1]].view(-1)[-1] = math.nan

    change_file(checkpoint, name, change)


@pytest.mark.parametrize(("name", "key"), [
    (LAYERS[2], ["mlp.linear1.weight"]), (STATES[1], ["input_layernorm.weight", "exp_avg"]),
])  # fmt: skip
def test_nan_is_named_and_stepped_over_when_told(name: str, key: list[str], trained: Path, tmp_path: Path) -> None:
    spoil(trained / "global_step4", name, *key)
    run_values = values(tmp_path, train_iters=5)
    loaded_values = {**run_values, "load": str(trained), "save": str(tmp_path / "other"), "no_load_optim": True}
    own_message, load_message = refused(run_values, loaded_values)
    is_state = name.startswith("optim")
    for message in (own_message,) if is_state else (own_message, load_message):
        assert all(fact in message for fact in ("global_step4", name, "/".join(key), "not finite", "iteration"))
        assert ("no_load_optim: true" in message) == is_state
    assert bool(load_message) != is_state, "nobody reads it"
    run({**run_values, "load_fallback": True})
    assert iterations(trained) == [1, 2, 3, 4, 5] and (trained / "latest").read_text() == "global_step5"


def test_nan_of_gpt_neox_is_named(trained: Path, tmp_path: Path) -> None:
    """Checkpoints of GPT-NeoX have no manifest."""
    spoil(trained / "global_step4", LAYERS[1], "attention.dense.bias")
    (trained / "global_step4" / "manifest.json").unlink()
    (message,) = refused({**SMALL, "load": str(trained), "finetune": True})
    assert re.search(rf"global_step4: {LAYERS[1]} \(attention.dense.bias is not finite", message)


def test_one_run_at_a_time(trained: Path, tmp_path: Path) -> None:
    with (trained / ".lock").open("w") as held:
        fcntl.lockf(held, fcntl.LOCK_EX)
        (message,) = refused(values(tmp_path))
    assert str(trained) in message and "another run" in message


def lock_after_a_kill(rank: int, world_size: int, save: str) -> None:
    """For the pool: a run with the lock and a worker is killed; another takes the lock while that lives."""
    (ready, tell), (wait_end, end) = os.pipe(), os.pipe()
    run = os.fork()
    if run == 0:
        held = lock_folder(Path(save))
        os.close(end)
        if os.fork() == 0:
            os.write(tell, b"x")
        os.read(wait_end, 1)  # until this process ends
        held.close()
        os._exit(0)
    os.read(ready, 1)
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    lock_folder(Path(save))


def test_workers_of_a_killed_run_do_not_hold_its_lock(tmp_path: Path) -> None:
    run_ranks(lock_after_a_kill, 1, str(tmp_path), init=False)


def lock_of_another_run(rank: int, world_size: int, values: dict[str, Any]) -> list[str]:
    """For the pool: what another process gets that locks `save` while this one looks for a checkpoint."""
    outcomes = []

    def look(args: NeoXArgs) -> Any:
        if (child := os.fork()) == 0:
            try:
                lock_folder(Path(values["save"]))
            except CheckpointError:
                os._exit(0)
            os._exit(1)
        outcomes.append("refused" if os.waitpid(child, 0)[1] == 0 else "locked")
        return choose_source(args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "choose_source", look)
        begin(values)
    return outcomes


def test_save_is_locked_before_a_checkpoint_is_looked_for(tmp_path: Path) -> None:
    """Else another run could save and end meanwhile, and this one would begin at step 0 all the same."""
    assert run_ranks(lock_of_another_run, 1, values(tmp_path))[0] == ["refused"]


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("years of work")
    for name in (".lock", ".run.stamp"):
        (tmp_path / name).symlink_to(tmp_path / "thesis")
    with pytest.raises(CheckpointError, match=r"\.lock: .*link"):
        lock_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"\.run\.stamp: .*link"), _locked(tmp_path / "run"):
        pass
    assert (tmp_path / "thesis").read_text() == "years of work"


def test_a_checkpoint_moved_to_an_archive_stays_a_link(tmp_path: Path) -> None:
    keys = {"train_iters": 2, "lr_decay_iters": 8, "keep_last_n_checkpoints": 1}
    run(values(tmp_path, **keys))
    (tmp_path / "archive").mkdir()
    link = tmp_path / "run" / "global_step2"
    shutil.move(link, tmp_path / "archive")
    link.symlink_to(tmp_path / "archive" / "global_step2")
    (line,) = run_ranks(warnings_of, 1, values(tmp_path, **{**keys, "train_iters": 8}))[0]
    assert steps(tmp_path / "run") == ["global_step2", "global_step8"] and link.is_symlink()
    assert verify(tmp_path / "archive" / "global_step2") is not None
    assert line.startswith(f"{link}: is a link") and "keep_last_n_checkpoints" in line


def test_changed_keys_are_listed(trained: Path, tmp_path: Path) -> None:
    lines = run_ranks(output_of_run, 1, values(tmp_path, train_iters=6, weight_decay=0.2))[0].splitlines()
    (line,) = [line for line in lines if line.startswith("keys changed")]
    assert "train_iters was 4, is 6" in line and "weight_decay was 0.1, is 0.2" in line


def test_ephemeral_and_best(tmp_path: Path) -> None:
    """Every second one stands until the next; the best outlasts `keep_last_n_checkpoints`."""
    common = {"checkpoint_factor": 4, "train_iters": 11, "lr_decay_iters": 12, "eval_iters": 1, "eval_interval": 4}
    run(values(tmp_path, **common, ephemeral_save_interval=2, keep_last_n_checkpoints=2, extra_save_iters=[0]))
    assert steps(tmp_path / "run") == ["global_step11", "global_step8"]
    keep_keys = {"keep_last_n_checkpoints": 1, "keep_best_n_checkpoints": 1, "keep_checkpoints_every": 1000}
    rising = {"optimizer": {"type": "SGD", "params": {"lr": 30.0}}}
    run(values(tmp_path / "best", **common, **rising, **keep_keys))
    best = tmp_path / "best" / "run"
    losses = {row["iteration"]: row["validation/lm_loss"] for row in metrics(best) if "validation/lm_loss" in row}
    assert sorted(losses) == [0, 4, 8, 11]
    lowest = min((4, 8, 11), key=lambda step: losses[step])
    assert lowest != 11, "or it proves nothing"
    assert steps(best) == ["global_step11", f"global_step{lowest}"]
    (message,) = refused(values(tmp_path, **common, keep_best_n_checkpoints=1))
    assert "keep_best_n_checkpoints: " in message and "keep_last_n_checkpoints" in message


def test_rng_of_the_process_is_restored(tmp_path: Path) -> None:
    full_draws = run_ranks(draws_of, 1, values(tmp_path))[0]
    load_keys = {"load": str(tmp_path / "run"), "iteration": 2}
    assert run_ranks(draws_of, 1, values(tmp_path / "b", **load_keys))[0] == full_draws[-2:]
    fresh = run_ranks(draws_of, 1, values(tmp_path / "c", **load_keys, no_load_rng=True))[0]
    assert fresh == full_draws[:2], "begun with seed"
    assert len(set(full_draws)) == len(full_draws) == 5


def draws_of(rank: int, world_size: int, values: dict[str, Any]) -> list[tuple[float, float, float]]:
    """For the pool: what the generators give a callback after each step, whatever they were before."""
    draws = list[tuple[float, float, float]]()

    class Draws(Callback):
        def on_step_end(self, run: TrainingRun, step: Step) -> None:
            draws.append((float(torch.rand(())), float(np.random.rand()), random.random()))

    for seed in (random.seed, np.random.seed, torch.seed):
        seed()
    train(begin(values), [Draws()])
    return draws


def size_asked_for(rank: int, world_size: int, values: dict[str, Any]) -> int:
    """For the pool: what this rank says that a checkpoint of its run will take of it, bytes; then the run."""
    training = begin(values)
    size = training.checkpointer.part_size()
    train(training)
    return size


@pytest.mark.parametrize("precision", ["fp32", "bfloat16"])
def test_space_asked_for_is_what_files_take(precision: str, tmp_path: Path) -> None:
    run_values = values(tmp_path, precision=precision, hidden_size=256, zero_optimization={"stage": 1}, train_iters=1)
    size = sum(run_ranks(size_asked_for, 2, run_values))
    written = sum(file.stat().st_size for file in (tmp_path / "run" / "global_step1").iterdir())
    assert written / 1.1 < size < written * 1.02, (size, written)


# -- without optimizer or random states ----------------------------------------------------------------------
WITHOUT_STATE = {"compat_no_save_optim": True}


def with_dropout(save: Path, **overrides: Any) -> dict[str, Any]:
    return {**SMALL, **ADAMW, "hidden_dropout": 0.1, "save": str(save), **overrides}


@pytest.mark.more
@pytest.mark.parametrize("name", cells(["zero3"], product=["pp2"]))
def test_no_optimizer_state_is_written_and_going_on_is_refused_unless_told(name: str, tmp_path: Path) -> None:
    ranks, layout = LAYOUTS[name]
    common = layout | {"precision": "bfloat16"}
    full = run(with_dropout(tmp_path / "full", **common), ranks)
    stateless = with_dropout(tmp_path / "less", **common, **WITHOUT_STATE)
    assert bit_equal(full, run(stateless, ranks))
    with_state, without_state = (tmp_path / part / "global_step4" for part in ("full", "less"))
    assert list(with_state.glob("optim_*")) and not list(without_state.glob("optim_*"))
    assert bit_equal(weights(with_state), weights(without_state))
    manifests = [read_manifest(path) for path in (with_state, without_state)]
    assert [manifest is not None and manifest.optimizer for manifest in manifests] == [True, False]
    raw = json.loads((with_state / "manifest.json").read_text())
    del raw["optimizer"], raw["checksum"]
    raw["format_version"] = 1
    assert Manifest.from_json(json.dumps(raw)).optimizer, "older ones do not say"

    longer = {**stateless, "train_iters": 5}
    loaded_values = {**longer, "save": str(tmp_path / "other"), "load": str(tmp_path / "less")}
    own_message, load_message = refused(longer, loaded_values, ranks=ranks)
    assert all("no_load_optim: true" in text and "optimizer" in text for text in (own_message, load_message))
    assert "restart: true" in own_message and "finetune: true" in load_message
    run({**longer, "no_load_optim": True}, ranks)
    assert sorted(losses(tmp_path / "less")) == [1, 2, 3, 4, 5], "went on at iteration 4"
    run({**loaded_values, "finetune": True, "train_iters": 1}, ranks)
    assert sorted(losses(tmp_path / "other")) == [1], "began at iteration 0"


def test_finished_and_unbegun_runs_need_no_state(tmp_path: Path) -> None:
    stateless = with_dropout(tmp_path, **WITHOUT_STATE, extra_save_iters=[0], checkpoint_factor=4)
    first_weights, rows = run(stateless), metrics(tmp_path)
    assert bit_equal(first_weights, run(stateless)) and metrics(tmp_path) == rows, "left alone"
    # As if the run had ended before its second save
    for path in (tmp_path / "global_step4").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "global_step4").rmdir()
    (tmp_path / "latest").write_text("global_step0")
    assert bit_equal(first_weights, run(stateless)), "the state was empty at iteration 0"


def test_no_random_states(tmp_path: Path) -> None:
    full_weights = run(with_dropout(tmp_path / "less", no_save_rng=True))
    state = load_tensors(tmp_path / "less" / "global_step2" / "mp_rank_00_model_states.pt")
    assert "torch_rng_state" not in state and list((tmp_path / "less" / "global_step2").glob("optim_*"))
    loaded_values = with_dropout(tmp_path / "on", load=str(tmp_path / "less"), iteration=2)
    (message,) = refused(loaded_values)
    assert "random_rng_state" in message and "no_load_rng: true" in message
    # Dropout follows from the batch, not from these states
    assert bit_equal(full_weights, run({**loaded_values, "no_load_rng": True}))


def is_save_iter(args: Any, iteration: int) -> bool:
    """When GPT-NeoX saves (its training.py, in our words)."""
    factor, extra = args.checkpoint_factor, args.extra_save_iters or ()
    if args.checkpoint_scale == "linear":
        return iteration in extra or (factor is not None and iteration % factor == 0)
    return iteration in {*extra, *(int(factor**k) for k in range(60))}


@pytest.mark.parametrize(("scale", "factor", "extra"), [
    ("linear", 7, None), ("linear", 10.0, (3, 9)), ("log", 2, None), ("log", 1.3, (5,)), ("log", 3.7, None),
    ("linear", None, (0, 4)), ("linear", 1000000, None),
])  # fmt: skip
def test_saves_when_neox_does(scale: str, factor: float | None, extra: tuple[int, ...] | None) -> None:
    scales = {"checkpoint_scale": scale, "checkpoint_factor": factor, "extra_save_iters": extra}
    args = SimpleNamespace(save="x", save_hf=None, train_iters=10**9, **scales)
    save = SaveCallback(SimpleNamespace(args=args))  # type: ignore[arg-type]
    assert [save.is_due(i) for i in range(1, 500)] == [is_save_iter(args, i) for i in range(1, 500)]
    assert save.is_due(0) == (0 in (extra or ())), "asked once before the first step"
