"""A checkpoint appears whole or not at all, and its manifest finds every damage."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpointing import EPHEMERAL, CheckpointError, Retention, begin_checkpoint, publish
from megatron.checkpointing.layout import find_checkpoint, layer_file, list_checkpoints, read_latest, step_of
from megatron.checkpointing.manifest import Manifest, ParallelLayout, check_model, model_keys, read_manifest
from megatron.checkpointing.opening import verify
from megatron.checkpointing.tensor_files import load_tensors, save_tensors, write_bytes
from tests.checkpointing.golden import checkpoint, fails, golden_args

MANIFEST = Manifest("r1", 0, 12, ParallelLayout(pipe=2, data=1, tensor=2, zero_stage=1, precision="bf16", world_size=4),
                    model_keys(golden_args("neox_pp1_mp1")), 1234, "sha256:ab", {"train": "sha256:cd"},
                    {"torch": torch.__version__}, "2025-01-01T00:00:00+00:00")  # fmt: skip


def save(folder: Path | str, step: int, value: float = 0, loss: Any = None, for_now: bool = False, **kw: Any) -> Path:
    temporary = begin_checkpoint(folder, step)
    assert not temporary.name.startswith("global_step")
    records = [save_tensors({"w": torch.full((4,), value)}, temporary / layer_file(i, 0)) for i in (0, 2)]
    records += [write_bytes(b"", temporary / EPHEMERAL)] if for_now else []
    manifest = replace(MANIFEST, files={r.name: r for r in records}, validation_loss=loss)
    return publish(temporary, folder, step, manifest, {"conf/a.yml": "seed: 1 # kept\n", "b.yml": "{}"}, **kw)


def value(path: Path) -> float:
    return load_tensors(path / "layer_00-model_00-model_states.pt")["w"][0].item()


def test_what_is_published(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert path == tmp_path / "global_step3" and read_latest(tmp_path) == "global_step3"
    assert (tmp_path / "latest").read_bytes() == b"global_step3"  # NeoX writes no newline
    assert (path / "configs" / "a.yml").read_text() == "seed: 1 # kept\n"
    manifest = verify(path)
    assert manifest is not None and manifest.iteration == 3 and manifest.layout == MANIFEST.layout
    assert sorted(os.listdir(tmp_path)) == ["global_step3", "latest"]
    files_on_disk = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()} - {"manifest.json"}
    assert set(manifest.files) == files_on_disk
    assert Manifest.from_json(manifest.to_json()) == manifest

    path = publish(begin_checkpoint(tmp_path, 4), tmp_path, 4, MANIFEST, {"x/a.yml": "x", "y/a.yml": "y"})
    assert sorted(p.read_text() for p in (path / "configs").iterdir()) == ["x", "y"], "both of one name"


def test_keep_last_n(tmp_path: Path) -> None:
    folder = f"{tmp_path}/"  # NeoX never deletes when `save` ends with a slash
    for step in (2, 10, 100, 9, 101):
        save(folder, step, keep=Retention(3))
    assert [step_of(p) for p in list_checkpoints(folder)] == [9, 100, 101], "by age, not by step"
    save(folder, 5, keep=Retention(1))  # the newest by time is kept, though its step is not the highest
    assert [p.name for p in list_checkpoints(folder)] == ["global_step5"]
    assert sorted(os.listdir(folder)) == ["global_step5", "latest"]
    for step in (6, 7):
        save(folder, step, keep=Retention(None))
    assert len(list_checkpoints(folder)) == 3


def test_what_else_stays(tmp_path: Path) -> None:
    """Multiples, and the best of those with a validation loss; what stands only until the next goes first."""
    losses = {4: 0.5, 5: 0.4, 6: None, 7: 0.9, 8: None, 9: 0.6, 10: 0.7}
    for step, loss in losses.items():
        save(tmp_path, step, keep=Retention(2, interval=4, best=1), loss=loss)
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [4, 5, 8, 9, 10]
    for step in (11, 12, 13):
        save(tmp_path, step, keep=Retention(2, interval=4, best=1), for_now=step != 13, loss=0.1)
        expected = [4, 5, 8, 9, 10, step] if step != 13 else [4, 8, 10, 13]
        assert [step_of(p) for p in list_checkpoints(tmp_path)] == expected, step
    save(tmp_path, 14, for_now=True)
    save(tmp_path, 15, keep=Retention(None))
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [4, 8, 10, 13, 15], "without keep_last_n too"


def test_what_cannot_be_deleted_ends_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in this save, and not in the next, which meets what is left."""
    log_lines: list[str] = []
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError(16, "Device or resource busy")))
        for step in (2, 3):
            save(tmp_path, step, keep=Retention(1), say=log_lines.append)
            assert read_latest(tmp_path) == f"global_step{step}"
    for line, step in zip(log_lines, (1, 2), strict=True):
        assert line.startswith(f"{tmp_path}/global_step{step}: ") and "Device or resource busy" in line
    save(tmp_path, 4, keep=Retention(1))
    assert sorted(os.listdir(tmp_path)) == ["global_step4", "latest"], "as soon as it can be"


def test_links_are_left_alone(tmp_path: Path) -> None:
    """Also that which an earlier version had begun to remove, and one whose step is saved again."""
    log_lines: list[str] = []
    (tmp_path / "archive").mkdir()
    run = tmp_path / "run"
    for step in (1, 2):
        save(run, step)
        shutil.move(run / f"global_step{step}", tmp_path / "archive")
        (run / f"global_step{step}").symlink_to(tmp_path / "archive" / f"global_step{step}")
    os.rename(run / "global_step1", run / ".tmp_removed_global_step1")
    save(run, 2, keep=Retention(1), say=log_lines.append)
    assert not log_lines and not (run / "global_step2").is_symlink()
    (run / "global_step1").symlink_to(tmp_path / "archive" / "global_step1")
    save(run, 3, keep=Retention(1), say=log_lines.append)
    assert re.match(f"{run}/global_step1: .*link.*keep_last_n_checkpoints", *log_lines)
    assert sorted(os.listdir(run)) == ["global_step1", "global_step3", "latest"]
    assert all(verify(tmp_path / "archive" / f"global_step{step}") for step in (1, 2))


def test_an_old_checkpoint_that_cannot_be_read_ends_no_save(tmp_path: Path) -> None:
    log_lines: list[str] = []
    (save(tmp_path, 1, loss=0.5) / "manifest.json").write_text("{")
    save(tmp_path, 2, keep=Retention(1, best=1), loss=0.5, say=log_lines.append)
    assert read_latest(tmp_path) == "global_step2" and len(log_lines) == 1
    assert "global_step1" in log_lines[0] and "deleted" in log_lines[0]


class Killed(BaseException):
    """Nothing may catch it, as nothing catches a kill."""


def kill_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Die before the nth operation that changes the disk."""
    count, rmtree = 0, shutil.rmtree

    def wrap(function: Any) -> Any:
        def counting_call(*a: Any, **k: Any) -> Any:
            nonlocal count
            count += 1
            if count == nth:
                if function is rmtree:  # killed in the middle of it
                    next(f for f in Path(a[0]).rglob("*") if f.is_file()).unlink()
                raise Killed
            return function(*a, **k)

        return counting_call

    for module, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (shutil, "rmtree")):
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))


@pytest.mark.parametrize("step", [3, 6])
def test_killed_at_any_moment(step: int, tmp_path: Path) -> None:
    """Saving step 6 after step 3, or step 3 again: what `latest` names is whole; a later save recovers."""
    survived = nth = 0
    while not survived:
        nth += 1
        folder = tmp_path / str(nth)
        save(folder, 3, value=1.0)
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, nth)
            try:
                save(folder, step, value=2.0, keep=Retention(1))
                survived = nth
            except Killed:
                pass
        latest = find_checkpoint(folder)
        assert verify(latest) is not None
        assert value(latest) in ((1.0,) if step_of(latest) != step else (1.0, 2.0))
        assert all(verify(path) for path in list_checkpoints(folder))
        save(folder, 9, value=3.0)
        assert value(find_checkpoint(folder)) == 3.0
        assert step_of(list_checkpoints(folder)[0]) in (3, 6)
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
    assert survived > 10


def test_incomplete_files_are_not_published(tmp_path: Path) -> None:
    save(tmp_path, 1)
    temporary = begin_checkpoint(tmp_path, 2)
    record = save_tensors({"w": torch.zeros(9)}, temporary / "mp_rank_00_model_states.pt")
    manifest = replace(MANIFEST, files={record.name: record, "gone.pt": replace(record, name="gone.pt")})
    fails(r"gone\.pt \(missing\)", publish, temporary, tmp_path, 2, manifest, {})
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [1] and read_latest(tmp_path) == "global_step1"


def test_damage_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    name, other_name = "layer_00-model_00-model_states.pt", "layer_02-model_00-model_states.pt"
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)
    fails(rf"{name} \(checksum\)", verify, path)
    assert verify(path, [other_name]) is not None
    (path / name).write_bytes(data[:-5])
    fails(rf"{name} \([\d,]+ bytes instead of", verify, path, [name])
    (path / other_name).unlink()
    fails("missing", verify, path)
    fails("does not list x.pt", verify, path, ["x.pt"])


def test_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    text = (path / "manifest.json").read_text()
    for damaged in (text[: len(text) // 2], "[]", "{}", text.replace('"pipe"', '"pipes"')):
        (path / "manifest.json").write_text(damaged)
        fails("manifest.json: damaged", verify, path)
    (path / "manifest.json").write_text(text.replace('"consumed_samples": 12', '"consumed_samples": 13'))
    fails("manifest.json: damaged: does not match its own checksum", read_manifest, path)
    (path / "manifest.json").write_text(json.dumps({**json.loads(text), "format_version": 99}))
    fails("format_version 99", read_manifest, path)


def test_a_manifest_with_further_fields_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    raw = {**json.loads((path / "manifest.json").read_text()), "format_version": 1, "later": [1]}
    del raw["checksum"]
    for record in raw["files"].values():
        record["later"] = "field"
    (path / "manifest.json").write_text(json.dumps(raw))
    assert read_manifest(path) is not None and verify(path) is not None


def test_another_model_is_refused_with_a_manifest_and_without() -> None:
    assert read_manifest(checkpoint("neox_pp1_mp1")) is verify(checkpoint("neox_pp1_mp1")) is None
    args = golden_args("neox_pp1_mp1")
    saved = load_tensors(checkpoint("neox_pp1_mp1") / "mp_rank_00_model_states.pt")["args"]
    check_model(saved, args, "x")
    with pytest.raises(CheckpointError, match=r"^num_attention_heads: 2 \(--set\).* x .* 4"):
        check_model(saved, golden_args("neox_pp1_mp1", num_attention_heads=2), "x")
    saved_keys = json.loads(json.dumps(model_keys(args)))
    check_model(saved_keys, args, "x")
    fails("rotary_pct", check_model, saved_keys, golden_args("neox_pp1_mp1", rotary_pct=0.5), "x")
