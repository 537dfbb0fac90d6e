"""Evaluates a converted folder by running eval.py in a subprocess."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.launch.environment import install_root
from megatron.launch.typed_variables import CLUSTER_VARIABLES
from megatron.operations.hub.errors import HubError
from megatron.operations.hub.retrying import Say, hide_token


def evaluate_folder(
    folder: Path, tasks: Sequence[str], include: Sequence[str], limit: float | None, keys: Mapping[str, Any], say: Say
) -> dict[str, float]:
    """Evaluates a converted folder and returns the scores by `TASK_METRIC`, the names a run logs.

    include: folders of the user's tasks.
    limit: number of documents of each task, for a trial.
    keys: further configuration keys of eval.py.

    Raises HubError with eval.py's last lines.
    """
    with tempfile.TemporaryDirectory() as results:
        command = [sys.executable, "eval.py", "--hf-model", str(folder), "--eval_tasks", *tasks]
        command += ["--eval_include_path", *include] if include else []
        command += ["--eval_limit", f"{limit:g}"] if limit is not None else []
        command += ["--eval_output_dir", results]
        command += ["--set", *(f"{key}={json.dumps(value)}" for key, value in keys.items())] if keys else []
        say(f"{folder.name}: evaluating {' '.join(tasks)}")
        child_env = {name: value for name, value in os.environ.items() if name not in CLUSTER_VARIABLES}
        done = subprocess.run(
            command,
            cwd=install_root(),
            env=child_env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        files = list(Path(results).glob("*eval_results_*.json"))
        if done.returncode or not files:
            lines = hide_token(done.stdout).strip().splitlines()[-3:]
            raise HubError(f"{folder.name}: eval.py ended with code {done.returncode}: {' / '.join(lines)}")
        say(hide_token(done.stdout).rstrip())
        return read_scores(files[0])


def read_scores(file: Path) -> dict[str, float]:
    """The scores in a result file in lm-eval's format, without standard errors. A filter is part of the name
    unless it is "none"."""
    scores = {}
    for task, values in json.loads(file.read_text(encoding="utf-8"))["results"].items():
        for name, value in values.items():
            metric, comma, kind = name.partition(",")
            if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
                scores[f"{task}_{metric}" if kind == "none" else f"{task}_{metric}_{kind}"] = float(value)
    return scores
