"""Saves a run's state to its machines every `local_save_interval` steps (`local_save`)."""

import time

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.training.checkpoint.local_saves import LocalSaves
from megatron.training.run import Training


class LocalSaveCallback(Callback):
    """Writes a copy if it is due and the step has no checkpoint in `save`.

    Deletes all copies once the run has ended with a checkpoint.
    """

    def __init__(self, training: Training, local: LocalSaves) -> None:
        self.training, self.local = training, local
        self._is_timed = False

    def on_train_start(self, run: TrainingRun) -> None:
        """Check that the folders have room."""
        words = self.local.check_space(self.training.checkpointer)
        run.logger.info(f"local_save: every {run.args.local_save_interval} steps {words}")

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Save if this step is due."""
        training = self.training
        is_due = step.iteration > 0 and step.iteration % run.args.local_save_interval == 0
        if not is_due or training.checkpointer.saved_at == step.iteration:
            return
        with run.pause(), training.watchdog.phase("saving to local_save"):
            start = time.monotonic()
            self.local.save(training.checkpointer, training.progress)
            if not self._is_timed:
                run.logger.info(f"local_save: step {step.iteration} took {time.monotonic() - start:.2f} s")
            self._is_timed = True

    def close(self) -> None:
        """Delete the copies, unless the run failed: its last step is in `save`."""
        ending, progress = self.training.loop.ending, self.training.progress
        has_ended = ending is not None and ending[0] in ("finished", "stopped")
        if has_ended and self.local.is_leader and self.training.checkpointer.saved_at == progress.iteration:
            self.local.remove()
