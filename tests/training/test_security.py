"""No file that a run reads runs code, and no file that it writes has a secret."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.training import train
from tests.launch.runs import DEEPY, PIPED_OUTPUT, ROOT, environment
from tests.pool import run_ranks
from tests.training.runs import ADAMW, NEOX, begin, config, run_to_end

SECRET = "s3cret"
VARIABLES = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "COMET_API_KEY", "OPENAI_API_KEY", "PASSWORD")


def values_of(folder: Path, **overrides: Any) -> dict[str, Any]:
    small = {"num_layers": 2, "train_iters": 4, "train_batch_size": 2, "checkpoint_factor": 2}
    return config(NEOX, ADAMW, small, {"save": str(folder), "load": str(folder)}, **overrides)


def unpickled_names(rank: int, world_size: int, values: dict[str, Any], decoy: bool) -> list[str]:
    """For the pool: names that unpickling has looked up while a run starts and trains.

    decoy: read a pickle as well."""
    names: list[str] = []

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "pickle.find_class":
            names.append(".".join(map(str, args)))

    sys.addaudithook(note)  # this process is the pool's throw-away fork
    training = begin(values)
    train(training)
    if decoy:
        torch.load(Path(values["save"]) / "decoy.pt", weights_only=False)
    return names


@pytest.mark.parametrize("decoy", [False, True])
def test_reading_a_checkpoint_looks_up_no_name(decoy: bool, tmp_path: Path) -> None:
    run_ranks(run_to_end, 1, values_of(tmp_path, train_iters=2))
    torch.save({"path": tmp_path}, tmp_path / "decoy.pt")
    (names,) = run_ranks(unpickled_names, 1, values_of(tmp_path), decoy)
    assert bool(names) == decoy, names


def test_no_secret_is_written(tmp_path: Path) -> None:
    keys = {
        "tensorboard_dir": "tensorboard", "save_hf": 2, "local_save": "local", "local_save_interval": 1,
        "wandb_host": "https://user:${PASSWORD}@example.org", "log_interval": 1,
    }  # fmt: skip
    text = f"# wandb_host: https://user:{SECRET}@example.org\n" + yaml.safe_dump(values_of(tmp_path / "save", **keys))
    (tmp_path / "run.yml").write_text(text)
    variables = {name: f"{SECRET}_{name}" for name in VARIABLES}
    command = [*DEEPY, "--num_gpus", "1", str(ROOT / "train.py"), "run.yml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(**variables), timeout=300, **PIPED_OUTPUT)
    assert done.returncode == 0 and SECRET not in done.stdout, done.stdout
    files = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    (arguments,) = (path for path in files if path != tmp_path / "run.yml")
    assert arguments.name.startswith("neox_args."), "the file that hands the configuration to the ranks"
    assert stat.S_IMODE(os.stat(arguments).st_mode) == 0o600
