"""What became of the steps: known when the next one has been started, or before something else waits for the
device."""

from dataclasses import replace

import torch

from megatron.checkpointing import NonFiniteStateError
from megatron.distributed import on_rank_zero
from megatron.neox_arguments.values.losses import writes_pairs
from megatron.training.callbacks.status import note_failure
from megatron.training.checkpoint.progress import TrainingProgress
from megatron.training.engine import StepResult
from megatron.training.metrics.host_copy import HostCopy
from megatron.training.nonfinite_guard import NonFiniteError, most_skips, on_device, report
from megatron.training.run import Training


class StepResults:
    """Steps that were left out are counted and said, and too many in a row end the run. All ranks call every
    method together."""

    def __init__(self, training: Training) -> None:
        self.training, self.in_a_row, self.untrained = training, 0, 0
        self._pending: tuple[TrainingProgress, StepResult, HostCopy] | None = None

    def begin(self, result: StepResult) -> None:
        """Take the result of a step, before `training.progress` takes it in."""
        progress, device = self.training.progress, result.loss.device
        flags = [on_device(flag, device) for flag in (result.spike, result.untrained, result.skipped)]
        before = replace(progress, row_tokens=dict(progress.row_tokens))
        self._pending = (before, result, HostCopy(torch.stack(flags)))

    def settle(self) -> None:
        """Read what is outstanding. Raises NonFiniteError, with `training.progress` as it was before the
        step, when the run ends on it; weights are still those."""
        if self._pending is None:
            return
        (before, result, reading), self._pending = self._pending, None
        spike, untrained, skipped = (value > 0 for value in reading.read())
        step, say = before.iteration + 1, self.training.logger.info
        self.training.progress.skipped += skipped
        if spike:
            say(f"step {step}: loss far above the recent ones, left out (skip_step_above_sigma)")
        if untrained:
            self.untrained += 1
            if self.untrained & (self.untrained - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... of this start
                pairs = writes_pairs(self.training.args)
                why = "no prompt gave a pair, see rollouts.jsonl" if pairs else "labels mask all of them"
                say(
                    f"step {step}: none of its tokens is trained ({why}), left out; {self.untrained} such "
                    f"step{'s' * (self.untrained > 1)} so far"
                )
        elif skipped:
            self.in_a_row += 1
            self._check(before, result)
        else:
            self.in_a_row = 0

    def _check(self, before: TrainingProgress, result: StepResult) -> None:
        """Decide on a step that was left out because it was not finite."""
        args, step, bearable = self.training.args, before.iteration + 1, self.in_a_row <= most_skips(self.training.args)
        if args.params_dtype == "fp16":
            if bearable:
                return
            text = f"step {step}: {self.in_a_row} fp16 overflows in a row, the loss scale cannot recover"
        else:
            text = report(result.finding, step, self.training.groups)
            if bearable:
                limit = f"{self.in_a_row} of at most {args.nonfinite_limit} in a row"
                self.training.logger.info(f"{text}; left out (on_nonfinite: skip, {limit})")
                return
        vars(self.training.progress).update(vars(before))
        self._end(text)

    def _end(self, text: str) -> None:
        """Save what was before the step, if it can be, and raise."""
        training = self.training
        outcome = f"weights are those of step {training.progress.iteration}"
        if training.args.save is not None:
            try:
                with training.watchdog.phase("saving"):
                    training.checkpointer.save(training.progress)
                    training.checkpointer.wait()
            except NonFiniteStateError as problem:  # an earlier step's update, of finite gradients
                outcome = str(problem)
        limit = f", {self.in_a_row} steps in a row" if self.in_a_row > 1 else ""
        text = f"{text}; {outcome} (on_nonfinite: {training.args.on_nonfinite}{limit})"
        on_rank_zero(training.groups, lambda: note_failure(training, text))
        raise NonFiniteError(text)
