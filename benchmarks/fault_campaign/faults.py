"""Faults, and the places in a run where they happen.

`install` makes this process, a rank, suffer a fault at the nth call of a phase's function. Faults that damage
files (DAMAGES) happen between two starts of a run instead.
"""

import importlib
import math
import os
import random
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from megatron.neox_arguments.frozen import FrozenDict
from megatron.process.run_files import STATUS

# Phase: the functions that it consists of, as (module, name in it), and how often a run calls one at most.
PHASES: Mapping[str, tuple[tuple[tuple[str, str], ...], int]] = FrozenDict({
    "configuration": ((("megatron.neox_arguments", "script_args"),), 1),
    "rendezvous": ((("megatron.training.setup", "rendezvous_and_check"),), 1),
    "index maps": ((("megatron.training.setup", "build_datasets"),), 1),
    "model": ((("megatron.training.setup", "build_engine"),), 1),
    "load": ((("megatron.training.checkpoint.resume", "CheckpointLoader.resume"),), 1),
    "step": ((
        ("megatron.training.native.engine", "NativeEngine.train_step"),
        ("megatron.training.deepspeed.engine", "DeepSpeedEngine.train_step"),
    ), 6),
    "forward": ((("megatron.model.stage", "Stage.forward"),), 12),
    "backward": ((("torch.autograd", "backward"),), 12),
    "optimizer": ((
        ("megatron.training.native.update", "Update.step"),
        ("deepspeed.runtime.engine", "DeepSpeedEngine._take_model_step"),
    ), 6),
    "copy of a save": ((
        ("megatron.training.native.engine", "NativeEngine.gather_weights"),
        ("megatron.training.deepspeed.engine", "DeepSpeedEngine.gather_weights"),
    ), 3),
    "write of a save": ((("megatron.training.checkpoint.pieces", "save_tensors"),), 24),
    "sync of a save": ((("os", "fsync"),), 60),
    "rename of a save": ((("os", "rename"),), 6),
    "manifest of a save": ((("megatron.checkpointing.publish", "replace_file"),), 9),
    "validation": ((("megatron.training.builtin_callbacks.validation", "ValidationCallback.on_step_end"),), 7),
    "open of a file": ((("builtins", "open"),), 40),
    "replacement of a file": ((("os", "replace"),), 9),
    "log": ((("megatron.training.builtin_callbacks.log", "LogCallback.settle"),), 12),
})  # fmt: skip


RESTARTED_FAULTS = ("SIGKILL", "SIGSTOP", "connections lost", "no descriptors left", "memory limit")
"""Faults after which deepy.py starts a run again. Only deepy.py notices a stopped rank (SIGSTOP)."""
BEFORE_ALL_HAVE_READ = ("configuration", "rendezvous", "open of a file")
"""Phases in which a rank may still have to read the configuration."""
BEFORE_FINGERPRINTS = (*BEFORE_ALL_HAVE_READ, "index maps", "model")
"""Phases in which a run has not yet fingerprinted its data: changed data are its data."""
BEFORE_SAVE_IS_LOCKED = (*BEFORE_FINGERPRINTS, "backward", "sync of a save", "replacement of a file")
"""Phases in which a run may not yet have locked its folder `save`."""
SECOND_ENDED = "second_ended"
"""Name of the file that says that a second start of a run has ended."""
VALID_CONFIGURATION = "valid_run.yml"
"""Name of the file that holds a run's configuration while that is unreadable."""
TRAINING_FAULTS = ("NaN", "configuration unreadable", "data changed in place", "second run on the same save")
"""Faults that commands do not have."""
_FURTHER_PHASES: Mapping[str, tuple[tuple[tuple[str, str], ...], int]] = FrozenDict({
    "request to the Hub": (tuple(
        ("huggingface_hub.hf_api", f"HfApi.{name}")
        for name in ("create_repo", "create_branch", "list_repo_tree", "preupload_lfs_files", "create_commit")
    ), 16),
    "journal": ((("megatron.operations.hub.journal", "Journal.add"),), 28),
})  # fmt: skip
PHASES_OF_COMMANDS: Mapping[str, Mapping[str, int]] = FrozenDict({
    "tokenise": {"open of a file": 22, "sync of a save": 12, "replacement of a file": 7},
    "clean": {"open of a file": 40, "sync of a save": 6, "replacement of a file": 24},
    "convert": {"open of a file": 40, "sync of a save": 11, "rename of a save": 1},
    "generate": {"configuration": 1, "open of a file": 35, "forward": 24, "sync of a save": 1,
                 "replacement of a file": 1},
    "evaluate": {"configuration": 1, "open of a file": 35, "forward": 2, "sync of a save": 1,
                 "replacement of a file": 1},
    "upload": {"open of a file": 40, "sync of a save": 39, "rename of a save": 2, "journal": 28,
               "request to the Hub": 16},
})  # fmt: skip
"""Phases of each command, and how often it calls one of their functions."""


@dataclass(frozen=True)
class Injection:
    """A fault of one rank at the nth call of a phase's function.

    is_late: whether it happens just after the call, not just before it.
    """

    fault: str
    phase: str
    nth: int
    is_late: bool
    rank: int


def install(injection: Injection, folder: Path) -> None:
    """Wraps the functions of the injection's phase in this process. When the fault happens, the file
    `reached` is written into `folder`."""
    calls = 0

    def wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            is_due = calls == injection.nth
            if is_due and not injection.is_late:
                happen()
            result = function(*args, **kwargs)
            if is_due and injection.is_late:
                happen()
            return result

        return wrapped

    def happen() -> None:
        (folder / "reached").write_text(f"{injection}\n")
        FAULTS[injection.fault](folder)

    for module_name, path in {**PHASES, **_FURTHER_PHASES}[injection.phase][0]:
        owner: Any = importlib.import_module(module_name)
        *classes, name = path.split(".")
        for attribute in classes:
            owner = getattr(owner, attribute)
        setattr(owner, name, wrapper(getattr(owner, name)))


def _signal(*numbers: int) -> Callable[[Path], None]:
    def send(folder: Path) -> None:
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.05)

    return send


def _die_in_a_file(folder: Path) -> None:
    """Kills this process as if in the middle of writing the newest file of a save, half of which is there."""
    files = [path for path in folder.rglob(".tmp_*/**/*") if path.is_file()]
    if files:
        newest = max(files, key=lambda path: path.stat().st_mtime_ns)
        os.truncate(newest, newest.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)


def _slow(folder: Path) -> None:
    time.sleep(2.0)


def _close_sockets(folder: Path) -> None:
    """Shuts down every TCP connection of this process, as a broken network does. Sockets that listen stay."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if connection.family in (socket.AF_INET, socket.AF_INET6) and not is_listening:
                        connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def _exhaust_descriptors(folder: Path) -> None:
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _limit_memory(folder: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (1 << 16)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _jump_clock(hours: float) -> Callable[[Path], None]:
    def jump(folder: Path, clock: Callable[[], float] = time.time) -> None:
        time.time = lambda: clock() + hours * 3600  # type: ignore[method-assign]

    return jump


def _lose_names(folder: Path) -> None:
    def fail(*words: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    socket.getaddrinfo = fail  # type: ignore[assignment]


def _make_nan(folder: Path) -> None:
    """Makes the next module that is called on this rank return NaN."""

    def poison(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and output.is_floating_point():
            hook.remove()
            return output * math.nan
        return None

    hook = register_module_forward_hook(poison)


def _fill_disk(folder: Path) -> None:
    from tests.disks import fill

    fill(folder)


def _make_read_only(folder: Path) -> None:
    from tests.disks import remount

    try:
        remount(folder, read_only=True)
    except AssertionError:  # a file is open for writing: then Linux leaves the disk as it is
        (folder / "reached").unlink()


def _spoil_configuration(folder: Path) -> None:
    """Makes the run's YAML file unreadable: no permissions, and bytes that are no text."""
    path = folder / "run.yml"
    shutil.copy(path, folder / VALID_CONFIGURATION)
    path.write_bytes(b"\x00\xff{ no: yaml")
    path.chmod(0)


def _change_data(folder: Path) -> None:
    """Flips a bit of a data file without replacing the file. Its path is written into `changed`."""
    if not (folder / "run" / STATUS).exists():  # not fingerprinted yet: the run would be one on other data
        (folder / "reached").unlink()
        return
    choice = random.Random((folder / "reached").read_text())
    files = [path for path in sorted((folder / "data").rglob("*")) if path.suffix in (".bin", ".jsonl")]
    path = choice.choice(files)
    with path.open("r+b") as file:
        place = choice.randrange(path.stat().st_size)
        file.seek(place)
        value = file.read(1)[0]
        file.seek(place)
        file.write(bytes([value ^ 1]))
    (folder / "changed").write_text(str(path.relative_to(folder)))


def _await_second_run(folder: Path) -> None:
    """Waits until the campaign has started the same run once more, and that start has ended."""
    deadline = time.monotonic() + 90.0
    while not (folder / SECOND_ENDED).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


FAULTS: Mapping[str, Callable[[Path], None]] = FrozenDict({
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGKILL in half a file": _die_in_a_file,
    "SIGINT": _signal(signal.SIGINT),
    "SIGUSR1": _signal(signal.SIGUSR1),
    "SIGUSR1 twice": _signal(signal.SIGUSR1, signal.SIGUSR1),
    "SIGSTOP": _signal(signal.SIGSTOP),
    "slow rank": _slow,
    "NaN": _make_nan,
    "connections lost": _close_sockets,
    "no descriptors left": _exhaust_descriptors,
    "memory limit": _limit_memory,
    "clock an hour ahead": _jump_clock(1),
    "clock a day back": _jump_clock(-24),
    "no name resolution": _lose_names,
    "disk full": _fill_disk,
    "disk read-only": _make_read_only,
    "configuration unreadable": _spoil_configuration,
    "data changed in place": _change_data,
    "second run on the same save": _await_second_run,
})  # fmt: skip
"""Faults of a rank. Afterwards the run must go on as if nothing had been, or say what is wrong."""


def damage(kind: str, folder: Path, choice: random.Random) -> str | None:
    """Damages a file of a run that has ended. Returns the file's path inside `folder`; None if it has no such
    file."""
    place_kind, _, way = kind.partition(": ")
    files = _files(place_kind, folder)
    if not files:
        return None
    path = choice.choice(files)
    content = path.read_bytes()
    if way == "removed":
        path.unlink()
    elif way == "truncated":
        path.write_bytes(content[: choice.randrange(len(content))])
    else:
        place = choice.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ (1 << choice.randrange(8))]) + content[place + 1 :])
    return str(path.relative_to(folder))


def _files(place_kind: str, folder: Path) -> list[Path]:
    save = folder / "run"
    if place_kind == "checkpoint":
        return sorted(path for path in (save / (save / "latest").read_text().strip()).rglob("*") if path.is_file())
    places = {
        "data": (folder / "data").rglob("*"),
        "index map": (folder / "index_maps").rglob("*"),
        "state": [*save.glob("*.json"), save / "latest", save / "logs" / "metrics.jsonl"],
        "configuration": [folder / "run.yml"],
    }
    return sorted(path for path in places[place_kind] if path.is_file() and path.stat().st_size)


DAMAGES = tuple(
    f"{place}: {way}"
    for place in ("checkpoint", "data", "index map", "state", "configuration")
    for way in ("flipped bit", "truncated", "removed")
)
