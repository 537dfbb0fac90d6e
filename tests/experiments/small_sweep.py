"""A sweep whose runs take seconds, made in a folder; its commands; and the steps that its runs took."""

import io
import json
import re
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from megatron.experiments.sweep_command import main
from tests.launch.runs import DEEPY, environment
from tests.training.runs import ADAMW, LLAMA, config

RUN = {"train_iters": 3, "checkpoint_factor": 2, "distributed_backend": "gloo", "num_layers": 2}
GRID = {"optimizer.params.lr": [1e-3, 3e-3]}


class Done(NamedTuple):
    code: int
    out: str
    err: str


def write_sweep(folder: Path, model: Mapping[str, Any] | None = None, /, **keys: Any) -> Path:
    """Writes base.yml, with the keys of `model`, and sweep.yml. Returns the path of sweep.yml."""
    (folder / "base.yml").write_text(yaml.safe_dump(config(LLAMA, ADAMW, RUN, model or {})))
    content = {"base": ["base.yml"], **({} if "runs" in keys else {"grid": GRID}), **keys}
    (folder / "sweep.yml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder / "sweep.yml"


def in_process(*words: Any) -> Done:
    """Runs `deepy.py sweep ...` in this process; a command that trains starts others."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(word) for word in words])
    return Done(code, out.getvalue(), err.getvalue())


def started(*words: Any, **variables: str) -> "subprocess.Popen[str]":
    """Starts `deepy.py sweep ...` as its own process."""
    command = [*DEEPY, "sweep", *map(str, words)]
    env = environment(**variables)
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_sweep(*words: Any, **variables: str) -> Done:
    """Runs `deepy.py sweep ...` as its own process to its end."""
    process = started(*words, **variables)
    out, err = process.communicate(timeout=280)
    return Done(process.returncode, out, err)


def finish(folder: Path, name: str, loss: float, tokens: int = 1000, parameters: int = 100) -> None:
    """Writes what a finished run leaves, without training it; sweep_run.json is the caller's."""
    logs, save = folder / name / "logs", folder / name / "checkpoints"
    for path in (logs, save):
        path.mkdir(parents=True, exist_ok=True)
    row = {"iteration": 3, "consumed_tokens": tokens, "train/lm_loss": loss}
    (logs / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (save / "status.json").write_text(json.dumps({"status": "finished", "iteration": 3, "train_iters": 3}))
    counts = {"total": parameters, "trainable": parameters, "trainable_share": 1.0}
    (save / "training_summary.json").write_text(json.dumps({"parameters": counts, "tokens_per_sec": 10.0}))


def logged_steps(run: Path) -> list[int]:
    """The steps that a run has logged over all its starts, in order."""
    return [int(step) for step in re.findall(r"\| iteration +(\d+)/", (run / "output.log").read_text())]


def records(folder: Path) -> dict[str, Any]:
    """sweep.json's cells, by name."""
    cells = json.loads((folder / "sweep.json").read_text())["cells"]
    return {cell["cell"]: cell for cell in cells}
