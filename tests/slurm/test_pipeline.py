"""A pipeline as jobs of a real Slurm: each stage after the one before has passed, each queued again alone."""

import re
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from tests.pipelines.small import GATES, change_yaml, finals, passed, records, write_small, write_yaml
from tests.slurm.conftest import END_STATES, OPTIONS, WAIT_S, Submitter, wait_for

pytestmark = pytest.mark.slurm


def in_cluster(slurm: Submitter, *words: object) -> "subprocess.CompletedProcess[str]":
    return slurm.python("deepy.py", "pipeline", *words)


def submitted(text: str) -> dict[str, str]:
    return dict(re.findall(r"pipeline: (\w+): job (\d+)", text))


def wait_for_jobs(slurm: Submitter, jobs: dict[str, str], folder: Path, until: str = "") -> dict[str, str]:
    """The state of each job once none waits or runs, or `until` stands in the last log of them."""
    deadline = time.monotonic() + 3 * WAIT_S
    while True:
        states = {stage: slurm.state(job) for stage, job in jobs.items()}
        if set(states.values()) <= set(END_STATES):
            return states
        logs = "\n".join(path.read_text() for path in sorted((folder / "logs").glob("*.out")))
        if until and re.search(until, logs):
            return states
        assert time.monotonic() < deadline, f"{states}\n{logs}"
        time.sleep(0.3)


def test_stages_are_dependent_jobs(slurm, tmp_path):
    """The same weights as without Slurm; a gate that refuses cancels what waits; what was mended goes on."""
    local_folder, slurm_folder = write_small(tmp_path / "here"), write_small(tmp_path / "there")
    passed("run", local_folder)
    write_yaml(slurm_folder / "gates.yml", {**GATES, "sft": {"require": [{"metric": "train/lm_loss", "max": 0.1}]}})
    done = in_cluster(slurm, "run", slurm_folder, "--slurm", "--", *OPTIONS)
    jobs = submitted(done.stderr)
    assert done.returncode == 0 and list(jobs) == ["data", "init", "pretrain", "sft", "lora"], done.stderr
    assert f"lora: job {jobs['lora']}, after job {jobs['sft']}" in done.stderr
    refused = in_cluster(slurm, "run", slurm_folder, "--slurm", "--", *OPTIONS)
    assert refused.returncode == 1 and "jobs of this pipeline wait or run" in refused.stderr
    states = wait_for_jobs(slurm, jobs, slurm_folder)
    log = (slurm_folder / "logs" / f"sft-{jobs['sft']}.out").read_text()
    assert states == {"data": "COMPLETED", "init": "COMPLETED", "pretrain": "COMPLETED", "sft": "FAILED",
                      "lora": "CANCELLED"}, log  # fmt: skip
    assert "ExitCode=3:0" in slurm.record(jobs["sft"]), log
    assert finals(slurm_folder) == {**finals(local_folder), "sft": None, "lora": None}
    assert records(slurm_folder)["sft"]["status"] == "refused"
    assert records(slurm_folder).get("lora", {}).get("status", "waiting") == "waiting"
    assert "refused" in in_cluster(slurm, "status", slurm_folder).stdout

    write_yaml(slurm_folder / "gates.yml", GATES)
    done = in_cluster(slurm, "resume", slurm_folder, "sft", "--slurm", "--", *OPTIONS)
    jobs = submitted(done.stderr)
    assert list(jobs) == ["sft", "lora"], done.stderr
    assert set(wait_for_jobs(slurm, jobs, slurm_folder).values()) == {"COMPLETED"}
    assert finals(slurm_folder) == finals(local_folder)


def test_a_stage_that_is_told_to_save_goes_on_by_itself(slurm, tmp_path):
    """USR1, as Slurm sends before a time limit: the job saves, is queued again, and the next stage waits."""
    folder, uninterrupted = write_small(tmp_path / "p"), write_small(tmp_path / "whole")
    for pipeline in (folder, uninterrupted):
        change_yaml(pipeline / "pretrain.yml", train_iters=80)
    passed("run", uninterrupted, "--to", "sft")
    done = in_cluster(slurm, "run", folder, "--to", "sft", "--slurm", "--", *OPTIONS)
    jobs = submitted(done.stderr)
    log = folder / "logs/pretrain.log"
    iterations_in = partial(re.findall, "iteration +[1-9]")
    wait_for(lambda: log.is_file() and len(iterations_in(log.read_text())) >= 3, WAIT_S, lambda: done.stderr)
    slurm.cluster.run("scancel", "--signal=USR1", "--batch", jobs["pretrain"])
    slurm.wait(jobs["pretrain"], lambda: "Restarts=1" in slurm.record(jobs["pretrain"]))
    assert slurm.state(jobs["sft"]) == "PENDING"
    assert set(wait_for_jobs(slurm, jobs, folder).values()) == {"COMPLETED"}
    job = jobs["pretrain"]
    assert f"job {job} is queued again" in (folder / "logs" / f"pretrain-{job}.out").read_text()
    assert finals(folder) == finals(uninterrupted)
