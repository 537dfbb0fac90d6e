"""Reads the result of a step once the next step has begun, or before something else waits for the device."""

from dataclasses import replace

import torch

from megatron.checkpointing import NonFiniteStateError
from megatron.distributed import on_rank_zero
from megatron.training.builtin_callbacks.status import note_failure
from megatron.training.checkpoint.run_parts import TrainingProgress
from megatron.training.engine import StepResult
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.nonfinite_guard import NonFiniteError, most_skips, on_device, report
from megatron.training.run import Training


class StepResults:
    """Counts and logs skipped steps, and ends the run after too many in a row. All ranks call every method
    together."""

    def __init__(self, training: Training) -> None:
        self.training, self.in_a_row, self.untrained = training, 0, 0
        self._pending: tuple[TrainingProgress, StepResult, HostCopy] | None = None

    def begin(self, result: StepResult) -> None:
        """Begin to copy a step's result to the host. Called before `training.progress` counts the step."""
        progress, device = self.training.progress, result.loss.device
        flags = [on_device(flag, device) for flag in (result.spike, result.untrained, result.skipped)]
        previous = replace(progress, row_tokens=dict(progress.row_tokens))
        self._pending = (previous, result, HostCopy(torch.stack(flags)))

    def settle(self) -> None:
        """Read the result that `begin` has taken, if it is not read yet.

        Raises NonFiniteError if the run ends because of it. `training.progress` and weights are then those
        from before the step.
        """
        if self._pending is None:
            return
        (previous, result, reading), self._pending = self._pending, None
        spike, untrained, skipped = (value > 0 for value in reading.read())
        step, say = previous.iteration + 1, self.training.logger.info
        self.training.progress.skipped += skipped
        if spike:
            say(f"step {step}: skipped, as its loss is far above recent losses (skip_step_above_sigma)")
        if untrained:
            self.untrained += 1
            if self.untrained & (self.untrained - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... of this start
                reason = self.training.method.untrained_reason()
                say(
                    f"step {step}: skipped, as none of its tokens is trained ({reason}); {self.untrained} such "
                    f"step{'s' * (self.untrained > 1)} so far"
                )
        elif skipped:
            self.in_a_row += 1
            self._check(previous, result)
        else:
            self.in_a_row = 0

    def _check(self, previous: TrainingProgress, result: StepResult) -> None:
        """After a step that was skipped for NaN or Inf, log it, or end the run after too many in a row."""
        args, step = self.training.args, previous.iteration + 1
        bearable = self.in_a_row <= most_skips(args)
        if args.params_dtype == "fp16":
            if bearable:
                return
            text = f"step {step}: {self.in_a_row} fp16 overflows in a row, the loss scale cannot recover"
        else:
            text = report(result.finding, step, self.training.groups)
            if bearable:
                limit = f"{self.in_a_row} of at most {args.nonfinite_limit} in a row"
                self.training.logger.info(f"{text}; step skipped (on_nonfinite: skip, {limit})")
                return
        vars(self.training.progress).update(vars(previous))
        self._end(text)

    def _end(self, text: str) -> None:
        """Save the state from before the step, if it is finite, and raise NonFiniteError. text: the
        reason."""
        training = self.training
        outcome = f"weights are those of step {training.progress.iteration}"
        if training.args.save is not None:
            try:
                with training.watchdog.phase("saving"):
                    training.checkpointer.save(training.progress)
                    training.checkpointer.wait()
            except NonFiniteStateError as problem:  # an earlier update with finite gradients made it non-finite
                outcome = str(problem)
        limit = f", {self.in_a_row} steps in a row" if self.in_a_row > 1 else ""
        text = f"{text}; {outcome} (on_nonfinite: {training.args.on_nonfinite}{limit})"
        on_rank_zero(training.groups, lambda: note_failure(training, text))
        raise NonFiniteError(text)
