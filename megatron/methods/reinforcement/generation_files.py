"""Files of generations that last several steps, for a run that is interrupted between these steps."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing import replace_file
from megatron.checkpointing.layout import list_checkpoints, step_of
from megatron.data import DataError
from megatron.methods.reinforcement.generation import Generation


@dataclass(frozen=True)
class GenerationFiles:
    """Writes and reads `NUMBER.json` of a run's generations, on rank 0.

    folder: of the files; None: nothing is written.
    steps: number of steps per generation.
    answers: number of answers per generation.
    save_dir: folder of the run's checkpoints; None if this machine has none.
    """

    folder: Path | None
    steps: int
    answers: int
    save_dir: str | None

    def write(self, generation: Generation, saved: Sequence[int]) -> None:
        """Writes the generation, and deletes earlier ones that no checkpoint can resume within.

        saved: the steps after which this process has written checkpoints."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{generation.number}.json", json.dumps(generation.as_json()).encode())
        first_step = self.steps * (generation.number - 1)
        if not any(first_step < step < first_step + self.steps for step in saved):
            (self.folder / f"{generation.number - 1}.json").unlink(missing_ok=True)
        checkpoints = [] if self.save_dir is None else list_checkpoints(self.save_dir)
        oldest = min(map(step_of, checkpoints), default=0) // self.steps
        for file in self.folder.glob("*.json"):
            if file.stem.isdecimal() and int(file.stem) < oldest:
                file.unlink()

    def read(self, number: int) -> Generation:
        """Reads a generation. Raises DataError where its file is missing or another run's."""
        file = None if self.folder is None else self.folder / f"{number}.json"
        if file is None or not file.is_file():
            raise DataError(
                f"{file}: missing; the run goes on between the steps of a generation, whose answers it held: set "
                f"iteration to a checkpoint at a multiple of {self.steps}"
            )
        generation = Generation.from_json(json.loads(file.read_bytes()))
        if (generation.number, len(generation.answers)) != (number, self.answers):
            raise DataError(
                f"{file}: holds {len(generation.answers)} answers of generation {generation.number}, not "
                f"{self.answers} of {number}: of another run; set log_dir to this run's"
            )
        return generation
