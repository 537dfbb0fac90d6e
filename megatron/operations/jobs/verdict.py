"""Decides what a job is doing from Slurm's state, the job's log and status.json, and the time. Reads no
files."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.operations.jobs.joblog import LogFacts
from megatron.operations.jobs.scheduler import PENDING, SUSPENDED, Job

STALE_S = 600.0
PENDING_, STARTING, TRAINING, EVALUATING, SAVING = "pending", "starting", "training", "evaluating", "saving"
STALE, CRASHED, UNKNOWN, FINISHED, STOPPED, CANCELLED, RUNNING = (
    "STALE", "CRASHED", "UNKNOWN", "FINISHED", "STOPPED", "CANCELLED", "running"
)  # fmt: skip
NEEDS_A_PERSON = frozenset({STALE, CRASHED, UNKNOWN})
DIED_SILENTLY = "GONE"
"""The state of a local run whose processes ended without writing a final status, for example after kill
-9."""
UNREADABLE = "UNREADABLE"
"""The state of a local run that has ended, if its status.json does not say how."""
_EVALUATES = ("evaluating", "computing the", "answering demo_prompts")


@dataclass(frozen=True)
class Verdict:
    """The verdict on a job: what it is doing, or how it ended.

    kind: pending, starting, training, evaluating, saving, running (not a training job), STALE (has not
        written its log for 10 minutes), CRASHED, UNKNOWN, FINISHED, STOPPED or CANCELLED.
    detail: additional text, such as the reason to wait.
    error_lines: error lines of the job's log, at most three.
    silent_s: seconds since a STALE job last wrote to its log.
    """

    kind: str
    detail: str = ""
    error_lines: tuple[str, ...] = ()
    silent_s: float | None = None

    def __str__(self) -> str:
        return f"STALE {self.silent_s:.0f} s" if self.silent_s is not None else self.kind


def judge(job: Job, log: LogFacts | None, status: Mapping[str, Any], now: float) -> Verdict:
    """Returns the verdict on a job: what it is doing, or how it ended.

    log: facts read from its log; None without a log. status: content of its run's status.json; {} if there
    is none or another job wrote it. now: seconds since 1970.
    """
    if job.state in PENDING:
        return Verdict(PENDING_, job.reason if job.reason not in ("None", "") else "")
    if not job.is_active:
        return _ended_verdict(job, log, status)
    if log is not None and log.error_lines:
        return Verdict(CRASHED, "and still running", log.error_lines)
    written = log.written if log is not None else job.start_time
    silent = now - written if written is not None else 0.0
    if job.trains and silent > STALE_S:
        detail = (
            "suspended" if job.state == SUSPENDED else "" if log is not None else f"its log {job.log} does not exist"
        )
        return Verdict(STALE, detail, silent_s=silent)
    if not job.trains:
        return Verdict(RUNNING)
    return _running_verdict(log, status)


def _running_verdict(log: LogFacts | None, status: Mapping[str, Any]) -> Verdict:
    if log is None or log.phase == STARTING:
        return Verdict(STARTING)
    if log.phase == "ended":
        return Verdict(FINISHED if status.get("status", "finished") == "finished" else STOPPED, "about to end")
    phase = str(status.get("phase") or "") if status.get("status") == "running" else ""
    if not phase:
        return Verdict(log.phase)
    if "saving" in phase:
        return Verdict(SAVING)
    if phase.startswith(_EVALUATES):
        return Verdict(EVALUATING, "" if phase == EVALUATING else phase)
    return Verdict(TRAINING, "" if phase == TRAINING else phase)


def _ended_verdict(job: Job, log: LogFacts | None, status: Mapping[str, Any]) -> Verdict:
    if job.state == "COMPLETED":
        if log is not None and log.submitted is not None:
            return Verdict(FINISHED, f"submitted job {log.submitted} in its place")
        if status.get("status") == "stopped":
            return Verdict(STOPPED, str(status.get("reason") or ""))
        return Verdict(FINISHED)
    if job.state == UNREADABLE:
        return Verdict(UNKNOWN, "the run's status.json does not say how it ended", log.error_lines if log else ())
    if job.state in ("CANCELLED", "REVOKED"):
        return Verdict(CANCELLED)
    if job.state == "PREEMPTED":
        return Verdict(STOPPED, str(status.get("reason") or "preempted"))
    lines = log.error_lines if log is not None else ()
    return Verdict(CRASHED, _failure_detail(job), lines or tuple(filter(None, [str(status.get("reason") or "")])))


def _failure_detail(job: Job) -> str:
    """Returns a text that says how a failed job ended, such as `Slurm: FAILED, exit code 1:0`; "" if
    unknown."""
    if job.state == DIED_SILENTLY:
        return "its processes ended without writing a status: they were killed, or the machine was restarted"
    if job.local:
        return ""
    text = f"Slurm: {job.state}"
    if job.state == "FAILED":
        text += f", exit code {job.exit_code}"
    return text if job.log is None or job.log.is_file() else f"{text}; its log {job.log} does not exist"
