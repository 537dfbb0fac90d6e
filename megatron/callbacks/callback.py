"""Defines `Callback`, the base class of callbacks, and says when training calls each of its methods."""

from collections.abc import Mapping
from typing import Any

from megatron.callbacks.run import OnGradients, Step, TrainingRun
from megatron.data import Batch


class Callback:
    """Base class of callbacks. Its methods do nothing; subclasses override the ones they need.

    All ranks call every method together and in the same order, except `on_error` and `close`. When a run
    fails, one rank alone may call these two, so they must not wait for other ranks. An exception in a method
    ends the run; an exception in `on_error` is only logged.
    """

    def on_train_start(self, run: TrainingRun) -> None:
        """Called once each time the training program starts, before its first step."""

    def on_completed_run(self, run: TrainingRun) -> None:
        """Called when the program starts on a run that has already reached `train_iters`, so no steps
        follow."""

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> OnGradients | None:
        """Called before each step. batches: this rank's micro-batches, on the CPU; keep no reference to them.

        May return a function, which is then called with the step's gradients.
        """
        return None

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Called after each step. A fresh run also calls it once before its first step, with `step.iteration`
        0.

        This method must not wait for the GPU. Put slow work, and code that reads `step.row`, under `with
        run.pause()`.
        """

    def on_stop_before_step(self, run: TrainingRun, step: Step) -> None:
        """Called when a stop signal ends the run between two steps.

        step: the step taken last; its `result` is None here.
        """

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """Called after each validation: every `eval_interval` steps, at the start and after the last step.

        `step.row` holds the validation results; it has none if the run has no validation set. Metrics that
        you add to `step.row` are logged. The time of this call does not count as step time.
        """

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Called after a checkpoint was written; with `async_save`, after the weights were copied to CPU
        memory.

        ephemeral: the checkpoint is temporary, and the next one replaces it (`ephemeral_save_interval`). The
            time of this call does not count as step time.
        """

    def state(self) -> Mapping[str, Any]:
        """Returns the callback's own state for the checkpoint: numbers, text, tensors, and lists and dicts of
        these."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the callback from `state`, which its method `state` returned when the checkpoint was
        saved.

        Called before `on_train_start`, and only if the run resumes from a checkpoint.
        """

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Called when the run fails. problem: the exception that ends the run; other ranks may not have seen
        it."""

    def close(self) -> None:
        """Called once when the run is over, after success or failure, even if another callback's `close`
        failed."""
