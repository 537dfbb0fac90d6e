"""Writes the weights of generations as HuggingFace folders, for servers."""

import json
import shutil
from pathlib import Path

from megatron.callbacks import TrainingRun
from megatron.checkpointing import replace_file
from megatron.data.files import sha256
from megatron.distributed import on_rank_zero
from megatron.generation.weight_updates import WeightUpdate

LATEST = "latest"


class WeightFolders:
    """Writes `FOLDER/VERSION` for the last `num_versions` versions, and `FOLDER/latest`.

    `latest` is JSON with the newest version, its folder and the files' SHA-256. All ranks call every method
    together."""

    def __init__(self, run: TrainingRun, folder: Path, num_versions: int) -> None:
        self.run, self.folder, self.num_versions = run, folder, num_versions

    def write(self, version: int) -> WeightUpdate:
        """Writes the model's current weights as `version`. Raises CheckpointError."""
        path = self.folder / str(version)
        with self.run.watchdog.phase("writing weights for servers"):
            self.run.save_hf_model(path)
            return on_rank_zero(self.run.groups, lambda: self._publish(path, version))

    def _publish(self, path: Path, version: int) -> WeightUpdate:
        files = {file.name: sha256(file) for file in sorted(path.iterdir()) if file.is_file()}
        update = WeightUpdate(str(path), version, files)
        content = {"version": version, "folder": path.name, "sha256": files}
        replace_file(self.folder / LATEST, (json.dumps(content, indent=1) + "\n").encode())
        for old_folder in self.folder.iterdir():
            if old_folder.name.isdecimal() and not version - self.num_versions < int(old_folder.name) <= version:
                shutil.rmtree(old_folder, ignore_errors=True)
        return update
