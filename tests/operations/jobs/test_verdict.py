"""The verdict on every kind of job: what Slurm, the log, status.json and the clock say, and what follows."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.operations.jobs.joblog import LogFacts, Progress
from megatron.operations.jobs.scheduler import Job
from megatron.operations.jobs.verdict import GONE, judge

NOW = 1_000_000.0
JOB = Job("7", "neox-training", "me", "RUNNING", started=NOW - 5000, log=Path("/nowhere/7.out"))
LOG = LogFacts(NOW - 10, Progress(5, 10, 2.5, 0.1), phase="training")
RUNS = {"status": "running", "phase": "training"}
TROUBLE = ("Traceback (most recent call last):", "ValueError: a")


@pytest.mark.parametrize(
    ("state", "log", "status", "kind", "detail"),
    [
        ("PENDING", None, {}, "pending", "Resources"),
        ("REQUEUED", LOG, {}, "pending", "Resources"),
        ("CONFIGURING", replace(LOG, phase="starting"), {}, "starting", ""),
        ("RUNNING", replace(LOG, phase="starting"), RUNS, "starting", ""),
        ("RUNNING", LOG, {}, "training", ""),
        ("RUNNING", LOG, RUNS, "training", ""),
        (
            "RUNNING",
            LOG,
            {**RUNS, "phase": "answering prompts of the step"},
            "training",
            "answering prompts of the step",
        ),
        ("RUNNING", LOG, {**RUNS, "phase": "saving"}, "saving", ""),
        ("RUNNING", LOG, {**RUNS, "phase": "saving the best model"}, "saving", ""),
        ("RUNNING", LOG, {**RUNS, "phase": "evaluating"}, "evaluating", ""),
        ("RUNNING", LOG, {**RUNS, "phase": "computing the test loss"}, "evaluating", "computing the test loss"),
        ("RUNNING", replace(LOG, phase="saving"), {}, "saving", ""),
        ("RUNNING", replace(LOG, written=NOW - 600), RUNS, "training", ""),
        ("RUNNING", replace(LOG, written=NOW - 601), RUNS, "STALE", ""),
        ("RUNNING", None, {}, "STALE", "there is no log /nowhere/7.out"),
        ("SUSPENDED", replace(LOG, written=NOW - 601), RUNS, "STALE", "suspended"),
        ("RUNNING", replace(LOG, error_lines=TROUBLE, written=NOW - 601), RUNS, "CRASHED", "and still running"),
        ("COMPLETING", replace(LOG, phase="ended"), {"status": "finished"}, "FINISHED", "about to end"),
        ("COMPLETED", LOG, {"status": "finished"}, "FINISHED", ""),
        ("COMPLETED", replace(LOG, submitted="8"), {}, "FINISHED", "submitted job 8 in its place"),
        ("COMPLETED", replace(LOG, error_lines=TROUBLE), {}, "FINISHED", ""),
        ("COMPLETED", LOG, {"status": "stopped", "reason": "SIGUSR1"}, "STOPPED", "SIGUSR1"),
        ("CANCELLED", LOG, {}, "CANCELLED", ""),
        ("PREEMPTED", LOG, {}, "STOPPED", "preempted"),
        ("FAILED", LOG, {}, "CRASHED", "Slurm: FAILED, exit code 1:0; there is no log /nowhere/7.out"),
        ("NODE_FAIL", LOG, {}, "CRASHED", "Slurm: NODE_FAIL; there is no log /nowhere/7.out"),
        ("TIMEOUT", LOG, {}, "CRASHED", "Slurm: TIMEOUT; there is no log /nowhere/7.out"),
    ],
)
def test_verdicts(state: str, log: LogFacts | None, status: dict[str, Any], kind: str, detail: str) -> None:
    verdict = judge(replace(JOB, state=state, reason="Resources", exit_code="1:0"), log, status, NOW)
    assert (verdict.kind, verdict.detail) == (kind, detail)
    assert (verdict.silent_s is not None) == (kind == "STALE")


def test_what_is_shown_of_a_crash_and_of_silence() -> None:
    crashed = judge(replace(JOB, state="FAILED"), replace(LOG, error_lines=TROUBLE), {}, NOW)
    assert crashed.error_lines == TROUBLE and str(crashed) == "CRASHED"
    said = judge(replace(JOB, state="FAILED"), LOG, {"reason": "NonFiniteError: step 3"}, NOW)
    assert said.error_lines == ("NonFiniteError: step 3",)
    assert str(judge(JOB, replace(LOG, written=NOW - 4000), RUNS, NOW)) == "STALE 4000 s"


def test_local_runs_and_other_jobs() -> None:
    gone = judge(replace(JOB, state=GONE, local=True), LOG, RUNS, NOW)
    assert gone.kind == "CRASHED" and "processes are gone" in gone.detail
    other = replace(JOB, name="convert_exp", command="sbatch huggingface/convert_hf_to_neox.sbatch x")
    assert judge(other, None, {}, NOW).kind == "running"
    assert judge(replace(other, command="sbatch /a/pretrain_neox.sbatch /b.yml"), LOG, {}, NOW).kind == "training"
