"""Two runs of one configuration leave the same files, whatever drew random numbers in their processes
before."""

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pool import run_ranks
from tests.training.runs import LAYOUTS, NEOX, config, run_to_end

SMALL = config(NEOX, train_iters=4, train_micro_batch_size_per_gpu=4, checkpoint_factor=2, num_layers=2)


def disturbed_run(rank: int, world_size: int, values: dict[str, Any], seed: int) -> None:
    """For the pool: a run in a process whose generators have been used before."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    run_to_end(rank, world_size, values)


@pytest.mark.parametrize(
    ("name", "more"), [("plain", {"num_workers": 1, "hidden_dropout": 0.1, "async_save": True}), ("pp2", {})]
)
def test_two_runs_write_the_same_bytes(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Every file of both checkpoints, but for the manifest's name of the run and its time."""
    ranks, layout = LAYOUTS[name]
    values, digests = {**SMALL, **layout, **more, "save": str(tmp_path / "run")}, []
    for n in range(2):
        run_ranks(disturbed_run, ranks, values, n)
        (tmp_path / "run").rename(tmp_path / f"run{n}")
        checkpoints = sorted((tmp_path / f"run{n}").glob("global_step*"))
        files = [p for folder in checkpoints for p in folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
        digests.append({p.relative_to(tmp_path / f"run{n}"): hashlib.sha256(p.read_bytes()).digest() for p in files})
    assert len(digests[0]) >= 20 and [p for p in digests[0] if digests[0][p] != digests[1].get(p)] == []
    first, second = (json.loads((tmp_path / f"run{n}/global_step4/manifest.json").read_text()) for n in range(2))
    assert {key for key in first if first[key] != second[key]} <= {"run_id", "created", "checksum"}
