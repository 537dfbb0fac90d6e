"""Tensor files: written with a checksum and synced, read without running any code that the file brings
along."""

import errno
import hashlib
import io
import os
import pickle
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

from megatron.checkpointing.errors import CheckpointError
from megatron.data.files import sync
from megatron.neox_arguments.errors import lfs_pointer_error

_WORTH_A_THREAD = 1 << 18  # bytes: their hash takes longer than it takes to hand them over


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file.

    name: path inside the checkpoint. size: in bytes. sha256: in hexadecimal. tensors: of a tensor file, dtype
    and shape of each tensor by its keys, as `describe_tensors` gives them.
    """

    name: str
    size: int
    sha256: str
    tensors: Mapping[str, str] = field(default_factory=dict)


class OneBehind:
    """Calls functions in a thread, in order and one at a time, so that what the next one needs can be made
    meanwhile.

    A context; leaving it waits for the last. What a function raises, the next call or the end raises.
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


class SyncBeside:
    """Syncs files to disk in a thread, while others are written.

    A context; called with the path of a file that is written in full. Leaving it waits until all are on disk,
    and raises CheckpointError for one that cannot be.
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
    """A file with the methods that `torch.save` needs, which hashes what is written; large pieces are hashed
    in `thread` while they are written."""

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
            hashed.result()  # `data` is torch's, and good for this call alone

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
    except (OSError, RuntimeError) as e:  # a full disk reaches us as RuntimeError through torch's zip writer
        raise CheckpointError(f"{path}: cannot be written: {e}") from e
    return FileRecord(name or path.name, writer.size, writer.sha256.hexdigest())


def save_tensors(
    state: Any, path: str | Path, name: str | None = None, to_disk: Callable[[Path], None] = sync
) -> FileRecord:
    """Write `state` to `path` by `torch.save`, synced to disk; the checksum is taken while writing.

    name: path inside the checkpoint; None: the file's name. to_disk: syncs the file, or sees to it
    (`SyncBeside`). Raises CheckpointError where it cannot be written.
    """
    record = _write(Path(path), lambda writer: torch.save(state, cast(IO[bytes], writer)), name, to_disk)
    return replace(record, tensors=describe_tensors(state))


def describe_tensors(state: Any) -> dict[str, str]:
    """Dtype and shape of every tensor in nested dicts, by their keys: {"norm.weight/exp_avg": "float32
    [64]"}."""
    return {
        path: f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for path, tensor in named_tensors(state)
    }


def named_tensors(state: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in nested dicts with its keys, joined by slashes: "norm.weight/exp_avg"."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, Mapping):
        for key, item in state.items():
            yield from named_tensors(item, f"{path}/{key}" if path else str(key))


def write_bytes(data: bytes, path: str | Path, name: str | None = None) -> FileRecord:
    """Write a file that holds no tensors (config, tokenizer), synced to disk; arguments as of
    `save_tensors`."""
    return _write(Path(path), lambda writer: writer.write(data), name)


def copy_file(source: Path, path: Path, name: str) -> FileRecord:
    """Copy a file of any size, synced to disk; the checksum is taken on the way. name: as of
    `save_tensors`."""

    def fill(writer: _HashingWriter) -> None:
        with source.open("rb") as file:
            shutil.copyfileobj(file, writer, 16 << 20)

    return _write(path, fill, name)


def replace_file(path: str | Path, data: bytes) -> None:
    """Write `path` so that a reader sees the old or the new content, never a part."""
    path = Path(path)
    temporary = path.with_name(f".tmp_{path.name}")
    write_bytes(data, temporary)
    os.replace(temporary, path)
    sync(path.parent)


def readable_size(count: float) -> str:
    """A number of bytes as text in powers of 1000: `1.50 GB`, `0 bytes`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} bytes"


def need_free(folder: Path, needed: int, takes: str = "takes about") -> None:
    """Raises CheckpointError, before anything is written, where `needed` bytes are not free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(f"{folder}: {takes} {readable_size(needed)}, {readable_size(free)} are free; make room")


def open_lock_file(path: Path) -> IO[str]:
    """Open a file that processes lock or keep a note in; it is made if it is not there, and never truncated.

    Raises CheckpointError for a link, whose target belongs to somebody else.
    """
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666), "r+")
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise CheckpointError(f"{path}: is a link, not a file of this run; remove it") from problem
        raise


# DeepSpeed classes inside NeoX's files, read without DeepSpeed: same full name, no behaviour. An engine that
# hands the state on to DeepSpeed passes the real classes as `extra_safe` instead.
@dataclass
class FragmentAddress:
    """deepspeed.utils.tensor_fragment.fragment_address: a slice of a flat ZeRO partition."""

    numel: int
    start: int


class LossScalerState:
    """deepspeed.runtime.fp16.loss_scaler.*: attributes only."""


_STAND_INS: dict[str, Any] = {
    "deepspeed.utils.tensor_fragment.fragment_address": FragmentAddress,
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": LossScalerState,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": LossScalerState,
}


def _safe_list(extra_safe: Iterable[Any]) -> list[Any]:
    """The classes that a file may build: numpy's random state (names of numpy 1 and 2), DeepSpeed's data
    classes, and `extra_safe`."""
    reconstruct = np.empty(0).__reduce__()[0]
    extra = list(extra_safe)
    named = {item[1] if isinstance(item, tuple) else f"{item.__module__}.{item.__qualname__}" for item in extra}
    return [
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        type(np.dtype(np.uint32)),
        io.BytesIO,  # Transformer-Engine's _extra_state
        *((stand_in, name) for name, stand_in in _STAND_INS.items() if name not in named),
        *extra,
    ]


def load_tensors(path: str | Path, extra_safe: Iterable[Any] = ()) -> Any:
    """Load what `torch.save` wrote, to the CPU; tensors stay in the file until they are used (memory map).

    extra_safe: classes, or (class, "full.name") pairs, that may be built beside the allow-list.
    Raises CheckpointError for a file that is missing, damaged, no tensor file, or that asks for other code.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; the checkpoint is incomplete, load another `iteration`")
    if (pointer := lfs_pointer_error(path)) is not None:
        raise CheckpointError(pointer)
    try:
        with torch.serialization.safe_globals(_safe_list(extra_safe)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, IndexError,
            TypeError, OSError, AssertionError) as e:  # fmt: skip
        asked = re.search(r"GLOBAL ([\w.]+)", str(e))
        if asked:
            raise CheckpointError(
                f"{path}: asks to run {asked[1]}, which is not on the allow-list; nothing was run. "
                "Re-save the file with plain tensors, numbers and strings"
            ) from e
        reason = (str(e).splitlines() or [type(e).__name__])[0][:200]
        raise CheckpointError(f"{path}: damaged, or not a tensor file ({reason}); load another `iteration`") from e
