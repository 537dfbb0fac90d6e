"""Scripts of GPT-NeoX and of its fork that are other commands here: each says which."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.runs import ROOT, environment
from tools.datasets import corpora
from tools.retired import rows

FOLDERS = ("", "configs/", "huggingface/", "post-training/", "tools/*/")
LINKS = {path.relative_to(ROOT).as_posix(): path for folder in FOLDERS
         for path in ROOT.glob(f"{folder}*.*") if path.resolve().stem == "retired" and path.is_symlink()}  # fmt: skip


def run_retired(name: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable] if name.endswith(".py") else ["bash"]
    env = environment(PYTHON=sys.executable, **variables)
    return subprocess.run([*command, str(ROOT / name), "--flag", "x"], cwd="/", env=env, capture_output=True, text=True)


def test_each_has_a_row_and_each_row_a_script() -> None:
    assert LINKS.keys() == rows().keys() and len(LINKS) > 25
    for name, path in LINKS.items():
        assert path.resolve().suffix == (".py" if name.endswith(".py") else ".sh"), name


def test_what_they_name_is_here() -> None:
    paths = {word for row in rows().values() for word in re.findall(r"(?:[\w-]+/)+[\w-]+\.(?:py|sh|sbatch)", row)}
    assert len(paths) > 8
    for word in paths:
        assert (ROOT / word).is_file() and not (ROOT / word).is_symlink(), word


@pytest.mark.parametrize("name", ["tools/ckpts/upload.py", "tools/bash/kill.sh", "post-training/dpo_data.py"])
def test_typed_it_says_so(name: str) -> None:
    done = run_retired(name)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"{name}: ") and done.stderr.count("\n") == 1
    assert {"tools/ckpts/upload.py": "hf upload", "tools/bash/kill.sh": "scancel"}.get(name, "zephyr") in done.stderr


def test_in_a_job_slurm_runs_a_copy(tmp_path: Path) -> None:
    copy = tmp_path / "slurm_script"
    copy.write_bytes((ROOT / "setup_uv_env.sbatch").read_bytes())
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '   Command={ROOT}/setup_uv_env.sbatch'\n")
    scontrol.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = environment(PYTHON=sys.executable, SLURM_JOB_ID="3", PATH=path)
    done = subprocess.run(["bash", str(copy)], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "run_on_compute.sbatch" in done.stderr


def test_names_of_the_corpora() -> None:
    with pytest.raises(ImportError, match="SOURCES"):
        from tools.datasets.corpora import DATA_DOWNLOADERS  # noqa: F401
    assert not hasattr(corpora, "nothing")
    with pytest.raises(ImportError, match="SOURCES"):
        _ = corpora.prepare_dataset


def test_links_may_be_typed_without_an_interpreter() -> None:
    for name, path in LINKS.items():
        assert os.access(path, os.X_OK) and path.read_bytes().startswith(b"#!"), name


def test_requirements_have_gpt_neoxs_names() -> None:
    """Each a file that pip reads: this project, with the extra it stands for."""
    names = "apex-pip comet dev flashattention mamba onebitadam s3 sparseattention tensorboard transformerengine wandb"
    for name in ["requirements.txt", *(f"requirements-{name}.txt" for name in names.split())]:
        lines = (ROOT / "requirements" / name).read_text().splitlines()
        assert re.fullmatch(r"-e \.(\[(deepspeed|wandb|comet|remote|dev)\])?", lines[-1]), name
