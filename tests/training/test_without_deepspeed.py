"""DeepSpeed is an extra: runs on the native engine never import it, and what needs it says so."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.neox_arguments import ConfigError, NeoXArgs
from megatron.training import engine_choice
from megatron.training.engine_choice import choose_engine
from tests.launch.runs import ROOT, environment
from tests.training.runs import LLAMA, config

# What every Python imports at its start: no process of the run finds the package.
BLOCK = """
import importlib.abc, sys
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


def run(folder: Path, *words: str, **keys: Any) -> "subprocess.CompletedProcess[str]":
    (folder / "sitecustomize.py").write_text(BLOCK)
    values = config(
        LLAMA, train_iters=2, checkpoint_factor=2, save=str(folder / "save"), log_dir=str(folder / "logs"), **keys
    )
    (folder / "model.yml").write_text(yaml.safe_dump(values))
    command = [sys.executable, "deepy.py", *words, "train.py", str(folder / "model.yml")]
    env = environment(PYTHONPATH=f"{folder}:{ROOT}")
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


def test_ranks_train_and_save(tmp_path: Path) -> None:
    done = run(tmp_path, "--num_gpus", "2", pipe_parallel_size=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "save/latest").read_text() == "global_step2"


def test_the_launcher_over_ssh_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "pdsh").write_text("#!/bin/sh\n")
    (tmp_path / "pdsh").chmod(0o755)
    (tmp_path / "hostfile").write_text("node1 slots=1\nnode2 slots=1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=":")
        done = run(tmp_path, "-H", str(tmp_path / "hostfile"))
    assert done.returncode == 1 and done.stderr.startswith("deepy.py: error: "), done.stderr
    assert "pip install 'neox[deepspeed]'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("keys", [{"engine": "deepspeed"}, {"prescale_gradients": True}], ids=["asked for", "auto"])
def test_the_engine_names_the_extra(keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_choice, "find_spec", lambda name: None)
    choice = choose_engine(NeoXArgs.from_dict(config(LLAMA, **keys)))
    assert choice.name == "deepspeed"
    with pytest.raises(ConfigError, match=rf"{next(iter(keys))}.* needs DeepSpeed.*pip install 'neox\[deepspeed\]'"):
        choice.load()
