"""Helper functions for saving: HuggingFace exports, states as bytes, empty folders.

It also has the lock that reserves a folder of checkpoints for one run.
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

from megatron.checkpointing import (
    CheckpointError,
    FileRecord,
    check_finite,
    open_lock_file,
    readable_size,
    save_tensors,
    write_bytes,
)
from megatron.neox_arguments import NeoXArgs


def is_hf_due(args: NeoXArgs, iteration: int) -> bool:
    """Returns whether `save_hf` asks for an export in HuggingFace's format after this iteration."""
    if args.save_hf is None:
        return False
    return iteration == args.train_iters or (args.save_hf > 0 and iteration > 0 and iteration % args.save_hf == 0)


def is_state_per_parameter(args: NeoXArgs) -> bool:
    """Returns whether the optimizer keeps its state per parameter. bitsandbytes keeps quantized blocks
    instead."""
    return not args.use_bnb_optimizer


def check_free_disk(folder: Path, num_bytes: int, remedy: str) -> None:
    """Raises CheckpointError, with the remedy, if a checkpoint of `num_bytes` does not fit on the disk of
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise CheckpointError(
            f"{folder}: a checkpoint takes about {readable_size(num_bytes)}, but {readable_size(free)} are free; "
            f"{remedy}"
        )


def layers_unless(look: Callable[[], None], layers: Iterable[int], count: int) -> Iterator[int]:
    """Yields `layers`, and calls `look` before each; an exception of `look` ends the export.

    It has the signature of the argument `progress` of `export_hf`.
    """
    for layer in layers:
        look()
        yield layer


def serialised(state: Any) -> bytes:
    """Returns a state as the bytes that torch.save writes, because the next step changes its tensors in
    place."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def write_states(
    path: Path, states: Iterable[tuple[str, Any]], written: Callable[[FileRecord], None] = lambda record: None
) -> list[FileRecord]:
    """Write files, given as (name, content), to the folder `path`; return their records.

    Content is a tree of tensors, bytes, or a function that takes path and name and writes the file.
    written: called after each file. An error is raised only after the last file, because other ranks still
    gather with this one until then.
    """
    records: list[FileRecord] = []
    problem: Exception | None = None
    for name, state in states:
        if problem is not None:
            continue
        try:
            check_finite(name, state)
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(state, bytes):
                records.append(write_bytes(state, path / name, name))
            elif callable(state):
                records.append(state(path / name, name))
            else:
                records.append(save_tensors(state, path / name))
            written(records[-1])
        except (OSError, CheckpointError) as caught:
            problem = caught
    if problem is not None:
        raise problem
    return records


def empty_folder(parent: Path, folder: Path) -> None:
    """Delete `parent` with its content, then make the folder `folder`, which is within `parent`."""
    shutil.rmtree(parent, ignore_errors=True)  # may be left from an interrupted save
    folder.mkdir(parents=True)


def lock_folder(save: Path) -> Any:
    """Lock the folder `save`, and return the open lock file; creates the folder if needed.

    The lock ends with the process, however that ends. It is not a `flock`, because data workers would inherit
    that and hold it for seconds after the process has died. The file names host, pid, and Slurm job (or null)
    of the process, by which `tools/jobs.py submit` recognises a stale lock.
    Raises CheckpointError if another run holds the lock, or the folder cannot be written.
    """
    try:
        save.mkdir(parents=True, exist_ok=True)
        file = open_lock_file(save / ".lock")
    except OSError as problem:
        raise _cannot_write(save, problem) from problem
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as problem:  # POSIX allows either
        text = f"{save}: another run is writing there; wait for it to end, or set another save"
        raise CheckpointError(text) from problem
    except OSError as problem:
        text = f"{save}: its file system takes no locks ({problem.strerror}), so two runs could mix; set another save"
        raise CheckpointError(text) from problem
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
    try:
        file.seek(0)
        file.truncate()
        file.write(json.dumps(holder) + "\n")
        file.flush()
    except OSError as problem:
        raise _cannot_write(save, problem) from problem
    return file


def _cannot_write(save: Path, problem: OSError) -> CheckpointError:
    return CheckpointError(f"{save}: cannot be written ({problem.strerror}); set another save")
