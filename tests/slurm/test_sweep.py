"""A sweep as jobs of a real Slurm: submitted once, told in one table, and the same numbers as here."""

import re
import subprocess
from pathlib import Path

import pytest

from megatron.experiments.sweep_file import read_sweep
from megatron.experiments.sweep_link import read_record
from tests.experiments.small_sweep import logged_steps, records, run_sweep, write_sweep
from tests.pipelines.small import STAGES, passed, write_small, write_yaml
from tests.slurm.conftest import END_STATES, OPTIONS, WAIT_S, Submitter, wait_for

pytestmark = pytest.mark.slurm


def in_cluster(slurm: Submitter, *words: object) -> "subprocess.CompletedProcess[str]":
    return slurm.python("deepy.py", "sweep", *words)


def submitted(text: str) -> dict[str, str]:
    return dict(re.findall(r"sweep: (\S+): submitted job (\d+)", text))


def wait_for_all(slurm: Submitter, jobs: dict[str, str], root: Path) -> dict[str, str]:
    """Returns the states of jobs once all have ended."""

    def states() -> dict[str, str]:
        return {name: slurm.state(job) for name, job in jobs.items()}

    def logs() -> str:
        return "\n".join(path.read_text() for path in sorted(root.glob("*/*.out")))

    wait_for(lambda: set(states().values()) <= set(END_STATES), 3 * WAIT_S, lambda: f"{states()}\n{logs()}")
    return states()


def test_runs_are_jobs_that_are_submitted_once(slurm, tmp_path):
    runs = [{"name": "one", "seed": 1}, {"name": "two", "seed": 2}, {"name": "bad", "load": str(tmp_path / "none")}]
    file = write_sweep(tmp_path, runs=runs)
    done = in_cluster(slurm, "submit", file, "--cwd", tmp_path, "--", *OPTIONS)
    jobs = submitted(done.stderr)
    assert done.returncode == 0 and list(jobs) == ["one", "two", "bad"], done.stderr
    resubmission = in_cluster(slurm, "submit", file, "--cwd", tmp_path, "--", *OPTIONS)
    assert resubmission.returncode == 0 and not submitted(resubmission.stderr), resubmission.stderr
    refused = in_cluster(slurm, "run", file)
    assert refused.returncode == 1 and f"scancel {jobs['one']}" in refused.stderr
    assert re.search(r"pending|running", in_cluster(slurm, "status", file).stdout)
    states = wait_for_all(slurm, jobs, tmp_path / "sweep")
    assert states == {"one": "COMPLETED", "two": "COMPLETED", "bad": "FAILED"}
    assert in_cluster(slurm, "status", file).returncode == 0
    cells = records(tmp_path / "sweep")
    assert {name: cell["state"] for name, cell in cells.items()} == {
        "one": "finished", "two": "finished", "bad": "failed"
    }  # fmt: skip
    resubmission = in_cluster(slurm, "submit", file, "--cwd", tmp_path, "--", *OPTIONS)
    assert list(submitted(resubmission.stderr)) == ["bad"], resubmission.stderr
    wait_for_all(slurm, submitted(resubmission.stderr), tmp_path / "sweep")
    local_file = write_sweep(tmp_path, runs=runs[:2], save_root="here")
    assert run_sweep("run", local_file).code == 0
    local = records(tmp_path / "here")
    assert all(cells[name]["train/lm_loss"] == local[name]["train/lm_loss"] for name in local)


def test_a_run_that_is_told_to_save_goes_on_by_itself(slurm, tmp_path):
    file = write_sweep(tmp_path, {"train_iters": 80}, grid={"seed": [1]})
    jobs = submitted(in_cluster(slurm, "submit", file, "--cwd", tmp_path, "--", *OPTIONS).stderr)
    run = tmp_path / "sweep/seed-1"
    log = run / "output.log"
    wait_for(lambda: log.is_file() and len(logged_steps(run)) >= 3, WAIT_S, lambda: str(list(run.iterdir())))
    slurm.cluster.run("scancel", "--signal=USR1", "--batch", jobs["seed-1"])
    slurm.wait(jobs["seed-1"], lambda: "Restarts=1" in slurm.record(jobs["seed-1"]))
    assert wait_for_all(slurm, jobs, tmp_path / "sweep") == {"seed-1": "COMPLETED"}
    assert logged_steps(run) == list(range(1, 81))


def test_children_in_a_chain_wait_for_their_parent(slurm, tmp_path):
    write_small(tmp_path / "base", {name: STAGES[name] for name in ("data", "init", "pretrain", "sft")}, {})
    passed("run", tmp_path / "base", "--only", "data")
    file = tmp_path / "sweep.yml"
    write_yaml(file, {"pipeline": "base", "grid": {"sft.train_iters": [4, 6]}, "slurm": list(OPTIONS)})
    done = in_cluster(slurm, "submit", file, "--cwd", tmp_path)
    jobs = submitted(done.stderr)
    assert list(jobs) == ["init", "pretrain", "sft_train_iters-4", "sft_train_iters-6"], done.stderr
    assert done.stderr.count(f"after job {jobs['pretrain']}") == 2
    assert set(wait_for_all(slurm, jobs, tmp_path / "sweep").values()) == {"COMPLETED"}
    assert [read_record(link).starts for link in read_sweep(file).links] == [1, 1, 1, 1]
    assert "finished" in in_cluster(slurm, "status", file).stdout


def test_twelve_runs_whose_jobs_are_cancelled_three_times(slurm, tmp_path):
    """Each submission has a job for every unfinished run, and no run is trained after its end."""
    grid = {"optimizer.params.lr": [1e-3, 3e-3], "seed": [1, 2, 3, 4, 5, 6]}
    file = write_sweep(tmp_path, {"train_iters": 6, "checkpoint_factor": 1}, grid=grid)
    root, counts = tmp_path / "sweep", []

    def submit() -> dict[str, str]:
        done = in_cluster(slurm, "submit", file, "--cwd", tmp_path, "--", *OPTIONS, "--cpus-per-task=20")
        assert done.returncode == 0, done.stderr
        jobs = submitted(done.stderr)
        counts.append(len(jobs))
        return jobs

    def steps() -> int:
        return sum(len(logged_steps(log.parent)) for log in root.glob("*/output.log"))

    for until in (8, 27, 45):
        jobs = submit()
        wait_for(lambda until=until: steps() >= until, 3 * WAIT_S, lambda: str(steps()))
        slurm.cluster.run("scancel", *jobs.values())
        wait_for_all(slurm, jobs, root)
    jobs = submit()
    assert set(wait_for_all(slurm, jobs, root).values()) == {"COMPLETED"}
    assert in_cluster(slurm, "status", file).returncode == 0
    cells = records(root)
    assert len(cells) == 12 and {cell["state"] for cell in cells.values()} == {"finished"}
    assert counts[0] == 12 and counts == sorted(counts, reverse=True) and 0 < counts[3] < 12
    for name in cells:
        all_steps = logged_steps(root / name)
        assert set(all_steps) == {1, 2, 3, 4, 5, 6} and all_steps.count(6) == 1, (name, all_steps)
