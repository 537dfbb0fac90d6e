"""The protocol of callbacks: when training calls them."""

from collections.abc import Mapping
from typing import Any

from megatron.callbacks.run import OnGradients, Step, TrainingRun
from megatron.data import Batch


class Callback:
    """Base class of callbacks. Its methods do nothing; subclasses override the ones they need.

    All ranks call every method together and in the same order. `on_error` and `close` are exceptions: when a
    run fails they may be called on one rank alone, so they must not wait for other ranks. An exception that a
    method raises ends the run; one from `on_error` is only logged.
    """

    def on_train_start(self, run: TrainingRun) -> None:
        """Called once, before the first step of this start."""

    def on_completed_run(self, run: TrainingRun) -> None:
        """Called instead of the steps if none is left: the run has reached `train_iters` in an earlier
        start."""

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> OnGradients | None:
        """Called before each step. batches: this rank's micro-batches, on the host; do not keep them.

        May return a function, which is then called with the step's gradients.
        """
        return None

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Called after each step, and as step 0 before the first step of a fresh run.

        It must not wait for the device. Put slow work, and work that reads `step.row`, under
        `with run.pause()`.
        """

    def on_stop_before_step(self, run: TrainingRun, step: Step) -> None:
        """Called where a stop signal ends the run before its next step. step: the last one, without
        result."""

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """Called after each validation: every `eval_interval` steps, at the start and after the last step.

        `step.row` holds the results, none if there was nothing to validate. Metrics that you add to it are
        logged. The step's time does not include this call.
        """

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """Called after a checkpoint was written; with `async_save`, after it was copied to the host.

        ephemeral: the next checkpoint replaces it (`ephemeral_save_interval`). The step's time does not
        include this call.
        """

    def state(self) -> Mapping[str, Any]:
        """Returns what a checkpoint keeps of the callback: numbers, text, tensors, and lists and dicts of
        these."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Called before `on_train_start` of a run that goes on, with the last checkpoint's `state`."""

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """Called when the run fails. problem: the exception that ends it; other ranks may not know of it."""

    def close(self) -> None:
        """Called once the run is over, however it ended, even if another callback's `close` failed."""
