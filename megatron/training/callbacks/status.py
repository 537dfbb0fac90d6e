"""`<save>/status.json`: how a run stands and what it is doing, for launchers and `tools/jobs.py`."""

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
    """`<save>/status.json`, which launchers read: running, finished, stopped (start again to go on) or
    failed, and why. All ranks call it together."""
    on_rank_zero(training.groups, lambda: _status_file(training, status, reason))


def write_ending(training: Training, status: str, reason: str | None) -> None:
    """status.json and the last line of the log of a run that did not fail. All ranks call it together."""
    write_status(training, status, reason)
    say_ending(training, status, reason)


def say_ending(training: Training, status: str, reason: str | None) -> None:
    """The last line of the log of a run that did not fail."""
    why = f": {reason}" if reason is not None else ""
    training.logger.info(f"run {status} at iteration {training.progress.iteration}{why}")


def ended_as(training: Training, status: str) -> bool:
    """Whether an earlier start took all steps of this run and noted this end: finished; or stopped, for a
    signal, without all that comes after the last step. All ranks call it together."""

    def read() -> bool:
        known = read_status(Path(training.args.save_dir or ""), Problems()) if training.args.save_dir else {}
        ended = (known.get("status"), known.get("iteration"), known.get("run_id"))
        return ended == (status, training.args.train_iters, training.checkpointer.run_id)

    return on_rank_zero(training.groups, read)


def write_stopped_start(args: NeoXArgs, rank: int, reason: str) -> None:
    """status.json and the last line of the log of a run that was told to stop before it had a model: its last
    checkpoint, if there is one, is where the next start begins. Rank 0's, of rank `rank`."""
    if rank != 0 or args.save_dir is None:
        return
    folder = Path(args.save_dir)
    known = read_status(folder, Problems()) if read_latest(folder) is not None else {}
    state = {"iteration": 0, "train_iters": args.train_iters, **known, "status": "stopped", "reason": reason}
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / STATUS, (json.dumps({**state, "phase": None, **_process()}, indent=1) + "\n").encode())


def note_phases(training: Training) -> None:
    """Let rank 0's status.json say from now on what the run is doing, whenever that changes: training,
    saving, evaluating and whatever else the watchdog is told of. A write that fails is left out, and none is
    synced."""
    noted = _TRAINING

    def note(doing: str) -> None:
        nonlocal noted
        phase = _TRAINING if doing.startswith("in ") else doing  # `in step 12`, `in the first step`
        if phase == noted:
            return
        noted = phase
        path = Path(training.args.save_dir or "") / STATUS
        temporary = path.with_name(f".tmp_{path.name}")
        try:
            temporary.write_bytes(_content(training, "running", None, phase))
            os.replace(temporary, path)
        except OSError:
            pass  # the next save says what is wrong with the disk

    if training.groups.world_rank == 0 and training.args.save_dir is not None:
        training.watchdog.listener = note


def note_failure(training: Training, reason: str) -> None:
    """Rank 0's status.json of a run that ends of `reason`, which stays the one that is told: the disk may be
    full."""
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
    """host, pid: of this process, rank 0; launcher_pid: of the deepy.py that started it, which may start it
    again; job: of Slurm."""
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
    """Which process it is, of which job, and now."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "launcher_pid": os.getppid() if "NEOX_RESTARTS" in os.environ else None,
        "job": os.environ.get("SLURM_JOB_ID"),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
