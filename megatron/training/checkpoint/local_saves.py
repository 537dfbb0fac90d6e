"""Keeps the state of a run's last steps on the disks or in the memory of its machines (`local_save`).

    <local_save>/<name of save>_<digest of its path>/global_stepN/    files of a checkpoint, and its manifest

Each rank writes its part of a checkpoint to its machine's folder, and each machine sends its files to the
next one. So a restart goes on from there, even if one machine has been lost. Such a copy serves the same
command alone; whoever changes keys or ranks goes on from `save`.
"""

import hashlib
import json
import logging
import os
import platform
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.checkpointing import (
    CheckpointError,
    DamagedError,
    Manifest,
    NonFiniteStateError,
    OpenCheckpoint,
    list_checkpoints,
    read_latest,
    read_manifest,
    readable_size,
    replace_file,
    step_of,
    step_tag,
)
from megatron.checkpointing.layout import layer_of
from megatron.checkpointing.manifest import MANIFEST
from megatron.data.files import sha256
from megatron.distributed import on_rank_zero, run_on_all_ranks, run_on_each_rank
from megatron.distributed.file_transfer import Transfer, transfer_files
from megatron.distributed.startup_checks import configuration
from megatron.mpu import ParallelGroups
from megatron.mpu.memory import free_host_memory
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.addresses import without_secrets
from megatron.neox_arguments.frozen import FrozenDict
from megatron.neox_arguments.values.local_paths import with_home
from megatron.process.run_files import Problems, Shape, any_value, map_of, number, read_fields, read_status
from megatron.training.checkpoint.pieces import write_states
from megatron.training.checkpoint.run_parts import TrainingProgress
from megatron.training.checkpoint.source import CheckpointSource
from megatron.training.checkpoint.writer import CheckpointWriter

START = "start.json"  # what a copy is of: the configuration, and the last checkpoint before it
_START_SHAPE: Shape = FrozenDict({"configuration": map_of(any_value), "durable_step": number})
_START_KEYS = ("restart", "iteration")  # choose how a run starts; dropped once it has saved
T = TypeVar("T")
_SHARED_LAYERS = (0, 2)  # of tied embeddings, and of tables that all blocks share


@dataclass(frozen=True)
class _Copy:
    """A copy, or the part of it that one machine has.

    step: its iteration. manifest: SHA-256 of its manifest.json. num_files: in the manifest. files: bit i is
    set if the i-th file, by name, is there in its right size.
    """

    step: int
    manifest: str
    num_files: int
    files: int

    @property
    def is_complete(self) -> bool:
        return self.files == (1 << self.num_files) - 1


def _joined(parts: Sequence[Sequence[_Copy]]) -> list[_Copy]:
    """Returns the copies of which machines have parts, the latest step first. parts: of each machine."""
    copies: dict[str, _Copy] = {}
    for part in chain.from_iterable(parts):
        joined_files = part.files | copies[part.manifest].files if part.manifest in copies else part.files
        copies[part.manifest] = replace(part, files=joined_files)
    return sorted(copies.values(), key=lambda copy: (-copy.step, copy.manifest))


class LocalSaves:
    """The copies of a run on its machines. All ranks call every method together, except `remove`.

    folder: of this rank's machine. machine_ranks: the ranks with the same folder.
    """

    def __init__(self, args: NeoXArgs, groups: ParallelGroups, logger: logging.Logger) -> None:
        self.args, self.groups, self.logger = args, groups, logger
        self._configuration = {
            path: without_secrets(value)
            for path, value in configuration(args).items()
            if path.partition(".")[0] not in _START_KEYS
        }
        self.folder = _folder(args)
        machines = run_on_all_ranks(groups, lambda: _machine(args, self.folder))
        leader_of = [machines.index(machine) for machine in machines]  # the lowest rank with the same folder
        self.leaders = sorted(set(leader_of))
        self._ranks_of = {
            leader: [rank for rank, its_leader in enumerate(leader_of) if its_leader == leader]
            for leader in self.leaders
        }
        self._leader = leader_of[groups.world_rank]
        self.machine_ranks = self._ranks_of[self._leader]
        self.is_leader = groups.world_rank in self.leaders
        self._group = dist.new_group(self.leaders, backend="gloo") if len(self.leaders) > 1 else None
        self._manifest: Manifest | None = None  # of the copy that `newest` chose, and its names by leader
        self._names: dict[int, set[str]] = {}

    # -- at the start ----------------------------------------------------------------------------------------

    def newest(self, source: CheckpointSource) -> CheckpointSource:
        """Returns the newest copy of this run that all machines together hold, if it is later than `source`.

        Else returns `source`. A machine without the copy gets its manifest and small files from others.
        source: from `choose_source`, what the run would start from without a copy.
        """
        if self.args.restart or self.args.iteration is not None:
            self._remove_copies()  # of steps that this start goes back from
            return source
        run_id, durable_step = on_rank_zero(self.groups, lambda: self._run_of(source))
        parts = run_on_all_ranks(self.groups, lambda: self._parts(run_id, durable_step) if self.is_leader else [])
        newest = next((copy for copy in _joined(parts) if copy.is_complete), None)
        if newest is None:
            return source
        holders = {rank: part for rank, held in enumerate(parts) for part in held if part.manifest == newest.manifest}
        path = self.folder / step_tag(newest.step)
        text = self._from_rank(min(holders), lambda: (path / MANIFEST).read_text())
        start = self._from_rank(min(holders), lambda: json.loads((path / START).read_text()))
        manifest = self._manifest = Manifest.from_json(text)
        if problem := self._unlike(start, manifest, durable_step):
            self.logger.info(f"local_save: the copy {path} is not used: {problem}")
            return source
        names = sorted(manifest.files)
        self._names = {leader: set[str]() for leader in self.leaders}
        for rank, part in holders.items():
            self._names[rank] = {name for i, name in enumerate(names) if part.files >> i & 1}
        small_files = [name for name in names if layer_of(name) is None]
        try:
            self._share(path, {leader: small_files for leader in self.leaders})
            run_on_all_ranks(
                self.groups, lambda: self._adopt(path, text, start, small_files) if self.is_leader else None
            )
        except DamagedError as problem:
            self.logger.warning(f"{problem}; local_save: the copy is not used")
            return source
        return CheckpointSource(path, True, fallback=source)

    def _adopt(self, path: Path, text: str, start: Mapping[str, Any], small_files: Sequence[str]) -> None:
        """Writes the manifest of the chosen copy, and checks the files that are read before its weights."""
        path.mkdir(exist_ok=True)
        replace_file(path / START, json.dumps(start).encode())
        replace_file(path / MANIFEST, text.encode())
        OpenCheckpoint(path).verify(small_files)

    def _from_rank(self, rank: int, read: Callable[[], T]) -> T:
        """Returns the result of `read` on a rank, on all ranks. One broadcast: manifests may be large."""
        result = [run_on_each_rank(self.groups, lambda: read() if self.groups.world_rank == rank else None)]
        if self.groups.world_size > 1:
            dist.broadcast_object_list(result, src=rank)
        return result[0]  # type: ignore[return-value]

    def _remove_copies(self) -> None:
        for path in list_checkpoints(self.folder) if self.is_leader else ():
            shutil.rmtree(path, ignore_errors=True)

    def _run_of(self, source: CheckpointSource) -> tuple[str | None, int]:
        """Returns the id of the run in `save`, and the step of its last checkpoint there, or -1."""
        if source.goes_on and source.path is not None:
            manifest = read_manifest(source.path)
            return (None, 0) if manifest is None else (manifest.run_id, manifest.iteration)
        saved = read_status(Path(self.args.save_dir or ""), Problems())
        return saved.get("run_id"), -1

    def _parts(self, run_id: str | None, durable_step: int) -> list[_Copy]:
        """Returns what this machine has of the copies of a run that are later than a step."""
        parts = []
        for path in list_checkpoints(self.folder):
            with suppress(DamagedError, OSError):
                manifest = read_manifest(path)
                if read_fields(path / START, _START_SHAPE, Problems()).keys() != _START_SHAPE.keys():
                    continue
                if manifest is not None and manifest.run_id == run_id and manifest.iteration > durable_step:
                    records = sorted(manifest.files.items())
                    files = sum(_has_size(path / name, file.size) << i for i, (name, file) in enumerate(records))
                    parts.append(_Copy(manifest.iteration, sha256(path / MANIFEST), len(records), files))
        return parts

    def _unlike(self, start: Mapping[str, Any], manifest: Manifest, durable_step: int) -> str | None:
        """Returns why a copy does not serve this start; None if it does. start: content of its START."""
        saved, now = start["configuration"], self._configuration
        if changed := sorted(key for key in {**now, **saved} if now.get(key) != saved.get(key)):
            return f"{', '.join(changed)} changed since"
        axes = ("pipe", "data", "context", "tensor")
        if any(getattr(manifest.layout, axis) != self.groups.size(axis) for axis in axes):
            return f"it is of {manifest.layout.world_size} ranks in another layout"
        if start["durable_step"] > durable_step:
            return f"save has gone back from step {start['durable_step']} since"
        return None

    def collect(self, path: Path, layers: Iterable[int]) -> list[str]:
        """Fetches from other machines what this machine lacks of the chosen copy; returns the names of all
        files that its ranks read.

        layers: NeoX indices of this rank's layers.
        """
        assert self._manifest is not None
        layers_by_rank = run_on_all_ranks(self.groups, lambda: {*layers, *_SHARED_LAYERS})
        needed_names = {
            leader: [
                name
                for name in self._manifest.files
                if (layer := layer_of(name)) is None or any(layer in layers_by_rank[rank] for rank in ranks)
            ]
            for leader, ranks in self._ranks_of.items()
        }
        self._share(path, needed_names)
        return needed_names[self._leader]

    def _share(self, path: Path, needed_names: Mapping[int, Sequence[str]]) -> None:
        """Sends files of the chosen copy from the machines that hold them to those that lack them.

        needed_names: names of the files that each machine needs, by its leader.
        """
        assert self._manifest is not None
        transfers = [
            Transfer(self._holder(name), leader, name, self._manifest.files[name].size)
            for leader in self.leaders
            for name in needed_names[leader]
            if name not in self._names[leader]
        ]
        try:
            self._transfer(transfers, path)
        except OSError as problem:
            raise DamagedError(f"{path}: its files could not be fetched ({problem.strerror})") from problem
        for transfer in transfers:
            self._names[transfer.target].add(transfer.name)
        if transfers:
            size = sum(transfer.size for transfer in transfers)
            self.logger.info(f"local_save: {readable_size(size)} of {path.name} came from other machines")

    def _holder(self, name: str) -> int:
        return next(leader for leader in self.leaders if name in self._names[leader])

    def _transfer(self, transfers: Sequence[Transfer], path: Path) -> None:
        if transfers:
            rank = self.groups.world_rank
            run_on_all_ranks(
                self.groups, lambda: transfer_files(transfers, rank, path, self._group) if self.is_leader else None
            )

    # -- while the run trains --------------------------------------------------------------------------------

    def check_space(self, writer: CheckpointWriter) -> str:
        """Returns what a copy takes, in words. Raises ConfigError if a folder has no room for two of them."""
        sizes = run_on_all_ranks(self.groups, writer.part_size)
        size_of = {leader: sum(sizes[rank] for rank in ranks) for leader, ranks in self._ranks_of.items()}
        size = size_of[self._leader]
        if len(self.leaders) > 1:
            place = self.leaders.index(self._leader)
            size += size_of[self.leaders[place - 1]]

        def check() -> None:
            present = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            free = _free(self.folder) + present
            if free < 2 * size:
                raise self.args.error(
                    "local_save",
                    f"{self.folder} on {platform.node()} has {readable_size(free)} free, but two copies of "
                    f"{readable_size(size)} must fit there, a new one beside the last; choose another folder, or "
                    "remove the key",
                )

        run_on_all_ranks(self.groups, lambda: check() if self.is_leader else None)
        doubled = (
            "" if len(self.leaders) == 1 else f" on each of {len(self.leaders)} machines, with the files of another"
        )
        return f"{readable_size(size)} to {self.folder}{doubled}"

    def save(self, writer: CheckpointWriter, progress: TrainingProgress) -> None:
        """Writes the run's present state to the machines, then deletes the copy before it.

        If a machine cannot write, logs a warning, and the copy before it stays. Raises NonFiniteStateError
        for NaN and Inf.
        """
        for check in writer.before_save:
            check()
        path, groups = self.folder / step_tag(progress.iteration), self.groups
        temporary = path.with_name(f".tmp_{path.name}")
        try:
            run_on_all_ranks(groups, lambda: self._begin(temporary) if self.is_leader else None)
            records = run_on_all_ranks(groups, lambda: write_states(temporary, writer.states(progress)))
            files = {record.name: record for per_rank in records for record in per_rank}
            text = on_rank_zero(groups, lambda: replace(writer.manifest(progress), files=files).to_json())
            following = dict(zip(self.leaders, self.leaders[1:] + self.leaders[:1], strict=True))
            transfers = [
                Transfer(leader, following[leader], record.name, record.size)
                for parity in (0, 1)  # first every second machine sends, then the others
                for leader in (self.leaders[parity::2] if self._group is not None else ())
                for rank in self._ranks_of[leader]
                for record in records[rank]
            ]
            self._transfer(transfers, temporary)
            latest = on_rank_zero(groups, lambda: read_latest(self.args.save or ""))
            start = {
                "configuration": self._configuration,
                "durable_step": -1 if latest is None else step_of(latest),
            }
            run_on_all_ranks(groups, lambda: self._publish(temporary, path, text, start) if self.is_leader else None)
        except NonFiniteStateError:
            raise
        except (OSError, CheckpointError) as problem:
            reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0]
            writer.say_once(f"local_save: a copy could not be written on a machine ({reason}); the one before it stays")
            if self.is_leader:
                shutil.rmtree(temporary, ignore_errors=True)
            return
        if self.is_leader:  # all machines have the new one
            for entry in self.folder.iterdir():
                if entry.is_dir() and entry != path:
                    shutil.rmtree(entry, ignore_errors=True)

    def _begin(self, temporary: Path) -> None:
        for leftover in self.folder.glob(".tmp_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir(parents=True)

    def _publish(self, temporary: Path, path: Path, manifest: str, start: Mapping[str, Any]) -> None:
        replace_file(temporary / START, json.dumps(start).encode())
        replace_file(temporary / MANIFEST, manifest.encode())
        shutil.rmtree(path, ignore_errors=True)  # of an earlier start, which was at this step, too
        os.rename(temporary, path)

    def remove(self) -> None:
        """Deletes the run's copies on this machine. The leader of each machine calls it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _folder(args: NeoXArgs) -> Path:
    """Returns the folder of this run's copies. Raises ConfigError for an unknown variable in `local_save`."""
    path = os.path.expandvars(with_home(args.local_save or ""))
    if "$" in path:
        raise args.error("local_save", f"{path}: a variable has no value on this machine; set it, or correct the path")
    save = Path(args.save or "").absolute()
    return Path(path) / f"{save.name}_{hashlib.sha256(str(save).encode()).hexdigest()[:8]}"


def _machine(args: NeoXArgs, folder: Path) -> str:
    """Returns a name that is the same on all ranks that share a folder, and is different on others.

    Raises ConfigError if the folder cannot be written.
    """
    mark, draft = folder / ".machine", folder / f".machine_{uuid.uuid4().hex}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise args.error("local_save", f"{folder} belongs to another user; choose another folder")
        draft.write_text(draft.name)
        with suppress(FileExistsError):
            os.link(draft, mark)
        draft.unlink()
        return mark.read_text()
    except OSError as problem:
        text = f"{folder} cannot be written ({problem.strerror}); choose another folder, or remove the key"
        raise args.error("local_save", text) from problem


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _free(folder: Path) -> int:
    """Returns the bytes that fit into a folder: of one in memory, no more than the memory that is free."""
    free, memory = shutil.disk_usage(folder).free, Path("/dev/shm")
    is_in_memory = memory.is_dir() and memory.stat().st_dev == folder.stat().st_dev
    return min(free, free_host_memory(free)) if is_in_memory else free
