"""Copies carried tensors: tensors of an imported HuggingFace model that NeoX models lack.

Each checkpoint keeps them unchanged in a file, and an export writes them again. They are the parts of a
multimodal model other than its language model (`families.multimodal`), and the layers for multi-token
prediction (`Family.carried`).
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from megatron.checkpointing.huggingface.folder import HFFolder, SafetensorsFile
from megatron.checkpointing.huggingface.weight_writer import write_weights
from megatron.checkpointing.tensor_files import FileRecord
from megatron.data.files import sha256, sync

CARRIED = "carried.safetensors"
CarriedWriter = Callable[[Path, str], FileRecord]
"""Writes the file at the path. The text is the file's name within the checkpoint, for the returned record."""


def carried_tensors(folder: Path) -> SafetensorsFile | None:
    """Opens the file of carried tensors: those that NeoX models lack and that are copied unchanged.

    folder: `huggingface/` of a checkpoint. Returns None if there is no such file."""
    path = folder / CARRIED
    return SafetensorsFile(path) if path.is_file() else None


def carried_writer(source: Path, is_hf: bool) -> CarriedWriter | None:
    """Returns a function that writes carried tensors (which NeoX models lack) into a checkpoint.

    source: `huggingface/` of a checkpoint, or with is_hf a HuggingFace folder. Returns None if `source` has
        no carried tensors."""
    folder = HFFolder(source) if is_hf else None
    if not (folder.carried if folder is not None else (source / CARRIED).is_file()):
        return None
    return _Carried(folder, None if is_hf else (source / CARRIED).open("rb")).write


class _Carried:
    """Writes the file of carried tensors into each checkpoint of a run.

    If the run started from a HuggingFace folder, the first file is written from it. All others are hard links
    to an earlier file, or copies if links fail. The earlier file stays open, because its checkpoint may be
    deleted during the run.
    """

    def __init__(self, folder: HFFolder | None, held: BinaryIO | None) -> None:
        self.folder, self.held = folder, held
        self.record: FileRecord | None = None

    def write(self, path: Path, name: str) -> FileRecord:
        if self.held is None:
            assert self.folder is not None
            self.record = write_carried(self.folder, path, name)
            self.held = path.open("rb")
            return self.record
        try:
            # With src_dir_fd (any: the path is absolute) Python follows the link in /proc to the file.
            os.link(f"/proc/self/fd/{self.held.fileno()}", path, src_dir_fd=self.held.fileno())
        except OSError:  # the file's last link is gone, or it is on another disk
            self.held.seek(0)
            with path.open("wb") as file:
                shutil.copyfileobj(self.held, file, 16 << 20)
                os.fsync(file.fileno())
        if self.record is None:
            self.record = FileRecord(name, path.stat().st_size, sha256(path))
        return replace(self.record, name=name)


def write_carried(folder: HFFolder, path: Path, name: str) -> FileRecord:
    """Write the carried tensors of a HuggingFace folder to the file `path`, one at a time; returns its
    record.

    name: the file's path inside the checkpoint, for the record."""
    tensors = ((carried, folder.get_carried(carried)) for carried in folder.carried)
    write_weights(path.parent, folder.carried, folder.carried_dtypes, tensors, limit=1 << 62, single_name=path.name)
    sync(path.parent)
    return FileRecord(name, path.stat().st_size, sha256(path))
