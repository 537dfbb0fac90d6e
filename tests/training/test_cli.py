"""The commands as users type them, without a compiler on the machine."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.runs import LLAMA, config

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run python with no g++, no ninja, nothing at all on the PATH; compiled extensions would land in
    `folder`."""
    env = {k: v for k, v in os.environ.items() if k not in ("DS_ACCELERATOR", "CXX", "CC")}
    env |= {"PATH": str(folder / "empty"), "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *argv], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two layers of YAML, in NeoX's two spellings."""
    values: dict[str, Any] = config(LLAMA, train_iters=4, save=str(tmp_path / "run"), checkpoint_factor=2)
    values |= {"load": values["save"], "eval_iters": 1, "eval_interval": 2, "split": "80,20,0", "num_workers": 1}
    local = {key: values.pop(key) for key in ("data_path", "split", "tokenizer_type", "vocab_file")}
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    (tmp_path / "local.yml").write_text(yaml.safe_dump({k.replace("_", "-"): v for k, v in local.items()}))
    return [str(tmp_path / "model.yml"), str(tmp_path / "local.yml")]


def test_deepy_with_two_ranks(files: list[str], tmp_path: Path) -> None:
    argv = ["deepy.py", "train.py", *files, "--num_gpus", "2", "--set", "model_parallel_size=2"]
    done = command(tmp_path, *argv)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "extensions").exists(), "nothing was compiled"
    log = done.stdout
    assert f"  save ............................ {tmp_path}/run" in log
    assert len(re.findall(r"iteration +\d+/ +4 \|.*lm_loss: \d\.\d{6}E[+-]\d\d \|", log)) == 4
    assert len(re.findall(r" validation results at iteration \d \| lm_loss value: ", log)) == 3
    assert log.rstrip().endswith("run finished at iteration 4")
    assert not re.search(r"error|exception|traceback|warning", log + done.stderr, re.IGNORECASE)
    assert (tmp_path / "run" / "latest").read_text() == "global_step4"
    assert sorted(p.name for p in (tmp_path / "run" / "logs").glob("rank_*")) == ["rank_0.log", "rank_1.log"]
    again = command(tmp_path, *argv)
    assert again.returncode == 0 and "nothing left to do" in again.stdout


@pytest.mark.more
def test_train_alone_and_under_torchrun(files: list[str], tmp_path: Path) -> None:
    alone = command(tmp_path, "train.py", *files, "--set", "train_micro_batch_size_per_gpu=4")
    assert alone.returncode == 0, alone.stderr
    rows = [json.loads(x) for x in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py", *files]
    other = str(tmp_path / "other")
    done = command(tmp_path, *torchrun, "--set", "pipe_parallel_size=2", f"save={other}", f"load={other}")
    assert done.returncode == 0, done.stderr
    torchrun_rows = [json.loads(x) for x in (tmp_path / "other/logs/metrics.jsonl").read_text().splitlines()]
    for a, b in zip(rows, torchrun_rows, strict=True):
        assert a.get("train/lm_loss", 0) == pytest.approx(b.get("train/lm_loss", 0), rel=1e-5)
        assert a.get("validation/lm_loss", 0) == pytest.approx(b.get("validation/lm_loss", 0), rel=1e-5)
