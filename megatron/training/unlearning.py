"""Which data each step of a run that unlearns reads, and what becomes of its steps on the forget set
(`ga_dataset`)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from megatron.callbacks import Callback, Step, StepResult, TrainingRun
from megatron.data import Batch, Role
from megatron.distributed import on_rank_zero
from megatron.neox_arguments import NeoXArgs
from megatron.neox_arguments.values.unlearning import begins_burst, is_ascent
from megatron.training.checkpoint.progress import TrainingProgress, UnlearningProgress
from megatron.training.engine import Engine

AVERAGE = 0.9  # of the losses before, in the moving average of ga_threshold_check_mode: ema


def unlearning_steps(
    args: NeoXArgs,
    progress: TrainingProgress,
    engine: Engine,
    ordinary: Iterator[list[Batch]],
    forget: Iterator[list[Batch]],
    retain: Iterator[list[Batch]] | None,
) -> Iterator[list[Batch]]:
    """The optimizer steps still to do, as lists of this rank's micro-batches: of the training set, or of the
    forget set with those of the retain set behind them.

    Decides on each when it is asked for, by `progress`, which it changes where a step on the forget set is
    left out because its loss has come above `ga_loss_threshold`: then an ordinary one takes its place.
    """
    while True:
        if is_ascent(args, progress.iteration):
            step = [next(forget) + (next(retain) if retain is not None else [])]
            if not _left_out(args, progress, engine, step[0]):
                yield step.pop()
                continue
            step.clear()
        yield next(ordinary)


def _left_out(args: NeoXArgs, progress: TrainingProgress, engine: Engine, batches: list[Batch]) -> bool:
    """Whether the step on these batches is left out; noted in `progress`. All ranks call it together."""
    if args.ga_loss_threshold is None:
        return False
    before = progress.unlearning
    in_burst = not begins_burst(args, progress.iteration) and args.ga_threshold_check_mode == "per_burst"
    leave_out, now = before.burst_left_out, before
    if not in_burst:
        known = before.average_loss if args.ga_threshold_check_mode == "ema" else before.last_loss
        if known is None or not args.ga_threshold_skip_forward:
            now = noted_loss(before, _mean_loss(engine, batches))
            known = now.average_loss if args.ga_threshold_check_mode == "ema" else now.last_loss
        above = known is not None and known > args.ga_loss_threshold
        leave_out = on_rank_zero(engine.groups, lambda: above)  # ranks may have it with other last bits
    if leave_out:
        if args.ga_threshold_skip_forward:  # what is known grows old, while ordinary steps go on: measure the next
            now = replace(now, last_loss=None, average_loss=None)
        samples = now.samples + args.train_batch_size
        now = replace(now, samples=samples, left_out=now.left_out + 1)
    progress.unlearning = replace(now, burst_left_out=leave_out)
    return leave_out


def _mean_loss(engine: Engine, batches: list[Batch]) -> float:
    """The mean negative log-likelihood of the batches' tokens to forget, over all data ranks, without
    gradients; NaN where none is trained."""
    batches = [batch for batch in batches if batch.role == "forget"]
    sums = torch.zeros(2, dtype=torch.float64)
    for batch, logprobs in zip(batches, engine.token_logprobs(batches), strict=True):
        weights = batch.loss_weights.double()
        sums += torch.stack([-(logprobs.double().cpu() * weights.cpu()).sum(), weights.cpu().sum()])
    total, count = engine.groups.sum(sums.to(engine.groups.device), "data").tolist()
    return total / count if count else math.nan


def noted_loss(progress: UnlearningProgress, loss: float) -> UnlearningProgress:
    """`progress` with the loss of a step on the forget set, and the moving average with it; as it was with
    one that is not finite."""
    if not math.isfinite(loss):
        return progress
    average = loss if progress.average_loss is None else AVERAGE * progress.average_loss + (1 - AVERAGE) * loss
    return replace(progress, last_loss=loss, average_loss=average)


def after_ascent(args: NeoXArgs, progress: UnlearningProgress, result: StepResult) -> UnlearningProgress:
    """`progress` after a step on the forget set. Waits for the step only where the next one is judged by
    it."""
    progress = replace(progress, samples=progress.samples + args.train_batch_size, steps=progress.steps + 1)
    if args.ga_loss_threshold is not None and args.ga_threshold_skip_forward:
        return noted_loss(progress, float(result.metrics["ga_actual_loss"]))
    return progress


def lr_scale(args: NeoXArgs, role: Role) -> float:
    """What the learning rate of a step is multiplied by."""
    return args.ga_lr_scale if role == "forget" else 1.0


def row_of_steps(
    args: NeoXArgs, schedule: Callable[[int], float], iteration: int, roles: Sequence[str], losses: Sequence[float]
) -> dict[str, float]:
    """What a row of metrics has of the steps since the row before, by the fork's names: `batch_type`, 0 for
    descent and 1 for ascent, is their mean; `ga_lr_scaled` the rate of the last on the forget set;
    `gd_combined_loss` the mean loss of these. iteration: of the last; roles, losses: of each, of each on the
    forget set that was not skipped."""
    row = {"train/batch_type": roles.count("forget") / len(roles)}
    if "forget" in roles:
        last = iteration - roles[::-1].index("forget")
        row["train/ga_lr_scaled"] = schedule(last - 1) * args.ga_lr_scale
    if args.gd_mode and losses:
        row["train/gd_combined_loss"] = sum(losses) / len(losses)
    return row


class UnlearningCallback(Callback):
    """Adds to each step's row the counts of steps on the forget set, by the fork's names."""

    def __init__(self, progress: TrainingProgress) -> None:
        self.progress = progress

    def on_step_end(self, run: TrainingRun, step: Step) -> None:
        """Add the counts."""
        if step.result is None:
            return
        now = self.progress.unlearning
        step.row["train/ga_iterations"] = now.steps
        step.row["train/ga_skip_rate"] = now.left_out / max(1, now.steps + now.left_out)
