"""USR1 before the first step: the run starts, saves and stops, so that a scheduler can start it again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.training.runs import LLAMA, config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("to", ["launcher", "ranks"])
def test_usr1_while_a_run_starts(to: str, tmp_path: Path) -> None:
    save = tmp_path / "save"
    values = config(LLAMA, train_iters=100_000, save=str(save), checkpoint_factor=100_000)
    (tmp_path / "model.yml").write_text(yaml.safe_dump(values))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-u", "deepy.py", "--num_gpus", "2", "train.py", str(tmp_path / "model.yml")]
    run = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = save / "logs" / "rank_1.log"
    while run.poll() is None and not log.exists():
        time.sleep(0.01)
    pids = [run.pid]
    if to == "ranks":  # as srun does, which signals all processes of a step
        pids = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
        time.sleep(0.7)  # Python itself is up
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    said = run.communicate(timeout=100)[0]
    assert run.returncode == 0, said
    status = json.loads((save / "status.json").read_text())
    assert status["status"] == "stopped" and 1 <= status["iteration"] <= 3
    assert (save / "latest").read_text().strip() == f"global_step{status['iteration']}"
