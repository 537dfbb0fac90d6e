"""--init-only: the weights that a run begins with, whatever the layout, as a checkpoint that any loads."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron.checkpointing import CheckpointError, read_manifest
from megatron.checkpointing.initial_weights import write_initial_weights
from megatron.neox_arguments import ConfigError, NeoXArgs
from tests.checkpointing.golden import assert_same, full_weights
from tests.pool import run_ranks
from tests.training.runs import ADAMW, LLAMA, NEOX, begin, config

ROOT = Path(__file__).resolve().parents[2]


def saved(rank: int, world_size: int, values: dict) -> None:
    """For the pool: a run's weights before its first step, in its `save`."""
    training = begin(values)
    training.checkpointer.save(training.progress, in_background=False)
    training.close()


@pytest.mark.parametrize(("family", "layout"), [
    (LLAMA, {}), (NEOX, {"model_parallel_size": 2}), (LLAMA, {"pipe_parallel_size": 2}),
], ids=["plain-llama", "tp2-neox", "pp2-llama"])  # fmt: skip
def test_the_same_as_a_run_begins_with(tmp_path, family, layout):
    values = config(family, ADAMW, layout)
    args = NeoXArgs.from_dict({**values, "save": str(tmp_path / "init"), "init_only": True})
    args = args.replace(padded_vocab_size=args.padded_vocab_size or 384)
    path = write_initial_weights(args, None)
    run = {**values, "padded_vocab_size": args.padded_vocab_size, "save": str(tmp_path / "run"), "train_iters": 2}
    run_ranks(saved, 2 if layout else 1, {**run, "checkpoint_factor": 1})
    one_rank = args.replace(model_parallel_size=1)
    assert_same(full_weights(path, one_rank), full_weights(tmp_path / "run/global_step0", one_rank))
    manifest = read_manifest(path)
    assert manifest is not None and manifest.iteration == 0 and not manifest.optimizer and manifest.files


def test_it_is_written_once_and_over_nothing_else(tmp_path):
    values = config(LLAMA, ADAMW, save=str(tmp_path / "init"), padded_vocab_size=128, init_only=True)
    args = NeoXArgs.from_dict(values)
    path = write_initial_weights(args, None)
    written_at = (path / "manifest.json").stat().st_mtime_ns
    assert write_initial_weights(args, None) == path and (path / "manifest.json").stat().st_mtime_ns == written_at
    lora = {"lora": {"r": 2, "alpha": 4, "target": "all-linear"}, "save": str(tmp_path / "other")}
    for keys, facts in (({"seed": 5}, "init.* other weights"), ({"save": None}, "save"), (lora, "lora|adapters")):
        with pytest.raises((CheckpointError, ConfigError), match=facts):
            write_initial_weights(args.replace(**keys), None)
    assert not (tmp_path / "other").exists()


@pytest.mark.more
def test_the_flag_starts_no_ranks(tmp_path):
    """deepy.py, typed: one process, whatever the layout; a run then loads it."""
    values = config(LLAMA, ADAMW, model_parallel_size=2, save=str(tmp_path / "init"))
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    words = [sys.executable, "deepy.py", "train.py", str(tmp_path / "model.yml"), "--init-only"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("init/global_step0: written\n")
    files = json.loads((tmp_path / "init/global_step0/manifest.json").read_text())["files"]
    assert {name for name in files if "model_01" in name}, files.keys()
