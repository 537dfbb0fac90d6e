"""The files of generations of which several steps are taken, for a run that is interrupted between these."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpointing import replace_file
from megatron.checkpointing.layout import list_checkpoints, step_of
from megatron.data import DataError
from megatron.rollouts.generation import Generation


@dataclass(frozen=True)
class GenerationFiles:
    """`NUMBER.json` of a run's generations, on rank 0.

    folder: None: nothing is kept. steps: of a generation; answers: of a generation; save_dir: of the run's
    checkpoints, None where there is none on this machine.
    """

    folder: Path | None
    steps: int
    answers: int
    save_dir: str | None

    def write(self, generation: Generation, saved: Sequence[int]) -> None:
        """Keep the generation, and of those before the ones between whose steps a checkpoint was written that
        is there. saved: the steps after which this start has written checkpoints."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / f"{generation.number}.json", json.dumps(generation.as_json()).encode())
        begun = self.steps * (generation.number - 1)
        if not any(begun < step < begun + self.steps for step in saved):
            (self.folder / f"{generation.number - 1}.json").unlink(missing_ok=True)
        there = [] if self.save_dir is None else list_checkpoints(self.save_dir)
        first = min(map(step_of, there), default=0) // self.steps
        for kept in self.folder.glob("*.json"):
            if kept.stem.isdecimal() and int(kept.stem) < first:
                kept.unlink()

    def read(self, number: int) -> Generation:
        """A generation that was kept. Raises DataError where it is missing or another run's."""
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
