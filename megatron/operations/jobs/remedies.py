"""Removes the cause of a run's failure before the run is submitted again. Never changes a configuration
file."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.operations.jobs.failures import FOLDER, LOCK, PORT, Failure, bad_node
from megatron.operations.jobs.local_runs import is_here, lock_holder
from megatron.operations.jobs.overview import Row
from megatron.operations.jobs.scheduler import Slurm
from megatron.process.run_files import Unfit, complete, process_number, read_object, text

if TYPE_CHECKING:
    from megatron.neox_arguments import NeoXArgs

_FIRST_PORT = 30500  # jobs use 29500 to 30499 by default
_FREED_S = 30.0  # seconds to wait until a run that is being killed releases its lock


@dataclass(frozen=True)
class Remedy:
    """A remedy that was applied to a failed run.

    action: a sentence about what was done or found.
    helps: whether to submit the run again.
    pairs, environment: KEY=VALUE of the configuration, and environment variables, to add to the next
    submission.
    exclude: nodes that the next submission must not use.
    """

    action: str
    helps: bool = True
    pairs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Attempt:
    """The changes that all remedies so far make to the next submission of a run.

    pairs: KEY=VALUE of the configuration. environment: variables. exclude: nodes not to use.
    """

    pairs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()  # nodes

    def with_remedy(self, remedy: Remedy) -> "Attempt":
        """Returns an attempt that has the changes of this one and of `remedy`."""
        return Attempt(
            (*self.pairs, *remedy.pairs), {**self.environment, **remedy.environment},
            (*self.exclude, *remedy.exclude),
        )  # fmt: skip


def remedy(
    failure: Failure, row: Row, args: "NeoXArgs", excluded: Sequence[str], lines: Sequence[str], slurm: Slurm
) -> Remedy:
    """Applies the remedy for a failure that is safe to retry, and returns what was done.

    lines: the end of the job's log. excluded: nodes that are already excluded from the next submission."""
    if failure.kind is PORT:
        return _another_port(row.job.id, args.origin("master_port") != "default")
    if failure.kind is LOCK:
        return free_lock(Path(args.save_dir or ""), slurm if slurm.is_here else None)
    if failure.kind is FOLDER:
        return _make_folder(row.job.log)
    node = bad_node(row.job, lines)
    if node is None or node in excluded or row.job.local:
        return Remedy("submitted again without changes: no node to exclude was found")
    return Remedy(f"submitted again without node {node}", exclude=(node,))


def free_lock(
    save: Path, slurm: Slurm | None, wait_s: float = _FREED_S, alive: Callable[[int], bool] | None = None
) -> Remedy:
    """Waits `wait_s` seconds for the lock of folder `save`, then deletes it if its holder has certainly
    ended.

    A file system may keep the lock of a crashed machine. The holder has certainly ended if the lock names a
    job that Slurm says has ended, or a process of this machine that does not exist.

    slurm: None on a machine without Slurm. alive: returns whether this machine has a process with this id.
    """
    alive = alive or (lambda pid: Path(f"/proc/{pid}").exists())
    start_time = time.monotonic()
    while (pid := lock_holder(save)) is not None and time.monotonic() - start_time < wait_s:
        time.sleep(0.5)
    if pid is None:
        return Remedy(f"{save}/.lock was free again after {time.monotonic() - start_time:.0f} s")
    if pid > 0 and alive(pid):
        return Remedy(f"{save}: the lock is not stale: process {pid} of this machine holds it", helps=False)
    holder = _holder(save)
    host, number = holder.get("host", "another machine"), holder.get("job")
    unknown = f"{save}: cannot tell from here whether the lock is stale"
    if is_here(holder):
        if alive(pid := holder["pid"]):
            return Remedy(f"{save}: the lock is not stale: process {pid} of this machine holds it", helps=False)
        evidence = "the process of this machine that held it is gone"
    elif number is None or slurm is None:
        return Remedy(f"{unknown}: check on {host} whether its run has ended", helps=False)
    else:
        job = slurm.job(str(number))
        if job is None:
            return Remedy(
                f"{unknown}: Slurm does not know job {number} any more; check on {host} whether its run has ended",
                helps=False,
            )
        if job.is_active:
            return Remedy(f"{save}: the lock is not stale: job {number} ({job.state}) trains there", helps=False)
        evidence = f"job {number}, which held it on {host}, has ended ({job.state})"
    (save / ".lock").unlink(missing_ok=True)
    return Remedy(f"removed the stale lock {save}/.lock: {evidence}")


def _holder(save: Path) -> Mapping[str, Any]:
    """Returns `host`, `pid` and `job` of the last process that locked `save`, from its file .lock.

    {} if the file is unreadable."""
    try:
        held = read_object(save / ".lock")
        return {"job": held.get("job"), **complete({"pid": process_number, "host": text})(held)}
    except (OSError, ValueError, Unfit):
        return {}


def _another_port(number: str, in_files: bool) -> Remedy:
    port = _FIRST_PORT + int(re.sub(r"\D", "", number) or 0) % 1000
    if in_files:  # the key in a configuration file has priority over the variable MASTER_PORT
        return Remedy(f"submitted again with --set master_port={port}", pairs=(f"master_port={port}",))
    return Remedy(f"submitted again with MASTER_PORT={port}", environment={"MASTER_PORT": str(port)})


def _make_folder(log: Path | None) -> Remedy:
    if log is None or log.parent.is_dir():
        return Remedy("the folder of the log exists already", helps=False)
    try:
        log.parent.mkdir(parents=True)
    except OSError as problem:
        return Remedy(f"{log.parent}, the folder of the log, cannot be created ({problem.strerror})", helps=False)
    return Remedy(f"created {log.parent}, the folder of the log")
