"""One Slurm for all tests of this folder, and a copy of the repository to submit from, as a user's clone
is."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm.cluster import Cluster, missing
from tests.training.runs import ADAMW, LLAMA, config

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 120


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if missing():
        pytest.skip(missing())
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    made.start()
    yield made
    made.stop()


class Submitter:
    """Submits from a copy of the repository."""

    def __init__(self, cluster: Cluster, clone: Path) -> None:
        self.cluster, self.clone = cluster, clone
        # The virtual nodes are one machine, whose resolver does not know their names.
        self.variables = {"PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "NEOX_SITE": "", "OMP_NUM_THREADS": "1"}

    def submit(self, *words: str, **variables: str) -> str:
        """sbatch's words; the job's number."""
        return self.cluster.run(
            "sbatch", "--parsable", *words, cwd=self.clone, **{**self.variables, **variables}
        ).strip()  # fmt: skip

    def state(self, job: str) -> str:
        shown = self.cluster.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def log(self, job: str, name: str = "neox-training") -> str:
        path = self.clone / "logs" / f"{name}-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, job: str, until: Callable[[], bool] | None = None, name: str = "neox-training") -> str:
        """The log of a job when it has ended, or when `until` holds."""
        deadline = time.monotonic() + WAIT_S
        while not (until() if until else self.state(job) in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")):
            assert time.monotonic() < deadline, f"{self.state(job)}\n{self.log(job, name)}"
            time.sleep(0.2)
        return self.log(job, name)


@pytest.fixture(scope="session")
def slurm(cluster: Cluster, clone: Path) -> Submitter:
    return Submitter(cluster, clone)


@pytest.fixture(scope="session")
def accounted(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Submitter]:
    """Submits to a Slurm that keeps accounts."""
    if missing(accounting=True):
        pytest.skip(missing(accounting=True))
    made = Cluster(tmp_path_factory.mktemp("accounted"), accounting=True)
    made.start()
    yield Submitter(made, clone)
    made.stop()


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    clone = tmp_path_factory.mktemp("home") / "neox"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", ":!tests"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, clone / name, follow_symlinks=False)
    return clone


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str = "model.yml", **keys: Any) -> Path:
        values = config(
            LLAMA, ADAMW, **{"save": str(tmp_path / "save"), "train_iters": 6, "checkpoint_factor": 1000, **keys}
        )
        path = tmp_path / name
        path.write_text(yaml.safe_dump(values))
        return path

    return write


def losses(save: Path) -> list[float]:
    """train/lm_loss of every iteration; the last word counts where one was run twice."""
    rows = [json.loads(line) for line in (save / "logs" / "metrics.jsonl").read_text().splitlines()]
    return [
        value
        for _, value in sorted({row["iteration"]: row["train/lm_loss"] for row in rows if row["iteration"]}.items())
    ]
