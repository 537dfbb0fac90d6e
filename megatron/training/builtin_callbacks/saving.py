"""Saves checkpoints of a run at the configured steps and when a save is requested."""

from collections.abc import Sequence

from megatron.callbacks import Callback, Step, TrainingRun
from megatron.training.checkpoint.pieces import is_hf_due
from megatron.training.run import Training


class SaveCallback(Callback):
    """Saves checkpoints after the configured steps, and when the loop state says that a save is due.

    The steps are multiples (or powers) of `checkpoint_factor`, `extra_save_iters`, the last step, and those
    of `save_hf` and `ephemeral_save_interval`. `StopCallback` says that a save is due, after
    `save_interval_in_mins` or a callback's `request_save`.
    """

    def __init__(self, training: Training, callbacks: Sequence[Callback] = ()) -> None:
        """callbacks: the callbacks whose `on_save` is called after each save."""
        self.training, self.callbacks = training, callbacks

    def is_due(self, iteration: int) -> bool:
        """Returns whether the configuration asks for a lasting checkpoint after this iteration."""
        args = self.training.args
        if args.save is None:
            return False
        if iteration == args.train_iters or iteration in (args.extra_save_iters or ()) or is_hf_due(args, iteration):
            return True
        factor = args.checkpoint_factor
        if not factor or iteration == 0:
            return False
        if args.checkpoint_scale == "linear":
            return iteration % int(factor) == 0
        power = 1.0
        while int(power) < iteration:
            power *= factor
        return int(power) == iteration

    def is_ephemeral_due(self, iteration: int) -> bool:
        """Returns whether `ephemeral_save_interval` asks for a checkpoint after this iteration. The next save
        deletes such a checkpoint."""
        args, interval = self.training.args, self.training.args.ephemeral_save_interval
        return args.save is not None and interval is not None and iteration > 0 and iteration % interval == 0

    def on_validation_end(self, run: TrainingRun, step: Step) -> None:
        """Keep the validation loss for the next checkpoint; `keep_best_n_checkpoints` compares these
        losses."""
        if step.iteration > 0:
            self.training.progress.validation_loss = step.row.get("validation/lm_loss")

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Save if a save is due or the run stops; then call `on_save` of all callbacks."""
        loop = self.training.loop
        lasting = loop.stop_reason is not None or loop.save_is_due or self.is_due(step.iteration)
        if lasting or self.is_ephemeral_due(step.iteration):
            with run.pause(), self.training.watchdog.phase("saving"):
                self.save(ephemeral=not lasting)
                if self.training.args.save is not None:
                    for callback in self.callbacks:
                        callback.on_save(run, step, not lasting)
                    loop.agree_on_stop()

    def on_stop_before_step(self, run: TrainingRun, step: Step) -> None:
        """Save the state with which the run stops."""
        self.on_step_end(run, step)

    def save(self, ephemeral: bool = False) -> None:
        """Write a checkpoint of the run's present state. ephemeral: the next save deletes it."""
        if self.training.args.save is not None:
            self.training.checkpointer.save(self.training.progress, ephemeral=ephemeral)
