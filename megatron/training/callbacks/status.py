"""`<save>/status.json`: how a run stands, for launchers."""

import json
import time
from pathlib import Path

from megatron.checkpointing import CheckpointError, replace_file
from megatron.distributed import on_rank_zero
from megatron.training.metrics.loggers import log_directory
from megatron.training.run import Training


def write_status(training: Training, status: str, reason: str | None) -> None:
    """`<save>/status.json`, which launchers read: running, finished, stopped (start again to go on) or
    failed, and why. All ranks call it together."""
    on_rank_zero(training.groups, lambda: _status_file(training, status, reason))


def write_ending(training: Training, status: str, reason: str | None) -> None:
    """status.json and the last line of the log of a run that did not fail. All ranks call it together."""
    write_status(training, status, reason)
    why = f": {reason}" if reason is not None else ""
    training.logger.info(f"run {status} at iteration {training.progress.iteration}{why}")


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
    state = {
        "status": status,
        "reason": reason,
        "iteration": training.progress.iteration,
        "train_iters": args.train_iters,
        "run_id": training.checkpointer.run_id,
        "log_dir": str((log_directory(args) or Path()).absolute()),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    path = Path(args.save_dir) / "status.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(state, indent=1) + "\n").encode())
