"""Writes tensor files with a checksum and a sync, reads them without running code, refuses NaN and Inf."""

import errno
import hashlib
import io
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self, cast

import numpy as np
import torch

from megatron.checkpointing.errors import CheckpointError, NonFiniteStateError
from megatron.checkpointing.layout import is_optimizer_file
from megatron.data.files import sync
from megatron.neox_arguments.errors import lfs_pointer_error

_WORTH_A_THREAD = 1 << 18  # bytes from which hashing takes longer than passing data to a thread


@dataclass(frozen=True)
class FileRecord:
    """The manifest's record of one file.

    name: path inside the checkpoint. size: in bytes. sha256: in hexadecimal.
    tensors: dtype and shape of each tensor in the file ("float32 [64]"), by the tensor's keys.
    """

    name: str
    size: int
    sha256: str
    tensors: Mapping[str, str] = field(default_factory=dict)


class BackgroundCalls:
    """A context that calls functions in a thread, in order and one at a time.

    Call the object with a function. The call waits until the previous function has ended, starts this one and
    returns. Leaving the context waits for the last function. Each wait raises the exception of the function
    it waited for.
    """

    def __init__(self) -> None:
        self._thread, self._last = ThreadPoolExecutor(1), Future[None]()
        self._last.set_result(None)

    def __call__(self, function: Callable[[], None]) -> None:
        self._last.result()
        self._last = self._thread.submit(function)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._thread.shutdown()
        if kind is None:
            self._last.result()


class BackgroundSync:
    """A context that syncs files to disk (fsync) in a thread, while other files are written.

    Call the object with the path of a complete file. Leaving the context waits until all files are on disk,
    and raises CheckpointError for a file that cannot be synced.
    """

    def __init__(self) -> None:
        self._thread, self._files = ThreadPoolExecutor(1), dict[Path, Future[None]]()

    def __call__(self, path: Path) -> None:
        self._files[path] = self._thread.submit(sync, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._thread.shutdown(cancel_futures=kind is not None)
        for path, done in self._files.items() if kind is None else ():
            try:
                done.result()
            except OSError as problem:
                raise CheckpointError(f"{path}: cannot be written: {problem}") from problem


class _HashingWriter:
    """A file object for `torch.save` that computes size and SHA-256 of the bytes written to it.

    Large pieces are hashed in `thread` while they are written.
    """

    def __init__(self, file: IO[bytes], thread: Executor) -> None:
        self.file, self.thread, self.sha256, self.size = file, thread, hashlib.sha256(), 0

    def write(self, data: Any) -> int:
        self.size += len(data)
        if len(data) < _WORTH_A_THREAD:
            self.sha256.update(data)
            return self.file.write(data)
        hashed = self.thread.submit(self.sha256.update, data)
        try:
            return self.file.write(data)
        finally:
            hashed.result()  # torch may free `data` after this call

    def flush(self) -> None:
        self.file.flush()


def _write(
    path: Path, fill: Callable[[_HashingWriter], Any], name: str | None, to_disk: Callable[[Path], None] = sync
) -> FileRecord:
    try:
        with open(path, "wb") as file, ThreadPoolExecutor(1) as thread:
            writer = _HashingWriter(file, thread)
            fill(writer)
        to_disk(path)
    except (OSError, RuntimeError) as e:  # torch's zip writer raises RuntimeError if the disk is full
        raise CheckpointError(f"{path}: cannot be written: {e}") from e
    return FileRecord(name or path.name, writer.size, writer.sha256.hexdigest())


def save_tensors(state: Any, path: str | Path, to_disk: Callable[[Path], None] = sync) -> FileRecord:
    """Write `state` to `path` by `torch.save`, synced to disk; returns the file's record for the manifest.

    to_disk: called with `path` to sync the file, now or later (`BackgroundSync`). Raises CheckpointError if
        the file cannot be written."""
    record = _write(Path(path), lambda writer: torch.save(state, cast(IO[bytes], writer)), None, to_disk)
    return replace(record, tensors=describe_tensors(state))


def describe_tensors(state: Any) -> dict[str, str]:
    """Returns dtype and shape of each tensor in nested dicts: {"norm.weight/exp_avg": "float32 [64]"}."""
    return {
        path: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for path, tensor in named_tensors(state)
    }


def named_tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (keys joined by slashes, tensor) for each tensor in nested dicts: ("norm.weight/exp_avg", ...).

    path: put before the keys."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, item in state.items():
            yield from named_tensors(item, f"{path}/{key}" if path else str(key))


def write_bytes(data: bytes, path: str | Path, name: str | None = None) -> FileRecord:
    """Write bytes to `path`, synced to disk; returns the file's record for the manifest.

    name: the file's path inside the checkpoint; None: the file's name."""
    return _write(Path(path), lambda writer: writer.write(data), name)


def copy_file(source: Path, path: Path, name: str) -> FileRecord:
    """Copy a file to `path`, synced to disk; returns its record for the manifest.

    name: the new file's path inside the checkpoint."""

    def fill(writer: _HashingWriter) -> None:
        with source.open("rb") as file:
            shutil.copyfileobj(file, writer, 16 << 20)

    return _write(path, fill, name)


def replace_file(path: str | Path, data: bytes) -> None:
    """Write a file atomically and synced to disk: a reader sees the old or the new content, never a part."""
    path = Path(path)
    temporary = path.with_name(f".tmp_{path.name}")
    write_bytes(data, temporary)
    os.replace(temporary, path)
    sync(path.parent)


def readable_size(count: float) -> str:
    """Converts a number of bytes to text in powers of 1000: `1.50 GB`, `0 bytes`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} bytes"


def need_free(folder: Path, size: int, label: str = "the checkpoint takes about") -> None:
    """Raise CheckpointError if the disk of `folder` has less than `size` bytes free.

    label: the words before the size in the error."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise CheckpointError(
            f"{folder}: {label} {readable_size(size)}, but only {readable_size(free)} are free on the disk; make room"
        )


def open_lock_file(path: Path) -> IO[str]:
    """Opens a file for locks between processes; it is created if missing, and its content stays.

    Raises CheckpointError if the path is a symbolic link, because its target may be another file."""
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+")
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise CheckpointError(
                f"{path}: is a symbolic link, but this run needs a regular file there; remove the link"
            ) from problem
        raise


# The next classes stand in for DeepSpeed's classes in NeoX's files, to read them without DeepSpeed. An engine
# that passes the state on to DeepSpeed gives the real classes as `extra_safe` instead.
@dataclass
class FragmentAddress:
    """Stands in for DeepSpeed's fragment_address: a slice (start, numel) of a flat ZeRO partition."""

    numel: int
    start: int


class LossScalerState:
    """Stands in for DeepSpeed's loss scalers when files are read: holds their attributes, without methods."""


_STAND_INS: dict[str, Any] = {
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScalerState,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": LossScalerState,
}


def _safe_list(extra_safe: Iterable[Any]) -> list[Any]:
    """Returns the classes that a file of `torch.save` may create: the allow-list of `load_tensors`.

    They are classes of numpy's random state, stand-ins of DeepSpeed's data classes, and `extra_safe`."""
    reconstruct = np.empty(0).__reduce__()[0]
    extra = list(extra_safe)
    extra_names = {item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}" for item in extra}
    return [
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
        io.BytesIO,  # Transformer-Engine's _extra_state
        *((stand_in, name) for name, stand_in in _STAND_INS.items() if name not in extra_names),
        *extra,
    ]


def load_tensors(path: str | Path, extra_safe: Iterable[Any] = ()) -> Any:
    """Returns the content of a file of `torch.save`, on the CPU; tensors are memory-mapped if possible.

    extra_safe: further classes, or (class, "full.name") pairs, that the file may create. Raises
        CheckpointError if the file is missing, damaged or no tensor file, or needs other classes."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete, load another `iteration`")
    if (pointer := lfs_pointer_error(path)) is not None:
        raise CheckpointError(pointer)
    try:
        with torch.serialization.safe_globals(_safe_list(extra_safe)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as e:  # a damaged pickle can raise any: EOFError, struct.error, KeyError, ...
        global_name = re.search(r"GLOBAL ([\w.]+)", str(e))
        if global_name:
            raise CheckpointError(
                f"{path}: contains {global_name[1]}, which could run code and is not on the allow-list; nothing was "
                "run. Save the file again with only tensors, numbers and strings"
            ) from e
        reason = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise CheckpointError(f"{path}: damaged, or not a tensor file ({reason}); load another `iteration`") from e


def check_finite(name: str, state: Any) -> None:
    """Raise NonFiniteStateError if `state`, the content of file `name`, holds NaN or Inf.

    Only files of weights and of optimizer state are checked. The check reads each tensor once, without a
    copy, several times faster than a checksum."""
    if not (name.startswith("layer_") or is_optimizer_file(name)):
        return
    for path, tensor in named_tensors(state):
        # If any element is NaN, minimum and maximum are NaN.
        if tensor.is_floating_point() and tensor.numel() and not all(map(torch.isfinite, torch.aminmax(tensor))):
            raise NonFiniteStateError(f"{name} ({path} is not finite: NaN or Inf)")


def verify_finite(path: Path, names: Iterable[str], optimizer: bool) -> None:
    """Raise NonFiniteStateError if weights in files `names` of checkpoint `path` hold NaN or Inf.

    optimizer: also check the checkpoint's optimizer state."""
    for name in names:
        if name.startswith("layer_") or (optimizer and name.startswith("optim_")):
            try:
                check_finite(name, load_tensors(path / name))
            except NonFiniteStateError as problem:
                fresh = ", or set no_load_optim: true" if is_optimizer_file(name) else ""
                raise NonFiniteStateError(f"{path}: {problem}; load another `iteration`{fresh}") from problem
