"""Opens checkpoints for reading: each file is checked against the manifest before it is first read.

All code that reads weights, state or other files of a checkpoint uses an `OpenCheckpoint`. `open_checkpoint`
is for code that reads the whole checkpoint. tests/checkpointing/test_readers.py lists all readers.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpointing.errors import CheckpointError, DamagedError
from megatron.checkpointing.layout import is_optimizer_file, model_file, model_files
from megatron.checkpointing.manifest import MANIFEST, Manifest, file_sizes, read_manifest, size_problems
from megatron.checkpointing.tensor_files import FileRecord, describe_tensors, load_tensors
from megatron.data.files import sha256
from megatron.distributed import run_on_all_ranks
from megatron.mpu import ParallelGroups

_COUNTERS = ("iteration", "global_steps", "global_samples", "skipped_steps", "consumed_samples", "consumed_tokens")


def _is_count(value: Any) -> bool:
    """Returns whether a value is a whole number or None; older programs write floats and tensors, too."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return value is None or isinstance(value, int) or isinstance(value, float) and value.is_integer()


class OpenCheckpoint:
    """A checkpoint directory whose files are checked against the manifest before they are first read.

    Size, SHA-256, and dtypes and shapes of tensors are checked.
    path: the directory. manifest: None for a checkpoint of GPT-NeoX, whose files are read unchecked.
    verified: check files; false if you read only names, dtypes and shapes of tensors.
    averaged: weights are read from the averages that the run kept (`ema_decay`), not from the last weights.
    Raises DamagedError if the manifest itself is damaged.
    """

    def __init__(self, path: str | Path, *, verified: bool = True, averaged: bool = False) -> None:
        self.path, self.averaged = Path(path), averaged
        self.manifest: Manifest | None = read_manifest(self.path)
        self._verified = verified
        self._problems: dict[str, Future[str | None]] = {}  # by name of each file that was, or is being, checked

    def file(self, name: str) -> Path:
        """Checks file `name`; returns its path. Raises CheckpointError if it differs from the manifest."""
        if self._verified:
            self.verify([name])
        return self.path / name

    def tensors(self, name: str) -> Any:
        """Checks the tensor file `name` and returns its content; tensors are memory-mapped."""
        return load_tensors(self.file(name))

    def model_state(self, rank: int = 0) -> dict[str, Any]:
        """Checks the mp_rank file of a model-parallel rank and returns its content.

        Raises CheckpointError if the file is missing or is no dict, or if a counter is no whole number."""
        state = self.tensors(model_file(rank))
        names = state if isinstance(state, dict) else ()
        wrong = [name for name in _COUNTERS if name in names and not _is_count(state[name])]
        if wrong or not isinstance(state, dict):
            problem = f"{wrong[0]} is {type(state[wrong[0]]).__name__}" if wrong else f"holds {type(state).__name__}"
            raise DamagedError(f"{self.path / model_file(rank)}: damaged: {problem}; load another `iteration`")
        return state

    def model_states(self) -> dict[int, dict[str, Any]]:
        """Returns the content of all mp_rank files, by model-parallel rank.

        Raises CheckpointError if there are none."""
        return {rank: self.model_state(rank) for rank in sorted(model_files(self.path)) or (0,)}

    @property
    def names(self) -> list[str]:
        """The names of all files except optimizer state; [] if there is no manifest."""
        return [] if self.manifest is None else [n for n in sorted(self.manifest.files) if not is_optimizer_file(n)]

    def verify(
        self,
        names: Iterable[str] | None = None,
        groups: ParallelGroups | None = None,
        sharers: Sequence[int] | None = None,
    ) -> None:
        """Compare files with the manifest, unless that was done before.

        names: the files; None: all except optimizer state.
        groups: all ranks call this method together, and each checks a part of the files; None: this process
            checks all.
        sharers: with `groups`, the ranks that see these files and divide them among themselves; None: all
            ranks.
        Raises DamagedError that names every damaged file, CheckpointError for a file that the manifest does
        not list."""
        if self.manifest is None:
            return
        requested = sorted(set(self.names if names is None else names))
        new = [name for name in requested if name not in self._problems]
        if groups is not None:
            sharers = range(groups.world_size) if sharers is None else sharers
            share = new[sharers.index(groups.world_rank) :: len(sharers)]
            run_on_all_ranks(groups, lambda: self.verify(share))
            new = [name for name in new if name not in self._problems]
            self._problems |= {name: _done(None) for name in new}  # another rank has checked them
            return
        self._check_sizes(new)
        for name in new:
            self._problems[name] = _done(self._problem(self.manifest.files[name]))
        if any(self._problems[name].result() for name in requested):
            _refuse(self.path, [text for future in self._problems.values() if (text := future.result())])

    @contextmanager
    def verifying_ahead(self, names: Sequence[str]) -> Iterator[None]:
        """Within the context, a thread checks the files `names`, in order, while you read the first ones.

        All sizes are checked at the start. The end of the context waits until all files are checked."""
        if self.manifest is None:
            yield
            return
        self._check_sizes(names)
        thread = ThreadPoolExecutor(1)
        try:
            records = {name: self.manifest.files[name] for name in names if name not in self._problems}
            self._problems |= {name: thread.submit(self._problem, record) for name, record in records.items()}
            yield
            self.verify(names)
        finally:
            thread.shutdown(cancel_futures=True)

    def _check_sizes(self, names: Sequence[str]) -> None:
        assert self.manifest is not None
        files = self.manifest.files
        if unlisted := [name for name in names if name not in files]:
            text = f"does not list {', '.join(unlisted)}; load another `iteration`"
            raise CheckpointError(f"{self.path / MANIFEST}: {text}")
        _refuse(self.path, size_problems(file_sizes(self.path, names), [files[name] for name in names]))

    def _problem(self, record: FileRecord) -> str | None:
        """Returns how a file differs from its record in the manifest; None if it does not.

        The checksum is compared, then dtypes and shapes of tensors."""
        if sha256(self.path / record.name) != record.sha256:
            return f"{record.name} (checksum)"
        described = describe_tensors(load_tensors(self.path / record.name)) if record.tensors else {}
        names = sorted({*described, *record.tensors})
        wrong = [name for name in names if described.get(name) != record.tensors.get(name)]
        if not wrong:
            return None
        is_now, recorded = described.get(wrong[0], "missing"), record.tensors.get(wrong[0], "no such tensor")
        return f"{record.name} ({wrong[0]} is {is_now}, but the manifest lists {recorded})"


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """Opens a checkpoint and checks all files except optimizer state, which is checked when it is read.

    Raises DamagedError that names every damaged file."""
    checkpoint = OpenCheckpoint(path)
    checkpoint.verify()
    return checkpoint


def verify(path: str | Path, names: Iterable[str] | None = None) -> Manifest | None:
    """Compare files of checkpoint `path` with its manifest; returns the manifest, None if there is none.

    names: the files; None: all files, including optimizer state. Raises CheckpointError that names every
        damaged file."""
    checkpoint = OpenCheckpoint(path)
    if checkpoint.manifest is not None:
        checkpoint.verify(checkpoint.manifest.files if names is None else names)
    return checkpoint.manifest


def _done(result: str | None) -> Future[str | None]:
    future: Future[str | None] = Future()
    future.set_result(result)
    return future


def _refuse(path: Path, bad: Sequence[str]) -> None:
    if bad:
        raise DamagedError(f"{path}: damaged: {', '.join(bad)}; load another `iteration`")
