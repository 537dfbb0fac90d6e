"""Branches equal, bit for bit, runs that had planned them; what they say, what they refuse, their family."""

import io
import json
import os
import re
import shutil
import signal
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepy import main
from megatron.checkpointing import CheckpointError, Manifest, read_manifest
from megatron.data import build_datasets, order_sha256
from megatron.experiments.branch import Branch, plan_branch
from megatron.experiments.branch_command import write_branch
from megatron.experiments.lineage import tree_lines
from megatron.neox_arguments import UserError, load
from megatron.training import train
from megatron.training.checkpoint.pieces import lock_folder
from tests.pool import run_ranks
from tests.training.checkpoint.test_resume import as_stopped_at, losses, refused
from tests.training.runs import ADAMW, GOLDEN, LAYOUTS, begin, cells, config

A, B, CHAT, LABELS, CHOSEN, CHOSEN_LABELS, REJECTED, REJECTED_LABELS = (
    str(GOLDEN / "dataset" / f"{name}_document")
    for name in (
        "corpusA_text", "corpusB_text", "chat_conversation", "chat_conversation_label", "pairs_chosen",
        "pairs_chosen_label", "pairs_rejected", "pairs_rejected_label",
    )
)  # fmt: skip
# A long run with a constant rate, and dropout, whose random states go on too.
LONG = {
    "data_path": None, "train_data_paths": [A], "train_iters": 5, "lr_decay_iters": 100, "lr_decay_style": "wsd",
    "lr_wsd_decay_iters": 10, "hidden_dropout": 0.1, "num_layers": 2, "checkpoint_factor": 2,
    "train_micro_batch_size_per_gpu": 2, "eod_mask_loss": False, "pos_emb": "rotary", "max_position_embeddings": 256,
}  # fmt: skip
DECAY = {"train_iters": 7, "lr_decay_iters": 7, "lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "minus_sqrt"}
MIX = {"train_iters": 7, "train_data_paths": [B, A], "train_data_weights": [1.0, 3.0]}
PLANNED_MIX = {
    "train_iters": 7, "train_data_paths": [A, B],
    "train_data_weight_schedule": {"until": [4], "weights": [[1.0, 0.0], [3.0, 1.0]]},
}  # fmt: skip
SFT = {
    "train_iters": 3, "train_data_paths": [CHAT], "train_label_data_paths": [LABELS], "pack_impl": "best_fit",
    "lr_decay_style": "constant",
}  # fmt: skip
DPO: dict[str, Any] = {
    "train_iters": 2, "seq_length": 256, "train_impl": "dpo", "pack_impl": "best_fit",
    "dataset_impl": "pairwise", "pos_train_data_paths": [CHOSEN],
    "neg_train_data_paths": [REJECTED], "pos_train_label_data_paths": [CHOSEN_LABELS],
    "neg_train_label_data_paths": [REJECTED_LABELS],
}  # fmt: skip
STATE = ("layer_", "optim_", "mp_rank_")


def run_all(rank: int, world_size: int, configs: list[dict[str, Any]]) -> None:
    """For the pool: whole runs, one after another."""
    for values in configs:
        training = begin(values)
        train(training)
        training.engine.close()


def long_run(**keys: Any) -> dict[str, Any]:
    return {key: value for key, value in config(ADAMW, LONG, **keys).items() if value is not None}


def branch(source: str | Path, save: Path, **keys: Any) -> Branch:
    """A branch as its command makes it, with its files."""
    values = {**keys, "save": str(save)}
    planned = plan_branch(str(source), [(key, value, "new.yml") for key, value in values.items()])
    write_branch(planned)
    return planned


def values_of(planned: Branch) -> dict[str, Any]:
    return json.loads(planned.args.to_json())["given"]


def state(save: Path, step: int) -> dict[str, str]:
    """The checksums of weights, optimizer state, random states and counters."""
    return {name: file.sha256 for name, file in manifest_of(save, step).files.items() if name.startswith(STATE)}


def manifest_of(save: Path, step: int) -> Manifest:
    manifest = read_manifest(save / f"global_step{step}")
    assert manifest is not None
    return manifest


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save = tmp_path_factory.mktemp("base") / "base"
    run_ranks(run_all, 1, [long_run(save=str(save))])
    return save


@pytest.mark.parametrize("layout", cells(["plain"], ["dp2", "zero1", "pp2"]))
def test_a_decay_and_a_mix_equal_planned_runs(layout: str, tmp_path: Path) -> None:
    """Also after the branch was killed, and started by its own file."""
    ranks, keys = LAYOUTS[layout]
    names = [f"{kind} {name}" for kind in ("planned", "branched") for name in ("decay", "mix")]
    planned_decay, planned_mix, decay, mix = (tmp_path / name for name in names)
    long = long_run(save=str(tmp_path / "long"), **keys)
    planned = [{**long, **DECAY, "save": str(planned_decay)}, {**long, **PLANNED_MIX, "save": str(planned_mix)}]
    run_ranks(run_all, ranks, [long, *planned])
    untouched = {path: path.stat().st_mtime_ns for path in (tmp_path / "long").rglob("*")}
    branches = [branch(f"{tmp_path}/long@4", decay, **DECAY), branch(f"{tmp_path}/long@4", mix, **MIX)]
    run_ranks(run_all, ranks, [values_of(planned_branch) for planned_branch in branches])
    assert untouched == {path: path.stat().st_mtime_ns for path in (tmp_path / "long").rglob("*")}
    for save, planned_save in ((decay, planned_decay), (mix, planned_mix)):
        expected = {step: loss for step, loss in losses(planned_save).items() if step > 4}
        assert losses(save) == expected and len(expected) == 3
        assert state(save, 7) == state(planned_save, 7)
    assert losses(decay) != losses(mix)
    undisturbed = state(mix, 7)
    shutil.rmtree(mix / "global_step7")
    (mix / "latest").write_text("global_step6")
    (mix / "logs" / "metrics.jsonl").unlink()
    resumed = branch(f"{tmp_path}/long@4", mix, **MIX)
    from_file = load([mix / "branch.yml"])
    assert from_file.user_values == resumed.args.user_values == branches[1].args.user_values
    run_ranks(run_all, ranks, [values_of(resumed)])
    assert state(mix, 7) == undisturbed and list(losses(mix)) == [7]
    record = manifest_of(mix, 7).config["branched_from"]
    assert record.items() >= {"run": str(tmp_path / "long"), "iteration": 4, "data": "replanned"}.items()
    assert record["changed"]["train_iters"] == [5, 7]


def test_another_objective_begins_with_the_weights(base: Path, tmp_path: Path) -> None:
    """SFT and DPO equal fine-tuning as configured by hand."""
    branches, expected_runs = [], []
    for name, keys in {"sft": SFT, "dpo": DPO}.items():
        new_branch = branch(f"{base}@4", tmp_path / name, **keys)
        branches.append(new_branch)
        assert "weights alone, from iteration 0: another objective" in "\n".join(new_branch.lines)
        left_out = {"sft": ["lr_wsd_decay_iters"], "dpo": ["train_data_paths"]}[name]
        values = {key: value for key, value in long_run().items() if key not in left_out} | keys
        place = {"save": str(tmp_path / f"{name} by hand"), "load": str(base), "iteration": 4, "finetune": True}
        expected_runs.append(values | place)
    run_ranks(run_all, 1, [*map(values_of, branches), *expected_runs])
    for name, steps in (("sft", 3), ("dpo", 2)):
        save, expected = tmp_path / name, tmp_path / f"{name} by hand"
        assert losses(save) == losses(expected) and len(losses(save)) == steps
        assert state(save, steps) == state(expected, steps)


def test_data_that_no_run_can_plan_begin_at_their_sample_0(base: Path, tmp_path: Path) -> None:
    """With a fresh optimizer; killed and resumed, the branch keeps its data position and moments."""
    save, keys = tmp_path / "order", {"data_seed": 7, "seq_length": 64, "train_iters": 8, "no_load_optim": True}
    new_branch = branch(f"{base}@latest", save, **keys)
    assert any(re.match("data: from sample 0 .*seq_length, data_seed", line) for line in new_branch.lines)
    assert "optimizer: fresh: no_load_optim (new.yml)" in new_branch.lines
    run_ranks(run_all, 1, [values_of(new_branch)])
    manifest, undisturbed = manifest_of(save, 8), state(save, 8)
    assert (manifest.iteration, manifest.consumed_samples) == (8, 24)
    fresh = build_datasets(new_branch.args.for_world(1), train_batch_size=8, on_one_rank=lambda work: work())
    assert fresh.train is not None and manifest.data["consumed_sha256"] == order_sha256(fresh.train, 24)
    as_stopped_at(6, save, tmp_path / "kept")
    shutil.rmtree(save)
    (tmp_path / "kept").rename(save)
    resumed = branch(f"{base}@latest", save, **keys)
    assert any("goes on from its own checkpoint global_step6" in line for line in resumed.lines)
    run_ranks(run_all, 1, [values_of(resumed)])
    assert state(save, 8) == undisturbed


@pytest.mark.parametrize(("source", "keys", "problem"), [
    ("base", {}, "name a step, as in .*@latest; it holds: 2, 4, 5"),
    ("base@soon", {}, "name a step"),
    ("base@3", {}, "no checkpoint of iteration 3; it holds steps 2, 4, 5"),
    ("none@4", {}, "no such folder"),
    ("s3://bucket/run@4", {}, "is remote"),
    ("base@4", {"save": None}, "a folder of its own"),
    ("base@4", {"save": "base"}, "new.yml: save: .* is the folder of the parent"),
    ("base@4", {"save": "base/branch"}, "is the folder of the parent, .* or lies in it"),
    ("base@4", {"save": "s3://bucket/x"}, "expected a folder of this machine"),
    ("base@4", {"load": "elsewhere"}, "new.yml: load: the checkpoint is named by RUN@STEP"),
    ("base@4", {"train_iters": 4}, "new.yml: train_iters: 4: the branch begins at step 4"),
    ("base@4", {"lr_decay_stile": "wsd"}, "new.yml: lr_decay_stile: unknown key"),
    ("base@4", {"train_data_paths": [A, B], "train_data_weight_schedule": {"until": [3], "weights": [[1, 1], [0, 1]]}},
     r"the run has read 4 steps .* until: \[4\], weights: \[\[1.0, 0.0\]\]"),
    ("base@4", {"data_seed": 7, "train_data_paths": [A, B],
                "train_data_weight_schedule": {"until": [5], "weights": [[1, 0], [1, 1]]}}, "set train_data_weights"),
])  # fmt: skip
def test_refusals(base: Path, tmp_path: Path, source: str, keys: dict[str, Any], problem: str) -> None:
    """One line each, before anything is written."""
    values = {"save": str(tmp_path / "x"), **keys}
    if str(values["save"]).startswith("base"):
        values["save"] = str(base.parent / values["save"])
    place = source if "://" in source else str(base.parent / source)
    with pytest.raises(UserError, match=problem) as refusal:
        plan_branch(place, [(key, value, "new.yml") for key, value in values.items()])
    assert "\n" not in str(refusal.value) and not list(tmp_path.iterdir())


def test_a_branch_settles_values_for_its_machine(base: Path, tmp_path: Path) -> None:
    """The parent's machine has chosen them, and the branch may run on another one."""
    settled = manifest_of(base, 4).settled
    assert settled.get("fused_update", "") is None, "or it proves nothing"
    assert not settled.keys() & branch(f"{base}@4", tmp_path / "x", **DECAY).args.user_values.keys()


def fork_that_locks(save: Path) -> int:
    """Starts a process that holds the lock of a run, until it is killed; returns its number."""
    ready, tell = os.pipe()
    if (child := os.fork()) == 0:
        held = lock_folder(save)
        os.write(tell, b"x")
        signal.pause()
        held.close()
        os._exit(0)
    os.read(ready, 1)
    return child


def test_a_started_branch_is_no_other_branch(base: Path, tmp_path: Path) -> None:
    """With checkpoints, its command must be typed as before; without, it may still be another one."""
    save = tmp_path / "x"
    first_branch = branch(f"{base}@4", save, **DECAY)
    assert branch(f"{base}@latest", save, **DECAY).args.iteration == 4, "latest is the step of the first start"
    second_branch = branch(f"{base}@4", save, **{**DECAY, "min_lr": 1e-5})
    assert (first_branch.args.min_lr, second_branch.args.min_lr) == (0.0, 1e-5)
    assert "replaces the branch from step 4" in second_branch.lines[-1]
    holder = fork_that_locks(save)
    with pytest.raises(CheckpointError, match="another run is writing there"):
        branch(f"{base}@4", save, **DECAY)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert load([save / "branch.yml"]).min_lr == 1e-5, "the running branch keeps its configuration"
    shutil.copytree(base / "global_step5", save / "global_step5")
    with pytest.raises(UserError, match=f"{save}: .*another min_lr.*branch.yml"):
        branch(f"{base}@4", save, **DECAY)
    with pytest.raises(UserError, match=f"{save}: holds a branch from step 4 of {base}"):
        branch(f"{base}@2", save, **DECAY)
    (save / "parent.json").unlink()
    with pytest.raises(UserError, match=f"{save}: holds checkpoints of a run that is no branch"):
        branch(f"{base}@4", save, **DECAY)


def edited(base: Path, run: Path, step: int = 4, **fields: Any) -> Path:
    """A run with one checkpoint, whose manifest has other fields; RUN."""
    shutil.copytree(base / f"global_step{step}", run / f"global_step{step}")
    text = replace(manifest_of(base, step), **fields).to_json()
    (run / f"global_step{step}" / "manifest.json").write_text(text)
    (run / "latest").write_text(f"global_step{step}")
    return run


def test_the_parent_decides(base: Path, tmp_path: Path) -> None:
    """A parent with other files, with passes over its data, without data, or without optimizer state."""
    data = dict(manifest_of(base, 4).data)
    other_files = {**data, "files": {"train": {**data["files"]["train"], "idx_sha256": "0" * 64}}}
    replaced = edited(base, tmp_path / "replaced", data=other_files)
    for keys in (DECAY, MIX):
        with pytest.raises(UserError, match="train_data_paths: idx_sha256 .*restore the files"):
            branch(f"{replaced}@4", tmp_path / "x", **keys)
    assert "sample 32 of the present data: allow_changed_data (new.yml)" in "".join(
        branch(f"{replaced}@4", tmp_path / "y", allow_changed_data=True).lines
    )
    passes = edited(base, tmp_path / "passes", data={**data, "order": {**data["order"], "train_epochs": True}})
    with pytest.raises(UserError, match="set train_epochs to those of the branch"):
        branch(f"{passes}@4", tmp_path / "x", min_lr=1e-5)
    assert branch(f"{passes}@4", tmp_path / "epochs", train_epochs=3).args.branched_from["data"] == "continued"
    imported = branch(f"{edited(base, tmp_path / 'imported', data={}, optimizer=False)}@4", tmp_path / "z")
    assert (
        imported.args.finetune
        and "weights alone, from iteration 0: the checkpoint has no position" in imported.lines[1]
    )
    stateless = edited(base, tmp_path / "without", optimizer=False)
    with pytest.raises(UserError, match="holds no optimizer state; set no_load_optim"):
        branch(f"{stateless}@4", tmp_path / "x", **DECAY)
    assert not (tmp_path / "x").exists()


def test_training_checks_its_parent(base: Path, tmp_path: Path) -> None:
    """A run refuses another checkpoint than its branch was made for, and a batch that its mix cannot have."""
    run = edited(base, tmp_path / "run")
    decay, batch = (
        branch(f"{run}@4", tmp_path / "x", **DECAY),
        branch(f"{run}@4", tmp_path / "y", **MIX, train_batch_size=4),
    )
    assert re.search("train_batch_size: 4 samples a step, but the 4 steps .* read 32", refused(values_of(batch))[0])
    shutil.rmtree(run)
    edited(base, run, run_id="another")
    assert re.search("is not the checkpoint .* branched from .*branch anew", refused(values_of(decay))[0])


def test_the_family_is_in_its_files(base: Path, tmp_path: Path) -> None:
    """A branch of a branch names both; `--tree` shows them all, whichever is asked for."""
    parent, child, grandchild = tmp_path / "base", tmp_path / "child", tmp_path / "grandchild"
    edited(base, parent)
    branch(f"{parent}@4", child, **DECAY, tensorboard_dir="boards")
    edited(base, child, 5, config=load([child / "branch.yml"]).public_values)  # as the child's run would write it
    new_branch = branch(f"{child}@5", grandchild, train_iters=9)
    family = new_branch.args.branched_from
    assert family["parent"]["run"] == str(parent) and family["changed"] == {"train_iters": (7, 9)}
    assert new_branch.lines[1].startswith(f"which is a branch from step 4 of {parent}")
    assert new_branch.args.tensorboard_dir is None
    assert "not taken over from the parent: tensorboard_dir" in new_branch.lines
    for requested in (parent, child, grandchild):
        lines = tree_lines(requested)
        runs = {parent: "", child: "  step 4: ", grandchild: "    step 5: "}
        expected = [f"{words}{run}{'  <-' if requested == run else ''}" for run, words in runs.items()]
        assert [line for line in lines if str(tmp_path) in line] == expected
        assert "      train_iters: 5 -> 7" in lines
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "parent.json").write_text("{")
    with_damaged = tree_lines(child)
    assert with_damaged[:-1] == tree_lines(child)[:-1] and f"{grandchild}" in "".join(with_damaged)
    assert with_damaged[-1].startswith(f"left out: {tmp_path / 'other' / 'parent.json'}: is damaged")


def command(*words: str) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        code = main(["branch", *words])
    return code, output.getvalue(), errors.getvalue()


def test_the_command_line(base: Path, tmp_path: Path) -> None:
    """--dry-run and --print-config say what would be, and write nothing; errors name file and line."""
    file = tmp_path / "new.yml"
    file.write_text(yaml.safe_dump({"save": str(tmp_path / "x"), "optimizer.params.lr": 0.01, "lr_decay_style": None}))
    code, output, reported = command(f"{base}@4", str(file), "--set", "train_iters=9", "--num_gpus", "2", "--dry-run")
    assert code == 0 and "(2 ranks)" in output and "branch: optimizer: AdamW, its state goes on" in reported
    for line in ("optimizer.params.lr: 0.001 -> 0.01", 'lr_decay_style: "wsd" -> "linear"', "train_iters: 5 -> 9"):
        assert f"branch: differs: {line}" in reported, reported
    code, output, _ = command(f"{base}@4", str(file), "--set", "train_iters=9", "--print-config")
    assert code == 0 and re.search(rf"optimizer.params.lr: +0.01 +# {file}", output)
    assert not (tmp_path / "x").exists()
    file.write_text("save: x\nhidden_size: []\n")
    code, _, errors = command(f"{base}@4", str(file))
    assert code == 1 and f"{file}:2: hidden_size" in errors
    assert command(f"{base}@4", "none.yml")[2] == "deepy.py branch: error: none.yml: no such file\n"
    assert "RUN@STEP" in command()[2]


def test_passwords_stay_private(base: Path, tmp_path: Path) -> None:
    words = ["--set", f"save={tmp_path / 'x'}", "train_iters=9", "wandb_host=https://me:secret@host", "--prepare-only"]
    code, output, _ = command(f"{base}@4", *words)
    config_file = tmp_path / "x" / "branch.yml"
    assert code == 0 and "secret" in config_file.read_text() and config_file.stat().st_mode & 0o077 == 0
    assert "secret" not in output + (tmp_path / "x" / "parent.json").read_text()
    assert not (tmp_path / "x" / "logs").exists()
