"""Reading the ends of a log, and the verdict on every kind of job."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.operations.jobs.joblog import LogFacts, Progress, error_lines, follow, last_lines, read_log
from megatron.operations.jobs.scheduler import Job
from megatron.operations.jobs.verdict import DIED_SILENTLY, judge

ARGUMENTS = """\
-------------------- arguments --------------------
  activation ...................... swiglu......................updated
  save ............................ /p/checkpoints/sf_model_organisms/exp,a=1/runupdated
  train_iters ..................... 200.........................updated
  log_dir ......................... None........................default
  save_hf ......................... None........................default
---------------- end of arguments ----------------
"""
LINE = (
    " samples/sec: 575.275 | iteration {:8d}/     200 | elapsed time per iteration (ms): 13.9 |"
    " learning rate: 1.000E-03 | approx flops per GPU: 7.4GFLOPS | lm_loss: 6.124934E+00"
    " | number of skipped iterations:   0 |\n"
)
VALIDATION = " validation results at iteration 5 | lm_loss value: 5.843227E+00 | lm_loss_ppl value: 3.448906E+02 | \n"


def written(folder: Path, *parts: str) -> Path:
    path = folder / "job.out"
    path.write_text("".join(parts))
    return path


def test_progress_and_folders(tmp_path: Path) -> None:
    log = read_log(written(tmp_path, ARGUMENTS, LINE.format(1), LINE.format(7), VALIDATION))
    assert (log.progress.iteration, log.progress.total, log.progress.loss) == (7, 200, 6.124934)
    assert log.progress.seconds == pytest.approx(0.0139)
    assert (log.save, log.log_dir) == ("/p/checkpoints/sf_model_organisms/exp,a=1/run", None)
    assert log.phase == "training" and log.error_lines == ()
    assert read_log(tmp_path / "absent") is None


@pytest.mark.parametrize(("text", "phase"), [
    ("", "starting"),
    ("distributed_backend: auto chose gloo\n", "starting"),
    (LINE.format(3), "training"),
    (LINE.format(3) + "still saving, for 61 s\n", "saving"),
    (LINE.format(3) + "Running evaluation harness:  45%|####5     | 450/1000 [00:30<00:36]\n", "evaluating"),
    (LINE.format(3) + "still computing the validation loss, for 61 s\n", "evaluating"),
    ("Running evaluation harness: 100%|###|\n evaluation results at iteration 5 | piqa_acc: 0.5\n", "training"),
    (LINE.format(3) + "deepy.py: restart 1 of 3 after rank 0 of 1 failed with exit code 1\n", "starting"),
    (LINE.format(3) + ARGUMENTS, "starting"),
    (LINE.format(200) + "run finished at iteration 200\n", "ended"),
])  # fmt: skip
def test_the_last_line_that_tells_says_the_phase(tmp_path: Path, text: str, phase: str) -> None:
    assert read_log(written(tmp_path, text)).phase == phase


@pytest.mark.parametrize(("line", "counts"), [
    ("Traceback (most recent call last):", True),
    ("torch.OutOfMemoryError: CUDA out of memory", True),
    ("RuntimeException in thread", True),
    ("train.py: ERROR: no such file", True),
    ("max error 1e-3", False),
    ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T04:00:00 DUE TO JOB REQUEUE ***", False),
    ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-24T04:00:00 DUE TO TIME LIMIT ***", True),
])  # fmt: skip
def test_a_crash_is_what_people_grep_for(line: str, counts: bool) -> None:
    assert bool(error_lines(["fine", line])) == counts


def test_a_crash_counts_within_the_last_hundred_lines(tmp_path: Path) -> None:
    trouble = "ValueError: a\n"
    within_limit, beyond_limit = (
        read_log(written(tmp_path, trouble, LINE.format(1) * num_lines)).error_lines for num_lines in (99, 100)
    )
    assert (within_limit, beyond_limit) == (("ValueError: a",), ())
    assert error_lines([f"Error: {n}" for n in range(9)]) == ("Error: 6", "Error: 7", "Error: 8")


def test_a_big_log_is_read_at_its_ends(tmp_path: Path) -> None:
    """The last iteration stands far before the end, behind what an evaluation writes."""
    path = written(tmp_path, ARGUMENTS, LINE.format(9), "a sample of text\n" * 30_000, "é" * 200_000 + "\n")
    log = read_log(path)
    assert log.progress.iteration == 9 and log.save == "/p/checkpoints/sf_model_organisms/exp,a=1/run"
    assert last_lines(path, 2) == ["a sample of text", "é" * 200_000]
    with path.open("r+b") as file:  # a file with a hole: reading all of it would take a minute
        file.truncate(20 * 2**30)
        file.seek(0, 2)
        file.write(b"\n" + LINE.format(11).encode())
    assert read_log(path).progress.iteration == 11


def test_following_ends_with_the_job(tmp_path: Path) -> None:
    path, checks = written(tmp_path, "before\n"), []

    def goes_on() -> bool:
        checks.append(1)
        with path.open("a") as file:
            file.write(f"line {len(checks)}\n")
        return len(checks) < 2

    assert "".join(follow(path, goes_on, pause_s=0.01, check_every_s=0.02)) == "line 1\nline 2\n"
    assert os.path.getsize(path) == len("before\nline 1\nline 2\n")


NOW = 1_000_000.0
JOB = Job("7", "neox-training", "me", "RUNNING", start_time=NOW - 5000, log=Path("/nowhere/7.out"))
LOG = LogFacts(NOW - 10, Progress(5, 10, 2.5, 0.1), phase="training")
RUNS = {"status": "running", "phase": "training"}
TROUBLE = ("Traceback (most recent call last):", "ValueError: a")


@pytest.mark.parametrize(("state", "log", "status", "kind", "detail"), [
    ("PENDING", None, {}, "pending", "Resources"),
    ("REQUEUED", LOG, {}, "pending", "Resources"),
    ("CONFIGURING", replace(LOG, phase="starting"), {}, "starting", ""),
    ("RUNNING", replace(LOG, phase="starting"), RUNS, "starting", ""),
    ("RUNNING", LOG, {}, "training", ""),
    ("RUNNING", LOG, RUNS, "training", ""),
    ("RUNNING", LOG, {**RUNS, "phase": "answering prompts"}, "training", "answering prompts"),
    ("RUNNING", LOG, {**RUNS, "phase": "saving"}, "saving", ""),
    ("RUNNING", LOG, {**RUNS, "phase": "saving the best model"}, "saving", ""),
    ("RUNNING", LOG, {**RUNS, "phase": "evaluating"}, "evaluating", ""),
    ("RUNNING", LOG, {**RUNS, "phase": "computing the test loss"}, "evaluating", "computing the test loss"),
    ("RUNNING", replace(LOG, phase="saving"), {}, "saving", ""),
    ("RUNNING", replace(LOG, written=NOW - 600), RUNS, "training", ""),
    ("RUNNING", replace(LOG, written=NOW - 601), RUNS, "STALE", ""),
    ("RUNNING", None, {}, "STALE", "its log /nowhere/7.out does not exist"),
    ("SUSPENDED", replace(LOG, written=NOW - 601), RUNS, "STALE", "suspended"),
    ("RUNNING", replace(LOG, error_lines=TROUBLE, written=NOW - 601), RUNS, "CRASHED", "and still running"),
    ("COMPLETING", replace(LOG, phase="ended"), {"status": "finished"}, "FINISHED", "about to end"),
    ("COMPLETED", LOG, {"status": "finished"}, "FINISHED", ""),
    ("COMPLETED", replace(LOG, submitted="8"), {}, "FINISHED", "submitted job 8 in its place"),
    ("COMPLETED", replace(LOG, error_lines=TROUBLE), {}, "FINISHED", ""),
    ("COMPLETED", LOG, {"status": "stopped", "reason": "SIGUSR1"}, "STOPPED", "SIGUSR1"),
    ("CANCELLED", LOG, {}, "CANCELLED", ""),
    ("PREEMPTED", LOG, {}, "STOPPED", "preempted"),
    ("FAILED", LOG, {}, "CRASHED", "Slurm: FAILED, exit code 1:0; its log /nowhere/7.out does not exist"),
    ("NODE_FAIL", LOG, {}, "CRASHED", "Slurm: NODE_FAIL; its log /nowhere/7.out does not exist"),
    ("TIMEOUT", LOG, {}, "CRASHED", "Slurm: TIMEOUT; its log /nowhere/7.out does not exist"),
])  # fmt: skip
def test_verdicts(state: str, log: LogFacts | None, status: dict[str, Any], kind: str, detail: str) -> None:
    verdict = judge(replace(JOB, state=state, reason="Resources", exit_code="1:0"), log, status, NOW)
    assert (verdict.kind, verdict.detail) == (kind, detail)
    assert (verdict.silent_s is not None) == (kind == "STALE")


def test_crashes_silence_local_runs_and_other_jobs() -> None:
    crashed = judge(replace(JOB, state="FAILED"), replace(LOG, error_lines=TROUBLE), {}, NOW)
    assert crashed.error_lines == TROUBLE and str(crashed) == "CRASHED"
    reported = judge(replace(JOB, state="FAILED"), LOG, {"reason": "NonFiniteError: step 3"}, NOW)
    assert reported.error_lines == ("NonFiniteError: step 3",)
    assert str(judge(JOB, replace(LOG, written=NOW - 4000), RUNS, NOW)) == "STALE 4000 s"
    vanished = judge(replace(JOB, state=DIED_SILENTLY, local=True), LOG, RUNS, NOW)
    assert vanished.kind == "CRASHED" and "processes ended without writing a status" in vanished.detail
    conversion = replace(JOB, name="convert_exp", command="sbatch huggingface/convert_hf_to_neox.sbatch x")
    assert judge(conversion, None, {}, NOW).kind == "running"
    assert judge(replace(conversion, command="sbatch /a/pretrain_neox.sbatch /b.yml"), LOG, {}, NOW).kind == "training"
