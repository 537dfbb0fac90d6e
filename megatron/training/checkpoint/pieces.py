"""Small parts of saving: when HuggingFace's format is due, its layers one by one, a state as bytes.

And the lock by which a folder of checkpoints is one run's alone.
"""

import fcntl
import io
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.checkpointing import CheckpointError, open_lock_file
from megatron.neox_arguments import NeoXArgs


def is_hf_due(args: NeoXArgs, iteration: int) -> bool:
    """Returns whether HuggingFace's format is written after this iteration."""
    if args.save_hf is None:
        return False
    return iteration == args.train_iters or (args.save_hf > 0 and iteration > 0 and iteration % args.save_hf == 0)


def layers_unless(look: Callable[[], None], layers: Iterable[int], count: int) -> Iterator[int]:
    """Yields the layers, as `export_hf` takes them. look: called before each; an exception ends the
    export."""
    for layer in layers:
        look()
        yield layer


def serialised(state: Any) -> bytes:
    """Returns a state as bytes: a copy of tensors that the next step changes in place."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def empty_folder(parent: Path, folder: Path) -> None:
    """Make `folder` within `parent`, after deleting everything else in `parent`."""
    shutil.rmtree(parent, ignore_errors=True)  # of an interrupted save
    folder.mkdir(parents=True)


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
