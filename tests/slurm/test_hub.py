"""Checkpoints of two experiments published by jobs of a real Slurm, on a Hub of this machine."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.operations.hub.loopback_hub import TOKEN, LoopbackHub
from tests.pool import run_ranks
from tests.slurm.conftest import END_STATES, Submitter, wait_for
from tests.training.runs import ADAMW, LLAMA, config, run_to_end

pytestmark = pytest.mark.slurm
TAGS = ("global_step2", "global_step1")
WAIT_S = 240


@pytest.fixture
def hub() -> Iterator[LoopbackHub]:
    with LoopbackHub().serving() as server:
        yield server


@pytest.fixture
def publish(accounted: Submitter, hub: LoopbackHub, tmp_path: Path) -> Iterator[Callable[[str], list[str]]]:
    """Types batch_submit_checkpoints.sh for an experiment of two checkpoints; the numbers of its jobs."""
    saves = tmp_path / "checkpoints"
    run_ranks(run_to_end, 1, config(LLAMA, ADAMW, save=str(saves / "one"), train_iters=2, checkpoint_factor=1))
    shutil.copytree(saves / "one", saves / "two")
    variables = {**accounted.variables, **hub.environment(), "NEOX_CHECKPOINT_DIR": str(saves),
                 "NEOX_HUB_PREFIX": "sfm", "HF_HOME": str(tmp_path / "hf_home"),
                 "SBATCH_OUTPUT": f"{tmp_path}/logs/%x-%j.out"}  # fmt: skip

    def submit(experiment: str) -> list[str]:
        words = ["bash", "huggingface/batch_submit_checkpoints.sh", experiment, "org", "--skip-eval"]
        lines = accounted.cluster.run(*words, "--skip-neox-upload", cwd=accounted.clone, **variables).splitlines()
        assert lines[0] == f"{experiment}: 2 checkpoints to org/sfm-{experiment}"
        assert [line.partition(":")[0] for line in lines[1:]] == list(TAGS), "the newest first"
        return [line.split()[-1] for line in lines[1:]]

    (tmp_path / "logs").mkdir()
    yield submit
    subprocess.run(["scancel", "--user=root"], env=accounted.cluster.environment, capture_output=True)


def test_jobs_of_an_experiment_never_overlap_and_two_experiments_do(
    publish: Callable[[str], list[str]], accounted: Submitter, hub: LoopbackHub, tmp_path: Path
) -> None:
    def logs() -> str:
        return "\n".join(path.read_text() for path in (tmp_path / "logs").glob("*.out"))

    hub.fail(".* /", "late", times=10**6)
    jobs = {experiment: publish(experiment) for experiment in ("one", "two")}
    wait_for(lambda: len(hub.waiting) >= 2, WAIT_S, logs)  # one of each asks the Hub
    states = {experiment: [accounted.state(job) for job in numbers] for experiment, numbers in jobs.items()}
    assert states == {"one": ["RUNNING", "PENDING"], "two": ["RUNNING", "PENDING"]}
    queue = accounted.cluster.run("squeue", "--noheader", "--format=%j %r", "--states=PENDING").splitlines()
    assert sorted(queue) == ["convert_one Dependency", "convert_two Dependency"]
    hub.released.set()
    all_jobs = [job for numbers in jobs.values() for job in numbers]
    wait_for(lambda: all(accounted.state(job) in END_STATES for job in all_jobs), WAIT_S, logs)
    assert [accounted.state(job) for job in all_jobs] == ["COMPLETED"] * 4, logs()
    for experiment in jobs:
        assert sorted(hub.repos[f"org/sfm-{experiment}"].branches) == [*sorted(TAGS), "main"]
        assert hub.content(f"org/sfm-{experiment}", "main") == hub.content(f"org/sfm-{experiment}", TAGS[0])
    assert TOKEN not in logs() and len(logs()) > 100
    times = "--format=JobID,Start,End"
    for numbers in jobs.values():
        listing = accounted.cluster.run(
            "sacct", "-X", "--noheader", "--parsable2", f"--jobs={','.join(numbers)}", times
        )
        spans = sorted(line.split("|")[1:] for line in listing.splitlines())
        assert len(spans) == 2 and spans[0][1] <= spans[1][0]
