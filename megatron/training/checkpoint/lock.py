"""The lock by which a folder of checkpoints is one run's alone."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError, open_lock_file


def lock_folder(save: Path) -> Any:
    """An open, locked file in `save`, which is made if it is not there. The lock ends with the process,
    however that ends: it is none of those (flock) that the data's workers would inherit, who see only seconds
    later that they are alone. The file says who has it, so that `tools/jobs.py submit` can tell a stale one:
    host, pid, and Slurm's job (null where it is none). Raises CheckpointError."""
    try:
        save.mkdir(parents=True, exist_ok=True)
        file = open_lock_file(save / ".lock")
    except OSError as problem:
        raise CheckpointError(f"{save}: cannot be written ({problem.strerror}); set another save") from problem
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as problem:  # either, says POSIX
        text = f"{save}: another run is writing there; wait for it to end, or set another save"
        raise CheckpointError(text) from problem
    except OSError as problem:
        text = f"{save}: its file system takes no locks ({problem.strerror}), so two runs could mix; set another save"
        raise CheckpointError(text) from problem
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
    file.seek(0)
    file.truncate()
    file.write(json.dumps(holder) + "\n")
    file.flush()
    return file
