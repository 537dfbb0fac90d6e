"""The protocol of callbacks: when training calls them."""

from megatron.callbacks.run import TrainingRun
from megatron.callbacks.step import OnGradients, Step
from megatron.data import Batch


class Callback:
    """Something that takes part in a training run. Subclasses override what they need; nothing is done by
    default.

    All ranks call every method together and in the same order, but for `on_error` and `close`: when a run
    fails they may be called on one rank alone, so that they must not wait for other ranks. What a method
    raises ends the run.
    """

    def on_train_start(self, run: TrainingRun) -> None:
        """Once, before the first step of this start."""

    def on_step_start(self, run: TrainingRun, batches: list[Batch]) -> OnGradients | None:
        """Before each step. batches: this rank's micro-batches, on the host; not to be kept.

        May return a function that is then called with the step's gradients."""
        return None

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """After each step, without a wait for the device, and for step 0 before the first step of a fresh
        run.

        What takes long, or needs `step.row`, belongs under `with run.pause()`."""

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """After the validation of a step: every `eval_interval` steps, at the start and after the last step.
        `step.row` has the results, none where there was nothing to validate; metrics added here are logged.
        Its time is none of the step's."""

    def on_save(self, run: TrainingRun, step: Step, ephemeral: bool) -> None:
        """After a checkpoint of a step was written, with `async_save` after it was copied. ephemeral: it is
        kept only until the next one (`ephemeral_save_interval`). Its time is none of the step's."""

    def on_error(self, run: TrainingRun, problem: Exception) -> None:
        """The run fails; problem: what ended it. Other ranks may not know of it."""

    def close(self) -> None:
        """The run is over, in whatever way. Called on every callback, also when another's `close` has
        failed."""
