"""The commands as users type them, without a compiler on the machine."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pool import run_ranks
from tests.training.runs import LLAMA, config

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run python with no g++, no ninja, nothing at all on the PATH; compiled extensions would land in `folder`."""
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


def test_train_alone_and_under_torchrun(files: list[str], tmp_path: Path) -> None:
    alone = command(tmp_path, "train.py", *files, "--set", "train_micro_batch_size_per_gpu=4")
    assert alone.returncode == 0, alone.stderr
    rows = [json.loads(x) for x in (tmp_path / "run/logs/metrics.jsonl").read_text().splitlines()]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py", *files]
    other = str(tmp_path / "other")
    done = command(tmp_path, *torchrun, "--set", "pipe_parallel_size=2", f"save={other}", f"load={other}")
    assert done.returncode == 0, done.stderr
    theirs = [json.loads(x) for x in (tmp_path / "other/logs/metrics.jsonl").read_text().splitlines()]
    for a, b in zip(rows, theirs, strict=True):
        assert a.get("train/lm_loss", 0) == pytest.approx(b.get("train/lm_loss", 0), rel=1e-5)
        assert a.get("validation/lm_loss", 0) == pytest.approx(b.get("validation/lm_loss", 0), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("num_layer=3", r"--set: num_layer: unknown key; did you mean num_layers"),
        ("precision=fp16", r"precision: fp16 needs a GPU; on CPU use --set precision=fp32 fp16=null"),
        ("data_path=/nowhere/text_document", r"/nowhere/text_document.*\.idx"),
        ("vocab_file=/nowhere.json", r"/nowhere.json: no such file"),
        ("distributed_backend=nccl", r"distributed_backend: nccl needs a GPU"),
        ("pipe_parallel_size=3", r"1 ranks cannot be divided"),
        ("padded_vocab_size=64", r"smaller than the tokenizer's vocabulary"),
        ("attention_backend=cudnn", r"attention_backend: cudnn needs a GPU"),
    ],
)
def test_bad_input_is_one_clear_line(files: list[str], tmp_path: Path, change: str, line: str) -> None:
    code, printed = run_ranks(call_train, 1, [*files, "--set", change], init=False)[0]
    assert code == 1
    assert re.search(line, printed), printed
    assert "Traceback" not in printed and len(printed.strip().splitlines()) <= 2
    assert not (tmp_path / "run" / "latest").exists()


def call_train(rank: int, world_size: int, argv: list[str]) -> tuple[int, str]:
    """For the pool: train.py's exit code and what it prints for a person."""
    import train

    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(io.StringIO()):
        code = train.main(argv)
    return code, printed.getvalue()
