"""A pipeline as jobs of a real Slurm: each stage after the one before has passed, each queued again alone."""

import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from tests.pipelines.small import GATES, change_yaml, finals, passed, records, write_small, write_yaml
from tests.slurm.conftest import ENDED, OPTIONS, WAIT_S, Submitter, wait_until

pytestmark = pytest.mark.slurm


def in_cluster(slurm: Submitter, *words: object) -> "subprocess.CompletedProcess[str]":
    return slurm.python("deepy.py", "pipeline", *words)


def submitted(text: str) -> dict[str, str]:
    return dict(re.findall(r"pipeline: (\w+): job (\d+)", text))


def wait_for(slurm: Submitter, jobs: dict[str, str], folder: Path, until: str = "") -> dict[str, str]:
    """The state of each job once none waits or runs, or `until` stands in the last log of them."""
    deadline = time.monotonic() + 3 * WAIT_S
    while True:
        states = {stage: slurm.state(job) for stage, job in jobs.items()}
        if set(states.values()) <= set(ENDED):
            return states
        logs = "\n".join(path.read_text() for path in sorted((folder / "logs").glob("*.out")))
        if until and re.search(until, logs):
            return states
        assert time.monotonic() < deadline, f"{states}\n{logs}"
        time.sleep(0.3)


def test_stages_are_dependent_jobs(slurm, tmp_path):
    """The same weights as without Slurm; a gate that refuses cancels what waits; what was mended goes on."""
    here, there = write_small(tmp_path / "here"), write_small(tmp_path / "there")
    passed("run", here)
    write_yaml(there / "gates.yml", {**GATES, "sft": {"require": [{"metric": "train/lm_loss", "max": 0.1}]}})
    told = in_cluster(slurm, "run", there, "--slurm", "--", *OPTIONS)
    jobs = submitted(told.stderr)
    assert told.returncode == 0 and list(jobs) == ["data", "init", "pretrain", "sft", "lora"], told.stderr
    assert f"lora: job {jobs['lora']}, after job {jobs['sft']}" in told.stderr
    again = in_cluster(slurm, "run", there, "--slurm", "--", *OPTIONS)
    assert again.returncode == 1 and "jobs of this pipeline wait or run" in again.stderr
    states = wait_for(slurm, jobs, there)
    log = (there / "logs" / f"sft-{jobs['sft']}.out").read_text()
    assert states == {"data": "COMPLETED", "init": "COMPLETED", "pretrain": "COMPLETED", "sft": "FAILED",
                      "lora": "CANCELLED"}, log  # fmt: skip
    assert "ExitCode=3:0" in slurm.record(jobs["sft"]), log
    assert finals(there) == {**finals(here), "sft": None, "lora": None}
    assert records(there)["sft"]["status"] == "refused"
    assert records(there).get("lora", {}).get("status", "waiting") == "waiting"
    assert "refused" in in_cluster(slurm, "status", there).stdout

    write_yaml(there / "gates.yml", GATES)
    told = in_cluster(slurm, "resume", there, "sft", "--slurm", "--", *OPTIONS)
    jobs = submitted(told.stderr)
    assert list(jobs) == ["sft", "lora"], told.stderr
    assert set(wait_for(slurm, jobs, there).values()) == {"COMPLETED"}
    assert finals(there) == finals(here)


def test_a_stage_that_is_told_to_save_goes_on_by_itself(slurm, tmp_path):
    """USR1, as Slurm sends before a time limit: the job saves, is queued again, and the next stage waits."""
    folder, whole = write_small(tmp_path / "p"), write_small(tmp_path / "whole")
    for made in (folder, whole):
        change_yaml(made / "pretrain.yml", train_iters=80)
    passed("run", whole, "--to", "sft")
    told = in_cluster(slurm, "run", folder, "--to", "sft", "--slurm", "--", *OPTIONS)
    jobs = submitted(told.stderr)
    log = folder / "logs/pretrain.log"
    seen = partial(re.findall, "iteration +[1-9]")
    wait_until(lambda: log.is_file() and len(seen(log.read_text())) >= 3, WAIT_S, lambda: told.stderr)
    slurm.cluster.run("scancel", "--signal=USR1", "--batch", jobs["pretrain"])
    slurm.wait(jobs["pretrain"], lambda: "Restarts=1" in slurm.record(jobs["pretrain"]))
    assert slurm.state(jobs["sft"]) == "PENDING"
    assert set(wait_for(slurm, jobs, folder).values()) == {"COMPLETED"}
    job = jobs["pretrain"]
    assert f"job {job} is queued again" in (folder / "logs" / f"pretrain-{job}.out").read_text()
    assert finals(folder) == finals(whole)
