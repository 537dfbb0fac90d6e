"""The machines of a hostfile by pdsh and OpenMPI, with a stand-in for ssh that runs the command here."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron.launch.devices import free_port
from tests.launch.runs import DEEPY, ROOT, environment
from tests.launch.test_manual_nodes import VALUES
from tests.pool import run_ranks
from tests.training.runs import curves

pytestmark = pytest.mark.slurm  # pdsh and OpenMPI come with `make test-slurm`
SSH = """\
#!{python}
import os, sys
words = sys.argv[1:]
while words[0].startswith("-"):
    option = words.pop(0)
    if option in ("-o", "-l", "-p"):
        words.pop(0)
os.execvp("sh", ["sh", "-c", " ".join(words[1:])])
"""


def start(folder: Path, *words: str, **changes: Any) -> subprocess.Popen:
    """deepy.py over two loopback addresses with one and two ranks."""
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(python=sys.executable))
    ssh.chmod(0o755)
    (folder / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=2\n")
    save = str(folder / "run")
    (folder / "a.yml").write_text(
        yaml.safe_dump({**VALUES, "save": save, "load": save, "checkpoint_factor": 1000, **changes})
    )
    env = environment(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env["PATH"] = f"{ssh.parent}:{env['PATH']}"
    line = [*DEEPY, "-H", "hosts", "--master_port", str(free_port()), *words]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen([*line, str(ROOT / "train.py"), "a.yml"], cwd=folder, env=env, text=True, **both)


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "run" / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [row["train/lm_loss"] for row in rows if "train/lm_loss" in row]


@pytest.mark.parametrize(("launcher", "program"), [("pdsh", "pdsh"), ("openmpi", "mpirun")])
def test_losses_are_those_of_one_machine(tmp_path, launcher, program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    run = start(tmp_path, "--launcher", launcher)
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 0, out
    expected = run_ranks(curves, 3, [VALUES], VALUES["train_iters"])[0][0].losses
    assert losses(tmp_path) == expected


def test_a_signal_reaches_the_ranks_over_pdsh(tmp_path):
    if shutil.which("pdsh") is None:
        pytest.skip("pdsh is not installed")
    run = start(tmp_path, train_iters=2000)
    assert run.stdout is not None
    lines = []
    for line in run.stdout:
        lines.append(line)
        if re.search(r"iteration +3/", line):
            run.send_signal(signal.SIGTERM)
            break
    rest, _ = run.communicate(timeout=100)
    assert run.returncode == 0, "".join(lines) + rest
    assert len(losses(tmp_path)) < 2000 and (tmp_path / "run" / "latest").exists()
