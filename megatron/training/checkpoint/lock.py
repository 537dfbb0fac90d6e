"""The lock by which a folder of checkpoints is one run's alone."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from megatron.checkpointing import CheckpointError, open_lock_file


def lock_folder(save: Path) -> Any:
    """Returns an open, locked file in `save`; creates the folder if needed. Raises CheckpointError.

    The lock ends with the process, however that ends. It is no `flock`: data workers would inherit that and
    hold it for seconds after the process has died. The file names its holder: host, pid, and Slurm's job or
    null. By it `tools/jobs.py submit` recognises a stale lock.
    """
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
