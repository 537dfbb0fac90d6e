"""Tensors of an imported model that no layer of ours has: they stay as they are, in a file of each of its
checkpoints, until an export puts them back.

They are those of a multimodal model beside its language model (`families.multimodal`), and those of layers
that predict further tokens (`Family.carried`).
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from megatron.checkpointing.huggingface.folder import HFFolder, SafetensorsFile, write_weights
from megatron.checkpointing.tensor_files import FileRecord
from megatron.data.files import sha256, sync

CARRIED = "carried.safetensors"
CarriedWriter = Callable[[Path, str], FileRecord]
"""Writes the file at a path; the second argument is its name within the checkpoint, for its record."""


def carried_tensors(folder: Path) -> SafetensorsFile | None:
    """The carried tensors in `huggingface/` of a checkpoint; None without any."""
    path = folder / CARRIED
    return SafetensorsFile(path) if path.is_file() else None


def carried_writer(source: Path, is_hf: bool) -> CarriedWriter | None:
    """What writes the carried tensors of a run's source into its checkpoints; None where it has none.

    source: `huggingface/` of a checkpoint, or with is_hf a HuggingFace folder.
    """
    folder = HFFolder(source) if is_hf else None
    if not (folder.carried if folder is not None else (source / CARRIED).is_file()):
        return None
    return _Carried(folder, None if is_hf else (source / CARRIED).open("rb")).write


class _Carried:
    """Writes a file into each checkpoint: the first from a HuggingFace folder, where that is the source, all
    others as hard links to it. It is kept open, since the checkpoint that it is from may be deleted while the
    run goes on."""

    def __init__(self, folder: HFFolder | None, held: BinaryIO | None) -> None:
        self.folder, self.held = folder, held
        self.known: FileRecord | None = None

    def write(self, path: Path, name: str) -> FileRecord:
        if self.held is None:
            assert self.folder is not None
            self.known = write_carried(self.folder, path, name)
            self.held = path.open("rb")
            return self.known
        try:
            # With a folder (any: the path is absolute) Python follows the link in /proc to the file itself.
            os.link(f"/proc/self/fd/{self.held.fileno()}", path, src_dir_fd=self.held.fileno())
        except OSError:  # its last link is gone, or it is on another disk
            self.held.seek(0)
            with path.open("wb") as file:
                shutil.copyfileobj(self.held, file, 16 << 20)
                os.fsync(file.fileno())
        if self.known is None:
            self.known = FileRecord(name, path.stat().st_size, sha256(path))
        return replace(self.known, name=name)


def write_carried(folder: HFFolder, path: Path, name: str) -> FileRecord:
    """Write the carried tensors of a folder to `path`, one after another."""
    tensors = ((carried, folder.get_carried(carried)) for carried in folder.carried)
    write_weights(path.parent, folder.carried, folder.carried_dtypes, tensors, limit=1 << 62, whole=path.name)
    sync(path.parent)
    return FileRecord(name, path.stat().st_size, sha256(path))
