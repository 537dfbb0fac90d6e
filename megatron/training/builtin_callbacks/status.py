"""Writes `<save>/status.json`, the status and phase of a run, for launchers and `tools/jobs.py`."""

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import CheckpointError, read_latest, replace_file
from megatron.distributed import on_rank_zero
from megatron.neox_arguments import NeoXArgs
from megatron.process.run_files import STATUS, Problems, read_status
from megatron.training.metrics.loggers import log_directory
from megatron.training.run import Training

_TRAINING = "training"


def write_status(training: Training, status: str, reason: str | None) -> None:
    """Write `<save>/status.json`, which launchers read. All ranks call it together; rank 0 writes.

    status: running, finished, stopped (start again to resume) or failed. reason: why, or None.
    """
    on_rank_zero(training.groups, lambda: _status_file(training, status, reason))


def say_ending(training: Training, status: str, reason: str | None) -> None:
    """Write the last log line of a run that did not fail, such as `run finished at iteration 100`."""
    suffix = f": {reason}" if reason is not None else ""
    training.logger.info(f"run {status} at iteration {training.progress.iteration}{suffix}")


def ended_as(training: Training, status: str) -> bool:
    """Returns whether an earlier start of this run took all of its steps and ended with this status.

    status: finished; or stopped, if a signal came before the work after the last step was done. All ranks
    call it together.
    """

    def read() -> bool:
        saved = read_status(Path(training.args.save_dir or ""), Problems()) if training.args.save_dir else {}
        ending = (saved.get("status"), saved.get("iteration"), saved.get("run_id"))
        return ending == (status, training.args.train_iters, training.checkpointer.run_id)

    return on_rank_zero(training.groups, read)


def write_stopped_start(args: NeoXArgs, rank: int, reason: str) -> None:
    """Write the status `stopped` for a run that was stopped before its model was built. Only rank 0 writes.

    Iteration and run id stay those of the last status.json, if the run has a checkpoint from which to resume,
    or may have copies (`local_save`).
    """
    if rank != 0 or args.save_dir is None:
        return
    folder = Path(args.save_dir)
    can_resume = args.local_save is not None or read_latest(folder) is not None
    saved = read_status(folder, Problems()) if can_resume else {}
    state = {"iteration": 0, "train_iters": args.train_iters, **saved, "status": "stopped", "reason": reason}
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / STATUS, (json.dumps({**state, "phase": None, **_process()}, indent=1) + "\n").encode())


def note_phases(training: Training) -> None:
    """Let rank 0 write the run's phase to status.json whenever it changes.

    Phases are training, saving, evaluating and other activities that the watchdog reports. Files are written
    without fsync, and a write that fails is ignored.
    """
    noted = _TRAINING

    def note(activity: str) -> None:
        nonlocal noted
        phase = _TRAINING if activity.startswith("in ") else activity  # `in step 12`, `in the first step`
        if phase == noted:
            return
        noted = phase
        path = Path(training.args.save_dir or "") / STATUS
        temporary = path.with_name(f".tmp_{path.name}")
        try:
            temporary.write_bytes(_content(training, "running", None, phase))
            os.replace(temporary, path)
        except OSError:
            pass  # the next save reports what is wrong with the disk

    if training.groups.world_rank == 0 and training.args.save_dir is not None:
        training.watchdog.listener = note


def note_failure(training: Training, reason: str) -> None:
    """Write status.json of a run that failed for `reason`. Only rank 0 calls it. If writing fails, as on a
    full disk, that is only logged."""
    try:
        _status_file(training, "failed", reason)
    except (OSError, CheckpointError) as problem:
        training.logger.warning(str(problem))


def _status_file(training: Training, status: str, reason: str | None) -> None:
    args = training.args
    if args.save_dir is None:
        return
    path = Path(args.save_dir) / STATUS
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, _content(training, status, reason, _TRAINING if status == "running" else None))


def _content(training: Training, status: str, reason: str | None, phase: str | None) -> bytes:
    """Returns the content of status.json.

    host, pid: of this process, rank 0. launcher_pid: of the deepy.py that started it, which may restart it.
    job: the Slurm job.
    """
    args, device = training.args, training.groups.device
    state = {
        "status": status,
        "reason": reason,
        "phase": phase,
        "iteration": training.progress.iteration,
        "train_iters": args.train_iters,
        "run_id": training.checkpointer.run_id,
        "log_dir": str((log_directory(args) or Path()).absolute()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        **_process(),
    }
    return (json.dumps(state, indent=1) + "\n").encode()


def _process() -> dict[str, Any]:
    """Returns the fields of status.json that identify this process: host, pids, Slurm job; and the time.

    restarts: those that deepy.py made. restart_cause: the reason of the last one.
    """
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher_pid": os.getppid() if "NEOX_RESTARTS" in os.environ else None,
        "job": os.environ.get("SLURM_JOB_ID"),
        "restarts": int(os.environ.get("NEOX_RESTARTS", "0")),
        "restart_cause": os.environ.get("NEOX_RESTART_CAUSE") or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
